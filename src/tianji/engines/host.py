"""A host: one process of a run, which holds roles and steps them until it is asked to stop."""

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
from typing import Any, NoReturn

import gymnasium  # noqa: F401  hosts are forked from a process that has it imported
import torch

import tianji.algorithms.dqn
import tianji.algorithms.ppo
import tianji.envs.gymnasium
import tianji.envs.toy
import tianji.transports.shm  # noqa: F401
from tianji import trace
from tianji.actor import SIMULATE, Actor
from tianji.buffer import Buffer
from tianji.build import Assembly, makes
from tianji.channel import Gone, Transport, make_transport
from tianji.config import load_config
from tianji.driver import Forever
from tianji.engines import messages, wire
from tianji.engines.engine import Evaluated, Faulted, Started, Updated
from tianji.engines.event_reporter import EventReporter, all_of, one
from tianji.engines.forkserver import leave_signals_to_launcher
from tianji.engines.hosts import BEAT, SEED, STEP
from tianji.errors import Failure, Refusal
from tianji.fault import Fault
from tianji.folder import batch_arrays
from tianji.learner import UPDATE, Learner, NonFinite
from tianji.machine import keep_memory
from tianji.role import Did, Role
from tianji.role_names import RoleName
from tianji.rows import Appender
from tianji.server import Server
from tianji.tally import Tally
from tianji.team import Alone, Lost, Shared, Team, Together
from tianji.transports.memory import Memory
from tianji.transports.split import Split
from tianji.types import sha256
from tianji.watch import Due, Watch

TELL = 0.25
"""seconds between two words of how a host is"""
TELL_UPDATES = 0.1
"""seconds between two words of what the learner did"""


def main(packet: wire.Packet) -> NoReturn:
    """Be the host that is asked for, in a process that was just forked."""
    leave_signals_to_launcher()
    fork: messages.Fork = packet.message()
    line, fds = socket.socket(fileno=packet.fds[0]), packet.fds[1:]
    code = 1
    try:
        files = dict(zip(fork.request.files, fds[1:], strict=False))
        _prepare(fork, files)
        host = Host(fork, line, fds[0], files, fds[1 + len(files) :])
        host.run()
        code = 0
    except (Gone, Lost) as error:
        # A consequence: whoever went first has said why, or is seen to be dead.
        print(error, file=sys.stderr)
        code = 0
    except BrokenPipeError:
        code = 0  # likewise, of the launcher
    except BaseException as error:
        with contextlib.suppress(OSError):
            wire.send(line, _failed(error, fork.request.host))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _failed(error: BaseException, host: str) -> messages.Failed:
    expected = isinstance(error, Failure | Refusal)
    exception = f"{type(error).__name__}: {error}"
    fault = Fault(
        role=host,
        cause=str(error) if expected else exception,
        pid=os.getpid(),
        exception=exception,
        traceback="".join(traceback.format_exception(error)),
    )
    batch = batch_arrays(error.batch) if isinstance(error, NonFinite) else {}
    return messages.Failed(fault, expected, isinstance(error, Refusal), batch)


def _prepare(fork: messages.Fork, files: Mapping[str, int]) -> None:
    """What must be set before torch or an env starts a thread or a process."""
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(files["log"], stream)
    os.close(files["log"])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the launcher asks where it hangs
    if fork.placement.cores:
        os.sched_setaffinity(0, fork.placement.cores)
    torch.set_num_threads(fork.placement.threads)
    keep_memory()


