"""How something is spread over a run, in bounded memory: mean, 95th percentile, maximum."""

from __future__ import annotations

import math

import numpy as np

from tianji.role import State
from tianji.types import Array
from tianji.view.status import Staleness


class Histogram:
    """Counts of staleness in bounded memory: exact below 1024, in bins 2 % wide above."""

    EXACT = 1024
    RATIO = 1.02
    BINS = EXACT + 1500
    """the last bin has all from 1024 * 1.02**1499, about 8e15"""
    ROOM = 8192

    def __init__(self) -> None:
        self.counts = np.zeros(self.BINS, np.int64)
        self.size = 0
        self.total = 0
        self.max = 0
        # arrivals wait here, for one numpy call per thousands of them
        self._waiting = np.empty(self.ROOM, np.int64)
        self._held = 0

    def add(self, values: Array) -> None:
        end = self._held + len(values)
        if end > self.ROOM:
            self._count(self._waiting[: self._held])
            self._held = 0
            if len(values) > self.ROOM:
                self._count(values)
                return
            end = len(values)
        self._waiting[self._held : end] = values
        self._held = end

    def plus(self, other: Histogram) -> Histogram:
        """A new one, with what both have."""
        both = Histogram()
        for one in (self, other):
            one._settle()
            both.counts += one.counts
            both.size += one.size
            both.total += one.total
            both.max = max(both.max, one.max)
        return both

    def spread(self) -> Staleness | None:
        self._settle()
        if self.size == 0:
            return None
        rank, part = divmod(0.95 * (self.size - 1), 1.0)
        ends = np.cumsum(self.counts)
        low = self._value(int(np.searchsorted(ends, rank, side="right")))
        high = self._value(int(np.searchsorted(ends, min(rank + 1, self.size - 1), side="right")))
        return Staleness(self.total / self.size, low + (high - low) * part, self.max)

    def state(self) -> State:
        self._settle()
        filled = np.flatnonzero(self.counts)
        counts = self.counts[filled]
        return {"bins": filled, "counts": counts, "total": self.total, "max": self.max}

    def tree(self) -> dict[str, list[float]]:
        """For a JSON file: the least and the largest value of every bin that has some, and how
        often it was met."""
        self._settle()
        filled = np.flatnonzero(self.counts).tolist()
        return {
            "low": [self._edge(place) for place in filled],
            "high": [min(max(self._edge(p + 1) - 1, self._edge(p)), self.max) for p in filled],
            "count": self.counts[filled].tolist(),
        }

    @classmethod
    def of(cls, state: State) -> Histogram:
        self = cls()
        self.counts[state["bins"]] = state["counts"]
        self.size = int(self.counts.sum())
        self.total, self.max = state["total"], state["max"]
        return self

    def _settle(self) -> None:
        if self._held:
            self._count(self._waiting[: self._held])
            self._held = 0

    def _count(self, values: Array) -> None:
        if len(values) == 0:
            return
        low, high = int(values.min()), int(values.max())
        if low < 0:
            raise ValueError(f"staleness {low}: what was consumed is newer than the learner")
        if high >= self.EXACT:
            values = values.astype(np.int64)
            self.total += int(values.sum())
            far = values >= self.EXACT
            bins = self.EXACT + np.log(values[far] / self.EXACT) / math.log(self.RATIO)
            values[far] = np.minimum(bins, self.BINS - 1)
        else:
            self.total += int(values.sum())
        counts = np.bincount(values)
        self.counts[: len(counts)] += counts
        self.size += len(values)
        self.max = max(self.max, high)

    def _value(self, place: int) -> float:
        if place < self.EXACT:
            return place
        middle: float = self.EXACT * self.RATIO ** (place - self.EXACT + 0.5)
        return min(middle, self.max)

    def _edge(self, place: int) -> int:
        """The least whole value of a bin."""
        if place <= self.EXACT:
            return place
        return math.ceil(self.EXACT * self.RATIO ** (place - self.EXACT))
