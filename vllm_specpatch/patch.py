"""The data that a patch is made of, and the verdicts about it. Pure: no vLLM, no hooks, no side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, Protocol

from .settings import Settings


class State(str, Enum):
    """Where a patch stands in this process."""

    APPLIED = "applied"
    WAITING = "waiting"  # its target is not imported yet
    NOT_NEEDED = "not needed"  # this vLLM, or this configuration, has nothing to fix
    DISABLED = "disabled"  # the user said so
    REFUSED = "refused"  # a gate said no; vLLM stays stock
    LATE = "late"  # its target was imported before us
    FAILED = "failed"  # an error of ours; rolled back

    @property
    def is_trouble(self) -> bool:
        """True where the user gets less than he installed the package for, and must hear of it."""
        return self in (State.REFUSED, State.LATE, State.FAILED)


@dataclass(frozen=True)
class Finding:
    """One verdict. A "no" says what was wanted, what was found, and the next step."""

    state: State
    reason: str
    wanted: str = ""
    found: str = ""
    next_step: str = ""

    def __str__(self) -> str:
        parts = [self.reason]
        parts += [f"wanted {self.wanted}"] if self.wanted else []
        parts += [f"found {self.found}"] if self.found else []
        parts += [f"next step: {self.next_step}"] if self.next_step else []
        return "; ".join(parts)


class Context(Protocol):
    """What the engine lends to a patch at run time."""

    settings: Settings

    def decided(self, finding: Finding, **facts: Any) -> None:
        """Records a decision about one configuration and logs it once per process.

        ``facts`` are shown in the line and in ``status()``: route, gpu, vllm, flashinfer, and so on.
        Raises :class:`~vllm_specpatch.errors.Refused` in strict mode if ``finding.state.is_trouble``.
        """


#: ``(wrapped, instance, args, kwargs)``, as wrapt calls it.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Edit:
    """Wrap one attribute: ``owner`` is a class of the target module, or "" for the module itself.

    ``in_use``: whether something that was made while patched would go wrong without it; then it outlives
    ``unpatch()``, and must pass through for everything else.
    """

    owner: str
    name: str
    wrapper: Wrapper
    in_use: Callable[[], bool] = lambda: False

    @property
    def qualname(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


@dataclass(frozen=True)
class Patch:
    """One patch. Making it changes nothing.

    ``versions``: distribution name -> specifier of the *release* (dev and local parts of the installed
    version are dropped first; the digests then decide).
    ``digests``: ``"module:qualname"`` -> {sha256 of its raw source: the releases it was read in, or ``from
    DISTRIBUTION RELEASE`` in their order}. Covers everything that is wrapped and everything that the wrappers
    rely on. Append when a release was checked; replace when old releases are dropped.
    ``edits``: called with the imported target module and the context; returns what to wrap, and changes
    nothing itself.
    """

    name: str
    target: str
    versions: Mapping[str, str]
    digests: Mapping[str, Mapping[str, str]]
    edits: Callable[[ModuleType, Context], Sequence[Edit]]
    summary: str = ""
    group: str = ""
    #: Name of a part -> digests that only this part relies on. It checks them itself and stands aside if they
    #: do not match; the patch applies without it.
    parts: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A line of the series: how the engine reaches a patch without importing it.

    ``module`` holds the ``PATCH`` object. Patches with the same ``group`` share one target and are decided,
    applied and rolled back together.
    """

    name: str
    module: str
    target: str
    group: str = ""


@dataclass
class Record:
    """What happened to one patch in this process."""

    finding: Finding
    decisions: list[dict[str, Any]] = field(default_factory=list)
