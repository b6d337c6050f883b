"""Algorithms: the public checker over each, and known answers learnt."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tianji.algorithm import Network, Traits
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.build import build
from tianji.config import RelaxConfig, ScaleConfig
from tianji.driver import Serial, Shuffled
from tianji.env import Discrete, EnvSpec, TimeStep, make_env
from tianji.errors import Refusal
from tianji.learner import NonFinite
from tianji.returns import vtrace
from tianji.spec import make_spec
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import EPISODE, Rollout, Row, leaf, rollout_layout

SMALL_DQN = DQN(batch_size=16, warmup=64, capacity=256, new_steps=16)
SMALL_PPO = PPO(epochs=2, minibatches=2)


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


@pytest.mark.parametrize(
    "algorithm",
    [
        SMALL_PPO,
        replace(SMALL_PPO, normalise_observation=True, normalise_reward=True, value_clip=0.2),
        replace(SMALL_PPO, schedule="linear", entropy_coef=0.01, epochs=1),
        SMALL_DQN,
        replace(SMALL_DQN, n_step=3, dueling=True, double=False, loss="mse", target_every=2),
        replace(SMALL_DQN, new_steps=4),
    ],
    ids=lambda a: f"{a.name}",
)
def test_each_algorithm_keeps_its_promises(algorithm):
    check_algorithm(algorithm, toy("Chain"))


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [("toy/Identity", {"continuous": True}), ("CartPole-v1", {}), ("Pendulum-v1", {})],
)
def test_ppo_keeps_its_promises_for_other_actions_and_envs(id, kwargs):
    check_algorithm(SMALL_PPO, lambda num_envs: make_env(id, num_envs, kwargs), updates=2)


class Forgetful(PPO):
    """Draws its minibatches from the clock."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        trainer._rng = np.random.default_rng()
        return trainer


class Unsaved(PPO):
    """Does not save its networks."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        trainer.state.load_state = lambda state: None
        return trainer


class Deaf(PPO):
    """Ignores the seed."""

    def policy(self, spec, device="cpu"):
        policy = super().policy(replace(spec, seed=0))
        act = policy.act
        policy.act = lambda o, s, rng: act(o, s, None if rng is None else np.random.default_rng(0))
        return policy

    def trainer(self, spec, device="cpu"):
        return super().trainer(replace(spec, seed=0))


class Momentless(PPO):
    """Saves its networks but not the optimizer's moments."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        load = trainer.state.load_state

        def forgets(state):
            load(state)
            trainer._optimizer._m.zero_()

        trainer.state.load_state = forgets
        return trainer


class Fateless(PPO):
    """Forgets to say what becomes of its value network."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        fates = {k: v for k, v in trainer.state.fates().items() if not k.startswith("value.")}
        trainer.state.fates = lambda: fates
        return trainer


class Unjoined(PPO):
    """Does not take over what joining the groups made of its normaliser."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        load = trainer.state.load_networks
        trainer.state.load_networks = lambda arrays: load(
            arrays | {"obs.mean": trainer.state.networks()["obs.mean"]}
        )
        return trainer


@pytest.mark.parametrize("broken", [Forgetful, Unsaved, Deaf, Momentless, Fateless, Unjoined])
def test_a_broken_algorithm_is_found(broken):
    with pytest.raises(AssertionError):
        check_algorithm(broken(epochs=2, minibatches=2), toy("Chain"))


def learn(algorithm, make, updates, network=Network(hidden=(32,)), scale=None, seed=0):  # noqa: B008
    scale = scale or ScaleConfig(envs_per_actor=16, rollout_length=16)
    config = replace(config_for(algorithm, seed, scale), network=network)
    built = build(config, make)
    built.learner.begin()
    returns = []
    driver = Serial(built.roles)
    while built.learner.version < updates:
        driver.step()
        report = built.learner.report
        if report is not None and len(report.episodes):
            returns += report.episodes["return"].tolist()
            built.learner.report = None
    built.close()
    return built, returns


@pytest.mark.parametrize("continuous", [False, True])
def test_ppo_learns_the_identity(continuous):
    make = toy("Identity", n=3, length=8, continuous=continuous)
    algorithm = PPO(learning_rate=5e-3, gamma=0.5, epochs=6)
    _, returns = learn(algorithm, make, 80)
    assert np.mean(returns[-100:]) > (-0.2 if continuous else 7.8)


