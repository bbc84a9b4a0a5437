"""Route spec_mask on real vLLM: what is planned, with which tensors, and that nothing waits for the GPU.

The kernels need a GPU; their Python surface is recorded here (their own tests are in tests/kernels)."""

import contextlib
import sys

import pytest
import wrapt

from vllm_specpatch import gate
from vllm_specpatch.patches import native, seams

DEVICE_READS = ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@pytest.fixture
def kernels(loaded, monkeypatch):
    """The recorded surface: specs that were loaded and runs that were made."""
    from types import SimpleNamespace

    from vllm_specpatch.kernels import spec_mask

    made = SimpleNamespace(specs=loaded, runs=[])

    def run(plan, q, k, v, table, **options):
        made.runs.append(SimpleNamespace(plan=plan, q=q, k=k, v=v, table=table, **options))
        return options["out"]

    monkeypatch.setattr(spec_mask, "run", run)
    return made


@pytest.fixture
def bench(bench, kernels, monkeypatch):
    """As in conftest, with the route forced."""
    from vllm_specpatch.hooks import engine
    from vllm_specpatch.patches import routes

    assert "spec_mask" in routes.ROUTES and engine.records
    monkeypatch.setattr(routes, "AUTO", ("spec_mask", "native"))
    return bench


@contextlib.contextmanager
def device_reads(*tensors):
    """Names of operations that would copy one of ``tensors`` (or a view of it) to the host."""
    from torch.overrides import TorchFunctionMode

    storages = {t.untyped_storage().data_ptr() for t in tensors}
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            first = args[0] if args else None
            if hasattr(first, "untyped_storage") and first.untyped_storage().data_ptr() in storages:
                to_cpu = name in ("to", "copy_") and "cpu" in repr((args[1:], kwargs))
                if name in DEVICE_READS or to_cpu:
                    seen.append(name)
            return function(*args, **(kwargs or {}))

    with Watch():
        yield seen


def on_device(common):
    return common.seq_lens, common.query_start_loc, common.block_table_tensor, common.slot_mapping


CACHES = {}


def run_layers(metadata, *layers):
    """The decodes of these layers, as FlashInferImpl.forward runs them; each has a KV cache of its own."""
    import torch

    for layer in layers:
        cache = CACHES.setdefault(layer, torch.zeros(1, 2, 16, 2, 128))
        rows = torch.zeros(metadata.num_decode_tokens, 4, 128)
        metadata.decode.wrapper.run(rows, (cache[:, 0], cache[:, 1]), out=rows)


def steady(b, *batch, **options):
    """A step of a batch as the V2 runner sends it (no CPU lengths): build() and two layers. Returns metadata
    and device reads."""
    common = b.batch(*batch, **options)
    with b.current(b.config), device_reads(*on_device(common)) as reads:
        metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
        run_layers(metadata, 0, 1)
    assert seams.host_lengths(common) is None or reads, "lengths reached the host unseen"
    return metadata, reads, common


def steady_stock_reads(b):
    """What a stock build of decodes without speculation reads, given the runner's bound on the host."""
    common = b.batch([1] * 3, [20, 33, 16])
    common = common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone())
    with b.current(b.config), device_reads(*on_device(common)) as reads:
        b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    return reads


def test_a_steady_state_step_reads_nothing_from_the_device(bench):
    b = bench(k=3)
    b.build([4, 4], [4, 4], capture=True)
    metadata, reads, common = steady(b, [4, 4], [100, 5])
    assert reads == []
    plan = metadata.decode.wrapper.plan
    seq_lens, query_start_loc = plan.updates[-1]
    assert seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert query_start_loc.data_ptr() == common.query_start_loc.data_ptr()
    assert metadata.decode.wrapper.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 8, 0)
    assert metadata.slot_mapping is common.slot_mapping and metadata.causal is True


def test_a_build_makes_no_views_and_skips_our_own_wrapper(bench):
    """Half of its time. A batch that is padded past its decodes is still cut."""
    from vllm.v1.attention.backends import flashinfer

    b = bench(k=3)
    metadata, _, common = steady(b, [4, 4], [100, 5])
    (lengths, starts), table = metadata.decode.wrapper.plan.updates[-1], metadata.decode.wrapper.block_table
    assert (
        lengths is common.seq_lens and starts is common.query_start_loc and table is common.block_table_tensor
    )
    assert type(flashinfer.split_decodes_and_prefills) is wrapt.FunctionWrapper
    calls = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        with b.current(b.config):
            b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    finally:
        sys.setprofile(None)
    assert calls.count("split_decodes_and_prefills") == 1
    metadata, _, _ = steady(b, [4, 40], [100, 60])
    assert metadata.decode.wrapper.block_table.shape[0] == metadata.num_decodes == 1


