"""What a run shows while it runs: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from tianji.role_names import KINDS
from tianji.verdict import Verdict, by_role
from tianji.view.status import Status, View, duration, human, number, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text


def choose_view(stream: TextIO, plain: bool) -> View:
    """The live view where the stream is a terminal that can show it, else the plain one."""
    utf8 = (stream.encoding or "").lower().replace("-", "") == "utf8"
    able = stream.isatty() and utf8 and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return LiveView(stream) if able and not plain else PlainView(stream)


class PlainView(View):
    """A line every few seconds, for files, pipes and simple terminals: no control characters."""

    def __init__(self, stream: TextIO, every: float = 5.0) -> None:
        self.every = every
        self._stream = stream
        self._ended = False

    def begin(self, title: str, facts: Mapping[str, object]) -> None:
        self._print([title, *(f"  {name}: {fact}" for name, fact in facts.items())])

    def show(self, status: Status) -> None:
        self._print([plain_line(status)])

    def line(self, text: str) -> None:
        self._print([text])

    def end(self, result_lines: Iterable[str] = ()) -> None:
        if self._ended:
            return
        self._ended = True
        if not self._print(result_lines):
            _discard_unwritten(self._stream)

    def _print(self, lines: Iterable[str]) -> bool:
        """A reader that went away or a full disk behind the stream does not stop the run."""
        encoding = self._stream.encoding or "utf-8"
        try:
            for line in lines:
                safe = printable(line).encode(encoding, "backslashreplace").decode(encoding)
                self._stream.write(safe + "\n")
            self._stream.flush()
        except OSError:
            return False
        return True


class LiveView(View):
    """A panel that is redrawn in place, and stays on the screen when the run has ended."""

    every = 0.125
    widest = 100
    """columns"""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._facts: Mapping[str, object] = {}
        self._status: Status | None = None
        self._events: deque[str] = deque(maxlen=2)
        self._console: Console | None = None
        self._live: Live | None = None
        self._drawn = 0
        """columns of the panel on the screen"""

    def begin(self, title: str, facts: Mapping[str, object]) -> None:
        from rich.console import Console

        self._title, self._facts = printable(title), facts
        self._console = Console(file=self._stream, highlight=False)
        atexit.register(self.end)
        self._start(self._console)

    def show(self, status: Status) -> None:
        self._status = status
        self._draw()

    def line(self, text: str) -> None:
        self._events.append(printable(text).replace("\n", " "))
        self._draw()

    def end(self, result_lines: Iterable[str] = ()) -> None:
        console, self._console = self._console, None
        if console is None:
            return
        atexit.unregister(self.end)
        try:
            self._stop()
            for line in result_lines:
                console.print(printable(line), markup=False, soft_wrap=True)
        except OSError:
            _discard_unwritten(self._stream)

    def _start(self, console: Console) -> None:
        from rich.live import Live
        from rich.text import Text

        for name, fact in self._facts.items():
            console.print(Text.assemble((f" {name:<10} ", "dim"), printable(str(fact))))
        # no thread of its own: the run loop calls `show`
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self) -> None:
        if self._console is None or self._live is None or self._status is None:
            return
        try:
            if self._console.width < self._drawn:
                # the terminal has wrapped the old panel, so moving up by its lines would miss it
                self._live.transient = True
                self._stop()
                self._console.clear()
                self._start(self._console)
            width = min(self._console.width, self.widest)
            color = not self._console.no_color and self._console.color_system is not None
            panel = live_panel(self._title, self._status, self._events, width, color)
            self._live.update(panel, refresh=True)
            self._drawn = width
        except OSError:
            # the terminal is gone (EIO): the run goes on without it
            self._console = None
            atexit.unregister(self.end)


def plain_line(status: Status) -> str:
    parts = [duration(status.elapsed)]
    if status.fraction is not None:
        parts.append(percent(status.fraction))
    if status.return_mean is not None:
        best = "" if status.return_best is None else f" (best {number(status.return_best)})"
        parts.append(f"return {number(status.return_mean)}{best}")
    if status.length_mean is not None:
        parts.append(f"length {number(status.length_mean)}")
    if status.win_rate is not None:
        parts.append(f"won {percent(status.win_rate)}")
    parts += [
        f"episodes {human(status.episodes)}",
        f"steps {human(status.steps)}",
        f"updates {human(status.updates)}",
        f"steps/s {human(status.produced)} produced, {human(status.received)} received, "
        f"{human(status.consumed)} consumed",
    ]
    if (stale := status.staleness) is not None:
        parts.append(
            f"staleness {stale.mean:.1f} mean, {human(stale.p95)} p95, {human(stale.max)} max"
        )
    if status.verdict is not None:
        parts.append(status.verdict.line)
    return " | ".join(parts)


def live_panel(title: str, status: Status, events: Iterable[str], width: int, color: bool) -> Panel:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    room = max(width - 4, 16)
    lines = [*_progress_lines(status, room), *_count_lines(status, room)]
    lines += _time_lines(status.util, status.verdict, room, color)
    last = list(events)[-max(1, MOST_LINES - len(lines)) :]
    lines += [Text.assemble(("· ", "cyan"), (event, "dim")) for event in last]
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
    return Panel(
        Group(*lines),
        title=Text(title, "bold"),
        title_align="left",
        subtitle=Text(duration(status.elapsed), "cyan"),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="bright_black",
        width=width,
    )


def _progress_lines(status: Status, room: int) -> list[Text]:
    from rich.text import Text

    if status.fraction is None:
        return []
    wide = room - 7
    filled = round(wide * status.fraction)
    bar = Text.assemble(
        ("━" * filled, "cyan"),
        ("─" * (wide - filled), "bright_black"),
        (f"{percent(status.fraction):>7}", "bold"),
    )
    return [bar, Text(" · ".join(status.goals), "dim")]


def _count_lines(status: Status, room: int) -> list[Text]:
    from rich.text import Text

    label = "cyan"
    mean = f"{_or_dash(status.return_mean):>8}"
    first = Text.assemble(("return    ", label), (mean, "bold green"))
    if status.return_best is not None:
        first.append("  best ", "dim").append(number(status.return_best))
    if status.curve:
        ends = [mean for _, mean in status.curve]
        scale = f" {human(min(ends))} to {human(max(ends))}"
        first.append(" " * max(2, 34 - first.cell_len))
        first.append(sparkline(status.curve, max(room - first.cell_len - len(scale), 0)), "green")
        first.append(scale, "dim")
    length = _or_dash(status.length_mean)
    pairs = [("length", length), ("updates", human(status.updates)), ("steps", human(status.steps))]
    if status.win_rate is not None:
        pairs.insert(0, ("won", percent(status.win_rate)))
    second = Text.assemble(("episodes  ", label), f"{human(status.episodes):>8}")
    for name, text in pairs:
        second.append(f"  {name} ", "dim").append(f"{text:<8}")
    third = Text.assemble(("steps/s   ", label), (f"{human(status.produced):>8}", "bold"))
    third.append(" produced → ", "dim").append(human(status.received), "bold")
    third.append(" received → ", "dim").append(human(status.consumed), "bold")
    third.append(" consumed", "dim")
    if status.received > 0:
        third.append(f"  ×{status.consumed / status.received:.3g}", "dim")
    lines = [first, second, third]
    if (stale := status.staleness) is not None:
        fourth = Text.assemble(("staleness ", label), (f"{stale.mean:>8.1f}", "bold"))
        fourth.append(" mean", "dim").append(f"   {human(stale.p95)}").append(" p95", "dim")
        lines.append(fourth.append(f"   {human(stale.max)}").append(" max", "dim"))
    return lines


MOST_LINES = 12
"""of a panel, its frame aside: so many fit into a small terminal"""
COLORS = ("cyan", "magenta", "yellow", "blue", "green", "red")
SHADES = "█▓▒░"
BAR = 20
"""columns of a role's bar: all of its time"""


