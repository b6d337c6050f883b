"""The architectures of the literature in processes: presets over the same roles."""

import contextlib
import json
import os
import signal
import time

import pytest
from local_runs import DQN, LOCAL, PPO, beside, hosts_of, metrics, train

import tianji

IDENTITY = {
    **PPO,
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo", "epochs": 1, "learning_rate": 2e-2, "gamma": 0.0},
    "network": {"hidden": [16]},
    "scale": {"actors": 2, "envs_per_actor": 8, "rollout_length": 16},
}


pytestmark = pytest.mark.usefixtures("one_server", "told_soon")


@pytest.mark.parametrize("actors", [1, 3])
def test_a_server_for_all_actors_trains_to_the_target(actors, tmp_path):
    config = {**IDENTITY, "stop": {"return": 15.0, "updates": 3000}}
    result = train(config, tmp_path, "scale.relax=seed", f"scale.actors={actors}", LOCAL)
    assert result.stop_reason.startswith("return"), result
    assert set(result.time) == {"actor", "server", "buffer", "learner"}
    for kind, shares in result.time.items():
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.02), kind
    assert {"ask", "simulate", "wait_server"} <= set(result.time["actor"])
    assert {"receive", "infer", "load"} <= set(result.time["server"])
    assert metrics(result)[-1]["staleness/max"] < 50


def test_impala_trains_to_the_target(tmp_path):
    config = {**IDENTITY, "stop": {"return": 15.0, "updates": 3000}}
    result = train(config, tmp_path, "scale.relax=impala", LOCAL)
    assert result.stop_reason.startswith("return"), result


@pytest.mark.parametrize(
    ("preset", "ratio"), [("gorila", (3.0, 4.2)), ("apex", None), ("reverb", (3.0, 5.5))]
)
def test_presets_for_replay_run_and_hold_the_ratio_that_they_promise(preset, ratio, tmp_path):
    """32 steps of a batch for 8 new ones; a run of 300 updates begins with a warm-up."""
    result = train(DQN, tmp_path, f"scale.relax={preset}", "stop.updates=300", LOCAL)
    assert result.updates >= 300
    if ratio is not None:
        assert ratio[0] < result.replay_ratio < ratio[1]


def test_a_seed_run_that_was_stopped_goes_on_with_new_episodes(tmp_path):
    first = train(IDENTITY, tmp_path, "scale.relax=seed", "stop.updates=5", LOCAL)
    again = tianji.resume(first.run_dir, ["stop.updates=12"])
    assert again.updates >= 12
    assert again.resumed == "inexact: envs reset"


def test_checkpoints_on_the_way_do_not_stop_a_server(tmp_path):
    often = ["checkpoint.every=2", "stop.updates=20", LOCAL]
    assert train(IDENTITY, tmp_path, "scale.relax=seed", *often).updates >= 20


@pytest.mark.parametrize(("role", "counted"), [("server", "recoveries"), ("actor-1", "restarts")])
def test_a_run_with_a_server_outlives_the_death_of_a_process(role, counted, tmp_path):
    """The server is restarted with all others, an actor alone, and it can ask again."""

    def kill():
        table = tmp_path / "run" / "hosts.json"
        old = hosts_of(tmp_path / "run")[role]
        os.kill(old, signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:  # until another one has made steps
            with contextlib.suppress(OSError, ValueError):
                rows = {row["role"]: row for row in json.loads(table.read_text())["hosts"]}
                rate = rows["actor-1"]["steps_per_s"]
                if rows[role]["pid"] not in (old, -1) and rate:
                    break
            time.sleep(0.05)
        else:
            raise TimeoutError("it makes no steps")
        os.kill(os.getpid(), signal.SIGTERM)

    config = {**IDENTITY, "stop": {"updates": 10_000_000}}
    with beside(kill):
        result = train(config, tmp_path, "scale.relax=seed", LOCAL, name="run")
    assert result.status == "stopped"
    assert result.notes[counted] == 1
