"""The two doors: when they open, when they stay shut, and what they cost a Python that never imports vLLM."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

import pytest

ARMED = """
import json, sys
print(json.dumps({
    "armed": [type(f).__name__ for f in sys.meta_path].count("VllmWatcher"),
    "loaded": sorted(m for m in sys.modules if m.split(".")[0] in
                     ("vllm_specpatch", "wrapt", "packaging", "torch", "vllm", "flashinfer", "json_")),
}))
"""


def test_the_start_up_door_arms_with_the_standard_library_only(python):
    result = python(ARMED)
    assert result["armed"] == 1
    assert result["loaded"] == ["vllm_specpatch", "vllm_specpatch.bootstrap"]


def test_importing_the_package_imports_neither_torch_nor_vllm_nor_wrapt(python):
    result = python("import vllm_specpatch, json\n" + ARMED)
    assert result["loaded"] == ["vllm_specpatch", "vllm_specpatch.bootstrap"]


# A vLLM that is found by a finder behind ours, as that of an editable install may be.
EDITABLE = """
import importlib.util, json, sys
class Editable:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "vllm" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.found_by = "editable"
assert type(sys.meta_path[0]).__name__ == "VllmWatcher"
sys.meta_path.insert(1, Editable())
"""


@pytest.mark.parametrize("mode", ["auto", "0", "no such mode"])
def test_no_finder_behind_the_door_is_passed_over(python, mode):
    assert (
        python(EDITABLE + "import vllm; print(json.dumps(vllm.found_by))", VLLM_SPECPATCH=mode) == "editable"
    )


@pytest.mark.parametrize("missing", ["wrapt", "vllm_specpatch.hooks"])
def test_a_damaged_installation_leaves_vllm_stock_and_says_so_once(python, missing):
    code = f"""{EDITABLE}
import vllm_specpatch
sys.modules[{missing!r}] = None
for attempt in range(2):
    try:
        import vllm
        vllm_specpatch.register()
        print("served")
    except ImportError as e:
        print("refused")
"""
    done = python(code, check=False)
    assert done.stdout.split() == ["served", "served"] and done.stderr.count("\n") == 1
    assert "vllm-specpatch cannot start (ModuleNotFoundError: " in done.stderr
    assert missing in done.stderr and "; vLLM runs stock; next step: " in done.stderr
    done = python(code, check=False, VLLM_SPECPATCH="strict")
    assert done.stdout.split() == ["refused", "refused"]
    done = python(code, check=False, VLLM_SPECPATCH="0")
    assert done.stdout.split() == ["served", "served"] and done.stderr == ""


def test_off_loads_nothing_at_the_entry_point_either(python):
    code = "import vllm_specpatch; vllm_specpatch.register()\n" + ARMED
    assert python(code, VLLM_SPECPATCH="off")["loaded"] == ["vllm_specpatch", "vllm_specpatch.bootstrap"]


def test_arming_twice_arms_once(python):
    assert python("from vllm_specpatch.bootstrap import watch; watch(); watch()\n" + ARMED)["armed"] == 1


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_no_door_opens_in_an_isolated_python(python, flag):
    assert python(ARMED, flag)["armed"] == 0


@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_the_entry_point_stays_shut_in_an_isolated_python(python, flag):
    result = python(
        """
        import json, vllm_specpatch
        vllm_specpatch.register()
        print(json.dumps(vllm_specpatch.status()))
        """,
        flag,
    )
    [patch] = result["patches"].values()
    assert patch["state"] == "disabled" and "-I or -E" in patch["reason"]


def test_the_entry_point_may_be_called_twice(python):
    result = python(
        """
        import json, vllm_specpatch
        vllm_specpatch.register(); vllm_specpatch.register()
        print(json.dumps(vllm_specpatch.status()))
        """
    )
    assert result["doors"] == ["vllm.general_plugins entry point"] * 2
    assert [p["state"] for p in result["patches"].values()] == ["waiting"]


def test_the_entry_point_is_registered_by_name():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [p.value for p in points if p.name == "specpatch"] == ["vllm_specpatch:register"]


def test_a_defect_of_ours_does_not_break_the_host(python):
    result = python(
        """
        import json, vllm_specpatch.hooks as hooks
        hooks.engine.series_module = "no_such_series"
        import vllm_specpatch
        vllm_specpatch.register()
        print(json.dumps("alive"))
        """
    )
    assert result == "alive"


def test_the_start_up_files_say_the_same():
    folder = pathlib.Path(__file__).parent.parent.parent / "vllm_specpatch" / "startup"
    module, _, function = (folder / "vllm_specpatch.start").read_text().strip().partition(":")
    line = (folder / "vllm_specpatch.pth").read_text()
    assert line.count("\n") == 1 and line.startswith("import ")
    assert f"from {module} import {function}" in line and "except Exception" in line


@pytest.fixture(scope="module")
def readonly_copy(tmp_path_factory):
    """A folder with the installed form of the package, mounted read-only, without .pyc files."""
    root = pathlib.Path(__file__).parent.parent.parent
    folder = tmp_path_factory.mktemp("readonly")
    package = folder / "vllm_specpatch"
    shutil.copytree(root / "vllm_specpatch", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("patches", "kernels"):
        shutil.copytree(root / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vllm_specpatch.pth").write_text((package / "startup" / "vllm_specpatch.pth").read_text())
    return folder


def test_a_read_only_site_packages_works(readonly_copy, python):
    """Root may write anywhere, so a permission bit proves nothing: the folder is bound read-only."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here (needs root)")
    code = f"""
import site, sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "VllmWatcher"]
sys.path.insert(0, {str(readonly_copy)!r})
for name in [m for m in sys.modules if m.startswith("vllm_specpatch")]: del sys.modules[name]
site.addsitedir({str(readonly_copy)!r})
import vllm_specpatch
assert vllm_specpatch.__file__.startswith({str(readonly_copy)!r}), vllm_specpatch.__file__
vllm_specpatch.register()
assert [p["state"] for p in vllm_specpatch.status()["patches"].values()] == ["waiting"]
try:
    open({str(readonly_copy / "probe")!r}, "w")
except OSError as e:
    print("read-only:", e.errno)
"""
    folder = f'"{readonly_copy}"'
    script = f'mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "read-only: 30" in done.stdout
