"""Routes conduits that do not leave a process to one transport, all others to another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tianji.channel import (
    Conduit,
    End,
    Inbox,
    Offer,
    Outbox,
    Publisher,
    Subscriber,
    Transport,
)
from tianji.types import Array


class Split(Transport):
    """Only the outer transport has offers, and only from there comes what is waited for."""

    def __init__(self, inner: Transport, outer: Transport, inside: Collection[str]) -> None:
        """`inside`: the conduits of which this process holds all ends."""
        self._inner = inner
        self._outer = outer
        self._inside = inside

    def open(self, conduit: Conduit) -> None:
        self._of(conduit).open(conduit)

    def offer(self, ends: Sequence[End], life: int) -> Offer:
        return self._outer.offer(ends, life)

    def accept(self, offer: Offer) -> None:
        self._outer.accept(offer)

    def revoke(self, conduit: str) -> None:
        self._outer.revoke(conduit)

    def outbox(self, conduit: Conduit) -> Outbox:
        return self._of(conduit).outbox(conduit)

    def inbox(self, conduit: Conduit) -> Inbox:
        return self._of(conduit).inbox(conduit)

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        return self._of(conduit).memory(conduit)

    def publisher(self, conduit: Conduit) -> Publisher:
        return self._of(conduit).publisher(conduit)

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        return self._of(conduit).subscriber(conduit, index)

    def also(self, fd: int) -> None:
        self._outer.also(fd)

    def wait(self, timeout: float) -> None:
        self._outer.wait(timeout)

    def close(self) -> None:
        self._inner.close()
        self._outer.close()

    def _of(self, conduit: Conduit) -> Transport:
        return self._inner if conduit.name in self._inside else self._outer
