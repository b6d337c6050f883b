"""The data that travels: rollouts from environment to gradient, snapshots back."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Leaves = dict[str, Array]

EPISODE = np.dtype([("return", np.float32), ("length", np.int32), ("win", np.int8)])
"""One episode that ended: its undiscounted return, its length in steps, and whether it was won: 1,
0, or -1 where the env does not say."""

HEAD = 8
VERSION, SOURCE, SEQ, UPDATE, EPISODES, STEPS, PRODUCED, GAP = range(HEAD)
"""Places in a rollout's head, 8 integers: the policy version that acted, the actor, its count of
rollouts, the update it is meant for, how many episodes ended, how many steps are valid, how many
valid steps the actor has made in all, and 1 where the first step does not continue the rollout
before it."""


VERSIONS = "version"
"""leaf of `Rollout.extras`: the policy version of each step, where they may differ"""


@dataclass(slots=True)
class Rollout:
    """T consecutive steps of B envs under one policy version, time-major; a batch is one too."""

    observation: Leaves
    """Each [T + 1, B, ...]; the successor of step t is row t + 1, always."""
    action: Array
    """[T, B, ...]"""
    reward: Array
    """[T, B] float32; [T, B, A] where every agent has its own"""
    terminated: Array
    """[T, B] bool: no value follows."""
    valid: Array
    """[T, B] bool: False where the step only reset its env."""
    extras: Leaves
    """Each [T, B, ...]: what the policy recorded beside the action, or the gatherer did."""
    once: Leaves
    """Each [B, ...]: what is there once per rollout, such as the recurrent state before it."""
    head: Array
    """8 integers; see VERSION and its neighbours."""
    episode_table: Array
    """Room for the episodes that ended, EPISODE records; the first `head[EPISODES]` are set."""
    versions: Array
    """The policy versions that acted: one for all, or one for each env of a batch from replay."""

    @classmethod
    def over(cls, leaves: Mapping[str, Array]) -> Rollout:
        """The rollout whose memory is these leaves, named as in `rollout_layout`."""
        under: dict[str, Leaves] = {"observation": {}, "extras": {}, "once": {}}
        for name, array in leaves.items():
            prefix, _, leaf = name.partition(".")
            if leaf:
                under[prefix][leaf] = array
        return cls(
            observation=under["observation"],
            action=leaves["action"],
            reward=leaves["reward"],
            terminated=leaves["terminated"],
            valid=leaves["valid"],
            extras=under["extras"],
            once=under["once"],
            head=leaves["head"],
            episode_table=leaves["episodes"],
            versions=leaves["head"][VERSION : VERSION + 1],
        )

    @property
    def acted(self) -> Array:
        """The versions that staleness is measured from: of each valid step, where they differ."""
        each = self.extras.get(VERSIONS)
        found: Array = self.versions if each is None else each[self.valid]
        return found if len(found) else self.versions

    @property
    def source(self) -> int:
        return int(self.head[SOURCE])

    @property
    def episodes(self) -> Array:
        return self.episode_table[: int(self.head[EPISODES])]


@dataclass(frozen=True, slots=True)
class Leaf:
    """The shape and dtype of one named array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    tied: str = ""
    """the leaf of params whose memory is this one's, too"""

    @property
    def nbytes(self) -> int:
        """Bytes of its own."""
        return 0 if self.tied else math.prod(self.shape) * self.dtype.itemsize


Layout = dict[str, Leaf]
"""The named arrays that one slot of a conduit holds."""


