"""vLLM 0.33 below sm_90 verifies drafts itself, planned on the host: when ours replaces it, and that vLLM's
own is back where ours cannot serve."""

import pytest

from vllm_specpatch.patch import Finding, State
from vllm_specpatch.patches import routes


@pytest.fixture
def by_name(vllm_on_gpu, set_route):
    if not getattr(vllm_on_gpu, "_use_fa2_native_decode", lambda: False)():
        pytest.skip("this release does not verify drafts on FlashInfer's FA2 here")
    return set_route


def both(b):
    return b.support(), b.builder.reorder_batch_threshold


def test_vllms_own_stays_where_the_device_planned_route_is_not_wanted(bench, by_name):
    by_name("native")
    b = bench(k=3)
    assert both(b) == ("UNIFORM_BATCH", 4) and b.builder.specpatch_route is None
    metadata, [plan] = b.build([4, 4], [20, 33], capture=True)
    assert (
        plan.uniform_q_len == 4 and metadata.decode.wrapper in b.builder._decode_wrappers_cudagraph.values()
    )


@pytest.mark.parametrize("name", ["auto", "spec_mask"])
def test_ours_takes_over(bench, by_name, monkeypatch, name):
    from types import SimpleNamespace

    from vllm_specpatch.kernels import spec_mask
    from vllm_specpatch.patches import spec_mask_route

    by_name(name)
    monkeypatch.setattr(routes, "AUTO", ("spec_mask", "native"))
    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
    monkeypatch.setattr(spec_mask, "load", lambda spec, before_build=None: SimpleNamespace(spec=spec))
    monkeypatch.setattr(spec_mask_route.SpecMaskRoute, "_reserve", lambda self: ())
    b = bench(k=3)
    assert both(b) == ("UNIFORM_BATCH", 4) and b.builder.specpatch_route.name == "spec_mask"


@pytest.mark.parametrize(("name", "state"), [("auto", State.NOT_NEEDED), ("spec_mask", State.REFUSED)])
def test_a_module_that_does_not_compile_is_trouble_only_if_it_was_asked_for(
    bench, by_name, monkeypatch, name, state
):
    """In strict mode trouble ends the start; vLLM's own decode serves all the same."""
    import vllm_specpatch
    from vllm_specpatch.patches import spec_mask_route

    by_name(name)
    monkeypatch.setattr(routes, "AUTO", ("spec_mask", "native"))
    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
    broken = Finding(State.REFUSED, "it does not compile", "a module", "errors")
    monkeypatch.setattr(routes.ROUTES["spec_mask"], "prepare", classmethod(lambda *_: broken))
    b = bench(k=3)
    assert both(b) == ("UNIFORM_BATCH", 4) and b.builder.specpatch_route is None
    [*_, said] = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["decisions"]
    assert said["state"] == state.value and "it does not compile" in said["reason"]


@pytest.mark.parametrize("gate_first", [True, False], ids=["V1", "V2"])
def test_vllms_own_serves_where_the_module_cannot_be_had(bench, by_name, monkeypatch, gate_first):
    """The V1 runner asks the gate before it makes builders."""

    def no_module(self, builder, backend):
        raise routes.RouteUnavailable(Finding(State.REFUSED, "no compiler"))

    by_name("spec_mask")
    monkeypatch.setattr(routes.ROUTES["spec_mask"], "__init__", no_module)
    other = bench(k=3)

    def ask_gate(config):
        with other.current(config):
            assert type(other.builder).get_cudagraph_support(config, other.spec).name == "UNIFORM_BATCH"

    b = bench(k=3, change=ask_gate if gate_first else None)
    assert both(b) == ("UNIFORM_BATCH", 4) and b.builder.specpatch_route is None
    _, [plan] = b.build([4, 4], [20, 33], capture=True)
    assert plan.uniform_q_len == 4
