"""How much longer things take under other circumstances: what a profile compares."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tianji.plan import between
from tianji.probe import SLICES, Measured, Probe
from tianji.types import Array

LONG = 0.5
"""seconds of an update or a step from which on it is not looked at again"""
APART = 2.0
"""times as long as usual that something takes, at most, if nothing is the matter"""


class Beside(NamedTuple):
    """Seconds of something under other circumstances, and as it is compared with, at about that
    time: of an update, with one inside a process that also acts, on one core."""

    took: float
    base: float

    def times(self, factor: float) -> Beside:
        return self._replace(took=factor * self.took)


def usual(looks: Iterable[float]) -> float:
    """Their mean. Others who use the machine, too, make it slower by half for seconds at a time: a
    run has its share of that, and a median all or nothing. What is further than `APART` from the
    median does not count: now and then a machine stands still."""
    found = list(looks)
    median = statistics.median_low(found)
    return statistics.fmean(x for x in found if median / APART <= x <= median * APART)


def over(found: Iterable[Beside]) -> float:
    """How much longer it takes."""
    took, base = zip(*found, strict=True)
    return usual(took) / usual(base)


class Slowed(NamedTuple):
    """Beside others, and alone."""

    learn: Beside
    act: Beside
    """a step, in the mean of all actors"""
    slowest: float
    """of the actors, whichever it is at a time, over that mean"""

    def times(self, factor: float) -> Slowed:
        return Slowed(self.learn.times(factor), self.act.times(factor), self.slowest)


class Curves(NamedTuple):
    """What of `Rates` comes of ratios."""

    inside: dict[int, float]
    learn: dict[int, float]
    slow_act: dict[int, float]
    slow_learn: dict[int, float]
    slowest: dict[int, float]
    team: dict[int, float]


@dataclasses.dataclass
class Ratios:
    """How much longer things take under other circumstances, each as often as it was measured."""

    apart: dict[int, list[Beside]] = dataclasses.field(default_factory=dict)
    """cores: an update in a process of its own, over one inside a process that also acts, on one
    core"""
    busy_apart: int = 2
    """busy cores while that was measured"""
    asked: list[float] = dataclasses.field(default_factory=list)
    """seconds of a step of the only actor meanwhile, with what a server took for it"""
    threads: dict[int, list[Beside]] = dataclasses.field(default_factory=dict)
    """cores: an update inside such a process, over one with one core"""
    team: dict[int, list[Beside]] = dataclasses.field(default_factory=dict)
    """learners: an update of all of them, over one inside a process that also acts"""
    workers: dict[int, list[Beside]] = dataclasses.field(default_factory=dict)
    """workers: from one update of each to the next, over an update alone"""
    busy: dict[int, list[Slowed]] = dataclasses.field(default_factory=dict)
    """by busy cores"""

    def times(self, factor: float, kind: str, key: int) -> Ratios:
        """As if one of them had always taken so many times as long; steps that asked a server
        likewise, where it is one of the runs that made them."""
        found = getattr(self, kind)
        changed = {kind: found | {key: [one.times(factor) for one in found[key]]}}
        if kind == "apart":
            changed["asked"] = [factor * step for step in self.asked]
        return dataclasses.replace(self, **changed)

    def curves(self, inside: dict[int, float], base: float) -> Curves:
        """With seconds of an update inside a process that also acts, by cores; on one core it took
        `base` in many looks."""
        inside = {cores: base * seconds / inside[1] for cores, seconds in inside.items()}
        inside |= {cores: base * over(found) for cores, found in self.threads.items()}
        apart = {cores: over(found) for cores, found in self.apart.items()}
        first = apart.get(1, 1.0)
        slow_learn, slow_act, slowest = {1: 1.0}, {1: 1.0}, {1: 1.0}
        for n, found in self.busy.items():
            slow_learn[n] = max(1.0, over(one.learn for one in found))
            slow_act[n] = max(1.0, over(one.act for one in found))
            slowest[n] = max(1.0, usual(one.slowest for one in found))
        if apart:  # it had busy cores beside it
            known = between(slow_learn, self.busy_apart)
            slow_learn = {n: max(1.0, factor / known) for n, factor in slow_learn.items()}
        # several learners had busy cores beside them, which predictions know of
        team = {
            n: over(found) / first / between(slow_learn, 2 * n) for n, found in self.team.items()
        }
        learn = {cores: seconds * first for cores, seconds in inside.items()}
        learn |= {cores: base * ratio for cores, ratio in apart.items()}
        return Curves(inside, learn, slow_act, slow_learn, slowest, {1: 1.0} | team)


class Again:
    """Who acts and who learns, asked again and again while a profile is made: others use the
    machine, too, so that it is quicker at one time than at another."""

    SECONDS = 0.4

    def __init__(
        self, learner: Probe, actor: Probe, cores: Sequence[int], update: float, step: float = 0.0
    ) -> None:
        """An update takes about `update` seconds and a step of all envs about `step`; what takes
        long is looked at only where something is compared with it."""
        self._learner, self._actor, self._cores = learner, actor, list(cores)
        self._update, self._step = update, step
        self._learnt: list[float] = []
        self._acted: list[float] = []

    @property
    def learn(self) -> float:
        """Seconds of an update on one core, in the process that also acts."""
        return usual(self._learnt) if self._learnt else self._update

    @property
    def act(self) -> float:
        """Seconds of a step, likewise."""
        return usual(self._acted) if self._acted else self._step

    @property
    def varied(self) -> float:
        """How much longer or shorter the same took from one time to another: of four looks in five,
        half the range over the middle, of whoever varied more."""
        return max((_varied(looks) for looks in (self._learnt, self._acted) if looks), default=0.0)

    def look(self) -> float:
        """Ask both, one after the other; seconds of an update."""
        if self._update < LONG:
            self._learnt.append(self._ask_learner())
        if self._step < LONG:
            self._acted.append(self._ask_actor(self.SECONDS / 2))
        return self._learnt[-1] if self._learnt else self._update

    def beside(self, measure: Callable[[], Measured]) -> tuple[Measured, float]:
        """What was measured, and seconds of an update at about that time."""
        before = self.look()
        taken = measure()
        return taken, (before + self.look()) / 2

    def threads(self, cores: Sequence[int]) -> Beside:
        """How long an update takes on these cores, and on one."""
        took = self._ask_learner(cores)
        self._learnt.append(self._ask_learner())
        return Beside(took, self._learnt[-1])

    def slowed(self, others: Sequence[Probe], alike: float) -> list[Slowed]:
        """How much longer learning and acting take together and beside others that act than each
        alone: twice where that is quick. Whoever is the slowest is so for `alike` seconds."""
        for other in others:
            other.ready()
        found = []
        for _ in range(2 if self._update < LONG else 1):
            learnt, acted = self._ask_learner(), self._ask_actor()
            self._learnt.append(learnt)
            self._acted.append(acted)
            self._learner.begin(cores=self._cores, seconds=self.SECONDS)
            looks = [self._all_at_once(others)]
            while not self._learner.has_ended:  # it is to have them beside it until then
                looks.append(self._all_at_once(others))
            learning = Beside(float(self._learner.end()["learn"]), learnt)
            slices = np.concatenate(looks, axis=1)
            mean = statistics.harmonic_mean([usual(row) for row in slices.tolist()])  # of the rates
            window = round(alike / self.SECONDS * SLICES)
            found.append(Slowed(learning, Beside(mean, acted), behind(slices, window)))
        return found

    def _all_at_once(self, others: Sequence[Probe]) -> Array:
        """Seconds of a step of each actor, all of which act, slice by slice."""
        for other in (self._actor, *others):
            other.begin(seconds=self.SECONDS)
        return np.array([other.end()["slices"] for other in (self._actor, *others)])

    def _ask_learner(self, cores: Sequence[int] = ()) -> float:
        where = list(cores) or self._cores
        return float(self._learner.ask(cores=where, seconds=self.SECONDS)["learn"])

    def _ask_actor(self, seconds: float = SECONDS) -> float:
        return usual(self._actor.ask(seconds=seconds)["slices"])


def behind(slices: Array, window: int) -> float:
    """How much longer a step takes where all actors wait for the slowest than in their mean, of
    seconds [actors, slices] of each one's step; which of them is the slowest may change after so
    many slices."""
    window = min(max(1, window), slices.shape[1])
    whole = slices[:, : slices.shape[1] // window * window]
    steps = whole.reshape(len(slices), -1, window).mean(axis=2)
    mean = statistics.harmonic_mean(steps.mean(axis=1).tolist())  # of the rates
    return float(steps.max(axis=0).mean() / mean)


def _varied(looks: Sequence[float]) -> float:
    low, middle, high = np.quantile(looks, (0.1, 0.5, 0.9))
    return float((high - low) / middle / 2)
