"""Times speculative-decoding steps of a dummy-weight Llama with a one-layer EAGLE drafter, in one process.

    python benchmarks/e2e.py NAME FLASHINFER k=7 bs=1,8,32 ctx=1024,8192 out=64 json=stock.json
    python benchmarks/e2e.py NAME FLASH_ATTN fa=2 ...

The model has 8 layers (4096 wide, 32 query and 8 KV heads of 128). With random weights the drafter is almost
never right, so time per emitted token is time per verify step. Run the variants to compare in one session on
one machine and print the ratios with benchmarks/compare.py: absolute times differ between hosts.

Keys: k (draft tokens, 7; 0 = none), bs, ctx, out (tokens per request), layers, repeats, fa (2 or 3), kv
(auto, fp8, fp8_e5m2), accept (tokens a step by vLLM's synthetic acceptance; EAGLE), async (0 or 1), cg
(capture sizes), eager=1, gpu_gib (KV cache size), method (eagle, ngram, dflash, own), json (result file),
skip (cells to leave out, as 32x32768: batch x context), profile (cells to trace with torch's profiler after
all timings, as 1x1024), weights (dummy: vLLM's, with which attention changes no token), tp and pp (GPUs),
lora (rank of an adapter with random weights), sample=1 (sampled tokens too), prefix=1 (prefix caching: a
cell's prompts are prefilled once), turns (FOLDER:N, see Turns; as: this process's name there), native33=1
(act as below sm_90: vLLM 0.33's own multi-token FA2 decode), wrong=N (our planner sees N tokens too few: a
comparison must tell). method=own: the drafter is the target's model with its weights. With fp8 KV, queries
stay bf16 (as on sm_8x, where FA2 takes no fp8 queries).
"""

import contextlib
import cProfile
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import pstats
import random
import signal
import statistics
import sys
import time
import warnings

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # see tp in make_llm

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def write_model(name: str, layers: int, **changes: object) -> str:
    folder = pathlib.Path("/tmp/specpatch-models") / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": layers, **changes}))
    return str(folder)


