"""The environment template: B environments that are stepped together."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    """What one env observes and accepts.

    Where there are several agents, "obs" is [A, ...], and so are actions. Beside it there may be
    "mask" [A, n] bool, the actions that are legal now (without agents: [n]); "alive" [A] bool, the
    agents that act now; and "state" [...], what a critic may see and a policy may not. Agents whose
    spaces differ are padded with zeros, or with actions that are never legal.
    """

    id: str
    observation: Layout
    """leaves of one observation; "obs" is the one that policies look at"""
    action: Action
    """of one agent"""
    max_episode_steps: int | None = None
    agents: tuple[str, ...] = ()
    """names; none: there is one agent, and no axis for it"""
    own_rewards: bool = False
    """every agent has a reward of its own: [B, A] instead of [B]"""
    widths: tuple[int, ...] = ()
    """numbers that each agent's "obs" has before padding; none: all are alike"""
    choices: tuple[int, ...] = ()
    """actions that each agent has before padding; none: all are alike"""
    frames: int = 1
    """pictures that "obs" is a stack of along its first axis, the newest last; a rollout holds each
    of them once"""

    @property
    def held(self) -> Layout:
        """The leaves of one observation as a rollout holds it: of a stack, the newest picture."""
        if self.frames == 1:
            return self.observation
        obs = self.observation["obs"]
        return self.observation | {"obs": leaf(obs.shape[1:], obs.dtype)}

    @property
    def action_leaf(self) -> Leaf:
        """Actions of all agents of one env."""
        one = self.action.leaf
        return leaf((len(self.agents), *one.shape), one.dtype) if self.agents else one

    @property
    def reward_leaf(self) -> Leaf:
        return leaf((len(self.agents),) if self.own_rewards else (), np.float32)


class Score(NamedTuple):
    """What is reported of a step, where it is not what is learnt from."""

    reward: Array | None = None
    """[B]; none: the reward itself, its mean over the agents where each has its own"""
    ended: Array | None = None
    """[B] bool: here an episode ended that is worth a report; none: those terminated or truncated.
    With a life as an episode, only the last one of a game is"""
    won: Array | None = None
    """[B] bool, of those that ended; none: there is no winning"""


class TimeStep(NamedTuple):
    """What one step of B envs gave. Arrays may be reused by the next step: copy what you keep."""

    observation: Leaves
    """each [B, ...]: what follows the step; of an episode's last step, its last observation"""
    reward: Array
    """[B], or [B, A]; 0 where valid is False because the step only reset its env"""
    terminated: Array
    """[B] bool: the episode ended and no value follows"""
    truncated: Array
    """[B] bool: the episode was cut, a value follows"""
    valid: Array
    """[B] bool: False where the step only reset its env, or where a truncated episode's last
    observation is not known because the env was reset in the same step"""
    score: Score = Score()
    """what is reported, where it differs"""


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


@runtime_checkable
class Halves(Protocol):
    """An env whose two halves, the first B // 2 envs and the rest, can be stepped apart, so that
    one simulates while actions are chosen for the other."""

    def begin(self, half: int, action: Array) -> None:
        """Let the envs of a half go on by these actions, without waiting for them."""

    def end(self, half: int) -> TimeStep:
        """What came of it: arrays over the half's envs, its own until its next `end`."""


@runtime_checkable
class Cuttable(Protocol):
    """An env whose episodes can be cut from outside, as a time limit does."""

    def reset_some(self, which: Array) -> Leaves:
        """Begin new episodes where `which`, [B] bool, is True, and forget whether the old ones had
        ended; what all envs observe now."""


class Factory(Protocol):
    """Takes, beside env.kwargs, what of `threads`, `halves`, `time_limit` and `render` it has
    parameters for: how many threads step the envs, whether they are stepped by `Halves`, steps
    after which episodes are cut, and whether there will be pictures."""

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
    if problem := _misfit(env.spec, env.num_envs, observation):
        raise Refusal(f"{env.spec.id}: the first reset gave {problem}. Mend reset() or the spec.")
    return observation


