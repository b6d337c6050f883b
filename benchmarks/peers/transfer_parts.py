"""The parts that a transfer's model is made of, each measured alone in one process.

python transfer_parts.py CELL: seconds of a sleep as it is achieved, of a send, of a receive.
python transfer_parts.py probe: nanoseconds of a look for a newer snapshot where there is none.
"""

import json
import os
import struct
import sys
import time

import numpy as np
from transfer_common import Cell, cell_of_argv, message_of
from transfer_tianji import conduit_of, use_of

from tianji.channel import Conduit, End
from tianji.transports.shm import Shm
from tianji.types import Params, leaf

LAPS = 40


def sample_s(cell: Cell) -> float:
    """What a sleep takes, on average."""
    begun, sleeps = time.perf_counter(), max(20, int(0.5 / cell.sample))
    for _ in range(sleeps):
        time.sleep(cell.sample)
    return (time.perf_counter() - begun) / sleeps


def send_and_receive_s(cell: Cell) -> tuple[float, float]:
    """The medians over laps in which another process sends as many as there are slots, and then
    this one receives them: nobody waits, and what is received was written by another core."""
    transport, conduit = Shm(), conduit_of(cell, 0)
    transport.open(conduit)
    offer = transport.offer([End(conduit.name, "send")], 0)
    told, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        transport = Shm()
        transport.accept(offer)
        outbox, message = transport.outbox(conduit), message_of(cell)
        for _ in range(LAPS):
            while len(outbox.granted(cell.slots)) < cell.slots:
                transport.wait(0.1)
            begun = time.perf_counter()
            for _ in range(cell.slots):
                slot = outbox.granted()[0]
                np.copyto(slot.leaf("x"), message)
                outbox.push(slot)
            os.write(said, struct.pack("<d", (time.perf_counter() - begun) / cell.slots))
        os._exit(0)
    offer.close()
    inbox, use = transport.inbox(conduit), use_of(cell)
    sends, receives = [], []
    for _ in range(LAPS):
        while inbox.grant(0):
            pass
        sends.append(struct.unpack("<d", os.read(told, 8))[0])
        begun = time.perf_counter()
        while (slot := inbox.probe()) is not None:
            if use is not None:
                use(0, slot.leaf("x"))
            inbox.release(slot)
        receives.append((time.perf_counter() - begun) / cell.slots)
    os.waitpid(pid, 0)
    transport.close()
    return float(np.median(sends)), float(np.median(receives))


def probe_ns(calls: int = 200_000) -> float:
    transport = Shm()
    policy = Conduit("policy", "newest", {"w": leaf((1000,), np.float32)})
    subscriber = transport.subscriber(policy)
    publisher = transport.publisher(policy)
    out, seen = Params(policy.layout), range(calls)
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
