"""doctor, check-log and build as a user calls them."""

import json
import pathlib
import subprocess
import sys

import ptxas
import pytest

LOGS = pathlib.Path(__file__).parent / "logs"


@pytest.fixture
def cli(clean_environment, tmp_path):
    def run(*arguments, **env):
        command = [sys.executable, "-P", "-m", "vllm_specpatch.cli", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment(**env)
        )

    return run


def test_doctor_without_a_gpu_cannot_tell_but_says_what_it_found(cli):
    done = cli("doctor", PATH="/nonexistent")
    assert done.returncode == 2, done.stderr
    assert "vLLM" in done.stdout and "no NVIDIA GPU was found" in done.stdout and "Advice" in done.stdout


def test_doctor_json_for_a_named_gpu(cli):
    done = cli("doctor", "--gpu", "sm_86", "--json")
    assert done.returncode in (0, 1), done.stderr
    assert "flashinfer-spec-decode" in json.dumps(json.loads(done.stdout))


def test_doctor_survives_a_python_without_vllm_torch_and_flashinfer(cli, tmp_path):
    """An isolated Python with nothing but this package and its two requirements on the path."""
    import packaging
    import wrapt

    import vllm_specpatch

    site = tmp_path / "site"
    site.mkdir()
    for module in (packaging, wrapt):
        folder = pathlib.Path(module.__file__).parent
        (site / folder.name).symlink_to(folder)
    package = site / "vllm_specpatch"
    root = pathlib.Path(vllm_specpatch.__file__).parent
    package.mkdir()
    for path in root.iterdir():
        (package / path.name).symlink_to(path)
    for name in ("patches", "kernels"):
        (package / name).symlink_to(root.parent / name)
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
from vllm_specpatch.cli import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr and "not installed" in done.stdout


def test_check_log_compares_two_files(cli):
    done = cli("check-log", LOGS / "0.27.1-v2-stock.txt", LOGS / "0.27.1-v2-patched.txt")
    assert done.returncode == 1
    assert "PIECEWISE" in done.stdout and "FULL graphs" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("check-log", "missing.log"),
        ("doctor", "--gpu", "ampere"),
        ("predict", "--gpu", "sm_86", "--k", "-1"),
    ],
)
def test_a_mistake_is_one_line(cli, arguments):
    done = cli(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) >= 1


def test_build_says_what_is_wrong_with_a_spec(cli, tmp_path):
    done = cli("build", "--arch", "8.6", "--spec", "bf16/fp8_e4m3/80/g4", "--out", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "80" in done.stderr


@ptxas.needs_nvcc
def test_build_says_that_it_cannot_write_before_it_compiles(cli, tmp_path):
    (tmp_path / "file").touch()
    done = cli("build", "--arch", "8.6", "--spec", "bf16/bf16/64/g1/q1", "--out", tmp_path / "file")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "wanted a folder to write to, found " in done.stderr


def test_predict_says_what_vllm_said(cli):
    done = cli("predict", "--gpu", "sm_86", "--kv-cache-dtype", "zz")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cache_dtype" in done.stderr and "'zz'" in done.stderr, done.stderr


def test_last_words():
    from vllm_specpatch.last_words import last_words

    pydantic = "Traceback:\n  File\np.ValidationError: 1 error for C\nk\n  Input is wrong\n"
    pydantic += "    For further information visit x\n"
    assert last_words(pydantic) == "p.ValidationError: 1 error for C k Input is wrong"
    assert last_words("no CUDA GPU found; pass --gpu\n\n") == "no CUDA GPU found; pass --gpu"
    assert last_words("") == ""
    # A log that goes on, and what torch says when it is left.
    cause = "torch.AcceleratorError: CUDA error: out of memory"
    advice = (
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable"
    )
    assert last_words(f"{cause}\n{advice}\n\n[rank0]:[W1 x.cpp:1] Warning: not called") == cause
    assert last_words(f"ERROR 11-30 [core.py:842] {cause}\nProcess EngineCore:") == cause
    assert last_words(f"{cause}\nTraceback (most recent call last):\n  File x\nINFO bye") == cause
    assert last_words("m.Refused: no\nWARNING 11-30 later") == "m.Refused: no"
    assert last_words("ValueError:\nbelow") == "ValueError: below"


def test_fingerprint_of_a_symbol_that_nobody_has(cli):
    done = cli("fingerprint", "vllm_specpatch.hooks:no_such_thing")
    assert done.returncode == 1 and "absent" in done.stdout
    assert cli("fingerprint", "vllm_specpatch.hooks:load_patches").returncode == 0


def test_fingerprint_says_which_sources_only_a_part_needs(monkeypatch, capsys):
    from types import SimpleNamespace

    from vllm_specpatch import cli, fingerprint

    found = {"m:whole": "1" * 64, "m:part": "2" * 64, "m:both": "3" * 64}
    patch = SimpleNamespace(
        digests={"m:whole": {"1" * 64: "release 1"}, "m:both": {"3" * 64: "release 1"}},
        parts={"route x": {"m:part": {"9" * 64: "release 1"}, "m:both": {"3" * 64: "release 1"}}},
    )
    monkeypatch.setattr(cli, "load_patches", lambda: [patch])
    monkeypatch.setattr(fingerprint, "of_symbol", found.__getitem__)
    arguments = cli.argparse.Namespace(symbols=[])
    assert cli.print_fingerprints(arguments) == 0  # without its part the patch applies all the same
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("m:part") + 1].strip() == f"{'2' * 64}  unknown (for route x only)"
    assert lines[lines.index("m:both") + 1].strip() == f"{'3' * 64}  release 1"
    found["m:whole"] = "4" * 64
    assert cli.print_fingerprints(arguments) == 1
