"""Checks the kernels on a GPU against fp64 torch.

    python benchmarks/spec_mask/gpu_check.py --quick          about a minute
    python benchmarks/spec_mask/gpu_check.py --seconds 600    everything that fits, in a fixed order

Modules are found in VLLM_SPECPATCH_KERNELS or compiled. Every case runs with NaN in unused pages,
slots and outputs, must give the same bits twice and from a CUDA graph, and must leave rows of no
request alone. Prints failures and a summary; writes check.json to --out or $OUT; exits 1 on failure.
"""

import argparse
import functools
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

import checkout

checkout.use_checkout()

import torch  # noqa: E402
from cases import KV_TORCH, int64, make_batch, random_words  # noqa: E402
from specs import check_spec  # noqa: E402

from vllm_specpatch.kernels import build, reference  # noqa: E402
from vllm_specpatch.kernels.spec_mask import Plan, Spec, load, run  # noqa: E402
from vllm_specpatch.selftest_planner import HostPlanner  # noqa: E402

# (mask kind of the plan, words)
MASKS = [
    ("causal", None),
    ("causal", "tree"),
    ("bits", "random"),
    ("full", None),
    ("causal", "chain"),
    ("causal", "subset"),
    ("bits", "full"),
    ("bits", "empty"),
    ("causal", "empty"),
    ("bits", "tree"),
    ("causal", "random"),
]
# query heads, KV heads, head_dim
GEOMETRIES = [
    (32, 8, 128),
    (24, 4, 256),
    (12, 2, 256),
    (28, 4, 128),
    (64, 8, 128),
    (16, 2, 128),
    (5, 1, 128),
    (8, 8, 64),
    (16, 4, 96),
]
SMALL = (8, 2, 128)


class Failure(AssertionError):
    pass


def expect(ok, text):
    if not ok:
        raise Failure(text)


# Roundings of a result to the output dtype. An output element is a mean of V with weights P: P is
# rounded once for the matrix product, a partial output when it is stored, the output when it is.
ROUNDINGS = 3


def unit_roundoff(dtype_q):
    """Largest relative error of one rounding: 2^-8 for bf16, 2^-11 for fp16."""
    return torch.finfo(KV_TORCH[dtype_q]).eps / 2


def compare(out, lse, want, want_lse, dtype_q, largest_logit):
    """Per (row, head) relative error of the output; LSE absolute; infinities at the same places."""
    u = unit_roundoff(dtype_q)
    # Logits and their sums are float32 of up to `largest_logit` (base 2: times 1.44); a dot product
    # of 256 terms that cancel loses a few units in the last place of its largest partial sum. What
    # is lost in a logit is a relative error of its weight.
    logit_error = 1.44 * largest_logit * 8 * 2**-24
    expect(not torch.isnan(out).any(), f"{int(torch.isnan(out).sum())} NaN in the output")
    expect(torch.equal(torch.isinf(lse), torch.isinf(want_lse)), "LSE infinities differ")
    error = (out.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)
    blank = torch.isinf(want_lse)
    expect(bool((out[blank] == 0).all()), "a row that sees nothing is not zero")
    worst = float(error[~blank].max()) if (~blank).any() else 0.0
    # Roundings are independent, so the norm of a row's error stays below their plain sum. The one
    # more is for rows of few tokens that cancel.
    limit = (ROUNDINGS + 1) * u + 2 * logit_error
    expect(worst < limit, f"relative error {worst:.2e} above {limit:.2e}")
    if (~blank).any():
        # The denominator is summed from the rounded P.
        gap = (lse.double() - want_lse).abs()[~blank].max()
        slack = 1.44 * u + 2 * logit_error + 1e-5
        expect(float(gap) <= slack, f"LSE off by {float(gap):.2e}, tolerance {slack:.2e}")
    return worst


