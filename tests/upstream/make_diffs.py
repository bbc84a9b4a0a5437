"""Writes patches/diffs/VERSION.patch for every release of versions.toml. Run as a program.

For those who build vLLM from source or bake images, in whose Python no start-up line runs. Applied with
``patch -p1`` in the folder that holds ``vllm/``, a diff makes the module itself ask to be patched. What is
then decided and done is the same, by the same code: vllm-specpatch must be importable, digests are checked
(the lines stand behind everything that has one), and the environment variables work.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from vllm_specpatch.patches import SERIES

# As a program under PYTHONSAFEPATH, which `make` sets, it would not find its neighbour.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import releases

DIFFS = Path(__file__).resolve().parent.parent.parent / "patches" / "diffs"
LINES = """

# vllm-specpatch (see `vllm-specpatch list`). Last in this file: it wraps what is defined above.
from vllm_specpatch.hooks import apply_in_source as _specpatch_apply  # noqa: E402

_specpatch_apply(__name__)
"""


def diff(root: Path) -> str:
    """The unified diff for the sources of one release, unpacked in ``root``."""
    found = []
    for target in dict.fromkeys(entry.target for entry in SERIES):
        path = target.replace(".", "/") + ".py"
        before = (root / path).read_text()
        after = before.rstrip("\n") + "\n" + LINES
        found += difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
    return "".join(found)


if __name__ == "__main__":
    DIFFS.mkdir(exist_ok=True)
    for release in releases.table():
        (DIFFS / f"{release}.patch").write_text(diff(releases.unpacked("vllm", release)))
