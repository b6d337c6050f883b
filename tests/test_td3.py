"""TD3: targets, smoothing and delays by formula; toys with answers; several learners as one."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_sac import IDENTITY, critic, env_spec, learn, mlp, replayed, spec_of, toy

from tianji.algorithms.sac import SAC
from tianji.algorithms.td3 import TD3
from tianji.env import Discrete
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.team import Shared
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for

SMALL = TD3(batch_size=32, warmup=64, capacity=512, new_steps=8)


def test_td3_keeps_the_promises_of_an_algorithm():
    for hyper in (SMALL, replace(SMALL, n_step=3, policy_every=1)):
        check_algorithm(hyper, IDENTITY)


def test_discrete_and_unbounded_actions_are_refused_with_the_remedy():
    with pytest.raises(Refusal, match=r'td3.*"dqn" or "ppo"'):
        make_spec(config_for(SMALL), replace(env_spec(), action=Discrete(2)))
    with pytest.raises(Refusal, match=r"td3.*finite bounds"):
        make_spec(config_for(SMALL), env_spec(high=(math.inf, 1.0)))


@pytest.mark.parametrize(("smoothing", "reach"), [(0.2, 0.5), (2.0, 0.3), (0.0, 0.5)])
def test_targets_are_those_of_the_formula_written_out(smoothing, reach):
    """r + discount min Q'(s', clip(pi'(s') + clip(noise))), by other code, in doubles."""
    env = env_spec()
    hyper = replace(SMALL, batch_size=16, smoothing=smoothing, smoothing_clip=reach)
    trainer, part, shaken = (
        hyper.trainer(spec_of(hyper, env)),
        replayed(env),
        np.random.default_rng(3),
    )
    trainer.state.load_networks(
        {k: a + 0.3 * shaken.standard_normal(a.shape) for k, a in trainer.state.networks().items()}
    )
    arrays = trainer.state.networks()
    trainer._rng = np.random.default_rng(9)
    found = trainer._values(part, torch.from_numpy(part.observation["obs"][1])).numpy()
    noise = np.random.default_rng(9).standard_normal((16, 2), np.float32)
    noise = np.clip(smoothing * noise, -reach, reach)
    then = part.observation["obs"][1].astype(np.float64)
    unit = np.clip(np.tanh(mlp(arrays, "target_policy", then)) + noise, -1, 1)
    heads = [critic(arrays, "target_critics", then, unit, head) for head in range(2)]
    expected = part.reward[0] + part.extras["discount"][0] * np.minimum(*heads)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_policy_and_targets_move_once_in_so_many_updates():
    env, hyper = env_spec(), replace(SMALL, batch_size=16, policy_every=3, tau=0.25)
    trainer = hyper.trainer(spec_of(hyper, env))
    for update in range(1, 8):
        before = {k: a.copy() for k, a in trainer.state.networks().items()}
        trainer.take(replayed(env, seed=update))
        trainer.finish()
        after = trainer.state.networks()
        moved = {k.split(".")[0] for k in before if not np.array_equal(before[k], after[k])}
        due = update % 3 == 0
        everything = {"policy", "critics", "target_policy", "target_critics"}
        assert moved == (everything if due else {"critics"}), update
        for name in before:
            if due and name.startswith("target"):
                online = after[name.removeprefix("target_")]
                expected = before[name] + 0.25 * (online - before[name])
                np.testing.assert_allclose(after[name], expected, atol=1e-6)


def test_the_policys_gradient_is_that_of_the_first_critic_by_finite_differences():
    env, hyper = env_spec(), replace(SMALL, batch_size=16, policy_every=1)
    trainer, part = hyper.trainer(spec_of(hyper, env)), replayed(env)
    shaken = np.random.default_rng(5)
    trainer.state.load_networks(
        {k: a + 0.3 * shaken.standard_normal(a.shape) for k, a in trainer.state.networks().items()}
    )
    before = {k: a.astype(np.float64) for k, a in trainer.state.networks().items()}
    trainer.take(part)
    trainer.finish()
    after, now = trainer.state.networks(), part.observation["obs"][0].astype(np.float64)

    def loss(arrays):
        """By the critics after their own step."""
        unit = np.tanh(mlp(arrays, "policy", now))
        return -critic(after, "critics", now, unit, 0).mean()

    for name, parameter in trainer._optimizers["policy"].flat.names.items():
        place, step = np.unravel_index(parameter.numel() // 2, parameter.shape), 1e-5
        up, down = ({k: a.copy() for k, a in before.items()} for _ in range(2))
        up[name][place] += step
        down[name][place] -= step
        slope = (loss(up) - loss(down)) / (2 * step)
        assert parameter.grad[place].item() == pytest.approx(slope, rel=1e-2, abs=1e-5), name


def test_td3_solves_the_identity_toy():
    hyper = replace(SMALL, learning_rate=1e-2, gamma=0.0, batch_size=64, warmup=256, capacity=4000,
                    tau=0.1, exploration=0.3)  # fmt: skip
    built, returns = learn(hyper, IDENTITY, 800)
    policy = hyper.policy(built.spec)
    policy.load(built.learner._trainer.params(built.learner.version))
    seen = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    np.testing.assert_allclose(policy.act({"obs": seen}, {}, None).action, seen, atol=0.25)
    assert np.mean(returns[:8]) < -8, "random actions give about -10.7 in 16 steps"
    assert np.mean(returns[-30:]) > -3.0
    built.close()


def test_a_truncated_episode_is_valued_as_if_it_went_on():
    """Rewards of 1 for ever: the value is 1 / (1 - gamma), whatever the length of episodes."""
    hyper = replace(SMALL, learning_rate=1e-2, gamma=0.8, batch_size=64, warmup=256, tau=0.1)
    built, _ = learn(hyper, toy("Target", every=4, continuous=True), 500)
    with torch.no_grad():
        value = built.learner._trainer._critics(torch.ones(1, 1), torch.zeros(1, 1))
    np.testing.assert_allclose(value.numpy(), 5.0, rtol=0.1)
    built.close()


def test_noise_is_added_to_actions_and_stays_within_the_bounds():
    env, hyper = env_spec(), replace(SMALL, exploration=0.3)
    spec = spec_of(hyper, env)
    trainer, policy = hyper.trainer(spec), hyper.policy(spec)
    obs = {"obs": np.zeros((4000, 3), np.float32)}
    policy.load(trainer.params(0))
    anywhere = policy.act(obs, {}, np.random.default_rng(0)).action
    np.testing.assert_allclose(anywhere.std(0), [4 / 12**0.5, 1 / 12**0.5], atol=0.03)
    policy.load(trainer.params(1))
    greedy = policy.act(obs, {}, None).action
    np.testing.assert_allclose(greedy, np.tile([0.0, 0.5], (4000, 1)), atol=1e-6)
    noisy = policy.act(obs, {}, np.random.default_rng(0)).action
    np.testing.assert_allclose(noisy.std(0), [0.6, 0.15], rtol=0.05)
    assert (noisy >= [-2.0, 0.0]).all()
    assert (noisy <= [2.0, 1.0]).all()


class Two:
    """One of two learners in threads."""

    size = 2

    def __init__(self, rank, desk):
        self.rank, self._desk = rank, desk

    def sum(self, tensor):
        barrier, places = self._desk
        places[self.rank] = tensor.clone()
        barrier.wait(30)
        total = places[0] + places[1]
        barrier.wait(30)
        return tensor.copy_(total)


def half(part, rank):
    """A learner's share of what replay drew."""
    N = part.valid.shape[1] // 2
    mine = slice(N * rank, N * (rank + 1))
    cut = {k: getattr(part, k)[:, mine] for k in ("action", "reward", "terminated", "valid")}
    observation = {"obs": part.observation["obs"][:, mine]}
    return replace(part, observation=observation,
                   extras={"discount": part.extras["discount"][:, mine]}, **cut)  # fmt: skip


