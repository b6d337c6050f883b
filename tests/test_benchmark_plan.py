"""How benchmarks/plan.py judges plans by real runs."""

import argparse
import functools
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from measured import CARTPOLE, Counted, a_profile

from tianji import planner
from tianji.config import load_config
from tianji.plan import Choice, predict


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    assert found["rounds"] == pytest.approx([1.0, 1.0, 0.5])
    low, high = found["interval"]
    assert 0.5 <= low < found["reached"] < high <= 1.0
    mine["runs"][2] = [180.0, 60.0]
    found = plan.compared({"ways": [mine, other, lucky], "sweep": []})
    assert found["reached"] == 1.0
    low, high = found["interval"]
    assert low < 0.9, "another one is the best in some samples of the turns"
    assert high == 1.0


def test_a_sweep_counts_among_the_errors_of_a_plan(plan):
    one, two, wide = (
        {"engine": "local", "actors": actors, "envs": envs, "rollout_length": 8}
        for actors, envs in ((1, 8), (2, 8), (2, 16))
    )
    mine = {"choice": one, "chosen": True, "predictions": [110.0], "runs": [[100.0]]}
    other = {"choice": wide, "chosen": False, "predictions": [90.0], "runs": [[120.0]]}
    sweep = [
        {"choice": one, "predictions": [130.0, 150.0], "new": [120.0, 80.0]},
        {"choice": two, "predictions": [30.0], "new": [40.0]},
    ]
    found = plan.compared({"ways": [mine, other], "sweep": sweep})
    assert found["ways"][0]["errors"] == pytest.approx([0.4, 0.1])
    assert found["error"] == pytest.approx(0.25)
    assert found["ways"][1]["errors"] == pytest.approx([-0.25, -0.25])
    assert found["reached"] == pytest.approx(100 / 120), "by rounds, in whose turns all were run"
    assert found["rounds"] == pytest.approx([100 / 120])
    assert plan.told_reached(found) == "0.83", "one turn has no interval"
    assert plan.told_reached(found | {"interval": [0.8, 0.9]}) == "0.83 [0.80, 0.90]"


def test_a_sweep_runs_every_way_and_the_better_ones_again(plan, monkeypatch):
    """The plan's, which is for two cores, is not the fastest here."""
    config = load_config(plan.source("ppo_cartpole"))
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
    monkeypatch.setattr(speed, "updates", lambda run: [quick, quick[:1]])
    assert speed.updates_per_s(None) == 0.0, "it is not known how quick the other group is"


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
