"""Who learns together: learners that add up tensors, or share one set of parameters."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from tianji.types import Array, fence

if TYPE_CHECKING:  # whoever only acts or looks need not wait for torch
    from torch import Tensor

T = TypeVar("T")

TIMEOUT = 60.0
"""seconds that a learner waits for the others of its group, before it calls them lost"""


class Lost(Exception):
    """The others of a team are gone, or one of them: a consequence of something else."""


class Team(Protocol):
    """The learners of a group, as one of them sees it. All make the same calls in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace it, in place, by the sum of all learners' tensors of this shape."""

    def gather(self, array: Array) -> list[Array]:
        """Every learner's array [n] in the order of their ranks; their lengths may differ."""

    def share(self, array: Array) -> Array:
        """The first learner's array of this shape, for all."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Alone:
    """One learner."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, array: Array) -> list[Array]:
        return [array]

    def share(self, array: Array) -> Array:
        return array

    def close(self) -> None:
        pass


class Together:
    """Several learners, each in a process of its own."""

    def __init__(
        self,
        file: int,
        rank: int,
        size: int,
        device: str = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        """They meet in an open file, which must be empty; returns when all are there. Each has a
        GPU of its own, as far as there are enough."""
        self.rank, self.size = rank, size
        self._device = device
        own_gpus = device == "cuda" and _set_gpu(rank) >= size
        kind: type[Desk | _Nccl] = _Nccl if own_gpus else Desk
        self._sums = self._try(lambda: kind(file, rank, size, timeout))

    def sum(self, tensor: Tensor) -> Tensor:
        self._try(lambda: self._sums.add_up(tensor))
        return tensor

    def _try(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise Lost(
                f"learner {self.rank} lost the other {self.size - 1} of its group, so that it "
                f"cannot go on alone: {error}. Look for the first of them that failed; its own "
                f"message says why."
            ) from error

    def gather(self, array: Array) -> list[Array]:
        import torch

        def filled(rows: int, row: Array) -> Array:
            """A table with one row for each learner, by adding up tables with one each."""
            table = np.zeros((self.size, rows), array.dtype)
            table[self.rank, : len(row)] = row
            return self.sum(torch.from_numpy(table).to(self._device)).cpu().numpy()

        lengths = filled(1, np.array([len(array)]))[:, 0].astype(np.int64)
        table = filled(int(lengths.max()), array)
        return [row[:n] for row, n in zip(table, lengths.tolist(), strict=True)]

    def share(self, array: Array) -> Array:
        import torch

        mine = array if self.rank == 0 else np.zeros_like(array)
        return self.sum(torch.from_numpy(mine.copy()).to(self._device)).cpu().numpy()

    def close(self) -> None:
        self._sums.close()


def _set_gpu(rank: int) -> int:
    """Let a learner use its own GPU, or share one where there are too few; how many there are."""
    import torch

    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(rank % gpus)
    return gpus


class Desk:
    """Memory of several processes, in which each lays numbers down and reads those of all others.

    For the k-th piece, everyone writes into the place of its own that has k's parity, then says so
    by its count; who sees that all have come so far adds up their places, in the order of ranks, so
    that all have the same sum bit for bit. Whoever writes piece k + 2 has seen everyone's count of
    k + 1, and they had read piece k before: two places for each are enough.
    """

    PIECE = 1 << 20
    """bytes of a place"""
    SPIN, LOOK = 2e-4, 0.02
    """seconds of waiting without sleep; and between looks at whether the others live"""

    def __init__(self, file: int, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._file = file
        places = 2 * size * self.PIECE
        os.posix_fallocate(self._file, 0, places + size * _LINE)  # rather an error than a signal
        # Locked as long as this process lives, however it ends.
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, rank)
        memory = mmap.mmap(self._file, places + size * _LINE)
        self._places = np.frombuffer(memory, np.uint8, places).reshape(2, size, self.PIECE)
        counts = memoryview(memory)[places:].cast("q")
        self._counts = counts
        self._others = [r for r in range(size) if r != rank]
        self._count = 0
        self._next()

    def add_up(self, tensor: Tensor) -> None:
        """Replace it, in place, by the sum of all processes' tensors of this shape."""
        import torch

        mine = tensor.detach().cpu().contiguous().view(-1)
        most = self.PIECE // mine.element_size()
        for begin in range(0, len(mine), most):
            piece = mine[begin : begin + most]
            places = [self._place(rank, piece) for rank in range(self._size)]
            places[self._rank].copy_(piece)
            self._next()
            torch.add(places[0], places[1], out=piece)
            for place in places[2:]:
                piece.add_(place)
        if mine.data_ptr() != tensor.data_ptr():
            tensor.copy_(mine.view(tensor.shape))

    def close(self) -> None:
        """The others see that it is gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _place(self, rank: int, like: Tensor) -> Tensor:
        import torch

        size = like.numel() * like.element_size()
        return torch.from_numpy(self._places[self._count & 1, rank, :size]).view(like.dtype)

    def _next(self) -> None:
        """Say that what was laid down is there, and wait until everyone has said so."""
        fence()
        self._count += 1
        self._counts[self._rank * _WORDS] = self._count
        begun = time.perf_counter()
        looked = begun
        for rank in self._others:
            while self._counts[rank * _WORDS] < self._count:
                now = time.perf_counter()
                if now - begun < self.SPIN:
                    continue
                if now - looked > self.LOOK:
                    looked = now
                    self._look_after(rank, now - begun)
                time.sleep(5e-5)
        fence()

    def _look_after(self, rank: int, waited: float) -> None:
        """Raise if there is no use in waiting for it."""
        if waited > self._timeout:
            raise RuntimeError(f"learner {rank} has not come for {waited:.0f} s")
        if self._counts[rank * _WORDS] == 0:
            return  # it is still to come, and holds no lock
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        if self._counts[rank * _WORDS] < self._count:  # it may have come and gone meanwhile
            raise RuntimeError(f"learner {rank} is gone")


_WORDS = 8
_LINE = 8 * _WORDS
"""a line of the cache, so that counts of two processes do not share one"""


class _Nccl:
    """Sums of GPUs, one for each process."""

    def __init__(self, file: int, rank: int, size: int, timeout: float) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "nccl",
            store=dist.FileStore(f"/proc/self/fd/{file}", size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )

    def add_up(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Shared:
    """Parameters and moments that learners of several processes step without locks (Hogwild!)."""

    flat: Array
    """float32 over shared memory, `Shared.size` of it or more, zeros at the start"""
    first: bool
    """does this learner lay the first parameters out? One must, before any makes a step."""

    @staticmethod
    def size(parameters: int) -> int:
        """Numbers that it takes: two counts, then parameters and both moments."""
        return 2 + 3 * parameters

    def after(self, parameters: int) -> Shared:
        """What is left for the next optimizer, after one of so many parameters."""
        return Shared(self.flat[self.size(parameters) :], self.first)
