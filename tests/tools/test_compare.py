"""benchmarks/compare.py on results of runs, one of which was stopped."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "compare.py"


def result(name, **cells):
    return {
        "name": name,
        "backend": "FLASHINFER",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "v2_runner": True,
        "graphs": {},
        "init_s": 1.0,
        "specpatch_log": [],
        "downgrade": [],
        "cells": {cell: {"ms_per_step": ms, "spread_ms": 0.1} for cell, (ms, _) in cells.items()},
        "tokens": {cell: tokens for cell, (_, tokens) in cells.items()},
    }


def test_a_cell_that_the_first_lacks_is_compared_with_the_next(tmp_path):
    runs = [
        result("stock", ctx1024_bs1=(10.0, [[1, 2]])),
        result("patched", ctx1024_bs1=(4.0, [[1, 2]]), ctx8192_bs1=(5.0, [[1, 2], [3, 4]])),
        result("other", ctx1024_bs1=(5.0, [[1, 3]]), ctx8192_bs1=(10.0, [[1, 2], [3, 5]])),
    ]
    files = []
    for run in runs:
        files.append(tmp_path / f"{run['name']}.json")
        files[-1].write_text(json.dumps(run))
    target = tmp_path / "all.json"
    command = [sys.executable, "-P", str(SCRIPT), *map(str, files), "--write", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    printed = done.stdout
    assert done.returncode == 1, "tokens differ"
    written = json.loads(target.read_text())
    assert written["compared_with"] == "stock"
    _, patched, other = (r["cells"] for r in written["results"])
    assert patched["ctx1024_bs1"]["ratio_to_first"] == 0.4
    assert patched["ctx1024_bs1"]["tokens_vs_first"] == "equal" and "first" not in patched["ctx1024_bs1"]
    assert other["ctx1024_bs1"]["tokens_vs_first"] == "1/1 differ from token 1"
    assert patched["ctx8192_bs1"]["first"] == other["ctx8192_bs1"]["first"] == "patched"
    assert other["ctx8192_bs1"]["ratio_to_first"] == 2.0
    assert other["ctx8192_bs1"]["tokens_vs_first"] == "1/2 differ from token 1"
    assert all("tokens" not in r for r in written["results"])
    for names, code in (([0, 1], 0), ([0], 2)):
        command = [sys.executable, "-P", str(SCRIPT), *(str(files[i]) for i in names)]
        assert subprocess.run(command, capture_output=True).returncode == code
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("ctx8192")] == [
        ["ctx8192_bs1", "patched"],
        ["ctx8192_bs1", "other"],
    ]
