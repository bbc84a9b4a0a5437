"""The ranks of a tensor-parallel group must promise the same CUDA graphs.

Each decides alone, and may decide otherwise than its neighbours: a node without the prebuilt module, a GPU
that fails the check of the kernels, no memory for a workspace. A rank with FULL graphs then runs passes at
capture that the others do not run, and its all-reduces wait for them forever, or meet other ones. So every
rank leaves its verdicts in torch's store, and before the first graph is captured looks at the others'. (Up to
vLLM 0.33 all ranks have decided by then: the executor answers initialize_from_config for all before it asks
for the capture, vllm/v1/executor/abstract.py.) The store is the process group's own: no collective, which a
rank without this package would not join.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..patch import Finding, State

#: For ranks that torchrun starts, which no executor keeps in step.
WAIT = timedelta(seconds=60)
PREFIX = "vllm-specpatch"


@dataclass(frozen=True)
class Group:
    """``ranks``: of the group, in the numbers of ``store``; ``own`` is one of them."""

    store: Any
    own: int
    ranks: tuple[int, ...]

    def key(self, number: int, rank: int) -> str:
        members = "-".join(map(str, self.ranks))
        return f"{PREFIX}/{members}/{number}/{rank}"


def tensor_parallel() -> Group | None:
    """This process's group; None without one, or where torch or vLLM do not say."""
    try:
        from torch.distributed import is_initialized
        from torch.distributed.distributed_c10d import _get_default_store
        from vllm.distributed.parallel_state import get_tp_group

        if not is_initialized():
            return None
        group = get_tp_group()
        if len(group.ranks) < 2:
            return None
        return Group(_get_default_store(), group.rank, tuple(group.ranks))
    except Exception:
        return None  # a safeguard must not be what fails


@dataclass
class Told:
    """About one configuration: its number, the gate's answers, and how many of them were compared."""

    number: int
    answers: list[tuple[bool, str]] = field(default_factory=list)
    compared: int = 0


class Agreement:
    """What this process told the others about its configurations, and what they told it."""

    def __init__(self) -> None:
        self._said: dict[int, Told] = {}
        self._number = 0

    def tell(self, vllm_config: Any, full: bool, reason: str) -> None:
        """One answer of the gate. Configurations are numbered in the order in which they are first asked
        about, which is the same on all ranks."""
        told = self._said.get(id(vllm_config))
        if told is None:
            told = self._said[id(vllm_config)] = Told(self._number)
            self._number += 1
            # ids are reused: a new configuration must not go on with the answers of an old one.
            weakref.finalize(vllm_config, self._said.pop, id(vllm_config), None)
        told.answers.append((full, reason))
        group = tensor_parallel()
        if group is not None:
            try:
                group.store.set(group.key(told.number, group.own), json.dumps(told.answers))
            except Exception:
                return  # the others will say that this rank is missing

    def disagreement(self, vllm_config: Any) -> Finding | None:
        """Looks once per answer. REFUSED where another rank has decided otherwise; FAILED where one has
        said nothing, which may mean that it has not got this package. None: all have said the same."""
        told = self._said.get(id(vllm_config))
        if told is None or told.compared == len(told.answers):
            return None
        group = tensor_parallel()
        if group is None:
            return None
        told.compared = len(told.answers)
        others = {rank: group.key(told.number, rank) for rank in group.ranks if rank != group.own}
        try:
            group.store.wait(list(others.values()), WAIT)
        except Exception:
            silent = [rank for rank, key in others.items() if not self._has(group.store, key)]
            return Finding(
                State.FAILED,
                f"rank {', '.join(map(str, silent))} said nothing about CUDA graphs, and capture may hang",
                wanted="this package on every rank",
                found=f"rank {group.own} with FULL CUDA graphs",
                next_step="install the same package on every node, or set VLLM_SPECPATCH=0 on all",
            )
        for rank, key in others.items():
            for (ours, because), (theirs, reason) in zip(told.answers, json.loads(group.store.get(key))):
                if ours != theirs:
                    mine, other = ("FULL graphs" if full else "stock" for full in (ours, theirs))
                    return Finding(
                        State.REFUSED,
                        "the ranks of a tensor-parallel group would wait for each other forever",
                        wanted="the same CUDA graphs on every rank",
                        found=f"{mine} on rank {group.own} ({because}), {other} on rank {rank} ({reason})",
                        next_step="make the reason go away, or set VLLM_SPECPATCH=0 on all ranks",
                    )
        return None

    @staticmethod
    def _has(store: Any, key: str) -> bool:
        try:
            return bool(store.check([key]))
        except Exception:
            return False
