"""Processes of a run are killed, stopped and told to end, in every phase; what is promised holds.

The quick half covers every deed, role and phase; the others are slow. `make chaos` runs all of them
and writes what it saw to benchmarks/results/chaos.json.
"""

import pytest
from chaos import DEEDS, FAULTS, INJECTED, MATRIX, PHASES, ROLES, Case, happen, promise

QUICK = [
    Case("SIGKILL", "actor", "training"),
    Case("SIGKILL", "buffer", "warm-up"),
    Case("SIGKILL", "learner", "training"),
    Case("SIGKILL", "evaluator", "start-up"),
    Case("SIGKILL", "launcher", "checkpointing"),
    Case("SIGSTOP", "actor", "shutdown"),
    Case("SIGSTOP", "learner", "checkpointing"),
    Case("SIGTERM", "buffer", "training"),
    Case("SIGTERM", "launcher", "warm-up"),
    Case("SIGTERM", "launcher", "shutdown"),
    Case("raises", "actor", "training"),
    Case("hangs", "actor", "training"),
]


def cases():
    slow = [pytest.mark.slow, pytest.mark.chaos]
    for case in (*MATRIX, *INJECTED):
        marks = [pytest.mark.chaos] if case in QUICK else slow
        yield pytest.param(case, id=str(case).replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("case", cases())
def test_what_is_promised_of_a_fault_holds(case, tmp_path):
    seen = happen(case, tmp_path)
    assert seen.broken == [], f"promised: {seen.promise.says}"


def test_the_quick_half_covers_every_deed_role_and_phase():
    assert {case.deed for case in QUICK} >= {*DEEDS, "raises", "hangs"}
    assert {case.role for case in QUICK} == set(ROLES)
    assert {case.phase for case in QUICK} == set(PHASES)
    assert set(QUICK) <= {*MATRIX, *INJECTED}


def test_the_matrix_is_whole_and_something_is_promised_of_every_case():
    assert len(set(MATRIX)) == len(DEEDS) * len(ROLES) * len(PHASES)
    assert len(INJECTED) == len(FAULTS)
    for case in (*MATRIX, *INJECTED):
        promised = promise(case.deed, case.role, case.phase)
        assert promised.code in (0, 75, -9), case
        assert promised.says


def test_only_a_killed_or_told_launcher_ends_a_run():
    """Whatever happens to a host, within the budget, the run reaches its stop condition."""
    ended = {c for c in (*MATRIX, *INJECTED) if promise(c.deed, c.role, c.phase).code != 0}
    assert ended == {
        Case(deed, "launcher", phase)
        for deed, phases in (("SIGKILL", PHASES), ("SIGTERM", PHASES[:-1]))
        for phase in phases
    }
