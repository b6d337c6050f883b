"""Stacks of pictures out of memory that holds each picture once.

A rollout's row t holds the newest picture of its stack. The older ones are those of the rows before
it or, before row 0, the `older` ones that are there once per rollout. After a row that only reset
its env nothing is older: there, a stack is filled with zeros.
"""

from __future__ import annotations

import numpy as np

from tianji.types import Array


def stacked(newest: Array, older: Array, valid: Array) -> Array:
    """[T + 1, B, K, ...] out of [T + 1, B, ...] pictures, [B, K - 1, ...] older ones and [T, B]."""
    T, K = len(valid), older.shape[1] + 1
    out = np.empty((T + 1, valid.shape[1], K, *newest.shape[2:]), newest.dtype)
    for t in range(T + 1):
        # The stack of the row before, moved on by one; or none of it, where that row reset its env.
        before = older if t == 0 else out[t - 1][:, 1:]
        out[t][:, :-1] = before
        out[t][:, -1] = newest[t]
        if t > 0 and not valid[t - 1].all():
            out[t][~valid[t - 1], :-1] = 0
    return out


def gather(newest: Array, older: Array, valid: Array, at: tuple[Array, Array, Array]) -> Array:
    """[N, K, ...]: the stacks at N places (slot, row, env) of memory [slots, T + 1, B, ...]."""
    slot, row, env = at
    K = older.shape[2] + 1
    out = np.empty((len(slot), K, *newest.shape[3:]), newest.dtype)
    out[:, -1] = newest[slot, row, env]
    follows = np.ones(len(slot), np.bool_)
    for age in range(1, K):
        inside = row >= age
        at_row = np.maximum(row - age, 0)
        follows &= valid[slot, at_row, env] | ~inside
        out[:, -1 - age] = newest[slot, at_row, env]
        if not inside.all():
            before = np.flatnonzero(~inside)
            place = K - 1 + row[before] - age
            out[before, -1 - age] = older[slot[before], env[before], place]
        if not follows.all():
            out[~follows, -1 - age] = 0
    return out
