"""Does an environment keep what its template promises?"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tianji.env import Discrete, Env, MultiDiscrete, Restorable, TimeStep
from tianji.types import Array, Leaves


def check_env(make: Callable[[int], Env], steps: int = 500) -> None:
    """Does the env that `make(num_envs)` returns keep the promises of `Env`?

    Raises AssertionError with the consequence and the remedy. The actions are random, and equal
    seeds must give equal episodes.
    """
    specs = []
    for num_envs in (1, 4):
        env, twin = make(num_envs), make(num_envs)
        try:
            _require(
                env.num_envs == num_envs,
                f"make({num_envs}) gave an env whose num_envs is {env.num_envs}, so actions would "
                f"not fit. Keep num_envs as it is given.",
            )
            specs.append(env.spec)
            ends = _check_episodes(env, twin, steps)
            if isinstance(env, Restorable):
                _check_state(env, make, min(steps, 100))
        finally:
            env.close()
            twin.close()
    _require(
        specs[0] == specs[1],
        "spec depends on the number of envs, so a policy of one could not act in the other. "
        "Describe one env in it.",
    )
    if not ends:
        warnings.warn(
            f"no episode ended in {steps} steps, so nothing is known of what the env does at an "
            f"end: call check_env with more steps, or make episodes shorter.",
            stacklevel=2,
        )


def _check_episodes(env: Env, twin: Env, steps: int) -> int:
    """Step both from one seed, with equal actions except where they must be ignored; the ends."""
    rng = np.random.default_rng(0)
    first = copy.deepcopy(env.reset(7))
    _check_observation(env, first, "reset")
    env.step(_actions(env, rng, env.reset(8)))
    for again in (env, twin):
        _require_equal(
            again.reset(7),
            first,
            "two resets with the same seed give different observations, so runs cannot be "
            "repeated. Draw everything from a generator that reset(seed) makes anew.",
        )
    ended, ends, seen = np.zeros(env.num_envs, np.bool_), 0, first
    for _ in range(steps):
        action = _actions(env, rng, seen)
        given = action.copy()
        step = copy.deepcopy(env.step(given))
        _require_equal(
            given,
            action,
            "step wrote into the action array, so the rollout would hold actions that the policy "
            "did not choose. Copy before you clip or scale.",
        )
        _check_step(env, step, ended)
        action[ended] = _actions(env, rng, seen)[ended]
        _require_equal(
            twin.step(action),
            step,
            "two envs with the same seed and actions part, so runs cannot be repeated. Draw "
            "everything from a generator that reset(seed) makes anew, share nothing between envs, "
            "and ignore the action of a step that only resets.",
        )
        over = step.score.ended  # where it is said, a lost life may terminate, and the game goes on
        ended = step.terminated | step.truncated if over is None else over
        seen = step.observation
        ends += int(ended.sum())
    return ends


def _check_step(env: Env, step: TimeStep, ended: Array) -> None:
    """What one step gave, where `ended` says which episodes the step before ended."""
    _check_observation(env, step.observation, "step")
    for name in ("reward", "terminated", "truncated", "valid"):
        array, kinds = getattr(step, name), "fiu" if name == "reward" else "b"
        own = env.spec.reward_leaf.shape if name == "reward" else ()
        shape = (env.num_envs, *own)
        _require(
            isinstance(array, np.ndarray) and array.shape == shape and array.dtype.kind in kinds,
            f"{name} is {_describe(array)}, so it does not fit a rollout's row. Return a numpy "
            f"array of {'numbers' if name == 'reward' else 'bool'}, shape {shape}.",
        )
    _require(
        bool(np.isfinite(step.reward).all()),
        "a reward is not finite, so the first update would make every parameter NaN. Bound it.",
    )
    _require(
        not (step.terminated & step.truncated).any(),
        "a step is both terminated and truncated, so it is open whether a value follows. Set "
        "truncated only where the episode was not terminated.",
    )
    _require(
        not (step.valid & ended).any(),
        "the step after an episode's end is valid, so a learner would take the way from the last "
        "observation to the next episode's first for experience. In the step after an end only "
        "reset that env, and set valid to False.",
    )
    _require(
        bool((step.valid | ended).all()),
        "a step that follows no end is not valid, so its experience is lost. Set valid to False "
        "only in the step after an end.",
    )
    _require(
        not step.reward[ended].any(),
        "the step that only resets has a reward, so returns would be wrong. Give 0.",
    )
    _require(
        not (step.terminated | step.truncated)[ended].any(),
        "the step that only resets ends an episode, so an episode of no steps would be counted. "
        "Begin a new episode there, with terminated and truncated False.",
    )


def _check_observation(env: Env, observation: Leaves, where: str) -> None:
    layout = env.spec.observation
    _require(
        "obs" in layout,
        'spec.observation has no leaf "obs", which policies look at. Name one so.',
    )
    _require(
        set(observation) == set(layout),
        f"{where} gives the leaves {sorted(observation)} where the spec has {sorted(layout)}, so "
        f"a rollout would miss some. Make them equal.",
    )
    for name, leaf in layout.items():
        array, shape = observation[name], (env.num_envs, *leaf.shape)
        _require(
            isinstance(array, np.ndarray) and array.shape == shape and array.dtype == leaf.dtype,
            f'observation "{name}" of {where} is {_describe(array)} where the spec says '
            f"{leaf.dtype} {shape}, so it does not fit a rollout's row. Make them equal.",
        )
        _require(
            array.dtype.kind != "f" or bool(np.isfinite(array).all()),
            f'observation "{name}" of {where} is not finite, so a policy would answer NaN. Bound '
            f"it.",
        )


def _check_state(env: Any, make: Callable[[int], Any], steps: int) -> None:
    """Does a fresh env that loads the state go on as the one that gave it?"""
    rng = np.random.default_rng(1)
    seen = env.reset(9)
    for made in range(2 * steps):
        step = env.step(_actions(env, rng, seen))
        seen = step.observation
        if made >= steps and (step.terminated | step.truncated).any():
            break  # between an end and its reset there is most to remember
    given = env.state()
    saved = _through_checkpoint(given, "state()")
    actions, went_on = [], []
    for _ in range(steps):
        actions.append(_actions(env, rng, seen))
        went_on.append(copy.deepcopy(env.step(actions[-1])))
        seen = went_on[-1].observation
    _require_equal(
        given,
        saved,
        "what state() returned changes when the env is stepped, so a checkpoint could hold a later "
        "moment than it says. Copy the arrays in state().",
    )
    fresh = make(env.num_envs)
    fresh.load_state(saved)
    for action, then in zip(actions, went_on, strict=True):
        _require_equal(
            fresh.step(action),
            then,
            "a fresh env that loads the state goes on differently, so a resumed run would part "
            "from the one that was stopped. Save all that step uses, the generator too, or do not "
            "offer state().",
        )
    fresh.close()


def _through_checkpoint(state: Any, path: str) -> Any:
    """A copy, as a checkpoint would give it back."""
    if isinstance(state, dict):
        for key in state:
            _require(isinstance(key, str), f"{path} has the key {key!r}. Keys must be strings.")
        return {key: _through_checkpoint(state[key], f"{path}[{key!r}]") for key in state}
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf":
        return state.copy()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(
            f"{path} is {_describe(state)}, which a checkpoint cannot hold ({error}). Use JSON "
            f"values and arrays of numbers, nested in dicts."
        ) from error


def _actions(env: Env, rng: np.random.Generator, observation: Leaves) -> Array:
    """Random legal actions, [B, ...] or [B, A, ...]."""
    action, many = env.spec.action, (env.num_envs, len(env.spec.agents))
    rows = many if env.spec.agents else many[:1]
    if isinstance(action, Discrete):
        if (mask := observation.get("mask")) is not None:
            _require(
                bool(mask.any(axis=-1).all()),
                "a mask allows no action at all, so no policy can act. Allow one, such as to do "
                "nothing.",
            )
            legal: Array = np.where(mask, rng.random(mask.shape), -1.0).argmax(axis=-1)
            return legal
        return rng.integers(action.n, size=rows)
    if isinstance(action, MultiDiscrete):
        return rng.integers(action.nvec, size=(*rows, len(action.nvec)))
    low = np.where(np.isfinite(action.low), action.low, np.minimum(action.high, 1) - 2)
    high = np.where(np.isfinite(action.high), action.high, low + 2)
    return rng.uniform(low, high, (*rows, len(low))).astype(np.float32)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return f"a {type(value).__name__}"


def _require(kept: bool, otherwise: str) -> None:
    if not kept:
        raise AssertionError(otherwise)


def _require_equal(one: Any, other: Any, otherwise: str) -> None:
    try:
        np.testing.assert_equal(one, other)
    except AssertionError as error:
        raise AssertionError(otherwise) from error
