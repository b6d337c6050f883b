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


LEARNS = ("learner", "worker")
"""kinds of hosts that compute updates"""


def kind_of(host: str) -> str:
    """Of a host by its name: g1.actor-0 is an actor."""
    return host.rpartition(".")[2].split("-")[0]


def wanted(hosts: Sequence[str], learner_cores: int, env_threads: int = 1) -> int:
    """Cores that hosts would use if each had its own: as many as learners and actors have threads.
    The buffer, a server and the evaluator work little beside."""
    kinds = [kind_of(host) for host in hosts]
    threads = {
        "learner": learner_cores,
        "actor": env_threads,
        "worker": max(learner_cores, env_threads),
    }
    return sum(threads.get(kind, 0) for kind in kinds)


def placements(
    hosts: Sequence[str],
    cores: Sequence[int],
    learner_cores: int,
    pin: bool,
    env_threads: int = 1,
) -> list[Placement]:
    """Each learner has the first cores that are left for itself, each actor one of the others for
    every thread of its env, and what is left runs on any of those; where there are none for
    somebody, all share all."""
    learners = [host for host in hosts if kind_of(host) in LEARNS]
    workers = any(kind_of(host) == "worker" for host in hosts)
    each = max(learner_cores, env_threads) if workers else learner_cores  # they take turns there
    taken = len(learners) * each
    rest = tuple(cores[taken:])
    apart = any(kind_of(host) not in LEARNS for host in hosts)
    pin = pin and (bool(rest) if apart else taken <= len(cores))
    placed, actors = [], 0
    for host in hosts:
        kind, where, threads = kind_of(host), rest, 1
        if kind in LEARNS:
            begin, threads = learners.index(host) * each, learner_cores
            where = tuple(cores[begin : begin + each])
        elif kind == "actor":
            begin, width = actors * env_threads, min(env_threads, len(rest))
            where = tuple(rest[(begin + i) % len(rest)] for i in range(width))
            actors += 1
        placed.append(Placement(host, where if pin else (), threads))
    return placed
