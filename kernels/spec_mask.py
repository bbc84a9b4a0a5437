"""Verify attention with draft-block masks over a paged KV cache: the public surface.

The steps of use::

    spec = Spec(head_dim=128, group_size=4, max_q_len=8)
    module = load(spec)                                   # compiles on first use, or finds a prebuilt
    plan = Plan(module, num_kv_heads=8, max_requests=16, max_rows=128, max_q_len=8,
                max_kv_len=131072, page_table_stride=page_table.stride(0))
    plan.update(seq_lens, query_start_loc)                # one small kernel, no host read
    run(plan, q, k_cache, v_cache, page_table, mask=words, out=out)

A request's draft block is its last ``q_len`` KV tokens, one per query row. Everything before the
block is visible to every row; within it, bit j of a row's 64-bit word says whether the row sees
block token j. ``update`` and ``run`` only launch kernels on the current stream, so both can be
captured in a CUDA graph; a replay plans from what the length tensors hold at that time.

Every error is a :class:`SpecMaskError` (a ValueError) raised before any launch, or a
:class:`~vllm_specpatch.kernels.build.BuildError` from :func:`load`. What only the device knows,
such as the lengths themselves, cannot raise: the planner replaces impossible values by harmless
ones and notes it, see :meth:`Plan.check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (64, 96, 128, 256)
MASKS = ("causal", "full", "bits")
KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
MAX_BLOCK = 64  # draft-block tokens a mask word can describe
MAX_REQUESTS = 2048  # five int32 per request must fit the planner's shared memory
MAX_KV_LEN = 2**24 - 1  # the planner divides lengths in fp32, kMaxKvLen in csrc/planner.cuh

# Values of MaskMode in csrc/params.cuh.
_MASK_MODES = {"full": 0, "causal": 1, "bits": 2}
# Values of SplitMode in csrc/planner.cuh.
_SPLIT_AUTO, _SPLIT_FIXED, _SPLIT_NONE = 0, 1, 2

# Fields of PlanShape in csrc/planner.cuh, in its order.
SHAPE_FIELDS = (
    "max_requests",
    "max_rows",
    "max_q_len",
    "group_size",
    "num_kv_heads",
    "tile_q",
    "granule",
    "min_chunk",
    "window_left",
    "max_kv_len",
    "page_table_stride",
    "split_mode",
    "fixed_chunk",
    "wave_ctas",
    "num_sms",
    "cta_tokens",
    "lone_percent",
    "merge_tokens",
    "extra_waves",
    "grid",
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Constants of the planner's choice of chunk sizes; results are right with any of them.

    ``granule``       chunk sizes are multiples of this many tokens. Whole KV tiles (64 to 256
                      tokens) would avoid a partly masked last tile in each chunk, but leave up to a
                      quarter of the slots idle at short contexts
    ``min_chunk``     smallest chunk that "auto" chooses, in tokens; never below one KV tile
    ``cta_tokens``, ``lone_percent``, ``merge_tokens``
                      the cost model, see ``plan_cost`` in csrc/planner.cuh. The first and the last are
                      times, given as the tokens of 512 bytes (K and V of a head) that could be read in them
    ``extra_waves``   grid beyond the query tiles' own waves, for batches of unequal lengths

    The defaults were fitted to times measured on an H200, tests/kernels/split_times.json.
    """

    granule: int = 16
    min_chunk: int = 64
    cta_tokens: int = 512
    lone_percent: int = 250
    merge_tokens: int = 8
    extra_waves: int = 2


class SpecMaskError(ValueError):
    """Unusable arguments; the message says what was wanted, what was found and what to do."""


def _need(ok: bool, what: str, wanted: object, found: object, then: str | Callable[[], str]) -> None:
    """Texts that take time to make are functions: a call that passes pays for no message."""
    if not ok:
        wanted, found, next_step = (text() if callable(text) else text for text in (wanted, found, then))
        raise SpecMaskError(f"{what}: wanted {wanted}, found {found}; {next_step}")


QUERY_TILES = (16, 32, 64, 128)


