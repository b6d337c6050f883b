"""tianji's shared memory: senders fill slots in place, the receiver takes the index."""

import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from transfer_common import Cell, Senders, cell_of_argv, message_of, result, storage_of

from tianji.channel import Conduit, End
from tianji.transports.shm import Shm
from tianji.types import leaf

Use = Callable[[int, np.ndarray], None]
"""What a receiver does with a message of this actor, where it lies."""


def conduit_of(cell: Cell, index: int) -> Conduit:
    return Conduit(f"actor-{index}", "lane", {"x": leaf((cell.size,), np.uint8)}, cell.slots)


def sender(cell: Cell, transport: Shm, index: int, start: Callable[[], None]) -> dict[str, Any]:
    conduit = conduit_of(cell, index)
    transport.keep([End(conduit.name, "send")])
    outbox, message = transport.outbox(conduit), message_of(cell)
    clock, sample = time.perf_counter, cell.sample

    def send(quota: int, seconds: float, sample: float) -> int:
        deadline, sent = clock() + seconds, 0
        for _ in range(quota):
            if sample:
                time.sleep(sample)
            while not (granted := outbox.granted()):
                transport.wait(0.1)
            slot = granted[0]
            np.copyto(slot.leaf("x"), message)
            outbox.push(slot)
            sent += 1
            if clock() > deadline:
                break
        return sent

    def send_numbered(quota: int) -> int:
        for k in range(quota):
            while not (granted := outbox.granted()):
                transport.wait(0.1)
            slot = granted[0]
            x = slot.leaf("x")
            x[:8] = np.frombuffer(k.to_bytes(8, "little"), np.uint8)
            x[8:] = k % 251
            outbox.push(slot)
        return quota

    send(cell.slots, 60.0, 0.0)
    start()
    cpu = time.process_time()
    if cell.work == "verify":
        sent = send_numbered(cell.quota)
    else:
        sent = send(cell.quota, cell.seconds, sample)
    return {"sent": sent, "cpu": time.process_time() - cpu}


class Receiver:
    """Takes what arrives on every conduit, and grants each slot again."""

    def __init__(self, cell: Cell, transport: Shm) -> None:
        self._transport = transport
        self._inboxes = [transport.inbox(conduit_of(cell, i)) for i in range(cell.actors)]
        for inbox in self._inboxes:
            while inbox.grant(0):
                pass

    def receive(self, total: int, use: Use | None = None) -> int:
        """Receive so many, or all that there will be."""
        inboxes, transport, got = self._inboxes, self._transport, 0
        while got < total:
            before = got
            for index, inbox in enumerate(inboxes):
                while (slot := inbox.probe()) is not None:
                    if use is not None:
                        use(index, slot.leaf("x"))
                    inbox.release(slot)
                    inbox.grant(0)
                    got += 1
            if got == before:
                if all(inbox.ended for inbox in inboxes):
                    break
                transport.wait(0.1)
        return got


def use_of(cell: Cell) -> Use | None:
    places, due, at = storage_of(cell), [0] * cell.actors, 0

    def copy(index: int, x: np.ndarray) -> None:
        nonlocal at
        np.copyto(places[at], x)
        at = (at + 1) % len(places)

    def checksum(index: int, x: np.ndarray) -> None:
        place = places[at]
        copy(index, x)
        zlib.crc32(place)

    def verify(index: int, x: np.ndarray) -> None:
        k = int.from_bytes(x[:8].tobytes(), "little")
        if k != due[index] or not np.all(x[8:] == k % 251):
            raise SystemExit(f"actor {index}: {due[index]} was due, and {k} came, or a torn one")
        due[index] += 1

    return {"none": None, "copy": copy, "checksum": checksum, "verify": verify}[cell.work]


def main() -> None:
    cell = cell_of_argv()
    transport = Shm()
    for index in range(cell.actors):
        transport.open(conduit_of(cell, index))
    senders = Senders(cell, lambda index, start: sender(cell, transport, index, start))
    transport.keep([End(conduit_of(cell, i).name, "receive") for i in range(cell.actors)])
    receiver, use = Receiver(cell, transport), use_of(cell)
    # The same use as later, so that the receiver has touched every page before the clock starts.
    receiver.receive(cell.slots * cell.actors, None if cell.work == "verify" else use)
    cpu, begun = time.process_time(), senders.start()
    got = receiver.receive(cell.total, use)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    reports = senders.reports()
    if got != sum(report["sent"] for report in reports):
        raise SystemExit(f"{got} arrived of {[report['sent'] for report in reports]}")
    result(got, seconds, cpu, sum(report["cpu"] for report in reports))


if __name__ == "__main__":
    main()
