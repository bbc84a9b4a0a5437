"""Line charts as SVG text, with the standard library only: the tools draw where nothing else is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

#: Told apart in print and by colour-blind readers (Okabe and Ito), in the order of the legend.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
#: A second sign for the same: the marks of a line.
MARKS = ("circle", "square", "diamond", "triangle")
FONT = 'font-family="system-ui, sans-serif"'
PANEL_W, PANEL_H = 330, 250
LEFT, TOP, GAP, RIGHT, BOTTOM = 56, 74, 60, 24, 52


@dataclass(frozen=True)
class Panel:
    """One set of axes. ``lines``: name -> points ``(x, y, spread)``; x are categories in ascending order,
    ``spread`` is drawn upwards from y (y is the best of several runs), 0 for none."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float, float]]]


def nice_step(top: float, ticks: int = 5) -> float:
    """The distance of axis ticks, 1, 2 or 5 times a power of ten, so that about ``ticks`` cover 0 to
    ``top``."""
    raw = top / ticks
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * (1 - 1e-9))


def lines(title: str, panels: Sequence[Panel], *, x: str, y: str, note: str = "") -> str:
    """An SVG document: the panels side by side on one y axis that starts at 0. ``x``, ``y``: axis labels."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    points = [p for panel in panels for line in panel.lines.values() for p in line]
    top = max((value + spread for _, value, spread in points), default=1.0) or 1.0
    step = nice_step(top)
    top = math.ceil(top / step - 1e-9) * step
    width = LEFT + max(len(panels), 1) * PANEL_W + max(len(panels) - 1, 0) * GAP + RIGHT
    height = TOP + PANEL_H + BOTTOM + (18 if note else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 24, title, size=15, weight="600"),
    ]
    x_legend = float(LEFT)
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        out += [mark(i, x_legend + 6, 42, colour), text(x_legend + 16, 46, name)]
        x_legend += 30 + 7.2 * len(name)
    for i, panel in enumerate(panels):
        out += axes(panel, LEFT + i * (PANEL_W + GAP), top, step, names, x, y if i == 0 else "")
    if note:
        out.append(text(LEFT, height - 12, note, size=11, fill="#555555"))
    return "\n".join([*out, "</svg>", ""])


def axes(
    panel: Panel, left: float, top: float, step: float, names: Sequence[str], x: str, y: str
) -> list[str]:
    categories = sorted({p[0] for line in panel.lines.values() for p in line})

    def to_x(value: int) -> float:
        return left + PANEL_W * (categories.index(value) + 0.5) / len(categories)

    def to_y(value: float) -> float:
        return TOP + PANEL_H * (1 - value / top)

    out = [text(left + PANEL_W / 2, TOP - 10, panel.title, anchor="middle", weight="600")]
    for i in range(round(top / step) + 1):
        level = to_y(i * step)
        out.append(
            f'<path d="M{left:g} {level:.1f}h{PANEL_W}" stroke="#{"888888" if i == 0 else "e2e2e2"}"/>'
        )
        out.append(text(left - 8, level + 4, f"{i * step:g}", anchor="end", fill="#444444"))
    for category in categories:
        out.append(text(to_x(category), TOP + PANEL_H + 18, str(category), anchor="middle", fill="#444444"))
    out.append(text(left + PANEL_W / 2, TOP + PANEL_H + 38, x, anchor="middle", fill="#444444"))
    if y:
        middle = TOP + PANEL_H / 2
        turned = f' transform="rotate(-90 14 {middle:g})"'
        out.append(text(14, middle, y, anchor="middle", fill="#444444", extra=turned))
    for name, line in panel.lines.items():
        points = sorted(line)
        number = names.index(name)
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{'M' if j == 0 else 'L'}{to_x(at):.1f} {to_y(value):.1f}"
            for j, (at, value, _) in enumerate(points)
        )
        out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for at, value, spread in points:
            here, level = to_x(at), to_y(value)
            if spread:
                out.append(
                    f'<path d="M{here:.1f} {level:.1f}V{to_y(value + spread):.1f}" stroke="{colour}"/>'
                )
            out.append(mark(number, here, level, colour, f"{name}, {panel.title}, {x} {at}: {value:g}"))
    return out


def mark(number: int, x: float, y: float, colour: str, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    kind = MARKS[number % len(MARKS)]
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{inside}</circle>'
    if kind == "triangle":
        path = f"M{x:.1f} {y - 5:.1f}l5 8.6h-10z"
        return f'<path d="{path}" fill="{colour}">{inside}</path>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "diamond" else ""
    place = f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'
    return f'<rect {place} fill="{colour}"{turned}>{inside}</rect>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "400",
    fill: str = "#1a1a1a",
    extra: str = "",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}"{extra}>{escape(words)}</text>'
    )
