"""Every release of versions.toml, run on simulated GPUs: what it decides, stock and with this package.

The verdicts are the releases' own code (see releases.py and probe_release.py). ``SPECPATCH_MATRIX=full`` runs
every capability with and without cubins and fails where a release cannot be fetched; otherwise the cells of
``DEFAULT`` run, and releases that cannot be fetched are skipped. ``SPECPATCH_MATRIX=0.31.0,0.32.0`` runs all
cells of those releases.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import releases

PROBE = Path(__file__).with_name("probe_release.py")
PROCESSES = 2
TIMEOUT_S = 600
K = 3
WANTED = os.environ.get("SPECPATCH_MATRIX", "")
ALL = [(capability, cubins) for capability in releases.CAPABILITIES for cubins in (False, True)]
#: One cell of each kind of verdict: never XQA, XQA that cannot be fetched, trtllm-gen, XQA.
DEFAULT = [("8.6", False), ("9.0", False), ("10.0", True), ("12.0", True)]
CELLS = {
    (release, *cell): None
    for release in (releases.table() if WANTED in ("", "full") else WANTED.split(","))
    for cell in (ALL if WANTED else DEFAULT)
}
RELEASES = list(dict.fromkeys(release for release, *_ in CELLS))
SIDES = ("stock", "patched")
WARNING = (
    "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention "
    "backend FlashInferBackend (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); "
    "setting cudagraph_mode=PIECEWISE"
)
DECISIONS = {
    "SINGLE": ("UNIFORM_SINGLE_TOKEN_DECODE", 1, "PIECEWISE", [WARNING]),
    "BATCH": ("UNIFORM_BATCH", 1 + K, "FULL_AND_PIECEWISE", []),
}


def probe(release, environment, folder):
    """(side, capability, cubins) -> the answer, for all cells of a release, from one process."""
    questions = [[side, K, *cell] for side in SIDES for name, *cell in CELLS if name == release]
    done = subprocess.run(
        [sys.executable, "-P", str(PROBE), json.dumps(questions)],
        cwd=folder,
        # A cache of vLLM's own for each release: it keeps what it found out about model classes.
        env={**environment, "PYTHONPATH": releases.table()[release].path(), "VLLM_CACHE_ROOT": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {(side, *cell): answer for (side, _k, *cell), answer in zip(questions, answers, strict=True)}


@pytest.fixture(scope="module")
def matrix(clean_environment, tmp_path_factory, request):
    """release -> its answers. All releases start at once; the caller waits for the one that it asks for."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    environment = clean_environment()
    # Forked children import vLLM: without bytecode each would compile it anew, 3 s a cell.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started, told = time.perf_counter(), set()

    def answers(release):
        try:
            return futures[release].result()
        finally:
            if release not in told:
                told.add(release)
                with capture.global_and_fixture_disabled():
                    print(f"\n[{time.perf_counter() - started:4.0f} s] vllm {release}", end=" ", flush=True)

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        folders = {release: tmp_path_factory.mktemp(f"vllm-{release}") for release in RELEASES}
        futures = {r: pool.submit(probe, r, environment, folder) for r, folder in folders.items()}
        yield answers
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def fetched():
    """Turns "the index cannot be reached" into a skip with its reason, unless the matrix was asked for."""

    def get(call):
        try:
            return call()
        except releases.Unreachable as e:
            if WANTED:
                raise
            pytest.skip(str(e))

    return get


@pytest.mark.parametrize("release", RELEASES)
def test_pins_are_what_the_wheel_requires(release, fetched):
    row = releases.table()[release]
    folder = fetched(lambda: releases.unpacked("vllm", release))
    assert releases.requirement(folder, "flashinfer-python") == row.flashinfer
    assert releases.requirement(folder, "torch") == row.torch


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda c: f"{c[0]}-sm_{c[1].replace('.', '')}-{'cubins' if c[2] else 'no-cubins'}"
)
def test_verdict(cell, matrix, fetched):
    release, *gpu = cell
    row = releases.table()[release]
    answers = fetched(lambda: matrix(release))
    stock, patched = (answers[(side, *gpu)] for side in SIDES)
    assert "error" not in stock, stock["error"]
    assert "error" not in patched, patched["error"]
    stock, patched = stock["result"], patched["result"]

    def decision(side):
        return side["support"], side["reorder_batch_threshold"], side["cudagraph_mode"], side["warnings"]

    for side in (stock, patched):
        found = side["vllm"], side["flashinfer"], side["gpu"]
        assert found == (release, row.flashinfer, f"sm_{gpu[0].replace('.', '')}")
    expected, verdict = row.stock[tuple(gpu)], row.ours[tuple(gpu)]
    assert decision(stock) == DECISIONS[expected]
    assert patched["patches"] == {"flashinfer-spec-decode": verdict}, patched["reasons"]
    assert decision(patched) == DECISIONS["BATCH" if verdict == "applied" else expected]
    assert (patched["route"] != "stock") == (verdict == "applied")


