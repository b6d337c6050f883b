"""PettingZoo's parallel envs: agents that end, spaces that differ, what is refused."""

import importlib
import sys
import types
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from tianji.algorithms.maddpg import MADDPG
from tianji.build import build
from tianji.driver import Serial
from tianji.env import Continuous, Discrete, MultiDiscrete, Restorable, make_env
from tianji.errors import Failure, Refusal
from tianji.testing import check_env
from tianji.testing.algorithm import config_for, run_updates

UNIT = spaces.Box(-1, 1, (2,), np.float32)


class Relay:
    """Agent i ends after lives[i] steps; it observes the clock and its own number."""

    metadata: ClassVar = {"name": "relay"}
    observed: ClassVar = {"a": UNIT, "b": UNIT}
    acted: ClassVar = {"a": spaces.Discrete(3), "b": spaces.Discrete(3)}
    lives: ClassVar = {"a": 2, "b": 4}
    cut: tuple[str, ...] = ()
    """agents whose end is a truncation"""

    def __init__(self):
        self.possible_agents = list(self.observed)
        self.agents = []
        self.given = []

    def observation_space(self, agent):
        return self.observed[agent]

    def action_space(self, agent):
        return self.acted[agent]

    def reset(self, seed=None, options=None):
        self.rng, self.clock = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        return self.look(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.given.append(dict(actions))
        assert set(actions) == set(self.agents)
        self.clock += 1
        acted: ClassVar = self.agents
        ends = {a: self.clock >= self.lives[a] and a not in self.cut for a in acted}
        cuts = {a: self.clock >= self.lives[a] and a in self.cut for a in acted}
        self.agents = [a for a in acted if not (ends[a] or cuts[a])]
        rewards = {a: float(self.clock) for a in acted}
        return self.look(acted), rewards, ends, cuts, {a: {} for a in acted}

    def look(self, agents):
        number = {a: i + 1 for i, a in enumerate(self.possible_agents)}
        return {a: self.see(a, np.float32([self.clock / 10, number[a] / 10])) for a in agents}

    def see(self, agent, array):
        return array

    def close(self):
        pass


@pytest.fixture
def made(monkeypatch):
    """Put an env class into a module of its own, and make it by its id."""

    def make(kind, num_envs=2, render=False, **kwargs):
        module = types.ModuleType("own_parallel_env")
        module.parallel_env = kind
        monkeypatch.setitem(sys.modules, "own_parallel_env", module)
        return make_env("pettingzoo/own_parallel_env", num_envs, kwargs, render=render)

    return make


def actions(env):
    return np.zeros((env.num_envs, *env.spec.action_leaf.shape), env.spec.action_leaf.dtype)


def test_the_spec_says_who_acts_and_how(made) -> None:
    spec = made(Relay).spec
    assert spec.agents == ("a", "b")
    assert spec.action == Discrete(3)
    assert spec.own_rewards
    assert spec.observation["obs"].shape == (2, 2)
    assert spec.observation["alive"].shape == (2,)
    assert spec.widths == ()
    assert spec.choices == ()
    assert not {"mask", "state"} & set(spec.observation)


def test_an_agent_that_ended_waits_for_the_others(made) -> None:
    env = made(Relay, num_envs=1)
    env.reset(0)
    steps = [env.step(actions(env)) for _ in range(6)]
    alive = [s.observation["alive"][0].tolist() for s in steps]
    assert alive == [[True, True], [False, True], [False, True], [False, False], *[[True] * 2] * 2]
    assert [s.reward[0].tolist() for s in steps] == [[1, 1], [2, 2], [0, 3], [0, 4], [0, 0], [1, 1]]
    assert [bool(s.terminated[0]) for s in steps] == [False, False, False, True, False, False]
    assert [bool(s.valid[0]) for s in steps] == [True, True, True, True, False, True]
    assert not any(s.truncated.any() for s in steps)
    assert not steps[1].observation["obs"][0, 0].any()
    np.testing.assert_allclose(steps[1].observation["obs"][0, 1], [0.2, 0.2])
    assert [set(given) for given in env._envs[0].given[:4]] == [{"a", "b"}] * 2 + [{"b"}] * 2


def test_a_value_follows_for_agents_that_were_only_cut_off(made) -> None:
    class Cut(Relay):
        lives: ClassVar = {"a": 3, "b": 3}
        cut = ("b",)

    env = made(Cut, num_envs=1)
    env.reset(0)
    *_, last = [env.step(actions(env)) for _ in range(3)]
    assert last.truncated[0]
    assert not last.terminated[0]
    assert last.observation["alive"][0].tolist() == [False, True]
    np.testing.assert_allclose(last.observation["obs"][0], [[0, 0], [0.3, 0.2]])


def test_a_cut_without_a_last_observation_is_no_experience(made) -> None:
    class Silent(Relay):
        lives: ClassVar = {"a": 2, "b": 2}
        cut = ("a", "b")

        def step(self, actions):
            seen, *rest = super().step(actions)
            return seen if self.agents else {}, *rest

    env = made(Silent, num_envs=1)
    env.reset(0)
    steps = [env.step(actions(env)) for _ in range(4)]
    assert [bool(s.valid[0]) for s in steps] == [True, False, False, True]
    assert [bool(s.truncated[0]) for s in steps] == [False, True, False, False]
    assert not any(s.terminated.any() for s in steps)


def test_unequal_spaces_are_padded_and_padded_actions_are_never_legal(made) -> None:
    class Unequal(Relay):
        observed: ClassVar = {
            "a": spaces.Box(-1, 1, (2,), np.float32),
            "b": spaces.Discrete(4, start=1),
        }
        acted: ClassVar = {"a": spaces.Discrete(2), "b": spaces.Discrete(4, start=3)}

        def see(self, agent, array):
            return array if agent == "a" else 2

    env = made(Unequal, num_envs=1)
    assert env.spec.action == Discrete(4)
    assert env.spec.widths == (2, 4)
    assert env.spec.choices == (2, 4)
    first = env.reset(0)
    np.testing.assert_allclose(first["obs"][0], [[0, 0.1, 0, 0], [0, 1, 0, 0]])
    assert first["mask"][0].tolist() == [[True, True, False, False], [True] * 4]
    env.step(np.array([[1, 3]]))
    assert env._envs[0].given[-1] == {"a": 1, "b": 6}
    ended = env.step(np.array([[1, 3]]))
    assert ended.observation["mask"][0, 0].tolist() == [True, False, False, False]
    with pytest.raises(Failure, match=r"action 4 .* agent 'b', which has 4"):
        env.step(np.array([[0, 4]]))


@pytest.mark.parametrize("where", ["info", "observation"])
def test_an_action_mask_is_taken_from_where_the_env_gives_it(made, where: str) -> None:
    dictionary = spaces.Dict({"observation": UNIT, "action_mask": spaces.MultiBinary(3)})

    class Masked(Relay):
        observed: ClassVar = dict.fromkeys("ab", dictionary if where == "observation" else UNIT)

        def mask(self, agent):
            return np.int8([1, self.clock % 2, agent == "a"])

        def see(self, agent, array):
            if where == "info":
                return array
            return {"observation": array, "action_mask": self.mask(agent)}

        def reset(self, seed=None, options=None):
            seen, _ = super().reset(seed)
            return seen, self.infos()

        def step(self, actions):
            return *super().step(actions)[:-1], self.infos()

        def infos(self):
            return {a: {"action_mask": self.mask(a)} if where == "info" else {} for a in "ab"}

    env = made(Masked, num_envs=1)
    assert env.reset(0)["mask"][0].tolist() == [[True, False, True], [True, False, False]]
    after = env.step(actions(env)).observation
    assert after["mask"][0].tolist() == [[True, True, True], [True, True, False]]
    np.testing.assert_allclose(after["obs"][0, :, 0], [0.1, 0.1])


def test_continuous_actions_are_clipped_to_each_agents_own_bounds(made) -> None:
    class Wide(Relay):
        acted: ClassVar = {
            "a": spaces.Box(0, 1, (2,), np.float32),
            "b": spaces.Box(-3, 2, (1,), np.float64),
        }

    env = made(Wide, num_envs=1)
    assert env.spec.action == Continuous((-3.0, 0.0), (2.0, 1.0), (2,))
    assert env.spec.choices == (2, 1)
    env.reset(0)
    env.step(np.array([[[-2, 0.5], [-9, 7]]], np.float32))
    given = env._envs[0].given[-1]
    np.testing.assert_array_equal(given["a"], np.float32([0, 0.5]))
    np.testing.assert_array_equal(given["b"], [-3.0])
    assert given["b"].dtype == np.float64


def test_equal_choices_at_once_are_taken(made) -> None:
    class Several(Relay):
        acted: ClassVar = dict.fromkeys("ab", spaces.MultiDiscrete([2, 3]))

    env = made(Several, num_envs=1)
    assert env.spec.action == MultiDiscrete((2, 3))
    env.reset(0)
    env.step(np.array([[[1, 2], [0, 0]]]))
    assert env._envs[0].given[-1]["a"].tolist() == [1, 2]


def test_pictures_stay_bytes(made) -> None:
    class Pictures(Relay):
        observed: ClassVar = dict.fromkeys("ab", spaces.Box(0, 255, (4, 4, 3), np.uint8))

        def see(self, agent, array):
            return np.full((4, 4, 3), 7, np.uint8)

    env = made(Pictures)
    assert env.spec.observation["obs"].dtype == np.uint8
    assert env.spec.observation["obs"].shape == (2, 4, 4, 3)
    assert (env.reset(0)["obs"] == 7).all()


class Random(Relay):
    """As relay, with something random to see and a state."""

    def see(self, agent, array):
        return array + self.rng.uniform(0, 0.1, 2).astype(np.float32)

    def state(self):
        return np.float64([self.clock, len(self.agents), 1])


def test_what_the_adapter_makes_keeps_the_promises_of_an_env(made) -> None:
    check_env(lambda num_envs: made(Random, num_envs), steps=60)
    assert not isinstance(made(Random), Restorable)


def test_the_state_is_a_leaf_where_the_env_has_one(made) -> None:
    env = made(Random, num_envs=1)
    assert env.spec.observation["state"].shape == (3,)
    assert env.reset(0)["state"].tolist() == [[0, 2, 1]]
    steps = [env.step(actions(env)).observation["state"][0].tolist() for _ in range(4)]
    assert steps == [[1, 2, 1], [2, 1, 1], [3, 1, 1], [0, 0, 0]]  # nothing follows the last


def test_mpe2_comes_through_the_adapter_as_it_is() -> None:
    from mpe2 import simple_tag_v3

    env = make_env("pettingzoo/mpe2.simple_tag_v3", 2, {"max_cycles": 5})
    ours = make_env("mpe/simple_tag", 2, {"max_cycles": 5})
    assert env.spec.agents == ours.spec.agents
    assert env.spec.widths == ours.spec.widths
    assert env.spec.observation["state"] == ours.spec.observation["state"]
    first = env.reset(3)
    seed = int(np.random.default_rng(3).integers(2**31))
    peer = simple_tag_v3.parallel_env(max_cycles=5)
    seen, _ = peer.reset(seed=seed)
    for i, agent in enumerate(peer.possible_agents):
        np.testing.assert_array_equal(first["obs"][0, i, : env.spec.widths[i]], seen[agent])
    np.testing.assert_array_equal(first["state"][0], peer.state())
    for _ in range(5):
        step = env.step(np.ones((2, 4), np.int64))
        seen, reward, *_ = peer.step(dict.fromkeys(peer.agents, 1))
    np.testing.assert_allclose(step.reward[0], [reward[a] for a in peer.possible_agents])
    assert step.truncated.all()
    assert step.observation["alive"].all()
    assert not env.step(np.ones((2, 4), np.int64)).valid.any()


def test_a_picture_comes_from_the_env_itself() -> None:
    env = make_env("pettingzoo/mpe2.simple_spread_v3", 1, {}, render=True)
    env.reset(0)
    assert env.render().shape == (700, 700, 3)
    with pytest.raises(Refusal, match="without pictures"):
        make_env("pettingzoo/mpe2.simple_spread_v3", 1, {}).render()


def test_an_env_without_a_render_mode_cannot_be_drawn(made) -> None:
    with pytest.raises(Refusal, match="no render_mode"):
        made(Relay, render=True)


class Later(Relay):
    """Something changes from the second episode on."""

    episodes = 0

    def reset(self, seed=None, options=None):
        self.episodes += 1
        self.later = self.episodes > 2  # the first is looked at, the second begins the run
        return super().reset(seed)


def second_episode(env):
    env.reset(0)
    for _ in range(6):
        env.step(actions(env))


def test_an_agent_that_appears_later_fails_by_its_name(made) -> None:
    class Newcomer(Later):
        def step(self, actions):
            seen, *rest = super().step(actions)
            return seen | ({"c": np.zeros(2)} if self.later else {}), *rest

    with pytest.raises(Failure, match=r"agent 'c' appeared, who is not among \['a', 'b'\]"):
        second_episode(made(Newcomer))


def test_an_agent_that_leaves_for_good_fails_by_its_name(made) -> None:
    class Leaver(Later):
        def reset(self, seed=None, options=None):
            answer = super().reset(seed)
            if self.later:
                self.possible_agents = ["a"]
            return answer

    with pytest.raises(Failure, match=r"agent 'b' is no more among possible_agents"):
        second_episode(made(Leaver))


def test_a_space_that_changes_fails_with_the_difference(made) -> None:
    class Grows(Later):
        def action_space(self, agent):
            return spaces.Discrete(5 if getattr(self, "later", False) else 3)

    with pytest.raises(Failure, match=r"action space of agent 'a' was Discrete\(3\) and now is"):
        second_episode(made(Grows))


def test_an_observation_that_changes_its_shape_fails_with_the_difference(made) -> None:
    class Wider(Later):
        def see(self, agent, array):
            return np.zeros(3) if self.later and agent == "b" else array

    with pytest.raises(Failure, match=r"agent 'b' observed shape \(2,\) and now observes \(3,\)"):
        second_episode(made(Wider))


def test_a_state_that_changes_its_shape_fails_with_the_difference(made) -> None:
    class Wider(Later):
        def state(self):
            return np.zeros(4 if self.later else 2)

    with pytest.raises(Failure, match=r"state\(\) had shape \(2,\) and now has \(4,\)"):
        second_episode(made(Wider))


def test_a_live_agent_that_observes_nothing_fails(made) -> None:
    class Blind(Later):
        def look(self, agents):
            seen = super().look(agents)
            return {"a": seen["a"]} if self.later else seen

    with pytest.raises(Failure, match=r"'b' is among env\.agents and observes nothing"):
        second_episode(made(Blind))


def test_a_change_stops_a_run_and_is_not_taken_for_an_env_to_rebuild(made) -> None:
    class Wider(Later):
        def see(self, agent, array):
            return np.zeros(3) if self.later else array

    hyper = MADDPG(batch_size=8, warmup=64, capacity=64)
    config = config_for(hyper)
    config = replace(config, scale=replace(config.scale, actors=1))
    built = build(config, lambda num_envs: made(Wider, num_envs))
    built.learner.begin()
    with pytest.raises(Failure, match=r"observed shape \(2,\)"):
        run_updates(built, Serial(built.roles), 4)
    built.close()


def test_spaces_that_no_policy_can_take_are_refused_by_name(made) -> None:
    class Talks(Relay):
        observed: ClassVar = {"a": UNIT, "b": spaces.Text(5)}

    class Speaks(Relay):
        acted: ClassVar = {"a": spaces.Discrete(2), "b": spaces.Text(5)}

    class Mixed(Relay):
        acted: ClassVar = {"a": spaces.Discrete(2), "b": UNIT}

    with pytest.raises(Refusal, match="agent 'b' observes a Text space"):
        made(Talks)
    with pytest.raises(Refusal, match=r"'b' in Text"):
        made(Speaks)
    with pytest.raises(Refusal, match=r"'a' in Discrete\(2\), 'b' in Box"):
        made(Mixed)


def test_what_cannot_be_made_is_refused_with_the_remedy(made) -> None:
    class Broken(Relay):
        def __init__(self, size=1):
            raise RuntimeError("no display")

    class Nobody(Relay):
        observed: ClassVar = {}

    with pytest.raises(Refusal, match=r"pettingzoo/mpe2\.simple_tag_v3.*tianji\[mpe\].*"):
        make_env("pettingzoo/pettingzoo.mpe.simple_tag_v3", 1, {})
    with pytest.raises(Refusal, match="set PYTHONPATH"):
        make_env("pettingzoo/no_such_module", 1, {})
    with pytest.raises(Refusal, match="correct the name of the module"):
        make_env("pettingzoo/mpe2.simple_spred_v3", 1, {})
    with pytest.raises(Refusal, match="no function parallel_env"):
        make_env("pettingzoo/json", 1, {})
    with pytest.raises(Refusal, match="does not fit"):
        make_env("pettingzoo/mpe2.simple_spread_v3", 1, {"size": 3})
    with pytest.raises(Refusal, match="RuntimeError: no display"):
        made(Broken)
    with pytest.raises(Refusal, match="names no possible_agents"):
        made(Nobody)


@pytest.mark.parametrize(
    ("module", "missing", "remedy"),
    [
        ("mpe2.simple_spread_v3", "mpe2", r"pip install 'tianji\[mpe\]'"),
        ("pettingzoo.sisl.pursuit_v4", "pettingzoo", r"pip install 'tianji\[mpe\]'"),
        ("pettingzoo.atari.pong_v3", "multi_agent_ale_py", r"pip install 'pettingzoo\[atari\]'"),
        ("own_games", "chess", "pip install chess"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, module, missing, remedy) -> None:
    real = importlib.import_module

    def import_module(name):
        if name == module:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(Refusal, match=remedy):
        make_env(f"pettingzoo/{module}", 1, {})


def test_another_function_of_a_module_can_be_named(monkeypatch) -> None:
    module = types.ModuleType("own_parallel_env")
    module.relay = Relay
    monkeypatch.setitem(sys.modules, "own_parallel_env", module)
    assert make_env("pettingzoo/own_parallel_env:relay", 1, {}).spec.agents == ("a", "b")
