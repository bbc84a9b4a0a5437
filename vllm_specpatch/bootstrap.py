"""The start-up door: runs in *every* Python of the environment, so it must be cheap and silent.

site.py calls :func:`watch` (through ``vllm_specpatch.pth`` or ``vllm_specpatch.start``). It puts one finder
in front of ``sys.meta_path``; when ``vllm`` is first looked for, the finder hands over to
``vllm_specpatch.hooks``. Until then nothing but the standard library is loaded: no wrapt, no packaging.

Without this door the package would be lost whenever ``VLLM_PLUGINS`` names other plugins only, since vLLM
then skips our entry point without a word.
"""

import os
import sys

_said: set[str] = set()


class VllmWatcher:
    """A meta path finder that finds nothing; it only notices that ``vllm`` is about to be imported.

    It stays where it is: Python is walking through ``sys.meta_path`` when it calls a finder, and one that
    removes itself then makes it skip the next one, perhaps the one that knows where vLLM is.
    """

    def __init__(self):
        self.opened = False

    def find_spec(self, name, path=None, target=None):
        if name == "vllm" and not self.opened:
            self.opened = True  # first: what is imported below asks us too
            try:
                open_door("start-up hook")
            except BaseException:
                self.opened = False  # strict: the next import of vLLM must not pass either
                raise
        return None


def open_door(door):
    """Arms the hooks unless the package is off, or says why it cannot. Raises in strict mode only."""
    mode = os.environ.get("VLLM_SPECPATCH", "").strip().lower()
    if mode in ("0", "off"):
        return
    try:
        from .hooks import activate
    except Exception as error:
        # wrapt is gone, or files of ours: whoever imports vLLM must not pay for it.
        say_once(
            f"vllm-specpatch cannot start ({type(error).__name__}: {error}); vLLM runs stock; next step: "
            "pip install --force-reinstall vllm-specpatch, or uninstall it"
        )
        if mode == "strict":
            raise
        return
    activate(door)


def say_once(line):
    """On stderr: there is no logger yet."""
    if line not in _said and sys.stderr is not None:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)


def watch() -> None:
    """Arms the door. Called once by site.py; a second call does nothing. Never raises.

    Does nothing under ``python -I`` or ``-E``: a Python that was told to ignore its environment is not
    changed by it.
    """
    if sys.flags.isolated or sys.flags.ignore_environment:
        return
    if not any(isinstance(finder, VllmWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, VllmWatcher())
