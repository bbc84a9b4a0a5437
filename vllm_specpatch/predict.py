"""``vllm-specpatch predict``: what the installed vLLM decides without and with the patches, on any
machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

from .exit_codes import CANNOT_TELL, GOOD
from .hooks import SERIES_MODULE
from .last_words import last_words

PROBE_MODULE = f"{SERIES_MODULE}.predict_probe"
PROBE_TIMEOUT_S = 300
ROWS = (
    ("support", "CUDA-graph support"),
    ("reorder_batch_threshold", "reorder_batch_threshold"),
    ("cudagraph_mode", "cudagraph_mode"),
    ("route", "route"),
)


class ProbeFailed(RuntimeError):
    """A probe process gave no result; the text is the last thing it said."""


def ask(side: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the probe process reports for ``side`` "stock" or "patched". Raises :class:`ProbeFailed`."""
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
    raise ProbeFailed(last_words(done.stderr or done.stdout) or f"exit code {done.returncode} without output")


def predict(arguments: argparse.Namespace) -> int:
    if arguments.k < 0:
        print(f"vllm-specpatch predict: --k: wanted 0 or more, found {arguments.k}", file=sys.stderr)
        return CANNOT_TELL
    options = {
        "gpu": arguments.gpu,
        "k": arguments.k,
        "method": arguments.method,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "cubins": {"auto": None, "yes": True, "no": False}[arguments.cubins],
    }
    try:
        stock, patched = ask("stock", options), ask("patched", options)
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
