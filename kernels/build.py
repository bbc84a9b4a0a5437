"""Compiles, caches, prebuilds and finds the CUDA modules of :mod:`.spec_mask`.

A module is one shared library for one (spec, architecture, FlashInfer version). Its name, the
URI, contains a digest of all of these and of our own sources: FlashInfer writes generated sources
under the URI before it takes its lock, so two different kernels under one URI would overwrite
each other (flashinfer/jit/core.py).

:func:`load_module` looks in this order:

1. folders of prebuilt modules: ``VLLM_SPECPATCH_KERNELS`` (separated like PATH), ``prebuilt``
   beside this file, and the package ``vllm_specpatch_prebuilt`` if one is installed. No compiler
   needed.
2. FlashInfer's own JIT cache, built there on the first use under FlashInfer's lock, so that
   concurrent ranks build once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .spec_mask import Spec

CSRC = Path(__file__).resolve().parent / "csrc"
PREBUILT_ENV = "VLLM_SPECPATCH_KERNELS"

# FlashInfer headers whose text the module depends on: wrappers of PTX, and division by an invariant.
# Relative to flashinfer/data/include/flashinfer.
HEADERS = (
    "cp_async.cuh",
    "fastdiv.cuh",
    "math.cuh",
    "mma.cuh",
)

# FlashInfer versions whose headers were read and built against, with the digest of the headers above
# (tests/kernels/test_flashinfer_versions.py): those that vLLM 0.24 to 0.33 pin. A version not listed here is
# refused: a wrapper that changed its meaning would compile and then compute something else.
SUPPORTED_FLASHINFER: dict[str, str] = {
    "0.6.12": "2f8244183fd910a6",
    "0.6.13": "2f8244183fd910a6",
    "0.6.14": "72e7725cf46ce75b",
    "0.6.16.post3": "72e7725cf46ce75b",
    "0.6.18": "72e7725cf46ce75b",
    "0.6.18.post1": "72e7725cf46ce75b",
    "0.7.0.post1": "7f6561ff8e89df35",
    "0.7.2.post1": "7f6561ff8e89df35",
}

# C++ names of the dtypes a spec may use, by their torch names.
C_DTYPES = {
    "bfloat16": "__nv_bfloat16",
    "float16": "half",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}

# Names of the mask modes in csrc/params.cuh.
C_MASKS = {"causal": "kCausal", "full": "kFull", "bits": "kBits"}

# Shared memory in KB by compute capability: (per multiprocessor, per block). CUDA programming
# guide, table of technical specifications per compute capability.
SHARED_MEMORY_KB = {
    "8.0": (164, 163),
    "8.6": (100, 99),
    "8.7": (164, 163),
    "8.9": (100, 99),
    "9.0": (228, 227),
    "10.0": (228, 227),
    "10.3": (228, 227),
    "11.0": (228, 227),
    "12.0": (100, 99),
    "12.1": (100, 99),
}


class BuildError(RuntimeError):
    """No usable module can be had; the message says what was wanted, what was found, what to do."""


@dataclasses.dataclass(frozen=True)
class Arch:
    """A CUDA architecture such as ``9.0a``: ``number`` is ``9.0``, ``sm`` is ``90a``."""

    name: str

    @property
    def number(self) -> str:
        return self.name.rstrip("abcdef")

    @property
    def sm(self) -> str:
        return self.name.replace(".", "")

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Accepts ``8.6``, ``9.0``, ``9.0a``, ``12.0f``; raises BuildError for anything else."""
        number = text.strip().rstrip("abcdef")
        if number not in SHARED_MEMORY_KB:
            raise BuildError(
                f"architecture: wanted one of {', '.join(SHARED_MEMORY_KB)}, found {text!r}; "
                "give compute capabilities such as --arch 8.0,8.6,8.9,9.0a"
            )
        suffix = text.strip()[len(number) :]
        if number == "9.0":
            suffix = "a"  # as FlashInfer normalises it (compilation_context.py)
        return cls(number + suffix)

    @classmethod
    def of_device(cls, device: Any = None) -> Arch:
        """The architecture of a torch CUDA device (the current one by default)."""
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return cls.parse(f"{major}.{minor}")


