"""IMPALA (Espeholt et al. 2018): actors run free, and V-trace corrects what is stale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tianji import actor_critic, corrections
from tianji.actor_critic import Batch, OnPolicy, Seen
from tianji.algorithm import Fraction, Positive, Spec, Traits
from tianji.corrections import Estimate, Steps
from tianji.types import Leaves, Rollout


@dataclass(frozen=True)
class IMPALA(OnPolicy):
    """V-trace actor-critic; one optimizer step for each batch, of rollouts of any age."""

    name: ClassVar[str] = "impala"
    traits: ClassVar[Traits] = replace(OnPolicy.traits, corrects=("vtrace",))

    learning_rate: Positive = 1e-3
    """Adam's step size"""
    lam: Fraction = 1.0
    """lambda of V-trace: 0 one-step, 1 all steps of the rollout"""
    normalise_advantage: bool = False
    """scale each batch's advantages to mean 0 and variance 1"""
    rho_bar: Positive = 1.0
    """importance weights are cut off here: larger, and values are nearer to the policy's own"""
    c_bar: Positive = 1.0
    """what weights are cut off at when they are multiplied over time: smaller, and noise is less"""

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


class Trainer(actor_critic.Trainer):
    def __init__(self, hyper: IMPALA, spec: Spec, device: str = "cpu") -> None:
        super().__init__(hyper, spec, device)
        self._bars = hyper.rho_bar, hyper.c_bar

    def _estimate(
        self, part: Rollout, seen: Seen, output: Tensor | None, steps: Steps
    ) -> tuple[Estimate, Leaves]:
        now, mu = self._log_prob(part, seen, output), part.extras["log_prob"]
        return corrections.vtrace(now, mu, steps, *self._bars), {}

    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        return corrections.policy_gradient(log_pi, batch["advantage"])
