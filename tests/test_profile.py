"""Measuring, keeping what was measured, and planning from it."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tianji
from tianji import comparing, planner, probe, profiled, profiler, shape
from tianji import profile as profiles
from tianji.__main__ import main
from tianji.config import EvalConfig, load_config
from tianji.engines.server import ForkServer
from tianji.env import make_env
from tianji.errors import Failure, Refusal
from tianji.plan import Choice, Rates, predict
from tianji.probe import Probe, alone
from tianji.ratios import Again, Beside, Ratios, Slowed, behind, over, usual
from tianji.trace import Track

CARTPOLE = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "scale": {"envs_per_actor": 8, "rollout_length": 8},
    "stop": {"updates": 3},
}
REPLAY = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "dqn", "warmup": 5000, "batch_size": 16, "new_steps": 8},
    "scale": {"envs_per_actor": 4, "rollout_length": 4},
    "stop": {"updates": 3},
}


WORKERS = ["scale.relax=gala", "scale.engine=local", "scale.groups=2"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def a_profile(config, cores=4, **changes):
    """As if it had been measured: a slow env and a quick learner."""
    rates = Rates(
        act={n: 1e-3 * n for n in (1, 8, 512)}, begin=1e-5, send=1e-6, receive=2e-5, serve=1e-5,
        learn={1: 2e-3, 2: 1.5e-3}, take=1e-4, wake=2e-5, slow_act={1: 1.0},
        slow_learn={1: 1.0}, valid=0.9,
    )  # fmt: skip
    one = shape.template(config)
    task = shape.task_of(one, shape.see(one).env)
    facts = profiles.facts() | changes
    return profiles.Profile(rates, task, facts, profiles.subject(config), 1.0, True)


def test_a_process_measures_on_its_own_cores_as_often_as_it_is_asked():
    cores = sorted(os.sched_getaffinity(0))

    def prepare():
        asked = []

        def measure(seconds, more=0):
            asked.append(seconds)
            here = sorted(os.sched_getaffinity(0))
            return {"sum": sum(asked) + more, "cores": here, "pid": os.getpid()}

        return measure

    with Probe(prepare, cores[:1]) as probe:
        first, second = probe.ask(seconds=1), probe.ask(seconds=2, more=4)
        assert (first["sum"], second["sum"]) == (1, 7)
        assert first["pid"] == second["pid"] != os.getpid()
        assert first["cores"] == cores[:1]
        probe.begin(seconds=3)
        assert probe.end()["sum"] == 6
    assert sorted(os.sched_getaffinity(0)) == cores, "and this process stays where it was"
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)


def test_a_measurement_that_raises_says_what(capfd):
    def prepare():
        raise ValueError("no such thing")

    with pytest.raises(Failure, match="ValueError: no such thing"):
        alone(prepare, [0])
    assert "no such thing" in capfd.readouterr().err


def test_a_measurement_that_hangs_or_is_killed_ends(monkeypatch):
    monkeypatch.setattr(probe, "PATIENCE", 0.3)
    with pytest.raises(Failure, match="Does the env hang"):
        alone(lambda: lambda: time.sleep(100), [0])
    monkeypatch.setattr(probe, "PATIENCE", 30.0)
    with pytest.raises(Failure, match="was killed"):
        alone(lambda: lambda: os.kill(os.getpid(), 9), [0])


def test_an_actor_is_measured_with_all_that_its_env_takes():
    slow = {
        **CARTPOLE,
        "env": {
            "id": "testing/Fault",
            "imports": ["tianji.testing.faults"],
            "kwargs": {"slows": 1.0, "slow": 0.004},
        },
    }
    config = load_config(slow)
    told = alone(lambda: probe.acting(config, 4), [0], seconds=0.2)
    assert told["step"] > 0.004, "though it only sleeps"
    quick = alone(lambda: probe.acting(load_config(CARTPOLE), 4), [0], seconds=0.2)
    assert 0 < quick["step"] < 0.004
    assert 0.8 < quick["valid"] <= 1.0


@pytest.mark.parametrize("tree", [CARTPOLE, REPLAY])
def test_learning_is_measured_by_cores(tree):
    one = shape.template(load_config(tree))
    config = shape.without_warmup(one, shape.see(one).env)
    cores = sorted(os.sched_getaffinity(0))
    first = cores[:1]
    told = alone(lambda: probe.learning(config, 8), first, cores=first, seconds=0.1)
    assert told["learn"] > told["take"] > 0
    assert told["serve"] > 0
    assert told["receive"] > 0
    rows = 64 if tree is CARTPOLE else 16
    assert told["consumed"] == pytest.approx(rows, rel=0.2)


def test_learning_needs_few_envs_where_they_take_long_to_make():
    one = shape.template(load_config(CARTPOLE))
    cores = sorted(os.sched_getaffinity(0))
    first = cores[:1]
    told = alone(lambda: probe.learning(one, 3), first, cores=first, seconds=0.1)
    assert told["consumed"] == pytest.approx(64, rel=0.2), "as many steps as with all of them"


def test_a_few_envs_are_shown_as_many():
    few, same = (tianji.env.make_env("CartPole-v1", n, {}) for n in (3, 3))
    many = probe.Repeated(few, 8)
    shown, seen = many.reset(5), same.reset(5)
    assert shown["obs"].shape == (8, 4)
    for _ in range(60):
        action = np.arange(8) % 2
        step, real = many.step(action), same.step(action[:3])
        for name in ("reward", "terminated", "truncated", "valid"):
            assert np.array_equal(getattr(step, name)[:3], getattr(real, name)), name
            assert np.array_equal(getattr(step, name)[3:6], getattr(real, name)), name
        assert np.array_equal(step.observation["obs"][6:], real.observation["obs"][:2])
    assert seen["obs"].shape == (3, 4)
    many.close()


def ran(config, folder, seconds):
    """What a real run tells."""
    how = {"tree": config.tree(), "folder": str(folder), "seconds": seconds}
    return alone(probe.Running, sorted(os.sched_getaffinity(0)), **how)


class Counted(ForkServer):
    """What hosts are forked from, which says in a file that it was started."""

    def __init__(self, path):
        with path.open("a") as file:
            file.write("started\n")
        super().__init__()


def test_real_runs_of_a_profile_begin_soon(monkeypatch, tmp_path):
    started = tmp_path / "started"
    monkeypatch.setattr("tianji.run.ForkServer", functools.partial(Counted, started))
    config = load_config(CARTPOLE, ["scale.engine=local"])
    with Probe(probe.Running, sorted(os.sched_getaffinity(0))) as runs:
        for at in ("first", "second"):
            how = {"tree": config.tree(), "folder": str(tmp_path / at), "seconds": 0.3}
            assert runs.ask(**how)["update"] > 0
    assert started.read_text().count("started") == 1, "and was kept for the second"


@pytest.mark.parametrize("tree", [CARTPOLE, REPLAY])
def test_a_learner_of_its_own_is_measured_by_a_real_run(tree, tmp_path):
    one = shape.template(load_config(tree))
    config = shape.without_warmup(one, shape.see(one).env)
    told = ran(config, tmp_path, 0.3)
    assert 1e-5 < told["update"] < 0.3
    assert 1e-5 < told["step"] < 0.3


def test_a_real_run_keeps_the_end_that_a_schedule_needs(tmp_path):
    tree = {**CARTPOLE, "algorithm": {**CARTPOLE["algorithm"], "schedule": "linear"}}
    config = shape.template(load_config(tree, ["scale.actors=auto"]))
    told = ran(config, tmp_path, 0.3)
    assert told["update"] > 0, "it ended by its seconds, and made no plan of its own"
    assert [path.name for path in tmp_path.glob("*/plan.json")] == []


def test_a_run_without_an_update_tells_no_time():
    ends = np.array([1.0, 2.0])
    track = Track("learner", ("learner/wait_buffer",), np.array([0, 0]), ends - 1, ends)
    assert probe._traced_update(track) is None


def test_a_process_that_dies_between_two_measurements_is_told():
    with Probe(lambda: lambda: {"pid": os.getpid()}, [0]) as one:
        os.kill(one.ask()["pid"], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(Failure, match="was killed"):
            one.ask()


def test_one_env_has_no_halves():
    config = load_config(CARTPOLE, ["scale.halves=true", "scale.envs_per_actor=1"])
    env = shape.see(load_config(CARTPOLE)).env
    with pytest.raises(Refusal, match="one env has no halves"):
        shape.join(config, env)


def test_the_time_of_an_update_is_all_that_a_learner_does_for_it():
    """Three updates of 2 s with 1 s to take a batch before and 0.5 s to push after; waits and the
    first one do not count."""
    keys = ("learner/take", "learner/update", "learner/push", "learner/wait_buffer")
    each = [(0, 1.0), (1, 2.0), (2, 0.5), (3, 4.0)]
    events = [(3, 9.0), (0, 5.0), (1, 7.0), (2, 0.5), (3, 1.0), *each, *each]
    key, seconds = zip(*events, strict=True)
    end = np.cumsum(seconds)
    track = Track("learner", keys, np.array(key), end - np.array(seconds), end)
    assert probe._traced_update(track) == pytest.approx((0.5 + 3.0 + 0.5 + 3.0) / 2)


def test_the_time_of_a_step_is_all_that_an_actor_waits_for():
    keys = ("actor/ask", "actor/wait_server", "actor/infer", "actor/simulate", "actor/wait_buffer")
    seconds = np.array([0.1, 0.5, 0.2, 1.0, 7.0] * 2)
    end = np.cumsum(seconds)
    track = Track("actor-0", keys, np.array([0, 1, 2, 3, 4] * 2), end - seconds, end)
    assert probe._traced_step(track) == pytest.approx(1.8)
    none = Track("actor-0", keys, np.array([4]), np.array([0.0]), np.array([1.0]))
    assert probe._traced_step(none) is None


def test_the_time_between_updates_of_workers_is_that_of_all_once_all_have_begun():
    def worker(*ends):
        """Each update takes 0.1 s, and there is as much of something else before it."""
        begin = np.array([[end - 0.2, end - 0.1] for end in ends]).ravel()
        return Track("g0.worker", ("actor/simulate", "learner/update"),
                     np.tile([0, 1], len(ends)), begin, begin + 0.1)  # fmt: skip

    quick, slow = worker(*range(1, 12)), worker(2, 5, 8, 11)
    assert probe._traced_rounds([quick, slow]) == pytest.approx(1.5), "by the mean of the rates"
    # what the quick one did before the other had begun would be 0.1 s
    early = worker(0.1, 0.2, 0.3, 0.4, 6, 7, 8)
    assert probe._traced_rounds([early, slow]) == pytest.approx(2 / (1 / 1 + 1 / 3))
    assert probe._traced_rounds([quick, worker(2, 5)]) is None, "too few"
    assert probe._traced_rounds([worker(1, 2, 3), worker(8, 9, 10)]) is None, "one had ended"


def test_asking_takes_what_it_took_in_real_runs():
    config = load_config(CARTPOLE, ["scale.relax=seed", "scale.engine=local", "algorithm.epochs=1"])
    profile = a_profile(config)
    rates = dataclasses.replace(profile.rates, infer={8: 2e-3})
    learnt = {"ask": 1e-4, "answer": 2.5e-3}
    alone = profiler._with_asking(rates, profile.task, learnt, 1e-5, [])
    assert (alone.ask, alone.answer) == pytest.approx((1.1e-4, 5.1e-4))
    known = profiler._with_asking(rates, profile.task, learnt, 1e-5, [0.02, 0.03, 0.9])
    assert known.asked(8, 1, None).step == pytest.approx(0.025), "and once the machine stood still"
    assert known.answer == alone.answer


def test_the_warm_up_is_not_waited_for():
    config = load_config(REPLAY)
    env = shape.see(config).env
    assert shape.without_warmup(config, env).algorithm.warmup < 1000
    other = load_config(CARTPOLE)
    assert shape.without_warmup(other, env).algorithm == other.algorithm


def test_a_curve_is_drawn_towards_what_its_neighbours_let_expect():
    drawn = profiler.smooth({1: 1.0, 2: 4.0, 4: 4.0, 8: 8.0})
    assert drawn == pytest.approx(
        {1: 1.0, 2: math.sqrt(8), 4: math.sqrt(4 * math.sqrt(32)), 8: 8.0}
    )
    assert profiler.smooth({8: 1.0}) == {8: 1.0}


class Told:
    """In the place of a probe: it says what it was given, one after the other."""

    def __init__(self, key, *values):
        self.key, self.values, self.busy = key, list(values), []

    def ask(self, **how):
        self.begin(**how)
        return self.end()

    def begin(self, **how):
        pass

    def end(self):
        value = self.values.pop(0)
        slices = value if isinstance(value, list) else [value] * probe.SLICES
        return {self.key: statistics.median(slices), "slices": slices}

    def ready(self):
        pass

    @property
    def has_ended(self):
        return not self.busy.pop(0) if self.busy else True


def test_a_machine_that_becomes_slower_slows_nobody_by_itself():
    """Alone and beside others in turn: all takes twice as long from the second turn on."""
    learner = Told("learn", 0.1, 0.15, 0.2, 0.3)
    actor = Told("step", 0.1, 0.1, 0.2, 0.2)
    again = Again(learner, actor, [0], 0.1)
    found = again.slowed([], 0.0)
    assert over(one.learn for one in found) == pytest.approx(1.5)
    assert over(one.act for one in found) == pytest.approx(1.0)
    assert again.learn == pytest.approx(0.15)
    assert again.act == pytest.approx(0.15)


def test_a_step_alone_and_one_beside_others_are_told_alike():
    """A core that neighbours slow for a fifth of the time is slow in both."""
    slices = [0.1, 0.1, 0.1, 0.1, 0.15]
    learner = Told("learn", *[0.1] * 4)
    again = Again(learner, Told("step", *[slices] * 4), [0], 0.1)
    found = again.slowed([], 0.0)
    assert over(one.act for one in found) == pytest.approx(1.0)
    assert again.act == pytest.approx(0.11)


def test_the_slowest_of_several_actors_is_told_over_their_mean():
    """Rates of 10, 5 and 10 steps: 25 / 3 in the mean, where 10 were made alone."""
    learner, actor = Told("learn", 0.1, 0.1, 0.1, 0.1), Told("step", 0.1, 0.1, 0.1, 0.1)
    others = [Told("step", 0.2, 0.1), Told("step", 0.1, 0.1)]
    again = Again(learner, actor, [0], 0.1)
    first, second = again.slowed(others, 0.0)
    assert first.learn == second.learn == second.act == (pytest.approx(0.1), 0.1)
    assert first.act == (pytest.approx(0.12), 0.1)
    assert (first.slowest, second.slowest) == pytest.approx((0.2 / 0.12, 1.0))


def test_who_is_the_slowest_may_change():
    slices = np.array([[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]])
    assert behind(slices, 1) == pytest.approx(2.0 / 1.5)
    assert behind(slices, 2) == behind(slices, 99) == pytest.approx(1.0)
    assert behind(slices[:1], 1) == pytest.approx(1.0), "one waits for nobody"
    assert behind(np.array([[1.0] * 5, [2.0] * 5]), 3) == pytest.approx(1.5)


def test_all_act_until_the_learner_has_ended():
    learner, actor = Told("learn", *[0.1] * 4), Told("step", *[0.1, 0.1, 0.3, 0.2] * 2)
    learner.busy = [True, True, False] * 2
    other = Told("step", *[0.2] * 6)
    found = Again(learner, actor, [0], 0.1).slowed([other], 10.0)
    assert not actor.values, "alone, and thrice beside the learner; twice"
    assert not other.values
    for one in found:
        assert one.act == (pytest.approx(0.2), 0.1)
        assert one.slowest == pytest.approx(1.0)


def test_what_is_measured_between_two_looks_is_compared_with_both():
    again = Again(Told("learn", 0.1, 0.3), Told("step", 0.1, 0.1), [0], 0.1)
    assert again.beside(lambda: {"update": 0.5}) == ({"update": 0.5}, pytest.approx(0.2))


def test_a_long_update_is_not_looked_at_again():
    again = Again(Told("learn"), Told("step", 0.1, 0.1), [0], 3.0)
    assert again.beside(lambda: {"update": 5.0}) == ({"update": 5.0}, 3.0)
    assert again.learn == 3.0


def beside(*pairs):
    """Updates under other circumstances, each with one under the usual ones."""
    return [Beside(took, base) for took, base in pairs]


def over_one(*took):
    return beside(*((one, 1.0) for one in took))


def test_what_takes_longer_for_half_of_the_time_does_so_on_average():
    assert usual([1.0, 1.5, 1.0, 1.5]) == pytest.approx(1.25)
    assert usual([1.0, 1.0, 1.5]) == pytest.approx(3.5 / 3), "and not as in the median"
    assert usual(iter([2.0])) == 2.0


def test_a_moment_at_which_the_machine_stood_still_does_not_count():
    assert usual([1.0, 90.0, 1.5]) == pytest.approx(1.25)
    assert usual([90.0, 1.0]) == 1.0
    assert usual([1.0, 1.0, 1.0, 0.1]) == 1.0


def test_of_what_is_compared_each_side_is_as_usual():
    found = beside((1.2, 1.0), (1.4, 0.8), (1.0, 1.2))
    assert over(found) == pytest.approx(1.2), "and not the mean of the ratios"


def slowed(learn, act, slowest):
    """Beside others, where each alone takes a second."""
    return Slowed(Beside(learn, 1.0), Beside(act, 1.0), slowest)


def test_what_was_compared_becomes_curves():
    ratios = Ratios()
    ratios.apart[1] = over_one(1.3, 1.2, 1.1)
    ratios.apart[2] = over_one(0.7, 0.8, 0.6)
    ratios.busy[2] = [slowed(1.5, 1.4, 1.0), slowed(1.4, 1.2, 0.9), slowed(1.6, 1.3, 0.9)]
    ratios.busy[4] = [slowed(3.0, 2.0, 1.1)]
    ratios.team[2] = over_one(1.1, 1.2, 1.3)
    ratios.threads[2] = over_one(0.5, 0.6, 0.7)
    curves = ratios.curves({1: 2.0, 2: 1.0, 4: 0.8}, 1.0)
    assert curves.inside == pytest.approx({1: 1.0, 2: 0.6, 4: 0.4})
    assert curves.learn == pytest.approx({1: 1.2, 2: 0.7, 4: 0.48})
    assert curves.slow_act == pytest.approx({1: 1.0, 2: 1.3, 4: 2.0})
    assert curves.slowest == pytest.approx({1: 1.0, 2: 1.0, 4: 1.1}), "the slowest is never quicker"
    assert curves.slow_learn == pytest.approx({1: 1.0, 2: 1.0, 4: 2.0}), (
        "a real run had a busy core beside it"
    )
    assert curves.team == pytest.approx({1: 1.0, 2: 0.5}), "two learners had three"


class Look:
    """In the place of who is asked again and again."""

    def __init__(self, varied):
        self.varied, self.looks = varied, 0

    def look(self):
        self.looks += 1


def compares(config, again, cores=2, preparing=1.0):
    """As in a profile, on so many cores, with an actor whose step takes 1 ms for each env."""
    asked = dataclasses.replace(profiled.Asked.of(config), cores=list(range(cores)))
    acted = profiled.Acted({8: 8e-3}, {8: 0.5}, 8, {}, None)
    clock, probes = profiled.Clock(lambda what, left: None), contextlib.ExitStack()
    return comparing.Comparing(asked, clock, probes, acted, again, {1: 0.01}, preparing)


def test_ratios_are_measured_again_while_there_is_time(monkeypatch):
    now, done = [0.0], []
    monkeypatch.setattr(profiled.time, "monotonic", lambda: now[0])

    def job(what, seconds, expected=None, came=True):
        def do():
            now[0] += seconds
            done.append(what)
            return came

        return comparing.Job(what, "apart", 1, expected or seconds, do)

    one = compares(load_config(CARTPOLE), Look(1.0))
    quick, slow, late = job("quick", 3), job("slow", 15, expected=10), job("late", 30)
    jobs = one.once([quick, slow, job("nothing", 1, came=False), late])
    assert [(j.what, j.seconds) for j in jobs] == [("quick", 3), ("slow", 15)]
    assert one._clock.skipped == ["nothing", "late"]
    done.clear()
    monkeypatch.setattr(comparing.Comparing, "that_matter", lambda self, jobs, rates: jobs)
    one.repeat(jobs, None)
    assert done == ["quick", "slow", "quick", "quick"], "then there are 2 s left, of 45"
    now[0] = 20.0
    done.clear()
    one.repeat([job("matters", 1)], None)
    assert done == ["matters"] * (comparing.MORE - 1)
    now[0] = 20.0
    done.clear()
    one._again = idle = Look(0.05)
    one.repeat([job("matters", 1)], None)
    assert done == ["matters"] * (comparing.TURNS - 1), "a steady machine is not asked as often"
    one.repeat([], None)
    assert idle.looks == comparing.TURNS - 1, "nothing that is compared matters"


def test_only_what_the_best_ways_depend_on_is_looked_at_again():
    config = load_config(CARTPOLE, ["scale.relax=tianji", "scale.engine=local"])
    one, base = compares(config, Look(0.0), cores=4), a_profile(config).rates

    def mattering(act, learn, **found):
        """Of all that was compared, with an update of one learner inside a process that acts."""
        one.ratios = Ratios(**found)

        def rates(ratios):
            curves = ratios.curves({1: learn}, learn)
            return dataclasses.replace(base, act={1: act / 8, 8: act}, **curves._asdict())

        jobs = [comparing.Job(f"{kind} {key}", kind, key, 1.0, lambda: True)
                for kind, looks in found.items() for key in looks]  # fmt: skip
        return [job.what for job in one.that_matter(jobs, rates)]

    busy = {n: [slowed(1.0, 1.0, 1.0)] for n in (2, 4)}
    compared = {"apart": {1: over_one(1.0), 2: over_one(1.6)}, "busy": busy}
    assert mattering(1e-4, 1.0, **compared, team={2: over_one(1.5)}) == ["apart 1"]
    # two learners are nearly as quick as one: at another time they may be quicker
    assert mattering(1e-4, 1.0, **compared, team={2: over_one(1.1)}) == ["apart 1", "team 2"]
    # they are the quickest, and it was measured with four busy cores
    assert mattering(1e-4, 1.0, **compared, team={2: over_one(0.6)}) == ["team 2"]
    # an update takes no time, and what two actors make, on three busy cores, is all there is
    assert mattering(1.0, 1e-3, **compared, team={}) == ["busy 2", "busy 4"]


def test_if_something_had_taken_longer():
    ratios = Ratios(
        apart={1: over_one(2.0)}, team={2: over_one(3.0)}, asked=[1.0],
        busy={4: [slowed(1.0, 2.0, 1.5)]},
    )  # fmt: skip
    apart, team = ratios.times(1.1, "apart", 1), ratios.times(1.1, "team", 2)
    assert over(apart.apart[1]) == pytest.approx(2.2)
    assert (apart.team, apart.asked) == (ratios.team, [pytest.approx(1.1)])
    assert over(team.team[2]) == pytest.approx(3.3)
    assert (team.apart, team.asked) == (ratios.apart, ratios.asked)
    assert over(ratios.apart[1]) == 2.0, "and what was measured stays"
    (crowded,) = ratios.times(1.1, "busy", 4).busy[4]
    assert crowded == slowed(1.1, 2.2, 1.5), "the slowest is so over the others"


def test_how_much_the_machine_varied_is_kept_and_told():
    again = Again(Told("learn"), Told("step"), [0], 0.1)
    assert again.varied == 0.0, "nothing was looked at twice"
    again._learnt = [1.0] * 11
    again._acted = [0.8, *[1.0] * 3, *[1.1] * 3, *[1.2] * 3, 1.6]
    assert again.varied == pytest.approx(0.1 / 1.1), "the first and the last of eleven aside"
    config = load_config(CARTPOLE)
    steady = a_profile(config)
    shaken = dataclasses.replace(steady, varied=0.18)
    assert profiles.Profile.of(shaken.tree()).varied == 0.18
    assert "varied by ± 18 %" in profiles.told(shaken)
    words = "varied by ± 18 % while it was measured, so a run may miss the prediction by as much"
    for profile, is_told in ((steady, False), (shaken, True)):
        plan = planner.make(config, profile)
        assert (words in planner.told(plan, profile, config, None)) is is_told
        assert planner.tree(plan, profile)["varied"] == profile.varied


def test_a_channel_between_two_processes_is_measured():
    cores = sorted(os.sched_getaffinity(0))
    told = alone(lambda: probe.channel(cores[-1:]), cores[:1], seconds=0.05)
    assert 0 < told["push"] < 0.1
    assert 0 < told["wake"] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "relax"), [(CARTPOLE, "sync"), (REPLAY, "sync"), (CARTPOLE, "gala")]
)
def test_a_whole_profile(tree, relax, capsys):
    said = []
    config = load_config(tree, WORKERS if relax == "gala" else [])
    found = profiler.measure(config, lambda what, left: said.append((what, left)))
    assert found.seconds < profiled.WHOLE + 5
    assert {1, 8, 64, 512} <= set(found.rates.act)
    assert 1 in found.rates.learn
    assert len(found.batches) == 3
    assert said[0][1] > said[-1][1] > 0, "what is left becomes less"
    assert profiles.Profile.of(json.loads(json.dumps(found.tree()))) == found
    table = profiles.told(found)
    assert "TR_A" in table
    assert "TR_L" in table
    assert "Trv" in table
    assert (2 in found.rates.together) == (relax == "gala")
    assert ("2 workers" in table) == (relax == "gala")


@pytest.fixture
def plan(monkeypatch):
    """benchmarks/plan.py"""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    yield importlib.import_module("plan")
    for name in ("plan", "picture", "speed", "measure"):
        sys.modules.pop(name, None)


def test_a_plan_is_judged_by_its_rounds_and_its_choice_by_all_runs(plan):
    mine = {"chosen": True, "predictions": [100.0, 50.0, 90.0],
            "runs": [[90.0, 110.0], [55.0, 55.0], [60.0, 60.0]]}  # fmt: skip
    other = {"chosen": False, "predictions": [1.0] * 3,
             "runs": [[80.0, 80.0], [50.0, 50.0], [120.0, 120.0]]}  # fmt: skip
    lucky = {"chosen": False, "predictions": [1.0] * 3,
             "runs": [[1.0, 130.0], [1.0, 1.0], [1.0, 1.0]]}  # fmt: skip
    found = plan.compared({"ways": [mine, other, lucky], "sweep": []})
    assert found["ways"][0]["errors"] == pytest.approx([0.0, 50 / 55 - 1, 0.5])
    assert found["error"] == pytest.approx(0.0), "the middle one, and not 90 over 60"
    assert found["reached"] == pytest.approx(430 / 500)
    assert found["turns"] == 6
    low, high = found["interval"]
    assert 0.5 <= low < found["reached"] < high <= 1.0
    mine["runs"][2] = [180.0, 60.0]
    found = plan.compared({"ways": [mine, other, lucky], "sweep": []})
    assert found["reached"] == 1.0
    low, high = found["interval"]
    assert low < 0.9, "another one is the best in some samples of the turns"
    assert high == 1.0


def test_a_sweep_counts_among_the_errors_of_a_plan(plan):
    mine = {"choice": {"actors": 1}, "chosen": True, "predictions": [110.0], "runs": [[100.0]]}
    other = {"choice": {"actors": 2}, "chosen": False, "predictions": [90.0], "runs": [[120.0]]}
    sweep = [
        {"choice": {"actors": 1}, "predictions": [130.0, 150.0], "new": [120.0, 80.0]},
        {"choice": {"actors": 2}, "predictions": [30.0], "new": [40.0]},
    ]
    found = plan.compared({"ways": [mine, other], "sweep": sweep})
    assert found["ways"][0]["errors"] == pytest.approx([0.4, 0.1])
    assert found["error"] == pytest.approx(0.25)
    assert found["ways"][1]["errors"] == pytest.approx([-0.25, -0.25])
    assert found["reached"] == pytest.approx(100 / 120), "by rounds, in whose turns all were run"


def test_a_sweep_runs_every_way_and_the_better_ones_again(plan, monkeypatch):
    """The plan's, which is for two cores, is not the fastest here."""
    config = load_config(plan.ROOT / "configs" / "ppo_cartpole.toml")
    found = a_profile(config)
    clock = [0.0]

    def one(found, way, seconds):
        assert seconds >= 1.5
        clock[0] += 1.0
        return 1000.0 * way.choice.actors + way.choice.cores

    monkeypatch.setattr(plan, "cores", lambda: 8)
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    monkeypatch.setattr(plan.profiler, "measure", lambda config: found)
    monkeypatch.setattr(plan.time, "monotonic", lambda: clock[0])
    every = [way.choice for way in plan.every_way(config, found)]
    case, asked = {"ways": [], "sweep": []}, argparse.Namespace(sweep=1.5, most=2)
    assert len(list(plan.swept(config, case, one, asked, end=2.5))) == 3
    assert not plan.is_whole(case["sweep"], 2)
    assert clock == [3.0], "the third run began before the end"
    assert len(every) == 8
    assert len(list(plan.swept(config, case, one, asked, end=99.0))) == 5 + 2
    assert plan.is_whole(case["sweep"], 2)
    assert clock == [10.0], "all once, and two of them again"
    assert {way["words"] for way in case["sweep"]} == set(map(str, every))
    fastest = sorted(case["sweep"], key=lambda way: -max(way["new"]))
    assert [len(way["new"]) for way in fastest] == [2, 2, 1, 1, 1, 1, 1, 1]
    ways = plan.started(config, found, 3, case["sweep"])["ways"]
    assert [way["chosen"] for way in ways] == [True, False, False]
    assert ways[0]["words"] == str(planner.make(config, found).best.choice)
    assert [way["words"] for way in ways[1:]] == [way["words"] for way in fastest[:2]]


