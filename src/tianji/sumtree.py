"""A sum tree: draws places in proportion to values that change all the time."""

from __future__ import annotations

import numpy as np

from tianji.role import State
from tianji.types import Array

DENSE = 1024
"""nodes of a level, at most, that are computed all at once: quicker than some of them by index"""


class SumTree:
    """Values at `capacity` places, and the sums over them that drawing needs.

    Node i is exactly the sum of nodes 2 i and 2 i + 1, so the tree is a function of the values
    alone, whatever the order in which they were set, and no error adds up.
    """

    def __init__(self, capacity: int) -> None:
        self._size = 1 << max(0, capacity - 1).bit_length()
        self._nodes = np.zeros(2 * self._size, np.float64)
        """the root is node 1, the value of place i is node size + i"""
        self._width = min(DENSE, self._size)
        """nodes of the level that draws begin at"""
        self._ends: Array | None = None
        """running sums over that level; None: it has changed"""

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def __getitem__(self, places: Array) -> Array:
        values: Array = self._nodes[places + self._size]
        return values

    def set(self, places: Array, values: Array | float) -> None:
        """Set the values, 0 or more, of some places; of a place that is named twice, the last."""
        if not len(places):
            return
        nodes = self._nodes
        at = places + self._size
        nodes[at] = values
        width = self._size
        while width > self._width:
            width >>= 1
            total = nodes.take(at)
            total += nodes.take(at ^ 1)  # a node and its sibling, whichever is the left one
            at = at >> 1
            nodes[at] = total
        while width > 1:
            level = nodes[width : 2 * width]
            width >>= 1
            np.add(level[0::2], level[1::2], out=nodes[width : 2 * width])
        self._ends = None

    def sample(self, prefix: Array) -> Array:
        """[N]: the places at which the running sum of values passes each of the prefix sums, which
        lie in 0 .. total; never one whose value is 0, unless all are."""
        if self._ends is None:
            self._ends = np.cumsum(self._nodes[self._width : 2 * self._width])
        ends = self._ends
        rest = np.minimum(prefix, np.nextafter(ends[-1], 0.0))
        at = np.minimum(np.searchsorted(ends, rest, side="right"), self._width - 1)
        rest -= np.where(at > 0, ends.take(at - 1), 0.0)
        at += self._width
        nodes, width = self._nodes, self._width
        while width < self._size:
            width <<= 1
            at <<= 1
            left = nodes.take(at)
            # Rounding may leave a rest of all there is on the left: nothing then lies on the right.
            right = (rest >= left) & (nodes.take(at + 1) > 0)
            left *= right
            rest -= left
            at += right
        places: Array = at - self._size
        return places

    def state(self) -> State:
        return {"values": self._nodes[self._size :].copy()}

    def load_state(self, state: State) -> None:
        self.set(np.arange(self._size), np.asarray(state["values"]))
