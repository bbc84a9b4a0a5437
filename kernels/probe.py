"""A module against plain torch, on the GPU it is to serve on and before it does.

Kernels are compiled on the user's machine, by its nvcc, from its FlashInfer, for a GPU that this project may
never have seen. What then goes wrong would show as a crash in the first request, or as text that is a little
worse. So each kernel runs once on a batch of a few hundred tokens, when there is still another route.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from . import reference, spec_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

KV_HEADS = 2
PAGE = 16
#: Tokens per chunk of the split plans: the longer requests have several chunks, so that the merge has work.
CHUNK = 64
SPLITS: tuple[str | int, ...] = ("auto", CHUNK)
#: Largest relative error of a row of a head. Rounding to bf16 makes 0.016 at most (benchmarks/spec_mask/
#: gpu_check.py has the sum); a mask or a table that is read wrongly makes more than 0.1.
LIMIT = 0.04


class WrongResults(RuntimeError):
    """A kernel does not compute what it should here; the text is one line."""


def check(module: spec_mask.Module, device: torch.device | str | None = None) -> int:
    """Runs every kernel of ``module`` (mask kind and query tile), with split and unsplit plans, ragged
    requests, an empty one, and NaN wherever nothing may be read. Returns the number of runs.

    ``device``: the current CUDA device. Waits for it; needs a few MB of its memory. Raises
    :class:`WrongResults`, and whatever a launch raises.
    """
    import torch

    spec = module.spec
    where = torch.device(device if device is not None else torch.cuda.current_device())
    runs = 0
    for mask, tile, with_words, split in cases(spec):
        error = Batch(spec, mask, tile, with_words, seed=runs).error(module, split, where)
        if not error <= LIMIT:  # NaN is wrong too
            gpu = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
            raise WrongResults(
                f"the kernel for {mask} masks{' with words' if with_words else ''}, query tile {tile}, "
                f"split {split}, is wrong on {gpu}: wanted errors below {LIMIT}, found {error:.3g}"
            )
        runs += 1
    return runs


def cases(spec: spec_mask.Spec) -> Iterator[tuple[str, int, bool, str | int]]:
    """(mask, query tile, words given, split) of all kernels of a spec."""
    for mask, tile in itertools.product(spec.masks, spec.tiles):
        choices = {"causal": [False, True] if spec.words else [False], "full": [False], "bits": [True]}
        for with_words, split in itertools.product(choices[mask], SPLITS):
            if longest_block(spec, tile, with_words):
                yield mask, tile, with_words, split


def longest_block(spec: spec_mask.Spec, tile: int, with_words: bool) -> int:
    """Rows of the longest request that takes a kernel, or 0: words reach 64 tokens."""
    rows = [n for n in range(1, spec.max_q_len + 1) if spec.tile(n) == tile]
    if with_words:
        rows = [n for n in rows if n <= spec_mask.MAX_BLOCK]
    return max(rows, default=0)


class Batch:
    """Random inputs of one case, on the CPU."""

    def __init__(self, spec: spec_mask.Spec, mask: str, tile: int, with_words: bool, seed: int) -> None:
        import torch

        self.spec, self.mask = spec, mask
        longest = longest_block(spec, tile, with_words)
        self.q_lens = [longest, 0, (longest + 1) // 2, 1]
        self.seq_lens = [longest + 3 * CHUNK + 5, 0, longest + 9, PAGE]
        self.start = [0, *itertools.accumulate(self.q_lens)]
        self.pages = -(-max(self.seq_lens) // PAGE)
        # All rows of a block must fit a query tile where it has a window and no causal order.
        windowed = spec.window and (mask == "causal" or longest <= tile)
        self.window_left = CHUNK + 1 if windowed else -1
        k_scale, v_scale = (0.5, 2.0) if spec.dtype_kv.startswith("float8") else (1.0, 1.0)
        soft_cap = 1.0 if spec.soft_cap else 0.0  # logits are about that large
        self.options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "soft_cap": soft_cap}
        self.words: list[int] | None = None
        if with_words:
            # Each second ancestor of a row and the row itself; of any bits also a later one.
            even = int("01" * 32, 2)
            self.words = [
                (even & ((1 << r) - 1)) | 1 << r | (1 << q_len - 1 if mask == "bits" else 0)
                for q_len in self.q_lens
                for r in range(q_len)
            ]

        with torch.device("cpu"):  # whatever the default device of the caller is
            self._make_tensors(seed)

    def _make_tensors(self, seed: int) -> None:
        import torch

        spec, generator = self.spec, torch.Generator().manual_seed(seed)
        rows, requests = self.start[-1], len(self.q_lens)
        heads, total = KV_HEADS * spec.group_size, requests * self.pages

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32)

        # One row more than the requests have, as in a padded batch.
        self.q = random(rows + 1, heads, spec.head_dim).to(getattr(torch, spec.dtype_q))
        self.table = torch.randperm(total, generator=generator).int().view(requests, self.pages)
        cache = random(total, 2, PAGE, KV_HEADS, spec.head_dim)
        for request, tokens in enumerate(self.seq_lens):
            pages = self.table[request].long()
            cache[pages[-(-tokens // PAGE) :]] = float("nan")
            if tokens % PAGE:
                cache[pages[tokens // PAGE], :, tokens % PAGE :] = float("nan")
        self.cache = cache.to(getattr(torch, spec.dtype_kv))

    def error(self, module: spec_mask.Module, split: str | int, device: torch.device) -> float:
        """Largest relative error of a row of a head; infinite if the kernel wrote rows of no request."""
        import torch

        used = self.start[-1]
        got = self._run(module, split, device).double()
        if not bool(got[used:].isnan().all()):
            return float("inf")
        with torch.device("cpu"):
            want, _ = reference.attention(
                self.q[:used],
                self.cache[:, 0],
                self.cache[:, 1],
                self.table,
                self.seq_lens,
                self.start,
                mask=self.mask,
                words=self.words,
                window_left=self.window_left,
                **self.options,
            )
        return float(((got[:used] - want).norm(dim=-1) / want.norm(dim=-1)).amax())

    def _run(self, module: spec_mask.Module, split: str | int, device: torch.device) -> torch.Tensor:
        """What the kernel makes of a NaN output, on the CPU."""
        import torch

        plan = spec_mask.Plan(
            module,
            num_kv_heads=KV_HEADS,
            max_requests=len(self.q_lens),
            max_rows=self.start[-1] + 1,
            max_q_len=max(self.q_lens),
            max_kv_len=self.pages * PAGE,
            page_table_stride=self.pages,
            mask=self.mask,
            window_left=self.window_left,
            split=split,
            device=device,
        )

        def lengths(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)

        with torch.device("cpu"):
            mask = None if self.words is None else spec_mask.words_tensor([*self.words, 0])
        q, cache, mask = self.q.to(device), self.cache.to(device), None if mask is None else mask.to(device)
        out = torch.full(q.shape, float("nan"), dtype=q.dtype, device="cpu").to(device)
        plan.update(lengths(self.seq_lens), lengths(self.start))
        spec_mask.run(
            plan, q, cache[:, 0], cache[:, 1], self.table.to(device), mask=mask, out=out, **self.options
        )
        return out.cpu()
