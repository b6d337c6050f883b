"""Envs, algorithms and stores that go wrong when and where they are told to; configs name this
module in env.imports, so that hosts know them, too."""

import contextlib
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tianji.algorithm import register_algorithm
from tianji.algorithms import dqn, ppo
from tianji.env import register_env
from tianji.envs.toy import Identity
from tianji.trigger import register_trigger


def role():
    """Of the host that this is, by the log that it writes to; "" elsewhere."""
    log = Path(os.readlink("/proc/self/fd/1"))
    return log.stem if log.parent.name == "logs" else ""


def meant(who):
    """Is this process, or its kind, the one that `who` names?"""
    return bool(who) and who in (role(), role().partition("-")[0])


@register_env("test/Fault")
class Fault(Identity):
    """Episodes of 16 steps; in the process `who`, something happens in its step `at`."""

    def __init__(self, num_envs, who="", what="", at=10, sleep=0.0, length=16):
        """`sleep`: seconds that every step of `who` takes more."""
        super().__init__(num_envs, length=length)
        self._meant, self._what, self._at, self._sleep = meant(who), what, at, sleep
        self._steps = 0
        if self._meant and what == "init":
            raise OSError("no licence")

    def reset(self, seed):
        if self._meant and self._what == "reset":
            raise OSError("no licence")
        return super().reset(seed)

    def step(self, action):
        self._steps += 1
        if self._meant:
            time.sleep(self._sleep)
            if self._steps == self._at:
                self._happen()
        timestep = super().step(action)
        if self._meant and self._what == "nan" and self._steps >= self._at:
            timestep.observation["obs"][0] = np.nan
        return timestep

    def _happen(self):
        match self._what:
            case "raise":
                raise RuntimeError("the simulator broke")
            case "hang":
                time.sleep(3600)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)


@register_env("test/Hungry")
class Hungry(Identity):
    """In its step 40, the second actor takes all memory that there is: once, as a file says."""

    def __init__(self, num_envs, marker):
        super().__init__(num_envs)
        self._marker, self._steps, self._eaten = Path(marker), 0, []

    def step(self, action):
        self._steps += 1
        if self._steps == 40 and role() == "actor-1" and not self._marker.exists():
            self._marker.touch()
            while True:
                self._eaten.append(bytearray(b"x") * (1 << 24))
        return super().step(action)


class _Trainer:
    """A trainer that sleeps in every update, or raises in one."""

    def __init__(self, hyper, spec):
        if hyper.raise_at == 0:
            raise OSError("no licence")
        super().__init__(hyper, spec)
        if hyper.begins_apart and spec.group:
            learnt = self.state.networks().items()
            self.state.load_networks({name: array + 1 for name, array in learnt})
        self._finished = 0

    def finish(self):
        """Its metrics also say what the host that it is in was given."""
        self._finished += 1
        if self._finished == self._hyper.raise_at:
            raise ZeroDivisionError("the trainer broke")
        time.sleep(self._hyper.sleep)
        about = {"threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))}
        at, last = self._hyper.nan_at, self._hyper.nan_at + self._hyper.nan_times
        before = {name: array.copy() for name, array in self.state.networks().items()}
        metrics = super().finish() | about
        if self.state.counters["updates"] > self._hyper.learns:
            self.state.load_networks(before)
        if at <= self._finished < last:
            metrics["loss"] = float("nan")
            for array in self.state.networks().values():
                array[...] = np.nan
        return metrics


class _PPOTrainer(_Trainer, ppo.Trainer):
    pass


class _DQNTrainer(_Trainer, dqn.Trainer):
    pass


class _Broken:
    """A store that raises, in the buffer alone."""

    def __init__(self, chooser):
        self._chooser = chooser

    def __getattr__(self, name):
        return getattr(self._chooser, name)

    def choose(self, rng, out):
        raise KeyError("the store broke")


@register_algorithm("test_ppo")
@dataclass(frozen=True)
class PPO(ppo.PPO):
    name = "test_ppo"

    sleep: float = 0.0
    """seconds that every update takes more"""
    raise_at: int = -1
    """the update that raises; 0: making the trainer does"""
    nan_at: int = -1
    """the update whose loss and networks are NaN"""
    nan_times: int = 1
    """updates in a row that are"""
    learns: int = 1_000_000
    """updates of a learner after which it changes nothing any more"""
    begins_apart: bool = False
    """each group but the first begins with other weights"""
    store_breaks: bool = False
    """serving a batch raises"""

    def trainer(self, spec, device="cpu"):
        return _PPOTrainer(self, spec)

    def chooser(self, spec, lanes):
        chooser = super().chooser(spec, lanes)
        return _Broken(chooser) if self.store_breaks else chooser


@register_algorithm("test_dqn")
@dataclass(frozen=True)
class DQN(dqn.DQN):
    name = "test_dqn"

    sleep: float = 0.0
    """seconds that every update takes more"""
    raise_at: int = -1
    """the update that raises; 0: making the trainer does"""
    nan_at: int = -1
    """the update whose loss and networks are NaN"""
    nan_times: int = 1
    """updates in a row that are"""
    learns: int = 1_000_000
    """updates of a learner after which it changes nothing any more"""
    begins_apart: bool = False
    """each group but the first begins with other weights"""

    def trainer(self, spec, device="cpu"):
        return _DQNTrainer(self, spec)


@register_algorithm("test_slow_load")
@dataclass(frozen=True)
class SlowLoad(dqn.DQN):
    """Its chooser takes a second to go on from a state."""

    name = "test_slow_load"

    def chooser(self, spec, lanes):
        chooser = super().chooser(spec, lanes)
        load = chooser.load_state

        def slowly(state):
            time.sleep(1.0)
            load(state)

        chooser.load_state = slowly
        return chooser


RECORD = struct.Struct("<qqd")
"""updates, steps received, seconds since the epoch"""


@register_trigger("told")
def told(earlier, now):
    """Due once there is a file `end` in the run's folder. The learner, where it is asked after each
    update, also leaves a record of it."""
    if role() != "learner":
        return False
    folder = Path(os.readlink("/proc/self/fd/1")).parents[1]
    with contextlib.suppress(OSError), (folder / "progress").open("ab", buffering=0) as file:
        file.write(RECORD.pack(now.updates, now.steps, time.time()))
    return (folder / "end").exists()
