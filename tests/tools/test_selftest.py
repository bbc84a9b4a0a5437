"""selftest without a GPU: its checks must pass what is right and, above all, fail what is wrong."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from vllm_specpatch import bench, cli, greedy, selftest, selftest_gpu, selftest_planner
from vllm_specpatch.selftest import Fail, Result, Skip
from vllm_specpatch.selftest_gpu import CheckFailed, Geometry

LLAMA = Geometry(32, 8, 128, "bfloat16", "bfloat16", 8)


# -- geometry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "wanted"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, {}, LLAMA),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "torch_dtype": "float16"},
            {"kv_cache_dtype": "fp8_e5m2", "tensor_parallel_size": 2, "k": 3},
            Geometry(12, 2, 256, "float16", "float8_e5m2", 4),
        ),
        # More ranks than KV heads: each rank has one. A float32 checkpoint is served in bfloat16.
        (
            {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "dtype": "torch.float32"},
            {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"},
            Geometry(2, 1, 64, "bfloat16", "float8_e4m3fn", 8),
        ),
        ({"num_attention_heads": 8, "head_dim": 64}, {"k": 0}, Geometry(8, 8, 64, "bfloat16", "bfloat16", 1)),
    ],
)
def test_geometry_of_a_config(config, options, wanted):
    assert selftest.geometry_of(config, **{"k": 7, **options}) == wanted


def test_a_multimodal_config_is_read_by_its_text_part(tmp_path):
    text = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": text}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert selftest.geometry_of(selftest.config_of(path), k=7).heads == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "missing"], "wanted a config.json or its folder"),
        (["--heads", "7", "--kv-heads", "2"], "geometry: wanted query heads that KV heads and ranks divide"),
        (["--tensor-parallel-size", "3"], "geometry: wanted"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype: wanted auto or one of fp8"),
        (["--kv-cache-dtype", "float16"], "--kv-cache-dtype: wanted auto"),
        (["--k", "-1"], "--k: wanted at least 0"),
        (["--arch", "ampere"], "--arch: wanted a capability like sm_86"),
    ],
)
def test_a_mistake_is_one_line(capsys, options, said):
    assert cli.main(["selftest", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-specpatch selftest: ") and said in line


# -- the planner ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    if selftest_planner.compiler() is None:
        pytest.skip("the planner is compiled, and there is no C++ compiler here")
    return selftest_planner.HostPlanner(tmp_path_factory.mktemp("planner"))


def test_the_planner_passes(planner):
    assert selftest_planner.fuzz(planner, 600, seed=11) is None
    assert selftest_planner.fuzz(planner, 60, seed=12, group=6, max_q_len=4) is None


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("kv_tile_indices", lambda v, n: v.__setitem__(0, v[1]), "pieces of work"),
        ("request_indices", lambda v, n: v.__setitem__(n - 1, 0), "pieces of work"),
        ("block_valid", lambda v, n: v.__setitem__(n - 1, 0), "CTAs"),
        ("merge_rows", lambda v, n: v.__setitem__(3, v[3] + 1), "merges"),
        ("o_indptr", lambda v, n: v.__setitem__(1, v[1] - 1), "merges"),
        ("kv_len", lambda v, n: v.__setitem__(0, 5), "kv_len is not"),
        ("q_len", lambda v, n: v.__setitem__(3, 1), "padding has rows"),
        ("header", lambda v, n: v.__setitem__(0, v[0] + 1), "chunk size"),
        ("header", lambda v, n: v.__setitem__(2, v[2] + 1), "ends at row"),
        ("header", lambda v, n: v.__setitem__(3, 4), "refused with status 4"),
        ("header", lambda v, n: v.__setitem__(4, 1), "direct output"),
    ],
)
def test_a_wrong_plan_is_found(planner, name, change, said):
    raw = {
        "max_requests": 4,
        "max_rows": 32,
        "max_q_len": 8,
        "group_size": 4,
        "num_kv_heads": 8,
        "tile_q": 64,
        "granule": 16,
        "min_chunk": 64,
        "window_left": -1,
        "max_kv_len": 131072,
        "page_table_stride": 8192,
        "split_mode": selftest_planner.AUTO,
        "fixed_chunk": 0,
        "wave_ctas": 33,
        "num_sms": 132,
        "cta_tokens": 192,
        "lone_percent": 250,
        "merge_tokens": 16,
        "extra_waves": 2,
        "grid": 0,
    }
    shape, elements, partial_rows = planner.complete(raw)
    lens, start = [9000, 100, 4000], [0, 8, 11, 19]
    plan = planner.plan(shape, lens, start, planner.buffer(elements))
    assert selftest_planner.violation(shape, partial_rows, lens, start, plan) is None
    change(plan[name], plan["header"][1])
    found = selftest_planner.violation(shape, partial_rows, lens, start, plan)
    assert found is not None and said in found


def test_no_compiler_is_a_skip(monkeypatch):
    monkeypatch.setattr(selftest_planner, "compiler", lambda: None)
    with pytest.raises(Skip, match="wanted a C"):
        selftest.check_planner(LLAMA, 0)


# -- the decision --------------------------------------------------------------------------------------

ANSWER = {
    "support": "UNIFORM_BATCH",
    "reorder_batch_threshold": 8,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "route": "native",
    "gpu": "sm_86",
    "vllm": "0.27.1",
    "patches": {"p": "applied"},
    "reasons": {"p": "because"},
}
STOCK = {
    "support": "UNIFORM_SINGLE_TOKEN_DECODE",
    "reorder_batch_threshold": 1,
    "cudagraph_mode": "PIECEWISE",
}


def test_decisions_that_agree():
    assert "threshold 8" in selftest.judge_decision(ANSWER, 7)
    # Stock is no failure here; the reason is shown.
    assert "(because)" in selftest.judge_decision({**ANSWER, **STOCK, "patches": {"p": "refused"}}, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # https://github.com/vllm-project/vllm/issues/45425: this pair degenerates text.
        ({"reorder_batch_threshold": 1}, "threshold disagree"),
        ({"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, "threshold disagree"),
        ({"cudagraph_mode": "PIECEWISE"}, "mode disagree"),
        ({"patches": {"p": "failed"}}, "p failed: because"),
        # This vLLM is not one that the package was made for: nowhere would it do anything.
        ({**STOCK, "patches": {"p": "refused"}, "imported": {"p": "refused"}}, "p refused: because"),
        ({**STOCK, "patches": {"p": "disabled"}, "error": "VLLM_SPECPATCH='true' is not"}, "'true' is not"),
    ],
)
def test_decisions_that_do_not(change, said):
    with pytest.raises(Fail, match=said):
        selftest.judge_decision({**ANSWER, **change}, 7)


# -- prebuilt modules ----------------------------------------------------------------------------------


def test_prebuilt_modules(monkeypatch, tmp_path):
    build = importlib.import_module("vllm_specpatch.kernels.build")

    def check(arch=None, needed=False):
        return selftest.check_prebuilt(LLAMA, arch, needed)

    monkeypatch.delenv(build.PREBUILT_ENV, raising=False)
    with pytest.raises(Skip, match="is not set"):
        check()
    monkeypatch.setenv(build.PREBUILT_ENV, str(tmp_path / "missing"))
    with pytest.raises(Fail, match="wanted a folder"):
        check()
    monkeypatch.setenv(build.PREBUILT_ENV, str(tmp_path))
    with pytest.raises(Fail, match="wanted modules, found none"):
        check()
    uri = build.module_uri(selftest_gpu.spec_of(LLAMA), build.Arch.parse("8.6"))
    library = tmp_path / uri / f"{uri}.so"
    library.parent.mkdir()
    library.write_bytes(b"x")
    with pytest.raises(Fail, match=r"\.so is not as it was built"):
        check()
    # As `build` leaves it: with its note beside it.
    build._write_note(library, selftest_gpu.spec_of(LLAMA), build.Arch.parse("8.6"))
    assert check() == "as they were built: 1"
    assert check("8.6", needed=True).endswith("serves this geometry on sm_86")
    assert "next step: vllm-specpatch build --arch 8.9 --spec bf16/bf16/128/g4/q8" in check("8.9")
    with pytest.raises(Fail, match="none serves this geometry on sm_89"):
        check("8.9", needed=True)


# -- the GPU's checks, run on the CPU by the reference itself ------------------------------------------


class Reference:
    """A route that is right: fp64, rounded to the output's dtype. ``spoil`` changes what it computes."""

    ragged = True

    def __init__(self, geometry, spoil=None):
        self.geometry, self.spoil = geometry, spoil

    def attend(self, batch, k_scale=1.0, v_scale=1.0):
        torch = importlib.import_module("torch")
        if self.spoil:
            return self.spoil(self, batch, k_scale, v_scale)
        return batch.wanted(k_scale, v_scale).to(getattr(torch, self.geometry.dtype))


