"""Advantage actor-critic (Mnih et al. 2016), in step: one gradient of each batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tianji import actor_critic, corrections
from tianji.actor_critic import Batch, OnPolicy
from tianji.algorithm import Fraction, Positive, Spec, Traits


@dataclass(frozen=True)
class A2C(OnPolicy):
    """On-policy; one optimizer step for each batch. With scale.relax = "a3c" it is A3C."""

    name: ClassVar[str] = "a2c"
    traits: ClassVar[Traits] = replace(OnPolicy.traits, corrects=("clip", "vtrace", "tis"))

    learning_rate: Positive = 1e-3
    """Adam's step size"""
    lam: Fraction = 1.0
    """lambda of the advantage estimate or of V-trace: 0 one-step, 1 all steps of the rollout"""
    normalise_advantage: bool = False
    """scale each batch's advantages to mean 0 and variance 1"""
    clip: Positive = 0.2
    """relax.correct = "clip": how far the probability ratio may move the objective"""

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


class Trainer(actor_critic.Trainer):
    def __init__(self, hyper: A2C, spec: Spec, device: str = "cpu") -> None:
        super().__init__(hyper, spec, device)
        self._clip = hyper.clip if spec.correct == "clip" else 0.0

    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        if self._clip > 0:
            return corrections.clip(log_pi, batch["log_prob"], batch["advantage"], self._clip)
        return corrections.policy_gradient(log_pi, batch["advantage"])
