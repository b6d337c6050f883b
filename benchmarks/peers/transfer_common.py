"""What the two sides of a transfer share: the cell, forked senders, a common start, a result."""

import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Cell:
    """One measurement: what is sent, by how many, how fast, and where it ends."""

    size: int
    """bytes of a message"""
    actors: int
    """sending processes"""
    messages: int
    """at most so many, over all actors"""
    seconds: float
    """a sender stops after so many"""
    slots: int
    """places for messages of one actor: all together they are more than caches hold"""
    sample: float = 0.0
    """seconds slept before each message"""
    work: str = "none"
    """what tianji's receiver does with a message: none, copy, checksum (copy and CRC-32), verify"""

    @property
    def ahead(self) -> int:
        """Messages of one actor that may be on their way, for paths that want to know."""
        return min(self.slots, 64)

    @property
    def quota(self) -> int:
        """Messages of one actor."""
        return max(1, self.messages // self.actors)

    @property
    def total(self) -> int:
        return self.quota * self.actors


def cell_of_argv() -> Cell:
    return Cell(**json.loads(sys.argv[1]))


def message_of(cell: Cell) -> np.ndarray:
    return np.full(cell.size, 7, np.uint8)


def storage_of(cell: Cell) -> np.ndarray:
    """Where messages land: as many places as tianji's conduits have slots."""
    return np.ones((cell.slots * cell.actors, cell.size), np.uint8)


class Senders:
    """Forked processes that warm up, wait for a common start, send, and report what it took."""

    def __init__(self, cell: Cell, body: Callable[[int, Callable[[], None]], dict[str, Any]]):
        self._go, self._reports = os.pipe(), os.pipe()
        self._pids = []
        for index in range(cell.actors):
            pid = os.fork()
            if not pid:
                self._live(index, body)
            self._pids.append(pid)

    def start(self) -> float:
        """Let every sender go; the time."""
        begun = time.perf_counter()
        os.write(self._go[1], bytes(len(self._pids)))
        return begun

    def reports(self) -> list[dict[str, Any]]:
        """What each sender said when it had sent all; they have ended then."""
        found = []
        for _ in self._pids:
            (length,) = struct.unpack("<i", os.read(self._reports[0], 4))
            found.append(json.loads(os.read(self._reports[0], length)))
        for pid in self._pids:
            os.waitpid(pid, 0)
        return found

    def _live(self, index: int, body: Callable[[int, Callable[[], None]], dict[str, Any]]) -> None:
        status = 1
        try:
            report = json.dumps(body(index, lambda: os.read(self._go[0], 1))).encode()
            # One write of less than a page: reports do not mix.
            os.write(self._reports[1], struct.pack("<i", len(report)) + report)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def send_all(cell: Cell, send: Callable[[], None]) -> dict[str, Any]:
    """Send a quota, or as much of it as there is time for; messages, CPU time."""
    cpu, begun = time.process_time(), time.perf_counter()
    deadline, sent = begun + cell.seconds, 0
    for _ in range(cell.quota):
        if cell.sample:
            time.sleep(cell.sample)
        send()
        sent += 1
        if time.perf_counter() > deadline:
            break
    return {"sent": sent, "cpu": time.process_time() - cpu}


def result(messages: int, seconds: float, receiver_cpu: float, sender_cpu: float) -> None:
    """Print what a cell took, as the last line."""
    print(
        json.dumps(
            {
                "messages": messages,
                "seconds": seconds,
                "rate": messages / seconds,
                "receiver_us": receiver_cpu / messages * 1e6,
                "sender_us": sender_cpu / messages * 1e6,
            }
        )
    )
