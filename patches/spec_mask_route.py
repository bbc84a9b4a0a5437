"""Route ``spec_mask``: verify attention of ``vllm_specpatch.kernels``, planned on the device.

A decode batch is planned by one small kernel from vLLM's own device tensors (``seq_lens``,
``query_start_loc``, the block table as it is), launched in front of the first layer that runs: a captured
graph holds it and plans itself from what these tensors are at every replay. vLLM's ``build()`` body, which
waits for the GPU to copy the lengths and plans on the host, is skipped; only real prefills of a mixed batch
go through it. Decodes may have different query lengths up to the reorder threshold: n-gram and trimmed
drafts stay decodes. Blocks of a non-causal drafter, whose rows all see each other, are served the same way,
with plans of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import wrapt

from ..errors import SpecPatchError
from ..kernels import build as kernel_build
from ..kernels import probe, spec_mask
from ..patch import Finding, State
from . import seams
from .routes_base import RouteUnavailable

log = logging.getLogger("vllm.specpatch")
#: vLLM's names of caches that do not have the model's dtype.
KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
#: Mask kind of a batch by vLLM's ``causal`` of it.
MASKS = {True: "causal", False: "full"}
#: What this file can set on the metadata of a decode batch. A release has some of these; a field that is not
#: among them would be left at a default unseen.
METADATA_FIELDS = {
    "kv_cache_layout",
    "num_actual_tokens",
    "slot_mapping",
    "q_data_type",
    "q_data_type_prefill",
    "q_data_type_decode",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "causal",
    "prefill",
    "decode",
    "use_cascade",
    "cascade_wrapper",
}


def _first(tensor: Any, count: int) -> Any:
    """The first rows. A batch of decodes has no others, and to slice takes five times as long as to ask."""
    return tensor if tensor.size(0) == count else tensor[:count]


class SpecMaskDecode:
    """What ``FIDecode.wrapper`` holds for one batch: a planned shape and the batch's block table.

    A new one per build, so that a later build cannot change the table under a step already in flight; the
    plan and its workspace are shared and stay at their addresses.

    The lengths are read when the first layer runs, as FLASH_ATTN reads them, and by a captured graph from the
    addresses that it was captured with: vLLM keeps its inputs there (vllm/v1/worker/gpu/input_batch.py,
    InputBuffers), or no backend's decode graphs could be replayed.
    """

    def __init__(
        self,
        route: SpecMaskRoute,
        plan: spec_mask.Plan,
        seq_lens: Any,
        query_start_loc: Any,
        block_table: Any,
    ) -> None:
        self.plan = plan
        self.block_table = block_table
        self._seq_lens, self._query_start_loc = seq_lens, query_start_loc
        self._layout = route.layout
        # FlashInferImpl.forward asserts that these equal the layer's.
        self._window_left = route.window_left
        self._logits_soft_cap = route.soft_cap
        self._sm_scale = route.sm_scale
        self._first_layer: int | None = None
        self._capturing = False

    def replan(self) -> None:
        """Lets the next layer that runs plan: the lengths have changed on the device."""
        self._first_layer = None

    def _plan_before(self, key_cache: Any) -> None:
        """Plans if ``key_cache`` is of the first layer of a forward pass: of the first that runs, and when it
        runs again (a warm-up and then the capture, the draft steps of one graph). A pass that starts
        with another layer without :meth:`replan` has the same lengths (a drafter on its target's metadata). A
        graph must hold its own planning whatever ran before it was captured."""
        import torch

        layer = key_cache.data_ptr()
        # Builds of torch without CUDA have no streams to ask.
        capturing = key_cache.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._first_layer in (None, layer) or capturing != self._capturing:
            self.plan.update(self._seq_lens, self._query_start_loc)
            self._first_layer, self._capturing = layer, capturing

    def run(
        self,
        q: Any,
        kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        kv_cache_sf: Any = None,
        sinks: Any = None,
    ) -> Any:
        """As ``BatchDecodeWithPagedKVCacheWrapper.run`` is called by vLLM. ``q`` ``[rows, heads, head_dim]``,
        caches as views in vLLM's layout; writes ``out``. Scales multiply as FlashInfer's do. Raises
        ``SpecMaskError`` for sinks: a model with any is left to vLLM (decision.py), this is the last line."""
        if sinks is not None:
            raise spec_mask.SpecMaskError(
                "sinks: wanted none, found attention sinks; set VLLM_SPECPATCH=0 for this model"
            )
        key_cache, value_cache = seams.key_and_value(kv_cache)
        self._plan_before(key_cache)
        return spec_mask.run(
            self.plan,
            q,
            key_cache,
            value_cache,
            self.block_table,
            out=out,
            sm_scale=self._sm_scale * (1.0 if q_scale is None else q_scale),
            k_scale=1.0 if k_scale is None else k_scale,
            v_scale=1.0 if v_scale is None else v_scale,
            soft_cap=self._logits_soft_cap,
            layout=self._layout,
        )


class Staging:
    """Guards the page-locked memory that vLLM's ``build()`` and FlashInfer's ``plan()`` copy from.

    Each build writes it anew and queues the copies. Stock may: every build of it waits for the GPU first.
    Without that wait a build overwrites what an earlier one has queued and not yet copied: of two prefill
    batches in a row the first ran with the second's plan (an illegal memory access at batch 32). So a build
    waits for the copies of the one before it, which are long done unless prefills follow each other.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._copied: Any = None

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        import torch

        if self._device.type != "cuda":
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))


