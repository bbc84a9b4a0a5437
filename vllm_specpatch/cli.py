"""The ``vllm-specpatch`` command. Exit codes: 0 good, 1 something is wrong, 2 cannot tell."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, bench, checklog, doctor, fingerprint, predict, selftest
from .exit_codes import CANNOT_TELL, GOOD, WRONG
from .hooks import load_patches

#: The kernels' build module; a string, because the engine knows no kernel.
BUILD_MODULE = "vllm_specpatch.kernels.build"


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
    part_of: dict[str, str] = {}
    for patch in load_patches():
        accepted.update(patch.digests)
        for part, digests in patch.parts.items():
            part_of |= {symbol: part for symbol in digests if symbol not in patch.digests}
            accepted.update(digests)
    bad = 0
    for symbol in symbols or accepted:
        try:
            digest = fingerprint.of_symbol(symbol)
        except fingerprint.NoSource as e:
            print(f"{symbol}\n    no digest: {e}")
            bad += 1
            continue
        known = accepted.get(symbol, {}).get(digest)
        verdict = known or ("unknown" if symbol in accepted else "")
        only = f" (for {part_of[symbol]} only)" if symbol in part_of else ""
        print(f"{symbol}\n    {digest}  {verdict}{only}".rstrip())
        # Without a part the patch still applies. A symbol that nobody has is a slip of the pen.
        bad += symbol in accepted and symbol not in part_of and known is None
        bad += symbol not in accepted and digest == fingerprint.ABSENT
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

    predict.add_parser(commands)
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
        help="query dtype/KV dtype/head_dim/group size, for example bf16/fp8_e4m3/128/g4, then perhaps "
        "/qROWS (1 + the draft tokens, 16 if not given), masks, /window, /softcap, /words; repeatable",
    )
    p.add_argument("--out", required=True, help="folder for the modules")
    p.set_defaults(run=build)

    doctor.add_parser(commands)
    checklog.add_parser(commands)
    bench.add_parser(commands)
    selftest.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        return CANNOT_TELL  # whoever closed the pipe has not seen the verdict


if __name__ == "__main__":
    sys.exit(main())
