"""Restarts hosts that died or hang, and says when they may go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tianji.channel import Transport
from tianji.config import FaultsConfig
from tianji.engines.engine import HostFailed
from tianji.engines.hosts import Died, Host, HostTable
from tianji.engines.messages import Follow, Made, Renew, Renewed
from tianji.fault import Budget, Fault
from tianji.graph import Graph, Joint

LOOK = 0.5
"""seconds between two looks at who hangs"""

SHORT = 10.0
"""seconds that a life must last, so that the next one is begun without waiting"""
BACKOFF, MOST = 0.25, 4.0
"""seconds that a host waits after its second short life, after each further one twice as long, and
the most of it"""


@dataclass
class Following:
    """What a host that takes a dead one's place must know before it goes on."""

    number: int
    """of this restart"""
    peers: int
    """hosts that have yet to say that they are ready for it"""
    made: dict[str, Made] = field(default_factory=dict)


class Supervisor:
    """Begins actors and evaluators anew, within budgets; says of all others that they are lost."""

    def __init__(
        self,
        faults: FaultsConfig,
        graph: Graph,
        hosts: HostTable,
        transport: Transport,
        start: Callable[[str, int], None],
    ) -> None:
        """`start` starts a host by its name, for its life of this number."""
        self.going = False
        """have the roles made their first move? Before, nobody's place can be taken"""
        self.due: dict[str, float] = {}
        """hosts that are being restarted, and when"""
        self._faults = faults
        self._graph = graph
        self._hosts = hosts
        self._transport = transport
        self._start = start
        self._budgets: dict[str, Budget] = {}
        """by kind of host"""
        self._following: dict[str, Following] = {}
        self._restarts = 0
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
            if host.steps_envs:
                words = f"it hangs: no step ended for {seconds:.1f} s (faults.hang)"
                self._hosts.end(host, words)

    def replaces(self, died: Died) -> bool:
        """Can the others go on while this one is restarted?"""
        host = died.host
        if host is None or not self.going or not host.replaceable:
            return False
        failure = host.failure
        return failure is None or failure.refused or not failure.expected

    def answer(self, died: Sequence[Died]) -> list[Fault]:
        """Begin anew what can be, and say so; else the root cause is raised."""
        grave = [d for d in died if not self.replaces(d)]
        if grave:
            first = min(grave, key=lambda d: (d.consequence, died.index(d)))
            others = sorted({d.fault.role for d in died} - {first.fault.role})
            also = f" (then also: {', '.join(others)})" if others else ""
            failure = None if first.host is None else first.host.failure
            batch = None if failure is None else failure.batch
            raise HostFailed(first.fault, also, first.fault.exception is not None, batch)
        return [self._replace(d.host, d.fault) for d in died if d.host is not None]

    def renewed(self, message: Renewed) -> Host | None:
        """The other side of a conduit is ready for the host that takes a dead one's place, which
        may be ready itself; None: it said so of a life that is over, too."""
        following = self._following[message.host]
        if message.number != following.number:
            return None
        following.peers -= 1
        following.made |= message.made
        return self._hosts.by_name[message.host]

    def follows(self, host: Host) -> Follow | None:
        """What a host that was restarted must know in order to go on now; None: it cannot yet, or
        it was not restarted."""
        following = self._following.get(host.name)
        ready = host.ready and self.going and (following is None or not following.peers)
        if host.name not in self.due or not ready:
            return None
        del self.due[host.name]
        return Follow() if following is None else Follow(following.made)

    def _replace(self, host: Host, fault: Fault) -> Fault:
        faults = self._faults
        budget = self._budgets.setdefault(host.kind, Budget(faults.restarts, faults.window))
        if not budget.spend():
            spent = f" ({host.kind}s may be restarted {budget}: faults.restarts)"
            raise HostFailed(fault, spent, final=True)
        self.due[host.name] = time.monotonic() + self._wait(host)
        host.resting, host.ready = True, False
        self._renew(host)
        self._begin_anew()
        return fault.then(f"{host.name} restarted")

    def _wait(self, host: Host) -> float:
        """Seconds before a host is restarted: the longer, the more of its lives were short."""
        short = time.monotonic() - host.born < SHORT
        self._short[host.name] = times = self._short.get(host.name, 0) + 1 if short else 0
        return min(BACKOFF * 2.0 ** (times - 2), MOST) if times > 1 else 0.0

    def _renew(self, host: Host) -> None:
        """Give the living sides of a dead host's conduits new ends, so that what was granted to it
        can be granted again."""
        self._restarts += 1
        peers: dict[str, list[Joint]] = {}
        for joint in self._joints(host.name):
            self._transport.revoke(joint.conduit.name)
            other = joint.receivers[0] if joint.sender in host.roles else joint.sender
            assert other is not None
            peers.setdefault(self._graph.host_of(other), []).append(joint)
        if peers:
            self._following[host.name] = Following(self._restarts, len(peers))
        for peer, joints in peers.items():
            ends = [
                end
                for j in joints
                for end in j.ends_of(self._graph.hosts[peer])
                if end.side != "read"
            ]
            with contextlib.closing(self._transport.offer(ends, self._restarts)) as offer:
                about = Renew(host.name, host.roles, self._restarts, offer)
                self._hosts.send(peer, about, offer.fds)

    def _begin_anew(self) -> None:
        for name, due in self.due.items():
            host = self._hosts.by_name[name]
            if not host.alive and time.monotonic() >= due:
                self._start(name, host.life + 1)
                self._hosts.table_now()

    def _joints(self, host: str) -> list[Joint]:
        """Where a host has the other side of somebody: not where only the newest counts."""
        roles, mine = self._graph.hosts[host], ("lane", "queue")
        joints = (j for j in self._graph.between_hosts if j.conduit.kind in mine)
        return [j for j in joints if j.sender in roles or set(roles).intersection(j.receivers)]