class SpecMaskRoute:
    """One per metadata builder. Owns a plan per captured shape, one for all other batches of a block table's
    layout and mask, and the workspace that they share: one plan is in use at a time, on one stream."""

    name = "spec_mask"
    builds = True
    non_causal = True

    def __init__(self, builder: Any, flashinfer_backend: Any) -> None:
        self._builder = builder
        self._backend = flashinfer_backend
        self.window_left = builder.window_left
        self.soft_cap = builder.logits_soft_cap or 0.0
        self.sm_scale = builder.sm_scale
        self._fields = {field.name for field in dataclasses.fields(flashinfer_backend.FlashInferMetadata)}
        if not self._fields <= METADATA_FIELDS:
            raise RouteUnavailable(
                Finding(
                    State.REFUSED,
                    "FlashInferMetadata has other fields than this package fills",
                    wanted=", ".join(sorted(METADATA_FIELDS)),
                    found=", ".join(sorted(self._fields)),
                )
            )
        spec = self._spec()
        self._module = load(spec)
        #: Graphs may hold decodes of any lengths, and replay any others of the same sum.
        self._ragged_graphs = seams.trims_on_device(builder.vllm_config)
        #: By (requests, tokens, causal).
        self._plans: dict[tuple[int, int, bool], spec_mask.Plan] = {}
        #: By (row stride, columns, causal); a runner need not keep those of the block table the same.
        self._eager_plans: dict[tuple[int, int, bool], spec_mask.Plan] = {}
        self._workspace = self._reserve()
        self._staging = Staging(builder.device)
        mib = sum(t.numel() * t.element_size() for t in self._workspace) / 2**20
        log.info("spec-mask route ready (%s), workspace %.1f MiB", spec.describe(), mib)

    @classmethod
    def why_not(cls) -> Finding | None:
        try:
            kernel_build.check_flashinfer()
        except kernel_build.BuildError as e:
            return Finding(State.REFUSED, str(e))
        if not module_is_within_reach():
            return Finding(
                State.REFUSED,
                "the spec-mask module is not built and cannot be built here",
                wanted="nvcc, or a folder of prebuilt modules",
                found="neither",
                next_step="run `vllm-specpatch build` where nvcc is, and set VLLM_SPECPATCH_KERNELS",
            )
        return None

    @classmethod
    def prepare(cls, vllm_config: Any, flashinfer_backend: Any, max_q_len: int) -> Finding | None:
        """Loads, and if need be compiles, the modules of all layers of the model on this backend."""
        for option, found, most, what in (
            (
                "max_num_seqs",
                vllm_config.scheduler_config.max_num_seqs,
                spec_mask.MAX_REQUESTS,
                "more requests at a time",
            ),
            (
                "max_model_len",
                vllm_config.model_config.max_model_len,
                spec_mask.MAX_KV_LEN,
                "longer requests",
            ),
        ):
            if found > most:
                return Finding(
                    State.REFUSED,
                    f"{what} than the planner takes",
                    wanted=f"{option} up to {most}",
                    found=str(found),
                    next_step=f"lower --{option.replace('_', '-')}",
                )
        try:
            for spec in layer_specs(vllm_config, flashinfer_backend, max_q_len):
                load(spec)
        except RouteUnavailable as e:
            return e.finding
        return None

    def _spec(self) -> spec_mask.Spec:
        builder = self._builder
        return make_spec(
            head_dim=builder.head_dim,
            group_size=builder.num_qo_heads // builder.num_kv_heads,
            dtype_q=_name(builder.model_config.dtype),
            dtype_kv=_name(builder.kv_cache_dtype),
            window=self.window_left >= 0,
            soft_cap=self.soft_cap > 0,
            max_q_len=builder.reorder_batch_threshold,
            masks=masks_of(builder.vllm_config),
        )

    def serves(self, causal: Any) -> bool:
        """Whether batches with this ``causal`` are built here. A tensor (by request) is left to vLLM."""
        return isinstance(causal, bool) and MASKS[causal] in self._module.spec.masks

    def _reserve(self) -> tuple[Any, Any]:
        """The partial outputs of the largest batch that is not captured. Owned by this route from its start:
        nothing of this size may be allocated while requests are served."""
        requests, q_len = self._largest_batch()
        longest = self._builder.model_config.max_model_len + q_len
        pages = -(-longest // self._builder.page_size)
        largest: tuple[Any, Any] | None = None
        try:
            # Kernels of different masks may run at different occupancy, and their plans split accordingly.
            for causal, mask in MASKS.items():
                if mask in self._module.spec.masks:
                    plan = self._plan(requests, requests * q_len, q_len, longest, pages, causal)
                    if largest is None or largest[0].shape[0] < plan.partial_o.shape[0]:
                        largest = plan.partial_o, plan.partial_lse
        except Exception as e:  # above all: no memory left for it
            why = f"no workspace for route spec_mask: {type(e).__name__}: {e}"
            raise RouteUnavailable(Finding(State.FAILED, why)) from e
        assert largest is not None
        return largest

    def _largest_batch(self) -> tuple[int, int]:
        """(requests, rows of each)"""
        builder = self._builder
        return builder.vllm_config.scheduler_config.max_num_seqs, builder.reorder_batch_threshold

    # -- plans -------------------------------------------------------------------------------------

    def _plan(
        self, requests: int, rows: int, q_len: int, max_kv_len: int, table_stride: int, causal: bool
    ) -> spec_mask.Plan:
        """A plan with partial outputs of its own."""
        return spec_mask.Plan(
            self._module,
            num_kv_heads=self._builder.num_kv_heads,
            max_requests=requests,
            max_rows=rows,
            max_q_len=q_len,
            max_kv_len=max_kv_len,
            page_table_stride=table_stride,
            mask=MASKS[causal],
            window_left=self.window_left,
            device=self._builder.device,
        )

    def _plan_in_workspace(
        self, requests: int, rows: int, q_len: int, block_table: Any, causal: bool
    ) -> spec_mask.Plan:
        # Drafts may reach past max_model_len for a step; the table bounds what can be read.
        reach = block_table.shape[1] * self._builder.page_size
        plan = self._plan(requests, rows, q_len, reach, block_table.stride(0), causal)
        # One plan is live at a time, so all share the partial outputs of the largest: a workspace for
        # every captured shape would be over a GiB. A graph keeps the one that it was captured with.
        if self._workspace[0].shape[0] < plan.partial_o.shape[0]:
            self._workspace = (plan.partial_o, plan.partial_lse)
        else:
            plan.partial_o, plan.partial_lse = self._workspace
        return plan

    def plan_for(
        self, requests: int, tokens: int, causal: bool, block_table: Any, graph: bool
    ) -> spec_mask.Plan:
        """The plan of a shape that is captured (same object each time), or the one for every other batch."""
        if graph:
            plan = self._plans.get((requests, tokens, causal))
            if plan is None:
                longest = self._builder.reorder_batch_threshold if self._ragged_graphs else tokens // requests
                q_len = max(min(longest, tokens), 1)
                plan = self._plan_in_workspace(requests, tokens, q_len, block_table, causal)
                self._plans[requests, tokens, causal] = plan
            return plan
        table = block_table.stride(0), block_table.shape[1], causal
        plan = self._eager_plans.get(table)
        if plan is None:
            requests, q_len = self._largest_batch()
            plan = self._plan_in_workspace(requests, requests * q_len, q_len, block_table, causal)
            self._eager_plans[table] = plan
        return plan

    # -- metadata ----------------------------------------------------------------------------------

    def stock(self, build: Any) -> Any:
        """Metadata made by vLLM's own ``build``, called without arguments, on staging memory that is free."""
        with self._staging:
            return build()

    def build(self, common: Any, stock_build: Any, capturing: bool) -> Any:
        """``FlashInferMetadata`` of a batch that this route :meth:`serves`, without reading a device value.

        ``stock_build(common)`` plans the prefills of a mixed batch. Raises whatever the kernels raise for
        arguments of the wrong kind: graphs were promised, so there is no quiet way back.
        """
        builder = self._builder
        decodes, prefills, decode_tokens, _ = self._split(
            common, decode_threshold=builder.reorder_batch_threshold, require_uniform=False
        )
        if not decodes:
            return self.stock(lambda: stock_build(common))
        # A graph replays without this wrapper. A batch of a captured shape that runs all the same may have
        # rows of unequal length, which a plan for uniform ones would drop (dynamic k: 6 + 2 rows where 2 x 4
        # were captured).
        uniform = decode_tokens % decodes == 0 and common.max_query_len <= decode_tokens // decodes
        graph = capturing and not prefills and (self._ragged_graphs or uniform)
        block_table = _first(common.block_table_tensor, decodes)
        plan = self.plan_for(decodes, decode_tokens, common.causal, block_table, graph)
        lengths = _first(common.seq_lens, decodes), _first(common.query_start_loc, decodes + 1)
        wrapper = SpecMaskDecode(self, plan, *lengths, block_table)
        decode = self._backend.FIDecode(wrapper=wrapper)
        if prefills:
            part = prefills_only(common, decodes, decode_tokens)
            metadata = self.stock(lambda: stock_build(part))
            metadata.num_actual_tokens = common.num_actual_tokens
            metadata.slot_mapping = common.slot_mapping
            metadata.num_decodes = decodes
            metadata.num_decode_tokens = decode_tokens
            metadata.decode = decode
            return metadata
        return self._backend.FlashInferMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            decode=decode,
            causal=common.causal,
            **self._fixed_fields,
        )

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Makes the next draft step plan itself; vLLM 0.28 and later may call this in place of ``build()``.

        It may record all steps in one CUDA graph, and then this never runs again in Python
        (vllm/v1/attention/backend.py). A kernel that reads the runner's own persistent buffers is what it
        asks for; a plan made on the host could not do it.
        """
        wrapper = metadata.decode.wrapper if metadata.decode is not None else None
        if not isinstance(wrapper, SpecMaskDecode):
            raise SpecPatchError(
                "a draft step was not planned by route spec_mask, which promised to update it; "
                "VLLM_SPECPATCH_ROUTE=native promises no such thing"
            )
        wrapper.replan()

    @functools.cached_property
    def _split(self) -> Any:
        """vLLM's ``split_decodes_and_prefills`` without our wrapper, which is for route native and took a
        quarter of a build."""
        split = self._backend.split_decodes_and_prefills
        return split.__wrapped__ if isinstance(split, wrapt.FunctionWrapper) else split

    @functools.cached_property
    def _fixed_fields(self) -> dict[str, Any]:
        """The fields that are the same for every decode batch. First asked for when the first batch is built:
        the builder's query dtypes and cache layout are settled after it has made this route."""
        fixed = {
            "kv_cache_layout": getattr(self._builder, "kv_cache_layout", None),
            **seams.query_dtypes(self._builder),
            "num_prefills": 0,
            "num_prefill_tokens": 0,
            "prefill": None,
            "use_cascade": False,
            "cascade_wrapper": None,
        }
        return {name: value for name, value in fixed.items() if name in self._fields}

    @functools.cached_property
    def layout(self) -> str:
        """``NHD`` or ``HND``, of the KV cache (laid out after the builders were made)."""
        return seams.kv_cache_layout(self._builder, self._backend)


