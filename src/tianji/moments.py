"""Running mean and variance of what streams by: observation and reward normalisation."""

from __future__ import annotations

import numpy as np

from tianji.types import Array, Leaves


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
        n, total = len(rows), self.count + len(rows)
        delta = rows.mean(axis=0) - self.mean
        squares = self.variance * self.count + rows.var(axis=0) * n
        # Of a single number, numpy would make scalars here; arrays is what a state holds.
        self.variance = np.asarray((squares + delta * delta * (self.count * n / total)) / total)
        self.mean = np.asarray(self.mean + delta * (n / total))
        self.count = np.asarray(total)

    def scale(self) -> Array:
        """What to multiply by, so that the variance becomes 1."""
        return (1.0 / np.sqrt(self.variance + 1e-8)).astype(np.float32)

    def arrays(self) -> Leaves:
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def load(self, arrays: Leaves) -> None:
        self.mean = np.array(arrays["mean"])
        self.variance = np.array(arrays["variance"])
        self.count = np.array(arrays["count"])
