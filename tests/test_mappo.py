"""Several agents: columns beside each other, values of the whole state, rows of those that act."""

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
from tianji.columns import Each, fold
from tianji.config import ScaleConfig
from tianji.driver import Serial
from tianji.env import make_env
from tianji.returns import gae
from tianji.spec import make_spec
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import Params, Rollout, Row, rollout_layout


def pair(**kwargs):
    return lambda num_envs: make_env("toy/Pair", num_envs, kwargs)


def spec_of(algorithm, **kwargs):
    return make_spec(config_for(algorithm), pair(**kwargs)(4).spec)


def a_part(spec, algorithm, seed=0, T=8, B=4):
    """A rollout of the right shapes with any content, in which the second agent dies at row 4."""
    rng = np.random.default_rng(seed)
    env = spec.env
    extras = algorithm.describe(spec).extras
    row = Row(env.observation, env.action_leaf, extras, {}, env.reward_leaf)
    layout = rollout_layout(row, T, B)
    part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
    for name in ("obs", "state"):
        part.observation[name][:] = rng.normal(size=part.observation[name].shape)
    part.observation["mask"][:] = True
    part.observation["alive"][:] = True
    part.observation["alive"][4:, :, 1] = False
    part.action[:] = rng.integers(4, size=part.action.shape)
    part.reward[:] = rng.normal(size=part.reward.shape)
    part.valid[:] = True
    part.valid[6, 0] = False
    part.terminated[5, 0] = True
    part.extras["log_prob"][:] = np.log(0.25)
    return part


@pytest.mark.parametrize("own_rewards", [False, True])
def test_agents_become_columns(own_rewards):
    algorithm = MAPPO()
    spec = spec_of(algorithm, own_rewards=own_rewards)
    part = a_part(spec, algorithm)
    folded = fold(part, 2)
    for b in range(4):
        for a in range(2):
            c = 2 * b + a
            np.testing.assert_array_equal(
                folded.observation["obs"][:, c], part.observation["obs"][:, b, a]
            )
            np.testing.assert_array_equal(folded.action[:, c], part.action[:, b, a])
            reward = part.reward[:, b, a] if own_rewards else part.reward[:, b]
            np.testing.assert_array_equal(folded.reward[:, c], reward)
            np.testing.assert_array_equal(folded.valid[:, c], part.valid[:, b])
            np.testing.assert_array_equal(folded.terminated[:, c], part.terminated[:, b])
    assert fold(part, 0) is part


def test_the_value_sees_the_state_what_the_agent_observes_and_which_it_is():
    algorithm = MAPPO()
    spec = spec_of(algorithm)
    trainer = algorithm.trainer(spec)
    part = a_part(spec, algorithm)
    _, seen = trainer._look(part)
    critic = seen.critic.numpy()
    assert critic.shape == (9, 8, 4 + 9 + 2)
    for c in range(8):
        b, a = divmod(c, 2)
        np.testing.assert_array_equal(critic[:, c, :4], part.observation["obs"][:, b, a])
        np.testing.assert_array_equal(critic[:, c, 4:13], part.observation["state"][:, b])
        assert (critic[:, c, 13:] == np.eye(2)[a]).all()
    assert seen.obs.shape == (9, 8, 4 + 2), "a policy sees its own, and which it is"


def test_without_a_state_the_value_sees_what_all_observe():
    algorithm = MAPPO()
    spec = spec_of(algorithm)
    observation = {k: v for k, v in spec.env.observation.items() if k != "state"}
    spec = replace(spec, env=replace(spec.env, observation=observation))
    part = a_part(spec_of(algorithm), algorithm)
    del part.observation["state"]
    _, seen = algorithm.trainer(spec)._look(part)
    critic = seen.critic.numpy()
    assert critic.shape == (9, 8, 2 * 4 + 2)
    np.testing.assert_array_equal(critic[:, 3, :8], part.observation["obs"][:, 1].reshape(9, -1))


