"""Steps of one rollout by several versions: staleness is that of the steps."""

import numpy as np
import pytest

from tianji.build import build
from tianji.config import load_config
from tianji.driver import Shuffled
from tianji.testing.algorithm import run_updates
from tianji.types import VERSION, Rollout

SERVED = {
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [8]},
    "scale": {"relax": "seed", "actors": 2, "envs_per_actor": 4, "rollout_length": 16},
    "stop": {"updates": 1000},
}


def parts_of(built):
    """What the trainer takes, noted."""
    taken, take = [], built.learner._trainer.take

    def noted(part):
        taken.append((part.head.copy(), part.extras["version"].copy(), part.valid.copy()))
        take(part)

    built.learner._trainer.take = noted
    return taken


@pytest.mark.parametrize("order", range(3))
def test_with_a_server_each_step_says_its_version_and_staleness_is_the_steps(order):
    built = build(load_config(SERVED))
    built.learner.begin()
    taken, driver = parts_of(built), Shuffled(built.roles, order)
    mixed = 0
    for _ in range(30):
        run_updates(built, driver, 1)
        update = built.learner.version - 1
        steps = [update - each[valid] for _, each, valid in taken]
        assert built.learner.report.staleness.tolist() == np.concatenate(steps).tolist()
        for head, each, _ in taken:
            assert head[VERSION] == each[0].min() == each.min(), "the head has the oldest"
            assert (np.diff(each, axis=0) >= 0).all()
            mixed += each.min() < each.max()
        taken.clear()
    assert mixed, "no version came in the middle of a rollout"
    built.close()


def test_without_a_server_no_step_says_its_version():
    built = build(load_config(SERVED, ["scale.relax=sync"]))
    assert "version" not in built.assembly.row.extras
    built.close()


def rollout(valid, each=None):
    leaves = dict.fromkeys(("action", "reward", "terminated", "episodes"), np.zeros((2, 2)))
    leaves |= {"valid": np.array(valid), "head": np.full(8, 3)}
    return Rollout.over(leaves | ({} if each is None else {"extras.version": np.array(each)}))


def test_steps_that_only_reset_are_not_stale():
    valid = [[True, False], [True, True]]
    assert rollout(valid, [[3, 9], [4, 5]]).acted.tolist() == [3, 4, 5]
    assert rollout(valid).acted.tolist() == [3]
    assert rollout([[False] * 2] * 2, [[3, 9], [4, 5]]).acted.tolist() == [3]
