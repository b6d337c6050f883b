"""Running mean and variance of what streams by: observation and reward normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tianji.description import Model, Models
from tianji.team import Team
from tianji.types import Array, Leaves, leaf


class Moments:
    """Mean and variance of all rows so far, joined batch by batch (Chan et al.), in float64."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean = np.zeros(shape, np.float64)
        self.variance = np.ones(shape, np.float64)
        self.count = np.zeros((), np.float64)

    def update(self, rows: Array) -> None:
        """Join rows [N, ...]."""
        if len(rows) == 0:
            return
        rows = rows.astype(np.float64)
        self._join(len(rows), rows.mean(axis=0), rows.var(axis=0))

    def update_together(self, team: Team, parts: Sequence[Array]) -> None:
        """Join the rows [N, ...] of every part that any learner has, in two passes over them."""
        count, shape = sum(len(rows) for rows in parts), self.mean.shape
        sums = sum((rows.sum(axis=0, dtype=np.float64) for rows in parts), np.zeros(shape))
        n, *total = _total(team, np.array([count, *sums.flat]))
        if n == 0:
            return
        mean = np.array(total).reshape(shape) / n
        squares = sum((np.square(rows - mean).sum(axis=0) for rows in parts), np.zeros(shape))
        self._join(n, mean, _total(team, squares.ravel()).reshape(shape) / n)

    def _join(self, n: float, mean: Array, variance: Array) -> None:
        total = self.count + n
        delta = mean - self.mean
        squares = self.variance * self.count + variance * n
        # Of a single number, numpy would make scalars here; arrays is what a state holds.
        self.variance = np.asarray((squares + delta * delta * (self.count * n / total)) / total)
        self.mean = np.asarray(self.mean + delta * (n / total))
        self.count = np.asarray(total)

    def scale(self) -> Array:
        """What to multiply by, so that the variance becomes 1."""
        return (1.0 / np.sqrt(self.variance + 1e-8)).astype(np.float32)

    def arrays(self) -> Leaves:
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    @staticmethod
    def models(name: str, shape: tuple[int, ...]) -> Models:
        """What is learnt, by the name that is before those of the arrays."""
        each = {"mean": Model(leaf(shape, np.float64)), "variance": Model(leaf(shape, np.float64))}
        count = Model(leaf((), np.float64), "local")
        return {f"{name}.{k}": model for k, model in (each | {"count": count}).items()}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Take these over. Joining groups that moved apart may have left a variance below 0."""
        self.mean = np.array(arrays["mean"])
        self.variance = np.asarray(np.maximum(arrays["variance"], 0.0))
        self.count = np.array(arrays["count"])


def _total(team: Team, numbers: Array) -> Array:
    """All learners' numbers, added up."""
    return np.sum(team.gather(numbers), axis=0)  # type: ignore[no-any-return]
