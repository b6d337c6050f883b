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


def gather(
    newest: Array, older: Array, valid: Array, at: tuple[Array, Array, Array], out: Array
) -> None:
    """Write the stacks at N places (slot, row, env) of memory [slots, T + 1, B, ...] into `out`,
    [N, K, ...]."""
    slot, row, env = (index[:, None] for index in at)
    T, B, K = valid.shape[1], valid.shape[2], out.shape[1]
    rows = row + np.arange(1 - K, 1)  # [N, K]: of each picture; less than 0 where it is older
    inside = np.maximum(rows, 0)
    pictures = newest.reshape(-1, *newest.shape[3:])
    # "clip": what is out of bounds is not looked for, and `out` is written at once.
    pictures.take((slot * (T + 1) + inside) * B + env, axis=0, out=out, mode="clip")
    if (rows[:, 0] < 0).any():
        n, k = np.nonzero(rows < 0)
        out[n, k] = older[at[0][n], at[2][n], K - 1 + rows[n, k]]
    before, inside = rows[:, :-1], inside[:, :-1]
    steps = valid.reshape(-1).take((slot * T + inside) * B + env) | (before < 0)
    if not steps.all():
        # A picture belongs to the stack if no row from it on only reset its env.
        belongs = np.logical_and.accumulate(steps[:, ::-1], axis=1)[:, ::-1]
        out[:, :-1][~belongs] = 0
