"""Compiles single units without linking and reads registers and spills from ptxas; cached.

Results are kept outside the checkout, in VLLM_SPECPATCH_TEST_CACHE or ~/.cache/vllm-specpatch, under
a digest of the preprocessed text, so that a run compiles only what a change can have changed.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_specpatch.kernels import build

needs_nvcc = pytest.mark.skipif(
    build.find_nvcc() is None,
    reason="compiling the kernels needs nvcc; none in CUDA_HOME, PATH or /usr/local/cuda",
)
ARCHS = ("8.0", "8.6", "8.9", "9.0a")
JOBS = 2

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<sm>sm_\w+)'\n"
    r"(?:ptxas info\s+: Function properties.*\n)?"
    r"\s*\d+ bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r"ptxas info\s+: Used (?P<registers>\d+) registers"
)
KERNEL = re.compile(r"stream_kernelILNS\d?_8MaskModeE(\d)ELj(\d+)E")

# nvdisasm: a label, an instruction, its operation behind a predicate, a jump.
LABEL = re.compile(r"\s*\.(L_x_\d+):")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
OPERATION = re.compile(r"^(?:@!?U?P\w+ )?(\w+)")
JUMP = re.compile(r"\bBRA\b.*`\(\.(L_x_\d+)\)")


def cache_folder() -> Path:
    folder = os.environ.get("VLLM_SPECPATCH_TEST_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(folder) if folder else base / "vllm-specpatch"


def parse(log: str) -> list[dict]:
    """The attention kernels in ptxas output: mode, tile_q, registers, spilled bytes."""
    rows = []
    for entry in ENTRY.finditer(log):
        if kernel := KERNEL.search(entry["name"]):
            rows.append(
                {
                    "sm": entry["sm"],
                    "mode": int(kernel[1]),
                    "tile_q": int(kernel[2]),
                    "registers": int(entry["registers"]),
                    "spilled": int(entry["stores"]) + int(entry["loads"]),
                }
            )
    return rows


@functools.cache
def nvcc_version() -> str:
    return subprocess.run([build.find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def _headers(includes: list[Path]) -> str:
    """Digest of all headers a unit may include from the given folders."""
    digest = hashlib.sha256()
    for folder in includes:
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".cuh", ".h", ".cu", ".inc")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compile_unit(source: Path, flags: list[str], own: list[Path], packages: list[Path], key: str) -> str:
    """ptxas output of one unit. ``own`` are include folders whose contents decide the result;
    ``packages`` those of installed packages, which ``key`` stands for."""
    text = json.dumps([source.read_text(), flags, _headers(own), key, nvcc_version()])
    cached = cache_folder() / "ptxas" / f"{hashlib.sha256(text.encode()).hexdigest()}.log"
    if cached.exists():
        return cached.read_text()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                build.find_nvcc(),
                *flags,
                *[f"-I{p}" for p in own],
                *[f"-I{p}" for p in packages],
                "-Xptxas=-v",
                "-c",
                str(source),
                "-o",
                f"{folder}/unit.o",
            ],
            capture_output=True,
            text=True,
        )
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(log)
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_text(log)
    partial.replace(cached)
    return log


@dataclasses.dataclass
class Kernel:
    """Machine code of one attention kernel, an instruction a line, and its main loop."""

    code: list[str]
    loop: range

    def in_loop(self, *operations: str) -> list[str]:
        """The loop's instructions of these kinds, such as ``LDL``."""
        return [self.code[i] for i in self.loop if OPERATION.search(self.code[i])[1] in operations]


def disassemble(spec, arch: build.Arch, folder: Path, name: str) -> Kernel:
    """The kernel of one unit, by nvdisasm. The main loop is that of the shortest backward jump over all
    matrix products."""
    folder.mkdir(parents=True, exist_ok=True)
    source = next(s for s in build.write_sources(spec, arch, folder) if s.name == name)
    flags = nvcc_flags(arch)
    includes = [f"-I{p}" for p in (build.CSRC, folder, *package_includes(build.flashinfer_data()))]
    cubin = folder / f"{name}.cubin"
    subprocess.run(
        [build.find_nvcc(), *flags, *includes, "-cubin", "-o", str(cubin), str(source)],
        check=True,
        capture_output=True,
    )
    tool = importlib.metadata.distribution("nvidia-cuda-nvdisasm").locate_file("nvidia/cu13/bin/nvdisasm")
    text = subprocess.run([str(tool), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    code, labels = [], {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
    jumps = [(labels[m[1]], i) for i, line in enumerate(code) if (m := JUMP.search(line))]
    products = [i for i, line in enumerate(code) if "HMMA" in line]
    around = [(a, b) for a, b in jumps if a <= products[0] and products[-1] <= b]
    start, end = min(around, key=lambda jump: jump[1] - jump[0])
    return Kernel(code, range(start, end + 1))


def package_includes(data: Path) -> list[Path]:
    """Include folders of FlashInfer's data folder and of tvm_ffi."""
    tvm_ffi = Path(next(iter(importlib.util.find_spec("tvm_ffi").submodule_search_locations)))
    folders = (
        "include",
        "csrc",
        "cutlass/include",
        "spdlog/include",
        "cccl/cub",
        "cccl/libcudacxx/include",
        "cccl/thrust",
    )
    return [*(data / f for f in folders if (data / f).is_dir()), tvm_ffi / "include"]


def nvcc_flags(arch: build.Arch) -> list[str]:
    """Ours, and FlashInfer's (flashinfer/jit/cpp_ext.py) less the debug ones."""
    return [
        "-std=c++17",
        "-use_fast_math",
        "-O3",
        "-DNDEBUG",
        "-DFLASHINFER_ENABLE_F16",
        "-DFLASHINFER_ENABLE_BF16",
        "-DFLASHINFER_ENABLE_FP8_E4M3",
        "-DFLASHINFER_ENABLE_FP8_E5M2",
        "--compiler-options=-fPIC",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
        *build.cuda_flags(arch),
    ]


def compile_spec(spec, arch: build.Arch, folder: Path, *, version=None, data=None, only=None) -> list[dict]:
    """Kernels of a spec's units, compiled against a FlashInfer (the installed one by default).
    ``only`` names the units, such as ``{"unit_causal_16.cu"}``; binding.cu is compiled if named."""
    version = version or build.flashinfer_version()
    data = data or build.flashinfer_data()
    sources = [
        s
        for s in build.write_sources(spec, arch, folder)
        if (s.name in only if only is not None else s.name != "binding.cu")
    ]
    flags = nvcc_flags(arch)
    key = f"{version} {build.headers_digest(data)}"
    includes = package_includes(data)

    def one(source):
        return parse(compile_unit(source, flags, [build.CSRC, folder], includes, key))

    with ThreadPoolExecutor(JOBS) as pool:
        return [row for rows in pool.map(one, sources) for row in rows]
