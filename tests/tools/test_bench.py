"""bench without a GPU: what children are asked (against real vLLM), how they measure, and what is made of
it."""

import ast
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import xml.etree.ElementTree as ElementTree

import pytest
import releases
from hypothesis import given
from hypothesis import strategies as st

from vllm_specpatch import bench, bench_probe, bench_run, chart, cli


def arguments(*more):
    return cli.parser().parse_args(["bench", "--model", "dummy", *more])


def planned(tmp_path, *more):
    return bench.plan(arguments(*more), tmp_path)


# -- what is asked -------------------------------------------------------------------------------------


def test_the_dummy_model_is_a_configuration_of_real_vllm(python, tmp_path):
    [(_, asked)] = planned(tmp_path, "--backends", "patched", "--batch", "1,8", "--kv-cache-dtype", "fp8")
    found = python(f"""
        import json
        from vllm_specpatch.patches import simulated_gpu
        simulated_gpu.install(8, 6)
        from vllm.engine.arg_utils import EngineArgs
        config = EngineArgs(**json.loads({json.dumps(asked["engine"])!r})).create_engine_config()
        print(json.dumps({{
            "backend": config.attention_config.backend.name,
            "k": config.speculative_config.num_speculative_tokens,
            "method": config.speculative_config.method,
            "sizes": config.compilation_config.cudagraph_capture_sizes,
            "prefix": config.cache_config.enable_prefix_caching,
            "kv": config.cache_config.cache_dtype,
            "heads": config.model_config.get_num_attention_heads(config.parallel_config),
            "length": config.model_config.max_model_len,
        }}))
    """)
    longest = bench_run.SHORT + 8 * bench_probe.steps_needed() * 5 // 4
    assert found == {
        "backend": "FLASHINFER",
        "k": 7,
        "method": "eagle",
        "sizes": [8, 16, 32, 64],
        "prefix": False,
        "kv": "fp8",
        "heads": 32,
        "length": 8192 + longest + 16,
    }


@pytest.mark.parametrize("release", releases.table())
def test_every_release_knows_the_arguments(tmp_path, release):
    try:
        folder = releases.unpacked("vllm", release)
    except releases.Unreachable as e:
        pytest.skip(str(e))
    source = ast.parse((folder / "vllm" / "engine" / "arg_utils.py").read_text())
    [fields] = [node for node in source.body if getattr(node, "name", "") == "EngineArgs"]
    known = {node.target.id for node in fields.body if isinstance(node, ast.AnnAssign)}
    asked = planned(tmp_path, "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.5")
    assert {name for _, one in asked for name in one["engine"]} <= known
    # The ways into the worker and out of it.
    engine = (folder / "vllm" / "v1" / "engine" / "llm_engine.py").read_text()
    assert "def collective_rpc" in engine
    for runner in ("gpu_model_runner.py", "gpu/model_runner.py"):
        text = (folder / "vllm" / "v1" / "worker" / runner).read_text()
        assert "def execute_model" in text and ("self.drafter" in text or "self.speculator" in text)
        assert "self.attn_groups" in text
    scheduler = (folder / "vllm" / "v1" / "core" / "sched" / "scheduler.py").read_text()
    for keyword in ("num_draft_tokens", "num_accepted_tokens"):
        assert re.search(rf"self\.make_spec_decoding_stats\(\s[^()]*\b{keyword}=", scheduler)
    client = (folder / "vllm" / "v1" / "engine" / "core_client.py").read_text()
    assert "self.engine_core = EngineCore(" in client
    steps = (folder / "vllm" / "v1" / "core" / "sched" / "output.py").read_text()
    assert "num_output_tokens: list[int]" in steps and "scheduled_spec_decode_tokens: dict" in steps
    assert "metadata_builders: list" in (folder / "vllm" / "v1" / "worker" / "utils.py").read_text()


def test_each_variant_gets_its_own_backend_and_environment(tmp_path):
    asked = planned(
        tmp_path, "--backends", "stock,native,flash_attn", "--flash-attn-version", "2", "--batch", "4"
    )
    seen = [(v.name, v.environment(), one["engine"]["attention_config"], one["route"]) for v, one in asked]
    assert seen == [
        ("stock", {"VLLM_SPECPATCH": "0"}, {"backend": "FLASHINFER"}, None),
        (
            "native",
            {"VLLM_SPECPATCH": "on", "VLLM_SPECPATCH_ROUTE": "native"},
            {"backend": "FLASHINFER"},
            "native",
        ),
        ("flash_attn", {"VLLM_SPECPATCH": "0"}, {"backend": "FLASH_ATTN", "flash_attn_version": 2}, None),
    ]


