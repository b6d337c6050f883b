"""QMIX and VDN: mixers, masks, targets by formula, memories, and the game that tells them apart."""

import dataclasses

import numpy as np
import pytest
import torch

from tianji.algorithm import Network, algorithm_class
from tianji.algorithms.qmix import QMIX, VDN, Monotonic, Sum
from tianji.build import build
from tianji.config import ScaleConfig
from tianji.driver import Serial
from tianji.env import Continuous, Discrete, EnvSpec, TimeStep
from tianji.envs.skirmish import Skirmish
from tianji.envs.toy import Identity
from tianji.errors import Refusal
from tianji.recurrent import NumpyRecurrent
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import EPISODE, Params, Rollout, leaf

SMALL = {"warmup": 488, "new_steps": 64, "batch_size": 4, "capacity": 2_000}


def battle(n):
    return Skirmish(n, "3m")


class TwoStep:
    """The game of Rashid et al. 2018, 5.1: the first agent chooses a matrix, in which all get 7, or
    0, 1, 1, 8 by what both choose then. No mask, no state: agents see where they are."""

    payoff = np.array([[[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)

    def __init__(self, num_envs):
        layout = {"obs": leaf((2, 3), np.float32)}
        self.spec = EnvSpec("two-step", layout, Discrete(2), 2, agents=("one", "other"))
        self.num_envs = num_envs

    def reset(self, seed):
        self._at = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observe()

    def step(self, action):
        valid, first = ~self._ended, self._at == 0
        paid = self.payoff[np.maximum(self._at - 1, 0), action[:, 0], action[:, 1]]
        reward = np.where(valid & ~first, paid, 0).astype(np.float32)
        terminated = valid & ~first
        self._at = np.where(valid, np.where(first, 1 + action[:, 0], self._at), 0)
        self._ended = terminated
        return TimeStep(self._observe(), reward, terminated, np.zeros_like(valid), valid)

    def render(self):
        raise Refusal("no picture")

    def close(self):
        pass

    def _observe(self):
        obs = np.zeros((self.num_envs, 2, 3), np.float32)
        obs[np.arange(self.num_envs), :, self._at] = 1
        return {"obs": obs}


def built_for(algorithm, make, hidden=(8,), scale=None, seed=0):
    config = config_for(algorithm, seed=seed, **({} if scale is None else {"scale": scale}))
    return build(dataclasses.replace(config, network=Network(hidden=hidden)), make)


@pytest.mark.parametrize("algorithm", [QMIX(**SMALL), VDN(**SMALL, td_lambda=0.5, double=False)])
def test_the_algorithm_keeps_its_promises(algorithm):
    check_algorithm(algorithm, battle, updates=2)


def test_both_are_known_by_name():
    assert algorithm_class("qmix") is QMIX
    assert algorithm_class("vdn") is VDN


def mixer(agents=4, state=6):
    torch.manual_seed(0)
    return Monotonic(agents, state, 8, 16)


def test_the_teams_value_falls_with_no_agents_value():
    module = mixer()
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(0, 5, (500, 4)).astype(np.float32)).requires_grad_()
    state = torch.from_numpy(rng.normal(0, 3, (500, 6)).astype(np.float32))
    module(values, state).sum().backward()
    assert (values.grad >= 0).all()
    assert (values.grad > 0).float().mean() > 0.9
    spread = values.grad.std(dim=0)
    assert (spread > 0.01).all()  # how much each counts depends on the state


def test_the_mixer_is_the_papers_formula():
    module, rng = mixer(2, 3), np.random.default_rng(1)
    values, state = rng.normal(size=(5, 2)), rng.normal(size=(5, 3))
    p = {k: v.detach().numpy().astype(np.float64) for k, v in module.named_parameters()}

    def two(name, s):
        hidden = np.maximum(p[f"{name}.0.weight"] @ s + p[f"{name}.0.bias"], 0)
        return p[f"{name}.2.weight"] @ hidden + p[f"{name}.2.bias"]

    for q, s in zip(values, state, strict=True):
        weight = np.abs(two("first", s)).reshape(2, 8)
        hidden = q @ weight + p["first_bias.weight"] @ s + p["first_bias.bias"]
        hidden = np.where(hidden > 0, hidden, np.exp(np.minimum(hidden, 0)) - 1)
        expected = hidden @ np.abs(two("second", s)) + two("second_bias", s)[0]
        q, s = torch.tensor(q, dtype=torch.float32), torch.tensor(s, dtype=torch.float32)
        assert module(q, s).item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_vdn_is_the_sum():
    values = torch.randn(7, 5, 3)
    torch.testing.assert_close(Sum()(values, torch.randn(7, 5, 9)), values.sum(-1))


def trainer_and_part(algorithm, seed=0):
    """A trainer whose target differs from its network, and two episodes of 3 and 2 rows by hand."""
    spec = built_for(algorithm, battle).spec
    trainer = algorithm.trainer(spec)
    rng = np.random.default_rng(seed)
    arrays = {k: v + rng.normal(0, 0.1, v.shape).astype(np.float32)
              for k, v in trainer.state.networks().items()}  # fmt: skip
    trainer.state.load_networks(arrays)
    L, N, A, n = 3, 2, 3, 9
    mask = rng.random((L + 1, N, A, n)) < 0.5
    mask[..., 1] = True
    alive = rng.random((L + 1, N, A)) < 0.8
    valid = np.array([[1, 1], [1, 1], [1, 0]], bool)
    part = Rollout(
        observation={
            "obs": rng.normal(size=(L + 1, N, A, 30)).astype(np.float32),
            "state": rng.normal(size=(L + 1, N, 48)).astype(np.float32),
            "mask": mask,
            "alive": alive,
        },
        action=np.where(mask[:L], rng.random((L, N, A, n)), -1).argmax(-1),
        reward=np.where(valid, rng.normal(size=(L, N)), 0).astype(np.float32),
        terminated=np.array([[0, 0], [0, 0], [1, 0]], bool),  # the second was cut
        valid=valid,
        extras={}, once={}, head=np.zeros(8, np.int64), episode_table=np.empty(0, EPISODE),
        versions=np.zeros(2, np.int64),
    )  # fmt: skip
    return trainer, part


def by_formula(algorithm, trainer, part):
    """The loss written out, row by row, with the numpy network."""
    arrays = trainer.state.networks()
    values = {}
    for prefix in ("q", "target.q"):
        network = NumpyRecurrent(prefix)
        network.load(arrays)
        memory, last, rows = np.zeros((6, 8), np.float32), np.zeros((6, 9), np.float32), []
        for t in range(4):
            obs = part.observation["obs"][t].reshape(6, 30)
            who = np.tile(np.eye(3, dtype=np.float32), (2, 1))
            answer, memory = network(np.concatenate([obs, last, who], axis=1), memory)
            rows.append(answer.reshape(2, 3, 9))
            if t < 3:
                last = np.eye(9, dtype=np.float32)[part.action[t].reshape(6)]
        values[prefix] = rows

    def mixed(networks, q, t, i):
        q = torch.tensor(np.where(part.observation["alive"][t, i], q, 0.0), dtype=torch.float32)
        state = torch.from_numpy(part.observation["state"][t, i])
        with torch.no_grad():
            return float(networks["mixer"](q, state))

    def following(t, i):
        legal = part.observation["mask"][t, i]
        chooses = "q" if algorithm.double else "target.q"
        best = np.where(legal, values[chooses][t][i], -np.inf).argmax(-1)
        return mixed(trainer._target, values["target.q"][t][i][range(3), best], t, i)

    errors = []
    for i, length in enumerate((3, 2)):
        after = None
        for t in reversed(range(length)):
            value = following(t + 1, i)
            if after is None:
                after = value
            lam, gamma = algorithm.td_lambda, algorithm.gamma
            follows = 0.0 if part.terminated[t, i] else (1 - lam) * value + lam * after
            target = part.reward[t, i] + gamma * follows
            taken = values["q"][t][i][range(3), part.action[t, i]]
            errors.append(mixed(trainer._online, taken, t, i) - target)
            after = target
    return np.mean(np.square(errors))


@pytest.mark.parametrize("kind", [QMIX, VDN])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.6])
def test_the_loss_is_the_formula(kind, double, lam):
    algorithm = kind(**SMALL, double=double, td_lambda=lam, gamma=0.9)
    trainer, part = trainer_and_part(algorithm)
    loss, _ = trainer._loss(part)
    assert loss.item() == pytest.approx(by_formula(algorithm, trainer, part), rel=1e-4)


