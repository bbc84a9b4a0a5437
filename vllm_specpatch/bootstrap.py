"""The start-up door: runs in *every* Python of the environment, so it must be cheap and silent.

site.py calls :func:`watch` (through ``vllm_specpatch.pth`` or ``vllm_specpatch.start``). It puts one finder
in front of ``sys.meta_path``; when ``vllm`` is imported the finder removes itself and hands over to
``vllm_specpatch.hooks``. Until then nothing but the standard library is loaded: no wrapt, no packaging.

Without this door the package would be lost whenever ``VLLM_PLUGINS`` names other plugins only, since vLLM
then skips our entry point without a word.
"""

import os
import sys


class VllmWatcher:
    """A meta path finder that finds nothing; it only notices that ``vllm`` is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            self.open_door()
        return None

    def open_door(self):
        try:
            sys.meta_path.remove(self)
        except ValueError:
            pass  # another thread was first
        if os.environ.get("VLLM_SPECPATCH", "").strip().lower() in ("0", "off"):
            return
        from .hooks import activate

        activate("start-up hook")  # raises only in strict mode


def watch() -> None:
    """Arms the door. Called once by site.py; a second call does nothing. Never raises.

    Does nothing under ``python -I`` or ``-E``: a Python that was told to ignore its environment is not
    changed by it.
    """
    if sys.flags.isolated or sys.flags.ignore_environment:
        return
    if not any(isinstance(finder, VllmWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, VllmWatcher())
