"""Who takes the place of a host that died or hangs, and when it may go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tianji.build import Topology
from tianji.channel import End, Side
from tianji.config import FaultsConfig
from tianji.engines.engine import HostFailed
from tianji.engines.hosts import Died, Host, Hosts
from tianji.fault import Budget, Fault
from tianji.role import State
from tianji.transports.shm import Shm

REPLACED = ("actor", "evaluator")
"""kinds of hosts that can be restarted while all others go on"""

ENVS = (*REPLACED, "worker")
"""kinds of hosts that step envs, and so may hang"""

LOOK = 0.5
"""seconds between two looks at who hangs"""

SHORT = 10.0
"""seconds that a life must last, so that the next one is begun without waiting"""
BACKOFF, MOST = 0.25, 4.0
"""seconds that a host waits after its second short life, after each further one twice as long, and
the most of it"""

OTHER: Mapping[Side, Side] = {"send": "receive", "receive": "send"}


class Supervisor:
    """Begins actors and evaluators anew, within budgets; says of all others that they are lost."""

    def __init__(
        self,
        faults: FaultsConfig,
        groups: Sequence[Topology],
        hosts: Hosts,
        transport: Shm,
        fork: Callable[[Topology, str, int], None],
    ) -> None:
        """`fork` starts a host of a group, by its name, for its life of this number."""
        self.going = False
        """have the roles made their first move? Before, nobody's place can be taken"""
        self.due: dict[str, float] = {}
        """hosts that are being restarted, and when"""
        self._faults = faults
        self._groups = groups
        self._hosts = hosts
        self._transport = transport
        self._fork = fork
        self._budgets = {kind: Budget(faults.restarts, faults.window) for kind in REPLACED}
        self._following: dict[str, State] = {}
        """what actors that take a dead one's place must know, and how many have yet to say it"""
        self._renewals = 0
        self._short: dict[str, int] = {}
        """how many lives of a host in a row were short"""
        self._look_due = 0.0

    def look(self) -> None:
        """Begin anew what is due; end a host whose env does not go on."""
        self._begin_anew()
        if (now := time.monotonic()) < self._look_due:
            return
        late, self._look_due = now - self._look_due > 10 * LOOK, now + LOOK
        if late:  # this process was stopped, and the hosts perhaps with it
            self._hosts.forgive()
        for host, seconds in self._hosts.hanging(self._faults.hang):
            if host.kind in ENVS:
                words = f"it hangs: no step ended for {seconds:.1f} s (faults.hang)"
                self._hosts.end(host, words)

    def replaces(self, died: Died) -> bool:
        """Can the others go on while this one is restarted?"""
        host = died.host
        return self.going and host is not None and host.kind in REPLACED and not host.expected

    def answer(self, died: Sequence[Died]) -> list[Fault]:
        """Begin anew what can be, and say so; else the root cause is raised."""
        grave = [d for d in died if not self.replaces(d)]
        if grave:
            first = min(grave, key=lambda d: (d.consequence, died.index(d)))
            others = sorted({d.fault.role for d in died} - {first.fault.role})
            also = f" (then also: {', '.join(others)})" if others else ""
            raise HostFailed(first.fault, also, final=first.fault.exception is not None)
        return [self._replace(d.host, d.fault) for d in died if d.host is not None]

    def renewed(self, content: State) -> Host | None:
        """The other side of a conduit is ready for the role that takes a dead one's place, which
        may be ready itself; None: it said so of a life that is over, too."""
        following = self._following[content["role"]]
        if content["renewals"] != following["renewals"]:
            return None
        following |= content | {"peers": following["peers"] - 1}
        return self._hosts.by_role[content["role"]]

    def follows(self, host: Host) -> State | None:
        """What a host that was restarted must know in order to go on now; None: it cannot yet, or
        it is none of those."""
        content = self._following.get(host.role, {"peers": 0})
        if host.role not in self.due or not host.ready or not self.going or content["peers"] > 0:
            return None
        del self.due[host.role]
        return content

    def let_go(self, host: str) -> None:
        """Close the pipes of a host's conduits here, so that its death is noticed."""
        for end in self._pipes(host):
            self._transport.let_go(end.conduit)

    def _replace(self, host: Host, fault: Fault) -> Fault:
        budget = self._budgets[host.kind]
        if not budget.spend():
            spent = f" ({host.kind}s may be restarted {budget}: faults.restarts)"
            raise HostFailed(fault, spent, final=True)
        self.due[host.role] = time.monotonic() + self._wait(host)
        host.resting, host.ready = True, False
        if host.kind == "actor":
            self._renew(host.role)
        self._begin_anew()
        return fault.then(f"{host.role} restarted")

    def _wait(self, host: Host) -> float:
        """Seconds before a host is restarted: the longer, the more of its lives were short."""
        short = time.monotonic() - host.born < SHORT
        self._short[host.role] = times = self._short.get(host.role, 0) + 1 if short else 0
        return min(BACKOFF * 2.0 ** (times - 2), MOST) if times > 1 else 0.0

    def _renew(self, host: str) -> None:
        """Give the living side of a dead host's conduits new pipes, so that what was granted to it
        can be granted again."""
        self._renewals += 1
        peers: dict[str, list[End]] = {}
        for name, side, _ in self._pipes(host):
            self._transport.renew(name)
            other = End(name, OTHER[side])
            peers.setdefault(self._group_of(host).holder(other), []).append(other)
        self._following[host] = {"renewals": self._renewals, "peers": len(peers)}
        for peer, ends in peers.items():
            table, fds = self._transport.pack(ends)
            about = {"role": host, "table": table, "renewals": self._renewals}
            self._hosts.send(peer, "renew", about, fds)

    def _begin_anew(self) -> None:
        for name, due in self.due.items():
            host = self._hosts.by_role[name]
            if not host.alive and time.monotonic() >= due:
                self._fork(self._group_of(name), name, host.life + 1)
                self.let_go(name)
                self._hosts.table_now()

    def _group_of(self, host: str) -> Topology:
        return next(group for group in self._groups if host in group.hosts)

    def _pipes(self, host: str) -> list[End]:
        """The ends that must be renewed where a host is dead."""
        group = self._group_of(host)
        newest = group.snapshots.name, group.evaluations.name
        ends = group.host_ends(host)
        return [end for end in ends if end.side in OTHER and end.conduit not in newest]
