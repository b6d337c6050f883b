"""multiprocessing.Queue: arrays are pickled by the sender and land in storage at the receiver."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from transfer_common import (
    Cell,
    Senders,
    cell_of_argv,
    message_of,
    result,
    send_all,
    storage_of,
)  # fmt: skip


def sender(cell: Cell, queue: Any, start: Callable[[], None]) -> dict[str, Any]:
    message = message_of(cell)
    for _ in range(cell.ahead):
        queue.put(message)
    start()
    report = send_all(cell, lambda: queue.put(message))
    before = time.process_time()
    queue.put(None)
    queue.close()
    queue.join_thread()
    report["cpu"] += time.process_time() - before
    return report


def main() -> None:
    cell = cell_of_argv()
    queue = multiprocessing.get_context("fork").Queue(cell.ahead * cell.actors)
    places = storage_of(cell)
    senders = Senders(cell, lambda index, start: sender(cell, queue, start))

    def receive(total: int) -> int:
        got = ended = 0
        while got < total and ended < cell.actors:
            message = queue.get()
            if message is None:
                ended += 1
                continue
            np.copyto(places[got % len(places)], message)
            got += 1
        return got

    receive(cell.ahead * cell.actors)
    cpu, begun = time.process_time(), senders.start()
    got = receive(cell.total)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    while not queue.empty():  # the marks of the end: a sender cannot leave before they are taken
        queue.get()
    reports = senders.reports()
    result(got, seconds, cpu, sum(report["cpu"] for report in reports))


if __name__ == "__main__":
    main()
