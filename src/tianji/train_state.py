"""What a trainer has learnt, by name, and what else it needs in order to go on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from tianji.role import State, generator_state, load_generator_state
from tianji.types import Array, Leaves

Fate = Literal["averaged", "local"]
"""what becomes of an array where groups join their models: one for all of them, or each its own"""

ADAM: dict[str, Fate] = dict.fromkeys(("optimizer.m", "optimizer.v", "optimizer.steps"), "local")
"""of an optimizer's moments and its count of steps"""


class Named(Protocol):
    """Parameters, or what a normaliser has seen."""

    def arrays(self) -> Leaves: ...

    def load(self, arrays: Mapping[str, Array]) -> None: ...


class Steps(Protocol):
    """An optimizer."""

    @property
    def flat(self) -> Named: ...

    @property
    def transforms(self) -> bool:
        """Does it heed what is asked of gradients?"""

    def finite(self) -> bool: ...

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


@dataclass
class TrainState:
    """All that changes while a trainer learns. Each key is a name in the saved state."""

    optimizers: Mapping[str, Steps] = field(default_factory=dict)
    """and the parameters that they step"""
    flats: dict[str, Named] = field(default_factory=dict)
    """parameters that follow others: target networks"""
    moments: Mapping[str, Named] = field(default_factory=dict)
    """of what streams by; the names of their arrays begin with the key"""
    learnt: Leaves = field(default_factory=dict)
    """what is learnt without an optimizer; loaded in place"""
    arrays: Leaves = field(default_factory=dict)
    """what is not learnt, but saved; loaded in place"""
    counters: dict[str, int] = field(default_factory=dict)
    rng: np.random.Generator | None = None

    def networks(self) -> Leaves:
        """Everything learnt, by name: networks, target networks, normalisers; views where the
        device allows it."""
        arrays = {k: v for flat in self._flats() for k, v in flat.arrays().items()}
        for prefix, moments in self.moments.items():
            arrays |= {f"{prefix}.{name}": array for name, array in moments.arrays().items()}
        return arrays | self.learnt

    def load_networks(self, arrays: Mapping[str, Array]) -> None:
        """Take these over: all that `networks` names."""
        for flat in self._flats():
            flat.load(arrays)
        for prefix, moments in self.moments.items():
            moments.load({name: arrays[f"{prefix}.{name}"] for name in moments.arrays()})
        _copy(arrays, self.learnt)

    def fates(self) -> dict[str, Fate]:
        """What becomes of each of `networks`, and of the optimizers' moments, where groups join
        their models."""
        fates: dict[str, Fate] = dict.fromkeys(self.networks(), "averaged")
        # A normaliser's scale goes with the networks that were trained at it; its count says how
        # fast it moves, and that is each group's own.
        counts: dict[str, Fate] = {f"{name}.count": "local" for name in self.moments}
        return fates | counts | (ADAM if self.optimizers else {})

    def finite(self) -> bool:
        """Is all that steps have moved finite?"""
        learnt = all(np.isfinite(array).all() for array in self.learnt.values())
        return learnt and all(optimizer.finite() for optimizer in self.optimizers.values())

    def state(self) -> State:
        """All that is needed to go on, in memory of its own."""
        return {
            "optimizers": {name: each.state() for name, each in self.optimizers.items()},
            "flats": {name: _copies(flat.arrays()) for name, flat in self.flats.items()},
            "moments": {name: _copies(each.arrays()) for name, each in self.moments.items()},
            "learnt": _copies(self.learnt),
            "arrays": _copies(self.arrays),
            "counters": dict(self.counters),
            "rng": None if self.rng is None else generator_state(self.rng),
        }

    def load_state(self, state: State) -> None:
        """Go on from there. Parameters that are stepped without locks are loaded by their first
        learner alone."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state(state["optimizers"][name])
        for name, flat in self.flats.items():
            flat.load(state["flats"][name])
        for name, moments in self.moments.items():
            moments.load(state["moments"][name])
        _copy(state["learnt"], self.learnt)
        _copy(state["arrays"], self.arrays)
        self.counters.update(state["counters"])
        if self.rng is not None:
            load_generator_state(self.rng, state["rng"])

    def _flats(self) -> list[Named]:
        """Of all parameters."""
        return [*(optimizer.flat for optimizer in self.optimizers.values()), *self.flats.values()]


def _copies(arrays: Leaves) -> Leaves:
    return {name: array.copy() for name, array in arrays.items()}


def _copy(arrays: Mapping[str, Array], into: Leaves) -> None:
    for name, array in into.items():
        array[...] = arrays[name]
