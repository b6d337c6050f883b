"""What a view shows, and how numbers are told; no view of its own but the silent one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from tianji.verdict import Verdict


class Staleness(NamedTuple):
    """Versions behind, of what updates consumed."""

    mean: float
    p95: float
    max: int


@dataclass(frozen=True, slots=True)
class Status:
    """What a view shows of a run at one moment."""

    elapsed: float
    """seconds, those of the processes before a resume included"""
    steps: int
    """received"""
    updates: int
    episodes: int
    produced: float
    """steps per second that actors make"""
    received: float
    """steps per second that reach the buffer"""
    consumed: float
    """steps per second that updates consume, reuse included"""
    fraction: float | None = None
    """of the way to the nearest stop condition; None where there is none"""
    goals: tuple[str, ...] = ()
    """each stop condition, in words"""
    return_mean: float | None = None
    return_best: float | None = None
    """the best mean of 100 episodes"""
    length_mean: float | None = None
    win_rate: float | None = None
    staleness: Staleness | None = None
    util: Mapping[str, float] = field(default_factory=dict)
    """shares of a role's time, 0 to 1, by "role/kind" """
    verdict: Verdict | None = None
    """what holds the run up lately"""
    curve: Sequence[tuple[float, float]] = ()
    """(steps, return mean) over the run"""


class View(Protocol):
    """Shows a run. `end` is safe to call twice, and is called when the `with` block is left."""

    every: float
    """seconds between two calls of `show`, at least"""

    def begin(self, title: str, facts: Mapping[str, object]) -> None: ...

    def show(self, status: Status) -> None: ...

    def line(self, text: str) -> None:
        """Something happened."""

    def end(self, result_lines: Iterable[str] = ()) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


class SilentView(View):
    """Shows nothing."""

    every = math.inf

    def begin(self, title: str, facts: Mapping[str, object]) -> None: ...

    def show(self, status: Status) -> None: ...

    def line(self, text: str) -> None: ...

    def end(self, result_lines: Iterable[str] = ()) -> None: ...


def human(count: float) -> str:
    """Three digits and a unit: 312, 12.3 k, 1.2 M."""
    if not math.isfinite(count):
        return str(count)
    if abs(count) < 999.5:
        return f"{count:.3g}"
    for unit in ("k", "M", "G", "T"):
        count /= 1000
        if abs(count) < 999.5 or unit == "T":
            break
    digits = 1 if abs(count) < 99.95 else 0
    return f"{count:.{digits}f} {unit}"


def number(value: float) -> str:
    """Four digits of a number that may be small, large or negative."""
    if abs(value) >= 10_000:
        return human(value)
    return f"{value:#.4g}".rstrip(".")


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """0:42, 12:03, 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def columns(rows: Sequence[Sequence[str]], figures: bool = False) -> list[str]:
    """Lines of a table, its cells below each other; `figures`: all but the first are figures."""
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(n) if figures and i else cell.ljust(n)
            for i, (cell, n) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]
