"""The decision, pure, and the real gate that follows it."""

import dataclasses

import pytest

from vllm_specpatch import gate
from vllm_specpatch.patch import State
from vllm_specpatch.patches import decision, native, routes, seams, spec_mask_route

PLAIN = decision.Facts(
    capability=(8, 6),
    num_speculative_tokens=7,
    full_decode_graphs=True,
    cudagraph_mode="FULL_AND_PIECEWISE",
    trtllm_api_decode=False,
)


TRTLLM_API = {"trtllm_api_decode": True, "trtllm_api_multi_token": True}
BY_NAME = {"route": "spec_mask"}


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
        ({"capability": (10, 0), **TRTLLM_API}, State.NOT_NEEDED),
        ({"capability": (10, 0), **TRTLLM_API, "non_causal": True}, State.REFUSED),
        ({"capability": (10, 0), **TRTLLM_API, "decode_context_parallel_size": 2}, State.REFUSED),
        ({"capability": (9, 0), **TRTLLM_API}, State.NOT_NEEDED),
        ({"capability": (9, 0), **TRTLLM_API, "non_causal": True}, State.NOT_NEEDED),
        ({"capability": (9, 0), "trtllm_api_decode": True}, State.REFUSED),
        ({"upstream_native": True, "route": "native"}, State.NOT_NEEDED),
        ({"upstream_native": True, "sinks": True}, State.NOT_NEEDED),
        ({"upstream_native": True, "batch_invariant": True}, State.NOT_NEEDED),
        ({"upstream_native": True, "batch_invariant": True, **BY_NAME}, State.REFUSED),
        ({"upstream_native": True, "non_causal": True}, State.REFUSED),
        ({"sinks": True}, State.REFUSED),
        ({"kv_cache_dtype": "nvfp4_4over6"}, State.REFUSED),
        ({"capability": (7, 5)}, State.REFUSED),
        ({"capability": None}, State.REFUSED),
        ({"decode_context_parallel_size": 2}, State.REFUSED),
        ({"non_causal": True}, State.REFUSED),
        ({"non_causal": True, "route": "native"}, State.REFUSED),
        ({"non_causal": True, **BY_NAME, "capability": (9, 0), **TRTLLM_API}, State.NOT_NEEDED),
        ({"non_causal": True, **BY_NAME, "capability": (10, 0), **TRTLLM_API}, State.REFUSED),
        ({"non_causal": True, **BY_NAME, "decode_context_parallel_size": 2}, State.REFUSED),
        ({"non_causal": True, **BY_NAME, "sinks": True}, State.REFUSED),
        ({"batch_invariant": True}, State.REFUSED),
        ({"kv_cache_dtype": "nvfp4"}, State.REFUSED),
        ({"splits_batches": True}, State.REFUSED),
    ],
)
def test_stock_with_a_reason(changes, state):
    finding = decision.why_stock(dataclasses.replace(PLAIN, **changes))
    assert finding.state is state and finding.reason
    if state is State.REFUSED and changes.get("capability", 0) is not None:
        assert finding.wanted and finding.found


@pytest.mark.parametrize("route", ["auto", "spec_mask"])
def test_the_device_planned_route_replaces_vllms_own(route):
    assert verdict(upstream_native=True, route=route) is None


@pytest.mark.parametrize("upstream_native", [True, False])
def test_the_device_planned_route_by_name_serves_non_causal_drafts(upstream_native):
    assert verdict(non_causal=True, upstream_native=upstream_native, **BY_NAME) is None


def test_why_non_causal_drafts_stay_stock_names_the_way_out():
    for changes in ({}, {"route": "native"}, {"capability": (10, 0), **TRTLLM_API}):
        finding = decision.why_stock(dataclasses.replace(PLAIN, non_causal=True, **changes))
        assert "non-causally" in finding.reason and finding.wanted and finding.found and finding.next_step


@pytest.mark.parametrize(
    ("capability", "vllm", "multi_token"),
    [
        ((10, 0), "0.24.0", True),
        ((12, 0), "0.27.1", False),
        ((12, 1), "0.28.0", True),
        ((9, 0), "0.29.0", False),
        ((9, 0), "0.30.0", True),
        ((9, 0), "0.30.0.dev3+gabc", True),
        ((9, 0), "a build of my own", True),
        ((8, 6), "0.33.0", False),
    ],
)
def test_where_vllm_verifies_through_trtllm_gen_or_xqa(capability, vllm, multi_token):
    assert seams.trtllm_api_is_multi_token(capability, seams.release(vllm)) is multi_token


