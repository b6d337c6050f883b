"""Returns against the written-out sums, and what must hold for every one of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji.returns import discounted, gae, n_step, td_lambda, vtrace
from tianji.types import Array

CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@dataclass
class Case:
    reward: Array
    value: Array
    terminated: Array
    valid: Array
    log_rho: Array
    gamma: float
    lam: float

    @property
    def rows(self) -> tuple[Array, Array, Array, Array]:
        return self.reward, self.value, self.terminated, self.valid


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T, B = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = draw(st.sampled_from([0.0, 0.2, 0.6]))
    return Case(
        reward=rng.normal(size=(T, B)).astype(np.float32),
        value=rng.normal(size=(T + 1, B)).astype(np.float32),
        terminated=rng.random((T, B)) < ends,
        valid=rng.random((T, B)) >= draw(st.sampled_from([0.0, 0.2, 0.6])),
        log_rho=rng.normal(size=(T, B)).astype(np.float32),
        gamma=draw(st.sampled_from([0.0, 0.5, 0.99, 1.0])),
        lam=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
    )


def episode_from(case: Case, t: int, b: int) -> range:
    """The rows of the sum that starts at row t: up to a termination or the row before a cut."""
    end = t
    while end < len(case.reward) and case.valid[end, b]:
        end += 1
        if case.terminated[end - 1, b]:
            break
    return range(t, end)


def error(case: Case, k: int, b: int) -> float:
    follows = 0.0 if case.terminated[k, b] else case.gamma * float(case.value[k + 1, b])
    return float(case.reward[k, b]) + follows - float(case.value[k, b])


def each(case: Case) -> list[tuple[int, int]]:
    return list(np.ndindex(*case.reward.shape))


def monte_carlo(case: Case, t: int, b: int) -> float:
    """The discounted sum of rewards, and the value of what follows the last row if any does."""
    rows = episode_from(case, t, b)
    if not rows:
        return 0.0
    total = sum(case.gamma ** (k - t) * float(case.reward[k, b]) for k in rows)
    if not case.terminated[rows[-1], b]:
        total += case.gamma ** len(rows) * float(case.value[rows[-1] + 1, b])
    return total


@given(cases())
def test_gae_is_the_written_out_sum_of_discounted_errors(case: Case) -> None:
    expected = np.zeros_like(case.reward)
    for t, b in each(case):
        rows = episode_from(case, t, b)
        expected[t, b] = sum((case.gamma * case.lam) ** (k - t) * error(case, k, b) for k in rows)
    actual = gae(*case.rows, case.gamma, case.lam)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, **CLOSE)


@given(cases())
def test_gae_with_lambda_0_is_the_td_error(case: Case) -> None:
    expected = np.zeros_like(case.reward)
    for t, b in each(case):
        expected[t, b] = error(case, t, b) if case.valid[t, b] else 0.0
    np.testing.assert_allclose(gae(*case.rows, case.gamma, 0.0), expected, **CLOSE)


@given(cases())
def test_gae_with_lambda_1_is_the_monte_carlo_return_minus_the_value(case: Case) -> None:
    expected = np.zeros_like(case.reward)
    for t, b in each(case):
        expected[t, b] = (monte_carlo(case, t, b) - case.value[t, b]) * case.valid[t, b]
    np.testing.assert_allclose(gae(*case.rows, case.gamma, 1.0), expected, **CLOSE)


@given(cases())
def test_td_lambda_is_the_mixture_of_n_step_returns(case: Case) -> None:
    """Sum over m of (1 - lam) lam^(m - 1) G_m, with all the rest of the weight on the longest."""
    expected = np.zeros_like(case.reward)
    for t, b in each(case):
        rows = episode_from(case, t, b)
        for m in range(1, len(rows) + 1):
            g = sum(case.gamma**k * float(case.reward[t + k, b]) for k in range(m))
            if not case.terminated[t + m - 1, b]:
                g += case.gamma**m * float(case.value[t + m, b])
            share = 1.0 if m == len(rows) else 1 - case.lam
            expected[t, b] += share * case.lam ** (m - 1) * g
    actual = td_lambda(*case.rows, case.gamma, case.lam)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, **CLOSE)


bars = st.sampled_from([0.5, 1.0, 2.0])


@given(cases(), bars, bars, bars)
def test_vtrace_is_the_written_out_sum_of_the_paper(
    case: Case, rho_bar: float, c_bar: float, rho_pg_bar: float
) -> None:
    T, B = case.reward.shape
    rho = np.exp(case.log_rho.astype(np.float64))
    expected = np.zeros((T, B))
    for t, b in each(case):
        rows = episode_from(case, t, b)
        expected[t, b] = case.value[t, b] * case.valid[t, b]
        for k in rows:
            trace = np.prod([case.lam * min(c_bar, rho[i, b]) for i in range(t, k)])
            expected[t, b] += (
                case.gamma ** (k - t) * trace * min(rho_bar, rho[k, b]) * error(case, k, b)
            )
    advantage = np.zeros((T, B))
    for t, b in each(case):
        if case.valid[t, b]:
            inside = t + 1 < T and case.valid[t + 1, b]
            follows = expected[t + 1, b] if inside else case.value[t + 1, b]
            follows = 0.0 if case.terminated[t, b] else follows
            target = case.reward[t, b] + case.gamma * follows
            advantage[t, b] = min(rho_pg_bar, rho[t, b]) * (target - case.value[t, b])
    vs, pg = vtrace(case.log_rho, *case.rows, case.gamma, case.lam, rho_bar, c_bar, rho_pg_bar)
    assert vs.dtype == pg.dtype == np.float32
    np.testing.assert_allclose(vs, expected, **CLOSE)
    np.testing.assert_allclose(pg, advantage, **CLOSE)


@given(cases())
def test_on_policy_vtrace_is_the_n_step_return(case: Case) -> None:
    on_policy = np.zeros_like(case.reward)
    vs, pg = vtrace(on_policy, *case.rows, case.gamma)
    expected = np.array([monte_carlo(case, t, b) for t, b in each(case)]).reshape(vs.shape)
    np.testing.assert_allclose(vs, expected, **CLOSE)
    np.testing.assert_allclose(pg, gae(*case.rows, case.gamma, 1.0), **CLOSE)


def test_vtrace_stands_a_ratio_beyond_float32() -> None:
    one = np.ones((1, 1), np.float32)
    false = np.zeros((1, 1), bool)
    vs, pg = vtrace(1e4 * one, one, np.zeros((2, 1), np.float32), false, ~false, 0.9)
    assert vs == pg == 1.0


@given(cases(), st.integers(0, 2**32))
def test_envs_in_another_order_give_the_same_results_in_that_order(case: Case, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(case.reward.shape[1])
    moved = [a[:, order] for a in case.rows]
    for f in (gae, td_lambda):
        before = f(*case.rows, case.gamma, case.lam)
        np.testing.assert_array_equal(f(*moved, case.gamma, case.lam), before[:, order])
    before = vtrace(case.log_rho, *case.rows, case.gamma, case.lam)
    after = vtrace(case.log_rho[:, order], *moved, case.gamma, case.lam)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, order], y)


@given(cases(), st.sampled_from([np.nan, 1e30, -7.0]))
def test_what_invalid_rows_hold_does_not_matter(case: Case, rubbish: float) -> None:
    def results(c: Case) -> list[Array]:
        return [
            gae(*c.rows, c.gamma, c.lam),
            td_lambda(*c.rows, c.gamma, c.lam),
            *vtrace(c.log_rho, *c.rows, c.gamma, c.lam),
        ]

    filled = copy.deepcopy(case)
    invalid = ~case.valid
    filled.reward[invalid] = filled.log_rho[invalid] = rubbish
    filled.terminated[invalid] = ~filled.terminated[invalid]
    before = np.roll(case.valid & ~case.terminated, 1, axis=0)
    before[0] = False  # the value there bootstraps the row before it where that is valid
    filled.value[:-1][invalid & ~before] = rubbish
    for x, y in zip(results(case), results(filled), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not x[invalid].any()


@given(cases())
def test_n_step_is_the_written_out_sum_up_to_the_end(case: Case) -> None:
    n = len(case.reward)
    case.valid[0] = True
    ret, discount, last = n_step(case.reward, case.terminated, case.valid, case.gamma, n)
    assert ret.dtype == discount.dtype == np.float32
    for b in range(case.reward.shape[1]):
        rows = episode_from(case, 0, b)
        assert last[b] == rows[-1]
        total = sum(case.gamma**k * float(case.reward[k, b]) for k in rows)
        np.testing.assert_allclose(ret[b], total, **CLOSE)
        ended = case.terminated[rows[-1], b]
        np.testing.assert_allclose(discount[b], 0.0 if ended else case.gamma ** len(rows), **CLOSE)
        target = ret[b] + discount[b] * case.value[last[b] + 1, b]
        np.testing.assert_allclose(target, monte_carlo(case, 0, b), **CLOSE)


@given(cases())
def test_n_step_leaves_its_arguments_as_they_are_and_ignores_rows_after_the_end(case: Case) -> None:
    n = len(case.reward)
    case.valid[0] = True
    before = n_step(case.reward, case.terminated, case.valid, case.gamma, n)
    valid = case.valid.copy()
    for b in range(case.reward.shape[1]):
        case.reward[episode_from(case, 0, b).stop :, b] = np.nan
    after = n_step(case.reward, case.terminated, case.valid, case.gamma, n)
    np.testing.assert_array_equal(valid, case.valid)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


@given(cases(), st.integers(0, 8))
def test_discounted_is_the_written_out_sum_however_it_is_cut(case: Case, cut: int) -> None:
    ended = case.terminated
    T, B = case.reward.shape
    start = case.value[0]
    expected = np.zeros((T + 1, B))
    for t, b in np.ndindex(T + 1, B):
        first = max((k + 1 for k in range(t) if ended[k, b]), default=0)
        stop = min(t + 1, T)
        expected[t, b] = sum(case.gamma ** (t - k) * case.reward[k, b] for k in range(first, stop))
        if first == 0:
            expected[t, b] += case.gamma ** (t + 1) * start[b]
    one, carry = discounted(case.reward[:cut], ended[:cut], start, case.gamma)
    two, carry = discounted(case.reward[cut:], ended[cut:], carry, case.gamma)
    assert one.dtype == two.dtype == carry.dtype == np.float32
    np.testing.assert_allclose(np.concatenate([one, two]), expected[:T], **CLOSE)
    np.testing.assert_allclose(case.gamma * carry, expected[T], **CLOSE)
    np.testing.assert_array_equal(start, case.value[0])


# Two episodes of one env, one after the other. States are numbered through, the state that the
# first episode ends in included, so that V(state) tells which one a sum bootstraps from.
REWARDS, V = [1.0, 2.0, 4.0], np.array([10, 20, 30, 40, 50, 60], np.float32)
GAMMA, LAM = 0.5, 1.0


def layout(
    states: list[int], rewards: list[float], end: int, invalid: int, truncated: bool
) -> Case:
    T = len(rewards)
    terminated = np.zeros((T, 1), bool)
    terminated[end] = not truncated
    valid = np.ones((T, 1), bool)
    if invalid >= 0:
        valid[invalid] = False
    reward = np.array(rewards, np.float32)[:, None]
    return Case(reward, V[states][:, None], terminated, valid, 0 * reward, GAMMA, LAM)


def next_step(truncated: bool) -> Case:
    """States 0 1 2 | 3, then a row that only resets, 4 5: row 2 has its true successor."""
    return layout([0, 1, 2, 3, 4, 5], [*REWARDS, 99.0, 8.0], 2, 3, truncated)


def same_step(truncated: bool) -> Case:
    """States 0 1 2 | 4 5: state 3 is lost, so the row that would need its value is invalid."""
    return layout([0, 1, 2, 4, 5], [*REWARDS, 8.0], 2, 2 if truncated else -1, truncated)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (next_step(truncated=False), 1 + 2 / 2 + 4 / 4),
        (same_step(truncated=False), 1 + 2 / 2 + 4 / 4),
        (next_step(truncated=True), 1 + 2 / 2 + 4 / 4 + 40 / 8),
        (same_step(truncated=True), 1 + 2 / 2 + 30 / 4),
    ],
    ids=[
        "next-step terminated",
        "same-step terminated",
        "next-step truncated",
        "same-step truncated",
    ],
)
def test_truncation_bootstraps_and_termination_does_not_in_both_layouts(
    case: Case, expected: float
) -> None:
    second = 8 + 60 / 2
    returns = td_lambda(*case.rows, GAMMA, LAM)
    assert (returns[0, 0], returns[-1, 0]) == (expected, second)
    assert gae(*case.rows, GAMMA, LAM)[0, 0] == expected - 10
    vs, pg = vtrace(case.log_rho, *case.rows, GAMMA)
    assert (vs[0, 0], vs[-1, 0], pg[0, 0]) == (expected, second, expected - 10)
    ret, discount, last = n_step(case.reward, case.terminated, case.valid, GAMMA, len(case.reward))
    assert ret[0] + discount[0] * case.value[last[0] + 1, 0] == expected
