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
from tianji.description import Differs
from tianji.driver import Serial, Shuffled
from tianji.env import Env, TimeStep
from tianji.learner import UPDATE, NonFinite
from tianji.train_state import TrainState
from tianji.types import Array, Leaves, Params, Rollout, rollout_layout, sha256

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
    _check_description(algorithm, make, network)
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
    _check_snapshot(algorithm, make, updates, network)
    _check_extremes(algorithm, make, updates, network)


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


def _check_description(algorithm: Algorithm, make: Callable[[int], Env], network: Network) -> None:
    """The parts are what the algorithm says of them before they are made."""
    try:
        built = build(config_for(algorithm, network=network), make)
    except Differs as error:
        raise AssertionError(str(error)) from error
    built.close()


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
    other.state.load_state(state)
    assert sha256(other.state.networks()) == sha256(built.learner.networks()), (
        "state() and load_state() lose something that networks() names, so a resumed run would "
        "not be the same run. Save everything that is learnt."
    )
    built.learner._trainer = _Both(built.learner._trainer, other)
    while driver.step() is not UPDATE:
        pass
    assert sha256(other.state.networks()) == sha256(built.learner.networks()), (
        "after load_state() the next update differs, so a resumed run would not be the same run. "
        "Save the optimizer, the generators and all that an update depends on."
    )
    _check_networks(other.state)
    assert other.state.finite(), "finite() says no, although training goes well"
    built.close()


def _check_networks(state: TrainState) -> None:
    """Everything learnt has a fate, and can be taken out and put back."""
    learnt, fates = state.networks(), state.fates()
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
    state.load_networks({name: array.copy() for name, array in learnt.items()})
    assert sha256(state.networks()) == sha256(before), (
        "load_networks(networks()) changes what was learnt, so joining groups would, too."
    )
    state.load_networks({name: array + 1 for name, array in before.items()})
    changed = state.networks()
    lost = [name for name, array in before.items() if np.array_equal(changed[name], array)]
    assert not lost, (
        f"load_networks() ignores {sorted(lost)}, so groups would not be joined. Load all."
    )
    state.load_networks(before)


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
    params, said = algorithm.trainer(spec).params(0), algorithm.describe(spec)
    copy = Params(said.params)
    np.copyto(copy.buffer, params.buffer)
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
    found = {name: array.shape[1:] for name, array in drawn[0].extras.items()}
    assert found == {name: leaf.shape for name, leaf in said.extras.items()}, (
        f"act records {found}, describe() says {said.extras}, so that actors would have no place "
        f"for it"
    )
    greedy = [policy.act(observation, state, None).action for _ in range(2)]
    assert np.array_equal(greedy[0], greedy[1]), (
        "without a generator the policy must be deterministic"
    )
    env.close()
    built.close()


def _check_snapshot(
    algorithm: Algorithm, make: Callable[[int], Env], updates: int, network: Network
) -> None:
    """What travels is what was learnt, and all that acting depends on."""
    env = make(4)
    built = build(config_for(algorithm, network=network), make)
    built.learner.begin()
    run_updates(built, Serial(built.roles), updates)
    policies = [algorithm.policy(built.spec) for _ in range(2)]
    params = built.learner._trainer.params(built.learner.version)
    for policy in policies:
        copy = Params(params.layout)
        np.copyto(copy.buffer, params.buffer)
        policy.load(copy)
    observation = env.reset(0)
    for seed in (None, 3):
        acts = [
            policy.act(
                {name: array.copy() for name, array in observation.items()},
                policy.initial(4),
                None if seed is None else np.random.default_rng(seed),
            )
            for policy in policies
        ]
        assert np.array_equal(acts[0].action, acts[1].action), (
            "two policies that loaded one snapshot act differently, so actors would, too. Let "
            "acting depend on nothing but the params, the observation and the generator."
        )
    learnt = {k: a.astype(np.float32) for k, a in built.learner.networks().items()}
    strange = [k for k in params if k in learnt and not np.array_equal(params[k], learnt[k])]
    assert not strange, (
        f"params() gives another {strange} than networks() does, so actors would not act with what "
        f"is learnt. Write all of it in params()."
    )
    env.close()
    built.close()