def masks_of(vllm_config: Any) -> tuple[str, ...]:
    """The mask kinds that the batches of a configuration need. A non-causal drafter needs both: it may mix
    causal layers (of a sliding window) with others."""
    return tuple(MASKS.values()) if seams.may_be_non_causal(vllm_config) else (MASKS[True],)


def make_spec(**fields: Any) -> spec_mask.Spec:
    """A spec, or :class:`.routes_base.RouteUnavailable` for what the kernels do not do."""
    try:
        spec = spec_mask.Spec(**fields)
    except spec_mask.SpecMaskError as e:
        raise RouteUnavailable(Finding(State.REFUSED, str(e))) from e
    tile = spec.tile(spec.max_q_len)
    if spec.window and MASKS[False] in spec.masks and spec.max_q_len > tile:
        # Plan says so too, but plans are made when graphs have been promised.
        raise RouteUnavailable(
            Finding(
                State.REFUSED,
                "non-causal blocks with a sliding window are longer than the kernels take",
                wanted=f"at most {tile} rows",
                found=str(spec.max_q_len),
                next_step="lower num_speculative_tokens",
            )
        )
    return spec


#: Specs whose module has been checked in this process, on the one GPU that a worker has.
_proved: set[spec_mask.Spec] = set()


def load(spec: spec_mask.Spec) -> spec_mask.Module:
    """The module of a spec, compiled if need be, and seen to compute attention on this GPU. Raises
    :class:`.routes_base.RouteUnavailable`."""
    try:
        module = spec_mask.load(spec, before_build=log.info)
        if spec not in _proved:
            probe.check(module)
            _proved.add(spec)
        return module
    except kernel_build.BuildError as e:
        raise RouteUnavailable(Finding(State.REFUSED, str(e))) from e
    except probe.WrongResults as e:
        raise RouteUnavailable(Finding(State.FAILED, str(e), next_step="report this line")) from e
    except Exception as e:  # a cache that cannot be written, a library that does not load, a failed launch
        why = f"the spec-mask module could not be had: {type(e).__name__}: {e}"
        raise RouteUnavailable(Finding(State.FAILED, why)) from e


