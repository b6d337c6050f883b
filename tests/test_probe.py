"""What a profile measures, each in a process of its own."""

import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import signal
import time

import numpy as np
import pytest
from measured import (
    CARTPOLE,
    REPLAY,
    Counted,
    a_profile,
    ran,
)

import tianji
from tianji import asked, probe, profiler, shape
from tianji.config import load_config
from tianji.errors import Failure
from tianji.probe import Probe, alone
from tianji.trace import Track


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Ticking(probe.Enduring):
    """Its clock goes on by a millisecond whenever it is read."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._clock = map((1e-3).__mul__, itertools.count()).__next__


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


def test_a_measurement_that_hangs_or_is_killed_ends():
    with (
        pytest.raises(Failure, match=r"not ended after 0 s.* Does the env hang"),
        Probe(lambda: lambda: time.sleep(100), [0], patience=0.3) as hangs,
    ):
        hangs.ask()
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


@pytest.mark.parametrize(
    ("env", "rests"),
    [
        ({"id": "planted/Sleeper", "kwargs": {"seconds": 0.004}}, True),
        ({"id": "planted/Elsewhere", "kwargs": {"burns": False}}, True),
        ({"id": "planted/Elsewhere", "kwargs": {"burns": True}}, False),
        ({"id": "CartPole-v1"}, False),
    ],
)
def test_an_actor_whose_envs_wait_is_told_from_one_whose_envs_compute(env, rests):
    """Also where they compute in a process of their own."""
    config = load_config({**CARTPOLE, "env": {**env, "imports": ["planted"]}})
    cores = sorted(os.sched_getaffinity(0))  # so that who computes finds one that is free
    told = alone(lambda: probe.acting(config, 4), cores, seconds=0.4)
    assert 0 <= told["rests"] <= 1
    assert (told["rests"] > 0.5) == rests
    waits = profiler._waiting({1: 0.3, 4: told["rests"]})
    assert set(waits) == ({1, 4} if rests else set())
    assert profiler._waiting({1: 0.0, 4: 0.9}) == {1: 1e-3, 4: 0.9}


def test_steps_of_an_env_that_is_made_anew_now_and_then_count(monkeypatch):
    """A step takes a tick to infer and one to simulate."""
    monkeypatch.setattr(probe, "Enduring", Ticking)
    monkeypatch.setattr(probe, "kept_waiting", lambda: 0.0)
    fails = {"id": "testing/Fault", "kwargs": {"raises": 0.05}}
    tree = {**CARTPOLE, "env": {**fails, "imports": ["tianji.testing.faults"]}}
    told = probe.acting(load_config(tree, ["faults.env_restarts=10000"]), 4)(seconds=2.0)
    assert told["slices"] == pytest.approx([2e-3] * probe.SLICES, rel=0.2)
    assert told["infer"] == pytest.approx(1e-3, rel=0.2)
    assert told["valid"] < 1.0, "it did fail"


@pytest.mark.parametrize("envs", [1, 3])
def test_an_actor_that_halves_its_envs_is_measured_with_any_number_of_them(envs):
    config = load_config("ppo_pong", ["scale.halves=true", "scale.rollout_length=4"])
    told = alone(lambda: probe.acting(config, envs), [0], seconds=0.1)
    assert told["step"] > 0


def test_a_program_with_many_open_files_can_measure():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        assert alone(lambda: lambda: {"one": 1.0}, [0]) == {"one": 1.0}


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


def test_an_update_that_takes_long_is_measured_by_a_share_of_it():
    tree = {
        **CARTPOLE,
        "env": {"id": "CartPole-v1", "imports": ["planted"]},
        "algorithm": {"name": "planted", "epochs": 1, "minibatches": 4, "update_s": 0.05},
    }
    one = shape.template(load_config(tree))
    first = sorted(os.sched_getaffinity(0))[:1]
    for share in (1, 4):
        quarter = shape.with_share(one, share)
        assert quarter.scale.envs_per_actor * share == one.scale.envs_per_actor
        assert quarter.algorithm.minibatches * share == one.algorithm.minibatches
        measured = functools.partial(probe.learning, one, 8, share=share)
        told = alone(measured, first, cores=first, seconds=0.1)
        assert share * 0.05 < told["learn"] < share * 0.05 + 0.1
        assert told["consumed"] == pytest.approx(64, rel=0.2), "as told, all of it"


def test_what_a_share_of_an_update_takes_is_told_in_proportion_to_its_steps(monkeypatch):
    """What the buffer does for an update or a rollout is not, as there are as many of them, and
    neither is a step: it takes fewer envs more than that share of it."""
    monkeypatch.setattr(probe, "Enduring", Ticking)
    monkeypatch.setattr(probe, "kept_waiting", lambda: 0.0)
    config = shape.template(load_config(CARTPOLE, ["scale.relax=seed", "scale.engine=local"]))
    first = sorted(os.sched_getaffinity(0))[:1]

    def told(config, share):
        return alone(lambda: probe.learning(config, 8, share=share), first, cores=first, seconds=0)

    quarter, whole = told(shape.with_share(config, 4), 1), told(config, 4)
    assert quarter["envs"] == whole["envs"] == config.scale.envs_per_actor / 4
    for name in {"learn", "take", "consumed", "serve", "receive", "act", "ask", "answer"}:
        times = 4 if name in ("learn", "take", "consumed") else 1
        assert whole[name] == pytest.approx(times * quarter[name]), name
        assert quarter[name] > 0, name


def test_as_large_a_share_is_taken_as_can_be_learnt_from_in_time():
    tree = {**CARTPOLE, "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 4}}
    config = load_config(tree, ["scale.envs_per_actor=16", "scale.rollout_length=10"])
    known = asked.Asked.of(config)
    passes = 160 * asked.PASSES * 2  # of one step through the network

    def share(config, seconds, glance=False):
        of = dataclasses.replace(known, config=config, one=shape.template(config))
        return of.share(seconds / passes, glance)

    assert share(config, 2.9) == 1
    assert share(config, 3.1) == 2
    assert share(config, 11.0) == 4
    assert share(config, 1e6) == 4, "with less, minibatches would be smaller"
    assert share(config, 0.2, glance=True) == 1
    assert share(config, 4.0, glance=True) == 16
    onto_gpu = dataclasses.replace(config, scale=dataclasses.replace(config.scale, device="cuda"))
    assert share(onto_gpu, 1e6) == 1, "how long that takes on a GPU, acting does not tell"
    halves = config.scaled(halves=True)
    assert share(halves, 1e6) == 4
    assert share(halves, 1e6, glance=True) == 8, "one env has no halves"
    assert shape.shares(load_config(REPLAY)) == {1: True}, "a batch is drawn, and known by its size"


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
    learnt = {"ask": 1e-4, "answer": 2.5e-3, "envs": 8}
    alone = profiler._with_asking(rates, profile.task, learnt, 1e-5, [])
    assert (alone.ask, alone.answer) == pytest.approx((1.1e-4, 5.1e-4))
    known = profiler._with_asking(rates, profile.task, learnt, 1e-5, [0.02, 0.03, 0.9])
    assert known.asked(8, 1, None).step == pytest.approx(0.025), "and once the machine stood still"
    assert known.answer == alone.answer


def test_a_channel_between_two_processes_is_measured():
    cores = sorted(os.sched_getaffinity(0))
    told = alone(lambda: probe.channel(cores[-1:]), cores[:1], seconds=0.05)
    assert 0 < told["push"] < 0.1
    assert 0 < told["wake"] < 1.0


def test_a_server_is_measured_with_what_asking_it_takes():
    config = shape.template(load_config(CARTPOLE, ["scale.relax=seed", "algorithm.epochs=1"]))
    cores = sorted(os.sched_getaffinity(0))[:1]
    told = alone(lambda: probe.learning(config, 8), cores, cores=cores, seconds=0.1)
    assert 0 < told["ask"] < told["act"]
    assert 0 < told["answer"] < told["act"]
    acted = alone(lambda: probe.acting(config, 8), cores, seconds=0.1)
    assert 0 < acted["infer"] < acted["step"]
