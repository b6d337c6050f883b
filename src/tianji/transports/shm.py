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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tianji.channel import (
    Conduit,
    End,
    Gone,
    Inbox,
    Lease,
    Outbox,
    Publisher,
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

    def __init__(self, size: int, fd: int = -1) -> None:
        size += HEAD
        if fd < 0:
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
        self.fd = fd
        self._map = mmap.mmap(fd, size)
        self.words = memoryview(self._map)[:HEAD].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        flat: Array = np.frombuffer(self._map, dtype, count, HEAD + offset)
        return flat.reshape(shape)

    def close(self) -> None:
        """The mapping itself ends with the last array that looks at it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _places(conduit: Conduit) -> tuple[dict[str, int], int]:
    """Where each leaf begins, and bytes in all."""
    offsets, end = {}, 0
    for name, leaf in conduit.layout.items():
        offsets[name] = end
        end += -(-conduit.slots * leaf.nbytes // LINE) * LINE
    return offsets, max(end, LINE)


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

    def granted(self) -> Sequence[Slot]:
        if self._words[GRANTED] != self._seen:
            self.drain()
        return self._granted

    def push(self, slot: Slot) -> None:
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
            if item not in self._granted[: 1 if self.ordered else None]:
                raise ValueError(
                    f"slot {item[0]} was pushed, which is not the one that was granted"
                )
            self._granted.remove(item)
            self._pushed.append(Slot(item[0], self._memory, *item[1:]))
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
"""Descriptors of one conduit that this process has, by what they are."""


class Shm(Transport):
    """Conduits between processes. One makes it; `pack` and `unpack` carry ends to the others."""

    def __init__(self) -> None:
        self._files: dict[str, _Files] = {}
        self._slots: dict[str, int] = {}
        self._mapped: dict[str, _File] = {}
        self._ends: dict[tuple[str, str], Any] = {}
        self._subscribers: list[_Subscriber] = []
        self._receivers: list[_Receiver] = []
        self._epoll = select.epoll()
        self._drains: dict[int, Any] = {}
        self._beside: list[int] = []

    def outbox(self, conduit: Conduit) -> Outbox:
        files = self._open(conduit)
        sender: _Sender = self._end(
            conduit.name,
            "send",
            lambda: _Sender(conduit, *self._view(conduit), files),
            files["grants_r"],
        )
        return sender

    def inbox(self, conduit: Conduit) -> Inbox:
        files = self._open(conduit)
        fresh = (conduit.name, "receive") not in self._ends
        receiver: _Receiver = self._end(
            conduit.name,
            "receive",
            lambda: _Receiver(conduit, *self._view(conduit), files),
            files["items_r"],
        )
        if fresh:
            self._receivers.append(receiver)
        return receiver

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        self._open(conduit)
        return self._view(conduit)[1]

    def publisher(self, conduit: Conduit) -> Publisher:
        files = self._open(conduit)
        copies = self._copies(conduit)
        events = {int(k[6:]): fd for k, fd in files.items() if k.startswith("event-")}
        end: _Publisher = self._end(conduit.name, "send", lambda: _Publisher(copies, events))
        return end

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        files = self._open(conduit)
        if index >= conduit.receivers:
            raise ValueError(f"{conduit.name} has {conduit.receivers} receivers: {index} is none")
        copies, event, key = self._copies(conduit), files[f"event-{index}"], f"receive-{index}"
        fresh = (conduit.name, key) not in self._ends
        make = partial(_Subscriber, copies, index, event)
        end: _Subscriber = self._end(conduit.name, key, make, event)
        if fresh:
            self._subscribers.append(end)
        return end

    def open(self, conduit: Conduit) -> None:
        """Make what a conduit needs, for others to use."""
        self._open(conduit)

    def pack(self, ends: Iterable[End]) -> tuple[dict[str, _Files], list[int]]:
        """What another process needs for these ends: a table of (conduit, which descriptor) and
        the descriptors, in the table's order of places."""
        table: dict[str, _Files] = {}
        fds: list[int] = []
        for name, side, index in ends:
            files = self._files[name]
            events = [kind for kind in files if kind.startswith("event-")]
            kinds = {
                "send": events or ["items_w", "grants_r"],
                "receive": [f"event-{index}"] if events else ["items_r", "grants_w"],
                "read": [],
            }
            for kind in ("memory", *kinds[side]):
                if kind not in table.setdefault(name, {}):
                    table[name][kind] = len(fds)
                    fds.append(files[kind])
        return table, fds

    @classmethod
    def unpack(cls, table: Mapping[str, _Files], fds: Sequence[int]) -> Shm:
        self = cls()
        self._files = {
            name: {kind: fds[place] for kind, place in files.items()}
            for name, files in table.items()
        }
        return self

    def keep(self, ends: Iterable[End]) -> None:
        """Close every pipe that these ends do not need, so that a death is noticed: a pipe ends
        when the last process that could write into it is gone."""
        table, fds = self.pack(ends)
        mine = set(fds)
        # A forked process shares its parent's epoll: each would wake, and unregister, the other.
        self._epoll.close()
        self._epoll = select.epoll()
        for name, files in self._files.items():
            for kind in [k for k in files if k.endswith(("_r", "_w")) and files[k] not in mine]:
                self._drains.pop(files[kind], None)
                os.close(files.pop(kind))
            assert set(table.get(name, ())) <= set(files)
        for fd in (*self._drains, *self._beside):
            self._epoll.register(fd, select.EPOLLIN)

    def renew(self, name: str) -> None:
        """New pipes for a conduit, one of whose ends died with its process: to be packed for both
        sides, and then let go."""
        self.let_go(name)
        files, slots = self._files[name], self._slots[name]
        files["items_r"], files["items_w"] = _pipe(slots)
        files["grants_r"], files["grants_w"] = _pipe(slots)

    def let_go(self, name: str) -> None:
        """Close a conduit's pipes here, so that a death is noticed."""
        files = self._files[name]
        for kind in [kind for kind in files if kind.endswith(("_r", "_w"))]:
            os.close(files.pop(kind))

    def replace(self, table: Mapping[str, _Files], fds: Sequence[int]) -> None:
        """Go on with these pipes, packed after `renew`, at this side of each conduit."""
        for name, places in table.items():
            files, old = self._files[name], []
            for kind, place in places.items():
                if kind == "memory":
                    os.close(fds[place])
                    continue
                if kind in files:
                    old.append(files[kind])
                files[kind] = fds[place]
            for side in ("send", "receive"):
                if (end := self._ends.get((name, side))) is not None:
                    wakes = end.renew(files)
                    self._drains[wakes] = end.drain
                    self._epoll.register(wakes, select.EPOLLIN)
            for fd in old:  # only now: the dead one's last pushes were read from there
                self._forget(fd)
                os.close(fd)

    def also(self, fd: int) -> None:
        """Let `wait` end when there is something to read here, too."""
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
        for files in self._files.values():
            for kind, fd in files.items():
                if kind != "memory":
                    os.close(fd)
        for name, files in self._files.items():
            if name not in self._mapped and "memory" in files:
                os.close(files["memory"])
        for file in self._mapped.values():
            file.close()
        self._files.clear()
        self._mapped.clear()

    def _forget(self, fd: int) -> None:
        if self._drains.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _open(self, conduit: Conduit) -> _Files:
        files = self._files.setdefault(conduit.name, {})
        if "memory" in files:
            return files
        if conduit.kind == "newest" and conduit.receivers > RECEIVERS:
            raise ValueError(f"{conduit.name}: {conduit.receivers} receivers; room is {RECEIVERS}")
        self._map(conduit, files)
        if conduit.kind == "newest":
            for index in range(conduit.receivers):
                files[f"event-{index}"] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        elif conduit.kind != "memory":
            self._slots[conduit.name] = conduit.slots
            files["items_r"], files["items_w"] = _pipe(conduit.slots)
            files["grants_r"], files["grants_w"] = _pipe(conduit.slots)
        return files

    def _map(self, conduit: Conduit, files: _Files) -> _File:
        name = conduit.name
        if name not in self._mapped:
            newest = conduit.kind == "newest"
            size = _Copies.room(conduit) * PLACES if newest else _places(conduit)[1]
            self._mapped[name] = _File(size, files.get("memory", -1))
            files["memory"] = self._mapped[name].fd
        return self._mapped[name]

    def _view(self, conduit: Conduit) -> tuple[memoryview, dict[str, Array]]:
        offsets, _ = _places(conduit)
        file = self._map(conduit, self._files[conduit.name])
        memory = {
            name: file.array(offsets[name], (conduit.slots, *leaf.shape), leaf.dtype)
            for name, leaf in conduit.layout.items()
        }
        return file.words, memory

    def _copies(self, conduit: Conduit) -> _Copies:
        return _Copies(self._map(conduit, self._files[conduit.name]), conduit)

    def _end(self, name: str, kind: str, make: Any, wakes: int | None = None) -> Any:
        end = self._ends.get((name, kind))
        if end is None:
            end = self._ends[name, kind] = make()
            if wakes is not None:
                self._drains[wakes] = end.drain
                self._epoll.register(wakes, select.EPOLLIN)
        return end
