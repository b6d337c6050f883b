"""What on-policy algorithms share: masks, agents, passes, refusals; and each one's known answer."""

import copy
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tianji.algorithm import Network
from tianji.algorithms.a2c import A2C
from tianji.algorithms.appo import APPO
from tianji.algorithms.dqn import DQN
from tianji.algorithms.impala import IMPALA
from tianji.algorithms.mappo import MAPPO
from tianji.algorithms.ppo import PPO
from tianji.build import build
from tianji.columns import CACHED, CHUNK, chunked
from tianji.config import RelaxConfig, ReuseConfig, ScaleConfig, load_config
from tianji.distributions import distribution
from tianji.driver import Serial
from tianji.env import Continuous, Discrete, EnvSpec, MultiDiscrete, TimeStep, make_env
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for
from tianji.types import SEQ, Rollout, leaf, rollout_layout

GRU = Network(hidden=(8,), recurrent="gru", memory=8)
FAMILY = {
    "ppo": PPO(epochs=2, minibatches=2),
    "a2c": A2C(),
    "impala": IMPALA(),
    "appo": APPO(minibatches=2, target_every=2),
    "mappo": MAPPO(epochs=2),
}
family = pytest.mark.parametrize("name", FAMILY)


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


class Masked:
    """Of three actions, the one that is legal and not 0 is right; 0 is always legal. Sometimes all
    are."""

    def __init__(self, num_envs):
        observation = {"obs": leaf((1,), np.float32), "mask": leaf((3,), np.bool_)}
        self.spec = EnvSpec("test/Masked", observation, Discrete(3))
        self.num_envs = num_envs

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        return self._draw()

    def _draw(self):
        self._mask = np.ones((self.num_envs, 3), np.bool_)
        self._mask[np.arange(self.num_envs), self._rng.integers(1, 4, self.num_envs) % 3] = False
        self._mask[:, 0] = True
        return {"obs": np.ones((self.num_envs, 1), np.float32), "mask": self._mask}

    def step(self, action):
        assert self._mask[np.arange(self.num_envs), action].all(), "not legal"
        reward = (action != 0).astype(np.float32)
        no = np.zeros(self.num_envs, np.bool_)
        return TimeStep(self._draw(), reward, no, no, ~no)

    def close(self):
        pass


@family
@pytest.mark.parametrize("network", [Network(hidden=(8,)), GRU], ids=["mlp", "gru"])
@pytest.mark.parametrize(
    "make", [toy("Chain"), Masked, toy("Pair")], ids=["chain", "masked", "agents"]
)
def test_every_one_keeps_its_promises(name, network, make):
    check_algorithm(FAMILY[name], make, updates=3, network=network)


@pytest.mark.parametrize(
    "algorithm",
    [
        replace(FAMILY["ppo"], normalise_observation=True, normalise_reward=True),
        replace(FAMILY["mappo"], share=False, critic="own", normalise_observation=True),
        replace(FAMILY["mappo"], share=False, normalise_observation=True, normalise_reward=True),
        replace(FAMILY["mappo"], normalise_value=False, value_clip=0.2, schedule="linear"),
    ],
    ids=["ppo", "own networks", "own networks and the state", "plain values"],
)
@pytest.mark.parametrize("network", [Network(hidden=(8,)), GRU], ids=["mlp", "gru"])
def test_agents_keep_their_promises_in_other_ways(algorithm, network):
    check_algorithm(algorithm, toy("Pair", own_rewards=True), updates=3, network=network)


