"""The launcher's hosts: processes that it starts, hears, watches and ends."""

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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tianji.actor import INACTIVE
from tianji.channel import Offer
from tianji.engines import wire
from tianji.engines.messages import Exited, Failed, Fork, RoleRequest, States, Status, Stop
from tianji.engines.server import ForkServer
from tianji.engines.spent import Spent
from tianji.fault import Fault
from tianji.folder import HOSTS
from tianji.machine import oom_kills, process_rss, process_started
from tianji.placement import Placement
from tianji.role_names import WORKER, RoleName

GRACE = 2.0
"""seconds that hosts have to end before they are killed"""
DUMP = 0.3
"""seconds that a host which hangs has to write its stack down"""
SILENT = 2.0
"""seconds after which a host that says nothing is known to be in the middle of one long step"""
TABLE = 1.0
"""seconds between two tables for `tianji ps`"""

BEAT, STEP, SEED = 1, 2, 3
"""words of a host on the board, behind the count of commands: its steps, those of its env since it
was seeded, and that seed"""


STARTS = Status(0.0, {}, 0.0, "starts")


@dataclass
class Host:
    """What is known of one process."""

    placement: Placement
    roles: tuple[RoleName, ...]
    place: int
    line: socket.socket
    life: int = 0
    """how often this role was restarted"""
    born: float = field(default_factory=time.monotonic)
    """when it was begun, by the clock"""
    pid: int = -1
    pidfd: int = -1
    ready: bool = False
    first: str = ""
    """the hash of the weights that its learner began with"""
    resting: bool = True
    alive: bool = True
    sent: int = 0
    status: Status = STARTS
    answer: States | None = None
    code: int | None = None
    rss: int = 0
    rate: float = 0.0
    counted: tuple[float, int] = (0.0, 0)
    beat: tuple[float, int] = (0.0, -1)
    """when it was last seen to go on, and how far it was"""
    longest: float = 0.0
    """seconds that it took at most from one step to the next, as far as was seen"""
    failure: Failed | None = None
    """what is known of why it ends, before it is seen to be dead"""
    spent: Spent = field(default_factory=Spent)
    """where its time went, as far as it has told"""
    went: float = math.inf
    """when it was last told to go on, by the clock"""

    @property
    def name(self) -> str:
        return self.placement.host

    @property
    def kind(self) -> str:
        """Of all its roles, or WORKER."""
        kinds = {role.kind for role in self.roles}
        return kinds.pop() if len(kinds) == 1 else WORKER

    @property
    def group(self) -> int:
        return self.roles[0].group or 0

    @property
    def acts(self) -> bool:
        """Does it make steps that are learnt from?"""
        return any(role.of.flow == "produced" for role in self.roles)

    @property
    def replaceable(self) -> bool:
        """Can it be restarted while all others go on?"""
        return all(role.of.replaceable for role in self.roles)

    @property
    def steps_envs(self) -> bool:
        return any(role.of.steps_envs for role in self.roles)

    @property
    def checkpointed(self) -> bool:
        """Is it part of what a resumed run goes on from?"""
        return any(role.of.checkpointed for role in self.roles)

    @property
    def beside(self) -> bool:
        """Does it work beside the loop, as no part of the run's future?"""
        return all(role.of.beside for role in self.roles)

    def silent(self, now: float) -> float:
        """Seconds since it said how it is, while it works: it is in the middle of one step."""
        if self.resting or not self.alive or not self.ready:
            return 0.0
        return max(0.0, now - max(self.spent.last.at, self.went))

    @property
    def leads(self) -> bool:
        """Does it hold the first learner of its group?"""
        return any(role.of.learns and role.index == 0 for role in self.roles)


class Heard(NamedTuple):
    """A message of a host."""

    host: Host
    message: Any
    """one of `messages`"""


class Died(NamedTuple):
    """A host has ended, or the process that they are forked from (None)."""

    host: Host | None
    fault: Fault

    @property
    def consequence(self) -> bool:
        """Is it more likely a consequence of something else?"""
        return self.host is not None and self.host.code == 0


