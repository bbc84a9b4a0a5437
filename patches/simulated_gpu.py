"""A CUDA platform of any compute capability on a machine with no GPU, so that vLLM's own gates can be asked.

Everything that decides stays vLLM's code: platform detection, ``EngineArgs`` to ``VllmConfig``, the backend
classes. Only the layer below is made up, before ``vllm`` is imported: NVML (one device), the compiled
extension modules that are imported unguarded, a few ``torch.cuda`` queries, and page-locked memory (off).
Nothing can be computed on the simulated device.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import types
from typing import Any

MEMORY_GIB = 24
SM_COUNT = 84  # of an RTX A6000 or 3090-class part; only shapes of plans depend on it

#: Compiled modules that vLLM imports without a guard somewhere on the way to the attention backends.
EXTENSION_MODULES = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)


def parse_capability(text: str) -> tuple[int, int]:
    """``sm_86``, ``86``, ``8.6`` or ``sm_90a`` as (major, minor). Raises ``ValueError``."""
    digits = text.strip().lower().removeprefix("sm_").removeprefix("sm").rstrip("af")
    major, _, minor = digits.partition(".") if "." in digits else (digits[:-1], "", digits[-1:])
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"{text!r} is no compute capability (examples: sm_86, 8.9, sm_120)")
    return int(major), int(minor)


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the made-up modules.

    A finder and not entries in ``sys.modules``: ``import a.b.c`` needs the real parent package ``a.b`` to
    be imported and to get the attribute.
    """

    def __init__(self, modules: dict[str, types.ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name in self.modules else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _nvml(major: int, minor: int) -> types.ModuleType:
    nvml = types.ModuleType("vllm.third_party.pynvml")
    memory = types.SimpleNamespace(total=MEMORY_GIB << 30, free=MEMORY_GIB << 30, used=0)
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetHandleByUUID": 0,
        "nvmlDeviceGetIndex": 0,
        "nvmlDeviceGetUUID": "GPU-simulated",
        "nvmlDeviceGetName": f"simulated sm_{major}{minor}",
        "nvmlDeviceGetCudaComputeCapability": (major, minor),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetP2PStatus": 1,
    }
    for name, answer in answers.items():
        setattr(nvml, name, lambda *_a, _answer=answer, **_k: _answer)
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    nvml.NVML_P2P_CAPS_INDEX_NVLINK = 2  # type: ignore[attr-defined]
    return nvml


def install(major: int, minor: int, cubins: bool | None = None) -> None:
    """Call once, before the first ``import vllm``. ``cubins``: reachable, not reachable, or ask (None)."""
    if "vllm" in sys.modules:
        raise RuntimeError("a GPU can only be simulated before vllm is imported")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    os.environ.pop("VLLM_HAS_FLASHINFER_CUBIN", None)
    if cubins:
        os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    modules = {f"vllm.{name}": types.ModuleType(f"vllm.{name}") for name in EXTENSION_MODULES}
    modules["vllm.third_party.pynvml"] = _nvml(major, minor)
    sys.meta_path.insert(0, _Modules(modules))
    _simulate_torch(major, minor)
    _finish_vllm(cubins)


def _simulate_torch(major: int, minor: int) -> None:
    import torch
    from torch._ops import _OpNamespace

    properties = types.SimpleNamespace(
        major=major,
        minor=minor,
        name=f"simulated sm_{major}{minor}",
        total_memory=MEMORY_GIB << 30,
        multi_processor_count=SM_COUNT,
        is_integrated=False,
        shared_memory_per_multiprocessor=102400,
        shared_memory_per_block_optin=101376,
        warp_size=32,
        uuid="GPU-simulated",
    )
    torch.cuda.get_device_capability = lambda *a, **k: (major, minor)
    torch.cuda.get_device_properties = lambda *a, **k: properties
    torch.cuda.get_device_name = lambda *a, **k: properties.name
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"

    # "Does this build support X?" operators of the compiled library are called while layers are imported.
    find_op = _OpNamespace.__getattr__

    def find_op_or_no(self: Any, op: str) -> Any:
        try:
            return find_op(self, op)
        except AttributeError:
            if self.name in ("_C", "_moe_C") and ("supports" in op or "supported" in op):
                return lambda *a, **k: False
            raise

    _OpNamespace.__getattr__ = find_op_or_no


def _finish_vllm(cubins: bool | None) -> None:
    """The parts that need vLLM: its own platform detection must have chosen CUDA by now."""
    import vllm.platforms as platforms

    platform = platforms.current_platform
    if not platform.is_cuda():
        raise RuntimeError(f"vLLM did not choose its CUDA platform but {type(platform).__name__}")
    type(platform).is_pin_memory_available = classmethod(lambda cls: False)
    import vllm.utils.torch_utils as torch_utils

    if hasattr(torch_utils, "PIN_MEMORY"):
        torch_utils.PIN_MEMORY = False
    platform_utils = sys.modules.get("vllm.utils.platform_utils")
    forget = getattr(getattr(platform_utils, "is_pin_memory_available", None), "cache_clear", None)
    if forget is not None:
        forget()
    import vllm.model_executor.models.registry as registry

    if hasattr(registry, "_run_in_subprocess"):
        # Model inspection in a child process costs 15 s of imports; it only keeps CUDA uninitialised.
        registry._run_in_subprocess = lambda function: function()
    if cubins is False:
        import vllm.utils.flashinfer as flashinfer_utils

        flashinfer_utils.has_nvidia_artifactory = lambda: False