def leaf(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Leaf:
    return Leaf(tuple(int(n) for n in shape), np.dtype(dtype))


class Row(NamedTuple):
    """What one step of one env leaves in a rollout."""

    observation: Layout
    action: Leaf
    extras: Layout
    once: Layout
    """what is there once per rollout"""
    reward: Leaf = Leaf((), np.dtype(np.float32))


def rollout_layout(row: Row, T: int, B: int) -> Layout:
    """The arrays of a rollout of T steps of B envs."""
    layout = {
        f"observation.{k}": leaf((T + 1, B, *v.shape), v.dtype) for k, v in row.observation.items()
    }
    layout["action"] = leaf((T, B, *row.action.shape), row.action.dtype)
    layout["reward"] = leaf((T, B, *row.reward.shape), np.float32)
    layout["terminated"] = leaf((T, B), np.bool_)
    layout["valid"] = leaf((T, B), np.bool_)
    layout |= {f"extras.{k}": leaf((T, B, *v.shape), v.dtype) for k, v in row.extras.items()}
    layout |= {f"once.{k}": leaf((B, *v.shape), v.dtype) for k, v in row.once.items()}
    layout["head"] = leaf((HEAD,), np.int64)
    layout["episodes"] = leaf((T * B,), EPISODE)
    return layout


BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The upper half of a float32, which numpy has no name for; one field, so that the name travels."""

CARRIED = {
    name: np.dtype(name)
    for name in (
        "float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"
    )
} | {"bfloat16": BFLOAT16}  # fmt: skip
"""What params may be, by name."""


def dtype_name(dtype: np.dtype[Any]) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.str


def floats(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Params of these shapes, all float32."""
    return {name: leaf(shape, np.float32) for name, shape in shapes.items()}


def packed(layout: Layout) -> tuple[dict[str, int], int]:
    """Where each leaf of params begins in their buffer, and the bytes of all."""
    places: dict[str, int] = {}
    end = 0
    for name, x in layout.items():
        if x.dtype not in CARRIED.values():
            raise TypeError(
                f"{name} is {x.dtype}, so no snapshot could carry it. Params are of "
                f"{', '.join(CARRIED)}: cast it."
            )
        if not x.tied:
            places[name] = -(-end // x.dtype.itemsize) * x.dtype.itemsize
            end = places[name] + x.nbytes
    for name, x in layout.items():
        if x.tied:
            own = layout.get(x.tied)
            same = own is not None and (math.prod(own.shape), own.dtype, own.tied) == (
                math.prod(x.shape), x.dtype, ""
            )  # fmt: skip
            if not same:
                raise ValueError(
                    f"{name} is tied to {x.tied}, which is not a leaf with memory of its own of "
                    f"the same size and dtype. Tie it to one that is."
                )
            places[name] = places[x.tied]
    return places, end


class Params(Mapping[str, Array]):
    """Named arrays in one buffer: what a policy needs in order to act."""

    def __init__(self, layout: Layout, buffer: Array | None = None) -> None:
        self.layout = layout
        places, size = packed(layout)
        self.buffer = np.zeros(size, np.uint8) if buffer is None else buffer
        """uint8"""
        if self.buffer.shape != (size,):
            raise ValueError(f"the layout has {size} bytes, the buffer {self.buffer.shape}")
        self._views: Leaves = {}
        for name, x in layout.items():
            end = places[name] + math.prod(x.shape) * x.dtype.itemsize
            self._views[name] = self.buffer[places[name] : end].view(x.dtype).reshape(x.shape)
        self._flat: Array | None = None

    @property
    def flat(self) -> Array:
        """All of it as one array of float32, if that is what it is."""
        if self._flat is None:
            other = [name for name, x in self.layout.items() if x.dtype != np.float32]
            if other:
                raise TypeError(
                    f"{other[0]} is {dtype_name(self.layout[other[0]].dtype)}, so these params are "
                    f"no flat array of float32. Use the leaves by their names."
                )
            self._flat = self.buffer.view(np.float32)
        return self._flat

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def sha256(arrays: Mapping[str, Array]) -> str:
    """A hash of named arrays, independent of the order in which they are given."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}:{dtype_name(array.dtype)}:{array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Report:
    """What the learner says after an update."""

    version: int
    """updates so far"""
    produced: int
    """valid steps that actors have made so far"""
    received: int
    """valid steps that the buffer has received so far"""
    consumed: int
    """valid steps that updates have consumed so far, reuse included"""
    episodes: Array
    """EPISODE records that arrived since the last report"""
    metrics: Mapping[str, float]
    """the trainer's"""
    staleness: Array
    """versions between what acted and what learns, of this update's rollouts or steps"""
    filtered: int = 0
    """valid steps that were thrown away so far, because they were too stale"""
    freshness: float = 1.0
    """share of the batch that was never consumed before"""
    share: float = 1.0
    """a batch over what it was drawn from: the paper's P = Bs / Ns"""


_fence = threading.Lock()


def fence() -> None:
    """No load or store passes: taking a lock is the cheapest full barrier that Python has."""
    with _fence:
        pass
