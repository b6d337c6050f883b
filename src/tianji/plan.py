"""Which role runs on which cores, with how many threads: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """A role on a host: a process with cores and threads of its own."""

    role: str
    cores: tuple[int, ...]
    """that it may run on; empty: any"""
    threads: int
    """that torch computes with"""


def placements(
    roles: Sequence[str], cores: Sequence[int], learner_cores: int, pin: bool
) -> list[Placement]:
    """One host for each role. The learner has the first cores for itself, each actor one of the
    others, and what is left runs on any of those; where there are none left, all share all."""
    mine, rest = tuple(cores[:learner_cores]), tuple(cores[learner_cores:])
    pin = pin and bool(rest)
    placed = []
    for role in roles:
        kind, _, index = role.partition("-")
        where: tuple[int, ...] = rest
        if kind == "learner":
            where = mine
        elif kind == "actor":
            where = (rest[int(index) % len(rest)],) if rest else ()
        threads = learner_cores if kind == "learner" else 1
        placed.append(Placement(role, where if pin else (), threads))
    return placed
