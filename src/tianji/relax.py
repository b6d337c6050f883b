"""How far the dependencies between acting, simulating and learning are relaxed: one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Relaxation:
    """A value of it is an architecture's timing; the roles are the same for all."""

    lead: int = 0
    """updates that production may run ahead: a rollout for update k begins at version k - lead"""


def sync() -> Relaxation:
    """Acting and learning alternate: staleness 0, replay aside."""
    return Relaxation(lead=0)


def one_step() -> Relaxation:
    """Rollouts for the next update are made during this one: staleness at most 1, replay aside."""
    return Relaxation(lead=1)


PRESETS: dict[str, Callable[[], Relaxation]] = {"sync": sync, "one_step": one_step}
