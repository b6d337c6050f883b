"""Does a transport keep what its template promises?"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from tianji.channel import Channel, Gone, Inbox, Outbox, Slot, Transport
from tianji.types import Array, leaf

SLOTS = 3
LAYOUT = {"head": leaf((2,), np.int64), "body": leaf((512,), np.int64)}
TURNS = 200
"""turns for each item, after which a transport in one process is taken to have stalled"""
LIVES = 30
"""processes that hold an end of a channel, one after the other"""
FOR_EVER = 3600.0
"""seconds to sleep where only a wake-up that never came would let them pass"""
SIZES = {1_000: 2_000, 100_000: 800, 2_000_000: 60}
"""sizes of a newest-only conduit, and how many versions each receiver must read"""


class Crossing(Transport, Protocol):
    """What a transport between processes has beside the template, so that it can be checked."""

    def open(self, channel: Channel) -> None:
        """Make what the channel needs, in the process that the others are forked from."""

    def open_newest(self, name: str, size: int, receivers: int) -> None:
        """Make what a newest-only conduit with this many receivers needs, there as well."""

    def keep(self, ends: Iterable[tuple[str, str]]) -> None:
        """Called first in every process after the fork: only these ends will be made here. An end
        is (conduit, "send" | "receive" | "publish" | "subscribe-0" | "subscribe-1" | ...). What
        belongs to the others is given up, so that they are noticed when they die."""


class Renewing(Crossing, Protocol):
    """What a transport has where a process that took a dead one's place can go on with its end."""

    def renew(self, name: str) -> None:
        """A process that held an end of this channel is dead: make what both ends need anew, in
        the process that the others are forked from."""

    def pack(self, ends: Iterable[tuple[str, str]]) -> tuple[Mapping[str, Any], list[int]]:
        """What the process at the other end needs of it: a table, as JSON can hold it, and
        descriptors, which are sent to it."""

    def replace(self, table: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Go on with what was packed, there. A receiver keeps what was pushed, and what was not it
        grants to the new sender, in the same order; a sender forgets what it was granted."""

    def let_go(self, name: str) -> None:
        """The new process is forked and the other one was told: give up what belongs to them."""


def check_transport(
    make: Callable[[], Transport],
    items: int = 400,
    seed: int = 0,
    processes: bool = False,
    deadline: float = 60.0,
) -> None:
    """Does a transport keep its word? An AssertionError says which one it broke.

    In one process, for 1, 4 and 8 senders with `items` each, in random order: order, no loss, no
    duplicate, no corruption, refusal when full, tags and releases that the sender can see, a state
    from which another transport goes on, slots that are reclaimed; and only the newest, for each
    receiver, where only the newest is promised. What was granted or pushed in this process must be
    seen at once. Receivers of a newest-only conduit are made before its sender.

    With `processes` the same between processes, with pauses at random moments: sleepers are woken,
    a death is noticed by the other side and costs nothing that was pushed, and no version is read
    half. Such a transport has three more methods, those of `Crossing`: the checker makes a
    transport, calls `open` and `open_newest`, forks, and then each process calls `keep` with the
    ends that are its own, makes them, uses them, and calls `close`. The process that forked keeps
    none. No process is left, and none lasts longer than `deadline` seconds.

    A transport that has a method `renew` has all those of `Renewing`, and is also checked for what
    they promise: ends whose processes are killed at random moments, again and again, are taken over
    by new ones, no item is lost, doubled or moved, and slots come in the same order as ever.
    """
    rng = np.random.default_rng(seed)
    for senders in (1, 4, 8):
        _check_channels(make, senders, items, rng)
    _check_reclaim(make)
    _check_newest(make)
    if processes:
        _check_methods(make)
        for senders in (1, 4, 8):
            _check_senders(make, senders, items, rng, deadline)
        _check_wake(make, rng, deadline)
        for moment in (None, 0.002, 0.02):
            _check_sender_death(make, moment, rng, deadline)
        _check_receiver_death(make, rng, deadline)
        for size, reads in SIZES.items():
            _check_snapshots(make, size, reads, rng, deadline)
        for moment in (0.01, 0.015, 0.02):
            _check_publisher_death(make, moment, rng, deadline)
        if _renews(make):
            for reclaims in (False, True):
                _check_new_senders(make, reclaims, rng, deadline)
            _check_new_receivers(make, rng, deadline)


def _check_channels(
    make: Callable[[], Transport], senders: int, items: int, rng: np.random.Generator
) -> None:
    """Random interleavings of granting, filling, pushing, probing, releasing and restarting."""
    lanes = [_Lane(i) for i in range(senders)]
    transport = make()
    try:
        for lane in lanes:
            lane.join(transport)
        for _ in range(TURNS * items * senders):
            if all(lane.released == items for lane in lanes):
                return
            lane = lanes[rng.integers(senders)]
            action = rng.integers(4)
            if action == 0 and lane.granted < items:
                lane.grant()
            elif action == 1:
                lane.push()
            elif action == 2:
                lane.probe()
            elif action == 3:
                lane.release(rng)
            if rng.random() < 0.005:
                old, transport = transport, make()
                for lane in lanes:
                    lane.move(old, transport)
                old.close()
        raise AssertionError(
            f"{items} items of each of {senders} senders did not all arrive: one was lost, and "
            "a run would wait for it for ever"
        )
    finally:
        transport.close()


class _Lane:
    """One channel, both of its ends, and what must be true of it."""

    outbox: Outbox
    inbox: Inbox

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self.channel = Channel(f"check-{sender}", LAYOUT, SLOTS)
        self.granted = self.pushed = self.probed = self.released = 0
        self._held: list[tuple[int, Slot]] = []

    def join(self, transport: Transport) -> None:
        self.outbox, self.inbox = transport.outbox(self.channel), transport.inbox(self.channel)
        self._memory = transport.memory(self.channel)
        if not self.granted:
            assert self.outbox.tag == -1, "before the first grant the newest tag is -1"

    def grant(self) -> None:
        self.granted += _grant(self.inbox, self.granted, self.granted - self.released)
        self._count()

    def push(self) -> None:
        slot = self.outbox.reserve()
        if slot is None:
            assert self.granted == self.pushed, "a granted slot was not offered to the sender"
            return
        assert self.outbox.reserve() is slot, "a slot stays reserved until it is pushed"
        _fill(slot, self.sender, self.pushed)
        assert (self._memory["body"][slot.index] == slot.leaf("body")).all(), (
            "the channel's memory must be the memory of its slots: a third role reads it in place"
        )
        self.outbox.push(slot)
        self.pushed += 1
        self._count()

    def probe(self) -> None:
        slot = self.inbox.probe()
        if slot is None:
            assert self.probed == self.pushed, "a pushed item was not offered to the receiver"
            return
        _intact(slot, self.sender, self.probed)
        self._held.append((self.probed, slot))
        self.probed += 1

    def release(self, rng: np.random.Generator) -> None:
        if self._held:
            number, slot = self._held.pop(int(rng.integers(len(self._held))))
            _intact(slot, self.sender, number, probed=True)
            self.inbox.release(slot)
            self.released += 1
            self._count()

    def move(self, old: Transport, new: Transport) -> None:
        """Go on in another transport, as after a restart."""
        state, memory = self.inbox.state(), old.memory(self.channel)
        assert json.loads(json.dumps(state)) == state, (
            "a channel's state must be plain lists and numbers: a checkpoint keeps it as JSON"
        )
        granted, pushed = state["granted"], state["pushed"]
        held = [slot.index for _, slot in self._held]
        places = [*state["free"], *(index for index, _ in granted + pushed), *held]
        assert sorted(places) == list(range(SLOTS)), (
            f"in its state each slot must be free, granted or pushed, or held: {state}, {held}"
        )
        assert set(range(state["used"], SLOTS)) <= set(state["free"]), (
            "a slot that was never granted must be free: a checkpoint does not keep its content"
        )
        self.join(new)
        for name, array in memory.items():
            self._memory[name][: state["used"]] = array[: state["used"]]
        self.inbox.load_state(state)
        self._held = [(number, self.inbox.slot(slot.index)) for number, slot in self._held]
        self._count()

    def _count(self) -> None:
        assert self.outbox.tag == self.granted - 1, "the newest tag must be visible to the sender"
        assert self.outbox.released == self.released, "releases must be visible to the sender"
        assert self.inbox.out == self.granted - self.pushed, "out must count what is not pushed yet"


def _check_reclaim(make: Callable[[], Transport]) -> None:
    transport, channel = make(), Channel("check-reclaim", LAYOUT, SLOTS)
    try:
        outbox, inbox = transport.outbox(channel), transport.inbox(channel)
        for tag in (5, 6, 7):
            inbox.grant(tag)
        slot = outbox.reserve()
        assert slot is not None, "a granted slot was not offered to the sender"
        outbox.push(slot)
        _reclaim(inbox, [6, 7], SLOTS - 1)
        probed = inbox.probe()
        assert probed is not None, "what was pushed must outlive reclaim()"
        assert probed.tag == 5, "what was pushed must outlive reclaim()"
    finally:
        transport.close()


def _check_newest(make: Callable[[], Transport]) -> None:
    transport, out = make(), np.zeros(5, np.float32)
    try:
        subscribers = [transport.subscriber("check-newest", 5, index) for index in range(3)]
        publisher = transport.publisher("check-newest", 5)
        for subscriber in subscribers:
            assert subscriber.probe(-1, out) == -1, "nothing was pushed, so nothing can be newer"
        for version in (0, 1, 4):
            publisher.push(version, np.full(5, version, np.float32))
        for subscriber in subscribers:
            out[:] = -1
            assert subscriber.probe(-1, out) == 4, "each receiver must see the newest version"
            assert (out == 4).all(), "the version and its content must belong together"
            out[:] = -1
            assert subscriber.probe(4, out) == 4, "a version that is known already is not newer"
            assert (out == -1).all(), "where nothing is newer, nothing must be copied"
    finally:
        transport.close()


@dataclass(frozen=True)
class _Part:
    """What one process does."""

    name: str
    ends: Sequence[tuple[str, str]]
    work: Callable[[], None]
    dies: bool = False
    """Is it its part to be killed?"""
    halts: bool = False
    """Is it stopped at random moments, in the middle of what it does?"""


def _check_methods(make: Callable[[], Transport]) -> None:
    transport = make()
    transport.close()
    missing = [name for name in ("open", "open_newest", "keep") if not hasattr(transport, name)]
    if missing:
        raise TypeError(
            f"{type(transport).__name__} cannot be checked between processes: it has no "
            f"{', '.join(missing)}. Give it the methods of tianji.testing.transport.Crossing, or "
            "leave processes out"
        )


def _check_senders(
    make: Callable[[], Transport], senders: int, items: int, rng: np.random.Generator, limit: float
) -> None:
    """Each sender in a process of its own, and the receiver in one."""
    transport = cast(Crossing, make())
    channels = [Channel(f"check-{i}", LAYOUT, SLOTS) for i in range(senders)]
    for channel in channels:
        transport.open(channel)
    *rngs, mine = rng.spawn(senders + 1)
    parts = [
        _Part(
            f"sender {i}",
            [(channel.name, "send")],
            partial(_send, transport, channel, i, items, rngs[i]),
        )
        for i, channel in enumerate(channels)
    ]
    ends = [(channel.name, "receive") for channel in channels]
    work = partial(_receive, transport, channels, items, mine, limit)
    _play(transport, [*parts, _Part("the receiver", ends, work)], rng, limit)


def _send(
    transport: Transport, channel: Channel, sender: int, items: int, rng: np.random.Generator
) -> None:
    outbox = transport.outbox(channel)
    for number in range(items):
        while (slot := outbox.reserve()) is None:
            transport.wait(FOR_EVER)
        assert slot.tag == number, f"grants came out of order: {slot.tag}, not {number}"
        assert outbox.tag >= number, "the newest tag must be visible to the sender"
        _fill(slot, sender, number, rng)
        outbox.push(slot)
        _pause(rng)
    while outbox.released < items:
        transport.wait(0.01)
    assert outbox.released == items, "more was released than was pushed"


def _receive(
    transport: Transport,
    channels: Sequence[Channel],
    items: int,
    rng: np.random.Generator,
    limit: float,
) -> None:
    inboxes = [transport.inbox(channel) for channel in channels]
    granted, probed, released = ([0] * len(channels) for _ in range(3))
    held: list[tuple[int, int, Slot]] = []
    while sum(released) < items * len(channels):
        moved = False
        for i, inbox in enumerate(inboxes):
            if granted[i] < items and _grant(inbox, granted[i], granted[i] - released[i]):
                granted[i] += 1
                moved = True
            if (slot := inbox.probe()) is not None:
                _intact(slot, i, probed[i])
                held.append((i, probed[i], slot))
                probed[i] += 1
                moved = True
            assert 0 <= inbox.out <= granted[i] - probed[i], "out must count what is not pushed yet"
        _pause(rng)
        if held and (not moved or rng.random() < 0.5):
            i, number, slot = held.pop(int(rng.integers(len(held))))
            _intact(slot, i, number, probed=True)
            inboxes[i].release(slot)
            released[i] += 1
            moved = True
        if not moved:
            transport.wait(FOR_EVER)
    end = time.monotonic() + limit / 2
    while not all(inbox.ended for inbox in inboxes):
        assert all(inbox.probe() is None for inbox in inboxes), "more came than was pushed"
        assert time.monotonic() < end, "a sender ended its process and its inbox did not say so"
        transport.wait(0.1)


def _check_wake(make: Callable[[], Transport], rng: np.random.Generator, limit: float) -> None:
    """A receiver does not sleep over what it has not probed, even where `out` has counted it."""
    transport, channel = cast(Crossing, make()), Channel("check-wake", LAYOUT, SLOTS)
    transport.open(channel)

    def receive() -> None:
        inbox = transport.inbox(channel)
        inbox.grant(0)
        while inbox.out:
            time.sleep(0.001)
        transport.wait(FOR_EVER)
        slot = inbox.probe()
        assert slot is not None, "an item that out has counted as pushed must be there to probe"
        inbox.release(slot)

    send = partial(_send, transport, channel, 0, 1, rng.spawn(1)[0])
    parts = [
        _Part("the sender", [(channel.name, "send")], send),
        _Part("the receiver that slept over an item", [(channel.name, "receive")], receive),
    ]
    _play(transport, parts, rng, limit)


def _check_sender_death(
    make: Callable[[], Transport], moment: float | None, rng: np.random.Generator, limit: float
) -> None:
    """A sender is killed in the middle of its third item, or `moment` seconds after its first."""
    transport, channel = cast(Crossing, make()), Channel("check-death", LAYOUT, SLOTS)
    transport.open(channel)
    counts = _shared(2)
    """items that were begun to be pushed, and those that were pushed"""

    def send() -> None:
        outbox = transport.outbox(channel)
        while True:
            while (slot := outbox.reserve()) is None:
                transport.wait(FOR_EVER)
            if moment is None and counts[1] == 2:
                slot.leaf("head")[:] = 0, 2
                slot.leaf("body")[:256] = _content(0, 2)[:256]
                os.kill(os.getpid(), signal.SIGKILL)
            _fill(slot, 0, int(counts[1]))
            counts[0] += 1
            outbox.push(slot)
            counts[1] += 1
            if moment is not None and counts[1] == 1:
                signal.setitimer(signal.ITIMER_REAL, moment)

    def receive() -> None:
        inbox = transport.inbox(channel)
        granted = probed = 0
        end = time.monotonic() + limit / 2
        while True:
            ended = inbox.ended
            while inbox.grant(granted):
                granted += 1
            if (slot := inbox.probe()) is not None:
                _intact(slot, 0, probed)
                probed += 1
                inbox.release(slot)
            elif ended:
                break
            else:
                assert time.monotonic() < end, "a sender was killed and its inbox did not say so"
                transport.wait(0.1)
        assert counts[1] <= probed <= counts[0], (
            f"{counts[1]} items were pushed before the sender was killed, and {probed} arrived"
        )
        _reclaim(inbox, list(range(probed, granted)), SLOTS)

    parts = [
        _Part("the sender", [(channel.name, "send")], send, dies=True),
        _Part("the receiver", [(channel.name, "receive")], receive),
    ]
    _play(transport, parts, rng, limit)


def _check_receiver_death(
    make: Callable[[], Transport], rng: np.random.Generator, limit: float
) -> None:
    transport, channel = cast(Crossing, make()), Channel("check-gone", LAYOUT, 100)
    transport.open(channel)

    def send() -> None:
        outbox = transport.outbox(channel)
        for number in range(channel.slots):
            while (slot := outbox.reserve()) is None:
                transport.wait(FOR_EVER)
            _fill(slot, 0, number)
            try:
                outbox.push(slot)
            except Gone:
                return
            time.sleep(0.02)
        raise AssertionError(
            "the receiver was killed and push did not raise Gone: the sender would never end"
        )

    def receive() -> None:
        inbox = transport.inbox(channel)
        for number in range(channel.slots):
            inbox.grant(number)
        while inbox.probe() is None:
            transport.wait(FOR_EVER)
        os.kill(os.getpid(), signal.SIGKILL)

    parts = [
        _Part("the sender", [(channel.name, "send")], send),
        _Part("the receiver", [(channel.name, "receive")], receive, dies=True),
    ]
    _play(transport, parts, rng, limit)


def _check_snapshots(
    make: Callable[[], Transport], size: int, reads: int, rng: np.random.Generator, limit: float
) -> None:
    """One process pushes as fast as it can until two others have read enough versions."""
    transport, name = cast(Crossing, make()), "check-snapshots"
    transport.open_newest(name, size, 2)
    counts = _shared(3)
    """the version at which the sender has paused, and how often each receiver has read"""
    counts[0] = -1

    def publish() -> None:
        publisher, flat, version = transport.publisher(name, size), np.empty(size, np.float32), -1
        while counts[1:].min() < reads:
            version += 1
            flat.fill(version)
            publisher.push(version, flat)
        counts[0] = version
        while counts[1:].min() <= reads:
            time.sleep(0.001)
        time.sleep(0.01)
        flat.fill(version + 1)
        publisher.push(version + 1, flat)

    def subscribe(index: int) -> None:
        subscriber = transport.subscriber(name, size, index)
        out, version = np.empty(size, np.float32), -1
        while (last := int(counts[0])) < 0 or version < 0:
            seen, version = version, subscriber.probe(version, out)
            _whole(version, seen, out)
            counts[1 + index] = min(counts[1 + index] + (version > seen), reads)
            if version == seen:
                transport.wait(0.001)
        version = subscriber.probe(version, out)
        assert version == last, f"version {last} was pushed long ago, and the newest is {version}"
        counts[1 + index] = reads + 1
        while subscriber.probe(last, out) == last:
            transport.wait(FOR_EVER)
        _whole(last + 1, last, out)

    parts = [
        _Part(f"receiver {i}", [(name, f"subscribe-{i}")], partial(subscribe, i), halts=True)
        for i in range(2)
    ]
    sender = _Part("the sender", [(name, "publish")], publish, halts=True)
    _play(transport, [sender, *parts], rng, limit)


def _check_publisher_death(
    make: Callable[[], Transport], moment: float, rng: np.random.Generator, limit: float
) -> None:
    """What was pushed last can still be read when its sender was killed in the next push."""
    transport, name, size = cast(Crossing, make()), "check-last", max(SIZES)
    transport.open_newest(name, size, 1)
    counts = _shared(2)
    """the version that was begun to be pushed, and the one that was pushed"""
    counts[:] = -1

    def publish() -> None:
        publisher, flat = transport.publisher(name, size), np.empty(size, np.float32)
        while True:
            flat.fill(counts[1] + 1)
            counts[0] += 1
            publisher.push(int(counts[0]), flat)
            counts[1] += 1
            if counts[1] == 0:
                signal.setitimer(signal.ITIMER_REAL, moment)

    def subscribe() -> None:
        subscriber, out = transport.subscriber(name, size), np.empty(size, np.float32)
        last = -1
        while last < 0 or counts[1] > last:
            last = int(counts[1])
            time.sleep(0.1)
        version = subscriber.probe(-1, out)
        assert last <= version <= counts[0], f"version {last} was pushed, and {version} was read"
        _whole(version, -1, out)

    parts = [
        _Part("the sender", [(name, "publish")], publish, dies=True),
        _Part("the receiver", [(name, "subscribe-0")], subscribe),
    ]
    _play(transport, parts, rng, limit)


def _renews(make: Callable[[], Transport]) -> bool:
    transport = make()
    transport.close()
    return hasattr(transport, "renew")


def _check_new_senders(
    make: Callable[[], Transport], reclaims: bool, rng: np.random.Generator, limit: float
) -> None:
    """One sender after the other is killed, until enough items have arrived; the receiver lets the
    next one fill what was granted to the dead one, or takes it back and grants it anew."""
    transport, channel = cast(Renewing, make()), Channel("check-renewal", LAYOUT, SLOTS)
    transport.open(channel)
    items = 10 * LIVES
    begun, done = _shared(LIVES + 1), _shared(100_000)
    """items that each life has begun, and the life that pushed each item"""
    slow = rng.spawn(1)[0]

    def send(life: int) -> None:
        outbox = transport.outbox(channel)
        while True:
            while (slot := outbox.reserve()) is None:
                transport.wait(0.01)
            assert done[slot.tag] == 0, (
                f"item {slot.tag} was pushed by a sender that is dead, and is granted once more"
            )
            begun[life] += 1
            _fill(slot, life, slot.tag)
            try:
                outbox.push(slot)
            except Gone:
                return  # the receiver has all that it wants
            done[slot.tag] = life

    def receive(line: socket.socket) -> None:
        inbox, granted, probed, newest = transport.inbox(channel), 0, 0, 1
        while probed < items or newest < LIVES:
            _dawdle(slow)
            transport.wait(0.0)
            while inbox.ended and newest < LIVES and not _told(line):
                time.sleep(0.001)  # with what was pushed and not probed yet
            if _told(line):
                newest += 1
                if reclaims:
                    tags = inbox.reclaim()
                    first = granted - len(tags)
                    assert tags == list(range(first, granted)), (
                        f"grants {tags} were never pushed, and the last one was {granted - 1}"
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
            _intact(slot, life, probed)
            assert slot.index == probed % SLOTS, (
                f"slot {slot.index} came where {probed % SLOTS} was due: slots that are granted "
                "again must come in the same order, as replay is a ring of them"
            )
            inbox.release(slot)
            probed += 1

    _play_lives(transport, channel, ("send", send), ("receive", receive), begun, rng, limit)


def _check_new_receivers(
    make: Callable[[], Transport], rng: np.random.Generator, limit: float
) -> None:
    """One receiver after the other is killed; the sender goes on with the next one's grants, and
    sees none that a dead one gave."""
    transport, channel = cast(Renewing, make()), Channel("check-heirs", LAYOUT, SLOTS)
    transport.open(channel)
    begun = _shared(LIVES + 1)
    """items that each life has received"""
    slow = rng.spawn(1)[0]

    def receive(life: int) -> None:
        inbox, granted, probed = transport.inbox(channel), 0, 0
        while True:
            while inbox.grant(1_000_000 * life + granted):
                granted += 1
            assert granted - probed == SLOTS or inbox.ended, "a slot was lost with a receiver"
            if (slot := inbox.probe()) is None:
                transport.wait(0.002)
                continue
            number = 1_000_000 * life + probed
            assert slot.tag == number, f"item {slot.tag} came where {number} was due"
            assert slot.leaf("head").tolist() == [0, number], (
                "what a dead receiver had granted came"
            )
            assert (slot.leaf("body") == _content(0, number)).all(), (
                "an item came that is not whole"
            )
            probed += 1
            begun[life] += 1
            inbox.release(slot)

    def send(line: socket.socket) -> None:
        outbox, newest = transport.outbox(channel), 1
        while newest < LIVES or begun[LIVES] < 10:
            if _told(line):
                newest += 1
                _take_over(transport, line)
            if (slot := outbox.reserve()) is None:
                transport.wait(0.002)
                continue
            assert slot.tag // 1_000_000 == newest, "a grant of a dead receiver was offered"
            _dawdle(slow)
            _fill(slot, 0, slot.tag)
            try:
                outbox.push(slot)
            except Gone:
                while not _told(line):
                    time.sleep(0.001)

    _play_lives(transport, channel, ("receive", receive), ("send", send), begun, rng, limit)


def _play_lives(
    transport: Renewing,
    channel: Channel,
    mortal: tuple[str, Callable[[int], None]],
    other: tuple[str, Callable[[socket.socket], None]],
    begun: Array,
    rng: np.random.Generator,
    limit: float,
) -> None:
    """One end in a process that lasts, the other in processes that are killed, each at a random
    moment after it has begun, and followed by the next."""
    name, end = channel.name, time.monotonic() + limit
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lasting = _Part(f"the one that lasts ({other[0]})", [(name, other[0])],
                    partial(other[1], theirs))  # fmt: skip
    failed, running = [], dict[int, tuple[str, int]]()

    def fork(life: int) -> int:
        part = _Part(f"life {life}", [(name, mortal[0])], partial(mortal[1], life))
        pid, report = _fork(transport, part, limit)
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
        keeper, report = _fork(transport, lasting, limit)
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
            table, fds = transport.pack([(name, other[0])])
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


def _play(
    transport: Crossing, parts: Sequence[_Part], rng: np.random.Generator, limit: float
) -> None:
    """Each part in a process of its own; whatever happens, none is left."""
    running: dict[int, tuple[_Part, int]] = {}
    failed: list[str] = []
    end = time.monotonic() + limit
    try:
        for part in parts:
            pid, report = _fork(transport, part, limit)
            running[pid] = part, report
        transport.keep([])
        while running and time.monotonic() < end:
            for pid, (part, report) in list(running.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del running[pid]
                    said = os.read(report, mmap.PAGESIZE).decode(errors="replace")
                    os.close(report)
                    if said != ("" if part.dies else "done"):
                        failed.append(f"{part.name}: {said or 'it was killed'}")
                        # The others may have something to say of it, too.
                        end = min(end, time.monotonic() + 0.1)
            _halt([pid for pid, (part, _) in running.items() if part.halts], rng)
            time.sleep(0.002)
    finally:
        for pid, (_, report) in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(report)
        transport.close()
    assert not failed, "\n".join(failed)
    names = ", ".join(part.name for part, _ in running.values())
    assert not running, (
        f"not finished within {limit:.0f} seconds: {names}. An item, a grant or a wake-up was lost"
    )


def _fork(transport: Crossing, part: _Part, limit: float) -> tuple[int, int]:
    """The process, and where it will say how it ended."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns where there are threads; the child takes no lock that they could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit) + 10)  # should the process that waits for this one be killed
        transport.keep(part.ends)
        part.work()
        transport.close()
        os.write(write, b"done")
    except BaseException as error:
        plain = str(error) if isinstance(error, AssertionError) else ""
        os.write(write, (plain or traceback.format_exc()).encode()[-mmap.PAGESIZE :])
    finally:
        os._exit(0)


def _halt(pids: Sequence[int], rng: np.random.Generator) -> None:
    """Stop one process at a random moment, then another, and let the first one meet its halves."""
    if len(pids) > 1:
        first, second = (pids[i] for i in rng.permutation(len(pids))[:2].tolist())
        os.kill(first, signal.SIGSTOP)
        time.sleep(10 ** rng.uniform(-4.5, -1.8))  # as long as some copies of any size take
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGCONT)
        time.sleep(10 ** rng.uniform(-4.5, -1.8))
        os.kill(second, signal.SIGCONT)


