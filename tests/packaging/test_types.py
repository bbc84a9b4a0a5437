"""mypy over the packages as they are installed: `patches` and `kernels` inside `vllm_specpatch`."""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_types(tmp_path):
    # The editable install serves the subpackages through an import hook, which mypy does not follow.
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_specpatch", tree / "vllm_specpatch", ignore=ignore)
    for name in ("patches", "kernels"):
        shutil.copytree(ROOT / name, tree / "vllm_specpatch" / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tree)
    cache = str(tmp_path / "cache")
    command = [sys.executable, "-P", "-m", "mypy", "-p", "vllm_specpatch", "--cache-dir", cache]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
