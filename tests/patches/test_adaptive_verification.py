"""Drafts that are trimmed on the device (vLLM 0.31 and later): what is answered to vLLM's own questions about
it, and when. That graphs then compute the right thing is in test_numbers.py."""

from types import SimpleNamespace

import pytest

from vllm_specpatch.kernels import spec_mask
from vllm_specpatch.patch import Finding, State
from vllm_specpatch.patches import routes


@pytest.fixture
def made(any_route_bench, set_route, loaded, monkeypatch):
    """Makes a bench with the route asked for by name; nothing is compiled."""
    monkeypatch.setattr(spec_mask, "run", lambda plan, q, *caches, out, **_: out)
    set_route("spec_mask")
    return any_route_bench


def answers(b):
    """vLLM's own checks when all builders are there: None, or what they object to."""
    from vllm.v1.worker.gpu import attn_utils

    group = SimpleNamespace(
        backend=b.backend.FlashInferBackend,
        layer_names=b.layers,
        kv_cache_spec=b.spec,
        get_metadata_builder=lambda ubatch: b.builder,
    )
    with b.current(b.config):
        return (
            attn_utils.get_query_lens_mismatch_unsupported_backend([[group]]),
            attn_utils.get_varlen_cudagraph_unsupported_backend([[group]], b.config, 4),
        )


def selects(b):
    """Whether vLLM's selector lets FlashInfer be chosen for a layer of the configuration."""
    with b.current(b.config):
        return b.backend.FlashInferBackend.supports_device_cpu_query_lens_mismatch()


def test_vllms_checks_pass_where_the_route_serves(made, adaptive):
    b = made(k=3, change=adaptive)
    assert answers(b) == (None, None) and b.builder.specpatch_route.name == "spec_mask"
    assert b.builder.get_varlen_cudagraph_max_query_len(b.config, b.spec) == b.builder.reorder_batch_threshold


def test_a_promise_of_ragged_graphs_is_one(made, adaptive, monkeypatch):
    """Asked first or alone, it must not be withdrawn quietly either."""
    from vllm_specpatch.errors import SpecPatchError

    b = made(k=3, change=adaptive)
    assert type(b.builder).get_varlen_cudagraph_max_query_len(b.config, b.spec) == 4
    monkeypatch.setattr(spec_mask, "Plan", lambda *a, **k: 1 / 0)
    with b.current(b.config), pytest.raises(SpecPatchError, match="VLLM_SPECPATCH=0"):
        type(b.builder)(b.spec, list(b.layers), b.config, b.builder.device)


def test_only_by_name(made, adaptive, set_route):
    set_route("auto")
    b = made(k=3, change=adaptive)
    assert answers(b) == ("FlashInferBackend", ("FlashInferBackend", None)) and not selects(b)


def test_only_where_drafts_are_trimmed(made, adaptive):
    b = made(k=3)
    assert b.builder.specpatch_route.name == "spec_mask" and not selects(b)
    plan = b.build([4, 4], [4, 4], capture=True)[0].decode.wrapper.plan
    assert (plan.shape["max_rows"], plan.shape["max_q_len"]) == (8, 4)
    ragged = b.build([4, 3], [4, 3], capture=True)[0].decode.wrapper.plan
    assert ragged.shape["max_requests"] == 16, "no graph of that shape exists"


def test_not_where_no_builder_could_be_had(made, adaptive, monkeypatch):
    def no_compiler(self, builder, backend):
        raise routes.RouteUnavailable(Finding(State.REFUSED, "no compiler"))

    monkeypatch.setattr(routes.ROUTES["spec_mask"], "__init__", no_compiler)
    b = made(k=3, change=adaptive)
    assert b.builder.specpatch_route is None
    assert answers(b)[0] == "FlashInferBackend", "vLLM must say that it cannot, at start-up"


def test_a_layers_backend_is_granted_before_anything_is_committed(made, adaptive):
    """The selector asks while the model is made: nothing may be committed for a model without layers."""
    before, after = [], []

    def change(config):
        adaptive(config)
        probe = SimpleNamespace(backend=bench.backend, current=bench.current, config=config)
        before.append(selects(probe))
        config.attention_config.backend = None  # vLLM chooses: it must find what it finds without us
        after.append(selects(probe))
        config.attention_config.backend = chosen

    bench = made(k=3)
    chosen = bench.config.attention_config.backend
    b = made(k=3, change=change)
    assert (before, after) == ([True], [False])
    assert answers(b) == (None, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.parallel_config, "decode_context_parallel_size", 2),
        lambda config: setattr(config.compilation_config, "cudagraph_mode", None),
    ],
    ids=["dcp", "no graphs"],
)
def test_a_layers_backend_is_not_granted_where_the_decision_is_known(made, adaptive, change):
    bench, granted = made(k=3), []

    def ask(config):
        adaptive(config)
        change(config)
        granted.append(selects(SimpleNamespace(backend=bench.backend, current=bench.current, config=config)))
        raise StopIteration

    with pytest.raises(StopIteration):
        made(k=3, change=ask)
    assert granted == [False]


def test_a_subclass_answers_for_itself(made, adaptive):
    """Chunked-local attention has a backend of its own, derived from this one."""
    b = made(k=3, change=adaptive)
    derived = type("Local", (b.backend.FlashInferBackend,), {})
    with b.current(b.config):
        assert not derived.supports_device_cpu_query_lens_mismatch()


def test_the_plan_of_a_ragged_graph(made, adaptive):
    """vLLM captures min(tokens, max_num_seqs) requests: any of them may get all rows that a request can."""
    b = made(k=3, change=adaptive)
    for requests, tokens, longest in ((16, 24, 4), (2, 2, 2), (16, 64, 4)):
        even = [tokens // requests + (i < tokens % requests) for i in range(requests)]
        shape = b.build(even, even, capture=True)[0].decode.wrapper.plan.shape
        assert (shape["max_requests"], shape["max_rows"], shape["max_q_len"]) == (requests, tokens, longest)


def test_trimmed_decodes_beside_a_prefill(made, adaptive):
    """Host and device agree where the prefills begin, and about the prefills."""
    import torch

    b = made(k=3, change=adaptive)
    common = b.batch([2, 2, 2, 40], [20, 33, 16, 50])
    common.query_start_loc = torch.tensor([0, 4, 5, 6, 46], dtype=torch.int32)
    common.is_prefilling = torch.tensor([False, False, False, True])
    common.seq_lens_cpu_upper_bound = torch.tensor([22, 33, 18, 50], dtype=torch.int32)
    before = {name: len(recorder.plans) for name, recorder in b.recorders.items()}
    with b.current(b.config):
        metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 6, 1)
    [prefill] = [p for name, r in b.recorders.items() for p in r.plans[before.get(name, 0) :]]
    assert prefill.qo_indptr == [0, 40] and prefill.kv_lens == [50]
    wrapper = metadata.decode.wrapper
    q, kv = torch.zeros(6, 4, 128), b.kv_cache(4).split(128, dim=-1)
    wrapper.run(q, kv, out=torch.empty_like(q))
    assert wrapper.plan.updated == ([20, 33, 16], [0, 4, 5, 6])