def test_a_way_that_was_disturbed_is_not_given_up_at_once(plan):
    def way(*new):
        return {"new": list(new)}

    best, disturbed, slow = way(100.0, 60.0), way(65.0, 110.0), way(55.0)
    sweep = [slow, best, disturbed, *(way(1.0) for _ in range(7))]
    assert plan.left(sweep, 0, 2) == sweep
    assert plan.left(sweep, 1, 2) == [best, disturbed], "a third, and the slow one never that slow"
    assert plan.left(sweep, 2, 2) == []
    assert plan.is_whole(sweep, 2)
    disturbed["new"].pop()
    assert not plan.is_whole(sweep, 2)


def test_a_run_that_was_too_short_is_made_again_and_longer(plan, monkeypatch, tmp_path):
    found, way = a_profile(load_config(CARTPOLE)), Choice("serial", 1, 8, 8)
    way = predict(found.task, found.rates, way, 2)
    took = []

    def forked(runs, name, overrides, seconds, folder, rows):
        took.append(seconds)
        return 0.0 if seconds < enough else 5.0

    monkeypatch.setattr(plan, "forked", forked)
    enough = 10
    assert plan.run(None, "run", [], found, way, 3.0, folder=tmp_path) == 5.0
    assert took == [3.0, 12.0]
    enough = 100
    with pytest.raises(SystemExit, match="less than two updates"):
        plan.run(None, "run", [], found, way, 3.0, folder=tmp_path)


