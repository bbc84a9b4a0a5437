"""The checks of ``selftest --gpu`` that launch kernels, for one route, in a process of their own.

Run as ``python -P -m vllm_specpatch.selftest_gpu REQUEST`` (JSON: ``route``, ``geometry``, ``seed``). Prints
a ``RESULT`` line with one entry per check. A process per route, because a fault ends a CUDA context.

Attention is checked on a paged cache of vLLM's shape against the same operation in fp64 torch
(:mod:`vllm_specpatch.kernels.reference`). Pages of no token hold NaN, slots behind a request's end large
numbers.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import selftest_planner

KERNELS = selftest_planner.KERNELS
PAGE = 16
#: Roundings to the output's type on the way to a result: weights, partial outputs, the output.
ROUNDINGS = 3
LONG = 32773
WORKSPACE_BYTES = 256 << 20
#: Tests of the checks themselves run them on the CPU.
DEVICE = "cuda"


class CheckFailed(AssertionError):
    """A wrong result; the text says which."""


class Unavailable(RuntimeError):
    """This route cannot run here; the text is one line."""


@dataclass(frozen=True)
class Geometry:
    """Attention of one rank: ``dtype`` of queries and ``kv_dtype`` of the cache as torch names."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    q_len: int  # 1 + draft tokens


# -- batches -------------------------------------------------------------------------------------------


