"""Envs that raise or give NaN: what reaches rollouts, returns, replay and evaluations."""

import json
import re
from typing import ClassVar

import numpy as np
import pytest

import tianji
from tianji import Failure, Refusal, returns
from tianji.actor import REBUILD, Actor
from tianji.algorithm import Decision, Lanes
from tianji.channel import Conduit
from tianji.env import Discrete, EnvSpec, TimeStep, register_env
from tianji.evaluator import EVALUATE, EVALUATED, LOAD, Evaluator
from tianji.evaluator import REBUILD as EVALUATOR_REBUILD
from tianji.role import generator
from tianji.store import Replay, Transitions
from tianji.transports.memory import Memory
from tianji.types import EPISODES, GAP, PRODUCED, STEPS, Params, Rollout, Row, leaf, rollout_layout

T, B = 6, 2
GAMMA, LAM = 0.5, 0.25

SNAPSHOTS = Conduit("snapshots", "newest", {"w": leaf((1,), np.float32)})


class Scripted:
    """Observations are (life, step), rewards the step; life 0 goes wrong in its step `at`, counted
    from 1. Episodes of the last env terminate after `length` steps, others never."""

    lives: ClassVar[list] = []

    def __init__(self, num_envs=B, what="", at=4, length=10**9):
        self.spec = EnvSpec("test/Scripted", {"obs": leaf((2,), np.float32)}, Discrete(2))
        self.num_envs = num_envs
        self._what, self._at, self._length = what, at, length
        self.life, self.closed = len(Scripted.lives), False
        Scripted.lives.append(self)
        self._steps, self._clock, self._ended = 0, 0, False

    def _observe(self):
        return {"obs": np.tile(np.float32([self.life, self._steps]), (self.num_envs, 1))}

    def reset(self, seed):
        self.seed = seed
        if self._what == "first reset" and self.life == 0:
            raise OSError("no licence")
        observation = self._observe()
        if self._what == "reset" and self.life == 1:
            observation["obs"][:] = np.nan
        return observation

    def step(self, action):
        self._steps += 1
        goes_wrong = self.life == 0 and self._steps == self._at
        if goes_wrong and self._what == "raise":
            raise RuntimeError("broken")
        no = np.zeros(self.num_envs, np.bool_)
        step = TimeStep(self._observe(), np.full(self.num_envs, self._steps, np.float32),
                        no, no.copy(), ~no)  # fmt: skip
        self._clock += 1
        if self._ended:
            step.valid[-1], step.reward[-1], self._clock = False, 0, 0
        self._ended = step.terminated[-1] = self._clock == self._length and not self._ended
        if goes_wrong and self._what in ("nan obs", "reset"):
            step.observation["obs"][-1, 0] = np.nan
        if goes_wrong and self._what == "inf reward":
            step.reward[0] = np.inf
        return step

    def close(self):
        self.closed = True


class Counting:
    """A recurrent policy that counts its own steps, and writes the count down."""

    extras: ClassVar[dict] = {"count": leaf((), np.float32)}

    def initial(self, n):
        return {"count": np.zeros(n, np.float32)}

    def load(self, params):
        pass

    def act(self, observation, state, rng):
        count = state["count"]
        action = np.ones(len(count), np.int64)
        return Decision(action, {"count": count + 1}, {"count": count.copy()})


@pytest.fixture(autouse=True)
def _first_life():
    Scripted.lives.clear()


class Acting:
    """An actor, and both ends of its conduit."""

    def __init__(self, slots=4, **kwargs):
        spec = Scripted(**kwargs).spec
        Scripted.lives.clear()
        layout = rollout_layout(Row(spec.observation, spec.action.leaf, Counting.extras, {}), T, B)
        self.transport, conduit = Memory(), Conduit("rollouts-0", "lane", layout, slots)
        self.inbox = self.transport.inbox(conduit)
        self.memory = self.transport.memory(conduit)
        self.transport.publisher(SNAPSHOTS).push(3, Params(SNAPSHOTS.layout))
        self.actor = Actor(
            0, Scripted(**kwargs), Counting(), self.transport.outbox(conduit),
            self.transport.subscriber(SNAPSHOTS), 0.0, generator(0, "actor"), 5,
            lambda n: Scripted(n, **kwargs),
        )  # fmt: skip

    def rollout(self):
        """The next one, in the slot that it lies in, and what was done for it."""
        assert self.inbox.grant(3)
        done = []
        while (slot := self.inbox.probe()) is None:
            done.append(self.actor.step())
            assert len(done) < 100
        return Rollout.over(slot.arrays), done


