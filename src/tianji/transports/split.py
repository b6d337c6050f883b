"""Two transports in one: some conduits stay within a process, the others leave it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tianji.channel import Channel, Inbox, Outbox, Publisher, Subscriber, Transport
from tianji.types import Array


class Split(Transport):
    """Conduits that `outside` names are the outer transport's, all others the inner one's."""

    def __init__(self, inner: Transport, outer: Transport, outside: Collection[str]) -> None:
        self._inner = inner
        self._outer = outer
        self._outside = outside

    def outbox(self, channel: Channel) -> Outbox:
        return self._of(channel.name).outbox(channel)

    def inbox(self, channel: Channel) -> Inbox:
        return self._of(channel.name).inbox(channel)

    def memory(self, channel: Channel) -> Mapping[str, Array]:
        return self._of(channel.name).memory(channel)

    def publisher(self, name: str, size: int) -> Publisher:
        return self._of(name).publisher(name, size)

    def subscriber(self, name: str, size: int, index: int = 0) -> Subscriber:
        return self._of(name).subscriber(name, size, index)

    def wait(self, timeout: float) -> None:
        """Nothing arrives inside while nobody works: what is waited for comes from outside."""
        self._outer.wait(timeout)

    def close(self) -> None:
        self._inner.close()
        self._outer.close()

    def _of(self, name: str) -> Transport:
        return self._outer if name in self._outside else self._inner
