"""What an actor writes: halves, recurrent state, stacks of pictures, scores, wins, shapes."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji import Failure, Refusal, frames
from tianji.actor import INFER, REBUILD, SIMULATE, Actor
from tianji.algorithm import Decision, Lanes
from tianji.annotated import read, tree
from tianji.build import build
from tianji.channel import Conduit
from tianji.config import load_config
from tianji.env import Continuous, Discrete, EnvSpec, Halves, Score, TimeStep
from tianji.ledger import Ledger
from tianji.role import generator
from tianji.store import Columns, Fresh, Replay, Rollouts, Transitions, Window, numbers
from tianji.transports.memory import Memory
from tianji.types import GAP, Params, Rollout, Row, leaf, rollout_layout

T, B, K = 5, 4, 3

SNAPSHOTS = Conduit("snapshots", "newest", {"w": leaf((1,), np.float32)})


class Film:
    """Stacks of K pictures of one number each: 100 * env + step. Env b's episodes are cut after
    b + 2 steps; what follows is a row that only resets."""

    made: ClassVar[list] = []

    def __init__(self, num_envs=B, raises=None, wider=None, stack=True):
        shape = (K, 1, 1) if stack else (1,)
        self.spec = EnvSpec(
            "test/Film", {"obs": leaf(shape, np.float32)}, Discrete(7), frames=K if stack else 1
        )
        self.num_envs, self._stack = num_envs, stack
        self._raises, self._wider = raises, wider
        self.life = len(Film.made)
        Film.made.append(self)
        self._pictures = np.zeros((num_envs, K, 1, 1), np.float32)
        self._count = np.zeros(num_envs, np.int64)
        self._clock = np.zeros(num_envs, np.int64)
        self._cut = np.zeros(num_envs, np.bool_)
        self._calls, self._begun = 0, {}
        self.order = []

    def _obs(self, where):
        pictures = self._pictures[where]
        return {"obs": (pictures if self._stack else pictures[:, -1, 0]).copy()}

    def _show(self, where):
        new = 1000 * self.life + 100 * np.arange(self.num_envs)[where] + self._count[where]
        self._pictures[where, :-1] = self._pictures[where, 1:]
        self._pictures[where, -1, 0, 0] = new

    def reset(self, seed):
        self._show(slice(None))
        return self._obs(slice(None))

    def _advance(self, where, action):
        self._calls += 1
        if self._raises == self._calls and self.life == 0:
            raise RuntimeError("broken")
        valid = ~self._cut[where]
        self._pictures[where][~valid] = 0
        self._count[where] += 1
        self._show(where)
        self._clock[where] = np.where(valid, self._clock[where] + 1, 0)
        cut = self._clock[where] == np.arange(self.num_envs)[where] + 2
        self._cut[where] = cut
        observation = self._obs(where)
        if self._wider == self._calls:
            observation = {"obs": np.concatenate([observation["obs"]] * 2, axis=-1)}
        no = np.zeros(len(valid), np.bool_)
        return TimeStep(observation, np.where(valid, action, 0).astype(np.float32), no, cut, valid)

    def step(self, action):
        return self._advance(slice(None), action)

    def begin(self, half, action):
        assert half not in self._begun
        self._begun[half] = action
        self.order.append(f"begin {half}")

    def end(self, half):
        self.order.append(f"end {half}")
        n = self.num_envs // 2
        where = slice(0, n) if half == 0 else slice(n, self.num_envs)
        return self._advance(where, self._begun.pop(half))

    def close(self):
        pass


class Counting:
    """Counts the steps of each episode; the action is what the picture and the count say."""

    extras: ClassVar[dict] = {"count": leaf((), np.float32)}

    def initial(self, n):
        return {"count": np.zeros(n, np.float32)}

    def load(self, params):
        pass

    def act(self, observation, state, rng):
        obs = observation["obs"]
        action = (obs.reshape(len(obs), -1).sum(1) + state["count"]).astype(np.int64) % 7
        return Decision(action, {"count": state["count"] + 1}, {"count": state["count"].copy()})


class Acting:
    def __init__(self, halves=False, slots=8, **kwargs):
        Film.made.clear()
        env = Film(**kwargs)
        once = {"count": leaf((), np.float32)}
        if env.spec.frames > 1:
            once["frames"] = leaf((K - 1, 1, 1), np.float32)
        row = Row(env.spec.held, env.spec.action_leaf, Counting.extras, once, env.spec.reward_leaf)
        self.transport = Memory()
        conduit = Conduit("rollouts-0", "lane", rollout_layout(row, T, B), slots)
        self.inbox = self.transport.inbox(conduit)
        self.memory = self.transport.memory(conduit)
        self.transport.publisher(SNAPSHOTS).push(3, Params(SNAPSHOTS.layout))
        self.actor = Actor(
            0, env, Counting(), self.transport.outbox(conduit),
            self.transport.subscriber(SNAPSHOTS), 0.0, generator(0, "actor"), 5,
            lambda n: Film(n, **kwargs), halves=halves,
        )  # fmt: skip
        self.lanes = Lanes((self.memory,), env.spec.frames)

    def rollout(self):
        assert self.inbox.grant(3)
        done = []
        while (slot := self.inbox.probe()) is None:
            done.append(self.actor.step())
            assert len(done) < 100
        self.slot = slot
        return Rollout.over(slot.arrays), done

    def whole(self, rollouts=6):
        """Rollouts as a store hands them out."""
        store, gatherer = Fresh(), Rollouts(self.lanes)
        for _ in range(rollouts):
            self.rollout()
            store.add(0, self.slot.index)
            selection = {name: np.zeros(1, np.int64) for name in ("lane", "slot")}
            store.choose(generator(0, "buffer"), selection)
            yield from gatherer.parts(selection)


def test_an_env_in_halves_gives_the_rollouts_of_the_whole():
    assert isinstance(Film(), Halves)
    for whole, halved in zip(Acting().whole(), Acting(halves=True).whole(), strict=True):
        for name in ("action", "reward", "terminated", "valid"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(halved, name), name)
        np.testing.assert_array_equal(whole.observation["obs"], halved.observation["obs"])
        np.testing.assert_array_equal(whole.once["count"], halved.once["count"])
        np.testing.assert_array_equal(whole.extras["count"], halved.extras["count"])
        assert sorted(whole.episodes.tolist()) == sorted(halved.episodes.tolist())


def test_while_one_half_simulates_the_policy_looks_at_the_other():
    acting = Acting(halves=True)
    _, done = acting.rollout()
    order = Film.made[0].order
    middle = ["end 0", "begin 0", "end 1", "begin 1"] * (T - 1)
    assert order == ["begin 0", "begin 1", *middle, "end 0", "end 1"]
    assert done.count(INFER) == done.count(SIMULATE) == 2 * T


@pytest.mark.parametrize("raises", range(1, 2 * T + 1))
def test_a_half_that_raises_is_cut_off_and_so_is_the_other(raises):
    acting = Acting(halves=True, raises=raises)
    rollout, done = acting.rollout()
    assert done.count(REBUILD) == 1
    lives = rollout.observation["obs"][..., 0, 0] // 1000
    for b in range(B):
        for t in range(T):
            if lives[t, b] != lives[t + 1, b]:
                assert not rollout.valid[t, b], "a step from one env into another"
    following, _ = acting.rollout()
    first, last = following.observation["obs"][0, :, 0, 0], rollout.observation["obs"][-1, :, 0, 0]
    assert (first // 1000 == 1).all()
    assert following.head[GAP] or np.array_equal(first, last)


def test_the_recurrent_state_before_a_rollout_is_in_it():
    acting = Acting()
    for _ in range(6):
        rollout, _ = acting.rollout()
        np.testing.assert_array_equal(rollout.once["count"], rollout.extras["count"][0])
    assert rollout.once["count"].max() > 0, "every rollout began with an episode"


def by_hand(acting, rollouts):
    """Stacks of an env that is stepped beside the actor's, with the same actions."""
    twin = Film()
    twin.life = 0
    obs = twin.reset(0)["obs"]
    for rollout in rollouts:
        seen = [obs]
        for action in rollout.action:
            obs = twin.step(action).observation["obs"]
            seen.append(obs)
        yield np.stack(seen)


