"""Makes the kernels of this checkout importable as ``vllm_specpatch.kernels``.

The scripts here run on machines where the project is a copied folder and nothing is installed. An
installed project wins.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_checkout() -> None:
    """Registers the package unless the project is installed."""
    try:
        # Started from the root, the checkout's own vllm_specpatch/ may be found: it has no kernels
        # unless the project is installed.
        importlib.import_module("vllm_specpatch.kernels")
    except ImportError:
        sys.modules["vllm_specpatch"] = types.ModuleType("vllm_specpatch")
        sys.modules["vllm_specpatch"].__path__ = [str(ROOT / "vllm_specpatch")]
        name, folder = "vllm_specpatch.kernels", ROOT / "kernels"
        found = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        found.loader.exec_module(module)
