"""Drafters whose blocks are not causal (DFlash, DSpark) on real vLLM: which of their batches are decodes, by
which plan, and what is settled before graphs are promised. The numbers are in test_numbers.py."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest

from vllm_specpatch import gate
from vllm_specpatch.kernels import spec_mask
from vllm_specpatch.patch import State
from vllm_specpatch.patches import decision, native, routes, seams, spec_mask_route

STOCK = "UNIFORM_SINGLE_TOKEN_DECODE"
SERVED = ("UNIFORM_BATCH", 4)
BOTH = ("causal", "full")
#: Until this release a drafter's builders get the target's configuration (V2 runner).
OWN_CONFIGURATION = seams.Version("0.26")
RELEASE = seams.release(gate.installed_version("vllm"))


def non_causal(config):
    config.attention_config.use_non_causal = True


@pytest.fixture
def drafter(any_route_bench, loaded, set_route):
    """A builder of a drafter that may have non-causal blocks, the route asked for by name."""
    set_route("spec_mask")
    return any_route_bench(k=3, change=non_causal)


def both(b):
    return b.support(), b.builder.reorder_batch_threshold


def mask(metadata):
    return metadata.decode.wrapper.plan.shape["mask"]


def test_one_builder_serves_causal_and_non_causal_batches(drafter, recorders):
    b = drafter
    assert both(b) == SERVED
    captured = {causal: b.build([4, 4], [4, 4], capture=True, causal=causal)[0] for causal in (True, False)}
    assert (mask(captured[True]), mask(captured[False])) == BOTH
    for causal, first in captured.items():
        again, plans = b.build([4, 4], [70, 80], causal=causal)
        assert again.causal is causal and plans == []
        assert (again.num_decodes, again.num_decode_tokens, again.num_prefills) == (2, 8, 0)
        # Not the graph's: that plans itself, and what runs here may have rows of other lengths.
        assert mask(again) == mask(first) and again.decode.wrapper.plan is not first.decode.wrapper.plan
        other, _ = b.build([4, 3, 1], [30, 40, 50], causal=causal)
        assert mask(other) == mask(first) and other.decode.wrapper.plan is not first.decode.wrapper.plan


def test_a_shape_is_captured_for_the_mask_that_it_was_captured_with(drafter):
    b = drafter
    captured, _ = b.build([4, 4], [4, 4], capture=True)
    block, _ = b.build([4, 4], [30, 40], causal=False)
    plan = block.decode.wrapper.plan
    assert plan.shape["mask"] == "full" and plan.shape["max_requests"] == 16  # not that of a graph
    assert captured.decode.wrapper.plan.shape["max_requests"] == 2


def test_padding_of_a_captured_block(drafter):
    b = drafter
    b.build([4] * 4, [4] * 4, capture=True, causal=False)
    metadata, _ = b.build([4, 4, 0, 0], [20, 33, 0, 0], num_tokens=16, causal=False)
    assert mask(metadata) == "full" and metadata.num_decodes == 4


def test_a_block_beside_a_real_prefill(drafter, recorders):
    metadata, [prefill] = drafter.build([4, 4, 40], [20, 33, 50], causal=False)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.causal) == (2, 1, False)
    assert mask(metadata) == "full" and not prefill.causal and prefill.kv_lens == [50]


def test_causality_by_request_is_vllms(drafter):
    import torch

    by_request = torch.tensor([False])
    assert not drafter.builder.specpatch_route.serves(by_request)
    metadata, _ = drafter.build([4], [20], causal=by_request)
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 1) and metadata.causal is by_request


def test_an_update_of_a_draft_step_keeps_the_plan_of_the_block(drafter):
    if not seams.draft_metadata_can_be_updated(drafter.builder):
        pytest.skip("before vLLM 0.28")
    metadata, _ = drafter.build([4, 4], [4, 4], capture=True, causal=False)
    wrapper = metadata.decode.wrapper
    plan = wrapper.plan
    drafter.builder.update_draft_decode_metadata(metadata)
    assert metadata.decode.wrapper is wrapper and wrapper.plan is plan and plan.shape["mask"] == "full"


def test_the_workspace_is_that_of_the_larger_mask(drafter):
    partial_o, _ = drafter.builder.specpatch_route._workspace
    assert partial_o.shape[0] == 2 * 16 * 4
    for causal in (True, False):
        metadata, _ = drafter.build([4] * 9, [30] * 9, causal=causal)
        assert metadata.decode.wrapper.plan.partial_o is partial_o, "allocated while requests are served"


# -- modules ---------------------------------------------------------------------------------------


def test_both_kinds_of_mask_are_there_before_the_promise(any_route_bench, loaded, set_route):
    set_route("spec_mask")
    probe = any_route_bench(k=3)
    loaded.clear()

    def ask(config):
        non_causal(config)
        config.compilation_config.static_forward_context.update(
            probe.config.compilation_config.static_forward_context
        )
        with probe.current(config):
            assert type(probe.builder).get_cudagraph_support(config, probe.spec).name == "UNIFORM_BATCH"
        config.compilation_config.static_forward_context.clear()

    any_route_bench(k=3, change=ask)
    at_gate, *later = loaded
    assert at_gate.masks == BOTH and set(later) == {at_gate}


def test_a_causal_configuration_builds_what_it_always_did(any_route_bench, loaded, set_route):
    set_route("spec_mask")
    b = any_route_bench(k=3)
    assert set(loaded) == {spec_mask.Spec(head_dim=128, group_size=2, max_q_len=4)}
    assert loaded[0].compiled()["masks"] == ["causal"]
    metadata, _ = b.build([4, 4], [20, 33], causal=False)
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2), "no kernel of that mask is loaded"


@pytest.mark.parametrize("rows", [4, 16, 17, 64, 65, 128, 129])
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("masks", [("causal",), BOTH])
def test_windows_are_refused_when_the_plan_would(rows, group_size, head_dim, masks):
    """Plans are made after the promise: their rule for windows must have been asked before."""
    spec = spec_mask.Spec(head_dim, group_size, window=True, masks=masks, max_q_len=rows)
    shape = {"num_kv_heads": 1, "max_requests": 1, "max_rows": rows, "max_q_len": rows, "max_kv_len": 4096}
    shape |= {"page_table_stride": 256, "mask": masks[-1], "window_left": 9, "device": "cpu"}
    with pytest.raises(spec_mask.SpecMaskError) as error:
        spec_mask.Plan(SimpleNamespace(spec=spec), **shape)
    refused = str(error.value).startswith("max_q_len")
    assert refused or str(error.value).startswith("device"), "a rule that is not asked about before"
    try:
        spec_mask_route.make_spec(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})
    except routes.RouteUnavailable as e:
        assert refused and e.finding.next_step
    else:
        assert not refused


# -- the decision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "native"])
def test_stock_until_the_route_is_asked_for(any_route_bench, loaded, set_route, name):
    set_route(name)
    b = any_route_bench(k=3, change=non_causal)
    assert b.support() == STOCK and b.builder.specpatch_route is None


def test_refused_in_one_line_without_a_route_for_it(any_route_bench, loaded, set_route, monkeypatch):
    """When ``auto`` may serve such drafters, and there is no compiler."""
    import vllm_specpatch

    set_route("auto")
    monkeypatch.setattr(decision, "NON_CAUSAL", ("auto", "spec_mask"))
    monkeypatch.setattr(routes, "AUTO", ("native",))
    monkeypatch.setattr(native.NativeRoute, "why_not", classmethod(lambda cls: None))
    b = any_route_bench(k=3, change=non_causal)
    assert b.support() == STOCK and b.builder.specpatch_route is None
    last = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["decisions"][-1]
    assert last["state"] == State.REFUSED.value and "non-causally" in last["reason"]
    assert last["wanted"] and last["found"] and last["next_step"]


def test_every_copy_of_the_drafters_configuration_is_decided_alike_and_said_once(drafter):
    """The V2 runner makes the drafter's configuration anew whenever it asks for it."""
    import vllm_specpatch

    def decisions():
        said = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["decisions"]
        return [d for d in said if "non-causal drafts included" in d["reason"]]

    b = drafter
    gate_first, builder_first = copy.copy(b.config), copy.copy(b.config)
    with b.current(gate_first):
        assert type(b.builder).get_cudagraph_support(gate_first, b.spec).name == "UNIFORM_BATCH"
    for config in (gate_first, builder_first):
        with b.current(config):
            builder = type(b.builder)(b.spec, list(b.layers), config, b.builder.device)
            assert builder.specpatch_route._module.spec.masks == BOTH
            assert builder.get_cudagraph_support(config, b.spec).name == "UNIFORM_BATCH"
    assert len(decisions()) == 1 and decisions()[0]["route"] == "spec_mask"


