"""What the parts of an algorithm will be like, before any of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tianji.errors import Refusal
from tianji.train_state import Fate
from tianji.types import Array, Layout, Leaf, leaf


@dataclass(frozen=True)
class Model:
    """One array that is learnt."""

    leaf: Leaf
    fate: Fate = "averaged"
    """what becomes of it where groups join their models"""


Models = dict[str, Model]


@dataclass(frozen=True)
class Description:
    """Plain data: all sizes of a run follow from it."""

    params: Layout
    """leaves of a snapshot, in its order"""
    models: Models
    """all that a trainer's `networks` names"""
    selection: Layout
    """leaves of what a chooser chooses"""
    pieces: int = 1
    """choices for one update"""
    slots: int = 1
    """rollouts of one actor that may be held at once"""
    extras: Layout = field(default_factory=dict)
    """leaves of what a policy records of one step of one env, beside its action"""
    recurrent: Layout = field(default_factory=dict)
    """leaves of a policy's recurrent state, of one env"""
    grants: int = 2
    """rollouts that one actor may be granted at once: the one that it makes and the next; more for
    actors that make several side by side"""
    any_order: bool = False
    """may an actor push its rollouts in another order than that of their grants?"""
    gradients: bool = False
    """do its optimizers heed relax.gradient?"""
    prioritizes: bool = False
    """is the chooser told after every update how much each of the steps it chose is worth?"""
    uses_end: bool = False
    """does what is learnt depend on when the run ends? Resuming with another end is not exact."""


class Differs(Refusal):
    """A part is not what its algorithm has described."""


Parts = Mapping[str, Leaf] | Mapping[str, Model]


def check(part: object, what: str, found: Parts, said: Parts) -> None:
    """Refuse a part that is not what its algorithm has described."""
    for name in [*said, *found]:
        if found.get(name) != said.get(name):
            raise Differs(
                f"{type(part).__module__}.{type(part).__name__} has {_shown(found, name)} among "
                f"{what}, and describe() says {_shown(said, name)}: memory of a run is laid out by "
                f"what it says, so this would be written where it does not belong. Let both come "
                f"from one table."
            )


def check_order(part: object, what: str, found: Parts, said: Parts) -> None:
    """As `check`, of leaves that lie in one buffer, where their order counts, too."""
    check(part, what, found, said)
    for mine, theirs in zip(found, said, strict=True):
        if mine != theirs:
            raise Differs(
                f"{type(part).__module__}.{type(part).__name__} has {mine} among {what} where "
                f"describe() says {theirs}: they lie in one buffer in this order, so one would be "
                f"read as the other. Let both come from one table."
            )


def _shown(parts: Parts, name: str) -> str:
    match parts.get(name):
        case Model(Leaf() as leaf, fate):
            return f"{name} {list(leaf.shape)} {leaf.dtype}, {fate}"
        case Leaf() as leaf:
            return f"{name} {list(leaf.shape)} {leaf.dtype}"
    return f"no {name}"


def leaves(arrays: Mapping[str, Array], axis: int = 0) -> Layout:
    """Of these arrays, without their first axes."""
    return {name: leaf(array.shape[axis:], array.dtype) for name, array in arrays.items()}


def averaged(*layouts: Layout) -> Models:
    """Models that groups average."""
    return {name: Model(leaf) for layout in layouts for name, leaf in layout.items()}
