"""What a profile compares: work alone and beside others, in a process of its own, with more cores;
what more depends on, more often."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from tianji.asked import MAKING, Acted, Asked, Clock
from tianji.config import Config, EvalConfig
from tianji.plan import Choice, Rates, Task, different, predict, search
from tianji.probe import Measured, Probe, Running, acting
from tianji.profile import UNSTEADY
from tianji.ratios import LONG, Again, Beside, Ratios
from tianji.shape import begins, possible, without_warmup

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


class Job(NamedTuple):
    """One thing to measure, as often as there is time for it."""

    what: str
    kind: Literal["apart", "threads", "team", "workers", "busy"]
    key: int
    """where in `Ratios` it puts what it finds"""
    seconds: float
    """that it takes, about"""
    do: Callable[[], bool]
    """False: nothing came of it"""


class Contrasts:
    """Measures ratios, of which each is worth the more time the more depends on it."""

    def __init__(
        self,
        asked: Asked,
        clock: Clock,
        probes: contextlib.ExitStack,
        acted: Acted,
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
        self._looking = inside[1] / asked.share(acted.inference)
        """seconds of an update with which learning is looked at"""
        self._collecting = asked.collecting(acted)
        """seconds in which one actor collects what an update follows"""
        self._runner: Probe | None = None
        """who makes real runs, once there was one"""
        self._possibles: dict[Choice, bool] = {}
        """whether a run would begin, by how it is spread, as far as was asked"""

    def jobs(self) -> list[Job]:
        """Those first on which most depends."""
        busy, threads = self._beside(), self._threads()
        if self._asked.task.workers:  # nobody learns in a process of its own
            workers = self._workers()
            return [*workers[:1], *busy[:1], *threads, *workers[1:], *busy[1:]]
        apart, team = self._apart(), self._team()
        return [*busy[:1], *apart[:1], *threads, *team[:1], *apart[1:], *team[1:], *busy[1:]]

    def once(self, jobs: list[Job]) -> list[Job]:
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

    def repeat(self, jobs: list[Job], rates: Callable[[Ratios], Rates]) -> None:
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

    def that_matter(self, jobs: list[Job], rates: Callable[[Ratios], Rates]) -> list[Job]:
        """Those on which it depends what the best way comes to or, by what is known so far, whether
        it is the best."""
        task, cores, known = self._asked.task, len(self._asked.cores), rates(self.ratios)
        ways = [p.choice for p in different(search(task, known, cores, self._possible))]
        if not ways:  # a plan will say so
            return []

        def new(way: Choice, known: Rates) -> float:
            return predict(task, known, way, cores).new

        def matters(job: Job) -> bool:
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

    def _apart(self) -> list[Job]:
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

    def _fed(self) -> list[Job]:
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

    def _threads(self) -> list[Job]:
        """How long an update takes with as many cores as were best, over one with one core."""
        inside, again = self._inside, self._again
        best = min(inside, key=lambda cores: inside[cores])

        def do() -> bool:
            taken = again.threads(self._asked.cores[:best])
            self.ratios.threads.setdefault(best, []).append(taken)
            return True

        expected = 2 * (again.SECONDS + self._looking)
        what = f"learning with {best} cores"
        return [Job(what, "threads", best, expected, do)] if best > 1 else []

    def _team(self) -> list[Job]:
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

    def _workers(self) -> list[Job]:
        """How long it takes each of several workers from one update to the next, over an update of
        one alone: two of them, and one on every core."""
        asked, jobs = self._asked, list[Job]()
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
    ) -> Job:
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

        return Job(what, kind, key, seconds + START + making, do)

    def _run(self, config: Config, seconds: float) -> Measured:
        """A real run, which has the whole machine."""
        if self._runner is None:
            self._runner = self._probes.enter_context(Probe(Running, self._asked.cores))
        with tempfile.TemporaryDirectory() as folder:
            return self._runner.ask(tree=config.tree(), folder=folder, seconds=seconds)

    def _beside(self) -> list[Job]:
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
        looks = 6 * (max(again.SECONDS, 2 * self._step) + self._looking)
        expected = self._envs * asked.making + 1 + looks
        return [
            Job(f"{busy} busy cores", "busy", busy, expected, partial(do, busy))
            for busy in sorted(some, reverse=True)
        ]


def fed_by(task: Task, cores: int, most_envs: int) -> Iterator[tuple[int, int]]:
    """Actors, at first as many as these cores hold, and envs of each, at most so many, that feed a
    learner what the config asks for."""
    for actors in range(cores, 0, -1):
        envs = max(1, task.envs // actors)
        if not task.on_policy:
            yield actors, min(envs, most_envs)
        elif task.envs % actors == 0 and envs <= most_envs:
            yield actors, envs
