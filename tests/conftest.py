"""Fresh processes for everything that is about imports; markers; one place that knows where the toys are."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

# `make` sets it for pytest itself; the processes that tests start must be like a user's.
os.environ.pop("PYTHONSAFEPATH", None)
# Tensors here are tiny. Two processes with a pool of OpenMP threads each spin at every barrier when they
# share two cores: 2.5 times the time on an idle machine, and over 300 s for 15 on a busy one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOY = ROOT / "tests" / "toy"


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without our settings, VLLM_PLUGINS and PYTHONPATH, plus ``changes``."""
    dropped = ("VLLM_SPECPATCH", "VLLM_PLUGINS", "PYTHONPATH", "TOY_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**env, **changes}


@pytest.fixture(scope="session", name="clean_environment")
def clean_environment_fixture():
    return clean_environment


@pytest.fixture
def python(tmp_path):
    """Runs code in a fresh Python outside the checkout; returns what it printed last, as JSON."""

    def run(code: str, *flags: str, python: str = sys.executable, check: bool = True, **env: str):
        done = subprocess.run(
            [python, *flags, "-c", textwrap.dedent(code)],
            cwd=tmp_path,
            env=clean_environment(**env),
            capture_output=True,
            text=True,
            timeout=600,
        )
        if not check:
            return done
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def toy(python):
    """Like ``python``, with the toy target and series on the path and an engine for them made."""

    prelude = f"""
import json, sys
sys.path.insert(0, {str(TOY)!r})
from vllm_specpatch.hooks import Engine
engine = Engine("toy_series")
def activate(): engine.activate("test")
def imported():
    import toy_target.core
    return toy_target.core
def seen():
    core = sys.modules["toy_target.core"]
    b = core.Builder()
    return [core.Builder.gate(1), b.gate(2), b.build(3), core.plan(4), b.inherited()]
def states():
    return {{n: p["state"] for n, p in engine.status()["patches"].items()}}
def report(**more):
    reasons = {{n: p["reason"] for n, p in engine.status()["patches"].items()}}
    print(json.dumps({{"states": states(), "reasons": reasons, "changes": len(engine.ledger), **more}}))
"""
    return lambda code, *flags, **env: python(prelude + textwrap.dedent(code), *flags, **env)