def test_dqn_learns_the_identity():
    algorithm = DQN(
        learning_rate=3e-3, gamma=0.5, new_steps=16, warmup=512, epsilon_steps=2000,
        epsilon_end=0.0, capacity=5000, batch_size=64,
    )  # fmt: skip
    _, returns = learn(algorithm, toy("Identity", n=3, length=8), 600)
    assert np.mean(returns[-50:]) > 7.8


@pytest.mark.parametrize("n_step", [1, 3])
def test_dqn_learns_the_known_values_of_the_chain(n_step):
    algorithm = DQN(
        learning_rate=3e-3, gamma=0.8, new_steps=8, warmup=512, epsilon_steps=1, n_step=n_step,
        epsilon_start=1.0, epsilon_end=1.0 if n_step == 1 else 0.1, capacity=5000, batch_size=128,
    )  # fmt: skip
    make = toy("Chain", n=5)
    built, _ = learn(algorithm, make, 1500, Network(hidden=(32,), activation="relu"))
    env = make(1)
    optimal = env.optimal_values(0.8)[:-1]
    trainer = built.learner._trainer
    with torch.no_grad():
        values = trainer._values(trainer._online, torch.eye(5)[:4]).amax(-1)
    np.testing.assert_allclose(values.numpy(), optimal[:4], atol=0.08)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_truncated_episode_is_valued_as_if_it_went_on(algorithm):
    """Rewards of 1 for ever: the value is 1 / (1 - gamma), whatever the length of episodes. Taking
    truncation for termination would give about half of it."""
    make, gamma = toy("Target", every=4), 0.8
    scale = ScaleConfig(envs_per_actor=8, rollout_length=16)
    if algorithm == "ppo":
        hyper = PPO(learning_rate=5e-3, gamma=gamma, epochs=8, max_grad_norm=0)
        built, _ = learn(hyper, make, 80, scale=scale)
        network = built.learner._trainer._value
    else:
        hyper = DQN(learning_rate=3e-3, gamma=gamma, warmup=256, new_steps=8, tau=0.05)
        built, _ = learn(hyper, make, 800, scale=scale)
        network = built.learner._trainer._online
    observation = torch.from_numpy(make(1).reset(0)["obs"])
    with torch.no_grad():
        value = float(network(observation).amax())
    assert value == pytest.approx(1 / (1 - gamma), rel=0.1)


def test_dqn_refuses_continuous_actions_with_the_remedy():
    env = make_env("Pendulum-v1", 1, {})
    with pytest.raises(Refusal, match=r'algorithm.name = "ppo"'):
        make_spec(config_for(DQN()), env.spec)
    env.close()


@pytest.mark.parametrize(
    ("algorithm", "word"),
    [
        (PPO(minibatches=1000), "minibatches"),
        (DQN(warmup=10), "warmup"),
        (DQN(warmup=1000, capacity=500), "capacity"),
    ],
)
def test_sizes_that_cannot_work_are_refused(algorithm, word):
    with pytest.raises(Refusal, match=word):
        make_spec(config_for(algorithm), make_env("toy/Chain", 4, {}).spec)


def test_a_linear_schedule_without_an_end_is_refused():
    config = config_for(PPO(schedule="linear"))
    config = replace(config, stop=replace(config.stop, updates=None, seconds=1.0))
    with pytest.raises(Refusal, match=r"stop\.steps"):
        make_spec(config, make_env("toy/Chain", 4, {}).spec)


