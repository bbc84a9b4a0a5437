"""``vllm-specpatch bench``: stock, patched and FLASH_ATTN on the user's own model, each in its own process.

Pure at both ends: :func:`request` makes what a child (:mod:`.bench_run`) is asked, :func:`compare` and
:func:`render` judge what the children answered. Only :func:`run_child` starts anything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import __version__, bench_probe, bench_run, chart, greedy
from .exit_codes import CANNOT_TELL, GOOD, WRONG
from .last_words import LastWords

WIDTH = 110
CHILD = "vllm_specpatch.bench_run"
#: ``--model dummy``: a Llama of 8 layers with random weights and, as drafter, the same with one layer.
DUMMY = "dummy"
DUMMY_K = 7
LLAMA = {
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


class Mistake(ValueError):
    """Something in the command line that cannot be used; the text is one line."""


class ChildFailed(RuntimeError):
    """A variant's process gave no result; the text is one line."""


@dataclass(frozen=True)
class Variant:
    """``route``: what VLLM_SPECPATCH_ROUTE is set to; None where the package is switched off."""

    name: str
    backend: str
    route: str | None
    what: str

    def environment(self) -> dict[str, str]:
        if self.route is None:
            return {"VLLM_SPECPATCH": "0"}
        return {"VLLM_SPECPATCH": "on", "VLLM_SPECPATCH_ROUTE": self.route}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("stock", "FLASHINFER", None, "FlashInfer as vLLM has it"),
        Variant("patched", "FLASHINFER", "auto", "FlashInfer with this package"),
        Variant("native", "FLASHINFER", "native", "FlashInfer with this package, route native"),
        Variant("spec_mask", "FLASHINFER", "spec_mask", "FlashInfer with this package, route spec_mask"),
        Variant("flash_attn", "FLASH_ATTN", None, "vLLM's FLASH_ATTN backend"),
    )
}


# -- what is asked -------------------------------------------------------------------------------------


def integers(text: str, what: str) -> list[int]:
    """``"1,8,32"`` as a list without repetitions. Raises :class:`Mistake`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise Mistake(f"{what}: wanted whole numbers from 1, separated by commas; found {text!r}")
    return list(dict.fromkeys(numbers))


def variants_of(text: str) -> list[Variant]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        raise Mistake(f"--backends: wanted some of {', '.join(VARIANTS)}; found {text!r}")
    return [VARIANTS[name] for name in names]


def json_object(text: str | None, what: str) -> dict[str, Any]:
    """A JSON object from the command line, or from the file it names after ``@``. Raises :class:`Mistake`."""
    if text is None:
        return {}
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError) as e:
        raise Mistake(f"{what}: wanted a JSON object or @FILE; found {text[:60]!r} ({e})") from None
    if not isinstance(value, dict):
        raise Mistake(f"{what}: wanted a JSON object, found {type(value).__name__}")
    return value


def absolute(name: str) -> str:
    """A model's name as it is, a folder as an absolute path: children run in a folder of their own."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def write_dummy(folder: Path, layers: int, **changes: Any) -> str:
    """A config.json without weights under ``folder``; returns its folder."""
    place = folder / f"llama-{layers}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({**LLAMA, **changes, "num_hidden_layers": layers}))
    return str(place)


def dummy_engine(folder: Path, k: int, batches: Sequence[int], layers: int, **changes: Any) -> dict[str, Any]:
    """Engine arguments of the dummy model and its drafter; ``changes`` to the model's config."""
    most = max(batches)
    engine: dict[str, Any] = {
        "model": write_dummy(folder, layers, **changes),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": changes.get("torch_dtype", LLAMA["torch_dtype"]),
        # Few captured sizes and no autotuning: they cost minutes and do not touch the attention that is
        # measured.
        "compilation_config": {"cudagraph_capture_sizes": sorted({(1 + k) * n for n in sizes(most)})},
        "kernel_config": {"enable_flashinfer_autotune": False},
    }
    if k:
        engine["speculative_config"] = {
            "method": "eagle",
            "model": write_dummy(folder, 1, **changes),
            "num_speculative_tokens": k,
        }
    return engine


