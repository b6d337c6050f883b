"""Does a transport keep what its template promises?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tianji.channel import Channel, Slot, Transport
from tianji.types import Array, leaf


def check_transport(make: Callable[[], Transport], items: int = 400, seed: int = 0) -> None:
    """Does a transport keep its word? Order, no loss, no duplicate, no corruption, refusal when
    full, and only the newest where only the newest is promised; for 1, 4 and 8 senders."""
    for senders in (1, 4, 8):
        transport = make()
        try:
            _check_channels(transport, senders, items, np.random.default_rng(seed))
        finally:
            transport.close()
    transport = make()
    try:
        _check_newest(transport)
    finally:
        transport.close()


def _check_channels(
    transport: Transport, senders: int, items: int, rng: np.random.Generator
) -> None:
    """Random interleavings of granting, filling, pushing, probing and releasing."""
    layout = {"head": leaf((2,), np.int64), "body": leaf((64,), np.int64)}
    channels = [Channel(f"check-{i}", layout, 3) for i in range(senders)]
    outboxes = [transport.outbox(channel) for channel in channels]
    inboxes = [transport.inbox(channel) for channel in channels]
    granted, pushed, probed = [0] * senders, [0] * senders, [0] * senders
    held: list[list[Slot]] = [[] for _ in range(senders)]
    while sum(probed) < items * senders:
        i, action = int(rng.integers(senders)), int(rng.integers(4))
        outbox, inbox = outboxes[i], inboxes[i]
        if action == 0:
            out = granted[i] - probed[i] + len(held[i])
            if inbox.grant(granted[i]):
                assert out < 3, "a slot was granted that is still in use: its data would be lost"
                granted[i] += 1
                assert outbox.tag == granted[i] - 1, "the newest tag must be visible to the sender"
            else:
                assert out == 3, "a grant was refused although a slot is free: the run would stall"
        elif action == 1:
            slot = outbox.reserve()
            if slot is None:
                assert granted[i] == pushed[i], "a granted slot was not offered to the sender"
                continue
            assert slot.tag == pushed[i], f"grants came out of order: {slot.tag}, not {pushed[i]}"
            slot.arrays["head"][:] = i, pushed[i]
            slot.arrays["body"][:] = _content(i, pushed[i])
            outbox.push(slot)
            pushed[i] += 1
        elif action == 2:
            slot = inbox.probe()
            if slot is None:
                continue
            assert slot.arrays["head"].tolist() == [i, probed[i]], "an item was lost or doubled"
            held[i].append(slot)
            probed[i] += 1
        elif held[i]:
            slot = held[i].pop(0)
            number = int(slot.arrays["head"][1])
            assert (slot.arrays["body"] == _content(i, number)).all(), (
                "an item changed while the receiver held it: slots are granted too early"
            )
            inbox.release(slot)
            assert outbox.released == probed[i] - len(held[i]), "releases must be counted"


def _content(sender: int, number: int) -> Array:
    return np.arange(64) * (sender + 1) + number * 1_000


def _check_newest(transport: Transport) -> None:
    newest, out = transport.newest("check-newest", 5), np.zeros(5, np.float32)
    assert newest.probe(-1, out) == -1, "nothing was pushed, so nothing can be newer"
    for version in (0, 1, 4):
        newest.push(version, np.full(5, version, np.float32))
    assert newest.probe(-1, out) == 4, "only the newest version must be seen"
    assert (out == 4).all(), "the version and its content must belong together"
    assert newest.probe(4, out) == 4, "a version that is known already is not newer"