def flashinfer_version() -> str:
    """Version of the installed FlashInfer, from its metadata: importing it would start CUDA."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        raise BuildError(
            "FlashInfer: wanted the package flashinfer-python, found none; install the version that vLLM pins"
        ) from None


def flashinfer_data() -> Path:
    """FlashInfer's data folder (headers), found without importing FlashInfer."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        raise BuildError("FlashInfer: wanted its headers, found no package; install flashinfer-python")
    return Path(next(iter(found.submodule_search_locations))) / "data"


def headers_digest(data: Path) -> str:
    """Digest of the FlashInfer headers the module depends on, under a data folder."""
    digest = hashlib.sha256()
    for name in HEADERS:
        path = data / "include" / "flashinfer" / name
        text = path.read_bytes() if path.exists() else b"absent"
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:16]


def check_flashinfer(version: str | None = None, data: Path | None = None) -> None:
    """Raises BuildError unless the FlashInfer at hand is one the sources were checked against."""
    version = version or flashinfer_version()
    wanted = SUPPORTED_FLASHINFER.get(version)
    if wanted is None:
        raise BuildError(
            f"FlashInfer: wanted one of {', '.join(SUPPORTED_FLASHINFER)}, found {version}; "
            "use a release that vLLM pins, or the native route"
        )
    found = headers_digest(data or flashinfer_data())
    if found != wanted:
        raise BuildError(
            f"FlashInfer {version}: wanted headers with digest {wanted}, found {found}; "
            "the installation was modified, reinstall flashinfer-python"
        )


def source_digest() -> str:
    """Digest of every file in csrc, names included."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.iterdir()):
        if path.suffix in (".cu", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def module_uri(spec: Spec, arch: Arch, version: str | None = None) -> str:
    """Name of the module for a spec: readable prefix plus a digest of everything it depends on."""
    key = json.dumps(
        {
            "spec": spec.compiled(),
            "arch": arch.name,
            "flashinfer": version or flashinfer_version(),
            "sources": source_digest(),
            "generated": [spec_header(spec, arch), *cuda_flags(arch)],
        },
        sort_keys=True,
    )
    kv = spec.dtype_kv.replace("float8_", "").replace("float", "f").replace("bf", "b")
    return f"spec_mask_sm{arch.sm}_d{spec.head_dim}_{kv}_{hashlib.sha256(key.encode()).hexdigest()[:20]}"


def _masks(spec: Spec) -> list[str]:
    """Mask kinds in one order: specs that share a module must generate the same text."""
    return [mask for mask in C_MASKS if mask in spec.masks]


def spec_header(spec: Spec, arch: Arch) -> str:
    """Text of the generated spec_mask_spec.h."""
    per_sm, per_block = SHARED_MEMORY_KB[arch.number]
    units = " ".join(f"X({C_MASKS[mask]}, {tile})" for mask in _masks(spec) for tile in spec.tiles)
    return f"""// Generated by build.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace spec_mask {{
using DTypeQ = {C_DTYPES[spec.dtype_q]};
using DTypeKV = {C_DTYPES[spec.dtype_kv]};
constexpr int32_t kHeadDim = {spec.head_dim};
constexpr bool kUseWindow = {str(spec.window).lower()};
constexpr bool kUseSoftCap = {str(spec.soft_cap).lower()};
constexpr bool kCausalWords = {str(spec.has_words).lower()};
constexpr int32_t kSmemPerSm = {per_sm} * 1024;
constexpr int32_t kSmemPerBlock = {per_block} * 1024;
}}  // namespace spec_mask

#define SPEC_MASK_SM {arch.number.replace(".", "")}
#define SPEC_MASK_UNITS(X) {units}
"""


def _partial(path: Path) -> Path:
    """A name of its own beside ``path``, to write to and then rename. Processes that share a cache may have
    the same number: in containers the first has 1."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}")


