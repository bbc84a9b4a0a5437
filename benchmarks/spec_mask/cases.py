"""Random verify batches for the check and the benchmark, with poison wherever nobody may read."""

from __future__ import annotations

import dataclasses
import random

import torch

KV_TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclasses.dataclass
class Batch:
    """Tensors of one batch; ``seq_lens`` and ``start`` also as lists."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: list[int]
    start: list[int]
    seq_lens_device: torch.Tensor
    start_device: torch.Tensor
    words: list[int] | None
    words_device: torch.Tensor | None


def int64(words: list[int]) -> torch.Tensor:
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


def random_words(kind: str, q_len: int, rng: random.Random) -> list[int]:
    """Words of one request. chain, full, tree, random (any bits), empty (sees no block token),
    subset (random bits below the diagonal)."""
    if kind == "chain":
        return [(1 << (r + 1)) - 1 for r in range(q_len)]
    if kind == "full":
        return [(1 << q_len) - 1] * q_len
    if kind == "empty":
        return [0] * q_len
    if kind == "random":
        return [rng.getrandbits(q_len) if q_len else 0 for _ in range(q_len)]
    if kind == "subset":
        return [rng.getrandbits(r + 1) for r in range(q_len)]
    words: list[int] = []
    for j in range(q_len):
        parent = rng.randint(0, j - 1) if j else -1
        words.append((1 << j) | (words[parent] if parent >= 0 else 0))
    return words


def poison(cache: torch.Tensor) -> None:
    """Fills a cache with NaN, in fp8 too (0x7f is NaN in e4m3fn and e5m2)."""
    if cache.element_size() == 1:
        cache.view(torch.uint8).fill_(0x7F)
    else:
        cache.fill_(float("nan"))


def make_batch(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_lens: list[int],
    seq_lens: list[int],
    page_size: int,
    dtype_q: str = "bfloat16",
    dtype_kv: str = "bfloat16",
    layout: str = "NHD",
    words_kind: str | None = None,
    seed: int = 0,
    table_stride: int | None = None,
    rows: int | None = None,
    logits: float = 0.0,
    device: str = "cuda",
) -> Batch:
    """A batch whose pages are shuffled over a cache of vLLM's shape ``[pages, 2, ...]``.

    Pages and slots of no token hold NaN, table entries past a request's last page hold a page
    number far outside the cache. ``logits`` > 0 scales q so that the largest raw logits times the
    default softmax scale are near it.
    """
    rng = random.Random(seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    start = [0]
    for q_len in q_lens:
        start.append(start[-1] + q_len)
    rows = rows or start[-1]
    pages_of = [-(-n // page_size) for n in seq_lens]
    total = sum(pages_of)
    spare = 3
    order = list(range(total + spare))
    rng.shuffle(order)
    stride = table_stride or max(1, *pages_of)
    table = torch.full((len(seq_lens), stride), 2**30, dtype=torch.int32)
    at = 0
    for i, n in enumerate(pages_of):
        table[i, :n] = torch.tensor(order[at : at + n], dtype=torch.int32)
        at += n
    table = table.to(device)

    inner = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    kv_type = KV_TORCH[dtype_kv]
    cache = torch.empty(total + spare, 2, *inner, head_dim, dtype=kv_type, device=device)
    poison(cache)
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    for i, n in enumerate(seq_lens):
        if n == 0:
            continue
        pages = table[i, : pages_of[i]].long()
        fresh = torch.empty(pages_of[i], 2, *inner, head_dim, dtype=kv_type, device=device)
        poison(fresh)
        fresh_raw = fresh.view(torch.uint8) if cache.element_size() == 1 else fresh
        tokens = torch.randn(2, n, kv_heads, head_dim, generator=generator, device=device).to(kv_type)
        tokens = tokens.view(torch.uint8) if cache.element_size() == 1 else tokens
        for half in (0, 1):
            flat = raw.new_empty(0)
            padded = fresh_raw[:, half] if layout == "NHD" else fresh_raw[:, half].transpose(1, 2)
            flat = padded.reshape(-1, kv_heads, head_dim).clone()
            flat[:n] = tokens[half]
            padded.copy_(flat.view(pages_of[i], page_size, kv_heads, head_dim))
        raw[pages] = fresh_raw
    q = torch.randn(rows, heads, head_dim, generator=generator, device=device)
    if logits > 0:
        # |q.k| / sqrt(d) is about a standard normal; the largest of many is about 4.
        q = q * (logits / 4)
    q = q.to(KV_TORCH[dtype_q])
    words = None
    if words_kind is not None:
        words = []
        for q_len in q_lens:
            words += random_words(words_kind, q_len, rng)
        words += [0] * (rows - len(words))
    return Batch(
        q,
        cache[:, 0],
        cache[:, 1],
        table,
        seq_lens,
        start,
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.tensor(start, dtype=torch.int32, device=device),
        words,
        int64(words).to(device) if words is not None else None,
    )
