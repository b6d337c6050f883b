"""Small charts as inline SVG: lines, dots, bars and shares of a whole. Colours are classes that a
page's style gives, so that a chart is readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDE, HIGH = 440, 250
"""of a chart, in its own units: a text is 12 high"""
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 42
MOST_POINTS = 400
"""of a line: more could not be told apart"""

COLORS = 8
"""classes c1 to c8, for lines and for kinds of work; w1 to w4 for waiting"""

STYLE = """
:root{--ink:#1d2430;--soft:#5b6675;--line:#d9dee6;--paper:#fff;--card:#f6f8fa;--good:#1a7f4b;
--bad:#b3261e;--c1:#0072b2;--c2:#009e73;--c3:#d55e00;--c4:#aa4499;--c5:#d0a000;--c6:#8a7a3c;
--c7:#56b4e9;--c8:#6b5b4b;--w1:#c3cad4;--w2:#a9b3c0;--w3:#dde2e9;--w4:#929daa}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa5b4;--line:#333b47;
--paper:#12161c;--card:#1a2029;--good:#4cc38a;--bad:#ff8078;--c1:#3d9be0;--c2:#2fbf93;--c3:#f0853a;
--c4:#d279c3;--c5:#f2cf4a;--c6:#b7a663;--c7:#8fd0f5;--c8:#c0a88e;--w1:#465060;--w2:#5a6576;
--w3:#363f4c;--w4:#6d798b}}
svg.chart{display:block;width:100%;height:auto;max-width:600px}
svg.chart text{font:12px system-ui,sans-serif;fill:var(--soft)}
svg.chart .axis{stroke:var(--soft);stroke-width:1}
svg.chart .grid{stroke:var(--line);stroke-width:1}
svg.chart .curve{fill:none;stroke-linejoin:round;stroke-linecap:round}
svg.share{display:block;width:100%;height:1.5rem;border-radius:4px}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.35rem 0 0;padding:0;list-style:none;
font-size:.85rem;color:var(--soft)}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.key b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
""" + "".join(
    f".{name}{{stroke:var(--{name});fill:var(--{name})}}.key .{name}{{background:var(--{name})}}"
    for name in [*(f"c{i}" for i in range(1, COLORS + 1)), *(f"w{i}" for i in range(1, 5))]
)
"""what a page with charts includes once"""


class Series(NamedTuple):
    """A line."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "c1"
    width: float = 2.0
    dashes: str = ""
    opacity: float = 1.0


class Axis(NamedTuple):
    """What is along it, with its unit."""

    label: str
    zero: bool = False
    """begin at 0"""
    whole: bool = False
    """only whole numbers are named"""


def lines(
    series: Sequence[Series], x: Axis, y: Axis, alt: str, marks: Sequence[Series] = ()
) -> str:
    """Lines over a common x; `marks` are points without a line between them."""
    every = [p for one in (*series, *marks) for p in one.points]
    if not every:
        return ""
    frame = _Frame(every, x, y)
    drawn = []
    for one in series:
        points = thin(one.points)
        style = f"stroke-width:{one.width:g};opacity:{one.opacity:g}"
        style += f";stroke-dasharray:{one.dashes}" if one.dashes else ""
        name = f"<title>{escape(one.name)}</title>"
        if len(points) == 1:
            drawn.append(frame.dot(*points[0], one.color, 3, name))
            continue
        path = " ".join(frame.at(*point) for point in points)
        drawn.append(
            f'<polyline class="curve {one.color}" style="fill:none;{style}" points="{path}">'
            f"{name}</polyline>"
        )
    for one in marks:
        name = f"<title>{escape(one.name)}</title>"
        drawn += [frame.dot(*point, one.color, 3, name) for point in thin(one.points)]
    return frame.svg("".join(drawn), alt)


