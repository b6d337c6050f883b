"""An env and an algorithm that take as long as they are told to: bottlenecks to be found."""

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from tianji.algorithm import register_algorithm
from tianji.algorithms.ppo import PPO
from tianji.env import register_env
from tianji.envs.toy import Identity


@register_env("planted/Sleeper")
class Sleeper(Identity):
    """A step takes `seconds`, and after so many steps `then` instead."""

    def __init__(self, num_envs, seconds=0.0, after=10**9, then=0.0):
        super().__init__(num_envs)
        self.spec = replace(self.spec, id="planted/Sleeper")
        self._seconds, self._after, self._then, self._steps = seconds, after, then, 0

    def step(self, action):
        self._steps += 1
        time.sleep(self._seconds if self._steps <= self._after else self._then)
        return super().step(action)


@register_env("planted/Raises")
class Raises(Identity):
    """An env that cannot make a step."""

    def step(self, action):
        raise ValueError("the simulator is gone")


@register_env("planted/Elsewhere")
class Elsewhere(Identity):
    """A step takes 4 ms in another process, which computes for all of them, or sleeps."""

    def __init__(self, num_envs, burns):
        super().__init__(num_envs)
        work = "while time.perf_counter() < end: pass" if burns else "time.sleep(0.004)"
        program = (
            "import sys, time\n"
            "for line in sys.stdin:\n"
            "    end = time.perf_counter() + 0.004\n"
            f"    {work}\n"
            "    print(flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def step(self, action):
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        self._process.stdout.readline()
        return super().step(action)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Slow:
    """Anything, with one method that takes longer, and after so many calls `then` longer."""

    def __init__(self, inner, method, seconds, after=10**9, then=0.0):
        self._inner, self._method, self._seconds = inner, method, seconds
        self._after, self._then, self._calls = after, then, 0

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name != self._method:
            return found

        def slowly(*arguments):
            self._calls += 1
            time.sleep(self._seconds if self._calls <= self._after else self._then)
            return found(*arguments)

        return slowly


@register_algorithm("planted")
@dataclass(frozen=True)
class Planted(PPO):
    """PPO whose updates, and whose chooser's receiving of a rollout, take so many seconds more."""

    name: ClassVar[str] = "planted"

    update_s: float = 0.0
    receive_s: float = 0.0
    after: int = 10**9
    """updates, after which they take `then_s` instead"""
    then_s: float = 0.0

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        if not self.update_s:
            return trainer
        return Slow(trainer, "finish", self.update_s, self.after, self.then_s)

    def chooser(self, spec, lanes):
        chooser = super().chooser(spec, lanes)
        return Slow(chooser, "add", self.receive_s) if self.receive_s else chooser
