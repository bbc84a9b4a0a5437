"""The parts of the GPU scripts that run without a GPU: their tolerances, cases and supervision."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "spec_mask"


@pytest.fixture(scope="module")
def scripts():
    """gpu_check and gpu_bench; their neighbours have common names and leave with them."""
    names = ("checkout", "cases", "specs", "gpu_check", "gpu_bench")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("gpu_check"), importlib.import_module("gpu_bench")
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in names:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]


def test_every_case_has_a_name_of_its_own(scripts):
    check, _ = scripts
    titles = [(group, title) for group, cases in check.GROUPS.items() for title, _ in cases()]
    assert len(titles) > 700
    assert len(set(titles)) == len(titles)
    # The causal words of requests in several query tiles, in the group made for them.
    assert sum(group == "many_tiles" for group, _ in titles) == 48


def attention(dtype, tokens, chunks, seed):
    """Rows of attention as the kernels compute them: P, partial outputs and outputs rounded."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, tokens, generator=generator, dtype=torch.float64)
    v = torch.randn(tokens, 32, generator=generator, dtype=torch.float64)
    exact = torch.softmax(logits, -1) @ v
    parts, sums = [], []
    for piece, values in zip(logits.chunk(chunks, -1), v.chunk(chunks), strict=True):
        p = torch.exp(piece - piece.amax(-1, keepdim=True)).to(dtype).double()
        total = p.sum(-1, keepdim=True)
        parts.append((p @ values / total).to(dtype).double())
        sums.append(torch.log2(total) + piece.amax(-1, keepdim=True) / torch.log(torch.tensor(2.0)).double())
    lses = torch.stack(sums)
    weights = torch.softmax(lses * torch.log(torch.tensor(2.0)).double(), 0)
    out = (torch.stack(parts) * weights).sum(0).to(dtype)
    lse = (
        torch.logsumexp(lses * torch.log(torch.tensor(2.0)).double(), 0)
        / torch.log(torch.tensor(2.0)).double()
    )
    want_lse = torch.logsumexp(logits, -1, keepdim=True) / torch.log(torch.tensor(2.0)).double()
    return out[:, None], lse.float(), exact[:, None], want_lse


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "chunks"), [(4, 1), (100, 1), (1000, 5), (1024, 16)])
def test_tolerance_takes_rounding_and_nothing_else(scripts, dtype, tokens, chunks):
    check, _ = scripts
    out, lse, want, want_lse = attention(getattr(torch, dtype), tokens, chunks, seed=tokens)
    check.compare(out, lse, want, want_lse, dtype, 30.0)
    u = check.unit_roundoff(dtype)
    assert u == {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    wrong = out.clone()
    wrong[7] *= 1 + 8 * u
    with pytest.raises(check.Failure, match="relative error"):
        check.compare(wrong, lse, want, want_lse, dtype, 30.0)
    late = lse.clone()
    late[3] += 4 * u
    with pytest.raises(check.Failure, match="LSE off"):
        check.compare(out, late, want, want_lse, dtype, 30.0)


def test_rows_that_see_nothing(scripts):
    """A batch in which no row sees anything compares, and must be zero."""
    check, _ = scripts
    zeros, blank = torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.full((2, 3), float("-inf"))
    assert check.compare(zeros, blank, zeros.double(), blank.double(), "bfloat16", 30.0) == 0.0
    with pytest.raises(check.Failure, match="not zero"):
        check.compare(zeros + 1, blank, zeros.double(), blank.double(), "bfloat16", 30.0)
    with pytest.raises(check.Failure, match="infinities differ"):
        check.compare(zeros, blank * 0, zeros.double(), blank.double(), "bfloat16", 30.0)


def test_a_fault_is_named_and_the_other_cases_run(scripts, monkeypatch, tmp_path):
    """A worker that dies leaves a note of what it did; the next one starts behind that case."""
    _, bench = scripts
    order = bench.spread(bench.cases())
    every = [i for i, case in enumerate(order) if "b1 " in str(case)]
    bad = every[3]
    started = []

    def worker(command, **options):
        option = dict(zip(command, command[1:], strict=False))
        todo = [int(i) for i in option["--todo"].split(",")]
        started.append(todo)
        for case in todo:
            Path(option["--progress"]).write_text(json.dumps({"case": case, "step": "native"}))
            if case == bad:
                return subprocess.CompletedProcess(
                    command, -6, stderr="x\nAcceleratorError: CUDA error: bad\n"
                )
            with open(option["--rows"], "a") as rows:
                rows.write(json.dumps({"index": case, "kv_bytes": 1}) + "\n")
        Path(option["--report"]).write_text('{"gpu": "none"}')
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(bench.subprocess, "run", worker)
    monkeypatch.setattr(
        sys, "argv", ["gpu_bench.py", "--seconds", "60", "--out", str(tmp_path), "--match", "b1 "]
    )
    assert bench.main() == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert started == [every, every[4:]]
    assert [row["index"] for row in report["cases"]] == [i for i in every if i != bad]
    (fault,) = report["faults"]
    assert fault["what"] == f"{order[bad]}: native"
    assert fault["said"] == ["AcceleratorError: CUDA error: bad"]
    assert report["gpu"] == "none"


def test_what_was_measured_is_written_when_the_time_is_up(scripts, monkeypatch, tmp_path):
    """timeout(1) ends a benchmark whose last case takes longer than was thought."""
    _, bench = scripts

    def worker(command, **options):
        option = dict(zip(command, command[1:], strict=False))
        Path(option["--rows"]).write_text(json.dumps({"index": 7, "kv_bytes": 1}) + "\n")
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal ends the wait for the worker")

    monkeypatch.setattr(bench.subprocess, "run", worker)
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--seconds", "60", "--out", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert bench.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [row["index"] for row in report["cases"]] == [7] and report["stopped_for_time"]
