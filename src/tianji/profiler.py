"""Measures what this machine does with a config: a profile, in less than a minute."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tianji.build import Topology, check_halves, make_spec
from tianji.config import Config, JoinConfig
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.machine import core_order
from tianji.machine import cores as cores_here
from tianji.plan import MOST_ENVS, Choice, Rates, Task, between, different, predict, search
from tianji.probe import (
    SLICES,
    Measured,
    Measurement,
    Probe,
    acting,
    alone,
    channel,
    learning,
    running,
)
from tianji.profile import UNSTEADY, Profile, facts, subject
from tianji.relax import PRESETS, Relaxation, Sizes
from tianji.transports.memory import Memory
from tianji.types import Array

WHOLE = 45.0
"""seconds that a profile may take"""
ACT, LEARN = 0.4, 2.0
"""seconds for which acting is looked at, with each number of envs, and learning on one core"""
START, START_GPU = 3.0, 8.0
"""seconds that a run takes beside its training, about; with a GPU"""
TURNS, MORE = 3, 9
"""times that each comparison is made, at most; and on a machine whose own speed varies"""
LONGER, SHORTER = 1.1, 1 / 1.2
"""times as long as measured that something may in truth take"""
MATTERS = 0.02
"""share by which a prediction must then change for it to be looked at again"""
A_LOOK = 2.0
"""seconds without which nothing is looked at again"""
TEAMS = (2, 4)
"""learners that are measured together"""
SHORT = 0.05
"""seconds of an update, at most, that are told apart by whether its process also acts"""
LONG = 0.5
"""seconds of an update from which on it is not looked at again"""
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
    quiet = dataclasses.replace(config.eval, every=0)
    # One group joins nobody, and one actor with all envs may have more than a server's batch.
    relax = dataclasses.replace(config.relax, join="none", max_batch=None)
    alone = dataclasses.replace(
        config, scale=one, relax=relax, eval=quiet, join=JoinConfig(), auto=False
    )
    if not works(config):
        return alone
    # One worker is a serial run: its actor, its buffer and its learner take turns.
    turns = dataclasses.replace(relax, hosts=None)
    correct: Any = _preset(config).correct
    if turns.correct is None and correct != "none":
        turns = dataclasses.replace(turns, correct=correct)
    return dataclasses.replace(alone, scale=dataclasses.replace(one, relax="sync"), relax=turns)


def works(config: Config) -> bool:
    """Does each group act and learn in one process?"""
    return (config.relax.hosts or _preset(config).hosts) == "worker"


def _preset(config: Config) -> Relaxation:
    """The relaxation that a config names, before fields that it sets."""
    return PRESETS[config.scale.relax](Sizes(config.algorithm.on_policy, alone=False))


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
    if config.scale.halves and config.scale.envs_per_actor < 2:
        raise Refusal(
            "scale.halves = true cannot be: one env has no halves. Set scale.halves = false, or "
            "scale.envs_per_actor to 2 or more."
        )
    joined = Topology(config, make_spec(config, env), lambda envs: config.env.make(envs))
    joined.check_memory()
    if joined.spec.learners > 1:
        joined.store(Memory())  # does every learner have an equal share?
    return joined


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
    return dataclasses.replace(config, scale=scale, auto=False)


def steps_per_update(config: Config, choice: Choice, env: EnvSpec) -> int:
    """What an update would follow; refuses what a run would refuse."""
    return join(spread(config, choice), env).balance.steps_per_update


def possible(config: Config, choice: Choice, env: EnvSpec, task: Task) -> bool:
    """Would a run begin that way, and learn from as much at an update?"""
    try:
        return steps_per_update(config, choice, env) == task.rows
    except Refusal:
        return False


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
        abreast=relax.lead <= max(1, spec.actors * spec.rows_per_rollout // rows),
        passes=relax.lead > 0 and relax.late == "pass",
        server=relax.infer == "server",
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


def _sees_gpu() -> Measurement:
    """For a process of its own: one that has asked CUDA cannot fork others that use it."""
    return lambda: {"gpu": torch.cuda.is_available()}


class _Profiler:
    """One profile: what is asked, what is left of the time, what was found."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._begun = time.monotonic()
        self._progress = progress
        self._mine = core_order()[: cores_here()]
        self._asked = config
        if config.scale.device == "cuda" and not alone(_sees_gpu, self._mine)["gpu"]:
            raise Refusal(
                "there is no GPU here that torch sees, so learning on one cannot be measured. "
                'Leave --gpus out, or set scale.device = "cpu".'
            )
        torch.set_num_threads(1)  # children are forked, and a pool of threads is not
        self._one = template(config)
        self._env, self._making = see(self._one)
        self._task = dataclasses.replace(
            task_of(self._one, self._env), workers=works(config), max_batch=config.relax.max_batch
        )
        self._sooner = without_warmup(self._one, self._env)
        self._on_cpu = config.scale.device == "cpu"
        self._skipped: list[str] = []
        self._possibles: dict[Choice, bool] = {}
        """whether a run would begin, by how it is spread, as far as was asked"""
        self._probes = contextlib.ExitStack()
        """processes that are asked more than once"""

    def whole(self) -> Profile:
        with self._probes:
            return self._whole()

    def _whole(self) -> Profile:
        self._say("the channel")
        passing = alone(lambda: channel(self._mine[-1:]), self._mine[:1], seconds=0.4)
        act, shares, envs, acted, actor = self._acting()
        begun = self._left
        self._say("learning")
        learner = self._probe(lambda: learning(self._sooner, self._at_once(MAKING)), self._mine)
        preparing = begun - self._left
        inside, learnt = self._inside(learner)
        again = _Again(learner, actor, self._mine[:1], inside[1])
        again.look()
        ratios = _Ratios()
        jobs = self._once(self._jobs(ratios, again, inside, envs, act[envs]))
        batches = self._batches(inside[1], preparing)
        inference = self._inference(act, envs)

        def rates(ratios: _Ratios) -> Rates:
            """By what was compared so far."""
            mine = act | {envs: again.act}
            found = Rates(
                act=mine, begin=acted["load"], send=passing["push"],
                receive=learnt.get("receive", 0.0) + passing["receive"],
                serve=learnt["serve"] + passing["push"] + passing["receive"], take=learnt["take"],
                wake=passing["wake"], valid=acted["valid"], device=self._asked.scale.device,
                inside_act=self._inside_act(mine, learnt),
                infer={n: shares[n] * mine[n] for n in mine},
                **ratios.curves(inside, again.learn)._asdict(),
            )  # fmt: skip
            asking = passing["push"] + passing["receive"]
            return self._joining(self._asking(found, learnt, asking, ratios.asked), ratios, again)

        self._repeat(jobs, ratios, rates, again)
        again.look()
        return self._profile(rates(ratios), learnt, True, batches, inference, again.varied)

    def glance(self) -> Profile:
        mine = self._mine[:1]
        envs = min(self._task.envs, self._at_once(0.3))
        first = alone(lambda: acting(self._one, envs), mine, seconds=0.3)
        acted = {envs: first}
        if envs > 1:
            few = max(1, envs // 8)
            acted[few] = alone(lambda: acting(self._one, few), mine, seconds=0.2)
        most = self._at_once(0.3)
        learnt = alone(lambda: learning(self._sooner, most), mine, cores=mine, seconds=0.4)
        rates = Rates(
            act={n: found["step"] for n, found in acted.items()},
            infer={n: found["infer"] for n, found in acted.items()},
            begin=first["load"], send=5e-6, receive=learnt.get("receive", 0.0) + 1e-5,
            serve=learnt["serve"] + 1e-5, learn={1: learnt["learn"]}, take=learnt["take"],
            wake=3e-5, slow_act={1: 1.0}, slow_learn={1: 1.0}, valid=first["valid"],
            device=self._asked.scale.device,
        )  # fmt: skip
        return self._profile(self._asking(rates, learnt, 1.5e-5, []), learnt, False)

    def _profile(
        self,
        rates: Rates,
        learnt: Measured,
        whole: bool,
        batches: dict[int, float] | None = None,
        inference: dict[str, float] | None = None,
        varied: float = 0.0,
    ) -> Profile:
        task = dataclasses.replace(self._task, batch=round(learnt["consumed"]))
        seconds = time.monotonic() - self._begun
        return Profile(rates, task, facts(), subject(self._asked), seconds, whole, batches or {},
                       inference or {}, tuple(self._skipped), varied)  # fmt: skip

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

    def _probe(self, prepare: Callable[[], Measurement], cores: Sequence[int]) -> Probe:
        probe = self._probes.enter_context(Probe(prepare, cores))
        probe.ready()
        return probe

    def _acting(self) -> tuple[dict[int, float], dict[int, float], int, Measured, Probe]:
        """Seconds of a step by number of envs, and what share of them is inference; the config's
        envs, or as many of them as can be made; what was measured with these, and by whom."""
        mine, own = self._mine[-1:], {self._task.envs, self._asked.scale.envs_per_actor}
        found: dict[int, float] = {}
        shares: dict[int, float] = {}
        counts = sorted({2**i for i in range(MOST_ENVS.bit_length())} | own)
        few = [n for n in counts if n == 1 or n <= self._at_once(2 * MAKING)]
        own_envs = max(n for n in few if n <= self._task.envs)
        self._skipped += [_with_envs(n) for n in counts if n not in few]
        kept: tuple[Measured, Probe] | None = None
        for envs in few:
            last = found[max(found)] if found else 0.0
            if envs not in (own_envs, *own) and (last > 0.3 or self._left < WHOLE / 2):
                self._skipped.append(_with_envs(envs))
                continue
            self._say(_with_envs(envs))
            probe = Probe(lambda n=envs: acting(self._one, n), mine)  # type: ignore[misc]
            with contextlib.ExitStack() as closing:
                closing.callback(probe.close)
                one = probe.ask(seconds=ACT)
                found[envs] = one["step"]
                shares[envs] = one["infer"] / one["step"]
                if envs == own_envs:
                    kept = one, probe
                    self._probes.push(closing.pop_all())
        assert kept is not None
        return smooth(found), shares, own_envs, *kept

    def _inside(self, learner: Probe) -> tuple[dict[int, float], Measured]:
        """Seconds of an update in a process that also acts, by cores, from the most to one: all but
        one, and every half of it; and all else that is known of the last one."""
        counts, most = {1}, max(1, len(self._mine) - 1)
        if self._on_cpu:
            counts.add(len(self._mine))
        while self._on_cpu and most > 1:
            counts.add(most)
            most //= 2
        found, learnt = {}, {}
        for count in sorted(counts, reverse=True):
            seconds = LEARN if count == 1 else LEARN / 2
            learnt = learner.ask(cores=self._mine[:count], seconds=seconds)
            found[count] = float(learnt["learn"])
        return found, learnt

    def _asking(
        self, rates: Rates, learnt: Measured, passing: float, asked: Sequence[float]
    ) -> Rates:
        """With what it takes to ask a server, if there is one: inference aside, and with a message
        in each direction, which takes `passing` seconds of both sides together; with what else
        steps took in real runs, where there were some."""
        if not self._task.server:
            return rates
        envs = self._task.envs
        inferring = between(rates.infer, envs, above=1.0)
        answer = max(0.0, learnt["answer"] - inferring) + passing
        rates = dataclasses.replace(rates, ask=learnt["ask"] + passing, answer=answer)
        if not asked:
            return rates
        more = statistics.median(asked) - rates.asked(envs, 1, None).step
        return dataclasses.replace(rates, ask=max(0.0, rates.ask + more))

    def _joining(self, rates: Rates, ratios: _Ratios, again: _Again) -> Rates:
        """With what it costs workers that there are others, where real runs tell: over what one
        alone is predicted to take."""
        if not ratios.workers:
            return rates
        one = predict(self._task, rates, Choice("serial", 1, self._task.envs, self._task.T), 1)
        took = {n: again.learn * over(found) for n, found in ratios.workers.items()}
        together = {n: seconds * one.new / rates.valid / self._task.rows
                    for n, seconds in took.items()}  # fmt: skip
        return dataclasses.replace(rates, together={1: 1.0} | together)

    def _inside_act(self, act: dict[int, float], learnt: Measured) -> float:
        """How much longer acting takes where one process also learns."""
        if self._task.envs > self._at_once(MAKING) or self._task.envs not in act:
            return 1.0
        return max(1.0, float(learnt.get("act", 0.0)) / act[self._task.envs])

    def _jobs(
        self, ratios: _Ratios, again: _Again, inside: dict[int, float], envs: int, step: float
    ) -> list[_Job]:
        """What is measured as a ratio, those first on which most depends."""
        collecting = self._task.rows * step / envs
        busy = self._beside(ratios, again, inside[1], envs, collecting)
        if self._task.workers:  # nobody learns in a process of its own
            workers = self._workers(ratios, again, inside[1], collecting)
            threads = self._threads(ratios, again, inside)
            return [*workers[:1], *busy[:1], *threads, *workers[1:], *busy[1:]]
        apart = self._apart(ratios, again, inside, collecting)
        team = self._team(ratios, again, inside[1], collecting)
        threads = self._threads(ratios, again, inside)
        return [*busy[:1], *apart[:1], *threads, *team[:1], *apart[1:], *team[1:], *busy[1:]]

    def _once(self, jobs: list[_Job]) -> list[_Job]:
        """Do each once, if there is time; those that came to something, with what they took."""
        done = []
        for job in jobs:
            if not self._time_for(job.what, job.seconds):
                continue
            begun = self._left
            if job.do():
                done.append(job._replace(seconds=begun - self._left))
            else:
                self._skipped.append(job.what)
        return done

    def _repeat(
        self,
        jobs: list[_Job],
        ratios: _Ratios,
        rates: Callable[[_Ratios], Rates],
        again: _Again,
    ) -> None:
        """Do again what matters while there is time: at one moment others may use the machine,
        too. Where nothing of it does, look again at who acts and who learns."""
        for turn in range(1, MORE):
            if self._left < A_LOOK or (turn >= TURNS and again.varied <= UNSTEADY):
                return
            matter = self._that_matter(jobs, ratios, rates)
            if not matter:
                again.look()
            for job in matter:
                if self._left < 1.2 * job.seconds + 1:
                    continue
                self._say(f"{job.what}, again")
                job.do()

    def _that_matter(
        self, jobs: list[_Job], ratios: _Ratios, rates: Callable[[_Ratios], Rates]
    ) -> list[_Job]:
        """Those on which it depends what the best way comes to or, by what is known so far, whether
        it is the best."""
        cores, known = len(self._mine), rates(ratios)
        ways = [p.choice for p in different(search(self._task, known, cores, self._possible))]
        if not ways:  # a plan will say so
            return []

        def new(way: Choice, known: Rates) -> float:
            return predict(self._task, known, way, cores).new

        def matters(job: _Job) -> bool:
            slower, quicker = (
                rates(ratios.times(factor, job.kind, job.key)) for factor in (LONGER, SHORTER)
            )
            overtaken = max(new(way, quicker) for way in ways) / new(ways[0], quicker) - 1
            return max(1 - new(ways[0], slower) / new(ways[0], known), overtaken) > MATTERS

        return [job for job in jobs if matters(job)]

    def _possible(self, choice: Choice) -> bool:
        if choice not in self._possibles:
            self._possibles[choice] = possible(self._asked, choice, self._env, self._task)
        return self._possibles[choice]

    def _apart(
        self, ratios: _Ratios, again: _Again, inside: dict[int, float], collecting: float
    ) -> list[_Job]:
        """How much longer an update takes in a process of its own, beside one actor's, than inside
        one that also acts, where each spoils the other's caches: by cores, with one and with those
        that were best. Only where updates are short. On a GPU, where most of an update may be to
        fetch what actors wrote: beside as many actors as half the cores hold."""
        if not self._on_cpu:
            return self._fed(ratios, again, inside[1], collecting)
        if inside[1] > SHORT or self._task.envs > self._at_once(MAKING):
            return []
        jobs = []
        for cores in sorted({1, min(inside, key=lambda cores: inside[cores])}):
            if cores + 1 > len(self._mine):
                continue
            seconds = self._long_enough(inside[cores], collecting)
            run = self._sooner.scaled(pin=True, cores=cores)
            what = f"a learner of its own with {cores} core{'s' * (cores > 1)}"
            jobs.append(self._job(what, "apart", cores, ratios, again, run, seconds))
        return jobs

    def _fed(self, ratios: _Ratios, again: _Again, update: float, collecting: float) -> list[_Job]:
        """How much longer an update takes that is fed by several actors."""
        if update > LONG:
            return []
        runs = (
            self._sooner.scaled(pin=True, actors=actors, envs_per_actor=envs)
            for actors, envs in fed_by(self._task, len(self._mine) // 2, self._at_once(MAKING))
        )
        run = next((run for run in runs if begins(run, self._env)), None)
        if run is None:
            self._skipped.append("a learner that actors feed")
            return []
        actors = run.scale.actors
        ratios.busy_apart = 1 + actors
        making = self._making * run.scale.envs_per_actor + START_GPU - START
        seconds = self._long_enough(update, collecting / actors)
        what = f"a learner that {actors} actor{'s feed' if actors > 1 else ' feeds'}"
        return [self._job(what, "apart", 1, ratios, again, run, seconds, making)]

    def _threads(self, ratios: _Ratios, again: _Again, inside: dict[int, float]) -> list[_Job]:
        """How long an update takes with as many cores as were best, over one with one core."""
        best = min(inside, key=lambda cores: inside[cores])

        def do() -> bool:
            ratios.threads.setdefault(best, []).append(again.threads(self._mine[:best]))
            return True

        expected = 2 * (again.SECONDS + inside[1])
        what = f"learning with {best} cores"
        return [_Job(what, "threads", best, expected, do)] if best > 1 else []

    def _team(self, ratios: _Ratios, again: _Again, update: float, collecting: float) -> list[_Job]:
        """How long an update of several learners takes, each on a core of its own, over one inside
        a process that also acts. Only as many as leave a core to each of as many actors."""
        jobs = []
        for learners in TEAMS if self._on_cpu else ():
            envs = max(1, self._one.scale.envs_per_actor // learners)
            several = self._sooner.scaled(
                learners=learners, actors=learners, pin=True, envs_per_actor=envs
            )
            if 2 * learners > len(self._mine) or not begins(several, self._env):
                continue  # and a plan will not say so, either
            seconds = self._long_enough(update, collecting)
            making = self._making * envs
            what = f"{learners} learners"
            jobs.append(self._job(what, "team", learners, ratios, again, several, seconds, making))
        return jobs

    def _workers(
        self, ratios: _Ratios, again: _Again, update: float, collecting: float
    ) -> list[_Job]:
        """How long it takes each of several workers from one update to the next, over an update of
        one alone: two of them, and one on every core."""
        if len(self._mine) < 2:
            return []
        making = self._making * self._task.envs + (0.0 if self._on_cpu else START_GPU - START)
        # Several take longer than one, and each is to make some updates after all have begun.
        seconds = 2 * self._long_enough(update + collecting, collecting)
        jobs = []
        for workers in sorted({2, len(self._mine)}, reverse=True):
            several = self._asked.scaled(
                engine="local", actors=1, learners=1, groups=workers, cores=1, pin=True,
                envs_per_actor=self._task.envs,
            )  # fmt: skip
            quiet = dataclasses.replace(
                several, eval=dataclasses.replace(several.eval, every=0), auto=False
            )
            if not begins(quiet, self._env):
                continue
            run = without_warmup(quiet, self._env)
            what = f"{workers} workers"
            jobs.append(self._job(what, "workers", workers, ratios, again, run, seconds, making))
        return jobs

    def _job(
        self,
        what: str,
        kind: Literal["apart", "team", "workers"],
        key: int,
        ratios: _Ratios,
        again: _Again,
        run: Config,
        seconds: float,
        making: float = 0.0,
    ) -> _Job:
        """A real run, and what an update takes there over what it takes inside, on one core."""

        def do() -> bool:
            told, base = again.beside(lambda: self._run(run, seconds))
            if told["update"] is None:
                return False
            found: dict[int, list[_Beside]] = getattr(ratios, kind)
            found.setdefault(key, []).append(_Beside(told["update"], base))
            one_actor = run.scale.actors == 1 and run.scale.envs_per_actor == self._task.envs
            if kind == "apart" and one_actor and told["step"] is not None:
                ratios.asked.append(told["step"])
            return True

        return _Job(what, kind, key, seconds + START + making, do)

    def _beside(
        self, ratios: _Ratios, again: _Again, update: float, envs: int, collecting: float
    ) -> list[_Job]:
        """How much longer acting and learning take when so many cores are busy: a learner on the
        first and an actor on each other one, of which the last also acts alone."""
        mine, others = self._mine, list[Probe]()
        if len(mine) < 2:
            return []

        def do(busy: int) -> bool:
            others.extend(
                self._probes.enter_context(Probe(lambda: acting(self._one, envs), [core]))
                for core in mine[1 + len(others) : busy - 1]
            )
            # Actors that share an update's steps wait for the slowest after that long.
            ahead = self._task.lead if self._task.abreast else 0.0
            alike = (1.0 + ahead) * collecting / (busy - 1)
            ratios.busy.setdefault(busy, []).extend(again.slowed(others[: busy - 2], alike))
            return True

        some = {len(mine) // 2, len(mine)} if len(mine) > 4 else {2, len(mine)}
        expected = envs * self._making + 1 + 6 * (again.SECONDS + update)
        return [
            _Job(f"{busy} busy cores", "busy", busy, expected, partial(do, busy))
            for busy in sorted(some, reverse=True)
        ]

    def _run(self, config: Config, seconds: float) -> Measured:
        """A real run, which has the whole machine."""
        with tempfile.TemporaryDirectory() as runs:
            return alone(lambda: running(config, runs), self._mine, seconds=seconds)

    def _long_enough(self, update: float, collecting: float) -> float:
        """Seconds of a real run in which some updates are made, each after so much collecting."""
        warmup = getattr(self._sooner.algorithm, "warmup", 0)
        first = collecting * max(1.0, warmup / self._task.rows)
        return max(2.0, first + 4 * max(update, collecting))

    def _batches(self, known: float, preparing: float) -> dict[int, float]:
        """Seconds of an update on one core with half and twice the batch."""
        found, mine = {self._task.batch: known}, self._mine[:1]
        for factor in (0.5, 2.0):
            size = round(self._task.batch * factor)
            other = self._with_batch(factor)
            if other is None or not begins(other, self._env):
                continue
            if not self._time_for(f"batches of {size}", preparing + 1 + 2 * factor * known):
                continue
            most = self._at_once(MAKING)
            learnt = alone(lambda c=other, n=most: learning(c, n), mine, cores=mine, seconds=0.5)  # type: ignore[misc]
            found[size] = learnt["learn"]
        return found

    def _with_batch(self, factor: float) -> Config | None:
        """The config with another batch, if it can have one."""
        config = self._sooner
        if self._task.on_policy:
            envs = round(config.scale.envs_per_actor * factor)
            return config.scaled(envs_per_actor=envs) if envs else None
        size = round(getattr(config.algorithm, "batch_size", 0) * factor)
        if size < 1:
            return None
        algorithm: Any = dataclasses.replace(config.algorithm, batch_size=size)  # type: ignore[type-var]
        return dataclasses.replace(config, algorithm=algorithm)

    def _inference(self, act: dict[int, float], envs: int) -> dict[str, float]:
        """Steps per second of one actor with so many envs, by the precision of inference."""
        own = self._one.network.precision
        other: Literal["float32", "bfloat16"] = "float32" if own == "bfloat16" else "bfloat16"
        network = dataclasses.replace(self._one.network, precision=other)
        changed = dataclasses.replace(self._one, network=network)
        known: dict[str, float] = {own: envs / act[envs]}
        if not begins(changed, self._env):  # there is nothing to choose: no convolutions
            return known
        if not self._time_for(f"inference in {other}", 3.0 + envs * self._making):
            return known
        measured = alone(lambda: acting(changed, envs), self._mine[-1:], seconds=0.3)
        return known | {other: envs / measured["step"]}


class _Job(NamedTuple):
    """One thing to measure, as often as there is time for it."""

    what: str
    kind: Literal["apart", "threads", "team", "workers", "busy"]
    key: int
    """where in `_Ratios` it puts what it finds"""
    seconds: float
    """that it takes, about"""
    do: Callable[[], bool]
    """False: nothing came of it"""


class _Beside(NamedTuple):
    """An update under other circumstances, and one inside a process that also acts, on one core, at
    about that time; in seconds."""

    took: float
    base: float

    def times(self, factor: float) -> _Beside:
        return self._replace(took=factor * self.took)


def over(found: Sequence[_Beside]) -> float:
    """How much longer it takes: of the medians, as each single look may be disturbed."""
    return statistics.median(one.took for one in found) / statistics.median(
        one.base for one in found
    )


class _Slowed(NamedTuple):
    """Beside others, over alone."""

    learn: float
    act: float
    """in the mean of all actors"""
    slowest: float
    """of the actors, whichever it is at a time, over that mean"""

    def times(self, factor: float) -> _Slowed:
        return _Slowed(factor * self.learn, factor * self.act, self.slowest)


class _Curves(NamedTuple):
    """What of `Rates` comes of ratios."""

    inside: dict[int, float]
    learn: dict[int, float]
    slow_act: dict[int, float]
    slow_learn: dict[int, float]
    slowest: dict[int, float]
    team: dict[int, float]


@dataclasses.dataclass
class _Ratios:
    """How much longer things take under other circumstances, each as often as it was measured."""

    apart: dict[int, list[_Beside]] = dataclasses.field(default_factory=dict)
    """cores: an update in a process of its own, over one inside a process that also acts, on one
    core"""
    busy_apart: int = 2
    """busy cores while that was measured"""
    asked: list[float] = dataclasses.field(default_factory=list)
    """seconds of a step of the only actor meanwhile, with what a server took for it"""
    threads: dict[int, list[_Beside]] = dataclasses.field(default_factory=dict)
    """cores: an update inside such a process, over one with one core"""
    team: dict[int, list[_Beside]] = dataclasses.field(default_factory=dict)
    """learners: an update of all of them, over one inside a process that also acts"""
    workers: dict[int, list[_Beside]] = dataclasses.field(default_factory=dict)
    """workers: from one update of each to the next, over an update alone"""
    busy: dict[int, list[_Slowed]] = dataclasses.field(default_factory=dict)
    """by busy cores"""

    def times(self, factor: float, kind: str, key: int) -> _Ratios:
        """As if one of them had always taken so many times as long; steps that asked a server
        likewise, where it is one of the runs that made them."""
        found = getattr(self, kind)
        changed = {kind: found | {key: [one.times(factor) for one in found[key]]}}
        if kind == "apart":
            changed["asked"] = [factor * step for step in self.asked]
        return dataclasses.replace(self, **changed)

    def curves(self, inside: dict[int, float], base: float) -> _Curves:
        """With seconds of an update inside a process that also acts, by cores; on one core it took
        `base` in the median of many."""
        inside = {cores: base * seconds / inside[1] for cores, seconds in inside.items()}
        inside |= {cores: base * over(found) for cores, found in self.threads.items()}
        apart = {cores: over(found) for cores, found in self.apart.items()}
        first = apart.get(1, 1.0)
        slow_learn, slow_act, slowest = (
            {1: 1.0}
            | {n: max(1.0, statistics.median(r[i] for r in rs)) for n, rs in self.busy.items()}
            for i in range(3)
        )
        if apart:  # it had busy cores beside it
            known = between(slow_learn, self.busy_apart)
            slow_learn = {n: max(1.0, factor / known) for n, factor in slow_learn.items()}
        # several learners had busy cores beside them, which predictions know of
        team = {
            n: over(found) / first / between(slow_learn, 2 * n) for n, found in self.team.items()
        }
        learn = {cores: seconds * first for cores, seconds in inside.items()}
        learn |= {cores: base * ratio for cores, ratio in apart.items()}
        return _Curves(inside, learn, slow_act, slow_learn, slowest, {1: 1.0} | team)


class _Again:
    """Who acts and who learns, asked again and again while a profile is made: others use the
    machine, too, so that it is quicker at one time than at another."""

    SECONDS = 0.4

    def __init__(self, learner: Probe, actor: Probe, cores: Sequence[int], update: float) -> None:
        """An update takes about `update` seconds; a long one is looked at only where something is
        compared with it."""
        self._learner, self._actor, self._cores = learner, actor, list(cores)
        self._update = update
        self._learnt: list[float] = []
        self._acted: list[float] = []

    @property
    def learn(self) -> float:
        """Seconds of an update on one core, in the process that also acts: the median."""
        return statistics.median(self._learnt) if self._learnt else self._update

    @property
    def act(self) -> float:
        """Seconds of a step, likewise."""
        return statistics.median(self._acted)

    @property
    def varied(self) -> float:
        """How much longer or shorter the same took from one time to another: of four looks in five,
        half the range over the middle, of whoever varied more."""
        return max((_varied(looks) for looks in (self._learnt, self._acted) if looks), default=0.0)

    def look(self) -> float:
        """Ask both, one after the other; seconds of an update."""
        if self._update < LONG:
            self._learnt.append(self._ask_learner())
        self._acted.append(self._ask_actor(self.SECONDS / 2))
        return self._learnt[-1] if self._learnt else self._update

    def beside(self, measure: Callable[[], Measured]) -> tuple[Measured, float]:
        """What was measured, and seconds of an update at about that time."""
        before = self.look()
        taken = measure()
        return taken, (before + self.look()) / 2

    def threads(self, cores: Sequence[int]) -> _Beside:
        """How long an update takes on these cores, and on one."""
        took = self._ask_learner(cores)
        self._learnt.append(self._ask_learner())
        return _Beside(took, self._learnt[-1])

    def slowed(self, others: Sequence[Probe], alike: float) -> list[_Slowed]:
        """How much longer learning and acting take together and beside others that act than each
        alone: twice where that is quick. Whoever is the slowest is so for `alike` seconds."""
        for other in others:
            other.ready()
        found = []
        for _ in range(2 if self._update < LONG else 1):
            learnt, acted = self._ask_learner(), self._ask_actor()
            self._learnt.append(learnt)
            self._acted.append(acted)
            self._learner.begin(cores=self._cores, seconds=self.SECONDS)
            looks = [self._all_at_once(others)]
            while not self._learner.has_ended:  # it is to have them beside it until then
                looks.append(self._all_at_once(others))
            learning = float(self._learner.end()["learn"])
            slices = np.concatenate(looks, axis=1)
            mean = statistics.harmonic_mean(np.median(slices, axis=1).tolist())  # of the rates
            window = round(alike / self.SECONDS * SLICES)
            found.append(_Slowed(learning / learnt, mean / acted, behind(slices, window)))
        return found

    def _all_at_once(self, others: Sequence[Probe]) -> Array:
        """Seconds of a step of each actor, all of which act, slice by slice."""
        for other in (self._actor, *others):
            other.begin(seconds=self.SECONDS)
        return np.array([other.end()["slices"] for other in (self._actor, *others)])

    def _ask_learner(self, cores: Sequence[int] = ()) -> float:
        where = list(cores) or self._cores
        return float(self._learner.ask(cores=where, seconds=self.SECONDS)["learn"])

    def _ask_actor(self, seconds: float = SECONDS) -> float:
        return float(self._actor.ask(seconds=seconds)["step"])


def fed_by(task: Task, cores: int, most_envs: int) -> Iterator[tuple[int, int]]:
    """Actors, at first as many as these cores hold, and envs of each, at most so many, that feed a
    learner what the config asks for."""
    for actors in range(cores, 0, -1):
        envs = max(1, task.envs // actors)
        if not task.on_policy:
            yield actors, min(envs, most_envs)
        elif task.envs % actors == 0 and envs <= most_envs:
            yield actors, envs


def behind(slices: Array, window: int) -> float:
    """How much longer a step takes where all actors wait for the slowest than in their mean, of
    seconds [actors, slices] of each one's step; which of them is the slowest may change after so
    many slices."""
    window = min(max(1, window), slices.shape[1])
    whole = slices[:, : slices.shape[1] // window * window]
    steps = whole.reshape(len(slices), -1, window).mean(axis=2)
    mean = statistics.harmonic_mean(steps.mean(axis=1).tolist())  # of the rates
    return float(steps.max(axis=0).mean() / mean)


def smooth(points: dict[int, float]) -> dict[int, float]:
    """Points of a curve, each drawn half way to where its neighbours, which were measured at other
    times, let it be expected; the first and the last stay."""
    keys = sorted(points)
    drawn = dict(points)
    for below, here, above in zip(keys, keys[1:], keys[2:], strict=False):
        expected = between({below: points[below], above: points[above]}, here)
        drawn[here] = math.sqrt(points[here] * expected)
    return drawn


def _varied(looks: Sequence[float]) -> float:
    low, middle, high = np.quantile(looks, (0.1, 0.5, 0.9))
    return float((high - low) / middle / 2)


def _with_envs(envs: int) -> str:
    return f"acting with {envs} env{'s' * (envs > 1)}"
