"""Placements: who runs where, with how many threads."""

from hypothesis import given
from hypothesis import strategies as st

from tianji.placement import Placement, placements, wanted
from tianji.role_names import RoleName, parse_role

WORKS = tuple(map(RoleName, ("actor", "buffer", "learner")))


def hosts(*names):
    """Hosts that hold one role each, and workers, which hold all but the evaluator."""
    return {name: WORKS if "worker" in name else (parse_role(name),) for name in names}


ROLES = ["actor-0", "actor-1", "actor-2", "buffer", "learner", "evaluator"]


def test_the_learner_has_the_first_cores_and_each_actor_one_of_the_others():
    placed = placements(hosts(*ROLES), [2, 3, 5, 7], learner_cores=2, pin=True)
    assert placed == [
        Placement("actor-0", (5,), 1),
        Placement("actor-1", (7,), 1),
        Placement("actor-2", (5,), 1),
        Placement("buffer", (5, 7), 1),
        Placement("learner", (2, 3), 2),
        Placement("evaluator", (5, 7), 1),
    ]


def test_an_actor_has_a_core_for_every_thread_of_its_env_as_long_as_there_are_some():
    roles = ["actor-0", "actor-1", "buffer", "learner"]
    placed = placements(hosts(*roles), range(5), learner_cores=1, pin=True, env_threads=2)
    assert [p.cores for p in placed] == [(1, 2), (3, 4), (1, 2, 3, 4), (0,)]
    assert {p.threads for p in placed} == {1}
    placed = placements(hosts(*roles), range(4), learner_cores=1, pin=True, env_threads=2)
    assert [p.cores for p in placed[:2]] == [(1, 2), (3, 1)]
    placed = placements(hosts(*roles), range(2), learner_cores=1, pin=True, env_threads=2)
    assert [p.cores for p in placed[:2]] == [(1,), (1,)]
    workers = placements(hosts("g0.worker", "g1.worker"), range(4), 1, pin=True, env_threads=2)
    assert [(p.cores, p.threads) for p in workers] == [((0, 1), 1), ((2, 3), 1)]


def test_where_the_learner_takes_all_cores_nobody_is_tied_to_any():
    for cores, learner in (([4], 1), ([0, 1], 2), ([0, 1], 5)):
        placed = placements(hosts(*ROLES), cores, learner, pin=True)
        assert {p.cores for p in placed} == {()}
        assert {p.host: p.threads for p in placed}["learner"] == learner


def test_without_pinning_only_threads_are_set():
    placed = placements(hosts(*ROLES), range(8), learner_cores=3, pin=False)
    assert {p.cores for p in placed} == {()}
    assert {p.host: p.threads for p in placed} == dict.fromkeys(ROLES, 1) | {"learner": 3}


@given(
    actors=st.integers(1, 40),
    cores=st.sets(st.integers(0, 200), min_size=1, max_size=32).map(sorted),
    learner=st.integers(1, 32),
)
def test_every_role_is_placed_once_and_no_actor_shares_the_learners_cores(actors, cores, learner):
    roles = [*(f"actor-{i}" for i in range(actors)), "buffer", "learner"]
    placed = placements(hosts(*roles), cores, learner, pin=True)
    assert [p.host for p in placed] == roles
    where = {p.host: set(p.cores) for p in placed}
    assert set().union(*where.values()) <= set(cores)
    learners = where.pop("learner")
    assert all(not learners & others for others in where.values())
    if len(cores) > learner:
        assert len(learners) == learner
        alone = [where[f"actor-{i}"] for i in range(actors)]
        assert all(len(one) == 1 for one in alone)
        loads = [sum(core in one for one in alone) for core in set(cores) - learners]
        assert max(loads) - min(loads) <= 1, "actors are spread unevenly"


SEVERAL = ["actor-0", "actor-1", "buffer", "learner", "learner-1"]


def test_each_of_several_learners_has_cores_of_its_own():
    placed = placements(hosts(*SEVERAL), [1, 2, 4, 6, 9, 11], learner_cores=2, pin=True)
    assert placed == [
        Placement("actor-0", (9,), 1),
        Placement("actor-1", (11,), 1),
        Placement("buffer", (9, 11), 1),
        Placement("learner", (1, 2), 2),
        Placement("learner-1", (4, 6), 2),
    ]


def test_the_learner_of_each_group_has_cores_of_its_own_and_actors_are_spread_over_the_rest():
    names = [f"g{g}.{role}" for g in range(2) for role in ("actor-0", "buffer", "learner")]
    placed = placements(hosts(*names, "g0.evaluator"), range(5), learner_cores=1, pin=True)
    where = {p.host: p.cores for p in placed}
    assert (where["g0.learner"], where["g1.learner"]) == ((0,), (1,))
    assert (where["g0.actor-0"], where["g1.actor-0"]) == ((2,), (3,))
    for role in ("g0.buffer", "g1.buffer", "g0.evaluator"):
        assert where[role] == (2, 3, 4)


def test_workers_may_take_all_cores_where_nobody_else_needs_one():
    workers = ["g0.worker", "g1.worker"]
    assert placements(hosts(*workers), [3, 5], 1, pin=True) == [
        Placement("g0.worker", (3,), 1),
        Placement("g1.worker", (5,), 1),
    ]
    for more, cores in (([], [3]), (["g0.evaluator"], [3, 5])):
        placed = placements(hosts(*workers, *more), cores, 1, pin=True)
        assert {p.cores for p in placed} == {()}


@given(
    groups=st.integers(1, 5),
    learners=st.integers(1, 4),
    actors=st.integers(1, 6),
    cores=st.sets(st.integers(0, 200), min_size=1, max_size=32).map(sorted),
    each=st.integers(1, 4),
)
def test_no_two_learners_of_any_group_share_a_core_unless_all_share_all(
    groups, learners, actors, cores, each
):
    roles = [*(f"actor-{i}" for i in range(actors)), "buffer", "learner"]
    roles += [f"learner-{i}" for i in range(1, learners)]
    names = [f"g{g}.{role}" for g in range(groups) for role in roles]
    placed = placements(hosts(*names), cores, each, pin=True)
    assert [p.host for p in placed] == names
    where = {p.host: p.cores for p in placed}
    if len(cores) <= groups * learners * each:
        assert set(where.values()) == {()}
        return
    learning = [core for role, own in where.items() if "learner" in role for core in own]
    assert len(learning) == len(set(learning)) == groups * learners * each
    others = {core for role, own in where.items() if "learner" not in role for core in own}
    assert others == set(cores) - set(learning)
    assert {p.threads for p in placed if "learner" in p.host} == {each}
    assert {p.threads for p in placed if "learner" not in p.host} == {1}


def test_the_cores_that_are_wanted_are_those_of_learners_and_actors():
    assert wanted(hosts("actor-0", "actor-1", "buffer", "learner", "evaluator"), 1) == 3
    two = hosts("g0.actor-0", "g0.buffer", "g0.learner", "g1.learner-1")
    assert wanted(two, 4, env_threads=2) == 10
    assert wanted(hosts("g0.worker", "g1.worker"), 1, env_threads=3) == 6, "they take turns there"
