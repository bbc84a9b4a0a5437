"""Makes a folder with all that gpu_check.py and gpu_bench.py need on a machine with a GPU and torch
but no compiler, no FlashInfer and no network.

    python benchmarks/spec_mask/pack.py --arch 9.0a --out build/gpu

Needs nvcc, torch, FlashInfer and tvm_ffi here; no GPU. The folder has run.sh and

    prebuilt/     the modules of specs.py (prebuild.py)
    native/       FlashInfer's own batch prefill modules for the geometries of gpu_bench.py
    site/         FlashInfer and tvm_ffi, less what only compiling needs

Copy the checkout and the folder, and there, in the root of the checkout:

    PYTHON=python3 /path/to/gpu/run.sh gpu_check.py --quick --out /tmp/results
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import checkout

checkout.use_checkout()

from specs import ALL_SPECS  # noqa: E402

from vllm_specpatch.kernels import build  # noqa: E402

RUN = """#!/bin/sh
# Usage, in the root of the checkout: run.sh gpu_check.py|gpu_bench.py|sanitize.sh [arguments]
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=
export VLLM_SPECPATCH_KERNELS="$here/prebuilt" FLASHINFER_AOT="$here/native" PYTHON="${PYTHON:-python3}"
script=$1
shift
case "$script" in
*.sh) exec sh "benchmarks/spec_mask/$script" "$@" ;;
*) exec "$PYTHON" "benchmarks/spec_mask/$script" "$@" ;;
esac
"""

# Builds FlashInfer's modules in a process of its own: the architecture is fixed at its import.
NATIVE = """
import shutil, sys
from pathlib import Path
import torch
from flashinfer.jit.attention.modules import gen_batch_prefill_module
from flashinfer.jit.xqa import gen_xqa_module
out = Path(sys.argv[1])
bf16 = torch.bfloat16
for head_dim, group in ((128, 4), (256, 6)):
    for dtype in (bf16, torch.float8_e4m3fn):
        wanted = [gen_batch_prefill_module(
            "fa2", bf16, dtype, bf16, torch.int32, head_dim, head_dim, 0, False, False, False)]
        for q_len in sys.argv[2:]:
            wanted.append(gen_xqa_module(bf16, dtype, 16, head_dim, group, False, bf16, int(q_len)))
        for jit in wanted:
            target = out / jit.name / f"{jit.name}.so"
            if not target.exists():
                jit.build(verbose=False)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(jit.jit_library_path, target)
            print(target.name, flush=True)
"""


def package(name: str) -> Path:
    return Path(next(iter(importlib.util.find_spec(name).submodule_search_locations)))


def fetch_tvm_ffi(site: Path, python: str) -> None:
    """The installed release of tvm_ffi for another Python: its core is compiled for one version of it, and
    fails elsewhere with "cannot import name 'core' from partially initialized module"."""
    version = importlib.metadata.version("apache-tvm-ffi")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--target", str(site), "--implementation", "cp", "--python-version", python]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 40)]
    subprocess.run([*command, f"apache-tvm-ffi=={version}"], check=True)


def copy_site(out: Path, python: str) -> None:
    """FlashInfer and tvm_ffi. Of FlashInfer's data the headers, whose digest is checked, and csrc, whose
    templates it fills in even for a module that is already built; not CUTLASS and CCCL."""
    site = out / "site"
    shutil.rmtree(site, ignore_errors=True)
    flashinfer, caches = package("flashinfer"), shutil.ignore_patterns("__pycache__")
    shutil.copytree(flashinfer, site / "flashinfer", ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("include", "csrc"):
        shutil.copytree(flashinfer / "data" / name, site / "flashinfer" / "data" / name, ignore=caches)
    fetch_tvm_ffi(site, python)
    for info in flashinfer.parent.glob("flashinfer_python-*.dist-info"):
        shutil.copytree(info, site / info.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="9.0a", help="one compute capability")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--python", default="3.12", help="Python of the machine with the GPU")
    parser.add_argument("--no-native", action="store_true", help="without FlashInfer's own modules")
    parser.add_argument("--xqa", default="", help='also XQA, for these query lengths: "1 8"')
    args = parser.parse_args()
    begin = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    built = build.prebuild(ALL_SPECS, [args.arch], args.out / "prebuilt")
    print(f"{len(built)} modules, {time.time() - begin:.0f} s", flush=True)
    if not args.no_native:
        stub = args.out / "stub"
        flags = " ".join(build.libcuda_stub(stub.absolute()))
        subprocess.run(
            [sys.executable, "-c", NATIVE, str(args.out / "native"), *args.xqa.split()],
            check=True,
            env={
                **os.environ,
                "FLASHINFER_CUDA_ARCH_LIST": build.Arch.parse(args.arch).name,
                "FLASHINFER_EXTRA_LDFLAGS": flags,
                "CUDA_HOME": build.cuda_home() or "",
            },
        )
        shutil.rmtree(stub, ignore_errors=True)
    copy_site(args.out, args.python)
    script = args.out / "run.sh"
    script.write_text(RUN)
    script.chmod(0o755)
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"{args.out}: {size / 2**20:.0f} MB, {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
