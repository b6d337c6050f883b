"""Measures what this machine does with a config: a profile, in less than a minute."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from tianji.algorithm import hyperparameter
from tianji.asked import MAKING, STEPPING, WHOLE, Acted, Asked, Clock, Progress
from tianji.config import Config
from tianji.contrasts import START, START_GPU, Contrasts
from tianji.plan import MOST_ENVS, Choice, Rates, Task, between, predict
from tianji.probe import Measured, Probe, acting, alone, channel, learning
from tianji.profile import Profile, facts, subject
from tianji.ratios import Again, Ratios, over, usual
from tianji.shape import begins, with_share

MOSTLY, LITTLE = 0.5, 1e-3
"""share of a step for which envs wait, that counts; and that is as good as none"""
ACT, LEARN = 0.4, 2.0
"""seconds for which acting is looked at, with each number of envs, and learning on one core"""


def measure(config: Config, progress: Progress = lambda what, left: None) -> Profile:
    """The whole profile, in at most 45 s where an update takes no more than a few."""
    return _Profiler(config, progress).whole()


def look(config: Config) -> Profile:
    """As much as two seconds tell."""
    return _Profiler(config, lambda what, left: None).glance()


class _Profiler:
    """One profile."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._clock = Clock(progress)
        self._asked = Asked.of(config)
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
            Probe(
                lambda: learning(asked.sooner, *asked.fed(acted), asked.share(acted.inference)),
                mine,
            )
        )
        learner.ready()
        preparing = self._clock.spent - begun
        inside, learnt = self._inside(learner)
        again = Again(learner, acted.actor, mine[:1], inside[1], acted.steps[acted.envs])
        again.look()
        contrasts = Contrasts(asked, self._clock, self._probes, acted, again, inside, preparing)
        jobs = contrasts.once(contrasts.jobs())
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
                infer={n: acted.shares[n] * act[n] for n in act}, rests=acted.rests,
                **ratios.curves(inside, again.learn)._asdict(),
            )  # fmt: skip
            asking = passing["push"] + passing["receive"]
            known = _with_asking(found, asked.task, learnt, asking, ratios.asked)
            return _with_joining(known, asked.task, ratios, again)

        contrasts.repeat(jobs, rates)
        again.look()
        return self._profile(
            rates(contrasts.ratios), learnt, True, batches, inference, again.varied
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
        share = asked.share(first["infer"] / max(acted), glance=True)
        learnt = alone(
            lambda: learning(asked.sooner, most, steps, share), mine, cores=mine, seconds=0.4
        )
        rates = Rates(
            act={n: found["step"] for n, found in acted.items()},
            infer={n: found["infer"] for n, found in acted.items()},
            rests=_waiting({n: found["rests"] for n, found in acted.items()}),
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
        made = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
        return Profile(rates, task, facts(), subject(asked.config), seconds, whole, batches or {},
                       inference or {}, skipped, varied, made)  # fmt: skip

    def _acting(self) -> Acted:
        asked, clock, mine = self._asked, self._clock, self._asked.cores[-1:]
        own = {asked.task.envs, asked.config.scale.envs_per_actor}
        found: dict[int, float] = {}
        shares: dict[int, float] = {}
        rests: dict[int, float] = {}
        counts = sorted({2**i for i in range(MOST_ENVS.bit_length())} | own)
        clock.say(_with_envs(1))
        first = self._probes.enter_context(Probe(lambda: acting(asked.one, 1), mine))
        told = first.ask(seconds=ACT)
        most = min(asked.at_once(2 * MAKING), int(STEPPING / told["step"]))
        few = [n for n in counts if n == 1 or n <= most]
        own_envs = max(n for n in few if n <= asked.task.envs)
        clock.skipped += [_with_envs(n) for n in counts if n not in few]
        rest = WHOLE / 2 if asked.on_cpu else WHOLE / 2 + START_GPU - START
        found[1], shares[1], rests[1] = told["step"], told["infer"] / told["step"], told["rests"]
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
                shares[envs], rests[envs] = one["infer"] / one["step"], one["rests"]
                if envs == own_envs:
                    kept = one, probe
                    self._probes.push(closing.pop_all())
        return Acted(smooth(found), shares, _waiting(rests), own_envs, *kept)

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
        envs = round(learnt["envs"])
        known = min(act) <= envs <= max(act)
        if self._asked.task.envs > self._asked.at_once(MAKING) or not known:
            return 1.0
        return max(1.0, float(learnt.get("act", 0.0)) / between(act, envs))

    def _batches(
        self, acted: Acted, consumed: int, known: float, preparing: float
    ) -> dict[int, float]:
        """Seconds of an update on one core, by the steps that it consumes: as many as it does,
        about half and about twice of that."""
        asked, mine = self._asked, self._asked.cores[:1]
        found, feeding, share = {consumed: known}, asked.fed(acted), asked.share(acted.inference)
        for what, factor in (("half the batch", 0.5), ("twice the batch", 2.0)):
            other = self._with_batch(factor)
            if other is None or other.scale.envs_per_actor % share:
                continue
            if not begins(with_share(other, share), asked.env):
                continue
            if not self._clock.has(what, preparing + 1 + 2 * factor * known / share):
                continue
            probe = partial(learning, other, *feeding, share)
            learnt = alone(probe, mine, cores=mine, seconds=0.5)
            found.setdefault(round(learnt["consumed"]), learnt["learn"])
        return found

    def _with_batch(self, factor: float) -> Config | None:
        """The config with another batch, if it can have one."""
        config = self._asked.sooner
        if self._asked.task.on_policy:
            envs = round(config.scale.envs_per_actor * factor)
            return config.scaled(envs_per_actor=envs) if envs else None
        size = round(hyperparameter(config.algorithm, "batch_size", 0) * factor)
        if size < 1:
            return None
        algorithm: Any = dataclasses.replace(config.algorithm, batch_size=size)  # type: ignore[type-var]
        return dataclasses.replace(config, algorithm=algorithm)

    def _inference(self, acted: Acted) -> dict[str, float]:
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


def _with_asking(
    rates: Rates, task: Task, learnt: Measured, passing: float, asked: Sequence[float]
) -> Rates:
    """With what it takes to ask a server, if there is one: inference aside, and with a message in
    each direction, which takes `passing` seconds of both sides together; with what else steps took
    in real runs, where there were some."""
    if not task.server:
        return rates
    inferring = between(rates.infer, round(learnt["envs"]), above=1.0)
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


def _waiting(rests: dict[int, float]) -> dict[int, float]:
    """Shares of steps in which envs wait, by their number, where that is most of a step for some:
    less is what others who use the machine take."""
    return {n: max(LITTLE, s) for n, s in rests.items()} if max(rests.values()) > MOSTLY else {}


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
