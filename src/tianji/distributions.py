"""From network outputs to actions: drawn in numpy by the actor, scored in torch by the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tianji.env import Action, Continuous, Discrete, EnvSpec, MultiDiscrete
from tianji.errors import Refusal
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


class Squashed:
    """Normals whose mean and spread depend on the observation, squashed by tanh into -1..1
    (Haarnoja et al. 2018, appendix C). A network gives means, then logs of deviations."""

    LOWEST, HIGHEST = -20.0, 2.0
    """of the log of a deviation"""

    def __init__(self, dimensions: int) -> None:
        self.width = 2 * dimensions
        self._dimensions = dimensions

    def sample(self, output: Array, rng: np.random.Generator) -> Array:
        mean, log_std = output[:, : self._dimensions], output[:, self._dimensions :]
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        spread = np.exp(np.clip(log_std, self.LOWEST, self.HIGHEST))
        return np.tanh(mean + spread * noise)  # type: ignore[no-any-return]

    def greedy(self, output: Array) -> Array:
        return np.tanh(output[:, : self._dimensions])

    def draw(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions by standard normal noise [N, d], through which gradients flow, and the log of
        their density [N].

        log pi(tanh u) = log N(u) - sum log(1 - tanh(u)^2), where the last is written as
        2 (log 2 - u - softplus(-2 u)): it stays finite and exact however large u is.
        """
        mean, log_std = output.chunk(2, -1)
        log_std = log_std.clamp(self.LOWEST, self.HIGHEST)
        u = mean + log_std.exp() * noise
        normal = -0.5 * noise.square() - log_std
        slope = 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))
        log_prob = (normal - slope).sum(-1) - self._dimensions * HALF_LOG_TAU
        return torch.tanh(u), log_prob


class Bounds:
    """Between actions of -1..1, which networks give, and those within an env's bounds."""

    def __init__(self, action: Continuous) -> None:
        low, high = np.array(action.low, np.float64), np.array(action.high, np.float64)
        self.centre: Array = ((high + low) / 2).astype(np.float32)
        self.reach: Array = ((high - low) / 2).astype(np.float32)
        self._least, self._most = low.astype(np.float32), high.astype(np.float32)

    def outer(self, action: Array) -> Array:
        """What the env takes; never beyond its bounds, whatever the rounding."""
        scaled = self.centre + self.reach * action
        return np.clip(scaled, self._least, self._most)  # type: ignore[no-any-return]

    def inner(self, action: Array) -> Array:
        """The same in -1..1; what cannot move is 0."""
        span = np.where(self.reach > 0, self.reach, np.float32(1.0))
        return (action - self.centre) / span


def bounds(algorithm: str, env: EnvSpec) -> Bounds:
    """Of an env's continuous actions; refuses others, in the name of the algorithm."""
    action = env.action
    if not isinstance(action, Continuous):
        raise Refusal(
            f"{algorithm} moves continuous actions along gradients; {env.id} has "
            f"{type(action).__name__} actions, which have none. Set algorithm.name = "
            + ('"dqn" or "ppo".' if isinstance(action, Discrete) else '"ppo".')
        )
    if env.agents:
        raise Refusal(
            f"{algorithm} acts for one agent; {env.id} has {len(env.agents)}, and would get "
            f"actions for one. Choose an algorithm for several agents: `tianji list` names them."
        )
    if not np.isfinite([*action.low, *action.high]).all():
        raise Refusal(
            f"{algorithm} scales its actions to the env's bounds; those of {env.id} are not all "
            f"finite, so that they would be infinite. Give the env's action space finite bounds "
            f'(gymnasium.wrappers.RescaleAction, ClipAction), or set algorithm.name = "ppo".'
        )
    if any(low == high for low, high in zip(action.low, action.high, strict=True)):
        raise Refusal(
            f"an action of {env.id} has one value only, and {algorithm}'s critics would be told of "
            f'others. Take it out of the env\'s action space, or set algorithm.name = "ppo".'
        )
    return Bounds(action)


def distribution(action: Action) -> Distribution:
    if isinstance(action, Discrete):
        return Categorical(action)
    if isinstance(action, MultiDiscrete):
        return MultiCategorical(action)
    return Gaussian(action)