def test_a_users_own_arguments_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    (tmp_path / "engine.json").write_text('{"max_model_len": 4096, "attention_config": {"backend": "X"}}')
    options = cli.parser().parse_args(
        [
            "bench",
            "--model",
            "org/name",
            "--speculative-config",
            '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}',
            "--engine",
            "@engine.json",
            "--backends",
            "stock",
        ]
    )
    [(_, one)] = bench.plan(options, tmp_path)
    assert one["k"] == 3 and one["engine"]["max_model_len"] == 4096 and one["engine"]["model"] == "org/name"
    assert one["engine"]["speculative_config"]["model"] == str(tmp_path / "draft")
    assert one["engine"]["attention_config"]["backend"] == "X"
    assert "load_format" not in one["engine"] and "compilation_config" not in one["engine"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backends", "stock,fast"], "--backends: wanted some of stock, patched"),
        (["--batch", "1,x"], "--batch: wanted whole numbers from 1"),
        (["--context", "0"], "--context: wanted whole numbers from 1"),
        (["--engine", "{"], "--engine: wanted a JSON object or @FILE"),
        (["--engine", "@missing.json"], "--engine: wanted a JSON object or @FILE"),
        (["--speculative-config", "[1]"], "--speculative-config: wanted a JSON object, found list"),
        (
            ["--speculative-config", '{"num_speculative_tokens": "x"}'],
            "wanted a whole num_speculative_tokens",
        ),
        (["--repeats", "0"], "--repeats: wanted at least 1"),
        (["--text", "missing.txt"], "--text: wanted a text file"),
        (["--text", __file__], "has no tokenizer"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, options, said):
    assert cli.main(["bench", "--model", "dummy", "--out-folder", str(tmp_path / "out"), *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-specpatch bench: ") and said in line


def test_no_gpu_is_said_in_one_line(clean_environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vllm_specpatch.cli", "bench", "--model", "dummy"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(CUDA_VISIBLE_DEVICES=""),
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "vllm-specpatch bench: no CUDA GPU"
    )
    report = json.loads((tmp_path / "specpatch-bench" / "bench.json").read_text())
    assert report["compared"] is False and "no CUDA GPU" in report["trouble"]


# -- a worker of ours under the real probe -------------------------------------------------------------


class BaseBuilder:
    def build(self):
        time.sleep(0.001)


class Builder(BaseBuilder):
    def build(self):
        super().build()
        return "built"


Builder.__module__ = "vllm.v1.attention.backends.flashinfer"


class Speculator:
    def __init__(self):
        self.decode_cudagraph_manager = types.SimpleNamespace(graphs={1: 0, 2: 0})

    def propose(self):
        return "drafts"


class Runner:
    """A V2 runner as the probe sees it: two builds and one proposal a step."""

    def __init__(self):
        self.builder, self.speculator = Builder(), Speculator()
        self.attn_groups = [[types.SimpleNamespace(metadata_builders=[self.builder])]]
        self.cudagraph_manager = types.SimpleNamespace(graphs={1: 0})

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        assert self.builder.build() == "built" and self.builder.build() == "built"
        return self.speculator.propose()


Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


#: Prompts that prefill was asked about, batch by batch.
scored = []


class Output:
    def __init__(self, ids, logprobs):
        at = [{i: types.SimpleNamespace(logprob=-1.0), 99: types.SimpleNamespace(logprob=-3.0)} for i in ids]
        self.outputs = [types.SimpleNamespace(token_ids=ids, logprobs=at if logprobs else None)]


class Scored(Output):
    """Of a prompt whose tokens prefill finds less likely than decoding did, by half a nat."""

    def __init__(self, prompt):
        super().__init__([0], None)
        self.prompt_logprobs = [None, *({i: types.SimpleNamespace(logprob=-1.5)} for i in prompt[1:])]


class FakeLLM:
    """Schedules like vLLM does: a prefill step per request, then ``accepted`` tokens a step and request."""

    accepted = 2

    def __init__(self, **engine):
        self.k = engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.worker = types.SimpleNamespace(model_runner=Runner())
        self.llm_engine = self
        self.scheduler = types.SimpleNamespace(make_spec_decoding_stats=lambda stats, **counts: None)
        self.engine_core = types.SimpleNamespace(engine_core=types.SimpleNamespace(scheduler=self.scheduler))
        self.model_config = types.SimpleNamespace(get_vocab_size=lambda: 1000)
        mode = types.SimpleNamespace(name="FULL_AND_PIECEWISE")
        self.vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(cudagraph_mode=mode),
            speculative_config=types.SimpleNamespace(num_speculative_tokens=self.k),
            scheduler_config=types.SimpleNamespace(
                max_num_seqs=engine["max_num_seqs"], max_num_batched_tokens=8192
            ),
        )

    def collective_rpc(self, function, args=()):
        return [function(self.worker, *args)]

    def step(self, scheduled, fresh=()):
        running = [name for name in scheduled if name not in fresh]
        output = types.SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[types.SimpleNamespace(req_id=name) for name in fresh],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=running, num_output_tokens=[1] * len(running)
            ),
            scheduled_spec_decode_tokens={name: [-1] * self.k for name in running if self.k},
        )
        self.worker.model_runner.execute_model(output, None)
        for _ in running if self.k else ():
            self.scheduler.make_spec_decoding_stats(
                None, num_draft_tokens=self.k, num_accepted_tokens=self.accepted - 1, request_id=""
            )

    def generate(self, prompts, sampling, use_tqdm):
        if getattr(sampling, "prompt_logprobs", None):
            scored.append([prompt["prompt_token_ids"] for prompt in prompts])
            return [Scored(prompt["prompt_token_ids"]) for prompt in prompts]
        made = dict.fromkeys(range(len(prompts)), 0)
        for i, prompt in enumerate(prompts):
            self.step({i: len(prompt["prompt_token_ids"])}, fresh=[i])
            made[i] = 1
        self.step({})  # vLLM runs steps without work, too
        while left := [i for i, n in made.items() if n < sampling.max_tokens]:
            self.step(dict.fromkeys(left, 1 + self.k))
            for i in left:
                made[i] = min(made[i] + self.accepted, sampling.max_tokens)
        return [
            Output(
                [(sum(p["prompt_token_ids"]) + n) % 97 for n in range(sampling.max_tokens)], sampling.logprobs
            )
            for p in prompts
        ]


