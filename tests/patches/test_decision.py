"""The decision, pure, and the real gate that follows it."""

import dataclasses

import pytest

from vllm_specpatch.patch import State
from vllm_specpatch.patches import decision, native, routes

PLAIN = decision.Facts(
    capability=(8, 6),
    num_speculative_tokens=7,
    full_decode_graphs=True,
    cudagraph_mode="FULL_AND_PIECEWISE",
    trtllm_api_decode=False,
)


def verdict(**changes):
    finding = decision.why_stock(dataclasses.replace(PLAIN, **changes))
    return finding.state if finding else None


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
)
def test_every_gpu_without_trtllm_or_xqa(capability):
    assert verdict(capability=capability) is None


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"num_speculative_tokens": 0}, State.NOT_NEEDED),
        ({"full_decode_graphs": False, "cudagraph_mode": "NONE"}, State.NOT_NEEDED),
        ({"capability": (10, 0), "trtllm_api_decode": True}, State.NOT_NEEDED),
        ({"capability": (9, 0), "trtllm_api_decode": True}, State.REFUSED),
        ({"capability": (7, 5)}, State.REFUSED),
        ({"capability": None}, State.REFUSED),
        ({"decode_context_parallel_size": 2}, State.REFUSED),
        ({"non_causal": True}, State.REFUSED),
        ({"batch_invariant": True}, State.REFUSED),
        ({"kv_cache_dtype": "nvfp4"}, State.REFUSED),
    ],
)
def test_stock_with_a_reason(changes, state):
    finding = decision.why_stock(dataclasses.replace(PLAIN, **changes))
    assert finding.state is state and finding.reason
    if state is State.REFUSED and changes.get("capability", 0) is not None:
        assert finding.wanted and finding.found


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("0.6.12", False),
        ("0.6.15.post1", False),
        ("0.6.16", True),
        ("0.6.16.post3", True),
        ("0.7.2", True),
        ("dev", False),
    ],
)
def test_native_is_refused_before_flashinfer_had_it(monkeypatch, version, usable):
    monkeypatch.setattr(native.gate, "installed_version", lambda name: version)
    assert (native.NativeRoute.why_not() is None) is usable
    found = routes.candidates("native")
    if usable:
        assert found == [native.NativeRoute]
    else:
        assert found.state is State.REFUSED and found.wanted and found.next_step


def test_a_forced_route_is_the_only_candidate():
    assert routes.candidates("spec_mask") == [routes.ROUTES["spec_mask"]]


def test_the_last_route_of_auto_cannot_fail_for_a_builder():
    """Graphs are promised before builders are made (V1 runner); native only refuses by version."""
    assert routes.AUTO[-1] == "native"


def test_the_next_route_serves_where_the_better_one_cannot():
    class Broken:
        def __init__(self, builder, backend):
            raise routes.RouteUnavailable(decision.Finding(State.REFUSED, "no compiler"))

    class Working:
        def __init__(self, builder, backend):
            pass

    route, refusals = routes.make([Broken, Working], None, None)
    assert isinstance(route, Working) and [str(r) for r in refusals] == ["no compiler"]
    with pytest.raises(routes.RouteUnavailable, match="no compiler"):
        routes.make([Broken], None, None)


# -- gate and threshold on real vLLM: never one without the other -----------------------------------


def both(b, **gate):
    """(CUDA-graph support, threshold): the pair that must move together."""
    return b.support(**gate), b.builder.reorder_batch_threshold


def test_promised_together(bench):
    assert both(bench(k=7)) == ("UNIFORM_BATCH", 8)


@pytest.mark.parametrize(
    "engine_arguments",
    [
        {"enforce_eager": True},
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    ],
    ids=["enforce_eager", "piecewise"],
)
def test_nothing_promised_where_no_full_graphs_were_asked_for(bench, engine_arguments):
    assert both(bench(k=3, **engine_arguments)) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)


def test_without_speculation_everything_is_stock(bench):
    b = bench(k=0)
    assert both(b) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1) and b.builder.specpatch_route is None


def test_ngram(bench):
    assert both(bench(k=3, method="ngram")) == ("UNIFORM_BATCH", 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        lambda c: setattr(c.attention_config, "use_non_causal", True),
    ],
    ids=["dcp", "non-causal"],
)
def test_configurations_that_stay_stock(bench, change):
    """Both faces are asked of one changed configuration; neither may move."""
    b = bench(k=3, change=change)
    assert both(b) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)


def test_uniform_type_groups(bench):
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    b = bench(k=3)
    wide = dataclasses.replace(b.spec, num_kv_heads=4)
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": b.spec, "b": wide})
    assert b.support(spec=group) == "UNIFORM_BATCH"


def test_mla_groups_stay_stock(bench):
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    b = bench(k=3)
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert b.support(spec=mla) == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_subclasses_answer_for_themselves(bench, vllm_on_sm86):
    """Chunked-local attention subclasses the builder at run time; its virtual batches are not ours."""
    b = bench(k=3)
    subclass = type("Local", (vllm_on_sm86.FlashInferMetadataBuilder,), {})
    assert b.support(cls=subclass) == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_both_runners_get_the_same_answer(bench):
    """V1 asks the class, V2 asks the instance."""
    b = bench(k=3)
    with b.current(b.config):
        assert b.builder.get_cudagraph_support(b.config, b.spec).name == b.support() == "UNIFORM_BATCH"


def test_parallel_drafting_doubles_the_draft_tokens(bench, monkeypatch):
    b = bench(k=3)
    monkeypatch.setattr(b.config.speculative_config, "parallel_drafting", True)
    b.builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    assert b.builder.reorder_batch_threshold == 7


def test_an_error_before_the_promise_leaves_both_faces_stock(bench, monkeypatch, vllm_on_sm86):
    def broken(self, builder, backend):
        raise RuntimeError("no memory")

    monkeypatch.setattr(native.NativeRoute, "__init__", broken)
    assert both(bench(k=5)) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)


def test_an_error_after_the_promise_is_loud(bench, monkeypatch, vllm_on_sm86):
    """The V1 runner asks the gate before it makes builders."""
    from vllm_specpatch.errors import SpecPatchError

    b = bench(k=5)
    assert b.support() == "UNIFORM_BATCH"
    monkeypatch.setattr(native.NativeRoute, "__init__", lambda self, builder, backend: 1 / 0)
    with b.current(b.config), pytest.raises(SpecPatchError, match="VLLM_SPECPATCH=0"):
        vllm_on_sm86.FlashInferMetadataBuilder(b.spec, list(b.layers), b.config, b.builder.device)


def test_the_decision_is_said_once(bench):
    import vllm_specpatch

    for _ in range(3):
        bench(k=3)
    decisions = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["decisions"]
    applied = [d for d in decisions if d["state"] == "applied"]
    assert len(applied) == 1
    assert applied[0]["route"] == "native" and "sm_86" in applied[0]["gpu"]
