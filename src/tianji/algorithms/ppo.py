"""Proximal policy optimization (Schulman et al. 2017), with generalised advantage estimation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tianji import actor_critic, corrections
from tianji.actor_critic import Batch, OnPolicy, Ways
from tianji.algorithm import Count, NotNegative, Positive, Spec, Traits


@dataclass(frozen=True)
class PPO(OnPolicy):
    """On-policy; each rollout is consumed by one update of several epochs. Where there are several
    agents, each learns by itself, with one network for all (independent PPO)."""

    name: ClassVar[str] = "ppo"
    traits: ClassVar[Traits] = replace(OnPolicy.traits, corrects=("clip", "vtrace", "tis"))

    epochs: Count = 10
    """passes over the batch in one update"""
    minibatches: Count = 4
    """parts into which each pass splits the batch, one optimizer step each"""
    clip: Positive = 0.2
    """how far the probability ratio may move the objective"""
    value_clip: NotNegative = 0.0
    """how far a value may move from the old one; 0: freely"""

    @property
    def ways(self) -> Ways:
        return Ways(self.epochs, self.minibatches, self.clip, self.value_clip)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


class Trainer(actor_critic.Trainer):
    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        return corrections.clip(log_pi, batch["log_prob"], batch["advantage"], self._ways.clip)
