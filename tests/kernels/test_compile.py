"""Compiles units with nvcc and reads ptxas: no GPU needed. Results are cached, see ptxas.py."""

import ptxas
import pytest

from vllm_specpatch.kernels import build
from vllm_specpatch.kernels.spec_mask import QUERY_TILES, Spec

pytest.importorskip("tvm_ffi")


pytestmark = ptxas.needs_nvcc


@pytest.mark.parametrize("arch", ptxas.ARCHS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype_kv", ["bfloat16", "float8_e4m3fn"])
def test_no_kernel_spills(arch, head_dim, dtype_kv, tmp_path, record_property):
    """FlashInfer's template spills at query tiles of 64 and 128 on sm_80 and sm_90."""
    spec = Spec(head_dim=head_dim, group_size=8, dtype_kv=dtype_kv, max_q_len=16)
    rows = ptxas.compile_spec(spec, build.Arch.parse(arch), tmp_path)
    assert sorted(r["tile_q"] for r in rows) == list(QUERY_TILES), "one kernel per unit"
    for row in rows:
        text = f"{row['registers']} registers, {row['spilled']} bytes spilled"
        record_property(f"sm_{arch} head_dim {head_dim} {dtype_kv} tile {row['tile_q']}", text)
        assert row["spilled"] == 0, row


def unit(folder, arch="9.0a", tile=32, **options):
    """The machine code of one causal kernel."""
    spec = Spec(head_dim=128, group_size=8, max_q_len=16, **options)
    return ptxas.disassemble(spec, build.Arch.parse(arch), folder, f"unit_causal_{tile}.cu")


def test_a_warp_of_its_own_meets_no_barrier(tmp_path):
    """Where its rows are the tile's: no barrier in the main loop, and one load, of the page table."""
    code = unit(tmp_path, tile=16)
    assert len(code.in_loop("HMMA")) == 2 * 16 + 1  # QK, PV and the row sums of 16 rows and 16 tokens
    assert code.in_loop("BAR") == []
    assert len(code.in_loop("LDG")) == 1
    assert unit(tmp_path / "fp8", dtype_kv="float8_e4m3fn").in_loop("BAR") == []
    for tile in (32, 64):
        assert len(unit(tmp_path, tile=tile).in_loop("BAR")) == 1


def test_a_group_has_a_barrier_of_its_own(tmp_path):
    """Of its two warps; the other group's pace is its own."""
    (barrier,) = unit(tmp_path, tile=64).in_loop("BAR")
    assert barrier.endswith(", 0x40"), barrier


def test_chains_cost_nothing_for_the_mask(tmp_path):
    """Without words, no logit asks for one: masked tiles are selects, one for each logit of a lane."""
    chain, tree = unit(tmp_path / "chain"), unit(tmp_path / "tree", words=True)
    assert len(chain.in_loop("LDG")) == 1 and len(tree.in_loop("LDG")) > 1
    assert len(chain.in_loop("FSEL")) == 16
    assert len(chain.loop) < len(tree.loop)


def test_fp8_is_converted_by_an_instruction_where_there_is_one(tmp_path):
    """Two elements at a time, each once: 32 tokens of 128 keys and values, over 32 lanes."""
    with_it = unit(tmp_path / "9.0", dtype_kv="float8_e4m3fn").in_loop("F2FP")
    assert sum("E4M3" in line for line in with_it) == 2 * 32 * 128 // 32 // 2
    without = unit(tmp_path / "8.6", "8.6", dtype_kv="float8_e4m3fn").in_loop("F2FP")
    assert not any("E4M3" in line for line in without)


def test_binding_compiles(tmp_path):
    """The planner, the merge and the exported functions, which no attention unit contains."""
    spec = Spec(head_dim=96, group_size=1, max_q_len=1)
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
