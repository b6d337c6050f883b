"""The parts that a transfer's model is made of, each measured alone in one process.

python transfer_parts.py CELL: seconds of a sleep as it is achieved, of a send, of a receive.
python transfer_parts.py probe: nanoseconds of a look for a newer snapshot where there is none.
"""

import json
import sys
import time

import numpy as np
from transfer_common import Cell, cell_of_argv, message_of
from transfer_tianji import channel_of, use_of

from tianji.transports.shm import Shm

LAPS = 40


def sample_s(cell: Cell) -> float:
    """What a sleep takes, on average."""
    begun, sleeps = time.perf_counter(), max(20, int(0.5 / cell.sample))
    for _ in range(sleeps):
        time.sleep(cell.sample)
    return (time.perf_counter() - begun) / sleeps


def send_and_receive_s(cell: Cell) -> tuple[float, float]:
    """The median over laps in which all slots are sent, then received; nobody waits."""
    transport, channel = Shm(), channel_of(cell, 0)
    outbox, inbox = transport.outbox(channel), transport.inbox(channel)
    message, use = message_of(cell), use_of(cell)
    while inbox.grant(0):
        pass
    sends, receives = [], []
    for _ in range(LAPS):
        begun = time.perf_counter()
        while (slot := outbox.reserve()) is not None:
            np.copyto(slot.leaf("x"), message)
            outbox.push(slot)
        sent = time.perf_counter()
        while (slot := inbox.probe()) is not None:
            if use is not None:
                use(0, slot.leaf("x"))
            inbox.release(slot)
            inbox.grant(0)
        sends.append((sent - begun) / cell.slots)
        receives.append((time.perf_counter() - sent) / cell.slots)
    transport.close()
    return float(np.median(sends)), float(np.median(receives))


def probe_ns(calls: int = 200_000) -> float:
    transport = Shm()
    subscriber = transport.subscriber("policy", 1000)
    publisher = transport.publisher("policy", 1000)
    out, seen = np.zeros(1000, np.float32), range(calls)
    publisher.push(3, out)
    newest = subscriber.probe(-1, out)
    probe = subscriber.probe
    begun = time.perf_counter()
    for _ in seen:
        probe(newest, out)
    return (time.perf_counter() - begun) / calls * 1e9


def main() -> None:
    if sys.argv[1] == "probe":
        print(json.dumps({"ns": probe_ns()}))
        return
    cell = cell_of_argv()
    send, receive = send_and_receive_s(cell)
    print(json.dumps({"sample_s": sample_s(cell), "send_s": send, "receive_s": receive}))


if __name__ == "__main__":
    main()
