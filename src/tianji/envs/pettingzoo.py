"""Any PettingZoo parallel env as an `Env`: B copies of it, stepped one after the other."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from tianji.env import (
    Action,
    Continuous,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    TimeStep,
    cannot_be_made,
)
from tianji.errors import Failure, Refusal
from tianji.types import Array, Layout, Leaves, leaf

Space = spaces.Space[Any]
FLATTENED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
MASK = "action_mask"
"""where an env says which actions are legal: beside "observation" in a Dict, or in an info"""


class PettingZoo:
    """B copies of the `parallel_env` of a module; "module:function" names another function.

    Every agent has a reward of its own, and their mean is reported. An agent that has ended is not
    "alive": it observes zeros, gets 0, and its action is ignored, until all have ended and with
    them the episode. Where one of the last was truncated, so is the episode, and the agents that
    were go on being alive in its last observation: a value follows for them. Where the env does not
    give that observation, the step is not valid.
    """

    def __init__(self, num_envs: int, name: str, render: bool = False, **kwargs: Any) -> None:
        self.num_envs = num_envs
        self._id = f"pettingzoo/{name}"
        self._render = render
        make = _maker(self._id, name)
        options = {**kwargs, "render_mode": "rgb_array"} if render else kwargs
        self._envs = [_made(self._id, make, options) for _ in range(num_envs)]
        first = self._envs[0]
        self._agents = list(getattr(first, "possible_agents", ()))
        if not self._agents:
            raise Refusal(
                f"{self._id} names no possible_agents, so that there is nobody to act. Set "
                f"possible_agents to all agents that may ever take part."
            )
        self._observed = {agent: first.observation_space(agent) for agent in self._agents}
        self._acted = {agent: first.action_space(agent) for agent in self._agents}
        self._seen = {
            agent: _seen(self._id, agent, self._observed[agent]) for agent in self._agents
        }
        self._action, choices = _action(self._id, self._acted)
        obs, self._alike = _padded(self._seen)
        widths = tuple(int(np.prod(space.shape or ())) for space in self._seen.values())
        self._layout: Layout = {"obs": obs, "alive": leaf((len(self._agents),), np.bool_)}
        self._rng = np.random.default_rng()
        self._probe(first)
        self.spec = EnvSpec(
            self._id,
            self._layout,
            self._action,
            agents=tuple(map(str, self._agents)),
            own_rewards=True,
            widths=() if len(set(widths)) == 1 else widths,
            choices=() if len(set(choices)) == 1 else choices,
        )
        self._choices = choices
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(self, seed: int) -> Leaves:
        self._rng = np.random.default_rng(seed)
        self._ended[:] = False
        observation = self._blank()
        for b in range(self.num_envs):
            self._begin(b, observation)
        return observation

    def step(self, action: Array) -> TimeStep:
        B, A = self.num_envs, len(self._agents)
        observation, reward = self._blank(), np.zeros((B, A), np.float32)
        terminated, truncated = np.zeros(B, np.bool_), np.zeros(B, np.bool_)
        valid = ~self._ended
        for b, env in enumerate(self._envs):
            if not valid[b]:
                self._begin(b, observation)
                continue
            acting = [(i, agent) for i, agent in enumerate(self._agents) if agent in env.agents]
            given = {agent: self._decoded(i, agent, action[b, i]) for i, agent in acting}
            seen, rewards, ends, cuts, infos = env.step(given)
            for i, agent in acting:
                reward[b, i] = rewards.get(agent, 0.0)
            self._know([*seen, *env.agents])
            going = {a for a in env.agents if not (ends.get(a) or cuts.get(a))}
            if not going:
                # A value follows for those that were only cut off, if they say what they saw last.
                cut = {a for _, a in acting if cuts.get(a) and not ends.get(a)}
                truncated[b], terminated[b] = bool(cut), not cut
                going = cut & seen.keys()
                valid[b] = going == cut
            self._look(b, observation, going, seen, infos)
        self._ended = terminated | truncated
        return TimeStep(observation, reward, terminated, truncated, valid)

    def render(self) -> Array:
        if not self._render:
            raise Refusal(f"{self._id} was made without pictures. Make it with render=True.")
        return np.asarray(self._envs[0].render())

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _probe(self, env: Any) -> None:
        """What only a reset tells: are there masks, and is there a state?"""
        try:
            seen, infos = env.reset(seed=0)
        except Exception as error:
            raise Refusal(
                f"{self._id} raised {type(error).__name__} in its first reset: {error}. So no step "
                f"can be made. Mend the env, or check env.kwargs."
            ) from error
        if isinstance(self._action, Discrete):
            masked = any(_mask(seen.get(a), infos.get(a, {})) is not None for a in self._agents)
            sizes = {int(space.n) for space in self._acted.values()}
            if masked or len(sizes) > 1:
                shape = (len(self._agents), self._action.n)
                self._layout["mask"] = leaf(shape, np.bool_)
        if (state := _state(env)) is not None:
            self._layout["state"] = leaf(state.shape, _dtype(state))

    def _begin(self, b: int, observation: Leaves) -> None:
        """An episode begins in one env, from a seed of its own: so runs can be repeated, whatever
        the env does with its generator."""
        env = self._envs[b]
        seen, infos = env.reset(seed=int(self._rng.integers(2**31)))
        self._know([*env.possible_agents, *env.agents, *seen])
        if gone := [agent for agent in self._agents if agent not in env.possible_agents]:
            raise Failure(
                f"{self._id}: agent {gone[0]!r} is no more among possible_agents, so that no "
                f"policy could act for the same agents. Keep possible_agents as they are."
            )
        for kind, known in (("observation", self._observed), ("action", self._acted)):
            for agent, space in known.items():
                now = getattr(env, f"{kind}_space")(agent)
                if now is not space and now != space:
                    raise Failure(
                        f"{self._id}: the {kind} space of agent {agent!r} was {space} and now is "
                        f"{now}, so that no policy can go on with it. Keep spaces as they are: pad."
                    )
        self._look(b, observation, set(env.agents), seen, infos)

    def _look(
        self,
        b: int,
        observation: Leaves,
        going: set[Any],
        seen: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> None:
        """Write what the agents that go on observe into row b, zeros for the others."""
        for i, agent in enumerate(self._agents):
            if agent not in going:
                if "mask" in observation:
                    observation["mask"][b, i, 0] = True
                continue
            if agent not in seen:
                raise Failure(
                    f"{self._id}: agent {agent!r} is among env.agents and observes nothing, so "
                    f"that no policy can act for it. Give an observation for every live agent."
                )
            observation["alive"][b, i] = True
            array = self._encoded(agent, seen[agent])
            if self._alike:
                observation["obs"][b, i] = array
            else:
                observation["obs"][b, i, : array.size] = array.ravel()
            if "mask" in observation:
                mask = _mask(seen[agent], infos.get(agent, {}))
                n = self._choices[i]
                observation["mask"][b, i, :n] = (
                    True if mask is None else self._legal(agent, mask, n)
                )
        if "state" in observation and going:
            observation["state"][b] = self._whole(self._envs[b])

    def _encoded(self, agent: Any, given: Any) -> Array:
        """What an agent observes as an array; its shape must be the one that its space has."""
        space, known = self._observed[agent], self._seen[agent]
        if isinstance(space, spaces.Dict) and MASK in space.spaces:
            given, space = given["observation"], space.spaces["observation"]
        if isinstance(space, FLATTENED):
            given = spaces.flatten(space, given)
        array = np.asarray(given)
        if array.shape != known.shape:
            raise Failure(
                f"{self._id}: agent {agent!r} observed shape {known.shape} and now observes "
                f"{array.shape}, so that no policy can go on with it. Observations must not change "
                f"their shape: pad them."
            )
        return array

    def _legal(self, agent: Any, mask: Array, n: int) -> Array:
        if mask.shape != (n,):
            raise Failure(
                f"{self._id}: the {MASK} of agent {agent!r} has shape {mask.shape}, not ({n},) as "
                f"its {n} actions, so that it is open which are legal. Mend the mask."
            )
        return mask

    def _whole(self, env: Any) -> Array:
        state = np.asarray(env.state())
        if state.shape != (shape := self._layout["state"].shape):
            raise Failure(
                f"{self._id}: state() had shape {shape} and now has {state.shape}, so that no "
                f"critic can go on with it. A state must not change its shape: pad it."
            )
        return state

    def _know(self, agents: list[Any]) -> None:
        """Refuse agents that no policy was made for."""
        for agent in agents:
            if agent not in self._observed:
                raise Failure(
                    f"{self._id}: agent {agent!r} appeared, who is not among {self._agents}, so "
                    f"that there is no place for it in what was learnt. Name all agents that may "
                    f"ever take part in possible_agents."
                )

    def _decoded(self, i: int, agent: Any, action: Array) -> Any:
        """An agent's own action, of one that may be padded."""
        space: Any = self._acted[agent]
        if isinstance(space, spaces.Discrete):
            if action >= self._choices[i]:
                raise Failure(
                    f"{self._id}: action {int(action)} was chosen for agent {agent!r}, which has "
                    f'{self._choices[i]}: the algorithm does not heed "mask". Use one that does, '
                    f"such as maddpg, or give all agents equally many actions."
                )
            return space.dtype.type(action + space.start)
        if isinstance(space, spaces.MultiDiscrete):
            return (action + space.start).astype(space.dtype)
        own = action[: self._choices[i]].reshape(space.shape)
        return np.clip(own, space.low, space.high).astype(space.dtype)

    def _blank(self) -> Leaves:
        return {
            name: np.zeros((self.num_envs, *of.shape), of.dtype)
            for name, of in self._layout.items()
        }


