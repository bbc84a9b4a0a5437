"""Device code of our own on emulated thread blocks: the planner's team and the merge."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import FUZZ, base_shape, batches, shapes

from vllm_specpatch.kernels.spec_mask import MAX_KV_LEN

torch = pytest.importorskip("torch")


# -- the emulation itself ------------------------------------------------------------------------------


def test_the_emulation_computes(device):
    assert [device.emulate(0, seed) for seed in range(20)] == [[1008, 1008]] * 20


@pytest.mark.parametrize(("wrong", "said"), [(1, "a lane that is not there"), (2, "that never come")])
def test_the_emulation_notices(device, wrong, said):
    with pytest.raises(RuntimeError, match=said):
        device.emulate(wrong, 0)


def test_the_emulation_shows_a_missing_barrier(device):
    right = device.emulate(0, 0)
    assert any(device.emulate(3, seed) != right for seed in range(5))


# -- the planner ---------------------------------------------------------------------------------------


@settings(FUZZ, max_examples=40)
@given(data=st.data())
def test_a_block_plans_what_one_thread_plans(planner, device, data):
    shape, elements, _ = planner.complete(data.draw(shapes()))
    lens, start = data.draw(batches(shape))
    one = planner.plan(shape, lens, start, planner.buffer(elements), elements)
    threads, blocks = device.plan_launch(shape["max_requests"])
    seed = data.draw(st.integers(0, 2**31))
    assert device.plan(shape, lens, start, planner.buffer(elements), elements, threads, blocks, seed) == one


@pytest.mark.parametrize("requests", [2, 5, 32, 100, 256, 1024])
def test_a_block_sums_lengths_without_loss(planner, device, requests):
    # Up to 2^24 - 1 tokens a request, where lengths end: more of all than a word of 32 bits counts.
    shape, elements, _ = planner.complete(
        base_shape(max_requests=requests, max_rows=64 * requests, max_q_len=64, max_kv_len=MAX_KV_LEN)
    )
    threads, blocks = device.plan_launch(requests)
    source = random.Random(requests)
    start = list(range(0, 64 * requests + 1, 64))
    for _ in range(5):
        lens = [source.randint(1, MAX_KV_LEN) for _ in range(requests)]
        one = planner.plan(shape, lens, start, planner.buffer(elements), elements)
        assert device.plan(shape, lens, start, planner.buffer(elements), elements, threads, blocks, 0) == one


# -- the merge -----------------------------------------------------------------------------------------

UNTOUCHED = 7.5
# (warps per pair, warps per block) of the kernels that there are.
KERNELS = [(16, 16), (8, 8), (4, 4), (2, 16), (2, 4), (1, 16), (1, 4)]


def merged(partial_o, partial_lse, rows):
    """What the merge must give, in fp64: outputs and base-2 LSEs; NaN where nothing may be written."""
    num_heads, head_dim = partial_o.shape[1:]
    out = torch.full((len(rows), num_heads, head_dim), math.nan, dtype=torch.float64)
    lse = torch.full((len(rows), num_heads), math.nan, dtype=torch.float64)
    for row, (first, count) in enumerate(rows.tolist()):
        if not count:
            continue
        s = partial_lse[first : first + count].double()
        o = partial_o[first : first + count].double()
        top = s.amax(0)
        weights = torch.where(top == -math.inf, 0.0, torch.exp2(s - top.clamp(min=-1e30)))
        total = weights.sum(0)
        out[row] = (weights[..., None] * o.nan_to_num()).sum(0) / total.clamp(min=1e-30)[..., None]
        lse[row] = torch.where(total > 0, top + torch.log2(total), -math.inf)
    return out, lse


def partials(counts, num_heads, head_dim, seed):
    """Partial outputs of rows with so many chunks each, among them chunks and whole rows that see nothing."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    starts = [0, *itertools.accumulate(counts)][:-1]
    rows = torch.tensor([(s if c else 0, c) for s, c in zip(starts, counts)], dtype=torch.int32)
    o = torch.randn(max(total, 1), num_heads, head_dim, generator=generator)
    lse = 20 * torch.randn(max(total, 1), num_heads, generator=generator)
    blind = torch.rand(lse.shape, generator=generator) < 0.2
    for row, (first, count) in enumerate(rows.tolist()):
        if row % 5 == 4:
            blind[first : first + count, row % num_heads] = True
    # The attention kernel gives zeros and minus infinity where a row sees nothing.
    lse[blind] = -math.inf
    o[blind] = 0
    return o, lse, rows


