"""Does a transport go on where a process dies and another one takes its end over?"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tianji.channel import Conduit, End, Gone, Offer, Side, Transport
from tianji.testing.family import Child, Line, Part
from tianji.testing.items import LAYOUT, SLOTS, content, dawdle, fill, intact, shared
from tianji.types import Array

LIVES = 30
"""processes that hold an end of a conduit, one after the other"""

Work = Callable[[Transport, Line], None]


def check_renewal(make: Callable[[], Transport], rng: np.random.Generator, deadline: float) -> None:
    """Ends whose processes are killed and followed by others."""
    for reclaims in (False, True):
        _check_new_senders(make, reclaims, rng, deadline)
    _check_new_receivers(make, rng, deadline)


def _check_new_senders(
    make: Callable[[], Transport], reclaims: bool, rng: np.random.Generator, limit: float
) -> None:
    """One sender after the other is killed, until enough items have arrived; the receiver lets the
    next one fill what was granted to the dead one, or takes it back and grants it again."""
    conduit, items = Conduit("check-renewal", "lane", LAYOUT, SLOTS), 10 * LIVES
    begun, done = shared(LIVES + 1), shared(100_000)
    """items that each life has begun, and the life that pushed each item"""
    slow = rng.spawn(1)[0]

    def send(life: int, transport: Transport, _: Line) -> None:
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

    def receive(transport: Transport, line: Line) -> None:
        inbox, granted, probed, newest = transport.inbox(conduit), 0, 0, 1
        while probed < items or newest < LIVES:
            dawdle(slow)
            transport.wait(0.0)
            while inbox.ended and newest < LIVES and not line.waiting:
                time.sleep(0.001)  # with what was pushed and not probed yet
            if life := line.waiting:
                if reclaims and life > newest:
                    numbers = inbox.reclaim()
                    first = granted - len(numbers)
                    assert numbers == [(update, 0) for update in range(first, granted)], (
                        f"grants {numbers} were never pushed, and the last one was {granted - 1}"
                    )
                    granted = first
                newest = max(newest, life)
                line.accept()
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

    _play_lives(make, conduit, ("send", send), ("receive", receive), begun, rng, limit)


def _check_new_receivers(
    make: Callable[[], Transport], rng: np.random.Generator, limit: float
) -> None:
    """One receiver after the other is killed; the sender goes on with the next one's grants, and
    sees none that a dead one gave."""
    conduit = Conduit("check-heirs", "lane", LAYOUT, SLOTS)
    begun = shared(LIVES + 1)
    """items that each life has received"""
    slow = rng.spawn(1)[0]

    def receive(life: int, transport: Transport, _: Line) -> None:
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

    def send(transport: Transport, line: Line) -> None:
        outbox, newest = transport.outbox(conduit), 1
        while newest < LIVES or begun[LIVES] < 10:
            if life := line.waiting:
                newest = max(newest, life)
                line.accept()
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
                while not line.waiting:
                    time.sleep(0.001)

    _play_lives(make, conduit, ("receive", receive), ("send", send), begun, rng, limit)


def _play_lives(
    make: Callable[[], Transport],
    conduit: Conduit,
    mortal: tuple[Side, Callable[[int, Transport, Line], None]],
    other: tuple[Side, Work],
    begun: Array,
    rng: np.random.Generator,
    limit: float,
) -> None:
    """One end in a process that lasts, the other in processes that are killed, each at a random
    moment after it has begun, and followed by the next."""
    transport, end = make(), time.monotonic() + limit
    theirs, mine = [End(conduit.name, mortal[0])], [End(conduit.name, other[0])]
    running: list[Child] = []
    failed: list[str] = []

    def live(life: int) -> Child:
        work = mortal[1]
        part = Part(f"life {life}", theirs, lambda joined, line: work(life, joined, line))
        running.append(Child(part, make, limit))
        return running[-1]

    def end_of(child: Child) -> None:
        running.remove(child)
        if (said := child.end()) not in ("", "done"):
            failed.append(f"{child.part.name}: {said}")

    def offered(life: int) -> Offer:
        """Of the end of the process that lasts, as it is renewed for this life of the other."""
        transport.revoke(conduit.name)
        return transport.offer(mine, life)

    def over() -> bool:
        return bool(failed) or time.monotonic() > end or any(child.ended for child in running)

    try:
        transport.open(conduit)
        lasting = Child(Part(f"the one that lasts ({other[0]})", mine, other[1]), make, limit)
        running.append(lasting)
        child = live(1)
        lasting.give(transport.offer(mine, 1), 1)
        child.give(transport.offer(theirs, 1))
        for life in range(2, LIVES + 1):
            while begun[life - 1] == 0 and not over():
                time.sleep(0.0005)
            time.sleep(10 ** rng.uniform(-4.5, -2))
            end_of(child)
            if over():
                break
            first, late = rng.random(2) < 0.5
            child = live(life)  # before there are pipes that it would inherit
            stale = offered(life - 1) if late else None
            offer = offered(life)
            if first:
                child.give(transport.offer(theirs, life))
            lasting.give(offer, life)
            if stale is not None:
                lasting.give(stale, life - 1)
            if not first:
                time.sleep(10 ** rng.uniform(-4.5, -2))
                child.give(transport.offer(theirs, life))
        while lasting in running and not failed and time.monotonic() < end:
            if lasting.ended:
                end_of(lasting)
            time.sleep(0.001)
        late = lasting in running and not failed
    finally:
        for left in list(running):
            end_of(left)
        transport.close()
    assert not failed, "\n".join(failed)
    assert not late, (
        f"not finished within {limit:.0f} seconds after {LIVES - 1} of its {mortal[0]} ends were "
        "killed and renewed: an item, a grant or a slot was lost with one of them"
    )
