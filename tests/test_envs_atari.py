"""Atari: what an episode is, stacks that are held once, halves, and what is refused."""

import builtins
import itertools
import os

import numpy as np
import pytest

import tianji
from tianji import frames
from tianji.actor import FRAMES
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.build import build, look
from tianji.config import ScaleConfig, load_config
from tianji.env import Halves, Restorable, make_env
from tianji.errors import Refusal
from tianji.ledger import Ledger
from tianji.store import Replay
from tianji.testing import check_env
from tianji.testing.algorithm import config_for
from tianji.types import Rollout

pytest.importorskip("ale_py", reason="needs the extra atari")


def atari(num_envs, game="Breakout", **options):
    kwargs = {k: options.pop(k) for k in list(options) if k not in ("halves", "threads", "render",
                                                                   "time_limit")}  # fmt: skip
    return make_env(f"ALE/{game}-v5", num_envs, kwargs, **options)


def play(env, steps, seed=0, first=7):
    """First observations, and every step of random actions."""
    rng = np.random.default_rng(seed)
    observation = env.reset(first)["obs"].copy()
    made = [env.step(rng.integers(env.spec.action.n, size=env.num_envs)) for _ in range(steps)]
    return observation, made


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param({k: True}, marks=pytest.mark.slow) for k in ("episodic_life", "halves"))],
)
def test_atari_keeps_the_promises_of_an_env(options):
    check_env(lambda num_envs: atari(num_envs, size=20, time_limit=15, **options), steps=40)


def test_the_spec_says_what_the_game_is():
    env = atari(2, "Pong")
    assert env.spec.observation["obs"].shape == (4, 84, 84)
    assert (env.spec.frames, env.spec.action.n, env.spec.max_episode_steps) == (4, 6, 27_000)
    assert env.spec.held["obs"].shape == (84, 84)
    assert not isinstance(env, Restorable)
    assert atari(1, "Pong", full_action_space=True).spec.action.n == 18
    small = atari(1, "Pong", size=42, frames=2, frameskip=2, grayscale=False)
    assert small.spec.observation["obs"].shape == (2, 42, 42, 3)
    assert small.spec.max_episode_steps == 54_000
    assert small.reset(0)["obs"].shape == (1, 2, 42, 42, 3)


def test_a_lost_life_terminates_and_the_game_goes_on():
    env = atari(4, episodic_life=True)
    _, steps = play(env, 500)
    over = np.stack([step.score.ended for step in steps])
    terminated = np.stack([step.terminated for step in steps])
    valid = np.stack([step.valid for step in steps])
    assert over.sum() >= 4
    assert (terminated | ~over).all()
    lives = terminated & ~over
    assert lives.sum() >= 4 * 4  # five lives: four are lost before the last one
    np.testing.assert_array_equal(valid[1:], ~over[:-1])  # only a game's end is followed by a reset


def test_a_game_without_lives_as_episodes_ends_once():
    env = atari(4)
    _, steps = play(env, 400)
    for step in steps:
        np.testing.assert_array_equal(step.terminated | step.truncated, step.score.ended)
    assert sum(step.terminated.sum() for step in steps) >= 2


def test_rewards_are_clipped_and_returns_are_reported_raw():
    learnt, reported = [], []
    for clip in (True, False):
        env = atari(3, "SpaceInvaders", clip_reward=clip, time_limit=120)
        _, steps = play(env, 150)
        learnt.append(np.stack([step.reward for step in steps]))
        ledger = Ledger(3)
        reported.append([ledger.count(step)[1]["return"].tolist() for step in steps])
    assert reported[0] == reported[1]
    assert sum(map(len, reported[0])) > 0
    assert set(np.unique(learnt[0])) == {0, 1}
    assert learnt[1].max() >= 5
    np.testing.assert_array_equal(np.sign(learnt[1]), learnt[0])


def test_a_game_is_cut_after_its_frames_and_after_the_time_limit():
    for options, length in (({"max_frames": 40}, 10), ({"time_limit": 7}, 7)):
        env = atari(2, "Pong", **options)
        assert env.spec.max_episode_steps == length
        _, steps = play(env, 2 * length + 2)
        cut = [t for t, step in enumerate(steps) if step.truncated.all()]
        assert cut == [length - 1, 2 * length]
        assert not steps[length].valid.any()


def test_halves_play_the_games_of_the_whole():
    whole, apart = atari(5, halves=False), atari(5, halves=True, threads=2)
    assert isinstance(apart, Halves)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(whole.reset(3)["obs"], apart.reset(3)["obs"])
    for t in range(100):
        action = rng.integers(4, size=5)
        step = whole.step(action)
        if t % 3:
            apart.begin(0, action[:2])
            apart.begin(1, action[2:])
            parts = [apart.end(0), apart.end(1)]
        else:
            other = apart.step(action)
            np.testing.assert_array_equal(other.score.reward, step.score.reward)
            parts = [other]
        for name in ("reward", "terminated", "truncated", "valid"):
            together = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(together, getattr(step, name))
        seen = np.concatenate([part.observation["obs"] for part in parts])
        np.testing.assert_array_equal(seen, step.observation["obs"])


