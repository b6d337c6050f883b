"""One-way typed conduits between roles: the sender pushes, the receiver probes, neither waits.

A conduit owns a fixed number of slots, each a set of named arrays. The receiver grants a slot
with a number that the sender can read: an update, and which grant of that update it is. The sender
fills the slot and pushes it; the receiver probes it, uses it in place, and releases it. So
back-pressure is a grant not given, nothing is copied on the way, and no side ever waits.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from tianji.types import Array, Layout, Leaves, Params, packed

Kind = Literal["lane", "queue", "newest", "memory"]
"""An actor's time ring; first in first out; only the newest of versioned values; no messages at
all, but memory that several read and write in place."""

Side = Literal["send", "receive", "read"]


@dataclass(frozen=True)
class Conduit:
    """What a transport needs to know of what joins roles."""

    name: str
    kind: Kind
    layout: Layout
    """of a slot; of a newest-only conduit: of a value"""
    slots: int = 1
    """how many items can be between grant and release"""
    receivers: int = 1
    """of a newest-only conduit"""
    ordered: bool = True
    """must slots be pushed in the order of their grants? Only of lanes they need not be"""

    @property
    def nbytes(self) -> int:
        if self.kind == "newest":
            return packed(self.layout)[1]
        return self.slots * sum(leaf.nbytes for leaf in self.layout.values())


class End(NamedTuple):
    """One role's hold on a conduit: it sends, receives, or reads the memory in place."""

    conduit: str
    side: Side
    index: int = 0  # type: ignore[assignment]  # hides the method of a tuple
    """which receiver, of a newest-only conduit"""


@dataclass(frozen=True)
class Offer:
    """Ends of conduits for another process: what it needs to know, and descriptors."""

    transport: str
    """of `TRANSPORTS`"""
    data: dict[str, Any]
    """JSON"""
    fds: tuple[int, ...] = field(default=(), compare=False)
    """the offer's own: whoever sends it closes it, whoever accepts it has new ones. They stay
    within a machine"""

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Slot:
    """One item's place in a conduit's memory; views are made when they are asked for."""

    __slots__ = ("grant", "index", "memory", "update")

    def __init__(
        self, index: int, memory: Mapping[str, Array], update: int = 0, grant: int = 0
    ) -> None:
        self.index = index
        self.memory = memory
        """every leaf of all slots, [slots, ...]"""
        self.update = update
        """what it was granted for"""
        self.grant = grant
        """which of that update's grants it is"""

    @property
    def number(self) -> tuple[int, int]:
        """Of its grant."""
        return self.update, self.grant

    @property
    def arrays(self) -> Leaves:
        index = self.index
        return {name: array[index] for name, array in self.memory.items()}

    def leaf(self, name: str) -> Array:
        view: Array = self.memory[name][self.index]
        return view


class Gone(Exception):
    """The other end of a conduit no longer exists: its process has ended."""


class Outbox(Protocol):
    """The sender's end."""

    @property
    def tag(self) -> int:
        """The newest update granted, used or not; -1 before the first."""

    @property
    def released(self) -> int:
        """How many pushed items the receiver has given back."""

    def granted(self, least: int = 1) -> Sequence[Slot]:
        """Slots that can be filled, the oldest grant first, each the same until it is pushed; none:
        the receiver is behind. Of those that are there, `least` or more are shown."""

    def push(self, slot: Slot) -> None:
        """Offer a granted slot, filled, to the receiver; raises `Gone` where there is none. Where
        the conduit is ordered it must be the oldest."""


def check_push(slot: Slot, granted: Sequence[Slot], ordered: bool) -> None:
    if not granted or slot is not granted[0]:
        if ordered:
            raise ValueError("only the slot that was granted first can be pushed")
        if slot not in granted:
            raise ValueError("only a slot that is granted can be pushed")


