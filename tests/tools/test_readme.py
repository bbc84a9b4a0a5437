"""What the README says is what the code, the matrix and the results say."""

import pathlib
import re
import xml.etree.ElementTree as ElementTree

import compatibility
import how_it_works
import measured
import pytest
import readme
import releases

from vllm_specpatch import cli

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PICTURES = ROOT / "benchmarks" / "pictures"


TEXT = readme.PATH.read_text()


# -- the table of releases -----------------------------------------------------------------------------


def test_the_table_of_releases_is_the_matrix():
    made = compatibility.table(releases.table().values())
    assert compatibility.section(TEXT).strip() == made, (
        "python tests/tools/compatibility.py --write README.md"
    )


def test_a_table_of_two_releases():
    every = {(c, k): "applied" for c in releases.CAPABILITIES for k in (True, False)}
    rows = [
        releases.Release("1.0", "0.1", "2", {}, every),
        releases.Release("1.1", "0.1", "2", {}, every),
        releases.Release("1.2", "0.1", "2", {}, {**every, ("9.0", True): "refused"}),
    ]
    first, second = compatibility.table(rows).splitlines()[2:]
    assert first == "| 1.0, 1.1 | 0.1 |" + " **patched** |" * 4
    assert second.split(" | ")[3] == "stock; without: **patched**"
    mixed = releases.Release("1.3", "0.1", "2", {}, {**every, ("8.0", True): "refused"})
    with pytest.raises(AssertionError, match=r"1\.3"):
        compatibility.table([mixed])


def test_markers_that_are_missing_are_said():
    with pytest.raises(SystemExit, match="wanted one line"):
        compatibility.section("# no markers")


# -- pictures ------------------------------------------------------------------------------------------


def test_the_diagram_is_drawn_from_the_code_as_it_is():
    made = how_it_works.picture()
    assert (PICTURES / "how-it-works.svg").read_text() == made, "python benchmarks/pictures/how_it_works.py"
    words = " ".join(ElementTree.fromstring(made).itertext())
    for name in (
        "bootstrap.VllmWatcher",
        "hooks.Engine.activate",
        "get_cudagraph_support",
        "ledger.Ledger.apply",
    ):
        assert name in words


def test_the_text_of_the_diagram_stays_in_its_boxes():
    """By the width of a wide glyph, since no font is at hand."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(how_it_works.picture())
    boxes = [
        (float(r.get("x")), float(r.get("y")), float(r.get("width")), float(r.get("height")))
        for r in root.iter(f"{svg}rect")
        if r.get("x") is not None
    ]
    for text in root.iter(f"{svg}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        around = [b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3]]
        width = (
            len(text.text)
            * float(text.get("font-size"))
            * (0.6 if text.get("font-weight") == "600" else 0.56)
        )
        assert not around or x + width <= around[0][0] + around[0][2], text.text


def test_the_plot_shows_what_was_measured():
    path = measured.newest()
    results = measured.timed(path)
    svg = (PICTURES / "measured.svg").read_text()
    assert svg == measured.draw(path), "python benchmarks/pictures/measured.py"
    for result in results:
        for cell in result["cells"].values():
            assert f": {cell['ms_per_step']:g}</title>" in svg


def test_results_that_are_no_times_are_not_drawn(tmp_path):
    cells = '{"ctx1024_bs1": {"ms_per_step": %s, "spread_ms": 0}}'
    one = '{"name": "stock", "gpu": "g", "versions": {"vllm": "0"}, "cells": ' + cells % 2 + "}"
    two = one.replace("stock", "patched")
    (tmp_path / "2026-01-01-a.json").write_text('{"results": [' + one + ", " + two + "]}")
    (tmp_path / "2026-01-02-b-tokens.json").write_text('{"results": [' + one + ", " + two + "]}")
    (tmp_path / "2026-01-03-c.json").write_text('{"results": [' + one + "]}")
    (tmp_path / "2026-01-04-d.json").write_text('{"compared": false, "results": [' + one + ", " + two + "]}")
    assert measured.newest(tmp_path).name == "2026-01-01-a.json"
    with pytest.raises(SystemExit, match="found none in"):
        measured.draw(tmp_path / "2026-01-04-d.json")
    with pytest.raises(SystemExit, match="found none in"):
        measured.newest(tmp_path / "empty")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:|#)([^)]+)\)", TEXT))))
def test_every_link_leads_somewhere(link):
    assert (ROOT / link).exists()


# -- commands and log lines ----------------------------------------------------------------------------


def test_every_command_is_one_and_every_option_exists():
    [action] = [a for a in cli.parser()._actions if hasattr(a, "choices") and isinstance(a.choices, dict)]
    mentioned = set()
    joined = TEXT.replace("\\\n", " ")
    for line in [*readme.code_lines(joined), *re.findall(r"`([^`\n]+)`", joined)]:
        for name, rest in re.findall(r"vllm-specpatch ([a-z][a-z-]+)([^#|]*)", line):
            assert name in action.choices, line
            mentioned.add(name)
            known = {option for a in action.choices[name]._actions for option in a.option_strings}
            assert set(re.findall(r"--[a-z-]+", rest)) <= known, line
    assert mentioned == set(action.choices), "a command that the README does not mention"


def test_every_line_of_the_troubleshooting_table_is_printed_by_something():
    """By our sources, or by vLLM in a stored log."""
    sources = [*ROOT.glob("vllm_specpatch/*.py"), *ROOT.glob("patches/*.py"), *ROOT.glob("kernels/*.py")]
    # Literals that continue on the next line, joined as Python joins them.
    ours = "".join(re.sub(r'"\n\s*f?"', "", path.read_text()) for path in sources)
    logs = "".join(path.read_text(errors="replace") for path in (HERE / "logs").iterdir())
    cells = readme.first_cells(TEXT, "Troubleshooting")
    lines = [cell.strip("`") for cell in cells if cell.startswith("`")]
    assert len(lines) > 8
    for line in lines:
        assert line in ours or line in logs, line
