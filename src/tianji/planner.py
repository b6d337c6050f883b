"""From a config and a profile to a plan, and from a plan to the config that follows it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tianji import profile as profiles
from tianji import profiler, shape
from tianji.annotated import Reader, expect, table
from tianji.config import Config, ScaleConfig
from tianji.env import EnvSpec
from tianji.errors import Refusal, wrong_with
from tianji.machine import cores as cores_here
from tianji.machine import gpu_model
from tianji.plan import (
    Choice,
    Knee,
    Plan,
    Prediction,
    Rates,
    Task,
    between,
    choices,
    collection_seconds,
    knee,
    plan,
    predict,
    sharing,
)
from tianji.profile import Profile
from tianji.view.status import human

MOST = {"envs": 1_000_000, "rollout_length": 1_000_000}
"""that may be asked about; of all else, 1000"""
FIELDS = ("engine", "actors", "envs", "rollout_length", "cores", "learners", "groups")
CHOSEN = tuple("envs_per_actor" if name == "envs" else name for name in FIELDS)
"""what a plan sets, by its names in a config's scale"""
NEAR = 0.05
"""share by which predictions of two ways may differ, if in truth they are the same"""
DEFAULTS = ScaleConfig()
WRITTEN = Reader(entry=(1e-12, 1e12))
"""what may have been predicted, in steps per second"""
GLANCE = "from a look of 2 s; `tianji profile` would know better"


def choice_of(config: Config) -> Choice:
    """How a config spreads its roles."""
    scale = config.scale
    return Choice(
        scale.engine, scale.actors, scale.envs_per_actor, scale.rollout_length, scale.cores,
        scale.learners, scale.groups, "worker" if shape.works(config) else "apart",
    )  # fmt: skip


def make(
    config: Config, profile: Profile, cores: int | None = None, groups: int | None = None
) -> Plan:
    """The best way to spread a config over so many cores, by default all that there are. With as
    many groups as it has or, if `groups` is given, at most so many: each has batches of its own.
    Workers are as many as are best."""
    cores = _cores(cores)
    env, task = shape.see(shape.template(config)).env, profile.task
    allowed, counts = _allowed(config, task, env, groups), _counts(config, task, groups)
    found = plan(task, profile.rates, cores, allowed, counts)
    if found is None:
        raise _no_way(config, task, env, cores, groups)
    of_gpu = _of_gpu(config, found.best, cores, groups)
    return dataclasses.replace(found, notes=(*found.notes, *of_gpu))


def _counts(config: Config, task: Task, groups: int | None) -> Sequence[int]:
    """Of groups that a plan may have."""
    own = 1 if task.workers else config.scale.groups
    return range(own, own + 1) if groups is None else range(1, groups + 1)


def _allowed(
    config: Config, task: Task, env: EnvSpec, groups: int | None
) -> Callable[[Choice], bool]:
    def allowed(choice: Choice) -> bool:
        few = groups is None or choice.groups <= groups
        return few and shape.possible(config, choice, env, task)

    return allowed


def _no_way(config: Config, task: Task, env: EnvSpec, cores: int, groups: int | None) -> Refusal:
    """Why there is no plan."""
    counts = _counts(config, task, groups)
    if config.scale.rebalance and cores < 3 * min(counts):
        return Refusal(
            f"scale.rebalance = true lets some of several actors rest, which with a learner need 3 "
            f"cores in each group, and there are {cores}, so there is no plan. Set "
            f"scale.rebalance = false."
        )
    if 2 * (least := min(counts)) > cores > 1:
        return Refusal(
            f"{config.name} has {least} groups, each with an actor and a learner, which need "
            f"{2 * least} cores, and there are {cores}, so there is no plan. Run it as it is, and "
            f"some will share a core; or let a plan have fewer by --groups {max(1, cores // 2)}, "
            f"which learn otherwise: each has batches of its own."
        )
    # What was asked for tells more than what was not.
    ways = sorted(choices(task, cores, counts), key=lambda way: way.engine != config.scale.engine)
    why = next(filter(None, (_refused(config, choice, env) for choice in ways)), "none")
    return Refusal(
        f"no way to spread {config.name} over {cores} core{'s' * (cores > 1)} is possible, so "
        f"there is no plan. Give it more cores, or set scale."
        f"{'groups' if task.workers else 'actors'} yourself. The first way that was tried: {why}"
    )


