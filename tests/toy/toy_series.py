"""Two patches of one group on toy_target, steered by environment variables so that processes can be told."""

import os

from vllm_specpatch import fingerprint
from vllm_specpatch.patch import Edit, Entry, Patch

SERIES = (
    Entry("toy-gate", "toy_series_gate", "toy_target.core", group="toy"),
    Entry("toy-build", "toy_series_build", "toy_target.core", group="toy"),
)


def mark(name):
    def wrapper(wrapped, instance, args, kwargs):
        return (name, wrapped(*args, **kwargs))

    return wrapper


def make(name, edits, symbols):
    wrong = os.environ.get("TOY_WRONG_DIGEST")
    digests = {
        f"toy_target.core:{s}": {"0" * 64 if wrong == s else fingerprint.of_file(toy_file(), s): "toy 1"}
        for s in symbols
    }
    versions = {"pytest": os.environ.get("TOY_PYTEST", ">=1")}
    return Patch(name, "toy_target.core", versions, digests, edits, "A toy.")


def toy_file():
    import importlib.util

    return importlib.util.find_spec("toy_target.core").origin


def gate_edits(module, context):
    return [Edit("Builder", "gate", mark("patched")), Edit("Builder", "inherited", mark("patched"))]


def build_edits(module, context):
    second = os.environ.get("TOY_SECOND_EDIT", "plan")
    return [Edit("Builder", "build", mark("patched")), Edit("", second, mark("patched"))]
