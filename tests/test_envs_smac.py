"""StarCraft II's adapter over a game of the same contract, and SMAX where it is installed.

StarCraft II cannot be had here, so `Game` stands in for `smac.env.StarCraft2Env`: the same methods,
arguments and answers, but the battle is only a count of steps.
"""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest

from tianji.algorithms.qmix import QMIX
from tianji.build import build
from tianji.config import ScaleConfig
from tianji.driver import Serial
from tianji.env import Discrete, make_env
from tianji.errors import Refusal
from tianji.testing import check_env
from tianji.testing.algorithm import config_for, run_updates

AGENTS, OBS, STATE, ACTIONS, LIMIT = 3, 30, 48, 9, 60


class Game:
    """`StarCraft2Env`, as its source has it: `step` gives three things, and no observation."""

    made: list  # all games, in order

    def __init__(self, map_name="8m", step_mul=8, difficulty="7", seed=None,
                 continuing_episode=False):  # fmt: skip
        if map_name != "3m":
            raise KeyError(map_name)
        self.map_name, self.seed = map_name, seed
        self.continuing_episode = continuing_episode
        self.running = self.closed = False
        self.crashes = False
        self.resets = 0
        self._rng = np.random.default_rng(seed)
        Game.made.append(self)

    def get_env_info(self):
        return {"state_shape": STATE, "obs_shape": OBS, "n_actions": ACTIONS, "n_agents": AGENTS,
                "episode_limit": LIMIT, "agent_features": [], "enemy_features": []}  # fmt: skip

    def reset(self):
        self.running, self.steps, self.resets = True, 0, self.resets + 1
        self.wins = bool(self._rng.random() < 0.5)
        self.length = int(self._rng.integers(5, 15))
        if self._rng.random() < 0.3:
            self.length = LIMIT + 1
        return self.get_obs(), self.get_state()

    def step(self, actions):
        assert self.running
        assert len(actions) == AGENTS
        assert all(type(action) is int for action in actions)
        for action, legal in zip(actions, self.get_avail_actions(), strict=True):
            assert legal[action] == 1, "Agent cannot perform action"
        if self.crashes:
            self.crashes = False
            self.reset()  # as full_restart() does
            return 0, True, {}
        self.steps += 1
        info = {"battle_won": False, "dead_allies": 0, "dead_enemies": 0}
        if self.steps >= self.length:
            info["battle_won"] = self.wins
            return 10.0 * self.wins, True, info
        if self.steps >= LIMIT:
            if self.continuing_episode:
                info["episode_limit"] = True
            return 0.0, True, info
        return 0.25, False, info

    def get_obs(self):
        return [np.full(OBS, self.steps + i / 10, np.float32) for i in range(AGENTS)]

    def get_state(self):
        return np.full(STATE, self.steps, np.float32)

    def get_avail_actions(self):
        dead = [1] + [0] * (ACTIONS - 1)
        alive = [0, 1, 1, 1, 1, 1] + [self.steps % 2] * 3
        return [alive, alive, dead if self.steps > 3 else alive]

    def close(self):
        self.closed = True


@pytest.fixture
def starcraft(monkeypatch):
    """smac.env, with the stand-in."""
    package, module = ModuleType("smac"), ModuleType("smac.env")
    module.StarCraft2Env = Game
    package.env = module
    monkeypatch.setitem(sys.modules, "smac", package)
    monkeypatch.setitem(sys.modules, "smac.env", module)
    Game.made = []


def legal(mask):
    return mask.argmax(axis=-1)


def test_the_env_keeps_its_promises(starcraft):
    check_env(lambda n: make_env("smac/3m", n, {}), steps=200)


def test_the_spec_is_what_the_game_tells(starcraft):
    env = make_env("smac/3m", 2, {"difficulty": "5"})
    layout = {k: v.shape for k, v in env.spec.observation.items()}
    assert layout == {"obs": (3, 30), "state": (48,), "mask": (3, 9), "alive": (3,)}
    assert env.spec.action == Discrete(9)
    assert env.spec.max_episode_steps == 60
    assert all(not game.running for game in Game.made)  # no game is started for it


