"""The split-KV planner of the kernels on the CPU: compiled from its header with g++, fed random batches.

The GPU runs the same header. :func:`violation` says what a plan must be from the attention kernel's point of
view: every (request, query tile, KV chunk) exactly once, every partial row written once and merged once.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KERNELS = "vllm_specpatch.kernels"
AUTO, FIXED, NONE = 0, 1, 2  # SplitMode in planner.cuh
GUARD = 8  # int32 behind the buffer's end that nobody may write
UNTOUCHED = -7

#: C interface to planner.cuh for ctypes, on one thread.
SHIM = """
#include <cstdint>
#include <vector>
#include "planner.cuh"
using namespace spec_mask;
extern "C" {
int32_t shape_fields() { return sizeof(PlanShape) / sizeof(int32_t); }
void sizes(PlanShape* shape, int64_t* out) {
  shape->grid = plan_grid(*shape);
  out[0] = shape->grid;
  out[1] = plan_layout(*shape).total;
  out[2] = max_partial_rows(*shape);
}
void plan(const PlanShape* shape, const int32_t* seq_lens, const int32_t* query_start_loc, int32_t requests,
          int32_t* buffer) {
  const PlanArrays arrays = plan_arrays(*shape, buffer);
  std::vector<int32_t> scratch(plan_scratch_elements(*shape), -1);
  SerialTeam team;
  make_plan(team, *shape, seq_lens, query_start_loc, requests, arrays, scratch.data());
}
}
"""


class NoCompiler(RuntimeError):
    """The planner cannot be compiled here; the text is one line."""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def raw_shape(shape: Mapping[str, int]) -> Any:
    """A shape as C++ has it, PlanShape."""
    fields = importlib.import_module(f"{KERNELS}.spec_mask").SHAPE_FIELDS
    return (ctypes.c_int32 * len(fields))(*(shape[field] for field in fields))


class HostPlanner:
    """The compiled planner. ``folder`` receives the library and must outlive the object. ``more``: C++ behind
    :data:`SHIM`; ``flags``: further ones of the compiler."""

    def __init__(self, folder: Path, more: str = "", flags: Sequence[str] = ()) -> None:
        found = compiler()
        if found is None:
            raise NoCompiler("wanted a C++20 compiler (g++, clang++), found none")
        self._spec_mask = importlib.import_module(f"{KERNELS}.spec_mask")
        csrc = importlib.import_module(f"{KERNELS}.build").CSRC
        source, library = folder / "planner.cpp", folder / "planner.so"
        source.write_text(SHIM + more)
        command = [
            found,
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            *flags,
            f"-I{csrc}",
            str(source),
            "-o",
            str(library),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise NoCompiler(f"{found} cannot compile the planner: {said}")
        self._library = ctypes.CDLL(str(library))
        fields = self._spec_mask.SHAPE_FIELDS
        if self._library.shape_fields() != len(fields):
            raise NoCompiler(f"the planner has {self._library.shape_fields()} fields, wanted {len(fields)}")

    def complete(self, shape: Mapping[str, int]) -> tuple[dict[str, int], int, int]:
        """The shape with its grid; int32 elements of a plan; rows of partial outputs."""
        out = (ctypes.c_int64 * 3)()
        self._library.sizes(raw_shape(shape), out)
        return {**shape, "grid": out[0]}, out[1], out[2]

    def buffer(self, elements: int) -> Any:
        """A plan's memory as another plan may have left it, with a guard behind its end."""
        return (ctypes.c_int32 * (elements + GUARD))(*([UNTOUCHED] * (elements + GUARD)))

    def plan(
        self, shape: Mapping[str, int], seq_lens: Sequence[int], start: Sequence[int], buffer: Any
    ) -> dict[str, list[int]]:
        """The named lists of a plan (``unpack`` of the kernels' ``spec_mask``)."""
        n = len(seq_lens)
        self._library.plan(
            raw_shape(shape), (ctypes.c_int32 * n)(*seq_lens), (ctypes.c_int32 * (n + 1))(*start), n, buffer
        )
        lists: dict[str, list[int]] = self._spec_mask.unpack(dict(shape), list(buffer)[:-GUARD])
        return lists


# -- random input --------------------------------------------------------------------------------------


