"""A policy that remembers: what the trainer unrolls is what the actor did."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tianji.algorithm import Network
from tianji.algorithms.a2c import A2C
from tianji.algorithms.appo import APPO
from tianji.algorithms.impala import IMPALA
from tianji.algorithms.mappo import MAPPO
from tianji.algorithms.ppo import PPO
from tianji.build import build
from tianji.config import RelaxConfig, ReuseConfig, ScaleConfig
from tianji.driver import Serial
from tianji.env import make_env
from tianji.testing.algorithm import config_for

GRU = Network(recurrent="gru", memory=16)
NAMES = {
    "ppo": PPO(epochs=2, minibatches=2, learning_rate=1e-2),
    "a2c": A2C(learning_rate=1e-2),
    "impala": IMPALA(learning_rate=1e-2),
    "appo": APPO(minibatches=2, learning_rate=1e-2),
    "mappo": MAPPO(epochs=2),
    "mappo, own critic": MAPPO(epochs=2, critic="own"),
    "mappo, own networks": MAPPO(epochs=2, share=False),
}


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


def watched(algorithm, make, scale, updates, check, relax=RelaxConfig(), window=1):  # noqa: B008
    """Train, and let `check` look at every part before it is taken."""
    config = replace(config_for(algorithm, 0, scale, relax), network=GRU)
    built = build(replace(config, reuse=ReuseConfig(window=window)), make)
    built.learner.begin()
    trainer, driver = built.learner._trainer, Serial(built.roles)
    take = trainer.take

    def look(part):
        check(trainer, part, built.learner.version)
        take(part)

    trainer.take = look
    while built.learner.version < updates:
        driver.step()
    built.close()


def equal(trainer, part, version):
    """The trainer's log-probabilities are the actor's; there are ends of episodes inside."""
    folded, seen = trainer._look(part)
    trainer._observed["obs"].clear()
    now = trainer._log_prob(folded, seen)
    valid = folded.valid
    np.testing.assert_allclose(now[valid], folded.extras["log_prob"][valid], atol=1e-5)
    return int((folded.terminated | ~valid).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("env", ["Recall", "Pair", "Target"])
def test_unrolled_log_probabilities_are_those_that_the_actor_recorded(name, env):
    """Episodes of 5 to 8 steps, rollouts of 7: they begin and end anywhere, also by truncation."""
    ends, scale = [], ScaleConfig(actors=2, envs_per_actor=3, rollout_length=7)
    kwargs = {"Recall": {"delay": 3}, "Pair": {}, "Target": {"every": 5}}[env]

    def check(trainer, part, version):
        assert (part.versions == version).all()
        ends.append(equal(trainer, part, version))

    watched(NAMES[name], toy(env, **kwargs), scale, 4, check)
    assert sum(ends) > 10


def test_what_a_server_chose_is_unrolled_alike():
    """The server has the recurrent state; until the first update its version is the learner's."""
    ends = []
    scale = ScaleConfig("local", "seed", actors=3, envs_per_actor=2, rollout_length=7)

    def check(trainer, part, version):
        if version == 0 and (part.versions == 0).all():
            ends.append(equal(trainer, part, version))

    watched(NAMES["ppo"], toy("Recall", delay=3), scale, 1, check)
    assert len(ends) == 3
    assert sum(ends) > 3


def test_a_server_that_publishes_seldom_keeps_states_from_rollout_to_rollout():
    ends = []
    scale = ScaleConfig("local", "seed", actors=2, envs_per_actor=2, rollout_length=5)

    def check(trainer, part, version):
        trainer._optimizer.step = lambda loss, rate, rows: torch.zeros(())  # nothing is learnt
        ends.append(equal(trainer, part, version))

    watched(NAMES["a2c"], toy("Recall", delay=6), scale, 6, check)
    assert len(ends) == 12


def test_states_of_a_window_are_those_before_each_rollout():
    scale, seen = ScaleConfig(actors=2, envs_per_actor=4, rollout_length=5), []

    def check(trainer, part, version):
        trainer._optimizer.step = lambda loss, rate, rows: torch.zeros(())
        equal(trainer, part, version)
        seen.append(len(set(part.versions.tolist())))

    watched(NAMES["ppo"], toy("Recall", delay=6), scale, 6, check, window=4)
    assert max(seen) > 1


def test_what_came_before_an_episode_does_not_matter():
    algorithm, changed = NAMES["ppo"], []

    def check(trainer, part, version):
        _, seen = trainer._look(part)
        other = seen._replace(obs=seen.obs.clone(), memory=seen.memory + 1.0)
        other.obs[0] += 1.0
        first, second = (trainer._outputs(trainer._policy, x) for x in (seen, other))
        same = (first == second).all(-1).numpy()
        begun = np.logical_or.accumulate(part.terminated | ~part.valid, axis=0)
        assert same[1:][begun].all()
        assert not same[1:][~begun].any()
        changed.append(begun.sum())

    scale = ScaleConfig(actors=1, envs_per_actor=3, rollout_length=9)
    watched(algorithm, toy("Recall", delay=3), scale, 2, check)
    assert sum(changed) > 5


def test_the_loss_of_all_columns_at_once_is_that_of_the_unrolled_rows():
    """Minibatches of columns hold each valid row once."""
    algorithm = PPO(epochs=1, minibatches=3)
    scale, held = ScaleConfig(actors=2, envs_per_actor=3, rollout_length=7), []

    def check(trainer, part, version):
        if not trainer._parts and not held:
            minibatches = trainer._minibatches

            def count(batch):
                batch["number"] = torch.arange(len(batch["advantage"]))
                for minibatch in minibatches(batch):
                    output, value = trainer._forward(minibatch)
                    assert len(output) == len(value) == len(minibatch["number"])
                    before = minibatch["value"]
                    if not held:  # of the first one nothing has changed yet
                        torch.testing.assert_close(value, before, atol=1e-5, rtol=0)
                    held.append(minibatch["number"])
                    yield minibatch
                assert sorted(torch.cat(held[-3:]).tolist()) == list(range(len(batch["number"])))

            trainer._minibatches = count

    watched(algorithm, toy("Recall", delay=3), scale, 1, check)
    assert len(held) == 3


def recalled(network, updates, algorithm, delay=3, seed=0):
    scale = ScaleConfig(envs_per_actor=32, rollout_length=15)
    built = build(
        replace(config_for(algorithm, seed, scale), network=network), toy("Recall", delay=delay)
    )
    built.learner.begin()
    driver, returns = Serial(built.roles), []
    while built.learner.version < updates:
        driver.step()
        if (report := built.learner.report) is not None:
            returns += report.episodes["return"].tolist()
            built.learner.report = None
    built.close()
    return np.mean(returns[-500:])


def test_who_remembers_can_recall_and_who_does_not_cannot():
    algorithm = PPO(learning_rate=5e-3, gamma=0.9, epochs=4, minibatches=2, entropy_coef=0.01)
    assert recalled(Network(recurrent="gru", memory=16), 60, algorithm) > 0.95
    assert 0.4 < recalled(Network(hidden=(32,)), 60, algorithm) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a2c", "impala", "appo"])
def test_the_others_recall_too(name):
    algorithm = {
        "a2c": A2C(learning_rate=1e-2, gamma=0.9, normalise_advantage=True, entropy_coef=0.01),
        "impala": IMPALA(learning_rate=1e-2, gamma=0.9, normalise_advantage=True),
        "appo": APPO(learning_rate=5e-3, gamma=0.9, epochs=4, minibatches=2),
    }[name]
    assert recalled(Network(recurrent="gru", memory=16), 200, algorithm) > 0.95