def right(route, batch, *scales):
    return Reference(route.geometry).attend(batch, *scales)


def reads_too_far(route, batch, *scales):
    """One token behind each request's end, as an off-by-one in a plan would."""
    torch = importlib.import_module("torch")
    reference = importlib.import_module("vllm_specpatch.kernels.reference")
    lens = [min(n + 1, pages * 16) for n, pages in zip(batch.lens, batch.pages)]
    out = reference.attention(batch.q, batch.k, batch.v, batch.table, lens, batch.start, layout=batch.layout)[
        0
    ]
    return out.to(getattr(torch, route.geometry.dtype))


def no_causal_order(route, batch, *scales):
    torch = importlib.import_module("torch")
    reference = importlib.import_module("vllm_specpatch.kernels.reference")
    out = reference.attention(
        batch.q, batch.k, batch.v, batch.table, batch.lens, batch.start, mask="full", layout=batch.layout
    )[0]
    return out.to(getattr(torch, route.geometry.dtype))


def drops_a_page(route, batch, *scales):
    table = batch.table.clone()
    batch.table[:, 0] = table[:, -1]
    out = right(route, batch, *scales)
    batch.table = table
    return out


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(selftest_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(selftest_gpu, "LONG", 2053)


@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_right_attention_passes(on_cpu, kv):
    route = Reference(Geometry(4, 2, 64, "bfloat16", kv, 4))
    assert "14 batches" in selftest_gpu.check_reference(route, 0)
    assert "needles" in selftest_gpu.check_needle(route, 0)


@pytest.mark.parametrize("spoil", [reads_too_far, no_causal_order, drops_a_page])
@pytest.mark.parametrize("check", [selftest_gpu.check_reference, selftest_gpu.check_needle])
def test_wrong_attention_fails(on_cpu, check, spoil):
    route = Reference(Geometry(2, 1, 64, "float16", "float16", 3), spoil)
    with pytest.raises(CheckFailed):
        check(route, 0)


def test_uniform_routes_get_no_ragged_batches():
    ragged, uniform = (selftest_gpu.cases(LLAMA, kind) for kind in (True, False))
    assert all(len(set(q_lens)) == 1 for _, q_lens, _, _ in uniform) and len(ragged) > len(uniform)
    assert all(kv >= q for _, q_lens, lens, _ in ragged for q, kv in zip(q_lens, lens, strict=True))


# -- tokens and verdicts -------------------------------------------------------------------------------


def test_what_the_token_comparison_asks(tmp_path):
    fp8 = Geometry(8, 2, 128, "bfloat16", "float8_e4m3fn", 4)
    (stock, first), (patched, second) = selftest.token_requests(fp8, "auto", "fp8", tmp_path)
    assert (stock.name, patched.name) == ("stock", "patched")
    assert first["engine"] == second["engine"] and first["k"] == 3
    for one in (first, second):
        assert one["random_weights"] and one["by_prefill"] and one["synthetic"]
        assert one["scale"] == greedy.FP8
    # Half of the drafts are taken, or only the first row of a verify step would be looked at.
    assert first["engine"]["speculative_config"]["synthetic_acceptance_length"] == 2.5
    [(_, plain), _] = selftest.token_requests(LLAMA, "auto", "auto", tmp_path / "plain")
    assert plain["scale"] == 1.0
    assert first["engine"]["attention_config"]["disable_flashinfer_q_quantization"]
    config = json.loads((pathlib.Path(first["engine"]["model"]) / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 2)
    assert selftest.token_requests(LLAMA, "native", "auto", tmp_path)[1][0].name == "native"


def side(name, tokens, gap=1.0):
    said = {
        "ids": tokens,
        "logprobs": [[-1.0] * len(row) for row in tokens],
        "gaps": [[gap] * len(row) for row in tokens],
        "synthetic": False,
    }
    cells = {"ctx300_bs1": {"by_prefill": {"verdict": "consistent", "text": "decoding agrees"}}}
    return {"cudagraph_mode": "FULL", "route": name, "tokens": {"ctx300_bs1": said}, "cells": cells}


def test_tokens_are_compared():
    assert "3 greedy tokens: equal; prefill agrees" in selftest.judge_tokens(
        [side("stock", [[1, 2, 3]]), side("native", [[1, 2, 3]])]
    )
    with pytest.raises(Fail, match=r"ctx300_bs1: 1/1 differ from token 2 \(gap 1.000\)"):
        selftest.judge_tokens([side("stock", [[1, 2, 3]]), side("native", [[1, 2, 4]])])
    near = [side("stock", [[1, 2, 3]], 0.05), side("native", [[1, 2, 4]], 0.05)]
    assert "1/1 part by rounding (gap 0.050) after 2" in selftest.judge_tokens(near)
    near[1]["cells"]["ctx300_bs1"]["by_prefill"] = {"verdict": "differ", "text": "decoding DIFFERS"}
    with pytest.raises(Fail, match="^ctx300_bs1: patched's decoding DIFFERS"):
        selftest.judge_tokens(near)
    near[1]["cells"]["ctx300_bs1"]["tokens_error"] = "ValueError: no logprobs"
    with pytest.raises(Fail, match="^ctx300_bs1: ValueError: no logprobs"):
        selftest.judge_tokens(near)


def test_a_variant_on_another_route_cannot_tell(monkeypatch):
    answers = iter([side("stock", [[1]]), {"otherwise": "patched ended as stock vLLM (why)"}])
    monkeypatch.setattr(bench, "run_child", lambda *a, **k: next(answers))
    with pytest.raises(Skip, match="ended as stock"):
        selftest.check_tokens(LLAMA, "auto", "auto", lambda text: None)


def test_a_child_that_fails_is_a_failure_without_a_lost_file(monkeypatch):
    def die(*arguments, **options):
        raise bench.ChildFailed("ValueError: no memory; see /gone/stock.log")

    monkeypatch.setattr(bench, "run_child", die)
    with pytest.raises(Fail, match=r"^stock: ValueError: no memory$"):
        selftest.check_tokens(LLAMA, "auto", "auto", lambda text: None)


def results(*states):
    return [Result("c", state, "", 0.0, required) for state, required in states]


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([("passed", True), ("skipped", False)], 0),
        ([("passed", True), ("skipped", True)], 2),
        ([("skipped", True), ("failed", False)], 1),
    ],
)
def test_exit_codes(states, code):
    assert selftest.exit_code(results(*states)) == code


