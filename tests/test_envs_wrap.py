"""What a config puts around envs: wrappers of Gymnasium by name, and keys that work for all."""

import gymnasium
import numpy as np
import pytest

import tianji
from tianji import frames
from tianji.config import load_config
from tianji.env import Cuttable, Halves, Restorable, TimeStep, make_env
from tianji.envs.wrap import wrapped
from tianji.errors import Refusal
from tianji.ledger import Ledger
from tianji.testing import check_env

OWN = ("toy/Identity", "toy/Chain", "toy/Target", "CartPole-v1", "Pendulum-v1", "Acrobot-v1")


@pytest.mark.parametrize("id", OWN)
def test_all_keys_together_keep_the_promises_of_an_env(id):
    keys = {"time_limit": 6, "clip_reward": 0.5, "clip_observation": 0.5, "frame_stack": 3}
    check_env(lambda num_envs: make_env(id, num_envs, {}, **keys), steps=60)


@pytest.mark.parametrize("id", OWN)
def test_a_time_limit_cuts_and_a_value_follows(id):
    env = make_env(id, 3, {}, time_limit=4)
    assert env.spec.max_episode_steps == 4
    env.reset(0)
    rng = np.random.default_rng(0)
    lengths = np.zeros(3, int)
    cut = 0
    for _ in range(60):
        action = env.spec.action
        step = env.step(
            rng.integers(action.n, size=3)
            if hasattr(action, "n")
            else rng.uniform(-1, 1, (3, len(action.low))).astype(np.float32)
        )
        lengths = np.where(step.valid, lengths + 1, 0)
        assert (lengths <= 4).all()
        np.testing.assert_array_equal(step.truncated, (lengths == 4) & ~step.terminated)
        cut += step.truncated.sum()
    assert cut > 3


def test_a_time_limit_never_makes_an_episode_longer_and_is_said_once():
    assert make_env("CartPole-v1", 1, {}, time_limit=1000).spec.max_episode_steps == 500
    assert make_env("toy/Chain", 1, {"limit": 9}, time_limit=1000).spec.max_episode_steps == 9
    with pytest.raises(Refusal, match="only one can"):
        make_env("CartPole-v1", 1, {"max_episode_steps": 7}, time_limit=5)


class Endless:
    """Rewards 5, 10, ... in an episode without an end, in which a life is lost every third step."""

    def __init__(self, env):
        self.spec, self.num_envs = env.spec, env.num_envs
        self._n = np.zeros(env.num_envs)

    def reset(self, seed):
        self._n[:] = 0
        return self._seen()

    def step(self, action):
        self._n += 1
        no = np.zeros(self.num_envs, bool)
        score = tianji.env.Score(None, no)
        return TimeStep(self._seen(), 5 * self._n, self._n % 3 == 0, no, ~no, score)

    def _seen(self):
        return {"obs": np.repeat(self._n[:, None], 4, axis=1).astype(np.float32)}

    def close(self):
        pass


class CanBeCut(Endless):
    def reset_some(self, which):
        self._n[which] = 0
        return self._seen()


def test_a_limit_that_falls_on_a_lost_life_terminates_and_ends_the_game():
    env = wrapped(CanBeCut(make_env("toy/Identity", 2, {})), time_limit=6, clip_reward=1.0)
    assert isinstance(env.env, Cuttable)
    env.reset(0)
    ledger, returns = Ledger(2), []
    for t in range(1, 15):
        step = env.step(np.zeros(2))
        at = t % 7  # six steps, and the one that resets
        assert step.valid.all() == (at != 0)
        assert step.terminated.all() == (at in (3, 6))
        assert not step.truncated.any()
        assert step.score.ended.all() == (at == 6)
        assert (step.reward == (at != 0)).all()
        returns += ledger.count(step)[1]["return"].tolist()
    assert returns == [105.0] * 4


def test_clipped_rewards_are_learnt_and_raw_ones_are_reported():
    plain, clipped = (make_env("Pendulum-v1", 4, {}, clip_reward=c) for c in (None, 0.5))
    ledgers, returns = [Ledger(4), Ledger(4)], [[], []]
    plain.reset(0)
    clipped.reset(0)
    for _ in range(201):
        action = np.ones((4, 1), np.float32)
        for i, env in enumerate((plain, clipped)):
            step = env.step(action)
            returns[i] += ledgers[i].count(step)[1]["return"].tolist()
            if i:
                assert (np.abs(step.reward) <= 0.5).all()
    assert returns[0] == returns[1]
    assert min(returns[0]) < -100


def test_clipped_observations_are_within_the_bound_and_bytes_are_refused():
    env = make_env("CartPole-v1", 8, {}, clip_observation=0.03)
    seen = [env.reset(0)["obs"]]
    seen += [env.step(np.ones(8, np.int64)).observation["obs"] for _ in range(20)]
    assert np.abs(np.stack(seen)).max() == np.float32(0.03)
    with pytest.raises(Refusal, match="uint8"):
        make_env("toy/Frames", 1, {}, clip_observation=1.0)


