"""Does a transport go on where a process dies and another one takes its end over?"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from tianji.channel import Conduit, End, Gone, Side, Transport
from tianji.testing.crossing import Crossing, Part, forked
from tianji.testing.items import (
    LAYOUT,
    SLOTS,
    content,
    dawdle,
    fill,
    intact,
    shared,
)
from tianji.types import Array

LIVES = 30
"""processes that hold an end of a conduit, one after the other"""


class Renewing(Crossing, Protocol):
    """What a transport has where a process that took a dead one's place can go on with its end."""

    def renew(self, name: str) -> None:
        """A process that held an end of this conduit is dead: make what both ends need anew, in
        the process that the others are forked from."""

    def pack(self, ends: Iterable[End]) -> tuple[Mapping[str, Any], list[int]]:
        """What the process at the other end needs of it: a table, as JSON can hold it, and
        descriptors, which are sent to it."""

    def replace(self, table: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Go on with what was packed, there. A receiver keeps what was pushed, and what was not it
        grants to the new sender, in the same order; a sender forgets what it was granted."""

    def let_go(self, name: str) -> None:
        """The new process is forked and the other one was told: give up what belongs to them."""


def check_renewal(make: Callable[[], Transport], rng: np.random.Generator, deadline: float) -> None:
    """Ends whose processes are killed and followed by others, where a transport provides for it."""
    if _renews(make):
        for reclaims in (False, True):
            _check_new_senders(make, reclaims, rng, deadline)
        _check_new_receivers(make, rng, deadline)


def _renews(make: Callable[[], Transport]) -> bool:
    transport = make()
    transport.close()
    return hasattr(transport, "renew")


def _check_new_senders(
    make: Callable[[], Transport], reclaims: bool, rng: np.random.Generator, limit: float
) -> None:
    """One sender after the other is killed, until enough items have arrived; the receiver lets the
    next one fill what was granted to the dead one, or takes it back and grants it anew."""
    transport, conduit = cast(Renewing, make()), Conduit("check-renewal", "lane", LAYOUT, SLOTS)
    transport.open(conduit)
    items = 10 * LIVES
    begun, done = shared(LIVES + 1), shared(100_000)
    """items that each life has begun, and the life that pushed each item"""
    slow = rng.spawn(1)[0]

    def send(life: int) -> None:
        outbox = transport.outbox(conduit)
        while True:
            while not (granted := outbox.granted()):
                transport.wait(0.01)
            slot = granted[0]
            assert done[slot.update] == 0, (
                f"item {slot.update} was pushed by a sender that is dead, and is granted once more"
            )
            begun[life] += 1
            fill(slot, life, slot.update)
            try:
                outbox.push(slot)
            except Gone:
                return  # the receiver has all that it wants
            done[slot.update] = life

    def receive(line: socket.socket) -> None:
        inbox, granted, probed, newest = transport.inbox(conduit), 0, 0, 1
        while probed < items or newest < LIVES:
            dawdle(slow)
            transport.wait(0.0)
            while inbox.ended and newest < LIVES and not _told(line):
                time.sleep(0.001)  # with what was pushed and not probed yet
            if _told(line):
                newest += 1
                if reclaims:
                    numbers = inbox.reclaim()
                    first = granted - len(numbers)
                    assert numbers == [(update, 0) for update in range(first, granted)], (
                        f"grants {numbers} were never pushed, and the last one was {granted - 1}"
                    )
                    granted = first
                _take_over(transport, line)
            while inbox.grant(granted):
                granted += 1
            assert granted - probed == SLOTS or inbox.ended, "a slot was lost with a sender"
            if (slot := inbox.probe()) is None:
                transport.wait(0.002)
                continue
            life = int(slot.leaf("head")[0])
            assert done[probed] in (0, life), "what was pushed must outlive its sender"
            intact(slot, life, probed)
            assert slot.index == probed % SLOTS, (
                f"slot {slot.index} came where {probed % SLOTS} was due: slots that are granted "
                "again must come in the same order, as replay is a ring of them"
            )
            inbox.release(slot)
            probed += 1

    _play_lives(transport, conduit, ("send", send), ("receive", receive), begun, rng, limit)


def _check_new_receivers(
    make: Callable[[], Transport], rng: np.random.Generator, limit: float
) -> None:
    """One receiver after the other is killed; the sender goes on with the next one's grants, and
    sees none that a dead one gave."""
    transport, conduit = cast(Renewing, make()), Conduit("check-heirs", "lane", LAYOUT, SLOTS)
    transport.open(conduit)
    begun = shared(LIVES + 1)
    """items that each life has received"""
    slow = rng.spawn(1)[0]

    def receive(life: int) -> None:
        inbox, granted, probed = transport.inbox(conduit), 0, 0
        while True:
            while inbox.grant(1_000_000 * life + granted):
                granted += 1
            assert granted - probed == SLOTS or inbox.ended, "a slot was lost with a receiver"
            if (slot := inbox.probe()) is None:
                transport.wait(0.002)
                continue
            number = 1_000_000 * life + probed
            assert slot.update == number, f"item {slot.update} came where {number} was due"
            assert slot.leaf("head").tolist() == [0, number], (
                "what a dead receiver had granted came"
            )
            assert (slot.leaf("body") == content(0, number)).all(), "an item came that is not whole"
            probed += 1
            begun[life] += 1
            inbox.release(slot)

    def send(line: socket.socket) -> None:
        outbox, newest = transport.outbox(conduit), 1
        while newest < LIVES or begun[LIVES] < 10:
            if _told(line):
                newest += 1
                _take_over(transport, line)
            if not (granted := outbox.granted()):
                transport.wait(0.002)
                continue
            slot = granted[0]
            assert slot.update // 1_000_000 == newest, "a grant of a dead receiver was offered"
            dawdle(slow)
            fill(slot, 0, slot.update)
            try:
                outbox.push(slot)
            except Gone:
                while not _told(line):
                    time.sleep(0.001)

    _play_lives(transport, conduit, ("receive", receive), ("send", send), begun, rng, limit)


def _play_lives(
    transport: Renewing,
    conduit: Conduit,
    mortal: tuple[Side, Callable[[int], None]],
    other: tuple[Side, Callable[[socket.socket], None]],
    begun: Array,
    rng: np.random.Generator,
    limit: float,
) -> None:
    """One end in a process that lasts, the other in processes that are killed, each at a random
    moment after it has begun, and followed by the next."""
    name, end = conduit.name, time.monotonic() + limit
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lasting = Part(f"the one that lasts ({other[0]})", [End(name, other[0])],
                    partial(other[1], theirs))  # fmt: skip
    failed, running = [], dict[int, tuple[str, int]]()

    def fork(life: int) -> int:
        part = Part(f"life {life}", [End(name, mortal[0])], partial(mortal[1], life))
        pid, report = forked(transport, part, limit)
        running[pid] = part.name, report
        return pid

    def reap(pid: int, kill: bool) -> str:
        if kill:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        part, report = running.pop(pid)
        said = os.read(report, mmap.PAGESIZE).decode(errors="replace")
        os.close(report)
        if said not in ("", "done"):
            failed.append(f"{part}: {said}")
        return said

    try:
        keeper, report = forked(transport, lasting, limit)
        running[keeper] = lasting.name, report
        pid = fork(1)
        transport.keep([])
        for life in range(2, LIVES + 1):
            while begun[life - 1] == 0 and not _over(running) and time.monotonic() < end:
                time.sleep(0.0005)
            time.sleep(10 ** rng.uniform(-4.5, -2))
            reap(pid, kill=True)
            if failed or _over(running) or time.monotonic() > end:
                break
            transport.renew(name)
            table, fds = transport.pack([End(name, other[0])])
            first = rng.random() < 0.5
            if first:
                pid = fork(life)
            socket.send_fds(mine, [json.dumps(table).encode()], fds)
            if not first:
                time.sleep(10 ** rng.uniform(-4.5, -2))
                pid = fork(life)
            transport.let_go(name)
        while keeper in running and not failed and time.monotonic() < end:
            if os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                reap(keeper, kill=False)
            time.sleep(0.001)
        late = keeper in running and not failed
    finally:
        for process in list(running):
            reap(process, kill=True)
        mine.close()
        theirs.close()
        transport.close()
    assert not failed, "\n".join(failed)
    assert not late, (
        f"not finished within {limit:.0f} seconds after {LIVES - 1} of its {mortal[0]} ends were "
        "killed and renewed: an item, a grant or a slot was lost with one of them"
    )


def _over(running: Mapping[int, tuple[str, int]]) -> bool:
    """Has one of these processes ended?"""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return any(os.waitid(os.P_PID, pid, options) is not None for pid in running)


def _told(line: socket.socket) -> bool:
    """Is there word of a new process at the other end?"""
    return bool(select.select([line], [], [], 0)[0])


def _take_over(transport: Renewing, line: socket.socket) -> None:
    table, fds, _, _ = socket.recv_fds(line, mmap.PAGESIZE, 20)
    transport.replace(json.loads(table), fds)