@pytest.mark.parametrize("correct", ["clip", "vtrace", "tis"])
@pytest.mark.parametrize("name", ["ppo", "a2c", "mappo"])
def test_corrections_change_nothing_where_nothing_is_stale_and_lambda_is_1(name, correct):
    """At staleness 0 all weights are 1; V-trace's estimate is then that of lambda 1."""
    algorithm = replace(FAMILY[name], lam=1.0, learning_rate=1e-3)
    make, learnt = toy("Pair"), []
    for word in ("none", correct):
        built = build(config_for(algorithm, relax=RelaxConfig(correct=word)), make)
        built.learner.begin()
        driver = Serial(built.roles)
        while built.learner.version < 2:
            driver.step()
        learnt.append(built.learner.networks())
        built.close()
    for k in learnt[0]:
        np.testing.assert_allclose(learnt[1][k], learnt[0][k], atol=2e-5, err_msg=k)


def learn(algorithm, make, updates, network=Network(hidden=(32,)), scale=None, seed=0):  # noqa: B008
    """The returns of the last 100 episodes."""
    scale = scale or ScaleConfig(envs_per_actor=16, rollout_length=16)
    built = build(replace(config_for(algorithm, seed, scale), network=network), make)
    built.learner.begin()
    driver, returns = Serial(built.roles), []
    while built.learner.version < updates:
        driver.step()
        if (report := built.learner.report) is not None:
            returns += report.episodes["return"].tolist()
            built.learner.report = None
    built.close()
    return np.mean(returns[-100:])


ANSWERS = {
    "a2c": (A2C(learning_rate=2e-2, gamma=0.5, normalise_advantage=True), 150),
    "impala": (IMPALA(learning_rate=2e-2, gamma=0.5, normalise_advantage=True), 150),
    "appo": (APPO(learning_rate=1e-2, gamma=0.5, epochs=2), 100),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_learns_the_identity(name):
    algorithm, updates = ANSWERS[name]
    assert learn(algorithm, toy("Identity", n=3, length=8), updates) > 7.7, "of 8"


def test_several_choices_at_once_are_learnt():
    class Two:
        """Both choices must be 1."""

        def __init__(self, num_envs):
            observation = {"obs": leaf((1,), np.float32), "mask": leaf((5,), np.bool_)}
            self.spec = EnvSpec("test/Two", observation, MultiDiscrete((2, 3)), 4)
            self.num_envs, self._clock = num_envs, 0

        def _look(self):
            mask = np.ones((self.num_envs, 5), np.bool_)
            mask[:, 4] = False
            return {"obs": np.ones((self.num_envs, 1), np.float32), "mask": mask}

        def reset(self, seed):
            self._clock = 0
            return self._look()

        def step(self, action):
            assert (action[:, 1] < 2).all(), "not legal"
            valid = np.full(self.num_envs, self._clock < 4)
            self._clock = self._clock + 1 if self._clock < 4 else 0
            reward = (action.sum(1) == 2).astype(np.float32) * valid
            ended = np.full(self.num_envs, self._clock == 4)
            return TimeStep(self._look(), reward, ended, ended & False, valid)

        def close(self):
            pass

    assert learn(PPO(learning_rate=1e-2, gamma=0.5), Two, 25) > 3.7, "of 4"


@pytest.mark.parametrize("action", [Discrete(4), MultiDiscrete((3, 4))])
def test_what_is_not_legal_is_impossible_and_makes_nothing_nan(action):
    over, rng = distribution(action), np.random.default_rng(0)
    N, width = 4000, over.width
    output = rng.normal(size=(N, width)).astype(np.float32) * 5
    mask = rng.random((N, width)) < 0.4
    cuts = [0, *np.cumsum([action.n] if isinstance(action, Discrete) else action.nvec)]
    for begin, end in itertools.pairwise(cuts):
        mask[np.arange(N), rng.integers(begin, end, N)] = True  # one at least is
    drawn, log_prob = over.sample(output, {}, rng, mask)
    best = over.greedy(output, mask)
    for chosen in (drawn, best):
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            choice = chosen if isinstance(action, Discrete) else chosen[:, i]
            assert mask[:, begin:end][np.arange(N), choice].all()
    logits = torch.from_numpy(output).requires_grad_()
    found, entropy = over.evaluate(
        logits, {}, torch.from_numpy(drawn), True, torch.from_numpy(mask)
    )
    np.testing.assert_allclose(found.detach().numpy(), log_prob, atol=1e-5)
    expected = np.zeros(N)
    for begin, end in itertools.pairwise(cuts):
        for row in range(N):
            legal = output[row, begin:end][mask[row, begin:end]].astype(np.float64)
            p = np.exp(legal - legal.max())
            p /= p.sum()
            expected[row] -= (p * np.log(np.maximum(p, 1e-300))).sum()
    np.testing.assert_allclose(entropy.detach().numpy(), expected, atol=1e-4)
    (found.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~torch.from_numpy(mask)] == 0).all()


