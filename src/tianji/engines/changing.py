"""Decides how many actors of a group are active, on the launcher's side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from tianji.engines.engine import Rebalanced
from tianji.engines.hosts import SILENT, Host, HostTable
from tianji.engines.messages import Activate
from tianji.engines.spent import LONGEST
from tianji.flow import LEAST, Flow
from tianji.rebalance import Rebalancer, chosen
from tianji.verdict import busy

WINDOW = 2.0
"""seconds of a window, at least"""
UPDATES = 2
"""updates in a window, at least: else it might see only one side of them"""
TURN = 30.0
"""seconds after which another actor is inactive, so that no lane of a replay grows old"""


class Changing:
    """Looks at what a group's hosts tell, and tells them who is active."""

    def __init__(
        self,
        group: int,
        hosts: HostTable,
        rebalancer: Rebalancer,
        crowd: Callable[[float], tuple[set[int], float]],
    ) -> None:
        """`crowd(seconds)`: the cores that actors may run on, and the share of them in use."""
        self._group = group
        self._hosts = hosts
        self._rebalancer = rebalancer
        self._crowd = crowd
        self._turn = 0
        self._began = self._turned = time.monotonic()
        self._updates = 0
        self._actors: list[int] = []

    @property
    def active(self) -> int:
        return self._rebalancer.active

    def apply(self) -> None:
        """Tell the buffer, which grants, and the actors, which say what they wait for."""
        hosts = (host for host in self._mine() for role in host.roles if role.kind == "actor")
        cores = [host.placement.cores for host in hosts]
        self._actors = chosen(self.active, self._turn, cores)
        for host in self._mine():
            self.tell(host)

    def tell(self, host: Host) -> None:
        if host.group == self._group and {"actor", "buffer"} & {r.kind for r in host.roles}:
            self._hosts.send(host.name, Activate(tuple(self._actors)))

    def look(self, counts: Sequence[Mapping[str, int]]) -> Rebalanced | None:
        """What is due now, by the counts of each group."""
        now, updates = time.monotonic(), counts[self._group]["version"]
        if any(host.resting or not host.alive for host in self._mine()):
            self._begin(now, updates)
            self._rebalancer.pause()
            return None
        if now - self._turned > TURN and self.active < self._rebalancer.most:
            self._turned, self._turn = now, self._turn + 1
            self.apply()
        if now - self._began < WINDOW or updates < self._updates + UPDATES:
            return None
        if any(host.silent(now) > SILENT for host in self._mine()):
            return None  # in the middle of something long: it is heard of when that has ended
        seconds = min(now - self._began, LONGEST)
        self._begin(now, updates)
        change = self._rebalancer.look(self._flow(seconds))
        if change is None:
            return None
        self.apply()
        own = self._mine()[0].roles[0].group
        return Rebalanced(change, "" if own is None else f"g{own}")

    def _begin(self, now: float, updates: int) -> None:
        self._began, self._updates = now, updates

    def _flow(self, seconds: float) -> Flow:
        """How busy the group's sides were."""
        shares: dict[str, list[float]] = {}
        for host in self._mine():
            kinds = {k.partition("/")[2]: s for k, s in host.spent.shares(seconds).items()}
            if (share := busy(host.kind, kinds)) is not None:
                shares.setdefault(host.kind, []).append(share)
        mean = {kind: max(LEAST, math.fsum(each) / len(each)) for kind, each in shares.items()}
        return Flow(
            actors=mean.get("actor", 1.0),
            learner=mean.get("learner", LEAST),
            buffer=mean.get("buffer", LEAST),
            cores=min(1.0, self._crowd(seconds)[1]),
        )

    def _mine(self) -> list[Host]:
        """The hosts of the group's loop."""
        hosts = self._hosts.by_name.values()
        return [host for host in hosts if host.group == self._group and not host.beside]
