"""Compiles units with nvcc and reads ptxas: no GPU needed. Results are cached, see ptxas.py."""

import json
from pathlib import Path

import ptxas
import pytest

from vllm_specpatch.kernels import build
from vllm_specpatch.kernels.spec_mask import Spec

pytest.importorskip("tvm_ffi")


pytestmark = ptxas.needs_nvcc

BASELINE = json.loads(Path(__file__).with_name("ptxas_baseline.json").read_text())


# Bytes spilled where FlashInfer's kernel of the same tiles spills none. ptxas keeps both at the 168
# registers with which three CTAs fit a multiprocessor; ours is three words over (12 bytes stored and
# loaded), with or without the variant's own members. Half the KV tile would avoid it. FlashInfer has no
# tile of 32; what ours spills on sm_90 was measured to be faster there than half its KV tile. The tile of 64
# beside it is two words over FlashInfer's 72: half its KV tile spills nothing, is up to 13% faster below 8k
# tokens and 8% slower at 32k, where it matters (H200).
ACCEPTED = {
    ("sm_80", 128, "bfloat16", 16): 24,
    ("sm_90a", 128, "float8_e4m3fn", 32): 56,
    ("sm_90a", 128, "float8_e4m3fn", 64): 80,
}


def theirs(spec, row):
    """Bytes that FlashInfer's kernel with the same tiles spills; it compiles every KV tile."""
    if row["tile_q"] == 32:
        return 0
    key = (spec.head_dim, spec.dtype_kv, row["sm"], row["tile_q"], row["mma_kv"])
    found = [
        k["spilled"]
        for k in BASELINE["kernels"]
        if (k["head_dim"], k["dtype_kv"], k["sm"], k["tile_q"], k["mma_kv"]) == key
    ]
    assert len(found) == 1, f"the baseline has {len(found)} kernels {key}"
    return found[0]


def test_baseline_is_of_the_installed_flashinfer():
    assert BASELINE["flashinfer"] == build.flashinfer_version()
    assert {k["sm"] for k in BASELINE["kernels"]} == {"sm_80", "sm_86", "sm_89", "sm_90a"}


@pytest.mark.parametrize("arch", ptxas.ARCHS)
@pytest.mark.parametrize(
    ("head_dim", "dtype_kv", "tiles"),
    [
        (128, "bfloat16", [16, 64, 128]),
        (128, "float8_e4m3fn", [16, 32, 64, 128]),
        (256, "bfloat16", [16, 64]),
    ],
)
def test_registers_and_spills(arch, head_dim, dtype_kv, tiles, tmp_path, record_property):
    spec = Spec(head_dim=head_dim, group_size=8, dtype_kv=dtype_kv, max_q_len=16)
    rows = ptxas.compile_spec(spec, build.Arch.parse(arch), tmp_path)
    assert sorted(r["tile_q"] for r in rows) == tiles, "one kernel per unit"
    for row in rows:
        text = f"{row['registers']} registers, {row['spilled']} bytes spilled, KV tile {row['mma_kv']}"
        record_property(f"sm_{arch} head_dim {head_dim} {dtype_kv} tile {row['tile_q']}", text)
        accepted = ACCEPTED.get((row["sm"], head_dim, dtype_kv, row["tile_q"]), 0)
        assert row["spilled"] <= max(theirs(spec, row), accepted), row
        if arch in ("8.6", "8.9"):
            assert row["spilled"] == 0, row


@pytest.mark.parametrize("arch", ["8.6", "9.0a"])
def test_tile_of_32_of_16_bit_caches_does_not_spill(arch, tmp_path):
    spec = Spec(head_dim=128, group_size=4, max_q_len=8, tile_32=True)
    rows = ptxas.compile_spec(spec, build.Arch.parse(arch), tmp_path, only={"unit_causal_32.cu"})
    assert [(r["tile_q"], r["mma_kv"], r["spilled"]) for r in rows] == [(32, 1, 0)]


def test_fp8_converted_in_the_loop_spills_nothing(tmp_path):
    """What the pass through shared memory costs 56 bytes for on sm_90, see ACCEPTED."""
    spec = Spec(head_dim=128, group_size=4, dtype_kv="float8_e4m3fn", max_q_len=8, convert="own")
    rows = ptxas.compile_spec(spec, build.Arch.parse("9.0a"), tmp_path)
    assert sorted((r["tile_q"], r["mma_kv"], r["spilled"]) for r in rows) == [(16, 2, 0), (32, 2, 0)]


def test_kv_tile_follows_the_architecture(tmp_path):
    """99 KB of shared memory per block on sm_86 allow half the KV tile of sm_90."""
    spec = Spec(head_dim=128, group_size=4, max_q_len=4)
    tiles = {}
    for arch in ("8.6", "9.0a"):
        rows = ptxas.compile_spec(spec, build.Arch.parse(arch), tmp_path / arch)
        tiles[arch] = [r["mma_kv"] for r in rows]
    assert tiles == {"8.6": [1], "9.0a": [2]}


def test_binding_compiles(tmp_path):
    """The planner, the merge and the exported functions, which no attention unit contains."""
    spec = Spec(head_dim=64, group_size=1, max_q_len=1)
    ptxas.compile_spec(spec, build.Arch.parse("8.0"), tmp_path, only={"binding.cu"})


def test_options_compile(tmp_path):
    """Window, soft cap, fp16 and every mask kind, on the architecture with the least memory."""
    spec = Spec(
        head_dim=64,
        group_size=1,
        dtype_q="float16",
        dtype_kv="float8_e5m2",
        window=True,
        soft_cap=True,
        masks=("bits", "full"),
        max_q_len=1,
    )
    rows = ptxas.compile_spec(spec, build.Arch.parse("8.9"), tmp_path)
    assert sorted(r["mode"] for r in rows) == [0, 2]