def _maker(id: str, name: str) -> Callable[..., Any]:
    """The function that makes one env."""
    if name == "pettingzoo.mpe" or name.startswith("pettingzoo.mpe."):
        world = name.removeprefix("pettingzoo.mpe").lstrip(".") or "simple_spread_v3"
        raise Refusal(
            f"the particle environments have left PettingZoo for the package mpe2, so that {name} "
            f'cannot be made. Set env.id = "pettingzoo/mpe2.{world}" (pip install '
            f"'tianji[mpe]'), or take one of our own, such as \"mpe/simple_spread\"."
        )
    module, _, function = name.partition(":")
    function = function or "parallel_env"
    try:
        with warnings.catch_warnings():  # what is asked for is the module that they deprecate
            warnings.filterwarnings("ignore", message="(?s)The old environment creation API")
            found = importlib.import_module(module)
    except ImportError as error:
        raise Refusal(
            f"{id} cannot be imported, so no step can be made: {error}. "
            f"Remedy: {_remedy(module, error)}."
        ) from error
    if not callable(make := getattr(found, function, None)):
        raise Refusal(
            f"the module {module} has no function {function}, so that {id} cannot be made. Name "
            f'one that returns a parallel env as env.id = "pettingzoo/{module}:function"; an env '
            f"whose agents take turns becomes one by pettingzoo.utils.aec_to_parallel."
        )
    return make  # type: ignore[no-any-return]