def remake(env: Env, make: Callable[[int], Env], seed: int) -> tuple[Env, Leaves]:
    """Another env in the place of one that raised, and its first observations."""
    with contextlib.suppress(Exception):  # it is broken, and what it raised is told already
        env.close()
    try:
        new = make(env.num_envs)
    except Refusal as error:  # what is refused before the first step is a failure after it
        cause = error.__cause__ or error
        raise Failure(
            f"{env.spec.id} raised, and cannot be made anew: {type(cause).__name__}: {cause}"
        ) from error
    return new, new.reset(seed)


def check_step(spec: EnvSpec, envs: int, step: TimeStep) -> None:
    """Does the first step of so many envs have the shapes that the spec promises?"""
    problem = _misfit(spec, envs, step.observation)
    for name, column in zip(TimeStep._fields[1:5], step[1:5], strict=True):
        own = spec.reward_leaf.shape if name == "reward" else ()
        if np.shape(column) != (shape := (envs, *own)):
            problem = f"{name} of shape {np.shape(column)}, not {shape}"
    if problem:
        raise Failure(f"{spec.id}: the first step gave {problem}. Mend step() or the spec.")


def _misfit(spec: EnvSpec, envs: int, observation: Leaves) -> str | None:
    """How an observation differs from the spec, in words."""
    if set(observation) != set(spec.observation):
        return f"the leaves {sorted(observation)}, not {sorted(spec.observation)}"
    for name, expected in spec.observation.items():
        shape = (envs, *expected.shape)
        if np.shape(observation[name]) != shape:
            return f'"{name}" of shape {np.shape(observation[name])}, not {shape}'
        if not np.can_cast(np.asarray(observation[name]).dtype, expected.dtype, "same_kind"):
            given = np.asarray(observation[name]).dtype
            return f'"{name}" as {given}, which does not fit {expected.dtype}'
    return None


_FACTORIES: dict[str, Factory | str] = {
    "mpe/simple_adversary": "tianji.envs.mpe:SimpleAdversary",
    "mpe/simple_spread": "tianji.envs.mpe:SimpleSpread",
    "mpe/simple_tag": "tianji.envs.mpe:SimpleTag",
    "toy/Identity": "tianji.envs.toy:Identity",
    "toy/Chain": "tianji.envs.toy:Chain",
    "toy/Frames": "tianji.envs.toy:Frames",
    "toy/Pair": "tianji.envs.toy:Pair",
    "toy/Recall": "tianji.envs.toy:Recall",
    "toy/Target": "tianji.envs.toy:Target",
}

_FAMILIES: dict[str, str] = {
    "ALE/": "tianji.envs.atari:Atari",
    "MinAtar/": "tianji.envs.minatar:MinAtar",
    "pettingzoo/": "tianji.envs.pettingzoo:PettingZoo",
    "skirmish/": "tianji.envs.skirmish:Skirmish",
    "smac/": "tianji.envs.smac:StarCraft",
    "smax/": "tianji.envs.smac:Smax",
}
"""by the beginning of an env.id, whose rest is the first argument beside the number of envs"""


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


Wrapper = str | dict[str, Any]
"""one of env.wrappers: a name, or a table of `name` and the wrapper's arguments"""


def make_env(
    id: str,
    num_envs: int,
    kwargs: dict[str, Any],
    render: bool = False,
    *,
    wrappers: tuple[Wrapper, ...] = (),
    time_limit: int | None = None,
    clip_reward: float | None = None,
    clip_observation: float | None = None,
    frame_stack: int = 1,
    threads: int = 1,
    halves: bool = False,
) -> Env:
    """The env of this name: our own by registry, all others from Gymnasium; with what the config
    wants around it, in the order of `envs.wrap`."""
    factory, name = (None, {}) if wrappers else _factory(id)
    limit = time_limit
    if factory is not None:
        offers = {"threads": threads, "halves": halves, "time_limit": limit, "render": render}
        taken = inspect.signature(factory).parameters
        if "time_limit" in taken:
            limit = None
        _refuse_threads(id, 1 if "threads" in taken else threads)
        offers = name | {key: value for key, value in offers.items() if key in taken}
        env = _made(id, factory, num_envs, offers, kwargs)
        if render and not hasattr(env, "render"):
            raise Refusal(
                f"{id} cannot be drawn: it has no render(). Give it one that returns a picture, "
                f"[H, W, 3] uint8."
            )
    else:
        _refuse_threads(id, threads)
        env, limit = _of_gymnasium(id, num_envs, kwargs, render, wrappers, limit), None
    if limit is None and clip_reward is None and clip_observation is None and frame_stack == 1:
        return env
    from tianji.envs.wrap import wrapped

    return wrapped(env, limit, clip_reward, clip_observation, frame_stack)


