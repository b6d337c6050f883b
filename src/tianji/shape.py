"""What a config would be if its roles were spread in other ways, without a run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

from tianji.algorithm import hyperparameter
from tianji.balance import Balance
from tianji.build import make_setup
from tianji.config import Config, EvalConfig, JoinConfig
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.graph import Setup, balance_of, check_memory, make_graph
from tianji.plan import Choice, Task
from tianji.relax import PRESETS, Relaxation, Sizes
from tianji.spec import check_halves


class Seen(NamedTuple):
    """What one env of a config looks like."""

    env: EnvSpec
    seconds: float
    """to make and reset it"""


def template(config: Config) -> Config:
    """The config with everything of a run in one place: one actor with all envs, one learner.
    Refuses what no plan knows."""
    scale = config.scale
    if scale.env_threads > 1:
        raise Refusal(
            f"scale.env_threads = {scale.env_threads} lets every actor use several cores, and a "
            f"plan gives each one core, so that its prediction would not hold and cores would be "
            f"shared. Leave scale.env_threads out: more actors use the same cores. Or set "
            f"scale.actors yourself."
        )
    one = dataclasses.replace(
        scale, engine="local", actors=1, learners=1, groups=1, cores=1, pin=False, rebalance=False,
        envs_per_actor=scale.actors * scale.envs_per_actor,
    )  # fmt: skip
    # One group joins nobody, one actor has no ladder of shares to explore by, and with all envs it
    # may have more than a server's batch.
    alone = dataclasses.replace(
        config, scale=one, eval=EvalConfig(), join=JoinConfig(), auto=False
    ).relaxed(join="none", max_batch=None, explore="alike")
    if not works(config):
        return alone
    # One worker is a serial run: its actor, its buffer and its learner take turns.
    correct = _preset(config).correct
    if config.relax.correct is None and correct != "none":
        alone = alone.relaxed(correct=correct)
    return alone.scaled(relax="sync").relaxed(hosts=None)


def works(config: Config) -> bool:
    """Does each group act and learn in one process?"""
    return (config.relax.hosts or _preset(config).hosts) == "worker"


def _preset(config: Config) -> Relaxation:
    """The relaxation that a config names, before fields that it sets."""
    return PRESETS[config.scale.relax](Sizes(config.algorithm.traits.on_policy, alone=False))


def see(config: Config) -> Seen:
    """Make an env, twice: the first one may have much to import."""
    scale, took = config.scale, 0.0
    for _ in range(2):
        begun = time.perf_counter()
        with contextlib.closing(config.env.make(1 + scale.halves, False, 1, scale.halves)) as env:
            env.reset(0)
            took = (time.perf_counter() - begun) / env.num_envs
            check_halves(config, env)
    return Seen(env.spec, took)


def join(config: Config, env: EnvSpec) -> tuple[Setup, Balance]:
    """What a run would be made from; refuses what a run would refuse."""
    setup = make_setup(config, env)
    check_memory(config, make_graph(config, setup))
    return setup, balance_of(config, setup)


def spread(config: Config, choice: Choice) -> Config:
    """The config with its roles spread as a choice says; what is learnt stays the same."""
    scale = dataclasses.replace(
        config.scale,
        engine=choice.engine,
        actors=choice.actors,
        envs_per_actor=choice.envs,
        rollout_length=choice.rollout_length,
        cores=choice.cores,
        learners=choice.learners,
        groups=choice.groups,
    )
    alone = config.scale.groups > choice.groups == 1 and not works(config)
    if alone:  # it has nobody to join
        config = dataclasses.replace(config.relaxed(join=None), join=JoinConfig())
    return dataclasses.replace(config, scale=scale, auto=False)


def steps_per_update(config: Config, choice: Choice, env: EnvSpec) -> int:
    """What an update would follow; refuses what a run would refuse."""
    return join(spread(config, choice), env)[1].steps_per_update


def possible(config: Config, choice: Choice, env: EnvSpec, task: Task) -> bool:
    """Would a run begin that way, and learn from as much at an update?"""
    try:
        return steps_per_update(config, choice, env) == task.rows
    except Refusal:
        return False


def task_of(config: Config, env: EnvSpec) -> Task:
    """What a config asks for."""
    setup, balance = join(config, env)
    spec, relax, algorithm = setup.spec, setup.relax, config.algorithm
    rows = balance.steps_per_update
    capacity = hyperparameter(algorithm, "capacity", 1 << 62)
    return Task(
        rows=rows,
        batch=rows if algorithm.traits.on_policy else hyperparameter(algorithm, "batch_size", rows),
        on_policy=algorithm.traits.on_policy,
        lead=relax.lead,
        streams=relax.start == "stream",
        envs=spec.actors * spec.envs,
        T=spec.T,
        abreast=relax.lead <= max(1, spec.actors * spec.rows_per_rollout // rows),
        passes=relax.lead > 0 and relax.late == "pass",
        server=relax.infer == "server",
        most_rows=max(spec.actors * spec.rows_per_rollout, capacity // 16),
    )


def task_of_all(config: Config, env: EnvSpec) -> Task:
    """What a config asks for, however its roles are spread."""
    task = task_of(template(config), env)
    return dataclasses.replace(task, workers=works(config), max_batch=config.relax.max_batch)


def begins(config: Config, env: EnvSpec) -> bool:
    """Would such a run begin?"""
    try:
        join(config, env)
    except Refusal:
        return False
    return True


def shares(config: Config) -> dict[int, bool]:
    """Into how many equal shares what an update takes can be cut, by its envs; and whether
    minibatches then have the size that they have."""
    envs = config.scale.envs_per_actor
    if not config.algorithm.traits.on_policy:
        return {1: True}
    minibatches = hyperparameter(config.algorithm, "minibatches", 1)
    return {n: minibatches % n == 0 for n in range(1, envs + 1) if envs % n == 0}


def with_share(config: Config, share: int) -> Config:
    """The config with an update of one of so many shares of what it takes."""
    if share == 1:
        return config
    algorithm: Any = config.algorithm
    if hasattr(algorithm, "minibatches"):
        fewer = max(1, algorithm.minibatches // share)
        algorithm = dataclasses.replace(algorithm, minibatches=fewer)
    smaller = config.scaled(envs_per_actor=config.scale.envs_per_actor // share)
    return dataclasses.replace(smaller, algorithm=algorithm)


def without_warmup(config: Config, env: EnvSpec) -> Config:
    """Without most of it, at least: the first update is waited for."""
    warmup, fewer = hyperparameter(config.algorithm, "warmup", 0), 256
    while fewer < warmup:
        algorithm: Any = dataclasses.replace(config.algorithm, warmup=fewer)  # type: ignore[type-var]
        shorter = dataclasses.replace(config, algorithm=algorithm)
        if begins(shorter, env):
            return shorter
        fewer *= 2
    return config
