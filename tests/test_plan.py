"""Placements: who runs where, with how many threads."""

from hypothesis import given
from hypothesis import strategies as st

from tianji.plan import Placement, placements

ROLES = ["actor-0", "actor-1", "actor-2", "buffer", "learner", "evaluator"]


def test_the_learner_has_the_first_cores_and_each_actor_one_of_the_others():
    placed = placements(ROLES, [2, 3, 5, 7], learner_cores=2, pin=True)
    assert placed == [
        Placement("actor-0", (5,), 1),
        Placement("actor-1", (7,), 1),
        Placement("actor-2", (5,), 1),
        Placement("buffer", (5, 7), 1),
        Placement("learner", (2, 3), 2),
        Placement("evaluator", (5, 7), 1),
    ]


def test_where_the_learner_takes_all_cores_nobody_is_tied_to_any():
    for cores, learner in (([4], 1), ([0, 1], 2), ([0, 1], 5)):
        placed = placements(ROLES, cores, learner, pin=True)
        assert {p.cores for p in placed} == {()}
        assert {p.role: p.threads for p in placed}["learner"] == learner


def test_without_pinning_only_threads_are_set():
    placed = placements(ROLES, range(8), learner_cores=3, pin=False)
    assert {p.cores for p in placed} == {()}
    assert {p.role: p.threads for p in placed} == dict.fromkeys(ROLES, 1) | {"learner": 3}


@given(
    actors=st.integers(1, 40),
    cores=st.sets(st.integers(0, 200), min_size=1, max_size=32).map(sorted),
    learner=st.integers(1, 32),
)
def test_every_role_is_placed_once_and_no_actor_shares_the_learners_cores(actors, cores, learner):
    roles = [*(f"actor-{i}" for i in range(actors)), "buffer", "learner"]
    placed = placements(roles, cores, learner, pin=True)
    assert [p.role for p in placed] == roles
    where = {p.role: set(p.cores) for p in placed}
    assert set().union(*where.values()) <= set(cores)
    learners = where.pop("learner")
    assert all(not learners & others for others in where.values())
    if len(cores) > learner:
        assert len(learners) == learner
        alone = [where[f"actor-{i}"] for i in range(actors)]
        assert all(len(one) == 1 for one in alone)
        loads = [sum(core in one for one in alone) for core in set(cores) - learners]
        assert max(loads) - min(loads) <= 1, "actors are spread unevenly"
