"""Route spec_mask before the first request: modules, workspace, and the memory that builds copy from."""

import copy
from types import SimpleNamespace

import pytest

import vllm_specpatch
from vllm_specpatch.kernels import build, probe, spec_mask
from vllm_specpatch.patches import native, routes, spec_mask_route


@pytest.fixture(autouse=True)
def spec_mask_alone(loaded, monkeypatch):
    monkeypatch.setattr(routes, "AUTO", ("spec_mask",))


def asked_first(made, change):
    """A bench whose configuration the gate has seen before any builder of it exists, as on the V1 runner.
    ``change(config)`` comes before."""
    probe = made(k=3)
    said = []

    def ask(config):
        # The layers exist by then: a model is loaded before graphs are thought of.
        config.compilation_config.static_forward_context.update(
            probe.config.compilation_config.static_forward_context
        )
        change(config)
        with probe.current(config):
            said.append(type(probe.builder).get_cudagraph_support(config, probe.spec).name)
        config.compilation_config.static_forward_context.clear()

    bench = made(k=3, change=ask)
    return bench, said[0]


def test_modules_are_loaded_before_graphs_are_promised(any_route_bench, loaded):
    at_gate = []

    def change(config):
        loaded.clear()

    bench, support = asked_first(any_route_bench, change)
    at_gate = loaded[:1]
    assert support == "UNIFORM_BATCH" and bench.builder.specpatch_route.name == "spec_mask"
    # The builder asked for the very module that the gate had loaded: nothing is left to fail.
    assert at_gate and set(loaded) == set(at_gate)


def test_a_module_that_does_not_compile_leaves_stock_whoever_asks_first(any_route_bench, loaded, monkeypatch):
    def change(config):
        def broken(spec, before_build=None):
            raise build.BuildError("did not compile")

        monkeypatch.setattr(spec_mask, "load", broken)

    bench, support = asked_first(any_route_bench, change)
    assert support == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert (bench.support(), bench.builder.reorder_batch_threshold) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)
    assert bench.builder.specpatch_route is None
    again = any_route_bench(k=3)  # the V2 runner makes the builder first
    assert (again.support(), again.builder.reorder_batch_threshold) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)


def test_each_module_is_checked_on_the_gpu_once_and_before_the_promise(any_route_bench, loaded, proved):
    asked = []

    def change(config):
        loaded.clear(), proved.clear(), spec_mask_route._proved.clear()
        asked.append(list(proved))

    bench, support = asked_first(any_route_bench, change)
    assert support == "UNIFORM_BATCH" and bench.builder.specpatch_route.name == "spec_mask"
    # The gate and the builder both load it; the gate, which comes first, has it checked.
    assert asked == [[]] and len(loaded) > len(set(loaded))
    assert [module.spec for module in proved] == list(dict.fromkeys(loaded))


@pytest.mark.parametrize(
    "error", [probe.WrongResults("the kernel is wrong on a GPU"), RuntimeError("too many resources")]
)
def test_a_kernel_that_is_wrong_on_this_gpu_never_serves(any_route_bench, loaded, monkeypatch, error):
    def wrong(module):
        raise error

    def change(config):
        monkeypatch.setattr(probe, "check", wrong)
        spec_mask_route._proved.clear()

    bench, support = asked_first(any_route_bench, change)
    assert support == "UNIFORM_SINGLE_TOKEN_DECODE" and bench.builder.specpatch_route is None
    status = vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]
    assert any(str(error) in str(decision) for decision in status["decisions"][-2:])


def test_layers_that_the_kernels_do_not_do_are_found_before_the_promise(any_route_bench, loaded):
    def change(config):
        for layer in config.compilation_config.static_forward_context.values():
            layer.impl.head_size = 80

    _, support = asked_first(any_route_bench, change)
    assert support == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_the_user_hears_of_a_build_and_of_the_workspace(any_route_bench, loaded, monkeypatch, caplog):
    def load(spec, before_build):
        before_build("building spec-mask module for sm_86")
        return SimpleNamespace(spec=spec)

    monkeypatch.setattr(spec_mask, "load", load)
    lines = []
    monkeypatch.setattr(spec_mask_route.log, "info", lambda text, *args: lines.append(text % args))
    b = any_route_bench(k=3)
    assert "building spec-mask module for sm_86" in lines
    rows = b.config.scheduler_config.max_num_seqs * 4
    mib = rows * 4 * (128 + 1) * 4 / 2**20
    assert any(line.endswith(f"workspace {mib:.1f} MiB") for line in lines), lines