def _check_extremes(
    algorithm: Algorithm, make: Callable[[int], Env], updates: int, network: Network
) -> None:
    """Where numbers are huge, or no step is valid, nothing becomes NaN without a word."""
    built = build(config_for(algorithm, network=network), lambda num_envs: _Extreme(make(num_envs)))
    built.learner.begin()
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            run_updates(built, Serial(built.roles), updates)
    except NonFinite:
        built.close()
    else:
        _all_finite(built.learner._trainer, "observations of 1e6 and rewards of 1e4")
        env = _Extreme(make(4))
        policy = algorithm.policy(built.spec)
        policy.load(built.learner._trainer.params(built.learner.version))
        action = policy.act(env.reset(0), policy.initial(4), np.random.default_rng(0)).action
        assert np.isfinite(action).all(), (
            "observations of 1e6 give actions that are not finite, so an env would fail on them. "
            "Bound what is computed from them."
        )
        env.close()
        built.close()
    if algorithm.traits.on_policy:
        _check_no_steps(algorithm, make, network)


def _check_no_steps(algorithm: Algorithm, make: Callable[[int], Env], network: Network) -> None:
    """A batch of rows that only reset their envs is learnt from without harm."""
    built = build(config_for(algorithm, network=network), make)
    trainer = algorithm.trainer(built.spec)
    layout = rollout_layout(built.assembly.row, built.spec.T, built.spec.envs)
    for _ in range(built.spec.actors):
        leaves = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in layout.items()}
        trainer.take(Rollout.over(leaves))
    metrics = trainer.finish()
    assert all(np.isfinite(value) for value in metrics.values()), (
        f"a batch without a valid step gives {metrics}, which would stop the run. Leave means over "
        f"nothing out."
    )
    _all_finite(trainer, "a batch without a valid step")
    built.close()


def _all_finite(trainer: Trainer, after: str) -> None:
    """Is what was learnt finite, and does the trainer know?"""
    bad = [name for name, array in trainer.state.networks().items() if not np.isfinite(array).all()]
    assert not bad, (
        f"{after} made {bad} not finite, and nothing said so: actors would get it. Let finite() "
        f"look at all that is learnt, or bound it."
    )
    assert trainer.state.finite(), f"finite() says no after {after}, although all is finite"


class _Extreme:
    """An env whose observations and rewards are as large as they may ever be."""

    def __init__(self, env: Env) -> None:
        self.spec, self.num_envs = env.spec, env.num_envs
        self._env = env
        self._clock = 0

    def reset(self, seed: int) -> Leaves:
        return self._far(self._env.reset(seed))

    def step(self, action: Array) -> TimeStep:
        step = self._env.step(action)
        self._clock += 1
        sign = 1.0 if self._clock % 2 else -1.0
        reward = np.full_like(step.reward, sign * 1e4)
        valid = step.valid.reshape(-1, *(1,) * (reward.ndim - 1))
        far = self._far(step.observation)
        return step._replace(observation=far, reward=np.where(valid, reward, np.float32(0)))

    def render(self) -> Array:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _far(self, observation: Leaves) -> Leaves:
        """1e6, -1e6 or 0, in turn over envs and time; of whole numbers, the ends of their range.
        What says who may do what stays as it is."""
        turn = (np.arange(self.num_envs) + self._clock) % 3
        found = dict(observation)
        for name in ("obs", "state"):
            if name in found and found[name].dtype != np.bool_:
                array = found[name]
                whole = np.issubdtype(array.dtype, np.integer)
                ends = np.iinfo(array.dtype) if whole else None
                values = (1e6, -1e6, 0) if ends is None else (ends.max, ends.min, 0)
                each = np.array(values, array.dtype)[turn]
                each = each.reshape(-1, *(1,) * (array.ndim - 1))
                found[name] = np.broadcast_to(each, array.shape).copy()
        return found
