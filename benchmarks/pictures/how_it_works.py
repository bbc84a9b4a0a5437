"""Draws how the package gets into vLLM and what it does there, from the names that the code has.

    python benchmarks/pictures/how_it_works.py [--out how-it-works.svg]

Every name in the picture is taken from the object that bears it, so a rename changes the picture or ends this
script; a test holds the stored picture against the code.
"""

import argparse
import ast
import importlib
import inspect
import sys
from pathlib import Path

import vllm_specpatch
from vllm_specpatch import bootstrap, chart, gate, hooks, ledger
from vllm_specpatch.patches import SERIES, decision, routes
from vllm_specpatch.patches.native import NativeRoute
from vllm_specpatch.patches.spec_mask_route import SpecMaskRoute

HERE = Path(__file__).resolve().parent
WIDTH, LEFT, GAP, PAD, LINE = 940, 20, 34, 14, 17
INK, SOFT = "#1a1a1a", "#555555"
OURS, VLLM, STOCK = ("#e8f1fa", "#0072b2"), ("#f3f3f3", "#888888"), ("#fdf0e6", "#d55e00")


def name_of(thing) -> str:
    """``module.qualname`` without the package's own name."""
    module = thing.__module__.removeprefix("vllm_specpatch").removeprefix(".")
    return f"{module}.{thing.__qualname__}" if module else thing.__qualname__