class Host:
    """Steps its roles, answers the launcher, and says how it is from time to time."""

    def __init__(
        self,
        fork: messages.Fork,
        line: socket.socket,
        board: int,
        files: Mapping[str, int],
        ends: list[int],
    ) -> None:
        """`board` and `files` are open descriptors, `ends` those of the offer."""
        request = fork.request
        self._name = request.host
        self._line = line
        words = mmap.mmap(board, os.fstat(board).st_size)
        os.close(board)
        self._board = memoryview(words).cast("q")
        """how many messages the launcher has sent to each host, as a look is cheaper than a read;
        and behind that, how far the host is"""
        self._place = fork.place
        self._heard = 0
        # This host may be tied to fewer cores than the learner has.
        config = load_config(request.config, name=request.name, available=request.available)
        self._transport = make_transport(fork.offer.transport)
        self._transport.accept(dataclasses.replace(fork.offer, fds=tuple(ends)))
        self._transport.also(line.fileno())
        parts = Assembly(
            config,
            request.setup,
            request.graph,
            makes(config),
            devices=fork.placement.devices,
            clock=time.monotonic,
        )
        self._roles = _make(fork, parts, self._transport, files)
        roles = self._roles.values()
        self._actors, self._buffer = all_of(roles, Actor), one(roles, Buffer)
        self._learner, self._server = one(roles, Learner), one(roles, Server)
        self._driver = Forever(list(roles), self._transport.wait)
        self._reporter = EventReporter(roles, self._name)
        self._config = config
        self._judges = request.judges and self._learner is not None and self._learner.leads
        self._tally = Tally()
        self._resting = True
        self._settling = self._stopping = False
        self._told = self._told_updates = time.perf_counter()
        self._cpu = 0.0
        """seconds of CPU time before its first step"""
        self._going = self._loaded = self._disk_said = False
        self._shown = -1
        """the version that the launcher had shown to the evaluator last"""
        paths = {what: Path(path) for what, path in request.files.items()}
        self._arrivals = (
            Appender(paths["arrivals"], files["arrivals"]) if "arrivals" in files else None
        )
        self._trace = trace.Ring(paths["trace"], fd=files["trace"]) if "trace" in files else None
        self._say(messages.Ready("" if self._learner is None else sha256(self._learner.networks())))

    def run(self) -> None:
        try:
            self._run()
        except Exception:
            if self._tally.last is not None:  # updates that were made before it
                self._tell_updates(Due())
            raise
        finally:
            with contextlib.suppress(OSError):
                self._write_trace()
            for role in self._roles.values():
                role.close()
        self._transport.close()

    def _run(self) -> None:
        board, place, heeded = self._board, self._place, self._reporter.heeded
        beats = 0
        while not self._stopping:
            if self._resting or board[place] > self._heard:
                self._listen()
                continue
            did = self._driver.step()
            beats += 1
            board[place + BEAT] = beats
            if did is SIMULATE:
                board[place + STEP] = self._actors[0].steps
            if did in heeded:
                self._report(did)
            if self._settling and (self._learner is None or self._learner.can_rest):
                self._rest()
                self._say(messages.Settled())
            if self._driver.now - self._told > TELL:
                self._tell(did)
                self._driver.spent("tell")

    def _listen(self) -> None:
        """Hear the launcher; at rest, wait for it."""
        packet = wire.receive(self._line)
        if packet is None:
            self._stopping = True  # the launcher is gone
            return
        self._heard += 1
        match packet.message():
            case messages.Load() as message:
                self._load(message)
            case messages.Go(elapsed):
                self._go(elapsed)
            case messages.Settle():
                self._settling = True
                if self._resting:
                    self._say(messages.Settled())
            case messages.Pause(goes):
                self._rest()
                self._say(messages.Paused(goes))
            case messages.Show():
                self._show()
            case messages.Ask(number):
                self._say(self._states(number))
            case messages.Activate(actors):
                if self._buffer is not None:
                    self._buffer.activate(actors)
                for actor in self._actors:
                    actor.active = actor.index in actors
            case messages.Renew() as message:
                self._renew(message, packet.fds)
            case messages.Follow(made):
                for name, role in self._roles.items():
                    if isinstance(role, Actor) and str(name) in made:
                        role.follow(made[str(name)].produced, made[str(name)].seq)
            case messages.Stop():
                self._stopping = True
        self._driver.spent("wait_checkpoint" if self._resting else "tell")

    def _show(self) -> None:
        """Let the evaluator play; a version that it has seen, it would not play again."""
        assert self._learner is not None
        if self._learner.version > self._shown:
            self._shown = self._learner.version
            self._say(messages.Shown(self._shown))
            self._learner.show_evaluator()

    def _load(self, message: messages.Load) -> None:
        for name, role in self._roles.items():
            if str(name) in message.roles:
                role.load_state(message.roles[str(name)])
        if self._judges:
            self._reporter.watch = Watch(self._config)
            self._reporter.watch.load_state(message.recorder)
        self._loaded = True
        self._say(messages.Ready())

    def _renew(self, message: messages.Renew, fds: list[int]) -> None:
        """The role at the other end of conduits died, and another process takes its place."""
        actors, made = [name for name in message.roles if name.kind == "actor"], {}
        for name in actors:
            if self._buffer is not None:
                made[str(name)] = messages.Made(*self._buffer.lost(name.index))
            if self._server is not None:
                self._server.lost(name.index)
        self._transport.accept(dataclasses.replace(message.offer, fds=tuple(fds)))
        for name in actors:
            if self._server is not None:
                self._server.found(name.index)
        self._say(messages.Renewed(message.host, message.number, made))

    def _go(self, elapsed: float) -> None:
        if self._learner is not None and not self._going and not self._loaded:
            if self._judges:
                self._reporter.watch = Watch(self._config, elapsed=elapsed)
            self._learner.begin()
        if not self._going:
            self._driver.start()
            self._cpu = time.process_time()
        self._going = True
        self._resting = self._settling = False

    def _rest(self) -> None:
        self._resting, self._settling = True, False
        self._tell(Did(waits="checkpoint"))

    def _report(self, did: Did) -> None:
        """Say what a step means to the run; what updates mean, together with those before."""
        due = Due()
        for event in self._reporter.after(did):
            if isinstance(event, Updated):
                assert not isinstance(event.report, Tally)
                self._tally.add(event.report)
                due = event.due
            else:
                assert isinstance(event, Started | Evaluated | Faulted)
                if self._actors and did is not UPDATE:
                    self._board[self._place + STEP] = 0
                    self._board[self._place + SEED] = self._actors[0].seed
                self._say(event)
        if did is UPDATE:
            self._after_update(due)

    def _after_update(self, due: Due) -> None:
        learner = self._learner
        assert learner is not None
        if not learner.leads:
            self._resting = learner.agree(False)  # and says so when the launcher asks
            return
        if due or self._driver.now - self._told_updates > TELL_UPDATES:
            self._tell_updates(due)
        if due.evaluate:  # after the launcher was told: the evaluator could be done before
            learner.show_evaluator()
        told_to = self._settling and not learner.alone
        if learner.agree(due.stop is not None or due.save or told_to):
            self._rest()
            self._say(messages.Settled())
        self._driver.spent("tell")

    def _tell_updates(self, due: Due) -> None:
        self._say(messages.Learnt(self._tally.state(), due))
        self._tally = Tally()
        self._told_updates = self._driver.now

    def _tell(self, did: Did) -> None:
        """How this host is: where its time went, what it has counted."""
        counted: dict[str, Any] = {}
        if self._actors:
            counted["produced"] = sum(actor.produced for actor in self._actors)
            counted["version"] = min(actor.version for actor in self._actors)
        if self._server is not None:
            counted["version"] = self._server.version
        if (buffer := self._buffer) is not None:
            counted |= {"received": buffer.received, "filling": buffer.filling}
            counted |= {"produced": buffer.produced, "filtered": buffer.filtered}
            arrived, kept = buffer.arrivals().tobytes(), self._arrivals
            if arrived and kept is not None:
                self._keep(kept.path, lambda: kept.write(arrived))
        if self._learner is not None and self._tally.last is not None:
            self._tell_updates(Due())
        if self._trace is not None:
            self._keep(self._trace.path, self._write_trace)
        spent, cpu = dict(self._driver.seconds), time.process_time() - self._cpu
        state = did.kind or f"waits for {did.waits}"
        self._say(messages.Status(self._driver.elapsed, spent, cpu, state, **counted))
        self._told = self._driver.now

    def _write_trace(self) -> None:
        if self._trace is not None:
            self._trace.write(*self._driver.events())

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        """Write something down; a disk that is full is said once and stops nothing."""
        try:
            write()
        except OSError as error:
            if not self._disk_said:
                self._disk_said = True
                words = f"{path} is not complete: {error}"
                self._say(Faulted(Fault(self._name, words, "disk", action="goes on")))

    def _states(self, number: int) -> messages.States:
        states = {str(name): role.state() for name, role in self._roles.items()}
        if self._learner is None:
            return messages.States(number, states)
        policy, networks = self._learner.policy_state(), self._learner.networks()
        return messages.States(number, states, policy, sha256(networks))

    def _say(self, message: Any) -> None:
        wire.send(self._line, message)


def _make(
    fork: messages.Fork, assembly: Assembly, outer: Transport, files: Mapping[str, int]
) -> dict[RoleName, Role]:
    """The roles of a host: memory joins them inside of it, the outer transport to all others."""
    name, graph = fork.request.host, assembly.graph
    transport: Transport = outer
    if inside := graph.inside(name):
        transport = Split(Memory(), outer, inside)
    made: dict[RoleName, Role] = {}
    for role in graph.hosts[name]:
        team: Team = Alone()
        if role.of.learns and assembly.spec.learners > 1:
            spec = assembly.spec
            team = Together(files["team"], role.index, spec.learners, assembly.device(role))
        shared = None
        for joint in graph.read("shared", role):
            (flat,) = transport.memory(joint.conduit)["flat"]
            shared = Shared(flat, first=assembly.spec.group == 0)
        made[role] = assembly.role(role, transport, fork.life, team, shared)
    return made
