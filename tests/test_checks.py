"""What travels is what was learnt, and nothing becomes NaN without a word: the checker finds it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.algorithms.sac import SAC
from tianji.algorithms.td3 import TD3
from tianji.build import build
from tianji.description import averaged
from tianji.driver import Serial
from tianji.env import make_env
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import leaf

SMALL = {"batch_size": 16, "warmup": 64, "capacity": 256, "new_steps": 16}


def toy(**kwargs):
    return lambda num_envs: make_env("toy/Identity", num_envs, kwargs)


class Changed(PPO):
    """Its trainer is changed by a test."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        self.change(trainer)
        return trainer


class Behind(Changed):
    """Its snapshots are those of the first version."""

    def change(self, trainer):
        first = trainer.params(0)
        trainer.params = lambda version: first


class Whimsical(PPO):
    """Its policies have tempers of their own."""

    tempers = iter(range(1000))

    def policy(self, spec, device="cpu"):
        policy, temper = super().policy(spec, device), next(self.tempers)
        act = policy.act

        def acts(observation, state, rng):
            decision = act(observation, state, rng)
            return decision._replace(action=(decision.action + temper) % 4)

        policy.act = acts
        return policy


class Silent(Changed):
    """A normaliser of its own overflows where inputs are large, and it says that all is well."""

    def describe(self, spec):
        found, scale = super().describe(spec), {"scale": leaf((1,), np.float32)}
        return replace(found, models=found.models | averaged(scale))

    def change(self, trainer):
        take, networks = trainer.take, trainer.state.networks
        scale = np.ones(1, np.float32)

        def takes(part):
            if np.abs(part.observation["obs"]).max() > 1e5:
                scale[:] = np.nan
            take(part)

        trainer.take = takes
        trainer.state.networks = lambda: networks() | {"scale": scale}


class Empty(Changed):
    """Takes a mean over nothing."""

    def change(self, trainer):
        finish = trainer.finish

        def finishes():
            rows = sum(len(part["obs"]) for part in trainer._parts)
            return finish() | {"mean": 1.0 if rows else float("nan")}

        trainer.finish = finishes


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Behind, "would not act with what is learnt"),
        (Whimsical, "two policies that loaded one snapshot act differently"),
        (Silent, "nothing said so"),
        (Empty, "batch without a valid step"),
    ],
)
def test_the_checker_finds_it(kind, told):
    algorithm = kind(epochs=1, minibatches=1)
    with pytest.raises(AssertionError, match=told):
        _only_the_new_checks(algorithm)


def _only_the_new_checks(algorithm):
    from tianji.testing import algorithm as checks

    checks._check_snapshot(algorithm, toy(), 2, checks.SMALL)
    checks._check_extremes(algorithm, toy(), 2, checks.SMALL)


def test_the_checker_finds_nothing_in_what_was_not_changed():
    _only_the_new_checks(PPO(epochs=1, minibatches=1))


def greedy(name, trainer, obs):
    """By the trainer's own networks, in torch."""
    with torch.no_grad():
        if name == "dqn":
            return trainer._values(trainer._online, obs).argmax(-1).numpy()
        output = trainer._policy(obs).numpy()
        if name == "ppo":
            return output.argmax(-1)
        unit = np.tanh(output[:, : len(trainer._bounds.reach)])
        return trainer._bounds.outer(unit)


@dataclass
class Case:
    algorithm: object
    continuous: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(DQN(**SMALL), False),
        Case(DQN(dueling=True, **SMALL), False),
        Case(PPO(epochs=1, minibatches=1), False),
        Case(SAC(**SMALL), True),
        Case(TD3(**SMALL), True),
    ],
    ids=lambda case: case.algorithm.name,
)
def test_a_policy_acts_as_the_trainers_own_network_says(case):
    built = build(
        config_for(case.algorithm), toy(**({"continuous": True} if case.continuous else {}))
    )
    built.learner.begin()
    run_updates(built, Serial(built.roles), 5)
    policy, trainer = case.algorithm.policy(built.spec), built.learner._trainer
    policy.load(trainer.params(built.learner.version))
    obs = np.random.default_rng(0).normal(size=(64, *built.spec.env.observation["obs"].shape))
    obs = obs.astype(np.float32)
    action = policy.act({"obs": obs}, {}, None).action
    expected = greedy(case.algorithm.name, trainer, torch.from_numpy(obs))
    np.testing.assert_allclose(action, expected, atol=1e-5)
    built.close()


def test_all_shipped_algorithms_keep_the_promises_of_the_checker():
    for algorithm in (DQN(**SMALL), PPO(epochs=1, minibatches=1)):
        check_algorithm(algorithm, toy(), updates=2)
    for algorithm in (SAC(**SMALL), TD3(**SMALL), PPO(epochs=1, minibatches=1)):
        check_algorithm(algorithm, toy(continuous=True), updates=2)