def test_the_row_in_which_an_env_raised_only_resets_and_the_next_row_is_of_the_new_env():
    acting = Acting(what="raise", at=4)
    rollout, done = acting.rollout()
    assert done.count(REBUILD) == 1
    lives = [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2]]
    assert rollout.observation["obs"].tolist() == [[row, row] for row in lives]
    assert rollout.valid.T.tolist() == [[True, True, True, False, True, True]] * B
    assert not rollout.terminated.any(), "a value follows: the episode was cut off, not lost"
    assert rollout.reward[:, 0].tolist() == [1, 2, 3, 0, 1, 2]
    assert rollout.extras["count"][:, 0].tolist() == [0, 1, 2, 3, 0, 1], "memory of another life"
    assert (rollout.head[EPISODES], rollout.head[STEPS], rollout.head[PRODUCED]) == (0, 10, 10)
    fault = acting.actor.fault
    assert (fault.seed, fault.step, fault.aborted, fault.kind) == (5, 3, B, "env")
    assert fault.exception == "RuntimeError: broken"
    old, new = Scripted.lives
    assert (old.closed, new.closed) == (True, False)
    assert new.seed == acting.actor.seed != old.seed
    following, _ = acting.rollout()
    assert following.observation["obs"][0].tolist() == [[1, 2]] * B
    assert following.head[GAP] == 0, "it continues the rows of the new env"


def slow_gae(rollout, value):
    """Equation 16 of the paper, written out: a sum from each row to the end of its episode."""
    out = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            if not rollout.valid[t, b]:
                continue
            factor = 1.0
            for k in range(t, T):
                if not rollout.valid[k, b]:
                    break
                delta = rollout.reward[k, b] + GAMMA * value[k + 1, b] - value[k, b]
                out[t, b] += factor * delta
                factor *= GAMMA * LAM
    return out


@pytest.mark.parametrize("what", ["raise", "nan obs", "inf reward"])
def test_advantages_bootstrap_from_where_an_env_was_cut_off(what):
    rollout, _ = Acting(what=what, at=4).rollout()
    observation = rollout.observation["obs"]
    value = (10 * observation[..., 0] + observation[..., 1] ** 2).astype(np.float32)
    advantage = returns.gae(rollout.reward, value, rollout.terminated, rollout.valid, GAMMA, LAM)
    np.testing.assert_allclose(advantage, slow_gae(rollout, value), rtol=1e-6)
    # the last row before: r = 3, V of its own successor (0, 3) is 9, V of (0, 2) is 4
    assert advantage[2].tolist() == [3 + GAMMA * 9 - 4] * B
    assert advantage[3].tolist() == [0, 0]


def test_returns_of_several_steps_bootstrap_from_where_an_env_was_cut_off():
    rollout, _ = Acting(what="raise", at=4).rollout()
    for begin, (expected, last) in {
        0: (1 + GAMMA * 2 + GAMMA**2 * 3, 2),
        1: (2 + GAMMA * 3, 1),
        2: (3.0, 0),
        4: (1 + GAMMA * 2, 1),
    }.items():
        window = slice(begin, begin + 3)
        found = returns.n_step(
            rollout.reward[window], rollout.terminated[window], rollout.valid[window], GAMMA,
            min(3, T - begin),
        )  # fmt: skip
        assert found[0].tolist() == [expected] * B, begin
        assert found[1].tolist() == [GAMMA ** (last + 1)] * B, begin
        assert found[2].tolist() == [last] * B, begin


@pytest.mark.parametrize("what", ["nan obs", "inf reward"])
def test_from_the_row_that_is_not_finite_on_no_row_is_valid_and_the_next_rollout_begins_anew(what):
    acting = Acting(what=what, at=4)
    rollout, done = acting.rollout()
    assert done[-1] is REBUILD
    assert rollout.observation["obs"][:4].tolist() == [[[0, t]] * B for t in range(4)]
    assert rollout.observation["obs"][4:].tolist() == [[[0, 3]] * B] * 3, "finite, of the same life"
    assert rollout.valid.T.tolist() == [[True, True, True, False, False, False]] * B
    assert rollout.reward[:, 0].tolist() == [1, 2, 3, 0, 0, 0]
    assert not rollout.terminated.any()
    assert rollout.head[STEPS] == rollout.head[PRODUCED] == acting.actor.produced == 6
    words = {
        "nan obs": r"nan in its obs \(env 1, row 4",
        "inf reward": r"inf in its reward \(env 0",
    }
    assert acting.actor.fault.exception is None
    assert re.search(words[what], acting.actor.fault.cause)
    following, _ = acting.rollout()
    assert following.head[GAP] == 1
    assert following.observation["obs"].tolist() == [[[1, t]] * B for t in range(T + 1)]
    assert following.extras["count"][:, 0].tolist() == list(range(T)), "memory of another life"
    assert following.valid.all()
    assert following.head[PRODUCED] == 6 + T * B