def expected(batch, **options):
    """(output, LSE) of a batch by the reference, in fp64."""
    tensors = batch.q, batch.k_cache, batch.v_cache, batch.page_table
    return reference.attention(*tensors, batch.seq_lens, batch.start, words=batch.words, **options)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def run_case(
    geometry,
    q_lens,
    seq_lens,
    *,
    mask="causal",
    words=None,
    page_size=16,
    layout="NHD",
    dtype_q="bfloat16",
    dtype_kv="bfloat16",
    window_left=-1,
    soft_cap=0.0,
    split="auto",
    scales=(1.0, 1.0),
    scale_tensors=False,
    logits=0.0,
    seed=0,
    max_q_len=None,
    max_requests=None,
    sm_scale=None,
    graph=True,
    spec=None,
):
    heads, kv_heads, head_dim = geometry
    spec = spec or check_spec(
        head_dim,
        heads // kv_heads,
        dtype_q,
        dtype_kv,
        words is not None,
        window=window_left >= 0,
        soft_cap=soft_cap > 0,
    )
    extra_rows = 3
    batch = make_batch(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_lens=q_lens,
        seq_lens=seq_lens,
        page_size=page_size,
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
        layout=layout,
        words_kind=words,
        seed=seed,
        logits=logits,
        rows=sum(q_lens) + extra_rows,
    )
    max_q_len = max_q_len or max(1, *q_lens)
    max_requests = max_requests or len(q_lens) + 1
    rows = batch.q.shape[0]
    while max_requests * max_q_len < rows:
        max_requests += 1
    plan = Plan(
        load(spec),
        num_kv_heads=kv_heads,
        max_requests=max_requests,
        max_rows=max(rows, max_q_len),
        max_q_len=max_q_len,
        max_kv_len=batch.page_table.stride(0) * page_size,
        page_table_stride=batch.page_table.stride(0),
        mask=mask,
        window_left=window_left,
        split=split,
    )
    k_scale, v_scale = scales
    if scale_tensors:
        k_scale, v_scale = (torch.tensor([s], device="cuda") for s in scales)
    out = torch.empty_like(batch.q)
    lse = torch.empty(rows, heads, device="cuda")

    def once():
        plan.update(batch.seq_lens_device, batch.start_device)
        run(
            plan,
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.page_table,
            mask=batch.words_device,
            out=out,
            lse=lse,
            sm_scale=sm_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            soft_cap=soft_cap,
            layout=layout,
        )

    def poisoned():
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        plan.partial_o.fill_(float("nan"))
        plan.partial_lse.fill_(float("nan"))

    poisoned()
    once()
    plan.check()
    used = batch.start[-1]
    expect(
        bool(torch.isnan(out[used:]).all()) and bool(torch.isnan(lse[used:]).all()),
        "rows of no request written",
    )
    want, want_lse = expected(
        batch,
        mask=mask,
        sm_scale=sm_scale,
        k_scale=scales[0],
        v_scale=scales[1],
        soft_cap=soft_cap,
        window_left=window_left,
        layout=layout,
    )
    worst = compare(out[:used], lse[:used], want[:used], want_lse[:used], dtype_q, max(logits, 30.0))
    first, first_lse = out[:used].clone(), lse[:used].clone()
    poisoned()
    once()
    expect(same_bits(out[:used], first) and torch.equal(lse[:used], first_lse), "two eager runs differ")
    # compute-sanitizer does not look inside graphs, and capture needs torch's caching allocator.
    if graph and not os.environ.get("VLLM_SPECPATCH_CHECK_NO_GRAPHS"):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            once()
        poisoned()
        captured.replay()
        torch.cuda.synchronize()
        expect(
            same_bits(out[:used], first) and torch.equal(lse[:used], first_lse),
            "graph replay differs from eager",
        )
    return worst


# --- groups of checks; each yields (name, function) --------------------------------------------


