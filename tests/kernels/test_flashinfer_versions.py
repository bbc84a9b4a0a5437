"""Every supported FlashInfer release: its headers' digest, and one unit of ours compiled with them.

The headers come from the releases' wheels on PyPI and are kept outside the checkout (ptxas.py).
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ptxas
import pytest
import releases

from vllm_specpatch.kernels import build
from vllm_specpatch.kernels.spec_mask import Spec

FOLDERS = ("flashinfer/data/include/", "flashinfer/data/cccl/")


def headers_of(version: str) -> Path:
    """The data folder of a release; downloads its wheel once."""
    if version == build.flashinfer_version():
        return build.flashinfer_data()
    target = ptxas.cache_folder() / "flashinfer" / version
    if not (target / "complete").exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "-q",
                "-d",
                str(target),
                f"flashinfer-python=={version}",
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            if any(
                "No matching distribution" in line and "from versions: none" not in done.stderr
                for line in said
            ):
                pytest.fail(f"PyPI has no flashinfer-python {version}: {said[-1]}")
            pytest.skip(f"PyPI cannot be reached for flashinfer-python {version}: {said[-1] if said else ''}")
        (wheel,) = target.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [n for n in archive.namelist() if n.startswith(FOLDERS)])
        wheel.unlink()
        (target / "complete").touch()
    return target / "flashinfer" / "data"


@pytest.mark.parametrize("version", build.SUPPORTED_FLASHINFER)
def test_headers_are_those_that_were_read(version):
    build.check_flashinfer(version, headers_of(version))


@ptxas.needs_nvcc
@pytest.mark.parametrize("version", build.SUPPORTED_FLASHINFER)
def test_a_unit_compiles(version, tmp_path):
    pytest.importorskip("tvm_ffi")
    spec = Spec(head_dim=128, group_size=4, dtype_kv="float8_e4m3fn", max_q_len=4)
    (row,) = ptxas.compile_spec(
        spec,
        build.Arch.parse("8.6"),
        tmp_path,
        version=version,
        data=headers_of(version),
        only={"unit_causal_16.cu"},
    )
    assert (row["tile_q"], row["spilled"]) == (16, 0)


BUILD = """
from vllm_specpatch.kernels import build
from vllm_specpatch.kernels.spec_mask import Spec
print(build.flashinfer_version())
try:
    build.build(Spec(head_dim=128, group_size=4, max_q_len=4), build.Arch.parse("8.6"))
except build.BuildError as error:
    print(error)
"""


@ptxas.needs_nvcc
@pytest.mark.parametrize("version", build.SUPPORTED_FLASHINFER)
def test_each_release_is_asked_to_build_as_it_wants_to_be(version, tmp_path):
    """The way to the compiler through the release's own Python: arguments, locks, generated files. Up to
    0.6.14 it took the lock by itself, which is ours already."""
    try:
        folder = releases.unpacked("flashinfer-python", version)
    except releases.Unreachable as error:
        pytest.skip(str(error))
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text("#!/bin/sh\necho 'error: ninja was reached'\nexit 1\n")
    ninja.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{ninja.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "VLLM_SPECPATCH_KERNELS": "",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD], env=environment, capture_output=True, text=True, timeout=600
    )
    found, *said = done.stdout.splitlines()
    assert found == version
    assert any("did not compile: error: ninja was reached" in line for line in said), (
        done.stdout + done.stderr
    )
