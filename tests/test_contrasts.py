"""What a profile compares, and how often."""

import contextlib
import dataclasses
from typing import ClassVar

import pytest
from measured import (
    CARTPOLE,
    REPLAY,
    WORKERS,
    Told,
    a_profile,
    beside,
    over_one,
    ran,
    slowed,
)

from tianji import contrasts, profiler, shape
from tianji.asked import Acted, Asked, Clock
from tianji.config import load_config
from tianji.contrasts import Contrasts
from tianji.plan import Choice, predict
from tianji.ratios import Again, Ratios


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Look:
    """In the place of who is asked again and again."""

    def __init__(self, varied):
        self.varied, self.looks = varied, 0

    def look(self):
        self.looks += 1


class Slows:
    """In the place of who is asked beside others: who they were, and how long one is behind."""

    SECONDS = 0.4

    def __init__(self):
        self.asked = []

    def slowed(self, others, alike):
        self.asked.append(([other.core for other in others], alike))
        return [slowed(1.0, 1.0, 1.0)]

    def beside(self, measure):
        return measure(), 0.01


class On:
    """In the place of a process that measures: on which core it was made."""

    made: ClassVar[list[int]] = []

    def __init__(self, prepare, cores):
        (self.core,) = cores
        self.made.append(self.core)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def compares(config, again, cores=2, preparing=1.0, update=0.01):
    """As in a profile, on so many cores, with an actor whose step takes 1 ms for each env."""
    asked = dataclasses.replace(Asked.of(config), cores=list(range(cores)))
    acted = Acted({8: 8e-3}, {8: 0.5}, {}, 8, {}, None)
    clock, probes = Clock(lambda what, left: None), contextlib.ExitStack()
    return Contrasts(asked, clock, probes, acted, again, {1: update}, preparing)


def test_ratios_are_measured_again_while_there_is_time(monkeypatch):
    now, done = [0.0], []
    monkeypatch.setattr("tianji.asked.time.monotonic", lambda: now[0])

    def job(what, seconds, expected=None, came=True):
        def do():
            now[0] += seconds
            done.append(what)
            return came

        return contrasts.Job(what, "apart", 1, expected or seconds, do)

    one = compares(load_config(CARTPOLE), Look(1.0))
    quick, slow, late = job("quick", 3), job("slow", 15, expected=10), job("late", 30)
    jobs = one.once([quick, slow, job("nothing", 1, came=False), late])
    assert [(j.what, j.seconds) for j in jobs] == [("quick", 3), ("slow", 15)]
    assert one._clock.skipped == ["nothing", "late"]
    done.clear()
    monkeypatch.setattr(Contrasts, "that_matter", lambda self, jobs, rates: jobs)
    one.repeat(jobs, None)
    assert done == ["quick", "slow", "quick", "quick"], "then there are 2 s left, of 45"
    now[0] = 20.0
    done.clear()
    one.repeat([job("matters", 1)], None)
    assert done == ["matters"] * (contrasts.MORE - 1)
    now[0] = 20.0
    done.clear()
    one._again = idle = Look(0.05)
    one.repeat([job("matters", 1)], None)
    assert done == ["matters"] * (contrasts.TURNS - 1), "a steady machine is not asked as often"
    one.repeat([], None)
    assert idle.looks == contrasts.TURNS - 1, "nothing that is compared matters"


