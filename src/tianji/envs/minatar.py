"""MinAtar (Young and Tian 2019): five small games whose pictures have one channel per object."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tianji.env import Discrete, EnvSpec, TimeStep
from tianji.errors import Refusal, nearest
from tianji.types import Array, Leaves, leaf

GAMES = {
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
VERSIONS = ("v0", "v1")
"""v0 has all six actions, v1 those that the game uses"""
SCALE = 16
"""pixels of a field's side in `render`"""


class MinAtar:
    """B copies of one game, observed as bool [10, 10, channels]."""

    def __init__(
        self,
        num_envs: int,
        name: str,
        sticky: float = 0.1,
        difficulty_ramping: bool = True,
        time_limit: int | None = None,
    ) -> None:
        """`sticky` is the probability that an action is repeated, `difficulty_ramping` makes some
        games harder as they go on."""
        id = f"MinAtar/{name}"
        game = _game(id, name)
        try:
            with _silent():
                module = importlib.import_module("minatar.environment")
        except ImportError as error:
            raise Refusal(
                f"{id} needs MinAtar, which is not installed, so no step can be made: {error}. "
                f"Remedy: pip install 'tianji[minatar]'."
            ) from error
        if isinstance(sticky, bool) or not isinstance(sticky, float | int) or not 0 <= sticky <= 1:
            raise Refusal(
                f"env.kwargs.sticky = {sticky!r} is no probability of repeating an action. Set it "
                f"from 0 to 1."
            )
        self._games = [
            module.Environment(game, sticky, difficulty_ramping) for _ in range(num_envs)
        ]
        one: Any = self._games[0]
        every = name.endswith("v0")
        self._actions: list[int] = list(range(6)) if every else one.minimal_action_set()
        shape = tuple(one.state_shape())
        self._limit = time_limit
        self._over = np.zeros(num_envs, np.bool_)
        self._clock = np.zeros(num_envs, np.int64)
        self.num_envs = num_envs
        action = Discrete(len(self._actions))
        self.spec = EnvSpec(id, {"obs": leaf(shape, np.bool_)}, action, time_limit)

    def reset(self, seed: int) -> Leaves:
        words = np.random.SeedSequence(seed).generate_state(self.num_envs)
        for game, word in zip(self._games, words, strict=True):
            game.seed(int(word))
            game.last_action = 0
            game.reset()
        self._over[:], self._clock[:] = False, 0
        return {"obs": self._observe()}

    def step(self, action: Array) -> TimeStep:
        valid = ~self._over
        reward = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, np.bool_)
        for i, (game, choice) in enumerate(zip(self._games, action.tolist(), strict=True)):
            if valid[i]:
                reward[i], terminated[i] = game.act(self._actions[choice])
            else:
                game.reset()
        self._clock = np.where(valid, self._clock + 1, 0)
        truncated = np.zeros(self.num_envs, np.bool_)
        if self._limit is not None:
            truncated = valid & ~terminated & (self._clock >= self._limit)
        self._over = terminated | truncated
        return TimeStep({"obs": self._observe()}, reward, terminated, truncated, valid)

    def render(self) -> Array:
        """Every kind of object in a colour of its own, the later ones above."""
        state = np.asarray(self._games[0].state())
        angle = np.arange(state.shape[2]) / state.shape[2] * 2 * np.pi
        wave = np.cos(angle[:, None] - np.array([0, 2, 4]) * np.pi / 3)
        colours = np.concatenate([np.zeros((1, 3)), 140 + 110 * wave]).astype(np.uint8)
        last = (state * np.arange(1, state.shape[2] + 1)).max(axis=2)
        return colours[last].repeat(SCALE, axis=0).repeat(SCALE, axis=1)  # type: ignore[no-any-return]

    def close(self) -> None:
        pass

    def _observe(self) -> Array:
        return np.stack([game.state() for game in self._games])


def _game(id: str, name: str) -> str:
    game, _, version = name.rpartition("-")
    if game in GAMES and version in VERSIONS:
        return GAMES[game]
    ids = [f"MinAtar/{game}-{version}" for game in GAMES for version in VERSIONS]
    raise Refusal(
        f'env.id = "{id}" is no game of MinAtar, so there is nothing to train on.'
        f"{nearest(id, ids)} Known: {', '.join(ids)}."
    )


@contextmanager
def _silent() -> Iterator[None]:
    """MinAtar warns when it cannot draw by seaborn, and we draw without."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
