"""Does an algorithm keep what its template promises?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tianji.algorithm import Algorithm, Metrics, Network, Trainer
from tianji.build import Built, build
from tianji.config import (
    CheckpointConfig,
    Config,
    EnvConfig,
    EvalConfig,
    RelaxConfig,
    ReuseConfig,
    ScaleConfig,
    StopConfig,
)
from tianji.driver import Serial, Shuffled
from tianji.env import Env
from tianji.learner import UPDATE
from tianji.types import Params, Rollout, sha256

SCALE = ScaleConfig(actors=2, envs_per_actor=4, rollout_length=8)
AS_PRESET = RelaxConfig()
SMALL = Network(hidden=(8,))


def check_algorithm(
    algorithm: Algorithm, make: Callable[[int], Env], updates: int = 4, network: Network = SMALL
) -> None:
    """Do the parts of an algorithm keep their promises, on the env that `make(num_envs)` returns?

    Raises AssertionError with the consequence and the remedy. Trains a few updates with two actors
    of four envs and rollouts of eight steps, so hyperparameters must fit such a small run.
    """
    first, second = (_learnt(algorithm, make, updates, network) for _ in range(2))
    assert first == second, (
        "two runs with one seed learnt different things, so no result could be repeated. Draw only "
        "from the generators that are given or that role.generator makes."
    )
    assert _learnt(algorithm, make, updates, network, seed=1) != first, (
        "another seed learns the same, so runs over seeds say nothing. Use spec.seed."
    )
    _check_any_order(algorithm, make, updates, network)
    _check_state(algorithm, make, updates, network)
    _check_policy(algorithm, make, network)


def config_for(
    algorithm: Algorithm,
    seed: int = 0,
    scale: ScaleConfig = SCALE,
    relax: RelaxConfig = AS_PRESET,
    network: Network = SMALL,
) -> Config:
    """A small run of this algorithm; the env is not named, but given to `build`."""
    return Config(
        env=EnvConfig(id="given"),
        algorithm=algorithm,
        network=network,
        scale=scale,
        relax=relax,
        reuse=ReuseConfig(),
        stop=StopConfig(updates=1000),
        eval=EvalConfig(),
        checkpoint=CheckpointConfig(),
        seed=seed,
    )


def run_updates(built: Built, driver: Serial, updates: int) -> None:
    """Step until so many more updates are made."""
    end = built.learner.version + updates
    while built.learner.version < end:
        driver.step()


def _learnt(
    algorithm: Algorithm,
    make: Callable[[int], Env],
    updates: int,
    network: Network,
    seed: int = 0,
) -> str:
    built = build(config_for(algorithm, seed, network=network), make)
    built.learner.begin()
    run_updates(built, Serial(built.roles), updates)
    learnt = sha256(built.learner.networks())
    built.close()
    return learnt


def _check_any_order(
    algorithm: Algorithm, make: Callable[[int], Env], updates: int, network: Network
) -> None:
    """With lead 0 the order in which roles are stepped changes nothing that is learnt."""
    serially = _learnt(algorithm, make, updates, network)
    for order in range(3):
        built = build(config_for(algorithm, network=network), make)
        built.learner.begin()
        run_updates(built, Shuffled(built.roles, order), updates)
        assert sha256(built.learner.networks()) == serially, (
            "the order of the roles' steps changed what was learnt, so parallel runs would differ "
            "from serial ones. Let the trainer use nothing but the parts it takes, in their order."
        )
        built.close()


def _check_state(
    algorithm: Algorithm, make: Callable[[int], Env], updates: int, network: Network
) -> None:
    """A trainer that loads another's state goes on exactly as the other does."""
    built = build(config_for(algorithm, network=network), make)
    built.learner.begin()
    driver = Serial(built.roles)
    run_updates(built, driver, updates)
    state = built.learner.state()["trainer"]
    other = algorithm.trainer(built.spec)
    other.load_state(state)
    assert sha256(other.networks()) == sha256(built.learner.networks()), (
        "state() and load_state() lose something that networks() names, so a resumed run would "
        "not be the same run. Save everything that is learnt."
    )
    built.learner._trainer = _Both(built.learner._trainer, other)
    while driver.step() is not UPDATE:
        pass
    assert sha256(other.networks()) == sha256(built.learner.networks()), (
        "after load_state() the next update differs, so a resumed run would not be the same run. "
        "Save the optimizer, the generators and all that an update depends on."
    )
    _check_networks(other)
    assert other.finite(), "finite() says no, although training goes well"
    built.close()


