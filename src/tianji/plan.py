"""How many actors, with how many envs, and how many cores to learn with: arithmetic on measured
rates, which predicts what a run will do and searches for the best of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal, NamedTuple

from tianji.annotated import tree
from tianji.view.status import human

Binding = Literal["actors", "learner", "channel", "turns"]
"""what bounds a run: making steps, learning from them, handing them on; or both sides in turn"""

SIDES: tuple[Binding, ...] = ("actors", "learner", "channel")

SAME = 0.01
"""share by which two predictions must differ to be told apart; of those that do not, one with slack
and few cores is taken"""
SLACK = 0.25
"""share by which actors should be able to make more than is learnt from, where that costs no speed:
a prediction may be 15 % wrong, of either side"""
INFERRING, TOGETHER = 0.3, 1.5
"""share of a step from which inference counts; and times that a step may take longer with twice the
envs, so that they are worth it"""
WORTH = 0.05
"""share that a change must bring to be advised"""
OTHERS = 3
"""ways beside the best that a plan tells"""
QUICK = 0.4
"""share of the time to collect its rows from which on an update lets no actor overtake another"""
CROWD = 8
"""actors on one core, at most, where their envs wait"""
FILLED, LEAST = 0.8, 1e-3
"""share of a core that they may compute for; and that an actor does, at least"""
INSTANT = 1e-9
"""seconds of an update that takes no time"""
MOST_ENVS = 512
"""envs of an actor, at most, where the plan may choose them"""


@dataclass(frozen=True)
class Task:
    """What a config asks for, as far as speed is concerned. Whatever the choice, an update follows
    as many new steps, consumes as many, and is bounded alike in staleness."""

    rows: int
    """new steps that an update follows, resets counted"""
    batch: int
    """steps that an update consumes"""
    on_policy: bool
    lead: float
    """updates that acting may run ahead; 0: acting and learning take turns"""
    streams: bool
    """does an update take each rollout as it arrives?"""
    envs: int
    """of all actors together, as the config has them"""
    T: int
    """steps of each env in a rollout"""
    abreast: bool = False
    """does an actor wait for the slowest of all, a rollout ahead of it at most?"""
    passes: bool = False
    """unless updates are so quick that first arrivals let it go on"""
    workers: bool = False
    """does each group act and learn in one process?"""
    server: bool = False
    """does a server choose the actions of all actors?"""
    max_batch: int | None = None
    """rows that it infers at once, at most"""
    most_rows: int = 1 << 62
    """steps of one rollout of every actor, at most: for replay, where they need not be a batch"""


@dataclass(frozen=True)
class Rates:
    """What was measured, in seconds, each role alone on its cores if not said otherwise."""

    act: Mapping[int, float]
    """envs: one step of all of them, inference included (with T steps: Tsp, for a rollout)"""
    begin: float
    """of a rollout beside its steps: to load the newest parameters, to finish it"""
    send: float
    """to push a rollout (Tsd)"""
    receive: float
    """to take a rollout into the store and grant another (Trv)"""
    serve: float
    """to choose a batch and hand it on"""
    learn: Mapping[int, float]
    """cores: one update, all of it, with making its version known"""
    take: float
    """of that, on one core, what can be done as rollouts arrive"""
    wake: float
    """from a push until the other process has noticed"""
    slow_act: Mapping[int, float]
    """busy cores: how much longer acting takes than alone, in the mean of all actors"""
    slow_learn: Mapping[int, float]
    """busy cores: how much longer an update takes than alone"""
    slowest: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    """busy cores: how much longer the slowest actor takes than all in the mean"""
    valid: float = 1.0
    """share of steps that are not resets"""
    device: str = "cpu"
    """where updates were computed"""
    team: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    """learners that share a batch: their update's seconds over those of one alone"""
    infer: Mapping[int, float] = field(default_factory=dict)
    """envs: what of `act` is inference"""
    rests: Mapping[int, float] = field(default_factory=dict)
    """envs: what share of `act` an actor leaves its core to others, as its envs wait for something
    else; none: it does not"""
    ask: float = 0.0
    """of an actor, to ask a server and to take its answer"""
    answer: float = 0.0
    """of a server for each actor that asks, beside inference"""
    inside_act: float = 1.0
    """times that acting takes longer in a process that also learns"""
    inside: Mapping[int, float] = field(default_factory=dict)
    """cores: one update in a process that also acts; none: as long as in one of its own"""
    together: Mapping[int, float] = field(default_factory=dict)
    """workers, each on a core: how much longer acting, handing on and learning takes each of so
    many, and to join what they learn, than one alone; none: what busy cores cost"""

    def step(self, envs: int) -> float:
        """Seconds of one step of so many envs; between what was measured, on a line in logarithms;
        beyond it, in proportion."""
        return between(self.act, envs, above=1.0)

    def resting(self, envs: int) -> float:
        """Share of a step in which an actor with so many envs leaves its core to others: not while
        it infers."""
        if not self.rests:
            return 0.0
        inferring = between(self.infer, envs, above=1.0) if self.infer else 0.0
        return max(0.0, min(between(self.rests, envs), 1.0 - inferring / self.step(envs)))

    def asked(self, envs: int, actors: int, max_batch: int | None) -> Asked:
        """One step of all envs of as many actors that ask a server. It answers those that have
        asked at once: all of them, or as many as it may."""
        at_once = actors if max_batch is None else max(1, min(actors, max_batch // envs))
        one = between(self.infer, at_once * envs, above=1.0) + at_once * self.answer
        all_of_them = one * actors / at_once
        own = self.step(envs) - between(self.infer, envs, above=1.0) + self.ask
        return Asked(own, max(own + one + 2 * self.wake, all_of_them), all_of_them)

    def update(self, cores: int, learners: int = 1) -> float:
        """Seconds of one update; beyond the measured cores and learners, as with the most."""
        return between(self.learn, cores, above=0.0) * between(self.team, learners, above=0.0)

    def acting_slowed(self, busy: int) -> float:
        return max(1.0, between(self.slow_act, max(1, busy), above=0.0))

    def learning_slowed(self, busy: int) -> float:
        return max(1.0, between(self.slow_learn, max(1, busy), above=0.0))

    def behind(self, busy: int) -> float:
        """How much longer the slowest actor takes than all in the mean."""
        return max(1.0, between(self.slowest, max(1, busy), above=0.0))

    @property
    def most_learner_cores(self) -> int:
        return max(self.learn)


class Asked(NamedTuple):
    """A step where a server infers, in seconds."""

    own: float
    """that an actor works"""
    step: float
    """until it has made it"""
    serving: float
    """that the server works for all actors"""


@dataclass(frozen=True)
class Choice:
    """How a run is spread."""

    engine: Literal["serial", "local"]
    actors: int
    envs: int
    """of an actor"""
    rollout_length: int
    cores: int = 1
    """of the learner"""
    learners: int = 1
    groups: int = 1
    hosts: Literal["apart", "worker"] = "apart"
    """worker: each group acts and learns in one process"""
    actor_cores: int | None = None
    """that the actors of a group share, as their envs wait; None: each has its own"""

    @property
    def rows_per_rollout(self) -> int:
        return self.envs * self.rollout_length

    @property
    def way(self) -> tuple[Any, ...]:
        """How roles are spread, whatever envs each has."""
        return self.engine, self.hosts, self.actors, self.cores, self.learners, self.groups

    @property
    def cores_used(self) -> int:
        """By actors and learners. The buffer's part-time is in the prediction."""
        if self.engine == "serial":
            return self.cores
        if self.hosts == "worker":
            return self.groups * self.cores
        acting = self.actors if self.actor_cores is None else self.actor_cores
        return self.groups * (acting + self.learners * self.cores)

    def __str__(self) -> str:
        envs = f"{self.envs} env{'s' * (self.envs > 1)}"
        if self.engine == "serial":
            threads = f", {self.cores} cores to learn with" if self.cores > 1 else ""
            several = f"{self.actors} actors with {envs} each"
            return f"one process: {several if self.actors > 1 else envs}{threads}"
        if self.hosts == "worker":
            threads = f" and {self.cores} cores" if self.cores > 1 else ""
            each = " each" * (self.groups > 1)
            return f"{self.groups} worker{'s' * (self.groups > 1)} with {envs}{threads}{each}"
        groups = f"{self.groups} groups of " if self.groups > 1 else ""
        actors = f"{self.actors} actor{'s' * (self.actors > 1)} with {envs}"
        if self.actor_cores is not None:
            shared = f"{self.actor_cores} core{'s' * (self.actor_cores > 1)}"
            actors = f"{self.actors} actors on {shared} with {envs}"
        learners = "a learner" if self.learners == 1 else f"{self.learners} learners"
        cores = f"{self.cores} cores" if self.cores > 1 else "1 core"
        return f"{groups}{actors}{' each' * (self.actors > 1)}, {learners} with {cores}"


class Prediction(NamedTuple):
    """What a choice will come to, in steps per second; resets are left out."""

    choice: Choice
    produced: float
    received: float
    consumed: float
    new: float
    """that updates follow: TR_L and TR_A where they are equal"""
    binding: Binding
    capacity: dict[str, float]
    """new steps per second that each side could do if the others were no limit"""

    def tree(self) -> dict[str, Any]:
        rates = {name: getattr(self, name) for name in ("produced", "received", "consumed", "new")}
        return {
            "choice": asdict(self.choice),
            "predicted": rates,
            "binding": self.binding,
            "capacity": self.capacity,
        }


def predict(task: Task, rates: Rates, choice: Choice, cores: int) -> Prediction:
    """What a choice will come to on so many cores, of which it may leave some idle."""
    if choice.engine == "serial":
        return _inside(task, rates, choice, busy=1)
    busy = min(choice.cores_used, cores)
    if choice.hosts == "worker":
        return _inside(task, rates, choice, busy)
    slow = rates.acting_slowed(busy)
    per_group = cores / choice.groups
    rows, R = task.rows, choice.rows_per_rollout
    if task.server:
        own, step, serving = rates.asked(choice.envs, choice.actors, task.max_batch)
    else:
        own = step = rates.step(choice.envs)
        serving = 0.0
    own -= rates.resting(choice.envs) * rates.step(choice.envs)
    left = per_group - choice.learners * choice.cores
    """cores for actors, buffer and server"""
    whole = step
    if choice.actor_cores is not None:
        whole += queued(own, step - own, -(-choice.actors // choice.actor_cores)) - own
    acting = (choice.rollout_length * whole + rates.begin) * slow + rates.send
    """seconds of an actor for a rollout"""
    passing = (rates.receive / R + rates.serve / rows) * slow
    """seconds of the buffer for a row"""
    learning = rates.update(choice.cores, choice.learners) * rates.learning_slowed(busy)
    actors = choice.actors * R / acting
    if task.abreast and choice.actors > 1:
        share = actors * learning / rows  # of the time to collect an update's rows
        weight = min(1.0, share / QUICK) if task.passes else 1.0
        actors /= 1 + weight * (rates.behind(busy) - 1)
    asleep = (step - own) / choice.envs - serving / (choice.actors * choice.envs)
    making = acting / R - asleep * slow + passing
    """seconds of all that works for a row, but to learn from it"""
    follows = rows / learning
    if left < 1:  # all share all
        threads = choice.learners * choice.cores
        actors = follows = min(actors, follows, per_group / (making + threads * learning / rows))
    elif left < choice.actors + 1 + task.server:
        # the buffer, or the server, has no core of its own: what it takes is not theirs
        actors = min(actors, left / making)
    sides: dict[Binding, float] = {
        "actors": actors, "learner": follows, "channel": 1 / passing
    }  # fmt: skip
    if task.lead > 0:
        x = min(sides.values())
        binding: Binding = min(SIDES, key=lambda side: sides[side])
    else:
        made = min(actors, sides["channel"])
        x, binding = _in_turn(task, rates, choice, made, learning), "turns"
    return _prediction(task, rates, choice, x, binding, sides)


def queued(computing: float, resting: float, actors: int) -> float:
    """Seconds until one of several actors on a core has computed, with what it waits for the core:
    mean value analysis of a queue whose customers rest in between."""
    seconds, waiting = computing, 0.0
    for n in range(1, actors + 1):
        seconds = computing * (1 + waiting)
        waiting = n * seconds / (resting + seconds)
    return seconds


def _inside(task: Task, rates: Rates, choice: Choice, busy: int) -> Prediction:
    """One process does all, one after the other; of several groups, each has such a one."""
    slow, R = rates.acting_slowed(busy), choice.rows_per_rollout
    learning_slow = rates.learning_slowed(busy)
    if choice.hosts == "worker" and rates.together:
        slow = learning_slow = between(rates.together, busy)
    acting = choice.rollout_length * rates.step(choice.envs) * rates.inside_act
    acting = (acting + rates.begin) * slow / R
    passing = (rates.receive / R + rates.serve / task.rows) * slow
    update = between(rates.inside, choice.cores) if rates.inside else rates.update(choice.cores)
    learning = update * learning_slow / task.rows
    sides: dict[Binding, float] = {
        "actors": 1 / acting, "learner": 1 / learning, "channel": 1 / passing
    }  # fmt: skip
    return _prediction(task, rates, choice, 1 / (acting + passing + learning), "turns", sides)


def _in_turn(task: Task, rates: Rates, choice: Choice, made: float, learning: float) -> float:
    """Rows per second where acting waits for the version and learning for the rows: at lead 0. A
    round is at least one rollout of every actor."""
    rows = max(task.rows, choice.actors * choice.rows_per_rollout)
    updates = rows / task.rows
    collecting = rows / made + 4 * rates.wake
    learning *= updates
    if task.streams:
        taking = min(learning, rates.take * updates)
        return rows / (max(collecting, taking) + learning - taking)
    return rows / (collecting + learning)


def _prediction(
    task: Task,
    rates: Rates,
    choice: Choice,
    x: float,
    binding: Binding,
    sides: Mapping[Binding, float],
) -> Prediction:
    new = choice.groups * x * rates.valid
    consumed = new if task.on_policy else choice.groups * x / task.rows * task.batch
    scale = choice.groups * rates.valid
    capacity: dict[str, float] = {side: scale * rate for side, rate in sides.items()}
    return Prediction(choice, new, new, consumed, new, binding, capacity)


Allowed = Callable[[Choice], bool]


def choices(
    task: Task, cores: int, groups: Sequence[int] = (1,), rates: Rates | None = None
) -> Iterable[Choice]:
    """All ways to spread a task, with as many threads of a learner and learners that share batches
    as were measured, that leave every actor and every learner's thread a core of its own and, with
    one group, change nothing of what is learnt. Batches of rollouts are split among actors; where
    steps are replayed, actors may have as many envs as they like. Actors whose envs wait share
    cores. Workers are groups, by default as many as there are cores for."""
    threads = [1] if rates is None else [c for c in sorted(rates.learn) if c <= cores]
    teams = [1] if rates is None else sorted(rates.team)
    crowd = CROWD if rates is not None and rates.rests else 1
    for (envs, T), c in product(_envs(task, actors=1), threads):
        if 1 in groups:
            yield Choice("serial", 1, envs, T, cores=c)
        if task.workers:
            most = cores // c if max(groups) == 1 else min(cores // c, max(groups))
            for G in range(1, most + 1):
                yield Choice("local", 1, envs, T, cores=c, groups=G, hosts="worker")
    if task.workers:
        return
    for G, L, c in product(groups, teams, threads):
        free = cores // G - L * c
        for actors in range(1, crowd * free + 1):
            for envs, T in _envs(task, actors):
                choice = Choice("local", actors, envs, T, cores=c, learners=L, groups=G)
                if rates is not None:
                    choice = sharing(choice, rates)
                if choice.cores_used <= cores:
                    yield choice


def sharing(choice: Choice, rates: Rates) -> Choice:
    """The choice with actors on no more cores than they use, where their envs wait."""
    computing = 1.0 - rates.resting(choice.envs)
    most = max(1, min(CROWD, math.floor(FILLED / max(computing, LEAST))))  # actors of a core
    if choice.engine == "serial" or choice.hosts == "worker" or min(most, choice.actors) == 1:
        return choice
    return replace(choice, actor_cores=-(-choice.actors // most))


def _envs(task: Task, actors: int) -> Iterable[tuple[int, int]]:
    """(envs of an actor, rollout length) that so many actors can have."""
    if task.on_policy:
        if task.envs % actors == 0:
            yield task.envs // actors, task.T
        return
    lengths = {task.T, max(1, task.T // 2), 2 * task.T}
    counts = {2**i for i in range(MOST_ENVS.bit_length())} | {max(1, task.envs // actors)}
    for T in sorted(lengths):
        for envs in sorted(counts):
            if actors * envs * T <= task.most_rows:
                yield envs, T


def search(
    task: Task,
    rates: Rates,
    cores: int,
    allowed: Allowed = lambda choice: True,
    groups: Sequence[int] = (1,),
) -> Iterator[Prediction]:
    """All predictions, best first: by new steps per second; of those that are alike, by whether
    actors have some slack, by how few cores and envs they take, and how little they differ from the
    config. Whether a choice is allowed is asked when its turn comes."""
    ways = choices(task, cores, groups, rates)
    found = [predict(task, rates, choice, cores) for choice in ways]
    found.sort(key=lambda p: -p.new)
    best = next((i for i, p in enumerate(found) if allowed(p.choice)), None)
    if best is None:
        return
    most = found[best].new

    def rank(p: Prediction) -> tuple[float, ...]:
        choice = p.choice
        level = math.floor(math.log(most / p.new) / math.log1p(SAME))
        other = abs(math.log2(choice.rows_per_rollout * choice.actors / (task.envs * task.T)))
        return (
            level, choice.groups, tight(p), choice.cores_used, choice.learners, other,
            choice.actors, choice.envs,
        )  # fmt: skip

    for p in sorted(found[best:], key=rank):
        if allowed(p.choice):
            yield p


def tight(p: Prediction) -> bool:
    """Would actors that are a little slower than predicted be the limit? Not where all take turns:
    there everybody is."""
    others = min(p.capacity["learner"], p.capacity["channel"])
    return p.binding != "turns" and p.capacity["actors"] < (1 + SLACK) * others


def different(ranked: Iterable[Prediction]) -> Iterator[Prediction]:
    """Of ranked predictions those that are another way to spread, not the same with other envs."""
    seen = set()
    for p in ranked:
        if p.choice.way not in seen:
            seen.add(p.choice.way)
            yield p


class Knee(NamedTuple):
    """Where collecting no longer becomes faster by more actors."""

    actors: float
    """N_A* = (Tsp + Tsd) / Trv"""
    sample: float
    send: float
    receive: float


def knee(rates: Rates, envs: int, T: int) -> Knee:
    """Equation (1) of TianJi, with the 1 / N_A that its own condition implies."""
    sample = T * rates.step(envs) + rates.begin
    return Knee((sample + rates.send) / rates.receive, sample, rates.send, rates.receive)


def collection_seconds(rates: Rates, choice: Choice, rows: int) -> float:
    """Tc = max((Tsp + Tsd) / N_A, Trv) Ns: until the actors have made so many rows."""
    _, sample, send, receive = knee(rates, choice.envs, choice.rollout_length)
    return max((sample + send) / choice.actors, receive) * rows / choice.rows_per_rollout


def more_actors(
    task: Task,
    rates: Rates,
    best: Prediction,
    cores: int,
    allowed: Allowed = lambda choice: True,
) -> str:
    """Why the plan has no more actors than it has."""
    choice = best.choice
    if choice.hosts == "worker":
        return "each worker acts and learns in turn, so that more actors would be more workers"
    ways = choices(task, cores, (choice.groups,), rates)
    local = (way for way in ways if way.engine == "local")
    if choice.engine == "serial":
        if cores < 2:
            return "there is no core for a second process"
        apart = sorted((predict(task, rates, c, cores) for c in local), key=lambda p: -p.new)
        then = next((p for p in apart if allowed(p.choice)), None)
        if then is None:
            return "processes are not possible here"
        return (
            f"one process makes {human(best.new)} new steps/s; {then.choice} would make "
            f"{human(then.new)}"
        )
    if best.binding == "learner":
        idle = 1 - best.capacity["learner"] / best.capacity["actors"]
        fewer = (1 - 1 / choice.actors) * best.capacity["actors"] >= best.capacity["learner"]
        spare = "; some are to spare, if they are slower than predicted" if fewer else ""
        return (
            f"the learner can follow {human(best.capacity['learner'])} new steps/s and the actors "
            f"make up to {human(best.capacity['actors'])}: they already wait {idle:.0%} of their "
            f"time{spare}"
        ).replace("%", " %")
    if best.binding == "channel":
        return (
            f"the buffer can pass on {human(best.capacity['channel'])} steps/s, whoever makes them"
        )
    more = (
        way
        for way in local
        if way.actors > choice.actors
        and (way.learners, way.cores) == (choice.learners, choice.cores)
        and (task.on_policy or way.rows_per_rollout == choice.rows_per_rollout)
    )
    next_one = next(filter(allowed, sorted(more, key=lambda way: way.actors)), None)
    if next_one is not None:
        then = predict(task, rates, next_one, cores)
        return (
            f"{next_one.actors} would make {human(then.new)} new steps/s instead of "
            f"{human(best.new)}"
        )
    if choice.actor_cores is not None:
        share = (1 - rates.resting(choice.envs)) * choice.actors / choice.actor_cores
        return (
            f"their envs wait, so that they compute for {share:.0%} of {choice.actor_cores} core"
            f"{'s' * (choice.actor_cores > 1)}, of which more of them would leave too little"
        ).replace("%", " %")
    if choice.cores_used >= cores:
        return f"all {cores} cores are taken, and acting needs each"
    if task.on_policy and task.envs % (choice.actors + 1):
        return f"{task.envs} envs cannot be split equally among {choice.actors + 1} actors"
    return "a run with more of them would be refused"


@dataclass(frozen=True)
class Plan:
    """The choice, what it is predicted to come to, and what else there was."""

    best: Prediction
    others: tuple[Prediction, ...]
    why: str
    """there are no more actors"""
    notes: tuple[str, ...] = ()
    """what more there is to be said: what a core more would bring, what cannot be balanced"""
    rates: Rates | None = field(default=None, compare=False)

    def tree(self) -> dict[str, Any]:
        return {
            **self.best.tree(),
            "alternatives": [p.tree() for p in self.others],
            "why_not_more_actors": self.why,
            "notes": list(self.notes),
            "rates": tree(self.rates),
        }


def plan(
    task: Task,
    rates: Rates,
    cores: int,
    allowed: Allowed = lambda choice: True,
    groups: Sequence[int] = (1,),
) -> Plan | None:
    """The best choice, of so many groups; None where none is allowed."""
    ranked = list(islice(different(search(task, rates, cores, allowed, groups)), 1 + OTHERS))
    if not ranked:
        return None
    best = ranked[0]

    def better(
        rates: Rates = rates, cores: int = cores, groups: Sequence[int] = groups
    ) -> tuple[float, Prediction]:
        """What other rates, cores or groups would bring, and how."""
        then = next(search(task, rates, cores, allowed, groups), best)
        return then.new / best.new - 1, then

    gain, then = better(cores=cores + 1)
    notes = [_one_core_more(gain, then)]
    if not task.workers and (never := unbalanced(task, rates, cores, best, gain)) is not None:
        notes.append(never)
    if rates.device == "cpu":
        instant = replace(rates, learn={1: INSTANT}, take=0.0, team={1: 1.0}, inside={})
        notes.append(_a_gpu(better(rates=instant)[0]))
    if max(groups) > 1 and best.choice.groups == 1 and not task.workers:
        several = [G for G in groups if 1 < G <= cores // 2]
        ranked_groups = search(task, rates, cores, allowed, several)
        most = next((p for p in ranked_groups if p.choice.groups > 1), None)
        if most is not None:
            notes.append(f"{most.choice} would make {human(most.new)} new steps/s")
        elif not several:
            notes.append(f"2 groups need 4 cores or more, and there are {cores}")
    if tuple(groups) == (1,) and not task.workers:
        gain, then = better(groups=range(2, cores // 2 + 1))
        if gain > WORTH:
            notes.append(
                f"{then.choice} would bring {_percent(gain)}, and learn otherwise: every group has "
                f"batches of its own. --groups {then.choice.groups} lets a plan choose them"
            )
    why = more_actors(task, rates, best, cores, allowed)
    return Plan(best, tuple(ranked[1:]), why, tuple(notes), rates)


def _one_core_more(gain: float, then: Prediction) -> str:
    if gain > WORTH:
        return f"one core more would bring {_percent(gain)} ({then.choice})"
    return "one core more would bring less than 5 %"


def _a_gpu(gain: float) -> str:
    """What is left when updates take no time: more than a GPU can bring."""
    if gain > WORTH:
        return f"a GPU would bring {_percent(gain)} at most: as if updates took no time"
    return "a GPU would bring less than 5 %, if updates took no time there"


def _percent(gain: float) -> str:
    return f"{gain:+.0%}".replace("%", " %")


def unbalanced(
    task: Task, rates: Rates, cores: int, best: Prediction, core: float = 0.0
) -> str | None:
    """What can never keep up with the other side on this machine, and what would help; None: the
    two can be made equal. One core more would bring the best way such a share."""
    if cores < 2:
        return None
    most = min(rates.most_learner_cores, max(1, cores - 1)), max(rates.team)
    team = rates.update(1, min(most[1], max(1, cores - 1)))
    scale = best.choice.groups * rates.valid
    makes, follows = best.capacity["actors"], best.capacity["learner"]
    learner = max(task.rows / min(rates.update(most[0]), team), follows / scale)
    step = rates.asked(task.envs, 1, None).step if task.server else rates.step(task.envs)
    actor = task.envs / step
    both = (
        f"cannot be balanced: the actors make up to {human(makes)} new steps/s, and the learner "
        f"follows {human(follows)}"
    )
    if learner < actor / 2:
        quicker = "fewer passes over a batch" if task.on_policy else "more new steps an update"
        return f"{both}. {_listed(['a smaller network', quicker])} would let it keep up"
    if not task.on_policy and not task.server:  # a plan may give an actor other envs
        actor = max(envs / rates.step(envs) for envs, _ in _envs(task, actors=1))
    if max((cores - 1) * actor, makes / scale) >= task.rows / rates.update(1) / 2:
        return None
    envs = best.choice.envs
    helps = ["a faster env"]
    if rates.infer and between(rates.infer, envs, above=1.0) > INFERRING * rates.step(envs):
        helps.append("a smaller network")
    if task.on_policy and rates.step(2 * envs) < TOGETHER * rates.step(envs):
        helps.append("more envs an actor, after which an update follows more steps,")
    if core > WORTH:
        helps.append("more cores")
    return f"{both}. {_listed(helps)} would let them keep up; more learner cores would not"


def _listed(names: Sequence[str]) -> str:
    """As the beginning of a sentence."""
    first, *rest = names
    whole = f"{', '.join([first, *rest[:-1]])} or {rest[-1]}" if rest else first
    return whole[0].upper() + whole[1:]


def between(points: Mapping[int, float], x: int, above: float = 0.0) -> float:
    """The value at x, on lines in logarithms between the points. Below them it is the first; above,
    the last grows by x ** above."""
    xs = sorted(points)
    if x in points:
        return points[x]
    if x <= xs[0]:
        return points[xs[0]]
    if x > xs[-1]:
        return points[xs[-1]] * float((x / xs[-1]) ** above)
    high = next(k for k in xs if k > x)
    low = xs[xs.index(high) - 1]
    slope = math.log(points[high] / points[low]) / math.log(high / low)
    return points[low] * float((x / low) ** slope)