def test_the_first_layer_plans_and_build_launches_nothing(bench):
    b = bench(k=3)
    captured, _ = b.build([4, 4], [4, 4], capture=True)
    plan = captured.decode.wrapper.plan
    assert plan.updates == []
    run_layers(captured, 0, 1, 2)
    assert len(plan.updates) == 1
    # A replay runs no Python: build() for it leaves everything to the graph.
    replayed, _ = b.build([4, 4], [70, 80])
    assert len(plan.updates) == 1 and replayed.decode.wrapper.plan.updates == []


def test_every_forward_pass_plans_for_itself(bench):
    """vLLM warms a graph up with the metadata that it then captures with, and may capture more than once."""
    b = bench(k=3)
    metadata, _ = b.build([4, 4], [4, 4], capture=True)
    for passes in (1, 2, 3):
        run_layers(metadata, 0, 1, 2)
        assert len(metadata.decode.wrapper.plan.updates) == passes


def test_a_capture_that_starts_with_another_layer_plans_too(bench, monkeypatch):
    """A drafter may run with the metadata of its target: eagerly the target's plan serves it, but a graph of
    the drafter alone must plan by itself."""
    import torch

    b = bench(k=3)
    metadata, _ = b.build([4, 4], [4, 4], capture=True)
    updates = metadata.decode.wrapper.plan.updates
    run_layers(metadata, 0, 1, "draft")
    assert len(updates) == 1
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run_layers(metadata, "draft")
    assert len(updates) == 2


def test_the_watch_sees_the_wait_of_the_native_route(bench, monkeypatch):
    """The same test on the route that waits: it must not pass there."""
    from vllm_specpatch.patches import routes

    monkeypatch.setattr(routes, "AUTO", ("native",))
    b = bench(k=3)
    b.build([4, 4], [4, 4], capture=True)
    common = b.batch([4, 4], [100, 5])
    with b.current(b.config), device_reads(*on_device(common)) as reads:
        b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert reads


def test_no_plan_is_made_on_the_host(bench, recorders):
    b = bench(k=3)
    b.build([4, 4], [4, 4], capture=True)
    _, plans = b.build([4, 4], [100, 5])
    assert plans == []


def test_captured_shapes_keep_their_plan_and_others_share_one(bench):
    b = bench(k=3)
    captured, _ = b.build([4, 4], [4, 4], capture=True)
    again, _ = b.build([4, 4], [70, 80], capture=True)
    assert again.decode.wrapper.plan is captured.decode.wrapper.plan
    assert captured.decode.wrapper.plan.shape["max_requests"] == 2
    others = {id(b.build([4] * n, [30] * n)[0].decode.wrapper.plan) for n in (1, 2, 3, 5)}
    assert len(others) == 1 and id(captured.decode.wrapper.plan) not in others


def test_an_uneven_batch_never_takes_the_plan_of_even_rows(bench):
    """With dynamic k, or parallel drafting, graphs of fewer rows than a decode may have are captured. A batch
    that has the same sum and runs eagerly would lose what is longer: the planner takes it for an error."""
    b = bench(k=3)
    b.build([2, 2], [20, 20], capture=True)
    metadata, reads, _ = steady(b, [3, 1], [20, 33])
    plan = metadata.decode.wrapper.plan
    assert reads == [] and (metadata.num_decodes, metadata.num_decode_tokens) == (2, 4)
    assert plan.shape["max_q_len"] == 4 and plan.updated == ([20, 33], [0, 3, 4])


def test_verify_and_draft_of_the_same_token_count_have_plans_of_their_own(bench):
    b = bench(k=3)
    verify, _ = b.build([4], [20], capture=True)
    draft, _ = b.build([1] * 4, [20, 21, 22, 23], capture=True)
    assert verify.decode.wrapper.plan.shape["max_q_len"] == 4
    assert draft.decode.wrapper.plan.shape["max_q_len"] == 1


