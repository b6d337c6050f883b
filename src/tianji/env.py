"""The environment template: B environments that are stepped together."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tianji.errors import Failure, Refusal, nearest
from tianji.role import State
from tianji.types import Array, Layout, Leaf, Leaves, leaf


@dataclass(frozen=True)
class Discrete:
    """One of n actions."""

    n: int

    @property
    def leaf(self) -> Leaf:
        return leaf((), np.int64)


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once, the i-th one of nvec[i]."""

    nvec: tuple[int, ...]

    @property
    def leaf(self) -> Leaf:
        return leaf((len(self.nvec),), np.int64)


@dataclass(frozen=True)
class Continuous:
    """A vector of reals; an env clips what lies outside its bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]
    """what the env itself expects; actions travel flat"""

    @property
    def leaf(self) -> Leaf:
        return leaf((len(self.low),), np.float32)


Action = Discrete | MultiDiscrete | Continuous


@dataclass(frozen=True)
class EnvSpec:
    """What one env observes and accepts."""

    id: str
    observation: Layout
    """leaves of one observation; "obs" is the one that policies look at"""
    action: Action
    max_episode_steps: int | None = None

    def tree(self) -> State:
        """As JSON can hold it, for another process."""
        kind = type(self.action).__name__
        action = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.action).items()}
        observation = {k: [list(v.shape), v.dtype.str] for k, v in self.observation.items()}
        return {
            "id": self.id,
            "observation": observation,
            "action": [kind, action],
            "max_episode_steps": self.max_episode_steps,
        }

    @classmethod
    def of(cls, tree: State) -> EnvSpec:
        kinds = {kind.__name__: kind for kind in (Discrete, MultiDiscrete, Continuous)}
        kind, fields = tree["action"]
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        observation = {k: leaf(tuple(s), dtype) for k, (s, dtype) in tree["observation"].items()}
        return cls(tree["id"], observation, kinds[kind](**fields), tree["max_episode_steps"])


class TimeStep(NamedTuple):
    """What one step of B envs gave. Arrays may be reused by the next step: copy what you keep."""

    observation: Leaves
    """each [B, ...]: what follows the step; of an episode's last step, its last observation"""
    reward: Array
    """[B]; 0 where valid is False because the step only reset its env"""
    terminated: Array
    """[B] bool: the episode ended and no value follows"""
    truncated: Array
    """[B] bool: the episode was cut, a value follows"""
    valid: Array
    """[B] bool: False where the step only reset its env, or where a truncated episode's last
    observation is not known because the env was reset in the same step"""


class Env(Protocol):
    """B envs that reset themselves: after an episode's last step, the next `step` ignores that
    env's action, returns the first observation of a new episode with reward 0, and is not valid."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seed: int) -> Leaves:
        """Begin anew, reproducibly; the first observations, each [B, ...]."""

    def step(self, action: Array) -> TimeStep: ...

    def render(self) -> Array:
        """The first env as a picture, [H, W, 3] uint8."""

    def close(self) -> None: ...


@runtime_checkable
class Restorable(Protocol):
    """An env that can be saved and goes on exactly where it was: JSON values and arrays."""

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class Factory(Protocol):
    def __call__(self, num_envs: int, **kwargs: Any) -> Env: ...


def first_observation(env: Env, seed: int) -> Leaves:
    """Reset an env for the first time; what is wrong with it then is refused."""
    try:
        observation = env.reset(seed)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            f"{env.spec.id} raised {type(error).__name__} in its first reset: {error}. So no step "
            f"can be made. Mend the env, or check env.kwargs."
        ) from error
    if problem := _misfit(env, observation):
        raise Refusal(f"{env.spec.id}: the first reset gave {problem}. Mend reset() or the spec.")
    return observation


def remake(env: Env, make: Callable[[int], Env], seed: int) -> tuple[Env, Leaves]:
    """Another env in the place of one that raised, and its first observations."""
    with contextlib.suppress(Exception):  # it is broken, and what it raised is told already
        env.close()
    new = make(env.num_envs)
    return new, new.reset(seed)


def check_step(env: Env, observation: Leaves, *columns: Array) -> None:
    """Does an env's first step have the shapes that its spec promises?"""
    problem = _misfit(env, observation)
    for name, column in zip(TimeStep._fields[1:], columns, strict=True):
        if np.shape(column) != (env.num_envs,):
            problem = f"{name} of shape {np.shape(column)}, not ({env.num_envs},)"
    if problem:
        raise Failure(f"{env.spec.id}: the first step gave {problem}. Mend step() or the spec.")


def _misfit(env: Env, observation: Leaves) -> str | None:
    """How an observation differs from the spec, in words."""
    if set(observation) != set(env.spec.observation):
        return f"the leaves {sorted(observation)}, not {sorted(env.spec.observation)}"
    for name, expected in env.spec.observation.items():
        shape = (env.num_envs, *expected.shape)
        if np.shape(observation[name]) != shape:
            return f'"{name}" of shape {np.shape(observation[name])}, not {shape}'
        if not np.can_cast(np.asarray(observation[name]).dtype, expected.dtype, "same_kind"):
            given = np.asarray(observation[name]).dtype
            return f'"{name}" as {given}, which does not fit {expected.dtype}'
    return None


_FACTORIES: dict[str, Factory | str] = {
    "toy/Identity": "tianji.envs.toy:Identity",
    "toy/Chain": "tianji.envs.toy:Chain",
    "toy/Frames": "tianji.envs.toy:Frames",
    "toy/Target": "tianji.envs.toy:Target",
}


def register_env(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make an own `Env` class known by a name that configs can use as env.id."""

    def register(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return register


def env_names() -> list[str]:
    return sorted(_FACTORIES)


def import_modules(modules: tuple[str, ...]) -> None:
    """Import what env.imports names, so that the envs in it register themselves."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not module.startswith(error.name):
                raise
            raise Refusal(
                f'env.imports names "{module}", which is not installed or not on the path, so its '
                f"environments are unknown. Install it, or set PYTHONPATH to the folder it is in."
            ) from error


def make_env(id: str, num_envs: int, kwargs: dict[str, Any], render: bool = False) -> Env:
    """The env of this name: our own by registry, all others from Gymnasium."""
    factory = _FACTORIES.get(id)
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        _FACTORIES[id] = factory
    if factory is not None:
        try:
            inspect.signature(factory).bind(num_envs, **kwargs)
        except TypeError as error:
            raise Refusal(
                f"env.kwargs does not fit {id}: {error}. Correct env.kwargs in the config."
            ) from error
        env = factory(num_envs, **kwargs)
        if render and not hasattr(env, "render"):
            raise Refusal(
                f"{id} cannot be drawn: it has no render(). Give it one that returns a picture, "
                f"[H, W, 3] uint8."
            )
        return env
    from tianji.envs.gymnasium import known_ids, make_gymnasium_env

    if id not in known_ids() and ":" not in id:
        raise Refusal(
            f'env.id = "{id}" is no known environment, so there is nothing to train on.'
            f"{nearest(id, [*known_ids(), *env_names()])} Own environments register themselves in "
            f"a module that env.imports names."
        )
    return make_gymnasium_env(id, num_envs, kwargs, render=render)
