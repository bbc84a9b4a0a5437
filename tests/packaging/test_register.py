"""Every patch carries its register: the headings that `vllm-specpatch list` shows."""

import importlib
import json
import pathlib

import pytest

from vllm_specpatch import cli
from vllm_specpatch.patches import SERIES

HEADINGS = ("Target", "Why", "How", "Upstream", "Remove when", "Reason class")
REASON_CLASSES = ("temporary", "not upstreamable", "permanent")
PATCHES = pathlib.Path(__file__).parent.parent.parent / "patches"


@pytest.mark.parametrize("entry", SERIES, ids=lambda e: e.name)
def test_headings(entry):
    patch = importlib.import_module(entry.module).PATCH
    assert (patch.name, patch.target) == (entry.name, entry.target)
    lines = patch.summary.splitlines()
    assert [line for line in lines if line in HEADINGS] == list(HEADINGS)
    sections = {h: lines[lines.index(h) + 1 :] for h in HEADINGS}
    assert sections["Reason class"][0].strip() in REASON_CLASSES
    assert any(c.isdigit() for line in sections["Why"] for c in line), "Why carries a number"
    assert patch.digests and patch.versions


def test_series_names_every_patch_file():
    with_patch = {p.stem for p in PATCHES.glob("*.py") if "\nPATCH = " in p.read_text()}
    assert {entry.module.rpartition(".")[2] for entry in SERIES} == with_patch


def test_every_wrapped_symbol_has_a_digest():
    """Static twin of the run-time gate: an Edit without a digest would be a blind patch."""
    import ast

    for entry in SERIES:
        module = importlib.import_module(entry.module)
        source = pathlib.Path(module.__file__).read_text()
        edits = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Edit"
        ]
        assert edits
        symbols = {s.partition(":")[2] for s in module.PATCH.digests}
        for edit in edits:
            owner = (
                edit.args[0].value
                if isinstance(edit.args[0], ast.Constant)
                else getattr(module, edit.args[0].id)
            )
            name = edit.args[1].value
            candidates = {f"{owner}.{name}" if owner else name, f"AttentionMetadataBuilder.{name}"}
            assert candidates & symbols, f"{owner}.{name} has no digest"


def test_list_renders(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    for heading in HEADINGS:
        assert heading in text
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == SERIES[0].name
