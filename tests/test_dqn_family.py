"""The variants of DQN: formulas against slow loops, and toys with a known answer for each."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tianji import networks
from tianji.algorithm import Network
from tianji.algorithms import dqn
from tianji.algorithms.dqn import DQN, project, quantile_huber
from tianji.build import build
from tianji.config import RelaxConfig, ScaleConfig
from tianji.driver import Serial
from tianji.env import Discrete, EnvSpec, TimeStep, make_env
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.testing import check_algorithm, check_env
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import Rollout, leaf

SMALL = DQN(batch_size=16, warmup=96, capacity=256, new_steps=16)
VARIANTS = {
    "dueling n-step": {"dueling": True, "n_step": 3, "double": False},
    "prioritized": {"prioritized": True},
    "prioritized from the largest": {"prioritized": True, "initial": "max", "n_step": 3},
    "c51": {"distribution": "c51", "v_min": 0.0, "v_max": 1.2, "atoms": 21},
    "qr": {"distribution": "qr", "atoms": 11},
    "noisy": {"noisy": True},
    "c51 dueling prioritized": {
        "distribution": "c51", "v_min": 0.0, "v_max": 1.2, "atoms": 21, "dueling": True,
        "prioritized": True, "n_step": 2,
    },
    "qr dueling noisy prioritized": {
        "distribution": "qr", "atoms": 11, "dueling": True, "noisy": True, "prioritized": True,
    },
}  # fmt: skip


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


def spec_of(algorithm, make, **fields):
    return replace(make_spec(config_for(algorithm), make(4).spec), **fields)


@pytest.mark.parametrize("name", [n for n in VARIANTS if "prioritized" not in n])
def test_each_variant_keeps_its_promises(name):
    check_algorithm(replace(SMALL, **VARIANTS[name]), toy("Chain"))


@pytest.mark.parametrize("seed", range(5))
def test_the_projection_is_that_of_the_paper_written_as_loops(seed):
    rng = np.random.default_rng(seed)
    N, k, low, high = 6, 7, -2.0, 4.0
    atoms, gap = np.linspace(low, high, k), (high - low) / (k - 1)
    share = rng.dirichlet(np.ones(k), N)
    reward, discount = rng.normal(0, 3, N), rng.choice([0.0, 0.9], N)
    reward[0] = atoms[2]  # exactly on an atom
    expected = np.zeros((N, k))
    for i in range(N):
        for j in range(k):
            z = min(high, max(low, reward[i] + discount[i] * atoms[j]))
            b = (z - low) / gap
            lower, upper = int(np.floor(b)), int(np.ceil(b))
            if lower == upper:
                expected[i, lower] += share[i, j]
            else:
                expected[i, lower] += share[i, j] * (upper - b)
                expected[i, upper] += share[i, j] * (b - lower)
    given = [torch.tensor(x, dtype=torch.float64) for x in (share, atoms, reward, discount)]
    projected = project(*given).numpy()
    np.testing.assert_allclose(projected, expected, atol=1e-12)
    np.testing.assert_allclose(projected.sum(1), 1.0)


def test_the_quantile_loss_is_that_of_the_paper_written_as_loops():
    rng = np.random.default_rng(0)
    N, k, m = 5, 4, 6
    quantiles, target = rng.normal(0, 2, (N, k)), rng.normal(0, 2, (N, m))
    expected = np.zeros(N)
    for n in range(N):
        for i in range(k):
            for j in range(m):
                u = target[n, j] - quantiles[n, i]
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                expected[n] += abs((i + 0.5) / k - (u < 0)) * huber / m
    found = quantile_huber(torch.tensor(quantiles), torch.tensor(target))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_quantiles_of_a_known_distribution_minimise_the_quantile_loss():
    rng = np.random.default_rng(1)
    samples = torch.tensor(rng.uniform(0, 100, (1, 1000)))
    quantiles = torch.full((1, 5), 50.0, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(quantile_huber(quantiles, samples).sum(), quantiles)
        with torch.no_grad():
            quantiles -= 20.0 * gradient
    np.testing.assert_allclose(quantiles.detach()[0], [10, 30, 50, 70, 90], atol=3)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_noisy_network_has_the_mean_and_the_deviation_of_its_parameters(activation):
    network, observation = Network(hidden=(6,), activation=activation), leaf((3,), np.float32)
    module = networks.Noisy(network, observation, 2, 0.5)
    networks.initialise(module, np.random.default_rng(0), 2**0.5, last=1.0)
    (layer,) = module.layers
    assert torch.all(layer.weight_sigma == 0.5 / 6**0.5)
    assert torch.all(layer.bias_sigma == 0.5 / 6**0.5)
    x, rng = torch.tensor([[0.5, -1.0, 2.0]]), np.random.default_rng(1)
    with torch.no_grad():
        hidden = module._activation(module.body(x))
        drawn = module(x.expand(20_000, 3), rng)
        mean = module(x)
    # f(e) = sign(e) sqrt|e| has variance E|e| = sqrt(2 / pi); that of in- and outputs is apart.
    each = (2 / np.pi) ** 0.5
    variance = each * (0.25 / 6) * (1 + each * float((hidden**2).sum()))
    np.testing.assert_allclose(drawn.mean(0), mean[0], atol=6 * (variance / 20_000) ** 0.5)
    np.testing.assert_allclose(drawn.var(0), variance, rtol=0.06)

    inference = networks.NoisyInference(network, observation, module, "q")
    inference.load({f"q.{k}": p.detach().numpy() for k, p in module.named_parameters()})
    rows = np.repeat(x.numpy(), 20_000, axis=0)
    acted = inference(rows, np.random.default_rng(2))
    np.testing.assert_allclose(inference(x.numpy(), None), mean, rtol=1e-5)
    np.testing.assert_allclose(acted.mean(0), mean[0], atol=6 * (variance / 20_000) ** 0.5)
    np.testing.assert_allclose(acted.var(0), variance, rtol=0.06)


def test_the_numpy_inference_of_noise_is_the_weights_with_noise():
    """The weights are written out: W + S * out into^T."""
    network, observation = Network(hidden=(6, 5)), leaf((3,), np.float32)
    module = networks.Noisy(network, observation, 2, 0.5)
    networks.initialise(module, np.random.default_rng(0), 2**0.5, last=1.0)
    inference = networks.NoisyInference(network, observation, module, "q")
    inference.load({f"q.{k}": p.detach().numpy() for k, p in module.named_parameters()})
    x = np.array([[0.5, -1.0, 2.0]], np.float32)
    with torch.no_grad():
        hidden, rng = torch.tanh(module.body(torch.from_numpy(x))), np.random.default_rng(3)
        for i, layer in enumerate(module.layers):
            hidden = torch.tanh(hidden) if i else hidden
            into = torch.from_numpy(networks.spread_noise(rng, layer.inputs))
            out = torch.from_numpy(networks.spread_noise(rng, layer.outputs))
            weight = layer.weight + layer.weight_sigma * torch.outer(out, into)
            hidden = hidden @ weight.T + layer.bias + layer.bias_sigma * out
    np.testing.assert_allclose(inference(x, np.random.default_rng(3)), hidden, rtol=1e-5)


def test_noise_takes_the_place_of_random_actions_and_greedy_play_has_none():
    algorithm = replace(SMALL, noisy=True)
    spec = spec_of(algorithm, toy("Chain"))
    policy, trainer = algorithm.policy(spec), algorithm.trainer(spec)
    policy.load(trainer.params(0))
    assert trainer.params(0)["epsilon"] == 0
    observation = toy("Chain")(64).reset(0)
    drawn = policy.act(observation, {}, np.random.default_rng(0)).action
    assert set(drawn.tolist()) == {0, 1}, "each env has noise of its own"
    greedy = policy.act(observation, {}, None).action
    values = trainer._online(torch.from_numpy(observation["obs"])).argmax(-1).numpy()
    assert np.array_equal(greedy, values)
    first, second = (trainer._values(trainer._online, torch.eye(5)) for _ in range(2))
    assert not torch.equal(first, second)


def test_noise_on_pictures_is_on_the_layers_after_the_convolutions():
    module = networks.Noisy(Network(), leaf((4, 84, 84), np.uint8), 6, 0.5)
    assert [(layer.inputs, layer.outputs) for layer in module.layers] == [(3136, 512), (512, 6)]
    networks.initialise(module, np.random.default_rng(0), 2**0.5, last=1.0)
    inference = networks.NoisyInference(Network(), leaf((4, 84, 84), np.uint8), module, "q")
    inference.load({f"q.{k}": p.detach().numpy() for k, p in module.named_parameters()})
    x = np.random.default_rng(0).integers(0, 255, (2, 4, 84, 84), np.uint8)
    with torch.no_grad():
        mean = module(torch.from_numpy(x))
    np.testing.assert_allclose(inference(x, None), mean, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_policy_records_and_ranks_by_the_values_of_the_trainer(name):
    algorithm = replace(SMALL, **VARIANTS[name] | {"noisy": False})
    spec = spec_of(algorithm, toy("Chain"))
    policy, trainer = algorithm.policy(spec), algorithm.trainer(spec)
    policy.load(trainer.params(0))
    observation = {"obs": np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)}
    with torch.no_grad():
        value = trainer._values(trainer._online, torch.from_numpy(observation["obs"])).numpy()
    decision = policy.act(observation, {}, np.random.default_rng(0))
    assert np.array_equal(policy.act(observation, {}, None).action, value.argmax(1))
    if algorithm.prioritized and algorithm.initial == "actor":
        q = value[np.arange(40), decision.action]
        np.testing.assert_allclose(decision.extras["q"], q, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(decision.extras["q_best"], value.max(1), rtol=1e-4, atol=1e-5)
    else:
        assert decision.extras == {}


def tensors(part):
    return {name: torch.from_numpy(array) for name, array in dqn._arrays(part).items()}


@pytest.mark.parametrize("distribution", ["none", "c51", "qr"])
def test_weights_scale_each_steps_share_of_the_loss_and_priorities_are_its_error(distribution):
    algorithm = replace(SMALL, prioritized=True, distribution=distribution)
    built = build(config_for(algorithm), toy("Chain"))
    built.learner.begin()
    run_updates(built, Serial(built.roles), 1)
    trainer = built.learner._trainer
    part = next(iter(built.learner._gatherer.parts(built.learner._batches.slot(0).arrays)))
    weight = part.extras["weight"].copy()
    alone = []
    for i in range(16):
        part.extras["weight"][:] = 0
        part.extras["weight"][0, i] = 16
        alone.append(float(trainer._loss(tensors(part))[0].detach()))
    part.extras["weight"][:] = weight
    loss, _, priority = trainer._loss(tensors(part))
    assert float(loss.detach()) == pytest.approx(float(np.mean(weight[0] * alone)), rel=1e-5)
    told = priority.numpy()
    trainer.take(part)
    trainer.finish()
    np.testing.assert_array_equal(trainer.priorities(), told)
    assert told.shape == (16,)
    if distribution == "none":
        error = np.where(told <= 1, told**2 / 2, told - 0.5)
        np.testing.assert_allclose(error, alone, rtol=1e-5)
    else:
        assert (told >= 0).all()
        assert np.corrcoef(told, alone)[0, 1] > 0.2
    built.close()


def test_the_kl_priority_is_0_where_the_distribution_is_right():
    algorithm = replace(SMALL, distribution="c51", v_min=0.0, v_max=1.0, atoms=3)
    trainer = algorithm.trainer(spec_of(algorithm, toy("Chain")))
    logits = torch.tensor([[0.3, -0.2, 1.0]])
    # A reward of 0 and a discount of 1 leave the distribution where it is.
    error, told = trainer._errors(logits, logits, torch.zeros(1), torch.ones(1))
    assert float(told) == pytest.approx(0, abs=1e-6)
    assert float(error) > 0.5
    _, told = trainer._errors(logits, logits, torch.ones(1), torch.zeros(1))
    assert float(told) == pytest.approx(-float(logits.log_softmax(-1)[0, 2]), rel=1e-5)


def learn(algorithm, make, updates, network):
    scale = ScaleConfig(envs_per_actor=16, rollout_length=16)
    built = build(replace(config_for(algorithm, 0, scale), network=network), make)
    built.learner.begin()
    run_updates(built, Serial(built.roles), updates)
    policy = algorithm.policy(built.spec)
    policy.load(built.learner._trainer.params(updates))
    built.close()
    return policy


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_learns_the_known_values_of_the_chain(name):
    fields = dict(VARIANTS[name])
    explores = {} if "noisy" in fields else {"epsilon_end": 0.1, "epsilon_steps": 2000}
    algorithm = DQN(
        learning_rate=1e-2, gamma=0.8, new_steps=16, warmup=512, capacity=5000, batch_size=32,
        tau=0.05, **fields, **explores,
    )  # fmt: skip
    make = toy("Chain", n=5, anywhere=True)
    policy = learn(algorithm, make, 500, Network(hidden=(32,), activation="relu"))
    states = np.eye(5, dtype=np.float32)[:4]
    assert policy.act({"obs": states}, {}, None).action.tolist() == [1, 1, 1, 1]
    if algorithm.dueling and algorithm.distribution == "none" and not algorithm.prioritized:
        return  # it ranks by advantages alone
    optimal = make(1).optimal_values(0.8)[:4]
    np.testing.assert_allclose(policy._values(states, None).max(1), optimal, atol=0.12)


class Legal:
    """Two kinds of state: actions 0 and 1 are legal, or 0 and 2. Action k is worth k; the next
    state is of either kind. Illegal actions raise."""

    def __init__(self, num_envs):
        observation = {"obs": leaf((2,), np.float32), "mask": leaf((4,), np.bool_)}
        self.spec = EnvSpec("test/Legal", observation, Discrete(4), 10)
        self.num_envs = num_envs

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._clock, self._ended = np.zeros(self.num_envs), np.zeros(self.num_envs, np.bool_)
        return self._draw()

    def _draw(self):
        self._kind = self._rng.integers(2, size=self.num_envs)
        self._mask = np.zeros((self.num_envs, 4), np.bool_)
        self._mask[:, 0] = True
        self._mask[np.arange(self.num_envs), 1 + self._kind] = True
        return {"obs": np.eye(2, dtype=np.float32)[self._kind], "mask": self._mask.copy()}

    def step(self, action):
        assert self._mask[np.arange(self.num_envs), action].all(), "an illegal action"
        valid = ~self._ended
        self._clock = np.where(valid, self._clock + 1, 0)
        self._ended = self._clock >= 10
        reward = np.where(valid, action, 0).astype(np.float32)
        no = np.zeros(self.num_envs, np.bool_)
        return TimeStep(self._draw(), reward, no, self._ended.copy(), valid)

    def close(self):
        pass


class Biased(DQN):
    """Values the action that is never legal far too highly at first."""

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        if not self.noisy and self.distribution == "none":
            with torch.no_grad():
                for network in (trainer._online, trainer._target):
                    network.layers[-1].bias[3] = 50.0
        return trainer


@pytest.mark.parametrize(
    "fields",
    [{}, {"double": False}, {"prioritized": True, "distribution": "qr", "atoms": 5},
     {"distribution": "c51", "v_min": 0.0, "v_max": 5.0}, {"noisy": True}],
)  # fmt: skip
def test_illegal_actions_are_neither_chosen_nor_bootstrapped_from(fields):
    """V = 1.5 / (1 - 0.5) = 3 on the average, so the best actions are worth 1 + 1.5 and 2 + 1.5;
    the values of illegal ones are never learnt, and large at first."""
    explores = {} if "noisy" in fields else {"epsilon_steps": 2000, "epsilon_end": 0.1}
    algorithm = Biased(
        learning_rate=1e-2, gamma=0.5, new_steps=16, warmup=512, capacity=5000, batch_size=32,
        tau=0.1, **fields, **explores,
    )  # fmt: skip
    policy = learn(algorithm, Legal, 400, Network(hidden=(32,), activation="relu"))
    states = {
        "obs": np.eye(2, dtype=np.float32),
        "mask": np.array([[1, 1, 0, 0], [1, 0, 1, 0]]) > 0,
    }
    assert policy.act(states, {}, None).action.tolist() == [1, 2]
    value = policy._values(states["obs"], None)
    np.testing.assert_allclose([value[0, 1], value[1, 2]], [2.5, 3.5], atol=0.3)


def test_random_actions_are_spread_evenly_over_the_legal_ones():
    algorithm = replace(SMALL, prioritized=True)
    spec = spec_of(algorithm, Legal)
    policy = algorithm.policy(spec)
    policy.load(algorithm.trainer(spec).params(0))
    mask = np.zeros((9000, 4), np.bool_)
    mask[:, [0, 2, 3]] = True
    mask[-1] = False  # as an episode's last observation may have it
    observation = {"obs": np.zeros((9000, 2), np.float32), "mask": mask}
    decision = policy.act(observation, {}, np.random.default_rng(0))
    counts = np.bincount(decision.action[:-1], minlength=4)
    assert counts[1] == 0
    assert np.abs(counts[[0, 2, 3]] - 3000).max() < 300
    assert np.isfinite(decision.extras["q_best"]).all()
    check_env(AnyLegal, 50)


class AnyLegal(Legal):
    """Takes any action, for a checker that knows no masks."""

    def step(self, action):
        illegal = ~self._mask[np.arange(self.num_envs), action]
        return super().step(np.where(illegal, 0, action))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"v_max": 5.0}, "algorithm.v_max"),
        ({"atoms": 5}, "algorithm.atoms"),
        ({"sigma": 0.1}, "algorithm.sigma"),
        ({"noisy": True, "epsilon_end": 0.2}, "algorithm.epsilon_end"),
        ({"distribution": "qr", "loss": "mse"}, "algorithm.loss"),
        ({"distribution": "c51", "v_min": 3.0, "v_max": 1.0}, "v_min below v_max"),
        ({"distribution": "c51", "atoms": 1}, "atoms to 2 or more"),
    ],
)
def test_what_would_do_nothing_or_cannot_work_is_refused(fields, word):
    with pytest.raises(Refusal, match=word):
        spec_of(replace(SMALL, **fields), toy("Chain"))


def test_noise_and_a_ladder_of_random_actions_exclude_each_other():
    scale = ScaleConfig("local", "apex", actors=2, envs_per_actor=4, rollout_length=4)
    with pytest.raises(Refusal, match=r"algorithm\.noisy = false"):
        build(config_for(replace(SMALL, noisy=True), scale=scale), toy("Chain"))
    assert RelaxConfig().explore is None


def test_several_agents_are_refused():
    env = toy("Chain")(4)
    with pytest.raises(Refusal, match="several agents"):
        make_spec(config_for(SMALL), replace(env.spec, agents=("a", "b")))


PICTURES = leaf((4, 84, 84), np.uint8)


def on_pictures(precision, **fields):
    env = EnvSpec("test/Pictures", {"obs": PICTURES}, Discrete(4))
    network = Network(precision=precision)
    algorithm = DQN(**fields)
    return algorithm.trainer(replace(make_spec(config_for(algorithm), env), network=network))


@pytest.mark.parametrize("fields", [{}, {"distribution": "c51", "dueling": True}])
def test_gradients_at_half_the_precision_point_the_same_way(fields):
    rng = np.random.default_rng(0)
    N = 32
    part = Rollout(
        observation={"obs": rng.integers(0, 256, (2, N, *PICTURES.shape), np.uint8)},
        action=rng.integers(0, 4, (1, N)),
        reward=rng.normal(size=(1, N)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={"discount": np.full((1, N), 0.9, np.float32)},
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0),
        versions=np.zeros(N, np.int64),
    )
    gradients, values = [], []
    for precision in ("float32", "bfloat16"):
        trainer = on_pictures(precision, **fields)
        loss, value, _ = trainer._loss(tensors(part))
        loss.backward()
        gradients.append(trainer._optimizer._gradient.clone())
        values.append(float(value))
        assert loss.dtype == torch.float32
    assert values[0] != values[1], "it is computed in another precision"
    assert values[0] == pytest.approx(values[1], rel=0.05, abs=0.02)
    cosine = float(torch.nn.functional.cosine_similarity(*gradients, dim=0))
    assert cosine > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_pictures_are_learnt_from_at_either_precision(precision):
    """Each right answer is worth 1 at once, and nothing follows from it."""
    algorithm = DQN(
        learning_rate=3e-4, gamma=0.0, batch_size=32, new_steps=16, warmup=256, capacity=1000,
        epsilon_steps=1000, epsilon_end=0.05,
    )  # fmt: skip
    make = toy("Frames", length=16)
    policy = learn(algorithm, make, 80, Network(precision=precision))
    env = make(64)
    observation = env.reset(5)
    right = env.step(policy.act(observation, {}, None).action).reward
    assert right.mean() > 0.97
