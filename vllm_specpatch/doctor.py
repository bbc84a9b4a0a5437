"""``vllm-specpatch doctor``: what this machine and this environment are, what follows, and what to do.

Three steps. :func:`collect` asks the probes and returns plain data; every probe survives a missing library, a
missing GPU and a broken installation. :func:`examine` and :func:`advise` are pure: data in, findings and one
paragraph out. The rest renders. Nothing heavy is imported here: vLLM and torch are asked in a fresh process.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from . import __version__, fingerprint, gate
from .exit_codes import CANNOT_TELL, GOOD, WRONG
from .hooks import load_patches
from .settings import read as read_settings

WIDTH = 110
LABEL = 22
COMMAND_TIMEOUT_S = 20
FRESH_TIMEOUT_S = 180
#: The name of our entry point, which VLLM_PLUGINS would have to contain.
PLUGIN = "specpatch"

# What vLLM's own sources say, read in 0.24.0, 0.25.1, 0.26.0, 0.27.1, 0.28.0, 0.30.0 and 0.33.0.
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
#: First release in which stock FlashInfer keeps FULL graphs for speculative decoding, by capability major;
#: on sm_10x always (trtllm-gen). Needs XQA or trtllm-gen kernels except on sm_8x.
UPSTREAM_SINCE = {8: "0.33.0", 9: "0.30.0", 10: "0.24.0", 12: "0.28.0"}
#: VLLM_ATTENTION_BACKEND is not read by any of these releases (vLLM warns that it does not know it).
SWITCH = "--attention-backend FLASH_ATTN (the same as --attention-config.backend FLASH_ATTN)"

FRESH_PROCESS = """
import importlib, json, sys
asked, out = json.loads(sys.argv[1]), {}
try:
    if asked["vllm"]:
        import vllm, vllm_specpatch
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        for target in asked["targets"]:
            try:
                importlib.import_module(target)
            except Exception as e:
                out.setdefault("not_imported", {})[target] = f"{type(e).__name__}: {e}"
        out["status"] = vllm_specpatch.status()
        out["changed_since"] = [line for line in vllm_specpatch.unpatch() if "someone else" in line]
except BaseException as e:
    out["error"] = f"{type(e).__name__}: {e}"
try:
    if asked["gpus"]:
        from torch import cuda
        out["gpus"] = [
            {"index": i, "uuid": None, "name": cuda.get_device_name(i), "driver": None,
             "capability": list(cuda.get_device_capability(i)),
             "memory_mib": cuda.get_device_properties(i).total_memory >> 20}
            for i in range(cuda.device_count())
        ]
except BaseException:
    out["gpus"] = []
print("RESULT " + json.dumps(out))
"""


# -- probes --------------------------------------------------------------------------------------


def run_command(command: Sequence[str], timeout: float = COMMAND_TIMEOUT_S) -> tuple[int, str]:
    """(exit code, stdout, or stderr if that is empty); code -1 if it cannot be run. Never raises."""
    try:
        with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
            # Not the caller's folder: a checkout of vLLM or of this package there would be imported.
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        return -1, str(e)
    said = done.stdout if done.stdout.strip() else done.stderr
    return done.returncode, said.decode("utf-8", "replace")


def requirements_of(distribution: str) -> list[str]:
    try:
        return list(metadata.requires(distribution) or [])
    except metadata.PackageNotFoundError:
        return []


def general_plugins() -> dict[str, str]:
    """Entry-point name -> what it points at, of all vLLM plugins in this environment."""
    return {point.name: point.value for point in metadata.entry_points(group="vllm.general_plugins")}


def folder_of(module: str) -> Path | None:
    """Where a top-level module or package is, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def digest_on_disk(symbol: str) -> str:
    """Digest of ``"module:qualname"`` from its file, or ``ABSENT``. Raises ``NoSource``.

    Not :func:`fingerprint.of_symbol`: to find the file of a submodule, Python imports its parents, and
    ``import vllm`` takes seconds and may fail in an environment that needs a doctor.
    """
    module, _, qualname = symbol.partition(":")
    top, *rest = module.split(".")
    folder = folder_of(top)
    if folder is None:
        raise fingerprint.NoSource(f"{top} cannot be found")
    place = folder.joinpath(*rest)
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.is_file():
        raise fingerprint.NoSource(f"{path} does not exist")
    try:
        return fingerprint.of_file(path, qualname)
    except fingerprint.NoSymbol:
        return fingerprint.ABSENT


@dataclass(frozen=True)
class Probes:
    """Everything that looks outside; tests replace single ones."""

    environ: Mapping[str, str]
    run: Callable[..., tuple[int, str]] = run_command
    version: Callable[[str], str | None] = gate.installed_version
    requires: Callable[[str], list[str]] = requirements_of
    which: Callable[[str], str | None] = shutil.which
    folder_of: Callable[[str], Path | None] = folder_of
    plugins: Callable[[], dict[str, str]] = general_plugins
    patches: Callable[[], list[Any]] = load_patches
    digest: Callable[[str], str] = digest_on_disk
    home: Path = Path("~")
    default_nvcc: str = "/usr/local/cuda/bin/nvcc"