def taken(algorithm, part, spec):
    """The batch as the passes see it."""
    trainer, seen = algorithm.trainer(spec), []
    loss = trainer._loss
    trainer._loss = lambda batch, tell: seen.append(dict(batch)) or loss(batch, tell)
    trainer.take(part)
    trainer.finish()
    return trainer, seen[0]


WHOLE = MAPPO(epochs=1, minibatches=1, normalise_value=False)


def test_advantages_are_those_of_each_agents_rewards_and_normalised_over_those_that_act():
    spec = spec_of(WHOLE, own_rewards=True)
    part = a_part(spec, WHOLE)
    _, batch = taken(WHOLE, part, spec)
    folded = fold(part, 2)
    trainer = WHOLE.trainer(spec)
    value, _ = trainer._values(trainer._look(part)[1])
    expected = gae(folded.reward, value, folded.terminated, folded.valid, 0.99, 0.95)
    acts = (folded.valid & folded.observation["alive"][:-1])[folded.valid]
    plain = expected[folded.valid]
    normalised = (plain - plain[acts].mean()) / plain[acts].std()
    order = np.argsort(batch["target"].numpy())
    target = (expected + value[:-1])[folded.valid]
    np.testing.assert_allclose(batch["target"].numpy()[order], np.sort(target), atol=1e-5)
    same = np.argsort(target)
    np.testing.assert_allclose(
        batch["advantage"].numpy()[order], normalised[same], atol=1e-4, rtol=1e-4
    )
    assert ((batch["acts"].numpy()[order] > 0) == acts[same]).all()
    assert float(batch["acts"].mean()) == pytest.approx(1.0)


def test_what_a_dead_agent_does_changes_no_policy():
    """Its actions, log-probabilities and advantages are in no gradient of the policy."""
    algorithm = replace(WHOLE, value_coef=0.0, max_grad_norm=0.0, normalise_advantage=False)
    spec, learnt = spec_of(algorithm), []
    for changed in (False, True):
        part = a_part(spec, algorithm)
        if changed:
            part.action[4:, :, 1] = 3 - part.action[4:, :, 1]
            part.extras["log_prob"][4:, :, 1] -= 1.0
            legal = part.action[4:, :, 1, None] == np.arange(3)
            part.observation["mask"][4:-1, :, 1, :3] = legal
        trainer, _ = taken(algorithm, part, spec)
        learnt.append(trainer.state.networks())
    for name, array in learnt[0].items():
        np.testing.assert_array_equal(array, learnt[1][name], err_msg=name)


def test_what_follows_for_the_others_is_a_dead_agents_return_too():
    """The team's reward after the second agent's death is part of its advantage before."""
    spec, advantages = spec_of(WHOLE), []
    for reward in (0.0, 5.0):
        part = a_part(spec, WHOLE)
        part.reward[7] = reward
        trainer = WHOLE.trainer(spec)
        trainer.take(part)
        rows = trainer._parts[0]
        advantages.append(rows["advantage"][rows["acts"]])
    assert len(advantages[0]) == 4 * 8 + 4 * 4 - 1
    assert int((advantages[0] != advantages[1]).sum()) > 3 * 12


def test_values_are_learnt_over_their_running_mean_and_deviation():
    algorithm = MAPPO(epochs=60, learning_rate=1e-2, entropy_coef=0.0)
    spec = spec_of(algorithm)
    trainer = algorithm.trainer(spec)
    for _ in range(15):
        part = a_part(spec, algorithm)
        part.reward[:], part.valid[:] = 1000.0, True
        part.terminated[:] = True
        trainer.take(part)
        trainer.finish()
    value, _ = trainer._values(trainer._look(part)[1])
    np.testing.assert_allclose(value, 1000.0, rtol=0.02)
    trainer.take(part)
    assert trainer.finish()["explained_variance"] == 0.0, "all returns are alike"


