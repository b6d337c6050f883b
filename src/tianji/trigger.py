"""Predicates on counts: is it due? Own ones register themselves under a name for configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """How far something is: a run, or a rollout that is being made."""

    steps: int = 0
    """valid env steps; of a rollout, steps of each env so far"""
    updates: int = 0
    """updates made; of a rollout, the version that acts"""
    episodes: int = 0
    """episodes that ended"""
    seconds: float = 0.0
    """of training; of a rollout always 0, so that what is sent does not depend on the clock"""
    return_mean: float = -float("inf")
    """of the last 100 episodes, once there are so many"""
    win_rate: float = -float("inf")
    """of the last 100 episodes, once there are so many and the env says who won"""

    def by_name(self) -> dict[str, float]:
        """As the config's [stop] names them."""
        return {
            "return": self.return_mean,
            "win_rate": self.win_rate,
            "steps": self.steps,
            "updates": self.updates,
            "seconds": self.seconds,
        }


Trigger = Callable[[Counts, Counts], bool]
"""Given the counts when it was last asked and the counts now: is it due?"""

TRIGGERS: dict[str, Trigger] = {}


def register_trigger(name: str) -> Callable[[Trigger], Trigger]:
    """Decorator: make an own predicate known by a name that configs can use as eval.when,
    checkpoint.when, stop.when, relax.publish_when or relax.send_when."""

    def register(trigger: Trigger) -> Trigger:
        TRIGGERS[name] = trigger
        return trigger

    return register


@dataclass(frozen=True)
class Every:
    """Due each time the count of updates passes a multiple of `every`; never where that is 0."""

    every: int

    def __call__(self, before: Counts, now: Counts) -> bool:
        return self.every > 0 and now.updates // self.every > before.updates // self.every


@dataclass(frozen=True)
class Reached:
    """Due once any of the named counts has reached its limit."""

    limits: Mapping[str, float]

    def due(self, counts: Mapping[str, float]) -> str | None:
        """The condition that holds, in words, or None."""
        for name, limit in self.limits.items():
            if counts[name] >= limit:
                return f"{name} >= {limit:g}"
        return None


def full(T: int) -> Trigger:
    """A rollout is sent when it has T steps of each env."""
    return lambda before, now: now.steps >= T


def either(*triggers: Trigger) -> Trigger:
    """Due where one of them is. All are asked, so that each sees every count."""

    def due(before: Counts, now: Counts) -> bool:
        answers = [trigger(before, now) for trigger in triggers]
        return any(answers)

    return due
