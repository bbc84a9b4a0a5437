"""Verify attention in plain torch: the oracle for tests and for checks on a GPU.

One request, one row and one head at a time in meaning; written per request and head group so that
it stays usable for contexts of 100k tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def visible(
    q_len: int, kv_len: int, mask: str, words: list[int] | None, window_left: int = -1
) -> torch.Tensor:
    """Dense visibility, bool ``[q_len, kv_len]`` on the CPU.

    ``mask`` and ``words`` are those of :func:`vllm_specpatch.kernels.spec_mask.run`, ``words`` for
    this request only. Row r is the query of KV token ``kv_len - q_len + r``.
    """
    import torch

    prefix = kv_len - q_len
    t = torch.arange(kv_len)
    rows = []
    for r in range(q_len):
        if mask == "causal":
            row = t <= prefix + r
        else:
            row = torch.ones(kv_len, dtype=torch.bool)
        if words is not None:
            word = words[r] & (2**64 - 1)
            bits = torch.tensor([bool(word >> j & 1) for j in range(q_len)])
            block = t - prefix
            in_block = block >= 0
            row = row & (~in_block | bits[block.clamp(0, max(q_len - 1, 0))])
        if window_left >= 0:
            row = row & (t >= prefix + r - window_left)
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, kv_len, dtype=torch.bool)


def gather_kv(cache: torch.Tensor, page_row: torch.Tensor, kv_len: int, layout: str) -> torch.Tensor:
    """KV tokens of one request, ``[kv_len, heads, head_dim]``, in the cache's dtype.

    ``page_row`` is the request's row of the page table. Only pages that hold a token are read.
    """
    import torch

    page_size = cache.shape[1] if layout == "NHD" else cache.shape[2]
    pages = page_row[: -(-kv_len // page_size)].long()
    # fp8 tensors cannot be indexed on every torch version; bytes can.
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    tokens = raw[pages]
    if layout == "HND":
        tokens = tokens.transpose(1, 2)
    tokens = tokens.reshape(-1, tokens.shape[2], tokens.shape[3])[:kv_len]
    return tokens.contiguous().view(cache.dtype)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: list[int],
    query_start_loc: list[int],
    *,
    mask: str = "causal",
    words: list[int] | None = None,
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    soft_cap: float = 0.0,
    window_left: int = -1,
    layout: str = "NHD",
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[rows, heads, head_dim]`` and base-2 LSE ``[rows, heads]`` in ``dtype`` (fp64).

    Rows of no request keep what ``out`` holds (zeros if it is not given) and LSE NaN. Computed on
    the device of ``q``. ``words`` holds one Python integer per row of the whole batch.
    """
    import torch

    dtype = dtype or torch.float64
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2] if layout == "NHD" else k_cache.shape[1]
    group = num_heads // num_kv_heads
    scale = (sm_scale if sm_scale is not None else head_dim**-0.5) * k_scale
    out = (
        torch.zeros(rows, num_heads, head_dim, dtype=dtype, device=q.device) if out is None else out.to(dtype)
    )
    lse = torch.full((rows, num_heads), math.nan, dtype=dtype, device=q.device)
    for i, kv_len in enumerate(seq_lens):
        begin, end = query_start_loc[i], query_start_loc[i + 1]
        if end == begin:
            continue
        k = gather_kv(k_cache, page_table[i], kv_len, layout).to(dtype)
        v = gather_kv(v_cache, page_table[i], kv_len, layout).to(dtype)
        sees = visible(
            end - begin, kv_len, mask, None if words is None else words[begin:end], window_left
        ).to(q.device)
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            logits = torch.einsum("rgd,td->rgt", q[begin:end, heads].to(dtype), k[:, h]) * scale
            if soft_cap > 0:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            logits = logits.masked_fill(~sees[:, None, :], -math.inf)
            top = (
                logits.amax(-1, keepdim=True)
                if kv_len
                else logits.new_full((*logits.shape[:2], 1), -math.inf)
            )
            top = torch.where(top.isinf(), torch.zeros_like(top), top)
            weights = torch.exp(logits - top)
            total = weights.sum(-1, keepdim=True)
            mean = torch.einsum("rgt,td->rgd", weights, v[:, h]) / total.clamp_min(1e-300)
            out[begin:end, heads] = torch.where(total > 0, mean * v_scale, torch.zeros_like(mean))
            lse[begin:end, heads] = ((top + torch.log(total)) / math.log(2.0)).squeeze(-1)
    return out, lse