def write_sources(spec: Spec, arch: Arch, folder: Path) -> list[Path]:
    """Writes the generated header and one unit per (mask, tile); returns all .cu files.

    A file is written only if its text differs, so ninja sees no change where there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"spec_mask_spec.h": spec_header(spec, arch)}
    for mask in _masks(spec):
        for tile in spec.tiles:
            texts[f"unit_{mask}_{tile}.cu"] = (
                f'#include "stream.cuh"\n\nSPEC_MASK_UNIT({C_MASKS[mask]}, {tile})\n'
            )
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            partial = _partial(path)
            partial.write_text(text)
            partial.replace(path)
    units = [folder / name for name in texts if name.endswith(".cu")]
    return [*units, CSRC / "binding.cu"]


def cuda_flags(arch: Arch) -> list[str]:
    """nvcc flags beyond FlashInfer's own. The -gencode flag replaces FlashInfer's list."""
    return [f"-gencode=arch=compute_{arch.sm},code=sm_{arch.sm}"]


def find_nvcc() -> str | None:
    """Path of nvcc the way FlashInfer finds it (flashinfer/jit/cpp_ext.py), or None."""
    override = os.environ.get("FLASHINFER_NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [override, f"{home}/bin/nvcc" if home else shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    return None


def cuda_home() -> str | None:
    """The toolkit to build ahead with: CUDA_HOME, the folder of nvcc, or /usr/local/cuda, whichever
    first has the runtime library. FlashInfer takes the folder of the nvcc in PATH without looking,
    which fails where that is a wrapper script."""
    nvcc = find_nvcc()
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for home in (named, Path(nvcc).resolve().parents[1] if nvcc else None, "/usr/local/cuda"):
        if home and any(Path(home).glob("lib*/libcudart.so")):
            return str(home)
    return None


def libcuda_stub(folder: Path) -> list[str]:
    """Link flags for -lcuda on a machine without a driver.

    FlashInfer links every module with -lcuda. Ours calls the runtime only, so where neither a
    driver nor the toolkit's stub is installed an empty library of that name does.
    """
    import ctypes.util

    nvcc = find_nvcc()
    stubs = Path(nvcc).resolve().parent.parent / "lib64" / "stubs" if nvcc else Path()
    if ctypes.util.find_library("cuda") or (stubs / "libcuda.so").exists():
        return []
    target = folder / "libcuda.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = _partial(target)
        subprocess.run(
            [
                os.environ.get("CXX", "c++"),
                "-shared",
                "-fPIC",
                "-x",
                "c",
                "/dev/null",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                str(partial),
            ],
            check=True,
        )
        partial.replace(target)
    return [f"-L{folder}"]


def _name_architecture(arch: Arch) -> None:
    """FlashInfer asks the driver for architectures when it is imported, and refuses to have none."""
    if os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch.name


def jit_spec(spec: Spec, arch: Arch) -> Any:
    """FlashInfer JitSpec of a module. Imports FlashInfer; writes the generated sources."""
    version = flashinfer_version()
    check_flashinfer(version)
    _name_architecture(arch)
    from flashinfer.jit import env as jit_env
    from flashinfer.jit.core import gen_jit_spec

    uri = module_uri(spec, arch, version)
    generated = jit_env.FLASHINFER_GEN_SRC_DIR / uri
    sources = write_sources(spec, arch, generated)
    return gen_jit_spec(
        uri,
        sources,
        extra_cuda_cflags=cuda_flags(arch),
        extra_ldflags=libcuda_stub(jit_env.FLASHINFER_GEN_SRC_DIR / "libcuda_stub"),
        extra_include_paths=[CSRC, generated],
    )


def _no_compiler(spec: Spec, arch: Arch) -> BuildError:
    return BuildError(
        f"spec_mask: wanted a module for {spec.describe()} on sm_{arch.sm} with FlashInfer "
        f"{flashinfer_version()}, found no prebuilt one and no nvcc; run `vllm-specpatch build "
        f"--arch {arch.name} --spec {spec_text(spec)}` on a machine with the CUDA toolkit and set "
        f"{PREBUILT_ENV} to its output"
    )


# --- libraries and the notes beside them --------------------------------------------------------


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _note_of(library: Path) -> Path:
    return library.with_suffix(".json")


def is_whole(library: Path) -> bool:
    """Is a library what the note beside it says? The note is written last, so that an interrupted
    build or copy has none or one that does not match. Loading a truncated library could end the
    process with a bus error, so this is checked before."""
    try:
        return json.loads(_note_of(library).read_text())["sha256"] == _sha256(library)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@functools.cache
def _toolkit(nvcc: str | None) -> str:
    """The release of a compiler, as 13.0; empty if it does not say."""
    if nvcc is None:
        return ""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else ""


def _write_note(library: Path, spec: Spec, arch: Arch) -> None:
    note = {
        "sha256": _sha256(library),
        "arch": arch.name,
        "toolkit": _toolkit(find_nvcc()),
        "flashinfer": flashinfer_version(),
        "spec": dataclasses.asdict(spec),
    }
    partial = _partial(_note_of(library))
    partial.write_text(json.dumps(note, indent=2) + "\n")
    partial.replace(_note_of(library))


def cached_library(uri: str) -> Path:
    """Where FlashInfer's JIT cache has a module, whether it is there or not. Imports FlashInfer."""
    from flashinfer.jit import env as jit_env

    return Path(jit_env.FLASHINFER_JIT_DIR) / uri / f"{uri}.so"


