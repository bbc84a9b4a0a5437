"""build() of real vLLM, patched: what is planned for every kind of batch that a runner sends."""

import pytest

from vllm_specpatch.patches import native

Q = 4  # 1 + k
pytestmark = pytest.mark.skipif(
    native.NativeRoute.why_not() is not None, reason="native is refused with this FlashInfer"
)


def test_uniform_verify_batch_is_planned_by_requests(bench):
    b = bench(k=3)
    assert b.builder.reorder_batch_threshold == Q
    metadata, [plan] = b.build([4, 4, 4], [20, 33, 16], capture=True)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 12, 0)
    assert plan.qo_indptr == [0, 4, 8, 12]
    assert plan.kv_indptr == [0, 2, 5, 6]  # pages of 16
    assert plan.kv_lens == [20, 33, 16]
    assert (plan.batch_size, plan.total_num_rows, plan.uniform_q_len) == (3, 12, 4)
    assert plan.causal and plan.cuda_graph and plan.backend == "fa2"
    wrapper = metadata.decode.wrapper
    assert wrapper._paged_kv_indices_buf[:6].tolist() == [100, 101, 200, 201, 202, 300]
    # What FlashInferImpl.forward asserts on before it calls run().
    assert wrapper._window_left == -1 and wrapper._logits_soft_cap == 0.0
    assert wrapper._sm_scale == pytest.approx(128**-0.5)


def test_replay_keeps_the_captured_wrapper_and_takes_the_fast_plan(bench):
    b = bench(k=3)
    captured, _ = b.build([4, 4], [4, 4], capture=True)
    again, [plan] = b.build([4, 4], [100, 5])
    assert again.decode.wrapper is captured.decode.wrapper
    assert plan.kv_lens == [100, 5] and plan.uniform_q_len == 4
    assert again.decode.wrapper._paged_kv_indptr_buf.tolist() == [0, 7, 8]
    assert again.decode.wrapper._paged_kv_last_page_len_buf.tolist() == [4, 5]


def test_rows_that_pad_a_captured_batch_get_the_null_block(bench):
    b = bench(k=3)
    b.build([4] * 4, [4] * 4, capture=True)
    metadata, [plan] = b.build([4, 4, 0, 0], [20, 33, 0, 0], num_tokens=16)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 16)
    assert plan.qo_indptr == [0, 4, 8, 12, 16]
    assert plan.kv_lens == [20, 33, 4, 4]
    assert metadata.decode.wrapper._paged_kv_indices_buf[:7].tolist() == [100, 101, 200, 201, 202, 0, 0]


def test_padding_does_not_write_into_vllms_own_lengths(bench):
    b = bench(k=3)
    b.build([4] * 2, [4] * 2, capture=True)
    common = b.batch([4, 0], [20, 0], num_tokens=8)
    common._seq_lens_cpu = common.seq_lens.clone()  # what the V1 runner fills in
    with b.current(b.config):
        b.builder.build(common_prefix_len=0, common_attn_metadata=common)
    assert common._seq_lens_cpu.tolist() == [20, 0]


def test_mixed_batch_decodes_first_prefills_behind(bench):
    b = bench(k=3)
    # A prefill of 3 tokens with 3 tokens of KV must not be taken for padding.
    metadata, plans = b.build([4, 4, 3, 40], [20, 33, 3, 50])
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (8, 43)
    prefill, decode = plans
    assert prefill.qo_indptr == [0, 3, 43] and prefill.kv_lens == [3, 50]
    assert decode.qo_indptr == [0, 4, 8] and decode.kv_lens == [20, 33]
    assert decode.uniform_q_len == 4 and not decode.cuda_graph and decode.causal
    assert prefill.causal


def test_prefill_only_batch_is_stock(bench):
    b = bench(k=3)
    metadata, [plan] = b.build([40, 50], [40, 50])
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)
    assert plan.qo_indptr == [0, 40, 90]


def test_single_token_batch_takes_the_stock_wrapper(bench):
    b = bench(k=3)
    metadata, [plan] = b.build([1, 1, 1], [20, 33, 16], capture=True)
    assert (plan.batch_size, plan.total_num_rows, plan.uniform_q_len) == (3, 3, 0)
    assert not plan.causal and plan.cuda_graph
    [stock] = b.builder._decode_wrappers_cudagraph.values()
    assert metadata.decode.wrapper is stock


