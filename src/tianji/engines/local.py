"""The local engine: each role in a process of its own on this machine, supervised by this one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from tianji.actor import INACTIVE
from tianji.build import Topology, topologies
from tianji.channel import End
from tianji.config import Config
from tianji.engines.changing import Changing
from tianji.engines.engine import Evaluated, Event, Faulted, NoAnswer, Updated
from tianji.engines.hosts import SILENT, Died, Heard, Host, Hosts
from tianji.engines.parts import gather, join_groups, of_group, scatter
from tianji.engines.server import ForkServer
from tianji.engines.spent import LATELY, Told
from tianji.engines.supervisor import Supervisor
from tianji.errors import Failure, Refusal
from tianji.fault import Fault, parse
from tianji.folder import read_plan
from tianji.machine import core_order, cores
from tianji.placement import placements
from tianji.plan import SLACK
from tianji.rebalance import Rebalancer, first_of
from tianji.role import State, generator, generator_state
from tianji.role_names import parse_role
from tianji.tally import Tally, only_counts
from tianji.transports.shm import Shm
from tianji.types import EPISODE, PRODUCED, SEQ
from tianji.verdict import Setting, Time, busy, scaling_of
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

    def __init__(self, config: Config, server: ForkServer) -> None:
        self._config = config
        self._closing = contextlib.ExitStack()
        self._server = server
        self._hosts: Hosts | None = None
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
        self._scaling: Mapping[int, float] = {}
        """updates per second of a learner by its cores, where the run's plan has measured them"""
        self._slack = 0.0
        """share of what is consumed that actors should be able to make beside it, by that plan"""
        self._watch: Watch | None = None
        try:
            self._groups = topologies(config)
            self.topology = self._groups[0]
            self._counts = [dict.fromkeys(COUNTED, 0) for _ in self._groups]
            self._transport = self._open()
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
            host.resting or host.role in self._due for host in self._loop_hosts()
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
        plan = read_plan(folder)
        self._slack, self._scaling = SLACK if plan else 0.0, scaling_of(plan)
        scale, mine = self._config.scale, core_order()
        hosts = {
            name: tuple(map(parse_role, roles))
            for group in self._groups
            for name, roles in group.hosts.items()
        }
        placed = placements(hosts, mine, scale.cores, scale.pin, scale.env_threads, scale.device)
        self._placed = {placement.host: placement for placement in placed}
        self._teams = folder / "logs" / f"team-{time.monotonic_ns()}"
        self._hosts = Hosts(self._server, folder, len(placed))
        self._supervisor = Supervisor(
            self._config.faults, self._groups, self._hosts, self._transport, self._fork
        )
        for group in self._groups:
            for name in group.hosts:
                self._fork(group, name)
        self._until(lambda: all(h.ready for h in self._all()), START, "start")
        self._check_alike()
        for name in hosts:
            self._supervisor.let_go(name)
        self._hosts.table_now()

    def begin(self, parts: Mapping[str, State] | None) -> None:
        elapsed = 0.0
        if parts is not None:
            recorded = parts["run"]["recorder"]
            elapsed = recorded["elapsed"]
            for group in self._groups:
                self._load(group, of_group(parts, group.spec.group), recorded)
            if self.topology.shared is not None:
                # Once the first group's learner answers, it has laid out what others go on from.
                self._ask([h for h in self._leaders() if h.group == 0], ANSWER)
        for group in self._groups:
            self._begin_active(group, {} if parts is None else of_group(parts, group.spec.group))
        self._watch = Watch(self._config, elapsed=elapsed)
        if parts is not None:
            self._watch.load_state(parts["run"]["recorder"])
        assert self._supervisor is not None
        self._supervisor.going = True
        self._go(elapsed)

    def _begin_active(self, group: Topology, parts: Mapping[str, State]) -> None:
        """Let as many actors be active as there were, as a plan says, or all."""
        most = group.spec.actors
        if self._config.scale.rebalance:
            saved = parts["run"]["buffer"].get("active") if parts else None
            active = len(saved) if saved else first_of(read_plan(self._folder), most)
            assert self._hosts is not None
            changing = Changing(group, self._hosts, Rebalancer(most, active), self._crowd)
            self._changing.append(changing)
            changing.apply()
        elif parts and group.relax.hosts == "apart" and group.relax.lead > 0:
            everyone = list(range(most))  # some may have rested when it was saved
            self._send(
                group.holder(End(group.lanes[0].name, "receive")), "active", {"actors": everyone}
            )

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
                self._send(host.role, "settle", {})
        return self._rest_s < PAUSE

    def go_on(self) -> None:
        assert self._watch is not None
        self._go(self._watch.seconds)

    def parts(self, most_bytes: float) -> dict[str, State]:
        asked = [host for host in self._loop_hosts() if host.role not in self._due]
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
                self._send(host.role, "pause", {"goes": self._goes})
        self._wait_for(leaders, PAUSE)
        if not all(host.resting and host.alive for host in leaders):
            return None
        self._wait_for(others, PAUSE)
        try:
            resting = [h for h in others if h.resting and h.alive]
            answers = self._ask([*leaders, *resting], PAUSE)
        except Failure:
            return None
        if not all(host.role in answers for host in leaders):
            return None
        return self._gather(answers, -1)

    def networks_sha256(self) -> str:
        return self._sha256

    def shares(self) -> dict[str, float]:
        """Actors share one account: the mean of theirs."""
        kinds = self._spent(LATELY)
        return {key: value for found in kinds.values() for key, value in _mean(found).items()}

    def load(self, seconds: float) -> tuple[Time, Setting]:
        scale, relax, now = self._config.scale, self.topology.relax, time.monotonic()
        found = {
            kind: [_kinds(kind, s) for s in each] for kind, each in self._spent(seconds).items()
        }
        places, crowd = self._crowd(seconds)
        silent = {h.role: h.silent(now) for h in self._loop_hosts() if h.silent(now) > SILENT}
        away = sum(kinds.get(f"wait_{INACTIVE.waits}", 0.0) for kinds in found.get("actor", []))
        setting = Setting(
            actors=max(1, round(scale.actors * scale.groups - away)),
            groups=scale.groups,
            cores=scale.cores,
            available=cores(),
            places=len(places),
            crowd=crowd,
            turns=relax.lead == 0,
            grows=self._config.algorithm.on_policy,
            ordered=relax.late == "wait",
            busiest=max(
                (busy("actor", kinds) or 0.0 for kinds in found.get("actor", [])), default=0
            ),
            scaling=self._scaling,
            slack=self._slack,
            rebalances=scale.rebalance,
            silent=silent,
        )
        return {kind: _mean(each) for kind, each in found.items()}, setting

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
            for path in self._teams.parent.glob(f"{self._teams.name}-*"):  # of those that died
                path.unlink(missing_ok=True)
        self._closing.close()

    def kill(self) -> None:
        if self._hosts is not None:
            self._hosts.kill()

    def _open(self) -> Shm:
        """Every conduit between hosts: made here, so that it is refused here if it is too big."""
        transport = Shm()
        self._closing.callback(transport.close)
        for conduit in self.topology.models.values():
            transport.open(conduit)
        if self.topology.shared is not None:
            transport.open(self.topology.shared)
        for group in self._groups:
            if group.evaluates:
                transport.open(group.evaluations)
            if group.relax.hosts == "worker":
                continue
            for conduit in (*group.lanes, *group.asks, *group.answers, group.snapshots):
                transport.open(conduit)
            store = group.store(transport)
            for learner in range(group.spec.learners):
                transport.open(group.batches(store, learner))
            for conduit in group.told(store):
                transport.open(conduit)
        return transport

    @property
    def _due(self) -> Collection[str]:
        """Hosts that are being restarted."""
        return () if self._supervisor is None else self._supervisor.due

    def _all(self) -> Iterable[Host]:
        return [] if self._hosts is None else self._hosts.by_role.values()

    def _loop_hosts(self) -> list[Host]:
        """All but the evaluator, which is no part of the run's future."""
        return [host for host in self._all() if host.kind != "evaluator"]

    def _leaders(self) -> list[Host]:
        return [host for host in self._all() if host.leads]

    def _fork(self, group: Topology, name: str, life: int = 0) -> None:
        assert self._hosts is not None
        table, fds = self._transport.pack(group.host_ends(name))
        request = {
            "roles": group.hosts[name],
            "group": group.spec.group,
            "prefix": group.prefix,
            "judges": len(self._groups) == 1,
            "team": f"{self._teams}-{group.spec.group}",
            "available": cores(),
            "config": self._config.tree(),
            "name": self._config.name,
            "env": group.spec.env.tree(),
            "table": table,
        }
        self._hosts.fork(self._placed[name], request, fds, life)

    def _check_alike(self) -> None:
        """All learners must begin with the same weights, or their mean would be no model at all."""
        learners = {h.role: h.first for h in self._all() if h.first}
        if len(set(learners.values())) > 1:
            told = ", ".join(f"{role} {sha256[:8]}" for role, sha256 in learners.items())
            raise Refusal(
                f"learners begin with different weights ({told}), so that averaging them would "
                f"mean nothing. Let the algorithm draw them from generator(spec.seed, 'init'), "
                f"which is the same for all."
            )

    def _load(self, group: Topology, parts: Mapping[str, State], recorded: State) -> None:
        """Give the roles of a group a checkpoint's states."""
        worker = group.relax.hosts == "worker"
        memory = {} if worker else group.memory(self._transport)
        parts = {k: v for k, v in parts.items() if not (worker and k == "store")}
        states = scatter(parts, group, memory)
        for name, roles in group.hosts.items():
            theirs = {role: states[role] for role in roles if role in states}
            if theirs:
                self._send(name, "load", {"roles": theirs, "recorder": recorded})
        counts = self._counts[group.spec.group]
        learner, buffer = states["learner"], states["buffer"]
        counts |= {"version": learner["version"], "consumed": learner["consumed"]}
        counts |= {"received": buffer["received"], "filtered": buffer["filtered"]}
        counts["produced"] = sum(buffer["produced"])

    def _go(self, elapsed: float) -> None:
        self._settling = False
        self._rests.clear()
        self._goes += 1
        for host in self._all():
            if host.role not in self._due:
                self._go_host(host, elapsed)

    def _go_host(self, host: Host, elapsed: float) -> None:
        host.resting, host.went = False, time.monotonic()
        self._send(host.role, "go", {"elapsed": elapsed})

    def _send(self, role: str, kind: str, content: State) -> None:
        assert self._hosts is not None
        self._hosts.send(role, kind, content)

    def _poll(self, timeout: float) -> None:
        assert self._hosts is not None
        played = []
        for event in self._hosts.poll(timeout):
            if isinstance(event, Died):
                self._died.append(event)
            elif event.kind == "evaluated":
                played.append(event.content)
            else:
                self._heard(event)
        for content in played:
            self._note_evaluation(content)

    def _heard(self, heard: Heard) -> None:
        host, kind, content = heard
        match kind:
            case "ready":
                host.ready, host.first = True, content["sha256"]
                self._let_follow(host)
            case "first":
                self.started = True
            case "status":
                self._note_status(host, content)
            case "updated":
                self._note_updates(host, content)
            case "shown":
                counts = self._counts
                received = sum(c["received"] for c in counts)
                self._shown[content["version"]] = self.version, received
            case "settled":
                self._note_rest(host)
            case "paused":
                if content["goes"] == self._goes:  # else it was told to go on meanwhile
                    host.resting = True
            case "state":
                if content["asked"] == self._asked:  # else it is the answer to an older question
                    host.answer = content
            case "renewed":
                assert self._supervisor is not None
                if (new := self._supervisor.renewed(content)) is not None:
                    self._let_follow(new)
            case "fault":
                self._note_fault(parse(content))
            case "failed" | "refused":
                if kind == "refused" and (self._supervisor is None or not self._supervisor.going):
                    raise Refusal(content["message"])
                host.told = parse(content["fault"])
                host.expected = content["expected"] and kind == "failed"

    def _note_fault(self, fault: Fault) -> None:
        """A full disk is every host's: it is said once."""
        if fault.kind == "disk":
            if self._disk_said:
                return
            self._disk_said = True
        self._events.append(Faulted(fault))

    def _note_rest(self, host: Host) -> None:
        """The first learner of a group rests, and with it the group."""
        host.resting = True
        self._rests.setdefault(host.group, time.monotonic())
        for other in self._loop_hosts():
            if other.group == host.group and not other.leads and not other.resting:
                self._send(other.role, "pause", {"goes": self._goes})

    def _note_status(self, host: Host, status: State) -> None:
        host.status = status
        told = status["elapsed"], status["seconds"], status["cpu"]
        host.spent.note(Told(time.monotonic(), *told))
        produced = status.get("produced", 0)
        if host.kind in ("actor", "worker"):
            now, (before, count) = time.monotonic(), host.counted
            if now - before >= 1.0:
                host.rate = (produced - count) / (now - before) if before else 0.0
                host.counted = now, produced
        if status.get("filling") and self._watch is not None:
            # No update is near that would report or judge: show what arrives, end if told to.
            counts = self._counts[host.group]
            for name in ("produced", "received", "filtered"):
                counts[name] = max(counts[name], status[name])
            report = only_counts(**self._summed())
            self._events.append(Updated(report, self._watch.note(report)))

    def _summed(self) -> dict[str, int]:
        return {name: sum(counts[name] for counts in self._counts) for name in COUNTED}

    def _note_updates(self, host: Host, content: State) -> None:
        tally = Tally.of(content["tally"])
        last = tally.last
        assert last is not None
        self._counts[host.group] |= {name: getattr(last, name) for name in COUNTED}
        due = Due(content["stop"], content["evaluate"], content["save"])
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
            self._send(self.topology.leader, "show", {})
        if due.save:
            self.settle()
        return due

    def _note_evaluation(self, content: State) -> None:
        assert self._hosts is not None
        for event in self._hosts.hear(self.topology.leader):  # which versions it has shown
            assert isinstance(event, Heard)
            self._heard(event)
        version = content["version"]
        updates, steps = self._shown.get(version, (version, 0))
        self._shown = {v: shown for v, shown in self._shown.items() if v > version}
        self._events.append(Evaluated(updates, steps, content["episodes"]))

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
        if (content := self._supervisor.follows(host)) is None:
            return
        host.counted = 0.0, 0
        self._send(host.role, "follow", content)
        for changing in self._changing:
            changing.tell(host)
        if host.group in self._rests and host.kind == "actor":
            return  # the others rest, and it goes on with them
        assert self._watch is not None
        self._go_host(host, self._watch.seconds)

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
        """The states of these hosts, which rest. Actors that do not answer are not waited for: one
        may have been stopped just now, and what it knows can be done without."""
        self._asked += 1
        for host in hosts:
            host.answer = None
            self._send(host.role, "state", {"asked": self._asked})
        end, late = time.monotonic() + seconds, math.inf
        while any(h.answer is None and h.alive for h in hosts):
            self._poll(TURN)
            missing = [h.role for h in hosts if h.answer is None and h.alive and h.kind != "actor"]
            if not missing:
                late = min(late, time.monotonic() + PAUSE)
            if time.monotonic() > late:
                break
            if missing and time.monotonic() > end:
                raise NoAnswer(f"{', '.join(missing)} did not answer within {seconds:g} s")
        return {h.role: h.answer for h in hosts if h.answer is not None}

    def _gather(self, answers: Mapping[str, State], most_bytes: float) -> dict[str, State]:
        """All groups' parts of a checkpoint; for a host that does not answer, what can be said."""
        assert self._hosts is not None
        self._sha256 = answers[self.topology.leader]["sha256"]
        gathered = []
        for group in self._groups:
            roles: dict[str, State] = {}
            for name in group.hosts:
                roles |= answers.get(name, {"roles": {}})["roles"]
            self._stand_in_for_dead(group, roles)
            policy = answers[group.leader]["policy"]
            if group.relax.hosts == "worker":  # its rollouts are its own
                parts = gather(group, {}, roles, policy, -1)
            else:
                memory = group.memory(self._transport)
                parts = gather(group, memory, roles, policy, most_bytes)
            parts["run"]["at"] = 0
            gathered.append(parts)
        return join_groups(gathered)

    def _stand_in_for_dead(self, group: Topology, roles: dict[str, State]) -> None:
        """Say what can be said of roles that do not answer; where the buffer has, it knows how far
        their actors were."""
        assert self._hosts is not None
        buffer = roles.get("buffer")
        for name, within in group.hosts.items():
            if within == ["evaluator"] or within[0] in roles:
                continue
            (role,) = within
            if role.startswith("learner"):  # it has learnt what the first one has
                roles[role] = roles["learner"] | {"mixer": None}
                continue
            state = self._stand_in(self._hosts.by_role[name], role)
            if role.startswith("actor") and buffer is not None:
                i = int(role.partition("-")[2])
                state |= {"produced": buffer["produced"][i], "seq": buffer["seqs"][i]}
                if pushed := buffer["lanes"][i]["pushed"]:  # and not received yet
                    memory = self._transport.memory(group.lanes[i])
                    head = memory["head"][pushed[-1][0]]
                    state |= {"produced": int(head[PRODUCED]), "seq": int(head[SEQ]) + 1}
            roles[role] = state

    def _stand_in(self, host: Host, role: str) -> State:
        """What can be said of a role whose process is dead, for a checkpoint without its data."""
        kind, _, index = role.partition("-")
        spec = self._groups[host.group].spec
        rng = generator(spec.seed, kind, spec.index(kind, int(index or 0)), host.life)
        rng.bit_generator.advance(2**64)  # type: ignore[attr-defined]  # not the same draws again
        state = {"produced": host.status.get("produced", 0), "rng": generator_state(rng)}
        if kind == "actor":
            return state | {"seq": 0}
        if kind == "server":
            return state
        actors = [h for h in self._all() if h.kind == "actor" and h.group == host.group]
        produced = [h.status.get("produced", 0) for h in actors]
        counts = {k: host.status.get(k, 0) for k in ("received", "filtered")}
        none = {"lanes": None, "store": None, "episodes": np.empty(0, EPISODE)}
        return state | counts | none | {"produced": produced, "seqs": [0] * len(actors)}


def _kinds(kind: str, shares: Mapping[str, float]) -> dict[str, float]:
    """Shares by kind of work alone, but of a worker, which has several roles."""
    if kind == "worker":
        return dict(shares)
    return {key.partition("/")[2]: share for key, share in shares.items()}


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for shares in found for key in shares})
    return {key: math.fsum(s.get(key, 0.0) for s in found) / len(found) for key in keys}
