"""Building, caching and finding modules: real compilers, several processes, no GPU.

One small module (head_dim 64, one kernel) is compiled once for the whole file, by three processes
at the same time; everything after that links at most.
"""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ptxas
import pytest

from vllm_specpatch.kernels import build
from vllm_specpatch.kernels.spec_mask import Spec

pytest.importorskip("torch")
pytest.importorskip("tvm_ffi")
pytest.importorskip("flashinfer.jit")

pytestmark = ptxas.needs_nvcc

TINY = Spec(head_dim=64, group_size=1, max_q_len=1)
ARCH = "8.6"

# Loads a module and calls it on the host: the sizes of a plan need no GPU.
LOAD = """
import json, os, sys
from vllm_specpatch.kernels import build, spec_mask
spec = spec_mask.Spec(head_dim=64, group_size=1, max_q_len=1)
go = os.environ.get("TEST_GO")
while go and not os.path.exists(go):
    pass
try:
    module = build.load_module(spec, build.Arch.parse("8.6"))
except build.BuildError as error:
    print("ERROR " + str(error))
    sys.exit(3)
shape = dict.fromkeys(spec_mask.SHAPE_FIELDS, 1)
shape.update(max_requests=2, max_rows=2, tile_q=16, granule=16, min_chunk=64, max_kv_len=1000, split_mode=2)
print("SIZES", *module.sizes([shape[f] for f in spec_mask.SHAPE_FIELDS]))
"""


