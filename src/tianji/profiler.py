"""Measures what this machine does with a config: a profile, in less than a minute."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from tianji.config import Config, EvalConfig
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.machine import core_order
from tianji.machine import cores as cores_here
from tianji.plan import MOST_ENVS, Choice, Rates, Task, between, different, predict, search
from tianji.probe import Measured, Measurement, Probe, Running, acting, alone, channel, learning
from tianji.profile import UNSTEADY, Profile, facts, subject
from tianji.ratios import LONG, Again, Beside, Ratios, over, usual
from tianji.shape import begins, possible, see, task_of_all, template, without_warmup

WHOLE = 45.0
"""seconds that a profile may take"""
ACT, LEARN = 0.4, 2.0
"""seconds for which acting is looked at, with each number of envs, and learning on one core"""
START, START_GPU = 3.0, 8.0
"""seconds that a run takes beside its training, about; with a GPU, at least"""
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
MAKING = 2.0
"""seconds to make the envs of one measurement, at most"""
STEPPING = 4.0
"""seconds in which envs make a step, or what an update follows, at most: with fewer envs, or with
steps that are shown again"""

Progress = Callable[[str, float], None]
"""what is being measured, and seconds that are left, about"""


def measure(config: Config, progress: Progress = lambda what, left: None) -> Profile:
    """The whole profile, in at most 45 s where an update takes no more than a few."""
    return _Profiler(config, progress).whole()


def look(config: Config) -> Profile:
    """As much as two seconds tell."""
    return _Profiler(config, lambda what, left: None).glance()


def _sees_gpu() -> Measurement:
    """For a process of its own: one that has asked CUDA cannot fork others that use it."""
    return lambda: {"gpu": torch.cuda.is_available()}


class _Clock:
    """What is left of the time, and for what it did not suffice."""

    def __init__(self, progress: Progress) -> None:
        self._begun = time.monotonic()
        self._progress = progress
        self.skipped: list[str] = []

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return WHOLE - self.spent

    def say(self, what: str) -> None:
        self._progress(what, max(0.0, self.left))

    def has(self, what: str, seconds: float) -> bool:
        """Is there so much left? If not, it is told in the profile."""
        if self.left < seconds:
            self.skipped.append(what)
            return False
        self.say(what)
        return True


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a profile is of."""

    config: Config
    one: Config
    """with everything of a run in one place"""
    sooner: Config
    """the same without most of its warm-up"""
    env: EnvSpec
    making: float
    """seconds to make and reset an env"""
    task: Task
    cores: Sequence[int]

    @classmethod
    def of(cls, config: Config) -> _Asked:
        cores = core_order()[: cores_here()]
        if config.scale.device == "cuda" and not alone(_sees_gpu, cores)["gpu"]:
            raise Refusal(
                "there is no GPU here that torch sees, so learning on one cannot be measured. "
                'Leave --gpus out, or set scale.device = "cpu".'
            )
        torch.set_num_threads(1)  # children are forked, and a pool of threads is not
        one = template(config)
        env, making = see(one)
        task = task_of_all(config, env)
        return cls(config, one, without_warmup(one, env), env, making, task, cores)

    @property
    def on_cpu(self) -> bool:
        return self.config.scale.device == "cpu"

    def at_once(self, seconds: float) -> int:
        """Envs that can be made in so many seconds."""
        return max(1, int(seconds / max(self.making, 1e-6)))

    def collecting(self, acted: _Acted) -> float:
        """Seconds in which one actor collects what an update follows."""
        return self.task.rows * acted.steps[acted.envs] / acted.envs

    def fed(self, acted: _Acted) -> tuple[int, int | None]:
        """What learning is measured with: envs that are made, and real steps of theirs; None: all
        are real, as they do not take long."""
        most = self.at_once(MAKING)
        real = min(most, self.task.envs) / self.task.envs
        if real * self.collecting(acted) < STEPPING:
            return most, None
        return 1, int(STEPPING / 2 / acted.steps[min(acted.steps)])

    def long_enough(self, update: float, collecting: float) -> float:
        """Seconds of a real run in which some updates are made, each after so much collecting."""
        warmup = getattr(self.sooner.algorithm, "warmup", 0)
        first = collecting * max(1.0, warmup / self.task.rows)
        return max(2.0, first + 4 * max(update, collecting))


