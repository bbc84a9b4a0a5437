"""Fixtures of the kernel tests: the planner compiled with g++ and a Python view of its plans."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_specpatch.kernels import build, spec_mask

HERE = Path(__file__).parent


class Planner:
    """csrc/planner.cuh behind ctypes."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        assert self.lib.shape_fields() == len(spec_mask.SHAPE_FIELDS)

    def _shape(self, shape: dict[str, int]) -> ctypes.Array:
        return (ctypes.c_int32 * len(spec_mask.SHAPE_FIELDS))(*(shape[f] for f in spec_mask.SHAPE_FIELDS))

    def complete(self, shape: dict[str, int]) -> tuple[dict[str, int], int, int]:
        """The shape with its grid, the buffer's int32 elements, the partial rows."""
        raw, out = self._shape(shape), (ctypes.c_int64 * 3)()
        self.lib.sizes(raw, out)
        return {**shape, "grid": out[0]}, out[1], out[2]

    def covered(self, shape: dict[str, int], kv_len: int) -> int:
        return self.lib.covered(self._shape(shape), kv_len)

    def new_buffer(self, elements: int) -> ctypes.Array:
        # Garbage, as after another plan, and a guard behind the end.
        return (ctypes.c_int32 * (elements + 8))(*([-7] * (elements + 8)))

    def plan(self, shape, seq_lens, query_start_loc, buffer, elements, threads=1) -> dict[str, list[int]]:
        requests = len(seq_lens)
        self.lib.plan(
            self._shape(shape),
            (ctypes.c_int32 * max(requests, 1))(*seq_lens),
            (ctypes.c_int32 * (requests + 1))(*query_start_loc),
            requests,
            buffer,
            threads,
        )
        assert list(buffer[elements:]) == [-7] * 8, "the planner wrote past its buffer"
        return spec_mask.unpack(shape, list(buffer[:elements]))


@pytest.fixture(scope="session")
def planner(tmp_path_factory) -> Planner:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the planner tests compile csrc/planner.cuh and found no g++")
    library = tmp_path_factory.mktemp("planner") / "planner.so"
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            f"-I{build.CSRC}",
            str(HERE / "planner_shim.cpp"),
            "-o",
            str(library),
        ],
        check=True,
    )
    return Planner(library)