@pytest.mark.parametrize("kind", [QMIX, VDN])
def test_padding_changes_nothing(kind):
    trainer, part = trainer_and_part(kind(**SMALL, td_lambda=0.6))
    before = trainer._loss(part)[0].item()
    part.action[2, 1] = 5
    part.observation["obs"][3, 1] = 100.0
    part.observation["state"][3, 1] = -100.0
    part.observation["mask"][3, 1] = True
    assert trainer._loss(part)[0].item() == before
    part.observation["obs"][2, 1] = 100.0  # what follows the last row counts
    assert trainer._loss(part)[0].item() != before


@pytest.mark.parametrize("double", [True, False])
def test_what_is_illegal_is_never_the_best_that_follows(double):
    trainer, part = trainer_and_part(QMIX(**SMALL, double=double))
    part.action[part.action == 7] = 1
    part.observation["mask"][..., 7] = False
    before = trainer._loss(part)[0].item()
    arrays = {k: v.copy() for k, v in trainer.state.networks().items()}
    for name in ("q.head.bias", "target.q.head.bias"):
        arrays[name][7] = 1e6
    trainer.state.load_networks(arrays)
    assert trainer._loss(part)[0].item() == before


def test_the_dead_are_worth_nothing():
    trainer, part = trainer_and_part(VDN(**SMALL))
    part.observation["alive"][:, :, 2] = False
    before = trainer._loss(part)[0].item()
    part.observation["obs"][:, :, 2] = 50.0
    assert trainer._loss(part)[0].item() == before


