"""Processes for the checkers of transports: each has a transport of its own, and is offered its
ends over a socket."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tianji.channel import End, Offer, Transport

MOST_OFFERED = 200
"""descriptors of one offer; the kernel takes 253"""


class Line:
    """A process's side of the socket that its offers come by."""

    def __init__(self, transport: Transport, ours: socket.socket) -> None:
        self._transport, self._socket = transport, ours
        self._offers: list[tuple[int, Offer]] = []

    @property
    def waiting(self) -> int:
        """The life of the next offer; 0: there is none."""
        if not self._offers and select.select([self._socket], [], [], 0)[0]:
            self._receive()
        return self._offers[0][0] if self._offers else 0

    def accept(self) -> None:
        """Wait for an offer and accept it."""
        if not self._offers:
            self._receive()
        self._transport.accept(self._offers.pop(0)[1])

    def _receive(self) -> None:
        text, fds, *_ = socket.recv_fds(self._socket, 1 << 16, MOST_OFFERED)
        life, kind, data = json.loads(text)
        self._offers.append((life, Offer(kind, data, tuple(fds))))


@dataclass(frozen=True)
class Part:
    """What one process does."""

    name: str
    ends: Sequence[End]
    work: Callable[[Transport, Line], None]
    dies: bool = False
    """Is it its part to be killed?"""
    halts: bool = False
    """Is it stopped at random moments, in the middle of what it does?"""


class Child:
    """A process that does a part, from its first offer on; `limit` seconds later it is ended."""

    def __init__(self, part: Part, make: Callable[[], Transport], limit: float) -> None:
        self.part = part
        self._report, write = os.pipe()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            # Python 3.12 warns where there are threads; the child takes no lock that they hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._report)
            _be(part, make, theirs, write, limit)
        os.close(write)
        theirs.close()

    def give(self, offer: Offer, life: int = 0) -> None:
        """Send an offer. The process may be dead already."""
        text = json.dumps([life, offer.transport, offer.data]).encode()
        try:
            socket.send_fds(self._line, [text], offer.fds)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            offer.close()

    @property
    def ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def end(self) -> str:
        """Kill it, if it has not ended; what it said: "done", what went wrong, or nothing."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        said = os.read(self._report, mmap.PAGESIZE).decode(errors="replace")
        os.close(self._report)
        self._line.close()
        return said


def _be(
    part: Part, make: Callable[[], Transport], ours: socket.socket, report: int, limit: float
) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit) + 10)  # should the process that waits for this one be killed
        transport = make()
        line = Line(transport, ours)
        line.accept()
        part.work(transport, line)
        transport.close()
        os.write(report, b"done")
    except BaseException as error:
        plain = str(error) if isinstance(error, AssertionError) else ""
        os.write(report, (plain or traceback.format_exc()).encode()[-mmap.PAGESIZE :])
    finally:
        os._exit(0)
