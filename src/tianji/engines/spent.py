"""Where a host's time went lately: what it told of all its time, some seconds back and now."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from tianji.engines.engine import shares_of

LATELY = 1.0
"""seconds over which shares of time are shown and written down"""
WINDOW = 5.0
"""seconds over which a run is judged, so that several updates fall into them"""
LONGEST = 30.0
"""seconds of which a host's words are kept"""


class Told(NamedTuple):
    """What a host said of all its time so far."""

    at: float
    """when, by the clock of who hears it"""
    elapsed: float
    seconds: Mapping[str, float]
    """by "role/kind" """
    cpu: float
    """seconds of CPU time"""


class Spent:
    """What one host has told, as far back as anybody asks."""

    def __init__(self) -> None:
        self._told = deque([Told(-math.inf, 0.0, {}, 0.0)])

    @property
    def last(self) -> Told:
        return self._told[-1]

    def note(self, told: Told) -> None:
        self._told.append(told)
        while len(self._told) > 2 and self._told[1].at <= told.at - LONGEST:
            self._told.popleft()

    def shares(self, seconds: float) -> dict[str, float]:
        """Of the last so many seconds that it has told of, or of all that there are."""
        since, last = self._since(seconds), self.last
        spent = {key: value - since.seconds.get(key, 0.0) for key, value in last.seconds.items()}
        return shares_of(spent, last.elapsed - since.elapsed)

    def cpu(self, seconds: float) -> float:
        """Cores that it used meanwhile."""
        since, last = self._since(seconds), self.last
        elapsed = last.elapsed - since.elapsed
        return (last.cpu - since.cpu) / elapsed if elapsed > 0 else 0.0

    def _since(self, seconds: float) -> Told:
        """The newest word that is at least so old."""
        if math.isinf(seconds):
            return Told(-math.inf, 0.0, {}, 0.0)
        old = [told for told in self._told if told.at <= self.last.at - seconds]
        return old[-1] if old else self._told[0]