@pytest.mark.parametrize("kind", [QMIX, VDN])
def test_who_can_do_nothing_at_a_cut_adds_nothing(kind):
    trainer, part = trainer_and_part(kind(**SMALL, td_lambda=0.0))
    part.observation["alive"][:] = True
    part.observation["mask"][2, 1] = False
    assert np.isfinite(trainer._loss(part)[0].item())


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_states_may_be_any_numbers(dtype):
    trainer, part = trainer_and_part(QMIX(**SMALL))
    part.observation["state"] = part.observation["state"].astype(dtype)
    assert np.isfinite(trainer._loss(part)[0].item())


def test_own_rewards_are_meant_for_the_team():
    trainer, part = trainer_and_part(VDN(**SMALL))
    before = trainer._loss(part)[0].item()
    part.reward = part.reward[..., None] + np.array([-1, 0, 1], np.float32)
    assert trainer._loss(part)[0].item() == pytest.approx(before, rel=1e-5)


def policy_of(algorithm, make=battle):
    spec = built_for(algorithm, make).spec
    policy, trainer = algorithm.policy(spec), algorithm.trainer(spec)
    params = Params(algorithm.describe(spec).params)
    np.copyto(params.flat, trainer.params(0).flat)
    return policy, params, trainer


def test_only_legal_actions_are_chosen_and_all_of_them():
    policy, params, _ = policy_of(QMIX(**SMALL))
    policy.load(params)  # epsilon is 1
    rng = np.random.default_rng(0)
    seen = battle(400).reset(0)
    seen["mask"] = rng.random(seen["mask"].shape) < 0.4
    seen["mask"][:, :, 3] = True
    decision = policy.act(seen, policy.initial(400), rng)
    took = np.take_along_axis(seen["mask"], decision.action[..., None], axis=2)
    assert took.all()
    assert set(decision.action.ravel().tolist()) == set(range(9))
    greedy = policy.act(seen, policy.initial(400), None)
    assert np.take_along_axis(seen["mask"], greedy.action[..., None], axis=2).all()
    seen["mask"][:] = False
    seen["mask"][..., 0] = True
    assert not policy.act(seen, policy.initial(400), rng).action.any()


def test_random_actions_are_uniform_among_the_legal_ones_by_epsilon():
    policy, params, _ = policy_of(QMIX(**SMALL))
    params["epsilon"][...] = 0.5
    policy.load(params)
    seen = {k: np.repeat(v, 4000, axis=0) for k, v in battle(1).reset(0).items()}
    seen["mask"][:] = False
    seen["mask"][..., [1, 2, 5, 8]] = True
    chosen = policy.act(seen, policy.initial(4000), np.random.default_rng(0)).action[:, 0]
    greedy = policy.act(seen, policy.initial(4000), None).action[0, 0]
    for action in (1, 2, 5, 8):
        expected = 0.125 + 0.5 * (action == greedy)
        assert np.mean(chosen == action) == pytest.approx(expected, abs=0.03)


def test_the_last_action_is_remembered_and_forgotten_with_the_memory():
    policy, params, _ = policy_of(QMIX(**SMALL))
    policy.load(params)
    seen, rng = battle(2).reset(0), np.random.default_rng(0)
    first = policy.act(seen, policy.initial(2), rng)
    np.testing.assert_array_equal(first.state["last"], first.action)
    other = {"memory": first.state["memory"], "last": policy.initial(2)["last"]}
    with_it, without = policy.act(seen, first.state, None), policy.act(seen, other, None)
    assert not np.array_equal(with_it.state["memory"], without.state["memory"])


