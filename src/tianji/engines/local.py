"""The local engine: each role in a process of its own on this machine, supervised by this one."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from tianji.build import EVALUATIONS, SNAPSHOTS, Topology, topology
from tianji.config import Config
from tianji.engines.engine import (
    Evaluated,
    Event,
    Faulted,
    HostFailed,
    Updated,
    gather,
    scatter,
    shares_of,
)
from tianji.engines.hosts import Died, Heard, Host, Hosts
from tianji.engines.server import ForkServer
from tianji.errors import Failure, Refusal
from tianji.fault import Budget, Fault, parse
from tianji.machine import cores
from tianji.plan import placements
from tianji.role import State, generator, generator_state
from tianji.tally import Tally, only_counts
from tianji.transports.shm import Shm
from tianji.types import EPISODE, PRODUCED, SEQ
from tianji.watch import Due, Watch

TURN = 0.05
"""seconds that a turn waits for something to happen"""
START = 180.0
"""seconds in which all hosts must be ready"""
ANSWER = 60.0
"""seconds in which a host at rest must answer"""
PAUSE = 1.0
"""seconds in which the other hosts must, or be done without"""
CAUSE = 0.3
"""seconds after the first sign of trouble in which its cause may still come to light"""
WATCH = 0.5
"""seconds between two looks at who hangs"""
BACKOFF = 0.25
"""seconds that the second restart of a role waits, each further one twice as long"""

REPLACED = ("actor", "evaluator")
"""kinds of roles that can be begun anew while all others go on"""


class LocalEngine:
    """The launcher's side: it starts hosts, hears them, begins them anew and ends them."""

    beside = True

    def __init__(self, config: Config, server: ForkServer) -> None:
        self._config = config
        self._closing = contextlib.ExitStack()
        self.version = 0
        self._consumed = 0
        self.started = False
        self._settling = False
        self._learner_rests = math.inf
        """since when, by the clock"""
        self._rests = 0
        """how often all were told to go on"""
        self._stopped = False
        self._going = False
        self._died: list[Died] = []
        self._restarts = {
            kind: Budget(config.faults.restarts, config.faults.window) for kind in REPLACED
        }
        self._due: dict[str, float] = {}
        """when roles whose process died are begun anew"""
        self._following: dict[str, State] = {}
        """what actors that take a dead one's place must know, once the buffer has said it"""
        self._renewals = 0
        self._events: list[Event] = []
        self._shown: dict[int, int] = {}
        """steps received when versions were shown to the evaluator, which has not played yet"""
        self._sha256 = ""
        self._watch: Watch | None = None
        self._look_due = 0.0
        self._folder = Path()
        self._server = server
        self._hosts: Hosts | None = None
        try:
            self.topology: Topology = topology(config)
            for env in self.topology.spare:
                env.close()
            self._transport = self._open()
        except BaseException:
            self.close()
            raise

    @property
    def evaluating(self) -> bool:
        return bool(self._shown)

    @property
    def settled(self) -> bool:
        """A role that is being begun anew is not waited for."""
        return self._learner_rests < math.inf and all(
            host.resting or host.role in self._due for host in self._loop_hosts()
        )

    @property
    def stuck(self) -> bool:
        return not self.settled and time.monotonic() - self._learner_rests > PAUSE

    def start(self, folder: Path) -> None:
        self._folder = folder
        (folder / "logs").mkdir(exist_ok=True)
        scale, mine = self._config.scale, sorted(os.sched_getaffinity(0))
        placed = placements(self.topology.role_names, mine, scale.cores, scale.pin)
        self._placed = {placement.role: placement for placement in placed}
        self._hosts = Hosts(self._server, folder, len(placed))
        for role in self._placed:
            self._fork(role)
        self._until(lambda: all(h.ready for h in self._all()), START, "start")
        self._transport.keep(())
        self._hosts.table_now()

    def begin(self, parts: Mapping[str, State] | None) -> None:
        elapsed = 0.0
        if parts is not None:
            recorded = parts["run"]["recorder"]
            states = scatter(parts, self.topology, self.topology.memory(self._transport))
            for role, state in states.items():
                self._send(role, "load", {"role": state, "recorder": recorded})
            self.version, elapsed = parts["trainer"]["version"], recorded["elapsed"]
            self._consumed = recorded["consumed"]
        self._watch = Watch(self._config, elapsed=elapsed)
        if parts is not None:
            self._watch.load_state(parts["run"]["recorder"])
        self._going = True
        self._go(elapsed)

    def turn(self) -> list[Event]:
        self._poll(TURN)
        self._answer_deaths()
        self._begin_anew()
        self._judge_clock()
        self._look_for_hangs()
        assert self._hosts is not None
        self._hosts.write_table()
        return self.heard()

    def heard(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def settle(self) -> bool:
        if not self._settling and not self.settled:
            self._settling = True
            self._send("learner", "settle", {})
        return time.monotonic() - self._learner_rests < PAUSE

    def go_on(self) -> None:
        assert self._watch is not None
        self._go(self._watch.seconds)

    def parts(self, most_bytes: float) -> dict[str, State]:
        asked = [host for host in self._loop_hosts() if host.role not in self._due]
        answers = self._ask(asked, ANSWER)
        if len(answers) < len(asked):
            self._answer_deaths()
        self._stand_in_for_dead(answers)
        return self._gather(answers, most_bytes)

    def rescue(self, seconds: float) -> dict[str, State] | None:
        learner = self._host("learner")
        if learner is None or not learner.alive or not learner.ready:
            return None
        others = [h for h in self._loop_hosts() if h.role != "learner"]
        self._settling = False
        self.settle()
        self._wait_for([learner], seconds)
        for host in (learner, *others):  # in the middle of a batch that will not be whole
            if not host.resting:
                self._send(host.role, "pause", {"rest": self._rests})
        self._wait_for([learner], PAUSE)
        if not learner.resting or not learner.alive:
            return None
        self._wait_for(others, PAUSE)
        try:
            answers = self._ask([learner, *(h for h in others if h.resting and h.alive)], PAUSE)
        except Failure:
            return None
        if "learner" not in answers:
            return None
        self._stand_in_for_dead(answers)
        return self._gather(answers, -1)

    def networks_sha256(self) -> str:
        return self._sha256

    def shares(self) -> dict[str, float]:
        """Actors share one account: the mean of theirs."""
        kinds: dict[str, list[dict[str, float]]] = {}
        for host in self._all():
            seconds, before = host.status.get("seconds", {}), host.seconds_before
            elapsed, since = host.status.get("elapsed", 0.0), host.elapsed_before
            if elapsed > since:
                host.seconds_before, host.elapsed_before = seconds, elapsed
                spent = {key: value - before.get(key, 0.0) for key, value in seconds.items()}
                shares = shares_of(spent, elapsed - since)
                kinds.setdefault(host.kind, []).append(shares)
        return {key: value for found in kinds.values() for key, value in _mean(found).items()}

    def time(self) -> dict[str, dict[str, float]]:
        kinds: dict[str, list[dict[str, float]]] = {}
        for host in self._all():
            if seconds := host.status.get("seconds"):
                shares = shares_of(seconds, host.status["elapsed"])
                kinds.setdefault(host.kind, []).append(
                    {key.partition("/")[2]: value for key, value in shares.items()}
                )
        return {kind: _mean(found) for kind, found in kinds.items()}

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None
        self._closing.close()

    def kill(self) -> None:
        if self._hosts is not None:
            self._hosts.kill()

    def _open(self) -> Shm:
        """Every conduit of the topology: made here, so that it is refused here if it is too big."""
        joined, transport = self.topology, Shm()
        self._closing.callback(transport.close)
        for lane in joined.lanes:
            transport.open(lane)
        transport.open(joined.batches(joined.store(transport)))
        transport.open_newest(SNAPSHOTS, joined.params_size, joined.spec.actors)
        if joined.evaluates:
            transport.open_newest(EVALUATIONS, joined.params_size, 1)
        return transport

    def _all(self) -> Iterable[Host]:
        return [] if self._hosts is None else self._hosts.by_role.values()

    def _host(self, role: str) -> Host | None:
        return None if self._hosts is None else self._hosts.by_role.get(role)

    def _loop_hosts(self) -> list[Host]:
        """All but the evaluator, which is no part of the run's future."""
        return [host for host in self._all() if host.kind != "evaluator"]

    def _fork(self, role: str, life: int = 0) -> None:
        assert self._hosts is not None
        table, fds = self._transport.pack(self.topology.ends(role))
        request = {
            "available": cores(),
            "config": self._config.tree(),
            "name": self._config.name,
            "env": self.topology.spec.env.tree(),
            "table": table,
        }
        self._hosts.fork(self._placed[role], request, fds, life)

    def _go(self, elapsed: float) -> None:
        self._settling = False
        self._learner_rests = math.inf
        self._rests += 1
        for host in self._all():
            if host.role not in self._due:
                host.resting = False
                self._send(host.role, "go", {"elapsed": elapsed})

    def _send(self, role: str, kind: str, content: State) -> None:
        assert self._hosts is not None
        self._hosts.send(role, kind, content)

    def _poll(self, timeout: float) -> None:
        assert self._hosts is not None
        for event in self._hosts.poll(timeout):
            if isinstance(event, Heard):
                self._heard(event)
            else:
                self._died.append(event)

    def _heard(self, heard: Heard) -> None:
        host, kind, content = heard
        match kind:
            case "ready":
                host.ready = True
                self._let_follow(host)
            case "first":
                self.started = True
            case "status":
                self._note_status(host, content)
            case "updated":
                self._note_updates(content)
            case "evaluated":
                self._note_evaluation(content)
            case "settled":
                host.resting = True
                self._learner_rests = min(self._learner_rests, time.monotonic())
                for other in self._loop_hosts():
                    if other.role != "learner" and not other.resting:
                        self._send(other.role, "pause", {"rest": self._rests})
            case "paused":
                if content["rest"] == self._rests:  # else it was told to go on meanwhile
                    host.resting = True
            case "state":
                host.answer = content
            case "renewed":
                if content["renewals"] == self._renewals:
                    self._following[content["role"]] = content
                    new = self._host(content["role"])
                    assert new is not None
                    self._let_follow(new)
            case "fault":
                self._events.append(Faulted(parse(content)))
            case "failed" | "refused":
                if kind == "refused" and not self._going:
                    raise Refusal(content["message"])
                host.told = parse(content["fault"])
                host.expected = content["expected"] and kind == "failed"

    def _note_status(self, host: Host, status: State) -> None:
        host.status = status
        produced = status.get("produced", 0)
        if host.kind == "actor":
            now, (before, count) = time.monotonic(), host.counted
            if now - before >= 1.0:
                host.rate = (produced - count) / (now - before) if before else 0.0
                host.counted = now, produced
        elif host.role == "buffer" and status["filling"] and self._watch is not None:
            # No update is near that would report or judge: show what arrives, end if told to.
            report = only_counts(
                self.version, produced, status["received"], self._consumed, status["filtered"]
            )
            self._events.append(Updated(report, self._watch.note(report)))

    def _note_updates(self, content: State) -> None:
        tally = Tally.of(content["tally"])
        assert tally.last is not None
        self.version, self._consumed = tally.last.version, tally.last.consumed
        if content["evaluate"]:
            self._shown[self.version] = tally.last.received
        due = Due(content["stop"], content["evaluate"], content["save"])
        self._stopped = self._stopped or due.stop is not None
        self._events.append(Updated(tally, due))

    def _note_evaluation(self, content: State) -> None:
        assert self._hosts is not None
        for event in self._hosts.hear("learner"):  # it has said which versions were shown
            assert isinstance(event, Heard)
            self._heard(event)
        version = content["version"]
        steps = self._shown.get(version, 0)
        self._shown = {v: s for v, s in self._shown.items() if v > version}
        self._events.append(Evaluated(version, steps, content["episodes"]))

    def _judge_clock(self) -> None:
        """The learner judges at its updates; where none comes, the time is up all the same."""
        limit = self._config.stop.seconds
        if limit is None or self._watch is None or self._stopped:
            return
        if self._watch.seconds >= limit and not self._settling and not self.settled:
            self._stopped = True
            self._events.append(Updated(Tally(), Due(stop=f"seconds >= {limit:g}")))

    def _look_for_hangs(self) -> None:
        """An actor or an evaluator that does not go on is ended, and then begun anew."""
        assert self._hosts is not None
        if (now := time.monotonic()) < self._look_due:
            return
        late, self._look_due = now - self._look_due > 10 * WATCH, now + WATCH
        if late:  # this process was stopped, and the hosts perhaps with it
            self._hosts.forgive()
        for host, seconds in self._hosts.hanging(self._config.faults.hang):
            if host.kind in REPLACED:
                where = f"{self._folder / 'logs' / host.role}.log"
                self._hosts.end(
                    host,
                    f"it hangs: no step ended for {seconds:.1f} s (faults.hang); its stack is in "
                    f"{where}",
                )

    def _answer_deaths(self) -> None:
        """Begin anew what can be; else the run cannot go on as it is: the root cause is told."""
        if not self._died:
            return
        if any(not self._replaced(d) or _consequence(d) for d in self._died):
            end = time.monotonic() + CAUSE
            while time.monotonic() < end:
                self._poll(CAUSE / 10)
        died, self._died = self._died, []
        grave = [d for d in died if not self._replaced(d)]
        if grave:
            first = min(grave, key=lambda d: (_consequence(d), died.index(d)))
            others = sorted({d.fault.role for d in died} - {first.fault.role})
            also = f" (then also: {', '.join(others)})" if others else ""
            raise HostFailed(first.fault, also, final=first.fault.exception is not None)
        for one in died:
            assert one.host is not None
            self._replace(one.host, one.fault)

    def _replaced(self, died: Died) -> bool:
        """Can the others go on while this one is begun anew?"""
        return (
            self._going
            and died.host is not None
            and died.host.kind in REPLACED
            and not died.host.expected
        )

    def _replace(self, host: Host, fault: Fault) -> None:
        budget = self._restarts[host.kind]
        if not budget.spend():
            spent = f" ({host.kind}s may be restarted {budget}: faults.restarts)"
            raise HostFailed(fault, spent, final=True)
        wait = BACKOFF * 2 ** (budget.recent - 2) if budget.recent > 1 else 0.0
        self._due[host.role] = time.monotonic() + min(wait, 4.0)
        host.resting, host.ready = True, False
        self._events.append(Faulted(fault.then(f"{host.role} restarted")))
        if host.kind == "actor":
            self._renew(host.role)

    def _renew(self, role: str) -> None:
        """Give the living side of a dead role's channels new pipes, so that what was granted to it
        can be granted again."""
        assert self._hosts is not None
        self._following.pop(role, None)
        self._renewals += 1
        for name, end in self._channels(role):
            self._transport.renew(name)
            table, fds = self._transport.pack([(name, OTHER[end])])
            about = {"role": role, "table": table, "renewals": self._renewals}
            self._hosts.send(self.topology.holder(name, OTHER[end]), "renew", about, fds)

    def _channels(self, role: str) -> list[tuple[str, str]]:
        return [(name, end) for name, end in self.topology.ends(role) if end in OTHER]

    def _begin_anew(self) -> None:
        assert self._hosts is not None
        for role, due in self._due.items():
            host = self._hosts.by_role[role]
            if not host.alive and time.monotonic() >= due:
                self._fork(role, host.life + 1)
                for name, _ in self._channels(role):
                    self._transport.let_go(name)
                self._hosts.table_now()

    def _let_follow(self, host: Host) -> None:
        """A role that was begun anew goes on once it and the other side of its channels are
        ready."""
        if host.role not in self._due or not host.ready or not self._going:
            return
        if host.kind == "actor" and host.role not in self._following:
            return
        del self._due[host.role]
        content = self._following.pop(host.role, {})
        host.counted = 0.0, 0
        if self._learner_rests < math.inf and host.kind == "actor":
            self._send(host.role, "follow", content)
            return  # the others rest, and it goes on with them
        host.resting = False
        assert self._watch is not None
        self._send(host.role, "follow", content)
        self._send(host.role, "go", {"elapsed": self._watch.seconds})

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            self._poll(TURN)
            self._answer_deaths()
            if time.monotonic() > end:
                slow = [h.role for h in self._all() if not h.ready]
                raise Failure(
                    f"{', '.join(slow) or 'a host'} did not {what} within {seconds:g} s, so the "
                    f"run cannot go on. Look at {self._folder / 'logs'}."
                )

    def _wait_for(self, hosts: list[Host], seconds: float) -> None:
        """Until these rest or are dead, or so many seconds."""
        end = time.monotonic() + seconds
        while any(not h.resting and h.alive for h in hosts) and time.monotonic() < end:
            self._poll(TURN)

    def _ask(self, hosts: list[Host], seconds: float) -> dict[str, State]:
        """The states of these hosts, which rest."""
        for host in hosts:
            host.answer = None
            self._send(host.role, "state", {})
        end = time.monotonic() + seconds
        while any(h.answer is None and h.alive for h in hosts):
            self._poll(TURN)
            if time.monotonic() > end:
                slow = ", ".join(h.role for h in hosts if h.answer is None)
                raise Failure(f"{slow} did not answer within {seconds:g} s: nothing was saved")
        return {h.role: h.answer for h in hosts if h.answer is not None}

    def _gather(self, answers: Mapping[str, State], most_bytes: float) -> dict[str, State]:
        self._sha256 = answers["learner"]["sha256"]
        roles = {role: answer["role"] for role, answer in answers.items()}
        policy = answers["learner"]["policy"]
        parts = gather(
            self.topology, self.topology.memory(self._transport), roles, policy, most_bytes
        )
        parts["run"]["at"] = 0
        return parts

    def _stand_in_for_dead(self, answers: dict[str, State]) -> None:
        """Where the buffer has answered, it knows how far dead actors were."""
        buffer = answers["buffer"]["role"] if "buffer" in answers else None
        for host in self._loop_hosts():
            if host.role in answers:
                continue
            state = self._stand_in(host)
            if host.kind == "actor" and buffer is not None:
                i = int(host.role.partition("-")[2])
                state |= {"produced": buffer["produced"][i], "seq": buffer["seqs"][i]}
                if pushed := buffer["lanes"][i]["pushed"]:  # and not received yet
                    memory = self._transport.memory(self.topology.lanes[i])
                    head = memory["head"][pushed[-1][0]]
                    state |= {"produced": int(head[PRODUCED]), "seq": int(head[SEQ]) + 1}
            answers[host.role] = {"role": state}

    def _stand_in(self, host: Host) -> State:
        """What can be said of a role whose process is dead, for a checkpoint without its data."""
        kind, _, index = host.role.partition("-")
        rng = generator(self._config.seed, kind, int(index or 0), host.life)
        rng.bit_generator.advance(2**64)  # type: ignore[attr-defined]  # not the same draws again
        state = {"produced": host.status.get("produced", 0), "rng": generator_state(rng)}
        if kind == "actor":
            return state | {"seq": 0}
        counts = {k: host.status.get(k, 0) for k in ("received", "filtered")}
        actors = [h for h in self._all() if h.kind == "actor"]
        produced = [h.status.get("produced", 0) for h in actors]
        none = {"lanes": None, "store": None, "episodes": np.empty(0, EPISODE)}
        return state | counts | none | {"produced": produced, "seqs": [0] * len(actors)}


OTHER = {"send": "receive", "receive": "send"}
"""the other end of a channel"""


def _consequence(died: Died) -> bool:
    """Is it more likely a consequence of something else?"""
    return died.host is not None and died.host.code == 0


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for shares in found for key in shares})
    return {key: math.fsum(s.get(key, 0.0) for s in found) / len(found) for key in keys}
