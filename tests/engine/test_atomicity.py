"""A group applies whole or not at all, and a refusal says what, why, and what next."""

import types

import pytest

from vllm_specpatch.ledger import Ledger
from vllm_specpatch.patch import Edit

BOTH = ("toy-gate", "toy-build")
STOCK_PLAN = ["stock plan", 4]


def assert_untouched(result, state):
    assert result["states"] == dict.fromkeys(BOTH, state)
    assert result["changes"] == 0
    assert "patched" not in str(result["seen"])


RUN = "activate(); imported(); report(seen=seen())"


@pytest.mark.parametrize("symbol", ["Builder.gate", "Base.inherited", "Builder.build", "plan"])
def test_one_wrong_digest_refuses_the_whole_group(toy, symbol):
    result = toy(RUN, TOY_WRONG_DIGEST=symbol)
    assert_untouched(result, "refused")
    assert f"toy_target.core:{symbol}" in result["reasons"]["toy-gate"]


def test_a_version_outside_the_table_refuses_the_whole_group(toy):
    result = toy(RUN, TOY_PYTEST=">=9999")
    assert_untouched(result, "refused")
    assert "pytest" in result["reasons"]["toy-build"]


def test_an_edit_that_cannot_be_made_rolls_the_others_back(toy):
    assert_untouched(toy(RUN, TOY_SECOND_EDIT="does_not_exist"), "failed")


class RefusesWrappers(type):
    """A class whose attribute ``second`` cannot be set."""

    def __setattr__(cls, name, value):
        if name == "second":
            raise RuntimeError("this attribute cannot be changed")
        super().__setattr__(name, value)


class ForgetsWrappers(type):
    def __setattr__(cls, name, value):
        if name != "second":
            super().__setattr__(name, value)


@pytest.mark.parametrize("metaclass", [RefusesWrappers, ForgetsWrappers])
def test_an_error_while_setting_rolls_back_what_was_set(metaclass):
    class Base:
        def inherited(self):
            return 1

    class Owner(Base, metaclass=metaclass):
        def first(self):
            return 2

        def second(self):
            return 3

    module = types.ModuleType("m")
    module.Owner = Owner
    before = dict(vars(Owner))
    ledger = Ledger()
    edits = [("p", Edit("Owner", name, lambda w, i, a, k: 9)) for name in ("first", "inherited", "second")]
    with pytest.raises(RuntimeError):
        ledger.apply(module, edits)
    assert dict(vars(Owner)) == before and len(ledger) == 0
    ledger.apply(module, edits[:2])
    assert Owner().first() == 9 == Owner().inherited()
    ledger.restore()
    assert dict(vars(Owner)) == before


def test_a_foreign_wrapper_is_found_and_refused(toy):
    result = toy(
        """
        import functools, wrapt
        activate()
        def foreign(module):
            original = module.Builder.build
            @functools.wraps(original)
            def build(self, value):
                return original(self, value)
            module.Builder.build = build
        # The other package's hook runs first.
        wrapt.importer._post_import_hooks["toy_target.core"].insert(0, foreign)
        imported()
        report(seen=seen())
        """
    )
    assert_untouched(result, "refused")
    assert "Builder.build" in result["reasons"]["toy-gate"]


def test_skip_leaves_the_whole_group_out(toy):
    result = toy(RUN, VLLM_SPECPATCH_SKIP="toy-build")
    assert_untouched(result, "disabled")


@pytest.mark.parametrize(("mode", "warnings"), [("auto", 0), ("on", 1)])
def test_on_warns_of_what_was_skipped(toy, mode, warnings):
    done = toy(RUN, check=False, VLLM_SPECPATCH=mode, VLLM_SPECPATCH_SKIP="toy-build")
    assert done.stderr.count("VLLM_SPECPATCH_SKIP names toy-build") == warnings


def test_off_does_nothing(toy):
    result = toy("activate(); imported(); report(seen=seen())", VLLM_SPECPATCH="0")
    assert_untouched(result, "disabled")