def test_the_workspace_is_there_before_the_first_request(any_route_bench, loaded):
    b = any_route_bench(k=3)
    route = b.builder.specpatch_route
    partial_o, _ = route._workspace
    captured, _ = b.build([4] * 8, [30] * 8, capture=True)
    other, _ = b.build([4, 2, 1], [30, 40, 50])
    assert captured.decode.wrapper.plan.partial_o is partial_o
    assert other.decode.wrapper.plan.partial_o is partial_o
    assert captured.decode.wrapper.plan is not other.decode.wrapper.plan


@pytest.mark.parametrize(
    ("part", "field", "most"),
    [
        ("scheduler_config", "max_num_seqs", spec_mask.MAX_REQUESTS),
        ("model_config", "max_model_len", spec_mask.MAX_KV_LEN),
    ],
)
def test_more_than_the_planner_takes_is_refused_before_promising(any_route_bench, loaded, part, field, most):
    def change(config):
        setattr(getattr(config, part), field, most + 1)

    _, support = asked_first(any_route_bench, change)
    assert support == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize("error", [OSError("[Errno 30] Read-only file system"), build.BuildError("no nvcc")])
@pytest.mark.parametrize("where", ["load", "Plan"])
def test_whatever_stops_the_route_the_next_one_serves(any_route_bench, loaded, monkeypatch, where, error):
    def stop(*args, **kwargs):
        raise error

    monkeypatch.setattr(spec_mask, where, stop)
    b = any_route_bench(k=3)
    assert b.builder.specpatch_route is None and b.builder.reorder_batch_threshold == 1
    assert b.support() == "UNIFORM_SINGLE_TOKEN_DECODE"
    if native.NativeRoute.why_not() is not None:
        return
    monkeypatch.setattr(routes, "AUTO", ("spec_mask", "native"))
    for b in (any_route_bench(k=3), asked_first(any_route_bench, lambda config: None)[0]):
        assert b.builder.specpatch_route.name == "native"
        assert (b.support(), b.builder.reorder_batch_threshold) == ("UNIFORM_BATCH", 4)


class Event:
    def __init__(self, log):
        self._log = log

    def record(self, stream):
        self._log.append("record")

    def synchronize(self):
        self._log.append("wait")


def test_a_build_waits_for_the_copies_of_the_one_before_it(any_route_bench, loaded, monkeypatch):
    """Of two prefill batches in a row the second overwrote page-locked memory from which the first was still
    to be copied: on an H200 an illegal memory access at batch 32, and none with CUDA_LAUNCH_BLOCKING=1."""
    import torch

    b = any_route_bench(k=3)
    happened = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(happened))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    b.builder.specpatch_route._staging = spec_mask_route.Staging(torch.device("cuda"))
    plan = type(b.builder)._compute_flashinfer_kv_metadata

    def stock(*args, **kwargs):
        happened.append("stock writes")
        return plan(b.builder, *args, **kwargs)

    monkeypatch.setattr(b.builder, "_compute_flashinfer_kv_metadata", stock)
    b.build([4, 4], [20, 33], capture=True)
    b.build([4, 4], [20, 33])
    assert happened == []  # decodes alone write nothing that is copied later, and wait for nothing
    b.build([100, 100], [100, 100])
    b.build([4, 100], [50, 100])
    b.build([4, 4], [20, 33])
    b.build([4, 60], [51, 160])
    first, then = ["stock writes", "record"], ["wait", "stock writes", "record"]
    assert happened == first + then + then


def test_a_block_table_of_another_width_gets_a_plan_of_its_own(any_route_bench, loaded):
    """The kernels read rows of the table by the stride that the plan was made with."""
    b = any_route_bench(k=3)
    first, _ = b.build([4, 2], [30, 40])
    common = b.batch([4, 2], [30, 40])
    narrow = common.replace(block_table_tensor=common.block_table_tensor[:, :32].contiguous())
    with b.current(b.config):
        second = b.builder.build(common_prefix_len=0, common_attn_metadata=narrow)
    again, _ = b.build([4, 2], [31, 41])
    plans = [m.decode.wrapper.plan for m in (first, second, again)]
    assert [plan.shape["page_table_stride"] for plan in plans] == [64, 32, 64]
    assert plans[0] is plans[2] is not plans[1]
    assert plans[0].partial_o is plans[1].partial_o


