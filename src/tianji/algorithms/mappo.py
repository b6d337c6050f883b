"""Multi-agent PPO (Yu et al. 2022): each agent acts by what it observes, and values see all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from tianji import actor_critic, corrections
from tianji.actor_critic import Batch, OnPolicy, Ways
from tianji.algorithm import Count, NotNegative, Positive, Spec, Traits


@dataclass(frozen=True)
class MAPPO(OnPolicy):
    """PPO over the steps of all agents, whose values are of the whole state. With one agent it is
    PPO."""

    name: ClassVar[str] = "mappo"
    traits: ClassVar[Traits] = replace(OnPolicy.traits, corrects=("clip", "vtrace", "tis"))

    learning_rate: Positive = 7e-4
    """Adam's step size"""
    epochs: Count = 10
    """passes over the batch in one update"""
    minibatches: Count = 1
    """parts into which each pass splits the batch, one optimizer step each"""
    clip: Positive = 0.2
    """how far the probability ratio may move the objective"""
    value_clip: NotNegative = 0.0
    """how far a value may move from the old one; 0: freely"""
    entropy_coef: NotNegative = 0.01
    """weight of the entropy bonus"""
    max_grad_norm: NotNegative = 10.0
    """the gradient is scaled down to this norm; 0: never"""
    share: bool = True
    """one network for all agents, which is told whose turn it is; false: one for each"""
    critic: Literal["state", "own"] = "state"
    """values are of the env's state, or of what all observe where it has none; or of what each
    agent observes itself"""
    normalise_value: bool = True
    """learn values over their running mean and deviation"""

    @property
    def ways(self) -> Ways:
        return Ways(
            self.epochs,
            self.minibatches,
            self.clip,
            self.value_clip,
            share=self.share,
            central=self.critic == "state",
            normalise_value=self.normalise_value,
        )

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


class Trainer(actor_critic.Trainer):
    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        return corrections.clip(log_pi, batch["log_prob"], batch["advantage"], self._ways.clip)