def _compile_error(library: Path, spec: Spec, error: Exception) -> BuildError:
    """The compiler's first errors in one line; its whole output stays in the chained exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"\berror\b[: ]|cannot find -l|undefined reference", line)]
    return BuildError(
        f"spec_mask: {library.stem} ({spec.describe()}) did not compile: {' | '.join(said[:3]) or lines[-1:]}"
    )


def compile_jit(jit: Any) -> None:
    """Runs ninja, in every supported release of FlashInfer. Up to 0.6.14 ``verbose`` has no default, and
    ``build()`` takes FlashInfer's lock by itself: it would wait for ours for ever."""
    jit.build(verbose=False, need_lock=False)


def build(
    spec: Spec,
    arch: Arch,
    before_build: Callable[[str], None] | None = None,
    unloadable: str | None = None,
) -> Path:
    """The library of a module in FlashInfer's JIT cache, built if need be. Idempotent.

    ``before_build`` is called with one line for the user when this process is about to compile.
    ``unloadable`` is the sha256 of a library that did not load: if that is the one in the cache, another is
    built, from nothing; it is put back if that fails.

    Runs under FlashInfer's lock for this module, so that concurrent processes build once. What an
    interrupted build left is completed if possible, else started over. Needs a compiler only if
    there is something to build. Raises BuildError.
    """
    version = flashinfer_version()
    check_flashinfer(version)
    _name_architecture(arch)
    library = cached_library(module_uri(spec, arch, version))

    def is_there() -> bool:
        try:
            return is_whole(library) and (unloadable is None or _sha256(library) != unloadable)
        except OSError:  # another process has just taken it away
            return False

    if is_there():
        return library
    if find_nvcc() is None:
        raise _no_compiler(spec, arch)
    jit = jit_spec(spec, arch)
    from filelock import FileLock

    with FileLock(jit.lock_path, thread_local=False):
        if is_there():  # another process was here first
            return library
        # With what did not load go its objects, which are of the same toolkit.
        with contextlib.nullcontext() if unloadable is None else _set_aside(library.parent):
            if unloadable is not None:
                jit = jit_spec(spec, arch)
            # Ninja would take a half-written library for a finished one.
            library.unlink(missing_ok=True)
            leftovers = any(library.parent.glob("*.o"))
            if before_build is not None:
                before_build(
                    f"building spec-mask module for sm_{arch.sm} ({spec.describe()}): "
                    f"about {build_seconds(spec)} s, cached afterwards"
                )
            try:
                compile_jit(jit)
            except RuntimeError as error:
                if not leftovers:
                    raise _compile_error(library, spec, error) from error
                # Perhaps an object of an interrupted build: once more from nothing.
                shutil.rmtree(library.parent, ignore_errors=True)
                try:
                    compile_jit(jit_spec(spec, arch))
                except RuntimeError as again:
                    raise _compile_error(library, spec, again) from again
            _write_note(library, spec, arch)
    return library


