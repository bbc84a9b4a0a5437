"""The attention kernels that serve, on emulated thread blocks, through the check that they pass on a GPU."""

import concurrent.futures
import dataclasses

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
SPECS = {
    "bf16": BF16,
    "head_dim 256": dataclasses.replace(BF16, head_dim=256, group_size=6),
    "trees": dataclasses.replace(SMALL, masks=("causal", "bits"), words=True),
    "non-causal blocks, window": dataclasses.replace(SMALL, masks=("causal", "full"), window=True),
    "fp16, soft cap": dataclasses.replace(
        SMALL, dtype_q="float16", dtype_kv="float16", soft_cap=True, max_q_len=17
    ),
    "bf16, tile of 32": dataclasses.replace(BF16, tile_32=True),
    "fp8": dataclasses.replace(FP8, max_q_len=16),
    "fp8, in the loop": dataclasses.replace(FP8, max_q_len=16, convert="in loop"),
    "fp8, own": dataclasses.replace(FP8, max_q_len=16, convert="own"),
    "fp8_e5m2": dataclasses.replace(FP8, dtype_kv="float8_e5m2"),
    "fp8_e5m2, own": dataclasses.replace(FP8, dtype_kv="float8_e5m2", convert="own"),
    "fp8, head_dim 64": dataclasses.replace(SMALL, dtype_kv="float8_e4m3fn"),
}
#: Three roundings to the queries' dtype, and one for rows that cancel (benchmarks/spec_mask/gpu_check.py).
LIMITS = {"bfloat16": 4 * 2**-8, "float16": 4 * 2**-11}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """name of a spec -> Kernels, compiled two at a time while the first of them are tested."""
    folder = tmp_path_factory.mktemp("emulated")
    template = emulation.copy_template(folder / "include", build.flashinfer_data())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = {
            name: pool.submit(emulation.Kernels, spec, folder / str(i), template)
            for i, (name, spec) in enumerate(SPECS.items())
        }
        yield lambda name: made[name].result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(spec_mask, "Plan", emulation.Plan)
    monkeypatch.setattr(spec_mask, "run", emulation.run)


@pytest.mark.parametrize("name", SPECS)
def test_attention(compiled, name, monkeypatch):
    spec = SPECS[name]
    monkeypatch.setattr(probe, "LIMIT", LIMITS[spec.dtype_q])
    monkeypatch.setattr(probe, "SPLITS", ("auto", probe.CHUNK, "none"))
    assert probe.check(compiled(name), "cpu") >= 3 * len(spec.masks) * len(spec.tiles)


@pytest.mark.parametrize(
    ("name", "like"),
    [("fp8, in the loop", "fp8"), ("fp8, own", "fp8"), ("fp8_e5m2, own", "fp8_e5m2")],
)
def test_conversions_of_fp8_have_the_same_bits(compiled, name, like):
    for mask, tile, with_words, split in probe.cases(SPECS[name]):
        batch = probe.Batch(SPECS[name], mask, tile, with_words, seed=3)
        one, other = (batch._run(compiled(which), split, torch.device("cpu")) for which in (name, like))
        used = batch.start[-1]
        assert torch.equal(one[:used].view(torch.int16), other[:used].view(torch.int16))


@pytest.mark.parametrize(
    "version", [v for v in build.SUPPORTED_FLASHINFER if v != build.flashinfer_version()]
)
def test_every_flashinfer(version, tmp_path):
    template = emulation.copy_template(tmp_path / "include", headers_of(version))
    kernels = emulation.Kernels(SPECS["fp8"], tmp_path / "kernels", template, version)
    assert probe.check(kernels, "cpu") == 6
