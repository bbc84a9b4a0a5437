"""Every supported FlashInfer release: its headers' digest, and one unit of ours compiled with them.

The headers come from the releases' wheels on PyPI and are kept outside the checkout (ptxas.py).
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ptxas
import pytest

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
            timeout=300,
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


@pytest.mark.skipif(
    build.find_nvcc() is None,
    reason="compiling the kernels needs nvcc; none in CUDA_HOME, PATH or /usr/local/cuda",
)
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