def _time_lines(
    util: Mapping[str, float], verdict: Verdict | None, room: int, color: bool
) -> list[Text]:
    """Where the time goes: what holds the run up and what would help; one bar for one host, else
    one for each role of the loop."""
    from rich.text import Text

    if not util:
        return []
    lines = []
    if verdict is not None:
        told = (f"{verdict.kind}: ", "bold"), verdict.text
        lines.append(Text.assemble(("bound     ", "cyan"), *told))
        if verdict.advice:
            lines.append(Text.assemble(" " * 10, ("; ".join(verdict.advice), "yellow")))
    if sum(util.values()) < 1.02:
        shares = {key.replace("/", " "): share for key, share in util.items()}
        bar, legend = _bar_and_legend(shares, room - 10, room - 10, color)
        lines += [Text.assemble(("time      ", "cyan"), bar), Text(" " * 10).append(legend)]
        return lines
    roles = by_role(util)
    loop = [role for role, kind in KINDS.items() if kind.flow and role in roles]
    for role in loop if len(loop) == 3 else list(roles)[:3]:
        bar, legend = _bar_and_legend(roles[role], BAR, room - BAR - 12, color)
        lines.append(Text.assemble((f"{role:<9.9} ", "cyan"), bar, "  ", legend))
    return lines


def _bar_and_legend(
    shares: Mapping[str, float], wide: int, room: int, color: bool
) -> tuple[Text, Text]:
    """Shares of 1 as a bar of `wide` columns, work before waiting, and what fits of their names."""
    from rich.text import Text

    bar, legend, end = Text(), Text(), 0.0
    order = sorted((_waits(kind), -share, kind) for kind, share in shares.items())
    for i, (waits, minus_share, kind) in enumerate(order):
        share = -minus_share
        style = "bright_black" if waits else COLORS[i % len(COLORS)]
        glyph = ("░" if waits else "█") if color else SHADES[i % len(SHADES)]
        end += share
        bar.append(glyph * (min(round(wide * end), wide) - bar.cell_len), style)
        entry = f"{kind.replace('_', ' ')} {percent(share)}"
        if share >= 0.005 and legend.cell_len + 3 + len(entry) <= room:
            legend.append(" · " if legend else "", "dim").append(entry, style)
    bar.append(" " * (wide - bar.cell_len))
    return bar, legend


def _waits(kind: str) -> bool:
    return "wait" in kind or "idle" in kind


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(curve: Sequence[tuple[float, float]], width: int) -> str:
    """The curve in `width` columns of equal ranges of steps; an empty range repeats the last."""
    if not curve or width <= 0:
        return ""
    start, stop = curve[0][0], curve[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in curve:
        place = (x - start) / (stop - start) if stop > start else 0.0
        columns[min(int(place * width), width - 1)].append(y)
    heights: list[float] = []
    for column in columns:
        heights.append(sum(column) / len(column) if column else heights[-1])
    low, high = min(heights), max(heights)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((y - low) * scale)] for y in heights)


def printable(text: str) -> str:
    """The text with what could steer a terminal written out, newlines kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else number(value)


def _discard_unwritten(stream: TextIO) -> None:
    """Let go of what could not be written, or the interpreter's exit code would become 120."""
    if stream in (sys.stdout, sys.stderr):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
