"""Who learns together: learners that add up tensors, or share one set of parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tianji.types import Array

if TYPE_CHECKING:  # whoever only acts or looks need not wait for torch
    from torch import Tensor

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
    """Several learners, each in a process of its own, through torch.distributed."""

    def __init__(
        self,
        path: Path | str,
        rank: int,
        size: int,
        device: str = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        """They meet in the file at `path`, which must be new; returns when all are there. Each has
        a GPU of its own, as far as there are enough."""
        import torch
        import torch.distributed as dist

        self.rank, self.size = rank, size
        self._device = device
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        if gpus:
            torch.cuda.set_device(rank % gpus)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._try(
            lambda: dist.init_process_group(
                # nccl refuses two learners on one GPU; gloo goes through the host's memory.
                "nccl" if gpus >= size else "gloo",
                store=dist.FileStore(str(path), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        )

    def sum(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        self._try(lambda: dist.all_reduce(tensor))
        return tensor

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
        """Also after a failure: gloo's threads would abort a process that ends without it."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise Lost(
                f"learner {self.rank} lost the other {self.size - 1} of its group, so that it "
                f"cannot go on alone: {error}. Look for the first of them that failed; its own "
                f"message says why."
            ) from error


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