def tile_q(packed_rows: int) -> int:
    """Query tile for requests of ``q_len * group_size`` packed rows: the smallest that has room for them, or
    the largest."""
    return next((tile for tile in QUERY_TILES if packed_rows <= tile), QUERY_TILES[-1])


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a compiled module is made for.

    ``head_dim``     64, 96, 128 or 256. (The output of 16 rows of 512 elements would fill all registers
                     of a thread.)
    ``group_size``   query heads per KV head
    ``dtype_q``      "bfloat16" or "float16"; also the output's
    ``dtype_kv``     "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2"; a 16-bit one must
                     equal ``dtype_q``
    ``window``       build in the sliding window
    ``soft_cap``     build in the logits soft cap
    ``masks``        mask kinds to build, see :func:`run`
    ``max_q_len``    longest query the module will see; with the group size it decides which query
                     tiles are built
    ``words``        build words into the causal kernels, for draft trees; chains need none, and the main
                     loop has a third more instructions with them. Kernels of kind "bits" have them anyway
    """

    head_dim: int
    group_size: int
    dtype_q: str = "bfloat16"
    dtype_kv: str = "bfloat16"
    window: bool = False
    soft_cap: bool = False
    masks: tuple[str, ...] = ("causal",)
    max_q_len: int = 16
    words: bool = False

    def __post_init__(self) -> None:
        _need(
            self.head_dim in HEAD_DIMS,
            "head_dim",
            f"one of {HEAD_DIMS}",
            self.head_dim,
            "use the stock route for this model",
        )
        _need(
            self.group_size >= 1,
            "group_size",
            "at least 1",
            self.group_size,
            "pass query heads divided by KV heads",
        )
        _need(
            self.dtype_q in ("bfloat16", "float16"),
            "dtype_q",
            "bfloat16 or float16",
            self.dtype_q,
            "use the stock route for this model",
        )
        _need(
            self.dtype_kv in KV_DTYPES,
            "dtype_kv",
            f"one of {KV_DTYPES}",
            self.dtype_kv,
            "use the stock route for this cache",
        )
        _need(
            self.dtype_kv.startswith("float8") or self.dtype_kv == self.dtype_q,
            "dtype_kv",
            f"{self.dtype_q} or an fp8 dtype",
            self.dtype_kv,
            "a 16-bit cache has the query's dtype",
        )
        _need(
            bool(self.masks) and set(self.masks) <= set(MASKS),
            "masks",
            f"some of {MASKS}",
            self.masks,
            "name the mask kinds that run() will be called with",
        )
        _need(
            self.max_q_len >= 1,
            "max_q_len",
            "at least 1",
            self.max_q_len,
            "pass the longest query of a request",
        )

    @property
    def has_words(self) -> bool:
        """Whether there are causal kernels, and with words."""
        return self.words and "causal" in self.masks

    def tile(self, q_len: int) -> int:
        """Query tile of requests with ``q_len`` rows."""
        return tile_q(q_len * self.group_size)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Query tiles that some q_len from 1 to ``max_q_len`` uses."""
        return tuple(sorted({self.tile(q_len) for q_len in range(1, self.max_q_len + 1)}))

    def compiled(self) -> dict[str, object]:
        """What decides the compiled code: specs with equal values share a module."""
        return {
            "head_dim": self.head_dim,
            "dtype_q": self.dtype_q,
            "dtype_kv": self.dtype_kv,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "masks": sorted(self.masks),
            "tiles": list(self.tiles),
            "words": self.has_words,
        }

    def describe(self) -> str:
        """Short text for messages."""
        extras = "".join(f", {name}" for name in ("window", "soft_cap", "words") if getattr(self, name))
        return (
            f"head_dim {self.head_dim}, q {self.dtype_q}, kv {self.dtype_kv}, "
            f"{'/'.join(self.masks)} masks, query tiles {'/'.join(map(str, self.tiles))}{extras}"
        )


@dataclasses.dataclass(frozen=True)
class Module:
    """A loaded module and the spec it was loaded for."""

    spec: Spec
    ffi: Any

    def info(self, mask: str, tile: int) -> dict[str, int]:
        """Facts of one kernel on the current device: ``tile_kv``, ``smem_bytes``,
        ``ctas_per_sm``, ``registers``, ``spill_bytes``, ``num_sms``."""
        names = ("tile_kv", "smem_bytes", "ctas_per_sm", "registers", "spill_bytes", "num_sms")
        return dict(zip(names, self.ffi.info(_MASK_MODES[mask], tile), strict=True))


def load(spec: Spec, before_build: Callable[[str], None] | None = None) -> Module:
    """The module of a spec for the current CUDA device: prebuilt, cached or compiled now, which
    ``before_build`` is told first, in one line for the user.

    Raises :class:`~vllm_specpatch.kernels.build.BuildError`. Loading twice is free.
    """
    from . import build

    return Module(spec, build.load_module(spec, before_build=before_build))


