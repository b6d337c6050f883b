"""The transport within one process: slots are plain arrays, granting and pushing are deques."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from tianji.channel import Channel, Inbox, Newest, Outbox, Slot, Transport
from tianji.role import State
from tianji.types import Array


class _Pipe:
    """Both ends of a channel, since both live here."""

    def __init__(self, channel: Channel) -> None:
        self.memory = {
            name: np.zeros((channel.slots, *leaf.shape), leaf.dtype)
            for name, leaf in channel.layout.items()
        }
        self._slots = [
            Slot(i, {name: array[i] for name, array in self.memory.items()})
            for i in range(channel.slots)
        ]
        self._free = deque(self._slots)
        self._granted: deque[Slot] = deque()
        self._pushed: deque[Slot] = deque()
        self._used = 0
        """slots that were ever granted; the rest of the memory is untouched"""
        self.tag = -1
        self.released = 0

    def grant(self, tag: int) -> bool:
        if not self._free:
            return False
        slot = self._free.popleft()
        self._used = max(self._used, slot.index + 1)
        slot.tag = self.tag = tag
        self._granted.append(slot)
        return True

    def reserve(self) -> Slot | None:
        return self._granted[0] if self._granted else None

    def push(self, slot: Slot) -> None:
        if not self._granted or slot is not self._granted[0]:
            raise ValueError("only the slot that was reserved last can be pushed")
        self._pushed.append(self._granted.popleft())

    def probe(self) -> Slot | None:
        return self._pushed.popleft() if self._pushed else None

    def release(self, slot: Slot) -> None:
        self.released += 1
        self._free.append(slot)

    def slot(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def nbytes(self) -> int:
        return sum(array[: self._used].nbytes for array in self.memory.values())

    def state(self) -> State:
        return {
            "tag": self.tag,
            "released": self.released,
            "used": self._used,
            "free": [slot.index for slot in self._free],
            "granted": [[slot.index, slot.tag] for slot in self._granted],
            "pushed": [[slot.index, slot.tag] for slot in self._pushed],
            "memory": {name: array[: self._used] for name, array in self.memory.items()},
        }

    def load_state(self, state: State) -> None:
        self.tag, self.released, self._used = state["tag"], state["released"], state["used"]
        for name, array in state["memory"].items():
            self.memory[name][: self._used] = array
        self._free = deque(self._slots[i] for i in state["free"])
        self._granted, self._pushed = deque(), deque()
        for queue, items in ((self._granted, state["granted"]), (self._pushed, state["pushed"])):
            for index, tag in items:
                self._slots[index].tag = tag
                queue.append(self._slots[index])


class _Newest:
    def __init__(self, size: int) -> None:
        self._version = -1
        self._flat = np.zeros(size, np.float32)

    def push(self, version: int, flat: Array) -> None:
        np.copyto(self._flat, flat)
        self._version = version

    def probe(self, than: int, out: Array) -> int:
        if self._version > than:
            np.copyto(out, self._flat)
            return self._version
        return than


class Memory(Transport):
    """Channels between roles of one process."""

    def __init__(self) -> None:
        self._pipes: dict[str, _Pipe] = {}
        self._newest: dict[str, _Newest] = {}

    def outbox(self, channel: Channel) -> Outbox:
        return self._pipe(channel)

    def inbox(self, channel: Channel) -> Inbox:
        return self._pipe(channel)

    def memory(self, channel: Channel) -> Mapping[str, Array]:
        return self._pipe(channel).memory

    def newest(self, name: str, size: int) -> Newest:
        return self._newest.setdefault(name, _Newest(size))

    def wait(self, timeout: float) -> None:
        time.sleep(timeout)

    @property
    def nbytes(self) -> int:
        """What `state` takes."""
        return sum(pipe.nbytes for pipe in self._pipes.values())

    def state(self) -> State:
        """All that is on its way or held: grants, pushes, and the memory that was ever used."""
        return {name: pipe.state() for name, pipe in self._pipes.items()}

    def load_state(self, state: State) -> None:
        for name, pipe in self._pipes.items():
            pipe.load_state(state[name])

    def close(self) -> None:
        self._pipes.clear()
        self._newest.clear()

    def _pipe(self, channel: Channel) -> _Pipe:
        if channel.name not in self._pipes:
            self._pipes[channel.name] = _Pipe(channel)
        return self._pipes[channel.name]
