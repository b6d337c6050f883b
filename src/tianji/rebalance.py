"""How many actors are active, and which: it follows what a run measures, between rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tianji.flow import Flow, wanted

SUSTAINED = 3
"""windows in a row in which a change must be called for"""
MOST_SUSTAINED = 24
"""the same, after changes that were taken back"""


class Change(NamedTuple):
    """Another number of actors, and why."""

    before: int
    after: int
    why: str

    def __str__(self) -> str:
        return f"rebalanced: {self.before} -> {self.after} actors: {self.why}"


@dataclass
class Rebalancer:
    """Decides after each window of time. One is not enough: a change must be called for several
    times in a row, and after each that was taken back, twice as often."""

    most: int
    """actors that there are"""
    active: int
    sustained: int = SUSTAINED
    """windows in a row that a change takes now"""
    _called: int = 0
    """windows in a row that called for more (above 0) or for fewer (below)"""
    _target: int = 0
    """the nearest number of those that they called for"""
    _last: int = 0
    """the direction of the last change"""
    _fresh: bool = True
    """has the first window after a change not gone by? It saw what had been begun before"""

    def look(self, flow: Flow) -> Change | None:
        """What a window says; a change, where it is due."""
        if self._fresh:
            self._fresh = False
            return None
        want = wanted(flow, self.active, self.most)
        way = (want > self.active) - (want < self.active)
        if way == 0 or way * self._called < 0:
            self._called = 0
        if way == 0:
            return None
        if self._called == 0 or abs(want - self.active) < abs(self._target - self.active):
            self._target = want
        self._called += way
        if abs(self._called) < self.sustained:
            return None
        return self._change(way, flow)

    def pause(self) -> None:
        """Nothing can be said of this window: what was called for does not count."""
        self._called = 0

    def _change(self, way: int, flow: Flow) -> Change:
        if way * self._last < 0:
            self.sustained = min(2 * self.sustained, MOST_SUSTAINED)
        self._last, self._called, self._fresh = way, 0, True
        change = Change(self.active, self._target, _why(way, flow))
        self.active = self._target
        return change


def _why(way: int, flow: Flow) -> str:
    other, share = ("learner", flow.learner)
    if flow.buffer > flow.learner:
        other, share = "buffer", flow.buffer
    if way > 0:
        return f"actors {_percent(flow.actors)} busy, {other} {_percent(share)}: it waits for them"
    return f"{other} {_percent(share)} busy, actors {_percent(flow.actors)}: fewer cost nothing"


def chosen(count: int, turn: int, cores: Sequence[Sequence[int]]) -> list[int]:
    """Which actors are active: `count` of them from the one whose `turn` it is, on cores that have
    as few of them as can be. `cores`: those that each may run on, none for any."""
    N = len(cores)
    taken: dict[int, int] = {}
    found: list[int] = []
    order = [(turn + i) % N for i in range(N)]
    while len(found) < min(count, N):
        left = [i for i in order if i not in found]
        best = min(left, key=lambda i: max((taken.get(c, 0) for c in cores[i]), default=0))
        found.append(best)
        for core in cores[best]:
            taken[core] = taken.get(core, 0) + 1
    return sorted(found)


def first_of(plan: object, most: int) -> int:
    """The number to begin with: that of a plan, or all."""
    choice = plan.get("choice") if isinstance(plan, dict) else None
    actors = choice.get("actors") if isinstance(choice, dict) else None
    if isinstance(actors, int | float) and math.isfinite(actors) and actors >= 1:
        return min(most, int(actors))
    return most


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