def test_padding_rows_reach_the_planner_as_they_are(bench):
    b = bench(k=3)
    b.build([4] * 4, [4] * 4, capture=True)
    metadata, reads, _ = steady(b, [4, 4, 0, 0], [20, 33, 0, 0], num_tokens=16)
    seq_lens, query_start_loc = metadata.decode.wrapper.plan.updates[-1]
    assert reads == [] and metadata.num_decodes == 4
    assert seq_lens.tolist() == [20, 33, 0, 0] and query_start_loc.tolist() == [0, 4, 8, 8, 8]


def test_ragged_decodes_stay_decodes(bench):
    """n-gram and trimmed drafts: the native route would plan these as prefills, on the host."""
    b = bench(k=3)
    metadata, reads, _ = steady(b, [4, 2, 3, 1], [20, 33, 40, 7])
    assert reads == []
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (4, 10, 0)
    plan = metadata.decode.wrapper.plan
    assert plan.updates[-1][1].tolist() == [0, 4, 6, 9, 10] and plan.shape["max_q_len"] == 4


def mixed(b, is_prefilling, upper_bound):
    import torch

    common = b.batch([4, 4, 40, 30], [20, 33, 50, 30])
    common.is_prefilling = torch.tensor(is_prefilling)
    common.seq_lens_cpu_upper_bound = torch.tensor(upper_bound, dtype=torch.int32)
    with b.current(b.config), device_reads(*on_device(common)) as reads:
        metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
        run_layers(metadata, 0, 1)
    return metadata, reads, common


def test_mixed_batch_plans_the_prefills_from_exact_host_bounds(bench, recorders):
    b = bench(k=3)
    # The bound of a decode row under async scheduling is too high; those of prefills are exact.
    metadata, reads, common = mixed(b, [False, False, True, True], [23, 36, 50, 30])
    assert reads == []
    [prefill] = [p for r in recorders.values() for p in r.plans]
    assert prefill.qo_indptr == [0, 40, 70] and prefill.kv_lens == [50, 30] and prefill.causal
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 8)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (2, 70)
    assert metadata.num_actual_tokens == 78 and metadata.slot_mapping is common.slot_mapping
    assert metadata.decode.wrapper.plan.updates[-1][0].tolist() == [20, 33]
    # Pages of the prefills are those of rows 2 and 3 of the block table.
    assert metadata.prefill.wrapper._paged_kv_indices_buf.tolist() == [300, 301, 302, 303, 400, 401]


def test_a_long_row_that_is_no_prefill_gets_exact_lengths_with_vllms_own_wait(bench, recorders):
    b = bench(k=3)
    metadata, reads, _ = mixed(b, [False, False, True, False], [23, 36, 50, 33])
    assert reads, "the bound of such a row is not exact: the length must come from the device"
    [prefill] = [p for r in recorders.values() for p in r.plans]
    assert prefill.kv_lens == [50, 30] and metadata.num_prefills == 2


@pytest.mark.parametrize("stale", ["upper bound", "host copy"])
def test_a_drafters_longer_first_pass_is_planned_with_the_lengths_of_the_device(bench, recorders, stale):
    """Parallel drafting on the V1 runner: vLLM's own change to the batch leaves the host's lengths alone."""
    import torch
    from vllm.v1.spec_decode.utils import extend_all_queries_by_N

    b = bench(k=3, change=lambda config: setattr(config.speculative_config, "parallel_drafting", True))
    common = b.batch([4, 4, 40, 30], [20, 33, 50, 30])
    common.is_prefilling = torch.tensor([False, False, True, True])
    common.seq_lens_cpu_upper_bound = torch.tensor([23, 36, 50, 30], dtype=torch.int32)
    if stale == "host copy":
        if not hasattr(common, "_seq_lens_cpu"):
            pytest.skip("from vLLM 0.30 there is no copy on the host")
        common = common.replace(_seq_lens_cpu=common.seq_lens.clone())
    slots = torch.zeros(common.num_actual_tokens + 4 * 2, dtype=torch.int64)
    common = extend_all_queries_by_N(common, 2, torch.arange(64, dtype=torch.int32), slots)
    with b.current(b.config):
        metadata = b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    [prefill] = [p for r in recorders.values() for p in r.plans]
    assert prefill.qo_indptr == [0, 42, 74] and prefill.kv_lens == [52, 32]


