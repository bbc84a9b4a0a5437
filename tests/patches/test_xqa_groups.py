"""Groups of one model where XQA serves some head sizes only (sm_12x with cubins, from vLLM 0.29)."""

import pytest

from vllm_specpatch.patches import predict_probe, seams


@pytest.fixture
def xqa(vllm_on_gpu, monkeypatch):
    import vllm.utils.flashinfer
    from vllm import __version__
    from vllm.platforms import current_platform

    if (
        current_platform.get_device_capability().major != 12
        or seams.release(__version__) < seams.XQA_PER_GROUP
    ):
        pytest.skip("needs a simulated sm_12x and vLLM 0.29")
    monkeypatch.setattr(
        vllm.utils.flashinfer, "supports_trtllm_attention", lambda is_prefill=False: not is_prefill
    )


@pytest.mark.parametrize(("head_dim", "route"), [(128, None), (512, "native")])
def test_only_the_group_that_xqa_refuses_is_ours(bench, xqa, monkeypatch, head_dim, route):
    monkeypatch.setitem(predict_probe.TINY_MODEL, "head_dim", head_dim)
    b = bench(k=3)
    assert b.builder.use_trtllm_decode_attention is (route is None)
    assert (b.support(), b.builder.reorder_batch_threshold) == ("UNIFORM_BATCH", 4)
    served = b.builder.specpatch_route
    assert served is None if route is None else served.name == route
