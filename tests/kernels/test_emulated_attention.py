"""The attention kernels that serve, on emulated thread blocks, through the check that they pass on a GPU."""

import concurrent.futures
import dataclasses
import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tvm_ffi")

import emulation  # noqa: E402
from test_flashinfer_versions import headers_of  # noqa: E402

from vllm_specpatch.kernels import build, probe, spec_mask  # noqa: E402
from vllm_specpatch.kernels.spec_mask import Spec  # noqa: E402

pytestmark = pytest.mark.skipif(emulation.missing() is not None, reason=str(emulation.missing()))

BF16 = Spec(head_dim=128, group_size=4, max_q_len=8)
FP8 = dataclasses.replace(BF16, dtype_kv="float8_e4m3fn")
SMALL = dataclasses.replace(BF16, head_dim=64)
# Long enough for every query tile of a layout: rows of 32 and 64 (two query warps), 128 (four or eight).
SPECS = {
    "bf16": dataclasses.replace(BF16, max_q_len=40),
    "head_dim 256": dataclasses.replace(BF16, head_dim=256, group_size=6, max_q_len=12),
    "head_dim 96": dataclasses.replace(BF16, head_dim=96),
    "trees": dataclasses.replace(SMALL, masks=("causal", "bits"), words=True, max_q_len=40),
    "non-causal blocks, window": dataclasses.replace(SMALL, masks=("causal", "full"), window=True),
    "fp16, soft cap": dataclasses.replace(
        SMALL, dtype_q="float16", dtype_kv="float16", soft_cap=True, max_q_len=17
    ),
    "window, words, soft cap": dataclasses.replace(
        BF16, masks=("bits", "causal"), words=True, window=True, soft_cap=True
    ),
    "fp8": dataclasses.replace(FP8, max_q_len=40),
    "fp8, head_dim 256": dataclasses.replace(FP8, head_dim=256, group_size=6, max_q_len=12),
    "fp8, head_dim 96": dataclasses.replace(FP8, head_dim=96),
    "fp8, head_dim 64": dataclasses.replace(SMALL, dtype_kv="float8_e4m3fn"),
    "fp8, fp16 queries": dataclasses.replace(FP8, dtype_q="float16"),
    "fp8_e5m2": dataclasses.replace(FP8, dtype_kv="float8_e5m2"),
}
# Other layouts, for more shared memory, and another conversion of fp8.
LARGE = ("bf16", "head_dim 256", "fp8", "fp8_e5m2")
#: Three roundings to the queries' dtype, and one for rows that cancel (benchmarks/spec_mask/gpu_check.py).
LIMITS = {"bfloat16": 4 * 2**-8, "float16": 4 * 2**-11}


RUNS = [*((name, "8.6") for name in SPECS), *((name, "9.0a") for name in LARGE)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(name of a spec, architecture) -> Kernels, compiled two at a time while the first are tested."""
    folder = tmp_path_factory.mktemp("emulated")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = {
            run: pool.submit(emulation.Kernels, SPECS[run[0]], folder / str(i), arch=run[1])
            for i, run in enumerate(RUNS)
        }
        yield lambda *run: made[run].result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(spec_mask, "Plan", emulation.Plan)
    monkeypatch.setattr(spec_mask, "run", emulation.run)


@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_attention(compiled, name, arch, monkeypatch):
    spec = SPECS[name]
    monkeypatch.setattr(probe, "LIMIT", LIMITS[spec.dtype_q])
    monkeypatch.setattr(probe, "SPLITS", ("auto", probe.CHUNK, "none"))
    # Each turn of the threads is drawn: another seed, other interleavings.
    assert probe.check(compiled(name, arch), "cpu") >= 3 * len(spec.masks) * len(spec.tiles)


@pytest.mark.parametrize("magnitude", [1e-30, 3e4, 5e37])
def test_queries_of_any_size_meet_an_fp8_cache(compiled, magnitude):
    """They become fp16, whose range is smaller than that of bf16."""
    batch = probe.Batch(SPECS["fp8"], "causal", 32, False, seed=5)
    batch.q *= magnitude
    batch.options["sm_scale"] = 0.1 / magnitude
    for arch in ("8.6", "9.0a"):
        assert batch.error(compiled("fp8", arch), "auto", torch.device("cpu")) < LIMITS["bfloat16"]


@pytest.mark.parametrize(("name", "arch"), [("fp8", "8.6"), ("fp8", "9.0a"), ("fp8_e5m2", "8.6")])
def test_every_fp8_number_becomes_the_fp16_that_it_is(compiled, name, arch):
    """In each of the four places, beside every kind of neighbour; zeros keep their sign. The factor that
    is left is a power of two."""
    kernels = compiled(name, arch)
    dtype = getattr(torch, SPECS[name].dtype_kv)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    for a, b in itertools.product(range(256), (0x00, 0x80, 0x7B, 0xFF)):
        elements = bytes([a, b, b, a])
        want = values[torch.tensor(list(elements))]
        number = want.isfinite()
        for places, converted in kernels.convert(elements):
            assert torch.equal(converted[number[places]], want[places][number[places]])
            assert torch.equal(converted[number[places]].signbit(), want[places][number[places]].signbit())


@pytest.mark.parametrize(
    "version", [v for v in build.SUPPORTED_FLASHINFER if v != build.flashinfer_version()]
)
def test_every_flashinfer(version, tmp_path):
    kernels = emulation.Kernels(FP8, tmp_path, headers_of(version))
    assert probe.check(kernels, "cpu") == 4
