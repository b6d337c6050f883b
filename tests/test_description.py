"""What an algorithm says of its parts before they are made is what they are."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from tianji.algorithm import Gradients
from tianji.build import assembly
from tianji.config import load_config
from tianji.description import Model
from tianji.errors import Refusal
from tianji.spec import make_spec
from tianji.transports.memory import Memory
from tianji.types import floats, leaf

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
SMALL = ["algorithm.warmup=2000", "algorithm.capacity=4000"]
PPO = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "scale": {"envs_per_actor": 4}}
PPO |= {"stop": {"updates": 9}}
DQN = PPO | {"algorithm": {"name": "dqn"}}
PENDULUM = PPO | {"env": {"id": "Pendulum-v1"}}
SPREAD = PPO | {"env": {"id": "mpe/simple_spread"}}
LOCAL = ["scale.engine=local"]

MORE = {
    "streamed": (PPO, [*LOCAL, "scale.relax=periodic", "scale.actors=3"]),
    "streamed, learners": (PPO, [*LOCAL, "scale.relax=periodic", "scale.actors=4",
                                 "scale.learners=2"]),
    "window": (PPO, ["reuse.window=4", "relax.lead=0"]),
    "learners": (PPO, [*LOCAL, "scale.actors=4", "scale.learners=2"]),
    "gru": (PPO, ["network.recurrent=gru"]),
    "linear": (PPO, ["algorithm.schedule=linear"]),
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
        assert list(said.params.items()) == list(floats(policy.shapes).items()), "in this order"
        assert said.extras == dict(policy.extras)
        assert said.recurrent == {
            name: leaf(array.shape[1:], array.dtype) for name, array in policy.initial(2).items()
        }
        store = joined.store(transport)
        assert (said.selection, said.pieces) == (store.selection, store.pieces)
        trainer = algorithm.trainer(dataclasses.replace(spec, gradients=Gradients("gac")))
        assert trainer.params(0).layout == said.params
        fates, found = trainer.state.fates(), leaves(trainer.state.networks())
        assert said.models == {name: Model(leaf, fates[name]) for name, leaf in found.items()}
        assert said.gradients == any(x.transforms for x in trainer.state.optimizers.values())
        assert said.slots == getattr(store, "_slots", spec.window)
        assert said.prioritizes == hasattr(store, "prioritize")
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
    config = load_config(PPO, ["network.hidden=[300000, 300000]"])
    with contextlib.closing(config.env.make(1)) as env:
        spec = make_spec(config, env.spec)
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *_, **__: tensor)
    said = config.algorithm.describe(spec)
    assert said.models["policy.layers.1.weight"].leaf.shape == (300_000, 300_000)
