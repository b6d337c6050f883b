"""What a config can put around any env. From the inside out: a time limit, clipped rewards, clipped
observations, a stack of the last observations."""

from __future__ import annotations

import dataclasses

import numpy as np

from tianji.env import Cuttable, Env, EnvSpec, Halves, Restorable, TimeStep
from tianji.errors import Refusal
from tianji.role import State
from tianji.types import Array, Leaves, leaf

ALL = slice(None)


def wrapped(
    env: Env,
    time_limit: int | None = None,
    clip_reward: float | None = None,
    clip_observation: float | None = None,
    frame_stack: int = 1,
) -> Env:
    """The env with these around it, `Restorable` and with `Halves` where it is itself."""
    saves = isinstance(env, Restorable)
    # Of one half no episode can be cut while the other is under way.
    halves = isinstance(env, Halves) and time_limit is None
    kinds = {
        (False, False): Wrapped,
        (True, False): WrappedRestorable,
        (False, True): WrappedHalves,
        (True, True): WrappedRestorableHalves,
    }
    kind = kinds[saves, halves]
    return kind(env, time_limit, clip_reward, clip_observation, frame_stack)


class Wrapped:
    """An env within all that is asked for; each is applied where it is not None or 1."""

    def __init__(
        self,
        env: Env,
        time_limit: int | None,
        clip_reward: float | None,
        clip_observation: float | None,
        frame_stack: int,
    ) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self._limit, self._reward = time_limit, clip_reward
        self._observation, self._frames = clip_observation, frame_stack
        self.spec = _spec(env, time_limit, clip_observation, frame_stack)
        self._clock = np.zeros(env.num_envs, np.int64)
        """steps of the episode so far"""
        self._cut = np.zeros(env.num_envs, np.bool_)
        """where the next step only resets, because of the limit"""
        obs = self.spec.observation["obs"]
        self._stack = np.zeros((env.num_envs, *obs.shape) if frame_stack > 1 else 0, obs.dtype)

    def reset(self, seed: int) -> Leaves:
        self._clock[:], self._cut[:] = 0, False
        return self._seen(self.env.reset(seed), np.zeros(self.num_envs, np.bool_), ALL)

    def step(self, action: Array) -> TimeStep:
        step = self.env.step(action)
        if self._limit is not None:
            step = self._limited(step, self._limit)
        return self._changed(step, ALL)

    def render(self) -> Array:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _limited(self, step: TimeStep, limit: int) -> TimeStep:
        observation, reward, terminated, truncated, valid, score = step
        over = terminated | truncated if score.ended is None else score.ended
        if self._cut.any():
            # The env took a step there that nobody asked for; it is forgotten.
            assert isinstance(self.env, Cuttable)
            on = ~self._cut
            observation = self.env.reset_some(self._cut)
            terminated, truncated, valid, over = (
                column & on for column in (terminated, truncated, valid, over)
            )
            reward = np.where(on if reward.ndim == 1 else on[:, None], reward, 0)
            if score.reward is not None:
                score = score._replace(reward=np.where(on, score.reward, 0))
        self._clock = np.where(valid, self._clock + 1, 0)
        self._cut = valid & ~over & (self._clock >= limit)
        truncated = truncated | (self._cut & ~terminated)
        if score.ended is not None:
            score = score._replace(ended=over | self._cut)
        return TimeStep(observation, reward, terminated, truncated, valid, score)

    def _changed(self, step: TimeStep, where: slice) -> TimeStep:
        observation, reward, terminated, truncated, valid, score = step
        if self._reward is not None:
            if score.reward is None:
                score = score._replace(reward=_reported(reward))
            reward = np.clip(reward, -self._reward, self._reward)
        observation = self._seen(observation, valid, where)
        return TimeStep(observation, reward, terminated, truncated, valid, score)

    def _seen(self, observation: Leaves, valid: Array, where: slice) -> Leaves:
        obs = observation["obs"]
        if self._observation is not None:
            obs = np.clip(obs, -self._observation, self._observation)
        if self._frames > 1:
            stack = self._stack[where]
            stack[:, :-1] = stack[:, 1:]
            stack[:, -1] = obs
            if not valid.all():
                stack[~valid, :-1] = 0
            obs = stack
        return observation | {"obs": obs}


class WrappedRestorable(Wrapped):
    """Around an env that can go on exactly where it was."""

    def state(self) -> State:
        assert isinstance(self.env, Restorable)
        state: State = {"env": self.env.state()}
        state |= {"clock": self._clock.copy(), "cut": self._cut.copy()}
        return state | {"stack": self._stack.copy()}

    def load_state(self, state: State) -> None:
        assert isinstance(self.env, Restorable)
        self.env.load_state(state["env"])
        self._clock[:], self._cut[:] = state["clock"], state["cut"]
        self._stack[:] = state["stack"]


class WrappedHalves(Wrapped):
    """Around an env whose halves can be stepped apart."""

    def begin(self, half: int, action: Array) -> None:
        assert isinstance(self.env, Halves)
        self.env.begin(half, action)

    def end(self, half: int) -> TimeStep:
        assert isinstance(self.env, Halves)
        middle = self.num_envs // 2
        return self._changed(self.env.end(half), slice(middle, None) if half else slice(middle))


class WrappedRestorableHalves(WrappedRestorable, WrappedHalves):
    """Around an env that is both."""


def _spec(
    env: Env, time_limit: int | None, clip_observation: float | None, frame_stack: int
) -> EnvSpec:
    """Of the env within them; refuses what they cannot do with it."""
    spec, obs = env.spec, env.spec.observation["obs"]
    if clip_observation is not None and obs.dtype.kind != "f":
        raise Refusal(
            f"env.clip_observation = {clip_observation:g} is for real numbers, and {spec.id} "
            f"observes {obs.dtype}, so it would do nothing or harm. Leave it out."
        )
    if time_limit is not None:
        if not isinstance(env, Cuttable):
            raise Refusal(
                f"env.time_limit = {time_limit} cannot be kept: {spec.id} has no reset_some(), by "
                f"which episodes can be cut from outside. Write one, or let the env end its "
                f"episodes itself."
            )
        least = min(time_limit, spec.max_episode_steps or time_limit)
        spec = dataclasses.replace(spec, max_episode_steps=least)
    if frame_stack > 1:
        if spec.frames > 1:
            raise Refusal(
                f"env.frame_stack = {frame_stack} would stack stacks: {spec.id} already observes "
                f"its last {spec.frames} pictures. Leave it out, or set env.kwargs.frames."
            )
        if spec.agents:
            raise Refusal(
                f"env.frame_stack = {frame_stack} is for one agent, and {spec.id} has "
                f"{len(spec.agents)}. Leave it out: recurrent policies remember by themselves."
            )
        stacked = {"obs": leaf((frame_stack, *obs.shape), obs.dtype)}
        observation = spec.observation | stacked
        spec = dataclasses.replace(spec, observation=observation, frames=frame_stack)
    return spec


def _reported(reward: Array) -> Array:
    """[B], of each env."""
    return reward if reward.ndim == 1 else reward.mean(axis=1)