@contextlib.contextmanager
def _set_aside(folder: Path) -> Iterator[None]:
    """Renames a folder while another is made in its place; who shares the cache may need it if that fails."""
    kept = _partial(folder)
    if not folder.exists():
        yield
        return
    folder.rename(kept)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)
        raise
    shutil.rmtree(kept, ignore_errors=True)


def prebuilt_folders() -> list[Path]:
    """Folders searched for prebuilt modules, in order."""
    folders = [Path(p) for p in os.environ.get(PREBUILT_ENV, "").split(os.pathsep) if p]
    folders.append(Path(__file__).resolve().parent / "prebuilt")
    package = importlib.util.find_spec("vllm_specpatch_prebuilt")
    if package is not None and package.submodule_search_locations:
        folders.extend(Path(p) for p in package.submodule_search_locations)
    return folders


def find_prebuilt(uri: str, folders: Iterable[Path] | None = None) -> Path | None:
    """The prebuilt library of a URI, or None. One that is not whole does not count."""
    for folder in prebuilt_folders() if folders is None else folders:
        library = folder / uri / f"{uri}.so"
        if is_whole(library):
            return library
    return None


def find_covering(spec: Spec, arch: Arch, folders: Iterable[Path] | None = None) -> Path | None:
    """A prebuilt library that has all kernels of a spec and more, or None.

    One module prebuilt with more query tiles or masks than are asked for, or with words, will do:
    ``vllm-specpatch build`` builds all tiles of up to 16 rows, which serves any smaller number of draft
    tokens.
    """
    from .spec_mask import Spec

    wanted = spec.compiled()
    version = flashinfer_version()
    slower = None  # with words that nobody asked for
    for folder in prebuilt_folders() if folders is None else folders:
        for note in sorted(folder.glob("spec_mask_*/spec_mask_*.json")):
            try:
                said = json.loads(note.read_text())["spec"]
                built = Spec(**{**said, "masks": tuple(said["masks"])})
            except (OSError, ValueError, KeyError, TypeError):  # of another version of this package
                continue
            has = built.compiled()
            more = all(set(wanted[key]) <= set(has[key]) for key in ("masks", "tiles"))  # type: ignore[call-overload]
            more = more and has["words"] >= wanted["words"]  # type: ignore[operator]
            same = all(wanted[key] == has[key] for key in wanted if key not in ("masks", "tiles", "words"))
            # The name says for which sources, FlashInfer and architecture.
            if more and same and note.stem == module_uri(built, arch, version):
                library = note.with_suffix(".so")
                if is_whole(library):
                    if has["words"] == wanted["words"]:
                        return library
                    slower = slower or library
    return slower


def find_ahead(spec: Spec, arch: Arch) -> Path | None:
    """The library built ahead that serves a spec, the exact one first, or None."""
    return find_prebuilt(module_uri(spec, arch)) or find_covering(spec, arch)


