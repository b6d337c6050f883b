"""Any Gymnasium id as an `Env`: by its own vector implementation, else a vector of single envs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation, TimeLimit
from gymnasium.wrappers.vector import FlattenObservation as FlattenVectorObservation

from tianji.env import (
    Action,
    Continuous,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    TimeStep,
    Wrapper,
    cannot_be_made,
)
from tianji.errors import Refusal, nearest
from tianji.role import State, generator_state, load_generator_state
from tianji.types import Array, Leaves, leaf

Vector = VectorEnv[Any, Any, Any]
Single = gymnasium.Env[Any, Any]
Wrap = Callable[[Single], Single]
EXTRAS = {"box2d": "box2d", "mujoco": "mujoco", "ale": "atari", "minatar": "minatar"}
"""which extra of ours brings a package, by a word of the error that misses it"""
FLATTENED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)


def known_ids() -> set[str]:
    """The ids that Gymnasium has registered so far."""
    return set(gymnasium.registry)


def register_family(id: str) -> None:
    """Let the package register its ids that they begin with, where it does not by itself."""
    if id.startswith("ALE/"):
        with _refusing(id, {}):
            importlib.import_module("ale_py")
    if id.startswith("MinAtar/") and id not in known_ids():
        with _refusing(id, {}):
            importlib.import_module("minatar.gym").register_envs()


def make_gymnasium_env(
    id: str,
    num_envs: int,
    kwargs: dict[str, Any],
    render: bool = False,
    wrappers: tuple[Wrapper, ...] = (),
    time_limit: int | None = None,
) -> GymnasiumEnv:
    """The env of this id; `Restorable` where it can go on exactly where it was."""
    if time_limit is not None and "max_episode_steps" in kwargs:
        raise Refusal(
            f"env.time_limit = {time_limit} and env.kwargs.max_episode_steps = "
            f"{kwargs['max_episode_steps']} both say when an episode is cut, and only one can. "
            f"Leave one of them out; the latter replaces the env's own limit."
        )
    with _refusing(id, kwargs):
        registered = _registered(id)
        native = None if render or wrappers else _native(registered)
    if time_limit is not None:
        least = min(time_limit, registered.max_episode_steps or time_limit)
        kwargs = {**kwargs, "max_episode_steps": least}
    kind = GymnasiumCartPole if native is CartPoleVectorEnv else GymnasiumEnv
    return kind(id, num_envs, kwargs, render, wrappers)


class GymnasiumEnv:
    """B envs of one Gymnasium id."""

    def __init__(
        self,
        id: str,
        num_envs: int,
        kwargs: dict[str, Any],
        render: bool = False,
        wrappers: tuple[Wrapper, ...] = (),
    ) -> None:
        self.num_envs = num_envs
        self._render = render
        self._singles: list[Single] = []
        with _refusing(id, kwargs):
            registered = _registered(id)
            single = _native(registered) is None and registered.entry_point is not None
            if render or wrappers or single:
                around = [_wrapper(wrapper) for wrapper in wrappers]
                self._vector, self._singles = _vector_of_singles(
                    id, num_envs, kwargs, render, around
                )
            else:
                self._vector = _native_vector(id, num_envs, kwargs)
        self._mode = self._vector.metadata["autoreset_mode"]
        self._next_step = self._mode is AutoresetMode.NEXT_STEP
        space = self._vector.single_observation_space
        assert isinstance(space, spaces.Box)
        outermost = self._singles[0] if self._singles else self._vector
        flat = isinstance(outermost, FlattenObservation | FlattenVectorObservation)
        self._declared = leaf(space.shape, space.dtype)
        small = space.dtype == np.uint8 or (space.dtype == np.bool_ and len(space.shape) == 3)
        self._dtype = np.dtype(space.dtype if small and not flat else np.float32)
        action, self._encode = _action(id, self._vector.single_action_space, num_envs)
        limit = kwargs.get("max_episode_steps", registered.max_episode_steps)
        for env in self._singles[:1]:
            while isinstance(env, gymnasium.Wrapper):  # the first that cuts is what counts
                if isinstance(env, TimeLimit):
                    limit = min(limit or env._max_episode_steps, env._max_episode_steps)
                env = env.env
        self.spec = EnvSpec(id, {"obs": leaf(space.shape, self._dtype)}, action, limit)
        self._begun = False
        self._truncated = np.zeros(num_envs, np.bool_)
        self._valid = np.ones(num_envs, np.bool_)
        self._spare = np.ones(num_envs, np.bool_)

    def reset(self, seed: int) -> Leaves:
        words = np.random.SeedSequence(seed).generate_state(self.num_envs)
        seeds: Any = [int(word) for word in words] if self._singles else seed
        self._valid[:] = True
        if self._begun:
            observation, _ = self._vector.reset(seed=seeds)
        else:
            observation = self._first_reset(seeds)
        return {"obs": np.array(observation, self._dtype)}

    def step(self, action: Array) -> TimeStep:
        if self._encode is not None:
            action = self._encode(action)
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        terminated = np.asarray(terminated, np.bool_)
        truncated = np.greater(truncated, terminated, self._truncated)
        if self._next_step:
            valid, self._valid, self._spare = self._valid, self._spare, self._valid
            np.equal(terminated, truncated, self._valid)  # never both: equal is not ended
        else:
            valid = np.logical_not(truncated, self._valid)
            if self._mode is AutoresetMode.DISABLED and (ended := terminated | truncated).any():
                reward, terminated = np.array(reward), np.array(terminated)
                observation, _ = self._vector.reset(options={"reset_mask": ended})
        return TimeStep(
            {"obs": np.asarray(observation, self._dtype)},
            np.asarray(reward),
            terminated,
            truncated,
            valid,
        )

    def render(self) -> Array:
        id = self.spec.id
        if not self._render:
            raise Refusal(f"{id} was made without pictures. Make it with render=True.")
        try:
            picture = np.asarray(self._singles[0].render())
        except (ImportError, DependencyNotInstalled) as error:
            raise Refusal(
                f"{id} cannot draw itself, so there is no video: {error} "
                f"Install what drawing needs: pip install 'tianji[video]'."
            ) from error
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise Refusal(
                f"{id} renders {picture.dtype} {picture.shape} where a picture is uint8 (H, W, 3), "
                f"so there is no video. Make it without pictures, or correct its render()."
            )
        return picture

    def close(self) -> None:
        self._vector.close()

    def _first_reset(self, seeds: Any) -> Array:
        """The first reset shows whether the env keeps what its spaces promise."""
        try:
            observation, _ = self._vector.reset(seed=seeds)
        except Exception as error:
            for env in self._singles:
                try:
                    single, _ = env.reset()
                except Exception:
                    break
                self._check_observation(np.asarray(single), self._declared.shape)
            raise Refusal(
                f"{self.spec.id} fails in its first reset, so no step can be made: "
                f"{type(error).__name__}: {error}. Correct the env's reset(), or env.kwargs."
            ) from error
        observation = np.asarray(observation)
        self._check_observation(observation, (self.num_envs, *self._declared.shape))
        if self._render:
            self.render()
        self._begun = True
        return observation

    def _check_observation(self, given: Array, shape: tuple[int, ...]) -> None:
        dtype = self._declared.dtype
        if given.shape != shape or not np.can_cast(given.dtype, dtype, "same_kind"):
            raise Refusal(
                f"{self.spec.id} declares observations of {dtype} {shape} but its first one is "
                f"{given.dtype} {given.shape}, so a policy made for the first cannot read the "
                f"second. Correct its observation_space or what its reset() returns."
            )


class GymnasiumCartPole(GymnasiumEnv):
    """CartPole's own vector implementation, which can go on exactly where it was."""

    def state(self) -> State:
        cartpole: Any = self._vector
        return {
            "state": np.array(cartpole.state),
            "steps": np.array(cartpole.steps),
            "prev_done": np.array(cartpole.prev_done),
            "valid": np.array(self._valid),
            "rng": generator_state(cartpole.np_random),
        }

    def load_state(self, state: State) -> None:
        cartpole: Any = self._vector
        if state["valid"].shape != self._valid.shape:
            raise Refusal(
                f"the state holds {len(state['valid'])} envs and this run has {self.num_envs}, so "
                f"it cannot go on where it was. Set num_envs to {len(state['valid'])}."
            )
        self._valid[:] = state["valid"]
        cartpole.state = np.array(state["state"])
        cartpole.steps = np.array(state["steps"])
        cartpole.prev_done = np.array(state["prev_done"])
        load_generator_state(cartpole.np_random, state["rng"])


