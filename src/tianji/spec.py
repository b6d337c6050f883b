"""What a config means to an algorithm: the sizes that follow from it, and the relaxation. What
cannot work is refused here, before anything is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NoReturn

from tianji.algorithm import ALGORITHMS, Algorithm, Spec, Traits, algorithm_class
from tianji.config import Config
from tianji.env import Env, EnvSpec, Halves
from tianji.errors import Refusal
from tianji.relax import Relaxation, Sizes, problem, relaxation

MIXING = ("average", "gossip")
"""values of relax.join by which groups exchange models"""


def make_spec(config: Config, env: EnvSpec, group: int = 0) -> Spec:
    """What the algorithm is told, with the derived sizes; refuses what it cannot work with."""
    scale, stop = config.scale, config.stop
    if scale.halves and scale.envs_per_actor < 2:
        raise Refusal(
            "scale.halves = true cannot be: one env has no halves. Set scale.halves = false, or "
            "scale.envs_per_actor to 2 or more."
        )
    spec = Spec(
        env=env,
        network=config.network,
        actors=scale.actors,
        envs=scale.envs_per_actor,
        T=scale.rollout_length,
        seed=config.seed,
        updates=stop.updates,
        steps=stop.steps,
        window=config.reuse.window,
        sends_early=config.relax.send_when is not None,
        learners=scale.learners,
        groups=scale.groups,
        group=group,
    )
    relax = relax_of(config, spec)
    _check_able(config, "relax.correct", relax.correct, "none", lambda able: able.corrects)
    _check_able(config, "relax.explore", relax.explore, "alike", lambda able: able.explores)
    if (relax.start == "stream" or relax.window > 1) and not config.algorithm.traits.once:
        raise Refusal(
            f'relax.start = "{relax.start}" and reuse.window = {relax.window} need a chooser that '
            f"can serve so; {config.algorithm.name} says that its own cannot. Set relax.start = "
            f'"batch" and reuse.window = 1, or use store.Fresh by store.chooser_once, and '
            f"Traits.once."
        )
    _check_able(
        config, "network.recurrent", recurrent := config.network.recurrent, "none",
        lambda able: (recurrent,) * able.remembers, "remember nothing",
    )  # fmt: skip
    spec = dataclasses.replace(
        spec, correct=relax.correct, explore=relax.explore, join=relax.join, start=relax.start
    )
    config.algorithm.check(spec)
    _check_shares(config.algorithm, spec)
    if relax.gradient != "none" and not config.algorithm.describe(spec).gradients:
        refuse_gradient(config.algorithm, relax.gradient)
    return spec


def _check_able(
    config: Config, key: str, word: str, plain: str,
    words: Callable[[Traits], tuple[str, ...]], lost: str = "be without effect",
) -> None:  # fmt: skip
    """Is a word of the config, unless it is the plain one, among those of the algorithm?"""
    if word in (plain, *words(config.algorithm.traits)):
        return
    able = [name for name in ALGORITHMS if word in words(algorithm_class(name).traits)]
    raise Refusal(
        f'{key} = "{word}" is nothing that {config.algorithm.name} can do, so it would {lost}. '
        f'Set {key} = "{plain}", or algorithm.name to one that can: {", ".join(able)}.'
    )


def _check_shares(algorithm: Algorithm, spec: Spec) -> None:
    """Can every learner of a group take an equal share of a batch?"""
    if spec.learners == 1:
        return
    whole = algorithm.describe(dataclasses.replace(spec, start="batch")).selection
    lengths = {leaf.shape[0] for leaf in whole.values()}
    if len(lengths) > 1:
        raise Refusal(
            f"scale.learners = {spec.learners} take equal shares of what {algorithm.name} chooses, "
            f"but its leaves have different lengths, {sorted(lengths)}, so there are none. Give "
            f"all leaves of `selection` one length, or set scale.learners = 1."
        )
    (length,) = lengths
    if not length % spec.learners:
        return
    near = min((n for n in range(1, 65) if length % n == 0), key=lambda n: abs(n - spec.learners))
    fit = max(1, round(length / spec.learners)) * spec.learners
    raise Refusal(
        f"scale.learners = {spec.learners} does not divide the {length} that a batch is made of "
        f"({', '.join(whole)}), so that their shares could not be equal. Set "
        f"scale.learners = {near}, or let a batch be made of {fit} (scale.actors for rollouts, "
        f"algorithm.batch_size for replay)."
    )


def refuse_gradient(algorithm: Algorithm, gradient: str) -> NoReturn:
    raise Refusal(
        f'relax.gradient = "{gradient}" is nothing that {algorithm.name} can do, so it would be '
        f"without effect. Give its Optimizer gradients=spec.gradients, and say so in its "
        f'description, or set relax.gradient = "none".'
    )


def relax_of(config: Config, spec: Spec) -> Relaxation:
    """The preset with the config's own fields; refuses what cannot work."""
    algorithm, scale, own = config.algorithm, config.scale, config.relax
    rows = spec.actors * spec.rows_per_rollout
    sizes = Sizes(
        on_policy=algorithm.traits.on_policy,
        alone=scale.engine == "serial",
        round=1 if algorithm.traits.on_policy else max(1, rows // algorithm.steps_per_update(spec)),
        actors=spec.actors,
        envs=spec.envs,
        groups=scale.groups,
        learners=scale.learners,
    )
    given = dataclasses.asdict(own) | {"window": config.reuse.window}
    fields = {k: v for k, v in given.items() if v is not None and not k.endswith("_when")}
    relax = relaxation(scale.relax, sizes, fields)
    if (wrong := problem(relax, sizes)) is not None:
        raise Refusal(wrong)
    for key in ("max_batch", "max_wait"):
        if key in fields and relax.infer == "actor":
            raise Refusal(
                f"relax.{key} = {fields[key]} is for an inference server, and there is none, so it "
                f'would do nothing. Set relax.infer = "server", or leave relax.{key} out.'
            )
    for key, value in dataclasses.asdict(config.join).items():
        if value is not None and relax.join not in MIXING:
            raise Refusal(
                f"join.{key} = {value} is for models that groups exchange, and relax.join = "
                f'"{relax.join}" exchanges none, so it would do nothing. Leave join.{key} out, or '
                f"set scale.groups to 2 or more and relax.join to one of {', '.join(MIXING)}."
            )
    if relax.join == "hogwild" and scale.device != "cpu":
        raise Refusal(
            f'scale.device = "{scale.device}" cannot step parameters that workers share in memory '
            f'(relax.join = "hogwild"). Set scale.device = "cpu", or scale.relax = "gala".'
        )
    if relax.join == "hogwild" and config.faults.nonfinite == "skip":
        raise Refusal(
            'faults.nonfinite = "skip" undoes an update, and relax.join = "hogwild" has no way to '
            "undo what others already build on: all of them would go on from NaN. Set "
            'faults.nonfinite = "rollback".'
        )
    if scale.rebalance:
        _check_rebalance(relax, sizes)
    if own.publish_when and math.isfinite(relax.lead):
        raise Refusal(
            f'relax.publish_when = "{own.publish_when}" may leave actors without '
            f"the version that relax.lead = {relax.lead:g} makes them wait for, and the run "
            f'would stand still. Set relax.lead = inf and relax.take = "boundary".'
        )
    if own.publish_when and relax.max_staleness is not None:
        raise Refusal(
            f'relax.publish_when = "{own.publish_when}" may be due less often '
            f"than relax.max_staleness = {relax.max_staleness} needs, and the run would stand "
            f"still: all that actors make in between would be thrown away. Leave "
            f'relax.max_staleness out and set scale.relax = "free".'
        )
    return relax


def _check_rebalance(relax: Relaxation, sizes: Sizes) -> None:
    """Can the number of active actors follow what is measured?"""
    why = None
    if sizes.alone:
        why = (
            "engine serial steps all actors in one process, where fewer would not make room for "
            'anything. Set scale.engine = "local"'
        )
    elif relax.hosts == "worker":
        why = (
            'each worker (relax.hosts = "worker") acts and learns in turn, so that its actor can '
            'never be spared. Set scale.relax = "tianji"'
        )
    elif sizes.actors < 2:
        why = (
            f"scale.actors = {sizes.actors} leaves nothing to choose from. Set it to the most "
            f"that there may be, 2 or more"
        )
    elif relax.lead == 0:
        why = (
            "relax.lead = 0 grants rounds of one rollout of every actor, so that one that is "
            'inactive would stop all. Set scale.relax = "one_step" or "tianji"'
        )
    if why is not None:
        raise Refusal(f"scale.rebalance = true cannot be: {why}, or scale.rebalance = false.")


def check_halves(config: Config, env: Env) -> None:
    """Can one half of the envs simulate while actions are chosen for the other?"""
    if not config.scale.halves:
        return
    why = None
    if not isinstance(env, Halves):
        why = f"{env.spec.id} steps all of its envs at once"
    elif config.relax.send_when is not None:
        why = "relax.send_when looks at rows that all envs have made"
    elif config.relax.infer == "server" or config.scale.relax == "seed":
        why = "a server chooses for all envs of an actor at once"
    if why is not None:
        raise Refusal(
            f"scale.halves = true cannot be: {why}, so nothing would overlap. Set scale.halves = "
            f"false."
        )