def build_seconds(spec: Spec) -> int:
    """About how long compiling takes here: 16 s for the binding and 2 s for each kernel, on one core."""
    cores = os.cpu_count() or 1
    return 16 + 2 * -(-(len(spec.masks) * len(spec.tiles)) // cores)


_loaded: dict[str, Any] = {}
_loaded_lock = threading.Lock()


def load_module(
    spec: Spec, arch: Arch | None = None, before_build: Callable[[str], None] | None = None
) -> Any:
    """The loaded module (tvm_ffi) of a spec for the current device; built if need be, which
    ``before_build`` hears of first.

    A library that does not load (of another CUDA release, in a cache that outlived an image) is built anew.

    Raises BuildError when there is neither a prebuilt module nor a compiler, when FlashInfer is
    not a supported version, when compilation fails (with the compiler's output), and when what was
    built does not load.
    """
    arch = arch or Arch.of_device()
    uri = module_uri(spec, arch)
    with _loaded_lock:
        if uri not in _loaded:
            _loaded[uri] = _load_ahead(spec, arch, before_build) or _load_built(spec, arch, before_build)
        return _loaded[uri]


def _load(library: Path) -> Any:
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(library))
    except (RuntimeError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(
            f"spec_mask: wanted a module that loads, found {library}: {said[-1].strip()}; "
            "build it with the CUDA release of this environment's torch"
        ) from error


def _load_ahead(spec: Spec, arch: Arch, say: Callable[[str], None] | None) -> Any | None:
    """The module built ahead, loaded; None if there is none, or one that does not load while another may."""
    library = find_ahead(spec, arch)
    if library is None:
        return None
    try:
        return _load(library)
    except BuildError as error:
        if find_nvcc() is None and not is_whole(cached_library(module_uri(spec, arch))):
            raise
        if say is not None:
            say(f"{error}; looking for another")
        return None


def _load_built(spec: Spec, arch: Arch, before_build: Callable[[str], None] | None) -> Any:
    library = build(spec, arch, before_build)
    try:
        return _load(library)
    except BuildError:
        try:
            note, digest = json.loads(_note_of(library).read_text()), _sha256(library)
        except (OSError, ValueError):  # another process is replacing it: build() waits for that
            note, digest = {}, None
        nvcc = find_nvcc()
        # With the toolkit that is here it would come out the same, at every start.
        if nvcc is None or note.get("toolkit") == _toolkit(nvcc):
            raise
        return _load(build(spec, arch, before_build, unloadable=digest))


# --- building ahead -----------------------------------------------------------------------------

# Short names of dtypes in --spec.
_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_SPEC_FORM = "QUERY/KV/HEAD_DIM/gGROUP[/qROWS][/MASK+MASK...][/window][/softcap][/words]"


def parse_spec(text: str) -> Spec:
    """The spec that a ``--spec`` argument means, such as ``bf16/fp8_e4m3/128/g4``.

    Parts are separated by slashes. Four are required, in this order: query dtype (bf16, fp16), KV
    dtype (bf16, fp16, fp8_e4m3, fp8_e5m2), head_dim, and ``g`` with the query heads per KV head. Any
    of these may follow, in any order:

    ==============  ==================================================================
    ``q16``         longest query of a request in rows: 1 + the draft tokens (default 16)
    ``causal+bits`` mask kinds (default causal): causal, full, bits, joined by +
    ``window``      with the sliding window
    ``softcap``     with the logits soft cap
    ``words``       with mask words under causal masks (draft trees)
    ==============  ==================================================================

    Raises BuildError.
    """
    from .spec_mask import MASKS, Spec

    def wrong(part: str) -> BuildError:
        return BuildError(
            f"spec: wanted {_SPEC_FORM}, found {part!r} in {text!r}; for example bf16/fp8_e4m3/128/g4"
        )

    parts = text.strip().split("/")
    if len(parts) < 4:
        raise wrong(text)
    for part in parts[:2]:
        if part not in _DTYPES:
            raise wrong(part)
    if not parts[2].isdecimal():
        raise wrong(parts[2])
    if not (parts[3].startswith("g") and parts[3][1:].isdecimal()):
        raise wrong(parts[3])
    fields: dict[str, Any] = {}
    for part in parts[4:]:
        if part.startswith("q") and part[1:].isdecimal():
            found: dict[str, Any] = {"max_q_len": int(part[1:])}
        elif part in ("window", "softcap", "words"):
            found = {"soft_cap" if part == "softcap" else part: True}
        elif set(part.split("+")) <= set(MASKS):
            found = {"masks": tuple(part.split("+"))}
        else:
            raise wrong(part)
        if fields.keys() & found.keys():
            raise wrong(part)
        fields.update(found)
    try:
        return Spec(
            head_dim=int(parts[2]),
            group_size=int(parts[3][1:]),
            dtype_q=_DTYPES[parts[0]],
            dtype_kv=_DTYPES[parts[1]],
            **fields,
        )
    except ValueError as error:
        raise BuildError(f"spec {text!r}: {error}") from None


def spec_text(spec: Spec) -> str:
    """The ``--spec`` argument that means a spec: the inverse of :func:`parse_spec`."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
    parts = [short[spec.dtype_q], short[spec.dtype_kv], str(spec.head_dim), f"g{spec.group_size}"]
    parts.append(f"q{spec.max_q_len}")
    parts.append("+".join(spec.masks))
    switches = {"window": spec.window, "softcap": spec.soft_cap, "words": spec.words}
    parts.extend(name for name, on in switches.items() if on)
    return "/".join(parts)


@dataclasses.dataclass(frozen=True)
class Built:
    """One prebuilt module: where it is and what it is for."""

    path: Path
    spec: Spec
    arch: str
    flashinfer: str

    def __str__(self) -> str:
        what = f"sm_{Arch.parse(self.arch).sm}, FlashInfer {self.flashinfer}: {self.spec.describe()}"
        return f"{what}: {self.path}"


def prebuild(specs: Sequence[Spec], archs: Sequence[str], out: Path) -> list[Built]:
    """Builds modules for architectures that need not be present, into a folder.

    ``archs`` are compute capabilities such as ``8.6`` and ``9.0a``. Every module becomes
    ``out/<uri>/<uri>.so`` with a note beside it; specs that share a module make one. The folder can
    be copied to any machine with the same FlashInfer: with ``VLLM_SPECPATCH_KERNELS`` set to it,
    :func:`load_module` needs no compiler. As ``vllm_specpatch_prebuilt`` with an ``__init__.py`` it
    is an importable package that is found by itself.

    One child process per architecture, because FlashInfer fixes its cache folder for a set of
    architectures when it is imported. Raises BuildError with the compiler's first errors.
    """
    parsed = [Arch.parse(a) for a in archs]
    if find_nvcc() is None:
        raise BuildError(
            "prebuild: wanted nvcc, found none in CUDA_HOME, PATH or /usr/local/cuda; install the "
            "CUDA toolkit of the major version that torch uses"
        )
    version = flashinfer_version()
    check_flashinfer(version)
    try:  # before minutes of compiling
        Path(out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise BuildError(f"prebuild: wanted a folder to write to, found {error}; name another") from error
    home = cuda_home()
    toolkit = {"CUDA_HOME": home} if home else {}
    built: list[Built] = []
    for arch in parsed:
        unique = list({module_uri(s, arch, version): s for s in specs}.values())
        request = json.dumps(
            {
                "arch": arch.name,
                "out": str(Path(out).absolute()),
                "specs": [dataclasses.asdict(s) for s in unique],
            }
        )
        child = subprocess.run(
            [sys.executable, "-c", _PREBUILD_CHILD, str(Path(__file__).resolve().parent)],
            input=request,
            env={**os.environ, "FLASHINFER_CUDA_ARCH_LIST": arch.name, **toolkit},
            text=True,
            stdout=subprocess.PIPE,
        )
        answers = [line for line in child.stdout.splitlines() if line.startswith("PREBUILT ")]
        if child.returncode != 0 or not answers:
            raise BuildError(
                f"prebuild for {arch.name}: wanted {len(unique)} modules, found an error; it is above"
            )
        answer = json.loads(answers[-1].removeprefix("PREBUILT "))
        if "error" in answer:
            raise BuildError(answer["error"])
        built.extend(
            Built(Path(p), s, arch.name, version) for p, s in zip(answer["libraries"], unique, strict=True)
        )
    return built


# Loads this package by its path, whatever it is installed as, and serves one request from stdin.
_PREBUILD_CHILD = """
import importlib, importlib.util, json, os, sys
folder = sys.argv[1]
found = importlib.util.spec_from_file_location(
    "spec_mask_kernels", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
sys.modules[found.name] = importlib.util.module_from_spec(found)
build = importlib.import_module("spec_mask_kernels.build")
request = json.load(sys.stdin)
try:
    answer = {"libraries": build._prebuild_child(request)}
except build.BuildError as error:
    answer = {"error": str(error)}
print("PREBUILT " + json.dumps(answer))
"""


def _prebuild_child(request: dict[str, Any]) -> list[str]:
    from .spec_mask import Spec

    arch = Arch.parse(request["arch"])
    done = []
    for fields in request["specs"]:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        spec = Spec(**values)
        built = build(spec, arch)
        target = Path(request["out"]) / built.stem / built.name
        if not (is_whole(target) and _sha256(target) == _sha256(built)):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = _partial(target)
            shutil.copyfile(built, partial)
            partial.replace(target)
            _write_note(target, spec, arch)
        done.append(str(target))
    return done