def test_a_closed_game_leaves_no_thread():
    before = set(os.listdir("/proc/self/task"))  # some of which may end meanwhile
    env = atari(4, "Pong", threads=2, halves=True)
    env.reset(0)
    own = set(os.listdir("/proc/self/task")) - before
    assert len(own) >= 4
    env.close()
    env.close()
    assert not own & set(os.listdir("/proc/self/task"))


SIDE = 40
"""pixels, where a policy looks at them: quicker than 84"""


class Watched:
    """An env that remembers every stack that it gave."""

    def __init__(self, env):
        self.env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self.stacks = []

    def reset(self, seed):
        first = self.env.reset(seed)
        self.stacks.append(first["obs"].copy())
        return first

    def step(self, action):
        step = self.env.step(action)
        self.stacks.append(step.observation["obs"].copy())
        return step

    def begin(self, half, action):
        self.env.begin(half, action)

    def end(self, half):
        step = self.env.end(half)
        if half == 0:
            self.first = step.observation["obs"].copy()
        else:
            self.stacks.append(np.concatenate([self.first, step.observation["obs"]]))
        return step

    def close(self):
        self.env.close()


def watched_run(algorithm, T, halves=False):
    """Roles around 4 games that end often, and the env that remembers its stacks."""
    scale = ScaleConfig(actors=1, envs_per_actor=4, rollout_length=T, halves=halves)
    made = []

    def make(num_envs):
        env = atari(num_envs, episodic_life=True, size=SIDE, time_limit=45, halves=halves)
        made.append(Watched(env))
        return made[-1]

    built = build(config_for(algorithm, scale=scale), make)
    built.learner.begin()
    return built, made[0]


def pushed(built, rollouts):
    """Slots of so many rollouts, as the actor fills them."""
    actor, lane = built.actors[0], built.transport.inbox(built.assembly.lanes[0])
    for _ in range(rollouts):
        assert lane.grant(0)
        while (slot := lane.probe()) is None:
            actor.step()
        yield slot
        lane.release(slot)


@pytest.mark.parametrize(("halves", "rollouts"), [(False, 32), (True, 12)])
def test_rollouts_that_hold_each_picture_once_give_the_envs_own_stacks_back(halves, rollouts):
    T, resets = 16, 0
    built, env = watched_run(PPO(epochs=1, minibatches=1), T, halves)
    store = built.assembly.chooser(built.transport)
    gatherer = built.assembly.gatherer(built.transport)
    selection = built.assembly.setup.description.selection
    chosen = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in selection.items()}
    for k, slot in enumerate(pushed(built, rollouts)):
        rollout = Rollout.over(slot.arrays)
        assert rollout.observation["obs"].shape == (T + 1, 4, SIDE, SIDE)
        own = np.stack(env.stacks[k * T : (k + 1) * T + 1])
        newest, older = rollout.observation["obs"], rollout.once[FRAMES]
        np.testing.assert_array_equal(frames.stacked(newest, older, rollout.valid), own)
        store.add(0, slot.index)
        store.choose(np.random.default_rng(0), chosen)
        (part,) = gatherer.parts(chosen)
        np.testing.assert_array_equal(part.observation["obs"], own)
        resets += int((~rollout.valid).sum())
    assert resets >= rollouts // 2
    built.close()


def test_replay_that_holds_each_picture_once_gives_the_envs_own_stacks_back():
    T, rollouts = 8, 40
    capacity = T * 4 * (rollouts + 1)
    built, env = watched_run(DQN(warmup=32, batch_size=32, capacity=capacity, n_step=3), T)
    store = built.assembly.chooser(built.transport)
    gatherer = built.assembly.gatherer(built.transport)
    selection = built.assembly.setup.description.selection
    assert isinstance(store, Replay)
    for slot in pushed(built, rollouts):
        store.add(0, slot.index)
    chosen = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in selection.items()}
    rng, own, after_reset = np.random.default_rng(0), np.stack(env.stacks), 0
    for _ in range(40):
        store.choose(rng, chosen)
        (part,) = gatherer.parts(chosen)
        row, at = np.divmod(chosen["step"], 4)  # rollouts follow each other: no slot was used twice
        np.testing.assert_array_equal(part.observation["obs"][0], own[row, at])
        follows = part.extras["discount"][0] > 0  # of others, what ends the window is never used
        span = np.round(np.log(part.extras["discount"][0][follows]) / np.log(0.99)).astype(int)
        then = own[row[follows] + span, at[follows]]
        np.testing.assert_array_equal(part.observation["obs"][1][follows], then)
        after_reset += int((own[row, at, 0].max(axis=(1, 2)) == 0).sum())
    assert after_reset >= 10
    built.close()


