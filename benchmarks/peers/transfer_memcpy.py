"""The limit of a transfer: one process copies a message into a ring of preallocated slots."""

import mmap
import os
import sys
import time

import numpy as np
from transfer_common import cell_of_argv, message_of, result, storage_of


def shared(slots: int, size: int) -> np.ndarray:
    """The same places in memory of the kind that processes can share: pages of 4 KB."""
    fd = os.memfd_create("transfer")
    os.posix_fallocate(fd, 0, slots * size)
    places = np.frombuffer(mmap.mmap(fd, slots * size), np.uint8).reshape(slots, size)
    places[:] = 1
    return places


def main() -> None:
    cell = cell_of_argv()
    message, slots = message_of(cell), cell.slots
    ring = shared(slots, cell.size) if sys.argv[2:] == ["shared"] else storage_of(cell)
    for at in range(slots):
        np.copyto(ring[at], message)
    sent = at = 0
    cpu, begun = time.process_time(), time.perf_counter()
    deadline = begun + cell.seconds
    for _ in range(cell.quota):
        np.copyto(ring[at], message)
        at = (at + 1) % slots
        sent += 1
        if time.perf_counter() > deadline:
            break
    result(sent, time.perf_counter() - begun, 0.0, time.process_time() - cpu)


if __name__ == "__main__":
    main()
