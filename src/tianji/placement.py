"""Which host runs on which cores, with how many threads: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tianji.role_names import RoleName

Hosts = Mapping[str, Sequence[RoleName]]
"""The roles that each host holds, by its name."""


@dataclass(frozen=True)
class Placement:
    """A host: a process with cores and threads of its own."""

    host: str
    cores: tuple[int, ...]
    """that it may run on; empty: any"""
    threads: int
    """that torch computes with"""
    node: str = ""
    """the machine that it is on; empty: this one"""
    devices: Mapping[str, str] = field(default_factory=dict)
    """by role: where it computes, if not on the CPU"""


def wanted(hosts: Hosts, learner_cores: int, env_threads: int = 1) -> int:
    """Cores that hosts would use if each had its own: as many as learners and actors have threads.
    The buffer, a server and the evaluator work little beside."""
    threads = {"consumed": learner_cores, "produced": env_threads}
    return sum(max(threads.get(role.of.flow, 0) for role in roles) for roles in hosts.values())


def placements(
    hosts: Hosts,
    cores: Sequence[int],
    learner_cores: int,
    pin: bool,
    env_threads: int = 1,
    device: str = "cpu",
) -> list[Placement]:
    """Each learner has the first cores that are left for itself, each actor one of the others for
    every thread of its env, and what is left runs on any of those; where there are none for
    somebody, all share all. Learners compute on the device."""
    flows = {host: {role.of.flow for role in roles} for host, roles in hosts.items()}
    learners = [host for host in hosts if "consumed" in flows[host]]
    workers = any("produced" in flows[host] for host in learners)
    each = max(learner_cores, env_threads) if workers else learner_cores  # they take turns there
    taken = len(learners) * each
    rest = tuple(cores[taken:])
    pin = pin and (bool(rest) if len(learners) < len(hosts) else taken <= len(cores))
    placed, actors = [], 0
    for host, roles in hosts.items():
        where, threads = rest, 1
        if host in learners:
            begin, threads = learners.index(host) * each, learner_cores
            where = tuple(cores[begin : begin + each])
        elif "produced" in flows[host]:
            begin, width = actors * env_threads, min(env_threads, len(rest))
            where = tuple(rest[(begin + i) % len(rest)] for i in range(width))
            actors += 1
        learn = [str(role) for role in roles if role.of.learns and device != "cpu"]
        devices = dict.fromkeys(learn, device)
        placed.append(Placement(host, where if pin else (), threads, devices=devices))
    return placed