def sizes(most: int) -> list[int]:
    """1, 2, 4 … up to and including ``most``."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def request(
    variant: Variant,
    engine: Mapping[str, Any],
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    out: int,
    repeats: int,
    profile: bool,
    text: str | None = None,
    seed: int = 0,
    random_weights: bool = False,
    by_prefill: bool = False,
    scale: float = 1.0,
) -> dict[str, Any]:
    """What a child is asked. ``engine``: arguments of ``vllm.LLM``; the ones the measurement needs are added
    unless they are given. ``random_weights``: of our own dummy model, see :mod:`.random_weights`.
    ``by_prefill``: also whether prefill agrees with what was decoded (logprobs of whole prompts: memory),
    with limits that are ``scale`` times as wide."""
    speculative = engine.get("speculative_config") or {}
    k = int(speculative.get("num_speculative_tokens") or 0)
    # The generation that is profiled must be long enough even if every draft is accepted.
    profile_tokens = bench_run.SHORT + (1 + k) * bench_probe.steps_needed() * 5 // 4 if profile else 0
    longest = max(bench_run.SHORT + out, bench_run.WARM_UP, profile_tokens)
    wanted: dict[str, Any] = {
        "max_model_len": max(contexts) + longest + 2 * (1 + k),
        "max_num_seqs": max(*batches, 8),
        # The two lengths of a generation must pay the same for their prefill.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": seed,
    }
    attention = {"backend": variant.backend, **engine.get("attention_config", {})}
    return {
        "variant": variant.name,
        "backend": variant.backend,
        "route": variant.route,
        "engine": {**wanted, **engine, "attention_config": attention},
        "k": k,
        "batches": list(batches),
        "contexts": list(contexts),
        "out": out,
        "repeats": repeats,
        "profile": profile,
        "profile_tokens": profile_tokens,
        "text": text,
        "seed": seed,
        "random_weights": random_weights,
        "by_prefill": by_prefill,
        "scale": scale,
        "synthetic": speculative.get("rejection_sample_method") == "synthetic",
    }


# -- children ------------------------------------------------------------------------------------------

#: The engine's core in the child itself: functions reach the workers without vLLM's insecure serialisation.
#: CUPTI must not go between two profiler sessions: CUDA graphs do not survive it on every release of CUDA.
CHILD_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TEARDOWN_CUPTI": "0",
    "DISABLE_CUPTI_LAZY_REINIT": "1",
}
#: Parts of the names of variables that are nobody's business.
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def run_child(
    asked: Mapping[str, Any],
    environment: Mapping[str, str],
    log: Path,
    *,
    timeout: float,
    progress: Callable[[dict[str, Any]], None],
    python: str = sys.executable,
) -> dict[str, Any]:
    """The result of one variant's process. All it prints goes to ``log``.

    Raises :class:`ChildFailed`. Leaves no process behind, whatever ends it.
    """
    env = {**os.environ, **CHILD_ENVIRONMENT, **environment}
    result: dict[str, Any] | None = None
    said = LastWords()
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder, log.open("w", encoding="utf-8") as file:
        # Not the caller's folder, where a checkout would shadow packages; a session of its own, so that the
        # workers of a parallel engine end with it.
        child = subprocess.Popen(
            [python, "-P", "-m", CHILD, json.dumps(asked)],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            kill(child)

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                kind, _, rest = line.partition(" ")
                if kind == "RESULT":
                    result = json.loads(rest)
                elif kind == "PROGRESS":
                    progress(json.loads(rest))
                else:
                    said.hear(line)
                    file.write(line)
                    file.flush()
            child.wait()
        finally:
            timer.cancel()
            kill(child)
            child.wait()
    if result is not None:
        return result
    if late.is_set():
        raise ChildFailed(f"no result after {timeout:.0f} s; see {log}")
    raise ChildFailed(f"{str(said) or f'exit code {child.returncode} without output'}; see {log}")


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    By default they end this process at once, and a child, in a session of its own, keeps the GPU.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only there they would raise
        return
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        # Once: a closing terminal sends several, and the next one would end the cleaning up.
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # One that is ignored stays so: nohup. None: set by something that is not Python, nothing to restore.
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def kill(child: subprocess.Popen[str]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# -- what is answered ----------------------------------------------------------------------------------


def compare(results: Sequence[dict[str, Any]], scale: float | None = greedy.TRAINED) -> None:
    """Adds to every cell how it stands to the first result's: ``ratio`` (below 1 is faster), ``noise`` (True
    if the difference is within the runs' spread, None where single runs have none), ``tokens_verdict``
    (equal, rounding, differ, cannot tell) and ``tokens_vs_first``, a line. Takes the token lists out.
    ``scale`` as of :func:`.greedy.difference`; None: tokens tell nothing."""
    first = results[0]
    lists = [result.pop("tokens") for result in results]
    for result, tokens in zip(results, lists):
        for name, cell in result["cells"].items():
            base = first["cells"][name]
            verdict = judged(lists[0][name], tokens[name], scale)
            cell["tokens_verdict"], cell["tokens_vs_first"] = verdict
            if "ms_per_step" in cell and "ms_per_step" in base:
                cell["ratio"] = round(cell["ms_per_step"] / base["ms_per_step"], 3)
                spreads = [cell["spread_ms"], base["spread_ms"]]
                apart = abs(cell["ms_per_step"] - base["ms_per_step"])
                cell["noise"] = None if None in spreads else apart <= max(spreads)


def judged(ours: greedy.Said | None, theirs: greedy.Said | None, scale: float | None) -> tuple[str, str]:
    """(verdict, a line) on two variants' tokens in a cell, None where an engine gave no logprobs."""
    if scale is None:
        return "cannot tell", "vLLM's dummy weights make tokens that attention cannot change"
    if ours is None or theirs is None:
        return "cannot tell", "cannot tell: no logprobs were had"
    found = greedy.difference(ours, theirs, scale)
    return found.verdict, str(found)