def masks_and_geometries():
    rng = random.Random(1)
    for geometry in GEOMETRIES:
        for q_len, (mask, words) in zip((8, 4, 5, 1, 16, 7, 2, 3, 13, 10), MASKS):
            lens = [q_len + rng.choice([0, 1, 57, 500, 3000]) for _ in range(3)]
            yield (
                f"{geometry} q{q_len} {mask}/{words} {lens}",
                lambda g=geometry, q=q_len, m=mask, w=words, n=lens: run_case(g, [q] * 3, n, mask=m, words=w),
            )


def query_lengths():
    for q_len in [*range(1, 17), 33, 64]:
        for (mask, words), length in zip(MASKS[:4], (q_len, 129, 1000, 128)):
            length = max(length, q_len)
            yield (
                f"q_len {q_len} {mask}/{words} L {length}",
                lambda q=q_len, m=mask, w=words, n=length: run_case(
                    SMALL, [q, q], [n, n + 77], mask=m, words=w
                ),
            )


def ragged():
    rng = random.Random(2)
    for seed in range(12):
        n = rng.choice([1, 3, 9, 40])
        q_lens = [rng.choice([0, 0, 1, 2, 5, 8, 16]) for _ in range(n)]
        q_lens[rng.randrange(n)] = rng.choice([1, 16])
        lens = [q + rng.choice([0, 3, 100, 2000, 9000]) if q else rng.choice([0, 50]) for q in q_lens]
        mask, words = MASKS[seed % len(MASKS)]
        yield (
            f"ragged {q_lens} {lens} {mask}/{words}",
            lambda q=q_lens, n=lens, m=mask, w=words, s=seed: run_case(
                SMALL, q, n, mask=m, words=w, seed=s, max_q_len=16
            ),
        )


def lengths():
    for length in (1, 2, 15, 16, 17, 127, 128, 129, 255, 1024, 4095, 16384, 65536, 131072):
        for q_len, mask in ((1, "causal"), (8, "causal"), (8, "full")):
            if mask == "causal" and length < q_len:
                continue
            yield (
                f"L {length} q{q_len} {mask}",
                lambda n=length, q=q_len, m=mask: run_case((8, 2, 128), [q], [n], mask=m),
            )
    for length in (0, 1, 3, 7):
        for mask, words in (("full", None), ("bits", "random"), ("bits", "full"), ("bits", "empty")):
            yield (
                f"L {length} below q 8 {mask}/{words}",
                lambda n=length, m=mask, w=words: run_case(SMALL, [8, 8], [n, 700], mask=m, words=w),
            )


def windows():
    for window, q_len, (mask, words) in itertools.product((0, 1, 63, 128, 1000), (1, 4, 16), MASKS[:5]):
        lens = [q_len, q_len + 40, 500 + q_len, 5000]
        yield (
            f"window {window} q{q_len} {mask}/{words}",
            lambda v=window, q=q_len, m=mask, w=words, n=lens: run_case(
                SMALL, [q] * 4, n, mask=m, words=w, window_left=v
            ),
        )


def soft_caps():
    for cap, logits in ((30.0, 0.0), (50.0, 60.0), (5.0, 200.0)):
        for mask, words in MASKS[:3]:
            yield (
                f"soft cap {cap} logits {logits} {mask}/{words}",
                lambda c=cap, x=logits, m=mask, w=words: run_case(
                    SMALL, [6, 1], [900, 40], mask=m, words=w, soft_cap=c, logits=x
                ),
            )


def kv_dtypes():
    for dtype_kv, (q_len, geometry), tensors in itertools.product(
        ("float8_e4m3fn", "float8_e5m2", "float16"),
        ((1, SMALL), (8, SMALL), (16, (16, 2, 128)), (5, (24, 4, 256))),
        (False, True),
    ):
        if geometry[2] == 256 and dtype_kv != "float8_e4m3fn":
            continue
        dtype_q = "float16" if dtype_kv == "float16" else "bfloat16"
        for mask, words in MASKS[:2]:
            yield (
                f"kv {dtype_kv} {geometry} q{q_len} {mask}/{words} scale tensors {tensors}",
                lambda d=dtype_kv, t=dtype_q, q=q_len, g=geometry, m=mask, w=words, x=tensors: run_case(
                    g,
                    [q] * 3,
                    [q, 333, 4097],
                    mask=m,
                    words=w,
                    dtype_q=t,
                    dtype_kv=d,
                    scales=(0.37, 2.5),
                    scale_tensors=x,
                ),
            )


