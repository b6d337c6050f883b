"""Asynchronous PPO by IMPACT (Luo et al. 2020): ratios to a target network that moves seldom."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from tianji import actor_critic, corrections
from tianji.actor_critic import Batch, OnPolicy, Seen, Ways
from tianji.algorithm import Count, Metrics, NotNegative, Positive, Spec, Traits
from tianji.corrections import Estimate, Steps
from tianji.description import Description
from tianji.optim import Flat
from tianji.types import Leaves, Rollout

TARGETS = {"policy": "target", "spread": "target_spread"}
"""names of the copies of modules"""


@dataclass(frozen=True)
class APPO(OnPolicy):
    """On-policy by name, off-policy by design: rollouts may be stale, and with reuse.window each is
    consumed several times. V-trace makes the targets of values, for the target network's policy."""

    name: ClassVar[str] = "appo"
    traits: ClassVar[Traits] = replace(OnPolicy.traits, corrects=("impact", "vtrace"))

    epochs: Count = 1
    """passes over the batch in one update"""
    minibatches: Count = 4
    """parts into which each pass splits the batch, one optimizer step each"""
    clip: Positive = 0.3
    """how far the probability ratio may move the objective"""
    value_clip: NotNegative = 0.0
    """how far a value may move from the old one; 0: freely"""
    target_every: Count = 2
    """updates between copies to the target network"""
    ratio_bound: Positive = 2.0
    """what acted becomes the anchor where it is more than so many times likelier than the target"""

    @property
    def ways(self) -> Ways:
        return Ways(self.epochs, self.minibatches, self.clip, self.value_clip)

    def describe(self, spec: Spec) -> Description:
        found = super().describe(spec)
        parted = [(name.partition("."), model) for name, model in found.models.items()]
        copies = {f"{TARGETS[m]}.{rest}": x for (m, _, rest), x in parted if m in TARGETS}
        return replace(found, models=found.models | copies)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


class Trainer(actor_critic.Trainer):
    def __init__(self, hyper: APPO, spec: Spec, device: str = "cpu") -> None:
        super().__init__(hyper, spec, device)
        self._every, self._bound = hyper.target_every, hyper.ratio_bound
        self._target = copy.deepcopy(self._policy)
        self._target_extra = {k: nn.Parameter(v.detach().clone()) for k, v in self._extra.items()}
        spread = {"target_spread": nn.ParameterDict(self._target_extra)} if self._extra else {}
        self._target_flat = Flat({"target": self._target, **spread})
        self.state.flats["target"] = self._target_flat

    def finish(self) -> Metrics:
        metrics = super().finish()
        if self.state.counters["updates"] % self._every == 0:
            self._follow()
        return metrics

    def _estimate(
        self, part: Rollout, seen: Seen, output: Tensor | None, steps: Steps
    ) -> tuple[Estimate, Leaves]:
        target = self._log_prob(part, seen, network=self._target, extra=self._target_extra)
        mu = part.extras["log_prob"]
        return corrections.vtrace(target, mu, steps), {"behaviour": mu}

    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        return corrections.impact(
            log_pi,
            batch["log_prob"],
            batch["behaviour"],
            batch["advantage"],
            self._ways.clip,
            self._bound,
        )

    def _follow(self) -> None:
        online = self._optimizer.flat.arrays().items()
        parted = [(name.partition("."), array) for name, array in online]
        self._target_flat.load(
            {f"{TARGETS[m]}.{rest}": array for (m, _, rest), array in parted if m in TARGETS}
        )