def test_a_row_without_a_legal_action_is_finite():
    over = distribution(Discrete(3))
    output, mask = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.bool_)
    action, log_prob = over.sample(output, {}, np.random.default_rng(0), mask)
    logits = torch.zeros(1, 3, requires_grad=True)
    found, entropy = over.evaluate(
        logits, {}, torch.from_numpy(action), True, torch.zeros(1, 3) > 1
    )
    (found.sum() + entropy.sum()).backward()
    assert np.isfinite(log_prob).all()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logits.grad).all()


def test_a_mask_that_allows_all_changes_nothing():
    for action in (Discrete(3), MultiDiscrete((2, 2))):
        over, output = distribution(action), np.random.default_rng(0).normal(size=(50, 4))
        output = output[:, : over.width].astype(np.float32)
        plain = over.sample(output, {}, np.random.default_rng(1))
        masked = over.sample(output, {}, np.random.default_rng(1), output > -99)
        np.testing.assert_array_equal(plain[0], masked[0])
        np.testing.assert_array_equal(plain[1], masked[1])


def test_masks_are_learnt_with():
    class Ending(Masked):
        """In episodes of 8 steps, for their returns."""

        def reset(self, seed):
            self._clock = 0
            return super().reset(seed)

        def step(self, action):
            step, self._clock = super().step(action), (self._clock + 1) % 9
            valid, ended = step.valid & (self._clock != 0), step.valid & (self._clock == 8)
            return step._replace(valid=valid, terminated=ended, reward=step.reward * valid)

    assert learn(PPO(learning_rate=1e-2, gamma=0.5), Ending, 15) > 7.5, "of 8"


def test_the_target_network_is_a_copy_of_every_second_version():
    algorithm = APPO(minibatches=1, target_every=2, learning_rate=1e-2)
    built = build(config_for(algorithm), toy("Chain"))
    built.learner.begin()
    driver, trainer, seen = Serial(built.roles), built.learner._trainer, []
    for version in range(1, 5):
        while built.learner.version < version:
            driver.step()
        arrays = {k: v.copy() for k, v in trainer.state.networks().items()}
        seen.append([
            np.array_equal(arrays[k], arrays[k.replace("target.", "policy.", 1)])
            for k in arrays
            if k.startswith("target.")
        ])  # fmt: skip
    assert [any(s) for s in seen] == [False, True, False, True]
    assert [all(s) for s in seen] == [False, True, False, True]
    built.close()


def test_the_target_has_a_spread_of_its_own():
    algorithm = APPO(minibatches=1, target_every=2)
    built = build(config_for(algorithm), toy("Target", continuous=True))
    trainer, spec = built.learner._trainer, built.spec
    layout = rollout_layout(built.assembly.row, spec.T, spec.envs)
    part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
    part.action[:], part.valid[:] = 0.7, True
    folded, seen = trainer._look(part)

    def of_the_target():
        return trainer._log_prob(folded, seen, network=trainer._target, extra=trainer._target_extra)

    before = of_the_target()
    with torch.no_grad():
        trainer._extra["log_std"].fill_(-1.0)
    np.testing.assert_array_equal(of_the_target(), before)
    trainer._follow()
    assert not np.array_equal(of_the_target(), before)
    assert "target_spread.log_std" in trainer.state.networks()
    built.close()