def _registered(id: str) -> Registered:
    """The registry's entry; of "module:name", the module registers the name when imported."""
    module, _, name = id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def _native(registered: Registered) -> Callable[..., Any] | None:
    """What makes the id's own vector implementation, where there is one and it can be imported."""
    entry: Any = registered.vector_entry_point
    if entry is None or registered.additional_wrappers:
        return None
    try:
        return load_env_creator(entry) if isinstance(entry, str) else entry
    except (ImportError, DependencyNotInstalled):
        return None


def _native_vector(id: str, num_envs: int, kwargs: dict[str, Any]) -> Vector:
    with warnings.catch_warnings():  # what they say of the mode, we refuse
        warnings.filterwarnings("ignore", message="(?s).*autoreset_?mode")
        name = id.rpartition(":")[2]
        vector = gymnasium.make_vec(name, num_envs, "vector_entry_point", **kwargs)
    vector.metadata = {**vector.metadata, "autoreset_mode": _autoreset_mode(id, vector)}
    _check_space(id, vector.single_observation_space)
    if isinstance(vector.single_observation_space, FLATTENED):
        return FlattenVectorObservation(vector)
    return vector


def _vector_of_singles(
    id: str, num_envs: int, kwargs: dict[str, Any], render: bool, around: list[Wrap]
) -> tuple[Vector, list[Single]]:
    options = {**kwargs, "disable_env_checker": True}
    if render:
        options["render_mode"] = "rgb_array"

    def single() -> Single:
        env: Single = gymnasium.make(id.rpartition(":")[2], **options)
        if render and "rgb_array" not in env.metadata.get("render_modes", []):
            raise _no_picture(id)
        for wrap in around:
            env = wrap(env)
        _check_space(id, env.observation_space)
        return FlattenObservation(env) if isinstance(env.observation_space, FLATTENED) else env

    with warnings.catch_warnings():  # what they say of the mode, we refuse
        warnings.filterwarnings("ignore", message="(?s).*render_modes?")
        vector: SyncVectorEnv[Any, Any] = SyncVectorEnv([single] * num_envs, copy=False)
    return vector, vector.envs


