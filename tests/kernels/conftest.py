"""Fixtures of the kernel tests: the planner and the merge compiled with g++, and a Python view of them."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_specpatch.kernels import build, spec_mask
from vllm_specpatch.selftest_planner import GUARD, UNTOUCHED, HostPlanner, raw_shape

HERE = Path(__file__).parent
STRICT = ("-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")


class Planner(HostPlanner):
    """csrc/planner.cuh behind ctypes, on one thread or several."""

    def chunks(self, covered: int, chunk: int) -> int:
        return self._library.chunks(covered, chunk)

    @property
    def max_kv_len(self) -> int:
        return self._library.max_kv_len()

    def covered(self, shape: dict[str, int], kv_len: int) -> int:
        return self._library.covered(raw_shape(shape), kv_len)

    def plan(
        self, shape, seq_lens, query_start_loc, buffer, elements, threads=1, teams=1
    ) -> dict[str, list[int]]:
        requests = len(seq_lens)
        arguments = (
            raw_shape(shape),
            (ctypes.c_int32 * max(requests, 1))(*seq_lens),
            (ctypes.c_int32 * (requests + 1))(*query_start_loc),
            requests,
            buffer,
        )
        if threads == teams == 1:
            self._library.plan(*arguments)
        else:
            self._library.plan_on_threads(*arguments, threads, teams)
        assert list(buffer[elements:]) == [UNTOUCHED] * GUARD, "the planner wrote past its buffer"
        return spec_mask.unpack(shape, list(buffer[:elements]))


@pytest.fixture(scope="session")
def planner(tmp_path_factory) -> Planner:
    if shutil.which("g++") is None:
        pytest.skip("the planner tests compile csrc/planner.cuh and found no g++")
    shim = (HERE / "planner_shim.cpp").read_text()
    return Planner(tmp_path_factory.mktemp("planner"), shim, STRICT)


class Device:
    """csrc/block_team.cuh and merge.cuh on emulated thread blocks (emulated/cuda_runtime.h)."""

    def __init__(self, folder: Path) -> None:
        library = folder / "device.so"
        include = [f"-I{path}" for path in (HERE / "emulated", build.CSRC)]
        # nvcc's pragmas are not g++'s.
        flags = ["-std=c++20", "-shared", "-fPIC", *STRICT, "-Wno-unknown-pragmas", *include]
        subprocess.run(["g++", *flags, str(HERE / "device_shim.cpp"), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.fault.restype = ctypes.c_char_p

    def _run(self, function: str, *arguments) -> None:
        if getattr(self._library, function)(*arguments):
            raise RuntimeError(self._library.fault().decode())

    def emulate(self, wrong: int, seed: int) -> list[int]:
        sums = (ctypes.c_int32 * 2)()
        self._run("emulate", wrong, seed, sums)
        return list(sums)

    def plan(
        self, shape, seq_lens, query_start_loc, buffer, elements, threads, blocks, seed
    ) -> dict[str, list[int]]:
        requests = len(seq_lens)
        self._run(
            "plan_on_block",
            raw_shape(shape),
            (ctypes.c_int32 * requests)(*seq_lens),
            (ctypes.c_int32 * (requests + 1))(*query_start_loc),
            requests,
            buffer,
            threads,
            blocks,
            seed,
        )
        assert list(buffer[elements:]) == [UNTOUCHED] * GUARD, "the planner wrote past its buffer"
        return spec_mask.unpack(shape, list(buffer[:elements]))

    def plan_launch(self, max_requests: int) -> tuple[int, int]:
        """(threads, blocks) of the planner's kernel."""
        out = (ctypes.c_int32 * 2)()
        self._library.plan_shape(max_requests, out)
        return out[0], out[1]

    def merge_launch(self, shape: dict[str, int], pairs: int, head_dim: int) -> tuple[int, int, int]:
        """(warps per pair, warps per block, blocks) of a merge of so many (row, head) pairs."""
        out = (ctypes.c_int32 * 3)()
        self._library.merge_shape(raw_shape(shape), ctypes.c_int64(pairs), head_dim, out)
        return tuple(out)

    def merge(self, launch, partial_o, partial_lse, direct, rows, out, lse, seed) -> None:
        """fp32 tensors as in csrc/merge.cuh; ``launch`` is as from merge_launch(), ``rows`` int32
        [num_rows, 2]; ``lse`` may be None."""
        num_rows, num_heads, head_dim = out.shape

        def pointer(tensor):
            assert tensor is None or tensor.is_contiguous()
            return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

        tensors = [pointer(t) for t in (partial_o, partial_lse)]
        ends = [pointer(t) for t in (rows, out, lse)]
        self._run("merge", head_dim, *launch, *tensors, direct, *ends, num_rows, num_heads, seed)


@pytest.fixture(scope="session")
def device(tmp_path_factory) -> Device:
    if shutil.which("g++") is None:
        pytest.skip("the emulated thread blocks are compiled with g++; found none")
    return Device(tmp_path_factory.mktemp("device"))