def dots(points: Sequence[tuple[float, float]], x: Axis, y: Axis, alt: str) -> str:
    """One dot for each, the later the darker."""
    if not points:
        return ""
    frame = _Frame(points, x, y)
    step = max(1, -(-len(points) // MOST_POINTS))
    taken = points[::step]
    drawn = [
        frame.dot(*point, "c1", 3.5, "", 0.15 + 0.75 * (i + 1) / len(taken))
        for i, point in enumerate(taken)
    ]
    return frame.svg("".join(drawn), alt)


def bars(bins: Sequence[tuple[float, float, float]], x: Axis, y: Axis, alt: str) -> str:
    """(from, to, height) of each."""
    if not bins:
        return ""
    ends = [(low, 0.0) for low, _, _ in bins] + [(high, top) for _, high, top in bins]
    frame = _Frame(ends, x, y._replace(zero=True))
    drawn = []
    for low, high, top in bins:
        left, right, above, below = frame.x(low), frame.x(high), frame.y(top), frame.y(0.0)
        gap = min(1.0, 0.1 * (right - left))
        drawn.append(
            f'<rect class="c1" style="stroke:none" x="{left + gap:.1f}" y="{above:.1f}" '
            f'width="{max(right - left - 2 * gap, 0.5):.1f}" height="{max(below - above, 0):.1f}">'
            f"<title>{_number(low)} to {_number(high)}: {_number(top)}</title></rect>"
        )
    return frame.svg("".join(drawn), alt)


def share(parts: Sequence[tuple[str, float, str]], alt: str) -> str:
    """(colour, share of 1, name) of each, side by side: a bar that is whole."""
    drawn, begin = [], 0.0
    for color, part, name in parts:
        drawn.append(
            f'<rect class="{color}" style="stroke:none" x="{1000 * begin:.2f}" y="0" '
            f'width="{1000 * part:.2f}" height="20"><title>{escape(name)}</title></rect>'
        )
        begin += part
    return (
        f'<svg class="share" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(alt)}">{"".join(drawn)}</svg>'
    )


def key(entries: Sequence[tuple[str, str, str]]) -> str:
    """(colour, name, figure) of what a chart shows."""
    items = "".join(
        f'<li><i class="{color}"></i>{escape(name)}{f" <b>{escape(figure)}</b>" if figure else ""}'
        f"</li>"
        for color, name, figure in entries
    )
    return f'<ul class="key">{items}</ul>'


def rounded(shares: Sequence[float], digits: int = 1) -> list[float]:
    """Shares of 1 in percent, rounded so that they still add up to 100: what is cut off goes to
    those that lost most."""
    unit = 10**digits
    exact = [100 * unit * part for part in shares]
    whole = [math.floor(value) for value in exact]
    left = round(math.fsum(exact)) - sum(whole)
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[:left]:
        whole[i] += 1
    return [value / unit for value in whole]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two, some `about` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * f for f in (1, 2, 2.5, 5, 10) if size * f >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def thin(
    points: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> Sequence[tuple[float, float]]:
    """At most so many points: of every stretch its lowest and its highest, in their order."""
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 2))
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


class _Frame:
    """The axes of a chart, and where a point is in it."""

    def __init__(self, points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._left, self._right = _range([p[0] for p in points], x)
        self._low, self._high = _range([p[1] for p in points], y)
        room = 0.04 * (self._high - self._low)  # so that no line lies on an edge
        self._high += room
        self._low -= 0.0 if y.zero and self._low == 0 else room

    def x(self, value: float) -> float:
        part = (value - self._left) / (self._right - self._left)
        return LEFT + part * (WIDE - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = (value - self._low) / (self._high - self._low)
        return HIGH - BOTTOM - part * (HIGH - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"

    def dot(
        self, x: float, y: float, color: str, size: float, inside: str, opacity: float = 1.0
    ) -> str:
        return (
            f'<circle class="{color}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{size:g}" '
            f'style="stroke:none;opacity:{opacity:.2f}">{inside}</circle>'
        )

    def svg(self, drawn: str, alt: str) -> str:
        bottom, right = HIGH - BOTTOM, WIDE - RIGHT
        parts = []
        for value in ticks(self._low, self._high):
            at = self.y(value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            )
            parts.append(
                f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(value)}</text>'
            )
        for value in ticks(self._left, self._right):
            if self._x.whole and not value.is_integer():
                continue
            at = self.x(value)
            parts.append(
                f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            )
            anchor = "end" if at > right - 8 else "middle"
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="{anchor}">'
                f"{_number(value)}</text>"
            )
        middle = (LEFT + right) / 2
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{middle:.0f}" y="{HIGH - 6}" text-anchor="middle">'
            f"{escape(self._x.label)}</text>"
        )
        upright = (TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(12 {upright:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self._y.label)}</text>"
        )
        return (
            f'<svg class="chart" viewBox="0 0 {WIDE} {HIGH}" role="img" '
            f'aria-label="{escape(alt)}"><title>{escape(alt)}</title>{"".join(parts)}{drawn}</svg>'
        )


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low, high = min(values), max(values)
    if axis.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-6):  # one value alone
        away = abs(high) * 0.5 or 1.0
        low, high = (0.0 if axis.zero and low >= 0 else low - away), high + away
    return low, high


def _number(value: float) -> str:
    """Short, for a tick."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"
