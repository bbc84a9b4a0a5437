"""Activation: turns the series into wrapt post-import hooks, and keeps the record of what became of them.

wrapt hooks are registered by string, so a patch file is imported only when its target is. wrapt makes the
target's import fail if a hook raises (its importer.py says so); everything here is therefore caught,
recorded and logged once, except in strict mode, where failing the import is the purpose.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import wrapt

from . import __version__, gate
from .errors import Refused
from .ledger import Ledger
from .patch import Entry, Finding, Patch, Record, State
from .settings import Settings
from .settings import read as read_settings

#: The module that lists the patches; a string, because the engine knows nothing of any patch.
SERIES_MODULE = "vllm_specpatch.patches"


def load_patches(entries: Iterable[Entry] | None = None) -> list[Patch]:
    """The patches of these entries (default: of the whole series), in order. Imports their files."""
    if entries is None:
        entries = importlib.import_module(SERIES_MODULE).SERIES
    return [importlib.import_module(entry.module).PATCH for entry in entries]


class Engine:
    """The state of the package in this process. One instance, :data:`engine`; tests make their own."""

    def __init__(self, series_module: str = SERIES_MODULE) -> None:
        self.series_module = series_module
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.settings: Settings | None = None
        self.doors: list[str] = []
        self.entries: tuple[Entry, ...] = ()
        self.records: dict[str, Record] = {}
        self.retired = False
        self._said: set[str] = set()

    # -- activation ------------------------------------------------------------------------------

    def activate(self, door: str, *, whole: ModuleType | None = None) -> None:
        """Arms the hooks; the second and later calls only note the door. Raises in strict mode only.

        ``whole``: a target that was just executed and that nobody has seen yet (:meth:`apply_in_source`).
        """
        with self.lock:
            self.doors.append(door)
            if self.settings is not None or self.retired:
                self._refuse()
                return
            self.entries = importlib.import_module(self.series_module).SERIES
            names = frozenset(entry.name for entry in self.entries)
            self.settings = read_settings(os.environ, names)
            disabled = self._why_disabled()
            if disabled is not None:
                self.records = {name: Record(disabled) for name in names}
                self._refuse()
                return
            for entry in self.entries:
                self.records[entry.name] = Record(
                    Finding(State.WAITING, f"{entry.target} is not imported yet")
                )
            groups = {entry.group or entry.name: entry.target for entry in self.entries}
        for group, target in groups.items():
            if whole is not None and target == whole.__name__:
                continue
            if target in sys.modules:
                self._group_is_late(group, target)
            else:
                wrapt.register_post_import_hook(_GroupHook(self, group), target)

    def _why_disabled(self) -> Finding | None:
        assert self.settings is not None
        if self.settings.error:
            self.say(logging.ERROR, self.settings.error)
            return Finding(State.DISABLED, self.settings.error)
        if self.settings.off:
            return Finding(State.DISABLED, "VLLM_SPECPATCH=off")
        if sys.flags.isolated or sys.flags.ignore_environment:
            # The same rule as bootstrap.watch(): no door opens in a Python that ignores its environment.
            return Finding(State.DISABLED, "Python runs with -I or -E")
        return None

    def _refuse(self) -> None:
        """In strict mode every door raises, whatever was caught before, while there is trouble."""
        if self.settings is None or not self.settings.strict or self.retired:
            return
        if self.settings.error:
            raise Refused(self.settings.error)
        for record in self.records.values():
            if record.finding.state.is_trouble:
                raise Refused(f"vllm-specpatch {__version__}: {record.finding}")

    def _group_is_late(self, group: str, target: str) -> None:
        finding = Finding(
            State.LATE,
            f"{target} was imported before vllm-specpatch",
            wanted="the package active before vLLM loads its attention backends",
            found=f"{target} already imported when the {self.doors[-1]} ran",
            next_step="install with pip into the environment's site-packages, so that the start-up hook runs",
        )
        self.settle_group(group, finding)

    # -- applying --------------------------------------------------------------------------------

    def apply_in_source(self, module: ModuleType) -> None:
        """The door of a vLLM whose source was patched (patches/diffs): the last statement of a target module.

        The same gates decide and the same edits are made as by the hooks; where those are armed as well, they
        find the group settled.
        """
        self.activate(f"source of {module.__name__}", whole=module)
        groups = {e.group or e.name for e in self.entries if e.target == module.__name__}
        for group in groups:
            self.apply_group(group, module)

    def _members(self, group: str) -> list[Entry]:
        return [entry for entry in self.entries if (entry.group or entry.name) == group]

    def _waits(self, group: str) -> bool:
        return {self.records[e.name].finding.state for e in self._members(group)} == {State.WAITING}

    def apply_group(self, group: str, module: ModuleType) -> None:
        """Decide first (all gates of all patches of the group), then act (one ledger call)."""
        with self.lock:
            if self.retired or not self._waits(group):
                return
            try:
                finding = self._apply_group(group, module)
            except Exception as e:
                self.say(logging.ERROR, f"defect, nothing was patched:\n{traceback.format_exc()}")
                finding = Finding(
                    State.FAILED,
                    f"{type(e).__name__}: {e}",
                    next_step="report this log line; vLLM runs stock",
                )
            self.settle_group(group, finding)

    def _apply_group(self, group: str, module: ModuleType) -> Finding:
        assert self.settings is not None
        members = self._members(group)
        skipped = [entry.name for entry in members if entry.name in self.settings.skip]
        if skipped:
            return Finding(State.DISABLED, f"VLLM_SPECPATCH_SKIP names {', '.join(skipped)}")
        patches = load_patches(members)
        for patch in patches:
            refusal = gate.check(patch, allow_unknown=self.settings.allow_unknown)
            if refusal is not None:
                return refusal
        edits = [
            (patch.name, edit)
            for patch in patches
            for edit in patch.edits(module, PatchContext(self, patch.name, self.settings))
        ]
        self.ledger.apply(module, edits)
        return Finding(State.APPLIED, f"{len(edits)} attributes of {module.__name__} wrapped")

    def settle_group(self, group: str, finding: Finding) -> None:
        """Writes the state after the work, says trouble once, and raises it in strict mode."""
        assert self.settings is not None
        members = self._members(group)
        for entry in members:
            self.records[entry.name] = Record(finding)
        asked = self.settings.asked and finding.state is State.DISABLED
        if finding.state.is_trouble or asked:
            self.say(logging.WARNING, f"not applied ({finding.state.value}): {finding}")
        if finding.state.is_trouble and self.settings.strict:
            # wrapt has dropped the hook that we are called from: without this, whoever catches the error and
            # imports the target again would have it unpatched.
            sys.meta_path.insert(0, _Refusing(self, {entry.target for entry in members}))
            self._refuse()

    # -- undo and report -------------------------------------------------------------------------

    def deactivate(self) -> list[str]:
        with self.lock:
            self.retired = True  # hooks that still wait must not apply later
            gc.collect()  # what was made while patched may be in cycles
            lines = self.ledger.restore()
            if lines:
                lines.append("captured CUDA graphs and builders made while patched go on as captured")
            for record in self.records.values():
                record.finding = Finding(State.DISABLED, "unpatch() was called")
            return lines

    def status(self) -> dict[str, Any]:
        with self.lock:
            settings = self.settings or Settings()
            return {
                "version": __version__,
                "mode": settings.mode,
                "route": settings.route,
                "doors": list(self.doors),
                "error": settings.error,
                "patches": {
                    name: {**_plain(record.finding), "decisions": [dict(d) for d in record.decisions]}
                    for name, record in self.records.items()
                },
            }

    def say(self, level: int, text: str) -> None:
        """One line through vLLM's logger; the same line only once per process."""
        if text not in self._said:
            self._said.add(text)
            vllm_logger().log(level, "vllm-specpatch %s: %s", __version__, text)