def test_window_and_soft_cap_of_the_layers_reach_module_plan_and_run(any_route_bench, loaded, monkeypatch):
    import torch

    b = any_route_bench(k=3)
    [layer] = b.config.compilation_config.static_forward_context.values()
    monkeypatch.setattr(layer.impl, "sliding_window", (9, 0))
    monkeypatch.setattr(layer.impl, "logits_soft_cap", 30.0)
    config = copy.copy(b.config)
    loaded.clear()
    with b.current(config):
        assert type(b.builder).get_cudagraph_support(config, b.spec).name == "UNIFORM_BATCH"
        at_gate = list(loaded)
        b.builder = type(b.builder)(b.spec, list(b.layers), config, b.builder.device)
    assert {(s.window, s.soft_cap) for s in loaded} == {(True, True)} and set(loaded) == set(at_gate)
    runs = []
    monkeypatch.setattr(spec_mask, "run", lambda *a, **options: runs.append(options))
    metadata, _ = b.build([4, 4], [20, 33], capture=True)
    shape = metadata.decode.wrapper.plan.shape
    assert (shape["window_left"], shape["num_kv_heads"]) == (9, 2)
    cache = torch.zeros(4, 16, 2, 128)
    metadata.decode.wrapper.run(torch.zeros(8, 4, 128), (cache, cache))
    assert runs[0]["soft_cap"] == 30.0


def test_a_module_that_failed_the_check_fails_it_again(loaded, monkeypatch):
    def wrong(module):
        raise probe.WrongResults("the kernel is wrong on a GPU")

    monkeypatch.setattr(probe, "check", wrong)
    for _ in range(2):
        with pytest.raises(routes.RouteUnavailable, match="wrong on a GPU"):
            spec_mask_route.load(spec_mask.Spec(head_dim=128, group_size=2))


def test_the_gate_loads_the_module_of_an_fp8_cache(any_route_bench, loaded):
    b = any_route_bench(k=3, kv_cache_dtype="fp8_e5m2")
    [served] = set(loaded)
    loaded.clear()
    config = copy.copy(b.config)
    with b.current(config):
        type(b.builder).get_cudagraph_support(config, b.spec)
    assert set(loaded) == {served} and served.dtype_kv == "float8_e5m2"


def test_a_plan_larger_than_the_workspace_becomes_it(any_route_bench, loaded):
    b = any_route_bench(k=3)
    route = b.builder.specpatch_route
    route._workspace = tuple(t[:5] for t in route._workspace)
    plan = b.build([4, 4], [30, 30], capture=True)[0].decode.wrapper.plan
    assert plan.partial_o.shape[0] == plan.partial_lse.shape[0] == 8
    assert route._workspace == (plan.partial_o, plan.partial_lse)
    small = b.build([4], [30], capture=True)[0].decode.wrapper.plan
    assert small.partial_o is plan.partial_o and small.partial_lse is plan.partial_lse


def test_fewer_columns_of_the_same_table_get_a_plan_of_their_own(any_route_bench, loaded):
    b = any_route_bench(k=3)
    common = b.batch([4, 2], [30, 40])
    narrow = common.replace(block_table_tensor=common.block_table_tensor[:, :32])  # the same row stride
    with b.current(b.config):
        first, second = (
            b.builder.build(common_prefix_len=0, common_attn_metadata=c).decode.wrapper.plan
            for c in (narrow, common)
        )
    assert [p.shape["max_kv_len"] for p in (first, second)] == [32 * 16, 64 * 16]


def test_batches_left_to_vllm_wait_for_the_copies_too(any_route_bench, loaded, monkeypatch):
    import torch

    b = any_route_bench(k=3)
    happened = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(happened))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    b.builder.specpatch_route._staging = spec_mask_route.Staging(torch.device("cuda"))
    b.build([100], [100])
    b.build([4, 4], [20, 33], causal=False)
    assert happened == ["record", "wait", "record"]


@pytest.mark.parametrize(
    ("part", "field", "most"),
    [
        ("scheduler_config", "max_num_seqs", spec_mask.MAX_REQUESTS),
        ("model_config", "max_model_len", spec_mask.MAX_KV_LEN),
    ],
)
def test_what_the_planner_just_takes_is_served(any_route_bench, loaded, part, field, most):
    b = any_route_bench(k=3)
    setattr(getattr(b.config, part), field, most)
    assert spec_mask_route.SpecMaskRoute.prepare(b.config, b.backend, 4) is None


def test_a_capture_plans_once(any_route_bench, loaded, monkeypatch):
    import torch

    b = any_route_bench(k=3)
    metadata, _ = b.build([4, 4], [4, 4], capture=True)
    wrapper = metadata.decode.wrapper
    monkeypatch.setattr(spec_mask, "run", lambda *a, **k: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    caches = [torch.zeros(1, 16, 2, 128) for _ in range(3)]
    for cache in caches:
        wrapper.run(torch.zeros(8, 4, 128), (cache, cache))
    assert len(wrapper.plan.updates) == 1
