"""Every environment variable of the package, read in one place.

======================================  ==========================================================
``VLLM_SPECPATCH``                      ``auto`` (default): apply where it fits. ``1``/``on``: the same,
                                        and warn with the reason when nothing was applied. ``0``/``off``:
                                        do nothing at all. ``strict``: raise at start-up instead of
                                        serving unpatched.
``VLLM_SPECPATCH_SKIP``                 Names of patches to leave out, separated by commas.
``VLLM_SPECPATCH_ROUTE``                ``auto`` (default), ``spec_mask`` or ``native``.
``VLLM_SPECPATCH_ALLOW_UNKNOWN``        ``1``: accept a release outside the table if all digests match.
======================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODES = {"": "auto", "auto": "auto", "1": "on", "on": "on", "0": "off", "off": "off", "strict": "strict"}
ROUTES = ("auto", "spec_mask", "native")
FLAGS = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Settings:
    """What the user asked for. ``error`` is one line about a wrong value; such settings count as off."""

    mode: str = "auto"
    skip: frozenset[str] = frozenset()
    route: str = "auto"
    allow_unknown: bool = False
    error: str | None = None

    @property
    def strict(self) -> bool:
        return self.mode == "strict"

    @property
    def asked(self) -> bool:
        """Whether the user said that he wants it, and so must hear where it does nothing."""
        return self.mode in ("on", "strict")

    @property
    def off(self) -> bool:
        return self.mode == "off" or self.error is not None


def _wrong(name: str, value: str, valid: str) -> str:
    return f"{name}={value!r} is not a valid value (valid: {valid}); vllm-specpatch is off"


def read(environ: Mapping[str, str], patch_names: frozenset[str]) -> Settings:
    """The settings in ``environ``. Pure; a wrong value comes back as ``Settings.error``."""

    def value(name: str) -> str:
        return environ.get(name, "").strip()

    mode = MODES.get(value("VLLM_SPECPATCH").lower())
    if mode is None:
        return Settings(error=_wrong("VLLM_SPECPATCH", value("VLLM_SPECPATCH"), "auto, 1/on, 0/off, strict"))
    error = None
    route = value("VLLM_SPECPATCH_ROUTE").lower() or "auto"
    if route not in ROUTES:
        error = _wrong("VLLM_SPECPATCH_ROUTE", value("VLLM_SPECPATCH_ROUTE"), ", ".join(ROUTES))
    unknown = value("VLLM_SPECPATCH_ALLOW_UNKNOWN")
    if unknown not in FLAGS:
        error = error or _wrong("VLLM_SPECPATCH_ALLOW_UNKNOWN", unknown, "0, 1")
    skip = frozenset(name.strip() for name in value("VLLM_SPECPATCH_SKIP").split(",") if name.strip())
    if not skip <= patch_names:
        error = error or _wrong(
            "VLLM_SPECPATCH_SKIP", value("VLLM_SPECPATCH_SKIP"), ", ".join(sorted(patch_names))
        )
    return Settings(mode, skip, route, FLAGS.get(unknown, False), error)
