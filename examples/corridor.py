"""An environment of one's own: walk a corridor to its right end, B corridors at a time."""

import numpy as np

from tianji import register_env
from tianji.env import Discrete, EnvSpec, TimeStep
from tianji.role import generator_state, load_generator_state
from tianji.types import leaf


@register_env("Corridor")
class Corridor:
    """Action 1 goes right, 0 left; reward 1 at the right end, -0.01 for every other step."""

    def __init__(self, num_envs, length=8, limit=50):
        self.spec = EnvSpec("Corridor", {"obs": leaf((1,), np.float32)}, Discrete(2), limit)
        self.num_envs = num_envs
        self._length, self._limit = length, limit

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._place = self._first()
        self._clock = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        return {"obs": self._observe()}

    def step(self, action):
        valid = ~self._ended  # where the last step ended an episode, this one only resets
        moved = np.clip(self._place + np.where(action == 1, 1, -1), 0, self._length)
        self._place = np.where(valid, moved, self._first())
        self._clock = np.where(valid, self._clock + 1, 0)
        terminated = valid & (self._place == self._length)  # arrived: no value follows
        truncated = valid & (self._clock >= self._limit) & ~terminated  # cut: a value follows
        self._ended = terminated | truncated
        reward = np.where(terminated, 1.0, np.where(valid, -0.01, 0.0)).astype(np.float32)
        return TimeStep({"obs": self._observe()}, reward, terminated, truncated, valid)

    def render(self):
        picture = np.full((16, 16 * (self._length + 1), 3), 255, np.uint8)
        picture[:, 16 * self._place[0] : 16 * (self._place[0] + 1)] = (30, 90, 200)
        return picture

    def close(self):
        pass

    def state(self):
        """With this and `load_state`, a resumed run goes on exactly where it was."""
        return {
            "rng": generator_state(self._rng),
            "place": self._place.copy(),
            "clock": self._clock.copy(),
            "ended": self._ended.copy(),
        }

    def load_state(self, state):
        self._rng = np.random.default_rng()
        load_generator_state(self._rng, state["rng"])
        self._place = state["place"].copy()
        self._clock = state["clock"].copy()
        self._ended = state["ended"].copy()

    def _first(self):
        return self._rng.integers(self._length, size=self.num_envs)

    def _observe(self):
        return (self._place[:, None] / self._length).astype(np.float32)
