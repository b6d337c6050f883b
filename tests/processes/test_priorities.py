"""Priorities in processes: the buffer is told, exactly where nothing is stale, and on resuming."""

import contextlib
import copy
import json
import os
import signal
import time

import pytest
from local_runs import DQN, LOCAL, beside, hosts_of, learnt, metrics, train

import tianji

PRIORITIZED = copy.deepcopy(DQN)
PRIORITIZED["algorithm"] |= {"prioritized": True, "beta_updates": 50}


pytestmark = pytest.mark.usefixtures("one_server", "told_soon")


@pytest.mark.parametrize("initial", ["actor", "max"])
def test_processes_learn_what_one_process_does_bit_for_bit(initial, tmp_path):
    given = f"algorithm.initial={initial}"
    serial = train(PRIORITIZED, tmp_path, given)
    local = train(PRIORITIZED, tmp_path, given, LOCAL)
    assert learnt(local) == learnt(serial)
    assert local.time["buffer"]["prioritize"] >= 0


def test_two_learners_repeat_bit_for_bit_and_learn_what_one_does(tmp_path):
    """Steps that both shares name get the second learner's word, whoever is quicker."""
    two = [train(PRIORITIZED, tmp_path, LOCAL, "scale.learners=2") for _ in range(2)]
    assert learnt(two[0]) == learnt(two[1])
    one = train(PRIORITIZED, tmp_path, LOCAL, "stop.updates=4")
    both = train(PRIORITIZED, tmp_path, LOCAL, "stop.updates=4", "scale.learners=2")
    assert (both.updates, both.steps) == (one.updates, one.steps)
    first, second = metrics(one)[-1], metrics(both)[-1]
    for name in ("train/loss", "train/q_mean", "train/grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-4), name


def test_a_run_of_processes_that_was_stopped_goes_on_exactly(tmp_path):
    whole = train(PRIORITIZED, tmp_path, LOCAL)
    first = train(PRIORITIZED, tmp_path, LOCAL, "stop.updates=20")
    again = tianji.resume(first.run_dir, ["stop.updates=60"])
    assert again.resumed == "exact"
    assert again.params_sha256 == whole.params_sha256


def test_a_buffer_that_is_slow_to_go_on_misses_no_priorities(tmp_path):
    """The learner begins only once there is room for its first ones."""
    config = copy.deepcopy(PRIORITIZED)
    config["env"] = {**config["env"], "imports": ["faults"]}
    config["algorithm"] |= {"name": "test_slow_load"}
    whole = train(config, tmp_path, LOCAL)
    first = train(config, tmp_path, LOCAL, "stop.updates=20")
    again = tianji.resume(first.run_dir, ["stop.updates=60"])
    assert again.resumed == "exact"
    assert again.params_sha256 == whole.params_sha256


def test_apex_runs_free_with_priorities_from_actors_and_learner(tmp_path):
    result = train(PRIORITIZED, tmp_path, LOCAL, "scale.relax=apex", "stop.updates=300")
    assert result.updates >= 300
    assert "prioritize" in result.time["buffer"]


@pytest.mark.parametrize(("role", "counted"), [("learner", "recoveries"), ("actor-1", "restarts")])
def test_a_run_with_priorities_outlives_the_death_of_a_process(role, counted, tmp_path):
    """A learner dies with what it had not told yet; an actor leaves a gap that no value spans."""

    def kill():
        hosts, metrics_file = hosts_of(tmp_path / "run"), tmp_path / "run" / "metrics.jsonl"
        os.kill(hosts[role], signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:  # until updates are made again
            with contextlib.suppress(OSError, ValueError):
                table = json.loads((tmp_path / "run" / "hosts.json").read_text())["hosts"]
                pid = next(row["pid"] for row in table if row["role"] == role)
                last = json.loads(metrics_file.read_text().splitlines()[-1])["updates"]
                if pid not in (hosts[role], -1):
                    seen.append(last)
            if len(seen) > 1 and seen[-1] > seen[0] + 20:
                break
            time.sleep(0.05)
        else:
            raise TimeoutError("no updates follow")
        os.kill(os.getpid(), signal.SIGTERM)

    seen = []
    config = {**PRIORITIZED, "stop": {"updates": 10_000_000}}
    with beside(kill):
        result = train(config, tmp_path, LOCAL, "scale.relax=tianji", name="run")
    assert result.status == "stopped"
    assert result.notes[counted] == 1
