"""What this machine does with a config, measured in seconds: the rates that a plan is made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tianji.build import Topology, topology
from tianji.config import Config
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.machine import cores as cores_here
from tianji.machine import cpu_model, gpu_model, version
from tianji.plan import MOST_ENVS, Rates, Task, between
from tianji.probe import Job, acting, alone, channel, learning, team, together
from tianji.view.status import human

WHOLE = 45.0
"""seconds that a profile may take"""
ACT, LEARN = 0.5, 3.0
"""seconds for which acting and learning are looked at, with each number of envs and of cores"""
ODD = 1.08
"""times what its neighbours let expect, from which on a measurement is made again"""
TEAMS = (2, 4)
"""learners that are measured together"""
FORMAT = 2
START = 3.0
"""seconds that a run takes beside its training, about"""
Progress = Callable[[str, float], None]
"""what is being measured, and seconds that are left, about"""


@dataclass(frozen=True)
class Profile:
    """Measured rates, and what they hold for."""

    rates: Rates
    task: Task
    facts: dict[str, Any]
    """of the machine and what runs on it"""
    config: str
    """a hash of what was measured"""
    seconds: float
    """that it took"""
    whole: bool
    """False: a look of two seconds"""
    batches: dict[int, float] = field(default_factory=dict)
    """seconds of an update on one core, by the steps that it consumes"""
    inference: dict[str, float] = field(default_factory=dict)
    """seconds of a step with the config's envs, by how actions are computed"""
    skipped: tuple[str, ...] = ()
    """what there was no time for"""

    def tree(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "rates": self.rates.tree(),
            "task": dataclasses.asdict(self.task),
            "facts": self.facts,
            "config": self.config,
            "seconds": self.seconds,
            "whole": self.whole,
            "batches": {str(k): v for k, v in self.batches.items()},
            "inference": self.inference,
            "skipped": list(self.skipped),
        }

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Profile:
        task = dict(tree["task"])
        task["lead"] = float(task["lead"])
        return cls(
            Rates.of(tree["rates"]), Task(**task), tree["facts"], tree["config"], tree["seconds"],
            tree["whole"], {int(k): v for k, v in tree["batches"].items()}, tree["inference"],
            tuple(tree["skipped"]),
        )  # fmt: skip


def facts() -> dict[str, Any]:
    """What rates depend on beside the config."""
    return {
        "cpu": cpu_model(),
        "cores": cores_here(),
        "gpu": gpu_model(),
        "system": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("tianji", "torch", "numpy", "gymnasium")},
    }