def _wrapper(wrapper: Wrapper) -> Wrap:
    """What puts the wrapper around a single env; refuses names that there are not."""
    kwargs = {} if isinstance(wrapper, str) else dict(wrapper)
    name = wrapper if isinstance(wrapper, str) else kwargs.pop("name")
    module, colon, attribute = name.rpartition(":")
    if attribute == "Autoreset":
        raise Refusal(
            'env.wrappers names "Autoreset", and envs are reset after every episode without it: '
            "with both, one of the two resets would be taken for a step. Leave it out."
        )
    if colon:
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            raise Refusal(
                f'env.wrappers names "{name}", and there is no module {error.name}, so it cannot '
                f"be applied. Install it, or set PYTHONPATH to the folder it is in."
            ) from error
        if not callable(found):
            raise Refusal(
                f'env.wrappers names "{name}", and {module} has no such class, so it cannot be '
                f"applied. Correct the name."
            )
    else:
        known = {
            key: kind
            for key, kind in vars(gymnasium.wrappers).items()
            if isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)
        }
        if name not in known:
            raise Refusal(
                f'env.wrappers names "{name}", which is no wrapper of gymnasium.wrappers, so it '
                f"cannot be applied.{nearest(name, known)} Known: {', '.join(sorted(known))}. An "
                f'own one is "module:Class".'
            )
        found = known[name]

    def wrap(env: Single) -> Single:
        try:
            made: Single = found(env, **kwargs)
        except (ImportError, DependencyNotInstalled):
            raise
        except Exception as error:
            raise Refusal(
                f'env.wrappers names "{name}" with {kwargs or "no arguments"}, which does not fit '
                f"around it: {type(error).__name__}: {error}. Correct its arguments: a table of "
                f'name and arguments, such as {{ name = "{name}", ... }}.'
            ) from error
        return made

    return wrap


