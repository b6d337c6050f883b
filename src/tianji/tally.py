"""Several updates in one: what the learner's host sends, and what a row of metrics is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tianji.histogram import Histogram
from tianji.role import State
from tianji.types import EPISODE, Array, Report


def only_counts(
    version: int, produced: int, received: int, consumed: int, filtered: int = 0
) -> Report:
    """A report of nothing new."""
    episodes, staleness = np.empty(0, EPISODE), np.empty(0, np.int64)
    return Report(version, produced, received, consumed, episodes, {}, staleness, filtered)


class Tally:
    """Sums over reports: metrics, staleness, freshness, episodes, and the newest counts."""

    def __init__(self) -> None:
        self.last: Report | None = None
        self.updates = 0
        self.sums: dict[str, float] = {}
        self.uses: dict[str, int] = {}
        self.staleness = Histogram()
        self._fresh = 0.0
        self._episodes: list[Array] = []

    @property
    def episodes(self) -> Array:
        return np.concatenate([np.empty(0, EPISODE), *self._episodes])

    @property
    def freshness(self) -> float | None:
        """Mean over the updates; None where there was none."""
        return self._fresh / self.updates if self.updates else None

    def add(self, report: Report) -> None:
        """Note one report. One with no staleness and no metrics only brings the counts."""
        self.last = report
        if len(report.episodes):
            self._episodes.append(report.episodes)
        sums, uses = self.sums, self.uses
        for name, value in report.metrics.items():
            if name in sums:
                sums[name] += value
                uses[name] += 1
            else:
                sums[name] = value
                uses[name] = 1
        if len(report.staleness):
            self.staleness.add(report.staleness)
            self.updates += 1
            self._fresh += report.freshness

    def merge(self, other: Tally) -> None:
        """Note all that another one has noted, after what this one has."""
        self.last = other.last or self.last
        self._episodes += other._episodes
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.uses[name] = self.uses.get(name, 0) + other.uses[name]
        self.staleness = self.staleness.plus(other.staleness)
        self.updates += other.updates
        self._fresh += other._fresh

    def state(self) -> State:
        last = self.last
        assert last is not None
        return {
            "counts": [last.version, last.produced, last.received, last.consumed, last.filtered],
            "share": last.share,
            "updates": self.updates,
            "sums": self.sums,
            "uses": self.uses,
            "staleness": self.staleness.state(),
            "fresh": self._fresh,
            "episodes": self.episodes,
        }

    @classmethod
    def of(cls, state: State) -> Tally:
        self = cls()
        self.last = replace(only_counts(*state["counts"]), share=state["share"])
        self.updates, self._fresh = state["updates"], state["fresh"]
        self.sums, self.uses = dict(state["sums"]), dict(state["uses"])
        self.staleness = Histogram.of(state["staleness"])
        self._episodes = [state["episodes"]] if len(state["episodes"]) else []
        return self