def layer_specs(vllm_config: Any, flashinfer_backend: Any, max_q_len: int) -> list[spec_mask.Spec]:
    """What the layers of a model on this backend need, target's and drafter's, each spec once."""
    dtype, masks = _name(vllm_config.model_config.dtype), masks_of(vllm_config)
    specs: dict[spec_mask.Spec, None] = {}
    for impl in seams.attention_impls(vllm_config, flashinfer_backend):
        window = getattr(impl, "sliding_window", None)
        spec = make_spec(
            head_dim=impl.head_size,
            group_size=impl.num_heads // impl.num_kv_heads,
            dtype_q=dtype,
            dtype_kv=KV_DTYPES.get(impl.kv_cache_dtype, dtype),
            window=window is not None and window[0] >= 0,
            soft_cap=bool(impl.logits_soft_cap),
            max_q_len=max_q_len,
            masks=masks,
        )
        specs[spec] = None
    return list(specs)


def module_is_within_reach() -> bool:
    """Whether any module can be had: a compiler, or one that is built. Not yet that it fits.

    Asked before graphs are promised: with a FlashInfer that leaves no other route, the V1 runner could not go
    back to stock when a builder then finds nothing to load.
    """
    if kernel_build.find_nvcc() is not None:
        return True
    folders = [*kernel_build.prebuilt_folders(), kernel_build.cached_library("any").parents[1]]
    return any(folder.is_dir() and any(folder.glob("spec_mask_*/*.so")) for folder in folders)


