"""May a FlashInfer group verify draft tokens as decodes, with FULL CUDA graphs? Pure: facts in, decision out.

CUDA-graph support and the reorder threshold follow from the same :class:`Decision`; raising one without
the other corrupts output (https://github.com/vllm-project/vllm/issues/45425: graphs stayed FULL while the
threshold was 1, and the text degenerated).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..patch import Finding, State

#: The settings of VLLM_SPECPATCH_ROUTE with which vLLM 0.33's own multi-token decode below sm_90 (host plan,
#: after waiting for the GPU) gives way to ours: 0.41 to 0.55 of its time a step (H200 taken for sm_8x).
REPLACE_UPSTREAM_NATIVE = ("auto", "spec_mask")

#: The settings with which from vLLM 0.31 its decodes without speculation (host plan, no wait) give way to
#: ours. "auto" belongs here once it was measured to be as fast.
REPLACE_UPSTREAM_PLAIN = ("spec_mask",)

#: The settings with which vLLM 0.28 and later may record all draft steps, planning included, in one CUDA
#: graph. Run on 0.30 and 0.33.
UPDATE_DRAFT_METADATA = ("auto", "spec_mask")

#: The settings with which non-causal draft blocks (DFlash) are decodes, in FULL CUDA graphs. Run on 0.27.1
#: with a drafter of random weights; "auto" belongs here once the drafts of a trained one were compared.
NON_CAUSAL = ("spec_mask",)

#: The settings with which vLLM 0.31 and later may trim drafts on the device (adaptive verification), and
#: replay FULL graphs over verify requests of any length. "auto" belongs here once that was run on a GPU.
VARLEN_GRAPHS = ("spec_mask",)


@dataclass(frozen=True)
class Facts:
    """What the decision depends on, read once from a ``VllmConfig`` and the platform."""

    capability: tuple[int, int] | None  # (major, minor); None: no CUDA device
    num_speculative_tokens: int  # k; 0 without speculative decoding
    full_decode_graphs: bool  # the requested cudagraph_mode has FULL graphs for decode
    cudagraph_mode: str
    trtllm_api_decode: bool  # vLLM decodes this group through trtllm-gen (sm_10x) or XQA (sm_90, sm_12x)
    trtllm_api_multi_token: bool = False  # and this release of it verifies drafts that way too
    upstream_native: bool = False  # vLLM itself verifies on FlashInfer's FA2 kernels (0.33, below sm_90)
    route: str = "auto"  # VLLM_SPECPATCH_ROUTE
    decode_context_parallel_size: int = 1
    non_causal: bool = False  # batches that graphs are promised for may be non-causal (DFlash drafts)
    batch_invariant: bool = False
    sinks: bool = False  # a layer has attention sinks
    splits_batches: bool = False  # dual-batch overlap on the V1 runner
    kv_cache_dtype: str = "auto"

    @property
    def replaces_upstream_native(self) -> bool:
        """Whether a route that plans on the device takes over from vLLM's own multi-token decode."""
        return self.upstream_native and self.route in REPLACE_UPSTREAM_NATIVE


@dataclass(frozen=True)
class Decision:
    """``applies`` and, if not, the finding that says why. ``route`` is set where it applies."""

    applies: bool
    finding: Finding
    route: str = ""


def _stock(state: State, reason: str, wanted: str = "", found: str = "", next_step: str = "") -> Finding:
    return Finding(state, reason, wanted, found, next_step)


def no_route_for_non_causal(route: str) -> Finding:
    """Why the blocks of a non-causal drafter stay prefills, planned on the host and run eagerly."""
    return _stock(
        State.REFUSED,
        "the drafter attends non-causally, which FlashInfer's own multi-token decode plans cannot express",
        "route spec_mask, asked for by name",
        f"route {route}",
        "VLLM_SPECPATCH_ROUTE=spec_mask serves such drafters, or says why it cannot",
    )


def vllms_own_serves(but: str = "") -> Finding:
    """``but``: why ours does not, where it was tried."""
    reason = "vLLM serves multi-token decodes through FlashInfer's FA2 kernels here"
    return _stock(
        State.NOT_NEEDED, f"{reason}; route spec_mask, which is faster, could not: {but}" if but else reason
    )


