"""patches/diffs: what make_diffs.py writes, applied to every release, does what the hooks do.

One process a release, two at a time. Releases that cannot be fetched are skipped.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import make_diffs
import pytest
import releases

from vllm_specpatch.patches import SERIES

PROBE = Path(__file__).with_name("probe_release.py")
PROCESSES = 2
TIMEOUT_S = 600
K = 3
#: Where XQA and trtllm-gen are out of reach every release leaves something to do.
GPU = ("12.0", False)
#: Only the line in the source; and with the start-up hook and the entry point as well.
SIDES = ("source", "patched")


def fetched(call):
    try:
        return call()
    except releases.Unreachable as e:
        pytest.skip(str(e))


def apply(release, folder):
    """A copy of the release in ``folder`` with the diff applied."""
    root = releases.unpacked("vllm", release)
    # Links, not copies: with __pycache__, a hundred MB. The file to change must be a copy.
    shutil.copytree(root, folder, copy_function=os.link)
    for entry in SERIES:
        path = entry.target.replace(".", "/") + ".py"
        (folder / path).unlink()
        shutil.copy2(root / path, folder / path)
    diff = (make_diffs.DIFFS / f"{release}.patch").read_text()
    done = subprocess.run(
        ["patch", "-p1", "--fuzz=0"], cwd=folder, input=diff, capture_output=True, text=True
    )
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout + done.stderr
    return folder


def probe(release, environment, folder):
    patched = apply(release, folder / "site")
    flashinfer = releases.unpacked("flashinfer-python", releases.table()[release].flashinfer)
    path = {"PYTHONPATH": f"{patched}{os.pathsep}{flashinfer}", "VLLM_CACHE_ROOT": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", str(PROBE), json.dumps([[side, K, *GPU] for side in SIDES])],
        cwd=folder,
        env={**environment, **path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def answers(clean_environment, tmp_path_factory):
    """release -> future of the answers for SIDES."""
    environment = clean_environment()
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        folders = {release: tmp_path_factory.mktemp(f"vllm-{release}") for release in releases.table()}
        yield {r: pool.submit(probe, r, environment, folder) for r, folder in folders.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("release", releases.table())
def test_the_diff_is_what_the_script_writes(release):
    root = fetched(lambda: releases.unpacked("vllm", release))
    assert (make_diffs.DIFFS / f"{release}.patch").read_text() == make_diffs.diff(root), (
        "run python tests/upstream/make_diffs.py"
    )


def test_no_diff_of_a_release_that_is_not_in_the_table():
    assert {path.stem for path in make_diffs.DIFFS.glob("*.patch")} == set(releases.table())


@pytest.mark.skipif(shutil.which("patch") is None, reason="the program `patch` is not installed")
@pytest.mark.parametrize("release", releases.table())
def test_same_effect_as_the_hooks(release, answers):
    found = fetched(lambda: answers[release].result())
    assert not [answer["error"] for answer in found if "error" in answer]
    source, both = (answer["result"] for answer in found)
    assert source["doors"] == ["source of vllm.v1.attention.backends.flashinfer"]
    assert {"start-up hook", *source["doors"]} < set(both["doors"])
    for side in (source, both):
        assert side["vllm"] == release
        assert side["patches"] == {"flashinfer-spec-decode": "applied"}, side["reasons"]
        assert side["patches"]["flashinfer-spec-decode"] == releases.table()[release].ours[GPU]
        assert (side["support"], side["reorder_batch_threshold"]) == ("UNIFORM_BATCH", 1 + K)
        assert side["cudagraph_mode"] == "FULL_AND_PIECEWISE" and side["warnings"] == []
    assert source | {"doors": None} == both | {"doors": None}
