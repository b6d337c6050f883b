"""What a role is: an object whose `step` does one bounded piece of work and says which."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from tianji.role_names import RoleName, stream_of


class Did:
    """Truthy: the kind of work that a step did. Falsy: whom the role waits for."""

    __slots__ = ("kind", "nap", "waits")

    def __init__(self, kind: str = "", waits: str = "", nap: float = math.inf) -> None:
        self.kind = kind
        self.waits = waits
        self.nap = nap
        """seconds after which it wants to be stepped again, even if nothing has arrived"""

    def __bool__(self) -> bool:
        return self.kind != ""

    def __repr__(self) -> str:
        return f"did {self.kind}" if self.kind else f"waits for {self.waits}"


State = dict[str, Any]
"""What a role needs to go on later: JSON values and arrays, nested in dicts with string keys."""


class Role(Protocol):
    """A kind of worker. It never waits, sleeps, takes the time or logs: the driver does."""

    name: RoleName

    def step(self) -> Did: ...

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...

    def close(self) -> None: ...


def generator(seed: int, kind: str, index: int = 0, life: int = 0) -> np.random.Generator:
    """The random generator that belongs to one role; after a restart, to its next life."""
    lives = (life,) if life else ()
    sequence = np.random.SeedSequence(seed, spawn_key=(stream_of(kind), index, *lives))
    return np.random.Generator(np.random.PCG64DXSM(sequence))


def generator_state(rng: np.random.Generator) -> State:
    return dict(rng.bit_generator.state)


def load_generator_state(rng: np.random.Generator, state: State) -> None:
    rng.bit_generator.state = state