class Inbox(Protocol):
    """The receiver's end. It alone knows where each slot is, so it alone has a state."""

    ordered: bool
    """do slots come in the order of their grants?"""

    @property
    def ended(self) -> bool:
        """Has the sender gone? What it pushed before can still be probed."""

    @property
    def out(self) -> int:
        """Grants whose slots have not been pushed yet, as far as is known here."""

    def grant(self, update: int, grant: int = 0) -> bool:
        """Let the sender fill one more slot; False: none is free."""

    def probe(self) -> Slot | None:
        """The next pushed slot, in the order of the pushes; None: nothing has arrived."""

    def release(self, slot: Slot) -> None:
        """Give a probed slot back, to be granted again."""

    def slot(self, index: int) -> Slot:
        """The slot of this index, for a receiver that goes on after a restart."""

    def reclaim(self) -> list[tuple[int, int]]:
        """Take back what was granted to a sender that is dead; the numbers of those grants."""

    def state(self) -> dict[str, Any]:
        """Which slots are free, granted and pushed, with the numbers of their grants; `used` of
        them were ever granted."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, before anything was granted; grants reach the sender again."""


class Publisher(Protocol):
    """The sender's end of a conduit that keeps only the newest value: a version and params."""

    def push(self, version: int, params: Params) -> None: ...


class Lease(Protocol):
    """The newest value where it lies: nothing is copied, so the sender may overwrite it."""

    @property
    def version(self) -> int: ...

    @property
    def params(self) -> Params:
        """Views, to be read before it is given back."""

    def give_back(self) -> bool:
        """False: it was torn, so that what was read must be read again."""


class Subscriber(Protocol):
    """A receiver's end of it."""

    layout: Layout
    leases: bool
    """False: `lease` never gives any"""

    def probe(self, than: int, out: Params) -> int:
        """Copy the newest into `out` if it is newer than `than`; the version that `out` holds."""

    def lease(self, than: int) -> Lease | None:
        """The newest, if it is newer than `than`."""


class Transport(Protocol):
    """What moves slots.

    One process opens conduits and offers their ends to others; each of those accepts what it is
    offered on a transport of its own, and makes these ends there. Or one process makes both ends of
    a conduit, which it need not open."""

    def open(self, conduit: Conduit) -> None:
        """Make what the conduit needs, for others to use."""

    def offer(self, ends: Sequence[End], life: int) -> Offer:
        """Hand ends over to another process, in its life of this number. Of each end but those that
        read, or receive only the newest, there is one, until the conduit is revoked."""

    def accept(self, offer: Offer) -> None:
        """Take over what was offered. An end that is here goes on with another process at its other
        side: a receiver keeps what was pushed, and what was not it grants again, in order; a sender
        forgets what it was granted. An offer of an older life than the one in hand is dropped."""

    def revoke(self, conduit: str) -> None:
        """A process that held an end is dead: the next offers are of new ends."""

    def outbox(self, conduit: Conduit) -> Outbox: ...

    def inbox(self, conduit: Conduit) -> Inbox: ...

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        """Every leaf of all slots, [slots, ...]: for a third role that reads in place."""

    def publisher(self, conduit: Conduit) -> Publisher:
        """The sender's end of a newest-only conduit."""

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        """The end of its receiver of this index; there is one for each."""

    def also(self, fd: int) -> None:
        """Let `wait` end when there is something to read here, too."""

    def wait(self, timeout: float) -> None:
        """Sleep until something arrives, or `timeout` seconds."""

    def close(self) -> None: ...


TRANSPORTS: dict[str, str | type[Any]] = {"shm": "tianji.transports.shm:Shm"}
"""Classes that an offer can name; "module:attribute" is imported when it is asked for."""


def register_transport(name: str) -> Callable[[type[Any]], type[Any]]:
    """Decorator: make an own transport known by the name that its offers have."""

    def register(transport: type[Any]) -> type[Any]:
        TRANSPORTS[name] = transport
        return transport

    return register


def make_transport(name: str) -> Transport:
    """A new one, of the kind that an offer names."""
    if name not in TRANSPORTS:
        raise ValueError(
            f'no transport is named "{name}", so its offers cannot be accepted. Known: '
            f"{', '.join(sorted(TRANSPORTS))}; own ones register themselves in a module that "
            f"env.imports names."
        )
    found = TRANSPORTS[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, type)
    made: Transport = found()
    return made