@pytest.mark.parametrize(
    ("head_dims", "capability", "vllm", "takes"),
    [
        ([128], (9, 0), "0.30.0", True),
        ([512], (9, 0), "0.30.0", False),
        ([128, 512], (12, 0), "0.29.0", False),
        ([512], (12, 0), "0.28.0", True),  # asked for all groups alike
        ([512], (10, 0), "0.30.0", True),
    ],
)
def test_which_groups_xqa_takes(head_dims, capability, vllm, takes):
    assert seams.xqa_takes(head_dims, capability, seams.release(vllm)) is takes


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("0.6.12", False),
        ("0.6.14", False),  # takes q_len_per_req, and ignores it
        ("0.6.15.post1", False),
        ("0.6.16", True),
        ("0.6.16.post3", True),
        ("0.7.2", True),
        ("dev", False),
    ],
)
def test_native_is_refused_before_flashinfer_had_it(monkeypatch, version, usable):
    monkeypatch.setattr(native.gate, "installed_version", lambda name: version)
    monkeypatch.setattr(native.gate, "check_sources", lambda digests: None)
    assert (native.NativeRoute.why_not() is None) is usable
    found = routes.candidates("native")
    if usable:
        assert found == [native.NativeRoute]
    else:
        assert found.state is State.REFUSED and found.wanted and found.next_step


def test_native_is_refused_if_flashinfers_source_is_unknown(monkeypatch):
    monkeypatch.setattr(native.gate, "installed_version", lambda name: native.FIRST_FLASHINFER)
    monkeypatch.setattr(
        native, "FLASHINFER_DECODE_DIGESTS", {"flashinfer.decode:fast_decode_plan": {"0": "x"}}
    )
    assert "fast_decode_plan" in native.NativeRoute.why_not().reason


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """No compiler, no prebuilt module, an empty JIT cache."""
    from vllm_specpatch.kernels import build

    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "prebuilt_folders", lambda: [tmp_path / "prebuilt"])
    monkeypatch.setattr(build, "cached_library", lambda uri: tmp_path / "cache" / uri / f"{uri}.so")
    return tmp_path


@pytest.mark.parametrize("where", ["prebuilt", "cache", None])
def test_spec_mask_is_refused_where_its_module_cannot_be_had(nothing_built, where):
    if where is not None:
        module = nothing_built / where / "spec_mask_sm86_x"
        module.mkdir(parents=True)
        (module / "spec_mask_sm86_x.so").touch()
        assert routes.candidates("spec_mask") == [routes.ROUTES["spec_mask"]]
        return
    found = routes.candidates("spec_mask")
    assert found.state is State.REFUSED and "vllm-specpatch build" in found.next_step


def test_nothing_is_promised_where_no_route_can_be_had(any_route_bench, nothing_built, monkeypatch):
    """FlashInfer before 0.6.16 and no compiler: stock, in the V1 runner's order too (gate, then builder)."""
    refusal = decision.Finding(State.REFUSED, "silently wrong")
    monkeypatch.setattr(native.NativeRoute, "why_not", classmethod(lambda cls: refusal))
    b = any_route_bench(k=3)
    assert both(b) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)
    with b.current(b.config):
        type(b.builder)(b.spec, list(b.layers), b.config, b.builder.device)


def test_a_forced_route_is_the_only_candidate(monkeypatch):
    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
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


def test_without_speculation_graphs_and_threshold_are_stock(bench, route):
    b = bench(k=0)
    assert both(b) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)
    waits = seams.plain_decode_waits(seams.release(gate.installed_version("vllm")))
    assert (b.builder.specpatch_route is not None) is (route.builds and waits)


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


def test_subclasses_answer_for_themselves(bench, vllm_on_gpu):
    """Chunked-local attention subclasses the builder at run time; its virtual batches are not ours."""
    b = bench(k=3)
    subclass = type("Local", (vllm_on_gpu.FlashInferMetadataBuilder,), {})
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


def test_an_error_before_the_promise_leaves_both_faces_stock(bench, monkeypatch, route):
    def broken(self, builder, backend):
        raise RuntimeError("no memory")

    monkeypatch.setattr(route, "__init__", broken)
    assert both(bench(k=5)) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)


def test_an_error_after_the_promise_is_loud(bench, monkeypatch, vllm_on_gpu, route):
    """The V1 runner asks the gate before it makes builders."""
    from vllm_specpatch.errors import SpecPatchError

    b = bench(k=5)
    assert b.support() == "UNIFORM_BATCH"
    monkeypatch.setattr(route, "__init__", lambda self, builder, backend: 1 / 0)
    with b.current(b.config), pytest.raises(SpecPatchError, match="VLLM_SPECPATCH=0"):
        vllm_on_gpu.FlashInferMetadataBuilder(b.spec, list(b.layers), b.config, b.builder.device)


def test_the_decision_is_said_once(bench, route):
    import vllm_specpatch

    for _ in range(3):
        bench(k=3)
    decisions = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["decisions"]
    reason = "FULL CUDA graphs for FlashInfer speculative decoding"
    # Other tests of this process ask for other routes by name.
    applied = [d for d in decisions if d["reason"] == reason and d["route"] == route.name]
    assert len(applied) == 1 and "simulated sm_" in applied[0]["gpu"]
