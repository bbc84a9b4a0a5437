"""Tokens of two engines: benchmarks/compare.py, the rule for what is rounding, the weights that tell."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from vllm_specpatch import greedy, random_weights

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
        "tokens": {cell: said(tokens) for cell, (_, tokens) in cells.items()},
    }


def said(ids, gap=1.0, logprob=-1.0):
    """``gap`` and ``logprob`` of every token, or lists of them."""

    def rows(value):
        return [list(value) if isinstance(value, list) else [value] * len(row) for row in ids]

    return {"ids": ids, "logprobs": rows(logprob), "gaps": rows(gap)}


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
    assert (
        other["ctx1024_bs1"]["tokens_vs_first"]
        == "1/1 differ from token 1; logprobs 0.0000 apart, at most 0.000"
    )
    assert patched["ctx8192_bs1"]["first"] == other["ctx8192_bs1"]["first"] == "patched"
    assert other["ctx8192_bs1"]["ratio_to_first"] == 2.0
    assert (
        other["ctx8192_bs1"]["tokens_vs_first"]
        == "1/2 differ from token 1; logprobs 0.0000 apart, at most 0.000"
    )
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


def test_a_run_that_ended_on_another_route_is_no_proof(tmp_path):
    runs = [result("stock", ctx1024_bs1=(10.0, [[1, 2]])), result("patched", ctx1024_bs1=(4.0, [[1, 2]]))]
    runs[1]["otherwise"] = "wanted the route spec_mask, found stock"
    files = [tmp_path / f"{run['name']}.json" for run in runs]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *map(str, files)], capture_output=True, text=True
    )
    assert done.returncode == 1 and "wanted the route spec_mask, found stock" in done.stdout


@pytest.mark.parametrize(
    ("backend", "environment", "routes", "otherwise"),
    [
        ("FLASHINFER", {"VLLM_SPECPATCH_ROUTE": "spec_mask"}, ["spec_mask", "spec_mask"], None),
        (
            "FLASHINFER",
            {"VLLM_SPECPATCH_ROUTE": "spec_mask"},
            ["spec_mask", "native"],
            "found native, spec_mask",
        ),
        ("FLASHINFER", {"VLLM_SPECPATCH_ROUTE": "spec_mask"}, [], "wanted the route spec_mask, found stock"),
        ("FLASHINFER", {}, ["native"], None),
        ("FLASHINFER", {}, [], "wanted the route auto, found stock"),
        ("FLASHINFER", {"VLLM_SPECPATCH": "0"}, [], None),
        ("FLASHINFER", {"VLLM_SPECPATCH": "0"}, ["native"], "wanted the route stock, found native"),
        ("FLASH_ATTN", {"VLLM_SPECPATCH": "0"}, [], None),
    ],
)
def test_a_run_knows_whether_it_is_what_was_asked_for(monkeypatch, backend, environment, routes, otherwise):
    e2e = script("e2e", monkeypatch)
    for name in ("VLLM_SPECPATCH", "VLLM_SPECPATCH_ROUTE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    decisions = [{"state": "applied", "route": route} for route in routes]
    status = {"patches": {"one": {"decisions": [*decisions, {"state": "refused"}]}}}
    found = e2e.ended_otherwise(backend, {}, status)
    assert found is None if otherwise is None else otherwise in found
    assert e2e.ended_otherwise(backend, {"tp": "2"}, status) is None  # other processes decide


NEAR, SURE = [1.0] * 15 + [0.05] * 5, [1.0] * 15 + [0.5] * 5


@pytest.mark.parametrize(
    ("a", "b", "verdict", "text"),
    [
        (said([[1] * 20]), said([[1] * 20]), "equal", "equal"),
        (
            said([[1] * 20, [2] * 20], NEAR),
            said([[1] * 15 + [9] * 5, [2] * 20]),
            "rounding",
            "1/2 part by rounding (gap 0.050) after 18; logprobs 0.0000 apart, at most 0.000",
        ),
        (said([[1] * 20], SURE), said([[1] * 15 + [9] * 5]), "differ", "1/1 differ from token 15; "),
        # A draft that was accepted unseen: nobody knows how sure the drafter was.
        (
            said([[1] * 20], [None] * 20),
            said([[1] * 15 + [9] * 5]),
            "rounding",
            "1/1 part by rounding after 15; ",
        ),
        # All of a batch at once, however near, is no rounding; one request may be that unlucky.
        (said([[1] * 20] * 4, 0.01), said([[1, 9] + [1] * 18] * 4), "differ", "4/4 differ from token 1; "),
        (
            said([[1] * 20], 0.01),
            said([[1, 9] + [1] * 18]),
            "rounding",
            "1/1 part by rounding (gap 0.010) after 1; ",
        ),
        (said([[1] * 20], 0.01), said([[9] * 20]), "differ", "1/1 differ from token 0; "),
        # The same tokens, with other logprobs than rounding gives.
        (said([[1] * 20]), said([[1] * 20], logprob=-1.2), "differ", "equal, but logprobs 0.2000 apart"),
        (said([[1] * 20]), said([[1] * 20], logprob=-1.02), "equal", "equal"),
        # A little everywhere is no rounding, if there are enough tokens to tell.
        (said([[1] * 40]), said([[1] * 40], logprob=-1.02), "differ", "equal, but logprobs 0.0200 apart"),
        (said([[1] * 40]), said([[1] * 40], logprob=-1.01), "equal", "equal"),
        # Nor is much at one token.
        (said([[1] * 40]), said([[1] * 40], logprob=[-1.12, *[-1.0] * 39]), "differ", "equal, but logprobs"),
        # Only what both said counts: logprobs of other tokens say nothing.
        (
            said([[1] * 20], NEAR),
            said([[1] * 15 + [9] * 5], logprob=[-1.0] * 15 + [-9.0] * 5),
            "rounding",
            "1/1 part by rounding",
        ),
        (said([[1] * 20], 0.01), said([[1] * 19]), "differ", "1/1 differ from token 19; "),
        (said([[]]), said([[]]), "equal", "equal"),
    ],
)
def test_what_is_rounding(a, b, verdict, text):
    found = greedy.difference(a, b)
    assert found.verdict == verdict and str(found).startswith(text)


def test_a_trained_models_logits_are_coarser():
    a, b = said([[1] * 40], [1.0] * 20 + [0.3] * 20), said([[1] * 30 + [9] * 10], logprob=-1.05)
    assert greedy.difference(a, b).verdict == "differ"
    assert greedy.difference(a, b, greedy.TRAINED).verdict == "rounding"
    assert greedy.difference(a, said([[9] * 40]), greedy.TRAINED).verdict == "differ"


def test_what_an_engine_said_is_kept_with_how_sure_it_was():
    def at(**logprobs):
        return {int(token[1:]): types.SimpleNamespace(logprob=p) for token, p in logprobs.items()}

    best, draft, alone = at(t5=-1.0, t7=-1.25), at(t9=-4.0, t5=-1.0, t7=-1.25), at(t3=-0.5)
    output = types.SimpleNamespace(token_ids=[5, 9, 3], logprobs=[best, draft, alone])
    assert greedy.said([output]) == {
        "ids": [[5, 9, 3]],
        "logprobs": [[-1.0, -4.0, -0.5]],
        "gaps": [[0.25, None, 0.0]],
    }


def prefilled(prompt, ids, behind):
    """As vLLM answers for a prompt with its tokens; prefill's best is ``behind`` nats ahead of each."""
    at = [
        {i: types.SimpleNamespace(logprob=-1.0 - d), 99: types.SimpleNamespace(logprob=-1.0)}
        for i, d in zip(ids, behind, strict=True)
    ]
    return types.SimpleNamespace(prompt_logprobs=[None, *[{}] * (prompt - 1), *at])


