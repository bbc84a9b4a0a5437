"""PEP 517 build backend: setuptools, plus the two start-up files at the top of the wheel.

setuptools has no way to put a ``.pth`` file into site-packages without a ``setup.py``. Wheels (normal and
editable) are built by setuptools and then gain

* ``vllm_specpatch.pth``: read by site.py of every Python up to 3.17;
* ``vllm_specpatch.start``: the entry point form that replaces it (PEP 829, Python 3.15).

Both are listed in RECORD, so ``pip uninstall`` removes them.
"""

import base64
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other hooks are setuptools' own

STARTUP_FILES = ("vllm_specpatch.pth", "vllm_specpatch.start")


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def _add_startup_files(wheel: Path) -> None:
    here = Path(__file__).parent
    files = {name: (here / name).read_bytes() for name in STARTUP_FILES}
    rebuilt = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(rebuilt, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = "".join(_record_line(n, d) for n, d in files.items()).encode() + data
            new.writestr(item, data)
        for name, data in files.items():
            new.writestr(zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0)), data)
    os.replace(rebuilt, wheel)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # A stale build/lib would put patches that were deleted since back into the wheel.
    shutil.rmtree("build/lib", ignore_errors=True)
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _add_startup_files(Path(wheel_directory) / name)
    return name


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_startup_files(Path(wheel_directory) / name)
    return name
