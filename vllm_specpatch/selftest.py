"""``vllm-specpatch selftest``: does this installation compute what it should, here? Meant for an image build.

Without ``--gpu``: the planner of the kernels against random batches, what the patches decide for a GPU model,
and the prebuilt modules. With ``--gpu`` also: attention of each route against fp64 at the user's geometry,
needles in a long context, and greedy tokens of a tiny model of random weights, patched against stock.
Everything that touches vLLM or a GPU runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__, bench, doctor, gate, greedy, predict, selftest_gpu, selftest_planner
from .exit_codes import CANNOT_TELL, GOOD, WRONG
from .hooks import SERIES_MODULE
from .last_words import last_words
from .selftest_gpu import Geometry
from .settings import ROUTES

WIDTH = 110
CHILD = "vllm_specpatch.selftest_gpu"
KERNELS = selftest_planner.KERNELS
CHILD_TIMEOUT_S = 900
#: Plans that are checked on the host; half a second.
PLANS = 1500
DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
KV_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
#: The dummy model of the token comparison, with weights of ours (random_weights.py).
TINY = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}
TINY_LAYERS = 4
TOKEN_CELLS: dict[str, Any] = {
    "contexts": [300],
    "batches": [1, 4],
    "out": 48,
    "repeats": 1,
    "profile": False,
}


@dataclass(frozen=True)
class Result:
    """One check. ``state``: passed, failed or skipped; ``required``: without it nothing can be told."""

    check: str
    state: str
    detail: str
    seconds: float
    required: bool = True


class Skip(RuntimeError):
    """A check cannot be made here; the text is one line."""


class Fail(RuntimeError):
    """A check went wrong; the text is one line."""


# -- geometry ------------------------------------------------------------------------------------------


def config_of(path: Path) -> dict[str, Any]:
    """The text part of a model's config.json (or of its folder). Raises :class:`.bench.Mistake`."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise bench.Mistake(f"--model: wanted a config.json or its folder, found {path} ({e})") from None
    if not isinstance(config, dict):
        raise bench.Mistake(f"--model: wanted a config.json, found {type(config).__name__} in {path}")
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def geometry_of(
    config: Mapping[str, Any], *, k: int, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1
) -> Geometry:
    """Attention of one rank of a model. Raises :class:`.bench.Mistake` for what a config does not say."""
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise bench.Mistake(
            "--model: wanted num_attention_heads in the config, found none; pass --heads, --kv-heads and "
            "--head-dim"
        )
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if heads % kv_heads or heads % tensor_parallel_size or not head_dim:
        raise bench.Mistake(
            f"geometry: wanted query heads that KV heads and ranks divide; found {heads} query heads, "
            f"{kv_heads} KV "
            f"heads, head_dim {head_dim}, {tensor_parallel_size} ranks"
        )
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = DTYPES.get(name, "bfloat16")  # as vLLM serves a float32 checkpoint, except that it takes float16
    kv_dtype = dtype if kv_cache_dtype == "auto" else KV_DTYPES.get(kv_cache_dtype, "")
    if not kv_dtype or (not kv_dtype.startswith("float8") and kv_dtype != dtype):
        raise bench.Mistake(
            f"--kv-cache-dtype: wanted auto or one of {', '.join(KV_DTYPES)}, 16-bit ones like the model; "
            "found "
            f"{kv_cache_dtype}"
        )
    ranks = tensor_parallel_size
    # vLLM repeats KV heads when there are more ranks than heads.
    return Geometry(heads // ranks, max(1, kv_heads // ranks), head_dim, dtype, kv_dtype, 1 + k)


def describe(geometry: Geometry) -> str:
    return (
        f"{geometry.heads} query heads, {geometry.kv_heads} KV heads of {geometry.head_dim}, "
        f"{geometry.dtype}, KV cache "
        f"{geometry.kv_dtype}, {geometry.q_len} rows"
    )


# -- checks without a GPU ------------------------------------------------------------------------------


def check_planner(geometry: Geometry, seed: int) -> str:
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
        try:
            planner = selftest_planner.HostPlanner(Path(folder))
        except selftest_planner.NoCompiler as e:
            raise Skip(str(e)) from None
        group = geometry.heads // geometry.kv_heads
        wrong = selftest_planner.fuzz(planner, PLANS // 2, seed)
        wrong = wrong or selftest_planner.fuzz(planner, PLANS // 2, seed + 1, group, geometry.q_len)
    if wrong:
        raise Fail(wrong)
    return f"{PLANS} random plans are complete, half of them of this geometry"


def check_decision(gpu: str | None, k: int) -> str:
    """The CUDA-graph support, the threshold and the resolved mode must agree: apart they corrupt output."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed here")
    if k == 0:
        raise Skip("without drafts (--k 0) there is no verify step to decide about")
    options = {"gpu": gpu, "k": k, "method": "eagle", "kv_cache_dtype": "auto", "cubins": None}
    try:
        answer = predict.ask("patched", options)
    except (predict.ProbeFailed, subprocess.TimeoutExpired) as e:
        raise Skip(f"vLLM could not be asked: {e}") from None
    return judge_decision(answer, k)


def judge_decision(answer: Mapping[str, Any], k: int) -> str:
    """The verdict on what the probe reports. Raises :class:`Fail`."""
    facts = (
        f"{answer['support']}, threshold {answer['reorder_batch_threshold']}, {answer['cudagraph_mode']}, "
        f"route {answer['route']} on {answer['gpu']}, vLLM {answer['vllm']}"
    )
    uniform = answer["support"] in ("UNIFORM_BATCH", "ALWAYS")
    if uniform != (answer["reorder_batch_threshold"] == 1 + k):
        raise Fail(f"CUDA-graph support and reorder threshold disagree for k = {k}: {facts}")
    if uniform != answer["cudagraph_mode"].startswith("FULL"):
        raise Fail(f"CUDA-graph support and mode disagree for k = {k}: {facts}")
    if answer.get("error"):
        raise Fail(answer["error"])
    # A refusal of this vLLM, not of one configuration: in this image the package would do nothing anywhere.
    refused = {name for name, state in answer.get("imported", {}).items() if state == "refused"}
    trouble = {
        name: state
        for name, state in answer["patches"].items()
        if state in ("failed", "late") or name in refused
    }
    if trouble:
        raise Fail("; ".join(f"{name} {state}: {answer['reasons'][name]}" for name, state in trouble.items()))
    return facts if uniform else f"{facts} ({'; '.join(answer['reasons'].values())})"


def check_prebuilt(geometry: Geometry, arch: str | None, needed: bool) -> str:
    """Every module of the named folders is as it was built. ``arch`` such as "8.6": and one of them serves
    this geometry there; it is a failure if none does and ``needed``."""
    build = importlib.import_module(f"{KERNELS}.build")
    folders = [Path(part) for part in os.environ.get(build.PREBUILT_ENV, "").split(os.pathsep) if part]
    if not folders:
        raise Skip(f"{build.PREBUILT_ENV} is not set")
    libraries = []
    for folder in folders:
        if not folder.is_dir():
            raise Fail(f"{build.PREBUILT_ENV}: wanted a folder, found none at {folder}")
        libraries += sorted(folder.rglob("*.so"))
    if not libraries:
        raise Fail(f"{build.PREBUILT_ENV}: wanted modules, found none in {', '.join(map(str, folders))}")
    broken = [library for library in libraries if not build.is_whole(library)]
    if broken:
        raise Fail(f"{broken[0]} is not as it was built; build it again")
    found = f"as they were built: {len(libraries)}"
    if arch is None:
        return found
    spec_mask = importlib.import_module(f"{KERNELS}.spec_mask")
    try:
        spec = selftest_gpu.spec_of(geometry)
        module = build.find_covering(spec, build.Arch.parse(arch), folders)
    except (build.BuildError, spec_mask.SpecMaskError) as e:
        raise Skip(str(e)) from None
    gpu = f"sm_{arch.replace('.', '')}"
    if module is not None:
        return f"{found}; {module.stem} serves this geometry on {gpu}"
    missing = (
        f"none serves this geometry on {gpu} with FlashInfer {build.flashinfer_version()}; "
        f"next step: vllm-specpatch build --arch {arch} --spec {build.spec_text(spec)}"
    )
    if needed:
        raise Fail(missing)
    return f"{found}; {missing}"


# -- checks with a GPU ---------------------------------------------------------------------------------


def wanted_routes(route: str) -> list[str]:
    """Routes that VLLM_SPECPATCH_ROUTE=``route`` may take, best first."""
    if route != "auto":
        return [route]
    return list(importlib.import_module(f"{SERIES_MODULE}.routes").AUTO)


def ask_gpu(route: str, geometry: Geometry, seed: int) -> dict[str, Any]:
    """The answer of a kernel-check process. Raises :class:`Fail` if it ended without one."""
    request = json.dumps({"route": route, "geometry": asdict(geometry), "seed": seed})
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", CHILD, request],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=CHILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise Fail(f"no answer after {CHILD_TIMEOUT_S} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return answer
    said = last_words(done.stderr or done.stdout)
    raise Fail(said or f"the process ended with {done.returncode} and without output")


def token_requests(
    geometry: Geometry, route: str, kv_cache_dtype: str, folder: Path
) -> list[tuple[bench.Variant, dict[str, Any]]]:
    """Stock and patched, on a tiny model of this geometry."""
    k = geometry.q_len - 1
    shape = {
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "torch_dtype": geometry.dtype,
    }
    engine = bench.dummy_engine(folder / "models", k, TOKEN_CELLS["batches"], TINY_LAYERS, **TINY, **shape)
    engine |= {
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.3,
        "kv_cache_dtype": kv_cache_dtype,
    }
    if geometry.kv_dtype.startswith("float8"):
        # Both with 16-bit queries: elsewhere stock would round queries to fp8, and the tokens could differ
        # for that.
        engine["attention_config"] = {"disable_flashinfer_q_quantization": True}
    if k:
        # vLLM's own way to accept drafts without a trained drafter: half of them. Without, nobody would look
        # at what the later rows of a verify step give.
        engine["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 1 + k / 2,
        }
    patched = bench.VARIANTS["patched" if route == "auto" else route]
    scale = greedy.scale_of_cache(geometry.kv_dtype)
    return [
        (
            variant,
            bench.request(variant, engine, random_weights=True, by_prefill=True, scale=scale, **TOKEN_CELLS),
        )
        for variant in (bench.VARIANTS["stock"], patched)
    ]


def check_tokens(geometry: Geometry, route: str, kv_cache_dtype: str, say: Callable[[str], None]) -> str:
    if geometry.q_len < 2:
        raise Skip("--k 0: without draft tokens there is nothing to compare")
    answers = []
    with tempfile.TemporaryDirectory(prefix="specpatch-") as name:
        folder = Path(name)
        for variant, request in token_requests(geometry, route, kv_cache_dtype, folder):
            say(f"tokens: {variant.name}")
            log = folder / f"{variant.name}.log"
            try:
                answer = bench.run_child(
                    request,
                    {**variant.environment(), "HF_HUB_OFFLINE": "1"},
                    log,
                    timeout=CHILD_TIMEOUT_S,
                    progress=lambda data: None,
                )
            except bench.ChildFailed as e:
                # The log goes with the folder, so the message must not point there.
                reason = str(e).rpartition("; see ")[0]
                raise Fail(f"{variant.name}: {reason}") from None
            if "cannot" in answer or "otherwise" in answer:
                raise Skip(answer.get("cannot") or answer["otherwise"])
            answers.append(answer)
    return judge_tokens(answers, greedy.scale_of_cache(geometry.kv_dtype))


def judge_tokens(answers: Sequence[Mapping[str, Any]], scale: float = 1.0) -> str:
    """The verdict on stock's and patched's answers. Raises :class:`Fail`."""
    stock, patched = answers
    for answer in answers:
        for cell, numbers in answer["cells"].items():
            if "tokens_error" in numbers:
                raise Fail(f"{cell}: {numbers['tokens_error']}")
    found = {
        cell: greedy.difference(said, patched["tokens"][cell], scale)
        for cell, said in stock["tokens"].items()
    }
    differing = [f"{cell}: {one}" for cell, one in found.items() if one.verdict == "differ"]
    differing += [
        f"{cell}: {name}'s {one['by_prefill']['text']}"
        for name, answer in (("patched", patched), ("stock", stock))
        for cell, one in answer["cells"].items()
        if one["by_prefill"]["verdict"] == "differ"
    ]
    if differing:
        raise Fail("; ".join(differing))
    parting = [f"{cell}: {one}" for cell, one in found.items() if one.verdict != "equal"]
    number = sum(len(ids) for said in stock["tokens"].values() for ids in said["ids"])
    return (
        f"{number} greedy tokens: {'; '.join(parting) or 'equal'}; prefill agrees with them; "
        f"stock {stock['cudagraph_mode']}, patched {patched['cudagraph_mode']} by route {patched['route']}"
    )


# -- the command ---------------------------------------------------------------------------------------


def attempt(name: str, check: Callable[[], str], required: bool = True) -> Result:
    started = time.time()
    try:
        state, detail = "passed", check()
    except Skip as e:
        state, detail = "skipped", str(e)
    except Fail as e:
        state, detail = "failed", str(e)
    return Result(name, state, detail, round(time.time() - started, 1), required)


def exit_code(results: Sequence[Result]) -> int:
    """WRONG if anything failed; CANNOT_TELL if nothing did but a required check was not made."""
    if any(result.state == "failed" for result in results):
        return WRONG
    if any(result.required and result.state == "skipped" for result in results):
        return CANNOT_TELL
    return GOOD


def kernel_results(
    routes: Sequence[str], geometry: Geometry, seed: int, say: Callable[[str], None]
) -> list[Result]:
    """The kernel checks of these routes. One route that passed is enough: vLLM is served by it where a better
    one cannot be had."""
    found: list[Result] = []
    for route in routes:
        say(f"kernels: {route}")
        started = time.time()
        try:
            answer = ask_gpu(route, geometry, seed)
        except Fail as e:
            found.append(Result(f"{route}: kernels", "failed", str(e), round(time.time() - started, 1)))
            continue
        if "cannot" in answer:
            return [Result("kernels", "skipped", answer["cannot"], 0.0)]
        for one in answer["checks"]:
            found.append(Result(one["check"], one["state"], one["detail"], one["seconds"], required=False))
    if not any(result.state == "passed" for result in found):
        found = [replace(result, required=True) for result in found]
    return found


def render(geometry: Geometry, results: Sequence[Result], code: int) -> str:
    lines = [f"vllm-specpatch {__version__}: {describe(geometry)}", ""]
    label = max(len(result.check) for result in results) + 2
    for result in results:
        head = f"{result.check:{label}}{result.state:8} {result.seconds:6.1f} s  "
        lines += textwrap.wrap(
            head + result.detail,
            WIDTH,
            subsequent_indent=" " * (label + 19),
            break_on_hyphens=False,
            break_long_words=False,  # paths, to be copied
        )
    verdict = {GOOD: "good", WRONG: "something is WRONG", CANNOT_TELL: "cannot tell"}[code]
    return "\n".join([*lines, "", f"verdict: {verdict}"])


def complain(text: str) -> None:
    print(f"vllm-specpatch selftest: {text}", file=sys.stderr)


def selftest(arguments: argparse.Namespace) -> int:
    try:
        with bench.signals_interrupt():
            return check_all(arguments)
    except KeyboardInterrupt:
        complain("interrupted")
        return CANNOT_TELL


def check_all(arguments: argparse.Namespace) -> int:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        if arguments.k < 0 or arguments.tensor_parallel_size < 1:
            raise bench.Mistake("--k: wanted at least 0; --tensor-parallel-size: wanted at least 1")
        capability = None if arguments.arch is None else doctor.capability_of(arguments.arch)
        if arguments.arch is not None and capability is None:
            raise bench.Mistake(f"--arch: wanted a capability like sm_86 or 8.6, found {arguments.arch!r}")
        config: dict[str, Any] = {
            "num_attention_heads": arguments.heads,
            "num_key_value_heads": arguments.kv_heads,
            "head_dim": arguments.head_dim,
            "dtype": arguments.dtype,
        }
        if arguments.model is not None:
            config = config_of(Path(arguments.model))
        geometry = geometry_of(
            config,
            k=arguments.k,
            kv_cache_dtype=arguments.kv_cache_dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
        )
    except bench.Mistake as e:
        complain(str(e))
        return CANNOT_TELL
    arch = None if capability is None else "{}.{}".format(*capability)
    routes = wanted_routes(arguments.route)
    results = [
        attempt("planner", lambda: check_planner(geometry, arguments.seed), required="spec_mask" in routes),
        attempt("decision", lambda: check_decision(arguments.arch, arguments.k)),
        attempt(
            "prebuilt modules",
            lambda: check_prebuilt(geometry, arch, arguments.model is not None),
            required=False,
        ),
    ]
    if arguments.gpu:
        results += kernel_results(routes, geometry, arguments.seed, say)
        cannot = [result.detail for result in results if result.check == "kernels"]
        if cannot:
            results.append(Result("tokens", "skipped", cannot[0], 0.0))
        else:
            results.append(
                attempt(
                    "tokens", lambda: check_tokens(geometry, arguments.route, arguments.kv_cache_dtype, say)
                )
            )
    code = exit_code(results)
    if arguments.json:
        report = {
            "specpatch": __version__,
            "versions": {
                name: gate.installed_version(name) for name in ("vllm", "flashinfer-python", "torch")
            },
            "verdict": {GOOD: "good", WRONG: "wrong", CANNOT_TELL: "cannot tell"}[code],
            "geometry": asdict(geometry),
            "checks": [asdict(result) for result in results],
        }
        print(json.dumps(report, indent=2))
    else:
        print(render(geometry, results, code))
    return code


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "selftest",
        help="check the planner, the decision and, with --gpu, attention and tokens on this machine",
        description="Meant to run once when an image is built. Exit code 0: all checks passed, 1: one "
        "failed, 2: a check that is needed could not be made.",
    )
    p.add_argument("--gpu", action="store_true", help="also launch kernels and start vLLM on the GPU here")
    p.add_argument("--arch", help="judge the decision for this capability, for example sm_86")
    p.add_argument("--model", help="take the geometry from this config.json or its folder")
    p.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    p.add_argument("--kv-heads", type=int, default=8, help="KV heads (default 8)")
    p.add_argument("--head-dim", type=int, default=128, help="default 128")
    p.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="default bfloat16")
    p.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's option (default auto)")
    p.add_argument("--k", type=int, default=7, help="num_speculative_tokens (default 7)")
    p.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks that share the heads (default 1)"
    )
    p.add_argument(
        "--route",
        default="auto",
        choices=ROUTES,
        help="check what this VLLM_SPECPATCH_ROUTE serves (default auto)",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=selftest)
