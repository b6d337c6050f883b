"""What to change in a run, as far as the shares of its time alone say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tianji.critical import worked
from tianji.flow import GAIN
from tianji.relax import PRESETS, Sizes
from tianji.role_names import SERIAL, by_flow, role_kind, waiting, waits_for
from tianji.verdict import EVEN, IDLE, alone


def of_shares(
    time: Mapping[str, Mapping[str, float]],
    config: Mapping[str, Any],
    cores: int | None,
    scaling: Mapping[int, float],
    judged: bool = False,
) -> list[str]:
    """What the shares of time say about where to look; every number in it is one of theirs, or a
    bound that follows from them. `scaling`: updates per second of a learner by its cores, where a
    plan has measured them; `judged`: a verdict has found that no other spread would bring much, so
    that only what is left is said."""
    algorithm = config.get("algorithm", {})
    if host := alone(time):
        return _of_one_host(time[host], host == SERIAL and not judged, cores, algorithm)
    sides = by_flow(time)
    if "produced" not in sides or "consumed" not in sides:
        return []
    busy = {host: 1.0 - waiting(kinds) for host, kinds in time.items()}
    passing = by_flow(busy)
    actors, learner = passing["produced"], passing["consumed"]
    if busy.get("server", 0.0) > max(actors, learner):
        return [
            f"The inference server is busiest ({busy['server']:.0%}); actors wait for it "
            f'{sides["produced"].get("wait_server", 0.0):.0%} of their time. relax.infer = "actor" '
            f"lets each choose its own actions; fewer, larger asks (scale.envs_per_actor) help too."
        ]
    if passing.get("received", 0.0) > max(actors, learner, 0.85):
        return [
            f"The buffer is busiest ({passing['received']:.0%}). Longer rollouts "
            f"(scale.rollout_length) or more envs for each actor make fewer pieces to receive; "
            f"more groups (scale.groups) give it less to do."
        ]
    if max(actors, learner) < (0.85 if actors + learner <= 1.1 else IDLE):
        return [_of_turns(actors, learner, config, judged)]
    if min(actors, learner) >= EVEN * max(actors, learner):
        return [
            f"Actors ({actors:.0%} busy) and learner ({learner:.0%} busy) are busy alike: it is "
            f"balanced. More cores for both, or cheaper work, are what is left."
        ]
    if learner >= actors:
        return _of_learner(sides, actors, learner, config, cores, scaling, judged)
    room = actors / learner if learner > 0 else math.inf
    bottleneck = (
        f"The actors are the bottleneck: busy {actors:.0%}{_most(sides['produced'])}, while the "
        f"learner waits {1 - learner:.0%}. It could take up to {room:.1f} times as many steps "
        f"before it is the limit."
    )
    if judged:
        return [
            f"{bottleneck} By the model more actors would bring little, so cheaper steps are what "
            f"is left: a faster env or policy, or more envs for each actor "
            f"(scale.envs_per_actor), which it asks at once."
        ]
    used = number_of(config, "groups") * number_of(config, "actors")
    spare = "" if cores is None else f"; {used} actors run on a machine with {cores} cores"
    return [
        f"{bottleneck} More actors (scale.actors), or more envs for each "
        f"(scale.envs_per_actor){spare}."
    ]


def _of_turns(actors: float, learner: float, config: Mapping[str, Any], judged: bool) -> str:
    """Where neither is busy for long and both together are for about all of the time."""
    if not _takes_turns(config):
        return (
            f"Neither actors ({actors:.0%} busy) nor learner ({learner:.0%} busy) work for most of "
            f"their time, though they may overlap: time goes by between them. A larger relax.lead "
            f"lets acting run further ahead; longer rollouts (scale.rollout_length) and more envs "
            f"for each actor are handed over less often."
        )
    told = f"Acting ({actors:.0%}) and learning ({learner:.0%}) take turns rather than overlap"
    if judged:
        if learner < actors:
            return f"{told}, so cheaper acting helps most."
        return f"{told}, so cheaper learning helps most. {_shorter(config.get('algorithm', {}))}."
    gain = (actors + learner) / max(actors, learner)
    return (
        f"{told}. A preset with a lead, such as one_step or tianji, lets them: at most {gain:.2f} "
        f"times as fast, as the longer of the two remains."
    )


def _takes_turns(config: Mapping[str, Any]) -> bool:
    """Is the lead 0?"""
    lead = config.get("relax", {}).get("lead")
    preset = PRESETS.get(str(config.get("scale", {}).get("relax")))
    if lead is None and preset is not None:
        lead = preset(Sizes(on_policy=True, alone=False)).lead
    return bool(lead == 0)


def _of_learner(
    sides: Mapping[str, Mapping[str, float]],
    actors: float,
    learner: float,
    config: Mapping[str, Any],
    cores: int | None,
    scaling: Mapping[int, float],
    judged: bool,
) -> list[str]:
    """Where it is the bottleneck."""
    count = number_of(config, "actors")
    groups = number_of(config, "groups")
    learners = groups * number_of(config, "learners")
    free = None if cores is None else (cores - groups * count) // learners
    more = _of_cores(scaling, number_of(config, "cores"), free, judged)
    advice = [
        f"The learner is the bottleneck: busy {learner:.0%}{_most(sides['consumed'])}. "
        f"{_shorter(config.get('algorithm', {}))}; more actors would only wait.{more}"
    ]
    idle = sum(
        share for kind, share in sides["produced"].items() if role_kind(waits_for(kind)).flow
    )
    enough = max(1, math.ceil(count * (1.0 - idle) / 0.9))
    rest = config.get("scale", {}).get("rebalance") is True  # those that are not needed do
    if enough < count and not rest and not judged:
        advice.append(
            f"Actors wait {idle:.0%} of their time for it: {enough} in place of {count} could "
            f"make the same number of steps."
        )
    return advice


def _most(kinds: Mapping[str, float]) -> str:
    """The largest kind of work of a role that is busy."""
    most = max((kind for kind in kinds if not waits_for(kind)), default="",
               key=lambda kind: kinds[kind])  # fmt: skip
    return f", of which {most} is {kinds[most]:.0%} of its time" if most else ""


def _shorter(algorithm: Mapping[str, Any]) -> str:
    """What makes less work of updates, of what the algorithm has."""

    def at_least(key: str, least: int) -> bool:
        value = algorithm.get(key)
        return isinstance(value, int) and value >= least

    ways = ["fewer epochs (algorithm.epochs)"] * at_least("epochs", 2)
    ways += ["larger minibatches (a lower algorithm.minibatches)"] * at_least("minibatches", 2)
    ways += ["smaller batches (algorithm.batch_size)"] * at_least("batch_size", 2)
    told = " or ".join(ways) or "a smaller network (network.hidden)"
    told = f"{told[:1].upper()}{told[1:]} make{'' if ways else 's'} updates shorter"
    if at_least("new_steps", 1):
        return f"{told}, a larger algorithm.new_steps fewer of them"
    return told


def _of_cores(scaling: Mapping[int, float], now: int, free: int | None, judged: bool) -> str:
    """What more cores would do for a learner, of those that are free for each."""
    more = {cores: rate for cores, rate in scaling.items() if cores > now}
    if now not in scaling or not more:
        return " `tianji profile` tells whether more cores (scale.cores) do."
    there = {cores: rate for cores, rate in more.items() if free is None or cores <= free}
    if max(more.values()) < (1.0 + GAIN) * scaling[now]:
        return " More cores (scale.cores) do not, by the plan's profile."
    if max(there.values(), default=0.0) < (1.0 + GAIN) * scaling[now]:
        return " More cores (scale.cores) would, and actors have those that it needs."
    if judged:
        return ""
    enough = max(there.values()) / (1.0 + GAIN)
    few = min(cores for cores, rate in there.items() if rate >= enough)
    return (
        f" By the plan's profile, {few} cores (scale.cores) make {there[few] / scaling[now]:.2f} "
        f"times as many updates."
    )


def _of_one_host(
    shares: Mapping[str, float], overlap: bool, cores: int | None, algorithm: Mapping[str, Any]
) -> list[str]:
    """`overlap`: is it to be said what that would bring?"""
    sides = worked(shares)
    acting, learning = sides.get("produced", 0.0), sides.get("consumed", 0.0)
    if acting + learning <= 0:
        return []
    longer = "learning" if learning >= acting else "acting"
    shorter = f" {_shorter(algorithm)}." if learning >= acting else ""
    advice = [
        f"One process does all in turn: acting takes {acting:.0%} of its time and learning "
        f"{learning:.0%}, so cheaper {longer} helps most.{shorter}"
    ]
    gain = 1.0 / max(acting, learning)
    if overlap and gain > 1.05 and (cores is None or cores > 1):
        advice.append(
            f'With scale.engine = "local" acting and learning overlap: at most {gain:.2f} times as '
            f"fast, less what moving data between processes takes."
        )
    return advice


def number_of(config: Mapping[str, Any], key: str) -> int:
    """Of [scale]; 1 where it does not say."""
    value = config.get("scale", {}).get(key, 1)
    return value if isinstance(value, int) else 1
