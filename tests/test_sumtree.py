"""The sum tree against running sums over a plain array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji.sumtree import SumTree

VALUES = st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.integers(1, 9).map(float))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data())
def test_the_tree_holds_the_last_value_of_every_place_and_their_sum(capacity, data):
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        place = st.integers(0, capacity - 1)
        pairs = data.draw(st.lists(st.tuples(place, VALUES), max_size=20))
        places = np.array([p for p, _ in pairs], np.int64)
        tree.set(places, np.array([v for _, v in pairs]))
        for p, v in pairs:
            plain[p] = v
    assert tree[np.arange(capacity)].tolist() == plain.tolist()
    assert tree.total == pytest.approx(plain.sum(), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=70), st.integers(0, 2**32 - 1))
def test_a_prefix_sum_finds_the_place_at_which_the_running_sum_passes_it(values, seed):
    """Whole numbers, so that sums are exact whatever their order."""
    tree, ends = SumTree(len(values)), np.cumsum(values)
    tree.set(np.arange(len(values)), np.array(values, np.float64))
    if ends[-1] == 0:
        return
    prefix = np.append(np.random.default_rng(seed).uniform(0, ends[-1], 50), ends[:-1])
    prefix = prefix[prefix < ends[-1]]
    expected = [next(i for i, end in enumerate(ends) if end > x) for x in prefix]
    assert tree.sample(prefix).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_no_place_of_value_0_is_found_even_at_the_very_end(capacity, seed):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(capacity) < 0.7, 0.0, rng.random(capacity) ** 20)
    values[rng.integers(capacity)] = 0.1
    tree = SumTree(capacity)
    tree.set(np.arange(capacity), values)
    prefix = np.append(rng.random(100), [0.0, 1.0, 1.0 + 1e-12]) * tree.total
    assert (values[tree.sample(prefix)] > 0).all()


def test_a_large_tree_draws_by_its_values():
    rng, size = np.random.default_rng(0), 1 << 14
    values = rng.random(size)
    tree = SumTree(size)
    tree.set(np.arange(size), values)
    prefix = np.sort(rng.random(1000)) * tree.total
    expected = np.searchsorted(np.cumsum(values), prefix, side="right")
    assert np.abs(tree.sample(prefix) - expected).max() <= 1, "sums of another order, no more"


def test_the_order_in_which_values_were_set_changes_no_bit():
    rng = np.random.default_rng(1)
    values = rng.random(3000)
    one, other = SumTree(3000), SumTree(3000)
    one.set(np.arange(3000), values)
    for places in np.array_split(rng.permutation(3000), 37):
        other.set(places, rng.random(len(places)))
        other.set(places, values[places])
    assert np.array_equal(one._nodes, other._nodes)


def test_a_loaded_tree_is_the_same_tree():
    rng = np.random.default_rng(2)
    one, other = SumTree(100), SumTree(100)
    one.set(np.arange(100), rng.random(100))
    one.sample(np.array([0.5]))
    other.load_state(one.state())
    assert np.array_equal(one._nodes, other._nodes)
    assert other.sample(np.array([3.0])) == one.sample(np.array([3.0]))