def scale_of(arguments: argparse.Namespace, engine: Mapping[str, Any]) -> float | None:
    """How wide the limits for tokens are (:mod:`.greedy`); None where no tokens can be compared."""
    if arguments.model == DUMMY:
        # With an fp8 cache FLASH_ATTN's queries are fp8, too.
        return 1.0 if engine.get("kv_cache_dtype", "auto") == "auto" else greedy.TRAINED
    return None if engine.get("load_format") == "dummy" else greedy.TRAINED


def text_of(value: float | None, form: str = "", missing: str = "-") -> str:
    return missing if value is None else format(value, form)


def drafter_of(cell: Mapping[str, Any]) -> str:
    drafter = cell.get("drafter")
    if drafter is None:
        return "-"
    return f"{drafter['ran']} ({drafter['graph_launches']:g}+{drafter['kernel_launches']:g})"


def render(results: Sequence[Mapping[str, Any]], repeats: int) -> str:
    """A table per variant; the ratio is to the first one."""
    lines = []
    head = results[0]
    ranks = "" if head["ranks"] == 1 else f" x{head['ranks']}"
    runs = f"best of {repeats}" if repeats > 1 else "a single run"
    lines.append(
        f"{head['gpu']}{ranks}, vLLM {head['versions']['vllm']}, "
        f"torch {head['versions']['torch']}, V{head['runner']} runner; {runs}"
    )
    columns = (
        f"{'cell':13}{'ms/step':>9}{'spread':>8}{'ratio':>9}{'tokens/s':>10}{'tok/step':>9}"
        f"{'us/build':>9}{'GPU idle':>9}  {'drafter':16}tokens"
    )
    for result in results:
        graphs = ", ".join(f"{name} {n}" for name, n in result["graphs"].items())
        lines += [
            "",
            f"{result['variant']}: {', '.join(result['backends'])}, route {result['route']}, "
            f"{result['cudagraph_mode']}, graphs: {graphs or 'unknown'}",
            columns,
        ]
        for name, cell in result["cells"].items():
            if "ms_per_step" not in cell:
                lines.append(f"{name:13}{cell['note']}")
                continue
            sign = {True: "~", False: " ", None: "?"}[cell.get("noise", False)]
            ratio = text_of(cell.get("ratio"), ".3f") + (" " if result is head else sign)
            idle = text_of(cell.get("gpu_idle_share"), ".0%")
            lines.append(
                f"{name:13}{cell['ms_per_step']:9.3f}{text_of(cell['spread_ms'], '.3f'):>8}{ratio:>9}"
                f"{text_of(cell['tokens_per_s'], '.0f'):>10}"
                f"{text_of(cell['tokens_per_step'], '.2f'):>9}"
                f"{text_of(cell.get('host_us_per_build'), '.0f'):>9}{idle:>9}"
                f"  {drafter_of(cell):16}{cell.get('tokens_verdict', '-')}"
            )
            notes = [cell.get("note"), cell.get("profiler_error")]
            if cell.get("tokens_verdict", "equal") != "equal":
                notes.append(f"tokens: {cell['tokens_vs_first']}")
            notes += [] if cell["repeatable"] else ["greedy tokens differed between its own runs"]
            lines += [f"{'':13}{note}" for note in notes if note]
    lines.append("")
    lines += textwrap.wrap(
        "ratio: ms/step over the first variant's, ~ within the spread of the runs, ? of single runs, whose "
        "noise is unknown. tok/step: per request. "
        "us/build: "
        "host time of one attention metadata build, waiting for the GPU included. GPU idle: share of a "
        "decode "
        "window without a kernel, with the profiler on. drafter: where most of its kernels came from (graph "
        "launches + single kernel launches per step). tokens: greedy, against the first variant: equal, "
        "rounding (they part where two tokens are nearly as good, with logprobs near each other until then), "
        "or they differ.",
        WIDTH,
    )
    return "\n".join(lines)


