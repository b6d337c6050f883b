"""Stacks of pictures out of memory that holds each picture once.

A rollout's row t holds the newest picture of its stack. The older ones are those of the rows before
it or, before row 0, the `older` ones that are there once per rollout. After a row that only reset
its env nothing is older: there, a stack is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tianji.types import Array

Spans = Sequence[tuple[int, slice]]
"""lanes that ascend, each with the places of what lies in it; together they are all places"""


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
    memory: Sequence[Mapping[str, Array]], spans: Spans, at: tuple[Array, Array, Array], out: Array
) -> None:
    """Write the stacks at N places (slot, row, env) of lanes' memory [slots, T + 1, B, ...] into
    `out`, [N, K, ...]; the spans tell which of them lie in which lane, in order. It may ask for one
    picture more than a stack has, where row 0 is not asked for."""
    slot, row, env = (index[:, None] for index in at)
    (_, T, B), K = memory[0]["valid"].shape, out.shape[1]
    rows = row + np.arange(1 - K, 1)  # [N, K]: of each picture; less than 0 where it is older
    inside = np.maximum(rows, 0)
    places = (slot * (T + 1) + inside) * B + env
    before, inside = rows[:, :-1], inside[:, :-1]
    checks = (slot * T + inside) * B + env
    steps = np.empty(checks.shape, np.bool_)
    n, k = np.nonzero(rows < 0)
    older_from = np.searchsorted(n, [where.start for _, where in spans] + [len(rows)]).tolist()
    for (lane, where), (begin, end) in zip(spans, pairwise(older_from), strict=True):
        here = memory[lane]
        pictures = here["observation.obs"].reshape(-1, *out.shape[2:])
        # "clip": what is out of bounds is not looked for, and `out` is written at once.
        pictures.take(places[where], axis=0, out=out[where], mode="clip")
        here["valid"].reshape(-1).take(checks[where], out=steps[where], mode="clip")
        if begin < end:
            i, j, older = n[begin:end], k[begin:end], here["once.frames"]
            out[i, j] = older[at[0][i], at[2][i], older.shape[2] + rows[i, j]]
    steps |= before < 0
    if not steps.all():
        # A picture belongs to the stack if no row from it on only reset its env.
        belongs = np.logical_and.accumulate(steps[:, ::-1], axis=1)[:, ::-1]
        out[:, :-1][~belongs] = 0
