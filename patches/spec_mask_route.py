"""Route ``spec_mask``: verify attention of ``vllm_specpatch.kernels``, planned on the device.

A decode batch is planned by one small kernel from vLLM's own device tensors (``seq_lens``,
``query_start_loc``, the block table as it is). vLLM's ``build()`` body, which waits for the GPU to copy the
lengths and plans on the host, is skipped; only real prefills of a mixed batch go through it. Decodes may
have different query lengths up to the reorder threshold: n-gram and trimmed drafts stay decodes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from ..kernels import build as kernel_build
from ..kernels import spec_mask
from ..patch import Finding, State
from .routes_base import CapturedShapes, RouteUnavailable

#: What this file sets on the metadata of a decode batch; other fields would be left at a default unseen.
METADATA_FIELDS = {
    "num_actual_tokens",
    "slot_mapping",
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


class SpecMaskDecode:
    """What ``FIDecode.wrapper`` holds for one batch: a planned shape and the batch's block table.

    A new one per build, so that a later build cannot change the table under a step already in flight; the
    plan and its workspace are shared and stay at their addresses.
    """

    def __init__(self, route: SpecMaskRoute, plan: spec_mask.Plan, block_table: Any) -> None:
        self.plan = plan
        self.block_table = block_table
        self._layout = route.layout
        # FlashInferImpl.forward asserts that these equal the layer's.
        self._window_left = route.window_left
        self._logits_soft_cap = route.soft_cap
        self._sm_scale = route.sm_scale

    def run(
        self,
        q: Any,
        kv_cache: tuple[Any, Any],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """As ``BatchDecodeWithPagedKVCacheWrapper.run`` is called by vLLM. ``q`` ``[rows, heads, head_dim]``,
        caches as views in vLLM's layout; writes ``out``. Scales multiply as FlashInfer's do."""
        return spec_mask.run(
            self.plan,
            q,
            kv_cache[0],
            kv_cache[1],
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
    """One per metadata builder. Owns a plan per captured shape, one for all other batches, and the
    workspace that they share: one plan is in use at a time, on one stream."""

    name = "spec_mask"
    builds = True

    def __init__(self, builder: Any, flashinfer_backend: Any) -> None:
        self._builder = builder
        self._backend = flashinfer_backend
        self.layout = flashinfer_backend.get_kv_cache_layout()
        self.window_left = builder.window_left
        self.soft_cap = builder.logits_soft_cap or 0.0
        self.sm_scale = builder.sm_scale
        known = {field.name for field in dataclasses.fields(flashinfer_backend.FlashInferMetadata)}
        if known != METADATA_FIELDS:
            raise RouteUnavailable(
                Finding(
                    State.REFUSED,
                    "FlashInferMetadata has other fields than this package fills",
                    wanted=", ".join(sorted(METADATA_FIELDS)),
                    found=", ".join(sorted(known)),
                )
            )
        self._module = self._load()
        self._plans: dict[tuple[int, int], spec_mask.Plan] = {}
        self._eager_plan: spec_mask.Plan | None = None
        self._workspace: tuple[Any, Any] | None = None
        self._staging = Staging(builder.device)

    @classmethod
    def why_not(cls) -> Finding | None:
        try:
            kernel_build.check_flashinfer()
        except kernel_build.BuildError as e:
            return Finding(State.REFUSED, str(e))
        return None

    def _load(self) -> spec_mask.Module:
        builder = self._builder
        try:
            spec = spec_mask.Spec(
                head_dim=builder.head_dim,
                group_size=builder.num_qo_heads // builder.num_kv_heads,
                dtype_q=_name(builder.model_config.dtype),
                dtype_kv=_name(builder.kv_cache_dtype),
                window=self.window_left >= 0,
                soft_cap=self.soft_cap > 0,
                max_q_len=builder.reorder_batch_threshold,
            )
            log = logging.getLogger("vllm.specpatch")
            log.info("loading the spec-mask module (%s): compiled on first use, then cached", spec.describe())
            start = time.perf_counter()
            module = spec_mask.load(spec)
            log.info("spec-mask module ready after %.1f s", time.perf_counter() - start)
            return module
        except (kernel_build.BuildError, spec_mask.SpecMaskError) as e:
            raise RouteUnavailable(Finding(State.REFUSED, str(e))) from e

    # -- plans -------------------------------------------------------------------------------------

    def _make_plan(self, requests: int, rows: int, q_len: int, block_table: Any) -> spec_mask.Plan:
        builder = self._builder
        plan = spec_mask.Plan(
            self._module,
            num_kv_heads=builder.num_kv_heads,
            max_requests=requests,
            max_rows=rows,
            max_q_len=q_len,
            # Drafts may reach past max_model_len for a step; the table bounds what can be read.
            max_kv_len=block_table.shape[1] * builder.page_size,
            page_table_stride=block_table.stride(0),
            window_left=self.window_left,
            device=builder.device,
        )
        # One plan is live at a time, so all share the partial outputs of the largest: a workspace for
        # every captured shape would be over a GiB. A graph keeps the one that it was captured with.
        shared = self._workspace
        if shared is None or shared[0].shape[0] < plan.partial_o.shape[0]:
            self._workspace = (plan.partial_o, plan.partial_lse)
        else:
            plan.partial_o, plan.partial_lse = shared
        return plan

    def plan_for(self, requests: int, tokens: int, block_table: Any, graph: bool) -> spec_mask.Plan:
        """The plan of a captured shape (same object each time), or the one for every other batch."""
        if graph:
            plan = self._plans.get((requests, tokens))
            if plan is None:
                q_len = max(tokens // requests, 1)
                plan = self._make_plan(requests, requests * q_len, q_len, block_table)
                self._plans[requests, tokens] = plan
            return plan
        if self._eager_plan is None:
            builder = self._builder
            most = builder.vllm_config.scheduler_config.max_num_seqs
            q_len = builder.reorder_batch_threshold
            self._eager_plan = self._make_plan(most, most * q_len, q_len, block_table)
        return self._eager_plan

    # -- metadata ----------------------------------------------------------------------------------

    def stock(self, build: Any) -> Any:
        """Metadata made by vLLM's own ``build``, called without arguments, on staging memory that is free."""
        with self._staging:
            return build()

    def build(self, common: Any, stock_build: Any, captured: CapturedShapes) -> Any:
        """``FlashInferMetadata`` of a causal batch without reading a device value.

        ``stock_build(common)`` plans the prefills of a mixed batch. Raises whatever the kernels raise for
        arguments of the wrong kind: graphs were promised, so there is no quiet way back.
        """
        builder = self._builder
        decodes, prefills, decode_tokens, prefill_tokens = self._backend.split_decodes_and_prefills(
            common, decode_threshold=builder.reorder_batch_threshold, require_uniform=False
        )
        if not decodes:
            return self.stock(lambda: stock_build(common))
        shape = (decodes, decode_tokens)
        graph = captured.use_graph(
            shape,
            builder.enable_cuda_graph
            and not prefills
            and decode_tokens <= builder._decode_cudagraph_max_bs
            and decode_tokens % decodes == 0,
        )
        block_table = common.block_table_tensor[:decodes]
        plan = self.plan_for(*shape, block_table, graph)
        plan.update(common.seq_lens[:decodes], common.query_start_loc[: decodes + 1])
        decode = self._backend.FIDecode(wrapper=SpecMaskDecode(self, plan, block_table))
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
            q_data_type_prefill=builder.q_data_type_prefill,
            q_data_type_decode=builder.q_data_type_decode,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=0,
            num_prefill_tokens=prefill_tokens,
            causal=True,
            prefill=None,
            decode=decode,
            use_cascade=False,
            cascade_wrapper=None,
        )