def series_of(results: Sequence[Mapping[str, Any]]) -> list[chart.Panel]:
    """Panels for :func:`chart.lines`: one per context, ms per step over the batch, one line per variant."""
    cells: dict[int, dict[str, list[tuple[int, float, float]]]] = {}
    for result in results:
        for name, cell in result["cells"].items():
            if "ms_per_step" in cell:
                context, batch = (int(part[3 if i == 0 else 2 :]) for i, part in enumerate(name.split("_")))
                points = cells.setdefault(context, {}).setdefault(label_of(result), [])
                points.append((batch, cell["ms_per_step"], cell["spread_ms"] or 0.0))
    return [chart.Panel(f"context {context}", lines) for context, lines in sorted(cells.items())]


def label_of(result: Mapping[str, Any]) -> str:
    name, route = result["variant"], result["route"]
    return name if route in ("stock", name) else f"{name} ({route})"


# -- the command ---------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace, folder: Path) -> list[tuple[Variant, dict[str, Any]]]:
    """What to run, in order. Raises :class:`Mistake`."""
    variants = variants_of(arguments.backends)
    batches = integers(arguments.batch, "--batch")
    contexts = integers(arguments.context, "--context")
    for name in ("out", "repeats"):
        if getattr(arguments, name) < 1:
            raise Mistake(f"--{name}: wanted at least 1, found {getattr(arguments, name)}")
    extra = json_object(arguments.engine, "--engine")
    speculative = json_object(arguments.speculative_config, "--speculative-config")
    k = speculative.get("num_speculative_tokens", DUMMY_K)
    if not isinstance(k, int) or k < 0:
        raise Mistake(f"--speculative-config: wanted a whole num_speculative_tokens, found {k!r}")
    if arguments.model == DUMMY:
        engine = dummy_engine(folder / "models", k, batches, layers=8)
    else:
        engine = {"model": absolute(arguments.model), "skip_tokenizer_init": arguments.text is None}
    if speculative:
        if "model" in speculative:
            speculative["model"] = absolute(str(speculative["model"]))
        engine["speculative_config"] = {**engine.get("speculative_config", {}), **speculative}
    if arguments.load_format is not None:
        engine["load_format"] = arguments.load_format
    for name in ("kv_cache_dtype", "tensor_parallel_size", "gpu_memory_utilization"):
        if getattr(arguments, name) is not None:
            engine[name] = getattr(arguments, name)
    text = None
    if arguments.text is not None:
        if not Path(arguments.text).is_file():
            raise Mistake(f"--text: wanted a text file, found no file {arguments.text!r}")
        if arguments.model == DUMMY:
            raise Mistake("--text: the dummy model has no tokenizer; give a real --model")
        text = str(Path(arguments.text).absolute())
    asked = []
    for variant in variants:
        own = {**engine, **extra}
        if variant.backend == "FLASH_ATTN" and arguments.flash_attn_version is not None:
            version = {"flash_attn_version": arguments.flash_attn_version}
            own["attention_config"] = {**own.get("attention_config", {}), **version}
        asked.append(
            (
                variant,
                request(
                    variant,
                    own,
                    batches=batches,
                    contexts=contexts,
                    out=arguments.out,
                    repeats=arguments.repeats,
                    profile=not arguments.no_profile,
                    text=text,
                    seed=arguments.seed,
                    random_weights=arguments.model == DUMMY,
                ),
            )
        )
    return asked