DECIDED = {
    "state": "applied",
    "reason": "FULL CUDA graphs",
    "wanted": "",
    "found": "",
    "next_step": "",
    "route": "native",
}


def status(*decisions, **verdict):
    plain = {"state": "applied", "reason": "8 wrapped", "wanted": "", "found": "", "next_step": ""}
    return {"patches": {"the-patch": {**plain, **verdict, "decisions": list(decisions)}}}


@pytest.fixture
def fake_vllm(monkeypatch):
    torch = pytest.importorskip("torch")
    module = types.ModuleType("vllm")
    module.__version__, module.LLM = "0.0", FakeLLM
    module.SamplingParams = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(Runner, "model", torch.nn.Linear(2, 2), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake GPU")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(bench_probe, "activities", lambda host: cpu)
    import vllm_specpatch

    monkeypatch.setattr(vllm_specpatch, "status", lambda: status(DECIDED))
    return FakeLLM


def asked_for(tmp_path, **changes):
    [(_, one)] = planned(
        tmp_path, "--backends", "patched", "--batch", "1,3", "--context", "20", "--out", "40"
    )
    return {**one, **changes}


def test_a_child_measures_what_happened(fake_vllm, tmp_path, capsys):
    result = bench_run.measure(asked_for(tmp_path))
    assert result["gpu"] == "Fake GPU" and result["runner"] == 2 and result["route"] == "native"
    assert result["graphs"] == {"target": 1, "draft_decode": 2}
    assert list(result["cells"]) == ["ctx20_bs1", "ctx20_bs3"]
    for name, cell in result["cells"].items():
        # 41 tokens after the first, two a step, less the one step of the short generation.
        assert cell["steps"] == 20
        assert cell["tokens_per_step"] == 2 and cell["acceptance"] == 0.1429
        assert 2 <= cell["ms_per_step"] < 20  # two builds of a millisecond
        assert cell["builds_per_step"] == 2 and 1000 <= cell["host_us_per_build"] < 5000
        assert cell["repeatable"] and len(result["tokens"][name]["ids"][0]) == 42
        assert result["tokens"][name]["gaps"][0][0] == 2.0
        assert "profiler_error" not in cell
        # No GPU here, so the drafter launched nothing; that it ran was seen.
        assert cell["drafter"]["ran"] == "host"
    lines = [line.partition(" ") for line in capsys.readouterr().out.splitlines()]
    progress = [json.loads(rest) for kind, _, rest in lines if kind == "PROGRESS"]
    assert [data.get("cell", data.get("phase")) for data in progress] == [
        "engine",
        *result["cells"],
        "profile",
    ]


def test_nothing_is_timed_where_the_profiler_has_been(fake_vllm, tmp_path, monkeypatch):
    """After a trace CUDA graphs are launched more slowly, in the cells that come later."""
    seen = []

    def noted(name, kind, what):
        original = getattr(kind, name)

        def method(self, first, *rest, **options):
            seen.append((what, len(first) if what == "generate" else first))
            return original(self, first, *rest, **options)

        monkeypatch.setattr(kind, name, method)

    noted("generate", FakeLLM, "generate")
    noted("_open", bench_probe.Probe, "window")
    monkeypatch.setattr(bench_run, "say", lambda kind, data: seen.append((kind, data.get("cell"))))
    result = bench_run.measure(asked_for(tmp_path))
    windows = [("window", name) for name, _ in bench_probe.WINDOWS]
    first = seen.index(windows[0])
    assert ("PROGRESS", "ctx20_bs3") in seen[:first]
    # From the first window on: one generation for each cell's windows, of that cell's prompts.
    assert seen[first - 1 :] == [("generate", 1), *windows, ("generate", 3), *windows]
    assert all(cell["drafter"] and cell["ms_per_step"] for cell in result["cells"].values())


@pytest.mark.parametrize("out", [15, 60, 127])
def test_all_drafts_accepted_are_an_acceptance_of_one(fake_vllm, tmp_path, monkeypatch, out):
    """By the tokens that are returned it was 2, 1.08 and 1.07: the short generation's only decode step
    verifies 8 tokens, of which 7 are cut off."""
    monkeypatch.setattr(FakeLLM, "accepted", 8)
    result = bench_run.measure(asked_for(tmp_path, out=out, profile=False))
    for cell, batch in (("ctx20_bs1", 1), ("ctx20_bs3", 3)):
        numbers = result["cells"][cell]
        assert numbers["acceptance"] == 1.0 and numbers["tokens_per_step"] == 8.0
        assert numbers["tokens_per_s"] == pytest.approx(8e3 * batch / numbers["ms_per_step"], rel=0.01)


def run_of(steps, drafts, seconds=1.0):
    return {"seconds": seconds, "steps": steps, "drafts": drafts}


def test_steps_without_drafts_count_as_one_token():
    """N-gram drafters propose nothing where the text does not repeat."""
    # Ten decodes in five steps, four of them with 3 drafts each, half of which were accepted.
    run = run_of([[2, 1, 2], [2, 1, 2], [2, 1, 0], [2, 1, 0], [2, 1, 0]], [4, 12, 6])
    assert bench_run.draft_rate(run) == (1.6, 0.5)
    assert bench_run.draft_rate(run_of([[2, 1, 0]], None)) == (1.0, None)
    assert bench_run.draft_rate(run_of([[2, 1, 2]], [0, 0, 0])) == (None, None)


def test_a_scheduler_that_is_not_known_costs_the_rate_and_nothing_else(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_probe, "watch_drafts", lambda llm: None)
    answer = bench_run.measure(asked_for(tmp_path))
    cell = answer["cells"]["ctx20_bs3"]
    assert cell["ms_per_step"] > 0 and cell["builds_per_step"] == 2
    assert (cell["tokens_per_step"], cell["acceptance"], cell["tokens_per_s"]) == (None, None, None)
    bench.compare([answer])
    assert "ctx20_bs3" in bench.render([answer], 3)


def test_the_last_piece_of_a_prompt_is_no_decode():
    """It is as short as a decode where running requests leave a prompt all but its last tokens."""
    probe = bench_probe.Probe(Runner())
    probe.watch(7)
    probe.before(
        types.SimpleNamespace(
            num_scheduled_tokens={"a": 8, "b": 8, "c": 1},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=types.SimpleNamespace(req_ids=["a", "b", "c"], num_output_tokens=[3, 0, 3]),
            scheduled_spec_decode_tokens={"a": [-1] * 7},
        )
    )
    assert probe.steps == [[2, 0, 1]]


def test_the_dummy_model_gets_weights_before_anything_is_timed(fake_vllm, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    filled = []
    monkeypatch.setattr(Runner, "model", torch.nn.Linear(2, 2), raising=False)
    generate = FakeLLM.generate

    def timed(self, *args, **kwargs):
        filled.append(Runner.model.bias.detach().abs().sum().item())
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(FakeLLM, "generate", timed)
    bench_run.measure(asked_for(tmp_path, profile=False))
    assert set(filled) == {0.0}
    torch.nn.init.ones_(Runner.model.bias)
    bench_run.measure(asked_for(tmp_path, profile=False, random_weights=False))
    assert filled[-1] == 2.0, "a real model's weights were touched"


def test_prefill_is_asked_about_the_tokens_that_were_decoded(fake_vllm, tmp_path, monkeypatch):
    scored.clear()
    result = bench_run.measure(asked_for(tmp_path, profile=False, by_prefill=True))
    found = result["cells"]["ctx20_bs3"]["by_prefill"]
    assert found["verdict"] == "differ" and "logprobs 0.5000 apart" in found["text"]
    tokens = result["tokens"]["ctx20_bs3"]["ids"]
    assert [[len(prompt) for prompt in batch] for batch in scored] == [[62], [62] * 3]
    assert [prompt[20:] for prompt in scored[1]] == tokens


def test_the_probe_leaves_nothing_behind(fake_vllm, tmp_path):
    before = Builder.build
    bench_run.measure(asked_for(tmp_path))
    assert Builder.build is before


def test_an_engine_that_fails_while_profiled_keeps_its_timings(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_run.Bench, "profiled", lambda *arguments: 1 / 0)
    cells = bench_run.measure(asked_for(tmp_path))["cells"]
    assert len(cells) == 2
    for cell in cells.values():
        assert cell["ms_per_step"] > 0 and cell["profiler_error"] == "ZeroDivisionError: division by zero"


def test_a_broken_profiler_costs_its_numbers_and_nothing_else(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_probe, "gpu_time", lambda events: 1 / 0)
    cell = bench_run.measure(asked_for(tmp_path))["cells"]["ctx20_bs3"]
    assert cell["profiler_error"].startswith("ZeroDivisionError") and cell["gpu_idle_share"] is None
    assert cell["builds_per_step"] == 2 and cell["ms_per_step"] > 0


@pytest.mark.parametrize(
    ("most", "said"),
    [(8, "waited while nothing was prefilled, most likely for room"), (1, "max_num_seqs is 1")],
)
def test_requests_that_did_not_decode_together_are_noted(fake_vllm, tmp_path, monkeypatch, most, said):
    run = FakeLLM.generate

    def one_by_one(self, prompts, sampling, use_tqdm):
        return [run(self, [prompt], sampling, use_tqdm)[0] for prompt in prompts]

    monkeypatch.setattr(FakeLLM, "generate", one_by_one)
    asked = asked_for(tmp_path, profile=False)
    asked["engine"]["max_num_seqs"] = most
    cells = bench_run.measure(asked)["cells"]
    assert "note" not in cells["ctx20_bs1"]
    note = cells["ctx20_bs3"]["note"]
    assert note.startswith("never more than 1 of 3 requests decoded together: ") and said in note


PREFILL, LAST = [0, 0, 0], [1, 1, 1]


@pytest.mark.parametrize(
    ("steps", "batch", "said"),
    [
        ([PREFILL, [1, 0, 1], [2, 0, 2], [3, 1, 3]], 3, None),
        # A prompt in every step until all have begun; by then the first have ended.
        ([PREFILL, [1, 0, 1], [2, 0, 2], [2, 0, 2], [1, 1, 1]], 4, "ended before the last prompt"),
        ([PREFILL, [1, 0, 1], [2, 1, 2], [2, 1, 2], [1, 0, 1], LAST], 4, "never more than 2 of 4 requests"),
        ([PREFILL, [1, 0, 1], [2, 1, 2], [2, 1, 2], [1, 0, 1], LAST], 4, "room in the KV cache"),
        # Preempted and prefilled again.
        ([PREFILL, [3, 1, 3], [2, 1, 2], [2, 0, 2], LAST], 4, "room in the KV cache"),
        ([PREFILL, [4, 1, 4], [4, 1, 4], [1, 0, 1], LAST], 9, "max_num_batched_tokens are used up"),
        ([PREFILL, [6, 1, 6], PREFILL, [6, 1, 6]], 9, "max_num_seqs is 6"),
    ],
)
def test_why_requests_did_not_decode_together(steps, batch, said):
    limits = {"max_num_seqs": 6, "verifying": 4 if batch == 9 else 64}
    note = bench_run.decoded_apart([run_of(steps, None)], batch, limits)
    assert note is None if said is None else said in note


def test_text_prompts_are_pieces_of_the_text(fake_vllm, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("abcdefghij")
    monkeypatch.setattr(
        FakeLLM,
        "get_tokenizer",
        lambda self: types.SimpleNamespace(encode=lambda t: [*map(ord, t)]),
        raising=False,
    )
    result = bench_run.measure(asked_for(tmp_path, text=str(tmp_path / "text.txt"), profile=False))
    assert "cells" in result
    assert bench_run.text_prompts([1, 2, 3, 4], 6, 2) == [[1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4]]
    (tmp_path / "text.txt").write_text("")
    result = bench_run.measure(asked_for(tmp_path, text=str(tmp_path / "text.txt"), profile=False))
    assert "has no tokens" in result["cannot"]


def test_another_route_is_refused_before_anything_is_timed(fake_vllm, tmp_path):
    result = bench_run.measure(asked_for(tmp_path, variant="spec_mask", route="spec_mask"))
    assert "spec_mask wanted the route spec_mask; found native" in result["otherwise"]
    assert "cells" not in result


def rank(*decisions, backends=("flashinfer",), **verdict):
    return {"backends": list(backends), "status": status(*decisions, **verdict)}


REFUSED = {**DECIDED, "state": "refused", "reason": "the GPU is too old", "next_step": "buy one", "route": ""}
FELL_BACK = {**DECIDED, "reason": "route native serves a group instead of spec_mask: no nvcc"}


@pytest.mark.parametrize(
    ("variant", "ranks", "mode", "said"),
    [
        ("stock", [rank(state="disabled", reason="off")], "PIECEWISE", None),
        ("stock", [rank(DECIDED)], "FULL", "was asked for stock vLLM; found the patch applied, route native"),
        ("stock", [rank(backends=["flash_attn"])], "FULL", "did not run on FLASHINFER; found"),
        ("flash_attn", [rank(backends=["flash_attn", "gdn_attn"])], "FULL", None),
        ("flash_attn", [rank(backends=["flash_attn", "flashinfer"])], "FULL", "did not run on FLASH_ATTN"),
        ("flash_attn", [rank(backends=[])], "FULL", "found the attention backends none"),
        ("patched", [rank(DECIDED), rank(DECIDED)], "FULL_AND_PIECEWISE", None),
        (
            "patched",
            [rank(REFUSED)],
            "PIECEWISE",
            "ended as stock vLLM (refused: the GPU is too old; next step: ",
        ),
        ("patched", [rank(state="late", reason="imported before")], "PIECEWISE", "(late: imported before)"),
        ("patched", [rank(DECIDED)], "PIECEWISE", "resolved cudagraph_mode to PIECEWISE; wanted FULL"),
        ("native", [rank(DECIDED)], "FULL", None),
        (
            "spec_mask",
            [rank({**DECIDED, "route": "spec_mask"}, FELL_BACK)],
            "FULL",
            "found native, spec_mask (route",
        ),
    ],
)
def test_a_variant_is_only_what_it_was_asked_to_be(variant, ranks, mode, said):
    asked = bench.VARIANTS[variant]
    request = {"variant": variant, "backend": asked.backend, "route": asked.route, "k": 7}
    found = bench_run.ended_otherwise(request, ranks, mode)
    assert found is None if said is None else said in found and "\n" not in found


# -- traces --------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), min_size=1, max_size=20)


@given(SPANS)
def test_busy_time_is_the_union_of_all_kernels(spans):
    events = [{"cat": "kernel", "ts": float(at), "dur": float(n)} for at, n in spans]
    noise = [{"cat": "cpu_op", "ts": 0.0, "dur": 1e6}]
    found = bench_probe.gpu_time(noise + events)
    covered = {tick for at, n in spans for tick in range(at, at + n)}
    assert found["busy_us"] == len(covered)
    assert found["span_us"] == max(at + n for at, n in spans) - min(at for at, _ in spans)


def launch(name, at, correlation):
    return {"cat": "cuda_runtime", "name": name, "ts": at, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation):
    return {"cat": "kernel", "name": "k", "ts": 0, "dur": 1, "args": {"correlation": correlation}}


def test_the_drafters_launches_are_told_from_the_targets():
    events = [
        {"cat": "user_annotation", "name": bench_probe.DRAFT, "ts": 100, "dur": 50},
        {"cat": "user_annotation", "name": bench_probe.DRAFT, "ts": 300, "dur": 50},
        {"cat": "gpu_user_annotation", "name": bench_probe.DRAFT, "ts": 0, "dur": 1000},
        launch("cudaGraphLaunch", 10, 1),  # the target's
        launch("cudaGraphLaunch", 110, 2),
        launch("cudaLaunchKernelExC", 120, 3),
        launch("cuLaunchKernel", 310, 4),
        launch("cudaMemcpyAsync", 130, 5),
        *(kernel(c) for c in (1, 1, 2, 2, 2, 3, 4)),
    ]
    assert bench_probe.draft_launches(events) == {
        "proposals": 2,
        "graph_launches": 1,
        "kernel_launches": 2,
        "graph_kernels": 3,
        "eager_kernels": 2,
    }


@pytest.mark.parametrize(("graph", "eager", "ran"), [(9, 3, "graph"), (1, 9, "eager"), (0, 0, "host")])
def test_where_the_drafter_ran(graph, eager, ran):
    draft = {
        "steps": 2,
        "proposals": 2,
        "graph_launches": 2,
        "kernel_launches": 4,
        "graph_kernels": graph,
        "eager_kernels": eager,
    }
    found = bench_run.window_numbers({"draft": draft, "gpu": {"steps": 1, "span_us": 10.0, "busy_us": 4.0}})
    assert found["drafter"]["ran"] == ran and found["drafter"]["graph_launches"] == 1
    assert found["gpu_idle_share"] == 0.6 and found["host_us_per_build"] is None


def test_a_real_profiler_trace_is_understood():
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(bench_probe.DRAFT):
        torch.ones(4).sum()
    found = bench_probe.draft_launches(bench_probe.trace_events(profiler))
    assert found["proposals"] == 1 and found["graph_launches"] == 0


# -- children ------------------------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Runs given code as the child's module."""

    def run(code, timeout=300.0, **environment):
        (tmp_path / "childish.py").write_text("import json, os, sys\n" + textwrap.dedent(code))
        monkeypatch.setattr(bench, "CHILD", "childish")
        seen = []
        result = bench.run_child(
            {"a": 1},
            {"PYTHONPATH": str(tmp_path), **environment},
            tmp_path / "child.log",
            timeout=timeout,
            progress=seen.append,
        )
        return result, seen

    return run


def test_a_childs_lines_are_sorted(child, tmp_path):
    result, seen = child(
        """
        print("INFO vLLM talks")
        print("PROGRESS " + json.dumps({"cell": 1}))
        print("to stderr", file=sys.stderr)
        print("RESULT " + json.dumps([json.loads(sys.argv[1]), os.environ["VLLM_SPECPATCH"]]))
        """,
        VLLM_SPECPATCH="0",
    )
    assert result == [{"a": 1}, "0"] and seen == [{"cell": 1}]
    assert "vLLM talks" in (tmp_path / "child.log").read_text()


def test_a_child_that_dies_is_one_line(child):
    with pytest.raises(bench.ChildFailed, match=r"^ValueError: no memory; see .*child\.log$"):
        child("raise ValueError('no memory')")


def test_a_child_says_what_its_configuration_lacked(child):
    with pytest.raises(bench.ChildFailed, match=r"^m\.ValidationError: 1 error for C k Input is wrong; see "):
        child(r"sys.exit('m.ValidationError: 1 error for C\nk\n  Input is wrong\n  For further information')")


LAST_WORDS = [
    ("[rank0]: AssertionError: Error in memory profiling. Initial free memory 42.45 GiB, current 43.12",),
    ("(EngineCore_DP0 pid=7) ERROR 11-30 20:39:38 [core.py:842] torch.OutOfMemoryError: CUDA out of memory.",
     "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ("KeyboardInterrupt",),
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
     "WARNING 11-30 20:39:30 [flashinfer.py:369] Failed to connect: (Caused by NameResolutionError: no host"),
    ("Killed",),
]  # fmt: skip


@pytest.mark.parametrize("lines", LAST_WORDS, ids=lambda lines: lines[0].split()[-1])
def test_the_cause_is_said_and_not_the_farewell(lines):
    """As vLLM 0.27.1 ends on a GPU that is full."""
    said = bench.LastWords()
    farewell = (
        "[rank0]:[W1130 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called"
    )
    for line in (
        "  raise RuntimeError(",
        "    ^^^^^",
        *lines,
        "",
        *([farewell] if lines != ("Killed",) else []),
    ):
        said.hear(line + "\n")
    assert lines[0].endswith(str(said)) and len(str(said)) >= len(lines[0].split(": ")[-1])


def test_a_child_that_hangs_leaves_no_process(child, tmp_path):
    with pytest.raises(bench.ChildFailed, match="no result after 3 s"):
        child(
            f"""
            import subprocess, time
            worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(tmp_path / "pid")!r}, "w").write(str(worker.pid))
            time.sleep(60)
            """,
            timeout=3.0,
        )
    assert all_gone([int((tmp_path / "pid").read_text())]), "the worker is still running"


#: A command as a process of its own, with a child of ours that waits beside a worker.
WAITING = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pids = pathlib.Path(__file__).with_name("pids")
pids.with_suffix(".new").write_text(f"{os.getpid()} {worker.pid}")
pids.with_suffix(".new").rename(pids)
time.sleep(60)
"""
COMMANDS = {
    "bench": "sys.exit(cli.main(['bench', '--model', 'dummy', '--backends', 'stock']))",
    "selftest": """
from vllm_specpatch import selftest
selftest.check_planner = selftest.check_decision = selftest.check_prebuilt = lambda *a: "good"
selftest.kernel_results = lambda *a: []
sys.exit(cli.main(["selftest", "--gpu"]))
""",
}


@pytest.fixture
def commanding(tmp_path, clean_environment):
    """Starts a command, waits for its child; returns the process and the ids of its child and worker."""
    started = []

    def start(command, before=""):
        (tmp_path / "childish.py").write_text("import os" + WAITING)
        # Whoever runs these tests with nohup, or in the background of a script, has them ignored.
        heard = "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        heard += "signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"import signal, sys\n{heard}\n{before}\n"
        code += "from vllm_specpatch import bench, cli\nbench.CHILD = 'childish'\n"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code + COMMANDS[command]],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**clean_environment(), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
        started.append(process)
        for _ in range(600):
            if (tmp_path / "pids").exists():
                return process, [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        pytest.fail("the command started no child")

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()
    if (tmp_path / "pids").exists():
        for pid in (tmp_path / "pids").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def all_gone(pids):
    for _ in range(100):  # a killed process stays until its parent, now init, has noticed
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("command", "number", "said"),
    [
        ("bench", signal.SIGTERM, "vllm-specpatch bench: interrupted while stock ran"),
        ("bench", signal.SIGHUP, "vllm-specpatch bench: interrupted while stock ran"),
        ("bench", signal.SIGINT, "vllm-specpatch bench: interrupted while stock ran"),
        ("selftest", signal.SIGTERM, "vllm-specpatch selftest: interrupted"),
    ],
)
def test_a_signal_ends_the_child_too(commanding, command, number, said):
    process, pids = commanding(command)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and errors.splitlines()[-1] == said
    assert all_gone(pids), "the child kept the GPU"


def test_nohup_stays(commanding):
    process, pids = commanding("bench", "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None and all(map(alive, pids))


def test_handlers_are_put_back():
    numbers = (signal.SIGTERM, signal.SIGHUP)
    ignored = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # or nothing is set under nohup
    try:
        handlers_are_put_back(numbers)
    finally:
        signal.signal(signal.SIGHUP, ignored)


def handlers_are_put_back(numbers):
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), bench.signals_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # does not disturb what is closed here
    assert [signal.getsignal(number) for number in numbers] == before


def test_another_thread_sets_no_handlers():
    seen = []

    def look():
        with bench.signals_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = pathlib.Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().split(")")[-1].split()[0] == "Z")


# -- the comparison ------------------------------------------------------------------------------------


def result(name, ms, tokens, route="stock", spread=0.1, **cell):
    numbers = {
        "ms_per_step": ms,
        "spread_ms": spread,
        "tokens_per_s": 100.0,
        "steps": 10,
        "tokens_per_step": 1.5,
        "acceptance": 0.1,
        "repeatable": True,
        "gpu_idle_share": 0.25,
        "host_us_per_build": 120.0,
        "drafter": {"ran": "graph", "graph_launches": 7.0, "kernel_launches": 3.0},
        **cell,
    }
    return {
        "variant": name,
        "route": route,
        "gpu": "Fake GPU",
        "ranks": 1,
        "runner": 2,
        "backends": ["flashinfer"],
        "versions": {"vllm": "0.0", "torch": "0.1"},
        "cudagraph_mode": "FULL",
        "graphs": {"target": 3},
        "cells": {"ctx1024_bs8": numbers},
        "tokens": {"ctx1024_bs8": said(tokens)},
    }


def said(tokens):
    rows = [[1.0] * len(row) for row in tokens]
    return {"ids": tokens, "logprobs": rows, "gaps": rows, "synthetic": False}


def test_ratios_noise_and_tokens():
    results = [
        result("stock", 10.0, [[1, 2], [3, 4]]),
        result("patched", 5.0, [[1, 2], [3, 5]], "native"),
        result("flash_attn", 10.05, [[1, 2], [3, 4]]),
    ]
    bench.compare(results)
    cells = [one["cells"]["ctx1024_bs8"] for one in results]
    assert [cell["ratio"] for cell in cells] == [1.0, 0.5, 1.005]
    assert [cell["noise"] for cell in cells] == [True, False, True]
    assert [c["tokens_vs_first"] for c in cells] == [
        "equal",
        "1/2 differ from token 1 (gap 1.000); logprobs 0.0000 apart, at most 0.000",
        "equal",
    ]
    assert [c["tokens_verdict"] for c in cells] == ["equal", "differ", "equal"]
    text = bench.render(results, 3)
    assert "0.500 " in text and "1.005~" in text and "graph (7+3)" in text and "25%" in text
    assert all(len(line) <= 115 for line in text.splitlines())
    [panel] = bench.series_of(results)
    assert panel.title == "context 1024"
    assert panel.lines["patched (native)"] == [(8, 5.0, 0.1)]


def test_single_runs_tell_no_noise(fake_vllm, tmp_path):
    [cell, _] = bench_run.measure(asked_for(tmp_path, repeats=1, profile=False))["cells"].values()
    assert cell["spread_ms"] is None
    results = [
        result("stock", 10.0, [[1]], spread=None),
        result("patched", 9.9, [[1]], "native", spread=None),
        result("flash_attn", 9.9, [[1]], spread=0.2),
    ]
    bench.compare(results)
    assert [one["cells"]["ctx1024_bs8"]["noise"] for one in results] == [None, None, None]
    text = bench.render(results, 1)
    assert "0.990?" in text and "1.000 " in text and "a single run" in text
    assert "? of single runs" in text
    [panel] = bench.series_of(results)
    assert panel.lines["patched (native)"] == [(8, 9.9, 0.0)]
    assert json.loads(json.dumps(results)) == results


def test_tokens_that_tell_nothing():
    """vLLM's dummy weights, or an engine that gives no logprobs."""
    results = [result("stock", 10.0, [[1, 2]]), result("patched", 5.0, [[1, 3]], "native")]
    bench.compare(results, None)
    cell = results[1]["cells"]["ctx1024_bs8"]
    assert cell["tokens_verdict"] == "cannot tell" and "dummy weights" in cell["tokens_vs_first"]
    results = [result("stock", 10.0, [[1, 2]]), result("patched", 5.0, [[1, 2]], "native")]
    results[1]["tokens"]["ctx1024_bs8"] = None
    bench.compare(results)
    assert results[1]["cells"]["ctx1024_bs8"]["tokens_vs_first"] == "cannot tell: no logprobs were had"
    assert "cannot tell" in bench.render(results, 3)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        (["--model", "dummy"], 1.0),
        (["--model", "dummy", "--kv-cache-dtype", "fp8"], 4.0),
        (["--model", "some/model"], 4.0),
        (["--model", "some/model", "--load-format", "dummy"], None),
    ],
)
def test_how_wide_the_limits_for_tokens_are(tmp_path, options, scale):
    asked = arguments(*options)
    [(_, one), *_] = bench.plan(asked, tmp_path)
    assert bench.scale_of(asked, one["engine"]) == scale


def test_other_tokens_of_the_dummy_model_are_wrong(monkeypatch, tmp_path, capsys):
    answers = {"stock": result("stock", 10.0, [[1]]), "patched": result("patched", 4.0, [[2]], "spec_mask")}
    children(monkeypatch, answers)
    options = ["--backends", "stock,patched", "--out-folder", str(tmp_path)]
    assert cli.main(["bench", "--model", "dummy", *options]) == 1
    assert cli.main(["bench", "--model", "some/model", *options]) == 0
    assert "differ" in capsys.readouterr().out


def test_an_engine_without_logprobs_keeps_its_timings(fake_vllm, tmp_path, monkeypatch):
    generate = FakeLLM.generate

    def refuse(self, prompts, sampling, use_tqdm):
        if sampling.logprobs:
            raise ValueError("max_logprobs is 0")
        return generate(self, prompts, sampling, use_tqdm)

    monkeypatch.setattr(FakeLLM, "generate", refuse)
    answer = bench_run.measure(asked_for(tmp_path, by_prefill=True))
    for cell in answer["cells"].values():
        assert cell["ms_per_step"] > 0 and cell["tokens_error"] == "ValueError: max_logprobs is 0"
        assert cell["repeatable"] and "by_prefill" not in cell
    assert set(answer["tokens"].values()) == {None}


def test_a_cell_without_a_time_is_shown_with_its_reason():
    broken = result("stock", 1.0, [[1]])
    broken["cells"]["ctx1024_bs8"] = {"note": "no decode step can be told", "repeatable": True}
    bench.compare([broken])
    assert "no decode step can be told" in bench.render([broken], 1)
    assert bench.series_of([broken]) == []


def children(monkeypatch, answers):
    monkeypatch.setattr(
        bench, "run_child", lambda asked, *a, **k: json.loads(json.dumps(answers[asked["variant"]]))
    )


def test_the_whole_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    children(
        monkeypatch,
        {"stock": result("stock", 10.0, [[1]]), "patched": result("patched", 4.0, [[1]], "spec_mask")},
    )
    out = tmp_path / "out"
    options = ["bench", "--model", "dummy", "--backends", "stock,patched", "--out-folder", str(out)]
    assert cli.main(options) == 0
    assert "0.400" in capsys.readouterr().out
    text = (out / "bench.json").read_text()
    report = json.loads(text)
    assert report["compared"] and "secret" not in text
    assert [r["cells"]["ctx1024_bs8"]["ratio"] for r in report["results"]] == [1.0, 0.4]
    assert "tokens" not in report["results"][0]
    ElementTree.parse(out / "bench.svg")
    assert cli.main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"]


def test_variants_on_other_routes_are_not_compared(monkeypatch, tmp_path, capsys):
    children(
        monkeypatch,
        {
            "stock": result("stock", 10.0, [[1]]),
            "patched": {"otherwise": "patched ended as stock vLLM (why)"},
        },
    )
    out = tmp_path / "out"
    code = cli.main(["bench", "--model", "dummy", "--backends", "stock,patched", "--out-folder", str(out)])
    assert code == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        "vllm-specpatch bench: nothing is compared: patched ended as stock vLLM (why)"
    )
    assert said.out == "" and not (out / "bench.svg").exists()
    report = json.loads((out / "bench.json").read_text())
    assert not report["compared"] and "ratio" not in report["results"][0]["cells"]["ctx1024_bs8"]