def prefills_only(common: Any, decodes: int, decode_tokens: int) -> Any:
    """The ``CommonAttentionMetadata`` of the requests behind the decodes, as a batch of its own.

    vLLM plans prefills on the host. Their lengths are known there: ``seq_lens_cpu_upper_bound`` is exact for
    rows that are still prefilling (vllm/v1/attention/backend.py). A row behind the decodes that is *not*
    prefilling has exact lengths on the device only; then vLLM's own copy, and its wait, is left in place.

    So it is where the longest request is longer than the host's lengths say: parallel drafters and draft
    models of the V1 runner add rows to every request in their first pass, on the device
    (vllm/v1/spec_decode/utils.py, extend_all_queries_by_N).
    """
    bound = common.seq_lens_cpu_upper_bound
    exact = seams.host_lengths(common)
    rows = slice(decodes, common.num_reqs)
    prefilling = common.is_prefilling
    if exact is None and bound is not None and prefilling is not None and bool(prefilling[rows].all()):
        exact = bound
    if exact is not None and int(exact[: common.num_reqs].max()) < common.max_seq_len:
        exact = None
    return seams.with_host_lengths(
        common,
        None if exact is None else exact[rows],
        query_start_loc=common.query_start_loc[decodes:] - decode_tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[decodes:] - decode_tokens,
        seq_lens=common.seq_lens[rows],
        num_reqs=common.num_reqs - decodes,
        num_actual_tokens=common.num_actual_tokens - decode_tokens,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[decode_tokens:],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[rows],
        seq_lens_cpu_upper_bound=None if bound is None else bound[rows],
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
