"""The account that keeps production and consumption together: pure arithmetic on counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Balance:
    """Who may produce and when a batch is due, from counts of rows (steps, reset rows included)."""

    rows_per_rollout: int
    steps_per_update: int
    """new rows that one update is meant to follow"""
    warmup: int
    """rows before the first update's own"""
    lead: float
    """updates that production may run ahead; inf: without a bound"""
    round: int = 1
    """rollouts that are granted for one and the same update, because one version makes them"""
    pieces: int = 1
    """parts in which an update is served"""
    paced: bool = True
    """False: once there is enough for one batch, batches do not wait for new rows"""
    credit: int = 0
    """updates that learning may run ahead of its rows, once the warm-up is there"""
    granted: int = 0
    """rollouts granted, those aside that were filtered or lost"""
    received: int = 0
    """rollouts received, those aside that were filtered"""
    served: int = 0
    """pieces served"""
    base: int = 0
    """updates that were made before this account began"""

    def next_update(self) -> int:
        """The update that the next granted rollout is meant for."""
        return self._update_after(self.granted - self.granted % self.round)

    def arriving_update(self) -> int:
        """The update that consumes the next rollout to be received, where each is consumed once."""
        return self._update_after(self.received)

    def filling(self) -> bool:
        """Is the first update's data still far off: less has arrived than the warm-up asks for?"""
        return self.received * self.rows_per_rollout < self.warmup

    def may_grant(self, version: int) -> bool:
        """Is the learner far enough for one more rollout?"""
        return self.next_update() <= version + self.lead

    def may_serve(self) -> bool:
        """Have the rows arrived that the next piece is meant to follow?"""
        served = self.served if self.paced else min(self.served, self.pieces - 1)
        ahead = max(0, served + 1 - self.credit * self.pieces)
        due = self.warmup * self.pieces + ahead * self.steps_per_update
        return self.received * self.rows_per_rollout * self.pieces >= max(1, due)

    def serving_update(self) -> int:
        """The update that the next piece is for."""
        return self.base + self.served // self.pieces

    def _update_after(self, rollouts: int) -> int:
        rows = max(0, rollouts * self.rows_per_rollout - self.warmup)
        return self.base + rows // self.steps_per_update


def uneven_rounds(rows_per_rollout: int, actors: int, steps_per_update: int) -> str | None:
    """Why updates and rounds of all actors do not fit into each other; None where they do."""
    rows = rows_per_rollout * actors
    if steps_per_update % rows == 0 or rows % steps_per_update == 0:
        return None
    if steps_per_update > rows:
        fit = round(steps_per_update / rows) * rows
    else:
        fits = [n for n in range(1, rows + 1) if rows % n == 0]
        fit = min(fits, key=lambda n: (abs(n - steps_per_update), n))
    return (
        f"one rollout of each of {actors} actors is {rows} steps, and an update follows "
        f"{steps_per_update}: neither is a whole number of the other, so acting and learning could "
        f"not take turns. The nearest number of steps for an update that fits is {fit}."
    )