def test_a_limit_is_a_truncation_and_a_battle_that_ends_a_termination(starcraft):
    env = make_env("smac/3m", 8, {})
    seen, ends = env.reset(1), []
    for _ in range(300):
        step = env.step(legal(seen["mask"]))
        seen = step.observation
        for i in np.flatnonzero(step.terminated | step.truncated):
            game = env._games[i]
            ends.append((bool(step.truncated[i]), bool(step.score.won[i])))
            assert bool(step.truncated[i]) == (game.steps == LIMIT)
            assert step.score.won[i] == (game.wins and game.steps < LIMIT)
            assert step.valid[i]
    assert {(True, False), (False, True), (False, False)} == set(ends)


def test_the_last_observation_of_an_episode_is_seen_before_the_next_begins(starcraft):
    env = make_env("smac/3m", 1, {})
    seen = env.reset(0)
    for step_number in range(1, 100):
        step = env.step(legal(seen["mask"]))
        seen = step.observation
        assert seen["state"][0, 0] == step_number
        if step.terminated[0] or step.truncated[0]:
            break
    resets = env._games[0].resets
    step = env.step(np.full((1, 3), 8))  # illegal, and ignored
    assert not step.valid[0]
    assert step.observation["state"][0, 0] == 0
    assert step.reward[0] == 0
    assert env._games[0].resets == resets + 1


def test_the_dead_have_nothing_but_to_do_nothing(starcraft):
    env = make_env("smac/3m", 1, {})
    seen = env.reset(0)
    for _ in range(4):
        assert seen["alive"].all()
        seen = env.step(legal(seen["mask"])).observation
    np.testing.assert_array_equal(seen["alive"], [[True, True, False]])


def test_a_crash_of_the_game_is_raised_not_taken_for_a_defeat(starcraft):
    env = make_env("smac/3m", 2, {})
    seen = env.reset(0)
    env._games[1].crashes = True
    with pytest.raises(RuntimeError, match="game 1 of smac/3m died"):
        env.step(legal(seen["mask"]))


def test_a_run_goes_on_after_a_crash_and_tells_of_it(starcraft):
    algorithm = QMIX(warmup=488, new_steps=64, batch_size=4, capacity=4000)
    scale = ScaleConfig(actors=1, envs_per_actor=8, rollout_length=8)
    made = []

    def make(n):
        made.append(make_env("smac/3m", n, {}))
        return made[-1]

    built = build(config_for(algorithm, scale=scale), make)
    built.learner.begin()
    driver = Serial(built.roles)
    run_updates(built, driver, 1)
    count = len(made)
    next(env for env in made if env._games)._games[0].crashes = True
    faults = []
    while built.learner.version < 4:
        driver.step()
        (actor,) = built.actors
        if actor.fault is not None and not faults:
            faults.append(actor.fault)
    assert len(made) == count + 1
    assert len(faults) == 1
    assert "died" in str(faults[0])
    built.close()


def test_games_are_seeded_apart_and_started_anew_by_a_reset(starcraft):
    env = make_env("smac/3m", 2, {})
    env.reset(5)
    first = list(env._games)
    assert first[0].seed != first[1].seed
    env.reset(5)
    assert all(game.closed for game in first)
    assert [game.seed for game in env._games] == [game.seed for game in first]
    env.close()
    assert not env._games


def test_games_may_go_on_at_a_later_reset(starcraft):
    env = make_env("smac/3m", 2, {"relaunch": False})
    env.reset(5)
    first = list(env._games)
    env.reset(6)
    assert env._games == first
    assert [game.resets for game in first] == [2, 2]


def test_what_the_adapter_sets_itself_is_refused(starcraft):
    with pytest.raises(Refusal, match="continuing_episode"):
        make_env("smac/3m", 1, {"continuing_episode": False})
    with pytest.raises(Refusal, match="smac/4q"):
        make_env("smac/4q", 1, {})
    with pytest.raises(Refusal, match="wrong_option"):
        make_env("smac/3m", 1, {"wrong_option": 1})