def _content(sender: int, number: int) -> Array:
    return np.arange(512) * (sender + 1) + number * 1_000


def _fill(slot: Slot, sender: int, number: int, rng: np.random.Generator | None = None) -> None:
    slot.leaf("head")[:] = sender, number
    if rng is not None:
        _pause(rng)
    slot.leaf("body")[:] = _content(sender, number)


def _intact(slot: Slot, sender: int, number: int, probed: bool = False) -> None:
    """Has the slot what was pushed, when it is probed, and still when it is released?"""
    head = slot.leaf("head").tolist()
    if probed:
        wrong = moved = "an item changed while the receiver held it: slots are granted too early"
    else:
        moved = (
            f"item {head[1]} of sender {head[0]} came where {number} of sender {sender} was due: "
            "an item was lost, doubled or moved"
        )
        wrong = "an item arrived that is not whole"
    assert head == [sender, number], moved
    if not probed:
        assert slot.tag == number, f"an item came with tag {slot.tag} where {number} was due"
    assert (slot.arrays["body"] == _content(sender, number)).all(), wrong


def _grant(inbox: Inbox, tag: int, used: int) -> bool:
    given = inbox.grant(tag)
    if given:
        assert used < SLOTS, "a slot was granted that is still in use: its data would be lost"
    else:
        assert used == SLOTS, "a grant was refused although a slot is free: the run would stall"
    return given


def _reclaim(inbox: Inbox, tags: list[int], free: int) -> None:
    found = inbox.reclaim()
    assert found == tags, f"grants {tags} were never pushed, and reclaim() gave {found}"
    assert inbox.out == 0, "what was reclaimed is no longer out"
    assert len(set(inbox.state()["free"])) == free, "slots that were reclaimed must be free again"


def _whole(version: int, seen: int, out: Array) -> None:
    assert version >= seen, f"version {version} came after version {seen}"
    assert version == seen or (out == version).all(), (
        f"version {version} was read half: it has numbers of {np.unique(out)[:3]}"
    )


def _pause(rng: np.random.Generator) -> None:
    if rng.random() < 0.05:
        time.sleep(rng.uniform(0.0, 0.002))


def _dawdle(rng: np.random.Generator) -> None:
    """Be the slower one, so that the other has always something under way when it is killed."""
    time.sleep(rng.uniform(0.0, 0.002))


def _shared(count: int) -> Array:
    """Integers that forked processes share, so that they can tell each other how far they are."""
    numbers: Array = np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
    return numbers