def random_shape(
    rng: random.Random, group: int | None = None, max_q_len: int | None = None
) -> dict[str, int]:
    """A captured shape as Plan makes them, but with a cost model of any kind: a plan must be right
    regardless.

    ``group`` and ``max_q_len`` fix what is given."""
    spec_mask = importlib.import_module(f"{KERNELS}.spec_mask")
    group = group or rng.choice([1, 2, 4, 5, 6, 7, 8, 12, 16])
    q_len = max_q_len or rng.choice([1, 2, 3, 4, 8, 16, 33, 64])
    requests = rng.choice([1, 2, 3, 5, 8, 16, 33, 64, 200])
    granule = rng.choice([16, 32, 64, 128, 256])
    mode = rng.choice([AUTO, AUTO, AUTO, FIXED, NONE])
    return {
        "max_requests": requests,
        "max_rows": rng.randint(q_len, requests * q_len),
        "max_q_len": q_len,
        "group_size": group,
        "num_kv_heads": rng.choice([1, 2, 4, 8]),
        "tile_q": spec_mask.tile_q(q_len * group),
        "granule": granule,
        "min_chunk": max(granule, 128 // granule * granule),
        "window_left": rng.choice([-1, -1, 0, 127, 1024]),
        "max_kv_len": rng.choice([131072, 131072, 4096, 100]),
        "page_table_stride": rng.choice([1, 8192]),
        "split_mode": mode,
        "fixed_chunk": granule * rng.randint(8, 64) if mode == FIXED else 0,
        "wave_ctas": rng.choice([1, 5, 20, 33, 49, 264]),
        "num_sms": rng.choice([1, 58, 84, 108, 132]),
        "cta_tokens": rng.choice([0, 192, 5000]),
        "lone_percent": rng.choice([0, 100, 250]),
        "merge_tokens": rng.choice([0, 16, 1000]),
        "extra_waves": rng.randint(0, 3),
        "grid": 0,
    }


def random_batch(rng: random.Random, shape: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Admissible ``(seq_lens, query_start_loc)``, empty and longest requests among them."""
    requests, longest = rng.randint(1, shape["max_requests"]), shape["max_kv_len"]
    top = rng.choice([64, 4096, longest])
    lens = [
        min(longest, rng.choice([0, 1, 127, 128, 129, top, rng.randint(0, top)])) for _ in range(requests)
    ]
    left, rows = shape["max_rows"], []
    for _ in range(requests):
        rows.append(min(left, rng.choice([0, 1, shape["max_q_len"], rng.randint(0, shape["max_q_len"])])))
        left -= rows[-1]
    return lens, [0, *itertools.accumulate(rows)]


# -- what a plan must be -------------------------------------------------------------------------------


def chunks_of(shape: Mapping[str, int], rows: int, kv_len: int, chunk: int) -> int:
    """KV chunks the kernel works off for each query tile of a request."""
    if not rows:
        return 0
    if shape["split_mode"] == NONE:
        return 1
    tokens = max(kv_len, 1)
    if shape["window_left"] >= 0:
        tokens = min(tokens, min(shape["window_left"], tokens) + shape["tile_q"])  # as the kernel has it
    return math.ceil(tokens / chunk)


def violation(
    shape: Mapping[str, int],
    partial_rows: int,
    lens: Sequence[int],
    start: Sequence[int],
    plan: Mapping[str, Sequence[int]],
) -> str | None:
    """What is wrong with a plan, or None."""
    chunk, ctas, end, status, direct = plan["header"]
    rows = [b - a for a, b in zip(start, start[1:])]
    if status:
        return f"admissible lengths were refused with status {status}"
    if end != max((b for a, b in zip(start, start[1:]) if b > a), default=0):
        return f"the plan ends at row {end}"
    if chunk <= 0 or (shape["split_mode"] != NONE and chunk % shape["granule"]):
        return f"chunk size {chunk}"
    if ctas > shape["grid"] or list(plan["block_valid"]) != [1] * ctas + [0] * (shape["grid"] - ctas):
        return f"{ctas} CTAs in a grid of {shape['grid']}, or they are marked otherwise"
    chunks = [chunks_of(shape, q, kv, chunk) for q, kv in zip(rows, lens)]
    wanted = {
        (i, tile, piece)
        for i, q in enumerate(rows)
        for tile in range(math.ceil(q * shape["group_size"] / shape["tile_q"]))
        for piece in range(chunks[i])
    }
    names = ("request_indices", "qo_tile_indices", "kv_tile_indices")
    work = list(zip(*(plan[name][:ctas] for name in names)))
    if len(work) != len(wanted) or set(work) != wanted:
        return f"{len(work)} pieces of work, {len(wanted)} wanted, {len(set(work) & wanted)} of them right"
    used = [i for i, q in enumerate(rows) if q]
    for name, given in (("q_len", rows), ("kv_len", lens), ("q_start", start)):
        if any(plan[name][i] != given[i] for i in used):
            return f"{name} is not the batch's"
    if any(plan["q_len"][len(rows) :]):
        return "padding has rows"
    if bool(direct) != (max(chunks, default=0) <= 1):
        return f"direct output is {direct} with up to {max(chunks, default=0)} chunks"
    merge = list(zip(plan["merge_rows"][::2], plan["merge_rows"][1::2]))
    if direct:
        if any(plan["o_indptr"][i] != start[i] for i in used):
            return "direct output rows are not the batch's"
    else:
        written: list[int] = []
        for i, q in enumerate(rows):
            for r in range(q):
                first = plan["o_indptr"][i] + r * chunks[i]
                if merge[start[i] + r] != (first, chunks[i]):
                    return (
                        f"row {start[i] + r} merges {merge[start[i] + r]}, written were {(first, chunks[i])}"
                    )
                written += range(first, first + chunks[i])
        if len(written) != len(set(written)) or max(written, default=-1) >= partial_rows:
            return "partial rows overlap or lie outside the workspace"
    covered = {row for a, b in zip(start, start[1:]) for row in range(a, b)}
    if any(merge[row] != (0, 0) for row in range(shape["max_rows"]) if row not in covered):
        return "rows of no request are merged"
    return None


def fuzz(
    planner: HostPlanner, plans: int, seed: int, group: int | None = None, max_q_len: int | None = None
) -> str | None:
    """Checks ``plans`` plans, three per shape in one buffer, as under a captured graph. The first
    violation."""
    rng = random.Random(seed)
    for _ in range(-(-plans // 3)):
        shape, elements, partial_rows = planner.complete(random_shape(rng, group, max_q_len))
        buffer = planner.buffer(elements)
        for _ in range(3):
            lens, start = random_batch(rng, shape)
            plan = planner.plan(shape, lens, start, buffer)
            wrong = violation(shape, partial_rows, lens, start, plan)
            if list(buffer)[-GUARD:] != [UNTOUCHED] * GUARD:
                wrong = "the planner wrote past its buffer"
            if wrong:
                return f"{wrong}; shape {shape}, seq_lens {lens}, query_start_loc {start}"
    return None