class HostTable:
    """All processes of a run, apart from the launcher itself."""

    def __init__(self, server: ForkServer, folder: Path, most: int) -> None:
        self.by_name: dict[str, Host] = {}
        self.server_dead = False
        self._server, self._line = server, server.line
        self._folder = folder
        self._closing = contextlib.ExitStack()
        self._epoll = select.epoll()
        self._closing.callback(self._epoll.close)
        self._epoll.register(self._line, select.EPOLLIN)
        self._board_fd, self._board = self._make_board(most)
        self._events: list[Heard | Died] = []
        self._forked: deque[Host] = deque()
        """hosts whose processes have yet to be reported, in the order of their starts"""
        self._table_due = 0.0
        self._oom_kills = oom_kills()

    def start(
        self,
        placement: Placement,
        request: RoleRequest,
        offer: Offer,
        files: Sequence[int] = (),
        life: int = 0,
    ) -> None:
        """Start a host; what it says and how it ends comes from `poll`. The descriptors of the
        request's files, and those of the offer, are closed here once they are sent."""
        name = placement.host
        with contextlib.ExitStack() as closing:
            closing.callback(offer.close)
            for fd in files:
                closing.callback(os.close, fd)
            old = self.by_name.get(name)
            place = 8 * len(self.by_name) if old is None else old.place
            if old is not None:
                self._let_go(old)
            for word in range(8):
                self._board[place + word] = 0
            ours, theirs = wire.pair()
            closing.callback(theirs.close)
            fork = Fork(request, placement, offer, place, life)
            wire.send(self._line, fork, [theirs.fileno(), self._board_fd, *files, *offer.fds])
        ours.setblocking(False)
        host = Host(placement, request.graph.hosts[name], place, ours, life)
        self.by_name[name] = host
        self._forked.append(host)
        self._epoll.register(ours, select.EPOLLIN)

    def send(self, name: str, message: Any, fds: Sequence[int] = ()) -> None:
        """Say something to a host; descriptors that come with it stay open here."""
        host = self.by_name[name]
        if not host.alive:
            return
        host.line.setblocking(True)
        try:
            wire.send(host.line, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead, and will be found so
        finally:
            host.line.setblocking(False)
        host.sent += 1
        self._board[host.place] = host.sent

    def poll(self, timeout: float) -> list[Heard | Died]:
        """What happened, or happens within so many seconds; in the order of each host's own."""
        lines = {host.line.fileno(): host for host in self.by_name.values() if host.alive}
        pidfds = {host.pidfd: host for host in self.by_name.values() if host.pidfd >= 0}
        dead = []
        for fd, _ in self._epoll.poll(max(0.0, timeout)):
            if fd == self._line.fileno():
                self._hear_server()
            elif fd in lines:
                self._hear(lines[fd])
            elif fd in pidfds:
                dead.append(pidfds[fd])
        for host in dead:
            if host.alive:
                self._hear(host)  # what it said last
                self._bury(host)
        events, self._events = self._events, []
        return events

    def hear(self, name: str) -> list[Heard | Died]:
        """What one host has said by now."""
        self._hear(self.by_name[name])
        events, self._events = self._events, []
        return events

    def hanging(self, seconds: float | None) -> list[tuple[Host, float]]:
        """Hosts that should work and have not gone on for so many seconds, and for how many. None:
        30, or ten times what they took at most before."""
        now, found = time.monotonic(), []
        for host in self.by_name.values():
            beats = self._board[host.place + BEAT]
            since, before = host.beat
            if beats != before or host.resting or not host.alive:
                if before > 0 and not host.resting and beats != before:
                    host.longest = max(host.longest, now - since)
                host.beat = now, beats
            elif now - since > (max(30.0, 10 * host.longest) if seconds is None else seconds):
                found.append((host, now - since))
        return found

    def forgive(self) -> None:
        """What went by until now does not count as hanging."""
        for host in self.by_name.values():
            host.beat = time.monotonic(), -1

    def end(self, host: Host, cause: str) -> None:
        """Kill a host that hangs, once it has written its stack down, if it can."""
        path, stack = self._log(host.name), ""
        with contextlib.suppress(OSError):
            before = path.stat().st_size
            signal.pidfd_send_signal(host.pidfd, signal.SIGUSR2)
            time.sleep(DUMP)
            stack = path.read_bytes()[before:].decode(errors="replace")
        where = f"its stack is in {path}" if stack else "it could not say where: it is stopped"
        fault = self._fault(host, f"{cause}; {where}", stack)
        host.failure = Failed(fault, expected=False, refused=False)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)

    def kill(self) -> None:
        """End everything at once."""
        for host in self.by_name.values():
            if host.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Ask all hosts to end, then end them; nothing of them is left."""
        end = time.monotonic() + GRACE
        # Word of one that was just forked is not left to the next run's hosts.
        while any(host.pidfd < 0 for host in self.by_name.values()) and not self.server_dead:
            if not readable(self._line.fileno(), end - time.monotonic()):
                break
            self._hear_server()
        for host in self.by_name.values():
            with contextlib.suppress(OSError):
                self.send(host.name, Stop())
        end = time.monotonic() + GRACE
        for host in self.by_name.values():
            if host.pidfd >= 0:
                readable(host.pidfd, end - time.monotonic())
        for host in self.by_name.values():
            self._let_go(host)
        if self.by_name:
            (self._folder / HOSTS).unlink(missing_ok=True)
        self.by_name.clear()
        self._closing.close()

    def write_table(self) -> None:
        """For `tianji ps`, from time to time."""
        if (now := time.monotonic()) < self._table_due:
            return
        self._table_due = now + TABLE
        rows = []
        for host in self.by_name.values():
            host.rss = process_rss(host.pid) or host.rss
            rows.append(
                {
                    "role": host.name,
                    "pid": host.pid,
                    "life": host.life,
                    "cores": list(host.placement.cores),
                    "threads": host.placement.threads,
                    "state": _state(host),
                    "steps_per_s": round(host.rate, 1) if host.acts else None,
                    "version": host.status.version,
                }
            )
        me = os.getpid()
        about = {"launcher": me, "started": process_started(me), "hosts": rows}
        new = self._folder / f".{HOSTS}"
        with contextlib.suppress(OSError):  # a full disk: `ps` then shows an older table
            new.write_text(json.dumps(about))
            new.replace(self._folder / HOSTS)

    def table_now(self) -> None:
        self._table_due = 0.0
        self.write_table()

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

    def _hear_server(self) -> None:
        packet = wire.receive(self._line)
        if packet is None:
            if self.server_dead:
                return
            self.server_dead = True
            self._epoll.unregister(self._line)
            code = self._server.process.wait()
            words = f"the process that hosts are forked from ended (code {code})"
            self._events.append(
                Died(None, Fault("forkserver", words, pid=self._server.process.pid))
            )
            return
        message = packet.message()
        if isinstance(message, Exited):
            for host in self.by_name.values():
                if host.pid == message.pid:
                    host.code = message.code
            return
        host = self._forked.popleft()
        host.pid = message.pid
        (host.pidfd,) = packet.fds  # not opened here: it may have ended, and be gone, by now
        self._epoll.register(host.pidfd, select.EPOLLIN)

    def _hear(self, host: Host) -> None:
        while host.alive:
            try:
                packet = wire.receive(host.line)
            except BlockingIOError:
                return
            finally:
                host.line.setblocking(False)
            if packet is None:
                with contextlib.suppress(FileNotFoundError):
                    self._epoll.unregister(host.line)
                return
            self._events.append(Heard(host, packet.message()))

    def _bury(self, host: Host) -> None:
        host.alive = False
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(host.line)
        self._epoll.unregister(host.pidfd)
        end = time.monotonic() + 1.0
        while host.code is None and not self.server_dead and time.monotonic() < end:
            if readable(self._line.fileno(), 0.1):
                self._hear_server()
        _kill_group(host.pid)  # processes that an env has left
        fault = self._death(host) if host.failure is None else host.failure.fault
        self._events.append(Died(host, fault))

    def _death(self, host: Host) -> Fault:
        """Why a host ended that said nothing."""
        how, number = f"ended with code {host.code}", None
        if host.code is not None and host.code < 0:
            number = signal.Signals(-host.code).name
            how = f"was killed by {number}"
        before, self._oom_kills = self._oom_kills, oom_kills()
        oom = number == "SIGKILL" and self._oom_kills > before
        if oom:
            how += (
                f", for lack of memory: it had {host.rss / 2**20:.0f} MiB, and the control group "
                f"of this run has no more. Lower scale.envs_per_actor or algorithm.capacity"
            )
        cause = f"its process (pid {host.pid}) {how}"
        return self._fault(host, cause, self._tail(host.name), number, oom)

    def _fault(
        self, host: Host, cause: str, trace: str = "", number: str | None = None, oom: bool = False
    ) -> Fault:
        words = self._board[host.place : host.place + 8].tolist()
        env = host.acts and words[STEP] > 0
        return Fault(
            role=host.name,
            cause=cause,
            pid=host.pid,
            signal=number,
            oom=oom,
            traceback=trace,
            seed=words[SEED] if env else None,
            step=words[STEP] if env else None,
        )

    def _log(self, name: str) -> Path:
        return log_of(self._folder, name)

    def _tail(self, name: str) -> str:
        """The last lines that a host wrote."""
        try:
            lines = self._log(name).read_text(errors="replace").strip().splitlines()[-40:]
        except OSError:
            return ""
        return "\n".join(lines)

    def _let_go(self, host: Host) -> None:
        """End a host, if it has not ended, and everything that it had."""
        if host.pidfd >= 0:
            if not readable(host.pidfd, 0):
                signal.pidfd_send_signal(host.pidfd, signal.SIGKILL)
                readable(host.pidfd, GRACE)
            for fd in (host.pidfd, host.line.fileno()):
                with contextlib.suppress(FileNotFoundError):
                    self._epoll.unregister(fd)
            os.close(host.pidfd)
            host.pidfd = -1
            if host.alive:
                _kill_group(host.pid)
        host.line.close()


def log_of(folder: Path, host: str) -> Path:
    """What a host of a run writes to."""
    return folder / "logs" / f"{host}.log"


def _state(host: Host) -> str:
    """How it is, in a word or two."""
    if not host.alive:
        return "dead"
    state = host.status.state
    return "inactive" if state == f"waits for {INACTIVE.waits}" else state


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def readable(fd: int, seconds: float) -> bool:
    """Is there something to read, or is there within so many seconds? Of a pidfd: has it ended?"""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))