def test_strict_raises_at_the_import_of_the_target(toy):
    done = toy(RUN, check=False, VLLM_SPECPATCH="strict", TOY_WRONG_DIGEST="plan")
    assert done.returncode == 1
    assert "Refused: vllm-specpatch" in done.stderr and "toy_target.core:plan" in done.stderr


def test_strict_raises_at_every_attempt(toy):
    """Whoever catches the first error and goes on must not get an unpatched vLLM for it."""
    code = """
def attempt(what):
    try:
        what()
    except Exception as e:
        return type(e).__name__
    return "served"
said = [attempt(step) for step in (activate, imported, imported, activate)]
engine.deactivate()
report(said=said, after=attempt(imported))
"""
    result = toy(code, VLLM_SPECPATCH="strict", TOY_WRONG_DIGEST="plan")
    assert result["said"] == ["served", "Refused", "Refused", "Refused"] and result["after"] == "served"
    result = toy(code, VLLM_SPECPATCH="strict", VLLM_SPECPATCH_ROUTE="fast")
    assert result["said"] == ["Refused", "served", "served", "Refused"]
    assert result["states"] == dict.fromkeys(("toy-gate", "toy-build"), "disabled")


def test_strict_raises_when_late(toy):
    done = toy("imported(); activate()", check=False, VLLM_SPECPATCH="strict")
    assert done.returncode == 1 and "imported before vllm-specpatch" in done.stderr


@pytest.mark.parametrize("mode", ["auto", "on", "1"])
def test_a_refusal_warns_once_and_the_target_still_imports(toy, mode):
    done = toy(RUN, check=False, VLLM_SPECPATCH=mode, TOY_WRONG_DIGEST="plan")
    assert done.returncode == 0
    assert done.stderr.count("not applied (refused)") == 1
    for part in ("wanted", "found", "next step"):
        assert part in done.stderr


def test_strict_applies_where_it_fits(toy):
    result = toy(RUN, VLLM_SPECPATCH="strict")
    assert result["states"] == dict.fromkeys(BOTH, "applied")


def test_allow_unknown_never_skips_the_digests(toy):
    unknown = {"TOY_PYTEST": ">=9999", "VLLM_SPECPATCH_ALLOW_UNKNOWN": "1"}
    assert toy(RUN, **unknown)["states"] == dict.fromkeys(BOTH, "applied")
    assert_untouched(toy(RUN, TOY_WRONG_DIGEST="plan", **unknown), "refused")


DECIDE = """
from vllm_specpatch.hooks import PatchContext
from vllm_specpatch.patch import Finding, State
activate(); imported()
PatchContext(engine, "toy-gate", engine.settings).decided(Finding(State({state!r}), "some reason"))
"""


def test_strict_raises_for_a_configuration_that_is_refused(toy):
    done = toy(DECIDE.format(state="refused"), check=False, VLLM_SPECPATCH="strict")
    assert done.returncode == 1 and "Refused: vllm-specpatch" in done.stderr
    assert toy(DECIDE.format(state="refused"), check=False).returncode == 0


@pytest.mark.parametrize(("mode", "lines"), [("auto", 0), ("on", 1), ("strict", 1)])
def test_who_asked_is_warned_where_nothing_was_needed(toy, mode, lines):
    done = toy(DECIDE.format(state="not needed"), check=False, VLLM_SPECPATCH=mode)
    assert done.returncode == 0 and done.stderr.count("not needed: some reason") == lines


def test_both_doors_let_strict_through(python):
    wrong = {"VLLM_SPECPATCH": "strict", "VLLM_SPECPATCH_ROUTE": "fast"}
    for door in ("vllm_specpatch.register()", "hooks.apply_in_source('json')"):
        code = f"import json, vllm_specpatch\nfrom vllm_specpatch import hooks\n{door}"
        done = python(code, check=False, **wrong)
        assert done.returncode == 1 and "Refused" in done.stderr, done.stderr
