"""Two transports in one: some conduits stay within a process, the others leave it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tianji.channel import Conduit, Inbox, Outbox, Publisher, Subscriber, Transport
from tianji.types import Array


class Split(Transport):
    """Conduits that `inside` names are the inner transport's, all others the outer one's."""

    def __init__(self, inner: Transport, outer: Transport, inside: Collection[str]) -> None:
        self._inner = inner
        self._outer = outer
        self._inside = inside

    def outbox(self, conduit: Conduit) -> Outbox:
        return self._of(conduit.name).outbox(conduit)

    def inbox(self, conduit: Conduit) -> Inbox:
        return self._of(conduit.name).inbox(conduit)

    def memory(self, conduit: Conduit) -> Mapping[str, Array]:
        return self._of(conduit.name).memory(conduit)

    def publisher(self, conduit: Conduit) -> Publisher:
        return self._of(conduit.name).publisher(conduit)

    def subscriber(self, conduit: Conduit, index: int = 0) -> Subscriber:
        return self._of(conduit.name).subscriber(conduit, index)

    def wait(self, timeout: float) -> None:
        """Nothing arrives inside while nobody works: what is waited for comes from outside."""
        self._outer.wait(timeout)

    def close(self) -> None:
        self._inner.close()
        self._outer.close()

    def _of(self, name: str) -> Transport:
        return self._inner if name in self._inside else self._outer
