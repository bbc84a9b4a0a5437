"""Ranks of a tensor-parallel group that decide differently are found before the first graph is captured."""

import datetime
import gc
import json
import os
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from vllm_specpatch.errors import SpecPatchError
from vllm_specpatch.patch import State
from vllm_specpatch.patches import ranks


class Config:
    """Stands for a VllmConfig: has an identity, and can be referred to weakly."""


@pytest.fixture
def group(monkeypatch):
    """Lets ``tensor_parallel()`` answer as in one of two processes: ``group(rank)``."""
    import torch

    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "WAIT", datetime.timedelta(milliseconds=50))

    def process(rank, members=(4, 5)):
        monkeypatch.setattr(ranks, "tensor_parallel", lambda: ranks.Group(store, rank, members))

    process(4)
    process.store = store
    return process


def told(group, rank, *answers):
    """An agreement of ``rank`` that was told ``answers`` about one configuration; and the configuration."""
    agreement, config = ranks.Agreement(), Config()
    group(rank)
    for full in answers:
        agreement.tell(config, full, f"because of {rank}")
    return agreement, config


def test_ranks_that_agree_go_on(group):
    there, other = told(group, 5, True, False)
    here, config = told(group, 4, True, False)
    assert here.disagreement(config) is None
    group(5)
    assert there.disagreement(other) is None


def test_ranks_that_do_not_are_told_from_either_side(group):
    there, other = told(group, 5, True, False)
    here, config = told(group, 4, True, True)
    finding = here.disagreement(config)
    assert finding.state is State.REFUSED and finding.wanted == "the same CUDA graphs on every rank"
    assert finding.found == "FULL graphs on rank 4 (because of 4), stock on rank 5 (because of 5)"
    group(5)
    assert there.disagreement(other).found.startswith("stock on rank 5")


def test_what_only_one_was_asked_so_far_is_no_disagreement(group):
    told(group, 5, True)
    here, config = told(group, 4, True, False)
    assert here.disagreement(config) is None


def test_a_rank_that_says_nothing_is_named(group):
    group(4, (4, 5, 6))
    here, config = ranks.Agreement(), Config()
    here.tell(config, True, "")
    group(5, (4, 5, 6))
    ranks.Agreement().tell(Config(), True, "")
    group(4, (4, 5, 6))
    finding = here.disagreement(config)
    assert finding.state is State.FAILED and finding.reason.startswith("rank 6 said nothing")
    assert here.disagreement(config) is None, "said twice"


def test_every_configuration_is_compared_with_its_own(group):
    """Also where one has gone and another has its id."""
    here = ranks.Agreement()
    group(5)
    there, others = ranks.Agreement(), [Config(), Config()]
    for config, full in zip(others, (True, False), strict=True):
        there.tell(config, full, "there")
    group(4)
    first = Config()
    here.tell(first, True, "here")
    assert here.disagreement(first) is None
    del first
    gc.collect()
    second = Config()
    here.tell(second, True, "here")
    assert here.disagreement(second).state is State.REFUSED
    assert here._said.keys() == {id(second)}


def test_an_answer_after_the_first_look_is_looked_at(group):
    there, other = told(group, 5, True)
    here, config = told(group, 4, True)
    assert here.disagreement(config) is None
    group(5)
    there.tell(other, False, "no memory")
    group(4)
    assert here.disagreement(config) is None, "nothing new was said here"
    here.tell(config, True, "")
    assert here.disagreement(config).state is State.REFUSED


def test_alone_nobody_is_asked(vllm_on_gpu):
    assert ranks.tensor_parallel() is None
    here, config = ranks.Agreement(), Config()
    here.tell(config, True, "")
    assert here.disagreement(config) is None


def test_a_store_that_fails_costs_nothing(group, monkeypatch):
    class Broken:
        def set(self, key, value):
            raise RuntimeError("gone")

        wait = check = set

    monkeypatch.setattr(ranks, "tensor_parallel", lambda: ranks.Group(Broken(), 4, (4, 5)))
    here, config = ranks.Agreement(), Config()
    here.tell(config, True, "")
    assert here.disagreement(config).state is State.FAILED