# --- mask words ---------------------------------------------------------------------------------


def words_tensor(words: list[int]) -> torch.Tensor:
    """Words as :func:`run` takes them, int64 on the CPU."""
    import torch

    # torch has int64 everywhere and uint64 in few places: bit 63 is the sign.
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


def _block_length(q_len: int) -> None:
    _need(
        1 <= q_len <= MAX_BLOCK,
        "draft block",
        f"1 to {MAX_BLOCK} tokens",
        q_len,
        "one 64-bit word per row describes the block",
    )


def chain(q_len: int) -> torch.Tensor:
    """Words of a chain draft, int64 ``[q_len]`` on the CPU: row r sees block tokens 0 to r.

    The causal kernels do this without words; pass them only to mix chains and trees in a batch.
    """
    _block_length(q_len)
    return words_tensor([(1 << (r + 1)) - 1 for r in range(q_len)])


def full(q_len: int) -> torch.Tensor:
    """Words of a block whose rows all see each other, int64 ``[q_len]`` on the CPU."""
    _block_length(q_len)
    return words_tensor([(1 << q_len) - 1] * q_len)


def tree(parents: list[int]) -> torch.Tensor:
    """Words of a draft tree, int64 ``[len(parents)]`` on the CPU.

    ``parents[j]`` is the block index of token j's parent, smaller than j, or -1 for a root. Block
    token 0 is the last accepted token, so ``parents[0]`` is -1 and drafts hang below it. A row sees
    itself and its ancestors; such masks are subsets of the causal order.
    """
    _block_length(len(parents))
    words: list[int] = []
    for j, parent in enumerate(parents):
        _need(
            -1 <= parent < j,
            f"parents[{j}]",
            f"-1 to {j - 1}",
            parent,
            "number the tree so that parents come first",
        )
        words.append((1 << j) | (words[parent] if parent >= 0 else 0))
    return words_tensor(words)


# --- plan ---------------------------------------------------------------------------------------