@pytest.mark.parametrize("id", ["toy/Chain", "CartPole-v1"])
def test_a_stack_is_what_frames_rebuild(id):
    env, plain = make_env(id, 4, {}, frame_stack=3), make_env(id, 4, {})
    assert env.spec.frames == 3
    assert env.spec.held == plain.spec.observation
    stacks, newest, valid = [env.reset(5)["obs"].copy()], [plain.reset(5)["obs"]], []
    rng = np.random.default_rng(0)
    for _ in range(150):
        action = rng.integers(2, size=4)
        step, other = env.step(action), plain.step(action)
        stacks.append(step.observation["obs"].copy())
        newest.append(other.observation["obs"].copy())
        valid.append(step.valid.copy())
    older = stacks[0][:, :-1]
    assert not older.any()
    assert not np.stack(valid).all()
    rebuilt = frames.stacked(np.stack(newest), older, np.stack(valid))
    np.testing.assert_array_equal(rebuilt, np.stack(stacks))


def test_stacks_of_stacks_and_of_agents_are_refused():
    with pytest.raises(Refusal, match="stack stacks"):
        wrapped(make_env("toy/Chain", 1, {}, frame_stack=2), frame_stack=2)


def test_an_env_stays_restorable_and_no_other_becomes_it():
    assert isinstance(make_env("CartPole-v1", 2, {}, frame_stack=2), Restorable)
    assert not isinstance(make_env("Pendulum-v1", 2, {}, frame_stack=2), Restorable)
    assert not isinstance(make_env("CartPole-v1", 2, {}, frame_stack=2), Halves)
    halves = make_env("ALE/Pong-v5", 2, {"frames": 1}, frame_stack=2, halves=True)
    assert isinstance(halves, Halves)


def test_an_env_that_cannot_be_cut_is_refused_a_time_limit():
    env = Endless(make_env("toy/Identity", 2, {}))
    with pytest.raises(Refusal, match="reset_some"):
        wrapped(env, time_limit=3)


class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


def test_wrappers_are_applied_in_order_by_name_or_as_module_and_class():
    env = make_env(
        "CartPole-v1",
        2,
        {},
        wrappers=(
            f"{__name__}:Doubled",
            {"name": "ClipReward", "max_reward": 1.5},
            {"name": "TimeLimit", "max_episode_steps": 3},
        ),
    )
    env.reset(0)
    assert env.spec.max_episode_steps == 3
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [[1.5, 1.5]] * 3
    assert steps[-1].truncated.all()


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("TimeLimits", r'Did you mean "TimeLimit"\? Known: .*ClipReward'),
        ("no_such_module:Thing", "no module no_such_module"),
        ("gymnasium.wrappers:Thing", "has no such class"),
        ({"name": "TimeLimit", "steps": 3}, "Correct its arguments"),
        ("ClipReward", "Correct its arguments"),
        ("Autoreset", "Leave it out"),
    ],
)
def test_a_wrapper_that_cannot_be_applied_is_refused(wrapper, words):
    with pytest.raises(Refusal, match=words):
        make_env("CartPole-v1", 1, {}, wrappers=(wrapper,))


def test_wrappers_around_an_env_that_gymnasium_does_not_make_are_refused():
    with pytest.raises(Refusal, match=r"env\.clip_reward"):
        make_env("toy/Chain", 1, {}, wrappers=("TimeLimit",))


def tree(env, **scale):
    return {
        "env": {"id": "CartPole-v1"} | env,
        "algorithm": {"name": "ppo", "epochs": 1},
        "scale": scale,
        "stop": {"updates": 2},
    }


def test_running_means_of_each_envs_own_are_refused_with_the_trainers_as_remedy():
    wrappers = {"wrappers": ["NormalizeObservation"]}
    with pytest.raises(Refusal, match=r"algorithm\.normalise_observation = true"):
        load_config(tree(wrappers, actors=2, envs_per_actor=1))
    with pytest.raises(Refusal, match=r"algorithm\.normalise_reward = true"):
        load_config(tree({"wrappers": [{"name": "NormalizeReward"}]}))
    assert load_config(tree(wrappers, envs_per_actor=1)).env.wrappers == ("NormalizeObservation",)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"wrappers": [3]}, "a text in quotes, or a table"),
        ({"wrappers": "TimeLimit"}, "a list"),
        ({"wrappers": [{"max_episode_steps": 3}]}, "names no wrapper"),
        ({"time_limit": 0}, "at least 1"),
        ({"clip_reward": 0}, "more than 0"),
        ({"frame_stack": 0}, "at least 1"),
    ],
)
def test_keys_that_say_nothing_sensible_are_refused(env, words):
    with pytest.raises(Refusal, match=words):
        load_config(tree(env))


def test_a_run_trains_evaluates_and_is_loaded_with_the_same_env(tmp_path):
    env = {
        "wrappers": [{"name": "TimeLimit", "max_episode_steps": 9}],
        "clip_reward": 0.5,
        "frame_stack": 2,
    }
    result = tianji.train(tree(env, envs_per_actor=4), runs=tmp_path)
    trained = tianji.load(result.run_dir)
    assert trained.config.env.wrappers == tuple(env["wrappers"])
    assert trained.env().spec.frames == 2
    episodes = trained.evaluate(4)
    assert (episodes["length"] <= 9).all()
    np.testing.assert_array_equal(episodes["return"], episodes["length"])