def _autoreset_mode(id: str, vector: Vector) -> AutoresetMode:
    mode = vector.metadata.get("autoreset_mode")
    for known in AutoresetMode:
        if mode in (known, known.value, known.name):
            return known
    raise Refusal(
        f'the vector implementation of {id} gives metadata["autoreset_mode"] = {mode!r}, '
        f"which is neither NextStep, SameStep nor Disabled. What it returns at the end of an "
        f"episode is then unknown, and bootstrapping would be wrong there. Set the metadata to "
        f"what it does, or register the id without vector_entry_point."
    )


def _check_space(id: str, space: spaces.Space[Any]) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            _check_space(id, part)
    elif not isinstance(space, (spaces.Box, *FLATTENED)):
        raise Refusal(
            f"{id} observes a {type(space).__name__} space, {space}, which is no array of fixed "
            f"shape, so no policy can read it. Wrap the env so that it observes Box, Discrete, "
            f"MultiDiscrete, MultiBinary, or a Dict or Tuple of these."
        )


def _action(
    id: str, space: spaces.Space[Any], num_envs: int
) -> tuple[Action, Callable[[Array], Array] | None]:
    """Our description of an action space, and what turns our actions into the env's own.

    A single env gets its row of a new array each time: it may keep it, and compare with the next.
    """
    dtype: Any = space.dtype
    if isinstance(space, spaces.Discrete) and int(space.start) == 0 and dtype == np.int64:
        return Discrete(int(space.n)), None
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.ndim(space.start) < 2:
        start = np.asarray(space.start, np.int64)
        kind = (
            Discrete(int(space.n))
            if isinstance(space, spaces.Discrete)
            else MultiDiscrete(tuple(int(n) for n in space.nvec))
        )
        return kind, lambda action: (action + start).astype(dtype, copy=False)
    if isinstance(space, spaces.Box) and np.issubdtype(dtype, np.floating):
        low, high = space.low.ravel(), space.high.ravel()
        shape = (num_envs, *space.shape)
        bounds = tuple(map(float, low)), tuple(map(float, high))

        def clipped(action: Array) -> Array:
            inside: Array = np.minimum(np.maximum(action, low), high)
            return inside.reshape(shape).astype(dtype, copy=False)

        return Continuous(*bounds, space.shape), clipped
    raise Refusal(
        f"{id} acts in {space}, and policies choose Discrete, one-dimensional MultiDiscrete or "
        f"floating Box actions only, so none can act in it. Wrap the env so that it takes one of "
        f"these."
    )


def _no_picture(id: str) -> Refusal:
    return Refusal(
        f"{id} has no render mode rgb_array, so there is no picture of it. "
        f"Make it without pictures, or add that mode to the env."
    )


@contextmanager
def _refusing(id: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """What goes wrong while an env is created, as a refusal."""
    try:
        yield
    except Refusal:
        raise
    except (ImportError, DependencyNotInstalled) as error:
        missing = getattr(error, "name", None) or getattr(error.__cause__, "name", None)
        told = f"{missing} {error}".lower()
        extra = next((name for word, name in EXTRAS.items() if word in told), None)
        if extra is not None:
            remedy = f"pip install 'tianji[{extra}]'"
        else:
            remedy = f"pip install {missing}" if missing else "install what the message names"
        raise Refusal(
            f"{id} needs a package that is not installed, so no step can be made: {error}. "
            f"Remedy: {remedy}."
        ) from error
    except Exception as error:
        if isinstance(error, TypeError) and "'render_mode'" in str(error):
            raise _no_picture(id) from error
        if isinstance(error, TypeError) and kwargs:
            raise Refusal(
                f"env.kwargs = {kwargs} does not fit {id}, so no step can be made: {error}. "
                f"Correct env.kwargs in the config."
            ) from error
        raise cannot_be_made(id, error) from error
