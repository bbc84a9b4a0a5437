"""A newcomer's path: a fresh environment and a clone, the README's own commands, and what it says they print.

The one difference to a newcomer is the network: vLLM and the other requirements are linked in from the
environment that runs the tests, and pip may not fetch anything (its index and its isolated build are off).
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import readme

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


TEXT = readme.PATH.read_text()
OURS = ("vllm_specpatch", "__editable__", "vllm-specpatch")


class Newcomer:
    def __init__(self, folder, environment):
        self.venv, self.clone, self.elsewhere = folder / "venv", folder / "clone", folder / "elsewhere"
        subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True)
        self.site = next((self.venv / "lib").glob("python*")) / "site-packages"
        # A venv brings the setuptools of its Python, which may be older than the build wants; an isolated
        # build would not see it.
        for path in [*self.site.glob("setuptools*"), *self.site.glob("_distutils_hack")]:
            shutil.rmtree(path)
        # In a folder of their own: pip must find the requirements installed and leave them alone.
        deps = folder / "deps"
        deps.mkdir()
        for path in pathlib.Path(sys.prefix).glob("lib/python*/site-packages/*"):
            known = (self.site / path.name).exists() or path.suffix in (".pth", ".start")
            if not known and not path.name.startswith(OURS):
                (deps / path.name).symlink_to(path)
        (self.site / "deps.pth").write_text(f"{deps}\n")
        skip = shutil.ignore_patterns("__pycache__", ".git", ".gpu", "*.egg-info", "build", "shared")
        shutil.copytree(ROOT, self.clone, ignore=skip)
        self.elsewhere.mkdir()
        # Younger than the pins of the clone, so that make takes the environment for made.
        (self.venv / ".complete").touch()
        self.environment = {
            **environment,
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{environment['PATH']}",
            "VENV": str(self.venv),
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def types(self, command, where):
        """What a command of the README prints. It must be there word by word, and succeed."""
        assert any(command in line for line in [*readme.code_lines(TEXT), TEXT]), (
            f"not in the README: {command}"
        )
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=where,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def ours(self):
        return sorted(path.name for path in self.site.iterdir() if path.name.startswith(OURS))


@pytest.fixture(scope="module")
def newcomer(clean_environment, tmp_path_factory):
    if shutil.which("make") is None or shutil.which("bash") is None:
        pytest.skip("the README asks for make, and its commands for a shell")
    return Newcomer(tmp_path_factory.mktemp("newcomer"), clean_environment())


def test_from_a_clone_to_uninstalled(newcomer):
    assert newcomer.ours() == []
    shown = {console.command.partition("#")[0].strip(): console for console in readme.consoles(TEXT)}

    # "Try it without a GPU": make runs the command that the README shows with its output.
    output = newcomer.types("make demo", newcomer.clone)
    recipe = (newcomer.clone / "Makefile").read_text().partition("\ndemo: env\n\t@$(BIN)/")[2].splitlines()[0]
    demo = shown.pop(recipe)
    assert len(demo.expected) >= 4
    assert demo.missing(output) is None, f"{demo.missing(output)!r} is not in:\n{output}"

    # "Install", from the clone.
    newcomer.types("pip install .", newcomer.clone)
    assert not [name for name in newcomer.ours() if name.startswith("__editable__")]
    assert {"vllm_specpatch", "vllm_specpatch.pth"} <= set(newcomer.ours())

    # Everything else that the README shows with a prompt, in its order; the last one removes the package.
    assert list(shown)[-1].startswith("pip uninstall")
    for console in shown.values():
        output = newcomer.types(console.command, newcomer.elsewhere)
        missing = console.missing(output)
        assert missing is None, f"{console.command}: {missing!r} is not in:\n{output}"
    assert newcomer.ours() == []
    python = [newcomer.venv / "bin" / "python", "-c", "pass"]
    assert subprocess.run(python, capture_output=True, text=True).stderr == ""


def test_expected_lines_are_matched_in_order():
    console = readme.Console("x", ["a ... c", "d"])
    assert console.missing("a b c\nother\nd\n") is None
    assert console.missing("d\na b c\n") == "d"
    assert console.missing("a c\n") == "a ... c"
    blocks = readme.consoles("text\n\n    $ one\n    out\n    $ two\n\n    no command\n")
    assert [(b.command, b.expected) for b in blocks] == [("one", ["out"]), ("two", [])]