def _remedy(module: str, error: ImportError) -> str:
    top, missing = module.split(".")[0], error.name or ""
    if top in ("pettingzoo", "mpe2") and missing.split(".")[0] in ("pettingzoo", "mpe2"):
        if missing in ("pettingzoo", "mpe2"):
            return "pip install 'tianji[mpe]'"
        return "correct the name of the module, such as mpe2.simple_spread_v3"
    if missing and not module.startswith(missing):
        family = module.split(".")[1] if top == "pettingzoo" and "." in module else ""
        return f"pip install 'pettingzoo[{family}]'" if family else f"pip install {missing}"
    return "install it, or set PYTHONPATH to the folder it is in"


def _made(id: str, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    try:
        return make(**kwargs)
    except TypeError as error:
        if "'render_mode'" in str(error):
            raise Refusal(
                f"{id} has no render_mode, so there is no picture of it. Make it without "
                f"pictures, or let it take render_mode."
            ) from error
        raise Refusal(
            f"env.kwargs = {kwargs} does not fit {id}, so no step can be made: {error}. Correct "
            f"env.kwargs in the config."
        ) from error
    except Exception as error:
        raise cannot_be_made(id, error) from error


def _seen(id: str, agent: Any, space: Space) -> spaces.Box:
    """An observation space as the array that it becomes, a mask in it left out."""
    if isinstance(space, spaces.Dict) and MASK in space.spaces:
        if "observation" not in space.spaces:
            raise Refusal(
                f'{id}: the observation of agent {agent!r} has an "{MASK}" and no "observation" '
                f"beside it, so that there is nothing to see. Name it so."
            )
        space = space.spaces["observation"]
    _check(id, agent, space)
    flat = spaces.flatten_space(space) if isinstance(space, FLATTENED) else space
    assert isinstance(flat, spaces.Box)
    return flat


def _check(id: str, agent: Any, space: Space) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            _check(id, agent, part)
    elif not isinstance(space, (spaces.Box, *FLATTENED)):
        raise Refusal(
            f"{id}: agent {agent!r} observes a {type(space).__name__} space, {space}, which is no "
            f"array of fixed shape, so no policy can read it. Wrap the env so that it observes "
            f"Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these."
        )


def _padded(seen: dict[Any, spaces.Box]) -> tuple[Any, bool]:
    """The leaf of all agents' observations: as they are where they are alike, else flat and as
    wide as the widest; and whether they are alike."""
    shapes = [space.shape for space in seen.values()]
    alike = len(set(shapes)) == 1
    shape = shapes[0] if alike else (max(int(np.prod(shape)) for shape in shapes),)
    pictures = all(space.dtype == np.uint8 for space in seen.values()) and len(shape) > 1
    return leaf((len(seen), *shape), np.uint8 if pictures else np.float32), alike


def _action(id: str, acted: dict[Any, Space]) -> tuple[Action, tuple[int, ...]]:
    """One description for the actions of all agents, and how many each has before padding."""
    own = list(acted.values())
    if all(isinstance(space, spaces.Discrete) for space in own):
        sizes = tuple(int(space.n) for space in own)  # type: ignore[attr-defined]
        return Discrete(max(sizes)), sizes
    if all(isinstance(s, spaces.Box) and np.issubdtype(s.dtype, np.floating) for s in own):
        sizes = tuple(int(np.prod(space.shape or ())) for space in own)
        low, high = np.full(max(sizes), np.inf), np.full(max(sizes), -np.inf)
        for space, n in zip(own, sizes, strict=True):
            assert isinstance(space, spaces.Box)
            low[:n] = np.minimum(low[:n], space.low.ravel())
            high[:n] = np.maximum(high[:n], space.high.ravel())
        shape = own[0].shape or ()
        if any(space.shape != shape for space in own):
            shape = (max(sizes),)
        return Continuous(tuple(low.tolist()), tuple(high.tolist()), shape), sizes
    nvecs = {tuple(s.nvec.tolist()) for s in own if isinstance(s, spaces.MultiDiscrete)}
    if len(nvecs) == 1 and all(
        isinstance(s, spaces.MultiDiscrete) and s.nvec.ndim == 1 for s in own
    ):
        (nvec,) = nvecs
        return MultiDiscrete(nvec), (len(nvec),) * len(own)
    named = ", ".join(f"{agent!r} in {space}" for agent, space in acted.items())
    raise Refusal(
        f"{id}: agents act {named}. One policy chooses for all: all must be Discrete, or floating "
        f"Box, or the same one-dimensional MultiDiscrete. Wrap the env so that they are."
    )


def _mask(seen: Any, info: Any) -> Array | None:
    """The actions that an agent may take, where the env says so."""
    given = seen.get(MASK) if isinstance(seen, dict) else None
    given = info.get(MASK) if given is None and isinstance(info, dict) else given
    return None if given is None else np.asarray(given).astype(np.bool_)


def _state(env: Any) -> Array | None:
    """What critics may see, where the env has it."""
    if not callable(getattr(getattr(env, "unwrapped", env), "state", None)):
        return None  # some games name something else so
    try:
        return np.asarray(env.state())
    except NotImplementedError:
        return None


def _dtype(array: Array) -> Any:
    return np.uint8 if array.dtype == np.uint8 else np.float32
