"""Versions and digests in, verdict out. Pure apart from reading metadata and source files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from . import fingerprint
from .patch import Finding, Patch, State

#: How a label of patches/digests.py says where a digest begins.
FROM = re.compile(r"from (\S+) (\S+)")


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
    """The same for a table of digests.

    Where the labels are ``from DISTRIBUTION RELEASE`` (a digest counts until the release of the next), all
    that is found must also be of one release: a build between two, or one with a function of another release
    in it, is a combination that nobody has read, though each part is known.
    """
    newest: dict[str, tuple[Version, str]] = {}  # distribution -> the latest start, and whose
    oldest: dict[str, tuple[Version, str]] = {}  # the earliest end
    for symbol, accepted in digests.items():
        try:
            found = digest(symbol)
        except fingerprint.NoSource as e:
            return _unknown_source(symbol, accepted, str(e))
        if found not in accepted:
            text = "no such function" if found == fingerprint.ABSENT else f"sha256 {found[:12]}…"
            return _unknown_source(symbol, accepted, text)
        distribution, start, end = _span(accepted, found)
        if start is not None:
            newest[distribution] = max(newest.get(distribution, (start, symbol)), (start, symbol))
        if end is not None:
            oldest[distribution] = min(oldest.get(distribution, (end, symbol)), (end, symbol))
    for distribution in newest.keys() & oldest.keys():
        (start, young), (end, old) = newest[distribution], oldest[distribution]
        if start >= end:
            return Finding(
                State.REFUSED,
                f"the sources of {distribution} are not of one release",
                wanted="all functions of one release",
                found=f"{young} of {start} or later, {old} of before {end}",
                next_step=f"reinstall {distribution}; a build between two releases is not supported",
            )
    return None


def _span(accepted: Mapping[str, str], digest: str) -> tuple[str, Version | None, Version | None]:
    """(distribution, first release with this digest, first release with the next one), from the labels."""
    labels = [FROM.fullmatch(label) for label in accepted.values()]
    at = list(accepted).index(digest)
    own, following = labels[at], labels[at + 1] if at + 1 < len(labels) else None
    if own is None:
        return "", None, None
    return own[1], Version(own[2]), None if following is None else Version(following[2])


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
