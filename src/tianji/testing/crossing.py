"""Does a transport between processes keep what its template promises?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tianji.channel import Conduit, End, Gone, Slot, Transport
from tianji.testing.family import Child, Line, Part
from tianji.testing.items import (
    LAYOUT,
    SLOTS,
    content,
    fill,
    grant,
    intact,
    pause,
    reclaim,
    shared,
    whole,
)
from tianji.types import Params, leaf

FOR_EVER = 3600.0
"""seconds to sleep where only a wake-up that never came would let them pass"""
SIZES = {1_000: 2_000, 100_000: 800, 2_000_000: 60}
"""sizes of a newest-only conduit, and how many versions each receiver must read"""


def check_crossing(
    make: Callable[[], Transport], items: int, rng: np.random.Generator, deadline: float
) -> None:
    """Senders and receivers in processes of their own, which pause and die."""
    before = set(os.listdir("/proc/self/fd"))
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
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left, (
        f"descriptors {sorted(left)} of ends that were handed over are still open: those whose "
        "ends they are would not be noticed when they die"
    )


def _check_senders(
    make: Callable[[], Transport], senders: int, items: int, rng: np.random.Generator, limit: float
) -> None:
    """Each sender in a process of its own, and the receiver in one."""
    conduits = [Conduit(f"check-{i}", "lane", LAYOUT, SLOTS) for i in range(senders)]
    *rngs, mine = rng.spawn(senders + 1)
    parts = [
        Part(
            f"sender {i}",
            [End(conduit.name, "send")],
            partial(_send, conduit, i, items, rngs[i]),
        )
        for i, conduit in enumerate(conduits)
    ]
    ends = [End(conduit.name, "receive") for conduit in conduits]
    work = partial(_receive, conduits, items, mine, limit)
    _play(make, conduits, [*parts, Part("the receiver", ends, work)], rng, limit)


def _send(
    conduit: Conduit,
    sender: int,
    items: int,
    rng: np.random.Generator,
    transport: Transport,
    _: Line,
) -> None:
    outbox = transport.outbox(conduit)
    for number in range(items):
        while not (granted := outbox.granted()):
            transport.wait(FOR_EVER)
        slot = granted[0]
        assert slot.update == number, f"grants came out of order: {slot.update}, not {number}"
        assert outbox.tag >= number, "the newest tag must be visible to the sender"
        fill(slot, sender, number, rng)
        outbox.push(slot)
        pause(rng)
    while outbox.released < items:
        transport.wait(0.01)
    assert outbox.released == items, "more was released than was pushed"


def _receive(
    conduits: Sequence[Conduit],
    items: int,
    rng: np.random.Generator,
    limit: float,
    transport: Transport,
    _: Line,
) -> None:
    inboxes = [transport.inbox(conduit) for conduit in conduits]
    granted, probed, released = ([0] * len(conduits) for _ in range(3))
    held: list[tuple[int, int, Slot]] = []
    while sum(released) < items * len(conduits):
        moved = False
        for i, inbox in enumerate(inboxes):
            if granted[i] < items and grant(inbox, granted[i], granted[i] - released[i]):
                granted[i] += 1
                moved = True
            if (slot := inbox.probe()) is not None:
                intact(slot, i, probed[i])
                held.append((i, probed[i], slot))
                probed[i] += 1
                moved = True
            assert 0 <= inbox.out <= granted[i] - probed[i], "out must count what is not pushed yet"
        pause(rng)
        if held and (not moved or rng.random() < 0.5):
            i, number, slot = held.pop(int(rng.integers(len(held))))
            intact(slot, i, number, probed=True)
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
    conduit = Conduit("check-wake", "lane", LAYOUT, SLOTS)

    def receive(transport: Transport, _: Line) -> None:
        inbox = transport.inbox(conduit)
        inbox.grant(0)
        while inbox.out:
            time.sleep(0.001)
        transport.wait(FOR_EVER)
        slot = inbox.probe()
        assert slot is not None, "an item that out has counted as pushed must be there to probe"
        inbox.release(slot)

    send = partial(_send, conduit, 0, 1, rng.spawn(1)[0])
    parts = [
        Part("the sender", [End(conduit.name, "send")], send),
        Part("the receiver that slept over an item", [End(conduit.name, "receive")], receive),
    ]
    _play(make, [conduit], parts, rng, limit)


def _check_sender_death(
    make: Callable[[], Transport], moment: float | None, rng: np.random.Generator, limit: float
) -> None:
    """A sender is killed in the middle of its third item, or `moment` seconds after its first."""
    conduit = Conduit("check-death", "lane", LAYOUT, SLOTS)
    counts = shared(2)
    """items that were begun to be pushed, and those that were pushed"""

    def send(transport: Transport, _: Line) -> None:
        outbox = transport.outbox(conduit)
        while True:
            while not (granted := outbox.granted()):
                transport.wait(FOR_EVER)
            slot = granted[0]
            if moment is None and counts[1] == 2:
                slot.leaf("head")[:] = 0, 2
                slot.leaf("body")[:256] = content(0, 2)[:256]
                os.kill(os.getpid(), signal.SIGKILL)
            fill(slot, 0, int(counts[1]))
            counts[0] += 1
            outbox.push(slot)
            counts[1] += 1
            if moment is not None and counts[1] == 1:
                signal.setitimer(signal.ITIMER_REAL, moment)

    def receive(transport: Transport, _: Line) -> None:
        inbox = transport.inbox(conduit)
        granted = probed = 0
        end = time.monotonic() + limit / 2
        while True:
            ended = inbox.ended
            while inbox.grant(granted):
                granted += 1
            if (slot := inbox.probe()) is not None:
                intact(slot, 0, probed)
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
        reclaim(inbox, [(update, 0) for update in range(probed, granted)], SLOTS)

    parts = [
        Part("the sender", [End(conduit.name, "send")], send, dies=True),
        Part("the receiver", [End(conduit.name, "receive")], receive),
    ]
    _play(make, [conduit], parts, rng, limit)


def _check_receiver_death(
    make: Callable[[], Transport], rng: np.random.Generator, limit: float
) -> None:
    conduit = Conduit("check-gone", "lane", LAYOUT, 100)

    def send(transport: Transport, _: Line) -> None:
        outbox = transport.outbox(conduit)
        for number in range(conduit.slots):
            while not (granted := outbox.granted()):
                transport.wait(FOR_EVER)
            slot = granted[0]
            fill(slot, 0, number)
            try:
                outbox.push(slot)
            except Gone:
                return
            time.sleep(0.02)
        raise AssertionError(
            "the receiver was killed and push did not raise Gone: the sender would never end"
        )

    def receive(transport: Transport, _: Line) -> None:
        inbox = transport.inbox(conduit)
        for number in range(conduit.slots):
            inbox.grant(number)
        while inbox.probe() is None:
            transport.wait(FOR_EVER)
        os.kill(os.getpid(), signal.SIGKILL)

    parts = [
        Part("the sender", [End(conduit.name, "send")], send),
        Part("the receiver", [End(conduit.name, "receive")], receive, dies=True),
    ]
    _play(make, [conduit], parts, rng, limit)


def _check_snapshots(
    make: Callable[[], Transport], size: int, reads: int, rng: np.random.Generator, limit: float
) -> None:
    """One process pushes as fast as it can until two others have read enough versions."""
    conduit = Conduit("check-snapshots", "newest", {"w": leaf((size,), np.float32)}, receivers=2)
    counts = shared(3)
    """the version at which the sender has paused, and how often each receiver has read"""
    counts[0] = -1

    def publish(transport: Transport, _: Line) -> None:
        publisher, params, version = transport.publisher(conduit), Params(conduit.layout), -1
        while counts[1:].min() < reads:
            version += 1
            params.flat.fill(version)
            publisher.push(version, params)
        counts[0] = version
        while counts[1:].min() <= reads:
            time.sleep(0.001)
        time.sleep(0.01)
        params.flat.fill(version + 1)
        publisher.push(version + 1, params)

    def subscribe(index: int, transport: Transport, _: Line) -> None:
        subscriber = transport.subscriber(conduit, index)
        out, version = Params(conduit.layout), -1
        while (last := int(counts[0])) < 0 or version < 0:
            seen = version
            if index or not subscriber.leases:
                version = subscriber.probe(version, out)
            elif (lease := subscriber.lease(version)) is not None:
                np.copyto(out.buffer, lease.params.buffer)
                version = lease.version if lease.give_back() else version
            whole(version, seen, out)
            counts[1 + index] = min(counts[1 + index] + (version > seen), reads)
            if version == seen:
                transport.wait(0.001)
        version = subscriber.probe(version, out)
        assert version == last, f"version {last} was pushed long ago, and the newest is {version}"
        counts[1 + index] = reads + 1
        while subscriber.probe(last, out) == last:
            transport.wait(FOR_EVER)
        whole(last + 1, last, out)

    parts = [
        Part(f"receiver {i}", [End(conduit.name, "receive", i)], partial(subscribe, i), halts=True)
        for i in range(2)
    ]
    sender = Part("the sender", [End(conduit.name, "send")], publish, halts=True)
    _play(make, [conduit], [sender, *parts], rng, limit)


def _check_publisher_death(
    make: Callable[[], Transport], moment: float, rng: np.random.Generator, limit: float
) -> None:
    """What was pushed last can still be read when its sender was killed in the next push."""
    conduit = Conduit("check-last", "newest", {"w": leaf((max(SIZES),), np.float32)})
    counts = shared(2)
    """the version that was begun to be pushed, and the one that was pushed"""
    counts[:] = -1

    def publish(transport: Transport, _: Line) -> None:
        publisher, params = transport.publisher(conduit), Params(conduit.layout)
        while True:
            params.flat.fill(counts[1] + 1)
            counts[0] += 1
            publisher.push(int(counts[0]), params)
            counts[1] += 1
            if counts[1] == 0:
                signal.setitimer(signal.ITIMER_REAL, moment)

    def subscribe(transport: Transport, _: Line) -> None:
        subscriber, out = transport.subscriber(conduit), Params(conduit.layout)
        last = -1
        while last < 0 or counts[1] > last:
            last = int(counts[1])
            time.sleep(0.1)
        version = subscriber.probe(-1, out)
        assert last <= version <= counts[0], f"version {last} was pushed, and {version} was read"
        whole(version, -1, out)

    parts = [
        Part("the sender", [End(conduit.name, "send")], publish, dies=True),
        Part("the receiver", [End(conduit.name, "receive")], subscribe),
    ]
    _play(make, [conduit], parts, rng, limit)


def _play(
    make: Callable[[], Transport],
    conduits: Sequence[Conduit],
    parts: Sequence[Part],
    rng: np.random.Generator,
    limit: float,
) -> None:
    """Each part in a process of its own; whatever happens, none is left."""
    transport, end = make(), time.monotonic() + limit
    running: list[Child] = []
    failed: list[str] = []
    try:
        for conduit in conduits:
            transport.open(conduit)
        for part in parts:  # before the first offer: what is offered is not inherited, too
            running.append(Child(part, make, limit))
        for child in running:
            child.give(transport.offer(child.part.ends, 0))
        while running and time.monotonic() < end:
            for child in [child for child in running if child.ended]:
                running.remove(child)
                said = child.end()
                if said != ("" if child.part.dies else "done"):
                    failed.append(f"{child.part.name}: {said or 'it was killed'}")
                    # The others may have something to say of it, too.
                    end = min(end, time.monotonic() + 0.1)
            _halt([child.pid for child in running if child.part.halts], rng)
            time.sleep(0.002)
    finally:
        for child in running:
            child.end()
        transport.close()
    assert not failed, "\n".join(failed)
    names = ", ".join(child.part.name for child in running)
    assert not running, (
        f"not finished within {limit:.0f} seconds: {names}. An item, a grant or a wake-up was lost"
    )


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