def test_a_plan_for_uniform_rows_is_not_made_for_others_of_the_same_sum(bench):
    b = bench(k=7)
    metadata, _ = b.build([8, 8, 8, 4], [20, 33, 40, 7], capture=True)
    assert metadata.decode.wrapper.plan.shape["max_q_len"] == 8


def test_prefill_only_and_non_causal_batches_are_stock(bench, recorders):
    b = bench(k=3)
    metadata, [plan] = b.build([40, 50], [40, 50])
    assert metadata.num_decodes == 0 and plan.qo_indptr == [0, 40, 90]
    metadata, [plan] = b.build([4, 4], [20, 33], causal=False)
    assert metadata.num_prefills == 2 and not plan.causal


def test_the_module_is_made_for_the_group(bench, kernels):
    b = bench(k=7, kv_cache_dtype="fp8_e5m2")
    spec = kernels.specs[-1]
    assert (spec.head_dim, spec.group_size, spec.max_q_len) == (128, 2, 8)
    assert (spec.dtype_q, spec.dtype_kv) == ("bfloat16", "float8_e5m2")
    assert not spec.window and not spec.soft_cap
    assert b.builder.reorder_batch_threshold == 8 and b.support() == "UNIFORM_BATCH"


def test_run_gets_the_layers_scales_and_the_batchs_table(bench, kernels):
    import torch

    b = bench(k=3)
    metadata, _ = b.build([4, 4], [20, 33], capture=True)
    q = torch.zeros(8, 4, 128)
    kv = torch.zeros(10, 16, 2, 256).split(128, dim=-1)
    out = torch.empty_like(q)
    metadata.decode.wrapper.run(q, kv, q_scale=2.0, k_scale=0.5, v_scale=3.0, out=out, kv_cache_sf=None)
    [call] = kernels.runs
    assert call.out is out and call.layout == "NHD"
    assert call.sm_scale == pytest.approx(2 * 128**-0.5) and (call.k_scale, call.v_scale) == (0.5, 3.0)
    assert call.table is metadata.decode.wrapper.block_table