def test_only_what_the_best_ways_depend_on_is_looked_at_again():
    config = load_config(CARTPOLE, ["scale.relax=tianji", "scale.engine=local"])
    one, base = compares(config, Look(0.0), cores=4), a_profile(config).rates

    def mattering(act, learn, **found):
        """Of all that was compared, with an update of one learner inside a process that acts."""
        one.ratios = Ratios(**found)

        def rates(ratios):
            curves = ratios.curves({1: learn}, learn)
            return dataclasses.replace(base, act={1: act / 8, 8: act}, **curves._asdict())

        jobs = [contrasts.Job(f"{kind} {key}", kind, key, 1.0, lambda: True)
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


def test_a_learner_on_a_gpu_is_measured_with_actors_that_feed_it_its_own_batches():
    config = load_config(CARTPOLE, ["scale.envs_per_actor=64"])
    task = shape.task_of(config, shape.see(config).env)
    assert next(contrasts.fed_by(task, 7, 64)) == (4, 16)
    assert list(contrasts.fed_by(task, 8, 16)) == [(8, 8), (4, 16)]
    assert not list(contrasts.fed_by(task, 7, 8))
    replay = dataclasses.replace(task, on_policy=False)
    assert next(contrasts.fed_by(replay, 7, 8)) == (7, 8)


def test_a_run_with_a_gpu_is_expected_to_begin_no_sooner_than_a_learner_did(monkeypatch):
    monkeypatch.setattr("tianji.asked.torch.cuda.is_available", lambda: True)
    config = load_config(CARTPOLE, ["scale.device=cuda"])
    quick, slow = (compares(config, None, 4, seconds)._apart()[0] for seconds in (1.0, 20.0))
    assert quick.what == "a learner that 2 actors feed"
    assert quick.seconds == pytest.approx(contrasts.START_GPU + 2.0, abs=0.5)
    assert slow.seconds == pytest.approx(contrasts.START + 20.0 + 2.0, abs=0.5)


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

    monkeypatch.setattr(Contrasts, "_job", job)
    compares(config, None, cores=6)._workers()
    assert asked == [("6 workers", 6, 6, "gala", 0), ("2 workers", 2, 2, "gala", 0)]
    assert compares(config, None, cores=1)._workers() == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_core_has_one_actor_beside_others_however_often_that_is_measured(order, monkeypatch):
    """Of eight cores the first has who learns and the last who also acts alone."""
    monkeypatch.setattr(contrasts, "Probe", On)
    monkeypatch.setattr(On, "made", [])
    slows, all_of_them = Slows(), [1, 2, 3, 4, 5, 6]
    jobs = compares(load_config(CARTPOLE), slows, cores=8)._beside()
    assert [job.key for job in jobs] == [8, 4]
    for turn in (*order, *order):
        assert jobs[turn].do()
    beside = {0: all_of_them, 1: [1, 2]}
    assert [who for who, _ in slows.asked] == [beside[turn] for turn in (*order, *order)]
    assert On.made == all_of_them


@pytest.mark.parametrize(
    ("relax", "times"), [("sync", 1), ("one_step", 2), ("tianji", 2), ("bounded", 1), ("free", 1)]
)
def test_actors_that_share_an_update_wait_for_the_slowest_once_they_are_as_far_ahead_as_they_may(
    relax, times, monkeypatch
):
    """64 steps, of 1 ms each, of as many actors as there are busy cores but one. Those who may be
    further ahead than a rollout do not wait for each other."""
    monkeypatch.setattr(contrasts, "Probe", On)
    slows = Slows()
    config = load_config(CARTPOLE, [f"scale.relax={relax}", "scale.engine=local"])
    for job in compares(config, slows, cores=4)._beside():
        job.do()
    assert [alike for _, alike in slows.asked] == pytest.approx([times * 64e-3 / n for n in (3, 1)])


def test_only_short_updates_are_told_apart_by_whether_their_process_also_acts():
    config = load_config(CARTPOLE)
    short, long = (compares(config, None, update=x * contrasts.SHORT)._apart() for x in (0.9, 1.1))
    assert [job.what for job in short] == ["a learner of its own with 1 core"]
    assert long == []


def test_a_step_of_the_only_actor_of_a_real_run_is_kept(monkeypatch):
    told = {"update": 0.02, "step": 0.03}
    monkeypatch.setattr(Contrasts, "_run", lambda self, run, seconds: told)
    one = compares(load_config(CARTPOLE), Slows(), cores=4)
    (apart,), (team,) = one._apart(), one._team()
    assert apart.do()
    assert one.ratios.apart == {1: beside((0.02, 0.01))}
    assert one.ratios.asked == [0.03]
    assert team.do()
    assert one.ratios.team == {2: beside((0.02, 0.01))}
    assert one.ratios.asked == [0.03], "two actors have half of the envs each"
    told["step"] = None
    assert apart.do()
    assert one.ratios.asked == [0.03], "it made none"
    told.update(update=None, step=0.03)
    assert not apart.do()
    assert one.ratios.asked == [0.03]
    assert len(one.ratios.apart[1]) == 2


def test_a_step_of_actors_that_feed_a_gpu_together_is_not_kept_as_that_of_the_only_one(monkeypatch):
    monkeypatch.setattr("tianji.asked.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(Contrasts, "_run", lambda *_: {"update": 0.02, "step": 0.03})
    for cores, asked in ((4, []), (2, [0.03])):
        one = compares(load_config(CARTPOLE, ["scale.device=cuda"]), Slows(), cores)
        (apart,) = one._apart()
        assert apart.do()
        assert one.ratios.apart == {1: beside((0.02, 0.01))}
        assert one.ratios.asked == asked


def test_a_learner_that_actors_feed_has_as_many_busy_cores_beside_it(monkeypatch):
    monkeypatch.setattr("tianji.asked.torch.cuda.is_available", lambda: True)
    for device, cores, busy in (("cuda", 8, 5), ("cuda", 4, 3), ("cuda", 2, 2), ("cpu", 8, 2)):
        one = compares(load_config(CARTPOLE, [f"scale.device={device}"]), None, cores)
        assert len(one._apart()) == 1
        assert one.ratios.busy_apart == busy, (device, cores)


@pytest.mark.parametrize(("cores", "teams"), [(3, []), (4, [2]), (7, [2]), (8, [2, 4])])
def test_as_many_learners_are_measured_as_leave_a_core_to_each_of_as_many_actors(cores, teams):
    assert [job.key for job in compares(load_config(CARTPOLE), None, cores)._team()] == teams


def test_real_runs_of_workers_do_not_wait_for_their_warm_up(monkeypatch):
    runs = []
    monkeypatch.setattr(Contrasts, "_job", lambda self, what, kind, key, run, *_: runs.append(run))
    config = load_config(REPLAY, WORKERS)
    compares(config, None, cores=4)._workers()
    assert [run.scale.groups for run in runs] == [4, 2]
    assert config.algorithm.warmup == 5000
    assert all(run.algorithm.warmup < 1000 for run in runs)