def test_an_env_that_is_not_finite_from_its_reset_on_gives_rows_that_are_finite_and_not_valid():
    acting = Acting(what="reset", at=T)
    acting.rollout()
    rollout, done = acting.rollout()
    assert done[-1] is REBUILD
    assert not rollout.valid.any()
    assert np.isfinite(rollout.observation["obs"]).all(), "a network would make NaN of all of it"
    assert rollout.head[STEPS] == 0
    following, _ = acting.rollout()
    assert following.valid.all()
    assert following.observation["obs"][0].tolist() == [[2, 0]] * B


@pytest.mark.parametrize("what", ["raise", "nan obs", "inf reward"])
def test_an_episode_that_was_aborted_has_no_return_and_adds_nothing_to_the_next(what):
    acting = Acting(what=what, at=5, length=3, slots=6)
    found = [acting.rollout()[0] for _ in range(3)]
    episodes = [(e["return"], e["length"]) for r in found for e in r.episodes]
    # steps 1 to 3; then step 4 resets, and what goes wrong in step 5 aborts; then anew
    assert episodes[:2] == [(1 + 2 + 3, 3), (1 + 2 + 3, 3)]
    assert all(length == 3 for _, length in episodes)
    assert acting.actor.fault.aborted == 1 + (what != "raise"), "env 0, and env 1 where it went on"


@pytest.mark.parametrize("what", ["raise", "nan obs", "inf reward"])
@pytest.mark.parametrize("n", [1, 3])
def test_no_window_of_replay_reaches_from_one_life_of_an_env_into_the_next(what, n):
    acting = Acting(what=what, at=4, slots=5)
    lanes = Lanes((acting.memory,))
    store, gatherer = Replay(lanes, 64, 4, n), Transitions(lanes, GAMMA, n)
    for index in range(3):
        acting.rollout()
        store.add(0, index)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(20):
        selection = {"lane": np.zeros(64, np.int64), "step": np.zeros(64, np.int64)}
        store.choose(rng, selection)
        (part,) = gatherer.parts(selection)
        first, final = part.observation["obs"][0], part.observation["obs"][1]
        assert (first[:, 0] == final[:, 0]).all(), "a window crossed"
        steps = (final[:, 1] - first[:, 1]).astype(int)
        seen |= {(int(life), int(m)) for life, m in zip(first[:, 0], steps, strict=True)}
        for i in range(64):
            rewards = [first[i, 1] + k + 1 for k in range(steps[i])]
            summed = sum(GAMMA**k * r for k, r in enumerate(rewards))
            assert part.reward[0, i] == pytest.approx(summed)
            assert part.extras["discount"][0, i] == GAMMA ** steps[i]
    assert seen >= {(0, m) for m in range(1, n + 1)}, "windows that end where it was cut off"
    assert (1, n) in seen


class Playing:
    def __init__(self, **kwargs):
        transport = Memory()
        self.snapshots = transport.publisher(SNAPSHOTS)
        self.evaluator = Evaluator(
            Scripted(1, **kwargs), Counting(), transport.subscriber(SNAPSHOTS), 2, 7,
            lambda n: Scripted(n, **kwargs),
        )  # fmt: skip

    def play(self, most=100):
        done = []
        while EVALUATED not in done and len(done) < most:
            done.append(self.evaluator.step())
        return done