class Batch:
    """Queries and a paged cache, random or (``zero``) all zeros, and where everything is. ``layout``: "NHD",
    "HND"."""

    def __init__(
        self,
        geometry: Geometry,
        q_lens: Sequence[int],
        lens: Sequence[int],
        layout: str,
        seed: int,
        zero: bool = False,
    ) -> None:
        import torch

        self.geometry, self.layout = geometry, layout
        self.q_lens, self.lens = list(q_lens), list(lens)
        self.start = [0, *itertools.accumulate(q_lens)]
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        pages = [-(-n // PAGE) for n in lens]
        spare = 2
        order = list(range(sum(pages) + spare))
        random.Random(seed).shuffle(order)
        self.table = torch.full((len(lens), max(pages)), order[-1], dtype=torch.int32)
        for i, (at, n) in enumerate(zip(itertools.accumulate([0, *pages]), pages)):
            self.table[i, :n] = torch.tensor(order[at : at + n], dtype=torch.int32)
        self.pages = pages
        shape = (len(order), 2, PAGE, geometry.kv_heads, geometry.head_dim)
        kind = getattr(torch, geometry.kv_dtype)
        tokens = torch.randn(shape, generator=generator, device=DEVICE) * (not zero)
        for i, n in enumerate(lens):
            if n % PAGE:
                tokens[int(self.table[i, pages[i] - 1]), :, n % PAGE :] = 240.0
        tokens[order[-spare:]] = float("nan")
        cache = tokens.to(kind)
        if layout == "HND":
            cache = raw(raw(cache).transpose(2, 3).contiguous(), kind)
        self.cache = cache
        self.table = self.table.to(DEVICE)
        rows = self.start[-1]
        self.q = torch.randn(rows, geometry.heads, geometry.head_dim, generator=generator, device=DEVICE)
        self.q = self.q.to(getattr(torch, geometry.dtype))

    @property
    def k(self) -> Any:
        return self.cache[:, 0]

    @property
    def v(self) -> Any:
        return self.cache[:, 1]

    def slot(self, half: int, request: int, token: int) -> Any:
        """``[kv_heads, head_dim]`` of one token as bytes or 16-bit words, writable."""
        page, at = int(self.table[request, token // PAGE]), token % PAGE
        view = raw(self.cache)
        return view[page, half, at] if self.layout == "NHD" else view[page, half, :, at]

    def wanted(self, k_scale: float, v_scale: float) -> Any:
        reference = importlib.import_module(f"{KERNELS}.reference")
        return reference.attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.lens,
            self.start,
            k_scale=k_scale,
            v_scale=v_scale,
            layout=self.layout,
        )[0]


def raw(tensor: Any, kind: Any = None) -> Any:
    """fp8 tensors as bytes (torch indexes them nowhere), others as they are; back with ``kind``."""
    import torch

    if kind is not None:
        return tensor.view(kind)
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


# -- routes --------------------------------------------------------------------------------------------


def spec_of(geometry: Geometry) -> Any:
    """The kernels' Spec for a geometry, as route spec_mask asks for it. Raises their SpecMaskError."""
    return importlib.import_module(f"{KERNELS}.spec_mask").Spec(
        head_dim=geometry.head_dim,
        group_size=geometry.heads // geometry.kv_heads,
        dtype_q=geometry.dtype,
        dtype_kv=geometry.kv_dtype,
        max_q_len=geometry.q_len,
    )


class SpecMask:
    """The bundled kernels; a plan per batch shape, planned on the device."""

    ragged = True

    def __init__(self, geometry: Geometry) -> None:
        self._spec_mask = importlib.import_module(f"{KERNELS}.spec_mask")
        build = importlib.import_module(f"{KERNELS}.build")
        try:
            build.check_flashinfer()
            self.module = self._spec_mask.load(spec_of(geometry))
        except (build.BuildError, self._spec_mask.SpecMaskError) as e:
            raise Unavailable(str(e)) from None
        self.geometry = geometry

    def plan_for(self, batch: Batch) -> Any:
        return self._spec_mask.Plan(
            self.module,
            num_kv_heads=self.geometry.kv_heads,
            max_requests=len(batch.lens),
            max_rows=max(batch.start[-1], max(batch.q_lens)),
            max_q_len=max(batch.q_lens),
            max_kv_len=batch.table.shape[1] * PAGE,
            page_table_stride=batch.table.stride(0),
        )

    def attend(self, batch: Batch, k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
        import torch

        plan = self.plan_for(batch)
        plan.update(
            torch.tensor(batch.lens, dtype=torch.int32, device=DEVICE),
            torch.tensor(batch.start, dtype=torch.int32, device=DEVICE),
        )
        out = self.run(plan, batch, k_scale, v_scale)
        plan.check()
        return out

    def run(self, plan: Any, batch: Batch, k_scale: float, v_scale: float, out: Any = None) -> Any:
        return self._spec_mask.run(
            plan,
            batch.q,
            batch.k,
            batch.v,
            batch.table,
            k_scale=k_scale,
            v_scale=v_scale,
            layout=batch.layout,
            out=out,
        )


class Native:
    """FlashInfer's own multi-token decode plan, as route native uses it."""

    ragged = False

    def __init__(self, geometry: Geometry) -> None:
        import torch

        route = importlib.import_module("vllm_specpatch.patches.native").NativeRoute
        refusal = route.why_not()
        if refusal is not None:
            raise Unavailable(str(refusal))
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._wrapper = BatchDecodeWithPagedKVCacheWrapper
        # FlashInfer wants the workspace zeroed before its first use.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        self.geometry = geometry

    def attend(self, batch: Batch, k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
        import torch

        geometry = self.geometry
        wrapper = self._wrapper(self._workspace, batch.layout, use_tensor_cores=True, backend="fa2")
        int32 = {"dtype": torch.int32}
        pages = [batch.table[i, :n] for i, n in enumerate(batch.pages)]
        wrapper.plan(
            indptr=torch.tensor([0, *itertools.accumulate(batch.pages)], **int32),
            indices=torch.cat(pages),
            last_page_len=torch.tensor([(n - 1) % PAGE + 1 for n in batch.lens], **int32),
            num_qo_heads=geometry.heads,
            num_kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            page_size=PAGE,
            q_data_type=getattr(torch, geometry.dtype),
            kv_data_type=getattr(torch, geometry.kv_dtype),
            o_data_type=getattr(torch, geometry.dtype),
            q_len_per_req=batch.q_lens[0],
        )
        return wrapper.run(batch.q, (batch.k, batch.v), k_scale=k_scale, v_scale=v_scale)


ROUTES: dict[str, Any] = {"spec_mask": SpecMask, "native": Native}


# -- checks --------------------------------------------------------------------------------------------


def tolerance(dtype: str) -> float:
    """Largest relative error of a row: every rounding once, one more for few tokens that cancel."""
    import torch

    return (ROUNDINGS + 1) * torch.finfo(getattr(torch, dtype)).eps / 2 + 1e-4


def relative_error(out: Any, wanted: Any) -> float:
    """Largest relative error over rows and heads. Raises :class:`CheckFailed` for NaN."""
    import torch

    if bool(torch.isnan(out).any()):
        raise CheckFailed(f"{int(torch.isnan(out).sum())} NaN in the output")
    error = (out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    return float(error.max())


def cases(geometry: Geometry, ragged: bool) -> list[tuple[str, list[int], list[int], str]]:
    """(title, query lengths, KV lengths, layout). Every request holds its own query tokens."""
    q = geometry.q_len
    out = []
    for layout in ("NHD", "HND"):
        for rows in dict.fromkeys((q, 1)):
            lens = [rows, rows + 1, PAGE, PAGE + 1, 127 + rows, 1000, 4099]
            lens = [max(n, rows) for n in lens]
            out.append((f"{rows} rows, {layout}, 7 requests", [rows] * 7, lens, layout))
            out.append((f"{rows} rows, {layout}, {LONG} tokens", [rows], [LONG], layout))
            many = [max(rows, 37 * i % 700) for i in range(1, 33)]
            out.append((f"{rows} rows, {layout}, 32 requests", [rows] * 32, many, layout))
        if ragged and q > 1:
            rows_of = [1 + i % q for i in range(9)]
            lens = [max(n, 311 * i % 3000 + 1) for i, n in enumerate(rows_of)]
            out.append((f"1 to {q} rows, {layout}", rows_of, lens, layout))
    return out


def check_reference(route: Any, seed: int) -> str:
    geometry: Geometry = route.geometry
    limit, worst = tolerance(geometry.dtype), 0.0
    scales = (0.75, 1.5) if geometry.kv_dtype.startswith("float8") else (1.0, 1.0)
    listed = cases(geometry, route.ragged)
    for number, (title, q_lens, lens, layout) in enumerate(listed):
        batch = Batch(geometry, q_lens, lens, layout, seed + number)
        try:
            error = relative_error(route.attend(batch, *scales), batch.wanted(*scales))
        except CheckFailed as e:
            raise CheckFailed(f"{title}: {e}") from None
        if error > limit:
            raise CheckFailed(f"{title}: relative error {error:.1e}, wanted at most {limit:.1e}")
        worst = max(worst, error)
    return f"{len(listed)} batches against fp64, relative error up to {worst:.1e} (limit {limit:.1e})"


def check_needle(route: Any, seed: int) -> str:
    """One token takes all attention of every row that may see it; its value must come out, and nowhere
    else."""
    import torch

    geometry: Geometry = route.geometry
    q, dim = geometry.q_len, geometry.head_dim
    found = 0
    for layout, target in (("NHD", 1), ("HND", 0)):
        lens = [max(q, 37), LONG, max(q, 4096)] if target == 1 else [LONG]
        batch = Batch(geometry, [q] * len(lens), lens, layout, seed, zero=True)
        kind = getattr(torch, geometry.kv_dtype)
        # q.k is 16 * 16 and all other logits are 0: exp(256 / sqrt(dim)) outweighs any context.
        batch.q.zero_()
        batch.q[..., 0] = 16.0

        def at(index: int, value: float, kind: Any = kind) -> Any:
            """The same for every KV head: ``value`` at one place, zeros elsewhere."""
            heads = torch.zeros(geometry.kv_heads, dim, device=DEVICE)
            heads[:, index] = value
            return raw(heads.to(kind))

        key = at(0, 16.0)
        length = lens[target]
        spots = {0, 1, PAGE - 1, PAGE, 127, 128, length // 2, length // 3 // PAGE * PAGE, length - q - 1}
        spots |= set(range(length - q, length))
        for token in sorted(spots):
            mark = token % dim
            batch.slot(0, target, token).copy_(key)
            batch.slot(1, target, token).copy_(at(mark, 1.0))
            out = route.attend(batch).double()
            batch.slot(0, target, token).zero_()
            batch.slot(1, target, token).zero_()
            wanted = torch.zeros_like(out)
            first = batch.start[target]
            for row in range(q):
                if token <= length - q + row:
                    wanted[first + row, :, mark] = 1.0
            wrong = (out - wanted).abs() > 0.02
            if bool(wrong.any()) or bool(torch.isnan(out).any()):
                rows = sorted({int(r) - first for r in wrong.any(-1).any(-1).nonzero().flatten()})
                raise CheckFailed(
                    f"token {token} of {length}, {layout}: wrong in rows {rows} of the request (row 0 is "
                    "the query "
                    f"of token {length - q})"
                )
            found += 1
    return f"{found} needles in {LONG} tokens, each seen by the rows that may and by no other"


def check_graph(route: SpecMask, seed: int) -> str:
    """One captured graph under other lengths than it was captured with."""
    import torch

    geometry, q = route.geometry, route.geometry.q_len
    rng = random.Random(seed)
    batch = Batch(geometry, [q] * 4, [2048] * 4, "NHD", seed)
    seq_lens = torch.tensor(batch.lens, dtype=torch.int32, device=DEVICE)
    start = torch.tensor(batch.start, dtype=torch.int32, device=DEVICE)
    plan, out = route.plan_for(batch), torch.empty_like(batch.q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.update(seq_lens, start)
        route.run(plan, batch, 1.0, 1.0, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(seq_lens, start)
        route.run(plan, batch, 1.0, 1.0, out)
    replays = 20
    for number in range(replays):
        batch.lens = [rng.randint(q, 2048) for _ in range(4)]
        seq_lens.copy_(torch.tensor(batch.lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        error = relative_error(out, batch.wanted(1.0, 1.0))
        if error > tolerance(geometry.dtype):
            raise CheckFailed(f"replay {number}, lengths {batch.lens}: relative error {error:.1e}")
    return f"{replays} replays of one graph, each with other lengths"


def check_planner(route: SpecMask, seed: int) -> str:
    """The plan made on the GPU against the one of the same code on the CPU, list by list."""
    import torch

    spec_mask = importlib.import_module(f"{KERNELS}.spec_mask")
    rng, plans = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
        try:
            host = selftest_planner.HostPlanner(Path(folder))
        except selftest_planner.NoCompiler as e:
            raise Unavailable(str(e)) from None
        for requests in (1, 2, 5, 33, 64, 200):
            plan = spec_mask.Plan(
                route.module,
                num_kv_heads=route.geometry.kv_heads,
                max_requests=requests,
                max_rows=requests * route.geometry.q_len,
                max_q_len=route.geometry.q_len,
                max_kv_len=131072,
                page_table_stride=131072 // PAGE,
            )
            for _ in range(4):
                lens, start = selftest_planner.random_batch(rng, plan.shape)
                plan.update(
                    torch.tensor(lens, dtype=torch.int32, device=DEVICE),
                    torch.tensor(start, dtype=torch.int32, device=DEVICE),
                )
                plan.check()
                got = plan.lists()
                wanted = host.plan(plan.shape, lens, start, host.buffer(plan.buffer.numel()))
                used = wanted["header"][1]
                for name, values in wanted.items():
                    limit = used if name.endswith("_indices") else None
                    if got[name][:limit] != values[:limit]:
                        raise CheckFailed(f"{name} differs for seq_lens {lens}, query_start_loc {start}")
                plans += 1
    return f"{plans} plans of the GPU equal those of the CPU"


def checks_of(name: str) -> list[tuple[str, Callable[[Any, int], str]]]:
    common: list[tuple[str, Callable[[Any, int], str]]] = [
        ("reference", check_reference),
        ("needle", check_needle),
    ]
    if name == "spec_mask":
        common += [("planner on the GPU", check_planner), ("CUDA graph", check_graph)]
    return common


def entry(check: str, state: str, detail: str, started: float) -> dict[str, Any]:
    return {"check": check, "state": state, "detail": detail, "seconds": round(time.time() - started, 1)}


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """``{"gpu", "checks"}``, or ``{"cannot": one line}``."""
    import torch

    if not torch.cuda.is_available():
        return {"cannot": "no CUDA GPU is visible"}
    name = request["route"]
    geometry = Geometry(**request["geometry"])
    answer: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "checks": []}
    started = time.time()
    try:
        route = ROUTES[name](geometry)
    except Unavailable as e:
        answer["checks"].append(entry(f"{name}: reference", "skipped", str(e), started))
        return answer
    for title, check in checks_of(name):
        started = time.time()
        try:
            state, detail = "passed", check(route, request["seed"])
            torch.cuda.synchronize()
        except Unavailable as e:
            state, detail = "skipped", str(e)
        except Exception as e:
            said = next(iter(str(e).splitlines()), "")
            state = "failed"
            detail = said if isinstance(e, CheckFailed) else f"{type(e).__name__}: {said}"
        answer["checks"].append(entry(f"{name}: {title}", state, detail, started))
        if state == "failed" and "CUDA error" in detail:
            break  # the context is lost
    return answer


def main() -> None:
    print("RESULT " + json.dumps(measure(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