# -- facts ---------------------------------------------------------------------------------------


def capability_of(text: str) -> tuple[int, int] | None:
    """(8, 6) from "8.6", "sm_86", "sm86" or "86"; None where it is none."""
    match = re.fullmatch(r"(?:sm_?)?([1-9]\d?)(?:\.(\d)|(\d))[a-z]?", text.strip().lower())
    if match is None:
        return None
    return int(match[1]), int(match[2] or match[3])


def arch(capability: Sequence[int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def gpus_from_smi(text: str) -> list[dict[str, Any]]:
    """The rows of ``nvidia-smi --query-gpu``; rows that it could not fill are left out."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 6 or (capability := capability_of(row[3])) is None or not row[0].isdigit():
            continue
        found.append(
            {
                "index": int(row[0]),
                "uuid": row[1],
                "name": row[2],
                "capability": list(capability),
                "driver": row[4],
                "memory_mib": int(row[5]) if row[5].isdigit() else None,
            }
        )
    return found


def visible(gpus: Sequence[dict[str, Any]], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Those that CUDA_VISIBLE_DEVICES leaves. All of them where its numbers cannot be mapped.

    CUDA numbers GPUs fastest first, nvidia-smi by bus, unless CUDA_DEVICE_ORDER says so; among equal GPUs it
    does not matter.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    if not names or names[0] == "-1":
        return []
    if all(name.isdigit() for name in names):
        same = len({gpu["name"] for gpu in gpus}) < 2
        if same or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return [gpu for gpu in gpus if str(gpu["index"]) in names]
        return list(gpus)
    if any(name.startswith("MIG-") for name in names):  # a part of a GPU; nvidia-smi lists whole ones
        return list(gpus)
    return [gpu for gpu in gpus if any(str(gpu["uuid"] or "").startswith(name) for name in names)]


def _nvcc(probes: Probes) -> dict[str, Any]:
    """nvcc where FlashInfer looks for it, its release, and the two other tools that its JIT needs."""
    environ = probes.environ
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    places = [environ.get("FLASHINFER_NVCC"), f"{home}/bin/nvcc" if home else probes.which("nvcc")]
    path = next((p for p in [*places, probes.default_nvcc] if p and Path(p).exists()), None)
    release = None
    if path is not None:
        _, said = probes.run([path, "--version"])
        match = re.search(r"release (\d+\.\d+), V([\d.]+)", said)
        release = match[2] if match else None
    cxx = probes.which(environ.get("CXX") or "c++") or probes.which("g++")
    return {"nvcc": path, "release": release, "cuda_home": home, "cxx": cxx, "ninja": probes.which("ninja")}


def _smi(probes: Probes) -> list[dict[str, Any]]:
    query = "--query-gpu=index,uuid,name,compute_cap,driver_version,memory.total"
    for command in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):  # WSL does not put it on PATH
        code, said = probes.run([command, query, "--format=csv,noheader,nounits"])
        if code == 0:
            return gpus_from_smi(said)
    return []


def _torch_cuda(folder: Path | None) -> str | None:
    """The CUDA release that torch was built for, from its version.py; importing torch takes seconds."""
    try:
        text = (folder / "version.py").read_text() if folder else ""
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def pin_of(requirements: Sequence[str], distribution: str) -> str | None:
    """The specifier ("==0.6.16.post3") that applies to a distribution here; None if there is none."""
    for text in requirements:
        try:
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, ValueError):
            continue
        if requirement.name.lower().replace("_", "-") == distribution and applies:
            return str(requirement.specifier) or None
    return None


def fits(version: str | None, specifier: str | None) -> bool | None:
    """Whether an installed version is what a specifier wants; None where that cannot be told."""
    if version is None or specifier is None:
        return None
    try:
        return Requirement(f"x{specifier}").specifier.contains(Version(version), prereleases=True)
    except (InvalidRequirement, InvalidVersion):
        return None


def jit_cache(base: Path, version: str | None) -> dict[str, Any]:
    """FlashInfer's JIT cache: <base>/.cache/flashinfer/<version>/<arch>/cached_ops/<module>/<module>.so."""
    root = base / ".cache" / "flashinfer"
    modules: dict[str, int] = {}
    size, others = 0, set()
    try:
        for library in root.glob("*/*/cached_ops/*/*.so"):
            release, folder = library.parts[len(root.parts)], library.parts[len(root.parts) + 1]
            if release != version:
                others.add(release)
                continue
            modules[folder] = modules.get(folder, 0) + 1
            size += library.stat().st_size
    except OSError:
        pass  # a cache that someone clears at this moment, or one that is not ours to read
    there = next((p for p in (root, *root.parents) if p.exists()), Path("/"))
    return {
        "folder": str(root),
        "exists": root.exists(),
        "writable": os.access(there, os.W_OK),
        "modules": modules,
        "size_mib": round(size / 2**20, 1),
        "other_versions": sorted(others),
    }


def prebuilt(probes: Probes) -> list[str]:
    """Names of our prebuilt kernel modules, in the folders where they are looked for."""
    kernels = probes.folder_of("vllm_specpatch.kernels")
    folders = [Path(p) for p in probes.environ.get("VLLM_SPECPATCH_KERNELS", "").split(os.pathsep) if p]
    folders += [kernels / "prebuilt"] if kernels else []
    if (package := probes.folder_of("vllm_specpatch_prebuilt")) is not None:
        folders.append(package)
    found = {lib.stem for folder in folders for lib in folder.glob("*/*.so") if lib.stem == lib.parent.name}
    return sorted(found)


def _patch_facts(patch: Any, probes: Probes, allow_unknown: bool) -> dict[str, Any]:
    """What the import-time gates say, and every source that is not known (gates stop at the first)."""
    refusal = gate.check_versions(patch, probes.version, allow_unknown=allow_unknown)
    installed = all(probes.version(distribution) for distribution in patch.versions)
    unknown: dict[str, str] = {}
    for symbol, accepted in patch.digests.items() if installed else ():
        try:
            digest = probes.digest(symbol)
        except fingerprint.NoSource as e:
            unknown[symbol] = str(e)
        except (OSError, SyntaxError, ValueError) as e:
            unknown[symbol] = f"its file cannot be read ({type(e).__name__})"
        else:
            if digest not in accepted:
                unknown[symbol] = f"sha256 {digest[:12]}…"
    return {
        "name": patch.name,
        "target": patch.target,
        "supported": {d: str(s) for d, s in patch.versions.items()},
        "refusal": None if refusal is None else {**asdict(refusal), "state": refusal.state.value},
        "sources": len(patch.digests),
        "unknown_sources": unknown,
    }


def fresh_process(probes: Probes, targets: Sequence[str], *, vllm: bool, gpus: bool) -> dict[str, Any]:
    """Our status in a process like those that vLLM starts, and the GPUs that torch sees. Never raises."""
    # -P: no folder of the caller's goes on sys.path. Before Python 3.11 the working folder alone must do.
    flags = ["-P"] if sys.version_info >= (3, 11) else []
    asked = json.dumps({"targets": list(targets), "vllm": vllm, "gpus": gpus})
    code, said = probes.run([sys.executable, *flags, "-c", FRESH_PROCESS, asked], FRESH_TIMEOUT_S)
    for line in said.splitlines():
        if line.startswith("RESULT "):
            try:
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
            except ValueError:
                break
    last = next((line for line in reversed(said.splitlines()) if line.strip()), f"exit code {code}")
    return {"error": last.strip()}


def collect(
    probes: Probes, *, gpu: str | None = None, kv_cache_dtype: str = "auto", fresh: bool = True
) -> dict[str, Any]:
    """All facts as plain data. ``gpu`` replaces the machine's; ``fresh`` False leaves vLLM alone."""
    environ = probes.environ
    names = ("vllm", "torch", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "wrapt")
    versions = {name: probes.version(name) for name in names}
    series = probes.patches()
    settings = read_settings(environ, frozenset(patch.name for patch in series))
    gpus = _smi(probes)
    source = "nvidia-smi" if gpus else None
    ask_torch = not gpus and versions["torch"] is not None and gpu is None
    ask_vllm = fresh and versions["vllm"] is not None
    child: dict[str, Any] = {}
    if ask_torch or ask_vllm:
        child = fresh_process(probes, [patch.target for patch in series], vllm=ask_vllm, gpus=ask_torch)
    if not gpus and child.get("gpus"):
        gpus, source = child["gpus"], "torch"
    driver = next((g["driver"] for g in gpus if g["driver"]), None)
    left = visible(gpus, environ) if source == "nvidia-smi" else gpus
    asked = capability_of(gpu) if gpu else None
    if asked is not None:
        gpus = left = [{"index": None, "name": "asked for with --gpu", "capability": list(asked)}]
        source = "--gpu"
    requirements = probes.requires("vllm")
    base = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or probes.home.expanduser())
    return {
        "vllm_specpatch": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "gpus": left,
        "gpus_hidden": len(gpus) - len(left),
        "gpu_source": source,
        "driver": driver,
        "versions": versions,
        "torch_cuda": _torch_cuda(probes.folder_of("torch")),
        "pins": {name: pin_of(requirements, name) for name in ("torch", "flashinfer-python")},
        "toolkit": _nvcc(probes),
        "jit_cache": jit_cache(base, versions["flashinfer-python"]),
        "prebuilt": prebuilt(probes),
        "plugins": probes.plugins(),
        "environment": {
            k: v for k, v in sorted(environ.items()) if k.startswith("VLLM_SPECPATCH") or k in SHOWN_VARIABLES
        },
        "settings": {"mode": settings.mode, "route": settings.route, "error": settings.error},
        "kv_cache_dtype": kv_cache_dtype,
        "patches": [_patch_facts(patch, probes, settings.allow_unknown) for patch in series],
        "vllm_process": child if ask_vllm else {},
    }


SHOWN_VARIABLES = (
    "VLLM_PLUGINS",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_V2_MODEL_RUNNER",
    "CUDA_VISIBLE_DEVICES",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_DISABLE_VERSION_CHECK",
)


# -- what follows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing to know. ``level``: "wrong", "unknown" (cannot tell) or "note"."""

    level: str
    text: str
    next_step: str = ""


def release_at_least(version: str | None, wanted: str) -> bool:
    try:
        return version is not None and gate.release_of(version) >= Version(wanted)
    except InvalidVersion:
        return False


def backends_for(kv_cache_dtype: str, capability: Sequence[int]) -> list[str]:
    """vLLM's backends (ordinary attention, sm_80 and later) that take this KV-cache dtype on this GPU."""
    major, minor = capability
    dtype = kv_cache_dtype.lower().removeprefix("torch.")
    if (major, minor) < (8, 0):
        return []
    if dtype in ("auto", "bfloat16", "float16", "bf16", "half"):
        return ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
    if dtype in FP8:
        found = ["FLASHINFER"]
        # FlashAttention takes e4m3 with FA3 on sm_90 and FA4 on sm_10x; Triton needs fp8 conversions (sm_89).
        if dtype != "fp8_e5m2" and major in (9, 10):
            found.insert(0, "FLASH_ATTN")
        if (major, minor) >= (8, 9):
            found.append("TRITON_ATTN")
        return found
    if dtype.startswith("nvfp4"):
        return ["FLASHINFER"] if major == 10 else []
    return []


def upstream_has_it(vllm: str | None, capability: Sequence[int]) -> bool:
    since = UPSTREAM_SINCE.get(capability[0])
    return since is not None and release_at_least(vllm, since)


def state_of(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The verdict about one patch: from the fresh process where there is one, else from the gates."""
    status = facts["vllm_process"].get("status") or {}
    said: dict[str, Any] | None = (status.get("patches") or {}).get(name)
    patch = next(p for p in facts["patches"] if p["name"] == name)
    if said is not None and said["state"] != "waiting":
        return said
    if patch["refusal"] is not None:
        refusal: dict[str, Any] = patch["refusal"]
        return refusal
    if patch["unknown_sources"]:
        return {"state": "refused", "reason": f"{len(patch['unknown_sources'])} sources are not known ones"}
    if said is not None:
        return said
    return {"state": "fits", "reason": "versions and sources are known ones"}


def examine(facts: Mapping[str, Any]) -> list[Finding]:
    """What is wrong, what cannot be told, and what is worth a note; the order is that of importance."""
    return [
        *_about_vllm(facts),
        *_about_patches(facts),
        *_about_gpus(facts),
        *_about_flashinfer(facts),
        *_about_environment(facts),
    ]


def _about_vllm(facts: Mapping[str, Any]) -> list[Finding]:
    child = facts["vllm_process"]
    if facts["versions"]["vllm"] is None:
        wanted = facts["patches"][0]["supported"].get("vllm", "") if facts["patches"] else ""
        return [
            Finding(
                "unknown",
                f"vLLM is not installed for {facts['executable']}",
                f"run doctor with the Python that runs vLLM (supported: vllm {wanted})",
            )
        ]
    found = []
    error = child.get("error", "")
    if error.startswith("Refused:"):
        text = f"VLLM_SPECPATCH=strict stops vLLM: {error.removeprefix('Refused: ')}"
        found.append(Finding("wrong", text, "correct what it names, or use VLLM_SPECPATCH=auto"))
    elif error:
        found.append(
            Finding("unknown", f"vLLM does not import here: {error}", "make `import vllm` work first")
        )
    doors = (child.get("status") or {}).get("doors")
    off = facts["settings"]["mode"] == "off"
    if doors is not None and not off:
        if not doors:
            found.append(
                Finding(
                    "wrong",
                    "neither door opened in a fresh vLLM process: vLLM runs stock",
                    "install with pip into the environment of vLLM (not with PYTHONPATH or --target)",
                )
            )
        elif "start-up hook" not in doors:
            found.append(
                Finding(
                    "note",
                    "the start-up hook did not run, only vLLM's plugin entry point did",
                    "reinstall with pip, so that vllm_specpatch.pth lies in site-packages",
                )
            )
    for module, why in (child.get("not_imported") or {}).items():
        found.append(Finding("unknown", f"{module} does not import here: {why}"))
    for line in child.get("changed_since") or ():
        text = f"another package patched on top of us: {line.partition(': ')[0]}"
        found.append(Finding("wrong", text, "remove one of the two"))
    return found


def _about_patches(facts: Mapping[str, Any]) -> list[Finding]:
    if facts["versions"]["vllm"] is None:
        return []
    found = []
    if facts["settings"]["error"]:
        return [Finding("wrong", facts["settings"]["error"], "correct the variable")]
    capabilities = [gpu["capability"] for gpu in facts["gpus"]]
    for patch in facts["patches"]:
        said = state_of(facts, patch["name"])
        if said["state"] == "disabled" and facts["settings"]["mode"] != "off":
            found.append(Finding("note", f"{patch['name']} is switched off: {said['reason']}"))
        if said["state"] not in ("refused", "late", "failed"):
            continue
        vllm = facts["versions"]["vllm"]
        if capabilities and all(upstream_has_it(vllm, c) for c in capabilities):
            text = f"{patch['name']} does not apply, and vLLM {vllm} does the same by itself on this GPU"
            found.append(Finding("note", text))
        else:
            text = f"{patch['name']} {said['state']}: {said['reason']}"
            found.append(Finding("wrong", text, said.get("next_step") or ""))
        # With another release all sources differ, which says nothing more than its version does.
        if patch["unknown_sources"] and fits(vllm, patch["supported"].get("vllm")):
            names = "; ".join(f"{symbol} ({why})" for symbol, why in patch["unknown_sources"].items())
            text = f"sources that are not those of the release (another package, or edited files): {names}"
            found.append(Finding("wrong", text, "remove the other patch, or reinstall the release"))
    return found


def _about_gpus(facts: Mapping[str, Any]) -> list[Finding]:
    gpus = facts["gpus"]
    if not gpus:
        hidden = facts["gpus_hidden"]
        text = f"CUDA_VISIBLE_DEVICES hides all {hidden} GPUs" if hidden else "no NVIDIA GPU was found"
        return [
            Finding(
                "unknown", text, "run doctor where vLLM runs, or name the GPU: --gpu sm_86 (image builds)"
            )
        ]
    found = []
    archs = sorted({arch(gpu["capability"]) for gpu in gpus})
    if len(archs) > 1:
        text = f"GPUs of several kinds ({', '.join(archs)}): every engine decides for its own first GPU"
        found.append(Finding("note", text, "put one kind into an engine (CUDA_VISIBLE_DEVICES by UUID)"))
    for capability in sorted({tuple(gpu["capability"]) for gpu in gpus}):
        takes = backends_for(facts["kv_cache_dtype"], capability)
        wanted = f"kv_cache_dtype {facts['kv_cache_dtype']} on {arch(capability)}"
        if capability < (8, 0):
            found.append(Finding("wrong", f"{arch(capability)}: FlashInfer in vLLM needs sm_80 or later"))
        elif not takes:
            found.append(
                Finding("unknown", f"{wanted}: no backend is known to take it", "see `vllm serve --help`")
            )
        elif takes == ["FLASHINFER"]:
            text = f"{wanted} needs FlashInfer: FLASH_ATTN there takes bf16 and fp16 only"
            found.append(Finding("note", text))
        vllm = facts["versions"]["vllm"]
        if capability[0] == 9 and release_at_least(vllm, "0.25.0") and not upstream_has_it(vllm, capability):
            text = "on sm_90 vLLM decodes through XQA where flashinfer-cubin or its download host is at hand"
            step = "--attention-config.use_trtllm_attention=0 selects the native kernels, which are patched"
            found.append(Finding("note", f"{text}; the patch then stands aside", step))
    if (facts["versions"]["torch"] or "").endswith("+cpu") and facts["gpu_source"] == "nvidia-smi":
        found.append(
            Finding("wrong", "torch is a CPU build on a machine with GPUs", "install the CUDA build")
        )
    return found


def _about_flashinfer(facts: Mapping[str, Any]) -> list[Finding]:
    versions = facts["versions"]
    flashinfer = versions["flashinfer-python"]
    if flashinfer is None:
        if versions["vllm"] is None:
            return []
        pin = facts["pins"]["flashinfer-python"]
        return [
            Finding("wrong", "FlashInfer is not installed", f"pip install 'flashinfer-python{pin or ''}'")
        ]
    found = []
    for name, pin in facts["pins"].items():
        if fits(versions[name], pin) is False:
            text = f"{name} {versions[name]} is not what vLLM {versions['vllm']} pins ({pin})"
            found.append(Finding("note", text, f"pip install '{name}{pin}' unless it was changed on purpose"))
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        version = versions[name]
        # The jit-cache wheels carry the CUDA release in their local version: 0.6.16.post3+cu130.
        if version is None or version == flashinfer or version.startswith(f"{flashinfer}+"):
            continue
        ignored = release_at_least(flashinfer, "0.7.0")
        then = "FlashInfer ignores it" if ignored else "FlashInfer refuses to be imported"
        checked = facts["environment"].get("FLASHINFER_DISABLE_VERSION_CHECK")
        found.append(
            Finding(
                "note" if ignored or checked else "wrong",
                f"{name} {version} does not match flashinfer-python {flashinfer}: "
                + ("the check is disabled" if checked else then),
                f"pip install '{name}=={flashinfer}', or uninstall it",
            )
        )
    toolkit, cache = facts["toolkit"], facts["jit_cache"]
    missing = [tool for tool in ("nvcc", "ninja", "cxx") if toolkit[tool] is None]
    if missing and versions["flashinfer-jit-cache"] is None and not cache["modules"]:
        tools = ", ".join("a C++ compiler" if tool == "cxx" else tool for tool in missing)
        text = f"FlashInfer has nothing to run: no {tools}, no flashinfer-jit-cache, and an empty JIT cache"
        step = f"install a CUDA toolkit with nvcc, or 'flashinfer-jit-cache=={flashinfer}'"
        found.append(Finding("wrong" if facts["gpus"] else "note", text, step))
    if not cache["writable"] and toolkit["nvcc"] is not None:
        text = f"the JIT cache {cache['folder']} cannot be written"
        found.append(Finding("note", text, "set FLASHINFER_WORKSPACE_BASE to a folder that can be"))
    cuda, nvcc = facts["torch_cuda"], toolkit["release"]
    if cuda and nvcc and cuda.split(".")[0] != nvcc.split(".")[0]:
        text = (
            f"nvcc is of CUDA {nvcc}, torch was built for CUDA {cuda}: what FlashInfer compiles may not load"
        )
        found.append(Finding("note", text, f"point CUDA_HOME to a CUDA {cuda.split('.')[0]} toolkit"))
    return found


def _about_environment(facts: Mapping[str, Any]) -> list[Finding]:
    environment, found = facts["environment"], []
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        text = f"VLLM_PLUGINS={allowed} leaves out {PLUGIN!r}: fine, the start-up hook does the work"
        found.append(Finding("note", text))
    if facts["settings"]["mode"] == "off":
        found.append(
            Finding("note", "VLLM_SPECPATCH=0: switched off, vLLM runs stock", "unset it to switch on")
        )
    if "VLLM_ATTENTION_BACKEND" in environment and release_at_least(facts["versions"]["vllm"], "0.24.0"):
        text = "VLLM_ATTENTION_BACKEND is set, and vLLM 0.24 and later do not read it"
        found.append(Finding("note", text, "use --attention-backend"))
    ours = ("vllm_specpatch", "vllm.")  # vLLM itself registers some
    others = [name for name, value in facts["plugins"].items() if not value.startswith(ours)]
    if others:
        found.append(Finding("note", f"other vLLM plugins here: {', '.join(sorted(others))}"))
    return found


def advise(facts: Mapping[str, Any]) -> str:
    """One paragraph: FlashInfer patched, FlashInfer as it is, or FLASH_ATTN, and why."""
    vllm, dtype = facts["versions"]["vllm"], facts["kv_cache_dtype"]
    if vllm is None:
        return "There is no vLLM here to give advice about."
    if not facts["gpus"]:
        return (
            "Without a GPU there is nothing to choose between. `vllm-specpatch doctor --gpu sm_86` answers "
            "for a GPU that is not here, and `vllm-specpatch predict --gpu sm_86` asks vLLM itself."
        )
    states = [state_of(facts, patch["name"])["state"] for patch in facts["patches"]]
    patched = (
        bool(states)
        and all(state in ("applied", "waiting", "fits", "not needed") for state in states)
        and facts["settings"]["mode"] != "off"
        and not facts["settings"]["error"]
    )
    capabilities = sorted({tuple(gpu["capability"]) for gpu in facts["gpus"]})
    names = " and ".join(arch(c) for c in capabilities)
    if capabilities[0] < (8, 0):
        return (
            f"FlashInfer and FLASH_ATTN in vLLM {vllm} need sm_80 or later; there is nothing to patch here."
        )
    if all(upstream_has_it(vllm, c) for c in capabilities):
        kernels = any(c[0] != 8 for c in capabilities)
        needs = ", where its XQA or trtllm-gen kernels are at hand" if kernels else ", for causal drafters"
        then = " (where they are not, the patch steps in)" if kernels and patched else ""
        return (
            f"Keep FlashInfer as it is: vLLM {vllm} itself keeps FULL CUDA graphs for speculative decoding "
            f"on {names}{needs}{then}. Confirm it after the start with `vllm-specpatch check-log`."
        )
    takes = {c: backends_for(dtype, c) for c in capabilities}
    without = [c for c in capabilities if "FLASH_ATTN" not in takes[c]]
    if without and all("FLASHINFER" in names for names in takes.values()):
        where = " and ".join(arch(c) for c in without)
        reason = f"FLASH_ATTN does not take a KV cache in {dtype} on {where}"
        others = [name for name in takes[without[0]] if name != "FLASHINFER"]
        reason += f" ({', '.join(others)} would)" if others else ", nor does any other backend of vLLM"
        if patched:
            return (
                f"Keep FlashInfer, patched: {reason}, and stock FlashInfer would give up FULL CUDA graphs. "
                "FLASH_ATTN would keep them as well, but with a bf16 or fp16 KV cache of twice the size. "
                "Confirm it after the start with `vllm-specpatch check-log`."
            )
        return (
            f"Get the patch to apply (see above): {reason}. Until then FLASH_ATTN with a bf16 or fp16 KV "
            f"cache keeps FULL CUDA graphs, at twice the KV memory: {SWITCH} and --kv-cache-dtype auto."
        )
    if not without:
        cache = "this KV cache" if dtype == "auto" else f"a KV cache in {dtype}"
        reason = f"it takes {cache} on {names} and keeps FULL CUDA graphs without any patch: {SWITCH}"
        if patched:
            return (
                "Keep FlashInfer, patched: on the one GPU measured (H200, route spec_mask) a step took 0.8 "
                "to 0.9 times that of FLASH_ATTN (FA2) at 1024 tokens and 0.4 to 0.5 times at 32768. "
                f"FLASH_ATTN is the other way: {reason}. `vllm-specpatch bench --backends "
                "patched,flash_attn` compares them on your model, `vllm-specpatch check-log` their logs."
            )
        return f"Switch to FLASH_ATTN: {reason}. FlashInfer loses them, since the patch is not on."
    known = " or ".join(takes[capabilities[0]]) or "no backend that is known here"
    return (
        f"A KV cache in {dtype} on {names} is taken by {known}. `vllm-specpatch predict` asks vLLM what "
        "FlashInfer does with it."
    )


def exit_code(findings: Sequence[Finding]) -> int:
    levels = {finding.level for finding in findings}
    return WRONG if "wrong" in levels else CANNOT_TELL if "unknown" in levels else GOOD


# -- rendering -----------------------------------------------------------------------------------


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) in the order in which a person would ask."""
    versions, toolkit, cache = facts["versions"], facts["toolkit"], facts["jit_cache"]
    table = [
        ("vllm-specpatch", f"{facts['vllm_specpatch']}, Python {facts['python']} ({facts['executable']})")
    ]
    kinds: dict[str, list[str]] = {}
    for gpu in facts["gpus"]:
        memory = f", {gpu['memory_mib'] / 1024:.0f} GiB" if gpu.get("memory_mib") else ""
        kinds.setdefault(f"{arch(gpu['capability'])}, {gpu['name']}{memory}", []).append(str(gpu["index"]))
    for kind, indices in kinds.items():
        count = f"{len(indices)} x " if len(indices) > 1 else ""
        where = f" (index {', '.join(indices)})" if len(kinds) > 1 else ""
        table.append(("GPU" if len(table) == 1 else "", f"{count}{kind}{where}"))
    if not facts["gpus"]:
        table.append(("GPU", "none visible" if facts["gpus_hidden"] else "none found"))
    elif facts["gpus_hidden"]:
        table.append(("", f"{facts['gpus_hidden']} more hidden by CUDA_VISIBLE_DEVICES"))
    table.append(("driver", facts["driver"] or "-"))
    nvcc = f"{toolkit['release'] or 'release unknown'} ({toolkit['nvcc']})" if toolkit["nvcc"] else "none"
    tools = f"C++ compiler {toolkit['cxx'] or 'none'}, ninja {toolkit['ninja'] or 'none'}"
    table.append(("CUDA toolkit (nvcc)", f"{nvcc}; {tools}"))
    cuda = f" for CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else ""
    table.append(
        ("torch", f"{versions['torch']}{cuda}{_pinned(facts, 'torch')}" if versions["torch"] else "none")
    )
    table.append(("vLLM", versions["vllm"] or "not installed"))
    flashinfer = versions["flashinfer-python"]
    table.append(
        ("FlashInfer", f"{flashinfer}{_pinned(facts, 'flashinfer-python')}" if flashinfer else "none")
    )
    table.append(("flashinfer-cubin", versions["flashinfer-cubin"] or "not installed"))
    table.append(("flashinfer-jit-cache", versions["flashinfer-jit-cache"] or "not installed"))
    modules = ", ".join(f"{n} for {folder}" for folder, n in sorted(cache["modules"].items()))
    state = (
        f"{modules} modules, {cache['size_mib']} MiB"
        if modules
        else "empty"
        if cache["exists"]
        else "not there"
    )
    more = f"; other versions: {', '.join(cache['other_versions'])}" if cache["other_versions"] else ""
    writable = "" if cache["writable"] else ", read-only"
    table.append(("FlashInfer JIT cache", f"{state}{writable} ({cache['folder']}){more}"))
    table.append(("prebuilt kernels", ", ".join(facts["prebuilt"]) or "none"))
    for i, (name, value) in enumerate(facts["environment"].items()):
        table.append(("variables" if i == 0 else "", f"{name}={value}"))
    status = facts["vllm_process"].get("status")
    if status is not None:
        doors = list(dict.fromkeys(status["doors"]))
        table.append(("fresh vLLM process", " and ".join(doors) + " opened" if doors else "no door opened"))
    for patch in facts["patches"] if versions["vllm"] else ():
        said = state_of(facts, patch["name"])
        detail = [said["reason"]]
        detail += [f"{key} {said[key]}" for key in ("wanted", "found") if said.get(key)]
        table.append(("patch", f"{patch['name']}: {said['state']} ({'; '.join(detail)})"))
        known = patch["sources"] - len(patch["unknown_sources"])
        table.append(("sources", f"{known} of {patch['sources']} functions are as known"))
    dtype = facts["kv_cache_dtype"]
    takes = {arch(gpu["capability"]): backends_for(dtype, gpu["capability"]) for gpu in facts["gpus"]}
    dtype += " (as the model, unless its checkpoint asks for fp8)" if dtype == "auto" else ""
    for i, (name, names) in enumerate(takes.items()):
        text = f"{dtype} on {name}: {', '.join(names) or 'no backend known'}"
        table.append(("KV cache" if i == 0 else "", text))
    return table


def _pinned(facts: Mapping[str, Any], name: str) -> str:
    pin = facts["pins"][name]
    verdict = fits(facts["versions"][name], pin)
    return "" if verdict is None else f" (vLLM pins {pin}: {'matches' if verdict else 'DIFFERS'})"


LEVELS = {"wrong": "WRONG", "unknown": "CANNOT TELL", "note": "note"}


def render(facts: Mapping[str, Any], findings: Sequence[Finding], advice: str) -> str:
    lines = []
    for label, text in rows(facts):
        indent = " " * (LABEL + 1)
        lines += textwrap.wrap(
            f"{label:{LABEL}} {text}", WIDTH, subsequent_indent=indent, break_on_hyphens=False
        )
    lines.append("")
    order = list(LEVELS)
    for finding in sorted(findings, key=lambda f: order.index(f.level)):
        head = f"{LEVELS[finding.level]}: {finding.text}"
        lines += textwrap.wrap(head, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        if finding.next_step:
            step = f"next step: {finding.next_step}"
            lines += textwrap.wrap(
                step, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    if not findings:
        lines.append("nothing is wrong")
    lines += ["", *textwrap.wrap(f"Advice: {advice}", WIDTH, break_on_hyphens=False)]
    return "\n".join(lines)


# -- the command ---------------------------------------------------------------------------------


def doctor(arguments: argparse.Namespace) -> int:
    if arguments.gpu is not None and capability_of(arguments.gpu) is None:
        print(f"vllm-specpatch doctor: --gpu {arguments.gpu!r} is not like sm_86 or 8.6", file=sys.stderr)
        return CANNOT_TELL
    facts = collect(
        Probes(os.environ),
        gpu=arguments.gpu,
        kv_cache_dtype=arguments.kv_cache_dtype,
        fresh=not arguments.quick,
    )
    findings, advice = examine(facts), advise(facts)
    code = exit_code(findings)
    if arguments.json:
        verdict = {GOOD: "good", WRONG: "wrong", CANNOT_TELL: "cannot tell"}[code]
        report = {"verdict": verdict, "findings": [asdict(f) for f in findings], "advice": advice}
        print(json.dumps({**report, "facts": facts}, indent=2))
    else:
        print(render(facts, findings, advice))
    return code


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "doctor",
        help="this machine and environment: what is installed, whether the patches apply, what to do",
        description="Looks at GPUs, driver, CUDA toolkit, torch, vLLM and FlashInfer, starts a fresh Python "
        "that imports vLLM to see what the patches do there, and gives advice. Exit code 0: all is well, 1: "
        "something is wrong, 2: cannot tell.",
    )
    p.add_argument("--gpu", help="judge for this capability, for example sm_86, instead of the GPUs here")
    p.add_argument(
        "--kv-cache-dtype", default="auto", help="the KV cache you want, as vLLM's option (default auto)"
    )
    p.add_argument("--quick", action="store_true", help="do not start vLLM; judge by versions and files only")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=doctor)