def pages():
    for page_size, layout, dtype_kv in itertools.product(
        (1, 16, 32, 64, 528), ("NHD", "HND"), ("bfloat16", "float8_e4m3fn")
    ):
        yield (
            f"page {page_size} {layout} {dtype_kv}",
            lambda p=page_size, y=layout, d=dtype_kv: run_case(
                SMALL, [4, 0, 7], [527, 0, 1700], page_size=p, layout=y, dtype_kv=d, words="tree"
            ),
        )


def extreme_logits():
    for logits, (mask, words), dtype_kv in itertools.product(
        (100.0, 1e3, 1e4), MASKS[:3], ("bfloat16", "float8_e4m3fn")
    ):
        yield (
            f"logits {logits:g} {mask}/{words} {dtype_kv}",
            lambda x=logits, m=mask, w=words, d=dtype_kv: run_case(
                SMALL, [8, 3], [2000, 90], mask=m, words=w, logits=x, dtype_kv=d
            ),
        )
    # All logits far below zero: the stand-in for minus infinity must not win over them.
    yield "all logits near -1e4", all_negative


def all_negative():
    spec = check_spec(128, 4)
    batch = make_batch(heads=8, kv_heads=2, head_dim=128, q_lens=[8], seq_lens=[500], page_size=16)
    pages = batch.page_table[0, :32].long()
    batch.q.fill_(1.0)
    keys = batch.k_cache[pages]
    keys.fill_(-880.0)  # 128 * -880 / sqrt(128) is about -1e4
    batch.k_cache[pages] = keys
    plan = Plan(
        load(spec),
        num_kv_heads=2,
        max_requests=1,
        max_rows=8,
        max_q_len=8,
        max_kv_len=512,
        page_table_stride=batch.page_table.stride(0),
    )
    plan.update(batch.seq_lens_device, batch.start_device)
    lse = torch.empty(8, 8, device="cuda")
    out = run(plan, batch.q, batch.k_cache, batch.v_cache, batch.page_table, lse=lse)
    want, want_lse = expected(batch)
    return compare(out, lse, want, want_lse, "bfloat16", 1e4)


def splits():
    for split, q_len, (mask, words) in itertools.product(("none", 256, 2048, "auto"), (1, 8), MASKS[:3]):
        yield (
            f"split {split} q{q_len} {mask}/{words}",
            lambda s=split, q=q_len, m=mask, w=words: run_case(
                SMALL, [q, 0, q], [5000, 0, 129], mask=m, words=w, split=s
            ),
        )
    yield "fixed split is independent of the batch", batch_invariance
    yield "no split is independent of the batch", lambda: batch_invariance("none")