@dataclasses.dataclass
class Cache:
    """A FlashInfer workspace of its own, with an nvcc that notes its calls."""

    base: Path
    calls: Path
    environment: dict

    def start(self, **extra) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", LOAD],
            env={**self.environment, **extra},
            cwd=self.base,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def load(self, **extra) -> str:
        """What the loading process says last; its errors are shown when it fails otherwise."""
        process = self.start(**extra)
        out, err = process.communicate(timeout=600)
        assert process.returncode in (0, 3), err[-3000:]
        return out.splitlines()[-1]

    def compiled(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    @property
    def built(self) -> Path:
        (found,) = self.base.glob("**/cached_ops/spec_mask_*/spec_mask_*.so")
        return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    base = tmp_path_factory.mktemp("jit")
    nvcc, calls = base / "nvcc", base / "calls"
    nvcc.write_text(
        f'#!/bin/sh\nfor a in "$@"; do case "$a" in *.cu) echo "$a" >> {calls};; esac; done\n'
        f'exec {build.find_nvcc()} "$@"\n'
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    environment = {
        **{k: v for k, v in os.environ.items() if k != build.PREBUILT_ENV},
        "FLASHINFER_WORKSPACE_BASE": str(base),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH,
        "FLASHINFER_NVCC": str(nvcc),
        "CUDA_HOME": str(build.cuda_home()),
        "MAX_JOBS": "2",
    }
    made = Cache(base, calls, environment)
    go = base / "go"
    processes = [made.start(TEST_GO=str(go)) for _ in range(3)]
    go.touch()
    results = [p.communicate(timeout=600) for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0], [(o, e[-3000:]) for o, e in results]
    # Two tiles, no split, so no partial rows; every process loaded the same code.
    assert {out.splitlines()[-1].split()[1] for out, _ in results} == {"2"}
    return made


def test_concurrent_processes_build_once(cache):
    names = sorted(Path(c).name for c in cache.compiled())
    assert names == ["binding.cu", "unit_causal_16.cu"]


def test_a_built_module_needs_no_compiler(cache):
    before = cache.compiled()
    assert cache.load(**no_compiler(cache)).startswith("SIZES 2 ")
    assert cache.compiled() == before


def no_compiler(cache) -> dict:
    """An environment in which nothing named nvcc exists."""
    empty = cache.base / "no_cuda"
    empty.mkdir(exist_ok=True)
    (cache.base / "sitecustomize.py").write_text(
        "import os.path, pathlib\n"
        "real = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self, **k: self.name != 'nvcc' and real(self, **k)\n"
    )
    return {"FLASHINFER_NVCC": "", "CUDA_HOME": str(empty), "PATH": str(empty), "PYTHONPATH": str(cache.base)}


@pytest.mark.parametrize("damage", ["truncated library", "no note", "wrong note", "no library"])
def test_what_an_interrupted_build_left_is_completed(cache, damage):
    library = cache.built
    good = library.read_bytes()
    note = library.with_suffix(".json")
    before = cache.compiled()
    if damage == "truncated library":
        library.write_bytes(good[: len(good) // 2])
    elif damage == "no note":
        note.unlink()
        library.write_bytes(good[:5000])
    elif damage == "wrong note":
        note.write_text('{"sha256": "0')
    else:
        library.unlink()
    assert cache.load().startswith("SIZES 2 ")
    assert build.is_whole(library)
    assert library.stat().st_size == len(good)
    assert cache.compiled() == before, "linking again would have been enough"


def test_broken_objects_are_compiled_again(cache):
    library = cache.built
    before = len(cache.compiled())
    for path in library.parent.glob("*.o"):
        path.write_bytes(path.read_bytes()[:100])
    library.unlink()
    assert cache.load().startswith("SIZES 2 ")
    assert build.is_whole(library)
    assert len(cache.compiled()) == before + 2


def unloadable(path: Path, toolkit: str = "12.9") -> None:
    """A library with a right note, which needs one that is not here: built with another CUDA release."""
    path.parent.mkdir(parents=True, exist_ok=True)
    absent = path.with_name("libcudart_of_another_release.so.1")
    empty = ["cc", "-shared", "-fPIC", "-x", "c", "/dev/null"]
    subprocess.run([*empty, f"-Wl,-soname,{absent.name}", "-o", str(absent)], check=True)
    subprocess.run(
        [*empty, "-x", "none", "-Wl,--no-as-needed", str(absent), "-o", str(path)],
        check=True,
    )
    absent.unlink()
    build._write_note(path, TINY, build.Arch.parse(ARCH))
    note = path.with_suffix(".json")
    assert json.loads(note.read_text())["toolkit"] == build._toolkit(build.find_nvcc()) != ""
    note.write_text(json.dumps({**json.loads(note.read_text()), "toolkit": toolkit}))
    assert build.is_whole(path)


def test_a_library_that_does_not_load_is_built_anew(cache):
    before = len(cache.compiled())
    unloadable(cache.built)
    assert cache.load().startswith("SIZES 2 ")
    assert build.is_whole(cache.built)
    assert len(cache.compiled()) == before + 2, "from nothing: its objects are of the other release too"
    assert cache.load().startswith("SIZES 2 ")
    assert len(cache.compiled()) == before + 2
    assert [p.name for p in cache.built.parent.parent.iterdir() if cache.built.stem in p.name] == [
        cache.built.stem
    ]


def test_a_library_that_this_toolkit_makes_so_is_not_built_at_every_start(cache):
    good = cache.built.read_bytes()
    before = cache.compiled()
    unloadable(cache.built, build._toolkit(build.find_nvcc()))
    assert cache.load().startswith("ERROR spec_mask: wanted a module that loads, found ")
    assert cache.compiled() == before
    cache.built.write_bytes(good)
    build._write_note(cache.built, TINY, build.Arch.parse(ARCH))


def test_a_folder_set_aside_comes_back_if_nothing_takes_its_place(tmp_path):
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(RuntimeError), build._set_aside(folder):
        folder.mkdir()
        raise RuntimeError
    assert [p.name for p in folder.iterdir()] == ["old"]
    with build._set_aside(folder):
        folder.mkdir()
    assert list(folder.iterdir()) == [] and list(tmp_path.iterdir()) == [folder]


def test_a_library_that_does_not_load_is_one_line_without_a_compiler(cache, tmp_path):
    uri = cache.built.stem
    unloadable(tmp_path / uri / f"{uri}.so")
    nothing = {**no_compiler(cache), "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "empty")}
    said = cache.load(**nothing, **{build.PREBUILT_ENV: str(tmp_path)})
    assert said.startswith("ERROR spec_mask: wanted a module that loads, found ")
    assert "libcudart_of_another_release.so.1" in said and "; build it with " in said
    # One in the cache serves all the same.
    assert cache.load(**no_compiler(cache), **{build.PREBUILT_ENV: str(tmp_path)}).startswith("SIZES 2 ")


def test_threads_and_processes_write_under_names_of_their_own(tmp_path):
    # In containers that share a cache the first process of each has the same number.
    spec, arch = dataclasses.replace(TINY, max_q_len=64), build.Arch.parse(ARCH)
    for turn in range(30):
        folder = tmp_path / str(turn)
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda _, to=folder: build.write_sources(spec, arch, to), range(4)))
        assert written.count(written[0]) == 4
        assert sorted(p.suffix for p in folder.iterdir()) == [".cu"] * len(spec.tiles) + [".h"]


def test_neither_module_nor_compiler_is_one_line(cache, tmp_path):
    said = cache.load(**{**no_compiler(cache), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)})
    assert said.startswith("ERROR spec_mask: wanted a module for head_dim 64, ")
    assert "found no prebuilt one and no nvcc" in said
    assert "vllm-specpatch build --arch 8.6 --spec bf16/bf16/64/g1/q1/causal" in said


@pytest.fixture(scope="module")
def prebuilt(cache, tmp_path_factory):
    """TINY built ahead, from the cache that is already there."""
    out = tmp_path_factory.mktemp("prebuilt")
    before = cache.compiled()
    saved = dict(os.environ)
    os.environ.update(cache.environment)
    try:
        # The second spec has another group size and the same code.
        built = build.prebuild([TINY, dataclasses.replace(TINY, group_size=2)], [ARCH], out)
    finally:
        os.environ.clear()
        os.environ.update(saved)
    assert cache.compiled() == before
    (one,) = built
    return out, one


def test_prebuild_says_what_it_built(prebuilt):
    out, one = prebuilt
    assert one.path.is_relative_to(out)
    assert build.is_whole(one.path)
    assert (one.arch, one.flashinfer) == (ARCH, build.flashinfer_version())
    note = json.loads(one.path.with_suffix(".json").read_text())
    assert (note["arch"], note["flashinfer"]) == (one.arch, one.flashinfer)
    assert note["spec"]["head_dim"] == 64
    assert "sm_86" in str(one)
    assert "head_dim 64" in str(one)


def test_prebuilt_modules_load_with_no_compiler(cache, prebuilt, tmp_path):
    out, _ = prebuilt
    empty = {**no_compiler(cache), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert cache.load(**empty, **{build.PREBUILT_ENV: str(out)}).startswith("SIZES 2 ")
    assert not list(tmp_path.glob("**/*.so"))


def test_prebuilt_package_is_found_by_itself(cache, prebuilt, tmp_path):
    _, one = prebuilt
    package = tmp_path / "site" / "vllm_specpatch_prebuilt"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / one.path.parent.name).symlink_to(one.path.parent)
    empty = {**no_compiler(cache), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    empty["PYTHONPATH"] += os.pathsep + str(package.parent)
    assert cache.load(**empty).startswith("SIZES 2 ")


def test_a_compiler_error_is_reported_in_one_line(cache, tmp_path):
    """What a spec that cannot compile looks like: csrc with an error in it."""
    broken = tmp_path / "csrc"
    broken.mkdir()
    for path in build.CSRC.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "stream.cuh").write_text("#error this was broken on purpose\n")
    code = LOAD.replace("go = os", f"build.CSRC = __import__('pathlib').Path({str(broken)!r})\ngo = os")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**cache.environment, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)},
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 3, done.stderr[-2000:]
    said = done.stdout.splitlines()[-1]
    assert "did not compile" in said
    assert "this was broken on purpose" in said
