"""The evaluator: plays whole episodes with a snapshot, greedily, beside training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tianji.algorithm import Policy, restart
from tianji.channel import Subscriber
from tianji.env import Env, remake
from tianji.errors import Failure
from tianji.fault import Fault, raised
from tianji.ledger import Ledger
from tianji.newest import Newest
from tianji.role import Did, State
from tianji.role_names import RoleName
from tianji.types import EPISODE, Array, Leaves

REBUILD = Did("rebuild")
LOAD, EVALUATE, EVALUATED = Did("load"), Did("evaluate"), Did("evaluated")
NO_VERSION = Did(waits="learner")


class EnvRaised(Failure):
    """An env raised in one of its steps, or in its reset before the first."""

    def __init__(self, env: Env, error: Exception, step: int) -> None:
        super().__init__(f"{env.spec.id} raised {type(error).__name__}: {error} in its step {step}")
        self.step = step


class Evaluation:
    """Episodes of one policy, until `episodes` have ended. Each env plays its share, so short
    episodes are not preferred."""

    def __init__(self, env: Env, policy: Policy, episodes: int, seed: int) -> None:
        self._env = env
        self._policy = policy
        self.steps = 0
        """that each env has made"""
        self._share = -(-episodes // env.num_envs)
        self._episodes = episodes
        try:
            self._observation: Leaves = env.reset(seed)
        except Exception as error:
            raise EnvRaised(env, error, 0) from error
        self._recurrent = policy.initial(env.num_envs)
        self._ledger = Ledger(env.num_envs)
        self._ended: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def step(self) -> Array | None:
        """One step of all envs; the episodes, EPISODE records, once enough have ended."""
        action, self._recurrent, *_ = self._policy.act(self._observation, self._recurrent, None)
        try:
            step = self._env.step(action)
        except Exception as error:
            raise EnvRaised(self._env, error, self.steps) from error
        self.steps += 1
        self._observation = step.observation
        restart(self._policy, self._recurrent, step.terminated | ~step.valid)
        envs, ended = self._ledger.count(step)
        for i, episode in zip(envs.tolist(), ended, strict=True):
            self._ended[i].append(episode)
        if len(envs) and all(len(episodes) >= self._share for episodes in self._ended):
            rounds = [e[k] for k in range(self._share) for e in self._ended]
            return np.array(rounds[: self._episodes], EPISODE)
        return None


class Evaluator:
    """A role: evaluates each snapshot that it is given."""

    name = RoleName("evaluator")

    def __init__(
        self,
        env: Env,
        policy: Policy,
        snapshots: Subscriber,
        episodes: int,
        seed: int,
        make: Callable[[int], Env],
    ) -> None:
        """`make` makes the env anew where it raised."""
        self.fault: Fault | None = None
        """why that was; set when `step` returns REBUILD"""
        self.result: Array = np.empty(0, EPISODE)
        """its episodes; set when `step` returns EVALUATED"""
        self._env = env
        self._make = make
        self._policy = policy
        self._newest = Newest(snapshots, policy)
        self._episodes = episodes
        self._seed = seed
        self._running: Evaluation | None = None
        self._again = False
        """has the evaluation of this version not ended? Then it is restarted where it must be"""

    @property
    def version(self) -> int:
        """Of the snapshot that is or was evaluated last."""
        return self._newest.version

    def step(self) -> Did:
        if self._running is None:
            if not self._newest.take() and not self._again:
                return NO_VERSION
            self._again = True
        try:
            return self._evaluate()
        except EnvRaised as error:
            cause, env = error.__cause__ or error, self._env
            self.fault = raised(
                cause, str(self.name), env.spec.id, self._seed, error.step, env.num_envs
            )
            # Another seed: the same episodes would come to the same end.
            self._seed = (self._seed + 1) % 2**31
            self._env, _ = remake(env, self._make, self._seed)
            self._running = None
            return REBUILD

    def _evaluate(self) -> Did:
        if self._running is None:
            self._running = Evaluation(self._env, self._policy, self._episodes, self._seed)
            return LOAD
        result = self._running.step()
        if result is None:
            return EVALUATE
        self.result, self._running, self._again = result, None, False
        return EVALUATED

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        """Nothing: an evaluation that is under way is not part of the run's future."""

    def close(self) -> None:
        self._env.close()
