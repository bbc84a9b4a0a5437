"""Version tables and digests."""

import functools
import inspect

import pytest
import wrapt

from vllm_specpatch import fingerprint, gate
from vllm_specpatch.patch import Patch, State

TABLE = {"vllm": ">=0.27.0,<=0.27.1", "flashinfer-python": ">=0.6.16,<=0.6.18.post1"}


def check(vllm, flashinfer="0.6.16.post3", **options):
    patch = Patch("p", "t", TABLE, {}, lambda module, context: [])
    installed = {"vllm": vllm, "flashinfer-python": flashinfer}.get
    return gate.check_versions(patch, installed, **options)


@pytest.mark.parametrize(
    "version", ["0.27.0", "0.27.1", "0.27.1+cu130", "0.27.1.dev3", "0.27.1.dev3+g12ab", "0.27.0rc1"]
)
def test_supported_also_dev_and_local_builds_whose_digests_then_decide(version):
    assert check(version) is None


@pytest.mark.parametrize("version", ["0.26.0", "0.27.2", "0.28.0", "0.28.0.dev1+gabc", "1.0", "0.27.1.post1"])
def test_too_old_and_too_new(version):
    finding = check(version)
    assert finding.state is State.REFUSED
    assert finding.found == version and "0.27.1" in finding.wanted and finding.next_step


@pytest.mark.parametrize("version", ["", "dev", "0.27.1-unknown-build!"])
def test_unparsable(version):
    assert check(version).state is State.REFUSED


@pytest.mark.parametrize("version", ["0.28.0", "dev"])
def test_allow_unknown_leaves_it_to_the_digests(version):
    assert check(version, allow_unknown=True) is None


def test_missing_distribution_is_refused_even_with_allow_unknown():
    assert check(None, allow_unknown=True).reason == "vllm is not installed"


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.6.15.post1", False),
        ("0.6.16", True),
        ("0.6.16.post3", True),
        ("0.6.18.post1", True),
        ("0.7.0", False),
    ],
)
def test_flashinfer_post_releases_are_releases_of_their_own(version, fits):
    assert (check("0.27.1", version) is None) is fits


def digests(accepted):
    patch = Patch("p", "t", {}, accepted, lambda module, context: [])
    return gate.check_digests(patch, {"m:a": "1" * 64, "m:b": "2" * 64}.__getitem__)


def test_every_digest_must_match():
    assert digests({"m:a": {"1" * 64: "x"}, "m:b": {"0" * 64: "w", "2" * 64: "x"}}) is None
    finding = digests({"m:a": {"1" * 64: "x"}, "m:b": {"1" * 64: "release 7"}})
    assert finding.state is State.REFUSED and "m:b" in finding.reason
    assert "release 7" in finding.wanted and finding.found.startswith("sha256 2222")


def test_a_table_may_accept_that_a_release_does_not_define_a_function():
    digest = {"m:a": "1" * 64, "m:b": fingerprint.ABSENT}.__getitem__
    assert (
        gate.check_sources({"m:b": {fingerprint.ABSENT: "release 1", "2" * 64: "release 2"}}, digest) is None
    )
    finding = gate.check_sources({"m:b": {"2" * 64: "release 2"}}, digest)
    assert finding.state is State.REFUSED and finding.found == "no such function"
    # Nor may a function be there that the table knows to be absent.
    assert gate.check_sources({"m:a": {fingerprint.ABSENT: "release 1"}}, digest) is not None


# -- fingerprints of objects and files agree ---------------------------------------------------------


class Sample:
    def plain(self):  # a comment inside counts
        return 1

    @classmethod
    def by_class(cls):
        return 2

    @property
    def value(self):
        return 3

    # A comment after the last statement does not count.


@functools.cache
def cached():
    return 4


@pytest.mark.parametrize("name", ["Sample.plain", "Sample.by_class", "Sample.value", "cached"])
def test_object_and_file_agree(name):
    owner, _, attribute = name.rpartition(".")
    space = Sample if owner else inspect.getmodule(Sample) or __import__(__name__)
    from_object = (
        fingerprint.of_object(Sample, attribute, name)
        if owner
        else fingerprint.digest_of_text(inspect.getsource(cached.__wrapped__))
    )
    assert from_object == fingerprint.of_file(__file__, name), space


def test_foreign_wrappers_do_not_pass_for_the_original():
    original = fingerprint.of_file(__file__, "Sample.plain")

    class Patched(Sample):
        @functools.wraps(Sample.plain)
        def plain(self):
            return Sample.plain(self)

    assert fingerprint.of_object(Patched, "plain", "other_package:Patched.plain") != original

    class Proxied(Sample):
        plain = wrapt.FunctionWrapper(Sample.plain, lambda w, i, a, k: w(*a, **k))

    with pytest.raises(fingerprint.NoSource, match="not a plain function"):
        fingerprint.of_object(Proxied, "plain", "other_package:Proxied.plain")


def test_no_source_says_what_is_missing():
    with pytest.raises(fingerprint.NoSource, match="nowhere"):
        fingerprint.of_symbol("nowhere.to.be.found:f")
    with pytest.raises(fingerprint.NoSymbol, match="Sample.nothing"):
        fingerprint.of_file(__file__, "Sample.nothing")


@pytest.mark.parametrize("symbol", ["pathlib:nothing", "pathlib:Path.nothing", "this:nothing"])
def test_absent_is_said_of_a_module_that_is_there_imported_or_not(symbol):
    assert fingerprint.of_symbol(symbol) == fingerprint.ABSENT


SINCE = {
    "m:a": {"a" * 64: "from vllm 0.9.0", "b" * 64: "from vllm 0.10.0", "c" * 64: "from vllm 0.11.0"},
    "m:b": {fingerprint.ABSENT: "from vllm 0.9.0", "e" * 64: "from vllm 0.10.1"},
    "m:c": {"f" * 64: "from vllm 0.9.0"},
    "n:d": {"d" * 64: "from other 3.0"},
}


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        ("a", fingerprint.ABSENT, True),  # 0.9
        ("b", fingerprint.ABSENT, True),  # 0.10.0
        ("b", "e", True),  # 0.10.1
        ("c", "e", True),  # 0.11
        ("a", "e", False),  # before 0.10, and from 0.10.1 on
        ("c", fingerprint.ABSENT, False),
    ],
)
def test_known_functions_of_different_releases_are_refused(a, b, fits):
    found = {"m:a": a * 64, "m:b": b if b == fingerprint.ABSENT else b * 64, "m:c": "f" * 64, "n:d": "d" * 64}
    finding = gate.check_sources(SINCE, found.__getitem__)
    assert (finding is None) == fits
    if finding is not None:
        assert finding.state is State.REFUSED and "vllm are not of one release" in finding.reason
        young, old = ("m:b", "m:a") if a == "a" else ("m:a", "m:b")
        assert finding.found.startswith(f"{young} of 0.1") and f", {old} of before 0.10" in finding.found
        assert "reinstall vllm" in finding.next_step
