"""A host: one process of a run, which holds a role and steps it until it is told to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import gymnasium  # noqa: F401  hosts are forked from a process that has it imported
import torch

import tianji.algorithms.dqn
import tianji.algorithms.ppo
import tianji.envs.gymnasium
import tianji.envs.toy  # noqa: F401
from tianji import actor, evaluator, trace
from tianji.actor import SIMULATE, Actor
from tianji.buffer import Buffer
from tianji.build import Topology, topology
from tianji.channel import Gone, Transport
from tianji.config import load_config
from tianji.driver import Forever
from tianji.engines import wire
from tianji.engines.forkserver import leave_signals_to_launcher
from tianji.engines.hosts import BEAT, SEED, STEP
from tianji.env import EnvSpec
from tianji.errors import Failure, Refusal
from tianji.evaluator import EVALUATED, Evaluator
from tianji.fault import Fault
from tianji.folder import ARRIVALS, NONFINITE, save_batch, skipped
from tianji.learner import UPDATE, Learner, NonFinite
from tianji.machine import keep_memory
from tianji.role import Did, Role, State
from tianji.rows import Appender
from tianji.server import Server
from tianji.spec import make_spec
from tianji.tally import Tally
from tianji.team import Alone, Lost, Shared, Team, Together
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.transports.split import Split
from tianji.types import sha256
from tianji.watch import Due, Watch

TELL = 0.25
"""seconds between two words of how a host is"""
TELL_UPDATES = 0.1
"""seconds between two words of what the learner did"""


def main(request: State, fds: list[int]) -> NoReturn:
    """Be the host of some roles, in a process that was just forked."""
    leave_signals_to_launcher()
    line = socket.socket(fileno=fds[0])
    code = 1
    try:
        _prepare(request)
        host = Host(request, line, fds[1:])
        host.run()
        code = 0
    except (Gone, Lost) as error:
        # A consequence: whoever went first has said why, or is seen to be dead.
        print(error, file=sys.stderr)
        code = 0
    except BrokenPipeError:
        code = 0  # likewise, of the launcher
    except BaseException as error:
        _tell_failure(error, request, line)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell_failure(error: BaseException, request: State, line: socket.socket) -> None:
    if isinstance(error, NonFinite):
        save_batch(Path(request["folder"]) / NONFINITE, error.batch)
    expected = isinstance(error, Failure | Refusal)
    exception = f"{type(error).__name__}: {error}"
    fault = Fault(
        role=request["role"],
        cause=str(error) if expected else exception,
        pid=os.getpid(),
        exception=exception,
        traceback="".join(traceback.format_exception(error)),
    )
    kind = "refused" if isinstance(error, Refusal) else "failed"
    about = {"fault": fault.tree(), "message": fault.cause, "expected": expected}
    with contextlib.suppress(OSError):
        wire.send(line, kind, about)


def _prepare(request: State) -> None:
    """What must be set before torch or an env starts a thread or a process."""
    os.setpgid(0, 0)
    log = Path(request["folder"]) / "logs" / f"{request['role']}.log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the launcher asks where it hangs
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    torch.set_num_threads(request["threads"])
    keep_memory()


class Host:
    """Steps its roles, answers the launcher, and says how it is from time to time."""

    def __init__(self, request: State, line: socket.socket, fds: list[int]) -> None:
        self._name: str = request["role"]
        self._line = line
        self._folder = Path(request["folder"])
        board = mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
        os.close(fds[0])
        self._board = memoryview(board).cast("q")
        """how many messages the launcher has sent to each host, as a look is cheaper than a read;
        and behind that, how far the host is"""
        self._place: int = request["place"]
        self._heard = 0
        # This host may be tied to fewer cores than the learner has.
        available = request["available"]
        config = load_config(request["config"], name=request["name"], available=available)
        self._transport = Shm.unpack(request["table"], fds[1:])
        self._transport.also(line.fileno())
        spec = make_spec(config, EnvSpec.of(request["env"]), request["group"])
        self._roles = _make(request, topology(config, spec=spec), self._transport)
        self._actor, self._buffer = _one(self._roles, Actor), _one(self._roles, Buffer)
        self._learner, self._server = _one(self._roles, Learner), _one(self._roles, Server)
        self._evaluator = _one(self._roles, Evaluator)
        self._driver = Forever(list(self._roles.values()), self._transport.wait)
        self._config = config
        self._judges: bool = request["judges"]
        """does its learner say when the run ends, is saved, is evaluated? Else the launcher does"""
        self._watch: Watch | None = None
        self._tally = Tally()
        self._resting = True
        self._settling = self._stopping = False
        self._told = self._told_updates = time.perf_counter()
        self._cpu = 0.0
        """seconds of CPU time before its first step"""
        self._going = self._loaded = self._simulated = self._disk_said = False
        self._shown = -1
        """the version that the launcher had shown to the evaluator last"""
        self._arrivals = Appender(self._folder / f"{request['prefix']}{ARRIVALS}")
        self._trace = trace.Ring(trace.path_of(self._folder, self._name))
        first = "" if self._learner is None else sha256(self._learner.networks())
        wire.send(line, "ready", {"role": self._name, "sha256": first})

    def run(self) -> None:
        try:
            self._run()
        except Exception:
            if self._tally.last is not None:  # updates that were made before it
                self._tell_updates(None, False, False)
            raise
        finally:
            with contextlib.suppress(OSError):
                self._trace.write(*self._driver.events())
            for role in self._roles.values():
                role.close()
        self._transport.close()

    def _run(self) -> None:
        board, place = self._board, self._place
        beats = 0
        while not self._stopping:
            if self._resting or board[place] > self._heard:
                self._listen()
                continue
            did = self._driver.step()
            beats += 1
            board[place + BEAT] = beats
            if did is UPDATE:
                self._after_update()
            elif did is SIMULATE:
                self._after_simulation()
            elif did is EVALUATED:
                self._after_evaluation()
            elif did is actor.REBUILD or did is evaluator.REBUILD:
                self._after_rebuild()
            if self._settling and self._settled():
                self._rest("settled", {})
            if self._driver.now - self._told > TELL:
                self._tell(did)
                self._driver.spent("tell")

    def _listen(self) -> None:
        """Hear the launcher; at rest, wait for it."""
        message = wire.receive(self._line)
        if message is None:
            self._stopping = True  # the launcher is gone
            return
        self._heard += 1
        content = message.content
        match message.kind:
            case "load":
                self._load(content)
            case "go":
                self._go(content)
            case "settle":
                self._settling = True
                if self._resting:
                    self._say("settled", {})
            case "pause":
                self._rest("paused", content)
            case "show":
                self._show()
            case "state":
                self._say("state", self._state() | content)
            case "active":
                if self._buffer is not None:
                    self._buffer.activate(content["actors"])
                if self._actor is not None:
                    self._actor.active = self._actor.index in content["actors"]
            case "renew":
                self._renew(content, message.fds)
            case "follow":
                if self._actor is not None and "seq" in content:
                    self._actor.follow(content["produced"], content["seq"])
            case "stop":
                self._stopping = True
        self._driver.spent("wait_checkpoint" if self._resting else "tell")

    def _show(self) -> None:
        """Let the evaluator play; a version that it has seen, it would not play again."""
        assert self._learner is not None
        if self._learner.version > self._shown:
            self._shown = self._learner.version
            self._say("shown", {"version": self._shown})
            self._learner.show_evaluator()

    def _load(self, states: State) -> None:
        for name, state in states["roles"].items():
            self._roles[name].load_state(state)
        if self._judging():
            self._watch = Watch(self._config)
            self._watch.load_state(states["recorder"])
        self._loaded = True

    def _judging(self) -> bool:
        return self._judges and self._learner is not None and self._learner.leads

    def _renew(self, content: State, fds: list[int]) -> None:
        """The role at the other end of a conduit died, and another one takes its place."""
        index = int(content["role"].partition("-")[2] or 0)
        about = {"role": content["role"], "renewals": content["renewals"]}
        if self._buffer is not None:
            about["produced"], about["seq"] = self._buffer.lost(index)
        if self._server is not None:
            self._server.lost(index)
        self._transport.replace(content["table"], fds)
        if self._server is not None:
            self._server.found(index)
        self._say("renewed", about)

    def _go(self, content: State) -> None:
        if self._learner is not None and not self._going and not self._loaded:
            if self._judging():
                self._watch = Watch(self._config, elapsed=content["elapsed"])
            self._learner.begin()
        if not self._going:
            self._driver.start()
            self._cpu = time.process_time()
        self._going = True
        self._resting = self._settling = False

    def _rest(self, word: str, content: State) -> None:
        self._resting, self._settling = True, False
        self._tell(Did(waits="checkpoint"))
        self._say(word, content)

    def _settled(self) -> bool:
        return self._learner is None or self._learner.can_rest

    def _after_simulation(self) -> None:
        role = self._actor
        assert role is not None
        self._board[self._place + STEP] = role.steps
        if not self._simulated:
            self._simulated = True
            self._board[self._place + SEED] = role.seed
            self._say("first", {})

    def _after_rebuild(self) -> None:
        for role in (self._actor, self._evaluator):
            if role is not None and role.fault is not None:
                fault, role.fault = role.fault, None
                about = dataclasses.replace(fault, role=self._name, pid=os.getpid())
                self._say("fault", about.tree())
        if self._actor is not None:
            self._board[self._place + STEP], self._board[self._place + SEED] = 0, self._actor.seed

    def _after_update(self) -> None:
        learner, watch = self._learner, self._watch
        assert learner is not None
        assert learner.report is not None
        if not learner.leads:
            self._resting = learner.agree(False)  # and says so when the launcher asks
            return
        due = Due() if watch is None else watch.note(learner.report)
        self._tally.add(learner.report)
        if learner.skipped is not None:
            self._say("fault", skipped(learner.skipped, self._folder, os.getpid()).tree())
        if due:
            self._tell_updates(due.stop, due.save, due.evaluate)
        if due.evaluate:  # after the launcher was told: the evaluator could be done before
            learner.show_evaluator()
        if not due and self._driver.now - self._told_updates > TELL_UPDATES:
            self._tell_updates(None, False, False)
        told_to = self._settling and not learner.alone
        if learner.agree(due.stop is not None or due.save or told_to):
            self._rest("settled", {})
        self._driver.spent("tell")

    def _tell_updates(self, stop: str | None, save: bool, evaluate: bool) -> None:
        about = {"tally": self._tally.state(), "stop": stop, "save": save, "evaluate": evaluate}
        self._say("updated", about)
        self._tally = Tally()
        self._told_updates = self._driver.now

    def _after_evaluation(self) -> None:
        role = self._evaluator
        assert role is not None
        self._say("evaluated", {"version": role.version, "episodes": role.result})

    def _tell(self, did: Did) -> None:
        """How this host is: where its time went, what it has counted."""
        about: State = {
            "seconds": dict(self._driver.seconds),
            "elapsed": self._driver.elapsed,
            "cpu": time.process_time() - self._cpu,
            "state": did.kind or f"waits for {did.waits}",
        }
        if self._actor is not None:
            about["produced"] = self._actor.produced
            about["version"] = self._actor.version
        if self._server is not None:
            about["version"] = self._server.version
        if (buffer := self._buffer) is not None:
            about |= {"received": buffer.received, "filling": buffer.filling}
            about |= {"produced": buffer.produced, "filtered": buffer.filtered}
            if arrived := buffer.arrivals().tobytes():
                self._keep(self._arrivals.path, lambda: self._arrivals.write(arrived))
        if self._learner is not None and self._tally.last is not None:
            self._tell_updates(None, False, False)
        self._keep(self._trace.path, lambda: self._trace.write(*self._driver.events()))
        self._say("status", about)
        self._told = self._driver.now

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        """Write something down; a disk that is full is said once and stops nothing."""
        try:
            write()
        except OSError as error:
            if not self._disk_said:
                self._disk_said = True
                words = f"{path} is not complete: {error}"
                self._say("fault", Fault(self._name, words, "disk", action="goes on").tree())

    def _state(self) -> State:
        state: State = {"roles": {name: role.state() for name, role in self._roles.items()}}
        if self._learner is not None:
            state["policy"] = self._learner.policy_state()
            state["sha256"] = sha256(self._learner.networks())
        return state

    def _say(self, kind: str, content: State) -> None:
        wire.send(self._line, kind, content)


T = TypeVar("T")


def _one(roles: Mapping[str, Role], kind: type[T]) -> T | None:
    """The role of this kind that a host has, if it has one."""
    return next((role for role in roles.values() if isinstance(role, kind)), None)


def _make(request: State, joined: Topology, shm: Shm) -> dict[str, Role]:
    """The roles of a host. In a worker they talk inside of it, and to others outside."""
    transport: Transport = shm
    if len(request["roles"]) > 1:
        transport = Split(Memory(), shm, request["table"])
    return {name: _make_role(name, request, joined, transport) for name in request["roles"]}


def _make_role(name: str, request: State, joined: Topology, transport: Transport) -> Role:
    kind, _, index = name.partition("-")
    match kind:
        case "actor":
            return joined.actor(int(index), transport, request["life"])
        case "server":
            return joined.server(transport, time.monotonic)
        case "buffer":
            return joined.buffer(transport)
        case "learner":
            return _make_learner(int(index or 0), request, joined, transport)
        case _:
            return joined.evaluator(transport)


def _make_learner(rank: int, request: State, joined: Topology, transport: Transport) -> Learner:
    spec, shared = joined.spec, None
    team: Team = Alone()
    if spec.learners > 1:
        team = Together(request["team"], rank, spec.learners, spec.device)
    if joined.shared is not None:
        (flat,) = transport.memory(joined.shared)["flat"]
        shared = Shared(flat, first=spec.group == 0)
    return joined.learner(transport, rank, team, shared)
