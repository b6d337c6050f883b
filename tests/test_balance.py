"""The account and the triggers, against what they say in words."""

from hypothesis import given
from hypothesis import strategies as st

from tianji.balance import Balance
from tianji.trigger import Counts, Every, Reached

accounts = st.builds(
    Balance,
    rows_per_rollout=st.integers(1, 64),
    steps_per_update=st.integers(1, 200),
    warmup=st.integers(0, 300),
    lead=st.integers(0, 4),
)


@given(accounts, st.integers(0, 400))
def test_a_rollout_is_meant_for_the_first_update_that_its_first_row_is_new_to(balance, granted):
    balance.granted = granted
    row = granted * balance.rows_per_rollout
    expected = 0
    while balance.warmup + (expected + 1) * balance.steps_per_update <= row:
        expected += 1
    assert balance.next_update() == expected


@given(accounts, st.data())
def test_production_never_runs_further_ahead_than_the_lead(balance, data):
    version = 0
    for _ in range(60):
        action = data.draw(st.sampled_from(["grant", "receive", "serve", "update"]))
        if action == "grant" and balance.may_grant(version):
            balance.granted += 1
        elif action == "receive" and balance.received < balance.granted:
            balance.received += 1
        elif action == "serve" and balance.may_serve():
            balance.served += 1
        elif action == "update" and version < balance.served:
            version += 1
        # The last rollout granted begins within what the updates up to version + lead follow.
        ahead = (balance.granted - 1) * balance.rows_per_rollout
        end = balance.warmup + (version + balance.lead + 1) * balance.steps_per_update
        assert ahead < end
        rows = balance.received * balance.rows_per_rollout
        assert balance.served * balance.steps_per_update <= max(0, rows - balance.warmup)


@given(accounts)
def test_the_account_never_stands_still(balance):
    version = 0
    for _ in range(200):
        if balance.may_serve():
            balance.served += 1
            version += 1
        else:
            assert balance.may_grant(version), "neither side may go on"
            balance.granted += 1
            balance.received += 1
    # the first update takes one of the 200 turns itself
    assert version > 0 or balance.warmup + balance.steps_per_update > 199 * balance.rows_per_rollout


def test_an_account_that_begins_after_some_updates_grants_for_the_next_ones():
    balance = Balance(rows_per_rollout=8, steps_per_update=8, warmup=16, lead=0, base=100)
    assert [balance.may_grant(99), balance.may_grant(100)] == [False, True]


@given(st.integers(1, 50), st.integers(0, 500), st.integers(0, 100))
def test_every_is_due_once_for_each_multiple_that_is_passed(every, before, more):
    passed = any(n % every == 0 for n in range(before + 1, before + more + 1))
    assert Every(every)(Counts(updates=before), Counts(updates=before + more)) == passed


def test_a_trigger_of_zero_is_never_due():
    assert not Every(0)(Counts(), Counts(updates=10**9))


def test_the_first_limit_that_is_reached_gives_the_reason():
    stop = Reached({"return": 475.0, "steps": 1000})
    assert stop.due({"return": 474.9, "steps": 999}) is None
    assert stop.due({"return": 475.0, "steps": 999}) == "return >= 475"
    assert stop.due({"return": 0.0, "steps": 1000}) == "steps >= 1000"
