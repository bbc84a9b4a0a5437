"""The ``vllm-specpatch`` command. Exit codes: 0 good, 1 something is wrong, 2 cannot tell."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, checklog, doctor, fingerprint
from .exit_codes import CANNOT_TELL, GOOD, WRONG
from .hooks import SERIES_MODULE, load_patches

PROBE_MODULE = f"{SERIES_MODULE}.predict_probe"
PROBE_TIMEOUT_S = 300
#: The kernels' build module; a string, because the engine knows no kernel.
BUILD_MODULE = "vllm_specpatch.kernels.build"
ROWS = (
    ("support", "CUDA-graph support"),
    ("reorder_batch_threshold", "reorder_batch_threshold"),
    ("cudagraph_mode", "cudagraph_mode"),
    ("route", "route"),
)


class ProbeFailed(RuntimeError):
    """A probe process gave no result; the text is the last thing it said."""


def _side(side: str, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", PROBE_MODULE, json.dumps({**options, "side": side})]
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
        # Not the caller's folder: `python -m` puts it on sys.path, where a checkout shadows the package.
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=os.environ
        )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    raise ProbeFailed(said[-1].strip() if said else f"exit code {done.returncode} without output")


def predict(arguments: argparse.Namespace) -> int:
    options = {
        "gpu": arguments.gpu,
        "k": arguments.k,
        "method": arguments.method,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "cubins": {"auto": None, "yes": True, "no": False}[arguments.cubins],
    }
    try:
        stock, patched = _side("stock", options), _side("patched", options)
    except (ProbeFailed, subprocess.TimeoutExpired) as e:
        print(f"vllm-specpatch predict: vLLM could not be asked: {e}", file=sys.stderr)
        return CANNOT_TELL
    shared = {key: stock.pop(key) for key in ("vllm", "flashinfer", "gpu")}
    for key in shared:
        patched.pop(key)
    if arguments.json:
        print(json.dumps({**shared, "stock": stock, "patched": patched}, indent=2))
        return GOOD
    print(
        f"vLLM {shared['vllm']}, FlashInfer {shared['flashinfer']}, {shared['gpu']}, FLASHINFER backend, "
        f"{arguments.method}, k = {arguments.k}, kv-cache-dtype {arguments.kv_cache_dtype}\n"
    )
    stock["route"] = "stock"
    print(f"{'':26}{'stock':32}patched")
    for key, label in ROWS:
        print(f"{label:26}{stock[key]!s:32}{patched[key]!s}")
    for label, side in (("stock", stock), ("patched", patched)):
        for warning in side["warnings"] or ["none"]:
            print(textwrap.fill(f"{label} warns: {warning}", 110, subsequent_indent="    "))
    for name, state in patched["patches"].items():
        print(
            textwrap.fill(
                f"patch {name}: {state} ({patched['reasons'][name]})", 110, subsequent_indent="    "
            )
        )
    return GOOD


def list_patches(arguments: argparse.Namespace) -> int:
    patches = load_patches()
    if arguments.json:
        rows = [
            {
                "name": p.name,
                "target": p.target,
                "versions": dict(p.versions),
                "summary": p.summary,
                "digests": {symbol: dict(accepted) for symbol, accepted in p.digests.items()},
            }
            for p in patches
        ]
        print(json.dumps(rows, indent=2))
        return GOOD
    for patch in patches:
        print(f"{patch.name}\n    " + ", ".join(f"{d} {spec}" for d, spec in patch.versions.items()) + "\n")
        print(textwrap.indent(patch.summary.strip(), "    ") + "\n")
    return GOOD


def print_fingerprints(arguments: argparse.Namespace) -> int:
    symbols = list(arguments.symbols)
    accepted: dict[str, Any] = {}
    for patch in load_patches():
        accepted.update(patch.digests)
    bad = 0
    for symbol in symbols or accepted:
        try:
            digest = fingerprint.of_symbol(symbol)
        except fingerprint.NoSource as e:
            print(f"{symbol}\n    no digest: {e}")
            bad += 1
            continue
        known = accepted.get(symbol, {}).get(digest)
        print(f"{symbol}\n    {digest}  {known or ('unknown' if symbol in accepted else '')}".rstrip())
        bad += symbol in accepted and known is None
    return WRONG if bad else GOOD


def build(arguments: argparse.Namespace) -> int:
    kernels = importlib.import_module(BUILD_MODULE)
    try:
        specs = [kernels.parse_spec(text) for text in arguments.spec]
        built = kernels.prebuild(specs, arguments.arch.split(","), Path(arguments.out))
    except (kernels.BuildError, ValueError) as e:
        print(f"vllm-specpatch build: {e}", file=sys.stderr)
        return WRONG
    for one in built:
        print(one)
    print(f"set {kernels.PREBUILT_ENV}={Path(arguments.out).absolute()} where vLLM runs")
    return GOOD


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="vllm-specpatch", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    top.add_argument("--version", action="version", version=f"vllm-specpatch {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    p = commands.add_parser(
        "predict", help="what the installed vLLM decides without and with the patches, side by side"
    )
    p.add_argument("--gpu", help="simulate this capability, for example sm_86 (default: the real GPU)")
    p.add_argument("--k", type=int, default=7, help="num_speculative_tokens (default 7)")
    p.add_argument("--method", default="eagle", choices=("eagle", "ngram", "none"))
    p.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's option (default auto)")
    p.add_argument(
        "--cubins",
        default="auto",
        choices=("auto", "yes", "no"),
        help="whether trtllm-gen and XQA kernels can be fetched (default: vLLM's own check)",
    )
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=predict)

    p = commands.add_parser("list", help="the patches: what, why, how, upstream, until when")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=list_patches)

    p = commands.add_parser(
        "fingerprint", help="digests of the installed sources, and whether they are known"
    )
    p.add_argument("symbols", nargs="*", metavar="MODULE:QUALNAME")
    p.set_defaults(run=print_fingerprints)
    p = commands.add_parser(
        "build", help="compile spec-mask modules ahead, on a machine with nvcc and no GPU"
    )
    p.add_argument("--arch", required=True, help="compute capabilities, for example 8.0,8.6,8.9,9.0a")
    p.add_argument(
        "--spec",
        required=True,
        action="append",
        help="query dtype/KV dtype/head_dim/group size, for example bf16/fp8_e4m3/128/g4; repeatable",
    )
    p.add_argument("--out", required=True, help="folder for the modules")
    p.set_defaults(run=build)

    doctor.add_parser(commands)
    checklog.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        return GOOD


if __name__ == "__main__":
    sys.exit(main())
