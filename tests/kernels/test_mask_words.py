"""Mask words and the reference's dense masks against each other and against plain rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specpatch.kernels import reference, spec_mask

torch = pytest.importorskip("torch")


def as_ints(words):
    return [w & (2**64 - 1) for w in words.tolist()]


def dense(words, q_len):
    return [[bool(w >> j & 1) for j in range(q_len)] for w in as_ints(words)]


@pytest.mark.parametrize("q_len", [1, 2, 8, 33, 63, 64])
def test_chain_and_full(q_len):
    assert dense(spec_mask.chain(q_len), q_len) == [[j <= r for j in range(q_len)] for r in range(q_len)]
    assert dense(spec_mask.full(q_len), q_len) == [[True] * q_len for _ in range(q_len)]
    assert spec_mask.chain(q_len).dtype == torch.int64
    assert all(w >> q_len == 0 for w in as_ints(spec_mask.full(q_len)))


@st.composite
def trees(draw):
    n = draw(st.integers(1, 64))
    return [draw(st.integers(-1, j - 1)) for j in range(n)]


@given(trees())
def test_tree_is_the_ancestor_relation(parents):
    words = spec_mask.tree(parents)
    for r, row in enumerate(dense(words, len(parents))):
        ancestors, node = set(), r
        while node >= 0:
            ancestors.add(node)
            node = parents[node]
        assert {j for j, seen in enumerate(row) if seen} == ancestors
    # A subset of the causal order: the causal kernels take it.
    chain = as_ints(spec_mask.chain(len(parents)))
    assert all(w & ~c == 0 for w, c in zip(as_ints(words), chain))


def test_a_chain_is_a_tree_without_branches():
    assert torch.equal(spec_mask.tree([-1, 0, 1, 2]), spec_mask.chain(4))


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 5], [-2], [], [-1] * 65])
def test_bad_trees_raise(parents):
    with pytest.raises(spec_mask.SpecMaskError, match="wanted .* found"):
        spec_mask.tree(parents)


@given(
    q_len=st.integers(1, 16),
    extra=st.integers(0, 40),
    window=st.sampled_from([-1, 0, 3, 100]),
    data=st.data(),
)
def test_visible(q_len, extra, window, data):
    """The dense mask of the reference, entry by entry from the definition."""
    mask = data.draw(st.sampled_from(spec_mask.MASKS))
    words = None
    if mask == "bits" or (mask == "causal" and data.draw(st.booleans())):
        words = [data.draw(st.integers(0, 2**64 - 1)) for _ in range(q_len)]
    kv_len = (
        data.draw(st.integers(0, q_len)) if mask != "causal" and data.draw(st.booleans()) else q_len + extra
    )
    got = reference.visible(q_len, kv_len, mask, words, window).tolist()
    prefix = kv_len - q_len
    for r in range(q_len):
        for t in range(kv_len):
            j = t - prefix
            expected = True
            if words is not None and j >= 0:
                expected = bool(words[r] >> j & 1)
            if mask == "causal":
                expected = expected and t <= prefix + r
            if window >= 0:
                expected = expected and t >= prefix + r - window
            assert got[r][t] == expected


def test_reference_against_torch_attention():
    """The oracle itself, on a case torch can compute."""
    torch.manual_seed(0)
    q_len, kv_len, heads, kv_heads, dim, page = 3, 37, 4, 2, 16, 8
    cache = torch.randn(9, 2, page, kv_heads, dim, dtype=torch.float64)
    table = torch.randperm(9, dtype=torch.int32)[None, :5]
    q = torch.randn(q_len, heads, dim, dtype=torch.float64)
    out, lse = reference.attention(q, cache[:, 0], cache[:, 1], table, [kv_len], [0, q_len])
    k, v = (cache[table[0].long(), h].reshape(-1, kv_heads, dim)[:kv_len] for h in (0, 1))
    causal = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(2, 0),
        v.transpose(0, 1).repeat_interleave(2, 0),
        causal,
    )
    assert torch.allclose(out, want.transpose(0, 1))
    logits = torch.einsum("rhd,thd->rht", q, k.repeat_interleave(2, 1)) / dim**0.5
    logits = logits.masked_fill(~causal[:, None], float("-inf"))
    assert torch.allclose(lse, torch.logsumexp(logits, -1) / torch.log(torch.tensor(2.0)).double())


def test_reference_hnd_is_the_transposed_cache():
    torch.manual_seed(1)
    cache = torch.randn(4, 2, 8, 2, 16)
    q = torch.randn(2, 4, 16)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    nhd = reference.attention(q, cache[:, 0], cache[:, 1], table, [20], [0, 2])
    swapped = cache.transpose(2, 3).contiguous()
    hnd = reference.attention(q, swapped[:, 0], swapped[:, 1], table, [20], [0, 2], layout="HND")
    assert torch.equal(nhd[0], hnd[0])


def test_reference_of_a_row_that_sees_nothing():
    cache = torch.full((1, 2, 8, 1, 16), float("nan"))
    cache[:, :, :2] = 1.0
    out, lse = reference.attention(
        torch.ones(2, 1, 16),
        cache[:, 0],
        cache[:, 1],
        torch.zeros(1, 1, dtype=torch.int32),
        [2],
        [0, 2],
        mask="bits",
        words=[0, 3],
    )
    assert torch.equal(out[0], torch.zeros(1, 16).double())
    assert lse[0, 0] == float("-inf")
    assert torch.allclose(out[1], torch.ones(1, 16).double())
