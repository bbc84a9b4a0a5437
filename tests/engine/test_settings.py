"""Every environment variable, right and wrong."""

import pytest

from vllm_specpatch.settings import Settings, read

NAMES = frozenset({"a", "b"})


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("", "auto"),
        ("auto", "auto"),
        ("1", "on"),
        ("on", "on"),
        ("ON", "on"),
        ("0", "off"),
        ("off", "off"),
        ("strict", "strict"),
    ],
)
def test_mode(value, mode):
    settings = read({"VLLM_SPECPATCH": value}, NAMES)
    assert settings.mode == mode and settings.error is None
    assert settings.off is (mode == "off")


def test_defaults():
    assert read({}, NAMES) == Settings("auto", frozenset(), "auto", False, None)


def test_all_together():
    env = {
        "VLLM_SPECPATCH": "strict",
        "VLLM_SPECPATCH_SKIP": " a , b,",
        "VLLM_SPECPATCH_ROUTE": "native",
        "VLLM_SPECPATCH_ALLOW_UNKNOWN": "1",
    }
    assert read(env, NAMES) == Settings("strict", frozenset({"a", "b"}), "native", True, None)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("VLLM_SPECPATCH", "yes", "strict"),
        ("VLLM_SPECPATCH_ROUTE", "fast", "spec_mask"),
        ("VLLM_SPECPATCH_SKIP", "a,nobody", "a, b"),
        ("VLLM_SPECPATCH_ALLOW_UNKNOWN", "maybe", "0, 1"),
    ],
)
def test_a_wrong_value_names_the_valid_ones_and_counts_as_off(name, value, valid):
    settings = read({name: value}, NAMES)
    assert settings.off
    assert name in settings.error and value in settings.error and valid in settings.error
    assert "\n" not in settings.error


def test_a_wrong_value_is_one_error_line_and_nothing_is_patched(toy):
    done = toy("activate(); imported(); print(seen())", check=False, VLLM_SPECPATCH_ROUTE="fast")
    assert done.returncode == 0 and "patched" not in done.stdout
    assert len([x for x in done.stderr.splitlines() if "VLLM_SPECPATCH_ROUTE" in x]) == 1


def test_a_wrong_value_with_strict_raises(toy):
    done = toy("activate()", check=False, VLLM_SPECPATCH="strict", VLLM_SPECPATCH_SKIP="nobody")
    assert done.returncode == 1 and "toy-build, toy-gate" in done.stderr
