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


def said(ids, gap=1.0, logprob=-1.0, synthetic=False, close=None):
    """``gap``, ``logprob`` and ``close`` of every token, or lists of them for each request."""

    def rows(value):
        return [list(value) if isinstance(value, list) else [value] * len(row) for row in ids]

    result = {"ids": ids, "logprobs": rows(logprob), "gaps": rows(gap), "synthetic": synthetic}
    return result if close is None else {**result, "close": [[close] * len(row) for row in ids]}


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
    assert written["results"][0]["cells"]["ctx1024_bs1"]["tokens_vs_first"] is None, "compared with itself"
    assert (
        other["ctx1024_bs1"]["tokens_vs_first"]
        == "1/1 differ from token 1 (gap 1.000); logprobs 0.0000 apart, at most 0.000"
    )
    assert patched["ctx8192_bs1"]["first"] == other["ctx8192_bs1"]["first"] == "patched"
    assert other["ctx8192_bs1"]["ratio_to_first"] == 2.0
    assert (
        other["ctx8192_bs1"]["tokens_vs_first"]
        == "1/2 differ from token 1 (gap 1.000); logprobs 0.0000 apart, at most 0.000"
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
    done = compared(tmp_path, runs)
    assert done.returncode == 1 and "wanted the route spec_mask, found stock" in done.stdout


@pytest.mark.parametrize("verdict", ["differ", "failed"])
def test_tokens_that_prefill_did_not_confirm_are_no_proof(tmp_path, verdict):
    runs = [result("stock", ctx1024_bs1=(10.0, [[1, 2]])), result("patched", ctx1024_bs1=(4.0, [[1, 2]]))]
    runs[1]["cells"]["ctx1024_bs1"]["by_prefill"] = {"verdict": verdict, "text": "what prefill found"}
    done = compared(tmp_path, runs)
    assert done.returncode == 1 and "what prefill found" in done.stdout
    runs[1]["cells"]["ctx1024_bs1"]["by_prefill"]["verdict"] = "consistent"
    assert compared(tmp_path, runs).returncode == 0


def test_dummy_weights_and_old_results_are_said(tmp_path):
    runs = [result("stock", ctx1024_bs1=(10.0, [[1, 2]])), result("patched", ctx1024_bs1=(4.0, [[1, 2]]))]
    runs[0]["weights"] = "dummy"
    assert "equal tokens say nothing" in compared(tmp_path, runs).stdout
    runs[0]["tokens"]["ctx1024_bs1"] = [[1, 2]]
    done = compared(tmp_path, runs)
    assert done.returncode == 2 and "run it again" in done.stderr and "Traceback" not in done.stderr


def compared(tmp_path, runs):
    files = [tmp_path / f"{run['name']}.json" for run in runs]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    command = [sys.executable, "-P", str(SCRIPT), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("backend", "environment", "ranks", "otherwise"),
    [
        ("FLASHINFER", {"VLLM_SPECPATCH_ROUTE": "spec_mask"}, [["spec_mask", "spec_mask"]], None),
        (
            "FLASHINFER",
            {"VLLM_SPECPATCH_ROUTE": "spec_mask"},
            [["spec_mask", "native"]],
            "found native, spec_mask",
        ),
        (
            "FLASHINFER",
            {"VLLM_SPECPATCH_ROUTE": "spec_mask"},
            [[]],
            "wanted the route spec_mask, found stock",
        ),
        # Another rank, in another process.
        ("FLASHINFER", {"VLLM_SPECPATCH_ROUTE": "native"}, [["native"], []], "native, found stock"),
        ("FLASHINFER", {}, [["native"]], None),
        ("FLASHINFER", {}, [[]], "wanted the route auto, found stock"),
        ("FLASHINFER", {"VLLM_SPECPATCH": "0"}, [[]], None),
        ("FLASHINFER", {"VLLM_SPECPATCH": "0"}, [["native"]], "wanted the route stock, found native"),
        ("FLASH_ATTN", {"VLLM_SPECPATCH": "0"}, [[]], None),
    ],
)
def test_a_run_knows_whether_it_is_what_was_asked_for(monkeypatch, backend, environment, ranks, otherwise):
    e2e = script("e2e", monkeypatch)
    for name in ("VLLM_SPECPATCH", "VLLM_SPECPATCH_ROUTE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    answers = []
    for routes in ranks:
        decisions = [{"state": "applied", "route": route} for route in routes]
        answers.append({"status": {"patches": {"one": {"decisions": [*decisions, {"state": "refused"}]}}}})
    engine = types.SimpleNamespace(collective_rpc=lambda function: answers)
    found = e2e.ended_otherwise(types.SimpleNamespace(llm_engine=engine), backend)
    assert found is None if otherwise is None else otherwise in found


NEAR, SURE = [1.0] * 15 + [0.05] * 5, [1.0] * 15 + [0.5] * 5
PARTED = [[1] * 15 + [9] * 5]


@pytest.mark.parametrize(
    ("a", "b", "verdict", "text"),
    [
        (said([[1] * 20]), said([[1] * 20]), "equal", "equal"),
        (
            said([[1] * 20, [2] * 20], NEAR),
            said([*PARTED, [2] * 20], NEAR),
            "rounding",
            "1/2 part by rounding (gap 0.050) after 18; logprobs 0.0000 apart, at most 0.000",
        ),
        (said([[1] * 20], SURE), said(PARTED, NEAR), "differ", "1/1 differ from token 15 (gap 0.500); "),
        (said([[1] * 20], NEAR), said(PARTED, SURE), "differ", "1/1 differ from token 15 (gap 0.500); "),
        # Both unsure, but one finds its token much better than the other finds its own.
        (
            said([[1] * 20], NEAR),
            said(PARTED, NEAR, [-1.0] * 15 + [-2.0] * 5),
            "differ",
            "1/1 differ from token 15 (other logprobs where they part); ",
        ),
        # Each must have thought of the other's token.
        (said([[1] * 20], NEAR, close=[9]), said(PARTED, NEAR, close=[1]), "rounding", "1/1 part"),
        (
            said([[1] * 20], NEAR, close=[9]),
            said(PARTED, NEAR, close=[2]),
            "differ",
            "1/1 differ from token 15 (a token that the other did not think of); ",
        ),
        # A draft that was accepted unseen: nobody knows how sure the drafter was.
        (
            said([[1] * 20], -2.0, synthetic=True),
            said(PARTED, 1.0, synthetic=True),
            "rounding",
            "1/1 part by rounding after 15; ",
        ),
        # But a greedy engine says its own best.
        (said([[1] * 20], -2.0), said(PARTED, 1.0), "differ", "1/1 differ from token 15 (gap -2.000); "),
        # All of a batch at once, however near, is no rounding; one request may be that unlucky.
        (
            said([[1] * 20] * 4, 0.01),
            said([[1, 9] + [1] * 18] * 4, 0.01),
            "differ",
            "4/4 differ from token 1 (they agreed on 1.0 tokens only); ",
        ),
        (said([[1] * 20] * 4, 0.01), said([[1] * 4 + [9] * 16] * 4, 0.01), "rounding", "4/4 part"),
        (
            said([[1] * 20] * 8, 0.01),
            said([[1] * 4 + [9] * 16] * 8, 0.01),
            "differ",
            "8/8 differ from token 4",
        ),
        (said([[1] * 20] * 8, 0.01), said([[1] * 8 + [9] * 12] * 8, 0.01), "rounding", "8/8 part"),
        (
            said([[1] * 20], 0.01),
            said([[1, 9] + [1] * 18], 0.01),
            "rounding",
            "1/1 part by rounding (gap 0.010) after 1; ",
        ),
        (said([[1] * 20], 0.01), said([[9] * 20], 0.01), "differ", "1/1 differ from token 0 "),
        # The same tokens, with other logprobs than rounding gives: at one token,
        (said([[1] * 20]), said([[1] * 20], logprob=[-1.12, *[-1.0] * 19]), "differ", "equal, but logprobs"),
        (said([[1] * 20]), said([[1] * 20], logprob=[-1.10, *[-1.0] * 19]), "equal", "equal"),
        # a little everywhere, if there are enough tokens to tell,
        (said([[1] * 40]), said([[1] * 40], logprob=-1.02), "differ", "equal, but logprobs 0.0200 apart"),
        (said([[1] * 20]), said([[1] * 20], logprob=-1.02), "equal", "equal"),
        (said([[1] * 40]), said([[1] * 40], logprob=-1.01), "equal", "equal"),
        # or in one request of many.
        (
            said([[1] * 40] * 4),
            {**said([[1] * 40] * 4), "logprobs": [[-1.03] * 40] + [[-1.0] * 40] * 3},
            "differ",
            "equal, but logprobs 0.0075 apart, at most 0.030 (a request whose logprobs are above 0.025",
        ),
        # What is no number is not near.
        (said([[1] * 40]), said([[1] * 40], logprob=float("nan")), "differ", "equal, but logprobs nan"),
        (
            said([[1] * 20], NEAR),
            said(PARTED, NEAR, [-1.0] * 19 + [float("nan")]),
            "differ",
            "1/1 differ from token 15 (logprobs that are no numbers)",
        ),
        # Only what both said counts: logprobs of other tokens say nothing.
        (
            said([[1] * 20], NEAR),
            said(PARTED, NEAR, [-1.0] * 16 + [-9.0] * 4),
            "rounding",
            "1/1 part by rounding",
        ),
        (said([[1] * 20], 0.01), said([[1] * 19]), "differ", "1/1 differ from token 19 (one ends"),
        (said([[]]), said([[]]), "equal", "equal"),
    ],
)
def test_what_is_rounding(a, b, verdict, text):
    found = greedy.difference(a, b)
    assert found.verdict == verdict and str(found).startswith(text)
    # Whoever is asked first.
    assert greedy.difference(b, a).verdict == verdict


def test_an_fp8_cache_and_a_trained_models_logits_are_coarser():
    a, b = said([[1] * 40]), said([[1] * 40], logprob=-1.02)
    assert greedy.difference(a, b).verdict == "differ"
    assert greedy.difference(a, b, greedy.FP8).verdict == "equal"
    unsure = [1.0] * 20 + [0.3] * 20
    a, b = said([[1] * 40], unsure), said([[1] * 30 + [9] * 10], unsure, [-1.05, -1.6, *[-1.05] * 38])
    assert greedy.difference(a, b, greedy.FP8).verdict == "differ"
    assert greedy.difference(a, b, greedy.TRAINED).verdict == "rounding"
    assert greedy.difference(a, said([[9] * 40]), greedy.TRAINED).verdict == "differ"


def test_what_an_engine_said_is_kept_with_how_sure_it_was():
    def at(**logprobs):
        return {int(token[1:]): types.SimpleNamespace(logprob=p) for token, p in logprobs.items()}

    best, draft, alone = at(t5=-1.0, t7=-1.25, t8=-1.5), at(t9=-4.0, t5=-1.0, t7=-1.25), at(t3=-0.5)
    output = types.SimpleNamespace(token_ids=[5, 9, 3], logprobs=[best, draft, alone])
    assert greedy.said([output], True) == {
        "ids": [[5, 9, 3]],
        "logprobs": [[-1.0, -4.0, -0.5]],
        "gaps": [[0.25, -3.0, 0.0]],
        "close": [[[7], [5, 7], []]],
        "synthetic": True,
    }
    nothing = types.SimpleNamespace(token_ids=[], logprobs=[])
    assert greedy.said([nothing])["gaps"] == [[]]


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
    found = greedy.consistency(said(ids), right[:1])
    assert found.verdict == "consistent" and found.tokens == 50
    far = [prefilled(7, row, [0.5, *[0.0] * 49]) for row in ids]
    found = greedy.consistency(said(ids), far)
    assert found.verdict == "differ" and (found.turned, found.widest) == (2, 0.5)
    assert str(found).startswith("decoding DIFFERS from prefill (a logprob above 0.11 apart) on 100 tokens")
    drifted = [prefilled(7, row, [0.02] * 50) for row in ids]
    assert greedy.consistency(said(ids), drifted).verdict == "differ"
    assert greedy.consistency(said(ids), drifted, greedy.FP8).verdict == "consistent"
    nan = [prefilled(7, row, [float("nan"), *[0.0] * 49]) for row in ids]
    assert greedy.consistency(said(ids), nan).verdict == "differ"


def test_tokens_that_prefill_would_not_have_said():
    """With the same logprobs as in decoding: another token is better."""
    ids = [list(range(1, 101))]
    logprobs = [-1.2] * 2 + [-1.0] * 98
    turned = [prefilled(7, ids[0], [0.2] * 2 + [0.0] * 98)]
    found = greedy.consistency(said(ids, logprob=logprobs), turned)
    assert (found.turned, found.verdict, found.reason) == (2, "differ", "2 tokens turned")
    one = [prefilled(7, ids[0], [0.2, *[0.0] * 99])]
    assert greedy.consistency(said(ids, logprob=[-1.2, *[-1.0] * 99]), one).verdict == "consistent"
    # A draft that was accepted unseen need not be the best; a greedy engine's token must.
    unseen = [-1.0] * 2 + [1.0] * 98
    found = greedy.consistency(said(ids, unseen, logprobs, synthetic=True), turned)
    assert (found.turned, found.verdict) == (0, "consistent")
    assert greedy.consistency(said(ids, unseen, logprobs), turned).verdict == "differ"


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


def test_a_page_left_out_moves_logprobs_by_more_than_rounding_may():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = llama.LlamaConfig(**sizes, **heads, attn_implementation="eager")
    model = llama.LlamaForCausalLM(config).to(torch.float32).eval()
    random_weights.fill_weights(model, 1)
    ids = torch.randint(3, 4096, (4, 512), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logprobs(left_out):
        seen = torch.ones(512, 512, dtype=torch.bool).tril()
        seen[496:, left_out] = False  # as if decoded with a page missing
        mask = torch.zeros(1, 1, 512, 512).masked_fill(~seen, float("-inf"))
        at = model(input_ids=ids, attention_mask=mask.expand(4, 1, 512, 512)).logits[:, 496:].log_softmax(-1)
        return at

    right = logprobs(slice(0, 0))
    best = right.argmax(-1, keepdim=True)
    for page in (slice(256, 272), slice(480, 496)):
        apart = (right - logprobs(page)).gather(-1, best).abs()
        assert apart.mean() > 2 * greedy.DRIFT, page


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
    del runner.model
    with pytest.raises(RuntimeError, match="no weights of the target model"):
        random_weights.fill_models(worker)


def test_ranks_have_their_own_parts():
    torch = pytest.importorskip("torch")

    class ColumnParallelLinear(torch.nn.Linear):
        tp_size = 2

    class RowParallelLinear(torch.nn.Linear):
        tp_size = 2

    def filled(rank):
        kinds = {"up": ColumnParallelLinear, "down": RowParallelLinear, "fc": torch.nn.Linear}
        model = torch.nn.ModuleDict({name: kind(64, 64) for name, kind in kinds.items()})
        for name in ("up", "down"):
            model[name].tp_rank = rank
        random_weights.fill_weights(model, 1)
        return model

    first, second = filled(0), filled(1)
    assert not torch.equal(first["up"].weight, second["up"].weight)
    assert not torch.equal(first["down"].weight, second["down"].weight)
    assert torch.equal(first["fc"].weight, second["fc"].weight), "every rank holds all of it"
    # All ranks' inputs are added up.
    assert 0.6 < first["down"].weight.std() / first["up"].weight.std() < 0.8


def test_copies_of_weights_are_renewed_where_they_are():
    """As vLLM's DFlash drafter keeps them."""
    torch = pytest.importorskip("torch")

    class Drafter(torch.nn.Linear):
        def _build_fused_kv_buffers(self):
            self._fused_kv_weight = self.weight[:4].detach().clone()
            self._fused_kv_bias = None
            self._k_norm_weights = self.bias.detach().clone()

    drafter = Drafter(8, 8)
    random_weights.fill_weights(drafter, 1)  # nothing was copied yet
    drafter._build_fused_kv_buffers()
    before = drafter._fused_kv_weight
    torch.nn.init.zeros_(before)
    random_weights.fill_weights(drafter, 2)
    assert drafter._fused_kv_weight is before and torch.equal(before, drafter.weight[:4])
    assert drafter._fused_kv_bias is None


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
