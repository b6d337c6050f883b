"""Predicates on counts: is it due?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Every:
    """Due each time a count passes a multiple of `every`; never where `every` is 0."""

    every: int

    def due(self, before: int, now: int) -> bool:
        return self.every > 0 and now // self.every > before // self.every


@dataclass(frozen=True)
class Reached:
    """Due once any of the named counts has reached its limit."""

    limits: Mapping[str, float]

    def due(self, counts: Mapping[str, float]) -> str | None:
        """The condition that holds, in words, or None."""
        for name, limit in self.limits.items():
            if counts[name] >= limit:
                return f"{name} >= {limit:g}"
        return None
