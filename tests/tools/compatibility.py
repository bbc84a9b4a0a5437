"""Renders the README's table of releases from tests/upstream/versions.toml.

python tests/tools/compatibility.py                     prints it
python tests/tools/compatibility.py --write README.md   puts it between the two marker lines
"""

import argparse
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "upstream"))  # as a program
import releases  # noqa: E402

BEGIN = "<!-- releases: made by tests/tools/compatibility.py from tests/upstream/versions.toml -->"
END = "<!-- end of releases -->"
#: Verdicts of versions.toml in the words of the README.
WORDS = {"applied": "**patched**", "not needed": "vLLM's own", "refused": "stock"}
#: (heading, capabilities that are shown as one)
COLUMNS = (
    ("sm_80, 86, 89", ("8.0", "8.6", "8.9")),
    ("sm_90", ("9.0",)),
    ("sm_10x", ("10.0",)),
    ("sm_12x", ("12.0",)),
)


def cell(release, capabilities) -> str:
    """One verdict, or the one with trtllm-gen and XQA kernels and the one without them."""
    with_kernels, without = (
        {release.ours[capability, cubins] for capability in capabilities} for cubins in (True, False)
    )
    # A column that stands for several capabilities must be true for all of them.
    assert len(with_kernels) == len(without) == 1, f"vLLM {release.vllm}: {capabilities} differ"
    first, second = WORDS[with_kernels.pop()], WORDS[without.pop()]
    return first if first == second else f"{first}; without: {second}"


def table(rows) -> str:
    """Markdown, neighbours with equal verdicts and FlashInfer pins in one line."""
    lines = [
        "| vLLM | FlashInfer pin | " + " | ".join(heading for heading, _ in COLUMNS) + " |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    shown = [(row, (row.flashinfer, *(cell(row, group) for _, group in COLUMNS))) for row in rows]
    for cells, group in itertools.groupby(shown, key=lambda item: item[1]):
        names = [row.vllm for row, _ in group]
        lines.append("| " + " | ".join([", ".join(names), *cells]) + " |")
    return "\n".join(lines)


def section(text: str) -> str:
    """What stands between the markers of a README. Raises ``SystemExit`` if they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"compatibility.py: wanted one line {BEGIN!r} and one {END!r}")
    return text.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    made = table(releases.table().values())
    if options.write is None:
        print(made)
        return
    text = options.write.read_text()
    section(text)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    options.write.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
