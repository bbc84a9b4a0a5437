"""Speculative decoding on FlashInfer keeps FULL CUDA graphs, for the target model and for the drafter.

Target
    vllm.v1.attention.backends.flashinfer: FlashInferMetadataBuilder.get_cudagraph_support, .__init__,
    .build, .build_for_cudagraph_capture, ._get_decode_wrapper, ._compute_flashinfer_kv_metadata;
    fast_plan_decode; split_decodes_and_prefills (the name in that module only). From vLLM 0.31 also
    FlashInferMetadataBuilder.get_varlen_cudagraph_max_query_len and
    FlashInferBackend.supports_device_cpu_query_lens_mismatch.
Why
    Where vLLM does not decode several tokens a request through trtllm-gen or XQA (sm_8x before 0.33, sm_12x
    before 0.28, sm_90 before 0.30, or no cubins), the gate answers UNIFORM_SINGLE_TOKEN_DECODE and the
    reorder threshold stays 1: a verify request (1 + k tokens) becomes a prefill, the mode drops to PIECEWISE
    and the drafter's k - 1 steps run eagerly; and every metadata build waits for the GPU to read the lengths.
    Measured on one H200 (8 layers, EAGLE, k = 7, context 1024, batch 1): 15.3 ms a step, 3.2 ms with
    FLASH_ATTN, 3.0 ms with this patch.
How
    The gate and the threshold follow one decision per configuration. A route takes the decodes: spec_mask
    makes their metadata itself, planned on the GPU, non-causal draft blocks (DFlash) included, which vLLM
    plans as prefills and runs eagerly, and leaves prefills to vLLM's build(); native gets a
    wrapper keyed by (requests, q_len) into vLLM's build(), planned by requests, where rows that only pad a
    captured batch are planned as q_len tokens of page 0. Everything else runs vLLM's own code, called by the
    wrappers. No subclass or registry would do: the gate is a classmethod that two runners call on the class
    and on the instance, and build() has no seam between its split and its plan.
Upstream
    https://github.com/vllm-project/vllm/issues/49547 and 54992 (open); the same design as pull request
    50885 (closed), in vLLM 0.33 below sm_90.
Remove when
    vLLM 0.32 leaves the supported range and a release's own path is as fast as spec_mask (0.33's is not).
Reason class
    temporary
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import weakref
from types import ModuleType
from typing import Any

from .. import gate
from ..errors import Refused, SpecPatchError
from ..patch import Context, Edit, Finding, Patch, State
from . import ranks, routes, seams
from .decision import (
    REPLACE_UPSTREAM_PLAIN,
    UPDATE_DRAFT_METADATA,
    VARLEN_GRAPHS,
    Decision,
    Facts,
    no_route_for_non_causal,
    vllms_own_serves,
    why_stock,
)
from .digests import FLASHINFER_DECODE_DIGESTS, VLLM_DIGESTS
from .routes_base import CapturedShapes

BUILDER = "FlashInferMetadataBuilder"
BACKEND = "FlashInferBackend"


class Commitment:
    """The decision about one ``VllmConfig``, and how far it has been carried out.

    A commitment may be withdrawn (all of it) until CUDA-graph support was promised to a runner. After that
    an error must surface: falling back quietly would replay graphs over plans that were never made.
    """

    def __init__(self, decision: Decision, candidates: list[type[routes.Route]]) -> None:
        self.decision = decision
        self.candidates = candidates
        self.promised = False

    @property
    def applies(self) -> bool:
        return self.decision.applies

    def withdraw(self, finding: Finding) -> None:
        self.decision, self.candidates = Decision(False, finding), []


class Batch:
    """The batch of the ``build()`` that runs in this thread: how vLLM split it."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.num_decodes = 0
        self.num_prefills = 0
        self.num_decode_tokens = 0

    @property
    def q_len(self) -> int:
        """Query rows per decode request; 1 where there is nothing for a multi-token route to do.

        By division, not from query_start_loc: a captured batch is laid out as num_decodes equal blocks,
        while a data-parallel dummy step may have fewer real tokens in its only request.
        """
        return max(self.num_decode_tokens // self.num_decodes, 1) if self.num_decodes else 1


class FlashInferSpecDecode:
    """The wrappers of this patch and the little state that they share. One per applied patch."""

    def __init__(self, module: ModuleType, context: Context) -> None:
        self.module = module
        self.context = context
        self.builder_class = getattr(module, BUILDER)
        self._commitments: dict[tuple[int, bool], Commitment] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._builders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ranks = ranks.Agreement()
        self._release = seams.release(gate.installed_version("vllm"))
        self._signatures = {
            name: inspect.signature(function)
            for name, function in (
                ("get_cudagraph_support", self.builder_class.get_cudagraph_support),
                ("build", self.builder_class.build),
                ("_get_decode_wrapper", self.builder_class._get_decode_wrapper),
                (
                    "_compute_flashinfer_kv_metadata",
                    self.builder_class._compute_flashinfer_kv_metadata,
                ),
                ("fast_plan_decode", module.fast_plan_decode),
            )
        }
        if seams.graphs_may_be_ragged(self.builder_class):
            ask = self.builder_class.get_varlen_cudagraph_max_query_len
            self._signatures["get_varlen_cudagraph_max_query_len"] = inspect.signature(ask)

    # -- the decision ----------------------------------------------------------------------------

    def commitment(self, vllm_config: Any, kv_cache_spec: Any) -> Commitment:
        """The commitment of a configuration; made, and said in the log, when first asked for.

        One for all groups of a model, except that groups whose head size XQA does not take have their own.
        """
        with self._lock:
            key = self._key(vllm_config, kv_cache_spec)
            found = self._commitments.get(key)
            if found is None:
                found = self._decide(vllm_config, xqa=key[1])
                self._keep(vllm_config, key, found)
                self._say(found)
            return found

    def _keep(self, vllm_config: Any, key: tuple[int, bool], commitment: Commitment) -> None:
        self._commitments[key] = commitment
        # ids are reused: a new configuration must not inherit an old decision.
        weakref.finalize(vllm_config, self._commitments.pop, key, None)

    def _key(self, vllm_config: Any, kv_cache_spec: Any) -> tuple[int, bool]:
        head_dims = [spec.head_size for spec in self._attention_specs(kv_cache_spec)]
        return id(vllm_config), seams.xqa_takes(head_dims, self._capability() or (0, 0), self._release)

    def _decide(self, vllm_config: Any, xqa: bool) -> Commitment:
        facts = self._facts(vllm_config, xqa)
        finding = why_stock(facts)
        if finding is not None:
            return self._decide_plain_decode(facts, finding)
        candidates = routes.candidates(self.context.settings.route)
        if isinstance(candidates, Finding):
            return Commitment(Decision(False, candidates), [])
        if facts.non_causal:
            candidates = [route for route in candidates if route.non_causal]
            if not candidates:
                return Commitment(Decision(False, no_route_for_non_causal(facts.route)), [])
        if facts.upstream_native:
            candidates = [route for route in candidates if route.builds]  # the rest is what vLLM does anyway
            if not candidates:
                return Commitment(Decision(False, vllms_own_serves()), [])
        # The last candidate has nobody behind it. The V1 runner asks for a promise before any builder exists,
        # so what could fail in a builder (a module that does not compile) must have happened by then.
        failure = candidates[-1].prepare(vllm_config, self.module, seams.max_decode_rows(vllm_config))
        if failure is not None:
            return Commitment(Decision(False, self._where_vllm_has_its_own(failure)), [])
        what = ", its non-causal drafts included" if facts.non_causal else ""
        applied = Finding(State.APPLIED, f"FULL CUDA graphs for FlashInfer speculative decoding{what}")
        return Commitment(Decision(True, applied, candidates[0].name), candidates)

    def _where_vllm_has_its_own(self, failure: Finding) -> Finding:
        """A failure that costs speed only is no trouble, unless the route was asked for by name."""
        if self.context.settings.route == "auto" and seams.verifies_natively(self.module):
            return vllms_own_serves(but=failure.reason)
        return failure

    def _decide_plain_decode(self, facts: Facts, finding: Finding) -> Commitment:
        """Without speculation there is nothing to promise, but stock waits for the GPU on every build there
        too: a route that plans on the device takes the decodes, with threshold and graphs left alone."""
        speculating = dataclasses.replace(facts, num_speculative_tokens=1)
        if facts.num_speculative_tokens or why_stock(speculating) is not None:
            return Commitment(Decision(False, finding), [])
        if not seams.plain_decode_waits(self._release) and facts.route not in REPLACE_UPSTREAM_PLAIN:
            return Commitment(Decision(False, finding), [])
        candidates = routes.candidates(self.context.settings.route)
        if isinstance(candidates, Finding):
            return Commitment(Decision(False, finding), [])
        planners = [route for route in candidates if route.builds and route.non_causal >= facts.non_causal]
        if not planners:
            return Commitment(Decision(False, finding), [])
        applied = Finding(State.APPLIED, "decode batches are planned on the GPU, without speculation")
        return Commitment(Decision(False, applied, planners[0].name), planners)

    @staticmethod
    def _capability() -> tuple[int, int] | None:
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        return None if capability is None else (capability.major, capability.minor)

    def _facts(self, vllm_config: Any, xqa: bool) -> Facts:
        from vllm import envs
        from vllm.config import CUDAGraphMode

        speculative = vllm_config.speculative_config
        mode = vllm_config.compilation_config.cudagraph_mode
        capability = self._capability()
        attention = vllm_config.attention_config
        return Facts(
            capability=capability,
            num_speculative_tokens=(speculative.num_speculative_tokens or 0) if speculative else 0,
            full_decode_graphs=mode is not None and mode.decode_mode() == CUDAGraphMode.FULL,
            cudagraph_mode=getattr(mode, "name", str(mode)),
            # The two halves of can_use_trtllm_attention, which itself needs vLLM's *current* config.
            trtllm_api_decode=attention.use_trtllm_attention is not False
            and seams.decodes_through_trtllm_api()
            and xqa,
            trtllm_api_multi_token=capability is not None
            and seams.trtllm_api_is_multi_token(capability, self._release),
            upstream_native=seams.verifies_natively(self.module),
            route=self.context.settings.route,
            decode_context_parallel_size=vllm_config.parallel_config.decode_context_parallel_size,
            non_causal=seams.may_be_non_causal(vllm_config),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            sinks=seams.layers_have_sinks(vllm_config, self.module),
            splits_batches=seams.splits_batches(vllm_config),
            kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        )

    def _say(self, commitment: Commitment) -> None:
        from vllm.platforms import current_platform

        capability = self._capability()
        gpu = f"{current_platform.get_device_name()} sm_{capability[0]}{capability[1]}" if capability else ""
        facts = {
            "route": commitment.decision.route,
            "gpu": gpu,
            "vllm": gate.installed_version("vllm"),
            "flashinfer": gate.installed_version("flashinfer-python"),
        }
        self.context.decided(commitment.decision.finding, **facts)

    @staticmethod
    def _attention_specs(kv_cache_spec: Any) -> list[Any]:
        from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

        specs = (
            list(kv_cache_spec.kv_cache_specs.values())
            if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs)
            else [kv_cache_spec]
        )
        return [spec for spec in specs if isinstance(spec, AttentionSpec)]

    def _is_ours(self, kv_cache_spec: Any) -> bool:
        """True for plain attention. Other kinds in a uniform group have other builders, as in vLLM's gate."""
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        attention = self._attention_specs(kv_cache_spec)
        return bool(attention) and not any(isinstance(spec, MLAAttentionSpec) for spec in attention)

    # -- gate and threshold: two faces of one commitment -------------------------------------------

    def get_cudagraph_support(self, wrapped: Any, cls: Any, args: Any, kwargs: Any) -> Any:
        stock = wrapped(*args, **kwargs)
        # Chunked-local attention and others subclass the builder at run time and answer for themselves.
        if cls is not self.builder_class:
            return stock
        arguments = self._signatures["get_cudagraph_support"].bind(*args, **kwargs).arguments
        uniform = type(stock).UNIFORM_BATCH
        vllm_config, kv_cache_spec = arguments["vllm_config"], arguments["kv_cache_spec"]
        try:
            if not self._is_ours(kv_cache_spec):
                return stock
            if stock.value >= uniform.value:
                return stock
            # A group of several specs is asked about as one on the V1 runner, and has a builder for each.
            parts = [self.commitment(vllm_config, spec) for spec in self._attention_specs(kv_cache_spec)]
            against = [c.decision.finding.reason for c in parts if not c.applies]
            self._ranks.tell(vllm_config, not against, "; ".join(against) or parts[0].decision.route)
            if against:
                return stock
        except Refused:
            raise
        except Exception as e:
            self._ranks.tell(vllm_config, False, f"{type(e).__name__}: {e}")
            self._failed(vllm_config, e)
            return stock
        for commitment in parts:
            commitment.promised = True
        return uniform

    def init(self, wrapped: Any, builder: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        builder.specpatch_route = None
        if type(builder) is not self.builder_class:
            return
        stock_threshold = builder.reorder_batch_threshold
        try:
            if not self._is_ours(builder.kv_cache_spec):
                return
            commitment = self.commitment(builder.vllm_config, builder.kv_cache_spec)
            if not commitment.candidates:
                return
            if not builder.enable_cuda_graph:
                # Another backend of the model lowered the mode before this builder was made (V1 runner).
                return
            if getattr(builder, "use_trtllm_decode_attention", False):
                raise SpecPatchError(
                    "vLLM decodes this group through trtllm-gen or XQA, against what its sources say"
                )
            builder.specpatch_captured = CapturedShapes()
            # vLLM's own rule, including parallel drafting (1 + 2k) and the DCP guard.
            builder._init_reorder_batch_threshold(
                1, supports_spec_as_decode=commitment.applies, supports_dcp_with_varlen=False
            )
            route, refusals = routes.make(commitment.candidates, builder, self.module)
            for refusal in refusals:
                wanted = commitment.decision.route
                reason = f"route {route.name} serves a group instead of {wanted}: {refusal}"
                self.context.decided(Finding(State.APPLIED, reason), route=route.name)
            query_dtype = seams.decode_query_dtype_name(builder)
            if getattr(builder, query_dtype).itemsize == 1:
                # FA2 takes no FP8 queries; they would be asked for on sm_90 and sm_10x without cubins. Set
                # last: a builder that no route serves must stay stock in everything.
                setattr(builder, query_dtype, builder.model_config.dtype)
            builder.specpatch_route = route
            self._builders.add(builder)
            update = getattr(route, "update_draft_decode_metadata", None)
            may_update = self.context.settings.route in UPDATE_DRAFT_METADATA
            if update is not None and may_update and seams.draft_metadata_can_be_updated(builder):
                builder.update_draft_decode_metadata = update
                builder.supports_draft_decode_metadata_update = True
        except Refused:
            raise
        except Exception as e:
            builder.reorder_batch_threshold = stock_threshold
            builder.specpatch_route = None
            self._failed(builder.vllm_config, e)

    def _failed(self, vllm_config: Any, error: Exception) -> None:
        """Withdraws all commitments to a configuration if nothing was promised yet; otherwise raises. Says it
        once."""
        with self._lock:
            made = {key: c for key, c in self._commitments.items() if key[0] == id(vllm_config)}
            if any(commitment.promised for commitment in made.values()):
                raise SpecPatchError(
                    "vllm-specpatch promised FULL CUDA graphs and then could not prepare the builder; "
                    "set VLLM_SPECPATCH=0 to serve without it"
                ) from error
            if isinstance(error, routes.RouteUnavailable):
                finding = self._where_vllm_has_its_own(error.finding)
            else:
                why = f"{type(error).__name__}: {error}"
                finding = Finding(State.FAILED, why, next_step="report this line; vLLM runs stock")
            for xqa in (True, False):
                key = (id(vllm_config), xqa)
                if key in made:
                    made[key].withdraw(finding)
                else:
                    self._keep(vllm_config, key, Commitment(Decision(False, finding), []))
        self.context.decided(finding)

    # -- drafts that are trimmed on the device (adaptive verification) ------------------------------

    def get_varlen_cudagraph_max_query_len(self, wrapped: Any, cls: Any, args: Any, kwargs: Any) -> Any:
        """Asked for each group once its builder is there. vLLM's own is not asked where ours serves: it takes
        a promise of UNIFORM_BATCH for one of trtllm-gen or XQA, and asserts that the GPU has them."""
        signature = self._signatures["get_varlen_cudagraph_max_query_len"]
        arguments = signature.bind(*args, **kwargs).arguments
        vllm_config, kv_cache_spec = arguments["vllm_config"], arguments["kv_cache_spec"]
        try:
            if cls is self.builder_class and self._is_ours(kv_cache_spec):
                commitment = self.commitment(vllm_config, kv_cache_spec)
                if commitment.applies and not self._may_trim(vllm_config):
                    return None
                if commitment.applies:
                    commitment.promised = True
                    return seams.max_decode_rows(vllm_config)
        except Refused:
            raise
        except Exception as e:
            self._failed(vllm_config, e)
        return wrapped(*args, **kwargs)

    def supports_device_cpu_query_lens_mismatch(self, wrapped: Any, cls: Any, args: Any, kwargs: Any) -> Any:
        """Asked twice, both times about the current configuration: when a backend is chosen for a layer, and
        when all builders are there, before a graph is captured (vllm/v1/worker/gpu/spec_decode/
        adaptive_verification.py), where a "no" ends the start with vLLM's own error.

        The first time nothing can be committed, as there are no layers yet. So only who chose FlashInfer
        gets a "yes" then: vLLM would have ended the start at once. Where vLLM chooses it must not be led to a
        backend that cannot serve in the end.
        """
        from vllm.config import get_current_vllm_config_or_none

        stock = wrapped(*args, **kwargs)
        vllm_config = get_current_vllm_config_or_none()
        if stock or vllm_config is None or cls is not getattr(self.module, BACKEND):
            return stock
        try:
            return self._may_trim(vllm_config) and self._plans_from_device_lengths(vllm_config)
        except Refused:
            raise
        except Exception as e:
            self._failed(vllm_config, e)
            return stock

    def _may_trim(self, vllm_config: Any) -> bool:
        return self.context.settings.route in VARLEN_GRAPHS and seams.trims_on_device(vllm_config)

    def _plans_from_device_lengths(self, vllm_config: Any) -> bool:
        """Whether all groups of a model do, or, before there are any, whether nothing speaks against it."""
        with self._lock:
            made = [c for key, c in self._commitments.items() if key[0] == id(vllm_config)]
        if made:
            return all(commitment.applies for commitment in made)
        head_dim = vllm_config.model_config.get_head_size()
        xqa = seams.xqa_takes([head_dim], self._capability() or (0, 0), self._release)
        candidates = routes.candidates(self.context.settings.route)
        return (
            seams.names_flashinfer(vllm_config)
            and why_stock(self._facts(vllm_config, xqa)) is None
            and not isinstance(candidates, Finding)
        )

    # -- building ----------------------------------------------------------------------------------

    def has_builders(self) -> bool:
        """Whether a builder lives that was made with a threshold and a route of ours."""
        return len(self._builders) > 0

    @property
    def _batch(self) -> Batch | None:
        return getattr(self._thread, "batch", None)

    def build(self, wrapped: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        route = getattr(builder, "specpatch_route", None)
        if route is None:
            return wrapped(*args, **kwargs)
        if route.builds:
            arguments = kwargs
            if args or "common_prefix_len" not in kwargs or "common_attn_metadata" not in kwargs:
                # Not how the runners call it, up to 0.33; bind() takes half of the time of a decode's build.
                arguments = self._signatures["build"].bind(builder, *args, **kwargs).arguments
            common = arguments["common_attn_metadata"]
            if arguments["common_prefix_len"] == 0 and route.serves(common.causal):
                return route.build(
                    common,
                    lambda part: wrapped(common_prefix_len=0, common_attn_metadata=part),
                    builder.specpatch_captured.capturing,
                )
            return route.stock(lambda: wrapped(*args, **kwargs))
        self._thread.batch = Batch(builder)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self._thread.batch = None

    def build_for_cudagraph_capture(self, wrapped: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        if getattr(builder, "specpatch_route", None) is None:
            return wrapped(*args, **kwargs)
        self._ask_other_ranks(builder)
        builder.specpatch_captured.capturing = True
        try:
            return wrapped(*args, **kwargs)
        finally:
            builder.specpatch_captured.capturing = False

    def _ask_other_ranks(self, builder: Any) -> None:
        """Before the first capture. Raises where another rank will not capture the same graphs: that is
        better than a start that hangs. A rank that is silent is said, in case the start hangs for it."""
        if not self.commitment(builder.vllm_config, builder.kv_cache_spec).applies:
            return
        finding = self._ranks.disagreement(builder.vllm_config)
        if finding is None:
            return
        self.context.decided(finding)
        if finding.state is State.REFUSED:
            raise SpecPatchError(str(finding))

    def split_decodes_and_prefills(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        split = wrapped(*args, **kwargs)
        batch = self._batch
        if batch is not None:
            batch.num_decodes, batch.num_prefills, batch.num_decode_tokens, _ = split
        return split

    def compute_flashinfer_kv_metadata(self, wrapped: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        batch = self._batch
        if batch is None or batch.builder is not builder or batch.num_prefills or batch.q_len == 1:
            return wrapped(*args, **kwargs)
        import numpy as np

        arguments = (
            self._signatures["_compute_flashinfer_kv_metadata"].bind(builder, *args, **kwargs).arguments
        )
        # Rows that pad a captured batch have no tokens and no KV. A plan for q_len causal rows needs q_len
        # KV tokens (FlashInfer refuses less, and its kernel would wrap around): give them those of their
        # first block, which vLLM sets to the null block; nobody reads their output. New arrays, because
        # the lengths are vLLM's own CPU copy. In a pure decode batch no real row is that short.
        seq_lens = np.maximum(arguments["seq_lens_np"], batch.q_len)
        page_size = arguments["page_size"]
        arguments["seq_lens_np"] = seq_lens
        arguments["num_blocks_np"] = (seq_lens + (page_size - 1)) // page_size
        del arguments["self"]
        return wrapped(**arguments)

    def get_decode_wrapper(self, wrapped: Any, builder: Any, args: Any, kwargs: Any) -> Any:
        batch = self._batch
        if batch is None or batch.builder is not builder:
            return wrapped(*args, **kwargs)
        bound = self._signatures["_get_decode_wrapper"].bind(builder, *args, **kwargs)
        bound.apply_defaults()
        shape = (batch.num_decodes, batch.q_len)
        graph = builder.specpatch_captured.use_graph(shape, bound.arguments["use_cudagraph"])
        if batch.q_len == 1:
            return wrapped(bound.arguments["batch_size"], graph)
        return builder.specpatch_route.decode_wrapper(*shape, graph)

    def fast_plan_decode(self, wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        batch = self._batch
        if batch is None or batch.q_len == 1:
            return wrapped(*args, **kwargs)
        bound = self._signatures["fast_plan_decode"].bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        return batch.builder.specpatch_route.plan(arguments.pop("self"), arguments)


def edits(module: ModuleType, context: Context) -> list[Edit]:
    patch = FlashInferSpecDecode(module, context)
    in_use = patch.has_builders
    ragged = [
        Edit(BUILDER, "get_varlen_cudagraph_max_query_len", patch.get_varlen_cudagraph_max_query_len),
        Edit(
            BACKEND, "supports_device_cpu_query_lens_mismatch", patch.supports_device_cpu_query_lens_mismatch
        ),
    ]
    return [
        *(ragged if seams.graphs_may_be_ragged(patch.builder_class) else []),
        Edit(BUILDER, "get_cudagraph_support", patch.get_cudagraph_support),
        Edit(BUILDER, "__init__", patch.init),
        # Stock would take the verify requests of a builder whose threshold is ours for so many single tokens.
        Edit(BUILDER, "build", patch.build, in_use),
        Edit(BUILDER, "build_for_cudagraph_capture", patch.build_for_cudagraph_capture, in_use),
        Edit(BUILDER, "_get_decode_wrapper", patch.get_decode_wrapper, in_use),
        Edit(BUILDER, "_compute_flashinfer_kv_metadata", patch.compute_flashinfer_kv_metadata, in_use),
        Edit("", "fast_plan_decode", patch.fast_plan_decode, in_use),
        Edit("", "split_decodes_and_prefills", patch.split_decodes_and_prefills, in_use),
    ]


PATCH = Patch(
    name="flashinfer-spec-decode",
    target="vllm.v1.attention.backends.flashinfer",
    versions={"vllm": ">=0.24.0,<=0.33.0", "flashinfer-python": ">=0.6.12,<=0.7.2.post1"},
    digests=VLLM_DIGESTS,
    edits=edits,
    summary=__doc__ or "",
    parts={"route native": FLASHINFER_DECODE_DIGESTS},
)
