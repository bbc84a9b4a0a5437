"""What vLLM's own attention layer computes on built batches, in numbers, against dense attention.

Kernels need a GPU; here the reference computes from exactly what the kernels would be handed: the plan's
lengths and the block table for decodes of route spec_mask, FlashInfer's index lists for everything else.
Batches are random mixtures of decodes, prefills and padding; a row that was planned wrongly, twice or not at
all gives other numbers.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_specpatch.kernels import reference, spec_mask
from vllm_specpatch.patches import native, routes, spec_mask_route

HEADS, KV_HEADS, HEAD_DIM, PAGE, K = 4, 2, 128, 16, 3
PAGES = 1600


def differences(numbers):
    return [b - a for a, b in itertools.pairwise(numbers)]


class ReferencePlan:
    def __init__(self, module, **shape):
        import torch

        self.shape = shape
        self.partial_o, self.partial_lse = torch.empty(shape["max_rows"], 1), torch.empty(1)

    def update(self, seq_lens, query_start_loc):
        # Copies, as the planner makes them.
        self.lengths, self.starts = seq_lens.tolist(), query_start_loc.tolist()
        assert len(self.lengths) <= self.shape["max_requests"]
        assert self.starts[-1] <= self.shape["max_rows"]
        assert all(n <= self.shape["max_q_len"] for n in differences(self.starts))


def reference_run(plan, q, k_cache, v_cache, table, *, out, sm_scale, layout, **_):
    assert table.stride(0) == plan.shape["page_table_stride"]
    assert k_cache.shape[1 if layout == "NHD" else 2] * table.shape[1] >= plan.shape["max_kv_len"]
    made, _ = reference.attention(
        q, k_cache, v_cache, table, plan.lengths, plan.starts, sm_scale=sm_scale, layout=layout, out=out
    )
    out.copy_(made)
    return out


def paged_run(_recorder, _float, _int, _info, q, k_cache, v_cache, qo_indptr, kv_indptr, *others):
    """FlashInfer's compiled function, from the lists that its host plan works on."""
    import torch

    kv_indices, last, out = others[:3]
    starts, pages, last = qo_indptr.tolist(), kv_indptr.tolist(), last.tolist()
    counts = differences(pages)
    lengths = [(n - 1) * PAGE + rest if n else 0 for n, rest in zip(counts, last, strict=False)]
    table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    for i, (first, n) in enumerate(zip(pages, counts, strict=False)):
        table[i, :n] = kv_indices[first : first + n]
    layout = "HND" if k_cache.shape[1] == KV_HEADS else "NHD"
    made, _ = reference.attention(q, k_cache, v_cache, table, lengths, starts, layout=layout, out=out)
    out.copy_(made)


@pytest.fixture
def numbers(any_route_bench, recorders, recorder_class, monkeypatch, set_route):
    """route name -> (bench, one KV cache of random numbers)."""
    import torch

    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
    monkeypatch.setattr(spec_mask, "load", lambda spec, before_build=None: SimpleNamespace(spec=spec))
    monkeypatch.setattr(spec_mask, "Plan", ReferencePlan)
    monkeypatch.setattr(spec_mask, "run", reference_run)
    monkeypatch.setattr(recorder_class, "paged_run", paged_run, raising=False)

    def make(route, change=None):
        if route == "native" and native.NativeRoute.why_not() is not None:
            pytest.skip("FlashInfer before 0.6.16")
        set_route(route)
        monkeypatch.setattr(routes, "AUTO", (route,))
        b = any_route_bench(k=K, change=change)
        if b.builder.specpatch_route is None or b.builder.specpatch_route.name != route:
            pytest.skip(f"route {route} does not serve on this release and GPU")
        torch.manual_seed(0)
        cache = b.kv_cache(PAGES)
        cache.copy_(torch.randn(cache.shape).to(cache.dtype))
        return b, cache

    return make


