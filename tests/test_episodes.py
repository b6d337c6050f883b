"""Replay over whole episodes, against slow loops over the rows that were put in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji.algorithm import Lanes
from tianji.episodes import SELECTION, Episodes, PaddedEpisodes
from tianji.errors import Failure
from tianji.store import numbers
from tianji.types import GAP, VERSION, Row, leaf, rollout_layout


class Feed:
    """Lanes filled slot by slot with rows that can be told apart."""

    def __init__(self, lanes, slots, T, B, rng, frames=1):
        obs = leaf((2,), np.float32) if frames == 1 else leaf((1,), np.float32)
        once = {"memory": leaf((3,), np.float32)}
        if frames > 1:
            once["frames"] = leaf((frames - 1, 1), np.float32)
        layout = rollout_layout(
            Row({"obs": obs}, leaf((2,), np.int64), {"chance": leaf((), np.float32)}, once), T, B
        )
        self.memory = [
            {k: np.zeros((slots, *v.shape), v.dtype) for k, v in layout.items()}
            for _ in range(lanes)
        ]
        self.lanes = Lanes(tuple(self.memory), frames)
        self.slots, self.T, self.B, self.rng = slots, T, B, rng
        self.count = [0] * lanes
        self.rows = [[] for _ in range(lanes)]
        """of each lane, all rows that ever were: dicts of what each env did, and the gap"""

    def add(self, lane, valid=None, terminated=None, gap=False):
        memory, slot = self.memory[lane], self.count[lane] % self.slots
        rng, T, B = self.rng, self.T, self.B
        shape = memory["observation.obs"].shape[1:]
        memory["observation.obs"][slot] = rng.normal(size=shape)
        memory["action"][slot] = rng.integers(0, 9, (T, B, 2))
        memory["reward"][slot] = rng.normal(size=(T, B))
        memory["extras.chance"][slot] = rng.random((T, B))
        memory["valid"][slot] = rng.random((T, B)) < 0.85 if valid is None else valid
        ends = rng.random((T, B)) < 0.15 if terminated is None else terminated
        memory["terminated"][slot] = ends & memory["valid"][slot]
        memory["head"][slot, VERSION] = self.count[lane]
        memory["head"][slot, GAP] = gap
        for t in range(T):
            row = {k: memory[k][slot, t].copy() for k in ("action", "reward", "valid",
                   "terminated", "extras.chance")}  # fmt: skip
            row |= {"obs": memory["observation.obs"][slot, t].copy(), "gap": gap and t == 0}
            row |= {"next": memory["observation.obs"][slot, t + 1].copy()}
            row |= {"version": self.count[lane]}
            self.rows[lane].append(row)
        self.count[lane] += 1
        return slot

    def episodes(self, lane, b):
        """(first row, length) of all complete ones, by the words of the definition."""
        found, first = [], None
        for r, row in enumerate(self.rows[lane]):
            if first is not None and (row["gap"] or not row["valid"][b]):
                found.append((first, r - first))
                first = None
            if first is None and row["valid"][b]:
                first = r
            if row["terminated"][b]:
                found.append((first, r + 1 - first))
                first = None
        return found


def selection(store):
    return {k: np.zeros(v.shape, v.dtype) for k, v in numbers(SELECTION, store._batch).items()}


def drawn(store, rng):
    out = selection(store)
    fresh = store.choose(rng, out)
    return out, fresh


def filled(data):
    draw = data.draw
    T, B, lanes = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    held = draw(st.integers(3, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    feed = Feed(lanes, held + 2, T, B, rng)
    store = Episodes(feed.lanes, batch=16, slots=held)
    retired = []
    for _ in range(draw(st.integers(4, 20))):
        for lane in range(lanes):
            store.add(lane, feed.add(lane, gap=bool(rng.random() < 0.15)))
        retired += store.retired()
    expected = set()
    for lane in range(lanes):
        oldest = max(0, feed.count[lane] - held) * T
        for b in range(B):
            expected |= {(lane, b, r, n) for r, n in feed.episodes(lane, b) if r >= oldest}
    return feed, store, expected, retired, held


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_complete_episode_of_the_held_rollouts_is_drawn_and_no_other(data):
    feed, store, expected, retired, held = filled(data)
    assert store.episodes == len(expected)
    for lane, count in enumerate(feed.count):
        slots = [slot for i, slot in retired if i == lane]
        assert slots == [k % feed.slots for k in range(max(0, count - held))]
    if not expected:
        with pytest.raises(Failure, match="no episode is complete"):
            drawn(store, feed.rng)
        return
    seen = set()
    for _ in range(40):
        out, _ = drawn(store, feed.rng)
        rows = list(zip(*(out[k].tolist() for k in ("lane", "env", "row", "length")), strict=True))
        seen |= set(rows)
        assert len(expected) < 16 or len(set(rows)) == 16
    assert seen <= expected
    if len(expected) <= 32:
        assert seen == expected


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_part_is_the_rows_of_its_episodes_padded_to_the_longest(data):
    feed, store, expected, _, _ = filled(data)
    if not expected:
        return
    out, _ = drawn(store, feed.rng)
    (part,) = PaddedEpisodes(feed.lanes).parts(out)
    L, N = part.valid.shape
    assert out["length"].max() == L
    assert N == 16
    assert part.once == {}
    for i in range(N):
        lane, b, first, n = (int(out[k][i]) for k in ("lane", "env", "row", "length"))
        rows = feed.rows[lane][first : first + n]
        for t, row in enumerate(rows):
            np.testing.assert_array_equal(part.observation["obs"][t, i], row["obs"][b])
            np.testing.assert_array_equal(part.action[t, i], row["action"][b])
            assert part.reward[t, i] == row["reward"][b]
            assert part.extras["chance"][t, i] == row["extras.chance"][b]
            assert part.terminated[t, i] == row["terminated"][b]
            assert part.valid[t, i]
        for t in range(n, L + 1):
            np.testing.assert_array_equal(part.observation["obs"][t, i], rows[-1]["next"][b])
        assert not part.valid[n:, i].any()
        assert not part.terminated[n:, i].any()
        assert not part.reward[n:, i].any()
        assert part.versions[i] == rows[0]["version"]


def straight(T=4, B=1, held=3, slots=5):
    feed = Feed(1, slots, T, B, np.random.default_rng(0))
    return feed, Episodes(feed.lanes, batch=2, slots=held)


def lengths(store):
    return sorted(store._index[0][:, 2].tolist())


def test_an_episode_crosses_rollouts_and_waits_for_its_end():
    feed, store = straight()
    never, always = np.zeros((4, 1), bool), np.ones((4, 1), bool)
    store.add(0, feed.add(0, always, never, gap=True))
    store.add(0, feed.add(0, always, never))
    assert store.episodes == 0
    ends = np.array([[False], [True], [False], [False]])
    store.add(0, feed.add(0, always, ends))
    assert lengths(store) == [10]
    (part,) = PaddedEpisodes(feed.lanes).parts(drawn(store, feed.rng)[0])
    assert part.terminated[9].all()
    assert not part.terminated[:9].any()


def test_a_truncated_episode_ends_before_the_row_that_resets_and_a_value_follows():
    feed, store = straight()
    valid = np.array([[True], [True], [False], [True]])
    store.add(0, feed.add(0, valid, np.zeros((4, 1), bool), gap=True))
    assert lengths(store) == [2]
    (part,) = PaddedEpisodes(feed.lanes).parts(drawn(store, feed.rng)[0])
    assert not part.terminated.any()
    np.testing.assert_array_equal(part.observation["obs"][2, 0], feed.rows[0][2]["obs"][0])


def test_an_episode_whose_beginning_was_given_up_is_never_served():
    feed, store = straight()
    never, always = np.zeros((4, 1), bool), np.ones((4, 1), bool)
    for _ in range(4):
        store.add(0, feed.add(0, always, never))
    assert list(store.retired()) == [(0, 0)]
    ends = np.array([[True], [False], [True], [False]])
    store.add(0, feed.add(0, always, ends))
    assert lengths(store) == [2]  # the one of 17 rows has lost its first; the next is whole


def test_a_gap_ends_an_episode_and_begins_another():
    feed, store = straight()
    never, always = np.zeros((4, 1), bool), np.ones((4, 1), bool)
    store.add(0, feed.add(0, always, never, gap=True))
    store.add(0, feed.add(0, always, never, gap=True))
    assert lengths(store) == [4]
    (part,) = PaddedEpisodes(feed.lanes).parts(drawn(store, feed.rng)[0])
    np.testing.assert_array_equal(part.observation["obs"][4, 0], feed.rows[0][3]["next"][0])


def test_few_episodes_are_drawn_repeatedly_and_freshness_counts_each_once():
    feed, store = straight()
    ends = np.array([[True], [False], [False], [False]])
    store.add(0, feed.add(0, np.ones((4, 1), bool), ends, gap=True))
    _, fresh = drawn(store, feed.rng)
    assert fresh == 0.5
    assert store.share == 2.0
    assert drawn(store, feed.rng)[1] == 0.0


def test_slots_must_come_in_their_order():
    _, store = straight()
    with pytest.raises(ValueError, match="out of order"):
        store.add(0, 1)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_store_that_loads_anothers_state_goes_on_as_it(data):
    feed, store, _, _, held = filled(data)
    other = Episodes(feed.lanes, batch=16, slots=held)
    other.load_state(store.state())
    for lane in range(len(feed.memory)):
        slot = feed.add(lane)
        store.add(lane, slot)
        other.add(lane, slot)
    assert store.episodes == other.episodes
    assert list(store.retired()) == list(other.retired())
    if store.episodes:
        one, _ = drawn(store, np.random.default_rng(5))
        two, _ = drawn(other, np.random.default_rng(5))
        np.testing.assert_equal(one, two)


def test_a_state_does_not_change_when_the_store_goes_on():
    feed, store = straight()
    ends = np.array([[True], [False], [False], [True]])
    store.add(0, feed.add(0, np.ones((4, 1), bool), ends, gap=True))
    state, again = store.state(), store.state()
    drawn(store, feed.rng)
    store.add(0, feed.add(0))
    np.testing.assert_equal(state, again)


def test_stacks_of_pictures_are_whole():
    rng = np.random.default_rng(0)
    feed = Feed(1, 5, 4, 1, rng, frames=3)
    store = Episodes(feed.lanes, batch=1, slots=4)
    never, always = np.zeros((4, 1), bool), np.ones((4, 1), bool)
    store.add(0, feed.add(0, always, never, gap=True))
    ends = np.array([[False], [True], [False], [False]])
    slot = feed.add(0, always, ends)
    memory = feed.memory[0]
    memory["observation.obs"][1, 0] = memory["observation.obs"][0, 4]
    memory["once.frames"][1, 0] = memory["observation.obs"][0, 2:4, 0]
    store.add(0, slot)
    (part,) = PaddedEpisodes(feed.lanes).parts(drawn(store, rng)[0])
    pictures = np.concatenate(
        [memory["observation.obs"][0, :, 0], memory["observation.obs"][1, 1:3, 0]]
    )
    assert part.observation["obs"].shape == (7, 1, 3, 1)
    for t in range(2, 7):
        np.testing.assert_array_equal(part.observation["obs"][t, 0], pictures[t - 2 : t + 1])
