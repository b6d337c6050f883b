"""Priorities in processes: the buffer is told, exactly where nothing is stale, and on resuming."""

import copy

import pytest
from local_runs import DQN, LOCAL, learnt, metrics, one_server, train

import tianji

PRIORITIZED = copy.deepcopy(DQN)
PRIORITIZED["algorithm"] |= {"prioritized": True, "beta_updates": 50}


@pytest.fixture(scope="module", autouse=True)
def _one_server():
    with one_server():
        yield


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


def test_apex_runs_free_with_priorities_from_actors_and_learner(tmp_path):
    result = train(PRIORITIZED, tmp_path, LOCAL, "scale.relax=apex", "stop.updates=300")
    assert result.updates >= 300
    assert "prioritize" in result.time["buffer"]
