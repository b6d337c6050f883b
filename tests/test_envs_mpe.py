"""The particle environments: step by step what mpe2 does, and what our template promises."""

import importlib
import json

import numpy as np
import pytest
from thorough import THOROUGH

from tianji.annotated import read, tree
from tianji.env import Continuous, Discrete, EnvSpec, Restorable, make_env
from tianji.envs.mpe import PIXELS, SimpleAdversary, SimpleSpread, SimpleTag
from tianji.errors import Refusal
from tianji.ledger import Ledger
from tianji.testing import check_env

B = 2
STEPS = 1000 if THOROUGH else 250
WORLDS = {
    "spread": ("simple_spread", {}),
    "spread of five": ("simple_spread", {"N": 5, "local_ratio": 0.3, "max_cycles": 40}),
    "spread of one": ("simple_spread", {"N": 1}),
    "tag": ("simple_tag", {}),
    "tag of many": (
        "simple_tag",
        {"num_good": 3, "num_adversaries": 2, "num_obstacles": 4, "max_cycles": 60},
    ),
    "tag that ends": (
        "simple_tag",
        {"num_adversaries": 6, "num_obstacles": 0, "terminate_on_success": True},
    ),
    "adversary": ("simple_adversary", {}),
    "adversary of four": ("simple_adversary", {"N": 4}),
}