@pytest.mark.parametrize(
    ("release", "flashinfer", "state", "route"),
    [("0.27.1", "0.6.14", "refused", "stock"), ("0.26.0", "0.6.16.post3", "applied", "native")],
)
def test_another_flashinfer_than_the_pinned_one_is_judged_by_what_is_installed(
    release, flashinfer, state, route, fetched, clean_environment, tmp_path
):
    pins = (("vllm", release), ("flashinfer-python", flashinfer))
    path = os.pathsep.join(str(fetched(lambda p=pin: releases.unpacked(*p))) for pin in pins)
    environment = clean_environment(
        PYTHONPATH=path, VLLM_CACHE_ROOT=str(tmp_path), VLLM_SPECPATCH_ROUTE="native"
    )
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-P", str(PROBE), json.dumps([["patched", K, "8.6", False]])]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer["error"]
    found = answer["result"]
    assert (found["vllm"], found["flashinfer"]) == (release, flashinfer)
    assert (found["patches"], found["route"]) == ({"flashinfer-spec-decode": state}, route)
    assert (found["support"] == "UNIFORM_BATCH") is (state == "applied")


# -- releases.py itself ------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path):
    """An environment in which pip finds one tiny wheel and asks no network."""
    wheel = tmp_path / "index" / "vllm-9.9.9-py3-none-any.whl"
    wheel.parent.mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\nRequires-Dist: torch==1.2.3\n"
    metadata += 'Requires-Dist: torch==9; extra == "other"\nRequires-Dist: flashinfer-python>=1\n'
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "x")
        archive.writestr("vllm-9.9.9.dist-info/METADATA", metadata)
        archive.writestr("vllm-9.9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("vllm-9.9.9.dist-info/RECORD", "")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    return {**env, **offline, "SPECPATCH_RELEASES": str(tmp_path / "cache")}


FETCH = "import sys, releases; print(releases.unpacked('vllm', sys.argv[1]))"


def fetch(version, env):
    command = [sys.executable, "-c", FETCH, version]
    where = {"cwd": PROBE.parent, "env": {k: v for k, v in env.items() if k != "PYTHONSAFEPATH"}}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **where)


def test_two_processes_unpack_a_release_once(index, tmp_path):
    both = [fetch("9.9.9", index) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    folder = tmp_path / "cache" / "vllm-9.9.9"
    assert {out.strip() for out, _ in said} == {str(folder)}
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == {"vllm/__init__.py", "vllm-9.9.9.dist-info/METADATA", "vllm-9.9.9.dist-info/WHEEL"}
    assert {path.name for path in folder.parent.iterdir()} == {"vllm-9.9.9", ".vllm-9.9.9.lock"}
    assert releases.requirement(folder, "torch") == "1.2.3"
    with pytest.raises(LookupError, match="pins no flashinfer-python"):
        releases.requirement(folder, "flashinfer-python")
    # Afterwards nothing is fetched.
    again = fetch("9.9.9", {**index, "PIP_FIND_LINKS": os.devnull})
    assert again.communicate()[0].strip() == str(folder)


def test_an_unknown_release_is_an_error_and_no_reason_to_skip(index):
    process = fetch("8.8.8", index)
    error = process.communicate()[1]
    assert process.returncode == 1 and "RuntimeError: pip download vllm==8.8.8" in error


def test_an_unreachable_index_is_a_reason_to_skip(index, tmp_path):
    env = {k: v for k, v in index.items() if k not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
    process = fetch("9.9.9", {**env, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"})
    error = process.communicate()[1]
    assert process.returncode == 1
    assert "releases.Unreachable: vllm 9.9.9 is not in" in error
    assert not (tmp_path / "cache" / "vllm-9.9.9").exists()
