"""MinAtar: its games as bool pictures, small convolutions, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest

from tianji import networks
from tianji.algorithm import Network
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.testing import check_algorithm, check_env

pytest.importorskip("minatar", reason="needs the extra minatar")

GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


@pytest.mark.parametrize("game", GAMES)
def test_every_game_keeps_the_promises_of_an_env(game):
    id = f"MinAtar/{game}-v1"
    check_env(lambda num_envs: make_env(id, num_envs, {}, time_limit=40), steps=120)


def test_the_spec_is_a_bool_picture_and_v0_has_all_actions():
    few, all_of_them = (make_env(f"MinAtar/Breakout-{v}", 2, {}) for v in ("v1", "v0"))
    assert few.spec.observation["obs"].shape == (10, 10, 4)
    assert few.spec.observation["obs"].dtype == np.bool_
    assert (few.spec.action.n, all_of_them.spec.action.n) == (3, 6)


def test_pictures_are_the_same_by_gymnasium_with_wrappers():
    """Whether by our own loop, or by Gymnasium where wrappers ask for single envs."""
    own = make_env("MinAtar/Breakout-v1", 2, {"sticky": 0.0})
    wrapped = make_env(
        "MinAtar/Breakout-v1",
        2,
        {"sticky_action_prob": 0.0},
        wrappers=({"name": "TimeLimit", "max_episode_steps": 50},),
    )
    assert wrapped.spec.observation == own.spec.observation
    assert wrapped.spec.max_episode_steps == 50
    np.testing.assert_array_equal(own.reset(3)["obs"], wrapped.reset(3)["obs"])
    rng = np.random.default_rng(0)
    for _ in range(60):
        action = rng.integers(3, size=2)
        one, other = own.step(action), wrapped.step(action)
        np.testing.assert_array_equal(one.observation["obs"], other.observation["obs"])
        np.testing.assert_array_equal(one.terminated, other.terminated)
        np.testing.assert_array_equal(one.valid, other.valid)


def test_a_picture_has_a_colour_for_every_kind_of_object():
    env = make_env("MinAtar/Breakout-v1", 1, {}, render=True)
    observation = env.reset(0)["obs"][0]
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((160, 160, 3), np.uint8)
    colours = {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}
    kinds = np.unique((observation * np.arange(1, 5)).max(axis=2))
    assert len(colours) == len(kinds) > 2


def test_small_pictures_get_small_convolutions():
    observation = make_env("MinAtar/Breakout-v1", 1, {}).spec.observation["obs"]
    assert networks.kind(Network(), observation) == "cnn"
    (module,) = networks.build(Network(), observation, 3)
    shapes = [tuple(p.shape) for p in module.parameters() if p.ndim > 1]
    assert shapes == [(16, 4, 3, 3), (128, 1024), (3, 128)]


@pytest.mark.parametrize(
    "algorithm", [PPO(epochs=1, minibatches=1), DQN(warmup=64, batch_size=16, capacity=1000)]
)
def test_algorithms_learn_from_bool_pictures(algorithm):
    check_algorithm(algorithm, lambda n: make_env("MinAtar/Breakout-v1", n, {}), updates=2)


@pytest.mark.parametrize(
    ("id", "kwargs", "words"),
    [
        ("MinAtar/Brakout-v1", {}, 'Did you mean "MinAtar/Breakout-v'),
        ("MinAtar/Breakout-v3", {}, 'Did you mean "MinAtar/Breakout-v'),
        ("MinAtar/Breakout-v1", {"sticky": -1}, "from 0 to 1"),
        ("MinAtar/Breakout-v1", {"ramping": True}, "Correct env.kwargs"),
    ],
)
def test_what_is_no_game_is_refused(id, kwargs, words):
    with pytest.raises(Refusal, match=words):
        make_env(id, 1, kwargs)


@pytest.mark.parametrize(
    ("id", "missing", "extra"),
    [
        ("MinAtar/Breakout-v1", "minatar.environment", "minatar"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_a_missing_package_is_told_with_the_line_that_installs_it(id, missing, extra, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in (missing, "mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ImportError
    with pytest.raises(Refusal, match=rf"pip install 'tianji\[{extra}\]'"):
        make_env(id, 1, {})


def test_mujoco_steps():
    pytest.importorskip("mujoco", reason="needs the extra mujoco")
    env = make_env("HalfCheetah-v5", 2, {})
    assert env.spec.observation["obs"].shape == (17,)
    assert len(env.spec.action.low) == 6
    check_env(lambda num_envs: make_env("HalfCheetah-v5", num_envs, {}, time_limit=20), steps=50)


def test_importing_minatar_says_nothing():
    code = "from tianji.env import make_env; make_env('MinAtar/Freeway-v1', 1, {})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
