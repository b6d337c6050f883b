"""Transports within one process, by the public checker, and a checker that can fail."""

from types import SimpleNamespace

import numpy as np
import pytest

from tianji.channel import Conduit
from tianji.testing import check_transport
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.types import leaf

CONDUIT = Conduit("c", "lane", {"x": leaf((2,), np.int64)}, slots=2)


def test_the_memory_transport_keeps_its_promises():
    check_transport(Memory)


def test_a_transport_of_one_process_cannot_be_checked_between_processes():
    with pytest.raises(TypeError, match=r"cannot be offered to another.*leave processes out"):
        check_transport(Memory, items=5, processes=True)


class Broken(Memory):
    """Memory of which one promise is broken, in `alter`."""

    def _pipe(self, conduit):
        fresh = conduit.name not in self._pipes
        pipe = super()._pipe(conduit)
        if fresh:
            self.alter(pipe)
        return pipe


class EarlyRelease(Broken):
    """Frees a slot as soon as it is probed, while the receiver still reads it."""

    def alter(self, pipe):
        probe, release = pipe.probe, pipe.release

        def early():
            slot = probe()
            if slot is not None:
                release(slot)
            return slot

        pipe.probe, pipe.release = early, lambda slot: None


class Reversed(Broken):
    """Gives the newest item first."""

    def alter(self, pipe):
        pipe.probe = lambda: pipe._pushed.pop() if pipe._pushed else None


class Stale(Memory):
    """Says that nothing is ever newer."""

    def subscriber(self, conduit, index=0):
        subscriber = super().subscriber(conduit, index)
        subscriber.probe = lambda than, out: than
        return subscriber


class Shared(Memory):
    """Gives a version to the first receiver that asks, and to no other."""

    def subscriber(self, conduit, index=0):
        subscriber = super().subscriber(conduit, index)
        probe = type(subscriber).probe

        def once(than, out):
            version = probe(subscriber, than, out)
            subscriber._version = -1
            return version

        subscriber.probe = once
        return subscriber


class TornLease(Memory):
    """Says of every lease that it is whole."""

    def subscriber(self, conduit, index=0):
        subscriber = super().subscriber(conduit, index)
        lease = subscriber.lease

        def torn(than):
            found = lease(than)
            return found and SimpleNamespace(
                version=found.version, params=found.params, give_back=lambda: True
            )

        subscriber.lease = torn
        return subscriber


class InTurn(Broken):
    """Grants slots in turn, whichever was released: what design.md section 6 warns of."""

    def alter(self, pipe):
        inner, count = pipe.grant, iter(range(10_000))

        def in_turn(update, grant=0):
            if pipe._free:
                pipe._free[0] = next(count) % len(pipe.memory["head"])
            return inner(update, grant)

        pipe.grant = in_turn


class LosesTheLast(Broken):
    """Drops the last item on its way, so that no later one shows the gap."""

    def alter(self, pipe):
        def probe():
            slot = whole()
            return None if slot is not None and slot.update == 19 else slot

        whole, pipe.probe = pipe.probe, probe


class ForgetsGrants(Broken):
    """Goes on from a state as if the sender still knew what it was granted."""

    def alter(self, pipe):
        load = pipe.load_state
        pipe.load_state = lambda state: load({**state, "granted": []})


class ForgetsTags(Broken):
    """Gives every item the tag 0."""

    def alter(self, pipe):
        probe = pipe.probe

        def tagless():
            slot = probe()
            if slot is not None:
                slot.update = 0
            return slot

        pipe.probe = tagless


class ReclaimsNothing(Broken):
    """Leaves with a dead sender what it was granted."""

    def alter(self, pipe):
        pipe.reclaim = list


class CountsNothing(Broken):
    """Does not tell the sender of releases."""

    def alter(self, pipe):
        pipe.release = lambda slot: pipe._free.append(slot.index)


FLAWS = {
    EarlyRelease: "still in use|releases must be visible",
    Reversed: "lost, doubled or moved|with update",
    Stale: "see the newest",
    Shared: "see the newest",
    TornLease: "given back as whole",
    InTurn: "granted too early|lost, doubled or moved",
    LosesTheLast: "not offered to the receiver",
    ForgetsGrants: "out must count",
    ForgetsTags: "with update 0",
    ReclaimsNothing: r"reclaim\(\) gave \[\]",
    CountsNothing: "releases must be visible",
}


@pytest.mark.parametrize("broken", FLAWS)
def test_a_broken_transport_is_found(broken):
    with pytest.raises(AssertionError, match=FLAWS[broken]):
        check_transport(broken, items=20)


@pytest.fixture(params=[Memory, Shm])
def make(request):
    """Ends of a conduit in a new transport of each kind."""
    transports = []

    def made():
        transports.append(request.param())
        return transports[-1].outbox(CONDUIT), transports[-1].inbox(CONDUIT)

    yield made
    for transport in transports:
        transport.close()


def test_only_the_slot_that_was_granted_first_can_be_pushed(make):
    outbox, inbox = make()
    inbox.grant(0)
    inbox.grant(1)
    first = outbox.granted()[0]
    assert outbox.granted()[0] is first
    outbox.push(first)
    with pytest.raises(ValueError, match="granted first"):
        outbox.push(first)
    with pytest.raises(ValueError, match="granted first"):
        outbox.push(inbox.slot(1))
    assert inbox.probe().index == first.index
    assert inbox.probe() is None


def test_a_conduit_goes_on_from_its_state(make):
    outbox, inbox = make()
    inbox.grant(5)
    inbox.grant(6)
    outbox.push(outbox.granted()[0])
    state = inbox.state()
    outbox, inbox = make()
    inbox.load_state(state)
    assert inbox.probe().update == 5
    assert outbox.granted()[0].update == 6
    assert outbox.tag == 6
    assert not inbox.grant(7)


def test_a_slot_shows_the_memory_of_its_conduit(make):
    outbox, inbox = make()
    inbox.grant(0)
    slot = outbox.granted()[0]
    slot.leaf("x")[:] = 3, 4
    outbox.push(slot)
    assert inbox.slot(slot.index).arrays["x"].tolist() == [3, 4]
    assert inbox.probe().leaf("x").tolist() == [3, 4]
