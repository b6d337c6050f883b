"""The transport within one process: slots are plain arrays, granting and pushing are deques."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tianji.channel import (
    Conduit,
    End,
    Inbox,
    Lease,
    Offer,
    Outbox,
    Publisher,
    Slot,
    Subscriber,
    Transport,
    check_push,
)
from tianji.types import Array, Params


class _Pipe:
    """Both ends of a conduit, since both live here."""

    ended = False

    def __init__(self, conduit: Conduit) -> None:
        self.memory = {
            name: np.zeros((conduit.slots, *leaf.shape), leaf.dtype)
            for name, leaf in conduit.layout.items()
        }
        self.ordered = conduit.ordered
        self._free = deque(range(conduit.slots))
        self._granted: list[Slot] = []
        self._pushed: deque[Slot] = deque()
        self._used = 0
        """slots that were ever granted; the rest of the memory is untouched"""
        self.tag = -1
        self.released = 0

    @property
    def out(self) -> int:
        return len(self._granted)

    def grant(self, update: int, grant: int = 0) -> bool:
        if not self._free:
            return False
        slot = Slot(self._free.popleft(), self.memory, update, grant)
        self._used = max(self._used, slot.index + 1)
        self.tag = update
        self._granted.append(slot)
        return True

    def granted(self, least: int = 1) -> Sequence[Slot]:
        return self._granted

    def push(self, slot: Slot) -> None:
        check_push(slot, self._granted, self.ordered)
        self._granted.remove(slot)
        self._pushed.append(slot)

    def probe(self) -> Slot | None:
        return self._pushed.popleft() if self._pushed else None

    def release(self, slot: Slot) -> None:
        self.released += 1
        self._free.append(slot.index)

    def slot(self, index: int) -> Slot:
        return Slot(index, self.memory)

    def reclaim(self) -> list[tuple[int, int]]:
        numbers = [slot.number for slot in self._granted]
        # To the front: slots are granted in the same order again.
        self._free.extendleft(slot.index for slot in reversed(self._granted))
        self._granted.clear()
        return numbers

    def state(self) -> dict[str, Any]:
        return {
            "tag": self.tag,
            "released": self.released,
            "used": self._used,
            "free": list(self._free),
            "granted": [[slot.index, *slot.number] for slot in self._granted],
            "pushed": [[slot.index, *slot.number] for slot in self._pushed],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.tag, self.released, self._used = state["tag"], state["released"], state["used"]
        self._free = deque(state["free"])
        granted, pushed = (
            [Slot(index, self.memory, *number) for index, *number in state[name]]
            for name in ("granted", "pushed")
        )
        self._granted, self._pushed = granted, deque(pushed)


class _Newest:
    """All ends of a newest-only conduit; a lease of its value, too."""

    leases = True

    def __init__(self, conduit: Conduit) -> None:
        self.layout = conduit.layout
        self._version = -1
        self._params = Params(conduit.layout)
        self._pushes = 0

    def push(self, version: int, params: Params) -> None:
        np.copyto(self._params.buffer, params.buffer)
        self._version = version
        self._pushes += 1

    def probe(self, than: int, out: Params) -> int:
        if self._version > than:
            np.copyto(out.buffer, self._params.buffer)
            return self._version
        return than

    def lease(self, than: int) -> Lease | None:
        if self._version <= than:
            return None
        return _Lease(self._version, self._params, self._pushes, self)


@dataclass(frozen=True)
class _Lease:
    version: int
    params: Params
    pushes: int
    newest: _Newest

    def give_back(self) -> bool:
        return self.newest._pushes == self.pushes


class Memory(Transport):
    """Conduits between roles of one process."""

    def __init__(self) -> None:
        self._pipes: dict[str, _Pipe] = {}
        self._newest: dict[str, _Newest] = {}
        self._beside: list[int] = []

    def open(self, conduit: Conduit) -> None:
        """Ends make what they need."""

    def offer(self, ends: Sequence[End], life: int) -> Offer:
        raise TypeError(
            "what lies in the memory of one process cannot be offered to another. Use a transport "
            "between processes, or leave processes out"
        )

    def accept(self, offer: Offer) -> None:
        raise TypeError("nothing can be offered to a transport within one process")

    def revoke(self, conduit: str) -> None:
        """Nothing was offered."""

    def outbox(self, conduit: Conduit) -> Outbox:
        return self._pipe(conduit)

    def inbox(self, conduit: Conduit) -> Inbox:
        return self._pipe(conduit)

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        return self._pipe(conduit).memory

    def publisher(self, conduit: Conduit) -> Publisher:
        return self._ends(conduit)

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        return self._ends(conduit)

    def also(self, fd: int) -> None:
        self._beside.append(fd)

    def wait(self, timeout: float) -> None:
        select.select(self._beside, [], [], timeout)

    def close(self) -> None:
        self._pipes.clear()
        self._newest.clear()

    def _pipe(self, conduit: Conduit) -> _Pipe:
        if conduit.name not in self._pipes:
            self._pipes[conduit.name] = _Pipe(conduit)
        return self._pipes[conduit.name]

    def _ends(self, conduit: Conduit) -> _Newest:
        if conduit.name not in self._newest:
            self._newest[conduit.name] = _Newest(conduit)
        return self._newest[conduit.name]