def _refused(config: Config, choice: Choice, env: EnvSpec) -> str:
    """Why a run would not begin that way; empty: it would."""
    try:
        shape.steps_per_update(config, choice, env)
    except Refusal as error:
        return f"{choice}: {error}"
    return ""


def check(
    config: Config, cores: int | None, changes: Sequence[str], groups: int | None = None
) -> None:
    """Refuses, before anything is measured, what could not be answered afterwards."""
    if changes:  # the model answers, whatever can be planned
        _cores_of(_changed(config, changes), cores)
        return
    cores = _cores(cores)
    env = shape.see(shape.template(config)).env
    task = shape.task_of_all(config, env)
    # What cannot begin with one thread and one learner needs more cores, not more of these.
    ways = choices(task, cores, _counts(config, task, groups))
    if not any(map(_allowed(config, task, env, groups), ways)):
        raise _no_way(config, task, env, cores, groups)


def _changed(config: Config, changes: Sequence[str]) -> Choice:
    """How a config spreads its roles, with some fields changed, such as actors=16."""
    choice = choice_of(config)
    asked = {change.partition("=")[0] for change in changes}
    for change in changes:
        key, _, text = change.partition("=")
        most = MOST.get(key, 1000)
        if key == "engine":
            known, why = text in ("serial", "local"), f'cannot be "{text}"'
        else:
            known = text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most
            why = f"can be a whole number from 1 to {most:,}"
        if key not in FIELDS or not known:
            why = why if key in FIELDS else "is not one of these"
            raise Refusal(
                f'"{change}" cannot be asked: {key} {why}. Write one of {", ".join(FIELDS)} and '
                f"its value, such as actors=16 or engine=local (or serial); to change several, "
                f"give --what-if for each."
            )
        if choice.hosts == "worker" and key in ("actors", "learners", "engine"):
            raise Refusal(
                f'"{change}" cannot be asked of workers, each of which has one actor and one '
                f"learner in its own process. Ask groups=N for so many workers."
            )
        if sum(other.partition("=")[0] == key for other in changes) > 1:
            raise Refusal(
                f"{key} is asked more than once, so that all but one would do nothing. Ask one "
                f"value at a time."
            )
        changed: dict[str, Any] = {key: text if key == "engine" else int(text)}
        choice = dataclasses.replace(choice, **changed)
    several = max(choice.learners, choice.groups) > 1
    if choice.engine == "serial" and several and "engine" in asked:
        raise Refusal(
            "engine=serial is one process, which has one learner and one group. Ask engine=local."
        )
    if choice.engine == "serial" and (several or choice.actors > 1) and "engine" not in asked:
        choice = dataclasses.replace(choice, engine="local")
    return choice


class Answer(NamedTuple):
    """What the model says of one way to spread a run."""

    prediction: Prediction
    notes: tuple[str, ...]
    """what is not the same as in the config, so that the prediction is not like for like"""


def what_if(config: Config, profile: Profile, changes: Sequence[str], cores: int | None) -> Answer:
    """What the model says of the config with some fields of its choice changed; where they need
    more cores than there are, as if there were so many."""
    choice = sharing(_changed(config, changes), profile.rates)
    cores = _cores_of(choice, cores)
    if choice.learners > (most := max(profile.rates.team)):
        raise Refusal(
            f"what {choice.learners} learners take for an update is not known: the profile has at "
            f"most {most}. They are measured on a CPU with a core for each and for as many actors, "
            f"where every learner has an equal share of a batch."
        )
    if profile.rates.device == "cpu" and choice.cores > (most := profile.rates.most_learner_cores):
        raise Refusal(
            f"what {choice.cores} cores of a learner take for an update is not known: the profile "
            f"has at most {most}, all that were measured."
        )
    task, rates = _with_batch(profile, choice)
    return Answer(predict(task, rates, choice, cores), _otherwise(config, profile.task, choice))