def test_a_drafter_that_fails_leaves_the_target_alone(any_route_bench, loaded, set_route, monkeypatch):
    set_route("spec_mask")
    target = any_route_bench(k=3)
    assert both(target) == SERVED
    config = copy.copy(target.config)
    config.attention_config = copy.copy(config.attention_config)
    non_causal(config)
    monkeypatch.setattr(spec_mask, "Plan", lambda *a, **k: 1 / 0)  # no memory left for it
    with target.current(config):
        builder = type(target.builder)(target.spec, list(target.layers), config, target.builder.device)
        assert builder.specpatch_route is None
        assert builder.get_cudagraph_support(config, target.spec).name == STOCK
    assert both(target) == SERVED


# -- whose configuration says so -------------------------------------------------------------------


def configuration(method="dflash", v2=True, **dflash):
    hf_config = SimpleNamespace(dflash_config=dflash)
    return SimpleNamespace(
        attention_config=SimpleNamespace(use_non_causal=False),
        speculative_config=SimpleNamespace(
            method=method, draft_model_config=SimpleNamespace(hf_config=hf_config)
        ),
        use_v2_model_runner=v2,
    )


def test_the_targets_graphs_are_the_drafters_before_vllm_026(vllm_on_gpu):
    """The drafter's builders get the target's configuration there, and graphs if the target gets them,
    whatever its attention can do: recorded over plans of the host they would replay stale ones."""
    shared = RELEASE < OWN_CONFIGURATION
    assert seams.may_be_non_causal(configuration()) is shared
    assert seams.may_be_non_causal(configuration(causal=False)) is shared
    assert not seams.may_be_non_causal(configuration(causal=True))
    # Drafts of the V1 runner are in no FULL graph.
    assert not seams.may_be_non_causal(configuration(v2=False))
    assert not seams.may_be_non_causal(configuration(method="eagle"))
    if RELEASE >= seams.Version("0.25"):
        assert seams.may_be_non_causal(configuration(method="dspark")) is shared


def test_the_drafter_has_a_configuration_of_its_own_from_vllm_026(any_route_bench, loaded):
    if RELEASE < OWN_CONFIGURATION:
        pytest.skip("it gets the target's")
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    b = any_route_bench(k=3)
    speculator = DFlashSpeculator.__new__(DFlashSpeculator)
    speculator.vllm_config, speculator.requires_non_causal = b.config, True
    config = speculator.attn_vllm_config
    assert seams.may_be_non_causal(config) and not seams.may_be_non_causal(b.config)
    # What is looked for there, the layers, is the target's own.
    assert config.compilation_config is b.config.compilation_config
