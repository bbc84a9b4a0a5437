"""Route ``native``: FlashInfer's own decode wrapper with ``q_len_per_req`` (FlashInfer 0.6.16 and later).

Causal, uniform, FA2 only, planned on the host: see flashinfer pull request 3871. Before 0.6.16 the same
wrapper answered q_len > 1 with silently wrong output (only the first rows were attended, without a causal
mask), so older releases are refused, not tried.
"""

from __future__ import annotations

from typing import Any

from packaging.version import InvalidVersion, Version

from .. import gate
from ..patch import Finding, State
from . import seams
from .digests import FLASHINFER_DECODE_DIGESTS

FIRST_FLASHINFER = "0.6.16"
#: Plans and page-locked staging are allocated in steps of this many bytes.
INT_WORKSPACE_STEP = 64 * 1024


class NativeRoute:
    """One per metadata builder. Owns the multi-token wrappers and their integer workspaces.

    Wrappers are keyed by ``(requests, q_len)``: the same number of decode tokens is another shape with
    another split, and a graph that replays over a wrapper planned for the other shape faults. The float
    workspace (split-KV partial outputs) is the builder's own unless a shape needs more.
    """

    name = "native"
    builds = False
    non_causal = False

    def __init__(self, builder: Any, flashinfer_backend: Any) -> None:
        self._builder = builder
        self._backend = flashinfer_backend
        self._graph_wrappers: dict[tuple[int, int], Any] = {}
        self._eager_wrapper: Any = None
        self._own_float_workspace: Any = None

    @classmethod
    def why_not(cls) -> Finding | None:
        found = gate.installed_version("flashinfer-python") or "nothing"
        # By version: 0.6.13 and 0.6.14 accept q_len_per_req and ignore it on FA2.
        try:
            known = Version(found) >= Version(FIRST_FLASHINFER)
        except InvalidVersion:
            known = False
        if known:
            return gate.check_sources(FLASHINFER_DECODE_DIGESTS)
        return Finding(
            State.REFUSED,
            "FlashInfer's decode wrapper is silently wrong for more than one query token per request",
            wanted=f"flashinfer-python >= {FIRST_FLASHINFER}",
            found=found,
            next_step="use the FlashInfer that this vLLM pins, if that is newer",
        )

    @classmethod
    def prepare(cls, vllm_config: Any, flashinfer_backend: Any, max_q_len: int) -> Finding | None:
        return None  # wrappers of FlashInfer's own prefill module, which vLLM itself needs

    def decode_wrapper(self, num_requests: int, q_len: int, graph: bool) -> Any:
        if not graph:
            if self._eager_wrapper is None:
                self._eager_wrapper = self._make_wrapper()
            self._eager_wrapper.specpatch_shape = (num_requests, q_len)
            return self._eager_wrapper
        shape = (num_requests, q_len)
        wrapper = self._graph_wrappers.get(shape)
        if wrapper is None:
            builder = self._builder
            wrapper = self._graph_wrappers[shape] = self._make_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=builder.paged_kv_indptr.gpu[: num_requests + 1],
                paged_kv_indices_buffer=seams.page_indices(builder),
                paged_kv_last_page_len_buffer=builder.paged_kv_last_page_len.gpu[:num_requests],
            )
            wrapper.specpatch_shape = shape
        return wrapper

    def _make_wrapper(self, **graph_buffers: Any) -> Any:
        wrapper = self._backend.BatchDecodeWithPagedKVCacheWrapper(
            self._builder._get_workspace_buffer(),
            seams.kv_cache_layout(self._builder, self._backend),
            use_tensor_cores=True,
            # "auto" resolves to fa3 for some dtypes on sm_90, and fa3 has no multi-token decode.
            backend="fa2",
            **graph_buffers,
        )
        wrapper.specpatch_planned = False
        return wrapper

    def plan(self, wrapper: Any, plan_arguments: dict[str, Any]) -> None:
        num_requests, q_len = wrapper.specpatch_shape
        arguments = dict(plan_arguments)
        # vLLM slices these by decode *tokens*; the plan is made by requests.
        arguments["indptr"] = arguments.pop("indptr_cpu")[: num_requests + 1]
        arguments["last_page_len"] = arguments.pop("last_page_len_cpu")[:num_requests]
        arguments["q_len_per_req"] = q_len
        if "seq_lens_cpu" in arguments:  # from vLLM 0.30: staged in page-locked memory
            arguments["seq_lens"] = arguments.pop("seq_lens_cpu")[:num_requests]
        if wrapper.is_cuda_graph_enabled and wrapper.specpatch_planned:
            arguments.pop("seq_lens", None)  # derived from the others
            del arguments["o_data_type"]  # frozen by the first plan
            self._backend.fast_decode_plan(wrapper, **arguments)
            return
        if wrapper.is_cuda_graph_enabled:
            self._size_workspace(wrapper, arguments)
        wrapper.plan(**arguments)
        wrapper.specpatch_planned = True

    def _size_workspace(self, wrapper: Any, arguments: dict[str, Any]) -> None:
        """Gives a graph wrapper exactly the workspace that its shape needs.

        The stock 8 MiB of plan (and as much page-locked memory) per wrapper adds up to hundreds of MiB over
        all captured shapes; and the builder's float workspace is too small for wide models (vLLM 40023: a
        64-head model overflowed ``batch_prefill_tmp_v`` by 100 MiB), which would end the server at capture.
        """
        import torch

        arguments = {k: v for k, v in arguments.items() if k not in ("non_blocking",)}
        float_bytes, int_bytes = wrapper.workspace_size(**arguments)
        float_workspace = self._builder._get_workspace_buffer()
        if float_bytes > float_workspace.numel():
            own = self._own_float_workspace
            if own is None or own.numel() < float_bytes:
                # Graphs captured with the smaller one keep it alive through their wrapper.
                own = torch.empty(float_bytes, dtype=torch.uint8, device=float_workspace.device)
                self._own_float_workspace = own
            float_workspace = own
        int_bytes = -(-int_bytes // INT_WORKSPACE_STEP) * INT_WORKSPACE_STEP
        int_workspace = torch.empty(int_bytes, dtype=torch.uint8, device=float_workspace.device)
        wrapper.reset_workspace_buffer(float_workspace, int_workspace)
