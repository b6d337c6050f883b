"""Stores against slow loops over the rollouts that were put in."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji.algorithm import Lanes
from tianji.errors import Failure, Refusal
from tianji.store import (
    Columns,
    Fresh,
    Replay,
    Rollouts,
    Transitions,
    Window,
    numbers,
    served_once,
)
from tianji.types import GAP, VERSION, Row, leaf, rollout_layout

STEPS, WHOLE, ENVS = ("lane", "step"), ("lane", "slot"), ("lane", "slot", "env")


def room(length, names=STEPS):
    """What a chooser writes its choice into."""
    return {k: np.zeros(v.shape, v.dtype) for k, v in numbers(names, length).items()}


def once_of(rollouts, B=2, window=1, start="batch"):
    """What the run asks for, as `served_once` reads it."""
    return SimpleNamespace(envs=B, window=window, start=start, learners=1), rollouts


class Feed:
    """Lanes filled slot by slot with steps that can be told apart."""

    def __init__(self, lanes, slots, T, B, rng, obs_dtype=np.float32):
        layout = rollout_layout(
            Row({"obs": leaf((2,), obs_dtype)}, leaf((), np.int64), {}, {}), T, B
        )
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
    store = Replay(feed.lanes, batch=16, slots=held, n=n)
    for _ in range(draw(st.integers(6, 15))):
        for lane in range(lanes):
            slot = feed.add(lane, gap=bool(rng.random() < 0.2))
            store.add(lane, slot)
    if not any(memory["valid"].any() for memory in feed.memory):
        return
    out = room(16)
    store.choose(rng, out)
    (part,) = Transitions(feed.lanes, 0.9, n).parts(out)
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
    store = Replay(feed.lanes, batch=2000, slots=4, n=1)
    for _ in range(6):
        for lane in (0, 1):
            store.add(lane, feed.add(lane))
    out = room(2000)
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
    store = Replay(feed.lanes, batch=2, slots=2, n=1)
    store.add(0, feed.add(0))
    feed.memory[0]["valid"][:] = False
    out = room(2)
    with pytest.raises(Failure, match="no valid step"):
        store.choose(np.random.default_rng(0), out)


def test_replay_retires_the_oldest_rollout_when_it_is_full():
    feed = Feed(1, 4, T=2, B=1, rng=np.random.default_rng(0))
    store = Replay(feed.lanes, batch=4, slots=2, n=1)
    retired = []
    for _ in range(5):
        store.add(0, feed.add(0))
        retired.append(list(store.retired()))
    assert retired == [[], [], [(0, 0)], [(0, 1)], [(0, 2)]]


def test_frames_stay_uint8_from_lane_to_batch():
    feed = Feed(1, 4, T=2, B=2, rng=np.random.default_rng(0), obs_dtype=np.uint8)
    store = Replay(feed.lanes, batch=4, slots=3, n=1)
    for _ in range(3):
        store.add(0, feed.add(0))
    out = room(4)
    store.choose(np.random.default_rng(0), out)
    (part,) = Transitions(feed.lanes, 0.9, 1).parts(out)
    assert part.observation["obs"].dtype == np.uint8


def test_fresh_gives_each_rollout_once_in_place_and_in_order():
    feed = Feed(2, 3, T=2, B=2, rng=np.random.default_rng(0))
    store, gatherer = Fresh(), Rollouts(feed.lanes)
    for lane in (0, 1, 0, 1):
        store.add(lane, feed.add(lane))
    out = room(2, WHOLE)
    named = []
    for _ in range(2):
        store.choose(np.random.default_rng(0), out)
        parts = list(gatherer.parts(out))
        named += zip(out["lane"].tolist(), out["slot"].tolist(), strict=True)
        assert all(
            np.shares_memory(part.reward, feed.memory[lane]["reward"])
            for part, lane in zip(parts, (0, 1), strict=True)
        )
    assert named == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert list(store.retired()) == named
    with pytest.raises(IndexError):
        store.choose(np.random.default_rng(0), out)


def test_a_streamed_store_gives_the_same_rollouts_in_the_same_order_one_by_one():
    feed = Feed(2, 4, T=2, B=2, rng=np.random.default_rng(0))
    whole, parts, gatherer = Fresh(), Fresh(), Rollouts(feed.lanes)
    batches, pieces = served_once(*once_of(3)), served_once(*once_of(3, start="stream"))
    assert (batches.pieces, pieces.pieces) == (1, 3)
    for lane in (1, 0, 0, 1, 0, 1):
        slot = feed.add(lane)
        whole.add(lane, slot)
        parts.add(lane, slot)
    rng, named = np.random.default_rng(0), []
    for _ in range(2):
        batch = room(batches.selection["slot"].shape[0], WHOLE)
        assert whole.choose(rng, batch) == 1.0
        at_once = list(gatherer.parts(batch))
        for i in range(pieces.pieces):
            piece = room(pieces.selection["slot"].shape[0], WHOLE)
            assert parts.choose(rng, piece) == parts.share == 1.0
            assert (piece["lane"][0], piece["slot"][0]) == (batch["lane"][i], batch["slot"][i])
            (part,) = gatherer.parts(piece)
            assert np.shares_memory(part.reward, at_once[i].reward)
            named.append((int(piece["lane"][0]), int(piece["slot"][0])))
            assert list(parts.retired()) == [named[-1]]
    assert list(whole.retired()) == named


@st.composite
def windows(draw):
    """Sizes of a window whose batches can be divided by it: lanes, rollouts, B, batches."""
    batches = draw(st.sampled_from([1, 2, 3, 4, 8]))
    lanes, rollouts, B = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return lanes, rollouts, B if rollouts * B % batches == 0 else B * batches, batches


@settings(max_examples=60)
@given(windows(), st.integers(0, 2**32 - 1))
def test_a_window_draws_an_equal_share_from_each_of_the_last_batches(sizes, seed):
    lanes, rollouts, B, batches = sizes
    rng = np.random.default_rng(seed)
    feed = Feed(lanes, rollouts * (batches + 1), T=3, B=B, rng=rng)
    store, gatherer = Window(feed.lanes, batches), Columns(feed.lanes)
    held, seen, columns = [], set(), rollouts * B
    for n in range(batches + 3):
        batch = []
        for _ in range(rollouts):
            lane = int(rng.integers(lanes))
            slot = feed.add(lane)
            seen -= {(lane, slot, b) for b in range(B)}
            store.add(lane, slot)
            batch.append((lane, slot))
        out = room(rollouts * B, ENVS)
        freshness = store.choose(rng, out)
        leaving = held.pop(0) if len(held) == batches else []
        held.append(batch)
        assert list(store.retired()) == leaving
        assert store.share == 1 / len(held)

        drawn = list(zip(*(out[k].tolist() for k in ("lane", "slot", "env")), strict=True))
        assert len(drawn) == len(set(drawn)) == columns
        shares = [sum((lane, slot) in batch for lane, slot, _ in drawn) for batch in held]
        assert sum(shares) == columns
        assert max(shares) - min(shares) <= 1
        if n + 1 >= batches:
            assert shares == [columns // batches] * batches
        assert freshness == pytest.approx(sum(x not in seen for x in drawn) / columns)
        assert freshness >= shares[-1] / columns, "all of the newest batch is new"
        seen |= set(drawn)

        i = 0
        for part in gatherer.parts(out):
            assert part.reward.shape == (3, B)
            for b in range(B):
                lane, slot, env = drawn[i]
                memory = feed.memory[lane]
                for name in ("reward", "action", "valid", "terminated"):
                    assert (getattr(part, name)[:, b] == memory[name][slot, :, env]).all()
                obs = memory["observation.obs"][slot, :, env]
                assert (part.observation["obs"][:, b] == obs).all()
                assert part.versions[b] == memory["head"][slot, VERSION]
                i += 1
            assert part.head[GAP] == 1
        assert i == columns


def test_a_window_goes_on_exactly_from_its_state():
    rng = np.random.default_rng(0)
    feed = Feed(2, 9, T=2, B=4, rng=rng)
    stores = [Window(feed.lanes, 4) for _ in range(2)]
    for n in range(7):
        for lane in (0, 1):
            stores[0].add(lane, feed.add(lane))
        if n == 4:
            stores[1].load_state(stores[0].state())
        elif n > 4:
            for lane in (0, 1):
                stores[1].add(lane, (feed.count[lane] - 1) % feed.slots)
        draws = np.random.default_rng(n), np.random.default_rng(n)
        both = [(room(8, ENVS), store, draw) for store, draw in zip(stores, draws, strict=True)]
        told = [(store.choose(draw, out), list(store.retired())) for out, store, draw
                in (both if n >= 4 else both[:1])]  # fmt: skip
        if n >= 4:
            assert told[0] == told[1]
            assert all((both[0][0][k] == both[1][0][k]).all() for k in both[0][0])


@pytest.mark.parametrize(("rollouts", "B", "batches"), [(2, 4, 3), (1, 1, 8), (3, 2, 5)])
def test_a_window_that_does_not_divide_a_batch_is_refused_and_the_nearest_fits(
    rollouts, B, batches
):
    with pytest.raises(Refusal, match="could not be new") as told:
        served_once(*once_of(rollouts, B, batches))
    near = int(re.search(r"Set it to (\d+)", str(told.value))[1])
    served_once(*once_of(rollouts, B, near))
    served_once(*once_of(rollouts, batches, batches))


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_freshness_of_replay_is_the_share_that_was_never_drawn_before(lanes, held, seed):
    rng = np.random.default_rng(seed)
    feed = Feed(lanes, held + 2, T=4, B=3, rng=rng)
    store = Replay(feed.lanes, batch=8, slots=held, n=1)
    rows, seen, arrived = 4 * 3, set(), [0] * lanes
    for _ in range(3 * held):
        for lane in range(lanes):
            slot = feed.add(lane)
            feed.memory[lane]["valid"][slot, 0, 0] = True
            store.add(lane, slot)
            arrived[lane] += 1
            seen -= {(lane, slot * rows + i) for i in range(rows)}
        assert store.share == 8 / sum(min(n, held) * rows for n in arrived)
        out = room(8)
        freshness = store.choose(rng, out)
        drawn = list(zip(out["lane"].tolist(), out["step"].tolist(), strict=True))
        assert freshness == sum(x not in seen for x in drawn) / 8
        seen |= set(drawn)


@pytest.mark.parametrize("batches", [1, 2, 4, 8])
def test_a_window_is_as_fresh_in_the_mean_as_the_page_on_balance_says(batches):
    rng = np.random.default_rng(0)
    feed = Feed(1, batches + 2, T=1, B=16, rng=rng)
    store = Window(feed.lanes, batches)
    freshness = []
    for _ in range(400):
        store.add(0, feed.add(0))
        freshness.append(store.choose(rng, room(16, ENVS)))
    expected = 1 - (1 - 1 / batches) ** batches
    assert np.mean(freshness[batches:]) == pytest.approx(expected, abs=0.02)
    text = (Path(__file__).parents[1] / "docs" / "balance.md").read_text()
    row = re.search(rf"^\| \w+ \| {batches} \| (\S+) \| (\S+) \| (\d) \|$", text, re.MULTILINE)
    assert [float(row[1]), int(row[3])] == [store.share, batches - 1]
    assert float(row[2]) == pytest.approx(expected, abs=0.005)
