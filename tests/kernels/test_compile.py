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


# Bytes spilled where FlashInfer's kernel of the same tiles spills fewer, all of them before the main loop
# and after it (test_what_is_spilled_stays_out_of_the_main_loop).
#   bf16, 64 rows: FlashInfer's spills 8 for the 168 registers that let a third CTA in. Without mask words
#       ours would take 176 to 181 and none; with them it takes 168 and none, and twice the instructions.
#   128 rows on sm_90: two words over the 255 registers of a thread.
#   fp8 on sm_90, 32 rows: FlashInfer has no tile of 32. Measured to be faster there than half its KV tile.
ACCEPTED = {
    ("sm_80", 128, "bfloat16", 64): 60,
    ("sm_90a", 128, "bfloat16", 64): 28,
    ("sm_90a", 128, "bfloat16", 128): 16,
    ("sm_90a", 128, "float8_e4m3fn", 128): 16,
    ("sm_90a", 128, "float8_e4m3fn", 32): 60,
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


def unit(sm, head_dim, dtype_kv, tile, folder):
    """The machine code of one kernel without mask words."""
    spec = Spec(head_dim=head_dim, group_size=8, dtype_kv=dtype_kv, max_q_len=16)
    arch = build.Arch.parse({"sm_80": "8.0", "sm_90a": "9.0a"}[sm])
    return ptxas.disassemble(spec, arch, folder, f"unit_causal_{tile}.cu")


@pytest.mark.parametrize("kernel", ACCEPTED, ids=lambda k: "-".join(map(str, k)))
def test_what_is_spilled_stays_out_of_the_main_loop(kernel, tmp_path):
    code = unit(*kernel, tmp_path)
    assert code.in_loop("HMMA")
    assert code.in_loop("LDL", "STL") == []


def test_chains_cost_nothing_for_the_mask(tmp_path):
    """Without words, masked tiles are selects: no logit asks for a word, and none branches."""
    code = unit("sm_90a", 128, "bfloat16", 64, tmp_path)
    assert len(code.in_loop("HMMA")) == 2 * 64 + 4  # QK, PV and the row sums of 64 tokens: it is that loop
    assert code.in_loop("BSSY") == [] and len(code.in_loop("BRA")) <= 4
    # Only the page table is loaded in it, four entries a thread.
    assert len(code.in_loop("LDG")) <= 4


@pytest.mark.parametrize("arch", ["8.6", "9.0a"])
def test_tile_of_32_of_16_bit_caches_does_not_spill(arch, tmp_path):
    spec = Spec(head_dim=128, group_size=4, max_q_len=8, tile_32=True)
    rows = ptxas.compile_spec(spec, build.Arch.parse(arch), tmp_path, only={"unit_causal_32.cu"})
    assert [(r["tile_q"], r["mma_kv"], r["spilled"]) for r in rows] == [(32, 1, 0)]


def test_fp8_converted_in_the_loop_spills_nothing(tmp_path):
    """What the pass through shared memory costs 60 bytes for on sm_90, see ACCEPTED."""
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
