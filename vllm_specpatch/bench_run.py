"""One variant of ``bench`` or of ``selftest``, measured in this process with vLLM's offline ``LLM`` class.

Run as ``python -P -m vllm_specpatch.bench_run REQUEST``, REQUEST being JSON as :func:`request` of
:mod:`vllm_specpatch.bench` makes it. Prints ``PROGRESS {...}`` lines and at the end one ``RESULT {...}``
line, among whatever vLLM prints. The environment (VLLM_SPECPATCH and so on) is the parent's to set.

How a step is timed: the batch generates ``out`` + 2 tokens, and 2 tokens; the difference is decoding alone.
The best of ``repeats`` of each is taken, divided by the difference in the number of steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import bench_probe, greedy, random_weights

#: Tokens of the short generation, whose time is prefill and start-up.
SHORT = 2
WARM_UP = 8


def say(kind: str, data: Mapping[str, Any]) -> None:
    print(f"{kind} {json.dumps(data)}", flush=True)


class Messages(logging.Handler):
    """What vLLM logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# -- did it end where it was asked to ----------------------------------------------------------------


def applied_decisions(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        decision
        for rank in ranks
        for patch in rank["status"]["patches"].values()
        for decision in patch["decisions"]
        if decision["state"] == "applied" and decision.get("route")
    ]


