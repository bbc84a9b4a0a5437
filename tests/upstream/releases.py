"""vLLM releases and the FlashInfer that each pins, Python files and headers, in a cache outside the checkout.

A release is unpacked once into ``~/.cache/vllm-specpatch/releases-2/NAME-VERSION`` (``XDG_CACHE_HOME`` and
``SPECPATCH_RELEASES`` move it); ``python tests/upstream/releases.py`` does it for the whole table. Ahead on
PYTHONPATH such a folder replaces the installed distribution, metadata included, while compiled requirements
stay those of the environment. The wheels are hundreds of MB, what is kept of them is 15 to 100 MB.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import tomllib

TABLE = Path(__file__).with_name("versions.toml")
#: vLLM's wheels are cp38-abi3 and FlashInfer's are pure Python: any recent interpreter and glibc will do,
#: also one that this machine has not, since nothing compiled is kept.
PYTHON_VERSION = "3.12"
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 43)),
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
]
#: How pip says that it did not reach its index, as opposed to having found no such release in it.
UNREACHABLE = re.compile(
    r"connection (?:broken|error|refused|timed out)|NewConnectionError|NameResolutionError|ReadTimeout"
    r"|ConnectTimeout|Temporary failure in name resolution|Network is unreachable|ProxyError"
    r"|Max retries exceeded",
    re.IGNORECASE,
)


class Unreachable(RuntimeError):
    """The package index could not be reached; the text says what pip said."""


def cache_root() -> Path:
    if "SPECPATCH_RELEASES" in os.environ:
        return Path(os.environ["SPECPATCH_RELEASES"])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # The number counts what unpack() keeps, so that a folder of before is not taken for a whole one.
    return Path(cache) / "vllm-specpatch" / "releases-2"


def unpacked(name: str, version: str, root: Path | None = None) -> Path:
    """The folder with the Python files and metadata of ``name`` ``version``; fetched if it is not there yet.

    Safe in parallel processes: one downloads while the others wait, and the folder appears complete or not
    at all. Raises :class:`Unreachable`, or ``RuntimeError`` if the index has no such release.
    """
    root = root or cache_root()
    folder = root / f"{name}-{version}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=root) as work:
                new = Path(work) / "unpacked"
                unpack(_download(name, version, Path(work)), new)
                new.rename(folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """The ``*.py`` and ``*.dist-info/*`` of a wheel, and FlashInfer's headers, whose text the kernels are
    built on and checked against. The wheel is deleted: it is 20 times as big."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            # RECORD would list the files that were left behind.
            metadata = ".dist-info/" in member and not member.endswith("/RECORD")
            header = member.startswith("flashinfer/data/include/flashinfer/")
            if member.endswith(".py") or metadata or header:
                archive.extract(member, folder)
    wheel.unlink()


def _download(name: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--retries", "2", "--disable-pip-version-check", "-d", str(folder)]
    command += ["--implementation", "cp", "--python-version", PYTHON_VERSION]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
    if done.returncode == 0:
        [wheel] = folder.glob("*.whl")
        return wheel
    said = done.stderr.strip()
    if UNREACHABLE.search(said):
        why = [line.strip() for line in said.splitlines() if UNREACHABLE.search(line)][-1]
        raise Unreachable(f"{name} {version} is not in {folder.parent}, pip cannot reach its index: {why}")
    raise RuntimeError(f"pip download {name}=={version}: {said}")


def requirement(folder: Path, distribution: str) -> str:
    """The exact version that an unpacked wheel requires of ``distribution``, from its metadata."""
    [metadata] = folder.glob("*.dist-info/METADATA")
    for line in HeaderParser().parsestr(metadata.read_text()).get_all("Requires-Dist", []):
        found = re.fullmatch(rf"{re.escape(distribution)}\s*\(?==\s*([^;)\s]+)\)?\s*", line)
        if found:
            return found[1]
    raise LookupError(f"{metadata} pins no {distribution}")


CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
#: (capability, whether trtllm-gen and XQA kernels can be fetched)
Cell = tuple[str, bool]


@dataclass(frozen=True)
class Release:
    """One row of versions.toml, with what it takes over from the rows before it."""

    vllm: str
    flashinfer: str
    torch: str
    stock: Mapping[Cell, str]  # SINGLE or BATCH
    ours: Mapping[Cell, str]  # a State of vllm_specpatch.patch

    def path(self) -> str:
        """What to put ahead on PYTHONPATH; unpacks what is missing."""
        pins = (("vllm", self.vllm), ("flashinfer-python", self.flashinfer))
        return os.pathsep.join(str(unpacked(name, version)) for name, version in pins)


@functools.cache
def table() -> dict[str, Release]:
    """release -> its row, oldest first."""
    rows: dict[str, Release] = {}
    said: dict[str, Any] = {"stock": {}, "ours": {}}
    for row in tomllib.loads(TABLE.read_text())["release"]:
        unknown = row.keys() - {"vllm", "flashinfer", "torch", "stock", "ours"}
        assert not unknown and row["vllm"] not in rows, f"{TABLE.name}: {row}"
        said = {
            **said,
            **row,
            "stock": said["stock"] | _cells(row.get("stock", {})),
            "ours": said["ours"] | _cells(row.get("ours", {})),
        }
        rows[row["vllm"]] = Release(**said)
    return rows


def _cells(verdicts: dict[str, dict[str, str]]) -> dict[Cell, str]:
    found: dict[Cell, str] = {}
    for key, by_capability in verdicts.items():
        cubins = {"cubins": True, "no-cubins": False}[key]
        if "*" in by_capability:
            found |= {(capability, cubins): by_capability["*"] for capability in CAPABILITIES}
        named = {capability: verdict for capability, verdict in by_capability.items() if capability != "*"}
        assert named.keys() <= set(CAPABILITIES), f"{TABLE.name}: {verdicts}"
        found |= {(capability, cubins): verdict for capability, verdict in named.items()}
    return found


if __name__ == "__main__":
    for row in table().values():
        print(row.vllm, row.path(), flush=True)
