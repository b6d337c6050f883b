"""Measures what this machine does with a config: a profile, in less than a minute."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from tianji.build import Topology, check_halves, make_spec
from tianji.config import Config
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.machine import core_order
from tianji.machine import cores as cores_here
from tianji.plan import MOST_ENVS, Rates, Task, between
from tianji.probe import (
    Job,
    Measured,
    Measurement,
    acting,
    alone,
    channel,
    learning,
    running,
    together,
)
from tianji.profile import Profile, facts, subject
from tianji.transports.memory import Memory

WHOLE = 45.0
"""seconds that a profile may take"""
ACT, LEARN = 0.5, 2.0
"""seconds for which acting is looked at, with each number of envs, and learning on one core"""
START = 3.0
"""seconds that a run takes beside its training, about"""
ODD = 1.08
"""times what its neighbours let expect, from which on a measurement is made again"""
TEAMS = (2, 4)
"""learners that are measured together"""
SHORT = 0.05
"""seconds of an update, at most, that are told apart by whether its process also acts"""
MAKING = 2.0
"""seconds to make the envs of one measurement, at most"""

Progress = Callable[[str, float], None]
"""what is being measured, and seconds that are left, about"""


class Seen(NamedTuple):
    """What one env of a config looks like."""

    env: EnvSpec
    seconds: float
    """to make and reset it"""


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


def see(config: Config) -> Seen:
    """Make an env, twice: the first one may have much to import."""
    scale, took = config.scale, 0.0
    for _ in range(2):
        begun = time.perf_counter()
        env = config.env.make(1 + scale.halves, False, 1, scale.halves)
        env.reset(0)
        took = (time.perf_counter() - begun) / env.num_envs
        check_halves(config, env)
        env.close()
    return Seen(env.spec, took)


def join(config: Config, env: EnvSpec) -> Topology:
    """The roles of a run, as they would be joined; refuses what a run would refuse."""
    joined = Topology(config, make_spec(config, env), lambda envs: config.env.make(envs))
    joined.check_memory()
    if joined.spec.learners > 1:
        joined.store(Memory())  # does every learner have an equal share?
    return joined


def task_of(config: Config, env: EnvSpec) -> Task:
    """What a config asks for."""
    joined = join(config, env)
    spec, relax, algorithm = joined.spec, joined.relax, config.algorithm
    rows = joined.balance.steps_per_update
    capacity = getattr(algorithm, "capacity", 1 << 62)
    return Task(
        rows=rows,
        batch=rows if algorithm.on_policy else int(getattr(algorithm, "batch_size", rows)),
        on_policy=algorithm.on_policy,
        lead=relax.lead,
        streams=relax.start == "stream",
        envs=spec.actors * spec.envs,
        T=spec.T,
        most_rows=max(spec.actors * spec.rows_per_rollout, capacity // 16),
    )


def begins(config: Config, env: EnvSpec) -> bool:
    """Would such a run begin?"""
    try:
        join(config, env)
    except Refusal:
        return False
    return True


def without_warmup(config: Config, env: EnvSpec) -> Config:
    """Without most of it, at least: the first update is waited for."""
    warmup = getattr(config.algorithm, "warmup", None)
    if not isinstance(warmup, int):
        return config
    fewer = 256
    while fewer < warmup:
        algorithm: Any = dataclasses.replace(config.algorithm, warmup=fewer)  # type: ignore[type-var]
        shorter = dataclasses.replace(config, algorithm=algorithm)
        if begins(shorter, env):
            return shorter
        fewer *= 2
    return config


def measure(config: Config, progress: Progress = lambda what, left: None) -> Profile:
    """The whole profile, in at most 45 s where an update takes no more than a few."""
    return _Profiler(config, progress).whole()


def look(config: Config) -> Profile:
    """As much as two seconds tell."""
    return _Profiler(config, lambda what, left: None).glance()


class _Profiler:
    """One profile: what is asked, what is left of the time, what was found."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._begun = time.monotonic()
        self._progress = progress
        self._mine = core_order()[: cores_here()]
        self._asked = config
        torch.set_num_threads(1)  # children are forked, and a pool of threads is not
        self._one = template(config)
        self._env, self._making = see(self._one)
        self._task = task_of(self._one, self._env)
        self._sooner = without_warmup(self._one, self._env)
        self._on_cpu = config.scale.device == "cpu"
        self._preparing_s = 0.0
        """seconds until learning could be measured"""
        self._skipped: list[str] = []

    def whole(self) -> Profile:
        self._say("the channel")
        passing = alone(Job(lambda: channel(0.4, self._mine[-1:]), self._mine[:1], 2.0))
        act, load, valid = self._acting()
        learnt = self._learning()
        inside = {int(cores): seconds for cores, seconds in learnt["learn"].items()}
        learn = self._apart(inside)
        slow_act, slow_learn = self._beside(act, inside[1], shared=learn is not inside)
        team = self._team(learn[1])
        batches = self._batches(inside[1])
        inference = self._inference(act)
        rates = Rates(
            act=act, begin=load, send=passing["push"],
            receive=learnt["receive"] + passing["receive"],
            serve=learnt["serve"] + passing["push"] + passing["receive"], learn=learn,
            take=learnt["take"], wake=passing["wake"], slow_act=slow_act, slow_learn=slow_learn,
            valid=valid, device=self._asked.scale.device, team=team,
            inside_act=self._inside_act(act, learnt), inside_learn=inside[1] / learn[1],
        )  # fmt: skip
        return self._profile(rates, learnt, True, batches, inference)

    def glance(self) -> Profile:
        mine = self._mine[:1]
        envs = min(self._task.envs, self._at_once(0.3))
        first = alone(Job(lambda: acting(self._one, envs, 0.3), mine, 1.0))
        act = {envs: first["step"]}
        if envs > 1:
            few = max(1, envs // 8)
            act[few] = alone(Job(lambda: acting(self._one, few, 0.2), mine, 1.0))["step"]
        most = self._at_once(0.3)
        learnt = alone(Job(lambda: learning(self._sooner, {tuple(mine): 0.4}, most), mine, 1.0))
        rates = Rates(
            act=act, begin=first["load"], send=5e-6, receive=learnt["receive"] + 1e-5,
            serve=learnt["serve"] + 1e-5, learn={1: learnt["learn"]["1"]}, take=learnt["take"],
            wake=3e-5, slow_act={1: 1.0}, slow_learn={1: 1.0}, valid=first["valid"],
            device=self._asked.scale.device,
        )  # fmt: skip
        return self._profile(rates, learnt, False)

    def _profile(
        self,
        rates: Rates,
        learnt: Measured,
        whole: bool,
        batches: dict[int, float] | None = None,
        inference: dict[str, float] | None = None,
    ) -> Profile:
        task = dataclasses.replace(self._task, batch=round(learnt["consumed"]))
        seconds = time.monotonic() - self._begun
        return Profile(rates, task, facts(), subject(self._asked), seconds, whole, batches or {},
                       inference or {}, tuple(self._skipped))  # fmt: skip

    @property
    def _left(self) -> float:
        return self._begun + WHOLE - time.monotonic()

    def _say(self, what: str) -> None:
        self._progress(what, max(0.0, self._left))

    def _time_for(self, what: str, seconds: float) -> bool:
        """Is there so much left? If not, it is told in the profile."""
        if self._left < seconds:
            self._skipped.append(what)
            return False
        self._say(what)
        return True

    def _at_once(self, seconds: float) -> int:
        """Envs that can be made in so many seconds."""
        return max(1, int(seconds / max(self._making, 1e-6)))

    def _acting(self) -> tuple[dict[int, float], float, float]:
        """Seconds of a step by number of envs; of what a rollout takes beside; the valid share."""
        mine, own = self._mine[-1:], {self._task.envs, self._asked.scale.envs_per_actor}
        found: dict[int, float] = {}
        beside: dict[int, tuple[float, float]] = {}
        for envs in sorted({2**i for i in range(MOST_ENVS.bit_length())} | own):
            what = f"acting with {envs} env{'s' * (envs > 1)}"
            last = found[max(found)] if found else 0.0
            if envs > max(MOST_ENVS, *own) or (envs > 1 and envs > self._at_once(2 * MAKING)):
                self._skipped.append(what)
                continue
            if envs not in own and (last > 0.3 or self._left < WHOLE / 2):
                self._skipped.append(what)
                continue
            self._say(what)
            one = alone(Job(lambda n=envs: acting(self._one, n, ACT), mine, 2.0))  # type: ignore[misc]
            found[envs] = one["step"]
            if envs <= self._task.envs:
                beside[envs] = one["load"], one["valid"]
        for envs in sorted(found)[1:-1]:
            below, above = max(n for n in found if n < envs), min(n for n in found if n > envs)
            expected = between({n: found[n] for n in (below, above)}, envs)
            if found[envs] > ODD * expected and self._left > WHOLE / 2:
                self._say(f"acting with {envs} envs, again")
                one = alone(Job(lambda n=envs: acting(self._one, n, ACT), mine, 2.0))  # type: ignore[misc]
                found[envs] = min(found[envs], one["step"])  # whatever disturbs makes it longer
        load, valid = beside[max(beside)]
        return found, load, valid

    def _learning(self) -> Measured:
        """All roles in one process, with several numbers of cores."""
        self._say("learning")
        before, most = self._left, self._at_once(MAKING)
        sets = {
            tuple(cores): LEARN if len(cores) == 1 else LEARN / 2 for cores in self._core_sets()
        }
        learnt = alone(Job(lambda: learning(self._sooner, sets, most), self._mine, 30.0))
        self._preparing_s = max(0.0, before - self._left - sum(sets.values()))
        return learnt

    def _on_one_core(self, config: Config, seconds: float) -> Measurement:
        return learning(config, {tuple(self._mine[:1]): seconds}, self._at_once(MAKING))

    def _core_sets(self) -> list[tuple[int, ...]]:
        """Cores to learn with, from the most to one: all but one, and every half of it."""
        if not self._on_cpu:
            return [tuple(self._mine[:1])]
        counts, most = {1, len(self._mine)}, max(1, len(self._mine) - 1)
        while most > 1:
            counts.add(most)
            most //= 2
        return [tuple(self._mine[:count]) for count in sorted(counts, reverse=True)]

    def _inside_act(self, act: dict[int, float], learnt: Measured) -> float:
        """How much longer acting takes where one process also learns."""
        if self._task.envs > self._at_once(MAKING) or self._task.envs not in act:
            return 1.0
        return max(1.0, float(learnt["act"]) / act[self._task.envs])

    def _apart(self, inside: dict[int, float]) -> dict[int, float]:
        """Seconds of an update in a process of its own, beside one actor's, by cores: `inside` is
        what it takes in a process that also acts, where each spoils the other's caches. That is so
        for short updates: with one core, and with those that were best."""
        seconds = max(2.0, 4 * inside[1])
        if not self._on_cpu or inside[1] > SHORT or self._task.envs > self._at_once(MAKING):
            return inside
        learn = inside
        for cores in sorted({1, min(inside, key=lambda cores: inside[cores])}):
            if cores + 1 > len(self._mine):
                continue
            what = f"a learner of its own with {cores} core{'s' * (cores > 1)}"
            if not self._time_for(what, seconds + START):
                continue
            scale = dataclasses.replace(self._sooner.scale, pin=True, cores=cores)
            run = dataclasses.replace(self._sooner, scale=scale)
            job = Job(lambda c=run: running(c, seconds), self._mine, seconds + START)  # type: ignore[misc]
            found = alone(job)["update"]
            if cores == 1:
                learn = {n: s * found / inside[1] for n, s in inside.items()}
            else:
                learn = learn | {cores: found}
        return learn

    def _beside(
        self, act: dict[int, float], inside: float, shared: bool
    ) -> tuple[dict[int, float], dict[int, float]]:
        """How much longer acting and learning take when so many cores are busy: a learner on one,
        and an actor on each of the others. `shared`: what learning is compared with had one busy
        core beside it."""
        slow_act, slow_learn = {1: 1.0}, {1: 1.0}
        mine, task = self._mine, self._task
        some = {len(mine) // 2, len(mine)} if len(mine) > 4 else {2, len(mine)}
        for busy in sorted(some - {0, 1}, reverse=True):
            # a GPU has nobody beside it
            expected = self._preparing_s + LEARN + inside if self._on_cpu else LEARN + 2.0
            if not self._time_for(f"{busy} busy cores", expected):
                continue
            envs = task.envs // (busy - 1) if task.on_policy else self._one.scale.envs_per_actor
            near = min(act, key=lambda n: abs(n - envs))
            seconds = max(LEARN, 1.5 * inside) if self._on_cpu else LEARN
            jobs = [
                Job(lambda n=near, s=seconds: acting(self._one, n, s), [core], expected)  # type: ignore[misc]
                for core in mine[1:busy]
            ]
            if self._on_cpu:
                jobs.append(Job(lambda: self._on_one_core(self._sooner, LEARN), mine[:1], expected))
            measured = together(jobs)
            if self._on_cpu:
                slow_learn[busy] = max(1.0, measured.pop()["learn"]["1"] / inside)
            slow_act[busy] = max(1.0, statistics.fmean(a["step"] for a in measured) / act[near])
        if shared:
            of_two = slow_learn.get(2, 1.0)
            slow_learn = {n: max(1.0, factor / of_two) for n, factor in slow_learn.items()}
        return slow_act, slow_learn

    def _team(self, apart: float) -> dict[int, float]:
        """How long an update of several learners takes, over one's, each on a core of its own.
        Only as many as leave a core to each of as many actors."""
        found = {1: 1.0}
        for learners in TEAMS if self._on_cpu else ():
            scale = dataclasses.replace(
                self._sooner.scale, learners=learners, actors=learners, pin=True,
                envs_per_actor=max(1, self._one.scale.envs_per_actor // learners),
            )  # fmt: skip
            several = dataclasses.replace(self._sooner, scale=scale)
            if 2 * learners > len(self._mine) or not begins(several, self._env):
                continue  # and a plan will not say so, either
            seconds = max(1.5, 4 * apart)
            making = self._making * scale.envs_per_actor
            if not self._time_for(f"{learners} learners", seconds + START + making):
                continue
            job = Job(lambda c=several, s=seconds: running(c, s), self._mine, seconds + START)  # type: ignore[misc]
            found[learners] = alone(job)["update"] / apart
        return found

    def _batches(self, known: float) -> dict[int, float]:
        """Seconds of an update on one core with half and twice the batch."""
        found = {self._task.batch: known}
        for factor in (0.5, 2.0):
            size = round(self._task.batch * factor)
            other = self._with_batch(factor)
            if other is None or not begins(other, self._env):
                continue
            if not self._time_for(f"batches of {size}", self._preparing_s + 1 + 2 * factor * known):
                continue
            job = Job(lambda c=other: self._on_one_core(c, 0.5), self._mine[:1], 5.0)  # type: ignore[misc]
            found[size] = alone(job)["learn"]["1"]
        return found

    def _with_batch(self, factor: float) -> Config | None:
        """The config with another batch, if it can have one."""
        config = self._sooner
        if self._task.on_policy:
            envs = round(config.scale.envs_per_actor * factor)
            scale = dataclasses.replace(config.scale, envs_per_actor=envs)
            return dataclasses.replace(config, scale=scale) if envs else None
        size = round(getattr(config.algorithm, "batch_size", 0) * factor)
        if size < 1:
            return None
        algorithm: Any = dataclasses.replace(config.algorithm, batch_size=size)  # type: ignore[type-var]
        return dataclasses.replace(config, algorithm=algorithm)

    def _inference(self, act: dict[int, float]) -> dict[str, float]:
        """Steps per second of one actor with the config's envs, by the precision of inference."""
        envs = max(n for n in act if n <= self._task.envs)
        own = self._one.network.precision
        other: Literal["float32", "bfloat16"] = "float32" if own == "bfloat16" else "bfloat16"
        network = dataclasses.replace(self._one.network, precision=other)
        changed = dataclasses.replace(self._one, network=network)
        if not begins(changed, self._env):  # there is nothing to choose: no convolutions
            return {own: envs / act[envs]}
        if not self._time_for(f"inference in {other}", 3.0 + envs * self._making):
            return {own: envs / act[envs]}
        job = Job(lambda: acting(changed, envs, 0.3), self._mine[-1:], 2.0)
        return {own: envs / act[envs], other: envs / alone(job)["step"]}
