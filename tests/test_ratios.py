"""Ratios of two measurements, on machines whose own speed drifts."""

import numpy as np
import pytest
from measured import Told, beside, over_one, slowed

from tianji.ratios import Again, Ratios, behind, over, usual


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_machine_that_becomes_slower_slows_nobody_by_itself():
    """Alone and beside others in turn: all takes twice as long from the second turn on."""
    learner = Told("learn", 0.1, 0.15, 0.2, 0.3)
    actor = Told("step", 0.1, 0.1, 0.2, 0.2)
    again = Again(learner, actor, [0], 0.1)
    found = again.slowed([], 0.0)
    assert over(one.learn for one in found) == pytest.approx(1.5)
    assert over(one.act for one in found) == pytest.approx(1.0)
    assert again.learn == pytest.approx(0.15)
    assert again.act == pytest.approx(0.15)


def test_a_step_alone_and_one_beside_others_are_told_alike():
    """A core that neighbours slow for a fifth of the time is slow in both."""
    slices = [0.1, 0.1, 0.1, 0.1, 0.15]
    learner = Told("learn", *[0.1] * 4)
    again = Again(learner, Told("step", *[slices] * 4), [0], 0.1)
    found = again.slowed([], 0.0)
    assert over(one.act for one in found) == pytest.approx(1.0)
    assert again.act == pytest.approx(0.11)


def test_the_slowest_of_several_actors_is_told_over_their_mean():
    """Rates of 10, 5 and 10 steps: 25 / 3 in the mean, where 10 were made alone."""
    learner, actor = Told("learn", 0.1, 0.1, 0.1, 0.1), Told("step", 0.1, 0.1, 0.1, 0.1)
    others = [Told("step", 0.2, 0.1), Told("step", 0.1, 0.1)]
    again = Again(learner, actor, [0], 0.1)
    first, second = again.slowed(others, 0.0)
    assert first.learn == second.learn == second.act == (pytest.approx(0.1), 0.1)
    assert first.act == (pytest.approx(0.12), 0.1)
    assert (first.slowest, second.slowest) == pytest.approx((0.2 / 0.12, 1.0))


def test_who_is_the_slowest_may_change():
    slices = np.array([[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]])
    assert behind(slices, 1) == pytest.approx(2.0 / 1.5)
    assert behind(slices, 2) == behind(slices, 99) == pytest.approx(1.0)
    assert behind(slices[:1], 1) == pytest.approx(1.0), "one waits for nobody"
    assert behind(np.array([[1.0] * 5, [2.0] * 5]), 3) == pytest.approx(1.5)


def test_all_act_until_the_learner_has_ended():
    learner, actor = Told("learn", *[0.1] * 4), Told("step", *[0.1, 0.1, 0.3, 0.2] * 2)
    learner.busy = [True, True, False] * 2
    other = Told("step", *[0.2] * 6)
    found = Again(learner, actor, [0], 0.1).slowed([other], 10.0)
    assert not actor.values, "alone, and thrice beside the learner; twice"
    assert not other.values
    for one in found:
        assert one.act == (pytest.approx(0.2), 0.1)
        assert one.slowest == pytest.approx(1.0)


def test_what_is_measured_between_two_looks_is_compared_with_both():
    again = Again(Told("learn", 0.1, 0.3), Told("step", 0.1, 0.1), [0], 0.1)
    assert again.beside(lambda: {"update": 0.5}) == ({"update": 0.5}, pytest.approx(0.2))


def test_a_long_update_is_not_looked_at_again():
    again = Again(Told("learn"), Told("step", 0.1, 0.1), [0], 3.0)
    assert again.beside(lambda: {"update": 5.0}) == ({"update": 5.0}, 3.0)
    assert again.learn == 3.0


def test_what_takes_longer_for_half_of_the_time_does_so_on_average():
    assert usual([1.0, 1.5, 1.0, 1.5]) == pytest.approx(1.25)
    assert usual([1.0, 1.0, 1.5]) == pytest.approx(3.5 / 3), "and not as in the median"
    assert usual(iter([2.0])) == 2.0


def test_a_moment_at_which_the_machine_stood_still_does_not_count():
    assert usual([1.0, 90.0, 1.5]) == pytest.approx(1.25)
    assert usual([90.0, 1.0]) == 1.0
    assert usual([1.0, 1.0, 1.0, 0.1]) == 1.0


def test_of_what_is_compared_each_side_is_as_usual():
    found = beside((1.2, 1.0), (1.4, 0.8), (1.0, 1.2))
    assert over(found) == pytest.approx(1.2), "and not the mean of the ratios"


def test_what_was_compared_becomes_curves():
    ratios = Ratios()
    ratios.apart[1] = over_one(1.3, 1.2, 1.1)
    ratios.apart[2] = over_one(0.7, 0.8, 0.6)
    ratios.busy[2] = [slowed(1.5, 1.4, 1.0), slowed(1.4, 1.2, 0.9), slowed(1.6, 1.3, 0.9)]
    ratios.busy[4] = [slowed(3.0, 2.0, 1.1)]
    ratios.team[2] = over_one(1.1, 1.2, 1.3)
    ratios.threads[2] = over_one(0.5, 0.6, 0.7)
    curves = ratios.curves({1: 2.0, 2: 1.0, 4: 0.8}, 1.0)
    assert curves.inside == pytest.approx({1: 1.0, 2: 0.6, 4: 0.4})
    assert curves.learn == pytest.approx({1: 1.2, 2: 0.7, 4: 0.48})
    assert curves.slow_act == pytest.approx({1: 1.0, 2: 1.3, 4: 2.0})
    assert curves.slowest == pytest.approx({1: 1.0, 2: 1.0, 4: 1.1}), "the slowest is never quicker"
    assert curves.slow_learn == pytest.approx({1: 1.0, 2: 1.0, 4: 2.0}), (
        "a real run had a busy core beside it"
    )
    assert curves.team == pytest.approx({1: 1.0, 2: 0.5}), "two learners had three"


def test_if_something_had_taken_longer():
    ratios = Ratios(
        apart={1: over_one(2.0)}, team={2: over_one(3.0)}, asked=[1.0],
        busy={4: [slowed(1.0, 2.0, 1.5)]},
    )  # fmt: skip
    apart, team = ratios.times(1.1, "apart", 1), ratios.times(1.1, "team", 2)
    assert over(apart.apart[1]) == pytest.approx(2.2)
    assert (apart.team, apart.asked) == (ratios.team, [pytest.approx(1.1)])
    assert over(team.team[2]) == pytest.approx(3.3)
    assert (team.apart, team.asked) == (ratios.apart, ratios.asked)
    assert over(ratios.apart[1]) == 2.0, "and what was measured stays"
    (crowded,) = ratios.times(1.1, "busy", 4).busy[4]
    assert crowded == slowed(1.1, 2.2, 1.5), "the slowest is so over the others"


def test_what_others_cost_a_learner_that_was_measured_beside_some_is_counted_once():
    ratios = Ratios()
    ratios.busy = {2: [slowed(1.1, 1.0, 1.0)], 5: [slowed(1.5, 1.0, 1.0)]}
    ratios.apart, ratios.busy_apart = {1: over_one(2.0)}, 5
    found = ratios.curves({1: 0.01}, 0.01)
    assert found.learn == {1: pytest.approx(0.02)}
    assert found.slow_learn == {1: 1.0, 2: 1.0, 5: pytest.approx(1.0)}
    ratios.busy_apart = 2
    assert ratios.curves({1: 0.01}, 0.01).slow_learn[5] == pytest.approx(1.5 / 1.1)