def _otherwise(config: Config, task: Task, choice: Choice) -> tuple[str, ...]:
    """What a choice changes of what is learnt."""
    env = shape.see(shape.template(config)).env
    try:
        rows = shape.steps_per_update(config, choice, env)
    except Refusal as refusal:
        return (f"such a run would be refused: {refusal}",)
    notes = list[str]()
    if rows != task.rows:
        shared, left = divmod(task.envs, choice.actors)
        other = shared != choice.envs and choice.rollout_length == task.T and choice.actors > 1
        alike = f"; --what-if envs={shared} shares the same envs among the actors"
        notes.append(
            f"an update would follow {rows:,} steps instead of {task.rows:,}, which changes what "
            f"is learnt and how long it takes" + alike * (other and not left)
        )
    elif task.on_policy and choice.rollout_length != task.T:
        notes.append(
            f"rollouts would have {choice.rollout_length} steps of each env instead of {task.T}, "
            f"which changes what is learnt"
        )
    if choice.groups != config.scale.groups and not task.workers:
        notes.append("every group has batches of its own, which changes what is learnt")
    if (used := choice.cores_used) > (here := cores_here()):
        notes.append(
            f"this is as if there were {used} cores: on the {here} that there are, roles would "
            f"share them and each would be slower"
        )
    return tuple(notes)


def _cores_of(choice: Choice, asked: int | None) -> int:
    """What a choice is asked about with: if not said otherwise, as many as it needs."""
    cores, used = _cores(asked), choice.cores_used
    if asked is not None and used > asked:
        raise Refusal(
            f"{choice} needs {used} cores and --cores says {asked}, so that roles would share "
            f"some, of which the model knows nothing. Leave --cores out, and it answers as if "
            f"there were {used}."
        )
    return max(cores, used)


def _with_batch(profile: Profile, choice: Choice) -> tuple[Task, Rates]:
    """Rollouts that are consumed once are a batch, whatever their number: with the one that a
    choice makes, by what was measured with half and twice of the config's."""
    task, rates = profile.task, profile.rates
    rows = choice.actors * choice.rows_per_rollout
    if not task.on_policy or rows == task.rows or len(profile.batches) < 2:
        return task, rates
    longer = between(profile.by_batch(), round(task.batch * rows / task.rows), above=1.0)
    task = dataclasses.replace(task, rows=rows, batch=round(task.batch * rows / task.rows))
    return task, dataclasses.replace(
        rates,
        learn={cores: longer * seconds for cores, seconds in rates.learn.items()},
        inside={cores: longer * seconds for cores, seconds in rates.inside.items()},
        take=longer * rates.take,
    )


def _cores(asked: int | None) -> int:
    here = cores_here()
    if asked is not None and asked > here:
        raise Refusal(
            f"--cores {asked} is more than the {here} that this process may use (by its affinity "
            f"and its control group), so that a plan could not be kept. Leave it out, or ask "
            f"--what-if actors={asked - 1}, which answers from the model."
        )
    return here if asked is None else asked


def _of_gpu(config: Config, best: Prediction, cores: int, groups: int | None) -> list[str]:
    """What the GPU that is here brings, if that is known."""
    if config.scale.device != "cpu" or gpu_model() is None:
        return []
    there = config.scaled(device="cuda")
    unknown = ["there is a GPU: `tianji plan CONFIG --gpus 1` measures what it brings"]
    try:
        if (measured := profiles.cached(there)) is None:
            return unknown
        with_gpu = make(there, measured, cores, groups).best
    except Refusal:  # a profile that cannot be read; that command would say so
        return unknown
    gain = f"{with_gpu.new / best.new - 1:+.0%}".replace("%", " %")
    return [f"the GPU brings {gain} ({with_gpu.choice}): --gpus 1 plans with it"]


def tree(found: Plan, profile: Profile) -> dict[str, Any]:
    """A plan as it is written: into a run folder, into a file, at the end of a command."""
    about = {"facts": profile.facts, "whole": profile.whole, "config": profile.config,
             "varied": profile.varied, "measured": profile.made}  # fmt: skip
    if found.best.choice.hosts == "apart":  # a worker hands nothing on
        n, collecting = _collecting(found.best.choice, profile)
        about["knee"] = n._asdict() | {"collecting": collecting}
    return found.tree() | about


def _collecting(choice: Choice, profile: Profile) -> tuple[Knee, float]:
    """Equation (1), and what it says of the rollouts of one update."""
    rates, task = profile.rates, profile.task
    if task.server:
        step = rates.asked(choice.envs, choice.actors, task.max_batch).step
        rates = dataclasses.replace(rates, act={choice.envs: step})
    return (
        knee(rates, choice.envs, choice.rollout_length),
        collection_seconds(rates, choice, task.rows),
    )


