"""The learner: turns batches into policy versions and publishes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tianji.algorithm import Metrics, Store, Trainer
from tianji.channel import Inbox, Newest, Slot
from tianji.errors import Failure
from tianji.role import Did, State
from tianji.types import Array, Report, Rollout

TAKE, UPDATE = Did("take"), Did("update")
NO_BATCH = Did(waits="buffer")


class NonFinite(Failure):
    """A loss, a gradient or a parameter is NaN or infinite; `batch` is what led to it."""

    def __init__(self, message: str, batch: list[Rollout]) -> None:
        super().__init__(message)
        self.batch = batch


class Learner:
    """Task 3. It takes the parts of a batch in order, makes the update, publishes the version."""

    name = "learner"

    def __init__(
        self, trainer: Trainer, store: Store, batches: Inbox, snapshots: list[Newest], depth: int
    ) -> None:
        self.version = 0
        self.consumed = 0
        """valid steps so far, reuse included"""
        self.report: Report | None = None
        """what the last update was; set when `step` returns UPDATE"""
        self._trainer = trainer
        self._store = store
        self._batches = batches
        self._snapshots = snapshots
        self._depth = depth
        self._batch: Slot | None = None
        self._parts: Iterator[Rollout] = iter(())
        self._taken: list[Rollout] = []
        self._staleness: list[Array] = []

    def begin(self) -> None:
        """Publish the first version and ask for the first batches."""
        self._publish()
        for _ in range(self._depth):
            self._batches.grant(self.version)

    @property
    def between_batches(self) -> bool:
        return self._batch is None

    def step(self) -> Did:
        if self._batch is None:
            self._batch = self._batches.probe()
            if self._batch is None:
                return NO_BATCH
            self._parts = iter(self._store.parts(self._batch.arrays))
        part = next(self._parts, None)
        if part is not None:
            self._take(part)
            return TAKE
        self._finish(self._batch)
        return UPDATE

    def state(self) -> State:
        return {
            "version": self.version,
            "consumed": self.consumed,
            "trainer": self._trainer.state(),
        }

    def load_state(self, state: State) -> None:
        self.version, self.consumed = state["version"], state["consumed"]
        self._trainer.load_state(state["trainer"])
        self._publish()

    def policy_state(self) -> State:
        """What acting with the newest version needs, apart from all else."""
        params = self._trainer.params(self.version)
        return {"version": self.version, "params": {k: v.copy() for k, v in params.items()}}

    def networks(self) -> dict[str, Array]:
        return self._trainer.networks()

    def close(self) -> None:
        pass

    def _take(self, part: Rollout) -> None:
        self._staleness.append(self.version - part.versions)
        self.consumed += int(np.count_nonzero(part.valid))
        self._taken.append(part)
        self._trainer.take(part)

    def _finish(self, batch: Slot) -> None:
        metrics = self._trainer.finish()
        self._refuse_nonfinite(metrics)
        self.version += 1
        self._publish()
        produced, received, episodes = batch.arrays["counts"].tolist()
        staleness = self._staleness
        self.report = Report(
            version=self.version,
            produced=produced,
            received=received,
            consumed=self.consumed,
            episodes=batch.arrays["episodes"][:episodes].copy(),
            metrics=metrics,
            staleness=staleness[0] if len(staleness) == 1 else np.concatenate(staleness),
        )
        self._batches.release(batch)
        self._batches.grant(self.version)
        self._batch = None
        self._taken, self._staleness = [], []

    def _publish(self) -> None:
        flat = self._trainer.params(self.version).flat
        for snapshots in self._snapshots:
            snapshots.push(self.version, flat)

    def _refuse_nonfinite(self, metrics: Metrics) -> None:
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if bad or not self._trainer.finite():
            what = ", ".join(f"{name} = {value}" for name, value in bad.items()) or "a parameter"
            raise NonFinite(
                f"update {self.version + 1} is not finite ({what}). It was not published and no "
                f"checkpoint holds it. Look at the saved batch; a lower algorithm.learning_rate or "
                f"normalised observations are the usual cure.",
                self._taken,
            )
