"""Prioritised replay against the formulas of its papers, and through the roles."""

import copy
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji.algorithm import Lanes, PriorityChooser
from tianji.algorithms.dqn import DQN
from tianji.buffer import PRIORITIZE
from tianji.build import build
from tianji.driver import Serial, Shuffled
from tianji.env import make_env
from tianji.errors import Failure, Refusal
from tianji.learner import UPDATE
from tianji.prioritized import LEAST, RECORDED, Prioritized, WeightedTransitions, weights
from tianji.store import numbers
from tianji.testing import check_algorithm
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import GAP, Row, leaf, rollout_layout, sha256


class Feed:
    """Lanes filled slot by slot, as actors that record values would."""

    def __init__(self, lanes, slots, T, B, rng):
        row = Row({"obs": leaf((1,), np.float32)}, leaf((), np.int64), RECORDED, {})
        layout = rollout_layout(row, T, B)
        self.memory = [
            {k: np.zeros((slots, *v.shape), v.dtype) for k, v in layout.items()}
            for _ in range(lanes)
        ]
        self.lanes = Lanes(tuple(self.memory))
        self.slots, self.T, self.B, self.rng = slots, T, B, rng
        self.rows = [[] for _ in range(lanes)]
        """of each lane, all rows so far: a dict of [B] arrays each"""

    def add(self, lane, gap=False, valid=0.8):
        slot = len(self.rows[lane]) // self.T % self.slots
        memory, rng, shape = self.memory[lane], self.rng, (self.T, self.B)
        memory["valid"][slot] = rng.random(shape) < valid
        memory["terminated"][slot] = (rng.random(shape) < 0.2) & memory["valid"][slot]
        for name in ("reward", "extras.q", "extras.q_best"):
            memory[name][slot] = rng.normal(size=shape)
        memory["observation.obs"][slot] = rng.normal(size=(self.T + 1, self.B, 1))
        memory["head"][slot, GAP] = gap
        for t in range(self.T):
            row = {k: v[slot, t].copy() for k, v in memory.items() if v.shape[1:3] == shape}
            self.rows[lane].append(row | {"gap": gap and t == 0, "at": (slot, t)})
        return slot


def seen_error(rows, place, b, n, gamma, largest):
    """|n-step return + discount q_best of what follows - q|, by the words; None: not known yet."""
    if place + n >= len(rows):
        return None
    total, discount = 0.0, 1.0
    for j in range(n):
        row = rows[place + j]
        if j > 0 and (row["gap"] or not row["valid"][b]):
            break
        total += discount * row["reward"][b]
        discount *= gamma
        after = place + j + 1
        if row["terminated"][b]:
            discount = 0.0
            break
    if discount > 0 and rows[after]["gap"]:
        return largest
    return abs(total + discount * rows[after]["extras.q_best"][b] - rows[place]["extras.q"][b])


def make(feed, held, batch=16, n=1, **kwargs):
    given = {"gamma": 0.9, "alpha": 0.6, "beta": 0.4, "beta_updates": 0, "initial": "actor"}
    return Prioritized(feed.lanes, batch=batch, slots=held, n=n, **given | kwargs)


def out_of(store):
    selection = numbers(("lane", "step"), store._batch) | weights(store._batch)
    return {k: np.zeros(v.shape, v.dtype) for k, v in selection.items()}


