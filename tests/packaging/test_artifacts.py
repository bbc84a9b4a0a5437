"""Wheel, sdist and editable install: complete, and installing moves nobody's vLLM, torch or FlashInfer."""

import email
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SOURCES = {
    "vllm_specpatch": "vllm_specpatch",
    "patches": "vllm_specpatch/patches",
    "kernels": "vllm_specpatch/kernels",
}
STARTUP = {"vllm_specpatch.pth", "vllm_specpatch.start"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel built from it), from a clean copy of what git would ship."""
    copy = tmp_path_factory.mktemp("copy") / "project"
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist", "tests", "benchmarks")
    shutil.copytree(ROOT, copy, ignore=skip)
    dist = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)],
        check=True,
        capture_output=True,
        text=True,
        cwd=dist,
    )
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


def tree_files():
    """What the wheel must hold: every Python, CUDA and data file of the three folders."""
    for folder, inside in SOURCES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{inside}/{path.relative_to(ROOT / folder)}"


def test_wheel_matches_tree(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    packed = {n for n in names if ".dist-info/" not in n}
    assert packed == set(tree_files()) | STARTUP


def test_wheel_record_lists_the_start_up_files(built):
    wheel = zipfile.ZipFile(built[1])
    [record] = [n for n in wheel.namelist() if n.endswith("/RECORD")]
    lines = wheel.read(record).decode().splitlines()
    assert STARTUP <= {line.split(",")[0] for line in lines}
    assert len(lines) == len(wheel.namelist())


def test_run_time_requirements_stay_tiny(built):
    wheel = zipfile.ZipFile(built[1])
    [metadata] = [n for n in wheel.namelist() if n.endswith("/METADATA")]
    headers = email.message_from_bytes(wheel.read(metadata))
    always = [r for r in headers.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split(">")[0].split("<")[0].strip() for r in always) == ["packaging", "wrapt"]


@pytest.fixture
def venv(tmp_path):
    """A venv that sees the dependencies of this one but not the package itself."""
    path = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    python = path / "bin" / "python"
    site = next((path / "lib").glob("python*")) / "site-packages"
    # Links in a folder of their own: `pip uninstall` moves away a site-packages whose only *files* are ours.
    deps = tmp_path / "deps"
    deps.mkdir()
    for path in pathlib.Path(sys.prefix).glob("lib/python*/site-packages/*"):
        if path.name.split("-")[0] in ("wrapt", "packaging", "setuptools", "_distutils_hack"):
            (deps / path.name).symlink_to(path)
    (site / "deps.pth").write_text(f"{deps}\n")
    return python, site


def install(python, *what):
    # pip of this environment, working on the other one
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            *map(str, what),
        ],
        capture_output=True,
        text=True,
        cwd=python.parent,
    )


PROBE = """
import importlib, sys
armed = [type(f).__name__ for f in sys.meta_path].count("VllmWatcher")
import vllm_specpatch, vllm_specpatch.patches, vllm_specpatch.kernels
from importlib import resources
from importlib.metadata import entry_points
names = [p.name for p in entry_points(group="vllm.general_plugins")]
print(armed, names, resources.files("vllm_specpatch").joinpath("py.typed").is_file())
"""


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_install_and_uninstall(built, venv, tmp_path, kind):
    python, site = venv
    if kind == "editable":
        copy = tmp_path / "checkout"
        skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "tests", "benchmarks")
        shutil.copytree(ROOT, copy, ignore=skip)
        done = install(python, "-e", copy)
    else:
        done = install(python, built[1] if kind == "wheel" else built[0])
    assert done.returncode == 0, done.stderr
    run = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path)
    assert run.stdout.strip() == "1 ['specpatch'] True", run.stderr
    tool = subprocess.run(
        [python.parent / "vllm-specpatch", "list"], capture_output=True, text=True, cwd=tmp_path
    )
    assert tool.returncode == 0 and "flashinfer-spec-decode" in tool.stdout, tool.stderr
    subprocess.run(
        [sys.executable, "-P", "-m", "pip", "--python", str(python), "uninstall", "-y", "vllm-specpatch"],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert not [p.name for p in site.iterdir() if "specpatch" in p.name]
    assert subprocess.run([python, "-c", "pass"], capture_output=True, text=True).stderr == ""


def test_editable_sees_a_new_patch_file_at_once(venv, tmp_path):
    python, _ = venv
    copy = tmp_path / "checkout"
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "tests", "benchmarks")
    shutil.copytree(ROOT, copy, ignore=skip)
    assert install(python, "-e", copy).returncode == 0
    (copy / "patches" / "new_one.py").write_text("VALUE = 5\n")
    run = subprocess.run(
        [python, "-c", "from vllm_specpatch.patches.new_one import VALUE; print(VALUE)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stdout.strip() == "5", run.stderr


@pytest.mark.parametrize("name", ["patches", "kernels"])
def test_a_folder_found_by_its_bare_name_says_what_is_wrong(name):
    run = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1 and f"vllm_specpatch.{name}" in run.stderr