@st.composite
def batches(draw):
    """(q_lens, seq_lens, decodes, padded requests, slack of the host's bound, prefilling rows, what the host
    knows). A long row that is not prefilling verifies more drafts than usual: its bound is not exact."""
    decodes = draw(st.integers(0, 6))
    uniform = draw(st.booleans())
    prefills = 0 if decodes and draw(st.booleans()) else draw(st.integers(0 if decodes else 1, 3))
    q_lens = [K + 1 if uniform else draw(st.integers(1, K + 1)) for _ in range(decodes)]
    q_lens += [draw(st.integers(K + 2, 40)) for _ in range(prefills)]
    seq_lens = [q + draw(st.integers(0, 60)) for q in q_lens]
    prefilling = [False] * decodes + [draw(st.sampled_from((True, True, False))) for _ in range(prefills)]
    slack = [0 if exact else draw(st.integers(0, 20)) for exact in prefilling]
    padding = draw(st.integers(0, 2)) if uniform and decodes and not prefills else 0
    host = draw(st.sampled_from(["bound", "nothing", "exact"]))
    return q_lens, seq_lens, decodes, padding, slack, prefilling, host


def common_of(b, batch):
    """The batch as a runner sends it: lengths on the host not at all, as an upper bound, or exactly."""
    import torch

    q_lens, seq_lens, _, padding, slack, prefilling, host = batch
    tokens = sum(q_lens) + padding * (K + 1)
    common = b.batch([*q_lens, *[0] * padding], [*seq_lens, *[0] * padding], num_tokens=tokens)
    changes = {"is_prefilling": torch.tensor([*prefilling, *[False] * padding])}
    if host != "nothing":
        changes["seq_lens_cpu_upper_bound"] = common.seq_lens + torch.tensor(
            [*slack, *[0] * padding], dtype=torch.int32
        )
    if host == "exact":
        changes["_seq_lens_cpu"] = common.seq_lens.clone()
    known = {field.name for field in dataclasses.fields(common)}
    return common.replace(**{name: value for name, value in changes.items() if name in known})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("route", ["spec_mask", "native"])
def test_attention_over_random_batches(numbers, route, layout, request):
    import torch

    b, cache = numbers(route, request.getfixturevalue("heads_first") if layout == "HND" else None)
    if route == "spec_mask":
        assert b.builder.specpatch_route.layout == layout
    for requests in (2, 4, 6):
        b.build([K + 1] * requests, [K + 1] * requests, capture=True)
    layer = b.config.compilation_config.static_forward_context[b.layers[0]]
    seen = []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(batches())
    def check(batch):
        q_lens, seq_lens, decodes, padding, slack, prefilling, host = batch
        common = common_of(b, batch)
        with b.current(b.config):
            metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
            rows = common.num_actual_tokens
            q = torch.randn(rows, HEADS, HEAD_DIM).bfloat16()
            k, v = (torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
            out = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
            layer.impl.forward(layer, q, k, v, cache, metadata, out)
        key, value = (cache[:, 0], cache[:, 1]) if cache.dim() == 5 else halves(cache)
        real = sum(q_lens)
        wanted, _ = reference.attention(
            q[:real],
            key,
            value,
            common.block_table_tensor,
            seq_lens,
            common.query_start_loc.tolist()[: len(q_lens) + 1],
            sm_scale=HEAD_DIM**-0.5,
        )
        torch.testing.assert_close(out[:real].double(), wanted, rtol=2e-2, atol=2e-2)
        behind = prefilling[decodes:]
        inexact = host == "bound" and any(n and not p for n, p in zip(slack[decodes:], behind, strict=True))
        ragged = len(set(q_lens[:decodes])) > 1
        seen.append((decodes > 0, len(behind) > 0, padding > 0, ragged, inexact))

    check()
    assert any(decodes and behind for decodes, behind, *_ in seen), "no mixed batch came"
    assert any(behind and not decodes for decodes, behind, *_ in seen), "no prefills alone"
    assert any(padding for _, _, padding, *_ in seen) and any(ragged for *_, ragged, _ in seen)
    assert any(decodes and inexact for decodes, *_, inexact in seen), "no row whose bound is not exact"


def halves(cache):
    """K and V of a cache that interleaves them by token, ``[pages, heads, tokens, 2 * head_dim]``, as NHD."""
    tokens = cache.transpose(1, 2)
    return tokens[..., :HEAD_DIM], tokens[..., HEAD_DIM:]
