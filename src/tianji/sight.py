"""What networks see of an observation, for the actor and the learner alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tianji import networks
from tianji.algorithm import Spec
from tianji.types import Array, Leaf, leaf

Shapes = dict[str, tuple[int, ...]]

FAR = 10.0
"""normalised observations and rewards are cut at this many standard deviations"""


class Sight:
    """What networks see of an observation, for the actor and the learner alike."""

    def __init__(self, spec: Spec, *, share: bool, central: bool, normalises: bool) -> None:
        """With one network for all agents that `share` it; `central` values are of the state of all
        agents; `normalises`: by running means and variances of observations."""
        observation, network = spec.env.observation, spec.network
        obs = observation["obs"]
        self.agents = len(spec.env.agents)
        """0: there is no axis for them"""
        self.columns = max(1, self.agents)
        self.own = leaf(obs.shape[1:], obs.dtype) if self.agents else obs
        """what one agent observes"""
        self.picture = networks.kind(network, self.own) == "cnn"
        self.memory = network.memory if network.recurrent == "gru" else 0
        """width of the recurrent state; 0: there is none"""
        self.separate = self.agents > 1 and not share
        self._ids = self.agents > 1 and not self.separate and not self.picture
        self._flat = self._ids or self.memory > 0
        self.normalises = normalises
        width = int(np.prod(self.own.shape)) + self.agents * self._ids
        self.leaf = leaf((width,), np.float32) if self._flat else self.own
        """what a policy network takes in"""
        self.state = observation.get("state")
        self.critic: Leaf | None = None
        """what a central value network takes in"""
        if central and not self.picture:
            own = int(np.prod(self.own.shape))
            state = own * (self.columns - 1) if self.state is None else np.prod(self.state.shape)
            self.critic = leaf((own + int(state) + self.agents * (self.agents > 1),), np.float32)

    def shapes(self) -> Shapes:
        """What a snapshot holds beside the networks."""
        return {"obs.mean": self.own.shape, "obs.scale": self.own.shape} if self.normalises else {}

    def scaled(self, obs: Array, scales: Mapping[str, Array]) -> Array:
        if not self.normalises:
            return obs
        return normalised(obs, scales["obs.mean"], scales["obs.scale"])

    def seen(self, scaled: Array) -> Array:
        """What a policy network takes in, of observations [..., N, *own] of N columns."""
        if not self._flat:
            return scaled
        lead = scaled.shape[: scaled.ndim - len(self.own.shape)]
        x = floats(scaled).reshape(*lead, -1)
        return np.concatenate([x, self._which(lead)], -1) if self._ids else x

    def central(self, scaled: Array, state: Array | None) -> Array:
        """What a central value network takes in: the state and what the agent observes, or what all
        do, and which agent it is. Observations are [R, N, *own], states [R, N / A, ...]."""
        R, N = scaled.shape[:2]
        x, A = floats(scaled).reshape(R, N, -1), self.columns
        if state is None:
            parts = [np.repeat(x.reshape(R, N // A, -1), A, axis=1)]
        else:
            parts = [x, np.repeat(floats(state).reshape(R, N // A, -1), A, axis=1)]
        if self.agents > 1:
            parts.append(self._which((R, N)))
        return np.concatenate(parts, -1)

    def _which(self, lead: tuple[int, ...]) -> Array:
        """[..., N, A]: 1 for the agent whose column it is."""
        which = np.tile(np.eye(self.agents, dtype=np.float32), (lead[-1] // self.agents, 1))
        return np.broadcast_to(which, (*lead, self.agents))


def floats(x: Array) -> Array:
    if x.dtype == np.float32:
        return x
    return x.astype(np.float32) * np.float32(networks.BYTE if x.dtype == np.uint8 else 1.0)


def normalised(x: Array, mean: Array | np.float32, scale: Array) -> Array:
    return np.clip((x - mean) * scale, -FAR, FAR, dtype=np.float32)  # type: ignore[no-any-return]