def test_verify_and_draft_of_the_same_token_count_do_not_share_a_wrapper(bench):
    b = bench(k=3)
    verify, _ = b.build([4], [20], capture=True)
    draft, _ = b.build([1, 1, 1, 1], [20, 21, 22, 23], capture=True)
    assert verify.decode.wrapper is not draft.decode.wrapper


@pytest.mark.parametrize("q_len", [2, 3, 4])
def test_k_changed_per_batch(bench, q_len):
    """Dynamic speculative decoding: fewer draft tokens than configured, in the same engine."""
    b = bench(k=3)
    b.build([4, 4], [4, 4], capture=True)
    _, [plan] = b.build([q_len, q_len], [20, 33])
    assert plan.qo_indptr == [0, q_len, 2 * q_len] and plan.uniform_q_len == q_len
    assert plan.cuda_graph is (q_len == 4), "only captured shapes replay"


def test_uncaptured_shapes_do_not_pile_up_wrappers(bench):
    b = bench(k=3)
    b.build([4, 4], [4, 4], capture=True)
    wrappers = set()
    for n in range(1, 9):
        for q_len in (1, 2, 3):
            metadata, _ = b.build([q_len] * n, [30] * n)
            wrappers.add(id(metadata.decode.wrapper))
    assert len(wrappers) == 2  # one of one token, one of several
    assert len(b.builder._decode_wrappers_cudagraph) == 0


def test_batches_over_the_capture_cap_are_planned_without_graph_buffers(bench):
    b = bench(k=3)
    b.builder._decode_cudagraph_max_bs = 8  # decode *tokens*, as in vLLM 26499
    _, [plan] = b.build([4, 4], [20, 33], capture=True)
    assert plan.cuda_graph
    _, [plan] = b.build([4, 4, 4], [20, 33, 40], capture=True)
    assert not plan.cuda_graph and plan.total_num_rows == 12


def test_dummy_step_with_fewer_tokens_than_its_captured_shape(bench):
    """An idle data-parallel rank runs one request of one token, padded to the captured 1 x (1 + k)."""
    b = bench(k=3)
    b.build([4], [4], capture=True)
    metadata, [plan] = b.build([1], [4], num_tokens=4)
    assert plan.qo_indptr == [0, 4] and plan.uniform_q_len == 4
    assert metadata.num_decode_tokens == 4


def test_non_causal_batch_is_stock_prefill(bench):
    b = bench(k=3)
    metadata, [plan] = b.build([4, 4], [20, 33], causal=False)
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)
    assert not plan.causal


def test_graph_wrappers_get_a_workspace_of_their_own_size(bench):
    b = bench(k=3)
    _, [plan] = b.build([4], [20], capture=True)
    assert plan.int_workspace.numel() == 2 * 64 * 1024  # 70,000 bytes rounded up, not 8 MiB
    assert plan.float_workspace is b.builder._get_workspace_buffer()


def test_a_shape_that_outgrows_the_shared_workspace_gets_a_larger_one(bench, monkeypatch):
    b = bench(k=3)
    b.build([1], [20])  # makes the module recorder
    shared = b.builder._get_workspace_buffer()
    need = shared.numel() + 4096
    b.build([4], [20])  # eager: makes the recorder of the forced backend
    for recorder in b.recorders.values():
        monkeypatch.setattr(recorder, "workspace_size", lambda *a: (need, 1000))
    _, [plan] = b.build([4, 4], [20, 20], capture=True)
    assert plan.float_workspace.numel() == need and b.builder._get_workspace_buffer() is shared


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_kv_cache(bench, kv_cache_dtype):
    import torch

    b = bench(k=3, kv_cache_dtype=kv_cache_dtype)
    metadata, [plan] = b.build([4, 4], [20, 33], capture=True)
    assert plan.uniform_q_len == 4 and plan.backend == "fa2"
    wrapper = metadata.decode.wrapper
    assert wrapper._cached_q_data_type == torch.bfloat16 == metadata.q_data_type_decode
    assert wrapper._cached_kv_data_type == (
        torch.float8_e4m3fn if kv_cache_dtype == "fp8" else torch.float8_e5m2
    )