def test_returns_do_not_run_on_over_a_rollout_that_was_left_out():
    algorithm = PPO(epochs=1, minibatches=1, normalise_reward=True)
    built = build(config_for(algorithm), toy("Chain"))
    trainer, spec = built.learner._trainer, built.spec
    layout = rollout_layout(built.assembly.row, spec.T, spec.envs)
    for seq, reward, carried in ((0, 10.0, True), (1, 0.0, True), (3, 0.0, False)):
        part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
        part.reward[:], part.valid[:], part.head[SEQ] = reward, True, seq
        trainer.take(part)
        assert (trainer._running[0] > 0).all() == carried
    built.close()


def test_appo_learns_from_a_window_of_stale_batches():
    scale = ScaleConfig("local", "free", actors=2, envs_per_actor=8, rollout_length=16)
    algorithm = APPO(learning_rate=1e-2, gamma=0.0, epochs=1)
    config = config_for(algorithm, scale=scale, relax=RelaxConfig(correct="impact", publish=3))
    built = build(replace(config, reuse=ReuseConfig(window=4)), toy("Identity", length=8))
    built.learner.begin()
    driver, returns, stale = Serial(built.roles), [], 0
    while built.learner.version < 150:
        driver.step()
        if (report := built.learner.report) is not None:
            returns += report.episodes["return"].tolist()
            stale = max(stale, int(report.staleness.max()))
            built.learner.report = None
    assert stale > 4
    assert np.mean(returns[-100:]) > 7.5, "of 8"
    built.close()


class Halves:
    """Two learners in threads, which add up tensors."""

    def __init__(self):
        self.barrier, self.tensors = threading.Barrier(2, timeout=60), [None, None]

    def of(self, rank):
        return Half(self, rank)


class Half:
    size = 2

    def __init__(self, halves, rank):
        self._halves, self.rank = halves, rank

    def sum(self, tensor):
        self._halves.tensors[self.rank] = tensor.clone()
        self._halves.barrier.wait()
        tensor.copy_(sum(self._halves.tensors))
        self._halves.barrier.wait()
        return tensor

    def gather(self, array):
        table = torch.zeros(2, len(array), dtype=torch.float64)
        table[self.rank] = torch.from_numpy(array)
        return list(self.sum(table).numpy())


