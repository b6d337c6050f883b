"""Measuring a whole profile, and keeping it."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from measured import (
    CARTPOLE,
    REPLAY,
    WORKERS,
    Told,
    a_profile,
    ask,
)

from tianji import planner, probe, profiler, shape
from tianji import profile as profiles
from tianji.asked import WHOLE, Acted
from tianji.config import EvalConfig, load_config
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.plan import Choice
from tianji.probe import alone
from tianji.ratios import Again


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_one_env_has_no_halves():
    config = load_config(CARTPOLE, ["scale.halves=true", "scale.envs_per_actor=1"])
    env = shape.see(load_config(CARTPOLE)).env
    with pytest.raises(Refusal, match="one env has no halves"):
        shape.join(config, env)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "relax"), [(CARTPOLE, "sync"), (REPLAY, "sync"), (CARTPOLE, "gala")]
)
def test_a_whole_profile(tree, relax, capsys):
    said = []
    config = load_config(tree, WORKERS if relax == "gala" else [])
    found = profiler.measure(config, lambda what, left: said.append((what, left)))
    assert found.seconds < WHOLE + 5
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
    with pytest.raises(Refusal, match=r"another config \(algorithm\.epochs = 1, here 3\), so its"):
        profiles.load(path, load_config(CARTPOLE, ["algorithm.epochs=3"]))
    changed = r"\(.*; .*; .*; .*; and more\)"
    with pytest.raises(Refusal, match=f"another config {changed}"):
        profiles.load(path, load_config(REPLAY))
    path.write_text("{}")
    with pytest.raises(Refusal, match="no profile that can be read"):
        profiles.load(path, config)
    with pytest.raises(Refusal, match="no profile that can be read"):
        profiles.load(tmp_path / "nowhere", config)


def test_learning_on_a_gpu_that_is_not_there_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr("tianji.asked.torch.cuda.is_available", lambda: False)
    with pytest.raises(Refusal, match="there is no GPU here"):
        profiler.measure(load_config(CARTPOLE, ["scale.device=cuda"]))


def test_cuda_is_never_asked_in_the_process_that_forks(monkeypatch):
    here = os.getpid()
    monkeypatch.setattr("tianji.asked.torch.cuda.is_available", lambda: os.getpid() != here)
    profiler._Profiler(load_config(CARTPOLE, ["scale.device=cuda"]), lambda what, left: None)


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
    setup, _ = shape.join(shape.spread(config, ladder), shape.see(one).env)
    assert setup.relax.explore == "ladder"


def test_batches_are_known_by_the_steps_that_updates_consume():
    """Three envs have no half: two of them are it, about."""
    config = load_config(CARTPOLE, ["scale.envs_per_actor=3"])
    acted = Acted({3: 1e-4}, {3: 0.5}, {}, 3, {}, None)
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
    twice = ask(config, known, "envs=6")
    once = ask(config, known, "envs=3")
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
        ("rates.act", {"8": -1.0}, "rates.act.8 is -1.0, no number from 1e-12 to 86400"),
        ("rates.act", {"8": True}, "rates.act.8 is True, no number"),
        ("rates.act", {"8.0": 1.0}, "rates.act has '8.0', no whole number from 1"),
        ("rates.act", {"9" * 5000: 1.0}, r"rates.act has '9999.*\.\.\..*', no whole number"),
        ("rates.act", {}, "rates.act is empty"),
        ("rates.learn", {"1": 0.0}, "rates.learn.1 is 0.0"),
        ("rates.learn", {"2": 1.0}, 'it has no "rates.learn.1"'),
        ("rates.serve", math.nan, "rates.serve is nan, no number from 0"),
        ("rates.serve", math.inf, "rates.serve is inf"),
        ("rates.receive", 0, "rates.receive is 0"),
        ("rates.valid", None, "rates.valid is None, no number from 1e-12 to 1"),
        ("rates.valid", 0.0, "rates.valid is 0.0"),
        ("rates.send", "x", "rates.send is 'x', no number"),
        ("rates.slow_act", {}, "rates.slow_act is empty"),
        ("rates.team", {}, "rates.team is empty"),
        ("rates.infer", {"8": 1e9}, "rates.infer.8 is 1000000000.0"),
        ("rates.infer", {"8": 1.0}, "rates.infer.8 is more than rates.act.8"),
        ("rates.device", "tpu", "rates.device is 'tpu'"),
        ("rates.more", 1.0, '"rates.more" is unknown here'),
        ("varied", "a lot", "varied is 'a lot', no number"),
        ("skipped", "all", "skipped is 'all', no list"),
        ("whole", 1, "whole is 1, not true or false"),
        ("batches", [], r"batches is \[\], no table"),
        ("batches", {"7": 1.0}, "batches lack the config's"),
        ("task.rows", 0, "task.rows is 0, no whole number from 1"),
        ("task.rows", 2.5, "task.rows is 2.5, no whole number"),
        ("task.lead", 0.5, "task.lead is 0.5, no number of updates"),
        ("task.lead", -1, "task.lead is -1"),
        ("task.lead", 10**400, "task.lead is 1000"),
        ("task", None, "task is None, no table"),
        ("facts.torch", [1], "facts.torch is .* not a text"),
        ("facts.moon", "full", '"facts.moon" is unknown here'),
        ("format", 99, "its format is 99, not"),
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


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "{", "\0", ""])
def test_a_file_that_is_no_profile_at_all_is_refused(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(Refusal, match="no profile that can be read"):
        profiles.load(tmp_path / "profile.json", load_config(CARTPOLE))


@pytest.mark.parametrize(
    "part", ["task", "rates", "rates.act", "task.lead", "facts.torch", "varied"]
)
def test_a_profile_that_lacks_a_part_is_refused(tmp_path, part):
    config = load_config(CARTPOLE)
    tree = json.loads(json.dumps(a_profile(config).tree()))
    *sections, last = part.split(".")
    inner = tree
    for section in sections:
        inner = inner[section]
    del inner[last]
    (tmp_path / "profile.json").write_text(json.dumps(tree))
    with pytest.raises(Refusal, match=f'it has no "{part}"'):
        profiles.load(tmp_path / "profile.json", config)


@pytest.mark.parametrize("lead", [0, 2, math.inf])
def test_a_profile_is_read_as_it_was_written(tmp_path, lead):
    config = load_config(CARTPOLE)
    known = a_profile(config)
    known = dataclasses.replace(
        known,
        task=dataclasses.replace(known.task, lead=lead, workers=True, max_batch=7),
        rates=dataclasses.replace(known.rates, infer={8: 1e-3}, together={1: 1.0, 2: 1.1}),
        skipped=("2 learners",),
        batches={known.task.batch: 0.1},
        inference={"float32": 1e3},
    )
    (tmp_path / "profile.json").write_text(json.dumps(known.tree()))
    assert profiles.load(tmp_path / "profile.json", config) == known


def test_an_env_that_fails_in_a_profile_is_told_like_in_a_run():
    config = load_config(
        {**CARTPOLE, "env": {"id": "planted/Raises", "imports": ["planted"]}},
        ["faults.env_restarts=3"],
    )
    for measured in (lambda: probe.acting(config, 2), lambda: probe.learning(config, 9)):
        with pytest.raises(
            Refusal, match=r"the simulator is gone.* more often than the 3 within .* a run bears"
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
    assert found.seconds < WHOLE
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


def test_a_profile_is_kept_whole_or_not_at_all(cache, monkeypatch, capsys):
    """Whoever reads it meanwhile, and whatever breaks off the writing."""
    config = load_config(CARTPOLE)
    path = profiles.save(a_profile(config), config)
    write = Path.write_text

    def breaks_off(self, text):
        write(self, text[:100])
        assert profiles.cached(config) == a_profile(config), "while the next one is written"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", breaks_off)
    assert profiles.save(dataclasses.replace(a_profile(config), varied=0.5), config) is None
    assert "No space left on device" in capsys.readouterr().err
    assert profiles.cached(config) == a_profile(config)
    assert list(cache.iterdir()) == [path]