def wrapped_names(module_name: str) -> list[str]:
    """What a patch wraps, in its order: the second argument of its ``Edit(owner, name, wrapper)`` calls."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module_name)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Edit":
            found.append((node.lineno, node.args[1].value))
    if not found:
        raise SystemExit(f"how_it_works.py: {module_name} has no Edit(...) that can be read")
    return list(dict.fromkeys(name for _, name in sorted(found)))


def folded(names: list[str], width: int) -> list[str]:
    """Names joined by commas in lines of at most ``width`` characters."""
    lines = [""]
    for i, name in enumerate(names):
        piece = name + ("," if i < len(names) - 1 else "")
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + piece
    return lines


class Box:
    """A box with a title and lines, whose height follows from them."""

    def __init__(self, x: int, y: int, width: int, title: str, lines: list[str], kind) -> None:
        self.x, self.y, self.width, self.title, self.lines = x, y, width, title, lines
        self.fill, self.stroke = kind
        self.height = 2 * PAD + 15 + LINE * len(lines)

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    def draw(self) -> list[str]:
        out = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" '
            f'fill="{self.fill}" stroke="{self.stroke}"/>',
            chart.text(self.x + PAD, self.y + PAD + 10, self.title, size=13, weight="600", fill=INK),
        ]
        for i, line in enumerate(self.lines):
            out.append(
                chart.text(self.x + PAD, self.y + PAD + 10 + LINE * (i + 1), line, size=12, fill="#333333")
            )
        return out


def arrow(x0: float, y0: float, x1: float, y1: float, label: str = "") -> list[str]:
    out = [
        f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'
    ]
    if label:
        beside = (x0 + 8, (y0 + y1) / 2 + 4) if x0 == x1 else ((x0 + x1) / 2 - 12, y0 - 6)
        out.append(chart.text(*beside, label, size=11, fill=SOFT))
    return out


def picture() -> str:
    [entry] = SERIES  # a second patch wants a second column here
    targets = {"start-up": name_of(bootstrap.watch), "plugin": name_of(vllm_specpatch.register)}
    half = (WIDTH - 2 * LEFT - GAP) // 2
    right = LEFT + half + GAP
    wide = 600
    side_x, side = LEFT + wide + GAP + 20, WIDTH - 2 * LEFT - wide - GAP - 20

    startup = Box(
        LEFT,
        56,
        half,
        f"Start-up door: a .pth line calls {targets['start-up']}()",
        [
            f"{name_of(bootstrap.VllmWatcher)} waits for `import vllm`",
            "every process, also when VLLM_PLUGINS is set",
        ],
        OURS,
    )
    plugin = Box(
        right,
        56,
        half,
        f"Plugin door: vllm.general_plugins calls {targets['plugin']}()",
        ["vLLM's own way, in every process it starts", "the second door to open changes nothing"],
        OURS,
    )
    engine = Box(
        LEFT,
        startup.bottom + GAP,
        wide,
        f"{name_of(hooks.Engine.activate)}: settings, then one hook per patched module",
        [f"when {entry.target} is imported"],
        OURS,
    )
    gates = Box(
        LEFT,
        engine.bottom + GAP,
        wide,
        f"{name_of(gate.check)}: decide before anything is changed",
        [
            f"{gate.check_versions.__name__}: is this release in the table?",
            f"{gate.check_digests.__name__}: is every function's source one that was read?",
        ],
        OURS,
    )
    refused = Box(
        side_x,
        gates.y,
        side,
        "vLLM as it is",
        ["one WARNING: wanted, found, next", "step; VLLM_SPECPATCH=strict raises"],
        STOCK,
    )
    apply = Box(
        LEFT,
        gates.bottom + GAP,
        wide,
        f"{name_of(ledger.Ledger.apply)}: all attributes or none",
        folded(wrapped_names(entry.module), 84),
        OURS,
    )
    choice = Box(
        LEFT,
        apply.bottom + GAP,
        wide,
        f"{decision.__name__.rpartition('.')[2]}.{decision.why_stock.__name__}({decision.Facts.__name__}): "
        "one "
        f"{decision.Decision.__name__} per configuration",
        [
            "asked once, before CUDA-graph support is promised; both faces follow from it:",
            "get_cudagraph_support answers UNIFORM_BATCH, and the reorder threshold becomes 1 + k",
        ],
        OURS,
    )
    stock = Box(
        side_x, choice.y, side, "vLLM as it is", ["one line says why: not needed,", "or refused"], STOCK
    )
    auto = ", then ".join(routes.AUTO)
    both = [
        Box(
            LEFT,
            choice.bottom + GAP,
            half,
            f"Route {SpecMaskRoute.name} ({SpecMaskRoute.__name__})",
            [
                "planned on the GPU from vLLM's own tensors;",
                "own kernels, ragged batches too",
            ],
            OURS,
        ),
        Box(
            right,
            choice.bottom + GAP,
            half,
            f"Route {NativeRoute.name} ({NativeRoute.__name__})",
            ["FlashInfer's multi-token plan, made on the host", "after a wait for the GPU; uniform batches"],
            OURS,
        ),
    ]
    last = Box(
        LEFT,
        both[0].bottom + GAP,
        WIDTH - 2 * LEFT,
        "vLLM's metadata builder and model runner",
        ["a verify request stays a decode: FULL CUDA graphs for the target and for each step of the drafter"],
        VLLM,
    )
    boxes = [startup, plugin, engine, gates, refused, apply, choice, stock, *both, last]
    height = last.bottom + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>How vllm-specpatch gets into vLLM and what it decides there</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        chart.text(LEFT, 32, "How vllm-specpatch works", size=16, weight="600"),
        *(line for box in boxes for line in box.draw()),
        *arrow(startup.middle, startup.bottom, startup.middle, engine.y),
        *arrow(plugin.x + 40, plugin.bottom, plugin.x + 40, engine.y),
        *arrow(LEFT + 60, engine.bottom, LEFT + 60, gates.y),
        *arrow(LEFT + 60, gates.bottom, LEFT + 60, apply.y, "yes"),
        *arrow(LEFT + wide, gates.y + 30, side_x, gates.y + 30, "no"),
        *arrow(LEFT + 60, apply.bottom, LEFT + 60, choice.y, "a metadata builder is made"),
        *arrow(LEFT + wide, choice.y + 30, side_x, choice.y + 30, "no"),
        *arrow(
            LEFT + 60, choice.bottom, LEFT + 60, both[0].y, f"yes; VLLM_SPECPATCH_ROUTE=auto tries {auto}"
        ),
        *arrow(right + 100, choice.bottom, right + 100, both[1].y),
        *(part for box in both for part in arrow(box.middle, box.bottom, box.middle, last.y)),
        "</svg>",
        "",
    ]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "how-it-works.svg")
    options = parser.parse_args()
    options.out.write_text(picture())
    print(options.out)


if __name__ == "__main__":
    sys.exit(main())
