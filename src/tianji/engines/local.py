"""The local engine: each role in a process of its own on this machine, supervised by this one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tianji import trace
from tianji.actor import INACTIVE
from tianji.build import look
from tianji.channel import make_transport
from tianji.config import Config
from tianji.engines import messages
from tianji.engines.changing import Changing
from tianji.engines.engine import (
    Evaluated,
    Event,
    Faulted,
    NoAnswer,
    Started,
    Updated,
    Usage,
)
from tianji.engines.hosts import SILENT, Died, Heard, Host, HostTable, log_of
from tianji.engines.parts import gather, join_groups, of_group, scatter
from tianji.engines.server import ForkServer
from tianji.engines.spent import LATELY, Told
from tianji.engines.supervisor import Supervisor
from tianji.errors import Failure, Refusal
from tianji.fault import Fault
from tianji.folder import ARRIVALS, read_plan
from tianji.machine import core_order, cores
from tianji.placement import placements
from tianji.rebalance import Rebalancer, first_of
from tianji.role import State, generator, generator_state
from tianji.role_names import WORKER, RoleName
from tianji.tally import Tally, only_counts
from tianji.types import EPISODE, PRODUCED, SEQ, Array
from tianji.verdict import busy
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
COUNTED = ("version", "produced", "received", "consumed", "filtered")


class LocalEngine:
    """The launcher's side: it starts hosts, hears them, begins them anew and ends them."""

    beside = True
    transport = "shm"
    """what hosts are joined by"""

    def __init__(self, config: Config, server: ForkServer) -> None:
        self._config = config
        self._closing = contextlib.ExitStack()
        self._server = server
        self._hosts: HostTable | None = None
        self._folder = Path()
        self.started = False
        self._settling = self._stopped = self._disk_said = False
        self._rests: dict[int, float] = {}
        """since when the first learner of a group rests, by the clock"""
        self._goes = 0
        """how often all were told to go on"""
        self._asked = 0
        """how often states were asked for"""
        self._died: list[Died] = []
        self._supervisor: Supervisor | None = None
        self._events: list[Event] = []
        self._shown: dict[int, tuple[int, int]] = {}
        """updates made and steps received when versions were shown to the evaluator, which has not
        played yet"""
        self._changing: list[Changing] = []
        """who decides how many actors are active, of each group"""
        self._sha256 = ""
        self._watch: Watch | None = None
        self._team_files: list[int] = []
        """memory in which the learners of each group meet"""
        try:
            self.setup, self.graph = look(config)
            self._groups = range(self.setup.spec.groups)
            self._counts = [dict.fromkeys(COUNTED, 0) for _ in self._groups]
            self._transport = make_transport(self.transport)
            self._closing.callback(self._transport.close)
            # Made here, so that it is refused here if it is too big.
            for joint in self.graph.between_hosts:
                self._transport.open(joint.conduit)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return sum(counts["version"] for counts in self._counts)

    @property
    def active(self) -> int | None:
        return sum(changing.active for changing in self._changing) if self._changing else None

    @property
    def evaluating(self) -> bool:
        return bool(self._shown)

    @property
    def settled(self) -> bool:
        """A role that is being restarted is not waited for."""
        return len(self._rests) == len(self._groups) and all(
            host.resting or host.name in self._due for host in self._loop_hosts()
        )

    @property
    def stuck(self) -> bool:
        """A group whose learner does not come to rest holds the others up for the grace time."""
        first = min(self._rests.values(), default=math.inf)
        late = time.monotonic() - first > self._config.faults.grace
        return not self.settled and (self._rest_s > PAUSE or late)

    @property
    def _rest_s(self) -> float:
        """Seconds that all first learners have rested."""
        if len(self._rests) < len(self._groups):
            return -math.inf
        return time.monotonic() - max(self._rests.values())

    def start(self, folder: Path) -> None:
        self._folder = folder
        (folder / "logs").mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # said where the files in it are opened
            (folder / trace.TRACE).mkdir(exist_ok=True)
        scale, hosts = self._config.scale, self.graph.hosts
        placed = placements(
            hosts, core_order(), scale.cores, scale.pin, scale.env_threads, scale.device
        )
        self._placed = {placement.host: placement for placement in placed}
        for _ in self._groups:
            self._team_files.append(os.memfd_create("team", os.MFD_CLOEXEC))
            self._closing.callback(os.close, self._team_files[-1])
        self._hosts = HostTable(self._server, folder, len(placed))
        self._supervisor = Supervisor(
            self._config.faults, self.graph, self._hosts, self._transport, self._start_host
        )
        for name in hosts:
            self._start_host(name)
        self._until(lambda: all(h.ready for h in self._all()), START, "start")
        self._check_alike()
        self._hosts.table_now()

    def begin(self, parts: Mapping[str, State] | None) -> None:
        elapsed = 0.0
        if parts is not None:
            recorded = parts["run"]["recorder"]
            elapsed = recorded["elapsed"]
            for group in self._groups:
                self._load(group, of_group(parts, group), recorded)
                # A learner that goes on before its buffer would find no room for priorities, and
                # one that shares parameters goes on from those of the first group's.
                self._until(lambda: all(h.ready for h in self._all()), START, "go on")
        for group in self._groups:
            self._begin_active(group, {} if parts is None else of_group(parts, group))
        self._watch = Watch(self._config, elapsed=elapsed)
        if parts is not None:
            self._watch.load_state(parts["run"]["recorder"])
        assert self._supervisor is not None
        self._supervisor.going = True
        self._go(elapsed)

    def _begin_active(self, group: int, parts: Mapping[str, State]) -> None:
        """Let as many actors be active as there were, as a plan says, or all."""
        most, relax = self.setup.spec.actors, self.setup.relax
        if self._config.scale.rebalance:
            saved = parts["run"]["buffer"].get("active") if parts else None
            active = len(saved) if saved else first_of(read_plan(self._folder), most)
            assert self._hosts is not None
            changing = Changing(group, self._hosts, Rebalancer(most, active), self._crowd)
            self._changing.append(changing)
            changing.apply()
        elif parts and relax.hosts == "apart" and relax.lead > 0:
            (buffer,) = self.graph.roles_of(group, "buffer")
            # Some may have rested when it was saved.
            self._send(self.graph.host_of(buffer), messages.Activate(tuple(range(most))))

    def turn(self) -> list[Event]:
        self._poll(TURN)
        self._answer_deaths()
        self._judge_clock()
        for changing in self._changing:
            if (change := changing.look(self._counts)) is not None:
                self._events.append(change)
        assert self._hosts is not None
        assert self._supervisor is not None
        self._supervisor.look()
        self._hosts.write_table()
        return self.heard()

    def heard(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def settle(self) -> bool:
        if not self._settling and not self.settled:
            self._settling = True
            for host in self._leaders():
                self._send(host.name, messages.Settle())
        return self._rest_s < PAUSE

    def go_on(self) -> None:
        assert self._watch is not None
        self._go(self._watch.seconds)

    def parts(self, most_bytes: float) -> dict[str, State]:
        asked = [host for host in self._loop_hosts() if host.name not in self._due]
        answers = self._ask(asked, ANSWER)
        if len(answers) < len(asked):
            self._answer_deaths()
        return self._gather(answers, most_bytes)

    def rescue(self, seconds: float) -> dict[str, State] | None:
        leaders = self._leaders()
        if not leaders or not all(host.alive and host.ready for host in leaders):
            return None
        others = [h for h in self._loop_hosts() if not h.leads]
        self._settling = False
        self.settle()
        self._wait_for(leaders, seconds)
        for host in (*leaders, *others):  # in the middle of a batch that will not be whole
            if not host.resting:
                self._send(host.name, messages.Pause(self._goes))
        self._wait_for(leaders, PAUSE)
        if not all(host.resting and host.alive for host in leaders):
            return None
        self._wait_for(others, PAUSE)
        try:
            resting = [h for h in others if h.resting and h.alive]
            answers = self._ask([*leaders, *resting], PAUSE)
        except Failure:
            return None
        if not all(host.name in answers for host in leaders):
            return None
        return self._gather(answers, -1)

    def networks_sha256(self) -> str:
        return self._sha256

    def shares(self) -> dict[str, float]:
        """Actors share one account: the mean of theirs."""
        kinds = self._spent(LATELY)
        return {key: value for found in kinds.values() for key, value in _mean(found).items()}

    def usage(self, seconds: float) -> Usage:
        scale, now = self._config.scale, time.monotonic()
        found = {
            kind: [_kinds(kind, s) for s in each] for kind, each in self._spent(seconds).items()
        }
        actors = found.get("actor", [])
        places, crowd = self._crowd(seconds)
        away = sum(kinds.get(f"wait_{INACTIVE.waits}", 0.0) for kinds in actors)
        return Usage(
            time={kind: _mean(each) for kind, each in found.items()},
            active=scale.actors * scale.groups - away,
            places=len(places),
            crowd=crowd,
            busiest=max((busy("actor", kinds) or 0.0 for kinds in actors), default=0),
            silent={h.name: h.silent(now) for h in self._loop_hosts() if h.silent(now) > SILENT},
        )

    def _spent(self, seconds: float) -> dict[str, list[dict[str, float]]]:
        """Shares of its time of each host, by its kind. One that has said nothing for long is in
        the middle of a step: so it was all that while."""
        kinds: dict[str, list[dict[str, float]]] = {}
        now = time.monotonic()
        for host in self._all():
            shares, silent = host.spent.shares(seconds), host.silent(now)
            if silent > SILENT:
                whole = max(host.spent.last.elapsed, LATELY) if math.isinf(seconds) else seconds
                part = min(1.0, silent / (whole + silent if math.isinf(seconds) else whole))
                shares = {key: (1.0 - part) * share for key, share in shares.items()}
                shares[f"{host.kind}/silent"] = part
            if shares:
                kinds.setdefault(host.kind, []).append(shares)
        return kinds

    def _crowd(self, seconds: float) -> tuple[set[int], float]:
        """The cores that actors may run on, and the share of them that hosts use."""
        mine = set(os.sched_getaffinity(0))
        actors = [host for host in self._all() if host.kind == "actor"]
        places = {core for host in actors for core in host.placement.cores or mine} or mine
        used = math.fsum(
            host.spent.cpu(seconds)
            for host in self._all()
            if not places.isdisjoint(host.placement.cores or mine)
        )
        return places, used / len(places)

    def counts(self) -> list[dict[str, int]]:
        return [dict(counts) for counts in self._counts]

    def time(self) -> dict[str, dict[str, float]]:
        found = self._spent(math.inf)
        return {kind: _mean([_kinds(kind, s) for s in each]) for kind, each in found.items()}

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None
        self._closing.close()

    def kill(self) -> None:
        if self._hosts is not None:
            self._hosts.kill()

    @property
    def _due(self) -> Collection[str]:
        """Hosts that are being restarted."""
        return () if self._supervisor is None else self._supervisor.due

    def _all(self) -> Iterable[Host]:
        return [] if self._hosts is None else self._hosts.by_name.values()

    def _loop_hosts(self) -> list[Host]:
        """All that the run's future depends on: not the evaluator."""
        return [host for host in self._all() if host.checkpointed]

    def _leaders(self) -> list[Host]:
        return [host for host in self._all() if host.leads]

    def _start_host(self, name: str, life: int = 0) -> None:
        assert self._hosts is not None
        group = self.graph.hosts[name][0].group or 0
        spec = dataclasses.replace(self.setup.spec, group=group)
        offer = self._transport.offer(self.graph.ends(name), life)
        files = self._open_files(name)
        request = messages.RoleRequest(
            host=name,
            config=self._config.tree(),
            name=self._config.name,
            available=cores(),
            setup=dataclasses.replace(self.setup, spec=spec),
            graph=self.graph.part_of(name),
            judges=len(self._groups) == 1,
            files={what: str(path) for what, (path, _) in files.items()},
        )
        opened = [fd for _, fd in files.values()]
        self._hosts.start(self._placed[name], request, offer, opened, life)

    def _open_files(self, name: str) -> dict[str, tuple[Path, int]]:
        """What a host writes to, open: its path and descriptor, by what it is for. A file that
        cannot be made is done without; only the log is needed."""
        wanted = {"trace": (trace.path_of(self._folder, name), os.O_RDWR)}
        roles, append = self.graph.hosts[name], os.O_WRONLY | os.O_APPEND
        group = "" if roles[0].group is None else f"g{roles[0].group}."
        if not self.setup.relax.exact and any(role.kind == "buffer" for role in roles):
            wanted["arrivals"] = (self._folder / f"{group}{ARRIVALS}", append)
        files = {"log": (log_of(self._folder, name), append)} | wanted
        found = {}
        for what, (path, flags) in files.items():
            try:
                found[what] = (path, os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644))
            except OSError as error:
                words = f"{path} is not complete: {error.strerror}"
                self._note_fault(Fault(name, words, "disk", action="goes on"))
                if what == "log":
                    found[what] = (path, os.open(os.devnull, append | os.O_CLOEXEC))
        if self.setup.spec.learners > 1 and any(role.of.learns for role in roles):
            found["team"] = (Path("team"), os.dup(self._team_files[roles[0].group or 0]))
        return found

    def _check_alike(self) -> None:
        """All learners must begin with the same weights, or their mean would be no model at all."""
        learners = {h.name: h.first for h in self._all() if h.first}
        if len(set(learners.values())) > 1:
            told = ", ".join(f"{role} {sha256[:8]}" for role, sha256 in learners.items())
            raise Refusal(
                f"learners begin with different weights ({told}), so that averaging them would "
                f"mean nothing. Let the algorithm draw them from generator(spec.seed, 'init'), "
                f"which is the same for all."
            )

    def _load(self, group: int, parts: Mapping[str, State], recorded: State) -> None:
        """Give the roles of a group a checkpoint's states."""
        memory = self._memory(group)
        if not memory:
            parts = {k: v for k, v in parts.items() if k != "store"}
        states = scatter(parts, self.graph, group, memory)
        for name in self.graph.hosts_of(group):
            roles = self.graph.hosts[name]
            theirs = {str(role): states[role] for role in roles if role in states}
            if theirs:
                assert self._hosts is not None
                self._hosts.by_name[name].ready = False
                self._send(name, messages.Load(theirs, recorded))
        counts = self._counts[group]
        learner, buffer = (states[self.graph.roles_of(group, k)[0]] for k in ("learner", "buffer"))
        counts |= {"version": learner["version"], "consumed": learner["consumed"]}
        counts |= {"received": buffer["received"], "filtered": buffer["filtered"]}
        counts["produced"] = sum(buffer["produced"])

    def _memory(self, group: int) -> dict[str, Mapping[str, Array]]:
        """What the conduits of a group hold; empty where they are its worker's own."""
        joints = [j for j in self.graph.stored(group) if j in self.graph.between_hosts]
        return {j.conduit.name: self._transport.memory(j.conduit) for j in joints}

    def _go(self, elapsed: float) -> None:
        self._settling = False
        self._rests.clear()
        self._goes += 1
        for host in self._all():
            if host.name not in self._due:
                self._go_host(host, elapsed)

    def _go_host(self, host: Host, elapsed: float) -> None:
        host.resting, host.went = False, time.monotonic()
        self._send(host.name, messages.Go(elapsed))

    def _send(self, host: str, message: Any) -> None:
        assert self._hosts is not None
        self._hosts.send(host, message)

    def _poll(self, timeout: float) -> None:
        assert self._hosts is not None
        played = []
        for event in self._hosts.poll(timeout):
            if isinstance(event, Died):
                self._died.append(event)
            elif isinstance(event.message, Evaluated):
                played.append(event.message)
            else:
                self._heard(event)
        for evaluated in played:
            self._note_evaluation(evaluated)

    def _heard(self, heard: Heard) -> None:
        host = heard.host
        match heard.message:
            case messages.Ready(sha256):
                host.ready, host.first = True, sha256
                self._let_follow(host)
            case Started():
                self.started = True
            case messages.Status() as status:
                self._note_status(host, status)
            case messages.Learnt() as learnt:
                self._note_updates(host, learnt)
            case messages.Shown(version):
                received = sum(counts["received"] for counts in self._counts)
                self._shown[version] = self.version, received
            case messages.Settled():
                self._note_rest(host)
            case messages.Paused(goes):
                if goes == self._goes:  # else it was told to go on meanwhile
                    host.resting = True
            case messages.States() as states:
                if states.number == self._asked:  # else it answers an older question
                    host.answer = states
            case messages.Renewed() as renewed:
                assert self._supervisor is not None
                if (new := self._supervisor.renewed(renewed)) is not None:
                    self._let_follow(new)
            case Faulted() as faulted:
                self._note_fault(faulted.fault, faulted)
            case messages.Failed() as failed:
                going = self._supervisor is not None and self._supervisor.going
                if failed.refused and not going:
                    raise Refusal(failed.fault.cause)
                host.failure = failed

    def _note_fault(self, fault: Fault, event: Faulted | None = None) -> None:
        """A full disk is every host's: it is said once."""
        if fault.kind == "disk":
            if self._disk_said:
                return
            self._disk_said = True
        self._events.append(event or Faulted(fault))

    def _note_rest(self, host: Host) -> None:
        """The first learner of a group rests, and with it the group."""
        host.resting = True
        self._rests.setdefault(host.group, time.monotonic())
        for other in self._loop_hosts():
            if other.group == host.group and not other.leads and not other.resting:
                self._send(other.name, messages.Pause(self._goes))

    def _note_status(self, host: Host, status: messages.Status) -> None:
        host.status, now = status, time.monotonic()
        host.spent.note(Told(now, status.elapsed, status.seconds, status.cpu))
        if host.acts:
            before, count = host.counted
            if now - before >= 1.0:
                host.rate = (status.produced - count) / (now - before) if before else 0.0
                host.counted = now, status.produced
        if status.filling and self._watch is not None:
            # No update is near that would report or judge: show what arrives, end if told to.
            counts = self._counts[host.group]
            for name in ("produced", "received", "filtered"):
                counts[name] = max(counts[name], getattr(status, name))
            report = only_counts(**self._summed())
            self._events.append(Updated(report, self._watch.note(report)))

    def _summed(self) -> dict[str, int]:
        return {name: sum(counts[name] for counts in self._counts) for name in COUNTED}

    def _note_updates(self, host: Host, learnt: messages.Learnt) -> None:
        tally, due = Tally.of(learnt.tally), learnt.due
        last = tally.last
        assert last is not None
        self._counts[host.group] |= {name: getattr(last, name) for name in COUNTED}
        if len(self._groups) > 1:
            due = self._judge(tally)
        elif due.evaluate:
            self._shown[last.version] = last.version, last.received
        self._stopped = self._stopped or due.stop is not None
        self._events.append(Updated(tally, due))

    def _judge(self, tally: Tally) -> Due:
        """What is due, by the counts of all groups together, which no learner knows."""
        assert self._watch is not None
        assert tally.last is not None
        counts, share = only_counts(**self._summed()), tally.last.share
        tally.last = dataclasses.replace(counts, share=share)
        due = self._watch.note(dataclasses.replace(counts, episodes=tally.episodes))
        if due.evaluate:
            self._send(self._leader, messages.Show())
        if due.save:
            self.settle()
        return due

    def _note_evaluation(self, evaluated: Evaluated) -> None:
        assert self._hosts is not None
        for event in self._hosts.hear(self._leader):  # which versions it has shown
            assert isinstance(event, Heard)
            self._heard(event)
        version = evaluated.version
        updates, steps = self._shown.get(version, (version, 0))
        self._shown = {v: shown for v, shown in self._shown.items() if v > version}
        self._events.append(Evaluated(updates, steps, evaluated.episodes))

    @property
    def _leader(self) -> str:
        """The host of the first group's first learner."""
        return self.graph.host_of(self.graph.roles_of(0, "learner")[0])

    def _judge_clock(self) -> None:
        """The learner judges at its updates; where none comes, the time is up all the same."""
        limit = self._config.stop.seconds
        if limit is None or self._watch is None or self._stopped:
            return
        if self._watch.seconds >= limit and not self._settling and not self.settled:
            self._stopped = True
            self._events.append(Updated(Tally(), Due(stop=f"seconds >= {limit:g}")))

    def _answer_deaths(self) -> None:
        """Begin anew what can be; else the run cannot go on as it is: the root cause is told."""
        if not self._died:
            return
        supervisor = self._supervisor
        assert supervisor is not None
        if any(not supervisor.replaces(d) or d.consequence for d in self._died):
            end = time.monotonic() + CAUSE
            while time.monotonic() < end:
                self._poll(CAUSE / 10)
        died, self._died = self._died, []
        self._events += [Faulted(fault) for fault in supervisor.answer(died)]

    def _let_follow(self, host: Host) -> None:
        """A role that was restarted goes on once it and the other side of its conduits are
        ready."""
        assert self._supervisor is not None
        if (follow := self._supervisor.follows(host)) is None:
            return
        host.counted = 0.0, 0
        self._send(host.name, follow)
        for changing in self._changing:
            changing.tell(host)
        if host.group in self._rests and not host.beside:
            return  # the others rest, and it goes on with them
        assert self._watch is not None
        self._go_host(host, self._watch.seconds)

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            self._poll(TURN)
            self._answer_deaths()
            if time.monotonic() > end:
                slow = [h.name for h in self._all() if not h.ready]
                raise Failure(
                    f"{', '.join(slow) or 'a host'} did not {what} within {seconds:g} s, so the "
                    f"run cannot go on. Look at {self._folder / 'logs'}."
                )

    def _wait_for(self, hosts: list[Host], seconds: float) -> None:
        """Until these rest or are dead, or so many seconds."""
        end = time.monotonic() + seconds
        while any(not h.resting and h.alive for h in hosts) and time.monotonic() < end:
            self._poll(TURN)

    def _ask(self, hosts: list[Host], seconds: float) -> dict[str, messages.States]:
        """The states of these hosts, which rest. Actors that do not answer are not waited for: one
        may have been stopped just now, and what it knows can be done without."""
        self._asked += 1
        for host in hosts:
            host.answer = None
            self._send(host.name, messages.Ask(self._asked))
        end, late = time.monotonic() + seconds, math.inf
        while any(h.answer is None and h.alive for h in hosts):
            self._poll(TURN)
            missing = [h.name for h in hosts
                       if h.answer is None and h.alive and not h.replaceable]  # fmt: skip
            if not missing:
                late = min(late, time.monotonic() + PAUSE)
            if time.monotonic() > late:
                break
            if missing and time.monotonic() > end:
                raise NoAnswer(f"{', '.join(missing)} did not answer within {seconds:g} s")
        return {h.name: h.answer for h in hosts if h.answer is not None}

    def _gather(
        self, answers: Mapping[str, messages.States], most_bytes: float
    ) -> dict[str, State]:
        """All groups' parts of a checkpoint; for a host that does not answer, what can be said."""
        self._sha256 = answers[self._leader].sha256
        gathered = []
        for group in self._groups:
            known = {text: s for states in answers.values() for text, s in states.roles.items()}
            names = self.graph.roles_of(group)
            roles = {name: known[str(name)] for name in names if str(name) in known}
            self._stand_in_for_dead(group, roles)
            leader = self.graph.host_of(self.graph.roles_of(group, "learner")[0])
            policy, memory = answers[leader].policy, self._memory(group)
            assert policy is not None
            most = most_bytes if memory else -1  # a worker's rollouts are its own
            parts = gather(self.graph, group, memory, roles, policy, most)
            parts["run"]["at"] = 0
            gathered.append(parts)
        return join_groups(gathered)

    def _stand_in_for_dead(self, group: int, roles: dict[RoleName, State]) -> None:
        """Say what can be said of roles that do not answer; where the buffer has, it knows how far
        their actors were."""
        assert self._hosts is not None
        (own,) = self.graph.roles_of(group, "buffer")
        first = self.graph.roles_of(group, "learner")[0]
        buffer = roles.get(own)
        for role in self.graph.roles_of(group):
            if role in roles or not role.of.checkpointed:
                continue
            if role.of.learns:  # it has learnt what the first one has
                roles[role] = roles[first] | {"mixer": None}
                continue
            state = self._stand_in(self._hosts.by_name[self.graph.host_of(role)], role)
            if role.kind == "actor" and buffer is not None:
                i = role.index
                (lane,) = self.graph.sent("rollouts", role)
                # What was pushed and not received yet, or came before its turn.
                arrived = [slot for slot, *_ in buffer["lanes"][i]["pushed"]]
                arrived += [slot for of, slot, *_ in buffer["early"] if of == i]
                heads = self._transport.memory(lane.conduit)["head"][arrived]
                state["produced"] = max(buffer["produced"][i], *heads[:, PRODUCED].tolist(), 0)
                state["seq"] = max(buffer["seqs"][i], *(heads[:, SEQ] + 1).tolist(), 0)
            roles[role] = state

    def _stand_in(self, host: Host, role: RoleName) -> State:
        """What can be said of a role whose process is dead, for a checkpoint without its data."""
        spec = dataclasses.replace(self.setup.spec, group=host.group)
        rng = generator(spec.seed, role.kind, spec.index(role.kind, role.index), host.life)
        rng.bit_generator.advance(2**64)  # type: ignore[attr-defined]  # not the same draws again
        state = {"produced": self._produced(role), "rng": generator_state(rng)}
        if role.kind == "actor":
            return state | {"seq": 0}
        if role.kind != "buffer":
            return state
        counts = {"received": host.status.received, "filtered": host.status.filtered}
        none = {"lanes": None, "store": None, "episodes": np.empty(0, EPISODE)}
        actors = self.graph.roles_of(host.group, "actor")
        produced = [self._produced(actor) for actor in actors]
        return state | counts | none | {"produced": produced, "seqs": [0] * len(actors)}

    def _produced(self, role: RoleName) -> int:
        """Steps that a role has made, as far as its host has said: an equal share of its host's."""
        assert self._hosts is not None
        host = self._hosts.by_name[self.graph.host_of(role)]
        return host.status.produced // [other.kind for other in host.roles].count(role.kind)


def _kinds(kind: str, shares: Mapping[str, float]) -> dict[str, float]:
    """Shares by kind of work alone, but of a worker, which has several roles."""
    if kind == WORKER:
        return dict(shares)
    return {key.partition("/")[2]: share for key, share in shares.items()}


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for shares in found for key in shares})
    return {key: math.fsum(s.get(key, 0.0) for s in found) / len(found) for key in keys}