class Peer:
    """One world of mpe2 that begins its episodes where one of ours does."""

    def __init__(self, name, kwargs):
        self.env = importlib.import_module(f"mpe2.{name}_v3").parallel_env(**kwargs)
        self.agents = tuple(self.env.possible_agents)

    def begin(self, env, b):
        self.env.reset(seed=0)
        world = self.env.unwrapped.world
        for entity, place in zip(world.entities, env._place[b], strict=True):
            entity.state.p_pos = place.copy()
        if hasattr(env, "_goal"):
            for agent in world.agents:
                agent.goal_a = world.landmarks[int(env._goal[b])]

    def look(self, spec, observation, b):
        for i, (agent, width) in enumerate(zip(self.agents, spec.widths, strict=True)):
            theirs = self.env.aec_env.observe(agent)
            assert theirs.shape == (width,)
            np.testing.assert_allclose(observation["obs"][b, i, :width], theirs, rtol=0, atol=1e-6)
            assert not observation["obs"][b, i, width:].any()
        np.testing.assert_allclose(observation["state"][b], self.env.state(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", WORLDS)
def test_random_steps_are_those_of_mpe2(name: str, continuous: bool) -> None:
    id, kwargs = WORLDS[name]
    kwargs = {**kwargs, "continuous_actions": continuous}
    env = make_env(f"mpe/{id}", B, kwargs)
    peers, rng = [Peer(id, kwargs) for _ in range(B)], np.random.default_rng(0)
    assert env.spec.agents == peers[0].agents
    shape = (B, len(env.spec.agents))
    observation = env.reset(5)
    for b, peer in enumerate(peers):
        peer.begin(env, b)
        peer.look(env.spec, observation, b)
    ends = 0
    for _ in range(STEPS // B):
        action = rng.random((*shape, 5), np.float32) if continuous else rng.integers(5, size=shape)
        step = env.step(action)
        for b, peer in enumerate(peers):
            if not step.valid[b]:
                peer.begin(env, b)
                peer.look(env.spec, step.observation, b)
                continue
            given = dict(zip(peer.agents, action[b], strict=True))
            _, reward, terminated, truncated, _ = peer.env.step(given)
            if any(terminated.values()) or any(truncated.values()):
                ends += 1
            assert set(terminated.values()) == {bool(step.terminated[b])}
            assert set(truncated.values()) == {bool(step.truncated[b])}
            theirs = np.array([reward[agent] for agent in peer.agents], np.float32)
            np.testing.assert_allclose(step.reward[b], theirs, rtol=0, atol=1e-6)
            peer.look(env.spec, step.observation, b)
    assert ends >= STEPS // 61 - B


def test_a_continuous_action_out_of_bounds_is_clipped() -> None:
    envs = [SimpleSpread(3, continuous_actions=True) for _ in range(2)]
    for env in envs:
        env.reset(0)
    action = np.random.default_rng(0).uniform(-1, 2, (3, 3, 5)).astype(np.float32)
    far, inside = envs[0].step(action), envs[1].step(np.clip(action, 0, 1))
    np.testing.assert_array_equal(far.observation["obs"], inside.observation["obs"])


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", ["simple_spread", "simple_tag", "simple_adversary"])
def test_every_world_keeps_the_promises_of_an_env(name: str, continuous: bool) -> None:
    kwargs = {"continuous_actions": continuous, "max_cycles": 7}
    check_env(lambda num_envs: make_env(f"mpe/{name}", num_envs, kwargs), steps=60)


def test_the_spec_says_agents_spaces_and_widths() -> None:
    spread, tag = SimpleSpread(2).spec, SimpleTag(2, continuous_actions=True).spec
    assert spread.action == Discrete(5)
    assert tag.action == Continuous((0.0,) * 5, (1.0,) * 5, (5,))
    assert spread.own_rewards
    assert tag.agents == ("adversary_0", "adversary_1", "adversary_2", "agent_0")
    assert tag.widths == (16, 16, 16, 14)
    assert tag.observation["obs"].shape == (4, 16)
    assert tag.observation["state"].shape == (62,)
    assert read(EnvSpec, json.loads(json.dumps(tree(tag)))) == tag
    assert isinstance(SimpleAdversary(1), Restorable)


def test_an_episode_is_truncated_after_max_cycles_and_then_only_resets() -> None:
    env = SimpleSpread(1, max_cycles=3)
    env.reset(0)
    steps = [env.step(np.ones((1, 3), np.int64)) for _ in range(8)]
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True, False] * 2
    assert [bool(s.valid[0]) for s in steps] == [True, True, True, False] * 2
    assert not any(s.terminated.any() for s in steps)


@pytest.mark.parametrize(
    ("env", "reported"),
    [
        (SimpleSpread(2, max_cycles=4), lambda reward: reward.sum(1)),
        (SimpleTag(2, max_cycles=4), lambda reward: reward[:, 0]),
        (SimpleAdversary(2, max_cycles=4), lambda reward: reward[:, 1]),
    ],
    ids=["spread: the sum", "tag: an adversary's", "adversary: a good agent's"],
)
def test_what_is_reported_is_what_the_class_says(env, reported) -> None:
    env.reset(1)
    ledger, expected, rng = Ledger(2), np.zeros(2), np.random.default_rng(0)
    for _ in range(4):
        step = env.step(rng.integers(5, size=(2, len(env.spec.agents))))
        expected += reported(step.reward)
        _, ended = ledger.count(step)
    np.testing.assert_allclose(ended["return"], expected, rtol=1e-5)


def test_a_picture_shows_the_entities_where_they_are() -> None:
    env = SimpleAdversary(1, N=2)
    env.reset(0)
    env._place[0] = [[-0.8, 0], [0.8, 0], [0, 0.8], [0, -0.8], [0, 0]]
    env._goal[0] = 0
    picture = env.render()
    assert picture.shape == (PIXELS, PIXELS, 3)
    assert picture.dtype == np.uint8
    middle, off = PIXELS // 2, round(0.8 * 0.45 * PIXELS)
    assert tuple(picture[middle, middle - off]) == (170, 70, 70)  # the adversary, to the left
    assert tuple(picture[middle - off, middle]) == (70, 70, 170)  # a good agent, above
    assert tuple(picture[middle + off, middle]) == (70, 170, 70)  # the goal, below
    assert tuple(picture[0, 0]) == (255, 255, 255)


def test_circles_shrink_with_distances_only_where_that_is_asked_for() -> None:
    areas = {}
    for rescaling in (True, False):
        env = SimpleSpread(1, N=1, dynamic_rescaling=rescaling)
        env.reset(0)
        env._place[0] = [[0, 0], [4, 4]]
        areas[rescaling] = int((env.render() == (70, 70, 170)).all(-1).sum())
    assert 0 < areas[True] < areas[False] / 8


def test_what_cannot_be_a_world_is_refused() -> None:
    with pytest.raises(Refusal, match="no agent"):
        SimpleSpread(1, N=0)
    with pytest.raises(Refusal, match="between 0 and 1"):
        SimpleSpread(1, local_ratio=1.5)
    with pytest.raises(Refusal, match="no hunt"):
        SimpleTag(1, num_good=0)
    with pytest.raises(Refusal, match="no good agent"):
        SimpleAdversary(1, N=0)
    with pytest.raises(Refusal, match="max_cycles to 1"):
        SimpleTag(1, max_cycles=0)
    with pytest.raises(Refusal, match=r"env\.kwargs does not fit mpe/simple_tag"):
        make_env("mpe/simple_tag", 1, {"N": 3})


def test_a_state_of_another_number_of_envs_is_refused() -> None:
    env = SimpleTag(2)
    env.reset(0)
    with pytest.raises(Refusal, match="holds 2 envs and this run has 3"):
        SimpleTag(3).load_state(env.state())
