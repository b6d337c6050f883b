"""One-way typed conduits between roles: the sender pushes, the receiver probes, neither waits.

A channel owns a fixed number of slots, each a set of named arrays. The receiver grants a slot
with a tag, an integer that the sender can read; the sender reserves the granted slot, fills it
and pushes it; the receiver probes it, uses it in place, and releases it. So back-pressure is a
grant not given, nothing is copied on the way, and no side ever waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tianji.types import Array, Layout, Leaves


@dataclass(frozen=True)
class Channel:
    """What a transport needs to know of a conduit."""

    name: str
    layout: Layout
    slots: int
    """how many items can be between grant and release"""

    @property
    def nbytes(self) -> int:
        return self.slots * sum(leaf.nbytes for leaf in self.layout.values())


@dataclass(slots=True, eq=False)
class Slot:
    """One item's place in a channel's memory."""

    index: int
    arrays: Leaves
    tag: int = 0
    """what the receiver said when it granted the slot"""
    cache: dict[str, object] = field(default_factory=dict)
    """for the endpoints' own views of `arrays`; does not travel"""


class Outbox(Protocol):
    """The sender's end."""

    @property
    def tag(self) -> int:
        """The newest tag granted, used or not; -1 before the first."""

    @property
    def released(self) -> int:
        """How many pushed items the receiver has given back."""

    def reserve(self) -> Slot | None:
        """The oldest granted slot, the same until it is pushed; None: the receiver is behind."""

    def push(self, slot: Slot) -> None:
        """Offer the reserved slot, filled, to the receiver."""


class Inbox(Protocol):
    """The receiver's end."""

    def grant(self, tag: int) -> bool:
        """Let the sender fill one more slot; False: none is free."""

    def probe(self) -> Slot | None:
        """The next pushed slot, in the order of the pushes; None: nothing has arrived."""

    def release(self, slot: Slot) -> None:
        """Give a probed slot back, to be granted again."""

    def slot(self, index: int) -> Slot:
        """The slot of this index, for a receiver that goes on after a restart."""


class Newest(Protocol):
    """A conduit that keeps only the newest value: a version and a flat buffer."""

    def push(self, version: int, flat: Array) -> None: ...

    def probe(self, than: int, out: Array) -> int:
        """Copy the newest into `out` if it is newer than `than`; the version that `out` holds."""


class Transport(Protocol):
    """What moves slots."""

    def outbox(self, channel: Channel) -> Outbox: ...

    def inbox(self, channel: Channel) -> Inbox: ...

    def memory(self, channel: Channel) -> Mapping[str, Array]:
        """Every leaf of all slots, [slots, ...]: for a third role that reads in place."""

    def newest(self, name: str, size: int) -> Newest:
        """A newest-only conduit for `size` float32 numbers."""

    def wait(self, timeout: float) -> None:
        """Sleep until something arrives, or `timeout` seconds."""

    def close(self) -> None: ...
