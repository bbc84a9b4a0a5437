"""The real attention kernels on the CPU, compiled with g++, but for the PTX that FlashInfer wraps in mma.cuh,
cp_async.cuh and math.cuh: emulated/flashinfer_warp.h has that.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import ptxas
import torch

from vllm_specpatch.kernels import build, spec_mask
from vllm_specpatch.selftest_planner import GUARD, UNTOUCHED, HostPlanner, raw_shape

HERE = Path(__file__).parent
#: As a small GPU: grids stay small, and are still larger than one wave.
NUM_SMS, CTAS_PER_SM = 4, 2


def missing() -> str | None:
    """Why the kernels cannot be compiled here, or None."""
    if shutil.which("g++") is None:
        return "the emulated kernels are compiled with g++; found none"
    if build.cuda_home() is None:
        return "the emulated kernels need the headers of a CUDA toolkit; found none"
    return None


class Kernels:
    """The compiled kernels of a spec, and the planner that goes with them."""

    def __init__(self, spec, folder: Path, data: Path | None = None, arch: str = "8.6") -> None:
        """``data``: FlashInfer's data folder, of the installed release by default."""
        folder.mkdir(parents=True, exist_ok=True)
        self.spec, self.planner = spec, HostPlanner(folder)
        build.write_sources(spec, build.Arch.parse(arch), folder)
        own = [HERE / "emulated", build.CSRC, folder]
        data = data or build.flashinfer_data()
        packages = [*ptxas.package_includes(data), Path(build.cuda_home()) / "include"]
        includes = [*(f"-I{p}" for p in own), *(f for p in packages for f in ("-isystem", str(p)))]
        # The order that is cheapest where an instruction converts two neighbours.
        self.keys_in_order = spec.dtype_kv == "float8_e4m3fn" and arch >= "8.9"
        library = folder / "attention.so"
        # Variables are each library's own: two specs have different ones of the same name.
        flags = ["-std=c++20", "-O1", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-fno-gnu-unique"]
        source = str(HERE / "attention_shim.cpp")
        subprocess.run(["g++", *flags, *includes, source, "-o", str(library)], check=True)
        self.code = ctypes.CDLL(str(library))
        self.code.fault.restype = ctypes.c_char_p

    def convert(self, elements: bytes):
        """Pairs (places of the four elements, their fp64 values): of values, then of keys."""
        words = (ctypes.c_uint32 * 4)()
        power = self.code.convert(int.from_bytes(elements, "little"), words)
        halves = torch.frombuffer(bytearray(words), dtype=torch.float16).double() * 2.0**power
        apart = [0, 2, 1, 3]  # at even places, then at odd ones
        keys = [0, 1, 2, 3] if self.keys_in_order else apart
        return [(apart, halves[:4]), (keys, halves[4:])]


class Plan:
    """As :class:`vllm_specpatch.kernels.spec_mask.Plan`; ``module`` is :class:`Kernels`."""

    def __init__(
        self, module: Kernels, *, num_kv_heads, max_q_len, mask="causal", split="auto", device=None, **sizes
    ) -> None:
        self.module, self.mask = module, mask
        tile_kv = module.code.tile_kv(spec_mask._MASK_MODES[mask], module.spec.tile(max_q_len))
        facts = {"tile_kv": tile_kv, "num_sms": NUM_SMS, "ctas_per_sm": CTAS_PER_SM}
        sizes = {"num_kv_heads": num_kv_heads, "max_q_len": max_q_len, "window_left": -1, **sizes}
        shape = spec_mask.captured_shape(module.spec, facts, split, spec_mask.Tuning(), **sizes)
        self.shape, elements, partial_rows = module.planner.complete(shape)
        self.buffer = torch.full((elements + GUARD,), UNTOUCHED, dtype=torch.int32)
        heads, dtype = num_kv_heads * module.spec.group_size, getattr(torch, module.spec.dtype_q)
        self.partial_o = torch.full(
            (max(partial_rows, 1), heads, module.spec.head_dim), float("nan"), dtype=dtype
        )
        self.partial_lse = torch.full((max(partial_rows, 1), heads), float("nan"))

    def check(self) -> None:
        assert self.lists["header"][3] == 0, "the planner found fault with the lengths"

    def update(self, seq_lens, query_start_loc) -> None:
        memory = (ctypes.c_int32 * self.buffer.numel()).from_address(self.buffer.data_ptr())
        lengths = seq_lens.tolist(), query_start_loc.tolist()
        self.lists = self.module.planner.plan(self.shape, *lengths, memory)


def run(
    plan,
    q,
    k_cache,
    v_cache,
    page_table,
    *,
    mask=None,
    out=None,
    lse=None,
    sm_scale=None,
    k_scale=1.0,
    v_scale=1.0,
    soft_cap=0.0,
    layout="NHD",
):
    """As :func:`vllm_specpatch.kernels.spec_mask.run`."""
    code, spec = plan.module.code, plan.module.spec
    assert k_cache.stride() == v_cache.stride() and q.is_contiguous() and page_table.is_contiguous()
    out = torch.empty_like(q) if out is None else out

    def at(tensor):
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    strides = (ctypes.c_int64 * 4)(*k_cache.stride())
    scale = spec.head_dim**-0.5 if sm_scale is None else sm_scale
    numbers = (scale, float(k_scale), float(v_scale), soft_cap)
    failed = code.run(
        spec_mask._MASK_MODES[plan.mask],
        raw_shape(plan.shape),
        at(plan.buffer),
        at(plan.partial_o),
        at(plan.partial_lse),
        at(q),
        at(k_cache),
        at(v_cache),
        strides,
        layout == "HND",
        ctypes.c_int64(k_cache.shape[0]),
        k_cache.shape[2 if layout == "HND" else 1],
        at(page_table),
        at(mask),
        at(out),
        at(lse),
        q.shape[0],
        *(ctypes.c_float(x) for x in numbers),
        1,
    )
    if failed:
        raise RuntimeError(code.fault().decode())
    return out