def subject(config: Config) -> str:
    """A hash of what of a config rates depend on: not of how it is spread, nor when it ends."""
    tree = config.tree()
    scale = {key: getattr(config.scale, key) for key in ("device", "halves", "env_threads")}
    envs = config.scale.actors * config.scale.envs_per_actor, config.scale.rollout_length
    about = [tree[section] for section in ("env", "algorithm", "network", "reuse")]
    text = json.dumps([*about, scale, envs, config.scale.relax, tree.get("relax")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    if folder := os.environ.get("TIANJI_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tianji"


def cache_path(config: Config) -> Path:
    here = hashlib.sha256(json.dumps(facts(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"profile-{here[:8]}-{subject(config)[:16]}.json"


def cached(config: Config) -> Profile | None:
    """The profile of this config on this machine, if there is one."""
    path = cache_path(config)
    return load(path, config) if path.is_file() else None


def load(path: Path, config: Config) -> Profile:
    """A profile from a file; refuses one that does not hold here."""
    try:
        tree = json.loads(path.read_text())
        if tree.get("format") != FORMAT:
            raise ValueError(f"its format is {tree.get('format')}, not {FORMAT}")
        profile = Profile.of(tree)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{path} is no profile that can be read ({error}), so there is nothing to plan from. "
            f"Run `tianji profile CONFIG`, which writes one."
        ) from error
    here = facts()
    differ = [
        f"{key}: {profile.facts.get(key)}, here {here[key]}"
        for key in here
        if profile.facts.get(key) != here[key]
    ]
    if differ:
        raise Refusal(
            f"{path} was measured elsewhere ({'; '.join(differ)}), so its rates would mislead. Run "
            f"`tianji profile CONFIG` here."
        )
    if profile.config != subject(config):
        raise Refusal(
            f"{path} was measured for another env, algorithm, network or number of envs, so its "
            f"rates would mislead. Run `tianji profile CONFIG` for this one."
        )
    return profile


def save(profile: Profile, config: Config) -> Path | None:
    """Keep a profile for plans to come; None, and it is said, where that cannot be."""
    path = cache_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(profile.tree()) + "\n")
    except OSError as error:
        print(f"the profile is not kept: {error}. $TIANJI_CACHE may name another folder.",
              file=sys.stderr)  # fmt: skip
        return None
    return path


def task_of(joined: Topology) -> Task:
    """What a config asks for."""
    config, spec, relax = joined.config, joined.spec, joined.relax
    rows = joined.balance.steps_per_update
    on_policy = config.algorithm.on_policy
    capacity = getattr(config.algorithm, "capacity", 1 << 62)
    return Task(
        rows=rows,
        batch=rows if on_policy else int(getattr(config.algorithm, "batch_size", rows)),
        on_policy=on_policy,
        lead=relax.lead,
        streams=relax.start == "stream",
        envs=spec.actors * spec.envs,
        T=spec.T,
        most_rows=max(spec.actors * spec.rows_per_rollout, capacity // 16),
    )


def template(config: Config) -> Config:
    """The config with everything of a run in one place: one actor with all envs, one learner."""
    scale = config.scale
    one = dataclasses.replace(
        scale, engine="local", actors=1, learners=1, groups=1, cores=1, pin=False,
        envs_per_actor=scale.actors * scale.envs_per_actor,
    )  # fmt: skip
    if config.relax.hosts == "worker" or scale.relax in ("a3c", "gala"):
        raise Refusal(
            "workers, each with an actor and a learner inside (scale.relax = a3c, gala), have "
            "nothing that a plan could choose but their number. Plan with scale.relax = "
            '"tianji", or set scale.groups to the number of cores.'
        )
    if config.relax.infer == "server" or scale.relax == "seed":
        raise Refusal(
            'an inference server (relax.infer = "server", scale.relax = "seed") is no part of what '
            'a plan knows, so it would predict wrongly. Plan with scale.relax = "tianji", or set '
            "scale.actors yourself."
        )
    return dataclasses.replace(config, scale=one, eval=dataclasses.replace(config.eval, every=0))


def _sooner(config: Config) -> Config:
    """Without most of the warm-up: the first update is waited for."""
    warmup = getattr(config.algorithm, "warmup", None)
    if not isinstance(warmup, int):
        return config
    fewer = 256
    while fewer < warmup:
        algorithm = dataclasses.replace(config.algorithm, warmup=fewer)  # type: ignore[type-var]
        shorter = dataclasses.replace(config, algorithm=algorithm)
        try:
            _close(topology(shorter))
            return shorter
        except Refusal:
            fewer *= 2
    return config


def task_and_env(config: Config) -> tuple[Task, EnvSpec]:
    """What a config asks for, and of which env."""
    joined = topology(config)
    task, env = task_of(joined), joined.spec.env
    _close(joined)
    return task, env


def _close(joined: Topology) -> None:
    for env in joined.spare:
        env.close()


class _Clock:
    """What is left of the time, and who is told."""

    def __init__(self, seconds: float, progress: Progress) -> None:
        self._end = time.monotonic() + seconds
        self._progress = progress
        self.learning = 0.0
        """seconds that it took to measure learning, its preparation included"""

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def say(self, what: str) -> None:
        self._progress(what, max(0.0, self.left))


def measure(config: Config, progress: Progress = lambda what, left: None) -> Profile:
    """The whole profile, in at most 45 s where an update takes no more than a few."""
    begun, clock = time.monotonic(), _Clock(WHOLE, progress)
    mine = sorted(os.sched_getaffinity(0))[: cores_here()]
    torch.set_num_threads(1)  # children are forked, and a pool of threads is not
    one = template(config)
    task, _ = task_and_env(one)
    skipped: list[str] = []
    clock.say("the channel")
    passing = alone(Job(lambda: channel(0.4, mine[-1:]), mine[:1], 2.0))
    act, load, valid = _acting(one, task, mine, clock, skipped)
    sooner = _sooner(one)
    clock.say("learning")
    before = clock.left
    learnt = alone(Job(lambda: learning(sooner, _core_sets(mine, config), LEARN), mine, 15.0))
    learn = {int(cores): seconds for cores, seconds in learnt["learn"].items()}
    clock.learning = before - clock.left
    slow_act, slow_learn = _beside(sooner, act, learn, task, mine, clock, skipped)
    team = _team(sooner, learn[1], mine, clock, skipped)
    batches = _batches(sooner, learn[1], task, mine, clock, skipped)
    inference = _inference(one, act, task, mine, clock, skipped)
    rates = Rates(
        act=act, begin=load, send=passing["push"], receive=learnt["receive"] + passing["receive"],
        serve=learnt["serve"] + passing["push"] + passing["receive"], learn=learn,
        take=learnt["take"], wake=passing["wake"], slow_act=slow_act,
        slow_learn=slow_learn, valid=valid, device=config.scale.device, team=team,
    )  # fmt: skip
    task = dataclasses.replace(task, batch=round(learnt["consumed"]))
    seconds = time.monotonic() - begun
    return Profile(rates, task, facts(), subject(config), seconds, True, batches, inference,
                   tuple(skipped))  # fmt: skip


def look(config: Config) -> Profile:
    """As much as two seconds tell."""
    begun, mine = time.monotonic(), sorted(os.sched_getaffinity(0))[: cores_here()]
    torch.set_num_threads(1)
    one = template(config)
    task, _ = task_and_env(one)
    envs = task.envs
    first = alone(Job(lambda: acting(one, envs, 0.3), mine[:1], 1.0))
    act = {envs: first["step"]}
    if envs > 1:
        few = max(1, envs // 8)
        act[few] = alone(Job(lambda: acting(one, few, 0.2), mine[:1], 1.0))["step"]
    sooner = _sooner(one)
    learnt = alone(Job(lambda: learning(sooner, [mine[:1]], 0.4), mine[:1], 1.0))
    rates = Rates(
        act=act, begin=first["load"], send=5e-6, receive=learnt["receive"] + 1e-5,
        serve=learnt["serve"] + 1e-5, learn={1: learnt["learn"]["1"]}, take=learnt["take"],
        wake=3e-5, slow_act={1: 1.0}, slow_learn={1: 1.0}, valid=first["valid"],
        device=config.scale.device,
    )  # fmt: skip
    task = dataclasses.replace(task, batch=round(learnt["consumed"]))
    return Profile(rates, task, facts(), subject(config), time.monotonic() - begun, False)


def _core_sets(mine: Sequence[int], config: Config) -> list[list[int]]:
    """Cores to learn with, from the most to one: all but one, and every half of it."""
    if config.scale.device != "cpu":
        return [list(mine[:1])]
    counts, most = {1, len(mine)}, max(1, len(mine) - 1)
    while most > 1:
        counts.add(most)
        most //= 2
    return [list(mine[:count]) for count in sorted(counts, reverse=True)]


def _acting(
    config: Config, task: Task, mine: Sequence[int], clock: _Clock, skipped: list[str]
) -> tuple[dict[int, float], float, float]:
    """Seconds of a step by number of envs; of what a rollout takes beside; the valid share."""
    counts = {2**i for i in range(MOST_ENVS.bit_length())} | {
        task.envs,
        config.scale.envs_per_actor,
    }
    found: dict[int, float] = {}
    load, valid = 0.0, 1.0
    for envs in sorted(counts):
        if envs > task.envs and envs > MOST_ENVS:
            continue
        last = found[max(found)] if found else 0.0
        if envs not in (task.envs, config.scale.envs_per_actor) and (
            last > 0.3 or clock.left < WHOLE / 2
        ):
            skipped.append(f"acting with {envs} envs")
            continue
        clock.say(f"acting with {envs} env{'s' * (envs > 1)}")
        one = alone(Job(lambda n=envs: acting(config, n, ACT), mine[-1:], 2.0))  # type: ignore[misc]
        found[envs] = one["step"]
        if envs == task.envs:
            load, valid = one["load"], one["valid"]
    for envs in sorted(found)[1:-1]:
        beside = {n: found[n] for n in (_below(found, envs), _above(found, envs))}
        if found[envs] > ODD * between(beside, envs) and clock.left > WHOLE / 2:
            clock.say(f"acting with {envs} envs, again")
            one = alone(Job(lambda n=envs: acting(config, n, ACT), mine[-1:], 2.0))  # type: ignore[misc]
            found[envs] = min(found[envs], one["step"])  # whatever disturbs makes it longer
    return found, load, valid


def _below(points: dict[int, float], n: int) -> int:
    return max(k for k in points if k < n)


def _above(points: dict[int, float], n: int) -> int:
    return min(k for k in points if k > n)


def _beside(
    config: Config,
    act: dict[int, float],
    learn: dict[int, float],
    task: Task,
    mine: Sequence[int],
    clock: _Clock,
    skipped: list[str],
) -> tuple[dict[int, float], dict[int, float]]:
    """How much longer acting and learning take when so many cores are busy: a learner on one, and
    an actor on each of the others."""
    slow_act, slow_learn = {1: 1.0}, {1: 1.0}
    learns = config.scale.device == "cpu"  # a GPU has nobody beside it
    for busy in sorted({2, len(mine) // 2, len(mine)} - {0, 1}):
        expected = clock.learning + learn[1] if learns else LEARN + 2.0
        if clock.left < expected:
            skipped.append(f"{busy} busy cores")
            continue
        clock.say(f"{busy} busy cores")
        envs = task.envs // (busy - 1) if task.on_policy else config.scale.envs_per_actor
        near = min(act, key=lambda n: abs(n - envs))
        seconds = max(LEARN, 1.5 * learn[1]) if learns else LEARN
        jobs = [
            Job(lambda n=near, s=seconds: acting(config, n, s), [core], expected)  # type: ignore[misc]
            for core in mine[1:busy]
        ]
        if learns:
            jobs.append(Job(lambda: learning(config, [mine[:1]], LEARN), mine[:1], expected))
        measured = together(jobs)
        if learns:
            slow_learn[busy] = max(1.0, measured.pop()["learn"]["1"] / learn[1])
        slow_act[busy] = max(1.0, sum(a["step"] for a in measured) / len(measured) / act[near])
    return slow_act, slow_learn


def _team(
    config: Config, known: float, mine: Sequence[int], clock: _Clock, skipped: list[str]
) -> dict[int, float]:
    """How long an update of several learners takes, over one's, each on a core of its own. Only as
    many as leave a core to each of as many actors."""
    found = {1: 1.0}
    if config.scale.device != "cpu":
        return found
    for learners in TEAMS:
        scale = dataclasses.replace(
            config.scale, learners=learners, actors=learners, pin=True,
            envs_per_actor=max(1, config.scale.envs_per_actor // learners),
        )  # fmt: skip
        several = dataclasses.replace(config, scale=scale)
        if 2 * learners > len(mine):
            return found
        try:
            _close(topology(several))
        except Refusal:  # this config cannot be learnt from by so many: nor will a plan say so
            continue
        seconds = max(1.5, 4 * known)
        if clock.left < seconds + START:
            skipped.append(f"{learners} learners")
            continue
        clock.say(f"{learners} learners")
        job = Job(lambda c=several, s=seconds: team(c, s), mine[: 2 * learners], 2 * seconds)  # type: ignore[misc]
        found[learners] = alone(job)["update"] / known
    return found


def _batches(
    config: Config,
    known: float,
    task: Task,
    mine: Sequence[int],
    clock: _Clock,
    skipped: list[str],
) -> dict[int, float]:
    """Seconds of an update on one core with half and twice the batch."""
    found = {task.batch: known}
    for factor in (0.5, 2.0):
        other = _with_batch(config, task, factor)
        if other is None:
            continue
        if clock.left < clock.learning * max(1.0, factor):
            skipped.append(f"batches of {round(task.batch * factor)}")
            continue
        clock.say(f"batches of {round(task.batch * factor)}")
        try:
            learnt = alone(Job(lambda c=other: learning(c, [mine[:1]], 0.5), mine[:1], 5.0))  # type: ignore[misc]
        except Refusal:
            continue
        found[round(task.batch * factor)] = learnt["learn"]["1"]
    return found


def _with_batch(config: Config, task: Task, factor: float) -> Config | None:
    """The config with another batch, if it can have one."""
    if task.on_policy:
        envs = round(config.scale.envs_per_actor * factor)
        if envs < 1:
            return None
        other = dataclasses.replace(
            config, scale=dataclasses.replace(config.scale, envs_per_actor=envs)
        )
    else:
        size = round(getattr(config.algorithm, "batch_size", 0) * factor)
        if size < 1:
            return None
        algorithm = dataclasses.replace(config.algorithm, batch_size=size)  # type: ignore[type-var]
        other = dataclasses.replace(config, algorithm=algorithm)
    try:
        _close(topology(other))
    except Refusal:
        return None
    return other


def _inference(
    config: Config,
    act: dict[int, float],
    task: Task,
    mine: Sequence[int],
    clock: _Clock,
    skipped: list[str],
) -> dict[str, float]:
    """Seconds of a step with all of the config's envs, by the precision of inference."""
    own = config.network.precision
    found: dict[str, float] = {own: act[task.envs]} if task.envs in act else {}
    other: Literal["float32", "bfloat16"] = "float32" if own == "bfloat16" else "bfloat16"
    network = dataclasses.replace(config.network, precision=other)
    changed = dataclasses.replace(config, network=network)
    if clock.left < 3.0:
        skipped.append(f"inference in {other}")
        return found
    try:
        _close(topology(changed))
        clock.say(f"inference in {other}")
        one = alone(Job(lambda: acting(changed, task.envs, 0.3), mine[-1:], 2.0))
    except Refusal:  # there is nothing to choose: no convolutions
        return found
    return found | {other: one["step"]}


def told(profile: Profile) -> str:
    """As tables and a small chart."""
    rates, task, valid = profile.rates, profile.task, profile.rates.valid
    lines = [f"measured in {profile.seconds:.0f} s on {profile.facts['cores']} cores, "
             f"{profile.facts['cpu']}", "",
             "acting, one actor on one core (TR_A)"]  # fmt: skip
    speed = {envs: valid * envs / seconds for envs, seconds in rates.act.items()}
    most = max(speed.values())
    for envs, rate in sorted(speed.items()):
        bar = "█" * max(1, round(30 * rate / most))
        lines.append(f"  {envs:>4} envs  {human(rate):>8} steps/s  {bar}")
    for name, seconds in profile.inference.items():
        lines.append(f"  inference in {name}: {human(valid * task.envs / seconds)} steps/s")
    lines += [
        "",
        f"learning, new steps per second (TR_L), {human(task.batch)} steps consumed by an update",
    ]
    follows = {cores: valid * task.rows / seconds for cores, seconds in rates.learn.items()}
    most = max(follows.values())
    for cores, rate in sorted(follows.items()):
        bar = "█" * max(1, round(30 * rate / most))
        where = (
            f"{cores:>4} core{'s' if cores > 1 else ' '}" if rates.device == "cpu" else "     GPU "
        )
        lines.append(
            f"  {where} {human(rate):>8} steps/s  {bar}  {1e3 * rates.learn[cores]:.3g} ms"
        )
    for learners, factor in sorted(rates.team.items()):
        if learners > 1:
            lines.append(f"  {learners} learners {human(follows[1] / factor):>8} steps/s, a core "
                         f"each")  # fmt: skip
    for batch, seconds in sorted(profile.batches.items()):
        lines.append(f"  batch of {human(batch):>6}: {1e3 * seconds:.3g} ms, "
                     f"{human(batch / seconds)} consumed steps/s")  # fmt: skip
    first = task.T * rates.step(task.envs) + rates.begin
    lines += [
        "",
        "handing on, of one rollout",
        f"  Tsp {_time(first)} to make it, Tsd {_time(rates.send)} to send, "
        f"Trv {_time(rates.receive)} to receive; {_time(rates.serve)} to serve a batch",
        "",
        "beside others, how much longer it takes",
    ]
    lines += [
        f"  {busy} busy cores: acting x {rates.slow_act[busy]:.2f}, learning x "
        f"{rates.slow_learn[busy]:.2f}"
        for busy in sorted(rates.slow_act)
        if busy > 1
    ]
    if profile.skipped:
        lines += ["", f"there was no time for: {', '.join(profile.skipped)}"]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