def test_a_picture_is_of_the_first_game_itself_in_colours():
    env, plain = atari(2, "Pong", render=True), atari(2, "Pong")
    env.reset(5)
    plain.reset(5)
    rng, seen = np.random.default_rng(0), 0
    for _ in range(60):
        action = rng.integers(6, size=2)
        step, other = env.step(action), plain.step(action)
        np.testing.assert_array_equal(step.observation["obs"], other.observation["obs"])
        picture = env.render()
        assert (picture.shape, picture.dtype) == ((210, 160, 3), np.uint8)
        # Our paddle, the green one: where it is in the large picture, it is in the small one.
        (rows,) = np.nonzero((picture[34:194, 140:144] == (92, 186, 92)).all(axis=2).any(axis=1))
        if len(rows) > 4:
            seen += 1
            small = step.observation["obs"][0, -1].astype(int)
            assert np.abs(small[int((rows.mean() + 34) / 2.5), 74:76] - 87).max() > 30
    assert seen > 20
    with pytest.raises(Refusal, match="render=True"):
        plain.render()


@pytest.mark.parametrize(
    ("id", "kwargs", "words"),
    [
        ("ALE/Pnog-v5", {}, 'Did you mean "ALE/Pong-v5"'),
        ("ALE/Pong-v4", {}, 'Did you mean "ALE/Pong-v5"'),
        ("ALE/Pong-v5", {"sticky": 1.5}, "from 0 to 1"),
        ("ALE/Pong-v5", {"frameskip": 0}, "1 or more"),
        ("ALE/Pong-v5", {"size": 84.5}, "a whole number"),
        ("ALE/Pong-v5", {"noop": 3}, "Correct env.kwargs"),
        ("ALE/Pong-v5", {"threads": 2}, "Set scale.env_threads instead"),
    ],
)
def test_what_no_game_can_be_played_with_is_refused(id, kwargs, words):
    with pytest.raises(Refusal, match=words):
        make_env(id, 1, kwargs)


def test_without_the_emulator_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **others):
        if name.startswith("ale_py"):
            raise ImportError("No module named 'ale_py'", name="ale_py")
        return real(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(Refusal, match=r"pip install 'tianji\[atari\]'"):
        make_env("ALE/Pong-v5", 1, {})


TREE = {
    "env": {"id": "ALE/Pong-v5"},
    "algorithm": {"name": "ppo"},
    "stop": {"updates": 1},
}


def tree(**scale):
    return TREE | {"scale": scale}


def test_more_threads_than_cores_are_refused():
    local = {"engine": "local", "actors": 2, "env_threads": 3}
    assert load_config(tree(**local), available=7).scale.env_threads == 3
    with pytest.raises(Refusal, match=r"makes 7 threads .* 6 cores"):
        load_config(tree(**local), available=6)
    assert load_config(tree(env_threads=4), available=4).scale.env_threads == 4
    with pytest.raises(Refusal, match="4 cores"):
        load_config(tree(env_threads=5), available=4)


def test_threads_for_an_env_that_has_none_are_refused():
    config = load_config(tree(env_threads=2) | {"env": {"id": "CartPole-v1"}}, available=4)
    with pytest.raises(Refusal, match="would do nothing"):
        build(config)
    config = load_config(tree(env_threads=2) | {"env": {"id": "toy/Chain"}}, available=4)
    with pytest.raises(Refusal, match="would do nothing"):
        build(config)


def test_the_config_hands_threads_and_halves_to_the_game():
    config = load_config(tree(env_threads=2, halves=True, envs_per_actor=4), available=4)
    built = build(config)
    assert [part.vector.num_envs for part in built.actors[0]._env._parts] == [2, 2]
    built.close()


@pytest.mark.parametrize("make", [build, look], ids=["build", "topologies"])
def test_one_game_has_no_halves(make):
    config = load_config(tree(halves=True, envs_per_actor=1))
    with pytest.raises(Refusal, match="one env has no halves"):
        make(config)
    setup, _ = look(load_config(tree(halves=True, envs_per_actor=2)))
    assert setup.spec.envs == 2


def test_what_was_learnt_is_evaluated_and_shown_in_the_same_game(tmp_path):
    config = tree(envs_per_actor=2, rollout_length=8) | {
        "env": {"id": "ALE/Pong-v5", "kwargs": {"size": 40}, "time_limit": 12},
        "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    }
    trained = tianji.load(tianji.train(config, runs=tmp_path).run_dir)
    assert trained.evaluate(2)["length"].tolist() == [12, 12]
    pictures, score = trained.frames()
    assert len(pictures) == 13  # the first one, and one after every step
    assert {picture.shape for picture in pictures} == {(210, 160, 3)}
    assert any((one != other).any() for one, other in itertools.pairwise(pictures))
    assert np.isfinite(score)
