"""The transport between processes of one machine: anonymous shared memory and pipes.

A conduit is one memory file (`memfd_create`: no name, so nothing can be left behind), with all of
its slots, and two pipes: grants go one way and pushes the other, as descriptors of 32 bytes. The
kernel keeps their order, wakes a sleeper (epoll), and tells of a death (end of file). What a slot
holds is never copied or serialized: it is written once, by the sender, into its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import select
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tianji.channel import (
    Conduit,
    End,
    Gone,
    Inbox,
    Lease,
    Offer,
    Outbox,
    Publisher,
    Side,
    Slot,
    Subscriber,
    Transport,
    check_push,
)
from tianji.types import Array, Params, fence

DESCRIPTOR = struct.Struct("<iiqqq")
"""slot, the number of its grant, backwards, the sender's count of descriptors, and the complement
of that count"""
AT_ONCE = 64 * DESCRIPTOR.size
"""bytes of descriptors read in one call; a multiple of one, so that none is cut"""

MOST_PIPE = 1 << 20
"""bytes of a pipe, at most: what the system allows without privileges"""

HEAD = 1 << 16
"""bytes before the arrays, for words"""
LINE = 64
"""bytes of a cache line: leaves begin on one, and words that two sides write have one each"""
PUSHED, GRANTED, TAG, RELEASED = 0, 8, 16, 24
"""words in a conduit's head: the sender writes the first one, the receiver the others"""