def test_how_quick_a_run_was_is_told_by_its_updates(plan, monkeypatch):
    speed = sys.modules["speed"]
    quick, slow = np.arange(0.0, 10.0, 0.02), np.arange(0.0, 10.0, 0.05)
    shaken = np.concatenate([quick[quick < 5.0], slow[slow >= 5.0]])
    monkeypatch.setattr(speed, "updates", lambda run: [shaken])
    assert speed.updates_per_s(None) == pytest.approx(35.0, rel=0.01)
    monkeypatch.setattr(speed, "updates", lambda run: [quick, shaken])
    assert speed.updates_per_s(None) == pytest.approx(85.0, rel=0.01), "of all groups"
    monkeypatch.setattr(speed, "updates", lambda run: [])
    assert speed.updates_per_s(None) == 0.0


def test_real_runs_are_made_in_one_process_and_timed(plan, monkeypatch, tmp_path):
    started = tmp_path / "started"
    monkeypatch.setattr("tianji.run.ForkServer", functools.partial(Counted, started))
    overrides = ["scale.envs_per_actor=8", "scale.rollout_length=16"]
    with sys.modules["speed"].runner() as runs:
        for at, engine in enumerate(("local", "serial", "local")):
            folder = tmp_path / str(at)
            how = [*overrides, f"scale.engine={engine}"]
            found = plan.forked(runs, "ppo_cartpole", how, 1.0, folder, 128.0)
            assert found > 0
            (run,) = folder.iterdir()
            assert "seconds" in json.loads((run / "result.json").read_text())["stop_reason"]
    assert started.read_text().count("started") == 1


