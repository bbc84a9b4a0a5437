"""What vLLM's own attention layer computes on built batches, in numbers, against dense attention.

Kernels need a GPU; here the reference computes from exactly what the kernels would be handed: the plan's
lengths and the block table for decodes of route spec_mask, FlashInfer's index lists for everything else.
Batches are random mixtures of decodes, prefills and padding, causal or, for a drafter that may have such
blocks, not; a row that was planned wrongly, twice or not at all gives other numbers.
"""

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_specpatch.kernels import reference, spec_mask
from vllm_specpatch.patches import native, routes

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


#: By FlashInfer's MaskMode.
MASKS = {0: "full", 1: "causal"}


def reference_run(plan, q, k_cache, v_cache, table, *, out, sm_scale, layout, **_):
    assert table.stride(0) == plan.shape["page_table_stride"]
    assert k_cache.shape[1 if layout == "NHD" else 2] * table.shape[1] >= plan.shape["max_kv_len"]
    made, _ = reference.attention(
        q,
        k_cache,
        v_cache,
        table,
        plan.lengths,
        plan.starts,
        mask=plan.shape["mask"],
        sm_scale=sm_scale,
        layout=layout,
        out=out,
    )
    out.copy_(made)
    return out


def paged_run(_recorder, _float, _int, _info, q, k_cache, v_cache, qo_indptr, kv_indptr, *others):
    """FlashInfer's compiled function, from the lists that its host plan works on."""
    import torch

    kv_indices, last, out, _, mask_mode = others[:5]
    starts, pages, last = qo_indptr.tolist(), kv_indptr.tolist(), last.tolist()
    counts = differences(pages)
    lengths = [(n - 1) * PAGE + rest if n else 0 for n, rest in zip(counts, last, strict=False)]
    table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    for i, (first, n) in enumerate(zip(pages, counts, strict=False)):
        table[i, :n] = kv_indices[first : first + n]
    layout = "HND" if k_cache.shape[1] == KV_HEADS else "NHD"
    made, _ = reference.attention(
        q, k_cache, v_cache, table, lengths, starts, mask=MASKS[mask_mode], layout=layout, out=out
    )
    out.copy_(made)


@pytest.fixture
def numbers(any_route_bench, recorders, recorder_class, loaded, monkeypatch, set_route):
    """route name -> (bench, one KV cache of random numbers)."""
    import torch

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


#: A long row behind the decodes that verifies drafts. Rare among random ones.
INEXACT = ([4, 2, 9], [20, 33, 50], 2, 0, [3, 3, 5], [False] * 3, "bound")


