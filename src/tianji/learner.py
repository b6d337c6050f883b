"""The learner: turns batches into policy versions and publishes them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import cast

import numpy as np

from tianji.algorithm import Gatherer, Gradients, Metrics, PriorityTrainer, Trainer
from tianji.channel import Inbox, Outbox, Publisher, Slot
from tianji.errors import Failure
from tianji.join import MIX, NO_MODEL, Mixer, averaged
from tianji.role import Did, State
from tianji.role_names import RoleName
from tianji.team import Alone, Team
from tianji.trigger import Counts, Trigger
from tianji.types import Array, Report, Rollout

TAKE, COMPUTE = Did("take"), Did("update")
UPDATE = Did("push")
"""an update is whole: its version is out, and it can be reported"""
NO_BATCH = Did(waits="buffer")
ALONE = Alone()

LAST = 4
"""place in a piece's counts: produced, received and filtered steps, episodes, 1 if it is the last
piece of its batch"""


MOST_SKIPS = 10
"""updates in a row that may be left out because they are not finite"""


class NonFinite(Failure):
    """A loss, a gradient or a parameter is NaN or infinite; `batch` is what led to it."""

    def __init__(self, message: str, batch: list[Rollout]) -> None:
        super().__init__(message)
        self.batch = batch


class Learner:
    """Task 3. It takes the parts of a batch in order, makes the update, publishes the version.

    The learners of a group do so in lock-step, each with its share of the batch; the first alone
    publishes, reports and exchanges models with other groups."""

    def __init__(
        self,
        trainer: Trainer,
        gatherer: Gatherer,
        batches: Inbox,
        depth: int,
        snapshots: Publisher | None,
        publish: Trigger,
        evaluations: Publisher | None = None,
        team: Team = ALONE,
        mixer: Mixer | None = None,
        joined: bool = False,
        skip: bool = False,
        priorities: Outbox | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """It asks for `depth` pieces of batches ahead; `publish` says when a version is sent.
        `joined`: the first learner of the team has a `mixer`, and the others follow it. `skip`: an
        update that is not finite is left out, else it raises. By `priorities` the buffer is told
        how much each step of a batch is worth, by `gradients` the optimizers how stale it is."""
        self.name = RoleName("learner", team.rank)
        self.skipped: NonFinite | None = None
        """what the last update would have been; set when `step` returns UPDATE"""
        self._skip = skip
        self._priorities = priorities
        self._gradients = gradients or Gradients()
        self._skips = 0
        """updates left out since the last one that was not"""
        self._before: State | None = None
        """the trainer before the update under way, where it may have to go back there"""
        self.version = 0
        self.consumed = 0
        """valid steps that updates have consumed so far, those of the whole team, reuse included"""
        self.report: Report | None = None
        """what the last update was; set when `step` returns UPDATE"""
        self._trainer = trainer
        self._gatherer = gatherer
        self._batches = batches
        self._depth = depth
        self._snapshots = snapshots
        self._publish_due = publish
        self._evaluations = evaluations
        self._team = team
        self._mixer = mixer
        self._follows = joined and team.size > 1
        self._mixed = False
        """have the networks been mixed since the other learners last took them over?"""
        self._unpublished = False
        """is a version to be sent, once it is mixed or need not wait for it?"""
        self._waits = False
        """does it wait for another group?"""
        self._owed = 0
        """pieces that were given back and not asked for anew"""
        self._counts = Counts()
        self._pieces: list[Slot] = []
        """of the batch in hand; the last one is being taken"""
        self._parts: Iterator[Rollout] | None = None
        self._metrics: Metrics | None = None
        """of an update that is computed and not yet published"""
        self._taken: list[Rollout] = []
        self._staleness: list[Array] = []

    def begin(self) -> None:
        """Publish the first version and ask for the first batches."""
        if self._mixer is not None:
            self._mixer.begin()
        self._ask()

    @property
    def between_batches(self) -> bool:
        return not self._pieces

    def step(self) -> Did:
        if self._metrics is not None:
            self._push(self._pieces[-1], self._metrics)
            return UPDATE
        if self._parts is None:
            if self._mixer is not None and not self._pieces and (did := self._mix()) is not None:
                return did
            piece = self._batches.probe()
            if piece is None:
                return NO_BATCH
            if self._follows and not self._pieces:
                self._follow()
            self._pieces.append(piece)
            self._parts = iter(self._gatherer.parts(piece.arrays))
        part = next(self._parts, None)
        if part is not None:
            self._take(part)
            return TAKE
        self._parts = None
        if not self._pieces[-1].leaf("counts")[LAST]:
            return TAKE
        self._finish()
        return COMPUTE

    @property
    def alone(self) -> bool:
        """Has it no team?"""
        return self._team.size == 1

    @property
    def can_rest(self) -> bool:
        """Would nobody wait for it in the middle of an update? One of a team must first `agree`,
        unless it waits for another group: then nobody of the team has a batch."""
        return self.between_batches and (self.alone or self._waits)

    @property
    def leads(self) -> bool:
        """Is it the first of its team?"""
        return self._team.rank == 0

    def agree(self, rest: bool) -> bool:
        """After an update: do all learners of the team rest now? The first one says so. Each of
        them must ask, or the others would wait for it in the next update."""
        if self._team.size == 1:
            return rest
        return bool(self._team.share(np.array([rest], np.int64))[0])

    def show_evaluator(self) -> None:
        """Let the evaluator play with the newest version."""
        assert self._evaluations is not None
        self._evaluations.push(self.version, self._trainer.params(self.version))

    @property
    def _computed(self) -> int:
        """The version of the trainer, published or not."""
        return self.version + (self._metrics is not None)

    def state(self) -> State:
        return {
            "version": self._computed,
            "consumed": self.consumed,
            "received": self._counts.steps,
            "trainer": self._trainer.state.state(),
            "batches": self._batches.state(),
            "owed": self._owed,
            "mixed": self._mixed,
            "mixer": None if self._mixer is None else self._mixer.state(),
        }

    def load_state(self, state: State) -> None:
        """Go on where the state was taken; without what was on its way, ask for batches anew."""
        self.version, self.consumed = state["version"], state["consumed"]
        self._counts = Counts(state["received"], self.version)
        self._trainer.state.load_state(state["trainer"])
        self._mixed = state["mixed"]
        if self._mixer is not None:
            self._mixer.load_state(state["mixer"])
        if state["batches"] is None:
            self._ask()
        else:
            self._publish()
            self._batches.load_state(state["batches"])
            self._owed = state["owed"]

    def policy_state(self) -> State:
        """What acting with the newest version needs, apart from all else."""
        params = self._trainer.params(self._computed)
        own = {k: v.copy() for k, v in params.items() if not params.layout[k].tied}
        return {"version": self._computed, "params": own}

    def networks(self) -> dict[str, Array]:
        return self._trainer.state.networks()

    def close(self) -> None:
        self._team.close()

    def _ask(self) -> None:
        self._publish()
        for _ in range(self._depth):
            self._batches.grant(self.version)

    def _take(self, part: Rollout) -> None:
        if self._skip and self._before is None:
            self._before = self._trainer.state.state()
        self._staleness.append(self.version - part.acted)
        self._taken.append(part)
        self._trainer.take(part)

    def _finish(self) -> None:
        if self._gradients.kind != "none":
            self._gradients.staleness = float(np.concatenate(self._staleness).mean())
        self._metrics = self._finite(self._trainer.finish() | self._gradients.told())

    def _push(self, last: Slot, metrics: Metrics) -> None:
        """Publish what was computed, tell of it, and ask for more."""
        self._metrics = None
        self.version += 1
        produced, received, filtered, episodes, _ = last.leaf("counts").tolist()
        before, self._counts = self._counts, Counts(received, self.version)
        self._unpublished |= self._publish_due(before, self._counts)
        if self._unpublished and self._mixer is None:
            self._publish()  # before the rest: actors may be waiting for it
        staleness = self._told()
        freshness = [piece.leaf("freshness").tolist() for piece in self._pieces]
        self.report = Report(
            version=self.version,
            produced=produced,
            received=received,
            consumed=self.consumed,
            episodes=last.leaf("episodes")[:episodes].copy(),
            metrics=metrics,
            staleness=staleness,
            filtered=filtered,
            freshness=sum(fresh for fresh, _ in freshness) / len(freshness),
            share=freshness[-1][1],
        )
        if self._priorities is not None and self.skipped is None:
            self._prioritize(self._priorities)
        for piece in self._pieces:
            self._batches.release(piece)
        self._owed += len(self._pieces)
        self._pieces, self._taken, self._staleness = [], [], []
        if self._mixer is None:
            self._go_on()

    def _prioritize(self, outbox: Outbox) -> None:
        """Tell the buffer what this update's steps are worth, before more are asked for. Where it
        is so far behind that there is no room, they keep what they have."""
        trainer = cast(PriorityTrainer, self._trainer)
        if not (granted := outbox.granted()):
            return
        slot = granted[0]
        (piece,) = self._pieces
        told = slot.arrays
        for name, array in told.items():
            array[...] = trainer.priorities() if name == "priority" else piece.leaf(name)
        outbox.push(slot)

    def _told(self) -> Array:
        """The staleness of all that the team took; its steps are consumed now."""
        steps = sum(int(np.count_nonzero(part.valid)) for part in self._taken)
        parts = self._staleness
        mine = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._team.size == 1:
            self.consumed += steps
            return mine
        told = self._team.gather(np.concatenate([[steps], mine]))
        self.consumed += int(sum(each[0] for each in told))
        return np.concatenate([each[1:] for each in told])

    def _mix(self) -> Did | None:
        """Join the model with those of other groups, if that is due; None: go on. While it waits,
        no batch is asked for, so that nobody of its team can begin the next one."""
        assert self._mixer is not None
        did = self._mixer.step(self.version)
        self._waits = did is NO_MODEL
        if did is not NO_MODEL:
            self._mixed |= did is MIX
            self._go_on()
        return did

    def _go_on(self) -> None:
        """Publish the version, if that is due, and ask for as much as was given back."""
        if self._unpublished:
            self._publish()
        for _ in range(self._owed):
            self._batches.grant(self.version)
        self._owed = 0

    def _follow(self) -> None:
        """Take over what the first learner has mixed since the last batch, if it has."""
        mixed, self._mixed = self._mixed, False
        if self._team.share(np.array([mixed], np.int64))[0]:
            state, share = self._trainer.state, self._team.share
            state.load_networks(
                state.networks() | {k: share(x) for k, x in averaged(state).items()}
            )

    def _publish(self) -> None:
        self._unpublished = False
        if self._snapshots is not None:
            self._snapshots.push(self.version, self._trainer.params(self.version))

    def _finite(self, metrics: Metrics) -> Metrics:
        """The metrics of an update that is finite; of one that is not, none: it is undone."""
        self.skipped, before, self._before = None, self._before, None
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if not bad and self._trainer.state.finite():
            self._skips = 0
            return metrics
        what = ", ".join(f"{name} = {value}" for name, value in bad.items()) or "a parameter"
        error = NonFinite(
            f"update {self.version + 1} is not finite ({what}). It was not published and no "
            f"checkpoint holds it. Look at the saved batch; a lower algorithm.learning_rate or "
            f"normalised observations are the usual cure.",
            self._taken,
        )
        self._skips += 1
        if before is None or self._skips > MOST_SKIPS:
            raise error
        self._trainer.state.load_state(before)
        error.batch = copy.deepcopy(self._taken)  # its slots are about to be given back
        self.skipped = error
        return {}