def test_a_missing_game_is_refused_with_what_to_install(starcraft, monkeypatch):
    def missing(self):
        raise FileNotFoundError("/root/StarCraftII")

    monkeypatch.setattr(Game, "reset", missing)
    with pytest.raises(Refusal, match=r"StarCraft II itself.*SC2PATH"):
        make_env("smac/3m", 1, {}).reset(0)


@pytest.mark.parametrize("other", [None, ModuleType("smac")])
def test_the_other_package_of_that_name_is_not_taken_for_it(monkeypatch, other):
    """PyPI's smac is an optimizer of hyperparameters."""
    monkeypatch.setitem(sys.modules, "smac", other)
    monkeypatch.delitem(sys.modules, "smac.env", raising=False)
    with pytest.raises(Refusal, match=r"git\+https://github.com/oxwhirl/smac.*something else"):
        make_env("smac/3m", 1, {})


def test_smax_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(Refusal, match=r"pip install 'tianji\[smax\]'"):
        make_env("smax/3m", 1, {})


smax = pytest.mark.skipif(
    importlib.util.find_spec("jaxmarl") is None,
    reason="JaxMARL is not installed: make smax, or pip install 'tianji[smax]' in its own venv",
)


@smax
@pytest.mark.filterwarnings("ignore")
def test_smax_keeps_its_promises():
    from tianji.envs.smac import Smax

    check_env(lambda n: Smax(n, "3m", max_steps=20), steps=60)


@smax
@pytest.mark.filterwarnings("ignore")
def test_smax_ends_wins_and_masks():
    env = make_env("smax/3m", 8, {"max_steps": 30})
    layout = {k: v.shape for k, v in env.spec.observation.items()}
    assert layout == {"obs": (3, 75), "state": (72,), "mask": (3, 8), "alive": (3,)}
    seen = env.reset(0)
    returns, ended, lengths = np.zeros(8), [], np.zeros(8, int)
    for _ in range(150):
        # Shoot whom one can, and walk on towards them else: this wins now and then.
        shoot = seen["mask"][..., 5:].any(axis=-1)
        action = np.where(shoot, 5 + seen["mask"][..., 5:].argmax(axis=-1), 1)
        step = env.step(np.where(seen["alive"], action, 4))
        seen = step.observation
        assert (seen["mask"].sum(axis=-1)[~seen["alive"]] == 1).all()
        returns, lengths = returns + step.reward, lengths + step.valid
        for i in np.flatnonzero(step.terminated | step.truncated):
            ended.append(bool(step.score.won[i]))
            assert step.score.won[i] == (returns[i] > 1.5)
            assert lengths[i] == 30 or not step.truncated[i]
            returns[i] = lengths[i] = 0
    assert len(ended) > 20
    with pytest.raises(Refusal, match="no map"):
        make_env("smax/none", 1, {})


@smax
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kinds"), [("3m", {0}), ("2s3z", {2, 3})])
def test_the_state_of_smax_has_the_units_of_its_observations(name, kinds):
    env = make_env(f"smax/{name}", 8, {})
    A, own = len(env.spec.agents), 10  # health, x, y, pause, and six for the kind
    seen, rng = env.reset(0), np.random.default_rng(0)
    pauses = set()
    for _ in range(40):
        units = seen["state"][:, : 2 * A * own].reshape(8, 2 * A, own)
        np.testing.assert_allclose(units[:, :A], seen["obs"][..., -own:], atol=1e-6)
        assert units.min() >= 0
        assert units.max() <= 1
        pauses |= set(np.sign(units[:, A:, 3]).flat)
        assert (seen["state"][:, 2 * A * own : -2 * A] == [0] * A + [1] * A).all()
        assert set(seen["state"][:, -2 * A :].flat) == kinds
        # A place that an agent sees is where the state says; marines see 9 of 32 far.
        if name == "3m":
            enemies = seen["obs"][:, 0, 26:65].reshape(8, 3, 13)
            there = units[:, :1, 1:3] + enemies[..., 1:3] * 9 / 32
            at = enemies[..., 0] > 0
            np.testing.assert_allclose(there[at], units[:, A:, 1:3][at], atol=1e-6)
        drawn = np.where(seen["mask"], rng.random(seen["mask"].shape), -1)
        seen = env.step(drawn.argmax(-1)).observation
    assert pauses == {0, 1}
