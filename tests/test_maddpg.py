"""MADDPG: gradients against finite differences, masks, agents that ended, toys with an answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tianji
from tianji.algorithm import Network
from tianji.algorithms.maddpg import MADDPG, Policy
from tianji.build import build
from tianji.config import ScaleConfig, load_config
from tianji.driver import Serial
from tianji.env import Continuous, Discrete, EnvSpec, MultiDiscrete, TimeStep, make_env
from tianji.envs.mpe import SimpleSpread, SimpleTag
from tianji.envs.toy import Identity
from tianji.errors import Refusal
from tianji.evaluator import Evaluation
from tianji.role import generator_state, load_generator_state
from tianji.store import Transitions
from tianji.testing import check_algorithm, check_env
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import Params, Rollout, leaf

SMALL = MADDPG(batch_size=32, new_steps=16, warmup=64, capacity=512, noise_steps=1000)


class Both:
    """Two agents each see a number of their own, -1 or 1. Right is to answer it: with one of three
    actions of which the last is never legal, or by a number. With a reward for the team, it is paid
    only where both are right, so that neither can learn alone.
    """

    def __init__(self, num_envs, continuous=False, own=False, length=8, dies=False):
        """`dies`: the second agent acts in every other step only, and is paid for no other."""
        observation = {
            "obs": leaf((2, 1), np.float32),
            "alive": leaf((2,), np.bool_),
        }
        action = Continuous((-1.0,), (3.0,), (1,)) if continuous else Discrete(3)
        if not continuous:
            observation["mask"] = leaf((2, 3), np.bool_)
        self.spec = EnvSpec(
            "Both", observation, action, length, agents=("first", "second"), own_rewards=own
        )
        self.num_envs = num_envs
        self._continuous, self._own, self._length, self._dies = continuous, own, length, dies

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._clock = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._draw()
        return self._observe()

    def step(self, action):
        valid, alive = ~self._ended, self._alive()
        if self._continuous:
            reward = -np.abs(action[..., 0] - self._x - 1)  # 0 or 2: right is not in the middle
        else:
            assert (action < 2).all(), "an illegal action was chosen"
            reward = (action == (self._x > 0)).astype(np.float32)
        reward = np.where(alive & valid[:, None], reward, 0.0)
        if not self._own:
            reward = reward.sum(1) if self._continuous else reward.min(1)
        self._clock = np.where(valid, self._clock + 1, 0)
        self._draw()
        terminated = valid & (self._clock >= self._length)
        self._ended = terminated
        nothing = np.zeros_like(terminated)
        return TimeStep(self._observe(), reward.astype(np.float32), terminated, nothing, valid)

    def render(self):
        raise Refusal("Both has no picture.")

    def close(self):
        pass

    def _draw(self):
        self._x = self._rng.choice([-1.0, 1.0], (self.num_envs, 2))

    def _alive(self):
        alive = np.ones((self.num_envs, 2), np.bool_)
        if self._dies:
            alive[:, 1] = self._clock % 2 == 0
        return alive

    def _observe(self):
        leaves = {"obs": self._x[..., None].astype(np.float32), "alive": self._alive()}
        if not self._continuous:
            leaves["mask"] = np.tile([True, True, False], (self.num_envs, 2, 1))
        return leaves


def built_for(hyper, make, seed=0, envs=16):
    scale = ScaleConfig(envs_per_actor=envs, rollout_length=1)
    config = replace(
        config_for(hyper, seed, scale), network=Network(hidden=(32,), activation="relu")
    )
    built = build(config, make)
    built.learner.begin()
    return built


def greedy_return(built, make, episodes=64):
    """The mean return of what the trainer has learnt, without noise."""
    trainer = built.learner._trainer
    policy = trainer._hyper.policy(built.spec)
    policy.load(trainer.params(built.learner.version))
    evaluation = Evaluation(make(episodes), policy, episodes, seed=11)
    while (result := evaluation.step()) is None:
        pass
    return float(result["return"].mean())


TOYS = {
    "discrete, team": {"continuous": False, "own": False},
    "discrete, own": {"continuous": False, "own": True},
    "continuous, team": {"continuous": True, "own": False},
    "continuous, own": {"continuous": True, "own": True},
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("continuous", [False, True])
def test_the_toy_keeps_the_promises_of_an_env(continuous: bool, own: bool) -> None:
    check_env(lambda n: Both(n, continuous, own, length=5, dies=own), steps=40)


@pytest.mark.parametrize("share", [False, True], ids=["each its own", "shared"])
@pytest.mark.parametrize("toy", TOYS)
def test_maddpg_solves_the_toy(toy: str, share: bool) -> None:
    def make(n):
        return Both(n, **TOYS[toy])

    hyper = MADDPG(
        learning_rate=5e-3, critic_learning_rate=5e-3, gamma=0.3, batch_size=128, new_steps=16,
        warmup=256, capacity=4096, tau=0.05, share=share, noise_steps=2000, regularise=1e-3,
    )  # fmt: skip
    built = built_for(hyper, make)
    run_updates(built, Serial(built.roles), 250)
    reached = greedy_return(built, make)
    if TOYS[toy]["continuous"]:
        assert reached > -8 * 2 * 0.15  # each off by 0.15 of 4 in each of 8 steps; random: -19
    else:
        assert reached == 8.0  # both right in each of 8 steps; random: 2 for a team, 4 for each
    built.close()


@pytest.mark.parametrize(
    ("hyper", "make"),
    [
        (SMALL, lambda n: SimpleSpread(n, max_cycles=5)),
        (replace(SMALL, share=True, n_step=3), lambda n: SimpleTag(n, max_cycles=5)),
        (
            replace(SMALL, noise="ou"),
            lambda n: SimpleSpread(n, max_cycles=5, continuous_actions=True),
        ),
        (SMALL, lambda n: Both(n, dies=True, own=True)),
    ],
    ids=["spread", "tag, shared, three steps", "wandering noise", "agents that end"],
)
def test_maddpg_keeps_the_promises_of_an_algorithm(hyper, make) -> None:
    check_algorithm(hyper, make)


def trainer_of(hyper, make, seed=0):
    built = build(config_for(hyper, seed), make)
    trainer = built.learner._trainer
    built.close()
    return trainer


def batch(env, N=12, seed=0):
    """Random steps of an env, as replay hands them out."""
    rng, spec = np.random.default_rng(seed), env.spec
    observation = {}
    for name, of in spec.observation.items():
        if of.dtype == np.bool_:
            observation[name] = rng.random((2, N, *of.shape)) < 0.6
        else:
            observation[name] = rng.standard_normal((2, N, *of.shape)).astype(np.float32)
    if "mask" in observation:
        observation["mask"][..., 0] = True
    shape = (1, N, *spec.action_leaf.shape)
    discrete = isinstance(spec.action, Discrete)
    return Rollout(
        observation=observation,
        action=np.zeros(shape, np.int64) if discrete else rng.uniform(-1, 1, shape).astype("f4"),
        reward=rng.standard_normal((1, N, *spec.reward_leaf.shape)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={"discount": rng.choice([0.0, 0.9], (1, N)).astype(np.float32)},
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0),
        versions=np.zeros(N, np.int64),
    )


def by_hand(network, x):
    """A multi-layer perceptron with tanh, written out."""
    layers = [parameter.detach().numpy() for parameter in network.parameters()]
    for i in range(0, len(layers), 2):
        x = layers[i] @ x + layers[i + 1]
        x = np.tanh(x) if i < len(layers) - 2 else x
    return x


@pytest.mark.parametrize("share", [False, True], ids=["each its own", "shared"])
@pytest.mark.parametrize("own", [False, True], ids=["team", "own"])
def test_the_critics_loss_is_the_formula_written_out(own: bool, share: bool) -> None:
    env = Both(4, continuous=True, own=own)
    trainer = trainer_of(replace(SMALL, share=share), lambda n: Both(n, continuous=True, own=own))
    with torch.no_grad():  # so that targets differ from what they follow
        trainer.state.flats["policy"].data.mul_(1.3)
        trainer.state.flats["critic"].data.mul_(0.7)
    part = batch(env)
    obs, alive = part.observation["obs"], part.observation["alive"]
    reward, discount, total, count = part.reward[0], part.extras["discount"][0], 0.0, 0
    which = np.eye(2, dtype=np.float32)
    for n in range(12):
        following = []
        for i in range(2):
            seen = np.concatenate([obs[1, n, i], which[i]]) if share else obs[1, n, i]
            following.append(np.tanh(by_hand(trainer._target_policies[0 if share else i], seen)))
        for i in range(2):
            if not alive[0, n, i]:
                continue
            tail = which[i] if share else which[i][:0]
            then = np.concatenate([obs[1, n].ravel(), *following, tail])
            now = np.concatenate([obs[0, n].ravel(), (part.action[0, n, :, 0] - 1) / 2, tail])
            goes_on = alive[1, n, i] if own else True
            after = by_hand(trainer._target_critics[0 if share else i], then)[0]
            target = (reward[n, i] if own else reward[n]) + discount[n] * goes_on * after
            total += (by_hand(trainer._critics[0 if share else i], now)[0] - target) ** 2
            count += 1
    loss, _ = trainer._critic_loss(trainer._batch(part))
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


def test_a_policys_gradient_is_that_of_its_critic_with_the_others_as_they_were() -> None:
    env = Both(4, continuous=True, own=True)
    trainer = trainer_of(SMALL, lambda n: Both(n, continuous=True, own=True))
    with torch.no_grad():
        trainer._optimizers["policy"].flat.data.mul_(3.0)
    part = batch(env)
    columns = trainer._batch(part)
    trainer._optimizers["policy"]._gradient.zero_()
    loss, _ = trainer._policy_loss(columns)
    loss.backward()
    parameters = trainer._optimizers["policy"].flat.data
    gradient, rng = trainer._optimizers["policy"]._gradient, np.random.default_rng(1)

    def written_out():
        """Minus the mean value over those alive, and the regulariser."""
        obs, alive = part.observation["obs"][0], part.observation["alive"][0]
        values, sizes = [], []
        for n, i in np.argwhere(alive):
            output = by_hand(trainer._policies[i], obs[n, i].astype(np.float64))
            action = (part.action[0, n, :, 0].astype(np.float64) - 1) / 2
            action[i] = np.tanh(output)[0]
            x = np.concatenate([obs[n].ravel(), action])
            values.append(by_hand(trainer._critics[i], x)[0])
            sizes.append(np.square(output).mean())
        return -np.mean(values) + SMALL.regularise * np.mean(sizes)

    assert loss.item() == pytest.approx(written_out(), rel=1e-4)
    for k in rng.choice(len(parameters), 12, replace=False):
        at, step = float(parameters[k]), 1e-2
        values = []
        for offset in (step, -step):
            parameters[k] = at + offset
            values.append(written_out())
        parameters[k] = at
        difference = (values[0] - values[1]) / (2 * step)
        assert float(gradient[k]) == pytest.approx(difference, rel=2e-2, abs=2e-4)


def test_a_discrete_choice_is_one_of_n_forwards_and_a_softmax_backwards() -> None:
    trainer = trainer_of(replace(SMALL, temperature=0.7), lambda n: Both(n))
    part = batch(Both(4))
    columns, state = trainer._batch(part), generator_state(trainer._rng)
    chosen, output = trainer._choose(trainer._policies, columns["obs"], columns["mask"])
    hard = chosen.detach()
    torch.testing.assert_close(hard.sum(-1), torch.ones(2, 12))
    torch.testing.assert_close(hard.amax(-1), torch.ones(2, 12))
    assert not hard[~columns["mask"]].any()
    load_generator_state(trainer._rng, state)
    drawn = trainer._rng.standard_exponential((2, 12, 3), np.float32)
    soft = torch.softmax((output - torch.from_numpy(np.log(drawn))) / 0.7, -1)
    assert torch.equal(hard.argmax(-1), soft.argmax(-1))
    weights = torch.arange(72.0).view(2, 12, 3)
    mine = torch.autograd.grad((chosen * weights).sum(), output, retain_graph=True)[0]
    theirs = torch.autograd.grad((soft * weights).sum(), output)[0]
    torch.testing.assert_close(mine, theirs)


def loaded(hyper, make, scale=1.0, noise=None):
    built = build(config_for(hyper), make)
    policy, params = hyper.policy(built.spec), Params(hyper.describe(built.spec).params)
    rng = np.random.default_rng(0)
    params.flat[:] = scale * rng.standard_normal(params.flat.size)
    if noise is not None:
        params["noise"][...] = noise
    policy.load(params)
    built.close()
    return policy, params


def test_bytes_are_scaled_whether_or_not_agents_share_a_network() -> None:
    policy, _ = loaded(replace(SMALL, share=True), lambda n: Both(n))
    obs = np.full((4, 2, 1), 200, np.uint8)
    scaled = (obs / np.float32(255)).astype(np.float32)
    np.testing.assert_allclose(policy._outputs(obs), policy._outputs(scaled), rtol=1e-5)


def test_draws_follow_the_softmax_of_legal_actions() -> None:
    policy, params = loaded(SMALL, lambda n: Both(n))
    assert isinstance(policy, Policy)
    B = 20_000
    obs = np.broadcast_to(np.float32([[0.5], [-0.5]]), (B, 2, 1))
    mask = np.tile([True, True, False], (B, 2, 1))
    action = policy.act({"obs": obs, "mask": mask}, {}, np.random.default_rng(1)).action
    for i, agent in enumerate(("first", "second")):
        layer = [params[f"policy.{agent}.layers.{k}.{kind}"] for k in (0, 1)
                 for kind in ("weight", "bias")]  # fmt: skip
        logits = layer[2] @ np.tanh(layer[0] @ obs[0, i] + layer[1]) + layer[3]
        p = np.exp(logits[:2]) / np.exp(logits[:2]).sum()
        shares = np.bincount(action[:, i], minlength=3) / B
        np.testing.assert_allclose(shares, [*p, 0], atol=4 * np.sqrt(0.25 / B))
        greedy = policy.act({"obs": obs, "mask": mask}, {}, None).action
        assert (greedy[:, i] == p.argmax()).all()


def test_continuous_actions_lie_within_their_bounds_and_greedy_ones_have_no_noise() -> None:
    policy, _ = loaded(SMALL, lambda n: Both(n, continuous=True), scale=0.1, noise=0.5)
    observation = {"obs": np.zeros((5000, 2, 1), np.float32)}
    drawn = policy.act(observation, {}, np.random.default_rng(0)).action
    greedy = policy.act(observation, {}, None).action
    assert drawn.min() >= -1
    assert drawn.max() <= 3
    assert drawn.shape == greedy.shape == (5000, 2, 1)
    assert np.ptp(greedy[:, 0]) == 0
    # Half the range is 2, and deviations beyond it are cut off: a normal's share within two of
    # them has this deviation of its own.
    assert drawn[:, 0].std() == pytest.approx(2 * 0.5 * 0.96, rel=0.05)


def test_wandering_noise_is_a_state_that_begins_at_zero_and_is_pulled_back() -> None:
    hyper = replace(SMALL, noise="ou", noise_pull=0.25)
    policy, _ = loaded(hyper, lambda n: Both(n, continuous=True), scale=0.0, noise=0.1)
    assert not policy.initial(3)["noise"].any()
    state, rng, seen = policy.initial(4000), np.random.default_rng(0), []
    observation = {"obs": np.zeros((4000, 2, 1), np.float32)}
    for _ in range(20):
        action, state, _ = policy.act(observation, state, rng)[:3]
        seen.append(state["noise"][:, 0, 0].copy())
        np.testing.assert_allclose(action, 1 + 2 * np.clip(state["noise"], -1, 1), atol=1e-6)
    # x' = 0.75 x + 0.1 z: a variance of 0.01 / (1 - 0.75^2), and 0.75 of it from step to step.
    assert seen[-1].std() == pytest.approx(0.1 / np.sqrt(1 - 0.75**2), rel=0.05)
    assert np.corrcoef(seen[-1], seen[-2])[0, 1] == pytest.approx(0.75, abs=0.04)
    assert policy.act(observation, state, None).state is state
    gaussian, _ = loaded(SMALL, lambda n: Both(n, continuous=True))
    assert gaussian.initial(3) == {}


def test_agents_that_share_a_network_are_told_apart() -> None:
    policy, _ = loaded(replace(SMALL, share=True), lambda n: Both(n, continuous=True))
    action = policy.act({"obs": np.zeros((1, 2, 1), np.float32)}, {}, None).action
    assert action[0, 0, 0] != action[0, 1, 0]


def test_noise_falls_with_the_steps_that_a_version_stands_for() -> None:
    hyper = MADDPG(noise_start=0.5, noise_end=0.1, noise_steps=1000, new_steps=10)
    assert [hyper.deviation(v) for v in (0, 50, 100, 900)] == pytest.approx([0.5, 0.3, 0.1, 0.1])


def test_several_steps_of_own_rewards_are_summed_for_each_agent() -> None:
    hyper = replace(SMALL, n_step=3, gamma=0.5)
    built = build(config_for(hyper), lambda n: Both(n, own=True, length=4))
    built.learner.begin()
    run_updates(built, Serial(built.roles), 1)
    gatherer = built.learner._gatherer
    assert isinstance(gatherer, Transitions)
    part = gatherer._part
    assert part is not None
    assert part.reward.shape == (1, 32, 2)
    # Rewards of 0 and 1 in up to three steps: all sums are of these.
    sums = {a + 0.5 * b + 0.25 * c for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    assert set(np.unique(part.reward).tolist()) <= sums
    assert (part.reward[..., 0] != part.reward[..., 1]).any()
    built.close()


def test_what_maddpg_cannot_take_is_refused_with_the_remedy() -> None:
    def refuses(match, make, hyper=SMALL, **changed):
        config = config_for(hyper)
        config = replace(
            config, **{k: replace(getattr(config, k), **v) for k, v in changed.items()}
        )
        with pytest.raises(Refusal, match=match):
            build(config, make)

    def of(**changed):
        def make(n):
            env = Both(n, continuous=True)
            env.spec = replace(env.spec, **changed)
            return env

        return make

    refuses('"sac" or "td3"', Identity)
    refuses(
        'several choices at once. Set algorithm.name = "mappo"', of(action=MultiDiscrete((2, 2)))
    )
    refuses("Bound the env's action space", of(action=Continuous((0.0,), (np.inf,), (1,))))
    picture = {"obs": leaf((2, 84, 84, 3), np.uint8)}
    refuses(
        '"mappo" with critic = "own", or network.kind = "mlp"',
        of(observation=picture, action=Discrete(2)),
    )
    refuses("warmup = 16 is too early", SimpleSpread, replace(SMALL, warmup=16))
    refuses("Raise capacity", SimpleSpread, replace(SMALL, capacity=32))


def test_a_resumed_run_with_wandering_noise_equals_one_that_was_never_stopped(tmp_path) -> None:
    config = {
        "env": {"id": "mpe/simple_spread", "kwargs": {"continuous_actions": True}},
        "algorithm": {
            "name": "maddpg", "noise": "ou", "batch_size": 32, "warmup": 64, "capacity": 512,
            "new_steps": 20,
        },
        "network": {"hidden": [8]},
        "scale": {"envs_per_actor": 4, "rollout_length": 3},
        "stop": {"updates": 12},
    }  # fmt: skip
    whole = tianji.train(config, name="whole", runs=tmp_path)
    half = tianji.train(config, ["stop.updates=7"], name="half", runs=tmp_path)
    rest = tianji.resume(half.run_dir, ["stop.updates=12"])
    assert rest.params_sha256 == whole.params_sha256
    assert rest.resumed == "exact"


@pytest.mark.slow
def test_maddpg_learns_to_spread() -> None:
    """From -79 of random actions to more than -62, within 35 thousand steps by its config."""
    config = load_config("maddpg_spread", ["seed=5"])

    def make(n):
        return make_env("mpe/simple_spread", n, {})

    built = build(config, make)
    built.learner.begin()
    run_updates(built, Serial(built.roles), 1000)
    assert greedy_return(built, make, 256) > -62
    built.close()
