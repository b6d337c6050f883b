"""`tianji ps`: the processes of runs that are under way."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

ENDLESS = {
    "env": {"id": "toy/Chain"},
    "algorithm": {"name": "ppo", "epochs": 1},
    "scale": {"engine": "local", "actors": 2, "envs_per_actor": 4, "rollout_length": 8},
    "stop": {"seconds": 120},
}
TRAIN = (
    "import json, sys, tianji; tianji.train(json.loads(sys.argv[1]), runs=sys.argv[2], name='on')"
)


def tianji(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "tianji", *words], cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture
def running(tmp_path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", TRAIN, json.dumps(ENDLESS), str(tmp_path / "runs")]
    )
    log = tmp_path / "runs" / "on" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not log.exists() and time.monotonic() < end:
        assert launcher.poll() is None, "the run ended before it began"
        time.sleep(0.1)
    yield tmp_path, launcher
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


def test_the_hosts_of_a_run_are_listed_with_what_they_do(running):
    folder, launcher = running
    listed = tianji("ps", "runs/on", "--json", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)
    assert [row["role"] for row in rows] == ["actor-0", "actor-1", "buffer", "learner"]
    for row in rows:
        assert os.path.exists(f"/proc/{row['pid']}")
        assert row["rss"] > 2**20
        assert row["cpu_percent"] >= 0
        assert row["state"]
        if row["cores"]:
            assert os.sched_getaffinity(row["pid"]) == set(row["cores"])
    assert sum(row["cpu_percent"] for row in rows) > 20, "a run that works takes time"

    told = tianji("ps", cwd=folder).stdout
    assert "actor-1" in told
    assert "learner" in told

    launcher.send_signal(signal.SIGKILL)
    launcher.wait(60)
    assert (folder / "runs" / "on" / "hosts.json").exists(), "it could not be taken away"
    assert json.loads(tianji("ps", "--json", cwd=folder).stdout) == []
    gone = tianji("ps", "runs/on", cwd=folder)
    assert gone.returncode == 2
    assert "no running processes" in gone.stderr
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{row['pid']}") for row in rows):
        assert time.monotonic() < end, "hosts outlived their launcher"
        time.sleep(0.05)


def test_without_runs_there_is_nothing_to_list(tmp_path):
    listed = tianji("ps", cwd=tmp_path)
    assert listed.returncode == 0
    assert "no run has processes" in listed.stdout