@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "no lse"])
@pytest.mark.parametrize("walk", [False, True], ids=["a turn", "several turns"])
@pytest.mark.parametrize(("warps", "block_warps"), KERNELS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_merge(device, head_dim, warps, block_warps, walk, with_lse):
    num_heads = 5
    counts = [3, 0, 1, 40, 2, 17, 0, 8, 9, 5, 64, 1, 0]
    o, lse, rows = partials(counts, num_heads, head_dim, seed=warps + head_dim)
    pairs = len(counts) * num_heads
    blocks = 3 if walk else math.ceil(pairs * warps / block_warps)
    assert walk == (blocks * block_warps // warps < pairs)
    out = torch.full((len(counts), num_heads, head_dim), UNTOUCHED)
    out_lse = torch.full((len(counts), num_heads), UNTOUCHED)
    launch = (warps, block_warps, blocks)
    device.merge(launch, o, lse, 0, rows, out, out_lse if with_lse else None, seed=blocks)
    want, want_lse = merged(o, lse, rows)
    skipped = want.isnan()
    assert (out[skipped] == UNTOUCHED).all() and (out_lse[want_lse.isnan()] == UNTOUCHED).all()
    torch.testing.assert_close(out[~skipped].double(), want[~skipped], rtol=1e-5, atol=1e-6)
    if with_lse:
        seen = ~want_lse.isnan()
        torch.testing.assert_close(out_lse[seen].double(), want_lse[seen], rtol=1e-6, atol=1e-5)
    else:
        assert (out_lse == UNTOUCHED).all()


@pytest.mark.parametrize(("warps", "block_warps"), KERNELS)
@pytest.mark.parametrize("blocks", [1, 7])
def test_an_unsplit_plan_leaves_the_output_alone(device, warps, block_warps, blocks):
    """The LSEs are in the output's order then; a row that belongs to no request keeps what it had."""
    num_heads, head_dim = 6, 64
    counts = [1] * 150 + [0] * 50
    o, lse, _ = partials([1] * 200, num_heads, head_dim, seed=1)
    rows = torch.tensor([(r, c) for r, c in enumerate(counts)], dtype=torch.int32)
    out = torch.full((200, num_heads, head_dim), UNTOUCHED)
    out_lse = torch.full((200, num_heads), UNTOUCHED)
    device.merge((warps, block_warps, blocks), o, lse, 1, rows, out, out_lse, seed=3)
    assert (out == UNTOUCHED).all()
    assert torch.equal(out_lse[:150], lse[:150]) and (out_lse[150:] == UNTOUCHED).all()
    device.merge((warps, block_warps, blocks), o, lse, 1, rows, out, None, seed=3)
    assert (out == UNTOUCHED).all()


@settings(FUZZ)
@given(data=st.data())
def test_the_grid_of_a_merge(planner, device, data):
    """There is a kernel for it, every pair has a turn, and a block a place at once."""
    shape, _, _ = planner.complete(data.draw(shapes()))
    pairs = data.draw(st.integers(1, 2**31 - 1) | st.integers(1, 10000))
    head_dim = data.draw(st.sampled_from([64, 96, 128, 256]))
    warps, block_warps, blocks = device.merge_launch(shape, pairs, head_dim)
    assert (warps, block_warps) in KERNELS
    at_a_time = shape["num_sms"] * 32 // block_warps
    assert blocks == min(math.ceil(pairs * warps / block_warps), at_a_time)
    assert warps == 1 or warps * pairs <= 32 * shape["num_sms"]


def test_a_pair_has_as_many_warps_as_its_chunks_need(planner, device):
    """32 and more chunks of 128 elements: a warp asks for 8 at once. Of 256, for 4."""
    for requests, q_len, head_dim, want in (
        (1, 1, 128, (4, 4)),  # 33 chunks
        (1, 1, 256, (8, 8)),
        (4, 8, 128, (1, 4)),  # 8
        (4, 8, 256, (2, 4)),
        (8, 16, 128, (1, 16)),  # 4096 pairs
        (100, 1, 128, (1, 16)),
    ):
        sizes = {"max_requests": requests, "max_rows": requests * q_len, "max_q_len": q_len}
        shape, _, _ = planner.complete(base_shape(**sizes, tile_q=64, wave_ctas=33, num_sms=132))
        assert device.merge_launch(shape, requests * q_len * 32, head_dim)[:2] == want, (
            requests,
            q_len,
            head_dim,
        )