def prefills_only(common: Any, decodes: int, decode_tokens: int) -> Any:
    """The ``CommonAttentionMetadata`` of the requests behind the decodes, as a batch of its own.

    vLLM plans prefills on the host. Their lengths are known there: ``seq_lens_cpu_upper_bound`` is exact for
    rows that are still prefilling (vllm/v1/attention/backend.py). A row behind the decodes that is *not*
    prefilling has exact lengths on the device only; then vLLM's own copy, and its wait, is left in place.
    """
    bound = common.seq_lens_cpu_upper_bound
    exact = common._seq_lens_cpu
    rows = slice(decodes, common.num_reqs)
    prefilling = common.is_prefilling
    if exact is None and bound is not None and prefilling is not None and bool(prefilling[rows].all()):
        exact = bound
    return common.replace(
        query_start_loc=common.query_start_loc[decodes:] - decode_tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[decodes:] - decode_tokens,
        seq_lens=common.seq_lens[rows],
        num_reqs=common.num_reqs - decodes,
        num_actual_tokens=common.num_actual_tokens - decode_tokens,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[decode_tokens:],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[rows],
        seq_lens_cpu_upper_bound=None if bound is None else bound[rows],
        _seq_lens_cpu=None if exact is None else exact[rows],
        _num_computed_tokens_cpu=None,
        _num_computed_tokens_cache=None,
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