def write(path: Path, written: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(written, indent=2) + "\n")
    except OSError as error:
        raise Refusal(
            f"{path} cannot be written ({error.strerror}), so that no run could follow the plan. "
            f"Choose another place with --save."
        ) from error


def follow(config: Config, path: Path | None) -> tuple[Config, dict[str, Any]]:
    """The config as a plan spreads it, and the plan: the one that a file has, or the best that
    there is, from the profile if one was kept, else from a look of two seconds."""
    if path is None:
        found = make(config, profile := _kept(config) or _glanced(config))
        return _followed(config, found.best.choice, tree(found, profile))
    written, choice = _read(path)
    if differ := profiles.differing(written.get("config", {}), config):
        raise Refusal(
            f"{path} was made for another config ({differ}), so that it would change what is "
            f"learnt, or its prediction would not hold. Make one for this: `tianji plan CONFIG "
            f"--save FILE`."
        )
    env = shape.see(shape.template(config)).env
    rows = shape.task_of(shape.template(config), env).rows
    if (now := shape.steps_per_update(config, choice, env)) != rows:
        raise Refusal(
            f"{path} would let an update follow {now} steps ({choice}) instead of {rows}, so that "
            f"something else would be learnt and its prediction would not hold. Was it edited? "
            f"Make a plan: `tianji plan CONFIG --save FILE`."
        )
    return _followed(config, choice, written)


def _followed(
    config: Config, choice: Choice, written: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """The config as a choice spreads it, and its plan with what the config set otherwise."""
    followed = shape.spread(config, choice)
    before, after = config.scale, followed.scale
    alike = before.actors * before.envs_per_actor == after.actors * after.envs_per_actor
    replaced = {
        name: getattr(before, name)
        for name in CHOSEN
        if getattr(before, name) not in (getattr(after, name), getattr(DEFAULTS, name))
        and not (alike and name in ("actors", "envs_per_actor"))
    }
    return followed, written | {"replaced": replaced}


def _glanced(config: Config) -> Profile:
    print(f"looking at {config.name} for 2 s, to plan it", file=sys.stderr)
    return profiler.look(config)


def _kept(config: Config) -> Profile | None:
    """The profile that was kept, if it can be read; if not, that is said."""
    try:
        return profiles.cached(config)
    except Refusal as error:
        print(f"{error} Until then, a look of 2 s is in its place.", file=sys.stderr)
        return None


def check_asked(asked: Config, followed: Config, overrides: Sequence[str]) -> None:
    """Refuses what was asked for on the command line and a plan would change."""
    shared_out = ("actors", "envs_per_actor") if asked.auto else ()
    for override in overrides:
        section, _, name = override.partition("=")[0].strip().partition(".")
        if section != "scale" or name not in CHOSEN or name in shared_out:
            continue
        mine, theirs = getattr(asked.scale, name), getattr(followed.scale, name)
        if mine != theirs:
            raise Refusal(
                f"scale.{name} = {mine} is asked for and the plan says {theirs}, so that one of "
                f"them would do nothing. Leave out scale.{name}, or the plan."
            )


def said(written: Mapping[str, Any]) -> str:
    """In one line, of a plan that is followed."""
    new = human(written["predicted"]["new"])
    words = f"plan: {Choice(**written['choice'])}; {new} new steps/s are predicted"
    if not written.get("whole", True):
        words += f", {GLANCE}"
    if replaced := written.get("replaced"):
        words += f"; in place of {', '.join(f'scale.{k} = {v}' for k, v in replaced.items())}"
    differ = profiles.elsewhere(written["facts"]) if "facts" in written else ""
    return f"{words}, but elsewhere ({differ})" if differ else words


def _read(path: Path) -> tuple[dict[str, Any], Choice]:
    """A plan that was written, and its choice."""
    try:
        written = dict(table(json.loads(path.read_text())))
        for part in ("choice", "predicted"):
            expect(part in written, f'it has no "{part}"')
        choice: Choice = WRITTEN.read(Choice, written["choice"], "choice")
        WRITTEN.read(dict[str, float], written["predicted"], "predicted")
        expect("new" in written["predicted"], 'it has no "predicted.new"')
        for part in ("facts", "config"):
            table(written.get(part, {}), part)
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            f"{path} is no plan that can be read ({wrong_with(error, 'a plan')}), so there is "
            f"nothing to follow. A run folder's plan.json is one, and `tianji plan CONFIG --save "
            f"FILE` writes one."
        ) from error
    if choice.cores_used > cores_here():
        raise Refusal(
            f"{path} wants {choice.cores_used} cores ({choice}) and this process may use "
            f"{cores_here()}, so that its roles would slow each other and the prediction would not "
            f'hold. Make a plan here: `tianji plan CONFIG`, or scale.actors = "auto".'
        )
    return written, choice


