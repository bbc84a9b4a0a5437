"""What differs between vLLM 0.24 and 0.33 at the places that this package touches: a function for each seam.

Each asks for the feature it is about, not for the version: digests have already said that the sources are
known ones (:mod:`.digests`), and a backported change is then taken for what it is.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from packaging.version import InvalidVersion, Version

from .. import gate

#: The first release in which vLLM decodes several tokens per request through trtllm-gen (10) or XQA (9, 12),
#: by compute capability major. Before it, XQA serves one token only, or is not used at all.
MULTI_TOKEN_TRTLLM_API = {10: Version("0.24"), 12: Version("0.28"), 9: Version("0.30")}
#: The first release that leaves a group whose head size XQA does not take to FlashInfer's native kernels.
XQA_PER_GROUP = Version("0.29")
#: The first release that plans decodes without speculation from the host's own lengths, without waiting.
PLAIN_DECODE_WITHOUT_WAIT = Version("0.31")


def release(version: str | None) -> Version:
    """The release of an installed version. What cannot be read (the user vouched for it) counts as newest."""
    try:
        return gate.release_of(version or "")
    except InvalidVersion:
        return Version("9999")


def trtllm_api_is_multi_token(capability: tuple[int, int], vllm: Version) -> bool:
    """Whether vLLM verifies drafts through trtllm-gen or XQA where it decodes through them."""
    first = MULTI_TOKEN_TRTLLM_API.get(capability[0])
    return first is not None and vllm >= first


def xqa_takes(head_dims: list[int], capability: tuple[int, int], vllm: Version) -> bool:
    """Whether groups of these head sizes decode through XQA where it is available (vLLM's own condition)."""
    if capability[0] not in (9, 12) or vllm < XQA_PER_GROUP:
        return True
    return all(16 <= head_dim <= 256 and head_dim % 16 == 0 for head_dim in head_dims)


def decodes_through_trtllm_api() -> bool:
    """vLLM's answer for decodes on this platform: trtllm-gen on sm_10x, XQA on sm_90 (from 0.25) and sm_12x
    (from 0.28)."""
    from vllm.utils.flashinfer import supports_trtllm_attention

    if "is_prefill" in inspect.signature(supports_trtllm_attention).parameters:
        return bool(supports_trtllm_attention(is_prefill=False))
    return bool(supports_trtllm_attention())


def plain_decode_waits(vllm: Version) -> bool:
    """Whether FlashInfer decodes without speculation wait for the GPU in every metadata build."""
    return vllm < PLAIN_DECODE_WITHOUT_WAIT


def verifies_natively(backend: Any) -> bool:
    """Whether vLLM itself plans several tokens per request on FlashInfer's FA2 (0.33, below sm_90)."""
    ask = getattr(backend, "_use_fa2_native_decode", None)
    return ask is not None and bool(ask())


def kv_cache_layout(builder: Any, backend: Any) -> str:
    """``NHD`` or ``HND``. Not before the KV cache is laid out: from 0.29 the builder resolves it then."""
    to_string = getattr(backend, "get_flashinfer_layout_string", None)
    layout: str = to_string(builder.kv_cache_layout) if to_string else backend.get_kv_cache_layout()
    return layout


def page_indices(builder: Any) -> Any:
    """The builder's page indices on the device: half of a pair of buffers, from 0.29 a tensor."""
    buffer = builder.paged_kv_indices
    return getattr(buffer, "gpu", buffer)


def query_dtypes(builder: Any) -> dict[str, Any]:
    """The builder's query dtypes, named as the metadata's: one for all, from 0.25 one a phase."""
    names = ("q_data_type", "q_data_type_prefill", "q_data_type_decode")
    return {name: getattr(builder, name) for name in names if hasattr(builder, name)}


def decode_query_dtype_name(builder: Any) -> str:
    """Name of the attribute that decodes follow."""
    return "q_data_type_decode" if hasattr(builder, "q_data_type_decode") else "q_data_type"


def key_and_value(kv_cache: Any) -> tuple[Any, Any]:
    """What ``wrapper.run`` gets as its cache: a pair, before 0.26 one tensor ``[pages, 2, ...]``."""
    key, value = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(dim=1)
    return key, value


def host_lengths(common: Any) -> Any:
    """Exact lengths that the runner left on the host, or None (from 0.30 there is no place for them)."""
    return getattr(common, "_seq_lens_cpu", None)


def with_host_lengths(common: Any, exact: Any, **changes: Any) -> Any:
    """``common`` with ``changes``, and with lengths that ``build()`` reads without waiting for the device.

    Up to 0.29 the metadata caches a host copy. Later releases call ``seq_lens.cpu()``, which returns a tensor
    that is on the host already; of a batch of native prefills nothing else reads ``seq_lens``.
    """
    fields = {field.name for field in dataclasses.fields(common)}
    caches = ("_num_computed_tokens_cpu", "_num_computed_tokens_cache", "_token_to_req_indices_cache")
    changes |= dict.fromkeys(caches)  # of the whole batch
    if "_seq_lens_cpu" in fields:
        changes["_seq_lens_cpu"] = exact
    elif exact is not None:
        changes["seq_lens"] = exact
    return common.replace(**{name: value for name, value in changes.items() if name in fields})


def draft_metadata_can_be_updated(builder: Any) -> bool:
    """Whether vLLM has a use for ``update_draft_decode_metadata`` (from 0.28, V2 runner)."""
    return hasattr(type(builder), "update_draft_decode_metadata")


def may_be_non_causal(vllm_config: Any) -> bool:
    """Whether batches of a configuration for which graphs are promised may be non-causal.

    Builders of a drafter get a configuration that says so on the V2 runner from 0.26. Before, they get the
    target's, and the drafter follows the target's graph mode whatever its own attention can do: a promise for
    the target is one for the drafter. The V1 runner runs drafts in no FULL graph.
    """
    if vllm_config.attention_config.use_non_causal:
        return True
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in ("dflash", "dspark"):
        return False
    if not vllm_config.use_v2_model_runner:
        return False
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    if hasattr(DraftModelSpeculator, "attn_vllm_config"):
        return False
    if speculative.method == "dspark":  # there without a causal variant
        return True
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import get_dflash_causal

    return not get_dflash_causal(speculative.draft_model_config)


def graphs_may_be_ragged(builder_class: Any) -> bool:
    """Whether FULL graphs of decodes of unequal length exist (from 0.31, V2 runner)."""
    return hasattr(builder_class, "get_varlen_cudagraph_max_query_len")


def trims_on_device(vllm_config: Any) -> bool:
    """Whether drafts are trimmed on the device (adaptive verification). The query lengths on the host have
    the right sum then, spread evenly over the requests that verify."""
    return bool(getattr(vllm_config.speculative_config, "enable_adaptive_verification", False))


def names_flashinfer(vllm_config: Any) -> bool:
    """Whether the user chose this backend, for all layers or for those of a kind."""
    attention = vllm_config.attention_config
    chosen = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    return any(getattr(backend, "name", backend) == "FLASHINFER" for backend in chosen)


def splits_batches(vllm_config: Any) -> bool:
    """Whether the V1 runner may cut a batch in two within a request (vllm/v1/worker/ubatch_utils.py)."""
    return bool(vllm_config.parallel_config.use_ubatching) and not vllm_config.use_v2_model_runner


def max_decode_rows(vllm_config: Any) -> int:
    """Rows of the longest decode with speculation: the token to verify from and its drafts, which parallel
    drafting doubles (``_init_reorder_batch_threshold``)."""
    from vllm.v1.attention import backend

    if hasattr(backend, "max_decode_query_len"):  # from 0.31; knows which runner doubles them
        return int(backend.max_decode_query_len(vllm_config))
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.num_speculative_tokens:
        return 1
    drafts: int = speculative.num_speculative_tokens
    return 1 + (2 * drafts if speculative.parallel_drafting else drafts)


def attention_impls(vllm_config: Any, backend: Any) -> list[Any]:
    """The implementations of the model's layers on this backend, target's and drafter's."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = [getattr(layer, "impl", None) for layer in layers]
    # From 0.30 a layer may choose between implementations at run time.
    impls = [each for impl in impls for each in getattr(impl, "get_impl_variants", lambda i=impl: (i,))()]
    return [impl for impl in impls if isinstance(impl, backend.FlashInferImpl)]


def layers_have_sinks(vllm_config: Any, backend: Any) -> bool:
    """Whether a layer of the model on this backend has attention sinks."""
    impls = attention_impls(vllm_config, backend)
    return any(getattr(impl, "sinks", None) is not None for impl in impls)
