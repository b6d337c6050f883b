"""Who steps the roles and takes the time: a role is only ever called from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tianji.errors import Failure
from tianji.role import Did, Role


class Serial:
    """One thread, fixed order: each role works until it waits for another, then the next one does.
    The same roles with the same seeds make the same steps, so runs repeat bit for bit."""

    def __init__(
        self, roles: Sequence[Role], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.at = 0
        """whose turn it is"""
        self.seconds: dict[str, float] = {}
        """time spent, by "role/kind of work"; waiting for each other is "driver/turn" """
        self._roles = roles
        self._clock = clock
        self._last = clock()
        self._waiting = 0
        self._keys: dict[tuple[int, str], str] = {}

    def step(self) -> Did:
        """One step of one role."""
        at = self.at
        did = self._roles[at].step()
        now = self._clock()
        if did:
            key = self._keys.get((at, did.kind)) or self._key(at, did.kind)
            self._waiting = 0
        else:
            key = "driver/turn"
            self._pass()
        self._account(key, now)
        return did

    def step_other(self, role: Role) -> Did:
        """One step of a role that has no turn of its own."""
        self.outside()
        did = role.step()
        self._account(f"{role.name}/{did.kind or 'wait'}", self._clock())
        return did

    def outside(self) -> None:
        """The time since the last step was not spent in a role: it is "run/other"."""
        self._account("run/other", self._clock())

    def _account(self, key: str, now: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._last
        self._last = now

    def _pass(self) -> None:
        self._waiting += 1
        if self._waiting > len(self._roles):
            waits = ", ".join(f"{role.name} {role.step()}" for role in self._roles)
            raise Failure(f"the run stands still: {waits}. This is a defect of tianji, not yours.")
        self.at = (self.at + 1) % len(self._roles)

    def _key(self, at: int, kind: str) -> str:
        key = f"{self._roles[at].name.split('-')[0]}/{kind}"
        self._keys[at, kind] = key
        return key


class Shuffled(Serial):
    """One thread, a seeded random role each time: interleavings that processes could make."""

    def __init__(self, roles: Sequence[Role], seed: int) -> None:
        super().__init__(roles)
        self._rng = np.random.default_rng(seed)

    def _pass(self) -> None:
        """Nobody's turn ends: the next role is drawn anyway."""

    def step(self) -> Did:
        self.at = int(self._rng.integers(len(self._roles)))
        return super().step()
