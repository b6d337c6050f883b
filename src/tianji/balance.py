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
    lead: int
    """updates that production may run ahead"""
    granted: int = 0
    """rollouts granted"""
    received: int = 0
    """rollouts received"""
    served: int = 0
    """batches served"""
    base: int = 0
    """updates that were made before this account began"""

    def next_update(self) -> int:
        """The update that the next granted rollout is meant for."""
        rows = max(0, self.granted * self.rows_per_rollout - self.warmup)
        return self.base + rows // self.steps_per_update

    def filling(self) -> bool:
        """Is the first update's data still far off: less has arrived than the warm-up asks for?"""
        return self.received * self.rows_per_rollout < self.warmup

    def may_grant(self, version: int) -> bool:
        """Is the learner far enough for one more rollout?"""
        return self.next_update() <= version + self.lead

    def may_serve(self) -> bool:
        """Have the rows arrived that the next batch is meant to follow?"""
        due = self.warmup + (self.served + 1) * self.steps_per_update
        return self.received * self.rows_per_rollout >= due