@pytest.mark.parametrize("hyper", [SMALL, SAC(batch_size=32, warmup=64)], ids=["td3", "sac"])
def test_two_learners_on_halves_learn_and_tell_what_one_does_on_the_whole(hyper):
    env = env_spec()
    parts = [replayed(env, N=32, seed=seed) for seed in range(6)]
    spec = spec_of(hyper, env)
    one, told = hyper.trainer(spec), [{}, {}]
    desk = threading.Barrier(2), [None, None]
    two = [
        hyper.trainer(replace(spec, learners=2, learner=rank, team=Two(rank, desk)))
        for rank in range(2)
    ]

    def follow(rank):
        for part in parts:
            two[rank].take(half(part, rank))
            told[rank] = two[rank].finish()

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for part in parts:
        one.take(part)
        expected = one.finish()
    for thread in threads:
        thread.join(30)
    for rank in range(2):
        for name, array in one.state.networks().items():
            np.testing.assert_allclose(
                two[rank].state.networks()[name], array, atol=1e-5, err_msg=name
            )
        assert told[rank] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("hyper", [SMALL, SAC(batch_size=32, warmup=64)], ids=["td3", "sac"])
def test_workers_share_all_that_is_stepped_and_nothing_overlaps(hyper):
    env = env_spec()
    spec = spec_of(hyper, env)
    sizes = [array.size for array in hyper.trainer(spec).state.networks().values()]
    flat = np.zeros(Shared.size(sum(sizes)), np.float32)
    first = hyper.trainer(replace(spec, shared=Shared(flat, first=True)))
    second = hyper.trainer(replace(spec, shared=Shared(flat, first=False), seed=7))
    alone = hyper.trainer(spec)
    for seed in range(4):
        for trainer in (first, alone):
            trainer.take(replayed(env, N=32, seed=seed))
            trainer.finish()
    for name, array in alone.state.networks().items():
        np.testing.assert_allclose(first.state.networks()[name], array, atol=1e-6, err_msg=name)
    for optimizer in second._optimizers.values():
        optimizer.refresh()
    for name, array in first.state.networks().items():
        if not name.startswith("target"):
            assert np.array_equal(second.state.networks()[name], array), name