def test_what_was_measured_is_kept_for_the_same_config_on_the_same_machine(cache):
    config = load_config(CARTPOLE)
    assert profiles.cached(config) is None
    path = profiles.save(a_profile(config), config)
    assert path.parent == cache
    assert profiles.cached(config) == a_profile(config)
    assert profiles.cached(load_config(CARTPOLE, ["stop.updates=9", "seed=3"])) is not None
    assert profiles.cached(load_config(CARTPOLE, ["algorithm.epochs=3"])) is None
    assert profiles.cached(load_config(CARTPOLE, ["network.hidden=[8]"])) is None
    assert profiles.cached(load_config(CARTPOLE, ["scale.envs_per_actor=16"])) is None
    # The same envs in other hands are the same measurement.
    other = load_config(
        CARTPOLE, ["scale.actors=2", "scale.envs_per_actor=4", "scale.engine=local"]
    )
    assert profiles.cached(other) is not None


def test_a_profile_of_a_run_without_a_bound_is_json():
    config = load_config(CARTPOLE, ["scale.relax=free", "scale.engine=local"])
    profile = a_profile(config)
    assert math.isinf(profile.task.lead)
    text = json.dumps(profile.tree(), allow_nan=False)
    assert profiles.Profile.of(json.loads(text)) == profile


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"torch": "1.0"}, "torch: 1.0, here"), ({"cpu": "Abacus"}, "cpu: Abacus, here")],
)
def test_a_profile_from_elsewhere_is_refused(tmp_path, changes, says):
    config = load_config(CARTPOLE)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(a_profile(config, **changes).tree()))
    with pytest.raises(Refusal, match=says):
        profiles.load(path, config)


