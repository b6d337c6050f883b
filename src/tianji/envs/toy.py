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
        return self._leaves()

    def step(self, action: Array) -> TimeStep:
        valid = ~self._ended
        reward, terminated = self._advance(action)
        self._clock += 1
        terminated &= valid
        truncated = (self._clock >= self._limit) & valid & ~terminated
        if not valid.all():
            self._x = np.where(_wide(valid, self._x), self._x, self._first())
            self._clock[~valid] = 0
        self._ended = terminated | truncated
        reward = np.where(_wide(valid, reward), reward, 0).astype(np.float32)
        return TimeStep(self._leaves(), reward, terminated, truncated, valid)

    def reset_some(self, which: Array) -> Leaves:
        self._x = np.where(which, self._first(), self._x)
        self._clock[which] = 0
        self._ended[which] = False
        return {"obs": self._observe()}

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

    def _leaves(self) -> Leaves:
        return {"obs": self._observe()}


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


class Recall(Toy):
    """One of `n` symbols is seen at the first step and never again; at the last step, `delay` blank
    ones later, the action must name it: reward 1. Who does not remember it gets 1 / n on average.
    """

    def __init__(self, num_envs: int, n: int = 2, delay: int = 4) -> None:
        self._n = n
        super().__init__("toy/Recall", num_envs, n + 1, Discrete(n), delay + 2)

    @property
    def optimal_return(self) -> float:
        return 1.0

    def _first(self) -> Array:
        return self._rng.integers(self._n, size=self.num_envs)

    def _advance(self, action: Array) -> tuple[Array, Array]:
        last = self._clock + 1 >= self._limit
        return (action == self._x) & last, last

    def _observe(self) -> Array:
        """The symbol at first, and a 1 in the last place when it is asked for."""
        obs = np.zeros((self.num_envs, self._n + 1), np.float32)
        first = self._clock == 0
        obs[first, self._x[first]] = 1
        obs[self._clock + 1 >= self._limit, self._n] = 1
        return obs


class Pair(Toy):
    """Two agents: each must name the symbol that it alone sees. One other action of each is not
    legal, and raises. The second agent stops acting after half of an episode of `length` steps; it
    may then only do 0. The reward is the share of the acting ones that are right, or each agent's
    own."""

    def __init__(
        self, num_envs: int, n: int = 4, length: int = 8, own_rewards: bool = False
    ) -> None:
        if n < 2:
            raise Refusal(f"n = {n} symbols leave no other action to forbid. Set n to 2 or more.")
        super().__init__("toy/Pair", num_envs, n, Discrete(n), length)
        self._n = n
        observation = {
            "obs": leaf((2, n), np.float32),
            "mask": leaf((2, n), np.bool_),
            "alive": leaf((2,), np.bool_),
            "state": leaf((2 * n + 1,), np.float32),
        }
        self.spec = EnvSpec(
            "toy/Pair", observation, Discrete(n), length, ("first", "second"), own_rewards
        )

    @property
    def optimal_return(self) -> float:
        """By the mean of the agents' rewards, where each has its own."""
        half = self._limit // 2
        return half + (self._limit - half) / 2 if self.spec.own_rewards else float(self._limit)

    def _first(self) -> Array:
        """[B, 2, 2]: of each agent, its symbol, and what is not legal."""
        symbol = self._rng.integers(self._n, size=(self.num_envs, 2))
        other = symbol + self._rng.integers(1, self._n, size=(self.num_envs, 2))
        return np.stack([symbol, other % self._n], -1)

    def _alive(self) -> Array:
        alive = np.ones((self.num_envs, 2), np.bool_)
        alive[self._clock >= self._limit // 2, 1] = False
        return alive

    def _mask(self) -> Array:
        legal = np.arange(self._n) != self._x[..., 1:]
        mask: Array = np.where(self._alive()[..., None], legal, np.arange(self._n) == 0)
        return mask

    def _advance(self, action: Array) -> tuple[Array, Array]:
        chosen = np.take_along_axis(self._mask(), action[..., None], -1)[..., 0]
        if not (chosen | self._ended[:, None]).all():
            raise ValueError(f"{self.spec.id}: an action that is not legal")
        alive = self._alive()
        right = (action == self._x[..., 0]) & alive
        reward = right if self.spec.own_rewards else right.sum(1) / alive.sum(1)
        self._x = self._first()
        return reward, self._clock + 1 >= self._limit

    def _leaves(self) -> Leaves:
        alive = self._alive()
        symbols = _one_hot(self._x[..., 0], self._n) * alive[..., None]
        state = np.concatenate(
            [symbols.reshape(self.num_envs, -1), self._clock[:, None] / self._limit], 1
        )
        return {
            "obs": symbols.astype(np.float32),
            "mask": self._mask(),
            "alive": alive,
            "state": state.astype(np.float32),
        }


def _wide(mask: Array, array: Array) -> Array:
    """A mask [B] with as many axes as the array has."""
    return mask.reshape(-1, *(1,) * (array.ndim - 1))


def _one_hot(index: Array, size: int) -> Array:
    return np.eye(size, dtype=np.float32)[index]
