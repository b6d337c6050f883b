"""StarCraft II by SMAC (Samvelyan et al. 2019), and its look-alike SMAX by JaxMARL, as `Env`s."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import Any

import numpy as np

from tianji.env import Discrete, EnvSpec, Score, TimeStep
from tianji.errors import Refusal
from tianji.role import State
from tianji.types import Array, Leaves, leaf

SMAC = "pip install git+https://github.com/oxwhirl/smac.git 'protobuf<3.21'"
SMAX = "pip install 'tianji[smax]'"
OURS = ("map_name", "seed", "continuing_episode")
"""arguments of StarCraft2Env that the adapter gives itself"""


class GameCrashed(RuntimeError):
    """StarCraft II died in an episode, which has no end and no return."""


class StarCraft:
    """B games of `smac.env.StarCraft2Env`, each its own process of StarCraft II.

    A crash of a game is raised, so that the runtime aborts the episodes of this env, makes it anew
    and tells of the fault. SMAC itself would answer (0, True, {}), which reads like a defeat; to
    take it as one would teach that what was done last is worth nothing.
    """

    def __init__(self, num_envs: int, name: str, relaunch: bool = True, **options: Any) -> None:
        """`relaunch`: `reset(seed)` starts the games anew, so that equal seeds give equal games;
        without, a later reset goes on with the games that run, which is quicker. `options` are
        StarCraft2Env's."""
        if taken := sorted(options.keys() & set(OURS)):
            raise Refusal(
                f"env.kwargs names {', '.join(taken)}, which smac/{name} sets itself: the map by "
                f"its name, the seed by the run's, and that a limit is told from a defeat. Take it "
                f"out of env.kwargs."
            )
        self._game = _starcraft(name)
        self._options = options | {"map_name": name, "continuing_episode": True}
        self._relaunch = relaunch
        self._games: list[Any] = []
        try:
            game = self._game(seed=0, **self._options)
        except (KeyError, TypeError, AssertionError) as error:
            raise Refusal(
                f"StarCraft2Env cannot be made for smac/{name} with {options}, so no step can be "
                f"made: {type(error).__name__}: {error}. Correct the map's name, or env.kwargs."
            ) from error
        info = game.get_env_info()
        self._A, self._n = info["n_agents"], info["n_actions"]
        self.num_envs = num_envs
        self.spec = EnvSpec(
            f"smac/{name}",
            _layout(self._A, info["obs_shape"], info["state_shape"], self._n),
            Discrete(self._n),
            info["episode_limit"],
            agents=tuple(f"agent_{i}" for i in range(self._A)),
        )
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(self, seed: int) -> Leaves:
        if self._relaunch or not self._games:
            self.close()
            words = np.random.SeedSequence(seed).generate_state(self.num_envs)
            self._games = [self._game(seed=int(word >> 1), **self._options) for word in words]
        try:
            for game in self._games:
                game.reset()
        except FileNotFoundError as error:
            raise Refusal(
                f"{self.spec.id} needs StarCraft II itself, which was not found: {error}. Install "
                f"the game and SMAC's maps by oxwhirl/smac's install_sc2.sh, and set SC2PATH to "
                f'its folder; or train on "skirmish/3m", which needs neither.'
            ) from error
        self._ended[:] = False
        return self._observe()

    def step(self, action: Array) -> TimeStep:
        B, valid = self.num_envs, ~self._ended
        reward = np.zeros(B, np.float32)
        terminated, truncated, won = np.zeros((3, B), np.bool_)
        for i, game in enumerate(self._games):
            if not valid[i]:
                game.reset()
                continue
            reward[i], done, info = game.step(action[i].tolist())
            if not done:
                continue
            if "battle_won" not in info:
                raise GameCrashed(f"game {i} of {self.spec.id} died and was started anew")
            truncated[i] = info.get("episode_limit", False)
            terminated[i] = not truncated[i]
            won[i] = info["battle_won"]
        self._ended = terminated | truncated
        score = Score(won=won)
        return TimeStep(self._observe(), reward, terminated, truncated, valid, score)

    def render(self) -> Array:
        raise Refusal(
            f"{self.spec.id} has no picture: the game draws in a window of its own. Make it without"
            f" pictures, and save a replay by StarCraft2Env's save_replay()."
        )

    def close(self) -> None:
        games, self._games = self._games, []
        for game in games:
            game.close()

    def _observe(self) -> Leaves:
        mask = np.array([game.get_avail_actions() for game in self._games], np.bool_)
        return {
            "obs": np.array([game.get_obs() for game in self._games], np.float32),
            "state": np.array([game.get_state() for game in self._games], np.float32),
            "mask": mask,
            "alive": ~mask[..., 0],  # to do nothing is for the dead only
        }