@pytest.mark.parametrize("network", [Network(hidden=(8,)), GRU], ids=["mlp", "gru"])
@pytest.mark.parametrize(
    "algorithm",
    [
        PPO(epochs=2, minibatches=1, normalise_observation=True, normalise_advantage=False),
        A2C(entropy_coef=0.01),
        IMPALA(),
        APPO(epochs=2, minibatches=1, target_every=1),
        MAPPO(epochs=2, value_clip=0.5),
        MAPPO(epochs=2, share=False, normalise_observation=True, normalise_value=False),
    ],
    ids=["ppo", "a2c", "impala", "appo", "mappo", "mappo, own networks"],
)
def test_two_learners_on_halves_learn_what_one_does_on_the_whole(algorithm, network):
    parts = []
    built = build(replace(config_for(algorithm), network=network), toy("Pair"))
    built.learner.begin()
    trainer, driver = built.learner._trainer, Serial(built.roles)
    take = trainer.take
    trainer.take = lambda part: parts.append(copy.deepcopy(part)) or take(part)
    while built.learner.version < 2:
        driver.step()
    whole = {k: v.copy() for k, v in trainer.state.networks().items()}
    built.close()
    halves, learnt = Halves(), [None, None]

    def learn(rank):
        spec = replace(built.spec, learners=2, learner=rank, team=halves.of(rank))
        mine = algorithm.trainer(spec)
        for update in range(2):
            mine.take(parts[2 * update + rank])
            mine.finish()
        learnt[rank] = mine.state.networks()

    threads = [threading.Thread(target=learn, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for k, array in whole.items():
        np.testing.assert_array_equal(learnt[0][k], learnt[1][k], err_msg=k)
        np.testing.assert_allclose(learnt[0][k], array, atol=2e-5, err_msg=k)


def test_what_an_algorithm_cannot_correct_names_those_that_can():
    config = config_for(PPO(), relax=RelaxConfig(correct="impact"))
    with pytest.raises(Refusal, match="one that can: appo"):
        make_spec(config, make_env("toy/Chain", 4, {}).spec)
    config = config_for(IMPALA(), relax=RelaxConfig(correct="tis"))
    with pytest.raises(Refusal, match="a2c, mappo, ppo"):
        make_spec(config, make_env("toy/Chain", 4, {}).spec)


def test_a_memory_that_would_not_be_used_is_refused():
    config = replace(config_for(DQN()), network=GRU)
    with pytest.raises(Refusal, match=r"remember nothing.*impala"):
        make_spec(config, make_env("toy/Chain", 4, {}).spec)
    config = replace(config_for(PPO()), network=GRU)
    with pytest.raises(Refusal, match="convolutions"):
        make_spec(config, make_env("toy/Frames", 4, {}).spec)


def test_minibatches_of_a_memory_are_of_whole_sequences():
    config = replace(config_for(PPO(minibatches=9)), network=GRU)
    with pytest.raises(Refusal, match="8 sequences"):
        make_spec(config, make_env("toy/Chain", 4, {}).spec)
    make_spec(replace(config, network=Network()), make_env("toy/Chain", 4, {}).spec)


def test_a_mask_of_continuous_actions_is_refused():
    observation = {"obs": leaf((2,), np.float32), "mask": leaf((2,), np.bool_)}
    env = EnvSpec("test/Odd", observation, Continuous((-1.0,), (1.0,), (1,)))
    with pytest.raises(Refusal, match="mask"):
        make_spec(config_for(PPO()), env)


def test_inherited_hyperparameters_have_their_meanings():
    tree = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "a2c"}, "stop": {"steps": 1}}
    rows = {key: meaning for key, _, _, meaning in load_config(tree).rows()}
    assert rows["algorithm.gamma"] == "discount per step"
    assert "all steps of the rollout" in rows["algorithm.lam"]
    assert all(meaning for key, meaning in rows.items() if key.startswith("algorithm."))


class Summed(torch.nn.Module):
    """Of each row, and whose it is; it notes how many rows it was given at once."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, x, agent=None):
        self.given.append(len(x))
        whose = torch.zeros(len(x)) if agent is None else agent.float()
        return torch.stack([x.flatten(1).sum(1, dtype=torch.float32), whose], 1)


def test_a_network_is_given_no_more_pictures_at_once_than_caches_bear():
    pictures = torch.randint(0, 255, (5, 200, 4, 84, 84), dtype=torch.uint8)
    agent = torch.arange(200) % 2
    for whose in (None, agent):
        seen = Summed()
        found = chunked(seen, pictures, whose)
        assert max(seen.given) * 4 * 84 * 84 <= CACHED
        assert sum(seen.given) == 1000
        assert torch.equal(found[..., 0], pictures.flatten(2).sum(2, dtype=torch.float32))
        assert torch.equal(found[..., 1], (0 * agent if whose is None else agent).expand(5, 200))
    seen = Summed()
    chunked(seen, torch.zeros(5, 2000, 3), None)
    assert seen.given == [CHUNK, CHUNK, 10_000 - 2 * CHUNK]
    huge = Summed()
    chunked(huge, torch.zeros(2, 1, 1).expand(2, 1, CACHED + 1), None)
    assert huge.given == [1, 1], "a row is never split"
    elsewhere = Summed()
    chunked(elsewhere, pictures.to("meta"), agent.to("meta"))
    assert elsewhere.given == [1000], "what a CPU's caches bear is nothing to a GPU"