def why_stock(facts: Facts) -> Finding | None:
    """None if spec-as-decode may be promised for this configuration; otherwise why vLLM stays stock.

    ``not needed``: vLLM loses nothing. ``refused``: it does, and we cannot help.
    """
    if facts.num_speculative_tokens < 1:
        return _stock(State.NOT_NEEDED, "no speculative decoding is configured")
    if not facts.full_decode_graphs:
        return _stock(
            State.NOT_NEEDED, f"no FULL CUDA graphs were asked for (cudagraph_mode {facts.cudagraph_mode})"
        )
    if facts.capability is None:
        return _stock(State.REFUSED, "no CUDA device", "a GPU of capability 8.0 or later", "none")
    major = facts.capability[0]
    # Neither trtllm-gen nor vLLM's own plans for FA2 take several non-causal tokens, and nothing takes DCP.
    causal, sharded = not facts.non_causal, facts.decode_context_parallel_size > 1
    if facts.trtllm_api_decode and facts.trtllm_api_multi_token and not sharded and (causal or major != 10):
        kernels = "trtllm-gen" if major == 10 else "XQA"
        return _stock(State.NOT_NEEDED, f"vLLM serves multi-token decodes through {kernels} here")
    has_own = facts.upstream_native and not sharded and causal
    if has_own and not facts.replaces_upstream_native:
        return vllms_own_serves()
    refusal = _why_refused(facts)
    # Whoever asked for a route by name is told why it does not serve; by itself nothing is lost.
    return vllms_own_serves() if has_own and refusal is not None and facts.route == "auto" else refusal


def _why_refused(facts: Facts) -> Finding | None:
    """None, or what this package cannot do where vLLM loses its graphs, or plans on the host."""
    assert facts.capability is not None
    major, minor = facts.capability
    if facts.trtllm_api_decode and not facts.trtllm_api_multi_token:
        return _stock(
            State.REFUSED,
            "vLLM decodes through XQA here, which this release of it wires for one token only",
            "a group that FlashInfer's native kernels serve",
            f"XQA on sm_{major}{minor}",
            "--attention-config.use_trtllm_attention=0 selects the native kernels, which are patched",
        )
    if facts.capability < (8, 0):
        return _stock(State.REFUSED, "the GPU is too old", "capability 8.0 or later", f"{major}.{minor}")
    if facts.decode_context_parallel_size > 1:
        return _stock(
            State.REFUSED,
            "decode context parallelism needs vLLM's own prefill path for verify requests",
            "decode_context_parallel_size 1",
            str(facts.decode_context_parallel_size),
        )
    if facts.non_causal and facts.trtllm_api_decode:
        return _stock(
            State.REFUSED,
            "the drafter attends non-causally, and vLLM decodes through trtllm-gen here, which cannot",
            "a group that FlashInfer's native kernels serve",
            f"trtllm-gen on sm_{major}{minor}",
            "--attention-config.use_trtllm_attention=0 selects the native kernels, which are patched",
        )
    if facts.non_causal and facts.route not in NON_CAUSAL:
        return no_route_for_non_causal(facts.route)
    if facts.batch_invariant:
        return _stock(
            State.REFUSED,
            "batch-invariant mode forbids split-KV, and FlashInfer's no-split graph plans start CTAs "
            "without a validity mask (flashinfer issue 4002)",
            "VLLM_BATCH_INVARIANT=0",
            "1",
        )
    if facts.sinks:
        return _stock(
            State.REFUSED, "the native kernels have no attention sinks", "a model without sinks", "sinks"
        )
    if facts.splits_batches:
        return _stock(
            State.REFUSED,
            "dual-batch overlap of the V1 runner copies the lengths of a request that it splits, and a CUDA "
            "graph would go on reading those that it was captured with",
            "no --enable-dbo, or the V2 runner",
            "dual-batch overlap on the V1 runner",
        )
    if facts.kv_cache_dtype.startswith("nvfp4"):
        return _stock(
            State.REFUSED,
            "no route reads an NVFP4 KV cache",
            "another kv_cache_dtype",
            facts.kv_cache_dtype,
        )
    return None