def _factory(id: str) -> tuple[Factory | None, dict[str, Any]]:
    """Of our own envs, and what of the id it is told; None: the id is for Gymnasium."""
    factory, name = _FACTORIES.get(id), {}
    for beginning, family in _FAMILIES.items():
        if factory is None and id.startswith(beginning):
            factory, name = family, {"name": id.removeprefix(beginning)}
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        assert callable(factory)
    return factory, name


def _made(
    id: str, factory: Factory, num_envs: int, offers: dict[str, Any], kwargs: dict[str, Any]
) -> Env:
    for key in offers.keys() & kwargs.keys():
        raise Refusal(
            f"env.kwargs.{key} = {kwargs[key]!r} is said elsewhere, so that two keys would say it. "
            f"Set {_KEYS[key]} instead."
        )
    try:
        inspect.signature(factory).bind(num_envs, **offers, **kwargs)
    except TypeError as error:
        raise Refusal(
            f"env.kwargs does not fit {id}: {error}. Correct env.kwargs in the config."
        ) from error
    try:
        return factory(num_envs, **offers, **kwargs)
    except (Refusal, Failure):
        raise
    except Exception as error:
        raise cannot_be_made(id, error) from error


def cannot_be_made(id: str, error: Exception) -> Refusal:
    """What an env's own constructor raised, and where: the last line that is no library's, if there
    is one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(LIBRARIES)]
    place = ""
    if frames:
        last = (own or frames)[-1]
        place = f" ({Path(last.f_code.co_filename).name}, line {last.f_lineno})"
    return Refusal(
        f"{id} cannot be created, so no step can be made: {type(error).__name__}: {error}{place}. "
        f"Correct the env's constructor, or give it what it needs by env.kwargs."
    )


LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
             str(Path(__file__).parent), "<")  # fmt: skip
"""where files begin that users of tianji did not write"""

_KEYS = {
    "name": "env.id",
    "threads": "scale.env_threads",
    "halves": "scale.halves",
    "time_limit": "env.time_limit",
    "render": "`tianji play RUN --video`",
}
"""which key of a config says what a factory is offered"""


def _refuse_threads(id: str, threads: int) -> None:
    if threads > 1:
        raise Refusal(
            f"scale.env_threads = {threads} would do nothing: {id} is stepped by one thread. Set "
            f"scale.env_threads = 1, and scale.actors higher to use more cores."
        )


def _of_gymnasium(
    id: str,
    num_envs: int,
    kwargs: dict[str, Any],
    render: bool,
    wrappers: tuple[Wrapper, ...],
    time_limit: int | None,
) -> Env:
    from tianji.envs.gymnasium import known_ids, make_gymnasium_env, register_family

    if id in _FACTORIES:
        raise Refusal(
            f"env.wrappers are for single envs of Gymnasium, and {id} is none, so they would not "
            f"be applied. Leave env.wrappers out; env.clip_reward and env.clip_observation work "
            f"for every env, env.frame_stack for those with one agent."
        )
    register_family(id)
    if id not in known_ids() and ":" not in id:
        raise Refusal(
            f'env.id = "{id}" is no known environment, so there is nothing to train on.'
            f"{nearest(id, [*known_ids(), *env_names()])} Own environments register themselves in "
            f"a module that env.imports names."
        )
    return make_gymnasium_env(id, num_envs, kwargs, render, wrappers, time_limit)