def smaller_specs():
    """What a model asks for: fewer tiles and masks than a module that was built ahead has. And trees over
    an fp8 cache."""
    specs = [
        Spec(head_dim=head_dim, group_size=group, dtype_kv=dtype_kv, max_q_len=16)
        for head_dim, group in ((128, 4), (256, 6))
        for dtype_kv in ("bfloat16", "float8_e4m3fn")
    ]
    for spec in [*specs, check_spec(128, 4, dtype_kv="float8_e4m3fn", words=True)]:
        heads = 2 * spec.group_size
        for q_len in sorted({1, 16 // spec.group_size + 1, 32 // spec.group_size, 16}):
            for mask, words in [("causal", "tree"), ("bits", "random")] if spec.words else [("causal", None)]:
                lens = [q_len, 129 + q_len, 1000, 5000]
                yield (
                    f"{spec.describe()}, q{q_len} {mask}/{words}",
                    lambda s=spec, h=heads, q=q_len, m=mask, w=words, n=lens: run_case(
                        (h, 2, s.head_dim),
                        [q] * 4,
                        n,
                        mask=m,
                        words=w,
                        dtype_kv=s.dtype_kv,
                        spec=s,
                        max_q_len=q,
                    ),
                )


def many_tiles():
    """Causal words of requests that need several query tiles, at KV tile boundaries in the block."""
    for q_len, words, length in itertools.product(
        (17, 33, 48, 64), ("tree", "random", "empty"), (64, 127, 129, 200)
    ):
        yield (
            f"many tiles q{q_len} causal/{words} L {length}",
            lambda q=q_len, w=words, n=length: run_case(
                SMALL, [q, 1, 9], [n, 700, n], mask="causal", words=w
            ),
        )


def batch_invariance(split=512):
    """The same request alone and among others must give the same bits."""
    spec = check_spec(128, 4)
    batch = make_batch(
        heads=8, kv_heads=2, head_dim=128, q_lens=[4, 4, 4], seq_lens=[3000, 777, 10], page_size=16
    )
    results = []
    for requests in (1, 3):
        plan = Plan(
            load(spec),
            num_kv_heads=2,
            max_requests=3,
            max_rows=12,
            max_q_len=4,
            max_kv_len=3008,
            page_table_stride=batch.page_table.stride(0),
            split=split,
        )
        plan.update(batch.seq_lens_device[:requests].clone(), batch.start_device[: requests + 1].clone())
        results.append(run(plan, batch.q, batch.k_cache, batch.v_cache, batch.page_table)[:4].clone())
    expect(same_bits(*results), "the batch around a request changes its bits")
    return 0.0


def marked_values():
    for q_len, (mask, words), length in itertools.product((1, 5, 16, 33, 64), MASKS, (64, 128, 200, 1024)):
        yield (
            f"marked V q{q_len} {mask}/{words} L {length}",
            lambda q=q_len, m=mask, w=words, n=length: marked(q, m, w, n),
        )


def marked(q_len, mask, words, length):
    """Zero Q and K make all weights equal; V marks block token j in column j. What a row sees can
    then be read off the output exactly."""
    spec = check_spec(128, 4, words=words is not None)
    batch = make_batch(
        heads=8,
        kv_heads=2,
        head_dim=128,
        q_lens=[q_len],
        seq_lens=[length],
        page_size=16,
        words_kind=words,
        seed=q_len,
    )
    batch.q.zero_()
    k, v = batch.k_cache, batch.v_cache
    for t in range(length):
        page, slot = int(batch.page_table[0, t // 16]), t % 16
        k[page, slot] = 0
        v[page, slot] = 0
        if t >= length - q_len:
            v[page, slot, :, t - (length - q_len)] = 1
    plan = Plan(
        load(spec),
        num_kv_heads=2,
        max_requests=1,
        max_rows=q_len,
        max_q_len=q_len,
        max_kv_len=length,
        page_table_stride=batch.page_table.stride(0),
        mask=mask,
    )
    plan.update(batch.seq_lens_device, batch.start_device)
    out = run(plan, batch.q, k, v, batch.page_table, mask=batch.words_device)
    sees = reference.visible(q_len, length, mask, batch.words).cuda()
    block = sees[:, length - q_len :]
    expect(
        bool(((out[:, :, :q_len] > 0) == block[:, None, :]).all()), "a block token is seen that should not be"
    )
    weight = torch.where(sees.sum(-1) > 0, 1.0 / sees.sum(-1).clamp_min(1), torch.zeros(()).cuda())
    # All P are exactly 1, so a weight is rounded when a partial output is stored (unless nothing is
    # split) and when the output is. 1e-5 is for the reciprocal, exp2 and log2 of the hardware.
    u = unit_roundoff("bfloat16")
    error = (out[:, :, :q_len].double() - block[:, None, :] * weight.double()[:, None, None]).abs()
    excess = error - weight.double()[:, None, None] * (2 * u + u * u + 1e-5)
    expect(bool((excess <= 0).all()), f"weights off by {float(error.max()):.2e}")
    return float(error.max())


def first_use():
    """Memory that nobody wrote: what is read of it shows under compute-sanitizer's initcheck only."""
    for q_lens, lens, geometry, dtype_kv, (mask, words), split in (
        ([8], [1000], SMALL, "bfloat16", ("causal", None), "auto"),
        ([8, 0, 3], [700, 50, 129], SMALL, "bfloat16", ("causal", "tree"), "auto"),
        ([1, 1], [333, 16], SMALL, "bfloat16", ("causal", None), "none"),
        ([16, 4], [200, 5], SMALL, "float8_e4m3fn", ("bits", "random"), "auto"),
        ([8, 8], [513, 64], SMALL, "float8_e4m3fn", ("causal", None), 256),
        ([5], [600], (24, 4, 256), "bfloat16", ("full", None), "auto"),
    ):
        yield (
            f"first use {q_lens} {lens} {geometry} {dtype_kv} {mask}/{words} split {split}",
            lambda q=q_lens, n=lens, g=geometry, d=dtype_kv, m=mask, w=words, s=split: written_once(
                q, n, g, d, m, w, s
            ),
        )


def written_once(q_lens, seq_lens, geometry, dtype_kv, mask, words, split, page_size=16):
    """One plan and one run where only what a caller must give was written, by copies from the host: no
    other kernel runs on the GPU, and the plan's own buffers are as the allocator left them. But the lists
    are zeros at first, as in every plan: the attention kernel reads an entry before it knows whether there
    is one."""
    heads, kv_heads, head_dim = geometry
    batch = make_batch(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_lens=q_lens,
        seq_lens=seq_lens,
        page_size=page_size,
        dtype_kv=dtype_kv,
        words_kind=words,
        device="cpu",
    )
    used = batch.start[-1]
    caches = [torch.empty(c.shape, dtype=c.dtype, device="cuda") for c in (batch.k_cache, batch.v_cache)]
    for i, tokens in enumerate(seq_lens):
        for at in range(0, tokens, page_size):
            page, slots = int(batch.page_table[i, at // page_size]), min(page_size, tokens - at)
            for cache, source in zip(caches, (batch.k_cache, batch.v_cache)):
                cache[page, :slots].copy_(source[page, :slots])
    plan = Plan(
        load(check_spec(head_dim, heads // kv_heads, dtype_kv=dtype_kv, words=words is not None)),
        num_kv_heads=kv_heads,
        max_requests=len(q_lens),
        max_rows=max(used, *q_lens),
        max_q_len=max(q_lens),
        max_kv_len=batch.page_table.stride(0) * page_size,
        page_table_stride=batch.page_table.stride(0),
        mask=mask,
        split=split,
    )
    plan.buffer = torch.zeros(plan.buffer.shape, dtype=torch.int32).cuda()
    words_device = None if batch.words_device is None else batch.words_device.cuda()
    lse = torch.empty(used, heads, device="cuda")
    plan.update(batch.seq_lens_device.cuda(), batch.start_device.cuda())
    out = run(plan, batch.q.cuda(), *caches, batch.page_table.cuda(), mask=words_device, lse=lse)
    want, want_lse = expected(batch, mask=mask)
    return compare(out.cpu(), lse.cpu(), want, want_lse, "bfloat16", 30.0)


def planner_lists():
    for requests, split in itertools.product((1, 2, 5, 33, 64, 65, 200, 1024), ("auto", 4096, "none")):
        yield (
            f"planner {requests} requests, split {split}: device lists equal the host's",
            lambda r=requests, s=split: planner_on_device(r, s),
        )


@functools.cache
def host_planner():
    """The planner compiled for the CPU."""
    return HostPlanner(Path(tempfile.mkdtemp()))


def planner_on_device(requests, split):
    """The plan kernel against the same code on the host, array by array."""
    host = host_planner()
    rng = random.Random(requests)
    for q_len, kv_heads in itertools.product((1, 8, 16), (1, 2, 8)):
        plan = Plan(
            load(check_spec(128, 4)),
            num_kv_heads=kv_heads,
            max_requests=requests,
            max_rows=requests * q_len,
            max_q_len=q_len,
            max_kv_len=131072 if requests <= 200 else 16384,
            page_table_stride=8192,
            split=split,
        )
        for _ in range(2):
            n = rng.randint(1, requests)
            top = rng.choice([64, 4096, plan.shape["max_kv_len"]])
            lens = [rng.randint(0, top) for _ in range(n)]
            start = [0, *itertools.accumulate(rng.randint(0, q_len) for _ in range(n))]
            plan.update(
                torch.tensor(lens, dtype=torch.int32, device="cuda"),
                torch.tensor(start, dtype=torch.int32, device="cuda"),
            )
            plan.check()
            buffer = host.buffer(plan.buffer.numel())
            want, got = host.plan(plan.shape, lens, start, buffer), plan.lists()
            used = want["header"][1]
            for name in want:
                limit = used if name.endswith("_indices") else None
                expect(
                    want[name][:limit] == got[name][:limit],
                    f"{name} differs, q_len {q_len}, {kv_heads} KV heads",
                )
    return 0.0


def replays(number):
    for mask, with_words in (("causal", False), ("causal", True), ("bits", True)):
        name = f"{mask} {'with' if with_words else 'without'} words"
        yield (f"{number} replays of one graph, {name}", lambda m=mask, w=with_words: replay(number, m, w))


def replay(number, mask, with_words):
    """One captured graph under changing lengths, tables, request counts and words, all checked."""
    rng = random.Random(7)
    heads, kv_heads, head_dim, page_size, requests, q_max, longest = 8, 2, 128, 16, 6, 8, 3000
    spec = check_spec(head_dim, heads // kv_heads, words=with_words)
    stride = -(-longest // page_size)
    rows = requests * q_max
    pool = requests * stride
    generator = torch.Generator(device="cuda").manual_seed(1)
    cache = torch.randn(pool, 2, page_size, kv_heads, head_dim, generator=generator, device="cuda").bfloat16()
    q = torch.randn(rows, heads, head_dim, generator=generator, device="cuda").bfloat16()
    table = torch.zeros(requests, stride, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(requests, dtype=torch.int32, device="cuda")
    start = torch.zeros(requests + 1, dtype=torch.int32, device="cuda")
    words = torch.zeros(rows, dtype=torch.int64, device="cuda") if with_words else None
    out, lse = torch.empty_like(q), torch.empty(rows, heads, device="cuda")
    plan = Plan(
        load(spec),
        num_kv_heads=kv_heads,
        max_requests=requests,
        max_rows=rows,
        max_q_len=q_max,
        max_kv_len=longest,
        page_table_stride=stride,
        mask=mask,
    )
    # The inputs were filled on the current stream, which the new one does not wait for by itself.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.update(seq_lens, start)
        run(plan, q, cache[:, 0], cache[:, 1], table, mask=words, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(seq_lens, start)
        run(plan, q, cache[:, 0], cache[:, 1], table, mask=words, out=out, lse=lse)
    worst = 0.0
    for i in range(number):
        n = rng.randint(0, requests)
        q_lens = [rng.randint(0, q_max) if rng.random() < 0.3 else q_max for _ in range(n)] + [0] * (
            requests - n
        )
        top = rng.choice([1, 40, 300, longest])
        lens = [min(longest, ql + rng.randint(0, top)) if ql else 0 for ql in q_lens]
        offsets = [0, *itertools.accumulate(q_lens)]
        kind = rng.choice(
            ["chain", "tree", "subset"] if mask == "causal" else ["random", "full", "tree", "empty"]
        )
        bits = [w for ql in q_lens for w in random_words(kind, ql, rng)] if with_words else None
        table.copy_(torch.randperm(pool, generator=generator, device="cuda").view(requests, stride))
        seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        start.copy_(torch.tensor(offsets, dtype=torch.int32))
        if with_words:
            words[: len(bits)].copy_(int64(bits))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        used = offsets[-1]
        expect(bool(torch.isnan(out[used:]).all()), f"replay {i}: rows of no request written")
        if used == 0:
            continue
        want, want_lse = reference.attention(
            q, cache[:, 0], cache[:, 1], table, lens, offsets, mask=mask, words=bits, dtype=torch.float32
        )
        try:
            worst = max(
                worst,
                compare(
                    out[:used], lse[:used], want[:used].double(), want_lse[:used].double(), "bfloat16", 30.0
                ),
            )
        except Failure as failure:
            raise Failure(f"replay {i}, q_lens {q_lens}, lengths {lens}, {kind}: {failure}") from None
    plan.check()
    return worst


GROUPS = {
    "masks": masks_and_geometries,
    "query_lengths": query_lengths,
    "ragged": ragged,
    "pages": pages,
    "kv_dtypes": kv_dtypes,
    "lengths": lengths,
    "extreme_logits": extreme_logits,
    "splits": splits,
    "many_tiles": many_tiles,
    "smaller_specs": smaller_specs,
    "soft_caps": soft_caps,
    "windows": windows,
    "marked_values": marked_values,
    "planner": planner_lists,
    "first_use": first_use,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a subset of every group, about 60 s")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop starting cases after this time")
    parser.add_argument("--replays", type=int, default=0, help="graph replays; 100 with --quick, else 10000")
    parser.add_argument(
        "--only", default="", help="comma-separated groups: " + ", ".join([*GROUPS, "replays"])
    )
    parser.add_argument("--every", type=int, default=0, help="run every n-th case of a group; 7 with --quick")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="folder for check.json")
    args = parser.parse_args()
    budget = args.seconds or (60.0 if args.quick else 1e9)
    every = args.every or (7 if args.quick else 1)
    number = args.replays or (100 if args.quick else 10000)
    groups = {**GROUPS, "replays": lambda: replays(number)}
    names = [n for n in args.only.split(",") if n] or list(groups)

    begin = time.time()
    torch.manual_seed(0)
    report = {"gpu": torch.cuda.get_device_name(), "flashinfer": build.flashinfer_version(), "groups": {}}
    failures, skipped = [], 0
    for name in names:
        cases = list(groups[name]())
        cases = cases[::every] if name != "replays" else cases
        done, worst, started = 0, 0.0, time.time()
        for title, check in cases:
            if time.time() - begin > budget:
                skipped += 1
                continue
            try:
                worst = max(worst, check())
                torch.cuda.synchronize()
            except Exception as error:
                failures.append((name, title, f"{type(error).__name__}: {error}"))
                if len(failures) <= 12:
                    print(f"FAIL {name}: {title}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                if not isinstance(error, Failure) and len(failures) <= 2:
                    traceback.print_exc()
                if "CUDA error" in str(error) or "illegal memory" in str(error):
                    print("the CUDA context is lost; stopping")
                    report["failures"] = failures
                    return finish(args, report, failures, skipped, begin)
            done += 1
        report["groups"][name] = {
            "cases": len(cases),
            "run": done,
            "worst": worst,
            "seconds": time.time() - started,
        }
        failed = sum(f[0] == name for f in failures)
        print(
            f"{name:16s} {done:4d}/{len(cases):<4d} failed {failed:3d}  worst {worst:.2e}  "
            f"{time.time() - started:6.1f} s",
            flush=True,
        )
    return finish(args, report, failures, skipped, begin)


def finish(args, report, failures, skipped, begin) -> int:
    report["failures"] = failures
    report["skipped_for_time"] = skipped
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "check.json").write_text(json.dumps(report, indent=1))
    total = sum(g["run"] for g in report["groups"].values())
    print(
        f"{report['gpu']}, FlashInfer {report['flashinfer']}: {total} cases, {len(failures)} failed, "
        f"{skipped} skipped for time, {time.time() - begin:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
