"""The specs that the check and the benchmark load; few modules, each with all it needs."""

from vllm_specpatch.kernels.spec_mask import Spec


def check_spec(head_dim, group_size, dtype_q="bfloat16", dtype_kv="bfloat16", words=False, **extra):
    """A geometry without mask words, as vLLM's batches are, or with: all masks that there are, and, through
    the long max_q_len, all query tiles. Specs that differ only in the group size share a module."""
    return Spec(
        head_dim=head_dim,
        group_size=group_size,
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
        masks=("bits", "causal") if words else ("causal", "full"),
        words=words,
        max_q_len=128,
        **extra,
    )


CHECK_SPECS = [
    check_spec(*sizes, words=words, **options)
    for words in (False, True)
    for sizes, options in (
        ((128, 4), {}),
        ((128, 4), {"dtype_kv": "float8_e4m3fn"}),
        ((128, 4), {"dtype_kv": "float8_e5m2"}),
        ((128, 4), {"dtype_q": "float16", "dtype_kv": "float16"}),
        ((128, 4), {"window": True}),
        ((128, 4), {"soft_cap": True}),
        ((256, 6), {}),
        ((256, 6), {"dtype_kv": "float8_e4m3fn"}),
        ((64, 1), {}),
        ((96, 4), {}),
    )
]

# Geometries 32/8/128 and 24/4/256; the same modules as above.
BENCH_SPECS = [
    check_spec(128, 4),
    check_spec(128, 4, dtype_kv="float8_e4m3fn"),
    check_spec(256, 6),
    check_spec(256, 6, dtype_kv="float8_e4m3fn"),
]

ALL_SPECS = [*CHECK_SPECS, *BENCH_SPECS]
