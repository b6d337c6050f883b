"""The rows that a run has written, read back: what was when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_ROWS = 2000
"""rows that are looked at; of a longer run every n-th"""

SHORT = 0.3
"""seconds from one row to the next, below which its rates are chance"""

Row = dict[str, Any]
Points = list[tuple[float, float]]


class History:
    """Rows of metrics.jsonl in their order, without those that a resume went back behind."""

    def __init__(
        self, rows: Sequence[Row], evaluations: Sequence[Row] = (), every: int = 1
    ) -> None:
        self.rows = rows
        """one for each interval"""
        self.evaluations = evaluations
        self.every = every
        """1: all rows; n: every n-th, as there were too many to look at all"""

    @classmethod
    def read(cls, run: Path, most: int = MOST_ROWS) -> History:
        """Of a run folder. Where there is no file there are no rows; half a line at the end, of a
        process that writes or was killed, is left out."""
        try:
            lines = (run / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return cls([])
        played = [line for line in lines if b'"eval/' in line]
        plain = [line for line in lines if line and b'"eval/' not in line]
        every = max(1, -(-len(plain) // most))
        # the last row is always there: it has the newest counts
        taken = plain[(len(plain) - 1) % every :: every] if plain else []
        rows, evaluations = _forward(_parsed(taken)), _forward(_parsed(played[-most:]))
        return cls(rows, evaluations, every)

    def series(self, key: str, over: str = "wall_s") -> Points:
        """(seconds or steps, value) of the rows that have it."""
        return [(row[over], row[key]) for row in self.rows if key in row]

    def flow(self, key: str) -> Points:
        """A rate over seconds, without rows of so short a time that it is chance: the last one of
        a run comes at its end, and not a second after the one before."""
        found: Points = []
        before = -math.inf
        for x, value in self.series(key):
            if x - before >= SHORT or not found:
                found.append((x, value))
            before = x
        return found

    def played(self, over: str = "wall_s") -> Points:
        """(seconds or steps, mean return) of the evaluations."""
        return [(row[over], row["eval/mean_reward"]) for row in self.evaluations
                if "eval/mean_reward" in row]  # fmt: skip

    def mean(self, key: str, over: str = "updates") -> float | None:
        """Over the updates, or the time, of the run; None where no row has it."""
        total = weight = 0.0
        for row, part in self._weighted(over):
            if key in row:
                total, weight = total + part * row[key], weight + part
        return total / weight if weight > 0 else None

    def shares(self) -> dict[str, float]:
        """Where the time went, by "role/kind": means over time of what the rows have of it."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        for row, seconds in self._weighted("wall_s"):
            util = {key[5:]: share for key, share in row.items() if key.startswith("util/")}
            for role in {key.partition("/")[0] for key in util}:
                weights[role] = weights.get(role, 0.0) + seconds
            for key, share in util.items():
                sums[key] = sums.get(key, 0.0) + seconds * share
        return {
            key: total / weights[role]
            for key, total in sums.items()
            if weights[role := key.partition("/")[0]] > 0
        }

    def _weighted(self, by: str) -> Iterator[tuple[Row, float]]:
        """Every row with how much went by since the one before."""
        before = 0.0
        for row in self.rows:
            yield row, max(row[by] - before, 0.0)
            before = row[by]


def _parsed(lines: Sequence[bytes]) -> list[Row]:
    rows = []
    for place, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if place + 1 < len(lines):
                raise
    return rows


def _forward(rows: Sequence[Row]) -> list[Row]:
    """A resume from an older checkpoint writes some steps again: the later rows hold."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] > row["step"]:
            kept.pop()
        kept.append(row)
    return kept
