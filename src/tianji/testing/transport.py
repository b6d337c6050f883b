"""Does a transport keep what its template promises?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from tianji.channel import Conduit, Inbox, Outbox, Publisher, Slot, Subscriber, Transport
from tianji.testing.crossing import check_crossing
from tianji.testing.items import (
    LAYOUT,
    SLOTS,
    fill,
    grant,
    intact,
    params_of,
    reclaim,
)
from tianji.testing.renewal import check_renewal
from tianji.types import Params, leaf

TURNS = 200
"""turns for each item, after which a transport in one process is taken to have stalled"""


def check_transport(
    make: Callable[[], Transport],
    items: int = 400,
    seed: int = 0,
    processes: bool = False,
    deadline: float = 60.0,
) -> None:
    """Does a transport keep its word? An AssertionError says which one it broke.

    In one process, for 1, 4 and 8 senders with `items` each, in random order: order, no loss, no
    duplicate, no corruption, refusal when full, grants and releases that the sender can see, a
    state from which another transport goes on, slots that are reclaimed, slots that are pushed in
    any order where they may be; and only the newest, for each
    receiver, where only the newest is promised. What was granted or pushed in this process must be
    seen at once.

    With `processes` the same between processes, with pauses at random moments: sleepers are woken,
    a death is noticed by the other side and costs nothing that was pushed, and no version is read
    half. The checker opens conduits on one transport and offers their ends to the others, each of
    which has a transport of its own. Then ends whose processes are killed at random moments, again
    and again, are revoked and offered to new ones: no item is lost, doubled or moved, slots come in
    the same order as ever, and an offer of an older life is dropped. No process and no descriptor
    is left, and no process lasts longer than `deadline` seconds.
    """
    rng = np.random.default_rng(seed)
    for senders in (1, 4, 8):
        _check_conduits(make, senders, items, rng)
    _check_reclaim(make)
    _check_any_order(make, rng)
    _check_newest(make)
    if processes:
        check_crossing(make, items, rng, deadline)
        check_renewal(make, rng, deadline)


def _check_conduits(
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
    """One conduit, both of its ends, and what must be true of it."""

    outbox: Outbox
    inbox: Inbox

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self.conduit = Conduit(f"check-{sender}", "lane", LAYOUT, SLOTS)
        self.granted = self.pushed = self.probed = self.released = 0
        self._held: list[tuple[int, Slot]] = []

    def join(self, transport: Transport) -> None:
        self.outbox, self.inbox = transport.outbox(self.conduit), transport.inbox(self.conduit)
        self._memory = transport.memory(self.conduit)
        if not self.granted:
            assert self.outbox.tag == -1, "before the first grant the newest tag is -1"

    def grant(self) -> None:
        self.granted += grant(self.inbox, self.granted, self.granted - self.released)
        self._count()

    def push(self) -> None:
        granted = self.outbox.granted(SLOTS)
        assert len(granted) == self.granted - self.pushed, (
            "a granted slot was not offered to the sender"
        )
        if not granted:
            return
        slot = granted[0]
        assert self.outbox.granted()[0] is slot, "a slot stays the same until it is pushed"
        fill(slot, self.sender, self.pushed)
        assert (self._memory["body"][slot.index] == slot.leaf("body")).all(), (
            "the conduit's memory must be the memory of its slots: a third role reads it in place"
        )
        self.outbox.push(slot)
        self.pushed += 1
        self._count()

    def probe(self) -> None:
        slot = self.inbox.probe()
        if slot is None:
            assert self.probed == self.pushed, "a pushed item was not offered to the receiver"
            return
        intact(slot, self.sender, self.probed)
        self._held.append((self.probed, slot))
        self.probed += 1

    def release(self, rng: np.random.Generator) -> None:
        if self._held:
            number, slot = self._held.pop(int(rng.integers(len(self._held))))
            intact(slot, self.sender, number, probed=True)
            self.inbox.release(slot)
            self.released += 1
            self._count()

    def move(self, old: Transport, new: Transport) -> None:
        """Go on in another transport, as after a restart."""
        state, memory = self.inbox.state(), old.memory(self.conduit)
        assert json.loads(json.dumps(state)) == state, (
            "a conduit's state must be plain lists and numbers: a checkpoint keeps it as JSON"
        )
        granted, pushed = state["granted"], state["pushed"]
        held = [slot.index for _, slot in self._held]
        places = [*state["free"], *(index for index, *_ in granted + pushed), *held]
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
    transport, conduit = make(), Conduit("check-reclaim", "lane", LAYOUT, SLOTS)
    try:
        outbox, inbox = transport.outbox(conduit), transport.inbox(conduit)
        for number in ((5, 0), (5, 1), (6, 0)):
            inbox.grant(*number)
        granted = outbox.granted(3)
        assert [slot.number for slot in granted] == [(5, 0), (5, 1), (6, 0)], (
            "the sender must see the numbers of its grants, the oldest first"
        )
        try:
            outbox.push(granted[1])
        except ValueError:
            outbox.push(granted[0])
        else:
            raise AssertionError("an ordered conduit let a slot be pushed before an older one")
        reclaim(inbox, [(5, 1), (6, 0)], SLOTS - 1)
        probed = inbox.probe()
        assert probed is not None, "what was pushed must outlive reclaim()"
        assert probed.number == (5, 0), "what was pushed must outlive reclaim()"
    finally:
        transport.close()


def _check_any_order(make: Callable[[], Transport], rng: np.random.Generator) -> None:
    """Where the conduit is not ordered, slots come as they were pushed, with their numbers."""
    transport = make()
    conduit = Conduit("check-order", "lane", LAYOUT, SLOTS, ordered=False)
    try:
        outbox, inbox = transport.outbox(conduit), transport.inbox(conduit)
        waiting: list[tuple[int, int]] = []
        for count in range(100):
            while len(waiting) < SLOTS:
                waiting.append((count, len(waiting)))
                assert inbox.grant(*waiting[-1]), "a grant was refused although a slot is free"
            for _ in range(rng.integers(1, SLOTS + 1)):
                granted = outbox.granted(SLOTS)
                assert [slot.number for slot in granted] == waiting, "grants must keep their order"
                slot = granted[int(rng.integers(len(granted)))]
                fill(slot, *slot.number)
                waiting.remove(slot.number)
                outbox.push(slot)
                assert [[*x[1:]] for x in inbox.state()["granted"]] == [[*x] for x in waiting], (
                    "its state must say which grants were not pushed"
                )
                probed = inbox.probe()
                assert probed is not None, "a pushed item was not offered to the receiver"
                assert probed.number == slot.number, "an item came with the number of another"
                assert probed.leaf("head").tolist() == [*slot.number], "an item was moved"
                inbox.release(probed)
        reclaim(inbox, waiting, SLOTS)
    finally:
        transport.close()


def _check_newest(make: Callable[[], Transport]) -> None:
    conduit = Conduit("check-newest", "newest", {"w": leaf((5,), np.float32)}, receivers=3)
    transport, out = make(), Params(conduit.layout)
    try:
        subscribers = [transport.subscriber(conduit, index) for index in range(3)]
        publisher = transport.publisher(conduit)
        for subscriber in subscribers:
            assert subscriber.probe(-1, out) == -1, "nothing was pushed, so nothing can be newer"
            assert subscriber.lease(-1) is None, "nothing was pushed, so nothing can be leased"
        for version in (0, 1, 4):
            publisher.push(version, params_of(conduit, version))
        for subscriber in subscribers:
            out.flat[:] = -1
            assert subscriber.probe(-1, out) == 4, "each receiver must see the newest version"
            assert (out.flat == 4).all(), "the version and its content must belong together"
            out.flat[:] = -1
            assert subscriber.probe(4, out) == 4, "a version that is known already is not newer"
            assert (out.flat == -1).all(), "where nothing is newer, nothing must be copied"
        _check_leases(conduit, publisher, subscribers)
    finally:
        transport.close()


def _check_leases(
    conduit: Conduit, publisher: Publisher, subscribers: Sequence[Subscriber]
) -> None:
    """A lease is the newest version, or is found to be torn."""
    for subscriber in subscribers:
        lease = subscriber.lease(3)
        assert (lease is not None) == subscriber.leases, "a newer version was not leased"
        assert subscriber.lease(4) is None, "a version that is known already is not newer"
        if lease is not None:
            assert (lease.version, lease.params["w"].tolist()) == (4, [4] * 5), (
                "the leased version and its content must belong together"
            )
            assert lease.give_back(), "nothing was pushed meanwhile, so no lease can be torn"
    torn = [lease for subscriber in subscribers if (lease := subscriber.lease(3)) is not None]
    for version in range(5, 20):
        publisher.push(version, params_of(conduit, version))
    for lease in torn:
        same = (lease.params["w"] == lease.version).all()
        assert not lease.give_back() or same, (
            "a lease was overwritten and given back as whole: a policy would act with a mixture"
        )