def test_the_share_of_random_actions_falls_with_the_version():
    dqn = DQN(epsilon_start=1.0, epsilon_end=0.1, epsilon_steps=100, new_steps=10)
    assert [dqn.epsilon(v) for v in (0, 5, 10, 50)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    spec = make_spec(config_for(dqn), make_env("toy/Chain", 4, {}).spec)
    assert dqn.trainer(spec).params(5)["epsilon"] == pytest.approx(0.55)


def test_the_dueling_network_adds_value_and_advantages():
    spec = make_spec(config_for(DQN(dueling=True)), make_env("toy/Chain", 4, {}).spec)
    trainer = DQN(dueling=True).trainer(spec)
    trainer._online = lambda x: torch.tensor([[1.0, 3.0, 10.0]])
    assert trainer._values(trainer._online, torch.zeros(1)).tolist() == [[9.0, 11.0]]


def part_of(reward, observation=0.0):
    """A rollout of two envs and eight steps that PPO can take."""
    extras = {"log_prob": leaf((), np.float32)}
    row = Row({"obs": leaf((5,), np.float32)}, leaf((), np.int64), extras, {})
    layout = rollout_layout(row, 8, 4)
    part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
    part.valid[:], part.reward[:], part.extras["log_prob"][:] = True, reward, np.log(0.5)
    part.observation["obs"][:] = observation
    assert part.episode_table.dtype == EPISODE
    return part


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("algorithm", [SMALL_PPO, SMALL_DQN], ids=["ppo", "dqn"])
def test_an_update_that_is_not_finite_is_never_published(bad, algorithm):
    built = build(config_for(algorithm), toy("Chain"))
    built.learner.begin()
    run_updates(built, Serial(built.roles), 1)
    learner = built.learner
    learner._trainer.finish = lambda: {"loss": bad}
    published = built.transport._newest["snapshots"]._version
    with pytest.raises(NonFinite, match="not published") as caught:
        run_updates(built, Serial(built.roles), 1)
    assert len(caught.value.batch) > 0
    assert built.transport._newest["snapshots"]._version == published
    assert learner.version == published


def test_rewards_that_overflow_end_in_a_failure_that_says_so():
    spec = make_spec(config_for(SMALL_PPO), make_env("toy/Chain", 4, {}).spec)
    trainer = SMALL_PPO.trainer(spec)
    trainer.take(part_of(1e30))
    metrics = trainer.finish()
    assert not np.isfinite(metrics["loss"]) or not trainer.state.finite()


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize("algorithm", [SMALL_PPO, SMALL_DQN], ids=["ppo", "dqn"])
def test_staleness_stays_within_the_lead_in_any_order(algorithm, order):
    scale = ScaleConfig(actors=3, envs_per_actor=2, rollout_length=4, relax="one_step")
    built = build(replace(config_for(algorithm, scale=scale)), toy("Chain"))
    built.learner.begin()
    driver = Shuffled(built.roles, order)
    seen = set()
    while built.learner.version < 30:
        driver.step()
        if built.learner.report is not None:
            seen |= set(built.learner.report.staleness.tolist())
            built.learner.report = None
    if algorithm.name == "ppo":
        assert seen == {0, 1}
    else:
        assert max(seen) > 1, "replay consumes what older versions made, and says so"


def test_the_policy_of_a_rollout_is_the_one_its_update_asks_for():
    built = build(config_for(SMALL_PPO), toy("Chain"))
    built.learner.begin()
    driver = Shuffled(built.roles, 0)
    while built.learner.version < 10:
        driver.step()
        if built.learner.report is not None:
            assert (built.learner.report.staleness == 0).all()
            assert len(built.learner.report.staleness) == 2


class Pictures:
    """Frames of one grey value, 0 or 200; the right action is to say which."""

    def __init__(self, num_envs):
        observation = {"obs": leaf((40, 40, 1), np.uint8)}
        self.spec = EnvSpec("test/Pictures", observation, Discrete(2))
        self.num_envs = num_envs

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        return self._draw()

    def _draw(self):
        self._bright = self._rng.integers(2, size=self.num_envs)
        frames = np.zeros((self.num_envs, 40, 40, 1), np.uint8)
        frames[self._bright == 1] = 200
        return {"obs": frames}

    def step(self, action):
        reward = (action == self._bright).astype(np.float32)
        no = np.zeros(self.num_envs, np.bool_)
        return TimeStep(self._draw(), reward, no, no, ~no)

    def close(self):
        pass


@pytest.mark.parametrize("algorithm", [SMALL_PPO, SMALL_DQN], ids=["ppo", "dqn"])
def test_pictures_stay_uint8_on_the_way_and_are_learnt_from(algorithm):
    check_algorithm(algorithm, Pictures, updates=1)
    built = build(config_for(algorithm), Pictures)
    assert built.transport.memory(built.assembly.lanes[0])["observation.obs"].dtype == np.uint8
    built.close()


def spec_of(algorithm, make, **fields):
    return replace(make_spec(config_for(algorithm), make(4).spec), **fields)


def random_part(trainer, seed, behind=0.0):
    """A rollout of CartPole's shapes that the trainer's own policy chose, with episodes that end
    and rows that only reset; `behind` is added to what acted, in log-probabilities."""
    rng = np.random.default_rng(seed)
    observation, T, B = {"obs": leaf((4,), np.float32)}, 12, 4
    extras = {"log_prob": leaf((), np.float32)}
    layout = rollout_layout(Row(observation, leaf((), np.int64), extras, {}), T, B)
    part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
    part.observation["obs"][:] = rng.normal(size=(T + 1, B, 4))
    part.action[:] = rng.integers(2, size=(T, B))
    part.reward[:] = rng.normal(size=(T, B))
    part.terminated[:] = rng.random((T, B)) < 0.1
    part.valid[:] = rng.random((T, B)) < 0.85
    part.terminated &= part.valid
    now = trainer._log_prob(*trainer._look(part))
    part.extras["log_prob"][:] = now + behind * rng.normal(size=(T, B))
    return part, now


def values_of(trainer, part):
    with torch.no_grad():
        rows = torch.from_numpy(part.observation["obs"]).flatten(0, 1)
        return trainer._value(rows).view(part.observation["obs"].shape[:2]).numpy()


VTRACE = PPO(lam=1.0, gamma=0.9, epochs=1, minibatches=1, normalise_advantage=False)
CARTPOLE = partial(make_env, "CartPole-v1", kwargs={})


def test_on_policy_vtrace_with_lambda_1_is_the_n_step_return():
    trainer = VTRACE.trainer(spec_of(VTRACE, CARTPOLE, correct="vtrace"))
    part, now = random_part(trainer, 0)
    value, expected = values_of(trainer, part), []
    for t, b in np.argwhere(part.valid):
        total, discount = 0.0, 1.0
        for k in range(t, len(part.reward)):
            total += discount * part.reward[k, b]
            discount *= 0.9
            if part.terminated[k, b]:
                break
            if k + 1 == len(part.reward) or not part.valid[k + 1, b]:
                total += discount * value[k + 1, b]
                break
        expected.append(total)
    trainer.take(part)
    taken = {k: v.numpy() for k, v in trainer._parts[0].items()}
    np.testing.assert_allclose(taken["target"], expected, rtol=1e-4, atol=1e-5)
    advantage = expected - value[:-1][part.valid]
    np.testing.assert_allclose(taken["advantage"], advantage, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(taken["log_prob"], now[part.valid])


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_vtrace_is_the_uncorrected_estimate_where_all_weights_are_1_and_lambda_is(lam):
    algorithm = replace(VTRACE, lam=lam, epochs=2)
    learnt = []
    for correct in ("none", "vtrace"):
        trainer = algorithm.trainer(spec_of(algorithm, CARTPOLE, correct=correct))
        trainer.take(random_part(trainer, 1)[0])
        trainer.finish()
        learnt.append(trainer.state.networks())
    same = all(np.allclose(learnt[0][k], learnt[1][k], atol=1e-6) for k in learnt[0])
    assert same == (lam == 1.0)


def test_stale_rollouts_are_corrected_and_the_ratio_is_anchored_at_the_update():
    told = {}
    for correct in ("none", "vtrace"):
        trainer = VTRACE.trainer(spec_of(VTRACE, CARTPOLE, correct=correct))
        part, now = random_part(trainer, 2, behind=1.0)
        value = values_of(trainer, part)
        trainer.take(part)
        taken = {k: v.numpy() for k, v in trainer._parts[0].items()}
        if correct == "vtrace":
            target, advantage = vtrace(
                now - part.extras["log_prob"], part.reward, value, part.terminated, part.valid, 0.9
            )
            np.testing.assert_allclose(taken["target"], target[part.valid], atol=1e-5)
            np.testing.assert_allclose(taken["advantage"], advantage[part.valid], atol=1e-5)
        told[correct] = trainer.finish()
    assert told["none"]["approx_kl"] > 0.1
    assert abs(told["vtrace"]["approx_kl"]) < 1e-6
    assert told["vtrace"]["clip_fraction"] == 0


def test_what_the_policy_would_never_do_weighs_nothing_after_normalising_either():
    """Rewards are all positive, so the mean advantage is far from 0."""
    algorithm = replace(VTRACE, normalise_advantage=True)
    trainer, seen = algorithm.trainer(spec_of(algorithm, CARTPOLE, correct="vtrace")), []
    part, _ = random_part(trainer, 3)
    part.reward[:] = 5.0
    part.valid[:] = True
    part.extras["log_prob"][3] += 60.0
    trainer._loss, loss = lambda batch, tell: seen.append(batch) or loss(batch, tell), trainer._loss
    trainer.take(part)
    trainer.finish()
    advantage, weight = seen[0]["advantage"], seen[0]["weight"]
    assert int((weight < 1e-20).sum()) == 4
    assert advantage[weight < 1e-20].abs().max() < 1e-18
    rest = advantage[weight > 0.5]
    assert 0.8 < rest.std() < 1.2


def test_ppo_learns_the_identity_from_stale_rollouts_with_vtrace():
    scale = ScaleConfig("local", "impala", actors=3, envs_per_actor=8, rollout_length=16)
    algorithm = replace(SMALL_PPO, epochs=1, learning_rate=2e-2, gamma=0.0)
    seldom = RelaxConfig(publish=5)
    built = build(config_for(algorithm, scale=scale, relax=seldom), toy("Identity"))
    assert built.spec.correct == "vtrace"
    built.learner.begin()
    driver, stale, returns = Serial(built.roles), [], []
    for _ in range(100):
        run_updates(built, driver, 1)
        stale.append(built.learner.report.staleness.max())
        returns += built.learner.report.episodes["return"].tolist()
    assert max(stale) > 3
    assert np.mean(returns[-50:]) > 15, "of 16"
    built.close()


class Plain(PPO):
    """Does not know how to correct."""

    traits = Traits(on_policy=True)


def test_an_algorithm_that_cannot_correct_is_refused():
    for algorithm in (Plain(), SMALL_DQN):
        with pytest.raises(Refusal, match=r'Set relax.correct = "none"'):
            build(config_for(algorithm, relax=RelaxConfig(correct="vtrace")), toy("Chain"))
    with pytest.raises(Refusal, match=r'Set relax.explore = "alike"'):
        build(config_for(SMALL_PPO, relax=RelaxConfig(explore="ladder")), toy("Chain"))


@pytest.mark.parametrize("actors", [2, 5])
def test_actors_on_the_ladder_have_their_own_constant_share_of_random_actions(actors):
    scale = ScaleConfig("local", "apex", actors=actors, envs_per_actor=4, rollout_length=4)
    algorithm = replace(SMALL_DQN, warmup=128)
    built = build(config_for(algorithm, scale=scale), toy("Chain"))
    built.learner.begin()
    run_updates(built, Shuffled(built.roles, 0), 300)
    shares = [actor._policy._epsilon for actor in built.actors]
    assert min(actor.version for actor in built.actors) > 0
    assert shares == [0.4 ** (1 + 7 * i / (actors - 1)) for i in range(actors)]
    assert algorithm.policy(built.spec)._rung is None, "the evaluator's policy is on no rung"
    assert built.learner.report.metrics["epsilon"] == pytest.approx(np.mean(shares))
    built.close()


def test_the_first_rung_acts_at_random_in_two_of_five_steps():
    spec = spec_of(SMALL_DQN, toy("Chain"), explore="ladder", actors=4)
    trainer, share = SMALL_DQN.trainer(spec), []
    for actor in (0, 3):
        policy = SMALL_DQN.policy(replace(spec, actor=actor))
        policy.load(trainer.params(0))
        observation = make_env("toy/Chain", 2000, {}).reset(0)
        drawn = policy.act(observation, {}, np.random.default_rng(0)).action
        greedy = policy.act(observation, {}, None).action
        share.append(np.mean(drawn != greedy) * 2)  # half of the random ones are the best one
    assert share[0] == pytest.approx(0.4, abs=0.05)
    assert share[1] < 0.01
