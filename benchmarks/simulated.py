"""A simulated load for benchmarks: an env and updates that take a fixed time, mostly asleep.

Hosts import it by env.imports = ["simulated"], with this folder on the path. As the time is slept
away, a few cores suffice for many processes, and what is measured is how they go together.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tianji.algorithm import Metrics, NotNegative, Spec, Trainer, register_algorithm
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.env import TimeStep, register_env
from tianji.envs.toy import Identity
from tianji.testing.faults import host_role
from tianji.types import Array


def rest_until(end: float) -> None:
    """Sleep until the clock says so, if it does not yet."""
    if (left := end - time.monotonic()) > 0:
        time.sleep(left)


@register_env("simulated/Env")
class SimulatedEnv(Identity):
    """`toy/Identity`, all envs of which take `step_s` seconds for a step, and `make_s` to be made.
    With `each_s`, each takes so much in addition, one after the other: as simulators on another
    machine that are asked in turn. With `uneven`, actor i takes `uneven[i]` times as long. A line
    of `log` says what ("make" when it begins, "made", "step" when it has ended), the role, the pid,
    and when, by the clock on the wall that faults.jsonl has, too."""

    def __init__(
        self,
        num_envs: int,
        step_s: float = 0.005,
        make_s: float = 0.0,
        log: str = "",
        uneven: Sequence[float] = (),
        each_s: float = 0.0,
    ) -> None:
        self._log, self._who = -1, ""
        if log and (role := host_role()):
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._who = f"{role} {os.getpid()}"
        self._tell("make")
        time.sleep(make_s)
        super().__init__(num_envs)
        kind, _, index = host_role().rpartition("-")
        self._step_s = step_s * (uneven[int(index)] if uneven and kind == "actor" else 1.0)
        self._step_s += each_s * num_envs
        self._tell("made")

    def step(self, action: Array) -> TimeStep:
        end = time.monotonic() + self._step_s
        timestep = super().step(action)
        rest_until(end)
        self._tell("step")
        return timestep

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _tell(self, what: str) -> None:
        if self._log >= 0:
            os.write(self._log, f"{what} {self._who} {time.time():.6f}\n".encode())


def _slow(trainer: Trainer, seconds: float) -> Trainer:
    finish: Callable[[], Metrics] = trainer.finish

    def slow() -> Metrics:
        end = time.monotonic() + seconds
        metrics = finish()
        rest_until(end)
        return metrics

    trainer.finish = slow
    return trainer


@register_algorithm("simulated_ppo")
@dataclass(frozen=True)
class SimulatedPPO(PPO):
    """PPO whose updates take `update_s` seconds."""

    name: ClassVar[str] = "simulated_ppo"
    epochs: int = 1
    minibatches: int = 1
    update_s: NotNegative = 0.06

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return _slow(super().trainer(spec, device), self.update_s)


@register_algorithm("simulated_dqn")
@dataclass(frozen=True)
class SimulatedDQN(DQN):
    """DQN whose updates take `update_s` seconds."""

    name: ClassVar[str] = "simulated_dqn"
    update_s: NotNegative = 0.015

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return _slow(super().trainer(spec, device), self.update_s)
