"""Groups that exchange models: means are kept, nothing is used twice, the patient go on."""

import copy
import math
import random
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from graphs import assemblies, ends, role_names
from hypothesis import example, given
from hypothesis import strategies as st
from test_team import Threads, toy
from thorough import examples

from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.build import assemble
from tianji.channel import Conduit, End
from tianji.config import JoinConfig, RelaxConfig, ScaleConfig
from tianji.description import Model
from tianji.driver import Shuffled
from tianji.join import (
    MIX,
    NO_MODEL,
    ROUND,
    Mixer,
    averaged,
    edges,
    in_peers,
    model_layout,
    moved,
    out_peers,
)
from tianji.learner import NO_BATCH, UPDATE
from tianji.state import decode, encode
from tianji.testing.algorithm import config_for
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.types import leaf

GRAPHS = ["complete", "ring", "exponential"]


class Vector:
    """A trainer with one thing that is averaged, of two kinds, and one that is not."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.arrays = {
            "w": rng.normal(size=(2, 3)).astype(np.float32),
            "scale": rng.normal(size=()),
            "count": np.array(float(seed)),
        }

    def networks(self):
        return dict(self.arrays)

    def fates(self):
        return {"w": "averaged", "scale": "averaged", "count": "local", "optimizer.m": "local"}

    def load_networks(self, arrays):
        for name in self.arrays:
            self.arrays[name] = np.array(arrays[name])

    def learn(self, rng):
        """Local progress, and what it was in float64."""
        before = self.arrays["w"].astype(np.float64)
        step = rng.normal(size=(2, 3)).astype(np.float32)
        self.arrays["w"] = self.arrays["w"] + step
        return self.arrays["w"] - before


class Witness(Mixer):
    """Notes which models are mixed, and does the sum over in float64."""

    def _mix(self, models):
        rounds = {peer: int(slot.leaf(ROUND)[0]) for peer, slot in models.items()}
        assert set(rounds.values()) <= {self.round}, "a model of another round"
        assert sorted(rounds) == in_peers(self._graph, self.round, self._group, self._groups)
        self.world.mixes.append((self._group, self.round))
        mine = self._mine["w"].astype(np.float64)
        theirs = [slot.leaf("w").reshape(2, 3).astype(np.float64) for slot in models.values()]
        for peer, slot in models.items():
            pushed = self.world.pushed[peer, self.round]
            assert np.array_equal(slot.leaf("w").reshape(2, 3), pushed), "not what was pushed"
        move = sum(x - mine for x in theirs) / (len(theirs) + 1)
        self.world.moves[self._group, self.round] = move
        self.world.expected[self._group] += move
        super()._mix(models)

    def _begin_round(self, version):
        super()._begin_round(version)
        if self._pushed == self.round:
            key = self._group, self.round
            again = self.world.pushed.setdefault(key, self._mine["w"].copy())
            assert np.array_equal(again, self._mine["w"]), "two models for one round"


def models_of(trainer):
    """What it describes of all that it learns."""
    fates = trainer.fates()
    arrays = trainer.networks().items()
    return {name: Model(leaf(a.shape, a.dtype), fates[name]) for name, a in arrays}


class World:
    """Mixers of several groups in one thread, over the memory transport."""

    def __init__(self, groups, graph="complete", every=1, patience=float("inf"), transport=Memory):
        self.groups, self.graph, self._transport = groups, graph, transport
        self._arguments = {"graph": graph, "every": every, "patience": patience}
        self.trainers = [Vector(seed) for seed in range(groups)]
        self.versions = [0] * groups
        self.did = [None] * groups
        self.mixes, self.moves, self.pushed = [], {}, {}
        self.expected = [t.arrays["w"].astype(np.float64) for t in self.trainers]
        """what each should be: its start, its progress, and the moves of all rounds"""
        self.progress = np.mean(self.expected, axis=0)
        """the mean of the starts and of all progress"""
        self._rng = np.random.default_rng(7)
        self._connect()
        for mixer in self.mixers:
            mixer.begin()

    def _connect(self):
        self.transport = transport = self._transport()
        layout = model_layout(models_of(self.trainers[0]))
        pairs = edges(self.graph, self.groups)
        conduits = {(i, j): Conduit(f"models-{i}-{j}", "queue", layout) for i, j in pairs}
        self.mixers = []
        for g, trainer in enumerate(self.trainers):
            mixer = Witness(
                trainer, g, self.groups,
                {j: transport.outbox(c) for (i, j), c in conduits.items() if i == g},
                {i: transport.inbox(c) for (i, j), c in conduits.items() if j == g},
                **self._arguments,
            )  # fmt: skip
            mixer.world = self
            self.mixers.append(mixer)

    def step(self, g, learn=True):
        """One update, unless the group waits; then what its mixer does."""
        if self.did[g] is not NO_MODEL:
            if learn:
                progress = self.trainers[g].learn(self._rng)
                self.expected[g] += progress
                self.progress = self.progress + progress / self.groups
            self.versions[g] += 1
        self.did[g] = self.mixers[g].step(self.versions[g])
        return self.did[g]

    def restart(self):
        """All from their states, as a checkpoint holds them; conduits are new."""
        states = []
        for mixer in self.mixers:
            arrays = {}
            states.append(decode(encode(mixer.state(), "mixer", "", arrays), arrays))
        self.transport.close()
        self._connect()
        for mixer, state in zip(self.mixers, states, strict=True):
            mixer.load_state(state)
        self.did = [None] * self.groups

    def even_out(self):
        """Let the groups that are behind do the rounds that others have done, and no more."""
        target = max(mixer.round for mixer in self.mixers)
        for _ in range(1000):
            behind = [g for g in range(self.groups) if self.mixers[g].round < target]
            if not behind:
                return
            for g in range(self.groups):
                if g in behind:
                    self.step(g, learn=False)
                else:  # it takes in and gives back, as it does in every step
                    self.mixers[g]._push_again()
                    self.mixers[g]._receive()
        raise AssertionError(f"rounds {[m.round for m in self.mixers]} never even out")

    @property
    def mean(self):
        return np.mean([t.arrays["w"].astype(np.float64) for t in self.trainers], axis=0)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 13])
def test_weights_are_doubly_stochastic_so_the_mean_is_kept(graph, groups):
    for round in range(8):
        W = np.zeros((groups, groups))
        for i in range(groups):
            peers = in_peers(graph, round, i, groups)
            assert i not in peers
            assert all(i in out_peers(graph, round, p, groups) for p in peers)
            assert all((p, i) in edges(graph, groups) for p in peers)
            for p in [i, *peers]:
                W[i, p] = 1 / (len(peers) + 1)
        np.testing.assert_allclose(W.sum(0), 1.0)
        np.testing.assert_allclose(W.sum(1), 1.0)


def test_the_hop_of_the_exponential_graph_doubles_and_begins_anew():
    hops = [out_peers("exponential", r, 0, 8)[0] for r in range(5)]
    assert hops == [1, 2, 4, 1, 2]


def test_averaging_is_the_mean_of_one_model_of_each_group():
    world = World(4, "complete", patience=0)
    starts = np.mean([t.arrays["scale"] for t in world.trainers])
    for g in [0, 1, 2, 3, 2, 1, 0]:
        world.step(g, learn=False)
    assert world.mixes == [(3, 0), (2, 0), (1, 0), (0, 0)]
    for trainer in world.trainers:
        np.testing.assert_allclose(trainer.arrays["w"], world.progress, rtol=1e-6)
        assert float(trainer.arrays["scale"]) == pytest.approx(starts, rel=1e-14)
    assert [float(t.arrays["count"]) for t in world.trainers] == [0, 1, 2, 3], "a local one moved"


def test_progress_made_while_models_travel_is_kept():
    world = World(2)
    world.step(0)
    start = world.pushed[0, 0].astype(np.float64)
    for _ in range(5):
        world.step(0)
    made = world.trainers[0].arrays["w"] - start
    world.step(1)
    other = world.pushed[1, 0].astype(np.float64)
    assert world.step(0, learn=False) is MIX
    after = world.trainers[0].arrays["w"]
    np.testing.assert_allclose(after, (start + other) / 2 + made, rtol=1e-5, atol=1e-6)


def test_a_move_is_rounded_once():
    now = np.array([1.0, 2.0**24], np.float32)
    assert moved(now, now, [now, now]).tolist() == now.tolist()
    assert moved(now, now, [now + 3, now]).dtype == np.float32
    third = moved(np.zeros((), np.float64), np.zeros(()), [np.ones(1), np.zeros(1)])
    assert third.shape == ()
    assert float(third) == pytest.approx(1 / 3)


@pytest.mark.parametrize("groups", [2, 3, 4, 7])
def test_gossip_on_a_ring_mixes_as_its_matrix_says(groups):
    world = World(groups, "ring", patience=0)
    x = np.stack([t.arrays["w"].astype(np.float64) for t in world.trainers])
    W = 0.5 * (np.eye(groups) + np.roll(np.eye(groups), 1, axis=0))
    while min(m.round for m in world.mixers) < 12:
        for g in range(groups):
            if world.mixers[g].round < 12:
                world.step(g, learn=False)
    before, x = x, np.tensordot(np.linalg.matrix_power(W, 12), x, axes=1)
    for trainer, row in zip(world.trainers, x, strict=True):
        np.testing.assert_allclose(trainer.arrays["w"], row, atol=1e-5)
    rate = np.sort(np.abs(np.linalg.eigvals(W)))[-2]
    spread = [np.linalg.norm(y - y.mean(0)) for y in (before, x)]
    learnt = np.stack([t.arrays["w"] for t in world.trainers])
    assert np.linalg.norm(learnt - learnt.mean(0)) <= rate**12 * spread[0] + 1e-5
    assert spread[1] < 0.5 * spread[0]


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_the_exponential_graph_averages_exactly_in_log2_rounds(groups):
    world = World(groups, "exponential", patience=0)
    rounds = groups.bit_length() - 1
    while min(m.round for m in world.mixers) < rounds:
        for g in range(groups):
            if world.mixers[g].round < rounds:
                world.step(g, learn=False)
    for trainer in world.trainers:
        np.testing.assert_allclose(trainer.arrays["w"], world.progress, atol=1e-6)


@dataclass(frozen=True)
class Case:
    groups: int
    graph: str
    every: int
    patience: float
    seed: int
    weights: tuple
    restarts: tuple


@st.composite
def cases(draw):
    groups = draw(st.integers(2, 6))
    return Case(
        groups=groups,
        graph=draw(st.sampled_from(GRAPHS)),
        every=draw(st.integers(1, 4)),
        patience=draw(st.sampled_from([0, 1, 3, float("inf")])),
        seed=draw(st.integers(0, 2**32 - 1)),
        weights=tuple(
            draw(st.lists(st.sampled_from([0.05, 0.3, 1.0]), min_size=groups, max_size=groups))
        ),
        restarts=tuple(draw(st.lists(st.integers(0, 300), max_size=4))),
    )


@examples(150)
@given(cases())
@example(Case(5, "exponential", 1, 0, 0, (0.05, 0.05, 0.05, 0.05, 1.0), (249,)))
def test_in_any_order_and_over_restarts_the_mean_is_kept_and_no_model_used_twice(case):
    world = World(case.groups, case.graph, case.every, case.patience)
    draw = random.Random(case.seed)
    for tick in range(300):
        if tick in case.restarts:
            world.restart()
        (g,) = draw.choices(range(case.groups), case.weights)
        did = world.step(g)
        assert case.patience < float("inf") or did is not NO_MODEL, "an asynchronous group waited"
    assert len(set(world.mixes)) == len(world.mixes), "a round was mixed twice"
    for g, mixer in enumerate(world.mixers):
        rounds = [r for group, r in world.mixes if group == g]
        assert rounds == list(range(mixer.round)), "rounds out of order"
        np.testing.assert_allclose(world.trainers[g].arrays["w"], world.expected[g], atol=1e-4)
        assert mixer.round <= world.versions[g] / case.every
    world.even_out()
    assert max(m.round for m in world.mixers) > 0 or case.patience > 0
    for r in range(world.mixers[0].round):
        total = sum(world.moves[g, r] for g in range(case.groups))
        assert np.abs(total).max() < 1e-12, "the moves of a round do not add up to 0"
    np.testing.assert_allclose(world.mean, world.progress, atol=1e-5)


@pytest.mark.parametrize("graph", GRAPHS)
def test_models_travel_through_shared_memory_as_well(graph):
    world = World(3, graph, transport=Shm)
    draw = random.Random(1)
    for tick in range(200):
        if tick == 100:
            world.restart()
        world.step(draw.randrange(3))
    world.even_out()
    world.transport.close()
    assert world.mixers[0].round > 10
    np.testing.assert_allclose(world.mean, world.progress, atol=1e-5)


@pytest.mark.parametrize("graph", GRAPHS)
def test_rounds_come_every_so_many_updates_where_nobody_is_slow(graph):
    world = World(4, graph, every=3)
    for _ in range(30):
        for g in range(4):
            world.step(g)
    assert all(mixer.round >= 9 for mixer in world.mixers)
    assert all(mixer.round <= 10 for mixer in world.mixers)


@pytest.mark.parametrize("graph", GRAPHS)
def test_an_asynchronous_group_never_waits_for_one_that_stands_still(graph):
    world = World(4, graph)
    for _ in range(50):
        for g in (0, 1, 3):
            assert world.step(g) is not NO_MODEL
    assert world.versions == [50, 50, 0, 50]
    assert all(mixer.round < 4 for mixer in world.mixers)


def test_a_model_is_not_overwritten_while_its_receiver_needs_it_and_that_is_counted():
    world = World(3, "ring")
    for _ in range(10):
        world.step(0)
        world.step(2)
    assert world.mixers[0].round == 1
    assert world.mixers[0].skipped == 9 - 1
    world.step(1)
    assert (1, 0) in world.mixes


@pytest.mark.parametrize(("patience", "updates"), [(0, 2), (1, 3), (4, 6)])
def test_a_learner_waits_once_its_patience_is_over(patience, updates):
    world = World(2, every=2, patience=patience)
    while world.step(0) is not NO_MODEL:
        assert world.versions[0] < 20
    assert world.versions[0] == updates
    for _ in range(5):
        assert world.step(0) is NO_MODEL
    world.step(1)
    world.step(1)
    assert world.step(0) is MIX
    assert world.versions[0] == updates


def test_a_round_that_comes_again_is_dropped():
    world = World(2, patience=0)
    world.step(0)
    assert world.step(1) is MIX
    world.restart()
    world.step(0, learn=False)  # both push round 0 again; only group 0 still wants it
    for _ in range(3):
        world.step(1)
        world.step(0)
    assert sorted(world.mixes)[:2] == [(0, 0), (0, 1)]
    assert len(set(world.mixes)) == len(world.mixes)
    assert world.mixers[1].dropped == 1
    assert world.mixers[0].round > 1


def groups_of(algorithm, groups, learners=1, relax="sync", **join):
    how = "gossip" if join.get("graph", "complete") != "complete" else "average"
    scale = ScaleConfig(
        engine="local", actors=2, envs_per_actor=4, rollout_length=8, groups=groups,
        learners=learners, relax=relax,
    )  # fmt: skip
    config = replace(
        config_for(algorithm, scale=scale),
        join=JoinConfig(**({"every": 1} | join if groups > 1 else {})),
        relax=RelaxConfig(join=how if groups > 1 else None),
    )
    return assemblies(config, toy("Chain"))


def begin(algorithm, groups, **join):
    """Whole groups over one transport, in this process."""
    transport = Memory()
    built = [assemble(joined, transport) for joined in groups_of(algorithm, groups, **join)]
    for group in built:
        group.learner.begin()
    return built, transport


SMALL_PPO = PPO(epochs=2, minibatches=2, normalise_observation=True)
SMALL_DQN = DQN(batch_size=16, warmup=64, capacity=256, new_steps=16, learning_rate=0.01)


@pytest.mark.parametrize("algorithm", [SMALL_PPO, SMALL_DQN], ids=["ppo", "dqn"])
@pytest.mark.parametrize("order", range(3))
def test_synchronous_groups_have_one_model_after_every_round(algorithm, order):
    built, transport = begin(algorithm, 3, every=2, patience=0)
    roles = [role for group in built for role in group.roles]
    learners = [group.learner for group in built]
    driver, after, waited = Shuffled(roles, order), {}, False
    while min(learner.version for learner in learners) < 7:
        did = driver.step()
        waited |= did is NO_MODEL
        if did is MIX:
            learner = roles[driver.at]
            g = learners.index(learner)
            assert learner.version == 2 * learner._mixer.round
            after.setdefault(learner.version, []).append(copy.deepcopy(learner.networks()))
            newest = transport._newest[f"g{g}.snapshots"]
            assert newest._version == learner.version, "the mixed model was not published"
            params = learner._trainer.params(learner.version).flat
            assert np.array_equal(newest._params.flat, params), (
                "it was published before it was mixed"
            )
    assert waited, "groups that are in step must wait for each other"
    fates = learners[0]._trainer.state.fates()
    for version in (2, 4, 6):
        for name, fate in fates.items():
            arrays = [networks[name] for networks in after[version] if name in networks]
            if fate == "averaged":
                assert len(arrays) == 3
                np.testing.assert_allclose(arrays[1], arrays[0], rtol=1e-6, atol=1e-7)
                np.testing.assert_allclose(arrays[2], arrays[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("graph", GRAPHS)
def test_asynchronous_groups_learn_on_while_one_of_them_stands_still(graph):
    built, _ = begin(SMALL_PPO, 3, graph=graph, patience=math.inf)
    driver = Shuffled([role for group in built[:2] for role in group.roles], 1)
    while min(group.learner.version for group in built[:2]) < 12:
        assert driver.step() is not NO_MODEL
    assert built[2].learner.version == 0
    late = Shuffled(built[2].roles, 2)
    while built[2].learner._mixer.round == 0:
        late.step()


def test_groups_begin_alike_and_go_their_own_ways():
    built, transport = begin(SMALL_PPO, 2, every=1000)
    start = [copy.deepcopy(group.learner.networks()) for group in built]
    for name, array in start[0].items():
        assert np.array_equal(array, start[1][name]), "groups must begin with the same weights"
    driver = Shuffled([role for group in built for role in group.roles], 0)
    while min(group.learner.version for group in built) < 1:
        driver.step()
    actions = [transport._pipes[f"g{g}.rollouts-0"].memory["action"][0] for g in range(2)]
    assert not np.array_equal(*actions), "groups that act alike learn nothing from each other"
    draws = {
        joined.actor(i, Memory())._rng.integers(2**60)
        for joined in groups_of(SMALL_PPO, 3)
        for i in range(2)
    }
    assert len(draws) == 6


@pytest.mark.parametrize(
    "algorithm", [replace(SMALL_PPO, normalise_reward=True), SMALL_DQN], ids=["ppo", "dqn"]
)
def test_every_fate_is_honoured(algorithm):
    """Groups that moved apart, then one round: averaged things meet, local ones stay."""
    built, _ = begin(algorithm, 2, every=3, patience=0)
    learners = [group.learner for group in built]
    roles = [role for group in built for role in group.roles]
    driver = Shuffled(roles, 3)
    before, after = {}, {}
    while len(after) < 2:
        did, at = driver.step(), roles[driver.at]
        if did is UPDATE and at.version == 3:
            before[learners.index(at)] = copy.deepcopy((at.networks(), at._trainer.state.state()))
        elif did is MIX and at.version == 3:
            after[learners.index(at)] = copy.deepcopy((at.networks(), at._trainer.state.state()))

    def of(told, name):
        kind = name.removeprefix("optimizer.")
        (optimizer,) = told[1]["optimizers"].values()
        return told[0][name] if kind == name else optimizer["moments"][kind]

    trainer = learners[0]._trainer
    for name, fate in trainer.state.fates().items():
        old, new = ([of(told[g], name) for g in range(2)] for told in (before, after))
        if fate == "local":
            assert all(map(np.array_equal, old, new)), f"{name} is local, but moved"
        else:
            mean = np.mean(np.asarray(old, np.float64), axis=0)
            np.testing.assert_allclose(new, [mean, mean], rtol=1e-6, atol=1e-7, err_msg=name)
    apart = [
        n for n in averaged(trainer.state) if not np.array_equal(before[0][0][n], before[1][0][n])
    ]
    assert {n.split(".")[0] for n in apart} >= (
        {"policy", "value", "obs", "return"} if algorithm.name == "ppo" else {"q", "target"}
    ), "groups did not move apart, so this test says nothing"


def test_a_variance_stays_one_where_groups_moved_far_apart():
    """The difference of old models may be more than what is left."""
    joined = groups_of(SMALL_PPO, 2)[0]
    trainer = joined.config.algorithm.trainer(joined.spec)
    low = trainer.state.networks() | {"obs.variance": np.full((5,), -1.0)}
    trainer.state.load_networks(low)
    assert (trainer.state.networks()["obs.variance"] == 0).all()
    assert np.isfinite(trainer.params(0).flat).all()


def test_whole_groups_go_on_from_the_middle_of_a_round():
    built, _ = begin(SMALL_PPO, 3, every=2, patience=1)
    driver = Shuffled([role for group in built for role in group.roles], 5)
    mixers = [group.learner._mixer for group in built]
    while not (
        len({mixer.round for mixer in mixers}) > 1
        and max(mixer.round for mixer in mixers) > 2
        and all(group.learner.between_batches for group in built)
    ):
        driver.step()
    states, networks = [], []
    for group in built:
        arrays, state = {}, group.learner.state() | {"batches": None}
        states.append(decode(encode(state, "learner", "", arrays), arrays))
        networks.append(copy.deepcopy(group.learner.networks()))
    rounds = [mixer.round for mixer in mixers]
    again, transport = [], Memory()
    for joined in groups_of(SMALL_PPO, 3, every=2, patience=1):
        again.append(assemble(joined, transport))
    for group, state in zip(again, states, strict=True):
        group.learner.load_state(state)
        group.buffer._balance.base = group.learner.version
    for group, learnt in zip(again, networks, strict=True):
        for name, array in group.learner.networks().items():
            assert np.array_equal(array, learnt[name])
    assert [group.learner._mixer.round for group in again] == rounds
    driver = Shuffled([role for group in again for role in group.roles], 6)
    while min(group.learner._mixer.round for group in again) < max(rounds) + 3:
        driver.step()


def test_a_learner_that_was_saved_while_it_waited_asks_for_its_next_batch_once_it_has_mixed():
    built, _ = begin(SMALL_PPO, 2, every=2, patience=0)
    waiting, working = (Shuffled(group.roles, 1) for group in built)
    while waiting.step() is not NO_MODEL:
        pass
    while not (working.step() is UPDATE and built[1].learner.version == 2):
        pass
    states = [group.learner.state() for group in built]
    transport = Memory()
    learners = [
        joined.learner(transport) for joined in groups_of(SMALL_PPO, 2, every=2, patience=0)
    ]
    for learner, state in zip(learners, states, strict=True):
        learner.load_state(state)
    assert [learner._batches.out for learner in learners] == [0, 0]
    while any(learner._mixer.round == 0 for learner in learners):
        for learner in learners:
            learner.step()
    assert [learner._batches.out for learner in learners] == [1, 1]
    assert [learner._batches.tag for learner in learners] == [2, 2]


def test_conduits_have_the_prefix_of_their_group_and_roles_have_not():
    first, second = groups_of(SMALL_PPO, 2, learners=2)
    assert role_names(first) == role_names(second)
    assert End("g1.rollouts-0", "send") in ends(second, "actor-0")
    assert End("g1.batches-1", "send") in ends(second, "buffer")
    assert End("g1.snapshots", "send") in ends(second, "learner")
    assert End("models-1-0", "send") in ends(second, "learner")
    assert End("models-0-1", "receive") in ends(second, "learner")
    assert not any("models" in name for name, *_ in ends(second, "learner-1"))
    assert End("rollouts-0", "send") in ends(groups_of(SMALL_PPO, 1)[0], "actor-0")


def test_one_evaluator_serves_all_groups():
    config = groups_of(SMALL_PPO, 2)[0].config
    config = replace(config, eval=replace(config.eval, every=1))
    groups = assemblies(config, toy("Chain"))
    assert ["evaluator" in role_names(joined) for joined in groups] == [True, False]


def test_the_env_to_look_at_is_one_and_closed_where_roles_make_their_own():
    made, closed = [], []

    def make(num_envs):
        env = toy("Chain")(num_envs)
        env.close = lambda: closed.append(num_envs)
        made.append(num_envs)
        return env

    config = groups_of(SMALL_PPO, 2)[0].config
    joined = assemblies(config, make)
    assert made == closed == [1], "some envs take long to make"
    assert [(one.spec.envs, one.spare) for one in joined] == [(4, []), (4, [])]


def drive(roles, updates):
    """Until the last of them has made so many."""
    while roles[-1].version < updates:
        did = [bool(role.step()) for role in roles]
        if not any(did):
            time.sleep(0.001)


def test_all_learners_of_a_group_take_over_what_the_first_has_mixed():
    transport, updates = Memory(), 6
    algorithm = PPO(epochs=1, minibatches=1)
    learners, roles = [], []
    for joined in groups_of(algorithm, 2, learners=2, every=2, patience=0):
        team = Threads(0, 2)
        first = joined.learner(transport, 0, team)
        learners += [first, joined.learner(transport, 1, team.other(1))]
        actors = [joined.actor(i, transport) for i in range(2)]
        roles.append([*actors, joined.buffer(transport), first])

    for learner in learners:
        learner.begin()
    sets = [*roles, [learners[1]], [learners[3]]]
    threads = [threading.Thread(target=drive, args=(own, updates), daemon=True) for own in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the groups stand still"
    assert [learner.version for learner in learners] == [updates] * 4
    assert learners[0]._mixer.round == 2, "the third round is due now, and not done"
    for first, second in (learners[:2], learners[2:]):
        for name, array in first.networks().items():
            assert np.array_equal(array, second.networks()[name]), name


@pytest.mark.parametrize("relax", ["sync", "one_step"])
def test_while_the_first_learner_waits_for_other_groups_no_other_one_begins_a_batch(relax):
    """It would stand in the middle of an update, and could not rest for a checkpoint."""
    transport = Memory()
    algorithm = PPO(epochs=1, minibatches=1)
    joined = groups_of(algorithm, 2, learners=2, relax=relax, every=2, patience=0)[0]
    team = Threads(0, 2)
    first, second = (joined.learner(transport, i, t) for i, t in ((0, team), (1, team.other(1))))
    roles = [*(joined.actor(i, transport) for i in range(2)), joined.buffer(transport)]
    first.begin()
    second.begin()
    thread = threading.Thread(target=lambda: drive([second], 2), daemon=True)
    thread.start()
    while first.step() is not NO_MODEL:
        for role in roles:
            role.step()
    thread.join(30)
    assert first.version == second.version == 2
    for _ in range(300):
        for role in roles:
            role.step()
        assert first.step() is NO_MODEL
        assert second.step() is NO_BATCH
