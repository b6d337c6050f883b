"""Shared memory between processes: the public checker, and what lies under it."""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from tianji.channel import Conduit, End, Gone
from tianji.testing import check_transport
from tianji.testing.items import params_of
from tianji.transports import shm
from tianji.transports.shm import DESCRIPTOR, Shm
from tianji.types import Params, leaf

LAYOUT = {"x": leaf((2,), np.int64)}
CONDUIT = Conduit("c", "lane", LAYOUT, slots=2)
NEWEST = Conduit("n", "newest", {"w": leaf((3,), np.float32)})
MANY = Conduit("n", "newest", {"w": leaf((3,), np.float32)}, receivers=256)


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:tianji")


def children():
    tasks = Path("/proc/self/task").iterdir()
    return sorted(pid for task in tasks for pid in (task / "children").read_text().split())


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(descriptors()), mappings(), set(children())
    yield
    gc.collect()
    assert set(descriptors()) <= before[0]
    assert mappings() <= before[1]
    assert set(children()) <= before[2]


@pytest.fixture
def transport():
    made = Shm()
    yield made
    made.close()


def in_a_fork(work):
    """What `work` returns, or how it died."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        except BaseException as error:
            os.write(write, json.dumps(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], 20.0)
        said = os.read(read, 4096) if ready else b""
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return json.loads(said) if said else f"killed by signal {os.WTERMSIG(status)}"


def test_shared_memory_keeps_its_promises():
    check_transport(Shm, processes=True, deadline=20.0)


@pytest.mark.slow
def test_a_checksum_finds_what_was_read_half_where_stores_can_pass_each_other(monkeypatch):
    monkeypatch.setattr(shm, "ORDERED", False)
    check_transport(Shm, items=10, processes=True, deadline=20.0)


class Broken(Shm):
    """Shm of which one promise is broken, but only between processes."""

    between = False

    def accept(self, offer):
        self.between = True
        super().accept(offer)


class EarlyRelease(Broken):
    """Frees a slot as soon as it is probed, while the receiver still reads it."""

    def inbox(self, conduit):
        inbox = super().inbox(conduit)
        if self.between:
            probe, release = inbox.probe, inbox.release

            def early():
                slot = probe()
                if slot is not None:
                    release(slot)
                return slot

            inbox.probe, inbox.release = early, lambda slot: None
        return inbox


class InTurn(Broken):
    """Grants slots in turn, whichever was released."""

    def inbox(self, conduit):
        inbox = super().inbox(conduit)
        if self.between:
            grant, count = inbox.grant, iter(range(10_000))

            def in_turn(update, number=0):
                if inbox._free:
                    inbox._free[0] = next(count) % conduit.slots
                return grant(update, number)

            inbox.grant = in_turn
        return inbox


class Loses(Broken):
    """Drops an item on its way."""

    def inbox(self, conduit):
        inbox = super().inbox(conduit)
        if self.between:
            probe = inbox.probe

            def lossy():
                slot = probe()
                return probe() if slot is not None and slot.update == 7 else slot

            inbox.probe = lossy
        return inbox


class Hasty(Broken):
    """Offers a slot to the receiver when it is looked at, before it is filled."""

    def outbox(self, conduit):
        outbox = super().outbox(conduit)
        if self.between:
            granted, push = outbox.granted, outbox.push

            def hasty(least=1):
                slots = granted(least)[:1]
                for slot in slots:
                    push(slot)
                return slots

            outbox.granted, outbox.push = hasty, lambda slot: None
        return outbox


class Torn(Broken):
    """Copies a version and does not verify that it was not overwritten meanwhile."""

    def subscriber(self, conduit, index=0):
        subscriber = super().subscriber(conduit, index)
        if self.between:
            words, places = subscriber._copies.words, subscriber._copies.places

            def torn(than, out):
                if words[shm.VERSION] <= than + 1:
                    subscriber._wants = True
                    return than
                place = words[shm.LATEST]
                version = words[shm.COPIES + 4 * place + 2]
                np.copyto(out.buffer, places[place].buffer)
                return version

            subscriber.probe = torn
        return subscriber


class TornLease(Broken):
    """Says of every lease that it is whole."""

    def subscriber(self, conduit, index=0):
        subscriber = super().subscriber(conduit, index)
        if self.between:
            lease = subscriber.lease

            def torn(than):
                found = lease(than)
                return found and SimpleNamespace(
                    version=found.version, params=found.params, give_back=lambda: True
                )

            subscriber.lease = torn
        return subscriber


class Sleepy(Broken):
    """Sleeps as long as it may, whatever comes."""

    def wait(self, timeout):
        if self.between:
            time.sleep(timeout)


class NeverGone(Broken):
    """Pushes to a receiver that is dead as if nothing were wrong."""

    def outbox(self, conduit):
        outbox = super().outbox(conduit)
        if self.between:
            push = outbox.push

            def quiet(slot):
                with contextlib.suppress(Gone):
                    return push(slot)
                outbox._granted.pop(0)

            outbox.push = quiet
        return outbox


class Hoarder(Shm):
    """Keeps the ends of the others, so that no death is ever noticed."""

    def __init__(self):
        super().__init__()
        self.hoard = []

    def offer(self, ends, life):
        offer = super().offer(ends, life)
        self.hoard += map(os.dup, offer.fds)
        return offer

    def close(self):
        super().close()
        while self.hoard:
            os.close(self.hoard.pop())


class Leaks(Shm):
    """Keeps the memory that it offers, for ever."""

    kept: ClassVar[list] = []

    def offer(self, ends, life):
        offer = super().offer(ends, life)
        Leaks.kept.append(os.dup(offer.fds[0]))
        return offer


class ReclaimsNothing(Broken):
    """Leaves with a dead sender what it was granted."""

    def inbox(self, conduit):
        inbox = super().inbox(conduit)
        if self.between:
            inbox.reclaim = list
        return inbox


class ForgetsGrants(Broken):
    """Does not grant to a new sender what the dead one had been granted."""

    def accept(self, offer):
        for (_, side, _), end in self._ends.items():
            if side == "receive":
                end._send = lambda *granted: None
        super().accept(offer)
        for (_, side, _), end in self._ends.items():
            if side == "receive":
                del end._send


class ForgetsPushes(Broken):
    """Throws away what a dead sender had pushed, and grants it again."""

    def accept(self, offer):
        for (_, side, _), end in self._ends.items():
            if side == "receive":
                end.drain()
                while end._pushed:
                    slot = end._pushed.pop()
                    end._granted.insert(0, (slot.index, *slot.number))
        super().accept(offer)


class ReclaimsBackwards(Broken):
    """Puts slots that were reclaimed behind the free ones, the last one first."""

    def inbox(self, conduit):
        inbox = super().inbox(conduit)
        if self.between:
            reclaim = inbox.reclaim

            def backwards():
                tags = reclaim()
                inbox._free.reverse()
                return tags

            inbox.reclaim = backwards
        return inbox


class KeepsOldGrants(Broken):
    """A sender goes on with what a dead receiver granted."""

    def accept(self, offer):
        senders = [end for (_, side, _), end in self._ends.items() if side == "send"]
        kept = [list(end._granted) for end in senders]
        super().accept(offer)
        for end, granted in zip(senders, kept, strict=True):
            end._granted.extend(granted if not end._granted else [])


class AcceptsStale(Broken):
    """Takes over whatever comes, of an older life too."""

    def accept(self, offer):
        self._lives.clear()
        super().accept(offer)


FLAWS = {
    EarlyRelease: (10.0, "receiver: a slot was granted that is still in use"),
    InTurn: (10.0, "receiver: an item changed while the receiver held it|lost, doubled or moved"),
    Loses: (10.0, "receiver: item 8 of sender 0 came where 7 of sender 0 was due"),
    Hasty: (10.0, "receiver: (an item arrived that is not whole|.*lost, doubled or moved)"),
    Torn: (20.0, "receiver .: version .* was read half"),
    TornLease: (20.0, "receiver .: version .* was read half"),
    Sleepy: (1.0, "not finished within 1 seconds: .*wake-up was lost"),
    NeverGone: (20.0, "sender: the receiver was killed and push did not raise Gone"),
    Hoarder: (2.0, "its inbox did not say so|not finished within 2 seconds: the receiver"),
    ReclaimsNothing: (10.0, r"receiver: grants .* were never pushed, and reclaim\(\) gave \[\]"),
    ForgetsGrants: (
        6.0,
        "its send ends were killed and renewed: an item, a grant or a slot was lost",
    ),
    ForgetsPushes: (20.0, "pushed by a sender that is dead, and is granted once more|outlive"),
    ReclaimsBackwards: (20.0, "slots that are granted again must come in the same order"),
    Leaks: (20.0, "descriptors .* of ends that were handed over are still open"),
    AcceptsStale: (6.0, "were killed and renewed: an item, a grant or a slot was lost"),
    KeepsOldGrants: (20.0, "a grant of a dead receiver was offered|dead receiver had granted came"),
}


def flaws():
    """Those that need processes to be killed many times are slow to show."""
    often = AcceptsStale, ForgetsGrants, ForgetsPushes, KeepsOldGrants, ReclaimsBackwards
    for flaw in FLAWS:
        slow = flaw in often
        yield pytest.param(flaw, marks=[pytest.mark.slow] if slow else [], id=flaw.__name__)


@pytest.mark.parametrize("broken", list(flaws()))
def test_a_transport_that_is_broken_between_processes_is_found(broken):
    """In some tries: there are flaws that show only where a process is killed just then."""
    deadline, flaw = FLAWS[broken]

    def tries():
        for _ in range(10):
            check_transport(broken, items=40, processes=True, deadline=deadline)

    with pytest.raises(AssertionError, match=flaw):
        tries()
    while Leaks.kept:
        os.close(Leaks.kept.pop())


@pytest.mark.parametrize(
    ("descriptor", "error"),
    [
        ((0, 0, 5, 1, ~1), "descriptor 1 came where 0 was due"),
        ((0, 0, 5, 0, 0), "descriptor 0 came where 0 was due"),
        ((1, 0, 5, 0, ~0), "slot 1 was pushed"),
        ((0, 0, 6, 0, ~0), "slot 0 was pushed"),
        ((0, 1, 5, 0, ~0), "slot 0 was pushed"),
    ],
    ids=["one is missing", "garbled", "another slot", "another update", "another grant"],
)
def test_a_descriptor_that_is_not_due_is_refused(transport, descriptor, error):
    inbox = transport.inbox(CONDUIT)
    inbox.grant(5)
    os.write(transport._made["c"]["items_w"], DESCRIPTOR.pack(*descriptor))
    with pytest.raises(ValueError, match=error):
        transport.wait(1.0)
    assert inbox.probe() is None


OTHER = """
import json, socket, sys
import numpy as np
from tianji.channel import Conduit, Offer
from tianji.transports.shm import Shm
from tianji.types import Params, leaf