def told(found: Plan, profile: Profile, config: Config, cores: int | None) -> str:
    """As a person wants to read it."""
    best, rates = found.best, profile.rates
    now = predict(profile.task, rates, sharing(choice_of(config), rates), _cores(cores))
    lines = [
        f"plan        {_named(best.choice, profile.task)}",
        f"predicted   {human(best.new)} new steps/s; {human(best.produced)} produced, "
        f"{human(best.received)} received, {human(best.consumed)} consumed",
        f"binding     {_binding(best)}",
        f"the config  {_named(now.choice, profile.task)}: {human(now.new)} new steps/s, "
        f"{now.new / best.new:.2f} of the plan's",
        f"more actors {found.why}",
    ]  # fmt: skip
    if best.choice.hosts == "apart":  # a worker hands nothing on
        n, collecting = _collecting(best.choice, profile)
        lines.append(
            f"the knee    were learning no limit, receiving would be one from (Tsp + Tsd) / Trv = "
            f"{n.actors:,.0f} actors on; an update's rollouts are collected in "
            f"{profiles.duration(collecting)} (Tc)"
        )
    if found.others:
        lines.append("next best")
        lines += [
            f"  {human(p.new):>8} new steps/s  {_named(p.choice, profile.task)}"
            + ", as good as far as can be told" * _as_good(p, best, profile)
            for p in found.others
        ]
    lines += [f"note        {note}" for note in found.notes]
    if not profile.whole:
        lines.append(f"note        {GLANCE}")
    if profile.whole and profile.made:
        lines.append(f"profile     of {profile.made}; --again measures anew, as the machine is now")
    return "\n".join([*lines, *_unsteady(profile)])


def _as_good(p: Prediction, best: Prediction, profile: Profile) -> bool:
    """May it be as fast as the best, by how steady the machine was?"""
    return p.new >= best.new * (1 - max(NEAR, profile.varied))


def told_of(answer: Answer, profile: Profile) -> str:
    """One prediction, as a person wants to read it."""
    p = answer.prediction
    used = p.choice.cores_used
    return "\n".join(
        (
            f"what if     {_named(p.choice, profile.task)} ({used} core{'s' * (used > 1)})",
            f"predicted   {human(p.new)} new steps/s; {human(p.produced)} produced, "
            f"{human(p.received)} received, {human(p.consumed)} consumed",
            f"binding     {_binding(p)}",
            *(f"note        {note}" for note in answer.notes),
            *_unsteady(profile),
        )
    )


def tree_of(answer: Answer) -> dict[str, Any]:
    """One prediction, for --json."""
    p = answer.prediction
    return p.tree() | {"cores": p.choice.cores_used, "notes": list(answer.notes)}


def _named(choice: Choice, task: Task) -> str:
    """With the length of rollouts, where it is not the config's."""
    T = choice.rollout_length
    return str(choice) + f", rollouts of {T} step{'s' * (T > 1)}" * (T != task.T)


def _unsteady(profile: Profile) -> list[str]:
    if profile.varied <= profiles.UNSTEADY:
        return []
    varied = f"{100 * profile.varied:.0f} %"
    return [
        f"note        the machine's own speed varied by ± {varied} while it was measured, so a "
        f"run may miss the prediction by as much"
    ]


def _binding(p: Prediction) -> str:
    if p.binding == "turns":
        shares = {side: 1 / rate for side, rate in p.capacity.items()}
        whole = sum(shares.values())
        parts = ", ".join(f"{side} {share / whole:.0%}" for side, share in shares.items())
        return f"acting and learning take turns: {parts} of the time".replace("%", " %")
    rates = ", ".join(f"{side} {human(rate)}" for side, rate in p.capacity.items())
    return f"{p.binding} (could do: {rates} new steps/s)"