def complain(text: str) -> None:
    print(f"vllm-specpatch bench: {text}", file=sys.stderr)


def bench(arguments: argparse.Namespace) -> int:
    try:
        with signals_interrupt():
            return measure(arguments)
    except KeyboardInterrupt:
        complain("interrupted")
        return CANNOT_TELL


def measure(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("vllm") is None:
        complain("wanted vLLM in this environment, found none; install the package where vLLM runs")
        return CANNOT_TELL
    folder = Path(arguments.out_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        asked = plan(arguments, folder.absolute())
    except (Mistake, OSError) as e:
        complain(str(e))
        return CANNOT_TELL
    cells = len(asked[0][1]["batches"]) * len(asked[0][1]["contexts"])
    # Its files are all there: no look at the hub, which some machines cannot reach.
    offline = {"HF_HUB_OFFLINE": "1"} if arguments.model == DUMMY else {}
    results: list[dict[str, Any]] = []
    code, trouble = GOOD, None
    for number, (variant, one) in enumerate(asked, 1):
        label = f"[{number}/{len(asked)}] {variant.name}"
        done = 0

        def progress(data: dict[str, Any], label: str = label, what: str = variant.what) -> None:
            nonlocal done
            if "cell" in data:
                done += 1
                ms = f"{data['ms_per_step']:.3f} ms/step" if "ms_per_step" in data else data["note"]
                print(f"{label}: {done}/{cells} {data['cell']} {ms}", file=sys.stderr, flush=True)
            elif data["phase"] == "profile":
                print(f"{label}: all timed; now with the profiler", file=sys.stderr, flush=True)
            else:
                print(f"{label}: starting vLLM ({what})", file=sys.stderr, flush=True)

        try:
            result = run_child(
                one,
                {**variant.environment(), **offline},
                folder / f"{variant.name}.log",
                timeout=arguments.timeout,
                progress=progress,
            )
        except ChildFailed as e:
            code, trouble = WRONG, f"{variant.name} failed: {e}"
            break
        except KeyboardInterrupt:
            code, trouble = CANNOT_TELL, f"interrupted while {variant.name} ran"
            break
        if "cannot" in result:
            code, trouble = CANNOT_TELL, result["cannot"]
            break
        if "otherwise" in result:
            code, trouble = WRONG, f"nothing is compared: {result['otherwise']}"
            break
        results.append(result)
    report: dict[str, Any] = {
        "specpatch": __version__,
        "command": ["vllm-specpatch", *sys.argv[1:]],
        "environment": {
            key: value
            for key, value in os.environ.items()
            if key.startswith("VLLM_") and not any(part in key for part in SECRET)
        },
        "requests": [one for _, one in asked],
        "compared": trouble is None,
        "trouble": trouble,
        "results": results,
    }
    if trouble is None:
        compare(results, scale_of(arguments, asked[0][1]["engine"]))
        verdicts = {cell["tokens_verdict"] for result in results for cell in result["cells"].values()}
        if arguments.model == DUMMY and "differ" in verdicts:
            code = WRONG  # of a user's model the reader judges
    for result in results:
        result.pop("tokens", None)
    written = folder / "bench.json"
    written.write_text(json.dumps(report, indent=1) + "\n")
    if trouble is None:
        picture = folder / "bench.svg"
        title = f"{results[0]['gpu']}, vLLM {results[0]['versions']['vllm']}: ms per decode step"
        picture.write_text(chart.lines(title, series_of(results), x="batch", y="ms per step"))
    if arguments.json:
        print(json.dumps(report, indent=1))
    elif trouble is None:
        print(render(results, arguments.repeats))
    if trouble is not None:
        complain(trouble)
    elif not arguments.json:
        print(f"\nwritten: {written}, {folder / 'bench.svg'}")
    return code


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "bench",
        help="measure stock, patched and FLASH_ATTN on your model, side by side (needs a GPU)",
        description="Times decode steps of each variant in a process of its own and compares them with the "
        "first: ms per step, tokens/s, acceptance, host time per metadata build, GPU idle share, and whether "
        "the drafter ran from CUDA graphs. Exit code 0: compared, 1: a variant failed or ended on another "
        "route than asked, 2: cannot tell.",
    )
    p.add_argument(
        "--model", required=True, help=f"as vLLM's option; '{DUMMY}' is an 8-layer Llama with random weights"
    )
    p.add_argument("--speculative-config", metavar="JSON", help="as vLLM's option, or @FILE")
    p.add_argument(
        "--backends",
        default="stock,patched,flash_attn",
        help=f"some of {', '.join(VARIANTS)} (default stock,patched,flash_attn)",
    )
    p.add_argument("--batch", default="1,8,32", help="requests at once (default 1,8,32)")
    p.add_argument("--context", default="1024,8192", help="prompt tokens (default 1024,8192)")
    p.add_argument("--out", type=int, default=128, help="tokens that are timed per request (default 128)")
    p.add_argument("--repeats", type=int, default=3, help="runs per cell (default 3; 1 tells no noise)")
    p.add_argument("--text", metavar="FILE", help="prompts are pieces of this text (default: random tokens)")
    p.add_argument("--load-format", help="as vLLM's option; 'dummy' needs no weights")
    p.add_argument("--kv-cache-dtype", help="as vLLM's option")
    p.add_argument("--tensor-parallel-size", type=int, help="as vLLM's option")
    p.add_argument("--gpu-memory-utilization", type=float, help="as vLLM's option")
    p.add_argument("--flash-attn-version", type=int, choices=(2, 3, 4), help="for the variant flash_attn")
    p.add_argument("--engine", metavar="JSON", help="more arguments of vllm.LLM, or @FILE")
    p.add_argument("--no-profile", action="store_true", help="only time; no build timers, no torch profiler")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--timeout", type=float, default=3600.0, help="seconds per variant (default 3600)")
    p.add_argument(
        "--out-folder",
        default="specpatch-bench",
        help="for bench.json, bench.svg and the logs (default specpatch-bench)",
    )
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=bench)