@pytest.mark.parametrize("halves", [False, True])
def test_stacks_are_those_of_the_env_though_pictures_are_held_once(halves):
    acting = Acting(halves=halves)
    assert acting.memory["observation.obs"].shape[1:] == (T + 1, B, 1, 1)
    rollouts = list(acting.whole())
    for rollout, stacks in zip(rollouts, by_hand(acting, rollouts), strict=True):
        np.testing.assert_array_equal(rollout.observation["obs"], stacks)
    assert sum((~r.valid).any() for r in rollouts) > 3, "no episode began within a rollout"


def test_replay_and_windows_hand_out_whole_stacks_too():
    acting = Acting(slots=10)
    store, window = Replay(acting.lanes, 64, 8, 3), Window(acting.lanes, 2)
    both = (
        (store, Transitions(acting.lanes, 0.9, 3), numbers(("lane", "step"), 64)),
        (window, Columns(acting.lanes), numbers(("lane", "slot", "env"), B)),
    )
    rollouts = []
    for _ in range(8):
        acting.rollout()
        for each in (store, window):
            each.add(0, acting.slot.index)
        rollouts.append(Rollout.over(acting.slot.arrays))
    stacks = list(by_hand(acting, rollouts))
    known = {tuple(s.ravel()) for each in stacks for s in each.reshape(-1, K)}
    rng = np.random.default_rng(0)
    for each, gatherer, layout in both:
        selection = {k: np.zeros(v.shape, v.dtype) for k, v in layout.items()}
        for _ in range(4):
            each.choose(rng, selection)
            for part in gatherer.parts(selection):
                obs = part.observation["obs"]
                assert obs.shape[2:] == (K, 1, 1)
                assert {tuple(s) for s in obs.reshape(-1, K)} <= known


