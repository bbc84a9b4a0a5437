"""The README as data: its console blocks, its tables, its commands."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "README.md"
INDENT = "    "
PROMPT = f"{INDENT}$ "


@dataclass(frozen=True)
class Console:
    """A command that the README shows with its output; "..." in an expected line stands for anything."""

    command: str
    expected: list[str]

    def missing(self, output: str) -> str | None:
        """The first expected line that does not come, in this order, in ``output``; None if all do."""
        lines = iter(output.splitlines())
        for wanted in self.expected:
            pattern = re.compile(".*".join(map(re.escape, wanted.strip().split("..."))))
            if not any(pattern.search(line) for line in lines):
                return wanted
        return None


def code_lines(text: str) -> list[str]:
    """All lines of indented code blocks, without their indent."""
    return [line.removeprefix(INDENT) for line in text.splitlines() if line.startswith(INDENT)]


def consoles(text: str) -> list[Console]:
    """The console blocks, in order; a block may hold several commands."""
    found: list[Console] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(PROMPT):
            found.append(Console(line.removeprefix(PROMPT), []))
            inside = True
        elif line.startswith(INDENT) and inside:
            if line.strip():
                found[-1].expected.append(line.strip())
        else:
            inside = False
    return found


def first_cells(text: str, heading: str) -> list[str]:
    """The first cell of every row of the table under a heading, without its head."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [row.split("|")[1].strip() for row in rows[2:]]
