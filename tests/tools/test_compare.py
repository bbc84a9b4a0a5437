"""benchmarks/compare.py on results of runs, and the weights that make tokens worth comparing."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

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


def script(name, monkeypatch):
    # e2e.py sets variables for vLLM, which are not for the tests after this one.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_rounding_may_part_two_runs(monkeypatch):
    first_difference = script("compare", monkeypatch).first_difference
    a = [[1] * 20, [2] * 20]
    b = [[1] * 15 + [9] * 5, [2] * 20]
    near, sure = [[1.0] * 15 + [0.05] * 5] * 2, [[1.0] * 15 + [0.5] * 5] * 2
    assert first_difference(a, b) == "1/2 differ from token 15"
    assert first_difference(a, b, near) == "1/2 part by rounding (at most 0.050), after 18"
    assert first_difference(a, b, sure) == "1/2 differ from token 15"
    # All of them at once, however near: that is no rounding.
    at_once = [[9] * 20, [9] * 20]
    assert first_difference(a, at_once, [[0.05] * 20] * 2) == "2/2 differ from token 0"


def test_tokens_depend_on_attention_with_our_weights_and_not_with_vllms_dummy_ones(monkeypatch):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()
    prompts = torch.randint(3, 1024, (4, 50), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def greedy(ids):
        for _ in range(8):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        return ids[:, prompts.shape[1] :].tolist()

    forward = llama.LlamaAttention.forward

    def without_attention(self, *args, **kwargs):
        out, *rest = forward(self, *args, **kwargs)
        return torch.zeros_like(out), *rest

    def differing():
        right = greedy(prompts)
        with monkeypatch.context() as patched:
            patched.setattr(llama.LlamaAttention, "forward", without_attention)
            wrong = greedy(prompts)
        return sum(a != b for a, b in zip(right, wrong, strict=True))

    with torch.no_grad():
        initialize_dummy_weights(model, None)
    assert differing() == 0
    with monkeypatch.context() as loading:
        fill_weights = script("e2e", loading).fill_weights
    assert fill_weights(model, 1) == len(list(model.parameters()))
    assert differing() == 4
    before = [p.clone() for p in model.parameters()]
    fill_weights(model, 1)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    fill_weights(model, 2)
    assert not torch.equal(before[0], next(model.parameters()))
