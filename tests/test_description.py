"""What an algorithm says of its parts before they are made is what they are."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tianji.algorithm import Gradients
from tianji.algorithms.ppo import PPO
from tianji.build import assembly, build
from tianji.config import load_config
from tianji.description import Model
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for
from tianji.transports.memory import Memory
from tianji.types import leaf

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
SMALL = ["algorithm.warmup=2000", "algorithm.capacity=4000"]
BASE = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "scale": {"envs_per_actor": 4}}
BASE |= {"stop": {"updates": 9}}
DQN = BASE | {"algorithm": {"name": "dqn"}}
PENDULUM = BASE | {"env": {"id": "Pendulum-v1"}}
SPREAD = BASE | {"env": {"id": "mpe/simple_spread"}}
LOCAL = ["scale.engine=local"]

MORE = {
    "streamed": (BASE, [*LOCAL, "scale.relax=periodic", "scale.actors=3"]),
    "streamed, learners": (BASE, [*LOCAL, "scale.relax=periodic", "scale.actors=4",
                                 "scale.learners=2"]),
    "window": (BASE, ["reuse.window=4", "relax.lead=0"]),
    "learners": (BASE, [*LOCAL, "scale.actors=4", "scale.learners=2"]),
    "gru": (BASE, ["network.recurrent=gru"]),
    "linear": (BASE, ["algorithm.schedule=linear"]),
    "normalised": (PENDULUM, ["algorithm.normalise_observation=true",
                              "algorithm.normalise_reward=true"]),
    "target with a deviation": (PENDULUM, ["algorithm.name=appo"]),
    "agents with a memory": (SPREAD, ["algorithm.name=mappo", "network.recurrent=gru"]),
    "agents apart": (SPREAD, ["algorithm.name=mappo", "algorithm.share=false"]),
    "maddpg, shared": (SPREAD, ["algorithm.name=maddpg", "algorithm.share=true",
                                "env.kwargs.continuous_actions=true", "algorithm.noise=ou"]),
    "prioritized": (DQN, ["algorithm.prioritized=true"]),
    "prioritized, max": (DQN, ["algorithm.prioritized=true", "algorithm.initial=max"]),
    "noisy": (DQN, ["algorithm.noisy=true", "algorithm.dueling=true"]),
    "c51": (DQN, ["algorithm.distribution=c51"]),
    "learners of replay": (DQN, [*LOCAL, "scale.learners=2"]),
    "td3": (PENDULUM, ["algorithm.name=td3"]),
}  # fmt: skip


def leaves(arrays):
    return {name: leaf(array.shape, array.dtype) for name, array in arrays.items()}


def check(config):
    """Compare what is said with what is built."""
    joined = assembly(config)
    algorithm, spec, transport = config.algorithm, joined.spec, Memory()
    with contextlib.closing(joined.spare[0]), contextlib.closing(transport):
        said = algorithm.describe(spec)
        policy = algorithm.policy(spec)
        assert said.recurrent == {
            name: leaf(array.shape[1:], array.dtype) for name, array in policy.initial(2).items()
        }
        buffer = joined.buffer(transport)
        chooser = buffer._chooser
        assert (said.selection, said.pieces) == (leaves(buffer._whole), buffer._pieces)
        trainer = algorithm.trainer(dataclasses.replace(spec, gradients=Gradients("gac")))
        assert list(trainer.params(0).layout.items()) == list(said.params.items()), "in order"
        policy.load(trainer.params(0))
        env, rng = joined.spare[0], np.random.default_rng(0)
        recorded = policy.act(env.reset(0), policy.initial(env.num_envs), rng).extras
        assert {name: array.shape[1:] for name, array in recorded.items()} == {
            name: leaf.shape for name, leaf in said.extras.items()
        }
        fates, found = trainer.state.fates(), leaves(trainer.state.networks())
        assert said.models == {name: Model(leaf, fates[name]) for name, leaf in found.items()}
        assert said.gradients == any(x.transforms for x in trainer.state.optimizers.values())
        assert said.slots == getattr(chooser, "_slots", spec.window)
        assert said.prioritizes == hasattr(chooser, "prioritize")
        assert said.uses_end == (getattr(algorithm, "schedule", "") == "linear")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_a_shipped_config_says_of_its_parts_is_what_they_are(path):
    config = load_config(path, ["eval.every=0"])
    small = SMALL if config.algorithm.name in ("dqn", "sac", "td3") else []
    try:
        check(load_config(path, ["eval.every=0", *small]))
    except Refusal as refusal:
        if "is not installed" not in str(refusal) and "needs MuJoCo" not in str(refusal):
            raise
        pytest.skip(str(refusal))


@pytest.mark.parametrize("case", MORE)
def test_what_an_algorithm_says_of_its_parts_is_what_they_are(case):
    tree, argv = MORE[case]
    check(load_config(tree, argv))


def test_nothing_is_allocated_for_a_description(monkeypatch):
    """Not even 400 GB of weights."""
    config = load_config(BASE, ["network.hidden=[300000, 300000]"])
    with contextlib.closing(config.env.make(1)) as env:
        spec = make_spec(config, env.spec)
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *_, **__: tensor)
    said = config.algorithm.describe(spec)
    assert said.models["policy.layers.1.weight"].leaf.shape == (300_000, 300_000)


class Lying(PPO):
    """Says that one leaf is another than it is."""

    def describe(self, spec):
        return self.lie(super().describe(spec))


class Larger(Lying):
    def lie(self, said):
        grown = {"value.layers.0.bias": Model(leaf((999,), np.float32))}
        return dataclasses.replace(said, models=said.models | grown)


class Kept(Lying):
    def lie(self, said):
        kept = {"obs.mean": dataclasses.replace(said.models["obs.mean"], fate="local")}
        return dataclasses.replace(said, models=said.models | kept)


class Unlearnt(Lying):
    def lie(self, said):
        more = {"dream": Model(leaf((2,), np.float32))}
        return dataclasses.replace(said, models=said.models | more)


class Halved(Lying):
    def lie(self, said):
        half = {"policy.layers.1.weight": leaf((8, 8), np.float16)}
        return dataclasses.replace(said, params=said.params | half)


class Reversed(Lying):
    def lie(self, said):
        return dataclasses.replace(said, params=dict(reversed(said.params.items())))


class Remembering(Lying):
    def lie(self, said):
        return dataclasses.replace(said, recurrent={"memory": leaf((3,), np.float32)})


class Recording(Lying):
    def lie(self, said):
        return dataclasses.replace(said, extras=said.extras | {"q": leaf((), np.float32)})


LIES = [
    (Larger, r"Trainer has value\.layers\.0\.bias \[8\] float32, .* says .* \[999\]"),
    (Kept, r"obs\.mean \[5\] float64, averaged .* obs\.mean \[5\] float64, local"),
    (Unlearnt, r"no dream .* says dream \[2\]"),
    (Halved, r"policy\.layers\.1\.weight .* float32 among its params, .* float16"),
    (Reversed, r"Trainer has policy\.layers\.0\.weight among its params where .* says"),
    (Remembering, r"Policy has no memory among its recurrent state"),
]


@pytest.mark.parametrize(("lying", "leaf"), LIES)
def test_a_part_that_is_not_as_described_is_refused_by_the_leafs_name(lying, leaf):
    make = lambda num_envs: make_env("toy/Chain", num_envs, {})  # noqa: E731
    with pytest.raises(Refusal, match=f"(?s){leaf}.*Let both come from one table"):
        build(config_for(lying(minibatches=1)), make)
    with pytest.raises(AssertionError, match=f"(?s){leaf}"):
        check_algorithm(lying(minibatches=1), make)


def test_what_a_policy_does_not_record_is_found():
    make = lambda num_envs: make_env("toy/Chain", num_envs, {})  # noqa: E731
    with pytest.raises((AssertionError, KeyError), match="q"):
        check_algorithm(Recording(minibatches=1), make)


def test_describing_pictures_imports_nothing_that_takes_long():
    """A module that computes on meta would import a second's worth of torch's own parts."""
    program = (
        "import sys; from tianji.build import look; from tianji.config import load_config; "
        "look(load_config('ppo_pong', ['scale.envs_per_actor=1', 'algorithm.minibatches=1'])); "
        "assert not {'sympy', 'torch._dynamo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
