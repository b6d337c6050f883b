"""What on-policy algorithms do against staleness: estimates and objectives, each a formula.

mu is the policy that acted, pi the one that learns, now: pi as it was when the update began. An
estimate is made once for an update, in numpy over [T, B]; an objective is what is made large, row
by row, in torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tianji import returns
from tianji.types import Array

KNOWN = ("none", "clip", "vtrace", "impact", "tis")
"""words of relax.correct"""


class Steps(NamedTuple):
    """What an estimate is made from: as in `returns`."""

    reward: Array
    value: Array
    """[T + 1, B]"""
    terminated: Array
    valid: Array
    gamma: float
    lam: float


class Estimate(NamedTuple):
    """What an update learns from each step, [T, B] each."""

    advantage: Array
    """of the action, times the weight"""
    target: Array
    """of the value"""
    anchor: Array
    """log-probability of the action that ratios are taken to"""
    weight: Array | None = None
    """what the step counts for; None: 1"""


def uncorrected(log_mu: Array, steps: Steps) -> Estimate:
    """As if pi had acted: GAE, ratios to mu. PPO's clip is all that is done."""
    advantage = returns.gae(*steps)
    return Estimate(advantage, advantage + steps.value[:-1], log_mu)


def vtrace(
    log_now: Array, log_mu: Array, steps: Steps, rho_bar: float = 1.0, c_bar: float = 1.0
) -> Estimate:
    """V-trace (Espeholt et al. 2018): targets of now's values, weight min(rho_bar, now / mu), and
    ratios to now."""
    log_rho = log_now - log_mu
    target, advantage = returns.vtrace(
        log_rho, *steps, rho_bar=rho_bar, c_bar=c_bar, rho_pg_bar=rho_bar
    )
    return Estimate(advantage, target, log_now, truncated(log_rho, rho_bar))


def tis(log_now: Array, log_mu: Array, steps: Steps, cap: float) -> Estimate:
    """Truncated importance sampling: GAE, weight min(cap, now / mu), and ratios to now. With a
    clipped objective it is decoupled PPO (Hilton et al. 2021)."""
    plain = uncorrected(log_mu, steps)
    weight = truncated(log_now - log_mu, cap)
    return Estimate(plain.advantage * weight, plain.target, log_now, weight)


def truncated(log_ratio: Array, cap: float) -> Array:
    """min(cap, e^log_ratio), whatever is in it."""
    weight: Array = np.exp(np.minimum(log_ratio, np.float32(np.log(cap))))
    return weight


def policy_gradient(log_pi: Tensor, advantage: Tensor) -> Tensor:
    """log pi A: its gradient is the policy gradient's, wherever mu is pi."""
    return log_pi * advantage


def clip(log_pi: Tensor, anchor: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    """min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), r = pi / anchor (Schulman et al. 2017)."""
    ratio = (log_pi - anchor).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    return torch.minimum(ratio * advantage, clipped * advantage)


def impact(
    log_pi: Tensor,
    log_target: Tensor,
    log_mu: Tensor,
    advantage: Tensor,
    epsilon: float,
    bound: float = 2.0,
) -> Tensor:
    """IMPACT's clipped objective (Luo et al. 2020) around a target policy that moves seldom:
    `clip` with r = min(mu / target, bound) pi / mu = pi / max(target, mu / bound)."""
    anchor = torch.maximum(log_target, log_mu - float(np.log(bound)))
    return clip(log_pi, anchor, advantage, epsilon)