# -- the chart -----------------------------------------------------------------------------------------


@given(st.floats(0.01, 1e6), st.integers(2, 9))
def test_axis_steps_are_round_and_cover_the_range(top, ticks):
    step = chart.nice_step(top, ticks)
    digits = f"{step:.0e}"[0]
    assert digits in "125" and top <= step * ticks * (1 + 1e-6) and step <= top / ticks * 2.5 * (1 + 1e-6)


def test_a_chart_is_valid_and_shows_every_point():
    panels = [
        chart.Panel("context 1024", {"a<b": [(1, 5.0, 1.0), (8, 7.0, 0.0)], "c": [(1, 2.0, 0.0)]}),
        chart.Panel("context 8192", {"a<b": [(1, 9.0, 0.5)]}),
    ]
    root = ElementTree.fromstring(chart.lines("t & u", panels, x="batch", y="ms", note="n"))
    tips = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "a<b, context 1024, batch 8: 7" in tips and "t & u" in tips
    assert sum("batch" in (tip or "") for tip in tips) == 4
    # Higher times are further up, on one scale in both panels.
    marks = [n for n in root.iter("{http://www.w3.org/2000/svg}circle") if len(n)]
    heights = {n[0].text.rpartition(": ")[2]: float(n.get("cy")) for n in marks}
    assert heights["9"] < heights["7"] < heights["5"]
    ElementTree.fromstring(chart.lines("nothing", [], x="batch", y="ms"))