def test_agents_know_who_they_are():
    policy, params, _ = policy_of(QMIX(**SMALL))
    policy.load(params)
    seen = battle(1).reset(0)
    seen["obs"][:] = seen["obs"][:, :1]
    memory = policy.act(seen, policy.initial(1), None).state["memory"]
    assert not np.array_equal(memory[0, 0], memory[0, 1])


def test_the_learner_sees_what_the_actor_saw_over_rollouts_and_episodes():
    """Greedy actions of version 0, as they were recorded, are those that the trainer's network
    finds best over the whole episodes: same inputs, same memory, same restarts."""
    algorithm = QMIX(**SMALL, epsilon_start=0.0, epsilon_end=0.0)
    built = built_for(algorithm, battle)
    parts = []
    inner = built.learner._trainer
    take = inner.take
    inner.take = lambda part: (parts.append(part), take(part))[1]
    built.learner.begin()
    run_updates(built, Serial(built.roles), 1)
    (part,) = parts
    fresh = algorithm.trainer(built.spec)
    last = np.concatenate([np.full_like(part.action[:1], -1), part.action])
    x = torch.from_numpy(fresh._inputs.join(part.observation["obs"], last))
    with torch.no_grad():
        values = fresh._values(fresh._online, x).numpy()
    best = np.where(part.observation["mask"], values, -np.inf).argmax(-1)[:-1]
    assert part.valid.sum() > 40
    assert part.valid.shape[0] > built.spec.T
    assert (best == part.action)[part.valid].mean() > 0.999
    built.close()


def greedy_return(algorithm, built):
    policy = algorithm.policy(built.spec)
    policy.load(built.learner._trainer.params(0))
    env = TwoStep(1)
    seen, state, total = env.reset(0), policy.initial(1), 0.0
    for _ in range(2):
        action, state, *_ = policy.act(seen, state, None)
        step = env.step(action)
        seen, total = step.observation, total + float(step.reward[0])
    return total


@pytest.mark.parametrize(("kind", "answer"), [(QMIX, 8.0), (VDN, 7.0)])
def test_qmix_finds_the_best_of_the_two_step_game_and_vdn_cannot(kind, answer):
    algorithm = kind(
        gamma=1.0, learning_rate=5e-3, warmup=256, new_steps=16, batch_size=64, capacity=4_000,
        epsilon_end=1.0, target_every=20,
    )  # fmt: skip
    scale = ScaleConfig(actors=1, envs_per_actor=16, rollout_length=3)
    built = built_for(algorithm, TwoStep, hidden=(16,), scale=scale)
    built.learner.begin()
    run_updates(built, Serial(built.roles), 200)
    assert greedy_return(algorithm, built) == answer
    built.close()


def refused(algorithm, make, words, **changes):
    spec = dataclasses.replace(built_for(QMIX(**SMALL), battle).spec, **changes)
    if make is not None:
        spec = dataclasses.replace(spec, env=make)
    with pytest.raises(Refusal, match=words):
        algorithm.check(spec)


def test_what_cannot_work_is_refused_with_what_can():
    one = Identity(1).spec
    team = TwoStep(1).spec
    replace = dataclasses.replace
    refused(QMIX(**SMALL), one, 'qmix divides.*"dqn"')
    refused(VDN(**SMALL), replace(team, action=Continuous((-1.0,), (1.0,), (1,))), "vdn.*rank")
    refused(QMIX(**SMALL), replace(team, max_episode_steps=None), "how long they become")
    pictures = replace(team, observation={"obs": leaf((2, 84, 84), np.uint8)})
    refused(QMIX(**SMALL), pictures, "no convolutions")
    refused(QMIX(**SMALL), None, "send_when", sends_early=True)
    refused(QMIX(**SMALL), None, r"hidden = \[64, 32\]", network=Network(hidden=(64, 32)))
    refused(QMIX(**SMALL), None, r"hidden = \[\]", network=Network(hidden=()))
    half = Network(hidden=(64,), precision="bfloat16")
    refused(QMIX(**SMALL), None, "qmix has none", network=half)
    refused(QMIX(**SMALL | {"warmup": 487}), None, "488 or more")
    refused(QMIX(**SMALL | {"capacity": 1000}), None, "1040 or more")
    refused(QMIX(**SMALL | {"batch_size": 3}), None, "Set batch_size to 4", learners=2)
