"""Versions and digests in, verdict out. Pure apart from reading metadata and source files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from . import fingerprint
from .patch import Finding, Patch, State


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> Version:
    """The version without its dev, pre and local parts: what the tables are keyed by.

    ``0.27.1+cu130`` and ``0.27.1.dev3`` are judged as 0.27.1, and the digests decide. A post release is a
    release of its own (FlashInfer ships changes in them). Raises ``InvalidVersion``.
    """
    parsed = Version(version)
    release = parsed.base_version
    return Version(release if parsed.post is None else f"{release}.post{parsed.post}")


def check_versions(
    patch: Patch, installed: Callable[[str], str | None] = installed_version, *, allow_unknown: bool = False
) -> Finding | None:
    """None if every distribution is in the patch's table; otherwise the refusal."""
    for distribution, wanted in patch.versions.items():
        found = installed(distribution)
        if found is None:
            return Finding(
                State.REFUSED,
                f"{distribution} is not installed",
                wanted=f"{distribution} {wanted}",
                found="nothing",
                next_step=f"pip install '{distribution}{wanted}'",
            )
        if allow_unknown:
            continue
        try:
            fits = SpecifierSet(wanted).contains(release_of(found), prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            return Finding(
                State.REFUSED,
                f"{distribution} {found} is outside the supported range",
                wanted=f"{distribution} {wanted}",
                found=found,
                next_step="see `vllm-specpatch list` for what is supported; "
                "VLLM_SPECPATCH_ALLOW_UNKNOWN=1 accepts a release whose sources are unchanged",
            )
    return None


def check_digests(patch: Patch, digest: Callable[[str], str] = fingerprint.of_symbol) -> Finding | None:
    """None if the source of everything the patch wraps or relies on is known; otherwise the refusal."""
    return check_sources(patch.digests, digest)


def check_sources(
    digests: Mapping[str, Mapping[str, str]], digest: Callable[[str], str] = fingerprint.of_symbol
) -> Finding | None:
    """The same for a table of digests."""
    for symbol, accepted in digests.items():
        try:
            found = digest(symbol)
        except fingerprint.NoSource as e:
            return _unknown_source(symbol, accepted, str(e))
        if found not in accepted:
            text = "no such function" if found == fingerprint.ABSENT else f"sha256 {found[:12]}…"
            return _unknown_source(symbol, accepted, text)
    return None


def _unknown_source(symbol: str, accepted: Mapping[str, str], found: str) -> Finding:
    return Finding(
        State.REFUSED,
        f"the source of {symbol} is not one that this package was made for",
        wanted=" or ".join(f"{d[:12]}… ({releases})" for d, releases in accepted.items()),
        found=found,
        next_step="another package may patch the same function: remove it, or reinstall the release",
    )


def check(patch: Patch, *, allow_unknown: bool = False) -> Finding | None:
    """All import-time gates of one patch."""
    return check_versions(patch, allow_unknown=allow_unknown) or check_digests(patch)