class Smax:
    """B battles of JaxMARL's SMAX against its scripted enemy, stepped by one compiled call."""

    def __init__(self, num_envs: int, name: str, **options: Any) -> None:
        """`options` are SMAX's, such as max_steps."""
        self._calls = calls = _compiled(name, num_envs, tuple(sorted(options.items())))
        self._limit = int(calls.smax.max_steps)
        self.num_envs = num_envs
        self.spec = EnvSpec(
            f"smax/{name}",
            _layout(len(calls.names), calls.smax.obs_size, calls.smax.state_size, calls.actions),
            Discrete(calls.actions),
            self._limit,
            agents=tuple(calls.names),
        )
        self._key: Any = None
        self._battles: Any = None
        self._ended = np.zeros(num_envs, np.bool_)
        self._clock = np.zeros(num_envs, np.int64)

    def reset(self, seed: int) -> Leaves:
        self._ended[:], self._clock[:] = False, 0
        self._key, self._battles, seen = self._calls.begin(self._calls.jax.random.PRNGKey(seed))
        return self._leaves(seen)

    def step(self, action: Array) -> TimeStep:
        valid = ~self._ended
        self._key, self._battles, seen, reward, won, lost = self._calls.advance(
            self._key, self._battles, action.astype(np.int32), self._ended
        )
        won, lost = np.array(won), np.array(lost)
        terminated = (won | lost) & valid
        self._clock = np.where(valid, self._clock + 1, 0)
        # SMAX's own limit is one step later than it says.
        truncated = (self._clock >= self._limit) & valid & ~terminated
        self._ended = terminated | truncated
        score = Score(won=won & ~lost & valid)
        reward = np.where(valid, reward, 0.0).astype(np.float32)
        return TimeStep(self._leaves(seen), reward, terminated, truncated, valid, score)

    def render(self) -> Array:
        raise Refusal(f"{self.spec.id} has no picture. Make it without pictures.")

    def close(self) -> None:
        pass

    def state(self) -> State:
        leaves = self._calls.jax.tree.leaves((self._key, self._battles))
        return {
            "leaves": {str(i): np.array(x) for i, x in enumerate(leaves)},
            "ended": self._ended.copy(),
            "clock": self._clock.copy(),
        }

    def load_state(self, state: State) -> None:
        if self._battles is None:
            self.reset(0)
        jax = self._calls.jax
        form = jax.tree.structure((self._key, self._battles))
        leaves = [jax.numpy.asarray(state["leaves"][str(i)]) for i in range(len(state["leaves"]))]
        self._key, self._battles = jax.tree.unflatten(form, leaves)
        self._ended[:], self._clock[:] = state["ended"], state["clock"]

    def _leaves(self, seen: Any) -> Leaves:
        layout = self.spec.observation
        return {name: np.array(x, layout[name].dtype) for name, x in seen.items()}


