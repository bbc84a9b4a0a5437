"""Builds the modules that gpu_check.py and gpu_bench.py need into one folder.

    python benchmarks/spec_mask/prebuild.py --arch 9.0a --out build/kernels

Needs nvcc, no GPU. Afterwards set VLLM_SPECPATCH_KERNELS to the folder.
"""

import argparse
import time
from pathlib import Path

import checkout

checkout.use_checkout()

from specs import ALL_SPECS  # noqa: E402

from vllm_specpatch.kernels import build  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="9.0a", help="comma-separated compute capabilities")
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    args = parser.parse_args()
    begin = time.time()
    built = build.prebuild(ALL_SPECS, args.arch.split(","), args.out)
    size = sum(b.path.stat().st_size for b in built)
    print(f"{len(built)} modules, {size / 2**20:.1f} MB, {time.time() - begin:.0f} s, in {args.out}")


if __name__ == "__main__":
    main()