def test_a_profile_of_another_config_or_no_profile_is_refused(tmp_path):
    config = load_config(CARTPOLE)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(a_profile(config).tree()))
    with pytest.raises(Refusal, match="another env, algorithm, network"):
        profiles.load(path, load_config(REPLAY))
    path.write_text("{}")
    with pytest.raises(Refusal, match="no profile that can be read"):
        profiles.load(path, config)
    with pytest.raises(Refusal, match="no profile that can be read"):
        profiles.load(tmp_path / "nowhere", config)


def test_a_plan_changes_nothing_of_what_is_learnt(monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 8)
    config = load_config(CARTPOLE)
    found = planner.make(config, a_profile(config))
    other = shape.spread(config, found.best.choice)
    scale = other.scale
    assert scale.engine == "local", "its env is slow"
    assert scale.actors > 1
    assert scale.actors * scale.envs_per_actor * scale.rollout_length == 64
    assert other.algorithm == config.algorithm


def test_more_cores_than_there_are_are_refused():
    config = load_config(CARTPOLE)
    with pytest.raises(Refusal, match="--cores 999 is more than"):
        planner.make(config, a_profile(config), cores=999)


def test_what_if_answers_from_the_model(monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    four, eight = (
        planner.what_if(config, profile, [f"actors={n}", "envs=1"], None).capacity["actors"]
        for n in (4, 8)
    )
    assert eight == pytest.approx(2 * four, rel=0.01)
    for wrong in ("actors", "actors=0", "actors=x", "colour=3", "engine=ray"):
        with pytest.raises(Refusal, match="cannot be asked"):
            planner.what_if(config, profile, [wrong], None)


def test_what_if_knows_that_a_batch_grows_with_what_is_consumed_once():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    rows = profile.task.rows
    batches = {rows // 2: 1.5e-3, rows: 2e-3, 2 * rows: 3e-3}
    known = dataclasses.replace(profile, batches=batches)
    one = planner.what_if(config, known, ["actors=1"], None)
    two = planner.what_if(config, known, ["actors=2"], None)
    assert two.capacity["learner"] / one.capacity["learner"] == pytest.approx(2 * 2e-3 / 3e-3)
    blind = planner.what_if(config, profile, ["actors=2"], None)
    assert blind.capacity["learner"] == pytest.approx(one.capacity["learner"], rel=0.01)


def test_learning_on_a_gpu_that_is_not_there_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(profiled.torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match="there is no GPU here"):
        profiler.measure(load_config(CARTPOLE, ["scale.device=cuda"]))


def test_a_learner_on_a_gpu_is_measured_with_actors_that_feed_it_its_own_batches():
    config = load_config(CARTPOLE, ["scale.envs_per_actor=64"])
    task = shape.task_of(config, shape.see(config).env)
    assert next(comparing.fed_by(task, 7, 64)) == (4, 16)
    assert list(comparing.fed_by(task, 8, 16)) == [(8, 8), (4, 16)]
    assert not list(comparing.fed_by(task, 7, 8))
    replay = dataclasses.replace(task, on_policy=False)
    assert next(comparing.fed_by(replay, 7, 8)) == (7, 8)


def test_a_run_with_a_gpu_is_expected_to_begin_no_sooner_than_a_learner_did(monkeypatch):
    monkeypatch.setattr(profiled.torch.cuda, "is_available", lambda: True)
    config = load_config(CARTPOLE, ["scale.device=cuda"])
    quick, slow = (compares(config, None, 4, seconds)._apart()[0] for seconds in (1.0, 20.0))
    assert quick.what == "a learner that 2 actors feed"
    assert quick.seconds == pytest.approx(comparing.START_GPU + 2.0, abs=0.5)
    assert slow.seconds == pytest.approx(comparing.START + 20.0 + 2.0, abs=0.5)


def test_what_others_cost_a_learner_that_was_measured_beside_some_is_counted_once():
    ratios = Ratios()
    ratios.busy = {2: [slowed(1.1, 1.0, 1.0)], 5: [slowed(1.5, 1.0, 1.0)]}
    ratios.apart, ratios.busy_apart = {1: over_one(2.0)}, 5
    found = ratios.curves({1: 0.01}, 0.01)
    assert found.learn == {1: pytest.approx(0.02)}
    assert found.slow_learn == {1: 1.0, 2: 1.0, 5: pytest.approx(1.0)}
    ratios.busy_apart = 2
    assert ratios.curves({1: 0.01}, 0.01).slow_learn[5] == pytest.approx(1.5 / 1.1)


def test_cuda_is_never_asked_in_the_process_that_forks(monkeypatch):
    here = os.getpid()
    monkeypatch.setattr(profiled.torch.cuda, "is_available", lambda: os.getpid() != here)
    profiler._Profiler(load_config(CARTPOLE, ["scale.device=cuda"]), lambda what, left: None)


def test_what_if_of_learners_and_groups_needs_processes_of_their_own():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    groups = planner.what_if(config, profile, ["groups=2"], None)
    assert groups.choice.engine == "local"
    with pytest.raises(Refusal, match="2 learners take for an update is not known"):
        planner.what_if(config, profile, ["learners=2"], None)
    rates = dataclasses.replace(profile.rates, team={1: 1.0, 2: 0.6})
    known = dataclasses.replace(profile, rates=rates)
    assert planner.what_if(config, known, ["learners=2"], None).choice.learners == 2


def test_a_server_is_measured_with_what_asking_it_takes():
    config = shape.template(load_config(CARTPOLE, ["scale.relax=seed", "algorithm.epochs=1"]))
    cores = sorted(os.sched_getaffinity(0))[:1]
    told = alone(lambda: probe.learning(config, 8), cores, cores=cores, seconds=0.1)
    assert 0 < told["ask"] < told["act"]
    assert 0 < told["answer"] < told["act"]
    acted = alone(lambda: probe.acting(config, 8), cores, seconds=0.1)
    assert 0 < acted["infer"] < acted["step"]


def test_a_plan_for_a_server_needs_only_a_look():
    overrides = ["scale.relax=seed", "scale.engine=local", "algorithm.epochs=1"]
    config = load_config(CARTPOLE, [*overrides, "scale.actors=2", "scale.envs_per_actor=4"])
    found = profiler.look(config)
    assert found.rates.ask > 0
    assert found.rates.answer > 0
    planned = planner.make(config, found)
    assert planned.best.new > 0
    assert "knee" in planner.tree(planned, found)
    few = load_config(CARTPOLE, [*overrides, "scale.actors=2", "relax.max_batch=8"])
    assert profiler.look(few).task.max_batch == 8, "less than all envs, which the run begins with"


@pytest.mark.parametrize("join", ["average", "gossip"])
def test_groups_that_join_are_measured_as_one(join):
    overrides = ["scale.groups=2", "scale.engine=local", f"relax.join={join}", "join.every=3"]
    one = shape.template(load_config(CARTPOLE, overrides))
    assert shape.task_of(one, shape.see(one).env).rows > 0


def test_workers_are_measured_as_one_that_takes_turns():
    overrides = ["scale.relax=a3c", "scale.engine=local", "scale.groups=2"]
    config = load_config(CARTPOLE, overrides)
    assert shape.works(config)
    one = shape.template(config)
    assert not shape.works(one)
    assert (one.scale.relax, one.relax.correct) == ("sync", "vtrace")
    assert planner.choice_of(config).cores_used == 2
    assert str(planner.choice_of(config)) == "2 workers with 8 envs each"


def test_what_workers_cost_each_other_is_measured_by_a_real_run_of_theirs(tmp_path):
    config = load_config(CARTPOLE, WORKERS)
    told = ran(config, tmp_path, 1.0)
    assert 0 < told["update"] < 0.5
    assert told["step"] is None
    profile, ratios = a_profile(config), Ratios()
    rates, task = profile.rates, profile.task
    alone_s = task.rows * rates.valid / predict(task, rates, Choice("serial", 1, 8, 8), 1).new
    # Updates of 1.0 s alone took 1.25 s at that time; rounds of two workers 2.5 times as long.
    ratios.workers[2] = beside((2.5 * 1.25, 1.25), (2.5 * 1.25, 1.25), (99.0, 1.25))
    again = Again(Told("learn"), Told("step"), [0], 1.0)
    found = profiler._with_joining(rates, task, ratios, again)
    assert found.together == pytest.approx({1: 1.0, 2: 2.5 / alone_s})
    assert profiler._with_joining(rates, task, Ratios(), again) == rates, "nothing was measured"


def test_a_profile_of_workers_runs_as_many_as_there_are_cores_for(monkeypatch):
    asked = []
    config = load_config(CARTPOLE, WORKERS)

    def job(self, what, kind, key, run, seconds, making=0.0):
        asked.append((what, key, run.scale.groups, run.scale.relax, run.eval.every))

    monkeypatch.setattr(comparing.Comparing, "_job", job)
    compares(config, None, cores=6)._workers()
    assert asked == [("6 workers", 6, 6, "gala", 0), ("2 workers", 2, 2, "gala", 0)]
    assert compares(config, None, cores=1)._workers() == []


def test_a_plan_of_workers_has_one_on_every_core(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "cores_here", lambda: 4)
    overrides = ["scale.relax=a3c", "scale.engine=local", "scale.groups=2"]
    config = load_config(CARTPOLE, overrides)
    profile = a_profile(config)
    task = dataclasses.replace(profile.task, workers=True)
    profile = dataclasses.replace(profile, task=task)
    found = planner.make(config, profile)
    assert (found.best.choice.groups, found.best.choice.hosts) == (4, "worker")
    two = planner.what_if(config, profile, ["groups=2"], None)
    assert found.best.new == pytest.approx(2 * two.new)
    assert planner.make(config, profile, groups=3).best.choice.groups == 3
    with pytest.raises(Refusal, match="no way to spread"):
        planner.make(config, profile, groups=1)
    with pytest.raises(Refusal, match="cannot be asked of workers"):
        planner.what_if(config, profile, ["actors=3"], None)
    assert "knee" not in planner.tree(found, profile)
    assert "the knee" not in planner.told(found, profile, config, None)
    assert "one core more" in found.notes[0]
    assert "5 workers" in found.notes[0]
    planner.write(tmp_path / "plan.json", planner.tree(found, profile))
    followed, _ = planner.follow(config, tmp_path / "plan.json")
    assert followed.scale.groups == 4
    for other in ([], [*overrides, "scale.envs_per_actor=16"], [*overrides, "network.hidden=[8]"]):
        with pytest.raises(Refusal, match="was made for another env"):
            planner.follow(load_config(CARTPOLE, other), tmp_path / "plan.json")


def test_a_plan_keeps_the_groups_of_a_config(monkeypatch, cache):
    """Each has batches of its own, so that with fewer something else would be learnt."""
    several = ["scale.engine=local", "scale.groups=2", "relax.join=average", "join.every=3"]
    config = load_config(CARTPOLE, [*several, "scale.actors=auto"])
    profile = a_profile(config)
    profiles.save(profile, config)
    monkeypatch.setattr(planner, "cores_here", lambda: 8)
    followed, written = planner.follow(config, None)
    assert (followed.scale.groups, written["choice"]["groups"]) == (2, 2)
    for p in (found := planner.make(config, profile)).others:
        assert p.choice.groups == 2
    assert not any("--groups" in note for note in found.notes)
    assert planner.make(load_config(CARTPOLE), profile).best.choice.groups == 1
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    with pytest.raises(Refusal, match=r"has 2 groups.* need 4 cores, and there are 2.*--groups"):
        planner.make(config, profile)
    alone = load_config(CARTPOLE, ["scale.groups=2", "scale.engine=local"])
    assert planner.make(alone, profile, groups=1).best.choice.groups == 1


def test_a_profile_holds_for_how_often_models_are_joined():
    config, other = (load_config(CARTPOLE, [*WORKERS, f"join.every={n}"]) for n in (1, 50))
    assert profiles.subject(config) != profiles.subject(other)


def test_a_template_neither_evaluates_nor_explores_by_a_ladder():
    tree = {**REPLAY, "scale": {**REPLAY["scale"], "engine": "local", "actors": 2}}
    config = load_config(tree, ["scale.relax=apex"])
    one = shape.template(dataclasses.replace(config, eval=EvalConfig(every=5, when="often")))
    assert one.eval == EvalConfig()
    assert shape.task_of(one, shape.see(one).env).rows > 0
    ladder = Choice("local", 2, 4, 8)
    assert shape.join(shape.spread(config, ladder), shape.see(one).env).relax.explore == "ladder"


def test_batches_are_known_by_the_steps_that_updates_consume():
    """Three envs have no half: two of them are it, about."""
    config = load_config(CARTPOLE, ["scale.envs_per_actor=3"])
    acted = profiled.Acted({3: 1e-4}, {3: 0.5}, 3, {}, None)
    found = profiler._Profiler(config, lambda what, left: None)._batches(acted, 23, 1.0, 0.5)
    small, own, large = sorted(found)
    assert own == 23
    assert 12 < small <= 16
    assert 40 < large <= 48
    profile = a_profile(config)
    task = dataclasses.replace(profile.task, batch=23)
    known = dataclasses.replace(profile, task=task, batches={16: 0.7, 23: 1.0, 46: 2.0})
    assert known.by_batch() == pytest.approx({16: 0.7, 23: 1.0, 46: 2.0})
    # twice the envs consume twice the steps, and that was measured
    twice = planner.what_if(config, known, ["envs=6"], None)
    once = planner.what_if(config, known, ["envs=3"], None)
    assert twice.capacity["learner"] == pytest.approx(once.capacity["learner"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_profile_that_is_ended_leaves_nothing_behind(tmp_path, number):
    folders = {name: tmp_path / name for name in ("TMPDIR", "TIANJI_CACHE")}
    for folder in folders.values():
        folder.mkdir()
    env = os.environ | {name: str(folder) for name, folder in folders.items()}
    before = set(os.listdir("/dev/shm"))
    argv = [sys.executable, "-m", "tianji", "profile", "ppo_cartpole"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "a learner of its own" in line:
                break
        deadline = time.monotonic() + 20
        while not os.listdir(folders["TMPDIR"]):
            if time.monotonic() > deadline:
                process.kill()
                pytest.fail("no run was begun")
            time.sleep(0.1)
        time.sleep(0.5)  # its run is under way
        process.send_signal(number)
        process.wait(20)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert os.listdir(folders["TMPDIR"]) == []
    deadline = time.monotonic() + 10
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rates.act", {"8": -1.0}, "rates.act is"),
        ("rates.act", {}, "rates.act is"),
        ("rates.learn", {"1": 0.0}, "rates.learn is"),
        ("rates.serve", math.nan, "rates.serve is nan"),
        ("rates.valid", None, "its parts are not those of a profile"),
        ("rates.valid", 0.0, "rates.valid is 0.0"),
        ("rates.send", "x", "its parts are not those of a profile"),
        ("rates.slow_act", {}, "rates.slow_act is"),
        ("rates.team", {}, "rates.team is"),
        ("varied", "a lot", "its parts are not those of a profile"),
        ("batches", [], "its parts are not those of a profile"),
        ("batches", {"7": 1.0}, "batches lack the config's"),
        ("task.rows", 0, "task.rows is 0"),
        ("task", None, "its parts are not those of a profile"),
    ],
)
def test_a_profile_with_what_cannot_be_measured_is_refused(tmp_path, path, value, words):
    config = load_config(CARTPOLE)
    tree = json.loads(json.dumps(a_profile(config).tree()))
    *sections, last = path.split(".")
    inner = tree
    for section in sections:
        inner = inner[section]
    inner[last] = value
    (tmp_path / "profile.json").write_text(json.dumps(tree))
    with pytest.raises(Refusal, match=f"no profile that can be read .*{words}"):
        profiles.load(tmp_path / "profile.json", config)


def test_a_run_with_auto_looks_itself_where_what_was_kept_cannot_be_read(cache, tmp_path, capsys):
    config = load_config(CARTPOLE, ["scale.actors=auto"])
    profiles.save(a_profile(config), config).write_text('{"format": 5}')
    result = tianji.train(CARTPOLE, ["scale.actors=auto"], runs=tmp_path)
    assert result.updates == 3
    told = capsys.readouterr().err
    assert 'no profile that can be read (it has no "task")' in told
    assert "a look of 2 s is in its place" in told
    assert not json.loads(Path(result.run_dir, "plan.json").read_text())["whole"]


def test_a_plan_from_elsewhere_says_so(tmp_path):
    config = load_config(CARTPOLE)
    found = planner.make(config, profile := a_profile(config))
    assert "elsewhere" not in planner.said(planner.tree(found, profile))
    there = dataclasses.replace(profile, facts=profile.facts | {"cpu": "Z80"})
    assert "but elsewhere (cpu: Z80, here" in planner.said(planner.tree(found, there))


def test_what_more_cores_than_were_measured_would_take_is_not_known():
    config = load_config(CARTPOLE)
    with pytest.raises(Refusal, match=r"8 cores of a learner .* not known.* at most 2"):
        planner.what_if(config, a_profile(config), ["cores=8"], None)


def test_an_env_that_fails_in_a_profile_is_told_like_in_a_run():
    config = load_config(
        {**CARTPOLE, "env": {"id": "planted/Raises", "imports": ["planted"]}},
        ["faults.env_restarts=3"],
    )
    for measured in (lambda: probe.acting(config, 2), lambda: probe.learning(config, 9)):
        with pytest.raises(
            Failure, match=r"the simulator is gone.* built anew 3 within .* was spent"
        ):
            alone(measured, [0], seconds=0.1)


def test_steps_that_take_long_are_shown_again_where_learning_is_measured():
    env = probe.Shown(make_env("toy/Chain", 3, {}), 4)
    env.reset(0)
    seen = [env.step(np.zeros(3, np.int64)) for _ in range(100)]
    assert len(env._kept) == 4
    for i, step in enumerate(seen, 1):
        assert step.terminated.all() == step.terminated.any() == (i % 32 == 0)
        assert step.valid.all() == step.valid.any() == (i % 32 != 1 or i == 1), "it only reset"
        assert not step.reward[~step.valid].any()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_a_slow_env_is_measured_in_time(seconds, cache):
    env = {"id": "planted/Sleeper", "imports": ["planted"], "kwargs": {"seconds": seconds}}
    config = load_config({**CARTPOLE, "env": env}, ["scale.rollout_length=64"])
    found = profiler.measure(config)
    assert found.seconds < profiled.WHOLE
    assert found.rates.step(1) == pytest.approx(seconds, rel=0.2)
    assert found.rates.learn[1] < 1.0
    plan = planner.make(config, found)
    assert plan.best.binding in ("turns", "actors")
    begun = time.monotonic()
    looked = profiler.look(config)
    assert time.monotonic() - begun < 3 + 8 * seconds
    assert looked.rates.step(1) == pytest.approx(seconds, rel=0.2)


def test_a_profile_that_cannot_be_kept_is_not_lost(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "file" / "cache"))
    config = load_config(CARTPOLE)
    assert profiles.save(a_profile(config), config) is None
    assert "is not kept" in capsys.readouterr().err


def test_auto_is_shown_as_such_and_counts_as_one_actor_until_it_is_planned():
    config = load_config(CARTPOLE, ["scale.actors=auto"])
    assert config.auto
    assert config.scale.actors == 1
    assert next(v for k, v, *_ in config.rows() if k == "scale.actors") == "auto"
    assert not shape.spread(config, Choice("serial", 1, 8, 8)).auto
    with pytest.raises(Refusal, match=r"scale\.actors = 'many'"):
        load_config(CARTPOLE, ["scale.actors=many"])


def test_a_run_with_auto_looks_first_and_keeps_its_plan(tmp_path):
    result = tianji.train(CARTPOLE, ["scale.actors=auto"], runs=tmp_path)
    run = Path(result.run_dir)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["choice"]["actors"] * plan["choice"]["envs"] == 8
    assert plan["predicted"]["new"] > 0
    assert not plan["whole"]
    assert "tianji profile` would know better" in (run / "log.txt").read_text()
    kept = load_config(run / "config.toml")
    assert not kept.auto
    assert kept.scale.engine == plan["choice"]["engine"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["plan/predicted_sps"] == plan["predicted"]["new"]
    tianji.resume(run, ["stop.updates=6"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] == 6
    assert rows[-1]["plan/predicted_sps"] == plan["predicted"]["new"], "and when it goes on"
    again = tianji.train(CARTPOLE, runs=tmp_path, plan=run / "plan.json")
    assert again.updates == 3
    assert load_config(Path(again.run_dir) / "config.toml").scale == kept.scale


def test_a_plan_that_needs_more_cores_than_there_are_is_not_followed(tmp_path):
    path = tmp_path / "plan.json"
    choice = dataclasses.asdict(Choice("local", 999, 1, 8))
    path.write_text(json.dumps({"choice": choice, "predicted": {"new": 1.0}}))
    with pytest.raises(Refusal, match="wants 1000 cores"):
        tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    wrongs = {
        "[]": "not those of a plan", "{}": 'has no "predicted"', "nonsense": "no JSON",
        '{"choice": {}, "predicted": {"new": 1}}': "not those of a plan",
        '{"choice": {}, "predicted": {"new": "many"}}': "is no speed",
        '{"choice": {}, "predicted": {"new": 0}}': "is no speed",
        '{"choice": {"cats": 2}, "predicted": {"new": 1}}': "its choice has cats",
        json.dumps({"choice": choice | {"actors": 0}, "predicted": {"new": 1}}): "a count is no",
    }  # fmt: skip
    for wrong, words in wrongs.items():
        path.write_text(wrong)
        with pytest.raises(Refusal, match=f"no plan that can be read .*{words}"):
            tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    with pytest.raises(Refusal, match="No such file"):
        tianji.train(CARTPOLE, runs=tmp_path, plan=tmp_path / "none.json")


def test_a_plan_that_was_edited_is_not_followed(tmp_path):
    config, path = load_config(CARTPOLE), tmp_path / "plan.json"
    written = planner.tree(planner.make(config, a_profile(config)), a_profile(config))
    for changed in ({"envs": 7}, {"engine": "serial", "actors": 3}):
        choice = dict(written["choice"]) | {"engine": "serial", "actors": 1, "envs": 16} | changed
        path.write_text(json.dumps(written | {"choice": choice}))
        with pytest.raises(Refusal, match=r"would let an update follow \d+ steps .* instead of"):
            tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("followed", ["plan", "auto"])
def test_what_is_asked_for_beside_a_plan_is_not_dropped(tmp_path, followed):
    config = load_config(CARTPOLE, ["scale.actors=auto"] if followed == "auto" else [])
    profile = a_profile(config)
    profiles.save(profile, config)
    found = planner.make(config, profile)
    path = tmp_path / "plan.json"
    planner.write(path, planner.tree(found, profile))
    other = "serial" if found.best.choice.engine == "local" else "local"
    plan = path if followed == "plan" else None
    mine = ["scale.actors=auto"] if followed == "auto" else []
    with pytest.raises(Refusal, match=rf"scale.engine = {other} is asked for and the plan says"):
        tianji.train(CARTPOLE, [*mine, f"scale.engine={other}"], runs=tmp_path, plan=plan)
    same = f"scale.engine={found.best.choice.engine}"
    assert tianji.train(CARTPOLE, [*mine, same], runs=tmp_path, plan=plan).updates == 3


def test_where_no_way_is_possible_the_reason_is_told():
    config = load_config(CARTPOLE, ["scale.rebalance=true"])
    with pytest.raises(Refusal, match=r"first way that was tried: .*scale\.rebalance = true"):
        planner.make(config, a_profile(load_config(CARTPOLE)), 1)


def test_one_process_may_be_asked_about_with_several_actors():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    several = planner.what_if(config, profile, ["engine=serial", "actors=2"], None)
    assert several.choice.engine == "serial"
    assert several.choice.actors == 2
    with pytest.raises(Refusal, match="engine=serial is one process"):
        planner.what_if(config, profile, ["engine=serial", "groups=2"], None)


def test_figures_of_a_profile_do_not_contradict_each_other():
    """Updates take longer in a process of their own; batches were measured in one that acts."""
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    batch = profile.task.batch
    rates = dataclasses.replace(profile.rates, inside={1: 1e-3})
    batches = {batch // 2: 0.6e-3, batch: 1e-3, 2 * batch: 1.8e-3}
    told = profiles.told(dataclasses.replace(profile, rates=rates, batches=batches))
    assert f"{batch:>6} steps: 2 ms" in told, "as the learner takes, in the lines above"
    quick = Rates(
        act={16: 1e-5}, begin=0.0, send=0.0, receive=1e-9, serve=1e-9, learn={1: 2e-2}, take=0.0,
        wake=0.0, slow_act={1: 1.0}, slow_learn={1: 1.0}, inside={1: 1e-2},
    )  # fmt: skip
    plan = planner.make(config, dataclasses.replace(profile, rates=quick))
    assert plan.best.consumed == plan.best.new, "each step is consumed once"
    (note,) = (note for note in plan.notes if "cannot be balanced" in note)
    follows = profile.task.rows / 1e-2
    assert f"follows {follows:,.0f}" in note, "as in one process, where updates are quicker"


def test_the_plan_on_the_command_line(tmp_path, capsys):
    config = load_config("ppo_cartpole")
    profile = a_profile(config)
    profiles.save(profile, config)
    assert main(["plan", "ppo_cartpole"]) == 0
    said = capsys.readouterr().out
    for word in ("plan  ", "predicted", "binding", "more actors", "the knee", "(Tc)", "next best"):
        assert word in said
    assert main(["plan", "ppo_cartpole", "--json", "--save", str(tmp_path / "p.json")]) == 0
    tree = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"predicted", "choice", "binding", "alternatives"} <= tree.keys()
    assert json.loads((tmp_path / "p.json").read_text())["choice"] == tree["choice"]
    assert main(["plan", "ppo_cartpole", "--save", str(tmp_path / "nowhere" / "p.json")]) == 2
    assert "Choose another place with --save" in capsys.readouterr().err
    assert main(["plan", "ppo_cartpole", "--save", str(tmp_path / "p.json")]) == 0
    assert f"--plan {tmp_path / 'p.json'} follows it" in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "actors=16"]) == 0
    asked = capsys.readouterr().out
    here = profile.facts["cores"]
    more = f", of which there are {here}" if here < 17 else ""
    assert f"16 actors with 64 envs each, a learner with 1 core (17 cores{more})" in asked
    assert "an update would follow 32,768 steps instead of 2,048" in asked
    assert "--what-if envs=4 shares the same envs" in asked
    more = ["--what-if", "actors=16", "--what-if", "envs=4"]
    assert main(["plan", "ppo_cartpole", *more]) == 0
    assert "instead of" not in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "groups=2", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tree["notes"] == ["every group has batches of its own, which changes what is learnt"]
    assert tree["cores"] == 4
    assert main(["plan", "ppo_cartpole", "--what-if", "rollout_length=64"]) == 0
    assert "one process: 64 envs, rollouts of 64 steps (1 core)" in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "engine=serial"]) == 0
    asked = capsys.readouterr().out
    assert "(1 core)" in asked
    assert "instead of" not in asked
    assert main(["plan", "ppo_cartpole", "--what-if", "actors=2", "--save", "p.json"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err
    assert main(["plan", "ppo_cartpole", "--cores", "999"]) == 2
    assert "--what-if actors=998" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--cores", "999"], "is more than"),
        (["--what-if", "actor=3"], "cannot be asked"),
        (["--what-if", "actors=16,envs=4"], "to change several, give --what-if for each"),
        (["--what-if", "actors=2", "--what-if", "actors=3"], "actors is asked more than once"),
        (["--what-if", "actors=3", "--cores", "1"], "needs 4 cores and --cores says 1"),
        (["--what-if", "engine=serial", "--what-if", "groups=2"], "Ask engine=local"),
    ],
)
def test_what_could_not_be_answered_is_refused_before_anything_is_measured(
    asked, told, capsys, monkeypatch
):
    monkeypatch.setattr("tianji.__main__._measured", lambda config: pytest.fail("it measures"))
    assert main(["plan", "ppo_cartpole", *asked]) == 2
    assert told in capsys.readouterr().err
