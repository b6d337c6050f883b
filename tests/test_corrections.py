"""Corrections against staleness: each against its formula, and where they are one."""

import typing

import numpy as np
import pytest
import torch

from tianji import corrections
from tianji.algorithm import ALGORITHMS, algorithm_class
from tianji.config import RelaxConfig
from tianji.corrections import Steps
from tianji.returns import gae


def steps(seed, lam=1.0, T=12, B=5, ends=True):
    rng = np.random.default_rng(seed)
    terminated = (rng.random((T, B)) < 0.15) & ends
    valid = (rng.random((T, B)) < 0.85) | ~np.array(ends)
    return Steps(
        reward=rng.normal(size=(T, B)).astype(np.float32),
        value=rng.normal(size=(T + 1, B)).astype(np.float32),
        terminated=terminated & valid,
        valid=valid,
        gamma=0.9,
        lam=lam,
    )


def logs(seed, shape=(12, 5)):
    rng = np.random.default_rng(seed)
    return rng.normal(-1.0, 0.7, size=shape).astype(np.float32)


def n_step_returns(s):
    """r_t + gamma r_{t+1} + ... up to the episode's or the rollout's end, and the value there."""
    T, B = s.reward.shape
    found = np.zeros((T, B))
    for t, b in np.argwhere(s.valid):
        discount = 1.0
        for k in range(t, T):
            found[t, b] += discount * s.reward[k, b]
            discount *= s.gamma
            if s.terminated[k, b]:
                break
            if k + 1 == T or not s.valid[k + 1, b]:
                found[t, b] += discount * s.value[k + 1, b]
                break
    return found


@pytest.mark.parametrize("seed", range(3))
def test_vtrace_of_the_policy_that_acted_is_the_n_step_return(seed):
    s, mu = steps(seed), logs(seed)
    estimate = corrections.vtrace(mu, mu, s)
    expected = n_step_returns(s)
    np.testing.assert_allclose(estimate.target, expected, rtol=1e-4, atol=1e-5)
    advantage = np.where(s.valid, expected - s.value[:-1], 0)
    np.testing.assert_allclose(estimate.advantage, advantage, rtol=1e-4, atol=1e-5)
    assert (estimate.weight == 1).all()


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5)])
def test_vtrace_is_the_written_out_sum_of_the_paper(rho_bar, c_bar):
    """vs = V(x_s) + sum_t gamma^(t-s) (prod_{i=s}^{t-1} c_i) rho_t delta_t, of one episode."""
    s, mu, now = steps(1, ends=False), logs(1), logs(2)
    estimate = corrections.vtrace(now, mu, s, rho_bar, c_bar)
    ratio = np.exp(now - mu)
    rho, c = np.minimum(ratio, rho_bar), np.minimum(ratio, c_bar)
    delta = s.reward + s.gamma * s.value[1:] - s.value[:-1]
    T = len(delta)
    target = np.stack([
        s.value[t] + sum(s.gamma ** (k - t) * c[t:k].prod(0) * rho[k] * delta[k]
                         for k in range(t, T))
        for t in range(T)
    ])  # fmt: skip
    np.testing.assert_allclose(estimate.target, target, rtol=1e-4, atol=1e-4)
    following = np.concatenate([target[1:], s.value[-1:]])
    advantage = rho * (s.reward + s.gamma * following - s.value[:-1])
    np.testing.assert_allclose(estimate.advantage, advantage, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(estimate.weight, rho, rtol=1e-6)
    np.testing.assert_array_equal(estimate.anchor, now)


def test_truncated_weights_are_1_where_nothing_is_stale():
    s, mu = steps(3, lam=0.9), logs(3)
    estimate, plain = corrections.tis(mu, mu, s, cap=2.0), corrections.uncorrected(mu, s)
    assert (estimate.weight == 1).all()
    for name in ("advantage", "target", "anchor"):
        np.testing.assert_array_equal(getattr(estimate, name), getattr(plain, name))


def test_truncated_weights_are_the_ratio_up_to_the_cap():
    s, mu, now = steps(4, lam=0.9), logs(4), logs(5)
    estimate = corrections.tis(now, mu, s, cap=1.5)
    weight = np.minimum(np.exp(now - mu), 1.5)
    assert (weight == 1.5).any()
    assert (weight < 1.5).any()
    np.testing.assert_allclose(estimate.weight, weight, rtol=1e-6)
    np.testing.assert_allclose(estimate.advantage, weight * gae(*s), rtol=1e-5)
    np.testing.assert_array_equal(estimate.anchor, now)
    huge = corrections.truncated(np.array([1e4, -1e4], np.float32), 2.0)
    np.testing.assert_allclose(huge, [2.0, 0.0], rtol=1e-6)


def test_uncorrected_targets_are_advantage_plus_value():
    s, mu = steps(6, lam=0.8), logs(6)
    estimate = corrections.uncorrected(mu, s)
    np.testing.assert_array_equal(estimate.target, gae(*s) + s.value[:-1])
    assert estimate.weight is None


def tensors(*seeds):
    return [torch.from_numpy(logs(seed).ravel()).double() for seed in seeds]


def test_the_clipped_objective_is_its_formula():
    pi, mu, advantage = tensors(1, 2, 3)
    r = torch.exp(pi - mu)
    expected = torch.minimum(r * advantage, r.clip(0.8, 1.2) * advantage)
    found = corrections.clip(pi, mu, advantage, 0.2)
    torch.testing.assert_close(found, expected)


def test_outside_the_clip_nothing_pulls_further():
    mu = torch.zeros(4, dtype=torch.float64)
    pi = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    corrections.clip(pi, mu, advantage, 0.2).sum().backward()
    assert (pi.grad != 0).tolist() == [False, True, True, False]


def test_impact_whose_target_acted_is_the_clipped_objective():
    pi, mu, advantage = tensors(4, 5, 6)
    found = corrections.impact(pi, mu, mu, advantage, 0.2)
    torch.testing.assert_close(found, corrections.clip(pi, mu, advantage, 0.2))


@pytest.mark.parametrize("bound", [1.0, 2.0, 10.0])
def test_impact_is_the_papers_ratio(bound):
    """R = min(mu / target, bound) pi / mu."""
    pi, target, mu, advantage = tensors(7, 8, 9, 10)
    ratio = torch.minimum((mu - target).exp(), torch.tensor(bound)) * (pi - mu).exp()
    expected = torch.minimum(ratio * advantage, ratio.clip(0.7, 1.3) * advantage)
    found = corrections.impact(pi, target, mu, advantage, 0.3, bound)
    torch.testing.assert_close(found, expected)


def test_the_policy_gradient_is_that_of_the_clipped_objective_where_the_policy_acted():
    advantage = tensors(11)[0]
    grads = []
    for objective in (
        lambda pi, mu: corrections.policy_gradient(pi, advantage),
        lambda pi, mu: corrections.clip(pi, mu, advantage, 0.2),
    ):
        pi = tensors(12)[0].requires_grad_()
        objective(pi, pi.detach()).sum().backward()
        grads.append(pi.grad)
    torch.testing.assert_close(*grads)


def test_a_config_knows_the_words_of_corrections_and_algorithms_no_others():
    (words, _) = typing.get_args(typing.get_type_hints(RelaxConfig)["correct"])
    assert typing.get_args(words) == corrections.KNOWN
    for name, where in ALGORITHMS.items():
        if isinstance(where, str):
            assert set(algorithm_class(name).traits.corrects) <= set(corrections.KNOWN)