VERSION, LATEST, COPIES = 0, 8, 16
"""words in a newest-only conduit's head: the newest version, its place, then begin, end, version
and checksum of each place"""
ASLEEP = 64
"""the word of the first receiver, 8 words each: 1 where it wants to be woken"""
RECEIVERS = (HEAD // 8 - ASLEEP) // 8
PLACES = 3
MOST_TRIES = 100_000

ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Do stores become visible in program order? Elsewhere a checksum finds what was torn."""


def _available() -> int:
    """Bytes that can still be had. `posix_fallocate` does not ask first: it takes page after page
    until the kernel kills someone."""
    with open("/proc/meminfo") as lines:
        found = {line.split()[0]: int(line.split()[1]) for line in lines}
    return found["MemAvailable:"] * 1024


class _File:
    """Anonymous memory, mapped: words in its head, arrays behind them."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, HEAD + size)
        self.words = memoryview(self._map)[:HEAD].cast("q")

    @staticmethod
    def made(size: int) -> int:
        """The descriptor of a new one."""
        size += HEAD
        if size > (free := _available()):
            raise MemoryError(
                f"{size / 2**20:.0f} MiB of shared memory cannot be had: "
                f"{free / 2**20:.0f} MiB are free. Make the buffer or the batch smaller"
            )
        fd = os.memfd_create("tianji", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise MemoryError(
                f"{size / 2**20:.0f} MiB of shared memory cannot be had ({error.strerror})"
            ) from error
        return fd

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        flat: Array = np.frombuffer(self._map, dtype, count, HEAD + offset)
        return flat.reshape(shape)


def _places(conduit: Conduit) -> tuple[dict[str, int], int]:
    """Where each leaf begins, and bytes in all."""
    offsets, end = {}, 0
    for name, leaf in conduit.layout.items():
        offsets[name] = end
        end += -(-conduit.slots * leaf.nbytes // LINE) * LINE
    return offsets, max(end, LINE)


def _size(conduit: Conduit) -> int:
    """Bytes behind the head."""
    if conduit.kind == "newest":
        return PLACES * _Copies.room(conduit)
    return _places(conduit)[1]


def _pipe(slots: int) -> tuple[int, int]:
    """A pipe with room for a descriptor of every slot, or for as many as the system allows."""
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    room = min(slots * DESCRIPTOR.size, MOST_PIPE)
    if fcntl.fcntl(ends[1], fcntl.F_GETPIPE_SZ) < room:
        with contextlib.suppress(OSError):  # then fewer grants are out at once
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, room)
    return ends


def _room(*pipes: int) -> int:
    """Descriptors that all of these pipes have room for."""
    return min(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) for pipe in pipes) // DESCRIPTOR.size


class _Reader:
    """The reading end of a pipe of descriptors."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False
        self._count = 0

    def read(self) -> list[tuple[int, int, int]]:
        """(slot, update, grant) of all that have arrived."""
        found: list[tuple[int, int, int]] = []
        while not self.ended:
            try:
                raw = os.read(self.fd, AT_ONCE)
            except BlockingIOError:
                break
            if not raw:
                self.ended = True
            for index, grant, update, count, check in DESCRIPTOR.iter_unpack(raw):
                if count != self._count or check != ~count:
                    raise ValueError(f"descriptor {count} came where {self._count} was due")
                self._count += 1
                found.append((index, update, grant))
            if len(raw) < AT_ONCE:
                break
        return found


class _Writer:
    """The writing end of a pipe of descriptors."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._count = 0

    def write(self, index: int, update: int, grant: int) -> int:
        """How many were written, this one included; raises `Gone` where nobody can read it."""
        count = self._count
        try:
            os.write(self.fd, DESCRIPTOR.pack(index, grant, update, count, ~count))
        except BrokenPipeError:
            raise Gone from None
        self._count += 1
        return self._count


class _Sender:
    """An outbox."""

    def __init__(
        self, conduit: Conduit, words: memoryview, memory: Mapping[str, Array], files: _Files
    ) -> None:
        self._words = words
        self._memory = memory
        self._ordered = conduit.ordered
        self._grants = _Reader(files["grants_r"])
        self._items = _Writer(files["items_w"])
        self._granted: list[Slot] = []
        self._seen = 0

    @property
    def tag(self) -> int:
        tag: int = self._words[TAG]
        return tag - 1

    @property
    def released(self) -> int:
        released: int = self._words[RELEASED]
        return released

    def granted(self, least: int = 1) -> Sequence[Slot]:
        # Where enough are known there is no need to look: reading takes a system call.
        if len(self._granted) < least and self._words[GRANTED] != self._seen:
            self.drain()
        return self._granted

    def push(self, slot: Slot) -> None:
        if not self._granted or slot is not self._granted[0]:
            check_push(slot, self._granted, self._ordered)
        self._words[PUSHED] = self._items.write(slot.index, slot.update, slot.grant)
        self._granted.remove(slot)

    def drain(self) -> bool:
        """Take what has come; True where more can come."""
        for index, update, grant in self._grants.read():
            self._granted.append(Slot(index, self._memory, update, grant))
            self._seen += 1
        return not self._grants.ended

    def renew(self, files: _Files) -> int:
        """Talk to a receiver that took a dead one's place and grants anew; what wakes this end."""
        self._grants, self._items = _Reader(files["grants_r"]), _Writer(files["items_w"])
        self._granted.clear()
        self._seen = self._words[GRANTED] = self._words[PUSHED] = 0
        return files["grants_r"]


class _Receiver:
    """An inbox."""

    def __init__(
        self, conduit: Conduit, words: memoryview, memory: Mapping[str, Array], files: _Files
    ) -> None:
        self.ordered = conduit.ordered
        self._words = words
        self._memory = memory
        self._items = _Reader(files["items_r"])
        self._grants = _Writer(files["grants_w"])
        self._most_out = _room(files["items_r"], files["grants_w"])
        self._free = deque(range(conduit.slots))
        self._granted: list[tuple[int, int, int]] = []
        self._pushed: deque[Slot] = deque()
        self._seen = 0
        self._used = 0
        self.fresh = False
        """has something come that neither a probe nor a sleeper knows of?"""

    @property
    def ended(self) -> bool:
        return self._items.ended

    @property
    def out(self) -> int:
        if self._words[PUSHED] != self._seen:
            self.drain()
        return len(self._granted)

    def grant(self, update: int, grant: int = 0) -> bool:
        if not self._free or self._items.ended or len(self._granted) >= self._most_out:
            return False
        index = self._free.popleft()
        self._used = max(self._used, index + 1)
        self._granted.append((index, update, grant))
        self._words[TAG] = update + 1
        self._send(index, update, grant)
        return True

    def probe(self) -> Slot | None:
        if not self._pushed:
            if self._words[PUSHED] == self._seen:
                return None
            self.drain()
        self.fresh = False
        return self._pushed.popleft() if self._pushed else None

    def release(self, slot: Slot) -> None:
        self._words[RELEASED] += 1
        self._free.append(slot.index)

    def slot(self, index: int) -> Slot:
        return Slot(index, self._memory)

    def reclaim(self) -> list[tuple[int, int]]:
        self.drain()
        numbers = [(update, grant) for _, update, grant in self._granted]
        # To the front: slots are granted in the same order again.
        self._free.extendleft(index for index, *_ in reversed(self._granted))
        self._granted.clear()
        return numbers

    def state(self) -> dict[str, Any]:
        self.drain()
        return {
            "tag": self._words[TAG] - 1,
            "released": self._words[RELEASED],
            "used": self._used,
            "free": list(self._free),
            "granted": [list(x) for x in self._granted],
            "pushed": [[slot.index, *slot.number] for slot in self._pushed],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._words[TAG], self._words[RELEASED] = state["tag"] + 1, state["released"]
        self._used, self._free = state["used"], deque(state["free"])
        self._granted = [(index, update, grant) for index, update, grant in state["granted"]]
        self._pushed = deque(
            Slot(index, self._memory, *number) for index, *number in state["pushed"]
        )
        for granted in self._granted:
            self._send(*granted)

    def drain(self) -> bool:
        """Take what has come; True where more can come."""
        for item in self._items.read():
            if self._granted and item == self._granted[0]:
                del self._granted[0]
            elif not self.ordered and item in self._granted:
                self._granted.remove(item)
            else:
                raise ValueError(
                    f"slot {item[0]} was pushed, which is not the one that was granted"
                )
            index, update, grant = item
            self._pushed.append(Slot(index, self._memory, update, grant))
            self._seen += 1
            self.fresh = True
        return not self._items.ended

    def renew(self, files: _Files) -> int:
        """Listen to a sender that took a dead one's place: what the dead one had pushed is kept,
        what it had not is granted to the new one; what wakes this end."""
        self.drain()
        self._items, self._grants = _Reader(files["items_r"]), _Writer(files["grants_w"])
        self._seen = self._words[GRANTED] = self._words[PUSHED] = 0
        for granted in self._granted:
            self._send(*granted)
        return files["items_r"]

    def _send(self, index: int, update: int, grant: int) -> None:
        # A sender that is dead is not the receiver's failure: its end of file says so.
        with contextlib.suppress(Gone):
            self._words[GRANTED] = self._grants.write(index, update, grant)


class _Copies:
    """The memory of a newest-only conduit."""

    def __init__(self, file: _File, conduit: Conduit) -> None:
        self.words = file.words
        self.layout, room = conduit.layout, self.room(conduit)
        places = (file.array(i * room, (conduit.nbytes,), np.uint8) for i in range(PLACES))
        self.places = [Params(conduit.layout, place) for place in places]

    @staticmethod
    def room(conduit: Conduit) -> int:
        """Bytes of each place."""
        return max(-(-conduit.nbytes // LINE), 1) * LINE


class _Publisher:
    """Writes each version into the place that was written longest ago."""

    def __init__(self, copies: _Copies, events: Mapping[int, int]) -> None:
        self._copies = copies
        self._events = dict(events)
        """the event descriptor of each receiver"""
        self._count = 0

    def push(self, version: int, params: Params) -> None:
        words, place = self._copies.words, self._count % PLACES
        buffer = self._copies.places[place].buffer
        self._count += 1
        word = COPIES + 4 * place
        words[word] = self._count
        fence()  # large copies go past the cache: without this they could overtake the mark
        np.copyto(buffer, params.buffer)
        words[word + 2] = version
        words[word + 3] = 0 if ORDERED else zlib.crc32(buffer.data)
        words[word + 1] = self._count
        words[LATEST] = place
        words[VERSION] = version + 1
        fence()
        for index, event in self._events.items():
            if words[ASLEEP + 8 * index]:
                words[ASLEEP + 8 * index] = 0
                os.eventfd_write(event, 1)


@dataclass(frozen=True)
class _Lease:
    version: int
    params: Params
    words: memoryview
    word: int
    """the first one of the place"""
    end: int
    """what it was"""

    def give_back(self) -> bool:
        return bool(self.words[self.word] == self.end)


class _Subscriber:
    """Copies the newest, and again where it was overwritten meanwhile."""

    def __init__(self, copies: _Copies, index: int, event: int) -> None:
        self.event = event
        self.layout = copies.layout
        self.leases = ORDERED
        self._copies = copies
        self._asleep = ASLEEP + 8 * index
        self._wants = False
        self._noticed = 0

    def probe(self, than: int, out: Params) -> int:
        words = self._copies.words
        if words[VERSION] <= than + 1:
            self._wants = True
            return than
        for _ in range(MOST_TRIES):
            place = words[LATEST]
            word = COPIES + 4 * place
            end, version, check = words[word + 1], words[word + 2], words[word + 3]
            np.copyto(out.buffer, self._copies.places[place].buffer)
            if not ORDERED:
                fence()
            if words[word] == end and (ORDERED or zlib.crc32(out.buffer.data) == check):
                return version if version > than else than
        raise RuntimeError("the newest version was overwritten at every try to read it")

    def lease(self, than: int) -> Lease | None:
        words = self._copies.words
        if not ORDERED or words[VERSION] <= than + 1:
            self._wants = True
            return None
        place = words[LATEST]
        word = COPIES + 4 * place
        end, version = words[word + 1], words[word + 2]
        return _Lease(version, self._copies.places[place], words, word, end)

    def arm(self) -> bool:
        """Ask to be woken by the next version; False where there is one already."""
        if not self._wants:
            return True
        words = self._copies.words
        words[self._asleep] = 1
        fence()
        newest = words[VERSION]
        if newest > self._noticed:
            self._noticed = newest
            return False
        return True

    def disarm(self) -> None:
        self._wants = False

    def drain(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return True


_Files = dict[str, int]
"""Descriptors of one conduit, by what they are."""

PIPES: Mapping[Side, tuple[str, ...]] = {
    "send": ("items_w", "grants_r"), "receive": ("items_r", "grants_w"), "read": ()
}  # fmt: skip
"""what each side has of the two pipes"""


class Shm(Transport):
    """Conduits between processes of one machine. An offer holds the pipes of an end themselves,
    so that the process that made them does not hide a death: a pipe ends when the last process
    that could write into it is gone."""

    name = "shm"

    def __init__(self) -> None:
        self._opened: dict[str, Conduit] = {}
        self._files: dict[str, _Files] = {}
        """of conduits that are open here, and of the ends that are here"""
        self._made: dict[str, _Files] = {}
        """pipes of ends that are nobody's yet"""
        self._lives: dict[End, int] = {}
        """of the offers in hand"""
        self._mapped: dict[str, _File] = {}
        self._ends: dict[End, Any] = {}
        self._subscribers: list[_Subscriber] = []
        self._receivers: list[_Receiver] = []
        self._epoll = select.epoll()
        self._drains: dict[int, Any] = {}
        self._beside: list[int] = []

    def open(self, conduit: Conduit) -> None:
        name, newest = conduit.name, conduit.kind == "newest"
        if name in self._files:
            return
        if newest and conduit.receivers > RECEIVERS:
            raise ValueError(f"{name}: {conduit.receivers} receivers; room is for {RECEIVERS}")
        self._files[name] = {"memory": _File.made(_size(conduit))}
        self._opened[name] = conduit
        for index in range(conduit.receivers if newest else 0):
            event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._files[name][f"event-{index}"] = event

    def offer(self, ends: Sequence[End], life: int) -> Offer:
        fds: list[int] = []

        def placed(files: _Files) -> _Files:
            places = {kind: len(fds) + i for i, kind in enumerate(files)}
            fds.extend(files.values())
            return places

        memory = {end.conduit: self._files[end.conduit]["memory"] for end in ends}
        places = placed({name: os.dup(fd) for name, fd in memory.items()})
        try:
            offered = [[*end, placed(self._hand_over(end))] for end in ends]
        except BaseException:
            Offer(self.name, {}, tuple(fds)).close()
            raise
        return Offer(self.name, {"life": life, "memory": places, "ends": offered}, tuple(fds))

    def accept(self, offer: Offer) -> None:
        data, fds = offer.data, offer.fds
        for name, place in data["memory"].items():
            if self._files.setdefault(name, {}).setdefault("memory", fds[place]) != fds[place]:
                os.close(fds[place])
        for conduit, side, index, places in data["ends"]:
            end, new = End(conduit, side, index), {kind: fds[at] for kind, at in places.items()}
            if data["life"] >= self._lives.get(end, data["life"]):
                self._lives[end] = data["life"]
                new = self._take_over(end, new)
            for fd in new.values():
                self._forget(fd)
                os.close(fd)

    def revoke(self, conduit: str) -> None:
        for fd in self._made.pop(conduit, {}).values():
            os.close(fd)

    def outbox(self, conduit: Conduit) -> Outbox:
        sender: _Sender = self._end(conduit, "send", _Sender, "grants_r")
        return sender

    def inbox(self, conduit: Conduit) -> Inbox:
        receiver: _Receiver = self._end(conduit, "receive", _Receiver, "items_r")
        if receiver not in self._receivers:
            self._receivers.append(receiver)
        return receiver

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        return self._view(conduit)[1]

    def publisher(self, conduit: Conduit) -> Publisher:
        end = End(conduit.name, "send")
        if end not in self._ends:
            copies, files = self._copies(conduit), self._files[conduit.name]
            events = {int(k[6:]): fd for k, fd in files.items() if k.startswith("event-")}
            self._ends[end] = _Publisher(copies, events)
        publisher: _Publisher = self._ends[end]
        return publisher

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        if index >= conduit.receivers:
            raise ValueError(f"{conduit.name} has {conduit.receivers} receivers: {index} is none")
        end = End(conduit.name, "receive", index)
        if end not in self._ends:
            copies = self._copies(conduit)
            event = self._files[conduit.name][f"event-{index}"]
            made = self._ends[end] = _Subscriber(copies, index, event)
            self._subscribers.append(made)
            self._watch(event, made.drain)
        subscriber: _Subscriber = self._ends[end]
        return subscriber

    def also(self, fd: int) -> None:
        self._beside.append(fd)
        self._epoll.register(fd, select.EPOLLIN)

    def wait(self, timeout: float) -> None:
        for subscriber in self._subscribers:
            if not subscriber.arm():
                timeout = 0.0
        for receiver in self._receivers:
            if receiver.fresh:
                timeout = 0.0
        ready = self._epoll.poll(timeout)
        for subscriber in self._subscribers:
            subscriber.disarm()
        for fd, _ in ready:
            drain = self._drains.get(fd)
            if drain is not None and not drain():
                self._forget(fd)
        for receiver in self._receivers:
            receiver.fresh = False

    def close(self) -> None:
        self._ends.clear()
        self._drains.clear()
        self._subscribers.clear()
        self._receivers.clear()
        self._epoll.close()
        for files in (*self._files.values(), *self._made.values()):
            for fd in files.values():
                os.close(fd)
        self._files.clear()
        self._made.clear()
        self._mapped.clear()

    def _hand_over(self, end: End) -> _Files:
        """The descriptors of an end, which are no longer this transport's; new ones of events, as
        those of dead receivers are used again."""
        name, side, index = end
        if (conduit := self._opened.get(name)) is None:
            raise ValueError(f"{name} was not opened here, so that its {side} end cannot be given")
        if conduit.kind == "newest":
            wanted = {"send": "event-", "receive": f"event-{index}", "read": "none"}[side]
            files = self._files[name].items()
            exact = side == "receive"
            return {
                kind: os.dup(fd)
                for kind, fd in files
                if kind == wanted or (not exact and kind.startswith(wanted))
            }
        if side != "read" and name not in self._made:
            items_r, items_w = _pipe(conduit.slots)
            grants_r, grants_w = _pipe(conduit.slots)
            self._made[name] = {
                "items_r": items_r, "items_w": items_w, "grants_r": grants_r, "grants_w": grants_w
            }  # fmt: skip
        if any(kind not in self._made[name] for kind in PIPES[side]):
            raise ValueError(f"the {side} end of {name} is somebody's until it is revoked")
        return {kind: self._made[name].pop(kind) for kind in PIPES[side]}

    def _take_over(self, end: End, new: _Files) -> _Files:
        """Go on with these descriptors; those that are not needed any more."""
        files = self._files[end.conduit]
        if any(kind.startswith("event-") and kind in files for kind in new):
            return new
        old = {kind: files[kind] for kind in new if kind in files}
        files |= new
        if new and (here := self._ends.get(end)) is not None:
            self._watch(here.renew(files), here.drain)
        return old  # only now: the dead one's last pushes were read from there

    def _watch(self, fd: int, drain: Callable[[], bool]) -> None:
        self._drains[fd] = drain
        self._epoll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        if self._drains.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _map(self, conduit: Conduit) -> _File:
        name = conduit.name
        if name not in self._mapped:
            self.open(conduit)
            self._mapped[name] = _File(self._files[name]["memory"], _size(conduit))
        return self._mapped[name]

    def _view(self, conduit: Conduit) -> tuple[memoryview, dict[str, Array]]:
        offsets, _ = _places(conduit)
        file = self._map(conduit)
        memory = {
            name: file.array(offsets[name], (conduit.slots, *leaf.shape), leaf.dtype)
            for name, leaf in conduit.layout.items()
        }
        return file.words, memory

    def _copies(self, conduit: Conduit) -> _Copies:
        return _Copies(self._map(conduit), conduit)

    def _end(self, conduit: Conduit, side: Side, make: Callable[..., Any], wakes: str) -> Any:
        end = End(conduit.name, side)
        if end not in self._ends:
            words, memory = self._view(conduit)
            files = self._files[conduit.name]
            if wakes not in files:
                files |= self._hand_over(end)
            made = self._ends[end] = make(conduit, words, memory, files)
            self._watch(files[wakes], made.drain)
        return self._ends[end]
