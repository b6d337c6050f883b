"""mpi4py, pickled objects or buffers: rank 0 receives, the other ranks send.

mpirun -n 2 python transfer_mpi.py CELL pickle|buffers
"""

import sys
import time
from collections import deque

import numpy as np
from mpi4py import MPI
from transfer_common import Cell, cell_of_argv, message_of, result, send_all, storage_of

MESSAGE, END = 0, 1
comm = MPI.COMM_WORLD


class Pickled:
    """A dict of arrays through lower-case send and recv, as the authors' code does."""

    def __init__(self, cell: Cell) -> None:
        self._rollout = {"x": message_of(cell)}
        self._places = storage_of(cell) if comm.rank == 0 else None
        self._status = MPI.Status()

    def send(self) -> None:
        comm.send(self._rollout, 0, MESSAGE)

    def end(self) -> None:
        comm.send(None, 0, END)

    def receive(self, at: int) -> bool:
        """Land one message; False where it was the mark of an end."""
        rollout = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=self._status)
        if rollout is None:
            return False
        np.copyto(self._places[at % len(self._places)], rollout["x"])
        return True

    def close(self) -> None:
        pass


class Buffers:
    """Isend of the array itself into receives that are posted ahead."""

    def __init__(self, cell: Cell) -> None:
        self._ahead, self._message = cell.ahead, message_of(cell)
        self._sends: deque[MPI.Request] = deque()
        self._status = MPI.Status()
        if comm.rank == 0:
            self._places = storage_of(cell)
            ahead = min(cell.ahead * cell.actors, len(self._places))
            self._next = 0
            self._posted = deque(self._post() for _ in range(ahead))

    def _post(self) -> MPI.Request:
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        return comm.Irecv([place, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)

    def send(self) -> None:
        if len(self._sends) == self._ahead:
            self._sends.popleft().Wait()
        self._sends.append(comm.Isend([self._message, MPI.BYTE], 0, MESSAGE))

    def end(self) -> None:
        while self._sends:
            self._sends.popleft().Wait()
        comm.Send([self._message[:1], MPI.BYTE], 0, END)

    def receive(self, at: int) -> bool:
        # Messages match receives in the order of posting, so the oldest is the next to complete.
        self._posted.popleft().Wait(self._status)
        self._posted.append(self._post())
        return self._status.tag == MESSAGE

    def close(self) -> None:
        for request in self._posted:
            request.Cancel()
            request.Free()


def main() -> None:
    cell = cell_of_argv()
    path = {"pickle": Pickled, "buffers": Buffers}[sys.argv[2]](cell)
    if comm.rank:
        for _ in range(cell.ahead):
            path.send()
        comm.Barrier()
        report = send_all(cell, path.send)
        path.end()
        comm.gather(report["cpu"])
    else:
        for at in range(cell.ahead * cell.actors):
            path.receive(at)
        comm.Barrier()
        cpu, begun = time.process_time(), time.perf_counter()
        got = ended = 0
        while got < cell.total and ended < cell.actors:
            if path.receive(got):
                got += 1
            else:
                ended += 1
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        while ended < cell.actors:
            ended += not path.receive(got)
        path.close()
        result(got, seconds, cpu, sum(comm.gather(0.0)))


if __name__ == "__main__":
    main()
