"""The evaluator: plays whole episodes with a snapshot, greedily, beside training."""

from __future__ import annotations

import numpy as np

from tianji.algorithm import Policy, restart
from tianji.channel import Subscriber
from tianji.env import Env
from tianji.role import Did, State
from tianji.types import EPISODE, Array, Leaves, Params

LOAD, EVALUATE, EVALUATED = Did("load"), Did("evaluate"), Did("evaluated")
NO_VERSION = Did(waits="learner")


class Evaluation:
    """Episodes of one policy, until `episodes` have ended. Each env plays its share, so short
    episodes are not preferred."""

    def __init__(self, env: Env, policy: Policy, episodes: int, seed: int) -> None:
        self._env = env
        self._policy = policy
        self._share = -(-episodes // env.num_envs)
        self._episodes = episodes
        self._observation: Leaves = env.reset(seed)
        self._recurrent = policy.initial(env.num_envs)
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self._ended: list[list[tuple[float, int]]] = [[] for _ in range(env.num_envs)]

    def step(self) -> Array | None:
        """One step of all envs; the episodes, EPISODE records, once enough have ended."""
        action, self._recurrent, *_ = self._policy.act(self._observation, self._recurrent, None)
        step = self._env.step(action)
        self._observation = step.observation
        self._returns += step.reward
        self._lengths += step.valid | step.truncated
        ended = step.terminated | step.truncated
        restart(self._policy, self._recurrent, step.terminated | ~step.valid)
        for i in np.flatnonzero(ended):
            self._ended[i].append((float(self._returns[i]), int(self._lengths[i])))
            self._returns[i] = 0.0
            self._lengths[i] = 0
        if ended.any() and all(len(episodes) >= self._share for episodes in self._ended):
            rounds = [e[k] for k in range(self._share) for e in self._ended]
            return np.array(rounds[: self._episodes], EPISODE)
        return None


class Evaluator:
    """A role: evaluates each snapshot that it is given."""

    name = "evaluator"

    def __init__(
        self, env: Env, policy: Policy, snapshots: Subscriber, episodes: int, seed: int
    ) -> None:
        self.version = -1
        """of the snapshot that is or was evaluated last"""
        self.result: Array = np.empty(0, EPISODE)
        """its episodes; set when `step` returns EVALUATED"""
        self._env = env
        self._policy = policy
        self._snapshots = snapshots
        self._episodes = episodes
        self._seed = seed
        self._params = Params(policy.shapes)
        self._running: Evaluation | None = None

    def step(self) -> Did:
        if self._running is None:
            newest = self._snapshots.probe(self.version, self._params.flat)
            if newest == self.version:
                return NO_VERSION
            self.version = newest
            self._policy.load(self._params)
            self._running = Evaluation(self._env, self._policy, self._episodes, self._seed)
            return LOAD
        result = self._running.step()
        if result is None:
            return EVALUATE
        self.result, self._running = result, None
        return EVALUATED

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Nothing: an evaluation that is under way is not part of the run's future."""

    def close(self) -> None:
        self._env.close()
