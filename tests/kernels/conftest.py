"""Fixtures of the kernel tests: the planner compiled with g++ and a Python view of its plans."""

import ctypes
import shutil
from pathlib import Path

import pytest

from vllm_specpatch.kernels import spec_mask
from vllm_specpatch.selftest_planner import GUARD, UNTOUCHED, HostPlanner

HERE = Path(__file__).parent
STRICT = ("-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")


class Planner(HostPlanner):
    """csrc/planner.cuh behind ctypes, on one thread or several."""

    def covered(self, shape: dict[str, int], kv_len: int) -> int:
        return self._library.covered(self._raw(shape), kv_len)

    def plan(self, shape, seq_lens, query_start_loc, buffer, elements, threads=1) -> dict[str, list[int]]:
        requests = len(seq_lens)
        arguments = (
            self._raw(shape),
            (ctypes.c_int32 * max(requests, 1))(*seq_lens),
            (ctypes.c_int32 * (requests + 1))(*query_start_loc),
            requests,
            buffer,
        )
        if threads == 1:
            self._library.plan(*arguments)
        else:
            self._library.plan_on_threads(*arguments, threads)
        assert list(buffer[elements:]) == [UNTOUCHED] * GUARD, "the planner wrote past its buffer"
        return spec_mask.unpack(shape, list(buffer[:elements]))


@pytest.fixture(scope="session")
def planner(tmp_path_factory) -> Planner:
    if shutil.which("g++") is None:
        pytest.skip("the planner tests compile csrc/planner.cuh and found no g++")
    shim = (HERE / "planner_shim.cpp").read_text()
    return Planner(tmp_path_factory.mktemp("planner"), shim, STRICT)