def common_of(b, batch, causal):
    """The batch as a runner sends it: lengths on the host not at all, as an upper bound, or exactly."""
    import torch

    q_lens, seq_lens, _, padding, slack, prefilling, host = batch
    tokens = sum(q_lens) + padding * (K + 1)
    common = b.batch([*q_lens, *[0] * padding], [*seq_lens, *[0] * padding], tokens, causal)
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
@pytest.mark.parametrize(
    ("route", "drafter"), [("spec_mask", "causal"), ("spec_mask", "non-causal"), ("native", "causal")]
)
def test_attention_over_random_batches(numbers, route, drafter, layout, request):
    import torch

    heads_first = request.getfixturevalue("heads_first") if layout == "HND" else None
    causalities = (True,) if drafter == "causal" else (True, False)

    def change(config):
        config.attention_config.use_non_causal = drafter != "causal"
        if heads_first is not None:
            heads_first(config)

    b, cache = numbers(route, change)
    if route == "spec_mask":
        assert b.builder.specpatch_route.layout == layout
    for requests in (2, 4, 6):
        for causal in causalities:
            b.build([K + 1] * requests, [K + 1] * requests, causal=causal, capture=True)
    layer = b.config.compilation_config.static_forward_context[b.layers[0]]
    seen = []

    examples = 100 + 50 * len(causalities)

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(batches(), st.sampled_from(causalities))
    @example(INEXACT, causalities[0])
    @example(INEXACT, causalities[-1])
    def check(batch, causal):
        q_lens, seq_lens, decodes, padding, slack, prefilling, host = batch
        common = common_of(b, batch, causal)
        with b.current(b.config):
            metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
            assert metadata.causal is causal
            assert route == "native" or metadata.num_decodes == decodes + padding
            rows = common.num_actual_tokens
            q = torch.randn(rows, HEADS, HEAD_DIM).bfloat16()
            k, v = (torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
            out = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
            layer.impl.forward(layer, q, k, v, cache, metadata, out)
        key, value = halves(cache)
        real = sum(q_lens)
        wanted, _ = reference.attention(
            q[:real],
            key,
            value,
            common.block_table_tensor,
            seq_lens,
            common.query_start_loc.tolist()[: len(q_lens) + 1],
            mask="causal" if causal else "full",
            sm_scale=HEAD_DIM**-0.5,
        )
        torch.testing.assert_close(out[:real].double(), wanted, rtol=2e-2, atol=2e-2)
        behind = prefilling[decodes:]
        inexact = host == "bound" and any(n and not p for n, p in zip(slack[decodes:], behind, strict=True))
        ragged = len(set(q_lens[:decodes])) > 1
        seen.append((causal, decodes > 0, len(behind) > 0, padding > 0, ragged, inexact))

    check()
    for causal in causalities:
        these = [kinds for was, *kinds in seen if was is causal]
        assert any(decodes and behind for decodes, behind, *_ in these), "no mixed batch came"
        assert any(behind and not decodes for decodes, behind, *_ in these), "no prefills alone"
        assert any(padding for _, _, padding, *_ in these) and any(ragged for *_, ragged, _ in these)
        assert any(decodes and inexact for decodes, *_, inexact in these), "no row whose bound is not exact"


def evenly(total, requests):
    """Query lengths as the host has them where drafts are trimmed on the device."""
    return [total // requests + (i < total % requests) for i in range(requests)]


class Graph:
    """The runner's persistent buffers, and the metadata that a graph over them was captured with."""

    def __init__(self, b, requests, tokens):
        self.b, self.requests, self.tokens = b, requests, tokens
        self.common = self.batch(evenly(tokens, requests), evenly(tokens, requests))
        with b.current(b.config):
            self.metadata = b.builder.build_for_cudagraph_capture(self.common)

    def batch(self, host, seq_lens):
        padding = [0] * (self.requests - len(host))
        common = self.b.batch([*host, *padding], [*seq_lens, *padding], self.tokens)
        return common.replace(max_query_len=K + 1)  # an upper bound, from before the drafts were trimmed

    def replay(self, forward, q_lens, seq_lens):
        """What the host builds for a batch, and the output of the graph with the batch in its buffers."""
        of_host = self.batch(evenly(sum(q_lens), len(q_lens)), seq_lens)
        metadata = self.b.builder.build(common_prefix_len=0, common_attn_metadata=of_host)
        for name in ("seq_lens", "block_table_tensor"):
            getattr(self.common, name).copy_(getattr(of_host, name))
        starts = [*itertools.accumulate(q_lens, initial=0)]
        starts += [starts[-1]] * (self.requests - len(q_lens))
        self.common.query_start_loc.copy_(self.common.query_start_loc.new_tensor(starts))
        return metadata, forward(self.metadata)


@st.composite
def trimmed(draw):
    """(requests of the graph, its tokens, rows of each request, its tokens): what drafts are left is decided
    on the device."""
    requests, tokens = draw(st.sampled_from(((2, 2), (3, 5), (6, 10), (6, 24))))
    q_lens = []
    for _ in range(draw(st.integers(1, requests))):
        room = tokens - sum(q_lens)
        if room:
            q_lens.append(draw(st.integers(1, min(K + 1, room))))
    return requests, tokens, q_lens, [q + draw(st.integers(0, 60)) for q in q_lens]


@st.composite
def padded(draw):
    """As :func:`trimmed`, of graphs of equal rows: fewer requests than were captured."""
    requests = draw(st.sampled_from((2, 4, 6)))
    q_lens = [K + 1] * draw(st.integers(1, requests))
    return requests, requests * (K + 1), q_lens, [q + draw(st.integers(0, 60)) for q in q_lens]


def test_a_graph_replays_what_is_in_its_buffers(numbers):
    replays_are_right(*numbers("spec_mask"), padded(), graphs=3, differs=(False, True, True))


def test_a_ragged_graph_replays_any_split_of_its_tokens(numbers, adaptive):
    """Adaptive verification (vLLM 0.31 and later): the host's query lengths are only their even split."""
    replays_are_right(*numbers("spec_mask", adaptive), trimmed(), graphs=4, differs=(True, True, True))


def replays_are_right(b, cache, batches, graphs, differs):
    """``graphs``: how many shapes ``batches`` has; ``differs``: whether it brings splits that are not even,
    fewer requests, fewer tokens."""
    import torch

    number = graphs
    key, value = halves(cache)
    layer = b.config.compilation_config.static_forward_context[b.layers[0]]
    graphs, seen = {}, []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(batches)
    def check(batch):
        requests, tokens, q_lens, seq_lens = batch
        if (requests, tokens) not in graphs:
            graphs[requests, tokens] = Graph(b, requests, tokens)
        graph = graphs[requests, tokens]
        q = torch.randn(tokens, HEADS, HEAD_DIM).bfloat16()

        def forward(metadata):
            k, v = (torch.zeros(tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
            out = torch.zeros(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16)
            layer.impl.forward(layer, q, k, v, cache, metadata, out)
            return out

        with b.current(b.config):
            metadata, out = graph.replay(forward, q_lens, seq_lens)
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (requests, tokens)
        starts, real = [*itertools.accumulate(q_lens, initial=0)], sum(q_lens)
        table = graph.common.block_table_tensor
        wanted, _ = reference.attention(
            q[:real], key, value, table, seq_lens, starts, sm_scale=HEAD_DIM**-0.5
        )
        torch.testing.assert_close(out[:real].double(), wanted, rtol=2e-2, atol=2e-2)
        assert not out[real:].any(), "rows of no request were written"
        seen.append((q_lens != evenly(real, len(q_lens)), len(q_lens) < requests, real < tokens))

    check()
    assert tuple(any(kinds) for kinds in zip(*seen, strict=True)) == differs
    assert len({id(graph.metadata.decode.wrapper.plan) for graph in graphs.values()}) == len(graphs) == number


def halves(cache):
    """K and V, as NHD, of a cache that interleaves them by page, or from vLLM 0.26 by token
    (``[pages, heads, tokens, 2 * head_dim]``)."""
    if cache.dim() == 5:
        return cache[:, 0], cache[:, 1]
    tokens = cache.transpose(1, 2)
    return tokens[..., :HEAD_DIM], tokens[..., HEAD_DIM:]