def why_not_applied(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The last verdict of the first patch that has one, as one phrase."""
    for rank in ranks:
        for patch in rank["status"]["patches"].values():
            verdict = (patch["decisions"] or [patch])[-1]
            parts = [f"{verdict['state']}: {verdict['reason']}"]
            parts += [f"{key} {verdict[key]}" for key in ("wanted", "found") if verdict.get(key)]
            parts += [f"next step: {verdict['next_step']}"] if verdict.get("next_step") else []
            return "; ".join(parts)
    return "the package is not active in the engine's processes"


def ended_otherwise(request: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], mode: str) -> str | None:
    """Why this engine is not the variant that was asked for, in one line; None if it is.

    ``ranks``: :func:`.bench_probe.describe` of each rank. ``mode``: vLLM's resolved cudagraph mode.
    """
    name, backend = request["variant"], request["backend"].lower()
    backends = {found for rank in ranks for found in rank["backends"]}
    others = {"flashinfer", "flash_attn"} - {backend}
    if backend not in backends or backends & others:
        found = ", ".join(sorted(backends)) or "none"
        return f"{name} did not run on {request['backend']}; found the attention backends {found}"
    applied = applied_decisions(ranks)
    routes = sorted({decision["route"] for decision in applied})
    if request["route"] is None:
        if routes:
            return f"{name} was asked for stock vLLM; found the patch applied, route {', '.join(routes)}"
        return None
    if not applied:
        return f"{name} ended as stock vLLM ({why_not_applied(ranks)})"
    if request["route"] != "auto" and routes != [request["route"]]:
        reasons = [d["reason"] for d in applied if d["route"] != request["route"]]
        return f"{name} wanted the route {request['route']}; found {', '.join(routes)} ({'; '.join(reasons)})"
    if request["k"] and "FULL" not in mode:
        return f"{name} applied, but vLLM resolved cudagraph_mode to {mode}; wanted FULL decode graphs"
    return None


# -- prompts -------------------------------------------------------------------------------------------


def random_prompts(vocabulary: int, context: int, batch: int, rng: random.Random) -> list[list[int]]:
    """Token ids from the middle of the vocabulary: special tokens sit at its ends."""
    low, high = min(1000, vocabulary // 4), max(vocabulary * 3 // 4, vocabulary // 4 + 1)
    return [[rng.randrange(low, high) for _ in range(context)] for _ in range(batch)]


def text_prompts(tokens: Sequence[int], context: int, batch: int) -> list[list[int]]:
    """Pieces of a text, each begun elsewhere so that requests differ; the text is repeated if it is short."""
    step = max(1, len(tokens) // batch)
    return [[tokens[(i * step + at) % len(tokens)] for at in range(context)] for i in range(batch)]


# -- numbers -------------------------------------------------------------------------------------------


def decoded(steps: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(steps, decoding requests in all of them together)."""
    return len(steps), sum(decoding for decoding, _, _ in steps)


def draft_rate(run: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(tokens per step and request, accepted share of the proposed tokens) of one run; None for what was not
    seen.

    Not from the tokens that a run returns: the last step of a generation verifies tokens that are then cut
    off, and in one of :data:`SHORT` tokens all but one are. By what is returned the acceptance was off by up
    to some (1 + k) / ``out``, in either direction: above 1 where every draft is accepted.
    """
    without = sum(decoding - drafted for decoding, _, drafted in run["steps"])  # one token each
    drafted = sum(drafted for _, _, drafted in run["steps"])
    if drafted and not (run["drafts"] and run["drafts"][0]):
        return None, None
    verified, proposed, accepted = run["drafts"] or (0, 0, 0)
    if not verified + without:
        return None, None
    return 1 + accepted / (verified + without), accepted / proposed if proposed else None


def decoded_apart(runs: Sequence[Mapping[str, Any]], batch: int, limits: Mapping[str, int]) -> str | None:
    """That a batch never decoded as a whole, and why, in one line; None if it did.

    ``limits``: of vLLM's scheduler, ``max_num_seqs`` and ``verifying``, the requests whose 1 + k tokens fit
    into a step. A prompt is not kept waiting in a step without prefill but for want of room, so steps before
    a prefill tell the KV cache from prompts that take longer than the first requests live.
    """
    most = max((decoding for run in runs for decoding, pure, _ in run["steps"] if pure), default=0)
    if most >= batch:
        return None
    if most >= limits["max_num_seqs"]:
        why = f"max_num_seqs is {limits['max_num_seqs']}"
    elif most >= limits["verifying"]:
        why = "a step's max_num_batched_tokens are used up by their tokens and drafts"
    elif any(waited(run["steps"]) for run in runs):
        why = "others waited while nothing was prefilled, most likely for room in the KV cache"
    else:
        why = "the first ended before the last prompt was prefilled; a larger --out keeps them longer"
    return f"never more than {most} of {batch} requests decoded together: {why}"


def waited(steps: Sequence[Sequence[int]]) -> bool:
    """Whether a prefill came after a step without one."""
    kinds = [pure for _, pure, _ in steps]
    return 1 in kinds and 0 in kinds[kinds.index(1) :]


def cell_numbers(
    short: Sequence[Mapping[str, Any]],
    long: Sequence[Mapping[str, Any]],
    batch: int,
    limits: Mapping[str, int],
) -> dict[str, Any]:
    """Numbers of one cell from its runs, each ``{"seconds", "steps", "drafts"}``; ``limits`` as in
    :func:`decoded_apart`.

    ``ms_per_step`` of the best long and the best short run; ``spread_ms``: how far the long runs lie apart,
    per step, None of a single run; ``tokens_per_step``: per request, 1 + k if every draft is accepted;
    ``tokens_per_s``: what these steps give at that rate, also the tokens that are cut off at a generation's
    end.
    """
    best_short, best_long = (min(runs, key=lambda run: run["seconds"]) for runs in (short, long))
    seconds = best_long["seconds"] - best_short["seconds"]
    (steps_long, busy_long), (steps_short, busy_short) = (
        decoded(run["steps"]) for run in (best_long, best_short)
    )
    steps, busy = steps_long - steps_short, busy_long - busy_short
    if steps < 1 or busy < 1 or seconds <= 0:
        return {"note": f"no decode step can be told from the prefill ({steps} steps, {seconds:.4f} s)"}
    times = [run["seconds"] for run in long]
    per_step, acceptance = draft_rate(best_long)
    numbers: dict[str, Any] = {
        "ms_per_step": round(seconds / steps * 1e3, 3),
        "spread_ms": round((max(times) - min(times)) / steps * 1e3, 3) if len(times) > 1 else None,
        "tokens_per_s": None if per_step is None else round(per_step * busy / seconds, 1),
        "steps": steps,
        "tokens_per_step": None if per_step is None else round(per_step, 3),
        "acceptance": None if acceptance is None else round(acceptance, 4),
    }
    note = decoded_apart(long, batch, limits)
    if note is not None:
        numbers["note"] = note
    return numbers


def window_numbers(windows: Mapping[str, Any]) -> dict[str, Any]:
    """Per step and per build, from :func:`.bench_probe.take_windows` of one rank; None where a window is
    missing."""
    builds, gpu, draft = (windows.get(name) for name in ("builds", "gpu", "draft"))
    numbers: dict[str, Any] = {
        "host_us_per_build": None,
        "builds_per_step": None,
        "gpu_idle_share": None,
        "drafter": None,
    }
    if builds and builds["calls"]:
        numbers["host_us_per_build"] = round(builds["seconds"] / builds["calls"] * 1e6, 1)
        numbers["builds_per_step"] = round(builds["calls"] / builds["steps"], 2)
    if gpu and gpu["span_us"]:
        numbers["gpu_idle_share"] = round(1 - gpu["busy_us"] / gpu["span_us"], 3)
    if draft and draft["proposals"]:
        each = {
            key: round(draft[key] / draft["proposals"], 1)
            for key in ("graph_launches", "kernel_launches", "graph_kernels", "eager_kernels")
        }
        kernels = draft["graph_kernels"] + draft["eager_kernels"]
        # A drafter in graphs still prepares its inputs with a few single kernels.
        ran = "graph" if draft["graph_kernels"] * 2 > kernels else "eager" if kernels else "host"
        numbers["drafter"] = {"ran": ran, **each}
    if "error" in windows:
        numbers["profiler_error"] = windows["error"]
    return numbers


# -- the measurement -----------------------------------------------------------------------------------


class Bench:
    """An engine and the generations made with it."""

    def __init__(self, request: Mapping[str, Any], llm: Any) -> None:
        self.request, self.llm = request, llm
        self.drafts = bench_probe.watch_drafts(llm)

    def rpc(self, function: Any, *args: Any) -> list[Any]:
        answers: list[Any] = self.llm.llm_engine.collective_rpc(function, args=args)
        return answers

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, logprobs: int | None = None
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        steps = self.rpc(bench_probe.take_steps)[0]
        drafts = self.drafts and self.drafts.take()
        result = {"seconds": seconds, "steps": steps, "drafts": drafts, "ids": ids}
        if logprobs is not None:
            result["said"] = greedy.said([o.outputs[0] for o in outputs], self.request["synthetic"])
        return result

    def by_prefill(self, prompts: Sequence[Sequence[int]], said: Mapping[str, Any]) -> dict[str, Any]:
        """What prefill makes of the tokens that decoding said (:func:`.greedy.by_prefill`)."""
        found = greedy.by_prefill(self.llm, prompts, said, self.request["scale"])
        self.rpc(bench_probe.take_steps)
        return {"verdict": found.verdict, "text": str(found)}

    def limits(self) -> dict[str, int]:
        scheduler = self.llm.llm_engine.vllm_config.scheduler_config
        return {
            "max_num_seqs": scheduler.max_num_seqs,
            "verifying": scheduler.max_num_batched_tokens // (1 + self.request["k"]),
        }

    def timed(self, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """A cell's numbers without a profiler, and what was said (:func:`.greedy.said`)."""
        request, batch = self.request, len(prompts)
        out, repeats = request["out"], request["repeats"]
        self.generate(prompts, WARM_UP)
        short = [self.generate(prompts, SHORT) for _ in range(repeats)]
        long = [self.generate(prompts, SHORT + out) for _ in range(repeats)]
        numbers = cell_numbers(short, long, batch, self.limits())
        ids, said = long[-1]["ids"], None
        try:  # not timed: logprobs cost time; an engine may be configured not to give them
            said = self.generate(prompts, SHORT + out, logprobs=greedy.LOGPROBS)["said"]
            ids = said["ids"]
        except Exception as e:
            numbers["tokens_error"] = f"{type(e).__name__}: {e}"
        numbers["tokens_sha256"] = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
        numbers["repeatable"] = all(run["ids"] == ids for run in long)
        if request["by_prefill"] and said is not None:
            numbers["by_prefill"] = self.by_prefill(prompts, said)
        return numbers, said

    def profiled(self, prompts: Sequence[Sequence[int]], per_step: float) -> dict[str, Any]:
        """What the windows see; ``per_step``: the tokens per step and request that were measured."""
        self.rpc(bench_probe.arm, len(prompts))
        # A quarter more than the rate that was measured, and never more than the model's length leaves room
        # for.
        wanted = math.ceil(bench_probe.steps_needed() * max(per_step, 1.0) * 1.25)
        self.generate(prompts, min(SHORT + wanted, self.request["profile_tokens"]))
        return window_numbers(self.rpc(bench_probe.take_windows)[0])


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """The variant's result: ``cannot``, ``otherwise`` (each one line) or the measured ``cells`` and
    ``tokens``."""
    import torch

    if not torch.cuda.is_available():
        return {"cannot": "no CUDA GPU is visible; run it on the machine that serves"}
    import vllm
    from vllm import LLM

    messages = Messages()
    logging.getLogger("vllm").addHandler(messages)
    say("PROGRESS", {"phase": "engine"})
    started = time.time()
    llm = LLM(**request["engine"])
    init_s = time.time() - started
    config = llm.llm_engine.vllm_config
    # Some drafters say themselves how many tokens they draft.
    request = {**request, "k": getattr(config.speculative_config, "num_speculative_tokens", 0) or 0}
    bench = Bench(request, llm)
    mode = config.compilation_config.cudagraph_mode
    mode_name = getattr(mode, "name", str(mode))
    ranks = bench.rpc(bench_probe.describe)
    result: dict[str, Any] = {
        "variant": request["variant"],
        "backend": request["backend"],
        "gpu": ranks[0]["gpu"],
        "ranks": len(ranks),
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "runner": ranks[0]["runner"],
        "backends": ranks[0]["backends"],
        "route": next((d["route"] for d in applied_decisions(ranks)), "stock"),
        "cudagraph_mode": mode_name,
        "graphs": ranks[0]["graphs"],
        "downgrade": [line for line in messages.lines if "not supported with spec-decode" in line][:1],
        "log": [line for line in messages.lines if line.startswith("vllm-specpatch")],
        "init_s": round(init_s, 1),
    }
    otherwise = ended_otherwise(request, ranks, mode_name)
    if otherwise is not None:
        return {**result, "otherwise": otherwise}
    if request["random_weights"]:
        bench.rpc(random_weights.fill_models)
    bench.rpc(bench_probe.watch, request["k"])
    text = None
    if request["text"]:
        with open(request["text"], encoding="utf-8") as file:
            text = list(llm.get_tokenizer().encode(file.read()))
        if not text:
            return {**result, "cannot": f"the text {request['text']} has no tokens"}
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    rng = random.Random(request["seed"])
    asked = {
        f"ctx{context}_bs{batch}": text_prompts(text, context, batch)
        if text
        else random_prompts(vocabulary, context, batch, rng)
        for context in request["contexts"]
        for batch in request["batches"]
    }
    result["cells"], result["tokens"] = {}, {}
    for name, prompts in asked.items():
        numbers, result["tokens"][name] = bench.timed(prompts)
        result["cells"][name] = numbers
        say("PROGRESS", {"cell": name, **numbers})
    if request["profile"]:
        say("PROGRESS", {"phase": "profile"})
        # After all timings: where torch's profiler has been, graphs are launched more slowly (stock, batch 1
        # at 8192, right after a trace: 24 ms a step instead of 13).
        for name, prompts in asked.items():
            numbers = result["cells"][name]
            try:
                numbers |= bench.profiled(prompts, numbers.get("tokens_per_step") or 1.0)
            except Exception as e:  # the timings must not be lost with it
                numbers["profiler_error"] = f"{type(e).__name__}: {e}"
    return result


def main() -> None:
    say("RESULT", measure(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
