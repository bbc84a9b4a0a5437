"""Draws ms per step by context and batch from a file of benchmarks/results, or from bench.json of `bench`.

    python benchmarks/pictures/measured.py [RESULTS.json] [--out measured.svg]

Without a file it takes the newest one in benchmarks/results that times stock against something else, by the
date in its name. Only what is in the file is drawn: the best time of each cell, and upwards the spread of its
runs.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from vllm_specpatch import chart

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
#: Results whose processes shared a GPU say in their name that only tokens count.
NOT_TIMES = re.compile(r"tokens")
CELL = re.compile(r"ctx(\d+)_bs(\d+)")


def timed(path: Path) -> list[dict]:
    """The variants of a results file that were timed, in its order; empty if there is nothing to compare."""
    document = json.loads(path.read_text())
    results = [r for r in document.get("results", []) if isinstance(r, dict) and r.get("cells")]
    timed = [r for r in results if all("ms_per_step" in cell for cell in r["cells"].values())]
    return timed if len(timed) > 1 and document.get("compared", True) else []


def newest(folder: Path = RESULTS) -> Path:
    """The last of the dated files with times. Raises ``SystemExit`` if there is none."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        if not NOT_TIMES.search(path.stem) and timed(path):
            return path
    raise SystemExit(f"measured.py: wanted a results file with times of two variants, found none in {folder}")


def draw(path: Path) -> str:
    results = timed(path)
    if not results:
        raise SystemExit(f"measured.py: wanted times of two variants, found none in {path}")
    panels: dict[int, dict[str, list[tuple[int, float, float]]]] = {}
    for result in results:
        name = result.get("variant") or result["name"]
        for cell, numbers in result["cells"].items():
            context, batch = map(int, CELL.fullmatch(cell).groups())
            point = (batch, numbers["ms_per_step"], numbers.get("spread_ms", 0.0))
            panels.setdefault(context, {}).setdefault(name, []).append(point)
    head = results[0]
    title = f"{head['gpu']}, vLLM {head['versions']['vllm']}: ms per verify step"
    return chart.lines(
        title,
        [chart.Panel(f"context {context}", lines) for context, lines in sorted(panels.items())],
        x="batch",
        y="ms per step",
        note=f"best of the runs, and upwards their spread; {path.name}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "measured.svg")
    options = parser.parse_args()
    path = options.results or newest()
    options.out.write_text(draw(path))
    print(f"{options.out} from {path}")


if __name__ == "__main__":
    sys.exit(main())
