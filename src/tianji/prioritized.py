"""Prioritised replay: steps are drawn in proportion to how much there is to learn from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from tianji.algorithm import Lanes
from tianji.errors import Failure
from tianji.role import State
from tianji.store import NStep, Replay, Transitions
from tianji.sumtree import SumTree
from tianji.types import GAP, HEAD, Array, Layout, Leaves, Rollout, leaf

LEAST = 1e-6
"""added to every priority, so that no step is never drawn again"""

RECORDED: Layout = {"q": leaf((), np.float32), "q_best": leaf((), np.float32)}
"""extras from which initial priorities are computed: the value of the action taken, and of the best
one"""


def weights(batch: int) -> Layout:
    """Leaves of a selection, beside those of uniform replay."""
    return {"weight": leaf((batch,), np.float32), "rollout": leaf((batch,), np.int64)}


class Prioritized(Replay):
    """Proportional prioritised replay (Schaul et al. 2016) over the lanes, with n-step returns.

    A step's priority is p = |error| + LEAST, and it is drawn with P = p^alpha / sum of p^alpha, one
    step from each of N equal shares of the sum. Its weight is (M P)^-beta over the largest of the
    batch, so that the number M of steps cancels.

    The first priority of a step is that of what the actor recorded (Horgan et al. 2018): its n-step
    return with the `q_best` that follows, less its `q`; or with `initial` "max" the largest so far.
    It is there as soon as its window is complete, and with "actor" the row that follows it.
    """

    def __init__(
        self,
        lanes: Lanes,
        batch: int,
        slots: int,
        gamma: float,
        n: int,
        alpha: float,
        beta: float,
        beta_updates: int,
        initial: Literal["actor", "max"],
    ) -> None:
        """`beta` becomes 1 over `beta_updates` choices; 0: it stays."""
        super().__init__(lanes, batch, slots, n)
        self._alpha, self._beta, self._beta_updates = alpha, beta, beta_updates
        self._recorded = NStep(lanes, gamma, n) if initial == "actor" else None
        self._rows = self._total * self._T
        """of a lane"""
        self._tree = SumTree(len(lanes.memory) * self._rows * self._B)
        """p^alpha of each lane's steps, one lane after the other"""
        self._arrived = [0] * len(lanes.memory)
        """rollouts of each lane so far"""
        self._known = [0] * len(lanes.memory)
        """rows of each lane so far that have a priority"""
        self._numbers = np.full((len(lanes.memory), self._total), -1)
        """which of its lane's rollouts each slot holds; -1: none"""
        self._choices = 0
        self._largest = 1.0

    def add(self, lane: int, slot: int) -> None:
        oldest, full = self._first[lane], self._held[lane] == self._slots
        super().add(lane, slot)
        if full:
            rows = np.arange(oldest * self._T, (oldest + 1) * self._T)
            self._tree.set(self._leaves(lane, self._steps(rows)), 0.0)
            self._numbers[lane, oldest] = -1
        self._numbers[lane, slot] = self._arrived[lane]
        self._arrived[lane] += 1
        first = (self._arrived[lane] - self._held[lane]) * self._T
        needs = self._n if self._recorded else self._n - 1
        begin, end = max(first, self._known[lane]), self._arrived[lane] * self._T - needs
        if begin < end:
            self._begin(lane, self._steps(np.arange(begin, end) % self._rows))
            self._known[lane] = end

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        total, N = self._tree.total, len(out["step"])
        if total <= 0:
            raise Failure(
                "no step that replay holds has a priority: the env ends its episodes at once, so "
                "that nearly all steps only reset it, or algorithm.warmup is too early."
            )
        leaves = self._tree.sample((np.arange(N) + rng.random(N)) * (total / N))
        lane, step = np.divmod(leaves, self._rows * self._B)
        out["lane"][:], out["step"][:] = lane, step
        out["rollout"][:] = self._numbers[lane, step // (self._T * self._B)]
        share = self._tree[leaves]
        out["weight"][:] = (share / share.min()) ** -self.beta
        self._choices += 1
        return self._use(out["lane"], out["step"])

    @property
    def beta(self) -> float:
        """How much of the bias of the next choice its weights take away."""
        if self._beta_updates == 0:
            return self._beta
        return self._beta + (1 - self._beta) * min(1.0, self._choices / self._beta_updates)

    def prioritize(self, selection: Leaves, priority: Array) -> None:
        """Steps that are no longer held, or whose slot holds others by now, are left alone."""
        lane, step = selection["lane"], selection["step"]
        held = self._numbers[lane, step // (self._T * self._B)] == selection["rollout"]
        if held.any():
            told = priority[held].astype(np.float64)
            self._set(self._leaves(lane, step)[held], told)
            self._largest = max(self._largest, float(told.max()))

    def state(self) -> State:
        return super().state() | {
            "tree": self._tree.state(),
            "arrived": list(self._arrived),
            "known": list(self._known),
            "numbers": self._numbers.copy(),
            "choices": self._choices,
            "largest": self._largest,
        }

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._tree.load_state(state["tree"])
        self._arrived, self._known = list(state["arrived"]), list(state["known"])
        self._numbers[:] = state["numbers"]
        self._choices, self._largest = state["choices"], state["largest"]

    def _begin(self, lane: int, step: Array) -> None:
        """Give these steps their first priority; those that only reset an env have none."""
        step = step[self._valid[lane][step]]
        if self._recorded is None:
            self._set(self._leaves(lane, step), np.full(len(step), self._largest))
        else:
            self._set(self._leaves(lane, step), self._errors(self._recorded, lane, step))

    def _errors(self, recorded: NStep, lane: int, step: Array) -> Array:
        """Those that the actor saw: ret + discount q_best - q."""
        flat, T, B = recorded.flat[lane], self._T, self._B
        ret, discount, last = recorded.windows([(lane, slice(0, len(step)))], step)
        follows = (last + B) % (self._rows * B)
        error = np.abs(ret + discount * flat["extras.q_best"][follows] - flat["extras.q"][step])
        # What follows the last step before a gap was not seen.
        row = follows // B
        gap = (flat["head"][row // T * HEAD + GAP] != 0) & (row % T == 0)
        return np.where(gap & (discount > 0), self._largest, error)

    def _set(self, leaves: Array, priority: Array) -> None:
        if not np.isfinite(priority).all():
            raise Failure(
                "a priority is not finite, so no step could be drawn any more. Bound the env's "
                "rewards, or lower algorithm.learning_rate."
            )
        self._tree.set(leaves, (np.abs(priority) + LEAST) ** self._alpha)

    def _steps(self, rows: Array) -> Array:
        """All envs' steps of these rows."""
        steps: Array = rows[:, None] * self._B + np.arange(self._B)
        return steps.reshape(-1)

    def _leaves(self, lane: Array | int, step: Array) -> Array:
        leaves: Array = lane * (self._rows * self._B) + step
        return leaves


class WeightedTransitions(Transitions):
    """Steps with their n-step returns and, as extras "weight" [1, N], how much each counts."""

    def parts(self, selection: Leaves) -> Iterator[Rollout]:
        for part in super().parts(selection):
            part.extras["weight"][0] = selection["weight"]
            yield part

    def _room(self, N: int) -> Rollout:
        part = super()._room(N)
        part.extras["weight"] = np.empty((1, N), np.float32)
        return part
