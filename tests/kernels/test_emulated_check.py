"""benchmarks/spec_mask/gpu_check.py on emulated kernels: some of the cases that it runs on a GPU.

So that neither the script nor a kernel is at fault for the first time when a GPU is there.
"""

import dataclasses
import functools
import importlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tvm_ffi")

import emulation  # noqa: E402
from test_harness import scripts  # noqa: E402, F401  (a fixture)

from vllm_specpatch.patches import predict_probe  # noqa: E402

pytestmark = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))

#: Group -> every how many-th of its cases.
EVERY = {
    "pages": 11,
    "splits": 15,
    "soft_caps": 8,
    "marked_values": 60,
    "extreme_logits": 11,
    "first_use": 4,
    "many_tiles": 7,
}


@pytest.fixture(scope="module")
def check(scripts, tmp_path_factory):  # noqa: F811
    """gpu_check with emulated kernels, and everything else that it wants of a GPU on the CPU."""
    module, _ = scripts
    cases = importlib.import_module("cases")
    folder = tmp_path_factory.mktemp("emulated")

    @functools.cache
    def load(spec):
        # Fewer query tiles than on the GPU: each is compiled.
        return emulation.Kernels(dataclasses.replace(spec, max_q_len=64), folder / str(hash(spec)))

    generator = torch.Generator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load", load)
        patch.setattr(module, "Plan", emulation.Plan)
        patch.setattr(module, "run", emulation.run)
        patch.setattr(module, "make_batch", lambda **given: cases.make_batch(**{**given, "device": "cpu"}))
        patch.setattr(torch, "Generator", lambda device="cpu": generator())
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        patch.setenv("VLLM_SPECPATCH_CHECK_NO_GRAPHS", "1")
        with predict_probe.simulated_device(True):
            yield module


@pytest.mark.parametrize("group", EVERY)
def test_cases_of_the_gpu_check(check, group):
    cases = list(check.GROUPS[group]())[:: EVERY[group]]
    assert len(cases) >= 2
    for title, run in cases:
        try:
            run()
        except check.Failure as failure:
            pytest.fail(f"{title}: {failure}")


def test_a_request_alone_and_among_others(check):
    assert check.batch_invariance(512) == check.batch_invariance("none") == 0.0
