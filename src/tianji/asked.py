"""What a profile is of, what its actor does, and the time that there is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tianji.algorithm import hyperparameter
from tianji.config import Config
from tianji.env import EnvSpec
from tianji.errors import Refusal
from tianji.machine import core_order
from tianji.machine import cores as cores_here
from tianji.plan import Task
from tianji.probe import Measured, Measurement, Probe, alone
from tianji.shape import begins, see, shares, task_of_all, template, with_share, without_warmup

WHOLE = 45.0
"""seconds that a profile may take"""
MAKING = 2.0
"""seconds to make the envs of one measurement, at most"""
UPDATING, GLANCING = 3.0, 0.3
"""seconds of an update with which learning is measured, at most, as acting lets it be expected; in
a look"""
PASSES = 3
"""times that a gradient takes as long as inference, about"""
STEPPING = 4.0
"""seconds in which envs make a step, or what an update follows, at most: with fewer envs, or with
steps that are shown again"""

Progress = Callable[[str, float], None]
"""what is being measured, and seconds that are left, about"""


def _sees_gpu() -> Measurement:
    """For a process of its own: one that has asked CUDA cannot fork others that use it."""
    return lambda: {"gpu": torch.cuda.is_available()}


class Clock:
    """What is left of the time, and for what it did not suffice."""

    def __init__(self, progress: Progress) -> None:
        self._begun = time.monotonic()
        self._progress = progress
        self.skipped: list[str] = []

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return WHOLE - self.spent

    def say(self, what: str) -> None:
        self._progress(what, max(0.0, self.left))

    def has(self, what: str, seconds: float) -> bool:
        """Is there so much left? If not, it is told in the profile."""
        if self.left < seconds:
            self.skipped.append(what)
            return False
        self.say(what)
        return True


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a profile is of."""

    config: Config
    one: Config
    """with everything of a run in one place"""
    sooner: Config
    """the same without most of its warm-up"""
    env: EnvSpec
    making: float
    """seconds to make and reset an env"""
    task: Task
    cores: Sequence[int]

    @classmethod
    def of(cls, config: Config) -> Asked:
        cores = core_order()[: cores_here()]
        if config.scale.device == "cuda" and not alone(_sees_gpu, cores)["gpu"]:
            raise Refusal(
                "there is no GPU here that torch sees, so learning on one cannot be measured. "
                'Leave --gpus out, or set scale.device = "cpu".'
            )
        torch.set_num_threads(1)  # children are forked, and a pool of threads is not
        one = template(config)
        env, making = see(one)
        task = task_of_all(config, env)
        return cls(config, one, without_warmup(one, env), env, making, task, cores)

    @property
    def on_cpu(self) -> bool:
        return self.config.scale.device == "cpu"

    def at_once(self, seconds: float) -> int:
        """Envs that can be made in so many seconds."""
        return max(1, int(seconds / max(self.making, 1e-6)))

    def collecting(self, acted: Acted) -> float:
        """Seconds in which one actor collects what an update follows."""
        return self.task.rows * acted.steps[acted.envs] / acted.envs

    def fed(self, acted: Acted) -> tuple[int, int | None]:
        """What learning is measured with: envs that are made, and real steps of theirs; None: all
        are real, as they do not take long."""
        most = self.at_once(MAKING)
        real = min(most, self.task.envs) / self.task.envs
        if real * self.collecting(acted) < STEPPING:
            return most, None
        return 1, int(STEPPING / 2 / acted.steps[min(acted.steps)])

    def share(self, inference: float, glance: bool = False) -> int:
        """Of how many equal shares of what an update takes learning is measured with one, as all
        of it would take too long: on a CPU a row takes as many times as long as `inference` as
        there are passes."""
        passes = PASSES * hyperparameter(self.config.algorithm, "epochs", 1)
        expected = self.task.rows * inference * passes
        if not self.on_cpu or expected < (most := GLANCING if glance else UPDATING):
            return 1
        found = [
            n
            for n, alike in shares(self.one).items()
            if (alike or glance) and begins(with_share(self.one, n), self.env)
        ]
        return next((n for n in found if expected / n < most), max(found))

    def long_enough(self, update: float, collecting: float) -> float:
        """Seconds of a real run in which some updates are made, each after so much collecting."""
        warmup = hyperparameter(self.sooner.algorithm, "warmup", 0)
        first = collecting * max(1.0, warmup / self.task.rows)
        return max(2.0, first + 4 * max(update, collecting))


class Acted(NamedTuple):
    """What one actor does."""

    steps: dict[int, float]
    """seconds of a step by number of envs"""
    shares: dict[int, float]
    """what share of them is inference"""
    rests: dict[int, float]
    """and for what share of them it leaves its core to others"""
    envs: int
    """the config's, or as many of them as can be made"""
    with_these: Measured
    actor: Probe
    """who was asked that"""

    @property
    def inference(self) -> float:
        """Seconds of it for a row."""
        return self.shares[self.envs] * self.steps[self.envs] / self.envs
