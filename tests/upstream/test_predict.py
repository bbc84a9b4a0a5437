"""The main job, and the real gates of the installed vLLM for every capability, in fresh processes."""

import concurrent.futures
import json
import subprocess
import sys

import pytest

CLI = [sys.executable, "-P", "-m", "vllm_specpatch.cli"]
WARNING = (
    "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention "
    "backend FlashInferBackend (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); "
    "setting cudagraph_mode=PIECEWISE"
)
SINGLE = ("UNIFORM_SINGLE_TOKEN_DECODE", 1, "PIECEWISE")


def batch(k):
    return ("UNIFORM_BATCH", 1 + k, "FULL_AND_PIECEWISE")


@pytest.fixture(scope="module")
def predict(clean_environment):
    def run(*arguments, cwd, **env):
        command = [*CLI, "predict", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=clean_environment(**env))

    return run


# (gpu, cubins) -> stock, patched, state. sm_90 with cubins decodes through XQA, which 0.27 wires for one
# token; sm_100 with cubins has trtllm-gen.
MATRIX = {
    ("sm_80", "no"): (SINGLE, batch(3), "applied"),
    ("sm_86", "no"): (SINGLE, batch(3), "applied"),
    ("sm_86", "yes"): (SINGLE, batch(3), "applied"),
    ("sm_89", "no"): (SINGLE, batch(3), "applied"),
    ("sm_90", "no"): (SINGLE, batch(3), "applied"),
    ("sm_90", "yes"): (SINGLE, SINGLE, "refused"),
    ("sm_100", "no"): (SINGLE, batch(3), "applied"),
    ("sm_100", "yes"): (batch(3), batch(3), "not needed"),
    ("sm_120", "no"): (SINGLE, batch(3), "applied"),
    ("sm_120", "yes"): (SINGLE, batch(3), "applied"),
}


@pytest.fixture(scope="module")
def answers(predict, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")

    def ask(cell):
        gpu, cubins = cell
        return predict("--gpu", gpu, "--k", "3", "--cubins", cubins, "--json", cwd=folder)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(MATRIX, pool.map(ask, MATRIX), strict=True))


def triple(side):
    return side["support"], side["reorder_batch_threshold"], side["cudagraph_mode"]


@pytest.mark.parametrize("cell", MATRIX, ids="-".join)
def test_every_capability(answers, cell):
    done = answers[cell]
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    stock, patched, state = MATRIX[cell]
    assert triple(result["stock"]) == stock
    assert triple(result["patched"]) == patched
    assert result["patched"]["patches"] == {"flashinfer-spec-decode": state}
    assert result["gpu"] == cell[0]
    # One promise: CUDA-graph support and threshold move together.
    for side in (result["stock"], result["patched"]):
        assert (side["support"] == "UNIFORM_BATCH") == (side["reorder_batch_threshold"] > 1)
        assert side["warnings"] == ([WARNING] if side["support"] != "UNIFORM_BATCH" else [])
    assert result["patched"]["route"] == ("spec_mask" if state == "applied" else "stock")


def test_the_main_job_as_a_person_reads_it(predict, tmp_path):
    done = predict("--gpu", "sm_86", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("vLLM 0.27") and "sm_86" in lines[0] and "k = 7" in lines[0]
    table = {line[:26].strip(): line[26:].split() for line in lines[2:7]}
    assert table["CUDA-graph support"] == ["UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"]
    assert table["reorder_batch_threshold"] == ["1", "8"]
    assert table["cudagraph_mode"] == ["PIECEWISE", "FULL_AND_PIECEWISE"]
    assert table["route"] == ["stock", "spec_mask"]
    assert "patched warns: none" in done.stdout and "is not supported with spec-decode" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--method", "ngram"), ("--kv-cache-dtype", "fp8")], ids=lambda a: a[-1]
)
def test_other_methods_and_kv_dtypes(predict, tmp_path, arguments):
    result = json.loads(predict("--gpu", "8.9", "--k", "3", *arguments, "--json", cwd=tmp_path).stdout)
    assert triple(result["stock"]) == SINGLE and triple(result["patched"]) == batch(3)


def test_without_speculation_graphs_and_threshold_are_stock(predict, tmp_path):
    result = json.loads(predict("--gpu", "sm_86", "--method", "none", "--json", cwd=tmp_path).stdout)
    assert triple(result["stock"]) == triple(result["patched"])
    assert result["patched"]["patches"] == {"flashinfer-spec-decode": "applied"}
    assert "without speculation" in result["patched"]["reasons"]["flashinfer-spec-decode"]


def test_a_wrong_gpu_is_one_line(predict, tmp_path):
    done = predict("--gpu", "ampere", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert "ampere" in line and "sm_86" in line


def test_no_gpu_is_one_line(predict, tmp_path):
    done = predict(cwd=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "--gpu sm_86" in line


def test_an_unsupported_release_is_refused_with_the_next_step(predict, tmp_path):
    """A newer vLLM, as far as the metadata says."""
    fake = tmp_path / "site" / "vllm-0.34.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    result = json.loads(predict("--gpu", "sm_86", "--k", "3", "--json", cwd=tmp_path, **env).stdout)
    assert triple(result["patched"]) == SINGLE
    assert result["patched"]["patches"] == {"flashinfer-spec-decode": "refused"}
    reason = result["patched"]["reasons"]["flashinfer-spec-decode"]
    assert "0.34.0" in reason
    # The user vouches for it, and the sources are in fact unchanged.
    env["VLLM_SPECPATCH_ALLOW_UNKNOWN"] = "1"
    result = json.loads(predict("--gpu", "sm_86", "--k", "3", "--json", cwd=tmp_path, **env).stdout)
    assert triple(result["patched"]) == batch(3)
