"""Each role computes where its placement says."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from tianji.algorithms.ppo import PPO
from tianji.build import assemble, assembly
from tianji.config import ScaleConfig
from tianji.env import make_env
from tianji.placement import placements
from tianji.role_names import RoleName
from tianji.testing.algorithm import config_for
from tianji.transports.memory import Memory

GIVEN = []


@dataclass(frozen=True)
class Records(PPO):
    """Notes which device each part was made for."""

    name: ClassVar[str] = "records"

    def policy(self, spec, device="cpu"):
        GIVEN.append(("policy", spec.actor, device))
        return super().policy(spec)

    def trainer(self, spec, device="cpu"):
        GIVEN.append(("trainer", spec.learner, device))
        return super().trainer(spec, "cpu")


@pytest.fixture(autouse=True)
def _nothing_given():
    GIVEN.clear()


def test_a_policy_and_a_trainer_are_given_the_device_of_their_role():
    scale = ScaleConfig(actors=2, envs_per_actor=2, rollout_length=4)
    config = config_for(Records(minibatches=1), scale=scale)
    joined = assembly(config, lambda envs: make_env("toy/Chain", envs, {}))
    joined = replace(joined, devices={"actor-1": "cuda:1", "learner": "cuda:0"})
    assemble(joined, Memory()).close()
    assert GIVEN == [("policy", 0, "cpu"), ("policy", 1, "cuda:1"), ("trainer", 0, "cuda:0")]


def test_learners_are_placed_on_the_configs_device_and_all_others_on_the_cpu():
    roles = [RoleName("actor"), RoleName("buffer"), RoleName("learner")]
    hosts = {str(role): (role,) for role in roles}
    found = {p.host: p.devices for p in placements(hosts, [0, 1], 1, True, device="cuda")}
    assert found == {"actor-0": {}, "buffer": {}, "learner": {"learner": "cuda"}}
