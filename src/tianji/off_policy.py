"""What off-policy algorithms are made of: the hyperparameters of replay, and a trainer that makes
one update of each batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tianji import networks
from tianji.algorithm import Chooser, Gatherer, Lanes, Metrics, Spec, Traits
from tianji.description import Description, averaged
from tianji.errors import Refusal
from tianji.optim import Flat, Optimizer, mean_over
from tianji.role import generator
from tianji.store import Replay, Transitions, numbers
from tianji.train_state import TrainState
from tianji.types import Array, Layout, Params, Rollout, leaf

Modules = Mapping[str, Mapping[str, nn.Module]]
"""by optimizer, and by the name that is before those of a module's parameters"""


class Networks(NamedTuple):
    """What an algorithm learns, before it is initialised."""

    modules: Modules
    """those that optimizers step"""
    targets: Modules
    """those that are copied, by the optimizer whose parameters the copies follow and by names of
    their own"""
    acting: Mapping[str, nn.Module]
    """the first ones of the first optimizer, which a snapshot holds"""
    scalar: str
    """the name of a number of the snapshot that depends on the version"""

    @property
    def params(self) -> Layout:
        """Leaves of a snapshot."""
        return networks.layout(self.acting) | {self.scalar: leaf((), np.float32)}


class OffPolicy:
    """What the hyperparameters of algorithms that replay have in common."""

    traits: ClassVar[Traits] = Traits(on_policy=False)

    batch_size: int
    """steps or episodes that one update consumes"""
    new_steps: int
    """new steps for each update"""
    capacity: int
    """steps that replay holds"""
    warmup: int
    """steps before the first update"""
    gamma: float
    """discount per step"""
    n_step: int
    """rewards that a target sums before it bootstraps"""
    max_grad_norm: float
    """gradients are scaled down to this norm; 0: never"""

    def make_networks(self, spec: Spec) -> Networks:
        raise NotImplementedError

    def describe(self, spec: Spec) -> Description:
        with torch.device("meta"):
            made = self.make_networks(spec)
        each = [*made.modules.values(), *made.targets.values()]
        return Description(
            params=made.params,
            models=averaged(*map(networks.layout, each)),
            selection=numbers(("lane", "step"), self.batch_size),
            slots=self.slots(spec),
            gradients=True,
        )

    def steps_per_update(self, spec: Spec) -> int:
        return self.new_steps

    def warmup_steps(self, spec: Spec) -> int:
        return self.warmup

    def slots(self, spec: Spec) -> int:
        return -(-self.capacity // (spec.actors * spec.rows_per_rollout))

    def chooser(self, spec: Spec, lanes: Lanes) -> Chooser:
        return Replay(lanes, self.batch_size, self.slots(spec), self.n_step)

    def gatherer(self, spec: Spec, lanes: Lanes) -> Gatherer:
        return Transitions(lanes, self.gamma, self.n_step)

    def check_replay(self, spec: Spec, rows: int) -> None:
        """Refuse a replay from which the first batch, or a learner's share, could not be drawn; a
        window has so many rows of an env."""
        least = max(self.batch_size, rows * spec.envs * spec.actors)
        if self.warmup < least:
            raise Refusal(
                f"algorithm.warmup = {self.warmup} is too early: the first batch needs {least} "
                f"steps (batch_size, and {rows} of every env). Set warmup to {least} or more."
            )
        if self.capacity < self.warmup:
            raise Refusal(
                f"algorithm.capacity = {self.capacity} is less than warmup = {self.warmup}: the "
                f"steps gathered first would be gone before the first update. Raise capacity."
            )
        self.check_shares(spec)

    def check_shares(self, spec: Spec) -> None:
        if self.batch_size % spec.learners:
            fit = max(1, round(self.batch_size / spec.learners)) * spec.learners
            raise Refusal(
                f"algorithm.batch_size = {self.batch_size} is no multiple of scale.learners = "
                f"{spec.learners}, so that their shares could not be equal. Set batch_size to "
                f"{fit}."
            )

    def _between(self, start: float, end: float, version: int, steps: int) -> float:
        """From start to end in so many env steps, by those that a policy version stands for."""
        return start + min(1.0, version * self.new_steps / steps) * (end - start)


class Trainer:
    """One update of one batch from replay. A snapshot is the policy's parameters, which the first
    optimizer steps before others, and one number that depends on the version."""

    def __init__(
        self,
        hyper: OffPolicy,
        spec: Spec,
        device: str,
        made: Networks,
        together: bool = False,
    ) -> None:
        """`together`: all learners of a group draw the noise of the whole batch, and each takes its
        share."""
        self._spec, self._device, self._team = spec, device, spec.team
        optimizers: dict[str, Optimizer] = {}
        self._copies: dict[str, dict[str, nn.Module]] = {}
        shared = spec.shared
        for name, stepped in made.modules.items():
            for module in stepped.values():
                module.to(device)
            self._copies[name] = copy.deepcopy(dict(made.targets.get(name, {})))
            optimizers[name] = Optimizer(
                stepped,
                hyper.max_grad_norm,
                team=spec.team,
                shared=shared,
                gradients=spec.gradients,
            )
            shared = shared and shared.after(len(optimizers[name].flat.data))
        for module in (m for copies in self._copies.values() for m in copies.values()):
            module.requires_grad_(False)
        self._flats = {name: Flat(copies) for name, copies in self._copies.items() if copies}
        index = spec.index("learner", 0 if together else spec.learner)
        self._rng = generator(spec.seed, "learner", index)
        self.state = TrainState(optimizers, {**self._flats}, counters={"updates": 0}, rng=self._rng)
        self._optimizers = optimizers
        self._params = Params(made.params)
        share = hyper.batch_size // spec.learners
        self._mine = slice(share * spec.learner, share * (spec.learner + 1))
        self._part: Rollout | None = None

    def take(self, part: Rollout) -> None:
        for optimizer in self._optimizers.values():
            optimizer.refresh()
        self._part = part

    def finish(self) -> Metrics:
        assert self._part is not None
        self.state.counters["updates"] += 1
        return self._learn(self._part)

    def params(self, version: int) -> Params:
        weights, first = self._params.flat[:-1], next(iter(self._optimizers.values()))
        np.copyto(weights, first.flat.array()[: len(weights)])
        self._params.flat[-1] = self._scalar(version)
        return self._params

    def _learn(self, part: Rollout) -> Metrics:
        """The steps of an update."""
        raise NotImplementedError

    def _scalar(self, version: int) -> float:
        """The last number of a snapshot."""
        raise NotImplementedError

    @property
    def _updates(self) -> int:
        """With the one under way."""
        return self.state.counters["updates"]

    def _follow(self, every: int, tau: float) -> None:
        """Move targets by tau at every update; where `every` is not 0, all the way at so many."""
        for name, target in self._flats.items():
            online = self._optimizers[name].flat
            if every == 0:
                target.data.lerp_(online.data, tau)
            elif self._updates % every == 0:
                target.data.copy_(online.data)

    def _means(self, names: Iterable[str], values: Tensor, rows: int) -> Metrics:
        """Of values that are means over a learner's rows: over those of all learners."""
        (means,) = mean_over(self._team, values.unsqueeze(0), [rows])
        return dict(zip(names, means.tolist(), strict=True))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)