def write_dflash(target_layers: int) -> str:
    """A drafter of one layer whose block of 1 + k rows sees all of itself, on hidden states of the target."""
    return write_model(
        f"dflash{target_layers}",
        1,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        dflash_config={
            "mask_token_id": 0,
            "target_layer_ids": sorted({0, target_layers // 2, target_layers - 1}),
        },
    )


def write_adapter(name: str, layers: int, rank: int) -> str:
    """A LoRA adapter of the query and value projections; the same random weights each time."""
    import torch
    from safetensors.torch import save_file

    folder = pathlib.Path("/tmp/specpatch-models") / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    source, width = torch.Generator().manual_seed(0), MODEL["hidden_size"]
    outputs = {"q_proj": width, "v_proj": MODEL["num_key_value_heads"] * MODEL["head_dim"]}
    weights = {}
    for layer in range(layers):
        for projection, rows in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for half, shape in (("A", (rank, width)), ("B", (rows, rank))):
                values = torch.randn(shape, generator=source) * 0.02
                weights[f"{prefix}.lora_{half}.weight"] = values.bfloat16()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return str(folder)


def drawn(llm, prompts: list, tokens: int, lora) -> list[list[int]]:
    """Tokens drawn at random, with a seed for each request."""
    from vllm import SamplingParams

    fixed = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    seeds = [SamplingParams(temperature=0.8, seed=1000 + i, **fixed) for i in range(len(prompts))]
    outputs = llm.generate(prompts, seeds, use_tqdm=False, lora_request=lora)
    return [list(o.outputs[0].token_ids) for o in outputs]


def judged(llm, prompts: list, tokens: int, lora, synthetic: bool) -> tuple[dict, int]:
    """Greedy tokens with their logprobs and how sure each was, and the engine steps that they took."""
    from vllm import SamplingParams

    from vllm_specpatch import greedy

    sampling = SamplingParams(
        temperature=0, logprobs=greedy.LOGPROBS, max_tokens=2 + tokens, ignore_eos=True, detokenize=False
    )
    engine, steps = llm.llm_engine, 0
    step = engine.step

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        return step(*args, **kwargs)

    engine.step = counted
    try:
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    finally:
        del engine.step
    return greedy.said([o.outputs[0] for o in outputs], synthetic), steps


def plan_short(tokens: int) -> None:
    """Has our planner see ``tokens`` fewer KV tokens than there are, in serving only: at start-up the package
    checks its kernels and would refuse. What a comparison must find."""
    from vllm_specpatch.kernels import spec_mask
    from vllm_specpatch.patches import spec_mask_route

    serving = False
    update, before = spec_mask.Plan.update, spec_mask_route.SpecMaskDecode._plan_before

    def wrong(self, seq_lens, *args, **kwargs):
        return update(self, (seq_lens - tokens).clamp(min=0) if serving else seq_lens, *args, **kwargs)

    def served(self, *args, **kwargs):
        nonlocal serving
        serving = True
        try:
            return before(self, *args, **kwargs)
        finally:
            serving = False

    spec_mask.Plan.update, spec_mask_route.SpecMaskDecode._plan_before = wrong, served


def make_llm(backend: str, options: dict, contexts: list[int], batches: list[int], out: int, **others):
    from vllm import LLM

    k, layers = int(options.get("k", 7)), int(options.get("layers", 8))
    attention = {"backend": backend}
    if "fa" in options:
        attention["flash_attn_version"] = int(options["fa"])
    if options.get("kv", "auto") != "auto":
        attention["disable_flashinfer_q_quantization"] = True
    sizes = [int(x) for x in options.get("cg", "8,16,32,64,128,256").split(",")]
    arguments = {
        "model": write_model(f"target{layers}", layers),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max(contexts) + out + 64,
        "gpu_memory_utilization": float(options.get("mem", 0.6)),
        "enable_prefix_caching": options.get("prefix") == "1",
        "attention_config": attention,
        "max_num_seqs": max(*batches, 8),
        "seed": 0,
        "disable_log_stats": True,
        "max_num_batched_tokens": 8192,
        "kv_cache_dtype": options.get("kv", "auto"),
        "compilation_config": {"cudagraph_capture_sizes": sizes},
        "kernel_config": {"enable_flashinfer_autotune": False},
    }
    if "gpu_gib" in options:  # a fixed KV cache, so that several processes can share the GPU
        arguments["kv_cache_memory_bytes"] = int(float(options["gpu_gib"]) * 2**30)
    method = options.get("method", "eagle")
    if k and method in ("eagle", "dflash", "own"):
        drafters = {"eagle": ("draft1", 1), "own": (f"target{layers}", layers)}
        arguments["speculative_config"] = {
            "method": "draft_model" if method == "own" else method,
            "model": write_model(*drafters[method]) if method in drafters else write_dflash(layers),
            "num_speculative_tokens": k,
        }
        if method == "dflash":  # such a drafter chooses its backend for itself otherwise
            arguments["speculative_config"]["attention_backend"] = backend
        if "accept" in options:
            # vLLM's own way to accept drafts without a trained drafter: so many tokens a step on average.
            arguments["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": float(options["accept"]),
            }
    elif k:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
    for key, argument in (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size")):
        if key in options:
            arguments[argument] = int(options[key])
    if "tp" in options:  # NCCL alone: what is faster may need NVLink multicast, which shared hosts forbid
        arguments["disable_custom_all_reduce"] = True
        arguments["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
    if "lora" in options:
        arguments |= {"enable_lora": True, "max_lora_rank": max(8, int(options["lora"]))}
    if "async" in options:
        arguments["async_scheduling"] = options["async"] == "1"
    if "eager" in options:
        arguments["enforce_eager"] = True
    if options.get("native33") == "1":
        act_below_sm90()
    return LLM(**{**arguments, **others})


def act_below_sm90() -> None:
    """Has vLLM 0.33 verify drafts with FlashInfer's FA2 decode, as its own code does below sm_90."""
    from vllm.v1.attention.backends import flashinfer

    if not hasattr(flashinfer, "_use_fa2_native_decode"):  # setting it would change nothing, silently
        raise SystemExit("native33=1: this vLLM has no multi-token FA2 decode of its own")
    # Looked up at each use and nowhere else: graph support, the builder's threshold, wrapper and plan.
    flashinfer._use_fa2_native_decode = lambda: True


def model_runner(llm):
    """The runner in this process. Raises AttributeError where there is none (several GPUs)."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def captured_graphs(llm) -> dict:
    """How many graphs of which kind the runner holds, from its own objects."""
    runner = model_runner(llm)
    speculator = getattr(runner, "speculator", None)
    managers = {
        "target": getattr(runner, "cudagraph_manager", None),
        "draft_prefill": getattr(speculator, "prefill_cudagraph_manager", None),
        "draft_decode": getattr(speculator, "decode_cudagraph_manager", None),
        "draft_block": getattr(speculator, "query_cudagraph_manager", None),  # DFlash drafts in one pass
    }
    found = {name: len(manager.graphs) for name, manager in managers.items() if manager is not None}
    if not found:  # the V1 runner keeps its graphs in wrappers; it counts keys per mode
        keys = runner.cudagraph_dispatcher.cudagraph_keys
        found = {f"v1_{mode.name}": len(v) for mode, v in keys.items()}
    return found


class Turns:
    """The processes of one comparison, all started: none measures before all are ready, and one at a time
    does. So the variants of a cell are timed one after the other, whatever the machine does meanwhile.

    ``FOLDER:N`` names a folder of theirs and their number; whoever starts them makes ``NAME.ready`` there for
    one that has ended (or the others wait for five minutes).
    """

    def __init__(self, text: str, name: str) -> None:
        folder, number = text.rsplit(":", 1)
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.ready").touch()
        limit = time.time() + 300
        while len(list(self.folder.glob("*.ready"))) < int(number) and time.time() < limit:
            time.sleep(0.2)

    @contextlib.contextmanager
    def mine(self):
        with (self.folder / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield
        time.sleep(0.3)  # or this process would have the next turn too


def last_drafts(llm, batch: int) -> list | None:
    """The drafts of the last step: what a wrong drafter would change, while the tokens stay the target's."""
    try:
        drafts = model_runner(llm).speculator.draft_tokens
    except AttributeError:  # several GPUs, the V1 runner, or no speculation
        return None
    return drafts[:batch].tolist()


class BuildTimes:
    """Host seconds in the attention backend's ``build()``, one entry per call, while it is recording; with
    ``functions`` set, where in it they go (which slows it)."""

    def __init__(self, llm) -> None:
        self.recording = False
        self.functions: cProfile.Profile | None = None
        self.syncs: list[str] | None = None
        self.seconds: list[float] = []
        runner = model_runner(llm)
        builders = {type(group.get_metadata_builder(0)) for groups in runner.attn_groups for group in groups}
        for builder in builders:
            builder.build = self.timed(builder.build)

    def timed(self, build):
        def wrapper(*args, **kwargs):
            if self.syncs is not None:
                return self.watched(build, *args, **kwargs)
            if self.functions is not None:
                return self.functions.runcall(build, *args, **kwargs)
            if not self.recording:
                return build(*args, **kwargs)
            start = time.perf_counter()
            try:
                return build(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - start)

        return wrapper

    def watched(self, build, *args, **kwargs):
        """build() under torch's watch for operations that wait for the GPU; FlashInfer's C++ is not seen."""
        import torch

        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return build(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            self.syncs += [str(w.message)[:80] for w in caught if "synchroniz" in str(w.message)]

    def largest(self, number: int = 15) -> list[dict]:
        """The functions of ``functions`` with the most time of their own, per call of ``build()``."""
        stats = pstats.Stats(self.functions).stats.items()
        builds = max(1, len(self.seconds))
        ranked = sorted(stats, key=lambda item: -item[1][2])[:number]
        return [
            {
                "function": f"{pathlib.Path(file).name}:{line}({name})",
                "calls": round(calls / builds, 2),
                "own_us": round(own / builds * 1e6, 1),
            }
            for (file, line, name), (_, calls, own, _, _) in ranked
        ]


#: Prompt tokens of a cell that are given to prefill again, at least one request: vLLM makes logprobs of all.
RESCORED = 1 << 14
#: Host calls that wait for the GPU.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "aten::item")


def profile(generate, steps: int, times: BuildTimes) -> dict:
    """What a verify step costs: GPU time busy and idle, its largest kernels, host time per build(), waits.

    The profiler slows the host, so idle time is an upper bound; build() is timed in a run without it.
    """
    import torch
    from torch.profiler import ProfilerActivity

    times.seconds.clear()
    times.recording = True
    generate(2 + steps)
    times.recording = False
    calls = sorted(times.seconds)
    times.functions = cProfile.Profile()
    generate(2 + steps)
    functions, times.functions = times.largest(), None
    times.syncs = []
    generate(2 + steps)
    syncs, times.syncs = times.syncs, None
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        generate(2 + steps)
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    # The first two tokens are the prefill's and warm the caches: the last half is steady.
    first, last = events[len(events) // 2].time_range.start, max(e.time_range.end for e in events)
    steady = [e for e in events if e.time_range.start >= first]
    busy, end = 0.0, first
    kernels: dict[str, list[float]] = {}
    for e in steady:
        start, stop = max(e.time_range.start, end), max(e.time_range.end, end)
        busy, end = busy + stop - start, stop
        kernels.setdefault(e.name[:90], []).append(e.time_range.elapsed_us())
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:14]
    host = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CPU]
    begin = min(e.time_range.start for e in host)
    middle = begin + (max(e.time_range.end for e in host) - begin) / 2
    waits = {
        name: [e.time_range.elapsed_us() for e in host if e.name == name and e.time_range.start >= middle]
        for name in WAITS
    }
    return {
        "steps": steps,
        "gpu_span_us": round(last - first, 1),
        "gpu_busy_share": round(busy / (last - first), 4),
        "builds_per_step": round(len(calls) / (1 + steps), 2),
        "build_us": {
            "median": round(calls[len(calls) // 2] * 1e6, 1),
            "p90": round(calls[len(calls) * 9 // 10] * 1e6, 1),
            "sum_per_step": round(sum(calls) / (1 + steps) * 1e6, 1),
        }
        if calls
        else None,
        "build_functions": functions,
        # The prefill's builds may wait; a steady step's should not.
        "torch_syncs_in_builds": {"calls": len(calls), "waits": len(syncs)},
        "waits_in_second_half": {n: {"calls": len(v), "us": round(sum(v), 1)} for n, v in waits.items() if v},
        "kernels": [{"name": n, "calls": len(v), "us": round(sum(v), 1)} for n, v in largest],
    }


def ended_otherwise(llm, backend: str) -> str | None:
    """Why this run is not of the route that was asked for, in a line; None if it is. Asks all ranks."""
    from vllm_specpatch import bench_probe, bench_run

    if backend != "FLASHINFER":
        return None
    off = os.environ.get("VLLM_SPECPATCH") == "0"
    wanted = "stock" if off else os.environ.get("VLLM_SPECPATCH_ROUTE", "auto")
    for rank in llm.llm_engine.collective_rpc(bench_probe.describe):
        routes = sorted({d["route"] for d in bench_run.applied_decisions([rank])}) or ["stock"]
        if routes != [wanted] and (wanted != "auto" or routes == ["stock"]):
            return f"wanted the route {wanted}, found {', '.join(routes)}"
    return None


class Stopped(BaseException):
    """SIGTERM, as from timeout(1): what has been measured is still written. vLLM would catch an Exception."""


def stop(*_) -> None:
    raise Stopped


def measure(llm, lora, turn, options: dict, cells: dict, tokens: dict) -> None:
    """Fills ``cells`` and what was said in them, cell by cell, then what is traced."""
    from vllm import SamplingParams

    from vllm_specpatch import greedy

    contexts, batches = sizes(options)
    scale = greedy.scale_of_cache(options.get("kv", "auto"))
    out, repeats = int(options.get("out", 64)), int(options.get("repeats", 3))
    skip, traced = (options.get(key, "").split(",") for key in ("skip", "profile"))
    later = []
    for context in contexts:
        for batch in batches:
            if f"{batch}x{context}" in skip:
                continue
            # The same prompts whatever other cells a run has, so that any two runs can be compared.
            source = random.Random(f"{batch}x{context}")
            prompts = [
                {"prompt_token_ids": [source.randrange(3, 32000) for _ in range(context)]}
                for _ in range(batch)
            ]

            def generate(n, prompts=prompts):
                sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
                start = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
                return time.perf_counter() - start

            cell = f"ctx{context}_bs{batch}"
            with turn():
                generate(8)
            short, long = [], []
            for _ in range(repeats):  # in turns, or a slow minute of the machine would be one variant's
                with turn():
                    short.append(generate(2))
                    long.append(generate(2 + out))
            with turn():
                tokens[cell], steps = judged(llm, prompts, out, lora, "accept" in options)
                try:
                    asked = [p["prompt_token_ids"] for p in prompts[: max(1, RESCORED // context)]]
                    found = greedy.by_prefill(llm, asked, tokens[cell], scale, lora_request=lora)
                    rescore = {"text": str(found), **dataclasses.asdict(found)}
                except Exception as e:  # the timings above must not be lost with it
                    rescore = {"verdict": "failed", "text": f"prefill was not asked: {e!r}"}
            cells[cell] = {
                "ms_per_step": round((min(long) - min(short)) / out * 1e3, 3),
                "median_ms": round((statistics.median(long) - statistics.median(short)) / out * 1e3, 3),
                "spread_ms": round((max(long) - min(long)) / out * 1e3, 3),
                "tokens_sha256": hashlib.sha256(json.dumps(tokens[cell]["ids"]).encode()).hexdigest()[:16],
                "last_drafts": last_drafts(llm, batch),
                "steps": steps,
            }
            cells[cell]["by_prefill"] = rescore
            if "sample" in options:
                with turn():
                    random_ids = drawn(llm, prompts, out, lora)
                cells[cell]["sampled"] = random_ids
            if f"{batch}x{context}" in traced:
                later.append((cell, generate))
    # After all timings: where torch's profiler has been, graphs are launched more slowly (stock, batch 1
    # at 8192, right after a trace: 24 ms a step instead of 13).
    times = BuildTimes(llm) if later else None
    for cell, generate in later:
        try:
            with turn():
                cells[cell]["profile"] = profile(generate, min(out, 32), times)
        except Exception as e:  # the timings above must not be lost with it
            cells[cell]["profile"] = {"error": repr(e)}


def sizes(options: dict) -> tuple[list[int], list[int]]:
    """Contexts and batches."""
    contexts, batches = options.get("ctx", "1024"), options.get("bs", "1,8")
    return [int(x) for x in contexts.split(",")], [int(x) for x in batches.split(",")]


def main() -> None:
    name, backend = sys.argv[1:3]
    options = dict(a.split("=", 1) for a in sys.argv[3:])
    import torch
    import vllm

    messages = Messages()
    logging.getLogger("vllm").addHandler(messages)
    if "wrong" in options:
        plan_short(int(options["wrong"]))
    started = time.time()
    llm = make_llm(backend, options, *sizes(options), int(options.get("out", 64)))
    init_s = time.time() - started
    filled = None
    if options.get("weights") != "dummy":
        from vllm_specpatch import random_weights

        same = options.get("method") == "own"
        filled = llm.llm_engine.collective_rpc(random_weights.fill_models, args=(same,))
    lora = None
    if "lora" in options:
        from vllm.lora.request import LoRARequest

        rank, layers = int(options["lora"]), int(options.get("layers", 8))
        lora = LoRARequest("random", 1, write_adapter(f"lora{layers}x{rank}", layers, rank))
    turn = contextlib.nullcontext
    if "turns" in options:
        turn = Turns(options["turns"], options.get("as", name)).mine
    cells, tokens = {}, {}
    signal.signal(signal.SIGTERM, stop)
    stopped = False
    try:
        measure(llm, lora, turn, options, cells, tokens)
    except Stopped:
        stopped = True
    config = llm.llm_engine.vllm_config
    try:
        graphs = captured_graphs(llm)
    except AttributeError as e:  # another runner layout: do not lose the timings for it
        graphs = {"unknown": str(e)}
    import vllm_specpatch
    from vllm_specpatch import greedy

    status = vllm_specpatch.status()
    result = {
        "name": name,
        "backend": backend,
        "options": options,
        "command": "python benchmarks/e2e.py " + " ".join(sys.argv[1:]),
        "environment": {key: v for key, v in os.environ.items() if key.startswith("VLLM_")},
        "gpu": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "v2_runner": bool(config.use_v2_model_runner),
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "graphs": graphs,
        "downgrade": [line for line in messages.lines if "not supported with spec-decode" in line][:1],
        "specpatch_log": [line for line in messages.lines if line.startswith("vllm-specpatch")],
        "scale": greedy.scale_of_cache(options.get("kv", "auto")),
        "specpatch": {n: p["decisions"][-1:] or p["state"] for n, p in status["patches"].items()},
        "otherwise": ended_otherwise(llm, backend),
        "init_s": round(init_s, 1),
        "weights": "dummy" if filled is None else f"random, {filled} parameters",
        "cells": cells,
        "stopped": stopped,
    }
    if backend == "FLASHINFER":
        import flashinfer

        result["versions"]["flashinfer"] = flashinfer.__version__
    if "json" in options:
        path = pathlib.Path(options["json"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**result, "tokens": tokens}))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