class Compiled:
    """A map of SMAX, and what steps B battles in it: compiled once, at the first call."""

    def __init__(self, name: str, num_envs: int, options: dict[str, Any]) -> None:
        self.jax, jaxmarl = _jax(name)
        maps = importlib.import_module("jaxmarl.environments.smax.smax_env").MAP_NAME_TO_SCENARIO
        if name not in maps:
            raise Refusal(
                f"SMAX has no map {name}, so there is nobody to fight. Known: "
                f"{', '.join(sorted(maps))}."
            )
        try:
            self.smax = jaxmarl.make("HeuristicEnemySMAX", scenario=maps[name], **options)
        except TypeError as error:
            raise Refusal(
                f"env.kwargs = {options} does not fit smax/{name}: {error}. Correct env.kwargs."
            ) from error
        self.names = list(self.smax.agents)
        self.actions = int(self.smax.num_ally_actions)
        self._B = num_envs
        self.begin = self.jax.jit(self._begin)
        self.advance = self.jax.jit(self._advance)

    def _begin(self, key: Any) -> tuple[Any, Any, Any]:
        """First battles."""
        key, own = self.jax.random.split(key)
        seen, battles = self.jax.vmap(self.smax.reset)(self._keys(own))
        return key, self._strong(battles), self._seen(seen, battles)

    def _advance(self, key: Any, battles: Any, action: Any, ended: Any) -> tuple[Any, ...]:
        """A step of all battles, or a new one where the last has ended."""
        jax, A = self.jax, len(self.names)
        key, one, other = jax.random.split(key, 3)
        actions = {name: action[:, i] for i, name in enumerate(self.names)}
        seen, then, reward, _, _ = jax.vmap(self.smax.step_env)(self._keys(one), battles, actions)
        first_seen, first = jax.vmap(self.smax.reset)(self._keys(other))
        alive = then.state.unit_alive
        won, lost = ~alive[:, A:].any(axis=1), ~alive[:, :A].any(axis=1)

        def choose(new: Any, old: Any) -> Any:
            return jax.numpy.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        seen, then = jax.tree.map(choose, (first_seen, first), (seen, then))
        told = self._seen(seen, then), reward[self.names[0]], won, lost
        return key, self._strong(then), *told

    def _scaled(self, state: Any, types: Any) -> Any:
        """SMAX's state in the units of its observations: places as shares of the field, the pause
        of a weapon as a share of a whole one. As SMAX tells it, places are up to 32 and pauses run
        far below 0, which networks of the state blow up: values of 300 where 2 is the most."""
        jnp, smax = self.jax.numpy, self.smax
        width = len(smax.own_features)
        units = state[:, : types.shape[1] * width].reshape(*types.shape, width)
        places = units[..., 1:3] / jnp.array([smax.map_width, smax.map_height])
        pauses = jnp.clip(units[..., 3] / smax.unit_type_weapon_cooldowns[types], 0.0, 1.0)
        units = units.at[..., 1:3].set(places).at[..., 3].set(pauses)
        return state.at[:, : units[0].size].set(units.reshape(len(units), -1))

    def _strong(self, battles: Any) -> Any:
        """The same with types that no later step changes, which would compile it again."""
        convert = self.jax.lax.convert_element_type
        return self.jax.tree.map(lambda x: convert(x, x.dtype), battles)

    def _keys(self, key: Any) -> Any:
        return self.jax.random.split(key, self._B)

    def _seen(self, seen: Any, battles: Any) -> Any:
        stack = self.jax.numpy.stack
        masks = self.jax.vmap(self.smax.get_avail_actions)(battles)
        return {
            "obs": stack([seen[name] for name in self.names], axis=1),
            "state": self._scaled(seen["world_state"], battles.state.unit_types),
            "mask": stack([masks[name] for name in self.names], axis=1) > 0,
            "alive": battles.state.unit_alive[:, : len(self.names)],
        }


@functools.cache
def _compiled(name: str, num_envs: int, options: tuple[tuple[str, Any], ...]) -> Compiled:
    """The same for all envs of this process that are alike: to compile takes many seconds."""
    return Compiled(name, num_envs, dict(options))


def _layout(agents: int, obs: int, state: int, actions: int) -> dict[str, Any]:
    return {
        "obs": leaf((agents, obs), np.float32),
        "state": leaf((state,), np.float32),
        "mask": leaf((agents, actions), np.bool_),
        "alive": leaf((agents,), np.bool_),
    }


def _starcraft(name: str) -> Any:
    """The class StarCraft2Env."""
    try:
        return importlib.import_module("smac.env").StarCraft2Env
    except (ImportError, AttributeError) as error:
        raise Refusal(
            f"smac/{name} needs SMAC, which is not installed, so no step can be made: {error}. "
            f"Install it by {SMAC} (the package smac of PyPI is something else), and StarCraft II "
            f'beside it; or train on "skirmish/3m", which needs neither.'
        ) from error


def _jax(name: str) -> tuple[Any, Any]:
    """The packages jax and jaxmarl."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it greets, where results are read
            return importlib.import_module("jax"), importlib.import_module("jaxmarl")
    except ImportError as error:
        raise Refusal(
            f"smax/{name} needs JaxMARL, which is not installed, so no step can be made: {error}. "
            f"Install it by {SMAX}, in an environment of its own: it wants an older gymnasium."
        ) from error
