"""Returns and lengths of the episodes that envs are in, until they end."""

from __future__ import annotations

import numpy as np

from tianji.env import TimeStep
from tianji.role import State
from tianji.types import EPISODE, Array

ALL = slice(None)
NONE = np.empty(0, np.int64), np.empty(0, EPISODE)


class Ledger:
    """Of B envs, as it is reported: by a step's score where it has one, else by its reward."""

    def __init__(self, B: int) -> None:
        self._returns = np.zeros(B, np.float64)
        self._lengths = np.zeros(B, np.int64)

    @property
    def begun(self) -> int:
        """Episodes that have made a step and not ended."""
        return int(np.count_nonzero(self._lengths))

    def count(self, step: TimeStep, where: slice = ALL) -> tuple[Array, Array]:
        """One step of the envs `where`: those of them whose episodes ended, and EPISODE records."""
        returns, lengths = self._returns[where], self._lengths[where]
        reward, ended, won = step.score
        if reward is None:
            reward = step.reward if np.ndim(step.reward) == 1 else step.reward.mean(axis=1)
        returns += reward
        lengths += step.valid | step.truncated
        if ended is None:
            ended = step.terminated | step.truncated
        if not np.count_nonzero(ended):
            return NONE
        (envs,) = np.nonzero(ended)
        records = np.empty(len(envs), EPISODE)
        records["return"], records["length"] = returns[envs], lengths[envs]
        records["win"] = -1 if won is None else won[envs]
        returns[envs], lengths[envs] = 0.0, 0
        return envs, records

    def clear(self) -> None:
        """All episodes are aborted: they have no return."""
        self._returns[:], self._lengths[:] = 0.0, 0

    def state(self) -> State:
        return {"returns": self._returns.copy(), "lengths": self._lengths.copy()}

    def load_state(self, state: State) -> None:
        self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
