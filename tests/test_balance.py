"""The account, against what it says in words."""

import random
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji.balance import Balance

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


rounds = st.builds(
    Balance,
    rows_per_rollout=st.integers(1, 20),
    steps_per_update=st.integers(1, 60),
    warmup=st.integers(0, 100),
    lead=st.just(0),
    round=st.integers(1, 5),
)


@given(rounds)
def test_a_whole_round_is_granted_for_one_update(balance):
    """So the version that makes a rollout does not depend on who comes first."""
    version = 0
    for _ in range(60):
        while balance.may_serve():
            balance.served += 1
            version += 1
        meant = set()
        while balance.may_grant(version):
            if balance.granted % balance.round == 0:
                meant = set()
            meant.add(balance.next_update())
            assert len(meant) == 1
            balance.granted += 1
        assert balance.granted % balance.round == 0
        assert balance.granted > balance.received, "neither side may go on"
        balance.received = balance.granted


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 6))
def test_pieces_are_served_one_by_one_as_their_rows_arrive(rows, pieces, updates):
    balance = Balance(rows, rows * pieces, warmup=0, lead=0, pieces=pieces)
    for _ in range(updates * pieces):
        assert not balance.may_serve()
        balance.received += 1
        assert balance.may_serve()
        balance.served += 1


@given(accounts, st.integers(0, 400))
def test_a_rollout_that_arrives_serves_the_update_after_those_that_arrived_before_it(balance, n):
    """Each is consumed once: rollout n has rows n r to (n + 1) r - 1, and updates take s each."""
    balance.received = balance.granted = n
    assert balance.arriving_update() == balance.next_update()
    balance.granted += 3
    row = n * balance.rows_per_rollout - balance.warmup
    assert balance.arriving_update() == max(0, row) // balance.steps_per_update


@given(accounts, st.integers(0, 400))
def test_the_store_is_filling_until_the_warm_up_has_arrived(balance, received):
    balance.received = received
    assert balance.filling() == (received * balance.rows_per_rollout < balance.warmup)
    if balance.filling():
        assert not balance.may_serve()


@given(accounts, st.integers(0, 50))
def test_without_a_pace_only_the_first_batch_waits_for_rows(balance, served):
    balance.paced = False
    need = balance.warmup + balance.steps_per_update
    balance.received = -(-need // balance.rows_per_rollout)
    balance.served = served
    assert balance.may_serve()
    balance.received -= 1
    assert not balance.may_serve()


@given(accounts, st.integers(0, 400), st.integers(0, 10**9))
def test_without_a_bound_production_may_always_go_on(balance, granted, version):
    balance.lead, balance.granted = float("inf"), granted
    assert balance.may_grant(0)
    assert balance.may_grant(version)


@given(accounts, st.integers(0, 100), st.integers(0, 400))
def test_an_account_that_begins_later_only_adds_the_updates_made_before(balance, base, granted):
    balance.granted = granted
    update, may = balance.next_update(), balance.may_grant(0)
    balance.base = base
    assert balance.next_update() == update + base
    assert balance.may_grant(base) == may


@given(accounts, st.integers(0, 60), st.integers(1, 5), st.integers(0, 9))
def test_pieces_are_for_updates_in_their_order(balance, served, pieces, base):
    balance.served, balance.pieces, balance.base = served, pieces, base
    updates = [base + k for k in range(served + 1) for _ in range(pieces)]
    assert balance.serving_update() == updates[served]


@dataclass
class Limiter:
    """Reverb's SampleToInsertRatio, as its sources write it; nothing is ever deleted."""

    samples_per_insert: Fraction
    min_size: int
    error_buffer: Fraction
    inserts: int = 0
    samples: int = 0

    @property
    def offset(self):
        return self.samples_per_insert * self.min_size

    def can_sample(self, n):
        min_diff = self.offset - self.error_buffer
        diff = self.inserts * self.samples_per_insert - self.samples - n
        return self.inserts >= self.min_size and diff >= min_diff

    def can_insert(self, n):
        max_diff = self.offset + self.error_buffer
        diff = (self.inserts + n) * self.samples_per_insert - self.samples
        return self.inserts + n <= self.min_size or diff <= max_diff


@pytest.mark.parametrize("seed", range(10))
def test_with_a_credit_the_account_is_reverbs_limiter(seed):
    """10 accounts of 10,000 random operations. Reverb counts rows, the account rollouts and
    batches: a rollout may begin where its first row may be inserted, one more batch allowed."""
    draw = random.Random(seed)
    rows, new, batch = draw.randint(1, 64), draw.randint(1, 100), draw.randint(1, 256)
    warmup, error = draw.randint(1, 500), draw.randint(1, 8)
    ours = Balance(rows, new, warmup, lead=error, credit=error)
    ratio = Fraction(batch, new)
    theirs, wider = (Limiter(ratio, warmup, Fraction(e * batch)) for e in (error, error + 1))
    asked = {True: 0, False: 0}
    for _ in range(10_000):
        assert ours.may_serve() == theirs.can_sample(batch)
        assert ours.may_grant(ours.served) == wider.can_insert(1)
        assert ours.may_grant(ours.served) or not theirs.can_insert(rows)
        if draw.random() < 0.5:
            may = ours.may_grant(ours.served)
            ours.granted += may
            ours.received += may
        else:
            may = ours.may_serve()
            ours.served += may
        asked[may] += 1
        for limiter in (theirs, wider):
            limiter.inserts, limiter.samples = ours.received * rows, ours.served * batch
    assert min(asked.values()) > 100, "the limits were hardly met"


@given(accounts, st.integers(1, 5), st.integers(0, 20))
def test_a_credit_is_so_many_updates_and_none_of_the_warm_up(balance, credit, served):
    balance.warmup += 1
    plain = Balance(balance.rows_per_rollout, balance.steps_per_update, balance.warmup, 0)
    balance.credit, balance.served = credit, served + credit
    for received in range(400):
        balance.received = plain.received = received
        plain.served = served
        assert balance.may_serve() == plain.may_serve()
        if balance.filling():
            balance.served = 0
            assert not balance.may_serve()
            balance.served = served + credit
