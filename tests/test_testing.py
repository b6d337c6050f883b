"""The checkers pass what keeps its promises and fail what breaks them, one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tianji.env import Env, TimeStep, make_env
from tianji.envs.toy import Chain, Identity, Target
from tianji.testing import check_env
from tianji.types import Array, Leaves, leaf


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_gymnasium_envs_pass(id: str) -> None:
    check_env(lambda num_envs: make_env(id, num_envs, {}), steps=250)


def test_an_env_without_a_state_passes() -> None:
    check_env(Stateless, steps=50)


class Stateless:
    """Target, of which only what an env must have."""

    def __init__(self, num_envs: int) -> None:
        self._inner = Target(num_envs)
        self.spec, self.num_envs = self._inner.spec, num_envs

    def reset(self, seed: int) -> Leaves:
        return self._inner.reset(seed)

    def step(self, action: Array) -> TimeStep:
        return self._inner.step(action)

    def render(self) -> Array:
        return self._inner.render()

    def close(self) -> None:
        self._inner.close()


class Small(Chain):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, n=3, limit=6, anywhere=True)


def broken_step(change: Callable[[TimeStep], TimeStep]) -> Callable[[int], Env]:
    class Broken(Small):
        def step(self, action: Array) -> TimeStep:
            return change(super().step(action))

    return Broken


def with_obs(change: Callable[[Array], Any]) -> Callable[[TimeStep], TimeStep]:
    return lambda s: s._replace(observation={"obs": change(s.observation["obs"])})


STEPS: dict[str, tuple[Callable[[TimeStep], TimeStep], str]] = {
    "observation of another dtype": (with_obs(lambda x: x.astype(float)), "where the spec says"),
    "observation of another shape": (with_obs(lambda x: x[:, :2]), "where the spec says"),
    "observation not an array": (with_obs(lambda x: x.tolist()), "a list"),
    "observation not finite": (with_obs(lambda x: x * np.float32(np.nan)), "not finite"),
    "another leaf": (lambda s: s._replace(observation={"pixels": s.reward}), "leaves"),
    "reward not finite": (lambda s: s._replace(reward=s.reward / np.float32(0)), "not finite"),
    "reward of another shape": (lambda s: s._replace(reward=s.reward[:, None]), "reward is"),
    "reward for resetting": (lambda s: s._replace(reward=s.reward + 1), "has a reward"),
    "flags not bool": (lambda s: s._replace(terminated=s.terminated * 1.0), "terminated is"),
    "both flags": (lambda s: s._replace(truncated=s.truncated | s.terminated), "both terminated"),
    "resets are valid": (lambda s: s._replace(valid=s.valid | True), "after an episode's end"),
    "nothing is valid": (lambda s: s._replace(valid=s.valid & False), "follows no end"),
    "ends without end": (lambda s: s._replace(truncated=~s.terminated), "only resets ends"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_a_step_that_breaks_a_promise_fails(name: str) -> None:
    change, message = STEPS[name]
    with pytest.raises(AssertionError, match=message):
        check_env(broken_step(change), steps=100)


class OwnDice(Identity):
    """Its resets do not come from the seed."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, continuous=True)

    def reset(self, seed: int) -> Leaves:
        return super().reset(int(np.random.default_rng().integers(2**31)))


class DriftingDice(Identity):
    """The first observation comes from the seed, the later ones do not."""

    def step(self, action: Array) -> TimeStep:
        self._rng = np.random.default_rng()
        return super().step(action)


class HeedsTheActionOfAReset(Small):
    def step(self, action: Array) -> TimeStep:
        step = super().step(action)
        step.observation["obs"][~step.valid] += action[~step.valid, None]
        return step


class WritesIntoActions(Small):
    def step(self, action: Array) -> TimeStep:
        action *= 0
        return super().step(action)


class CountsWrong(Small):
    def __init__(self, num_envs: int) -> None:
        super().__init__(2)


class ForgetsItsDice(Identity):
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._rng = np.random.default_rng()


class GivesItsOwnArrays(Small):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "clock": self._clock}


class KeepsObjects(Small):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "self": {1, 2}}


class KeepsNumberedKeys(Small):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "table": {1: 2}}


class SpecOfTheWholeBatch(Target):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.spec = replace(self.spec, max_episode_steps=num_envs)


class NoObs(Small):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.spec = replace(self.spec, observation={"pixels": leaf((3,), np.float32)})


ENVS: dict[type[Any], str] = {
    OwnDice: "two resets with the same seed",
    DriftingDice: "same seed and actions part",
    HeedsTheActionOfAReset: "ignore the action",
    WritesIntoActions: "wrote into the action",
    CountsWrong: "num_envs is 2",
    ForgetsItsDice: "goes on differently",
    GivesItsOwnArrays: "changes when the env is stepped",
    KeepsObjects: r"state\(\)\['self'\] is a set",
    KeepsNumberedKeys: "Keys must be strings",
    SpecOfTheWholeBatch: "depends on the number of envs",
    NoObs: 'no leaf "obs"',
}


@pytest.mark.parametrize("kind", ENVS, ids=lambda kind: kind.__name__)
def test_an_env_that_breaks_a_promise_fails(kind: type[Any]) -> None:
    with pytest.raises(AssertionError, match=ENVS[kind]):
        check_env(kind, steps=60)


def test_an_env_whose_ends_were_not_seen_is_reported() -> None:
    with pytest.warns(UserWarning, match="no episode ended in 10 steps"):
        check_env(lambda num_envs: Target(num_envs, every=100), steps=10)
