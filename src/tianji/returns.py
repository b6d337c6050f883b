"""Returns and advantages over time-major arrays, cut where episodes end.

All take and give float32 arrays [T, B], with `value` [T + 1, B]. Two masks say how episodes end:
no value follows a `terminated` row, and a row that is not `valid` is no step of any episode, so
every sum stops before it. The row before it still bootstraps from the value of its own successor,
`value[t + 1]`. What an invalid row holds does not matter; its results are 0.
"""

from __future__ import annotations

import numpy as np

from tianji.types import Array

_LARGEST_LOG = 80.0
"""e^80 is finite in float32; every clip lies below it."""


def gae(
    reward: Array, value: Array, terminated: Array, valid: Array, gamma: float, lam: float
) -> Array:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t
    A_t     = delta_t + gamma lam (1 - terminated_t) valid_{t+1} A_{t+1}
    """
    delta = _td_error(reward, value, terminated, gamma)
    return _backward(
        np.where(valid, delta, np.float32(0)),
        np.where(valid & ~terminated, np.float32(gamma * lam), np.float32(0)),
    )


def td_lambda(
    reward: Array, value: Array, terminated: Array, valid: Array, gamma: float, lam: float
) -> Array:
    """TD(lambda) returns, the targets of a value that is learned beside `gae`: A_t + V_t."""
    advantage = gae(reward, value, terminated, valid, gamma, lam)
    return np.where(valid, advantage + value[:-1], np.float32(0))


def n_step(
    reward: Array, terminated: Array, valid: Array, gamma: float, n: int
) -> tuple[Array, Array, Array]:
    """Returns of up to n steps over windows [n, N], each of which begins with a valid row.

    ret = sum_{k < m} gamma^k r_k, where m <= n steps lie before the window's end or an invalid
    row, or end with a terminated one; discount = gamma^m, or 0 where row m - 1 terminated;
    last = m - 1. The target is ret + discount V(the successor of row last).
    """
    used = valid[:n].copy()
    used[1:] &= ~terminated[: n - 1]
    np.logical_and.accumulate(used, axis=0, out=used)
    last = used.sum(axis=0) - 1
    powers = np.power(gamma, np.arange(n + 1)).astype(np.float32)
    own = (1,) * (reward.ndim - 2)  # agents may have rewards of their own
    weighted = reward[:n] * powers[:n].reshape(-1, 1, *own)
    ret = np.where(used.reshape(*used.shape, *own), weighted, np.float32(0)).sum(axis=0)
    ended = (used & terminated[:n]).any(axis=0)
    return ret, np.where(ended, np.float32(0), powers[last + 1]), last


def vtrace(
    log_rho: Array,
    reward: Array,
    value: Array,
    terminated: Array,
    valid: Array,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_pg_bar: float = 1.0,
) -> tuple[Array, Array]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, eq. 1 and section 4.2).

    rho_t = min(rho_bar, e^log_rho_t),  c_t = lam min(c_bar, e^log_rho_t)
    vs_t - V_t = rho_t delta_t + gamma c_t (1 - terminated_t) valid_{t+1} (vs_{t+1} - V_{t+1})
    pg_t = min(rho_pg_bar, e^log_rho_t) (r_t + gamma (1 - terminated_t) vs'_t - V_t)

    with delta_t as in `gae`, and vs'_t = vs_{t+1} where row t + 1 is a valid one, else V_{t+1}.
    """
    ratio = np.exp(np.minimum(log_rho, _LARGEST_LOG))
    follows = ~terminated
    delta = _td_error(reward, value, terminated, gamma)
    coefficient = np.float32(gamma * lam) * np.minimum(ratio, c_bar)
    error = np.zeros_like(value)  # vs - V, 0 after the end and on invalid rows: there vs' is V'
    _backward(
        np.where(valid, np.minimum(ratio, rho_bar) * delta, np.float32(0)),
        np.where(valid & follows, coefficient, np.float32(0)),
        out=error[:-1],
    )
    delta += np.where(follows, np.float32(gamma) * error[1:], np.float32(0))
    pg_advantage = np.where(valid, np.minimum(ratio, rho_pg_bar) * delta, np.float32(0))
    return np.where(valid, value[:-1] + error[:-1], np.float32(0)), pg_advantage


def discounted(reward: Array, ended: Array, carry: Array, gamma: float) -> tuple[Array, Array]:
    """Running discounted returns, for the scale of rewards, and the carry [B] of the next call.

    R_t = r_t + gamma (1 - ended_{t-1}) R_{t-1}, where R_{-1} is the carry
    """
    running = np.empty_like(reward)
    keep = np.where(ended, np.float32(0), np.float32(gamma))
    before = gamma * carry
    for t in range(len(reward)):
        np.add(reward[t], before, out=running[t])
        np.multiply(running[t], keep[t], out=before)
    if len(reward):
        carry = np.where(ended[-1], np.float32(0), running[-1])
    return running, carry


def _td_error(reward: Array, value: Array, terminated: Array, gamma: float) -> Array:
    follows = np.where(terminated, np.float32(0), value[1:])
    follows *= np.float32(gamma)
    follows += reward
    follows -= value[:-1]
    return follows


def _backward(first: Array, coefficient: Array, out: Array | None = None) -> Array:
    """x_t = first_t + coefficient_t x_{t+1}, from the last row to the first."""
    out = np.empty_like(first) if out is None else out
    after = np.zeros_like(first[0])
    scaled = np.empty_like(after)
    for t in range(len(first) - 1, -1, -1):
        np.multiply(coefficient[t], after, out=scaled)
        after = np.add(first[t], scaled, out=out[t])
    return out
