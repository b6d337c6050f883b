"""From network outputs to actions: drawn in numpy by the actor, scored in torch by the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tianji.env import Action, Continuous, Discrete, MultiDiscrete
from tianji.types import Array

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
NEVER = -1e9
"""logit of an action that is not legal: its probability is exactly 0, and nothing becomes NaN, not
even where no action is"""


class Distribution(Protocol):
    """Over the actions of one env, from a network's `width` outputs. Where there is a `mask`, [B,
    width] bool, the other actions are impossible, and no part of the entropy."""

    width: int
    shapes: dict[str, tuple[int, ...]]
    """parameters beside the network's outputs"""

    def sample(
        self,
        output: Array,
        params: Mapping[str, Array],
        rng: np.random.Generator,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        """An action and its log-probability for each row."""

    def greedy(self, output: Array, mask: Array | None = None) -> Array: ...

    def evaluate(
        self,
        output: Tensor,
        params: Mapping[str, Tensor],
        action: Tensor,
        entropy: bool = True,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each row's action, and each row's entropy where asked for."""


def _legal(logits: Array, mask: Array | None) -> Array:
    return logits if mask is None else np.where(mask, logits, np.float32(NEVER))


def _sample(logits: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """One of n by the inverse of the cumulated probabilities."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    cumulated = np.exp(shifted).cumsum(axis=1)
    total = cumulated[:, -1]
    drawn = rng.random(len(logits), dtype=np.float32) * total
    action = (cumulated[:, :-1] <= drawn[:, None]).sum(axis=1)
    return action, shifted[np.arange(len(logits)), action] - np.log(total)


def _possible(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else torch.where(mask, logits, NEVER)


def _evaluate(logits: Tensor, action: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits, dim=-1)
    log_prob = log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p).sum(-1) if entropy else None


class Categorical:
    def __init__(self, action: Discrete) -> None:
        self.width = action.n
        self.shapes: dict[str, tuple[int, ...]] = {}

    def sample(
        self,
        output: Array,
        params: Mapping[str, Array],
        rng: np.random.Generator,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        return _sample(_legal(output, mask), rng)

    def greedy(self, output: Array, mask: Array | None = None) -> Array:
        return _legal(output, mask).argmax(axis=1)  # type: ignore[no-any-return]

    def evaluate(
        self,
        output: Tensor,
        params: Mapping[str, Tensor],
        action: Tensor,
        entropy: bool = True,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        return _evaluate(_possible(output, mask), action, entropy)


class MultiCategorical:
    """Independent choices; log-probabilities and entropies add up."""

    def __init__(self, action: MultiDiscrete) -> None:
        self.width = sum(action.nvec)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._cuts = np.cumsum(action.nvec)[:-1]
        self._nvec = list(action.nvec)

    def sample(
        self,
        output: Array,
        params: Mapping[str, Array],
        rng: np.random.Generator,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        pairs = [
            _sample(logits, rng) for logits in np.split(_legal(output, mask), self._cuts, axis=1)
        ]
        return np.stack([a for a, _ in pairs], axis=1), sum(p for _, p in pairs)  # type: ignore[return-value]

    def greedy(self, output: Array, mask: Array | None = None) -> Array:
        choices = [
            logits.argmax(axis=1) for logits in np.split(_legal(output, mask), self._cuts, axis=1)
        ]
        return np.stack(choices, axis=1)

    def evaluate(
        self,
        output: Tensor,
        params: Mapping[str, Tensor],
        action: Tensor,
        entropy: bool = True,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        pairs = [
            _evaluate(logits, action[..., i], entropy)
            for i, logits in enumerate(torch.split(_possible(output, mask), self._nvec, dim=-1))
        ]
        log_prob = torch.stack([p for p, _ in pairs]).sum(0)
        entropies = [e for _, e in pairs if e is not None]
        return log_prob, torch.stack(entropies).sum(0) if entropies else None


class Gaussian:
    """Independent normals whose spread does not depend on the observation."""

    def __init__(self, action: Continuous) -> None:
        self.width = len(action.low)
        self.shapes: dict[str, tuple[int, ...]] = {"log_std": (self.width,)}

    def sample(
        self,
        output: Array,
        params: Mapping[str, Array],
        rng: np.random.Generator,
        mask: Array | None = None,
    ) -> tuple[Array, Array]:
        log_std = params["log_std"]
        noise = rng.standard_normal(output.shape, dtype=np.float32)
        log_prob = (-0.5 * noise * noise - log_std - HALF_LOG_TAU).sum(axis=1)
        return output + noise * np.exp(log_std), log_prob

    def greedy(self, output: Array, mask: Array | None = None) -> Array:
        return output.copy()

    def evaluate(
        self,
        output: Tensor,
        params: Mapping[str, Tensor],
        action: Tensor,
        entropy: bool = True,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        log_std = params["log_std"]
        noise = (action - output) * torch.exp(-log_std)
        log_prob = (-0.5 * noise * noise - log_std - HALF_LOG_TAU).sum(-1)
        spread = (log_std + 0.5 + HALF_LOG_TAU).sum().expand_as(log_prob)
        return log_prob, spread if entropy else None


def distribution(action: Action) -> Distribution:
    if isinstance(action, Discrete):
        return Categorical(action)
    if isinstance(action, MultiDiscrete):
        return MultiCategorical(action)
    return Gaussian(action)
