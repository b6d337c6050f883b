"""A policy of bfloat16 parameters, one of them tied, from the trainer to actors and to disk."""

import dataclasses

import numpy as np
import pytest
from test_interleavings import Hashing, Marked, Once

from tianji.algorithm import Decision
from tianji.build import assemble, assembly
from tianji.checkpoint import Checkpoints
from tianji.config import RelaxConfig, ScaleConfig
from tianji.driver import Shuffled
from tianji.testing.algorithm import config_for, run_updates
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.types import BFLOAT16, Leaf, Params, leaf, sha256

LAYOUT = {
    "embed": leaf((3, 2), BFLOAT16),
    "head": Leaf((2, 3), BFLOAT16, tied="embed"),
    "scale": leaf((), np.float32),
}


def widened(array):
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrowed(array):
    return (array.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


class Halves:
    """Acts by its parameters, which say which version they are of."""

    def initial(self, B):
        return {}

    def load(self, params):
        embed, head = widened(params["embed"]), widened(params["head"])
        assert embed.ravel().tolist() == head.ravel().tolist(), "a tied leaf is another one's"
        self._w, self._version = embed.copy(), int(params["scale"])
        assert (self._w == self._version).all(), "leaves are of different versions"

    def act(self, observation, state, rng):
        B = len(observation["obs"])
        extras = {"version": np.full(B, self._version)}
        return Decision(rng.integers(10, size=B) + int(self._w[0, 0]) % 7, state, extras)


class Copying(Halves):
    """The same, without a copy beside its own."""

    copies = True


class Trainer(Hashing):
    def params(self, version):
        params = Params(LAYOUT)
        params["embed"][:] = narrowed(np.full((3, 2), version, np.float32))
        params["scale"][...] = version
        return params


class Seen:
    def __init__(self):
        self.versions = []

    def check(self, part, update=None):
        if update is not None:
            assert part.extras["version"].min() == part.extras["version"].max()
            self.versions.append(int(part.extras["version"][0, 0]))


@dataclasses.dataclass(frozen=True)
class OfHalves(Once):
    kind: type = Halves

    def describe(self, spec):
        extras = {"version": leaf((), np.int64)}
        return dataclasses.replace(super().describe(spec), params=LAYOUT, extras=extras)

    def policy(self, spec, device="cpu"):
        return self.kind()

    def trainer(self, spec, device="cpu"):
        return Trainer(self.witness)


def built_of(kind, transport):
    scale = ScaleConfig(engine="local", actors=2, envs_per_actor=2, rollout_length=3)
    algorithm = OfHalves(2, Seen(), kind)
    config = config_for(algorithm, scale=scale, relax=RelaxConfig(lead=1.0))
    built = assemble(assembly(config, lambda n: Marked(n, 0, 3)), transport)
    built.learner.begin()
    return built, algorithm.witness


@pytest.mark.parametrize("kind", [Halves, Copying])
@pytest.mark.parametrize("transport", [Memory, Shm])
def test_actors_act_with_the_bfloat16_that_was_learnt(kind, transport):
    built, seen = built_of(kind, transport())
    run_updates(built, Shuffled(built.roles, 0), 20)
    assert seen.versions == sorted(seen.versions)
    assert max(seen.versions) >= 18
    assert all(actor._newest.leases == (kind is Copying) for actor in built.actors)
    built.close()


def test_a_checkpoint_of_it_is_the_same_again(tmp_path):
    built, _ = built_of(Halves, Memory())
    run_updates(built, Shuffled(built.roles, 1), 5)
    checkpoints = Checkpoints(tmp_path, 1, "me")
    state = built.learner.policy_state()
    states = {"actor": built.actors[0].state(), "policy": state}
    path = checkpoints.save(5, states, {})
    loaded = checkpoints.load().parts
    assert set(loaded["policy"]["params"]) == {"embed", "scale"}, "a tied leaf is saved once"
    assert sha256(loaded["policy"]["params"]) == sha256(state["params"])
    assert b'"dtype":"BF16","shape":[3,2]' in (path / "policy.safetensors").read_bytes()
    other, _ = built_of(Halves, Memory())
    other.actors[0].load_state(loaded["actor"])
    if other.actors[0].exact(loaded["actor"]):
        assert other.actors[0]._newest._policy._version == loaded["actor"]["version"]
    built.close()
    other.close()


def test_an_actor_without_a_copy_goes_on_from_a_reset():
    built, _ = built_of(Copying, Memory())
    run_updates(built, Shuffled(built.roles, 1), 5)
    state = built.actors[0].state()
    assert state["params"] is None
    other, _ = built_of(Copying, Memory())
    assert not other.actors[0].exact(state)
    other.actors[0].load_state(state)
    assert other.actors[0].version == -1
    built.close()
    other.close()
