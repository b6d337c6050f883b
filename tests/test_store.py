"""Stores against slow loops over the rollouts that were put in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji.algorithm import Lanes
from tianji.errors import Failure
from tianji.store import Fresh, Replay
from tianji.types import GAP, VERSION, leaf, rollout_layout


class Feed:
    """Lanes filled slot by slot with steps that can be told apart."""

    def __init__(self, lanes, slots, T, B, rng, obs_dtype=np.float32):
        layout = rollout_layout({"obs": leaf((2,), obs_dtype)}, leaf((), np.int64), {}, T, B)
        self.memory = [
            {k: np.zeros((slots, *v.shape), v.dtype) for k, v in layout.items()}
            for _ in range(lanes)
        ]
        self.lanes = Lanes(tuple(self.memory))
        self.slots, self.T, self.B, self.rng = slots, T, B, rng
        self.count = [0] * lanes
        self.steps = [[] for _ in range(lanes)]
        """of each lane: rows of (reward, terminated, valid, gap, version) and observations"""

    def add(self, lane, gap=False):
        memory, slot = self.memory[lane], self.count[lane] % self.slots
        rng, T, B = self.rng, self.T, self.B
        memory["observation.obs"][slot] = rng.integers(0, 250, (T + 1, B, 2))
        memory["action"][slot] = rng.integers(0, 9, (T, B))
        memory["reward"][slot] = rng.normal(size=(T, B))
        memory["valid"][slot] = rng.random((T, B)) < 0.8
        memory["terminated"][slot] = (rng.random((T, B)) < 0.2) & memory["valid"][slot]
        memory["head"][slot, VERSION] = self.count[lane]
        memory["head"][slot, GAP] = gap
        for t in range(T):
            self.steps[lane].append((slot, t, gap and t == 0))
        self.count[lane] += 1
        return slot


def expected_n_step(feed, lane, place, b, n, gamma):
    """The n-step return from a row of the lane, by the words of the definition."""
    memory, total, discount = feed.memory[lane], 0.0, 1.0
    for j in range(n):
        slot, t, gap = feed.steps[lane][place + j]
        if j > 0 and (gap or not memory["valid"][slot, t, b]):
            break
        total += discount * memory["reward"][slot, t, b]
        discount *= gamma
        end = memory["observation.obs"][slot, t + 1, b]
        if memory["terminated"][slot, t, b]:
            discount = 0.0
            break
    return total, discount, end


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_replay_gives_the_written_out_n_step_returns_of_steps_it_holds(data):
    draw = data.draw
    T, B, n = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lanes, held = draw(st.integers(1, 3)), draw(st.integers(6, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    feed = Feed(lanes, held + 2, T, B, rng)
    store = Replay(feed.lanes, batch=16, slots=held, gamma=0.9, n=n)
    for _ in range(draw(st.integers(6, 15))):
        for lane in range(lanes):
            slot = feed.add(lane, gap=bool(rng.random() < 0.2))
            store.add(lane, slot)
    if not any(memory["valid"].any() for memory in feed.memory):
        return
    out = {k: np.zeros(v.shape, v.dtype) for k, v in store.selection.items()}
    store.choose(rng, out)
    (part,) = store.parts(out)
    for i in range(16):
        lane, step = int(out["lane"][i]), int(out["step"][i])
        row, b = divmod(step, B)
        slot, t = divmod(row, T)
        places = [p for p, (s, u, _) in enumerate(feed.steps[lane]) if (s, u) == (slot, t)]
        place = places[-1]
        assert place >= (feed.count[lane] - held) * T, "a step was chosen that is no longer held"
        assert feed.memory[lane]["valid"][slot, t, b], "a step that only reset its env was chosen"
        total, discount, end = expected_n_step(feed, lane, place, b, n, 0.9)
        assert part.reward[0, i] == pytest.approx(total, abs=1e-5)
        assert part.extras["discount"][0, i] == pytest.approx(discount, abs=1e-6)
        begin = feed.memory[lane]["observation.obs"][slot, t, b]
        assert part.observation["obs"][0, i].tolist() == begin.tolist()
        assert part.observation["obs"][1, i].tolist() == end.tolist()
        assert part.action[0, i] == feed.memory[lane]["action"][slot, t, b]
        assert part.versions[i] == feed.memory[lane]["head"][slot, VERSION]


def test_replay_draws_every_valid_step_equally_often():
    rng = np.random.default_rng(0)
    feed = Feed(2, 6, T=4, B=3, rng=rng)
    store = Replay(feed.lanes, batch=2000, slots=4, gamma=0.9, n=1)
    for _ in range(6):
        for lane in (0, 1):
            store.add(lane, feed.add(lane))
    out = {k: np.zeros(v.shape, v.dtype) for k, v in store.selection.items()}
    counts = {}
    for _ in range(20):
        store.choose(rng, out)
        for key in zip(out["lane"].tolist(), out["step"].tolist(), strict=True):
            counts[key] = counts.get(key, 0) + 1
    valid = sum(int(feed.memory[lane]["valid"][[2, 3, 4, 5]].sum()) for lane in (0, 1))
    assert len(counts) == valid
    mean = 40_000 / valid
    assert max(abs(c - mean) for c in counts.values()) < 6 * mean**0.5


def test_replay_without_a_valid_step_fails_instead_of_hanging():
    feed = Feed(1, 4, T=2, B=1, rng=np.random.default_rng(0))
    store = Replay(feed.lanes, batch=2, slots=2, gamma=0.9, n=1)
    store.add(0, feed.add(0))
    feed.memory[0]["valid"][:] = False
    out = {k: np.zeros(v.shape, v.dtype) for k, v in store.selection.items()}
    with pytest.raises(Failure, match="no valid step"):
        store.choose(np.random.default_rng(0), out)


def test_replay_retires_the_oldest_rollout_when_it_is_full():
    feed = Feed(1, 4, T=2, B=1, rng=np.random.default_rng(0))
    store = Replay(feed.lanes, batch=4, slots=2, gamma=0.9, n=1)
    retired = []
    for _ in range(5):
        store.add(0, feed.add(0))
        retired.append(list(store.retired()))
    assert retired == [[], [], [(0, 0)], [(0, 1)], [(0, 2)]]


def test_frames_stay_uint8_from_lane_to_batch():
    feed = Feed(1, 4, T=2, B=2, rng=np.random.default_rng(0), obs_dtype=np.uint8)
    store = Replay(feed.lanes, batch=4, slots=3, gamma=0.9, n=1)
    for _ in range(3):
        store.add(0, feed.add(0))
    out = {k: np.zeros(v.shape, v.dtype) for k, v in store.selection.items()}
    store.choose(np.random.default_rng(0), out)
    (part,) = store.parts(out)
    assert part.observation["obs"].dtype == np.uint8


def test_fresh_gives_each_rollout_once_in_place_and_in_order():
    feed = Feed(2, 3, T=2, B=2, rng=np.random.default_rng(0))
    store = Fresh(feed.lanes, rollouts=2)
    for lane in (0, 1, 0, 1):
        store.add(lane, feed.add(lane))
    out = {k: np.zeros(v.shape, v.dtype) for k, v in store.selection.items()}
    named = []
    for _ in range(2):
        store.choose(np.random.default_rng(0), out)
        parts = list(store.parts(out))
        named += zip(out["lane"].tolist(), out["slot"].tolist(), strict=True)
        assert all(
            np.shares_memory(part.reward, feed.memory[lane]["reward"])
            for part, lane in zip(parts, (0, 1), strict=True)
        )
    assert named == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert list(store.retired()) == named
    with pytest.raises(IndexError):
        store.choose(np.random.default_rng(0), out)
