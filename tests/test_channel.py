"""Transports, by the public checker, and a checker that can fail."""

import numpy as np
import pytest

from tianji.channel import Channel
from tianji.testing import check_transport
from tianji.transports.memory import Memory
from tianji.types import leaf


def test_the_memory_transport_keeps_its_promises():
    check_transport(Memory)


CHANNEL = Channel("c", {"x": leaf((2,), np.int64)}, slots=2)


class EarlyRelease(Memory):
    """Frees a slot as soon as it is probed, while the receiver still reads it."""

    def inbox(self, channel):
        pipe = self._pipe(channel)
        if not hasattr(pipe, "broken"):
            pipe.broken = True
            probe, release = pipe.probe, pipe.release

            def early():
                slot = probe()
                if slot is not None:
                    release(slot)
                return slot

            pipe.probe, pipe.release = early, lambda slot: None
        return pipe


class Reversed(Memory):
    """Gives the newest item first."""

    def inbox(self, channel):
        pipe = self._pipe(channel)
        pipe.probe = lambda: pipe._pushed.pop() if pipe._pushed else None
        return pipe


class Stale(Memory):
    """Says that nothing is ever newer."""

    def newest(self, name, size):
        newest = super().newest(name, size)
        newest.probe = lambda than, out: than
        return newest


@pytest.mark.parametrize("broken", [EarlyRelease, Reversed, Stale])
def test_a_broken_transport_is_found(broken):
    with pytest.raises(AssertionError):
        check_transport(broken, items=50)


def test_only_the_reserved_slot_can_be_pushed():
    transport = Memory()
    outbox, inbox = transport.outbox(CHANNEL), transport.inbox(CHANNEL)
    inbox.grant(0)
    inbox.grant(1)
    first = outbox.reserve()
    assert outbox.reserve() is first
    outbox.push(first)
    with pytest.raises(ValueError, match="reserved"):
        outbox.push(first)


def test_a_transport_goes_on_from_its_state():
    def make():
        transport = Memory()
        return transport, transport.outbox(CHANNEL), transport.inbox(CHANNEL)

    transport, outbox, inbox = make()
    inbox.grant(5)
    inbox.grant(6)
    slot = outbox.reserve()
    slot.arrays["x"][:] = 3, 4
    outbox.push(slot)
    state = transport.state()
    again, outbox, inbox = make()
    again.load_state(state)
    assert inbox.probe().arrays["x"].tolist() == [3, 4]
    assert outbox.reserve().tag == 6
    assert outbox.tag == 6
    assert not inbox.grant(7)
