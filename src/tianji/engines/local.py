"""The local engine: each role in a process of its own on this machine, supervised by this one."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tianji.build import EVALUATIONS, SNAPSHOTS, Topology, topology
from tianji.config import Config
from tianji.engines import wire
from tianji.engines.engine import (
    Evaluated,
    Event,
    Updated,
    gather,
    scatter,
    shares_of,
)
from tianji.engines.server import ForkServer
from tianji.errors import Failure, Refusal
from tianji.folder import HOSTS
from tianji.machine import cores, process_started
from tianji.plan import Placement, placements
from tianji.role import State, generator, generator_state
from tianji.tally import Tally, only_counts
from tianji.transports.shm import Shm
from tianji.types import EPISODE
from tianji.watch import Due, Watch

TURN = 0.05
"""seconds that a turn waits for something to happen"""
START = 180.0
"""seconds in which all hosts must be ready"""
ANSWER = 60.0
"""seconds in which a host at rest must answer"""
PAUSE = 1.0
"""seconds in which the other hosts must, or be done without"""
GRACE = 2.0
"""seconds that hosts have to end before they are killed"""
CAUSE = 0.3
"""seconds after the first sign of trouble in which its cause may still come to light"""


class HostFailed(Failure):
    """A host raised or died; the message names it and says why."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


@dataclass
class _Host:
    """What is known of one process."""

    placement: Placement
    place: int
    line: socket.socket
    pid: int = -1
    pidfd: int = -1
    ready: bool = False
    resting: bool = True
    alive: bool = True
    sent: int = 0
    status: State = field(default_factory=dict)
    seconds_before: dict[str, float] = field(default_factory=dict)
    elapsed_before: float = 0.0
    answer: State | None = None
    code: int | None = None
    rate: float = 0.0
    counted: tuple[float, int] = (0.0, 0)

    @property
    def role(self) -> str:
        return self.placement.role


@dataclass(frozen=True)
class _Trouble:
    """A sign that something is wrong."""

    at: float
    role: str
    message: str
    trace: str = ""
    refused: bool = False
    cause: bool = True
    """False: more likely a consequence of something else"""


