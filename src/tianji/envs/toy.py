"""Toy environments whose answers are known in closed form."""

from __future__ import annotations

import numpy as np

from tianji.env import Action, Continuous, Discrete, EnvSpec, TimeStep
from tianji.errors import Refusal
from tianji.role import State, generator_state, load_generator_state
from tianji.types import Array, Leaf, Leaves, leaf


class Toy:
    """What the toys share: episodes of at most `limit` steps that reset themselves."""

    def __init__(
        self, id: str, num_envs: int, observation: int | Leaf, action: Action, limit: int
    ) -> None:
        """An observation is so many floats, or what the leaf says."""
        if limit < 1:
            raise Refusal(f"{id} would end before its first step. Set its length to 1 or more.")
        if isinstance(observation, int):
            observation = leaf((observation,), np.float32)
        self.spec = EnvSpec(id, {"obs": observation}, action, limit)
        self.num_envs = num_envs
        self._limit = limit
        self._rng = np.random.default_rng()
        self._clock = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)
        self._x: Array = np.zeros(num_envs)
        """[B]: what an env of this kind is in"""

    def reset(self, seed: int) -> Leaves:
        self._rng = np.random.default_rng(seed)
        self._clock[:] = 0
        self._ended[:] = False
        self._x = self._first()
        return {"obs": self._observe()}

    def step(self, action: Array) -> TimeStep:
        valid = ~self._ended
        reward, terminated = self._advance(action)
        self._clock += 1
        terminated &= valid
        truncated = (self._clock >= self._limit) & valid & ~terminated
        if not valid.all():
            self._x = np.where(valid, self._x, self._first())
            self._clock[~valid] = 0
        self._ended = terminated | truncated
        reward = np.where(valid, reward, 0).astype(np.float32)
        return TimeStep({"obs": self._observe()}, reward, terminated, truncated, valid)

    def render(self) -> Array:
        raise Refusal(f"{self.spec.id} has no picture. Make it without pictures.")

    def close(self) -> None:
        pass

    def state(self) -> State:
        return {
            "rng": generator_state(self._rng),
            "clock": self._clock.copy(),
            "ended": self._ended.copy(),
            "x": self._x.copy(),
        }

    def load_state(self, state: State) -> None:
        load_generator_state(self._rng, state["rng"])
        self._clock[:] = state["clock"]
        self._ended[:] = state["ended"]
        self._x = np.array(state["x"])

    def _first(self) -> Array:
        """[B]: where episodes begin."""
        raise NotImplementedError

    def _advance(self, action: Array) -> tuple[Array, Array]:
        """Move on; reward and terminated."""
        raise NotImplementedError

    def _observe(self) -> Array:
        """[B, ...], a new array."""
        raise NotImplementedError


class Identity(Toy):
    """The action must equal the symbol that is seen; an episode terminates after `length` steps."""

    def __init__(
        self, num_envs: int, n: int = 4, length: int = 16, continuous: bool = False
    ) -> None:
        self._n = n
        self._continuous = continuous
        action = Continuous((-1.0,), (1.0,), (1,)) if continuous else Discrete(n)
        super().__init__("toy/Identity", num_envs, 1 if continuous else n, action, length)

    @property
    def optimal_return(self) -> float:
        return 0.0 if self._continuous else float(self._limit)

    def _first(self) -> Array:
        if self._continuous:
            return self._rng.uniform(-1, 1, self.num_envs).astype(np.float32)
        return self._rng.integers(self._n, size=self.num_envs)

    def _advance(self, action: Array) -> tuple[Array, Array]:
        if self._continuous:
            reward = -np.square(np.clip(action[:, 0], -1, 1) - self._x)
        else:
            reward = action == self._x
        self._x = self._first()
        return reward, self._clock + 1 >= self._limit

    def _observe(self) -> Array:
        return self._x[:, None].copy() if self._continuous else _one_hot(self._x, self._n)


class Chain(Toy):
    """States 0 to n - 1 in a row: action 1 goes right, 0 left; reward 1 at the right end, which
    terminates. Episodes begin at the left end, or anywhere, and are truncated after `limit` steps.
    """

    def __init__(self, num_envs: int, n: int = 5, limit: int = 50, anywhere: bool = False) -> None:
        if n < 2:
            raise Refusal(f"a chain of n = {n} states has no way to go. Set n to 2 or more.")
        self._n = n
        self._anywhere = anywhere
        super().__init__("toy/Chain", num_envs, n, Discrete(2), limit)

    def optimal_values(self, gamma: float) -> Array:
        """[n]: the reward is n - 1 - s steps away, and no value follows the right end."""
        values = gamma ** np.arange(self._n - 2, -2, -1, dtype=np.float64)
        values[-1] = 0
        return values

    def _first(self) -> Array:
        if self._anywhere:
            return self._rng.integers(self._n - 1, size=self.num_envs)
        return np.zeros(self.num_envs, np.int64)

    def _advance(self, action: Array) -> tuple[Array, Array]:
        self._x = np.clip(self._x + np.where(action == 1, 1, -1), 0, self._n - 1)
        arrived = self._x == self._n - 1
        return arrived.astype(np.float32), arrived

    def _observe(self) -> Array:
        return _one_hot(self._x, self._n)


class Target(Toy):
    """Reward 1 whatever is done, never terminated, truncated every `every` steps: a learner that
    takes truncation for termination misses the value, 1 / (1 - gamma)."""

    def __init__(self, num_envs: int, every: int = 8, continuous: bool = False) -> None:
        action = Continuous((-1.0,), (1.0,), (1,)) if continuous else Discrete(2)
        super().__init__("toy/Target", num_envs, 1, action, every)

    def optimal_values(self, gamma: float) -> Array:
        """[1]: the one state's value."""
        return np.array([1 / (1 - gamma)])

    def _first(self) -> Array:
        return np.ones(self.num_envs, np.float32)

    def _advance(self, action: Array) -> tuple[Array, Array]:
        return np.ones(self.num_envs, np.float32), np.zeros(self.num_envs, np.bool_)

    def _observe(self) -> Array:
        return self._x[:, None].copy()


class Frames(Toy):
    """Pictures of the size of an Atari game's, four frames of 84 x 84 bytes: noise, brighter in one
    half. The action must say which; an episode terminates after `length` steps."""

    KINDS = 16
    """pictures of each kind"""

    def __init__(self, num_envs: int, length: int = 1000) -> None:
        observation = leaf((4, 84, 84), np.uint8)
        super().__init__("toy/Frames", num_envs, observation, Discrete(2), length)
        rng = np.random.default_rng(0)
        self._pictures = rng.integers(0, 128, (2 * self.KINDS, *observation.shape), np.uint8)
        self._pictures[: self.KINDS, :, :42] += 64
        self._pictures[self.KINDS :, :, 42:] += 64

    @property
    def optimal_return(self) -> float:
        return float(self._limit)

    def _first(self) -> Array:
        return self._rng.integers(2 * self.KINDS, size=self.num_envs)

    def _advance(self, action: Array) -> tuple[Array, Array]:
        reward = action == self._x // self.KINDS
        self._x = self._first()
        return reward, self._clock + 1 >= self._limit

    def _observe(self) -> Array:
        return self._pictures[self._x]


def _one_hot(index: Array, size: int) -> Array:
    return np.eye(size, dtype=np.float32)[index]
