"""An env that goes wrong when it is told to: it raises, hangs, crashes, gives NaN or is slow."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from tianji.env import Factory, TimeStep, register_env
from tianji.envs.toy import Identity
from tianji.errors import Refusal
from tianji.role import State, generator_state, load_generator_state
from tianji.role_names import parse_role
from tianji.types import Array, Leaves

KINDS = ("raises", "hangs", "segfaults", "nans", "slows")
FOREVER = 3600.0
"""seconds that a hang takes"""


def host_role() -> str:
    """Of the host that this process is, by the log that it writes to; "" where it is none."""
    try:
        log = Path(os.readlink("/proc/self/fd/1"))
    except OSError:
        return ""
    return log.stem if log.parent.name == "logs" else ""


class Happened(NamedTuple):
    """A line of a marker."""

    role: str
    kind: str
    step: int
    """of the env, since it was made"""
    pid: int
    time: float
    """seconds since the epoch"""


def happened(marker: str | Path) -> list[Happened]:
    """The faults that a marker tells of, in their order; slow steps only where `at` named them."""
    path = Path(marker)
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [Happened(r, kind, int(step), int(pid), float(at)) for r, kind, step, pid, at in lines]


class FaultEnv(Identity):
    """`toy/Identity` with faults. Each of the kinds has a probability per step, of all envs
    together; `at` names steps in which one happens for certain, {"raises": 40} for example.

    Chances are drawn from a generator of their own that `reset(seed)` makes anew: equal seeds fail
    in equal steps, and a restarted actor, which has another seed, in others. What `at` names would
    instead happen in every life of a restarted actor, so that no budget could ever be enough.
    Memory does not outlive a process that crashes, and an env knows nothing of its own past; so the
    past is a file: `marker` gets a line for every fault before it happens, and what `at` names
    happens only as long as fewer than `times` lines of that role and kind are in it.
    """

    def __init__(
        self,
        num_envs: int,
        raises: float = 0.0,
        hangs: float = 0.0,
        segfaults: float = 0.0,
        nans: float = 0.0,
        slows: float = 0.0,
        slow: float = 0.1,
        at: Mapping[str, int] | None = None,
        only: str = "",
        marker: str = "",
        times: int = 1,
        n: int = 4,
        length: int = 16,
    ) -> None:
        """`slow`: seconds that a slow step takes more; `only`: the role that it happens in,
        "actor-1", or "actor" for all of a kind. In a process that is no host, as with engine
        serial, there is no role: faults then happen only where `only` is not set."""
        super().__init__(num_envs, n=n, length=length)
        self.spec = replace(self.spec, id="testing/Fault")
        self._rates = np.array([raises, hangs, segfaults, nans, slows])
        self._at, self._slow, self._times = dict(at or {}), slow, times
        self._marker = Path(marker) if marker else None
        self._refuse()
        role = host_role()
        self._role = role or "here"
        self._meant = not only or only in (role, parse_role(role).kind)
        self._chance = np.random.default_rng()
        self._steps = 0

    def _refuse(self) -> None:
        if not ((self._rates >= 0) & (self._rates <= 1)).all():
            raise Refusal(
                f"testing/Fault: {', '.join(KINDS)} are probabilities per step, so {self._rates} "
                f"cannot be drawn from. Set each between 0 and 1."
            )
        if unknown := self._at.keys() - set(KINDS):
            raise Refusal(
                f"testing/Fault: at = {self._at} names {', '.join(sorted(unknown))}, which is no "
                f"fault, so nothing would happen. The kinds are {', '.join(KINDS)}."
            )
        if self._at and self._marker is None:
            raise Refusal(
                f"testing/Fault: at = {self._at} without a marker would happen again after every "
                f"restart, for ever. Set marker to a file of the test, which remembers."
            )

    def reset(self, seed: int) -> Leaves:
        self._chance = np.random.default_rng((seed, len(KINDS)))
        return super().reset(seed)

    def step(self, action: Array) -> TimeStep:
        self._steps += 1
        drawn = self._chance.random(len(KINDS)) < self._rates
        happening = [
            k for k, draw in zip(KINDS, drawn, strict=True) if self._happens(k, bool(draw))
        ]
        if "slows" in happening:
            time.sleep(self._slow)
        if "hangs" in happening:
            time.sleep(FOREVER)
        if "segfaults" in happening:
            ctypes.string_at(0)
        if "raises" in happening:
            raise RuntimeError(f"an injected fault, in step {self._steps} of {self._role}")
        timestep = super().step(action)
        if "nans" in happening:
            timestep.observation["obs"][0] = np.nan
        return timestep

    def state(self) -> State:
        chance = generator_state(self._chance)
        return super().state() | {"chance": chance, "steps": self._steps}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        load_generator_state(self._chance, state["chance"])
        self._steps = state["steps"]

    def _happens(self, kind: str, drawn: bool) -> bool:
        if not self._meant:
            return False
        due = self._at.get(kind) == self._steps and self._before(kind) < self._times
        if not (drawn or due):
            return False
        if self._marker is not None and (due or kind != "slows"):
            line = f"{self._role} {kind} {self._steps} {os.getpid()} {time.time():.3f}\n"
            with self._marker.open("a") as file:
                file.write(line)
        return True

    def _before(self, kind: str) -> int:
        """How often it has happened in this role, in all its lives."""
        assert self._marker is not None
        return sum((f.role, f.kind) == (self._role, kind) for f in happened(self._marker))


register_env("testing/Fault")(cast(Factory, FaultEnv))
