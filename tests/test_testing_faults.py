"""The env that goes wrong does so when and where it is told to, once, and else keeps its word."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import tianji
from tianji import Failure, Refusal
from tianji.env import make_env
from tianji.testing import check_env, faults
from tianji.testing.faults import FaultEnv, happened

STEPS = 400


def faulty_steps(seed, **rates):
    """The steps, from 1 on, in which an env with these rates raises or gives NaN."""
    env, found = FaultEnv(2, **rates), []
    env.reset(seed)
    for step in range(1, STEPS + 1):
        try:
            timestep = env.step(np.zeros(2, np.int64))
            if np.isnan(timestep.observation["obs"]).any():
                found.append(step)
        except RuntimeError:
            found.append(step)
    return found


def step_until_killed(seconds=60, **kwargs):
    """Step an env in a process of its own; the code that it ends with, "killed" after seconds."""
    code = (
        "import json, sys, numpy; from tianji.testing.faults import FaultEnv; "
        "env = FaultEnv(2, **json.loads(sys.argv[1])); env.reset(0); "
        "[env.step(numpy.zeros(2, int)) for _ in range(20)]"
    )
    argv = [sys.executable, "-c", code, json.dumps(kwargs)]
    return subprocess.run(
        argv, timeout=seconds, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ).returncode


def test_an_env_without_faults_is_valid():
    check_env(FaultEnv)
    check_env(lambda num_envs: make_env("testing/Fault", num_envs, {"length": 5}), steps=100)


def test_an_env_that_is_only_slow_is_valid():
    check_env(lambda num_envs: FaultEnv(num_envs, slows=0.5, slow=1e-4), steps=50)


@pytest.mark.parametrize("kind", ["raises", "nans"])
def test_faults_of_a_rate_happen_about_so_often_and_in_the_same_steps_for_a_seed(kind):
    found = faulty_steps(3, **{kind: 0.05})
    assert found == faulty_steps(3, **{kind: 0.05})
    assert found != faulty_steps(4, **{kind: 0.05})
    assert 0.02 * STEPS < len(found) < 0.1 * STEPS


def test_a_kind_fails_in_the_same_steps_whatever_else_fails():
    raised, nans = faulty_steps(3, raises=0.05), faulty_steps(3, nans=0.05)
    assert set(raised) != set(nans)
    assert set(faulty_steps(3, raises=0.05, nans=0.05)) == set(raised) | set(nans)


def test_the_state_holds_what_chances_come_next():
    env, other = FaultEnv(2, nans=0.1), FaultEnv(2, nans=0.1)
    env.reset(5)
    for _ in range(30):
        env.step(np.zeros(2, np.int64))
    other.load_state(env.state())
    for _ in range(50):
        one, two = (e.step(np.zeros(2, np.int64)).observation["obs"] for e in (env, other))
        np.testing.assert_array_equal(one, two)


def test_what_is_told_to_happen_at_a_step_happens_then_and_once(tmp_path):
    marker = tmp_path / "faults"
    for life in ("first", "rebuilt"):
        env = FaultEnv(2, at={"raises": 7}, marker=str(marker))
        env.reset(0)
        for step in range(1, 21):
            if (life, step) == ("first", 7):
                with pytest.raises(RuntimeError, match="an injected fault, in step 7"):
                    env.step(np.zeros(2, np.int64))
            else:
                env.step(np.zeros(2, np.int64))
    (told,) = happened(marker)
    assert (told.role, told.kind, told.step, told.pid) == ("here", "raises", 7, os.getpid())


def test_it_happens_as_many_times_as_it_is_told_to(tmp_path):
    marker = tmp_path / "faults"
    for _ in range(4):
        env = FaultEnv(2, at={"nans": 1}, marker=str(marker), times=3)
        env.reset(0)
        env.step(np.zeros(2, np.int64))
    assert len(happened(marker)) == 3


def test_a_segfault_is_real_and_does_not_happen_in_the_next_process(tmp_path):
    told = {"at": {"segfaults": 5}, "marker": str(tmp_path / "faults")}
    assert step_until_killed(**told) == -signal.SIGSEGV
    assert step_until_killed(**told) == 0


def test_a_hang_does_not_end_by_itself_and_is_told_before(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    env = FaultEnv(2, at={"hangs": 1}, marker=str(tmp_path / "faults"))
    env.reset(0)
    env.step(np.zeros(2, np.int64))
    assert slept == [3600]
    assert [fault.kind for fault in happened(tmp_path / "faults")] == ["hangs"]


def test_a_slow_step_takes_so_many_seconds_more(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    env = FaultEnv(2, slows=0.5, slow=0.25)
    env.reset(0)
    for _ in range(100):
        env.step(np.zeros(2, np.int64))
    assert set(slept) == {0.25}
    assert 20 < len(slept) < 80


def test_faults_that_are_meant_for_a_role_do_not_happen_elsewhere(tmp_path):
    env = FaultEnv(2, raises=1.0, only="actor-1")
    env.reset(0)
    env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("host", ["actor-0", "actor-3", "g1.actor-0"])
def test_those_meant_for_a_kind_of_role_happen_in_all_of_that_kind(host, monkeypatch):
    monkeypatch.setattr(faults, "host_role", lambda: host)
    for only in ("actor", host):
        env = FaultEnv(2, raises=1.0, only=only)
        env.reset(0)
        with pytest.raises(RuntimeError, match=f"in step 1 of {host}"):
            env.step(np.zeros(2, np.int64))


def test_they_happen_in_the_host_that_is_named(one_server, tmp_path):
    config = {
        "env": {
            "id": "testing/Fault", "imports": ["tianji.testing.faults"],
            "kwargs": {"at": {"nans": 9}, "only": "actor-1", "marker": str(tmp_path / "faults"),
                       "times": 1000},
        },
        "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
        "network": {"hidden": [8]},
        "scale": {"engine": "local", "actors": 2, "envs_per_actor": 2, "rollout_length": 8},
        "stop": {"updates": 1000},
        "faults": {"env_restarts": 1},
    }  # fmt: skip
    with pytest.raises(Failure, match="actor-1"):
        tianji.train(config, runs=tmp_path, name="run")
    told = happened(tmp_path / "faults")
    assert {(fault.role, fault.kind, fault.step) for fault in told} == {("actor-1", "nans", 9)}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"raises": 1.5}, "between 0 and 1"),
        ({"at": {"explodes": 3}, "marker": "x"}, "explodes"),
        ({"at": {"raises": 3}}, "marker"),
    ],
)
def test_what_cannot_be_meant_is_refused(kwargs, words):
    with pytest.raises(Refusal, match=words):
        FaultEnv(2, **kwargs)