def forward(b, metadata, cache, **attributes):
    """vLLM's own attention layer on a built batch; returns its output."""
    import torch

    layer = b.config.compilation_config.static_forward_context[b.layers[0]]
    for name, value in attributes.items():
        setattr(layer.impl, name, value)
    rows = metadata.num_actual_tokens
    q, k, v = (torch.zeros(rows, heads, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = torch.zeros(rows, 4, 128, dtype=torch.bfloat16)
    with b.current(b.config):
        layer.impl.forward(layer, q, k, v, cache, metadata, out)
    return out


def test_vllms_forward_hands_the_cache_and_the_output_to_the_kernel(bench, kernels):
    b = bench(k=3)
    metadata, _ = b.build([4, 4], [20, 33], capture=True)
    cache = b.kv_cache(pages=8)
    out = forward(b, metadata, cache)
    [call] = kernels.runs
    assert call.plan is metadata.decode.wrapper.plan and call.layout == "NHD"
    assert tuple(call.q.shape) == (8, 4, 128) and call.out.data_ptr() == out.data_ptr()
    assert tuple(call.k.shape) == tuple(call.v.shape) == (8, 16, 2, 128)
    assert call.k.stride() == call.v.stride() and call.k.stride(3) == 1
    assert call.k.data_ptr() == cache.data_ptr()
    # Behind the K of a page, or, from 0.26, of a token.
    step = call.v.data_ptr() - call.k.data_ptr()
    assert step == (16 * 2 * 128 if cache.dim() == 5 else 128) * cache.element_size()
    assert (call.sm_scale, call.k_scale, call.v_scale) == (pytest.approx(128**-0.5), 1.0, 1.0)


def test_sinks_are_refused_and_not_dropped(bench, kernels):
    import torch

    from vllm_specpatch.kernels import spec_mask

    b = bench(k=3)
    metadata, _ = b.build([4, 4], [20, 33], capture=True)
    with pytest.raises(spec_mask.SpecMaskError, match="sinks"):
        metadata.decode.wrapper.run(None, None, sinks=torch.zeros(4))


def test_a_model_with_sinks_is_left_to_vllm(bench, vllm_on_gpu):
    import torch

    def give_sinks(config):
        other = bench(k=3)
        [layer] = other.config.compilation_config.static_forward_context.values()
        layer.impl.sinks = torch.zeros(4)
        config.compilation_config.static_forward_context["another.layer"] = layer

    b = bench(k=3, change=give_sinks)
    assert (b.support(), b.builder.reorder_batch_threshold) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)
    assert b.builder.specpatch_route is None


def test_the_partial_outputs_of_all_shapes_are_one_workspace(bench):
    b = bench(k=3)
    large, _ = b.build([4] * 8, [30] * 8, capture=True)
    small, _ = b.build([4] * 2, [30] * 2, capture=True)
    assert small.decode.wrapper.plan.partial_o is large.decode.wrapper.plan.partial_o


def test_draft_steps_can_be_planned_in_one_graph(bench):
    """From 0.28: one metadata for all draft steps, planned anew from the runner's persistent buffers."""
    from vllm_specpatch.errors import SpecPatchError

    b = bench(k=3)
    if not seams.draft_metadata_can_be_updated(b.builder):
        assert not hasattr(b.builder, "supports_draft_decode_metadata_update")
        return
    assert b.builder.supports_draft_decode_metadata_update
    common = b.batch([1, 1, 1], [20, 33, 16])
    with b.current(b.config), device_reads(*on_device(common)) as reads:
        metadata = b.builder.build_for_cudagraph_capture(common)
        run_layers(metadata, 0)
        common.seq_lens += 1
        b.builder.update_draft_decode_metadata(metadata)
        run_layers(metadata, 1)  # the next module of a drafter that has one for each step
    assert reads == []
    first, second = metadata.decode.wrapper.plan.updates
    for lengths, starts in (first, second):
        assert lengths.data_ptr() == common.seq_lens.data_ptr()
        assert starts.data_ptr() == common.query_start_loc.data_ptr()
    assert second[0].tolist() == [21, 34, 17]
    prefills, _ = b.build([40], [40])
    with pytest.raises(SpecPatchError, match="VLLM_SPECPATCH_ROUTE=native"):
        b.builder.update_draft_decode_metadata(prefills)


def test_without_speculation_decodes_are_planned_on_the_device_where_stock_waits(bench, set_route):
    waits = seams.plain_decode_waits(seams.release(gate.installed_version("vllm")))
    if not waits:  # from 0.31: only by name
        b = bench(k=0)
        assert b.builder.specpatch_route is None
        assert steady_stock_reads(b) == []
        set_route("spec_mask")
    b = bench(k=0)
    assert b.support() == "UNIFORM_SINGLE_TOKEN_DECODE" and b.builder.reorder_batch_threshold == 1
    b.build([1] * 3, [9] * 3, capture=True)
    metadata, reads, _ = steady(b, [1] * 3, [20, 33, 16])
    assert reads == [] and metadata.num_decodes == 3
    assert metadata.decode.wrapper.plan.shape["max_q_len"] == 1


def test_native_serves_where_the_module_cannot_be_built(bench, kernels, monkeypatch, recorders):
    from vllm_specpatch.kernels import build, spec_mask

    def no_compiler(spec, before_build=None):
        raise build.BuildError("no nvcc; run `vllm-specpatch build`")

    monkeypatch.setattr(spec_mask, "load", no_compiler)
    b = bench(k=3)
    if native.NativeRoute.why_not() is not None:  # FlashInfer before 0.6.16: nothing else may serve
        assert (b.support(), b.builder.reorder_batch_threshold) == ("UNIFORM_SINGLE_TOKEN_DECODE", 1)
        return
    assert (b.support(), b.builder.reorder_batch_threshold) == ("UNIFORM_BATCH", 4)
    assert b.builder.specpatch_route.name == "native"
    _, [plan] = b.build([4, 4], [20, 33], capture=True)
    assert plan.uniform_q_len == 4


def test_metadata_that_grew_a_field_is_not_filled_blindly(bench, vllm_on_gpu, monkeypatch):
    import dataclasses

    grown = dataclasses.make_dataclass(
        "FlashInferMetadata", ["sinks"], bases=(vllm_on_gpu.FlashInferMetadata,)
    )
    monkeypatch.setattr(vllm_on_gpu, "FlashInferMetadata", grown)
    served = bench(k=3).builder.specpatch_route
    assert served is None if native.NativeRoute.why_not() is not None else served.name == "native"