def _check_networks(trainer: Trainer) -> None:
    """Everything learnt has a fate, and can be taken out and put back."""
    learnt, fates = trainer.networks(), trainer.fates()
    assert set(fates.values()) <= {"averaged", "local"}, (
        f"fates() knows {sorted(set(fates.values()))}; it is one of averaged and local"
    )
    assert learnt.keys() <= fates.keys(), (
        f"fates() leaves {sorted(learnt.keys() - fates.keys())} out, so groups that join their "
        f"models would not know what to do with it. Name it averaged or local."
    )
    strange = {k for k, fate in fates.items() if fate == "averaged"} - learnt.keys()
    assert not strange, (
        f"fates() says that {sorted(strange)} is averaged, but networks() does not give it, so it "
        f"would not be. Name it local, or give it."
    )
    before = {name: array.copy() for name, array in learnt.items()}
    trainer.load_networks({name: array.copy() for name, array in learnt.items()})
    assert sha256(trainer.networks()) == sha256(before), (
        "load_networks(networks()) changes what was learnt, so joining groups would, too."
    )
    trainer.load_networks({name: array + 1 for name, array in before.items()})
    changed = trainer.networks()
    lost = [name for name, array in before.items() if np.array_equal(changed[name], array)]
    assert not lost, (
        f"load_networks() ignores {sorted(lost)}, so groups would not be joined. Load all."
    )
    trainer.load_networks(before)


class _Both:
    """Two trainers that take the same parts; the first one is asked for everything else."""

    def __init__(self, first: Trainer, second: Trainer) -> None:
        self._first, self._second = first, second

    def take(self, part: Rollout) -> None:
        self._first.take(part)
        self._second.take(part)

    def finish(self) -> Metrics:
        self._second.finish()
        return self._first.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


def _check_policy(algorithm: Algorithm, make: Callable[[int], Env], network: Network) -> None:
    """The policy takes what the trainer gives, and answers in the promised shapes."""
    env = make(4)
    built = build(config_for(algorithm, network=network), make)
    spec, policy = built.spec, algorithm.policy(built.spec)
    params = algorithm.trainer(spec).params(0)
    assert dict(params.shapes) == dict(policy.shapes), (
        "the trainer's params are not those that the policy's shapes name, so a snapshot would be "
        "read wrongly. Make both from one table."
    )
    copy = Params(policy.shapes)
    np.copyto(copy.flat, params.flat)
    policy.load(copy)
    observation, state = env.reset(0), policy.initial(4)
    drawn = [policy.act(observation, state, np.random.default_rng(3)) for _ in range(2)]
    leaf = spec.env.action_leaf
    assert drawn[0].action.shape == (4, *leaf.shape), (
        f"actions have shape {drawn[0].action.shape}, the env wants {(4, *leaf.shape)}"
    )
    assert np.array_equal(drawn[0].action, drawn[1].action), (
        "equal generators gave different actions, so nothing could be repeated"
    )
    assert set(drawn[0].extras) == set(policy.extras), (
        f"act records {sorted(drawn[0].extras)}, the layout promises {sorted(policy.extras)}"
    )
    greedy = [policy.act(observation, state, None).action for _ in range(2)]
    assert np.array_equal(greedy[0], greedy[1]), (
        "without a generator the policy must be deterministic"
    )
    env.close()
    built.close()