# -- in the builder --------------------------------------------------------------------------------


def say(group, b, answers):
    """Rank 5 about the configuration that is asked about next here."""
    patch = vars(type(b.builder))["build"]._self_wrapper.__self__
    number = patch._ranks._number
    group.store.set(ranks.Group(group.store, 5, (4, 5)).key(number, 5), json.dumps(answers))
    return patch


def test_a_capture_goes_on_where_all_ranks_have_full_graphs(bench, group):
    b = bench(k=3)
    say(group, b, [[True, "spec_mask"]])
    assert b.support() == "UNIFORM_BATCH"
    b.build([4] * 2, [30] * 2, capture=True)


def test_a_capture_is_refused_where_another_rank_runs_stock(bench, group):
    b = bench(k=3)
    patch = say(group, b, [[False, "the spec-mask module is not built"]])
    assert b.support() == "UNIFORM_BATCH"
    with pytest.raises(SpecPatchError, match=r"stock on rank 5 \(the spec-mask module is not built\)"):
        b.build([4] * 2, [30] * 2, capture=True)
    assert not b.builder.specpatch_captured.capturing
    b.build([4] * 2, [30] * 2)  # nothing of it is asked in serving
    assert patch.context is not None


def test_a_silent_rank_is_said_and_not_waited_for_again(bench, group, monkeypatch):
    b = bench(k=3)
    patch = say(group, b, [])
    group.store.delete_key(ranks.Group(group.store, 5, (4, 5)).key(patch._ranks._number, 5))
    decided = []
    monkeypatch.setattr(
        patch, "context", SimpleNamespace(settings=patch.context.settings, decided=decided.append)
    )
    assert b.support() == "UNIFORM_BATCH"
    for _ in range(2):
        b.build([4] * 2, [30] * 2, capture=True)
    assert [finding.reason.split(",")[0] for finding in decided] == ["rank 5 said nothing about CUDA graphs"]


def test_a_rank_that_fails_tells_the_others(bench, group, monkeypatch, route):
    b = bench(k=3)
    patch = say(group, b, [[True, "spec_mask"]])
    number = patch._ranks._number
    monkeypatch.setattr(patch, "commitment", lambda *_: 1 / 0)
    assert b.support() == "UNIFORM_SINGLE_TOKEN_DECODE"
    here = json.loads(group.store.get(ranks.Group(group.store, 4, (4, 5)).key(number, 4)))
    assert here == [[False, "ZeroDivisionError: division by zero"]]


# -- vLLM's own groups ------------------------------------------------------------------------------

TWO = textwrap.dedent("""
    import sys

    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_specpatch.patches import ranks

    rank, port = int(sys.argv[1]), sys.argv[2]
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=2, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}", local_rank=rank,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(2, backend="gloo")
    agreement, other = ranks.Agreement(), VllmConfig(device_config=DeviceConfig("cpu"))
    agreement.tell(config, True, "")
    agreement.tell(other, rank == 0, f"reason {rank}")
    print("FOUND", agreement.disagreement(config))
    print("FOUND", agreement.disagreement(other))
    parallel_state.torch.distributed.barrier()
""")


def test_two_processes_of_vllm_find_each_other(clean_environment, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", TWO, rank, port],
            cwd=tmp_path,
            # The release under test comes by PYTHONPATH (tests/upstream/test_build_on_releases.py).
            env=clean_environment(VLLM_SPECPATCH="0", PYTHONPATH=os.environ.get("PYTHONPATH", "")),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=240)[0] for process in running]
    found = [[line for line in text.splitlines() if line.startswith("FOUND")] for text in said]
    assert all(len(lines) == 2 for lines in found), said[0][-2000:]
    assert [lines[0] for lines in found] == ["FOUND None"] * 2
    assert "FULL graphs on rank 0 (reason 0), stock on rank 1 (reason 1)" in found[0][1]
    assert "stock on rank 1 (reason 1), FULL graphs on rank 0 (reason 0)" in found[1][1]