conduits = socket.socket(fileno=int(sys.argv[1]))
data, fds, _, _ = socket.recv_fds(conduits, 4096, 100)
conduits.close()
transport = Shm()
transport.accept(Offer("shm", json.loads(data), tuple(fds)))
outbox = transport.outbox(Conduit("c", "lane", {"x": leaf((2,), np.int64)}, 2))
snapshots = Conduit("n", "newest", {"w": leaf((3,), np.float32)}, receivers=256)
newest, flat = transport.subscriber(snapshots, 1), Params(snapshots.layout)
while (version := newest.probe(6, flat)) == 6:
    transport.wait(20.0)
while not (granted := outbox.granted()):
    transport.wait(20.0)
slot = granted[0]
slot.leaf("x")[:] = version, flat["w"].sum()
outbox.push(slot)
"""


def test_ends_can_be_carried_to_another_program(transport):
    transport.open(CONDUIT)
    transport.open(MANY)
    offer = transport.offer([End("c", "send"), End("n", "receive", 1)], 0)
    mine, yours = socket.socketpair()
    with mine, yours:
        command = [sys.executable, "-c", OTHER, str(yours.fileno())]
        other = subprocess.Popen(command, pass_fds=[yours.fileno()])
        socket.send_fds(mine, [json.dumps(offer.data).encode()], offer.fds)
    offer.close()
    try:
        inbox, publisher = transport.inbox(CONDUIT), transport.publisher(NEWEST)
        inbox.grant(0)
        publisher.push(7, params_of(NEWEST, 2))
        deadline = time.monotonic() + 20
        while (slot := inbox.probe()) is None:
            assert time.monotonic() < deadline
            transport.wait(1.0)
        assert slot.leaf("x").tolist() == [7, 6]
        while not inbox.ended:
            assert time.monotonic() < deadline
            transport.wait(1.0)
        assert not inbox.grant(1)
    finally:
        other.kill()
        other.wait()
    assert other.returncode in (0, -signal.SIGKILL)


def test_pushing_to_a_receiver_that_is_gone_raises(transport):
    other = Shm()
    transport.open(CONDUIT)
    other.accept(transport.offer([End("c", "receive")], 0))
    outbox, inbox = transport.outbox(CONDUIT), other.inbox(CONDUIT)
    inbox.grant(0)
    slot = outbox.granted()[0]
    other.close()
    with pytest.raises(Gone):
        outbox.push(slot)
    assert outbox.granted()[0] is slot


def everything(transport):
    """Every kind of end, used."""
    outbox, inbox = transport.outbox(CONDUIT), transport.inbox(CONDUIT)
    subscriber, publisher = transport.subscriber(NEWEST), transport.publisher(NEWEST)
    inbox.grant(0)
    outbox.push(outbox.granted()[0])
    publisher.push(0, params_of(NEWEST, 1))
    out = Params(NEWEST.layout)
    assert inbox.probe().update == subscriber.probe(-1, out) == 0
    return outbox, inbox, subscriber, publisher


def test_no_descriptor_and_no_memory_is_left_after_close():
    before = descriptors(), mappings()
    transport = Shm()
    ends = everything(transport)
    assert len(descriptors()) > len(before[0])
    assert mappings() == before[1] + 2
    transport.close()
    transport.close()
    del ends
    assert (descriptors(), mappings()) == before


def test_what_was_accepted_and_not_used_is_closed_too():
    before = descriptors()
    transport = Shm()
    transport.open(CONDUIT)
    copy = Shm()
    copy.accept(transport.offer([End("c", "receive"), End("c", "send"), End("c", "read")], 0))
    copy.close()
    transport.close()
    assert descriptors() == before


def test_an_end_is_offered_once_until_it_is_revoked(transport):
    transport.open(CONDUIT)
    transport.offer([End("c", "send")], 0).close()
    with pytest.raises(ValueError, match="send end of c is somebody's"):
        transport.offer([End("c", "receive"), End("c", "send")], 0)
    transport.revoke("c")
    transport.offer([End("c", "receive"), End("c", "send")], 0).close()


def test_an_end_that_was_not_offered_cannot_be_made(transport):
    transport.open(CONDUIT)
    other = Shm()
    other.accept(transport.offer([End("c", "read")], 0))
    other.memory(CONDUIT)
    with pytest.raises(ValueError, match="not opened here"):
        other.inbox(CONDUIT)
    other.close()


def test_an_offer_of_an_older_life_is_dropped_and_its_descriptors_closed(transport):
    transport.open(CONDUIT)
    other = Shm()
    older = transport.offer([End("c", "receive")], 1)
    transport.revoke("c")
    other.accept(transport.offer([End("c", "receive")], 2))
    inbox, outbox = other.inbox(CONDUIT), transport.outbox(CONDUIT)
    inbox.grant(7)
    other.accept(older)
    for fd in older.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    outbox.push(outbox.granted()[0])
    assert inbox.probe().update == 7
    other.close()


def test_an_end_goes_on_in_place_with_a_new_other_side(transport):
    other = Shm()
    transport.open(CONDUIT)
    inbox = transport.inbox(CONDUIT)
    other.accept(transport.offer([End("c", "send")], 0))
    inbox.grant(5)
    inbox.grant(6)
    outbox = other.outbox(CONDUIT)
    outbox.push(outbox.granted()[0])
    other.close()
    transport.revoke("c")
    another = Shm()
    another.accept(transport.offer([End("c", "send")], 1))
    transport.accept(transport.offer([End("c", "receive")], 1))
    outbox = another.outbox(CONDUIT)
    assert [slot.update for slot in outbox.granted()] == [6]
    outbox.push(outbox.granted()[0])
    assert [inbox.probe().update for _ in range(2)] == [5, 6]
    another.close()


def test_an_array_outlives_the_transport_it_came_from():
    before = mappings()
    transport = Shm()
    array = transport.memory(CONDUIT)["x"]
    array[:] = 3
    transport.close()
    assert mappings() == before + 1
    assert array.sum() == 12
    del array
    assert mappings() == before


def test_a_role_that_waits_burns_nothing(transport):
    transport.open(CONDUIT)
    transport.open(NEWEST)
    transport.publisher(NEWEST).push(0, params_of(NEWEST, 1))
    offer = transport.offer([End("c", "receive"), End("n", "receive")], 0)

    def idle():
        transport = Shm()
        transport.accept(offer)
        transport.inbox(CONDUIT)
        subscriber, out = transport.subscriber(NEWEST), Params(NEWEST.layout)
        version = subscriber.probe(-1, out)
        begin, end = time.process_time(), time.monotonic() + 1.0
        while (left := end - time.monotonic()) > 0:
            version = subscriber.probe(version, out)
            transport.wait(left)
        return time.process_time() - begin

    assert in_a_fork(idle) < 0.02
    offer.close()


def waits(transport, seconds=0.2):
    """How often a role is woken in this time: a few times at most, where nothing comes."""
    end, count = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        transport.wait(left)
        count += 1
    return count


def test_a_role_sleeps_again_after_it_was_woken_by_a_version(transport):
    subscriber, out = transport.subscriber(NEWEST), Params(NEWEST.layout)
    publisher = transport.publisher(NEWEST)
    subscriber.probe(-1, out)
    transport.wait(0.0)
    publisher.push(0, params_of(NEWEST, 1))
    assert waits(transport) < 10


def test_a_role_sleeps_again_after_it_was_woken_by_a_death(transport):
    inbox = transport.inbox(CONDUIT)
    transport.offer([End("c", "send")], 0).close()
    assert waits(transport) < 10
    assert inbox.ended


def test_a_forked_role_does_not_wake_for_what_another_has_not_read(transport):
    other = Conduit("other", "lane", LAYOUT, slots=2)
    transport.open(other)
    offer = transport.offer([End("other", "receive")], 0)

    def idle():
        transport = Shm()
        transport.accept(offer)
        transport.inbox(other)
        return waits(transport)

    outbox, inbox = transport.outbox(CONDUIT), transport.inbox(CONDUIT)
    inbox.grant(0)
    assert in_a_fork(idle) < 10
    offer.close()
    begin = time.monotonic()
    transport.wait(5.0)
    assert time.monotonic() - begin < 4.0, "a fork took its parent's wake-ups away"
    assert outbox.granted()


def test_a_receiver_does_not_sleep_over_an_item_that_was_counted(transport):
    outbox, inbox = transport.outbox(CONDUIT), transport.inbox(CONDUIT)
    inbox.grant(0)
    assert inbox.probe() is None
    transport.wait(0.0)
    outbox.push(outbox.granted()[0])
    assert inbox.out == 0
    begin = time.monotonic()
    transport.wait(5.0)
    assert time.monotonic() - begin < 4.0
    begin = time.monotonic()
    transport.wait(0.1)
    assert time.monotonic() - begin > 0.05, "an item that nobody takes must not keep a role awake"
    assert inbox.probe().update == 0


def test_every_slot_of_a_long_lane_can_be_out(transport):
    conduit = Conduit("long", "lane", LAYOUT, slots=3000)  # 2048 descriptors fill a pipe of 64 KiB
    outbox, inbox = transport.outbox(conduit), transport.inbox(conduit)
    for tag in range(3000):
        assert inbox.grant(tag)
    for _ in range(3000):
        outbox.push(outbox.granted()[0])
    assert inbox.out == 0
    assert [inbox.probe().update for _ in range(3000)] == list(range(3000))


def test_more_slots_than_a_pipe_has_room_for_are_granted_in_turn(transport):
    conduit = Conduit(
        "longer", "lane", LAYOUT, slots=40_000
    )  # a pipe of 1 MiB holds 32,768 descriptors
    outbox, inbox = transport.outbox(conduit), transport.inbox(conduit)
    granted = 0
    while inbox.grant(granted):
        granted += 1
    assert granted < 40_000
    pushed = 0
    while pushed < 40_000:
        while granted_to := outbox.granted():
            assert granted_to[0].update == pushed
            outbox.push(granted_to[0])
            pushed += 1
        while inbox.probe() is not None:
            pass
        while inbox.grant(granted):
            granted += 1
    assert granted == 40_000


@pytest.mark.parametrize("index", [0, 255])
def test_every_one_of_many_receivers_is_woken(transport, index):
    subscriber, out = transport.subscriber(MANY, index), Params(NEWEST.layout)
    publisher = transport.publisher(NEWEST)
    assert subscriber.probe(-1, out) == -1
    transport.wait(0.0)
    publisher.push(0, params_of(NEWEST, 1))
    begin = time.monotonic()
    transport.wait(5.0)
    assert time.monotonic() - begin < 4.0
    assert subscriber.probe(-1, out) == 0
    assert out["w"].tolist() == [1, 1, 1]


def test_a_version_that_comes_between_a_probe_and_a_wait_is_not_slept_over(transport):
    subscriber, out = transport.subscriber(NEWEST), Params(NEWEST.layout)
    publisher = transport.publisher(NEWEST)
    for version in range(2):
        assert subscriber.probe(version - 1, out) == version - 1
        publisher.push(version, params_of(NEWEST, 1))
        begin = time.monotonic()
        transport.wait(5.0)
        assert time.monotonic() - begin < 4.0
        assert subscriber.probe(version - 1, out) == version


def test_memory_that_cannot_be_had_is_an_error_at_once():
    def ask():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        before = descriptors()
        transport = Shm()
        try:
            transport.open(Conduit("large", "lane", {"x": leaf((2**20,), np.uint8)}, slots=2))
        except MemoryError as error:
            transport.close()
            return [str(error), descriptors() == before]

    said, closed = in_a_fork(ask)
    assert "2 MiB of shared memory cannot be had" in said
    assert closed


def test_more_memory_than_the_machine_has_is_refused_before_it_is_taken():
    def ask():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            Shm().open(Conduit("huge", "lane", {"x": leaf((2**40,), np.uint8)}, slots=100))
        except MemoryError as error:
            return str(error)

    assert "cannot be had" in in_a_fork(ask)