class LocalEngine:
    """The launcher's side: it starts hosts, hears them, and ends them."""

    beside = True

    def __init__(self, config: Config, server: ForkServer) -> None:
        self._config = config
        self._closing = contextlib.ExitStack()
        self.version = 0
        self._consumed = 0
        self.started = False
        self.settled = False
        self._settling = False
        self._learner_rests = math.inf
        """since when, by the clock"""
        self._stopped = False
        self._server_dead = False
        self._hosts: dict[str, _Host] = {}
        self._troubles: list[_Trouble] = []
        self._events: list[Event] = []
        self._shown: dict[int, int] = {}
        """steps received when versions were shown to the evaluator, which has not played yet"""
        self._sha256 = ""
        self._watch: Watch | None = None
        self._table_due = 0.0
        self._folder = Path()
        self._server, self._server_line = server, server.line
        self._epoll = select.epoll()
        self._closing.callback(self._epoll.close)
        self._epoll.register(server.line, select.EPOLLIN)
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

    def start(self, folder: Path) -> None:
        self._folder = folder
        (folder / "logs").mkdir(exist_ok=True)
        scale, mine = self._config.scale, sorted(os.sched_getaffinity(0))
        placed = placements(self.topology.role_names, mine, scale.cores, scale.pin)
        self._board_fd, self._board = self._make_board(len(placed))
        for place, placement in enumerate(placed):
            self._fork(placement, place)
        self._until(lambda: all(h.ready for h in self._hosts.values()), START, "start")
        self._transport.keep(())
        self._write_table()

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
        self._go(elapsed)

    def turn(self) -> list[Event]:
        self._poll(TURN)
        self._raise_trouble()
        self._judge_clock()
        if (now := time.monotonic()) >= self._table_due:
            self._table_due = now + 1.0
            self._write_table()
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
        asked = [h for h in self._hosts.values() if h.role != "evaluator"]
        answers = self._ask(asked, ANSWER)
        if len(answers) < len(asked):
            self._raise_trouble()
        return self._gather(answers, most_bytes)

    def rescue(self, seconds: float) -> dict[str, State] | None:
        learner = self._hosts.get("learner")
        if learner is None or not learner.alive or not learner.ready:
            return None
        others = [h for h in self._hosts.values() if h.role not in ("learner", "evaluator")]
        self._settling = False
        self.settle()
        self._wait_for([learner], seconds)
        for host in (learner, *others):  # in the middle of a batch that will not be whole
            if not host.resting:
                self._send(host.role, "pause", {})
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
        for role in self._hosts:
            if role not in answers and role != "evaluator":
                answers[role] = {"role": self._stand_in(role)}
        return self._gather(answers, -1)

    def networks_sha256(self) -> str:
        return self._sha256

    def shares(self) -> dict[str, float]:
        """Actors share one account: the mean of theirs."""
        kinds: dict[str, list[dict[str, float]]] = {}
        for host in self._hosts.values():
            seconds, before = host.status.get("seconds", {}), host.seconds_before
            elapsed, since = host.status.get("elapsed", 0.0), host.elapsed_before
            if elapsed > since:
                host.seconds_before, host.elapsed_before = seconds, elapsed
                spent = {key: value - before.get(key, 0.0) for key, value in seconds.items()}
                shares = shares_of(spent, elapsed - since)
                kinds.setdefault(host.role.split("-")[0], []).append(shares)
        return {key: value for found in kinds.values() for key, value in _mean(found).items()}

    def time(self) -> dict[str, dict[str, float]]:
        kinds: dict[str, list[dict[str, float]]] = {}
        for host in self._hosts.values():
            if seconds := host.status.get("seconds"):
                kind = host.role.split("-")[0]
                shares = shares_of(seconds, host.status["elapsed"])
                kinds.setdefault(kind, []).append(
                    {key.partition("/")[2]: value for key, value in shares.items()}
                )
        return {kind: _mean(found) for kind, found in kinds.items()}

    def close(self) -> None:
        """Ask all hosts to end, then end them; nothing of the run is left."""
        for host in self._hosts.values():
            with contextlib.suppress(OSError):
                self._send(host.role, "stop", {})
        end = time.monotonic() + GRACE
        for host in self._hosts.values():
            if host.pidfd >= 0:
                _readable(host.pidfd, end - time.monotonic())
        for host in self._hosts.values():
            if host.pidfd >= 0:
                if not _readable(host.pidfd, 0):
                    signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)
                    _readable(host.pidfd, GRACE)
                os.close(host.pidfd)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(host.pid, signal.SIGKILL)  # processes that an env has left
            host.line.close()
        if self._hosts:
            (self._folder / HOSTS).unlink(missing_ok=True)
        self._hosts.clear()
        self._closing.close()

    def kill(self) -> None:
        """End everything at once."""
        for host in self._hosts.values():
            if host.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)

    def _open(self) -> Shm:
        """Every conduit of the topology: made here, so that it is refused here if it is too big."""
        joined, transport = self.topology, Shm()
        self._closing.callback(transport.close)
        for lane in joined.lanes:
            transport.open(lane)
        transport.open(joined.batches(joined.store(transport)))
        for channel in (*joined.asks, *joined.answers):
            transport.open(channel)
        transport.open_newest(SNAPSHOTS, joined.params_size, joined.subscribers)
        if joined.evaluates:
            transport.open_newest(EVALUATIONS, joined.params_size, 1)
        return transport

    def _make_board(self, hosts: int) -> tuple[int, memoryview]:
        size = -(-hosts * 64 // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("board", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, size)
        self._closing.callback(os.close, fd)
        board = mmap.mmap(fd, size)
        whole = memoryview(board)
        words = whole.cast("q")
        for end in (board.close, whole.release, words.release):  # the last one first
            self._closing.callback(end)
        return fd, words

    def _fork(self, placement: Placement, place: int) -> None:
        ours, theirs = wire.pair()
        table, fds = self._transport.pack(self.topology.ends(placement.role))
        request = {
            "role": placement.role,
            "place": 8 * place,
            "cores": list(placement.cores),
            "threads": placement.threads,
            "available": cores(),
            "config": self._config.tree(),
            "name": self._config.name,
            "env": self.topology.spec.env.tree(),
            "table": table,
            "folder": str(self._folder.resolve()),
        }
        wire.send(self._server_line, "fork", request, [theirs.fileno(), self._board_fd, *fds])
        theirs.close()
        ours.setblocking(False)
        self._hosts[placement.role] = _Host(placement, place, ours)
        self._epoll.register(ours, select.EPOLLIN)

    def _go(self, elapsed: float) -> None:
        self.settled = self._settling = False
        self._learner_rests = math.inf
        for host in self._hosts.values():
            host.resting = False
            self._send(host.role, "go", {"elapsed": elapsed})

    def _send(self, role: str, kind: str, content: State) -> None:
        host = self._hosts[role]
        if not host.alive:
            return
        host.line.setblocking(True)
        try:
            wire.send(host.line, kind, content)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead, and will be found so
        finally:
            host.line.setblocking(False)
        host.sent += 1
        self._board[8 * host.place] = host.sent

    def _poll(self, timeout: float) -> None:
        lines = {host.line.fileno(): host for host in self._hosts.values() if host.alive}
        pidfds = {host.pidfd: host for host in self._hosts.values() if host.pidfd >= 0}
        dead = []
        for fd, _ in self._epoll.poll(max(0.0, timeout)):
            if fd == self._server_line.fileno():
                self._hear_server()
            elif fd in lines:
                self._hear(lines[fd])
            elif fd in pidfds:
                dead.append(pidfds[fd])
        for host in dead:
            if host.alive:
                self._hear(host)  # what it said last
                self._bury(host)

    def _hear_server(self) -> None:
        message = wire.receive(self._server_line)
        if message is None:
            if self._server_dead:
                return
            self._server_dead = True
            self._epoll.unregister(self._server_line)
            trouble = (
                f"the process that hosts are forked from ended (code {self._server.process.wait()})"
            )
            self._troubles.append(_Trouble(time.monotonic(), "forkserver", trouble))
            return
        content = message.content
        if message.kind == "forked":
            host = self._hosts[content["role"]]
            host.pid = content["pid"]
            host.pidfd = os.pidfd_open(host.pid)
            self._epoll.register(host.pidfd, select.EPOLLIN)
        else:
            for host in self._hosts.values():
                if host.pid == content["pid"]:
                    host.code = content["code"]

    def _hear(self, host: _Host) -> None:
        while host.alive:
            try:
                message = wire.receive(host.line)
            except BlockingIOError:
                return
            finally:
                host.line.setblocking(False)
            if message is None:
                with contextlib.suppress(FileNotFoundError):
                    self._epoll.unregister(host.line)
                return
            self._heard(host, message.kind, message.content)

    def _heard(self, host: _Host, kind: str, content: State) -> None:
        match kind:
            case "ready":
                host.ready = True
            case "first":
                self.started = True
            case "status":
                self._note_status(host, content)
            case "updated":
                self._note_updates(content)
            case "evaluated":
                self._hear(self._hosts["learner"])  # it has said which versions were shown
                version = content["version"]
                steps = self._shown.get(version, 0)
                self._shown = {v: s for v, s in self._shown.items() if v > version}
                self._events.append(Evaluated(version, steps, content["episodes"]))
            case "settled":
                host.resting = True
                self._learner_rests = time.monotonic()
                for other in self._hosts.values():
                    if other.role not in ("learner", "evaluator"):
                        self._send(other.role, "pause", {})
            case "paused":
                host.resting = True
                self.settled = all(
                    h.resting for h in self._hosts.values() if h.role != "evaluator" and h.alive
                )
            case "state":
                host.answer = content
            case "failed" | "refused":
                self._troubles.append(
                    _Trouble(
                        content["at"],
                        host.role,
                        content["message"],
                        content["traceback"],
                        refused=kind == "refused",
                    )
                )

    def _note_status(self, host: _Host, status: State) -> None:
        host.status = status
        produced = status.get("produced", 0)
        if host.role.startswith("actor"):
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

    def _judge_clock(self) -> None:
        """The learner judges at its updates; where none comes, the time is up all the same."""
        limit = self._config.stop.seconds
        if limit is None or self._watch is None or self._stopped:
            return
        if self._watch.seconds >= limit and not self._settling and not self.settled:
            self._stopped = True
            self._events.append(Updated(Tally(), Due(stop=f"seconds >= {limit:g}")))

    def _bury(self, host: _Host) -> None:
        host.alive = False
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(host.line)
        self._epoll.unregister(host.pidfd)
        end = time.monotonic() + 1.0
        while host.code is None and not self._server_dead and time.monotonic() < end:
            if _readable(self._server_line.fileno(), 0.1):
                self._hear_server()
        if any(t.role == host.role for t in self._troubles):
            return
        how = f"ended with code {host.code}"
        if host.code is not None and host.code < 0:
            how = f"was killed by {signal.Signals(-host.code).name}"
        message = f"its process (pid {host.pid}) {how}{self._tail(host.role)}"
        cause = host.code != 0 and not self._server_dead  # hosts end with the server
        self._troubles.append(_Trouble(time.monotonic(), host.role, message, cause=cause))

    def _tail(self, role: str) -> str:
        """The last lines that a host wrote, as part of a sentence."""
        path = self._folder / "logs" / f"{role}.log"
        try:
            lines = path.read_text(errors="replace").strip().splitlines()[-20:]
        except OSError:
            return ""
        return f"; the end of {path}:\n" + "\n".join(lines) if lines else ""

    def _raise_trouble(self) -> None:
        """The root cause first: the earliest sign that is not likely a consequence."""
        if not self._troubles:
            return
        end = time.monotonic() + (0.0 if self._troubles[0].refused else CAUSE)
        while time.monotonic() < end:
            self._poll(CAUSE / 10)
        first = min(self._troubles, key=lambda t: (not t.cause, t.at))
        others = sorted({t.role for t in self._troubles} - {first.role})
        also = f" (then also: {', '.join(others)})" if others else ""
        if first.refused:
            raise Refusal(first.message)
        raise HostFailed(f"{first.role} failed: {first.message}{also}", first.trace)

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            self._poll(TURN)
            self._raise_trouble()
            if time.monotonic() > end:
                slow = [h.role for h in self._hosts.values() if not h.ready]
                raise Failure(
                    f"{', '.join(slow) or 'a host'} did not {what} within {seconds:g} s, so the "
                    f"run cannot go on. Look at {self._folder / 'logs'}."
                )

    def _wait_for(self, hosts: list[_Host], seconds: float) -> None:
        """Until these rest or are dead, or so many seconds."""
        end = time.monotonic() + seconds
        while any(not h.resting and h.alive for h in hosts) and time.monotonic() < end:
            self._poll(TURN)

    def _ask(self, hosts: list[_Host], seconds: float) -> dict[str, State]:
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

    def _stand_in(self, role: str) -> State:
        """What can be said of a role whose process is dead, for a checkpoint without its data."""
        kind, _, index = role.partition("-")
        rng = generator(self._config.seed, kind, int(index or 0))
        rng.bit_generator.advance(2**64)  # type: ignore[attr-defined]  # not the same draws again
        status = self._hosts[role].status
        state = {"produced": status.get("produced", 0), "rng": generator_state(rng)}
        if kind == "actor":
            return state | {"seq": 0}
        counts = {k: status.get(k, 0) for k in ("received", "filtered")}
        produced = [h.status.get("produced", 0) for h in self._hosts.values()
                    if h.role.startswith("actor")]  # fmt: skip
        none = {"lanes": None, "store": None, "episodes": np.empty(0, EPISODE)}
        return state | counts | none | {"produced": produced}

    def _write_table(self) -> None:
        """For `tianji ps`."""
        rows = [
            {
                "role": host.role,
                "pid": host.pid,
                "cores": list(host.placement.cores),
                "threads": host.placement.threads,
                "state": host.status.get("state", "starts") if host.alive else "dead",
                "steps_per_s": round(host.rate, 1) if host.role.startswith("actor") else None,
                "version": host.status.get("version"),
            }
            for host in self._hosts.values()
        ]
        me = os.getpid()
        about = {"launcher": me, "started": process_started(me), "hosts": rows}
        new = self._folder / f".{HOSTS}"
        with contextlib.suppress(OSError):  # a full disk: `ps` then shows an older table
            new.write_text(json.dumps(about))
            new.replace(self._folder / HOSTS)


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for shares in found for key in shares})
    return {key: math.fsum(s.get(key, 0.0) for s in found) / len(found) for key in keys}


def _readable(fd: int, seconds: float) -> bool:
    """Is there something to read, or is there within so many seconds? Of a pidfd: has it ended?"""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))