def test_an_evaluation_in_which_the_env_raised_is_begun_anew_with_another_seed():
    playing = Playing(what="raise", at=5, length=3)
    playing.snapshots.push(2, Params(SNAPSHOTS.layout))
    done = playing.play()
    assert done.count(EVALUATOR_REBUILD) == 1
    at = done.index(EVALUATOR_REBUILD)
    assert done[:at] == [LOAD] + [EVALUATE] * 4
    assert done[at + 1] is LOAD, "from the beginning, not where it was"
    evaluator = playing.evaluator
    assert evaluator.version == 2
    assert evaluator.result["length"].tolist() == [3, 3]
    assert evaluator.result["return"].tolist() == [1 + 2 + 3, 5 + 6 + 7], "both of the new env"
    fault = evaluator.fault
    assert (fault.role, fault.seed, fault.step) == ("evaluator", 7, 4)
    old, new = Scripted.lives
    assert old.closed
    assert new.seed == 8


def test_an_evaluation_whose_reset_raises_is_begun_anew():
    playing = Playing(what="first reset", length=3)
    playing.snapshots.push(2, Params(SNAPSHOTS.layout))
    done = playing.play()
    assert done[0] is EVALUATOR_REBUILD
    assert done[-1] is EVALUATED
    assert playing.evaluator.fault.step == 0


@register_env("test/Scripted")
class InRuns(Scripted):
    """As configs make it."""


CONFIG = {
    "env": {"id": "test/Scripted"},
    "network": {"hidden": [8]},
    "scale": {"envs_per_actor": 2, "rollout_length": 6},
    "stop": {"updates": 12},
}
PPO = CONFIG | {"algorithm": {"name": "ppo", "epochs": 1, "normalise_observation": True}}
DQN = CONFIG | {
    "algorithm": {
        "name": "dqn", "warmup": 24, "capacity": 100, "batch_size": 8, "new_steps": 12, "n_step": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", [PPO, DQN], ids=["ppo", "dqn"])
@pytest.mark.parametrize("what", ["raise", "nan obs", "inf reward", "reset"])
def test_what_an_env_did_wrong_does_not_reach_the_networks(config, what, tmp_path):
    """Life 0 is the env that is made to look at, and the first actor's."""
    argv = [f'env.kwargs={{what="{what}", at=10}}']
    result = tianji.train(config, argv, runs=tmp_path)
    assert (result.status, result.updates) == ("done", 12)
    assert result.notes["env_restarts"] == 1 + (what == "reset")
    params = tianji.load(result.run_dir)
    assert params.version == 12


def test_an_env_that_can_never_be_rebuilt_well_ends_the_run_by_its_budget(tmp_path):
    config = PPO | {"env": {"id": "test/Always"}}
    with pytest.raises(Failure, match=r"nan in its obs.*3 within 600 s"):
        tianji.train(config, ["faults.env_restarts=3"], runs=tmp_path)


@register_env("test/Always")
class AlwaysNaN(Scripted):
    def reset(self, seed):
        observation = super().reset(seed)
        if self.life > 0:
            observation["obs"][:] = np.nan
        return observation

    def step(self, action):
        step = super().step(action)
        if self.life == 0 and self._steps == 9:
            step.observation["obs"][:] = np.nan
        return step


@register_env("test/Unmade")
class Unmade(Scripted):
    """An own env that cannot be created."""

    def __init__(self, num_envs, text="nowhere"):
        if text == "gone":
            raise Failure("the simulator ended by itself")
        json.loads(text)


def test_an_own_env_whose_constructor_raises_is_refused_with_its_own_line(tmp_path):
    where = r"test/Unmade cannot be created.*JSONDecodeError: .* \(test_env_faults.py, line "
    with pytest.raises(Refusal, match=where):
        tianji.train(PPO | {"env": {"id": "test/Unmade"}}, runs=tmp_path)
    with pytest.raises(Refusal, match="does not fit test/Unmade"):
        tianji.train(PPO | {"env": {"id": "test/Unmade", "kwargs": {"maps": 3}}}, runs=tmp_path)
    with pytest.raises(Failure, match=r"^the simulator ended by itself$"):
        tianji.train(PPO | {"env": {"id": "test/Unmade", "kwargs": {"text": "gone"}}},
                     runs=tmp_path)  # fmt: skip


@register_env("test/Once")
class Once(Scripted):
    """It can be made once, and not again after it raised."""

    made = 0

    def __init__(self, num_envs):
        type(self).made += 1
        if self.made > 1:
            raise OSError("the address is in use")
        super().__init__(num_envs, what="raise", at=10)


def test_an_env_that_cannot_be_made_anew_fails_the_run_after_its_first_step(tmp_path):
    Once.made = 0
    with pytest.raises(Failure, match="cannot be made anew: OSError: the address is in use"):
        tianji.train(PPO | {"env": {"id": "test/Once"}}, runs=tmp_path)