def checks(route, *states):
    return {"gpu": "g", "checks": [{"check": route, "state": s, "detail": "", "seconds": 0} for s in states]}


@pytest.mark.parametrize(
    ("spec_mask", "native", "code"),
    [
        # No module for the better route: vLLM is served by the other one.
        (checks("spec_mask", "skipped"), checks("native", "passed", "passed"), 0),
        (checks("spec_mask", "skipped"), checks("native", "skipped"), 2),
        (checks("spec_mask", "passed", "failed"), checks("native", "passed"), 1),
        ({"cannot": "no CUDA GPU is visible"}, None, 2),
    ],
)
def test_one_good_route_is_enough(monkeypatch, spec_mask, native, code):
    answers = {"spec_mask": spec_mask, "native": native}
    monkeypatch.setattr(selftest, "ask_gpu", lambda route, *more: answers[route])
    found = selftest.kernel_results(["spec_mask", "native"], LLAMA, 0, lambda text: None)
    assert selftest.exit_code(found) == code


def test_a_kernel_process_that_faults_is_a_failure(monkeypatch):
    def fault(*arguments):
        raise Fail("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(selftest, "ask_gpu", fault)
    [found] = selftest.kernel_results(["native"], LLAMA, 0, lambda text: None)
    assert found.state == "failed" and "illegal memory access" in found.detail


def test_routes_come_from_the_patches():
    routes = importlib.import_module("vllm_specpatch.patches.routes")
    assert selftest.wanted_routes("auto") == list(routes.AUTO)
    assert selftest.wanted_routes("native") == ["native"]
    assert set(selftest_gpu.ROUTES) == set(routes.ROUTES)


def test_the_command_on_a_machine_without_a_gpu(clean_environment, tmp_path):
    def run(*options):
        return subprocess.run(
            [sys.executable, "-P", "-m", "vllm_specpatch.cli", "selftest", "--arch", "sm_86", *options],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean_environment(CUDA_VISIBLE_DEVICES=""),
        )

    done = run("--json")
    report = json.loads(done.stdout)
    by_name = {check["check"]: check["state"] for check in report["checks"]}
    assert by_name["decision"] == "passed", report
    assert by_name["planner"] == ("passed" if selftest_planner.compiler() else "skipped")
    assert done.returncode == (0 if selftest_planner.compiler() else 2) and done.stderr == ""
    done = run("--gpu")
    assert done.returncode == 2 and "no CUDA GPU is visible" in done.stdout
    assert "verdict: cannot tell" in done.stdout and "Traceback" not in done.stderr
