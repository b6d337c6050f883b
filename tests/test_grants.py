"""An actor that holds several grants, and pushes what it made of them in any order."""

import dataclasses
import json

import numpy as np
import pytest
from test_interleavings import Again, Marked, Once

from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.build import assemble, assembly, build
from tianji.config import RelaxConfig, ScaleConfig
from tianji.driver import Serial, Shuffled
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.role import Did
from tianji.testing.algorithm import config_for, run_updates
from tianji.transports.memory import Memory
from tianji.types import GAP, PRODUCED, SEQ, SOURCE, STEPS, UPDATE, VERSION, Rollout

MOST = 4
"""grants that an actor holds"""
T, B = 2, 3


class Generator:
    """Fills all slots that it was granted, row by row in turn, and pushes any that is full."""

    def __init__(self, actor, seed):
        self.name = actor.name
        self._index, self._rollouts, self._newest = actor.index, actor._rollouts, actor._newest
        self._rng = np.random.default_rng(seed)
        self._rows, self.pushed, self.most = {}, [], 0

    def step(self):
        if self._newest.take():
            return Did("load")
        slots = [
            slot for slot in self._rollouts.granted(4) if self._newest.version >= slot.update - 1
        ]
        if not slots:
            return Did(waits="buffer")
        self.most = max(self.most, len(slots))
        slot = slots[self._rng.integers(len(slots))]
        rollout, t = Rollout.over(slot.arrays), self._rows.setdefault(slot.number, 0)
        if t == 0:
            rollout.head[VERSION], rollout.head[SOURCE] = self._newest.version, self._index
            rollout.head[UPDATE], rollout.head[GAP] = slot.update, 1
        if t < T:
            rollout.reward[t] = slot.grant
            rollout.valid[t] = True
            self._rows[slot.number] = t + 1
            return Did("simulate")
        rollout.head[SEQ], rollout.head[STEPS] = len(self.pushed), T * B
        rollout.head[PRODUCED] = T * B * (len(self.pushed) + 1)
        self._rollouts.push(slot)
        self.pushed.append(slot.number)
        del self._rows[slot.number]
        return Did("push")

    def close(self):
        pass


class Seen:
    """What each update took: the number of each rollout's grant."""

    def __init__(self):
        self.taken = []

    def check(self, part, update=None):
        if update is not None:
            assert len(set(part.reward.ravel().tolist())) == 1, "a rollout is a mixture"
            self.taken.append((update, (int(part.head[UPDATE]), int(part.reward[0, 0]))))


def unordered(joined):
    """The same, with lanes of more slots, which may be pushed in any order."""

    def changed(joint):
        if joint.what != "rollouts":
            return joint
        lane = dataclasses.replace(joint.conduit, slots=8, ordered=False)
        return dataclasses.replace(joint, conduit=lane)

    joints = tuple(map(changed, joined.graph.joints))
    return dataclasses.replace(joined, graph=dataclasses.replace(joined.graph, joints=joints))


def built_of(algorithm, late, actors=2):
    scale = ScaleConfig(engine="local", actors=actors, envs_per_actor=B, rollout_length=T)
    config = config_for(algorithm, scale=scale, relax=RelaxConfig(lead=1.0, late=late))
    built = assemble(unordered(assembly(config, lambda n: Marked(n, 0, 3))), Memory())
    built.buffer._most_out = [MOST] * actors
    built.actors = [Generator(actor, i) for i, actor in enumerate(built.actors)]
    built.learner.begin()
    return built


@pytest.mark.parametrize("order", [None, 0, 1, 2])
@pytest.mark.parametrize("late", ["wait", "pass"])
def test_rollouts_are_pushed_in_any_order(late, order):
    seen = Seen()
    built = built_of(Once(8, seen), late)
    driver = Serial(built.roles) if order is None else Shuffled(built.roles, order)
    run_updates(built, driver, 12)
    pushed = [number for actor in built.actors for number in actor.pushed]
    assert pushed != sorted(pushed), "they were pushed in the order of their grants"
    assert max(actor.most for actor in built.actors) == MOST
    numbers = [number for _, number in seen.taken]
    assert len(set(numbers)) == len(numbers) == 12 * 8, "one was lost or doubled"
    if late == "wait":
        assert numbers == [(update, grant) for update in range(12) for grant in range(8)]
        assert all(update == number[0] for update, number in seen.taken)
    built.close()