def test_what_decoding_said_is_judged_by_prefill():
    ids = [list(range(1, 51)), list(range(2, 52))]
    right = [prefilled(7, row, [0.0] * 49 + [0.05]) for row in ids]
    found = greedy.consistency(said(ids), right)
    assert found.verdict == "consistent" and (found.tokens, found.turned) == (100, 0)
    assert str(found) == (
        "decoding agrees with prefill on 100 tokens: logprobs 0.0010 apart, at most 0.050; "
        "0 turned (at most 0.050)"
    )
    turned = [prefilled(7, row, [0.5, 0.5] + [0.0] * 48) for row in ids]
    found = greedy.consistency(said(ids), turned)
    assert found.verdict == "differ" and (found.turned, found.widest) == (4, 0.5)
    assert str(found).startswith("decoding DIFFERS from prefill")
    # A draft that was accepted unseen need not be the best; its logprob must be the same.
    unseen = greedy.consistency(said(ids, [None] * 50, [-1.5, -1.5] + [-1.0] * 48), turned)
    assert (unseen.turned, unseen.verdict) == (0, "consistent")
    drifted = [prefilled(7, row, [0.02] * 50) for row in ids]
    assert greedy.consistency(said(ids, [None] * 50), drifted).verdict == "differ"


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
    fill_weights = random_weights.fill_weights
    assert fill_weights(model, 1) == len(list(model.parameters()))
    assert differing() == 4
    before = [p.clone() for p in model.parameters()]
    fill_weights(model, 1)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    fill_weights(model, 2)
    assert not torch.equal(before[0], next(model.parameters()))


def test_a_drafter_gets_its_own_weights_or_the_targets():
    torch = pytest.importorskip("torch")

    def model():
        return torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(64, 64), "mlp": torch.nn.Linear(64, 64)})

    target, drafter = model(), model()
    runner = types.SimpleNamespace(model=target, speculator=types.SimpleNamespace(model=drafter))
    worker = types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner))
    assert random_weights.fill_models(worker) == 8
    assert not torch.equal(target["mlp"].weight, drafter["mlp"].weight)
    assert target["qkv_proj"].weight.std() > 1.3 * target["mlp"].weight.std()
    random_weights.fill_models(worker, True)
    assert torch.equal(target["mlp"].weight, drafter["mlp"].weight)
    runner.speculator = types.SimpleNamespace()  # n-grams have no model
    assert random_weights.fill_models(worker) == 4


def test_a_planner_that_is_told_too_little_is_what_a_control_run_has(monkeypatch):
    torch = pytest.importorskip("torch")
    from vllm_specpatch.kernels import spec_mask
    from vllm_specpatch.patches import spec_mask_route

    seen = []
    monkeypatch.setattr(spec_mask.Plan, "update", lambda self, lengths, start: seen.append(lengths.tolist()))
    # monkeypatch notes the original, which plan_short replaces again.
    monkeypatch.setattr(
        spec_mask_route.SpecMaskDecode, "_plan_before", spec_mask_route.SpecMaskDecode._plan_before
    )
    script("e2e", monkeypatch).plan_short(16)
    plan = object.__new__(spec_mask.Plan)
    lengths = torch.tensor([100, 3], dtype=torch.int32)
    batch = spec_mask_route.SpecMaskDecode(
        types.SimpleNamespace(layout="NHD", window_left=-1, soft_cap=0.0, sm_scale=1.0),
        plan,
        lengths,
        None,
        None,
    )
    plan.update(lengths, None)
    batch._plan_before(torch.zeros(4))
    plan.update(lengths, None)
    assert seen == [[100, 3], [84, 0], [100, 3]]