def captured_shape(
    spec: Spec,
    facts: dict[str, int],
    split: str | int,
    tuning: Tuning,
    *,
    num_kv_heads: int,
    max_q_len: int,
    window_left: int,
    **sizes: int,
) -> dict[str, int]:
    """The fields of PlanShape (csrc/planner.cuh) for arguments of :class:`Plan`, all but the grid.

    ``facts`` are :meth:`Module.info`'s of the kernel; ``sizes`` are max_requests, max_rows, max_kv_len and
    page_table_stride."""
    granule = tuning.granule
    token_bytes = 2 * spec.head_dim * (1 if spec.dtype_kv.startswith("float8") else 2)
    fixed = 0
    if split == "auto":
        mode = _SPLIT_AUTO
    elif split == "none":
        mode = _SPLIT_NONE
    else:
        _need(
            isinstance(split, int) and split > 0,
            "split",
            '"auto", "none" or a chunk size',
            split,
            "pass tokens per chunk",
        )
        mode, fixed = _SPLIT_FIXED, -(-int(split) // granule) * granule
    return {
        **sizes,
        "max_q_len": max_q_len,
        "group_size": spec.group_size,
        "num_kv_heads": num_kv_heads,
        "tile_q": spec.tile(max_q_len),
        "granule": granule,
        "min_chunk": -(-max(tuning.min_chunk, facts["tile_kv"]) // granule) * granule,
        # A longer window sees all, and the kernels add to it.
        "window_left": min(max(window_left, -1), MAX_KV_LEN),
        "split_mode": mode,
        "fixed_chunk": fixed,
        "wave_ctas": max(1, facts["num_sms"] * facts["ctas_per_sm"] // num_kv_heads),
        "num_sms": facts["num_sms"],
        "cta_tokens": tuning.cta_tokens * 512 // token_bytes,
        "lone_percent": tuning.lone_percent,
        "merge_tokens": tuning.merge_tokens * 512 // token_bytes,
        "extra_waves": tuning.extra_waves,
        "grid": 0,
    }


class Plan:
    """Split-KV plan and workspace of one captured shape on one device.

    :param module: from :func:`load`
    :param num_kv_heads: KV heads; query heads are ``num_kv_heads * spec.group_size``
    :param max_requests: most requests of an update, at most 2048
    :param max_rows: most query rows of all requests together
    :param max_q_len: most rows of one request; fixes the query tile
    :param max_kv_len: longest request in KV tokens, below 2^24; bounds page-table reads
    :param page_table_stride: entries per page-table row (``page_table.stride(0)``)
    :param mask: mask kind of every run with this plan, see :func:`run`
    :param window_left: sliding window (a row sees this many tokens before itself), -1 for none
    :param split: ``"auto"``; a chunk size in tokens, which makes a request's result independent of
        the batch around it; or ``"none"``, which also does and skips the merge, but leaves a long
        request to one CTA per KV head and query tile
    :param tuning: constants of the "auto" split, for measurements
    :param device: CUDA device; the current one by default

    The plan owns ``buffer`` (int32, the lists the kernels read), ``partial_o`` and ``partial_lse``
    (partial outputs). Their addresses never change, so a captured graph may hold them. One plan
    serves any number of layers of one shape one after the other on one stream; two streams need
    two plans.
    """

    _requests = 0  # of the last update

    def __init__(
        self,
        module: Module,
        *,
        num_kv_heads: int,
        max_requests: int,
        max_rows: int,
        max_q_len: int,
        max_kv_len: int,
        page_table_stride: int,
        mask: str = "causal",
        window_left: int = -1,
        split: str | int = "auto",
        tuning: Tuning | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        import torch

        spec = module.spec
        _need(
            1 <= max_requests <= MAX_REQUESTS,
            "max_requests",
            f"1 to {MAX_REQUESTS}",
            max_requests,
            "capture smaller batches",
        )
        _need(
            1 <= max_q_len <= spec.max_q_len,
            "max_q_len",
            f"1 to the spec's {spec.max_q_len}",
            max_q_len,
            "load a module with a larger max_q_len",
        )
        _need(
            max_q_len <= max_rows <= max_requests * max_q_len,
            "max_rows",
            f"{max_q_len} to max_requests * max_q_len = {max_requests * max_q_len}",
            max_rows,
            "pass the most query rows of a batch",
        )
        _need(num_kv_heads >= 1, "num_kv_heads", "at least 1", num_kv_heads, "pass the KV heads of one rank")
        _need(
            1 <= max_kv_len <= MAX_KV_LEN,
            "max_kv_len",
            f"1 to {MAX_KV_LEN}",
            max_kv_len,
            "pass the model's length",
        )
        _need(
            page_table_stride >= 1,
            "page_table_stride",
            "at least 1",
            page_table_stride,
            "pass page_table.stride(0)",
        )
        _need(
            mask in spec.masks,
            "mask",
            f"one of the module's {spec.masks}",
            mask,
            "load a module with this mask kind",
        )
        _need(
            window_left < 0 or spec.window, "window_left", "-1", window_left, "load a module with window=True"
        )
        tile = spec.tile(max_q_len)
        # The planner sizes the partial outputs of a windowed row for window_left + tile tokens,
        # which covers the later tokens of the block only if the block fits the tile.
        _need(
            window_left < 0 or mask == "causal" or max_q_len <= tile,
            "max_q_len",
            f"at most {tile} with a window and {mask} masks",
            max_q_len,
            "use causal masks",
        )

        self.module = module
        self.mask = mask
        self.device = torch.device(device if device is not None else torch.cuda.current_device())
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        _need(self.device.type == "cuda", "device", "a CUDA device", self.device, "move the plan there")
        with torch.cuda.device(self.device):
            facts = module.info(mask, tile)
        self.shape = captured_shape(
            spec,
            facts,
            split,
            tuning or Tuning(),
            num_kv_heads=num_kv_heads,
            max_q_len=max_q_len,
            window_left=window_left,
            max_requests=max_requests,
            max_rows=max_rows,
            max_kv_len=max_kv_len,
            page_table_stride=page_table_stride,
        )
        grid, elements, partial_rows = module.ffi.sizes([self.shape[f] for f in SHAPE_FIELDS])
        self.shape["grid"] = grid
        num_heads = num_kv_heads * spec.group_size
        import tvm_ffi

        self._shape = tvm_ffi.convert([self.shape[f] for f in SHAPE_FIELDS])
        dtype = getattr(torch, spec.dtype_q)
        self.buffer = torch.zeros(elements, dtype=torch.int32, device=self.device)
        # Never read before written: a CTA writes all rows that the merge of this plan reads.
        self.partial_o = torch.empty(
            max(partial_rows, 1), num_heads, spec.head_dim, dtype=dtype, device=self.device
        )
        self.partial_lse = torch.empty(
            max(partial_rows, 1), num_heads, dtype=torch.float32, device=self.device
        )

    @property
    def workspace_bytes(self) -> int:
        """Device memory the plan holds."""
        return sum(t.numel() * t.element_size() for t in (self.buffer, self.partial_o, self.partial_lse))

    def update(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Plans a batch on the current stream: one kernel, no host read, no copy to the device.

        ``seq_lens`` int32 ``[requests]``, KV tokens of each request with its query tokens;
        ``query_start_loc`` int32 ``[requests + 1]``, non-decreasing row offsets. Both contiguous on
        the plan's device, ``requests <= max_requests``. A request without rows (padding) may have
        any length. The lengths are copied: the tensors may change once the kernel has run. Rows before
        the first offset belong to no request.
        """
        self._check_lengths("seq_lens", seq_lens)
        self._check_lengths("query_start_loc", query_start_loc)
        requests = seq_lens.shape[0]
        _need(
            1 <= requests <= self.shape["max_requests"],
            "seq_lens",
            lambda: f"1 to {self.shape['max_requests']} requests",
            requests,
            "make a plan for this batch",
        )
        _need(
            query_start_loc.shape[0] == requests + 1,
            "query_start_loc",
            lambda: f"{requests + 1} entries",
            query_start_loc.shape[0],
            "pass one offset more than requests",
        )
        self.module.ffi.plan(self.buffer, seq_lens, query_start_loc, self._shape)
        self._requests = requests

    def _check_lengths(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        _need(
            tensor.dtype == torch.int32
            and tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.device == self.device,
            name,
            lambda: f"a contiguous int32 vector on {self.device}",
            lambda: f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
            "pass the scheduler's device tensors",
        )

    def check(self) -> None:
        """Waits for the device and raises SpecMaskError if the last update got impossible lengths:
        negative ones, more rows or tokens than captured, or overlapping rows. For debugging."""
        _, _, rows, status, _ = self.buffer[:5].tolist()
        reasons = [
            text
            for bit, text in (
                (1, f"a request with a negative number of rows or more than {self.shape['max_q_len']}"),
                (2, f"rows beyond the captured {self.shape['max_rows']}, or overlapping"),
                (4, f"a KV length below 0 or above {self.shape['max_kv_len']}"),
            )
            if status & bit
        ]
        _need(
            status == 0,
            "lengths",
            "what the plan was captured for",
            " and ".join(reasons) or status,
            f"the planned batch has {rows} rows; see the tensors given to update()",
        )

    def lists(self) -> dict[str, list[int]]:
        """The last plan's lists on the host, for tests and inspection. Waits for the device."""
        return unpack(self.shape, self.buffer.cpu().tolist())


def unpack(shape: dict[str, int], buffer: list[int]) -> dict[str, list[int]]:
    """Names the arrays in a plan buffer (PlanLayout in csrc/planner.cuh)."""
    requests, rows, grid = shape["max_requests"], shape["max_rows"], shape["grid"]
    fields = (
        ("header", 5),
        ("request_indices", grid),
        ("qo_tile_indices", grid),
        ("kv_tile_indices", grid),
        ("o_indptr", requests + 1),
        ("q_start", requests),
        ("q_len", requests),
        ("kv_len", requests),
        ("merge_rows", 2 * rows),
        ("block_valid", (grid + 3) // 4),
    )
    out, at = {}, 0
    for name, length in fields:
        out[name] = buffer[at : at + length]
        at += -(-length // 4) * 4
    packed = b"".join((w & 0xFFFFFFFF).to_bytes(4, "little") for w in out["block_valid"])
    out["block_valid"] = list(packed[:grid])
    return out


# --- run ----------------------------------------------------------------------------------------


def run(
    plan: Plan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    soft_cap: float = 0.0,
    layout: str = "NHD",
) -> torch.Tensor:
    """Attention of the batch of the last ``plan.update``, on the current stream.

    :param q: ``[rows, heads, head_dim]``, last dimension contiguous, rows and heads may be strided
    :param k_cache: ``[pages, page_size, kv_heads, head_dim]`` for layout "NHD",
        ``[pages, kv_heads, page_size, head_dim]`` for "HND"; last dimension contiguous, otherwise
        strided, e.g. one half of ``[pages, 2, ...]``
    :param v_cache: like ``k_cache``, same strides
    :param page_table: int32 ``[requests, entries]`` page numbers, row stride as in the plan; entries
        past a request's last page are never dereferenced
    :param mask: int64 or uint64 ``[rows]``, a word per row. Kind "causal": optional, if the module has
        words, ANDed with the causal order (chains need none, trees are subsets of it). Kind "bits":
        required, any bits.
        Kind "full": none, all rows see all tokens of their request
    :param out: ``[rows, heads, head_dim]`` contiguous, dtype of q; made if not given
    :param lse: float32 ``[rows, heads]`` contiguous, gets the base-2 log-sum-exp (with soft cap and
        scales applied); -inf for a row that saw nothing
    :param sm_scale: ``head_dim ** -0.5`` by default
    :param k_scale, v_scale: numbers, or float32 tensors of one element on the device, which a
        captured graph reads at each replay
    :param soft_cap: logits soft cap, > 0 exactly if the module was built with it
    :returns: ``out``

    Rows of no request are not written. A row that sees nothing gets zeros. ``sm_scale`` times the K scales
    must be positive. With causal masks a request must be at least as long as its query (it contains it);
    "bits" and "full" take any length.
    """
    import torch

    spec, shape = plan.module.spec, plan.shape
    _need(layout in ("NHD", "HND"), "layout", "NHD or HND", layout, "name the KV cache's layout")
    dtype = getattr(torch, spec.dtype_q)
    heads = shape["num_kv_heads"] * spec.group_size
    _need(
        q.dim() == 3 and tuple(q.shape[1:]) == (heads, spec.head_dim) and q.dtype == dtype,
        "q",
        lambda: f"{spec.dtype_q} [rows, {heads}, {spec.head_dim}]",
        lambda: f"{q.dtype} {tuple(q.shape)}",
        "check heads per rank and the plan's module",
    )
    rows = q.shape[0]
    _need(
        rows <= shape["max_rows"],
        "q",
        lambda: f"at most {shape['max_rows']} rows",
        rows,
        "make a plan for this batch",
    )
    _need(
        q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0,
        "q",
        "16-byte aligned rows and heads",
        lambda: f"strides {q.stride()}",
        "make it contiguous",
    )
    _check_cache("k_cache", k_cache, layout, plan)
    _check_cache("v_cache", v_cache, layout, plan)
    _need(
        k_cache.stride() == v_cache.stride() and k_cache.shape == v_cache.shape,
        "v_cache",
        lambda: f"shape and strides of k_cache, {tuple(k_cache.shape)} {k_cache.stride()}",
        lambda: f"{tuple(v_cache.shape)} {v_cache.stride()}",
        "pass the two halves of one cache",
    )
    page_size = k_cache.shape[1] if layout == "NHD" else k_cache.shape[2]
    _need(
        page_table.dtype == torch.int32
        and page_table.dim() == 2
        and page_table.stride(1) == 1
        and page_table.stride(0) == shape["page_table_stride"],
        "page_table",
        lambda: f"int32 [requests, entries] with row stride {shape['page_table_stride']}",
        lambda: f"{page_table.dtype} {tuple(page_table.shape)} with strides {page_table.stride()}",
        "make the plan with this table's row stride",
    )
    _need(
        page_table.shape[0] >= plan._requests,
        "page_table",
        lambda: f"a row for each of the {plan._requests} requests of the last update",
        page_table.shape[0],
        "pass the table of the batch that was planned",
    )
    _need(
        shape["max_kv_len"] <= shape["page_table_stride"] * page_size,
        "page_table",
        lambda: f"rows for {shape['max_kv_len']} tokens",
        lambda: f"{shape['page_table_stride']} pages of {page_size}",
        "lower the plan's max_kv_len",
    )
    if mask is not None:
        _need(plan.mask != "full", "mask", "no words with full masks", "words", 'plan with mask="bits"')
        _need(
            shape["max_q_len"] <= MAX_BLOCK,
            "mask",
            lambda: f"draft blocks of at most {MAX_BLOCK} tokens",
            shape["max_q_len"],
            "drop the words",
        )
        _need(
            plan.mask == "bits" or spec.words,
            "mask",
            "a module with words",
            "one without",
            "load a module with words=True",
        )
        _need(
            mask.dtype in (torch.int64, torch.uint64)
            and mask.dim() == 1
            and mask.is_contiguous()
            and mask.shape[0] >= rows,
            "mask",
            lambda: f"contiguous int64 [{rows}]",
            lambda: f"{mask.dtype} {tuple(mask.shape)}",
            "pass one word per row",
        )
    else:
        _need(plan.mask != "bits", "mask", "a word per row", "none", 'plan with mask="causal" or "full"')
    _need(
        (soft_cap > 0) == spec.soft_cap,
        "soft_cap",
        "> 0 exactly if the module has it",
        soft_cap,
        lambda: f"load a module with soft_cap={soft_cap > 0}",
    )
    if out is None:
        out = torch.empty(rows, heads, spec.head_dim, dtype=dtype, device=q.device)
    _need(
        out.shape == q.shape and out.dtype == dtype and out.is_contiguous() and out.data_ptr() % 16 == 0,
        "out",
        lambda: f"contiguous {spec.dtype_q} {tuple(q.shape)}, 16-byte aligned",
        lambda: f"{out.dtype} {tuple(out.shape)} with strides {out.stride()} at {out.data_ptr():#x}",
        "pass a contiguous buffer",
    )
    if lse is not None:
        _need(
            lse.dtype == torch.float32 and tuple(lse.shape) == (rows, heads) and lse.is_contiguous(),
            "lse",
            lambda: f"contiguous float32 ({rows}, {heads})",
            lambda: f"{lse.dtype} {tuple(lse.shape)}",
            "pass a contiguous buffer",
        )
    for name, tensor in (
        ("q", q),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("page_table", page_table),
        ("out", out),
        ("mask", mask),
        ("lse", lse),
    ):
        if tensor is not None and tensor.device != plan.device:
            _need(False, name, f"a tensor on {plan.device}", tensor.device, "move it to the plan's device")
    # The running maximum is that of products before they are scaled.
    scale = float(sm_scale if sm_scale is not None else spec.head_dim**-0.5)
    _need(scale > 0, "sm_scale", "above 0", scale, "negate q instead")
    k_tensor = _scale_tensor("k_scale", k_scale, plan)
    _need(k_tensor is not None or k_scale > 0, "k_scale", "above 0", k_scale, "negate q instead")
    v_tensor = _scale_tensor("v_scale", v_scale, plan)
    plan.module.ffi.run(
        _MASK_MODES[plan.mask],
        plan._shape,
        plan.buffer,
        plan.partial_o,
        plan.partial_lse,
        q,
        k_cache,
        v_cache,
        layout == "HND",
        page_table,
        mask,
        out,
        lse,
        scale,
        1.0 if k_tensor is not None else float(k_scale),
        1.0 if v_tensor is not None else float(v_scale),
        k_tensor,
        v_tensor,
        float(soft_cap),
    )
    return out


def _check_cache(name: str, cache: torch.Tensor, layout: str, plan: Plan) -> None:
    import torch

    spec, kv_heads = plan.module.spec, plan.shape["num_kv_heads"]
    form = "[pages, page_size, {0}, {1}]" if layout == "NHD" else "[pages, {0}, page_size, {1}]"
    _need(
        cache.dim() == 4
        and cache.shape[2 if layout == "NHD" else 1] == kv_heads
        and cache.shape[3] == spec.head_dim
        and cache.dtype == getattr(torch, spec.dtype_kv),
        name,
        lambda: f"{spec.dtype_kv} {form.format(kv_heads, spec.head_dim)}",
        lambda: f"{cache.dtype} {tuple(cache.shape)}",
        "view the cache in its layout and dtype",
    )
    size = cache.element_size()
    _need(
        cache.stride(3) == 1
        and all(stride * size % 16 == 0 for stride in cache.stride()[:3])
        # The binding divides by what the distances of pages and tokens have in common.
        and (cache.stride(0) > 0 or cache.stride(1 if layout == "NHD" else 2) > 0)
        and cache.data_ptr() % 16 == 0,
        name,
        "16-byte aligned tokens and heads, not all in one place",
        lambda: f"strides {cache.stride()}",
        "pass a view of the whole cache",
    )


def _scale_tensor(name: str, scale: float | torch.Tensor, plan: Plan) -> torch.Tensor | None:
    import torch

    if not isinstance(scale, torch.Tensor):
        return None
    _need(
        scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == plan.device,
        name,
        f"a number or one float32 on {plan.device}",
        f"{scale.dtype} {tuple(scale.shape)} on {scale.device}",
        "convert it when the layer is made",
    )
    return scale
