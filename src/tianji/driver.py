"""Who steps the roles and takes the time: a role is only ever called from here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tianji.errors import Failure
from tianji.role import Did, Role

KEPT = 2**16
"""events that are kept until somebody asks for them: the newest"""


class Serial:
    """One thread, fixed order: each role works until it waits for another, then the next one does.
    The same roles with the same seeds make the same steps, so runs repeat bit for bit."""

    def __init__(
        self, roles: Sequence[Role], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.at = 0
        """whose turn it is"""
        self.seconds: dict[str, float] = {}
        """time spent, by "role/kind of work" or "role/wait_whom"; going round is "driver/turn" """
        self._roles = roles
        self._clock = clock
        self._last = self._started = self._asked = clock()
        self._waiting = 0
        self._done: deque[str] = deque(maxlen=KEPT)
        """keys of the events since somebody asked, and when they ended"""
        self._ends: deque[float] = deque(maxlen=KEPT)
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
            key = self._pass(did)
            now = self._clock()
        self._account(key, now)
        return did

    def step_other(self, role: Role) -> Did:
        """One step of a role that has no turn of its own."""
        self.outside()
        did = role.step()
        self._account(f"{role.name.kind}/{did.kind or 'wait'}", self._clock())
        return did

    def start(self) -> None:
        """What was before does not count."""
        self.seconds.clear()
        self._done.clear()
        self._ends.clear()
        self._last = self._started = self._asked = self._clock()

    def outside(self) -> None:
        """The time since the last step was not spent in a role: it is "run/other"."""
        self._account("run/other", self._clock())

    def _account(self, key: str, now: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._last
        self._last = now
        self._done.append(key)
        self._ends.append(now)

    def events(self) -> tuple[float, list[str], list[float]]:
        """What the time since the last call was spent on: when that began, keys as in `seconds`,
        and when each of them ended. Events follow each other without a break."""
        begin, keys, ends = self._asked, list(self._done), list(self._ends)
        if len(keys) == KEPT:  # some may be lost, and with them when the first one left began
            begin, keys, ends = ends[0], keys[1:], ends[1:]
        self._done.clear()
        self._ends.clear()
        self._asked = self._last
        return begin, keys, ends

    @property
    def now(self) -> float:
        """The clock's reading after the last step."""
        return self._last

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the last step, by the clock: what `seconds` must add up to."""
        return self._last - self._started

    def _pass(self, did: Did) -> str:
        """A role waits: what to do, and what the time since the last step was spent on."""
        self._waiting += 1
        if self._waiting > len(self._roles):
            waits = ", ".join(f"{role.name} {role.step()}" for role in self._roles)
            raise Failure(f"the run stands still: {waits}. This is a defect of tianji, not yours.")
        self.at = (self.at + 1) % len(self._roles)
        return "driver/turn"

    def _key(self, at: int, kind: str) -> str:
        key = f"{self._roles[at].name.kind}/{kind}"
        self._keys[at, kind] = key
        return key


class Forever(Serial):
    """A process's roles, each in turn; when none has work it sleeps until something arrives."""

    NAP = 0.1
    """seconds that it sleeps at most, so that it can say how it is"""

    def __init__(
        self,
        roles: Sequence[Role],
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(roles, clock)
        self._sleep = sleep
        self._nap = self.NAP

    def spent(self, kind: str) -> None:
        """The time since the last step was the first role's, of this kind."""
        self._account(f"{self._roles[0].name.kind}/{kind}", self._clock())

    def _pass(self, did: Did) -> str:
        role = self._roles[self.at]
        self._nap = min(self._nap if self._waiting else self.NAP, did.nap)
        self._waiting += 1
        self.at = (self.at + 1) % len(self._roles)
        if self._waiting < len(self._roles):
            return "driver/turn"
        self._waiting = 0
        self._sleep(self._nap)
        return f"{role.name.kind}/wait_{did.waits}"


class Shuffled(Serial):
    """One thread, a seeded random role each time: interleavings that processes could make."""

    def __init__(self, roles: Sequence[Role], seed: int) -> None:
        super().__init__(roles)
        self._rng = np.random.default_rng(seed)

    def _pass(self, did: Did) -> str:
        """Nobody's turn ends: the next role is drawn anyway."""
        return "driver/turn"

    def step(self) -> Did:
        self.at = int(self._rng.integers(len(self._roles)))
        return super().step()
