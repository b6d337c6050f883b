"""Processes of a run are killed, stopped and told to end, in every phase; what is promised holds.

The quick part covers every deed, role and phase, and what test_supervision.py does not have in its
quick part; the others are slow. `make chaos` runs all of them and writes what it saw to
benchmarks/results/chaos.json.
"""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import chaos
import numpy as np
import pytest
from chaos import DEEDS, FAULTS, INJECTED, MATRIX, PHASES, ROLES, Case, Promise, happen, promise

from tianji.checkpoint import Checkpoints

QUICK = [
    Case("SIGKILL", "buffer", "warm-up"),
    Case("SIGKILL", "evaluator", "start-up"),
    Case("SIGSTOP", "learner", "checkpointing"),
    Case("SIGTERM", "launcher", "shutdown"),
    Case("raises", "actor", "training"),
]


def cases():
    slow = [pytest.mark.slow, pytest.mark.chaos]
    for case in (*MATRIX, *INJECTED):
        marks = [pytest.mark.chaos] if case in QUICK else slow
        yield pytest.param(case, id=str(case).replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_what_is_promised_of_a_fault_holds(case, tmp_path):
    seen = happen(case, tmp_path)
    assert seen.broken == [], f"promised: {seen.promise.says}"


def test_the_quick_part_covers_every_deed_role_and_phase():
    assert {case.deed for case in QUICK} >= {*DEEDS, "raises"}
    assert {case.role for case in QUICK} == set(ROLES)
    assert {case.phase for case in QUICK} == set(PHASES)
    assert set(QUICK) <= {*MATRIX, *INJECTED}


def test_the_matrix_is_whole_and_something_is_promised_of_every_case():
    assert len(set(MATRIX)) == len(DEEDS) * len(ROLES) * len(PHASES)
    assert len(INJECTED) == len(FAULTS)
    for case in (*MATRIX, *INJECTED):
        promised = promise(case.deed, case.role, case.phase)
        assert promised.code in (0, 75, -9), case
        assert promised.says


def test_only_a_killed_or_told_launcher_ends_a_run():
    """Whatever happens to a host, within the budget, the run reaches its stop condition."""
    ended = {c for c in (*MATRIX, *INJECTED) if promise(c.deed, c.role, c.phase).code != 0}
    assert ended == {
        Case(deed, "launcher", phase)
        for deed, phases in (("SIGKILL", PHASES), ("SIGTERM", PHASES[:-1]))
        for phase in phases
    }


@pytest.fixture
def run(tmp_path):
    """What looks at a run, before there is one."""
    looking = chaos._Run(Case("SIGKILL", "actor", "training"), tmp_path)
    (tmp_path / "runs" / "run" / "logs").mkdir(parents=True)
    return looking


def write_run(folder, updates=7, weight=1.0, steps=(1, 2, 3), status="done"):
    """A run folder with which everything is well, unless told otherwise."""
    policy = {"w": np.array([weight])}
    Checkpoints(folder / "checkpoints", 3, "x").save(3, {"policy": policy}, {"updates": updates})
    rows = [{"step": step, "updates": step} for step in steps]
    rows.insert(2, {"step": 1, "updates": 1, "eval/mean_reward": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps({"status": status, "updates": 7}))
    fault = {"role": "actor-1", "signal": "SIGKILL", "cause": "killed"}
    (folder / "faults.jsonl").write_text(json.dumps(fault) + "\n")


PROMISED = Promise(0, "", "new", {"signal": "SIGKILL"})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, None),
        ({"steps": (1, 3, 2)}, "step runs backwards"),
        ({"weight": np.nan}, "not finite"),
        ({"updates": 6}, "the last checkpoint is of update 6, not 7"),
        ({"status": "failed"}, "result.json says failed"),
    ],
)
def test_the_judge_sees_what_is_wrong_in_a_folder(wrong, words, run, tmp_path):
    write_run(tmp_path / "runs" / "run", **wrong)
    broken = run.judge(PROMISED, True)
    assert len(broken) == (words is not None), broken
    assert not words or words in broken[0]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("checkpoints/latest/policy.json", "{}", "saved"),
        ("metrics.jsonl", '{"step": 1, "upd', "rows"),
        ("faults.jsonl", "", "does not tell of actor-1"),
        ("hosts.json", "{}", "hosts.json is left"),
    ],
)
def test_the_judge_sees_files_that_are_damaged_missing_or_left(file, text, words, run, tmp_path):
    write_run(tmp_path / "runs" / "run")
    (tmp_path / "runs" / "run" / file).write_text(text)
    (broken,) = run.judge(PROMISED, True)
    assert words in broken


def test_the_judge_sees_faults_where_there_must_be_none(run, tmp_path):
    write_run(tmp_path / "runs" / "run")
    (broken,) = run.judge(Promise(0, "", faultless=True), True)
    assert "killed" in broken


def test_the_judge_sees_processes_that_are_left(run, tmp_path, monkeypatch):
    """By the mark in their environment, and by the run's files that they have open."""
    monkeypatch.setattr(chaos, "GONE", 0.5)
    idle = [sys.executable, "-c", "input()"]
    assert run.left() == []
    for way in ("mark", "log"):
        env = os.environ | ({"TIANJI_TEST": run._mark} if way == "mark" else {})
        with (tmp_path / "runs" / "run" / "logs" / "x.log").open("w") as log:
            out = log if way == "log" else subprocess.DEVNULL
            left = subprocess.Popen(idle, stdin=subprocess.PIPE, stdout=out, env=env)
        try:
            (broken,) = run.left()
            assert str(left.pid) in broken
        finally:
            left.communicate(b"\n", timeout=30)
    assert run.left() == []


def test_the_judge_sees_what_nobody_has_open_in_shared_memory():
    before, name = chaos._shared(), f"tianji-chaos-{uuid.uuid4()}"
    path = Path("/dev/shm") / name
    try:
        with path.open("w"):
            assert name not in chaos._abandoned(chaos._shared() - before)
        assert name in chaos._abandoned(chaos._shared() - before)
    finally:
        path.unlink()