class _Acted(NamedTuple):
    """What one actor does."""

    steps: dict[int, float]
    """seconds of a step by number of envs"""
    shares: dict[int, float]
    """what share of them is inference"""
    envs: int
    """the config's, or as many of them as can be made"""
    with_these: Measured
    actor: Probe
    """who was asked that"""


class _Profiler:
    """One profile."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._clock = _Clock(progress)
        self._asked = _Asked.of(config)
        self._probes = contextlib.ExitStack()
        """processes that are asked more than once"""

    def whole(self) -> Profile:
        with self._probes:
            return self._whole()

    def _whole(self) -> Profile:
        asked, mine = self._asked, self._asked.cores
        self._clock.say("the channel")
        passing = alone(lambda: channel(mine[-1:]), mine[:1], seconds=0.4)
        acted = self._acting()
        begun = self._clock.spent
        self._clock.say("learning")
        learner = self._probes.enter_context(
            Probe(lambda: learning(asked.sooner, *asked.fed(acted)), mine)
        )
        learner.ready()
        preparing = self._clock.spent - begun
        inside, learnt = self._inside(learner)
        again = Again(learner, acted.actor, mine[:1], inside[1], acted.steps[acted.envs])
        again.look()
        comparing = _Comparing(asked, self._clock, self._probes, acted, again, inside, preparing)
        jobs = comparing.once(comparing.jobs())
        batches = self._batches(acted, round(learnt["consumed"]), inside[1], preparing)
        inference = self._inference(acted)

        def rates(ratios: Ratios) -> Rates:
            """By what was compared so far."""
            act = acted.steps | {acted.envs: again.act}
            found = Rates(
                act=act, begin=acted.with_these["load"], send=passing["push"],
                receive=learnt.get("receive", 0.0) + passing["receive"],
                serve=learnt["serve"] + passing["push"] + passing["receive"], take=learnt["take"],
                wake=passing["wake"], valid=acted.with_these["valid"],
                device=asked.config.scale.device, inside_act=self._inside_act(act, learnt),
                infer={n: acted.shares[n] * act[n] for n in act},
                **ratios.curves(inside, again.learn)._asdict(),
            )  # fmt: skip
            asking = passing["push"] + passing["receive"]
            known = _with_asking(found, asked.task, learnt, asking, ratios.asked)
            return _with_joining(known, asked.task, ratios, again)

        comparing.repeat(jobs, rates)
        again.look()
        return self._profile(
            rates(comparing.ratios), learnt, True, batches, inference, again.varied
        )

    def glance(self) -> Profile:
        asked, mine = self._asked, self._asked.cores[:1]
        envs = min(asked.task.envs, asked.at_once(0.3))
        few = max(1, envs // 8)
        first = alone(lambda: acting(asked.one, few), mine, seconds=0.2)
        acted, each = {few: first}, first["step"] / few
        if few < envs and envs * each < 0.3:
            acted[envs] = first = alone(lambda: acting(asked.one, envs), mine, seconds=0.3)
        most, steps = asked.at_once(0.3), None
        if asked.task.rows / asked.task.envs * min(most, asked.task.envs) * each > 1.0:
            most, steps = 1, int(0.3 / each)
        learnt = alone(lambda: learning(asked.sooner, most, steps), mine, cores=mine, seconds=0.4)
        rates = Rates(
            act={n: found["step"] for n, found in acted.items()},
            infer={n: found["infer"] for n, found in acted.items()},
            begin=first["load"], send=5e-6, receive=learnt.get("receive", 0.0) + 1e-5,
            serve=learnt["serve"] + 1e-5, learn={1: learnt["learn"]}, take=learnt["take"],
            wake=3e-5, slow_act={1: 1.0}, slow_learn={1: 1.0}, valid=first["valid"],
            device=asked.config.scale.device,
        )  # fmt: skip
        return self._profile(_with_asking(rates, asked.task, learnt, 1.5e-5, []), learnt, False)

    def _profile(
        self,
        rates: Rates,
        learnt: Measured,
        whole: bool,
        batches: dict[int, float] | None = None,
        inference: dict[str, float] | None = None,
        varied: float = 0.0,
    ) -> Profile:
        asked = self._asked
        task = dataclasses.replace(asked.task, batch=round(learnt["consumed"]))
        seconds, skipped = self._clock.spent, tuple(self._clock.skipped)
        return Profile(rates, task, facts(), subject(asked.config), seconds, whole, batches or {},
                       inference or {}, skipped, varied)  # fmt: skip

    def _acting(self) -> _Acted:
        asked, clock, mine = self._asked, self._clock, self._asked.cores[-1:]
        own = {asked.task.envs, asked.config.scale.envs_per_actor}
        found: dict[int, float] = {}
        shares: dict[int, float] = {}
        counts = sorted({2**i for i in range(MOST_ENVS.bit_length())} | own)
        clock.say(_with_envs(1))
        first = self._probes.enter_context(Probe(lambda: acting(asked.one, 1), mine))
        told = first.ask(seconds=ACT)
        most = min(asked.at_once(2 * MAKING), int(STEPPING / told["step"]))
        few = [n for n in counts if n == 1 or n <= most]
        own_envs = max(n for n in few if n <= asked.task.envs)
        clock.skipped += [_with_envs(n) for n in counts if n not in few]
        rest = WHOLE / 2 if asked.on_cpu else WHOLE / 2 + START_GPU - START
        found[1], shares[1] = told["step"], told["infer"] / told["step"]
        kept = told, first
        for envs in few[1:]:
            last = found[max(found)]
            if envs not in (own_envs, *own) and (last > 0.3 or clock.left < rest):
                clock.skipped.append(_with_envs(envs))
                continue
            clock.say(_with_envs(envs))
            probe = Probe(lambda n=envs: acting(asked.one, n), mine)  # type: ignore[misc]
            with contextlib.ExitStack() as closing:
                closing.callback(probe.close)
                one = probe.ask(seconds=ACT)
                found[envs] = one["step"]
                shares[envs] = one["infer"] / one["step"]
                if envs == own_envs:
                    kept = one, probe
                    self._probes.push(closing.pop_all())
        return _Acted(smooth(found), shares, own_envs, *kept)

    def _inside(self, learner: Probe) -> tuple[dict[int, float], Measured]:
        """Seconds of an update in a process that also acts, by cores, from the most to one: all but
        one, and every half of it; and all else that is known of the last one."""
        mine, on_cpu = self._asked.cores, self._asked.on_cpu
        counts, most = {1}, max(1, len(mine) - 1)
        if on_cpu:
            counts.add(len(mine))
        while on_cpu and most > 1:
            counts.add(most)
            most //= 2
        found, learnt = {}, {}
        for count in sorted(counts, reverse=True):
            seconds = LEARN if count == 1 and on_cpu else LEARN / 2
            learnt = learner.ask(cores=mine[:count], seconds=seconds)
            found[count] = float(learnt["learn"])
        return found, learnt

    def _inside_act(self, act: dict[int, float], learnt: Measured) -> float:
        """How much longer acting takes where one process also learns."""
        envs = self._asked.task.envs
        if envs > self._asked.at_once(MAKING) or envs not in act:
            return 1.0
        return max(1.0, float(learnt.get("act", 0.0)) / act[envs])

    def _batches(
        self, acted: _Acted, consumed: int, known: float, preparing: float
    ) -> dict[int, float]:
        """Seconds of an update on one core, by the steps that it consumes: as many as it does,
        about half and about twice of that."""
        asked, mine = self._asked, self._asked.cores[:1]
        found, feeding = {consumed: known}, asked.fed(acted)
        for what, factor in (("half the batch", 0.5), ("twice the batch", 2.0)):
            other = self._with_batch(factor)
            if other is None or not begins(other, asked.env):
                continue
            if not self._clock.has(what, preparing + 1 + 2 * factor * known):
                continue
            learnt = alone(partial(learning, other, *feeding), mine, cores=mine, seconds=0.5)
            found.setdefault(round(learnt["consumed"]), learnt["learn"])
        return found

    def _with_batch(self, factor: float) -> Config | None:
        """The config with another batch, if it can have one."""
        config = self._asked.sooner
        if self._asked.task.on_policy:
            envs = round(config.scale.envs_per_actor * factor)
            return config.scaled(envs_per_actor=envs) if envs else None
        size = round(getattr(config.algorithm, "batch_size", 0) * factor)
        if size < 1:
            return None
        algorithm: Any = dataclasses.replace(config.algorithm, batch_size=size)  # type: ignore[type-var]
        return dataclasses.replace(config, algorithm=algorithm)

    def _inference(self, acted: _Acted) -> dict[str, float]:
        """Steps per second of one actor, by the precision of inference."""
        asked, envs = self._asked, acted.envs
        own = asked.one.network.precision
        other: Literal["float32", "bfloat16"] = "float32" if own == "bfloat16" else "bfloat16"
        network = dataclasses.replace(asked.one.network, precision=other)
        changed = dataclasses.replace(asked.one, network=network)
        known: dict[str, float] = {own: envs / acted.steps[envs]}
        if not begins(changed, asked.env):  # there is nothing to choose: no convolutions
            return known
        expected = 3.0 + envs * asked.making + 2 * acted.steps[envs]
        if not self._clock.has(f"inference in {other}", expected):
            return known
        measured = alone(lambda: acting(changed, envs), asked.cores[-1:], seconds=0.3)
        return known | {other: envs / measured["step"]}


class _Job(NamedTuple):
    """One thing to measure, as often as there is time for it."""

    what: str
    kind: Literal["apart", "threads", "team", "workers", "busy"]
    key: int
    """where in `Ratios` it puts what it finds"""
    seconds: float
    """that it takes, about"""
    do: Callable[[], bool]
    """False: nothing came of it"""


class _Comparing:
    """Measures ratios, of which each is worth the more time the more depends on it."""

    def __init__(
        self,
        asked: _Asked,
        clock: _Clock,
        probes: contextlib.ExitStack,
        acted: _Acted,
        again: Again,
        inside: dict[int, float],
        preparing: float,
    ) -> None:
        """Updates inside a process that also acts take `inside` seconds, by cores, and it took
        `preparing` until it could learn. Those who are compared are among the `probes`."""
        self._asked, self._clock, self._probes = asked, clock, probes
        self._again, self._inside, self._preparing = again, inside, preparing
        self._envs, self._step = acted.envs, acted.steps[acted.envs]
        self.ratios = Ratios()
        """what was found so far"""
        self._collecting = asked.collecting(acted)
        """seconds in which one actor collects what an update follows"""
        self._runner: Probe | None = None
        """who makes real runs, once there was one"""
        self._possibles: dict[Choice, bool] = {}
        """whether a run would begin, by how it is spread, as far as was asked"""

    def jobs(self) -> list[_Job]:
        """Those first on which most depends."""
        busy, threads = self._beside(), self._threads()
        if self._asked.task.workers:  # nobody learns in a process of its own
            workers = self._workers()
            return [*workers[:1], *busy[:1], *threads, *workers[1:], *busy[1:]]
        apart, team = self._apart(), self._team()
        return [*busy[:1], *apart[:1], *threads, *team[:1], *apart[1:], *team[1:], *busy[1:]]

    def once(self, jobs: list[_Job]) -> list[_Job]:
        """Do each once, if there is time; those that came to something, with what they took."""
        done = []
        for job in jobs:
            if not self._clock.has(job.what, job.seconds):
                continue
            begun = self._clock.spent
            if job.do():
                done.append(job._replace(seconds=self._clock.spent - begun))
            else:
                self._clock.skipped.append(job.what)
        return done

    def repeat(self, jobs: list[_Job], rates: Callable[[Ratios], Rates]) -> None:
        """Do again what matters while there is time: at one moment others may use the machine,
        too. Where nothing of it does, look again at who acts and who learns."""
        for turn in range(1, MORE):
            if self._clock.left < A_LOOK or (turn >= TURNS and self._again.varied <= UNSTEADY):
                return
            matter = self.that_matter(jobs, rates)
            if not matter:
                self._again.look()
            for job in matter:
                if self._clock.left < 1.2 * job.seconds + 1:
                    continue
                self._clock.say(f"{job.what}, again")
                job.do()

    def that_matter(self, jobs: list[_Job], rates: Callable[[Ratios], Rates]) -> list[_Job]:
        """Those on which it depends what the best way comes to or, by what is known so far, whether
        it is the best."""
        task, cores, known = self._asked.task, len(self._asked.cores), rates(self.ratios)
        ways = [p.choice for p in different(search(task, known, cores, self._possible))]
        if not ways:  # a plan will say so
            return []

        def new(way: Choice, known: Rates) -> float:
            return predict(task, known, way, cores).new

        def matters(job: _Job) -> bool:
            slower, quicker = (
                rates(self.ratios.times(factor, job.kind, job.key)) for factor in (LONGER, SHORTER)
            )
            overtaken = max(new(way, quicker) for way in ways) / new(ways[0], quicker) - 1
            return max(1 - new(ways[0], slower) / new(ways[0], known), overtaken) > MATTERS

        return [job for job in jobs if matters(job)]

    def _possible(self, choice: Choice) -> bool:
        if choice not in self._possibles:
            asked = self._asked
            self._possibles[choice] = possible(asked.config, choice, asked.env, asked.task)
        return self._possibles[choice]

    def _apart(self) -> list[_Job]:
        """How much longer an update takes in a process of its own, beside one actor's, than inside
        one that also acts, where each spoils the other's caches: by cores, with one and with those
        that were best. Only where updates are short. On a GPU, where most of an update may be to
        fetch what actors wrote: beside as many actors as half the cores hold."""
        asked, inside = self._asked, self._inside
        if not asked.on_cpu:
            return self._fed()
        if inside[1] > SHORT or asked.task.envs > asked.at_once(MAKING):
            return []
        jobs = []
        for cores in sorted({1, min(inside, key=lambda cores: inside[cores])}):
            if cores + 1 > len(asked.cores):
                continue
            seconds = asked.long_enough(inside[cores], self._collecting)
            run = asked.sooner.scaled(pin=True, cores=cores)
            what = f"a learner of its own with {cores} core{'s' * (cores > 1)}"
            jobs.append(self._job(what, "apart", cores, run, seconds))
        return jobs

    def _fed(self) -> list[_Job]:
        """How much longer an update takes that is fed by several actors."""
        asked = self._asked
        if self._inside[1] > LONG:
            return []
        runs = (
            asked.sooner.scaled(pin=True, actors=actors, envs_per_actor=envs)
            for actors, envs in fed_by(asked.task, len(asked.cores) // 2, asked.at_once(MAKING))
        )
        run = next((run for run in runs if begins(run, asked.env)), None)
        if run is None:
            self._clock.skipped.append("a learner that actors feed")
            return []
        actors = run.scale.actors
        self.ratios.busy_apart = 1 + actors
        making = asked.making * run.scale.envs_per_actor + self._gpu_start
        seconds = asked.long_enough(self._inside[1], self._collecting / actors)
        what = f"a learner that {actors} actor{'s feed' if actors > 1 else ' feeds'}"
        return [self._job(what, "apart", 1, run, seconds, making)]

    @property
    def _gpu_start(self) -> float:
        """Seconds that a run takes to begin beside those of one without a GPU."""
        return 0.0 if self._asked.on_cpu else max(START_GPU - START, self._preparing)

    def _threads(self) -> list[_Job]:
        """How long an update takes with as many cores as were best, over one with one core."""
        inside, again = self._inside, self._again
        best = min(inside, key=lambda cores: inside[cores])

        def do() -> bool:
            taken = again.threads(self._asked.cores[:best])
            self.ratios.threads.setdefault(best, []).append(taken)
            return True

        expected = 2 * (again.SECONDS + inside[1])
        what = f"learning with {best} cores"
        return [_Job(what, "threads", best, expected, do)] if best > 1 else []

    def _team(self) -> list[_Job]:
        """How long an update of several learners takes, each on a core of its own, over one inside
        a process that also acts. Only as many as leave a core to each of as many actors."""
        asked, jobs = self._asked, []
        for learners in TEAMS if asked.on_cpu else ():
            envs = max(1, asked.one.scale.envs_per_actor // learners)
            several = asked.sooner.scaled(
                learners=learners, actors=learners, pin=True, envs_per_actor=envs
            )
            if 2 * learners > len(asked.cores) or not begins(several, asked.env):
                continue  # and a plan will not say so, either
            seconds = asked.long_enough(self._inside[1], self._collecting)
            making = asked.making * envs
            what = f"{learners} learners"
            jobs.append(self._job(what, "team", learners, several, seconds, making))
        return jobs

    def _workers(self) -> list[_Job]:
        """How long it takes each of several workers from one update to the next, over an update of
        one alone: two of them, and one on every core."""
        asked, jobs = self._asked, list[_Job]()
        if len(asked.cores) < 2:
            return jobs
        making = asked.making * asked.task.envs + self._gpu_start
        # Several take longer than one, and each is to make some updates after all have begun.
        seconds = 2 * asked.long_enough(self._inside[1] + self._collecting, self._collecting)
        for workers in sorted({2, len(asked.cores)}, reverse=True):
            several = asked.config.scaled(
                engine="local", actors=1, learners=1, groups=workers, cores=1, pin=True,
                envs_per_actor=asked.task.envs,
            )  # fmt: skip
            quiet = dataclasses.replace(several, eval=EvalConfig(), auto=False)
            if not begins(quiet, asked.env):
                continue
            run = without_warmup(quiet, asked.env)
            what = f"{workers} workers"
            jobs.append(self._job(what, "workers", workers, run, seconds, making))
        return jobs

    def _job(
        self,
        what: str,
        kind: Literal["apart", "team", "workers"],
        key: int,
        run: Config,
        seconds: float,
        making: float = 0.0,
    ) -> _Job:
        """A real run, and what an update takes there over what it takes inside, on one core."""
        ratios = self.ratios

        def do() -> bool:
            told, base = self._again.beside(lambda: self._run(run, seconds))
            if told["update"] is None:
                return False
            found: dict[int, list[Beside]] = getattr(ratios, kind)
            found.setdefault(key, []).append(Beside(told["update"], base))
            one_actor = run.scale.actors == 1 and run.scale.envs_per_actor == self._asked.task.envs
            if kind == "apart" and one_actor and told["step"] is not None:
                ratios.asked.append(told["step"])
            return True

        return _Job(what, kind, key, seconds + START + making, do)

    def _run(self, config: Config, seconds: float) -> Measured:
        """A real run, which has the whole machine."""
        if self._runner is None:
            self._runner = self._probes.enter_context(Probe(Running, self._asked.cores))
        with tempfile.TemporaryDirectory() as folder:
            return self._runner.ask(tree=config.tree(), folder=folder, seconds=seconds)

    def _beside(self) -> list[_Job]:
        """How much longer acting and learning take when so many cores are busy: a learner on the
        first and an actor on each other one, of which the last also acts alone."""
        asked, again = self._asked, self._again
        mine, others = asked.cores, list[Probe]()
        if len(mine) < 2:
            return []

        def do(busy: int) -> bool:
            others.extend(
                self._probes.enter_context(Probe(lambda: acting(asked.one, self._envs), [core]))
                for core in mine[1 + len(others) : busy - 1]
            )
            # Actors that share an update's steps wait for the slowest after that long.
            ahead = asked.task.lead if asked.task.abreast else 0.0
            alike = (1.0 + ahead) * self._collecting / (busy - 1)
            slowed = again.slowed(others[: busy - 2], alike)
            self.ratios.busy.setdefault(busy, []).extend(slowed)
            return True

        some = {len(mine) // 2, len(mine)} if len(mine) > 4 else {2, len(mine)}
        looks = 6 * (max(again.SECONDS, 2 * self._step) + self._inside[1])
        expected = self._envs * asked.making + 1 + looks
        return [
            _Job(f"{busy} busy cores", "busy", busy, expected, partial(do, busy))
            for busy in sorted(some, reverse=True)
        ]


def _with_asking(
    rates: Rates, task: Task, learnt: Measured, passing: float, asked: Sequence[float]
) -> Rates:
    """With what it takes to ask a server, if there is one: inference aside, and with a message in
    each direction, which takes `passing` seconds of both sides together; with what else steps took
    in real runs, where there were some."""
    if not task.server:
        return rates
    inferring = between(rates.infer, task.envs, above=1.0)
    answer = max(0.0, learnt["answer"] - inferring) + passing
    rates = dataclasses.replace(rates, ask=learnt["ask"] + passing, answer=answer)
    if not asked:
        return rates
    more = usual(asked) - rates.asked(task.envs, 1, None).step
    return dataclasses.replace(rates, ask=max(0.0, rates.ask + more))


def _with_joining(rates: Rates, task: Task, ratios: Ratios, again: Again) -> Rates:
    """With what it costs workers that there are others, where real runs tell: over what one alone
    is predicted to take."""
    if not ratios.workers:
        return rates
    one = predict(task, rates, Choice("serial", 1, task.envs, task.T), 1)
    took = {n: again.learn * over(found) for n, found in ratios.workers.items()}
    together = {n: seconds * one.new / rates.valid / task.rows for n, seconds in took.items()}
    return dataclasses.replace(rates, together={1: 1.0} | together)


def fed_by(task: Task, cores: int, most_envs: int) -> Iterator[tuple[int, int]]:
    """Actors, at first as many as these cores hold, and envs of each, at most so many, that feed a
    learner what the config asks for."""
    for actors in range(cores, 0, -1):
        envs = max(1, task.envs // actors)
        if not task.on_policy:
            yield actors, min(envs, most_envs)
        elif task.envs % actors == 0 and envs <= most_envs:
            yield actors, envs


def smooth(points: dict[int, float]) -> dict[int, float]:
    """Points of a curve, each drawn half way to where its neighbours, which were measured at other
    times, let it be expected; the first and the last stay."""
    keys = sorted(points)
    drawn = dict(points)
    for below, here, above in zip(keys, keys[1:], keys[2:], strict=False):
        expected = between({below: points[below], above: points[above]}, here)
        drawn[here] = math.sqrt(points[here] * expected)
    return drawn


def _with_envs(envs: int) -> str:
    return f"acting with {envs} env{'s' * (envs > 1)}"