def test_each_agent_has_its_own_network_where_they_do_not_share():
    algorithm = MAPPO(share=False)
    spec = spec_of(algorithm)
    trainer, policy = algorithm.trainer(spec), algorithm.policy(spec)
    params = trainer.params(0)
    assert {"policy.0.layers.0.weight", "policy.1.layers.0.weight"} <= set(params)
    assert params["policy.0.layers.0.weight"].shape[1] == 4, "no need to be told which it is"
    observation = pair()(4).reset(0)
    observation["mask"][:] = True
    before = _greedy_outputs(policy, params, observation)
    changed = Params(params.layout)
    np.copyto(changed.flat, params.flat)
    changed["policy.1.layers.1.bias"][:] += np.array([0, 3.0, 0, 0], np.float32)
    after = _greedy_outputs(policy, changed, observation)
    assert (after[:, 1] == 1).all()
    np.testing.assert_array_equal(after[:, 0], before[:, 0])


def _greedy_outputs(policy, params, observation):
    policy.load(params)
    return policy.act(observation, policy.initial(4), None).action


def test_answers_of_networks_of_their_own_come_back_in_their_order():
    nets = Each([torch.nn.Linear(3, 2) for _ in range(3)])
    x, agent = torch.randn(10, 3), torch.tensor([2, 0, 0, 2, 1, 0, 2, 2, 1, 0])
    expected = torch.stack([nets[int(a)](row) for a, row in zip(agent, x, strict=True)])
    torch.testing.assert_close(nets(x, agent), expected)
    some = torch.tensor([2, 2, 0, 0, 2, 0, 0, 0, 2, 2])
    expected = torch.stack([nets[int(a)](row) for a, row in zip(some, x, strict=True)])
    torch.testing.assert_close(nets(x, some), expected)


def learn(algorithm, make, updates, network=Network(hidden=(32,))):  # noqa: B008
    scale = ScaleConfig(envs_per_actor=16, rollout_length=18)
    built = build(replace(config_for(algorithm, 0, scale), network=network), make)
    built.learner.begin()
    driver, returns = Serial(built.roles), []
    while built.learner.version < updates:
        driver.step()
        assert built.actors[0].fault is None, "an action that is not legal"
        if (report := built.learner.report) is not None:
            returns += report.episodes["return"].tolist()
            built.learner.report = None
    built.close()
    return np.mean(returns[-100:])


QUICK = MAPPO(learning_rate=1e-2, gamma=0.5, epochs=6)


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        (QUICK, {}),
        (replace(QUICK, share=False, critic="own"), {"own_rewards": True}),
        (PPO(learning_rate=1e-2, gamma=0.5, epochs=4), {}),
    ],
    ids=["mappo", "own networks, critics and rewards", "ppo for each"],
)
def test_a_pair_learns_what_each_of_it_must_do(algorithm, kwargs):
    assert learn(algorithm, pair(**kwargs), 30) > 0.93 * pair(**kwargs)(1).optimal_return


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        replace(QUICK, share=False),
        A2C(learning_rate=2e-2, gamma=0.5, normalise_advantage=True),
        IMPALA(learning_rate=2e-2, gamma=0.5, normalise_advantage=True),
        APPO(learning_rate=1e-2, gamma=0.5, epochs=4),
    ],
    ids=["own networks", "a2c", "impala", "appo"],
)
def test_all_learn_it(algorithm):
    assert learn(algorithm, pair(), 100) > 7.5, "of 8"


@pytest.mark.slow
def test_a_pair_with_a_memory_learns_it():
    network = Network(recurrent="gru", memory=16)
    assert learn(replace(QUICK, learning_rate=5e-3), pair(), 60, network) > 7.5, "of 8"


def test_a_schedule_counts_steps_of_envs_not_of_agents():
    built = build(config_for(PPO(epochs=1)), pair())
    built.learner.begin()
    run_updates(built, Serial(built.roles), 3)
    assert built.learner._trainer.state.counters["steps"] == built.learner.consumed
    built.close()
