"""What passes from actors through the buffer to the learner, and what would pass with others."""

from __future__ import annotations

from dataclasses import dataclass, replace

GAIN = 0.05
"""predicted gain from which something is advised"""
LEAST = 1e-4
"""share of its time that a role is busy at least, so that nothing is divided by 0"""
HEADROOM = 1.1
"""what fewer actors must be able to make, over what is consumed: so that they never just suffice"""


@dataclass(frozen=True)
class Flow:
    """The fluid model. A side that is busy for a share of the time could pass 1 / share as much;
    the least of these is what passes."""

    actors: float
    learner: float
    buffer: float
    cores: float = 0.0
    """share that is used of the cores that actors may run on: more actors cannot pass that"""
    turns: bool = False
    """acting and learning do not overlap, but for what the shares say"""

    def rate(self, actors: float = 1.0, learner: float = 1.0) -> float:
        """What would pass, over what passes now, with sides that are so many times as fast."""
        acting, learning = max(self.actors / actors, self.cores), self.learner / learner
        slowest = max(acting, learning, self.buffer)
        if self.turns:
            between = 1.0 - max(self.actors, self.cores) - self.learner
            slowest = max(slowest, acting + learning + between)
        return 1.0 / slowest

    def gain(self, actors: float = 1.0, learner: float = 1.0) -> float:
        """By what share more would pass than the model says passes now."""
        return self.rate(actors, learner) / self.rate() - 1.0

    def overlapped(self) -> Flow:
        """The same with acting and learning at once."""
        return replace(self, turns=False)


def wanted(flow: Flow, active: int, most: int) -> int:
    """The number of actors that the model calls for, where so many were active and busy.

    Between too few, where more would bring over 5 %, and too many, where fewer would make over
    1.1 times what is consumed, there is room in which nothing is changed. What is chosen lies
    within it, so that the same inputs never call for a change and then for its reverse.
    """
    demand = 1.0 / max(flow.learner, flow.buffer)

    def supply(actors: int) -> float:
        return 1.0 / max(flow.actors * active / actors, flow.cores)

    now = min(supply(active), demand)
    best = min(supply(most), demand)
    if best > (1.0 + GAIN) * now:
        return next(n for n in range(active, most + 1) if min(supply(n), demand) >= 0.99 * best)
    return next((n for n in range(1, active) if supply(n) >= HEADROOM * demand), active)