class _GroupHook:
    """The callable that wrapt keeps; an object, so that its repr names the group in a traceback."""

    def __init__(self, engine: Engine, group: str) -> None:
        self.engine, self.group = engine, group

    def __call__(self, module: ModuleType) -> None:
        self.engine.apply_group(self.group, module)


class _Refusing:
    """A meta path finder that finds nothing; in strict mode it keeps refused targets from being imported."""

    def __init__(self, engine: Engine, targets: set[str]) -> None:
        self.engine, self.targets = engine, targets

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.targets:
            self.engine._refuse()


class PatchContext:
    """See :class:`vllm_specpatch.patch.Context`."""

    def __init__(self, engine: Engine, patch: str, settings: Settings) -> None:
        self._engine, self._patch, self.settings = engine, patch, settings

    def decided(self, finding: Finding, **facts: Any) -> None:
        record = self._engine.records[self._patch]
        decision = {**_plain(finding), **facts}
        if decision not in record.decisions:
            record.decisions.append(decision)
        detail = ", ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, ""))
        text = f"{self._patch} {finding.state.value}: {finding}" + (f" ({detail})" if detail else "")
        asked = self.settings.asked and finding.state is not State.APPLIED
        self._engine.say(logging.WARNING if finding.state.is_trouble or asked else logging.INFO, text)
        if finding.state.is_trouble and self.settings.strict:
            raise Refused(f"vllm-specpatch {__version__}: {finding}")


def _plain(finding: Finding) -> dict[str, str]:
    return {**asdict(finding), "state": finding.state.value}


def vllm_logger() -> logging.Logger:
    """A child of vLLM's logger, so that its level, format and handlers apply once vLLM has set them."""
    return logging.getLogger("vllm.specpatch")


engine = Engine()


def activate(door: str) -> None:
    try:
        engine.activate(door)
    except Refused:
        raise
    except Exception:
        # A door must never break the host process.
        engine.say(logging.ERROR, f"defect, nothing was patched:\n{traceback.format_exc()}")


def apply_in_source(module_name: str) -> None:
    """What a vLLM patched with patches/diffs calls. Raises in strict mode only."""
    try:
        engine.apply_in_source(sys.modules[module_name])
    except Refused:
        raise
    except Exception:
        engine.say(logging.ERROR, f"defect, nothing was patched:\n{traceback.format_exc()}")


def deactivate() -> list[str]:
    return engine.deactivate()


def current_status() -> dict[str, Any]:
    return engine.status()