def priorities(store, feed):
    """[lane][slot, t, b]: p^alpha as the tree has it."""
    shape = (len(feed.memory), feed.slots, feed.T, feed.B)
    return store._tree[np.arange(np.prod(shape))].reshape(shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_first_priorities_are_the_errors_that_actors_saw(data):
    draw = data.draw
    T, B, n = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lanes, held = draw(st.integers(1, 3)), draw(st.integers(6, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    feed = Feed(lanes, held + 2, T, B, rng)
    store = make(feed, held, n=n)
    for _ in range(draw(st.integers(1, 15))):
        lane = int(rng.integers(lanes))
        store.add(lane, feed.add(lane, gap=bool(rng.random() < 0.2)))
    expected = np.zeros((lanes, held + 2, T, B))
    for lane, rows in enumerate(feed.rows):
        for place in range(max(0, len(rows) - held * T), len(rows)):
            for b in range(B):
                error = seen_error(rows, place, b, n, 0.9, store._largest)
                if error is not None and rows[place]["valid"][b]:
                    expected[lane, *rows[place]["at"], b] = (error + LEAST) ** 0.6
    np.testing.assert_allclose(priorities(store, feed), expected, rtol=1e-4, atol=1e-5)
    assert ((priorities(store, feed) > 0) == (expected > 0)).all()


@pytest.mark.parametrize("n", [1, 3])
def test_with_the_largest_first_only_complete_windows_of_valid_steps_have_a_priority(n):
    feed = Feed(1, 6, 4, 2, np.random.default_rng(0))
    store = make(feed, 4, n=n, initial="max", alpha=1.0)
    for _ in range(6):
        store.add(0, feed.add(0))
    has = priorities(store, feed)[0] > 0
    rows = feed.rows[0]
    for place, row in enumerate(rows):
        there = place >= 8 and place < len(rows) - (n - 1)
        assert (has[row["at"]] == (row["valid"] & there)).all()
    told = out_of(store)
    store.choose(feed.rng, told)
    store.prioritize(told, np.full(16, 5.0, np.float32))
    store.add(0, feed.add(0, valid=1.1))
    newest = priorities(store, feed)[0][rows[-n]["at"]]
    assert newest == pytest.approx(5.0, abs=1e-5)


def test_steps_are_drawn_in_proportion_to_their_priority_and_weighed_by_the_formula():
    rng = np.random.default_rng(3)
    feed = Feed(2, 5, 4, 3, rng)
    store = make(feed, 4, batch=500, alpha=0.7, beta=0.5)
    for _ in range(5):
        for lane in (0, 1):
            store.add(lane, feed.add(lane))
    share = priorities(store, feed).reshape(-1)
    P = share / share.sum()
    counts, told = np.zeros(len(share)), out_of(store)
    for _ in range(200):
        store.choose(rng, told)
        drawn = told["lane"] * (len(share) // 2) + told["step"]
        np.add.at(counts, drawn, 1)
        M = np.count_nonzero(share)
        weight = (M * P[drawn]) ** -0.5
        np.testing.assert_allclose(told["weight"], weight / weight.max(), rtol=1e-5)
    assert (counts[share == 0] == 0).all()
    expected = 100_000 * P[share > 0]
    chi2 = ((counts[share > 0] - expected) ** 2 / expected).sum()
    freedom = np.count_nonzero(share) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_one_step_is_drawn_from_each_equal_share_of_the_sum():
    feed = Feed(1, 5, 8, 4, np.random.default_rng(4))
    store = make(feed, 4, batch=32)
    for _ in range(4):
        store.add(0, feed.add(0))
    ends, told = np.cumsum(priorities(store, feed).reshape(-1)), out_of(store)
    store.choose(feed.rng, told)
    ends = np.append(0, ends) * (32 / ends[-1])
    for i, step in enumerate(told["step"]):
        assert ends[step] < i + 1 + 1e-9
        assert ends[step + 1] > i - 1e-9


def test_beta_becomes_1_over_the_choices_that_were_made():
    feed = Feed(1, 4, 4, 2, np.random.default_rng(5))
    store = make(feed, 3, beta=0.4, beta_updates=4)
    for _ in range(2):
        store.add(0, feed.add(0, valid=1.1))
    betas = []
    for _ in range(6):
        betas.append(store.beta)
        store.choose(feed.rng, out_of(store))
    assert betas == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0])
    assert make(feed, 3, beta=0.4, beta_updates=0).beta == 0.4


def test_what_a_learner_tells_becomes_the_priority_of_the_steps_it_was_about():
    feed = Feed(2, 6, 4, 2, np.random.default_rng(6))
    store = make(feed, 4)
    for _ in range(4):
        for lane in (0, 1):
            store.add(lane, feed.add(lane))
    told = out_of(store)
    store.choose(feed.rng, told)
    before = priorities(store, feed)
    store.prioritize(told, np.arange(16, dtype=np.float32))
    after = priorities(store, feed).reshape(2, -1)
    for i in range(16):
        again = (told["lane"] == told["lane"][i]) & (told["step"] == told["step"][i])
        last = np.flatnonzero(again)[-1]
        value = after[told["lane"][i], told["step"][i]]
        assert value == pytest.approx((last + LEAST) ** 0.6)
    changed = (after != before.reshape(2, -1)).sum()
    assert changed <= len({*zip(told["lane"].tolist(), told["step"].tolist(), strict=True)})


def test_steps_whose_slot_is_retired_or_holds_others_by_now_are_left_alone():
    feed = Feed(1, 5, 2, 2, np.random.default_rng(7))
    store = make(feed, 3, batch=64)
    for _ in range(3):
        store.add(0, feed.add(0, valid=1.1))
    told = out_of(store)
    store.choose(feed.rng, told)
    store.add(0, feed.add(0, valid=1.1))
    retired = told["step"] < 4
    assert retired.any()
    assert not retired.all()
    store.prioritize(told, np.full(64, 7.0, np.float32))
    assert (priorities(store, feed)[0, 0] == 0).all()
    for _ in range(2):  # slot 0 holds another rollout now
        store.add(0, feed.add(0, valid=1.1))
    before = priorities(store, feed)[0, 0].copy()
    store.prioritize(told, np.full(64, 9.0, np.float32))
    assert np.array_equal(priorities(store, feed)[0, 0], before)
    assert store._largest == 7.0


def test_a_priority_that_is_not_finite_is_refused_and_none_at_all_is_a_failure():
    feed = Feed(1, 4, 2, 2, np.random.default_rng(8))
    store = make(feed, 3)
    with pytest.raises(Failure, match="no step that replay holds has a priority"):
        store.choose(feed.rng, out_of(store))
    for _ in range(3):
        store.add(0, feed.add(0, valid=1.1))
    told = out_of(store)
    store.choose(feed.rng, told)
    with pytest.raises(Failure, match="not finite"):
        store.prioritize(told, np.full(16, np.nan, np.float32))


def test_a_part_has_the_weights_of_what_was_chosen_and_the_rest_of_replay():
    feed = Feed(3, 5, 4, 2, np.random.default_rng(9))
    buffers, learners = make(feed, 4, n=2), WeightedTransitions(feed.lanes, 0.9, 2)
    assert isinstance(buffers, PriorityChooser)
    for _ in range(4):
        for lane in range(3):
            buffers.add(lane, feed.add(lane))
    told = out_of(buffers)
    buffers.choose(feed.rng, told)
    (part,) = learners.parts(told)
    assert np.array_equal(part.extras["weight"][0], told["weight"])
    assert part.extras["weight"].max() == 1.0
    for i, (lane, step) in enumerate(zip(told["lane"], told["step"], strict=True)):
        place, b = divmod(int(step), 2)
        row, after = feed.rows[lane][place], feed.rows[lane][place + 1]
        expected = row["reward"][b]
        if not row["terminated"][b] and after["valid"][b]:
            expected += 0.9 * after["reward"][b]
        assert part.reward[0, i] == pytest.approx(expected, abs=1e-6)


def test_a_store_that_loads_a_state_goes_on_exactly():
    def run(store, feed, rng, rounds):
        seen = []
        for _ in range(rounds):
            for lane in (0, 1):
                store.add(lane, feed.add(lane))
            told = out_of(store)
            fresh = store.choose(rng, told)
            store.prioritize(told, rng.random(16).astype(np.float32))
            seen.append((fresh, told["lane"].tolist(), told["step"].tolist(),
                         told["weight"].tolist()))  # fmt: skip
        return seen

    feed = Feed(2, 7, 3, 2, np.random.default_rng(10))
    store, other = (make(feed, 5, n=2, beta_updates=9) for _ in range(2))
    run(store, feed, np.random.default_rng(0), 6)
    other.load_state(copy.deepcopy(store.state()))
    memory, drawn = copy.deepcopy(feed.memory), copy.deepcopy(feed.rng)
    first = run(store, feed, np.random.default_rng(1), 5)
    for now, then in zip(feed.memory, memory, strict=True):
        for name, array in now.items():
            array[:] = then[name]
    feed.rng = drawn
    for rows in feed.rows:
        del rows[-15:]
    assert run(other, feed, np.random.default_rng(1), 5) == first


SMALL = DQN(batch_size=16, warmup=96, capacity=256, new_steps=16, prioritized=True)
CASES = {
    "actor": SMALL,
    "largest": replace(SMALL, initial="max", n_step=3),
    "often": replace(SMALL, new_steps=4, n_step=3, beta_updates=10),
    "all": replace(SMALL, noisy=True, distribution="c51", dueling=True, atoms=5),
}


def chain(num_envs):
    return make_env("toy/Chain", num_envs, {})


@pytest.mark.parametrize("name", CASES)
def test_prioritised_dqn_keeps_its_promises(name):
    check_algorithm(CASES[name], chain, updates=8)


@pytest.mark.parametrize("driver", [Serial, lambda roles: Shuffled(roles, 3)])
def test_every_update_is_told_to_the_buffer_before_the_next_batch_is_chosen(driver):
    built = build(config_for(SMALL), chain)
    built.learner.begin()
    store, events = built.buffer._chooser, []
    choose, prioritize = store.choose, store.prioritize
    store.choose = lambda rng, out: events.append("choose") or choose(rng, out)
    store.prioritize = lambda told, p: events.append("told") or prioritize(told, p)
    run_updates(built, driver(built.roles), 10)
    assert events[:18] == ["choose", "told"] * 9
    built.close()


def test_what_is_told_is_the_errors_of_the_steps_that_were_chosen():
    built = build(config_for(SMALL), chain)
    built.learner.begin()
    driver, kinds = Serial(built.roles), []
    run_updates(built, driver, 5)
    store = built.buffer._chooser
    selection = built.learner._batches.slot(0).arrays
    told = {name: selection[name].copy() for name in out_of(store)}
    expected = built.learner._trainer.priorities().copy()
    while (did := driver.step()) is not PRIORITIZE:
        kinds.append(did)
    assert UPDATE not in kinds
    leaves = store._leaves(told["lane"], told["step"])
    for i, place in enumerate(leaves):
        last = np.flatnonzero(leaves == place)[-1]
        assert store._tree[place] == pytest.approx((expected[last] + LEAST) ** 0.6, rel=1e-6), i
    built.close()


def test_a_run_that_loads_all_states_goes_on_exactly():
    def learnt(cut):
        built = build(config_for(CASES["often"]), chain)
        built.learner.begin()
        driver = Serial(built.roles)
        run_updates(built, driver, 10)
        if cut:
            while not built.learner.between_batches:
                driver.step()
            states = [role.state() for role in built.roles]
            memory = {
                name: {k: v.copy() for k, v in leaves.items()}
                for name, leaves in built.assembly.memory(built.transport).items()
            }
            built.close()
            built = build(config_for(CASES["often"]), chain)
            for name, leaves in built.assembly.memory(built.transport).items():
                for k, v in leaves.items():
                    v[...] = memory[name][k]
            for role, state in zip(built.roles, states, strict=True):
                role.load_state(state)
            driver = Serial(built.roles)
        run_updates(built, driver, 10)
        told = sha256(built.learner.networks()), built.buffer._chooser._tree.total
        built.close()
        return told

    assert learnt(cut=True) == learnt(cut=False)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prioritized": False, "alpha": 0.5}, "algorithm.alpha"),
        ({"prioritized": False, "initial": "max"}, "algorithm.initial"),
        ({"n_step": 12, "warmup": 96}, "104 steps"),
    ],
)
def test_what_would_do_nothing_or_is_too_early_is_refused(fields, word):
    with pytest.raises(Refusal, match=word):
        build(config_for(replace(SMALL, **fields)), chain)


class Behind:
    """Stands for another trainer or store, and lacks what that one has by this name."""

    def __init__(self, other, lacks=""):
        self._other, self._lacks = other, lacks

    def __getattr__(self, name):
        if name == self._lacks:
            raise AttributeError(name)
        return getattr(self._other, name)


@dataclass(frozen=True)
class Wrapped(DQN):
    lacks: str = ""

    def trainer(self, spec, device="cpu"):
        return Behind(super().trainer(spec, device), self.lacks)


def test_a_trainer_may_stand_for_another():
    """Python from 3.12 looks for a protocol's methods in the class alone, and finds none there."""
    check_algorithm(Wrapped(**asdict(SMALL)), chain, updates=8)


def test_priorities_that_nobody_gives_or_takes_are_refused(monkeypatch):
    lacking = Wrapped(**asdict(SMALL), lacks="priorities")
    with pytest.raises(Refusal, match=r"Behind has no priorities\(\), so nobody.*Write it, or let"):
        build(config_for(lacking), chain)
    monkeypatch.delattr(Prioritized, "prioritize")
    with pytest.raises(Refusal, match=r"Prioritized has no prioritize\(\)"):
        build(config_for(SMALL), chain)