@given(st.data())
def test_single_stacks_are_those_of_the_whole_rollout(data):
    slots, T, B, K = 3, data.draw(st.integers(1, 6)), 2, data.draw(st.integers(2, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    newest = rng.integers(1, 255, (slots, T + 1, B, 2)).astype(np.uint8)
    older = rng.integers(0, 255, (slots, B, K - 1, 2)).astype(np.uint8)
    valid = rng.random((slots, T, B)) < 0.7
    whole = np.stack([frames.stacked(newest[s], older[s], valid[s]) for s in range(slots)])
    at = tuple(rng.integers(0, n, 50) for n in (slots, T + 1, B))
    out = np.empty((50, K, 2), np.uint8)
    memory = {"observation.obs": newest, "once.frames": older, "valid": valid}
    frames.gather([memory], [(0, slice(0, 50))], at, out)
    np.testing.assert_array_equal(out, whole[at])


def test_an_env_whose_observations_change_their_shape_is_refused_with_the_difference():
    acting = Acting(wider=3, stack=False)
    with pytest.raises(Failure, match=r"test/Film: obs had shape \(1,\) and now has \(2,\)"):
        acting.rollout()


def step_of(reward, terminated=(0, 0), truncated=(0, 0), valid=(1, 1), score=None):
    flags = (np.array(x, np.bool_) for x in (terminated, truncated, valid))
    return TimeStep({}, np.array(reward, np.float32), *flags, score or Score())


def test_what_is_reported_is_the_score_where_there_is_one():
    ledger = Ledger(2)
    raw = np.array([7.0, 1.0], np.float32)
    lost = np.array([True, False])
    over = np.array([False, True])
    # a life is lost in the first env: it terminates, but the game goes on
    envs, _ = ledger.count(step_of([1, 1], lost, score=Score(raw, np.array([False, False]))))
    assert len(envs) == 0
    envs, ended = ledger.count(step_of([1, 1], lost, score=Score(raw, over, over)))
    assert (envs.tolist(), ended.tolist()) == ([1], [(2.0, 2, 1)])
    envs, ended = ledger.count(step_of([1, 1], lost, score=Score(raw, lost, over)))
    assert (envs.tolist(), ended.tolist()) == ([0], [(21.0, 3, 0)])


def test_without_a_score_the_reward_is_reported_and_of_agents_its_mean():
    ledger = Ledger(2)
    envs, ended = ledger.count(step_of([[1, 3], [5, 7]], truncated=(0, 1)))
    assert (envs.tolist(), ended.tolist()) == ([1], [(6.0, 1, -1)])
    assert ledger.begun == 1
    ledger.clear()
    assert ledger.begun == 0


def test_a_spec_with_agents_survives_the_way_to_another_process():
    spec = EnvSpec(
        "a", {"obs": leaf((2, 3), np.float32), "mask": leaf((2, 4), np.bool_)},
        Continuous((-1.0,), (1.0,), (1,)), 25, ("red", "blue"), True, (3, 2), (4, 3), 1,
    )  # fmt: skip
    assert read(EnvSpec, json.loads(json.dumps(tree(spec)))) == spec
    assert spec.action_leaf.shape == (2, 1)
    assert spec.reward_leaf.shape == (2,)
    assert replace(spec, agents=(), own_rewards=False).action_leaf.shape == (1,)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "CartPole-v1 steps all of its envs at once"),
        ({"env": {"id": "toy/Frames"}}, "toy/Frames steps all of its envs at once"),
    ],
)
def test_halves_of_an_env_that_has_none_are_refused(changes, why):
    tree = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo"},
        "scale": {"halves": True},
        "stop": {"steps": 100},
        **changes,
    }
    with pytest.raises(Refusal, match=rf"{why}.*Set scale.halves = false"):
        build(load_config(tree))