def test_a_store_that_is_a_ring_in_time_refuses_rollouts_in_any_order():
    with pytest.raises(Refusal, match=r"Replay holds lanes as rings.*any_order"):
        built_of(Again(1, 8, 3, Seen()), "wait")


def one_lane(ordered):
    """A buffer of one lane, both of the lane's ends, and the learner's end."""
    scale = ScaleConfig(engine="local", actors=1, envs_per_actor=B, rollout_length=T)
    relax = RelaxConfig(lead=1.0, late="wait" if ordered else "pass")
    config = config_for(Once(4, Seen()), scale=scale, relax=relax)
    joined = unordered(assembly(config, lambda n: Marked(n, 0, 3)))
    transport = Memory()
    buffer = joined.buffer(transport)
    buffer._most_out = [MOST]
    (batches,) = joined.graph.sent("batches", buffer.name)
    (lane,) = joined.lanes
    ends = transport.outbox(lane), transport.inbox(batches.conduit)
    return buffer, *ends, transport.memory(lane)


def until_it_waits(role):
    while did := role.step():
        yield did


def push(outbox, grant, seq):
    (slot,) = (slot for slot in outbox.granted(4) if slot.number == (0, grant))
    slot.leaf("head")[:] = 0
    slot.leaf("head")[SEQ], slot.leaf("head")[PRODUCED] = seq, 10 * (seq + 1)
    outbox.push(slot)


def test_what_comes_before_its_turn_waits_and_is_kept_in_the_state():
    buffer, outbox, batches, memory = one_lane(ordered=True)
    batches.grant(0)
    assert [*map(str, until_it_waits(buffer))].count("did grant") == MOST
    for seq, grant in enumerate((2, 1, 3)):
        push(outbox, grant, seq)
        assert {did.kind for did in until_it_waits(buffer)} == {"grant"}, "nothing was due"
    assert buffer.lost(0) == (30, 3), "what waits was made by the actor, too"
    state, other = json.loads(json.dumps(dict(buffer.state(), episodes=[]))), one_lane(True)
    assert [grant for *_, grant in state["early"]] == [2, 1, 3]
    state["episodes"] = buffer.state()["episodes"]
    for name, array in memory.items():
        other[3][name][:] = array
    buffer, outbox, batches, _ = other
    buffer.load_state(state)
    batches.grant(0)
    push(outbox, 0, 3)
    kinds = [did.kind for did in until_it_waits(buffer)]
    assert kinds.count("receive") == 4
    assert kinds.count("serve") == 1
    piece = batches.probe().leaf("slot").tolist()
    heads = [int(memory["head"][slot][SEQ]) for slot in piece[1:]]
    assert heads == [1, 0, 2], "they were not taken in the order of their grants"


def test_where_order_does_not_matter_nothing_waits_for_its_turn():
    buffer, outbox, batches, _ = one_lane(ordered=False)
    batches.grant(0)
    settled = [*until_it_waits(buffer)]
    assert len(settled) == MOST
    for seq, grant in enumerate((2, 1, 3)):
        push(outbox, grant, seq)
        assert buffer.step().kind == "receive"


@dataclasses.dataclass(frozen=True)
class Several(PPO):
    """Its actors make four rollouts side by side."""

    def describe(self, spec):
        return dataclasses.replace(super().describe(spec), grants=4, any_order=True)


@dataclasses.dataclass(frozen=True)
class SeveralReplayed(DQN):
    """It wants the same, and reads its lanes as rings in time."""

    def describe(self, spec):
        return dataclasses.replace(super().describe(spec), grants=4, any_order=True)


def test_an_algorithm_describes_how_many_grants_an_actor_holds_and_in_which_order_it_pushes():
    config = config_for(Several(minibatches=1), scale=ScaleConfig(actors=2, rollout_length=3))
    built = build(config, lambda n: make_env("toy/Chain", n, {}))
    assert built.buffer._most_out == [4, 4]
    assert [(lane.ordered, lane.slots >= 4) for lane in built.assembly.lanes] == [(False, True)] * 2
    built.close()


def test_a_replay_whose_lanes_are_rings_refuses_pushes_in_any_order():
    with pytest.raises(Refusal, match="order"):
        build(config_for(SeveralReplayed()), lambda n: make_env("toy/Chain", n, {}))
