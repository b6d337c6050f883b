"""Soft actor-critic: its distribution, targets and temperature by formula; toys with answers."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tianji.algorithm import Network
from tianji.algorithms.sac import SAC
from tianji.build import build
from tianji.config import ScaleConfig
from tianji.distributions import Bounds, Squashed, bounds
from tianji.driver import Serial
from tianji.env import Continuous, Discrete, EnvSpec, MultiDiscrete, make_env
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import Rollout, leaf

SMALL = SAC(batch_size=32, warmup=64, capacity=512, new_steps=8)


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


IDENTITY = toy("Identity", continuous=True)


def env_spec(low=(-2.0, 0.0), high=(2.0, 1.0), obs=(3,)):
    action = Continuous(low, high, (len(low),))
    return EnvSpec("given", {"obs": leaf(obs, np.float32)}, action)


def spec_of(algorithm, env, **fields):
    return replace(make_spec(config_for(algorithm), env), **fields)


def replayed(env, N=16, seed=0, discount=0.9):
    """What replay draws: one row, N steps of it."""
    rng = np.random.default_rng(seed)
    low, high = np.array(env.action.low), np.array(env.action.high)
    obs = env.observation["obs"].shape
    return Rollout(
        observation={"obs": rng.normal(size=(2, N, *obs)).astype(np.float32)},
        action=rng.uniform(low, high, (1, N, len(low))).astype(np.float32),
        reward=rng.normal(size=(1, N)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={"discount": np.where(rng.random((1, N)) < 0.2, 0, discount).astype(np.float32)},
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0),
        versions=np.zeros(N, np.int64),
    )


def learn(algorithm, make, updates, network=None, scale=None):
    """Train in this process; all that was built, and the returns of the episodes that ended."""
    scale = scale or ScaleConfig(envs_per_actor=8, rollout_length=1)
    config = replace(config_for(algorithm, scale=scale), network=network or Network(hidden=(32,)))
    built, returns = build(config, make), []
    built.learner.begin()
    driver = Serial(built.roles)
    for _ in range(updates):
        run_updates(built, driver, 1)
        returns += built.learner.report.episodes["return"].tolist()
    return built, returns


def log_density(action, mean, log_std):
    """Of a squashed normal at an action in -1..1, by the change of variables in doubles."""
    u, std = np.arctanh(action), np.exp(log_std)
    normal = -0.5 * ((u - mean) / std) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    return normal - np.log1p(-(action**2))


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.2, -1.0), (-0.7, 0.5)])
def test_the_density_of_a_squashed_normal_is_what_draw_says_and_sums_to_1(mean, log_std):
    noise = torch.linspace(-2.5, 2.5, 101).unsqueeze(-1)
    output = torch.tensor([[mean, log_std]]).expand(101, -1)
    action, log_prob = Squashed(1).draw(output, noise)
    expected = log_density(action[:, 0].double().numpy(), mean, log_std)
    np.testing.assert_allclose(log_prob.numpy(), expected, atol=2e-3)
    grid = np.linspace(-1, 1, 2_000_003)[1:-1]
    assert np.trapezoid(np.exp(log_density(grid, mean, log_std)), grid) == pytest.approx(
        1, abs=1e-3
    )


def test_several_dimensions_add_up():
    generator = torch.Generator().manual_seed(0)
    output, noise = (0.5 * torch.randn(5, n, generator=generator) for n in (6, 3))
    action, log_prob = Squashed(3).draw(output, noise)
    expected = log_density(action.double().numpy(), output[:, :3].numpy(), output[:, 3:].numpy())
    np.testing.assert_allclose(log_prob.numpy(), expected.sum(1), rtol=1e-4)


def test_the_log_density_is_exact_and_differentiable_far_out():
    """tanh is 1 to all digits of float32 there: the log of 1 - tanh^2 would be minus infinity."""
    for mean in (-400.0, -30.0, 30.0, 400.0):
        output = torch.tensor([[mean, 0.0]], requires_grad=True)
        action, log_prob = Squashed(1).draw(output, torch.zeros(1, 1))
        slope = 2 * (math.log(2) - abs(mean))  # log(1 - tanh(u)^2) for large |u|
        assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - slope, rel=1e-5)
        (gradient,) = torch.autograd.grad(log_prob.sum() + action.sum(), output)
        assert gradient[0, 0] == pytest.approx(2 * np.sign(mean), rel=1e-4)


def test_gradients_through_an_action_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: Squashed(2).draw(x, noise), output)


def test_the_actor_draws_what_the_learner_scores():
    """In numpy and in torch: the same mean, spread and squashing, by the moments of many draws."""
    over, rng = Squashed(1), np.random.default_rng(0)
    output = np.tile(np.array([[0.4, -0.5]], np.float32), (200_000, 1))
    drawn = over.sample(output, rng)
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((200_000, 1), np.float32))
    scored, _ = over.draw(torch.from_numpy(output), noise)
    assert drawn.mean() == pytest.approx(float(scored.mean()), abs=5e-3)
    assert drawn.std() == pytest.approx(float(scored.std()), abs=5e-3)
    assert over.greedy(output[:1])[0, 0] == pytest.approx(math.tanh(0.4))


def test_actions_are_scaled_to_the_bounds_and_back():
    scale = Bounds(Continuous((-2.0, 0.0, 5.0), (2.0, 1.0, 5.0), (3,)))
    unit = np.array([[-1.0, -1.0, -1.0], [0.0, 0.5, 0.3], [1.0, 1.0, 1.0]], np.float32)
    outer = scale.outer(unit)
    assert outer.tolist() == [[-2.0, 0.0, 5.0], [0.0, 0.75, 5.0], [2.0, 1.0, 5.0]]
    np.testing.assert_allclose(scale.inner(outer)[:, :2], unit[:, :2])
    assert scale.inner(outer)[:, 2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        (replace(env_spec(), action=Discrete(3)), '"dqn" or "ppo"'),
        (replace(env_spec(), action=MultiDiscrete((2, 3))), 'algorithm.name = "ppo"'),
        (env_spec(low=(-math.inf, 0.0)), "finite bounds"),
        (env_spec(low=(2.0, 0.0)), "one value only"),
        (replace(env_spec(), agents=("a", "b")), "several agents"),
    ],
)
def test_what_cannot_be_acted_in_is_refused_with_the_remedy(env, remedy):
    with pytest.raises(Refusal, match=remedy):
        make_spec(config_for(SMALL), env)
    with pytest.raises(Refusal, match=remedy):
        bounds("sac", env)


def test_replay_that_is_too_small_is_refused():
    for hyper, remedy in (
        (replace(SMALL, warmup=16), "Set warmup to 32"),
        (replace(SMALL, capacity=32), "Raise capacity"),
        (replace(SMALL, n_step=40), "Set warmup to 320"),
    ):
        with pytest.raises(Refusal, match=remedy):
            make_spec(config_for(hyper), env_spec())


def test_sac_keeps_the_promises_of_an_algorithm():
    for hyper in (SMALL, replace(SMALL, n_step=3, tune=False, temperature=0.1)):
        check_algorithm(hyper, IDENTITY)


def network(weights, biases, x, head, activation=np.tanh):
    """One head of the critics, written out."""
    last = len(weights) - 1
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w[head] + b[head]
        x = activation(x) if i < last else x
    return x[:, 0]


def critic(arrays, prefix, obs, unit, head):
    names = sorted({k for k in arrays if k.startswith(f"{prefix}.weights")})
    weights = [arrays[k].astype(np.float64) for k in names]
    biases = [arrays[k.replace("weights", "biases")].astype(np.float64) for k in names]
    return network(weights, biases, np.concatenate([obs, unit], 1), head)


def mlp(arrays, prefix, x):
    names = sorted({k.rsplit(".", 1)[0] for k in arrays if k.startswith(f"{prefix}.layers")})
    for name, after in pairwise([*names, None]):
        x = x @ arrays[f"{name}.weight"].T.astype(np.float64) + arrays[f"{name}.bias"]
        x = np.tanh(x) if after else x
    return x


def test_targets_are_those_of_the_formula_written_out():
    """r + discount (min of both target critics - alpha log pi), by other code, in doubles."""
    env, hyper = env_spec(), replace(SMALL, batch_size=16, temperature=0.3)
    trainer, part = hyper.trainer(spec_of(hyper, env)), replayed(env)
    shaken = np.random.default_rng(3)
    trainer.state.load_networks(
        {k: a + 0.3 * shaken.standard_normal(a.shape) for k, a in trainer.state.networks().items()}
    )
    arrays = trainer.state.networks()
    alpha = math.exp(arrays["temperature.log_alpha"])
    noise = np.random.default_rng(4).standard_normal((16, 2)).astype(np.float32)
    then = part.observation["obs"][1].astype(np.float64)
    output = mlp(arrays, "policy", then)
    mean, log_std = output[:, :2], np.clip(output[:, 2:], -20, 2)
    unit = np.tanh(mean + np.exp(log_std) * noise)
    log_prob = log_density(unit, mean, log_std).sum(1)
    least = np.minimum(*(critic(arrays, "target", then, unit, head) for head in range(2)))
    expected = part.reward[0] + part.extras["discount"][0] * (least - alpha * log_prob)
    found = trainer._targets(
        part, torch.from_numpy(part.observation["obs"][1]), torch.from_numpy(noise),
        torch.tensor(alpha),
    )  # fmt: skip
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert (part.extras["discount"] == 0).any()


def test_critics_of_one_batch_are_networks_of_their_own():
    env = env_spec()
    trainer, part = SMALL.trainer(spec_of(SMALL, env)), replayed(env, N=8)
    arrays, obs = trainer.state.networks(), part.observation["obs"][0]
    unit = np.random.default_rng(0).uniform(-1, 1, (8, 2)).astype(np.float32)
    with torch.no_grad():
        found = trainer._critics(torch.from_numpy(obs), torch.from_numpy(unit)).numpy()
        first = trainer._critics(torch.from_numpy(obs), torch.from_numpy(unit), heads=1).numpy()
    for head in range(2):
        expected = critic(arrays, "critics", obs.astype(np.float64), unit, head)
        np.testing.assert_allclose(found[head], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first, found[:1], rtol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_an_update_moves_what_it_should_and_the_target_by_tau():
    env, hyper = env_spec(), replace(SMALL, batch_size=16, tau=0.25)
    trainer, part = hyper.trainer(spec_of(hyper, env)), replayed(env)
    before = {k: a.copy() for k, a in trainer.state.networks().items()}
    trainer.take(part)
    metrics = trainer.finish()
    after = trainer.state.networks()
    assert all(not np.array_equal(before[k], after[k]) for k in before if "bias" not in k)
    for name in before:
        if name.startswith("target"):
            online = after[name.replace("target", "critics")]
            moved = before[name] + 0.25 * (online - before[name])
            np.testing.assert_allclose(after[name], moved, atol=1e-6)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("target", "sign"), [(5.0, 1), (-5.0, -1)])
def test_the_temperature_moves_by_the_formula_towards_the_target_entropy(target, sign):
    """The gradient is E[-log pi - H] = entropy - H; Adam's first step is its sign times the step
    size, the other way."""
    env = env_spec()
    hyper = replace(SMALL, batch_size=16, temperature=0.5, target_entropy=target)
    trainer = hyper.trainer(spec_of(hyper, env))
    trainer.take(replayed(env))
    metrics = trainer.finish()
    assert math.copysign(1, target - metrics["entropy"]) == sign
    slope = trainer._log_alpha.grad.item()
    assert slope == pytest.approx(metrics["entropy"] - target, rel=1e-4)
    moved = trainer.state.networks()["temperature.log_alpha"] - math.log(0.5)
    assert moved == pytest.approx(sign * hyper.learning_rate, rel=1e-2)
    assert metrics["temperature"] == pytest.approx(0.5)


def test_a_fixed_temperature_stays():
    hyper = replace(SMALL, batch_size=16, temperature=0.5, tune=False)
    trainer = hyper.trainer(spec_of(hyper, env_spec()))
    for _ in range(3):
        trainer.take(replayed(env_spec()))
        metrics = trainer.finish()
    assert metrics["temperature"] == pytest.approx(0.5)
    assert trainer.state.networks()["temperature.log_alpha"] == pytest.approx(math.log(0.5))


BANDIT = env_spec(low=(-1.0,), high=(1.0,), obs=(1,))


def pulls(rng, N=64):
    """Of a bandit that pays most for the action that is seen."""
    part = replayed(BANDIT, N)
    part.observation["obs"][0] = seen = rng.uniform(-1, 1, (N, 1))
    part.action[0] = rng.uniform(-1, 1, (N, 1))
    part.reward[0] = -np.square(part.action[0] - seen)[:, 0]
    part.extras["discount"][:] = 0
    return part


@pytest.mark.parametrize("target", [0.2, -0.5])
def test_the_temperature_makes_the_policy_keep_the_target_entropy_on_a_bandit(target):
    """The reward wants no entropy at all, so that it is as low as it is asked for."""
    hyper = SAC(learning_rate=1e-2, batch_size=64, warmup=64, temperature=0.1, tau=0.05,
                target_entropy=target)  # fmt: skip
    trainer = hyper.trainer(spec_of(hyper, BANDIT, network=Network(hidden=(32,))))
    rng, told = np.random.default_rng(0), []
    for _ in range(650):
        trainer.take(pulls(rng))
        told.append(trainer.finish()["entropy"])
    assert np.mean(told[-150:]) == pytest.approx(target, abs=0.12)


def test_sac_solves_the_identity_toy():
    hyper = replace(SMALL, learning_rate=1e-2, gamma=0.0, batch_size=64, warmup=256, capacity=4000,
                    tau=0.1, temperature=0.05)  # fmt: skip
    built, returns = learn(hyper, IDENTITY, 500)
    policy = hyper.policy(built.spec)
    policy.load(built.learner._trainer.params(built.learner.version))
    seen = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    np.testing.assert_allclose(policy.act({"obs": seen}, {}, None).action, seen, atol=0.2)
    assert np.mean(returns[:8]) < -8, "random actions give about -10.7 in 16 steps"
    assert np.mean(returns[-30:]) > -3.0
    built.close()


def test_a_truncated_episode_is_valued_as_if_it_went_on():
    """Rewards of 1 for ever: the value is 1 / (1 - gamma), whatever the length of episodes. Taking
    truncation for termination would give about half of it."""
    hyper = replace(SMALL, learning_rate=1e-2, gamma=0.8, batch_size=64, warmup=256, tau=0.1,
                    temperature=1e-3, tune=False)  # fmt: skip
    built, _ = learn(hyper, toy("Target", every=4, continuous=True), 400)
    with torch.no_grad():
        value = built.learner._trainer._critics(torch.ones(1, 1), torch.zeros(1, 1))
    np.testing.assert_allclose(value.numpy(), 5.0, rtol=0.1)
    built.close()


def test_actions_are_random_before_the_first_update_and_the_policys_own_after_it():
    env = env_spec()
    spec = spec_of(SMALL, env)
    trainer, policy = SMALL.trainer(spec), SMALL.policy(spec)
    trainer.state.load_networks(
        {k: a * 0 - (3.0 if k == "policy.layers.1.bias" else 0.0)
         for k, a in trainer.state.networks().items()}
    )  # fmt: skip
    obs = {"obs": np.zeros((4000, 3), np.float32)}
    policy.load(trainer.params(0))
    anywhere = policy.act(obs, {}, np.random.default_rng(0)).action
    np.testing.assert_allclose(anywhere.mean(0), [0.0, 0.5], atol=0.06)
    np.testing.assert_allclose(anywhere.std(0), [4 / 12**0.5, 1 / 12**0.5], atol=0.03)
    policy.load(trainer.params(1))
    own = policy.act(obs, {}, np.random.default_rng(0)).action
    np.testing.assert_allclose(own, np.tile([-2.0, 0.0], (4000, 1)), atol=0.1)
    assert (own >= [-2.0, 0.0]).all()
    assert (own <= [2.0, 1.0]).all()


@pytest.mark.parametrize("side", [12, 40])
def test_pictures_pass_convolutions(side):
    env = replace(env_spec(), observation={"obs": leaf((4, side, side), np.uint8)})
    hyper = replace(SMALL, batch_size=4, warmup=64)
    spec = spec_of(hyper, env)
    trainer = hyper.trainer(spec)
    before = {k: a.copy() for k, a in trainer.state.networks().items()}
    part = replayed(env, N=4)
    rng, shape = np.random.default_rng(0), (2, 4, 4, side, side)
    part.observation["obs"] = rng.integers(0, 255, shape, np.uint8)
    trainer.take(part)
    assert math.isfinite(trainer.finish()["loss"])
    after = trainer.state.networks()
    assert any("critics.body" in k for k in after)
    assert all(not np.array_equal(before[k], after[k]) for k in before if k.endswith("weight"))
    policy = hyper.policy(spec)
    policy.load(trainer.params(1))
    assert policy.act({"obs": part.observation["obs"][0]}, {}, None).action.shape == (4, 2)
