"""The only place that sets an attribute, and therefore the only undo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from .errors import SpecPatchError
from .patch import Edit

_INHERITED = object()  # the attribute came from a base class: undo deletes ours


@dataclass(frozen=True)
class Change:
    """One attribute that was set: where, what was there, what is there now."""

    patch: str
    where: str
    owner: Any
    name: str
    original: Any
    replacement: Any
    in_use: Callable[[], bool]


class Ledger:
    """Changes of this process, oldest first. Not thread-safe: the engine holds its lock."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._changes)

    def apply(self, module: ModuleType, edits: Sequence[tuple[str, Edit]]) -> None:
        """Applies all ``(patch name, edit)`` pairs, or none: an error restores those already made.

        Two steps: first every original is looked up, so that a missing attribute changes nothing; then the
        attributes are set, each read back.
        """
        planned = []
        for patch, edit in edits:
            owner = getattr(module, edit.owner) if edit.owner else module
            here = vars(owner)
            original = here[edit.name] if edit.name in here else _inherited(owner, edit.name)
            replacement = wrapt.FunctionWrapper(original, edit.wrapper)
            where = f"{module.__name__}:{edit.qualname}"
            kept = original if edit.name in here else _INHERITED
            planned.append(Change(patch, where, owner, edit.name, kept, replacement, edit.in_use))
        done: list[Change] = []
        try:
            for change in planned:
                done.append(change)
                setattr(change.owner, change.name, change.replacement)
                if vars(change.owner).get(change.name) is not change.replacement:
                    raise SpecPatchError(f"{change.where} did not keep the value that was set")
        except BaseException:
            for change in reversed(done):
                # Also the one that failed: its setattr may have raised after storing the value.
                if vars(change.owner).get(change.name) is change.replacement:
                    _put_back(change)
            raise
        self._changes += done

    def restore(self) -> list[str]:
        """Undoes everything that is not in use, newest first. Returns one line per attribute."""
        lines = []
        changes, self._changes = self._changes, []
        for change in reversed(changes):
            if change.in_use():
                self._changes.insert(0, change)
                lines.append(f"{change.where}: kept for what was made while patched")
            elif vars(change.owner).get(change.name) is change.replacement:
                _put_back(change)
                lines.append(f"{change.where}: restored")
            else:
                lines.append(f"{change.where}: kept, someone else has changed it since")
        return lines


def _inherited(owner: Any, name: str) -> Any:
    for base in getattr(owner, "__mro__", ())[1:]:
        if name in vars(base):
            return vars(base)[name]
    raise AttributeError(f"{owner!r} has no attribute {name!r}")


def _put_back(change: Change) -> None:
    if change.original is not _INHERITED:
        setattr(change.owner, change.name, change.original)
    elif change.name in vars(change.owner):
        delattr(change.owner, change.name)
