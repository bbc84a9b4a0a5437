"""Which KV tiles evaluate masks: a model of the template's loop against the dense mask.

FlashInfer's kernel evaluates causal order, words and window only on some KV tiles of a query tile.
Its expressions (prefill.cuh, BatchPrefillWithPagedKVCacheDevice) are repeated here one by one; the
digests of the headers in build.py say that they are still those.
"""

import itertools
import random

import pytest

from vllm_specpatch.kernels import reference
from vllm_specpatch.kernels.spec_mask import Plan, Spec

torch = pytest.importorskip("torch")


def ceil_div(a, b):
    return -(-a // b)


def seen(kernel, q_len, kv_len, group, tile, tile_kv, chunk, words, causal_words):
    """What each row sees under a kernel (MaskMode), walked like the kernel walks."""
    result = [[False] * kv_len for _ in range(q_len)]
    for qo_tile in range(ceil_div(q_len * group, tile)):
        rows = [r for r in range(q_len) for h in range(group) if (r * group + h) // tile == qo_tile]
        for start in range(0, kv_len, chunk):
            end = min(start + chunk, kv_len)
            size = end - start
            iterations, first_masked = ceil_div(size, tile_kv), size // tile_kv
            if kernel == "causal":
                last = max(kv_len - q_len + ceil_div((qo_tile + 1) * tile, group) - start, 0)
                iterations = ceil_div(min(size, last), tile_kv)
                first_masked = (
                    min(size, max(kv_len + ceil_div(qo_tile * tile, group) - q_len - start, 0)) // tile_kv
                )
            for iteration in range(iterations):
                masked = kernel == "bits" or iteration >= first_masked
                for t in range(start + iteration * tile_kv, start + (iteration + 1) * tile_kv):
                    if t >= kv_len:
                        assert masked, "a token past the end is seen"
                        continue
                    for r in rows:
                        ok = t < end
                        if masked:
                            j = t - (kv_len - q_len)
                            ok = ok and (kernel != "causal" or t <= kv_len - q_len + r)
                            if words is not None and j >= 0:
                                ok = ok and bool(words[r] >> j & 1) and (not causal_words or j <= r)
                        result[r][t] = result[r][t] or ok
    return result


def words_of(kind, q_len, rng):
    return {
        "none": None,
        "random": [rng.getrandbits(q_len) for _ in range(q_len)],
        "subset": [rng.getrandbits(r + 1) for r in range(q_len)],
        "empty": [0] * q_len,
    }[kind]


def plan_of(spec, q_len, mask):
    """A plan without a device: what decides the kernel."""
    plan = object.__new__(Plan)
    plan.mask = mask
    plan.shape = {"max_q_len": q_len, "group_size": spec.group_size, "tile_q": spec.tile(q_len)}
    return plan


# q_len, group, head_dim, tokens before the block
CASES = list(itertools.product((1, 8, 17, 33, 64), (1, 4, 6), (128, 256), (0, 65, 129)))


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        *(("causal", k) for k in ("none", "random", "subset", "empty")),
        *(("bits", k) for k in ("random", "subset", "empty")),
        ("full", "none"),
    ],
)
def test_every_row_sees_its_tokens(mask, kind):
    rng = random.Random(5)
    for q_len, group, head_dim, prefix in CASES:
        spec = Spec(head_dim=head_dim, group_size=group, masks=("causal", "bits", "full"), max_q_len=q_len)
        plan = plan_of(spec, q_len, mask)
        kernel = plan.mask if kind == "none" else plan.words_mask
        words = words_of(kind, q_len, rng)
        kv_len = q_len + prefix
        want = reference.visible(q_len, kv_len, mask, words).tolist()
        for tile_kv, chunk in ((64, 64), (64, 10**6), (128, 80)):
            got = seen(
                kernel, q_len, kv_len, group, spec.tile(q_len), tile_kv, chunk, words, mask == "causal"
            )
            assert got == want, (q_len, group, head_dim, prefix, tile_kv, chunk, kernel)


def test_words_under_causal_tiles_would_be_wrong():
    """Why a plan leaves the causal kernel where a request needs several query tiles: 33 rows of 4
    heads are 132 packed rows, two tiles of 128, and 129 tokens end one KV tile inside the block."""
    spec = Spec(head_dim=128, group_size=4, masks=("causal", "bits"), max_q_len=33)
    assert plan_of(spec, 33, "causal").words_mask == "bits"
    assert plan_of(spec, 32, "causal").words_mask == "causal"
    words = [0] * 33
    want = reference.visible(33, 129, "causal", words).tolist()
    assert seen("causal", 33, 129, 4, 128, 32, 10**6, words, True) != want
    assert seen("bits", 33, 129, 4, 128, 32, 10**6, words, True) == want
