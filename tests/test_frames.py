"""Stacks out of pictures that are held once, against the stacks that an env saw."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji import frames
from tianji.algorithm import Lanes
from tianji.algorithms.dqn import DQN
from tianji.build import build
from tianji.driver import Serial
from tianji.env import Discrete, EnvSpec, TimeStep
from tianji.prioritized import RECORDED, Prioritized, weights
from tianji.store import Replay, Transitions, numbers
from tianji.testing import check_algorithm, check_env
from tianji.testing.algorithm import config_for, run_updates
from tianji.types import GAP, Row, leaf, rollout_layout

SIDE = 3
"""pixels: enough to tell pictures apart"""


class Tape:
    """Lanes filled as an actor would: it notes the whole stack of every row beside the memory."""

    def __init__(self, lanes, slots, T, B, K, rng, ends=0.25):
        picture = {"obs": leaf((SIDE, SIDE), np.uint8)}
        once = {"frames": leaf((K - 1, SIDE, SIDE), np.uint8)}
        layout = rollout_layout(Row(picture, leaf((), np.int64), RECORDED, once), T, B)
        self.memory = [
            {k: np.zeros((slots, *v.shape), v.dtype) for k, v in layout.items()}
            for _ in range(lanes)
        ]
        self.lanes = Lanes(tuple(self.memory), K)
        self.slots, self.T, self.B, self.K, self.rng, self.ends = slots, T, B, K, rng, ends
        self.seen = [{} for _ in range(lanes)]
        """of each lane: the stack at (slot, row, env), as the env gave it"""
        self.count = [0] * lanes
        self._stack = [np.zeros((B, K, SIDE, SIDE), np.uint8) for _ in range(lanes)]
        self._ended = [np.zeros(B, np.bool_) for _ in range(lanes)]
        for lane in range(lanes):
            self._stack[lane][:, -1] = self._pictures()

    def _pictures(self):
        return self.rng.integers(1, 255, (self.B, SIDE, SIDE), np.uint8)

    def add(self, lane, gap=False):
        memory, slot, rng = self.memory[lane], self.count[lane] % self.slots, self.rng
        if gap:
            self._stack[lane][:] = rng.integers(1, 255, self._stack[lane].shape)
            self._ended[lane][:] = False
        memory["head"][slot, GAP] = gap
        memory["once.frames"][slot] = self._stack[lane][:, :-1]
        for t in range(self.T + 1):
            memory["observation.obs"][slot, t] = self._stack[lane][:, -1]
            for b in range(self.B):
                self.seen[lane][slot, t, b] = self._stack[lane][b].copy()
            if t == self.T:
                break
            valid = ~self._ended[lane]
            terminated = valid & (rng.random(self.B) < self.ends)
            truncated = valid & ~terminated & (rng.random(self.B) < self.ends)
            memory["valid"][slot, t], memory["terminated"][slot, t] = valid, terminated
            memory["reward"][slot, t] = rng.normal(size=self.B)
            moved = np.concatenate([self._stack[lane][:, 1:], self._pictures()[:, None]], axis=1)
            moved[~valid, :-1] = 0  # a reset: nothing is older
            self._stack[lane], self._ended[lane] = moved, terminated | truncated
        self.count[lane] += 1
        return slot


SIZES = {"T": st.integers(1, 6), "B": st.integers(1, 3), "K": st.integers(2, 5)}


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ends=st.sampled_from([0.0, 0.2, 0.6]), **SIZES)
def test_a_whole_rollouts_stacks_are_those_that_were_seen(seed, ends, T, B, K):
    tape = Tape(1, 2, T, B, K, np.random.default_rng(seed), ends)
    for _ in range(4):
        slot, memory = tape.add(0), tape.memory[0]
        whole = frames.stacked(
            memory["observation.obs"][slot], memory["once.frames"][slot], memory["valid"][slot]
        )
        assert whole.shape == (T + 1, B, K, SIDE, SIDE)
        for t in range(T + 1):
            for b in range(B):
                assert np.array_equal(whole[t, b], tape.seen[0][slot, t, b]), (t, b)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ends=st.sampled_from([0.0, 0.2, 0.6]), **SIZES)
def test_single_stacks_are_those_that_were_seen_wherever_they_lie(seed, ends, T, B, K):
    rng = np.random.default_rng(seed)
    tape = Tape(1, 3, T, B, K, rng, ends)
    for i in range(7):
        tape.add(0, gap=i == 4)
    memory, N = tape.memory[0], 40
    at = rng.integers(3, size=N), rng.integers(T + 1, size=N), rng.integers(B, size=N)
    out = rng.integers(0, 255, (N, K, SIDE, SIDE), np.uint8)
    frames.gather([memory], [(0, slice(0, N))], at, out)
    for i, place in enumerate(zip(*(index.tolist() for index in at), strict=True)):
        assert np.array_equal(out[i], tape.seen[0][place]), place


def test_stacks_come_from_the_lanes_that_they_lie_in():
    rng, T, B, K, N = np.random.default_rng(3), 3, 2, 4, 30
    tape = Tape(3, 3, T, B, K, rng, 0.2)
    for lane in range(3):
        for _ in range(3):
            tape.add(lane)
    at = rng.integers(3, size=N), rng.integers(T + 1, size=N), rng.integers(B, size=N)
    at[1][[0, 11, N - 1]] = 0  # what is older than a rollout, in both lanes that are asked
    out = rng.integers(0, 255, (N, K, SIDE, SIDE), np.uint8)
    frames.gather(tape.memory, [(0, slice(0, 11)), (2, slice(11, N))], at, out)
    for i, place in enumerate(zip(*(index.tolist() for index in at), strict=True)):
        assert np.array_equal(out[i], tape.seen[0 if i < 11 else 2][place]), place


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), ends=st.sampled_from([0.0, 0.2, 0.5]), n=st.integers(1, 4),
    lanes=st.integers(1, 3), prioritised=st.booleans(), **SIZES,
)  # fmt: skip
def test_replay_hands_out_the_stacks_that_were_seen(seed, ends, n, lanes, prioritised, T, B, K):
    """Over the ring's seam, at episodes' beginnings, with n-step windows and several lanes."""
    rng, held = np.random.default_rng(seed), 6
    tape = Tape(lanes, held + 1, T, B, K, rng, ends)
    if prioritised:
        store = Prioritized(tape.lanes, 16, held, 0.9, n, 0.5, 0.5, 0, "actor")
    else:
        store = Replay(tape.lanes, 16, held, n)
    for _ in range(int(rng.integers(6, 16))):
        for lane in range(lanes):
            store.add(lane, tape.add(lane, gap=bool(rng.random() < 0.15)))
    selection = numbers(("lane", "step"), 16) | (weights(16) if prioritised else {})
    told = {k: np.zeros(v.shape, v.dtype) for k, v in selection.items()}
    store.choose(rng, told)
    (part,) = Transitions(tape.lanes, 0.9, n).parts(told)
    assert part.observation["obs"].shape == (2, 16, K, SIDE, SIDE)
    for i, (lane, step) in enumerate(zip(told["lane"], told["step"], strict=True)):
        (row, b), memory = divmod(int(step), B), tape.memory[lane]
        begin = tape.seen[lane][row // T, row % T, b]
        assert np.array_equal(part.observation["obs"][0, i], begin)
        last = row
        for _ in range(n - 1):  # to the last row of the window
            slot, t = last // T, last % T
            after = (last + 1) % ((held + 1) * T)
            gap = after % T == 0 and memory["head"][after // T, GAP]
            if memory["terminated"][slot, t, b] or gap:
                break
            if not memory["valid"][after // T, after % T, b]:
                break
            last = after
        end = tape.seen[lane][last // T, last % T + 1, b]
        assert np.array_equal(part.observation["obs"][1, i], end)


class Counting:
    """Pictures that show the time of the episode; what is older than its beginning is black."""

    def __init__(self, num_envs, K=3, side=40):
        observation = {"obs": leaf((K, side, side), np.uint8)}
        self.spec = EnvSpec("test/Counting", observation, Discrete(2), 7, frames=K)
        self.num_envs, self._K, self._side = num_envs, K, side

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._clock = np.zeros(self.num_envs, np.int64)
        self._life = self._rng.integers(2, 7, self.num_envs)
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._observe()

    def _observe(self):
        age = self._clock[:, None] - np.arange(self._K - 1, -1, -1)
        grey = np.where(age >= 0, 20 * (age + 1), 0).astype(np.uint8)
        return {"obs": np.broadcast_to(grey[:, :, None, None],
                                       (*grey.shape, self._side, self._side)).copy()}  # fmt: skip

    def step(self, action):
        valid = ~self._ended
        self._clock = np.where(valid, self._clock + 1, 0)
        self._life = np.where(valid, self._life, self._rng.integers(2, 7, self.num_envs))
        self._ended = valid & (self._clock >= self._life)
        truncated = np.zeros(self.num_envs, np.bool_)
        reward = (valid & (action == self._clock % 2)).astype(np.float32)
        return TimeStep(self._observe(), reward, self._ended.copy(), truncated, valid)

    def close(self):
        pass


SMALL = DQN(batch_size=16, warmup=64, capacity=128, new_steps=16, n_step=2)


@pytest.mark.parametrize("n_step", [1, 2])
def test_the_env_and_dqn_on_stacks_keep_their_promises(n_step):
    check_env(Counting, 60)
    check_algorithm(replace(SMALL, n_step=n_step), Counting, updates=2)


@pytest.mark.parametrize(("n_step", "prioritized"), [(1, False), (2, False), (2, True)])
def test_through_the_roles_a_batch_has_the_stacks_of_the_env(n_step, prioritized):
    """The grey of each picture is its time, so a stack must count up to its newest one."""
    algorithm = DQN(
        batch_size=16, warmup=96, capacity=128, new_steps=16, n_step=n_step, prioritized=prioritized
    )
    built = build(config_for(algorithm), Counting)
    built.learner.begin()
    take, seen = built.learner._trainer.take, []
    built.learner._trainer.take = lambda part: (
        seen.append(part.observation["obs"][..., 0, 0].copy()) or take(part)
    )
    run_updates(built, Serial(built.roles), 10)
    memory = built.transport.memory(built.assembly.lanes[0])
    assert memory["observation.obs"].shape[3:] == (40, 40)
    for part in seen:  # [2, N, K]
        newest = part[..., -1:].astype(int)
        expected = np.maximum(newest - 20 * np.arange(2, -1, -1), 0)
        assert np.array_equal(part, expected)
        assert (newest >= 20).all()
        assert (newest[1] > newest[0]).all(), "a window ends later than it begins"
    built.close()
