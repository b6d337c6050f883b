"""pyzmq over ipc, PUSH to PULL: sent without a copy, received into storage."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from transfer_common import (
    Cell,
    Senders,
    cell_of_argv,
    message_of,
    result,
    send_all,
    storage_of,
)  # fmt: skip


def socket_of(kind: int, slots: int) -> zmq.Socket:
    socket = zmq.Context.instance().socket(kind)
    socket.set_hwm(slots)
    return socket


def sender(cell: Cell, address: str, start: Callable[[], None]) -> dict[str, Any]:
    message = message_of(cell)
    socket = socket_of(zmq.PUSH, cell.ahead)
    socket.connect(address)
    for _ in range(cell.ahead):
        socket.send(message, copy=False)
    start()
    report = send_all(cell, lambda: socket.send(message, copy=False))
    before = time.process_time()
    socket.send(b"")
    start()  # the second time: a receiver loses what a sender that leaves has sent last
    report["cpu"] += time.process_time() - before
    socket.close(linger=0)
    zmq.Context.instance().term()
    return report


def main() -> None:
    cell = cell_of_argv()
    places = storage_of(cell)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'transfer'}"
        senders = Senders(cell, lambda index, start: sender(cell, address, start))
        socket = socket_of(zmq.PULL, cell.ahead)
        socket.bind(address)

        def receive(total: int) -> int:
            got = ended = 0
            while got < total and ended < cell.actors:
                frame = socket.recv(copy=False)
                if not len(frame):
                    ended += 1
                    continue
                np.copyto(places[got % len(places)], np.frombuffer(frame, np.uint8))
                got += 1
            return got

        receive(cell.ahead * cell.actors)
        cpu, begun = time.process_time(), senders.start()
        got = receive(cell.total)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        senders.start()
        reports = senders.reports()
        socket.close(linger=0)
        zmq.Context.instance().term()
    result(got, seconds, cpu, sum(report["cpu"] for report in reports))


if __name__ == "__main__":
    main()
