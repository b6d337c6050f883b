"""The number of active actors follows what a run measures, and does not swing."""

import json
import math
import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tianji
from tianji import Refusal
from tianji.build import assembly
from tianji.config import load_config
from tianji.engines import changing
from tianji.engines.local import LocalEngine
from tianji.flow import GAIN, HEADROOM, Flow, wanted
from tianji.rebalance import MOST_SUSTAINED, SUSTAINED, Change, Rebalancer, chosen, first_of
from tianji.view.status import SilentView

shares = st.floats(0.01, 1.0)
flows = st.builds(Flow, actors=shares, learner=shares, buffer=shares, cores=st.floats(0, 1))
numbers = st.integers(1, 40).flatmap(lambda most: st.tuples(st.integers(1, most), st.just(most)))


@given(flows, numbers)
def test_what_is_wanted_lies_within_bounds(flow, counts):
    active, most = counts
    assert 1 <= wanted(flow, active, most) <= most


@given(flows, numbers)
def test_more_are_wanted_only_for_a_gain_and_fewer_only_where_they_still_suffice(flow, counts):
    active, most = counts
    want = wanted(flow, active, most)
    demand = 1 / max(flow.learner, flow.buffer)
    if want > active:
        assert flow.gain(actors=want / active) > 0.9 * GAIN
    if want < active:
        assert 1 / max(flow.actors * active / want, flow.cores) >= HEADROOM * demand
        assert flow.gain(actors=want / active) > -0.01


def test_cores_that_have_no_time_left_bring_nothing():
    sampling = Flow(actors=1.0, learner=0.4, buffer=0.05)
    assert wanted(sampling, 2, 8) == 5
    assert wanted(Flow(1.0, 0.4, 0.05, cores=0.99), 2, 8) == 2


def looks(rebalancer, flow_of, windows):
    """Changes that so many windows bring; `flow_of(active)` is what they see."""
    changes = []
    for _ in range(windows):
        if (change := rebalancer.look(flow_of(rebalancer.active))) is not None:
            changes.append(change)
    return changes


@given(flows, numbers)
def test_shares_that_stay_never_make_it_swing(flow, counts):
    """Whatever the shares are, the number goes one way."""
    active, most = counts
    changes = looks(Rebalancer(most, active), lambda n: flow, 400)
    ways = {change.after > change.before for change in changes}
    assert len(ways) <= 1


def measured(rate, consumed, noise=lambda: 1.0):
    """What a run with actors of this rate each sees: the slower side is busy all the time."""

    def flow_of(active):
        production = rate * active / consumed
        a, b = min(1.0, 1.0 / production) * noise(), min(1.0, production) * noise()
        return Flow(actors=min(1.0, a), learner=min(1.0, b), buffer=0.01)

    return flow_of


@given(numbers, st.floats(0.01, 10))
def test_a_run_whose_speeds_stay_settles_after_at_most_two_changes(counts, rate):
    active, most = counts
    rebalancer = Rebalancer(most, active)
    changes = looks(rebalancer, measured(rate, 1.0), 200)
    assert len(changes) <= 2
    n, r = rebalancer.active, rate
    assert n == most or n * r >= 0.95, "too few"
    assert n == 1 or (n - 1) * r < HEADROOM + 1e-9, "too many"


@given(numbers, st.floats(0.05, 5), st.integers(0, 1000))
def test_noise_of_a_few_percent_does_not_make_it_swing(counts, rate, seed):
    active, most = counts
    draw = random.Random(seed)
    flow_of = measured(rate, 1.0, lambda: draw.uniform(0.97, 1.03))
    assert len(looks(Rebalancer(most, active), flow_of, 400)) <= 2


@given(st.integers(0, 2**32 - 1))
def test_whatever_is_seen_changes_become_rare(seed):
    """Even where the world itself swings, each change that is taken back makes the next slower."""
    draw = random.Random(seed)
    rebalancer = Rebalancer(8, 8)
    for _ in range(3000):
        flow = Flow(draw.uniform(0.01, 1), draw.uniform(0.01, 1), draw.uniform(0.01, 0.2))
        rebalancer.look(flow)
        assert 1 <= rebalancer.active <= 8
    assert SUSTAINED <= rebalancer.sustained <= MOST_SUSTAINED


def test_a_change_takes_several_windows_in_a_row_and_the_first_does_not_count():
    many, enough = Flow(0.2, 1.0, 0.05), Flow(0.95, 1.0, 0.05)
    rebalancer = Rebalancer(8, 8)
    seen = [many, many, many, enough, many, many, many]
    changes = [rebalancer.look(flow) for flow in seen]
    assert changes[:-1] == [None] * 6
    assert changes[-1] == Change(8, 2, "learner 100 % busy, actors 20 %: fewer cost nothing")
    assert str(changes[-1]).startswith("rebalanced: 8 -> 2 actors: ")
    rebalancer.look(many)
    for _ in range(SUSTAINED - 1):
        rebalancer.look(Flow(1.0, 0.5, 0.05))
    rebalancer.pause()
    assert rebalancer.look(Flow(1.0, 0.5, 0.05)) is None


def test_after_it_was_taken_back_a_change_takes_longer():
    rebalancer = Rebalancer(4, 4)
    many, few = Flow(0.2, 1.0, 0.05), Flow(1.0, 0.3, 0.05)
    counts = []
    for flow in (many, few, many, few):
        n = 1
        while rebalancer.look(flow) is None:
            n += 1
        counts.append(n - 1)
    assert counts == [SUSTAINED, SUSTAINED, 2 * SUSTAINED, 4 * SUSTAINED]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(1, 5))
def test_those_that_are_active_share_cores_as_little_as_can_be(N, count, turn, cores):
    places = [(i % cores,) for i in range(N)]
    active = chosen(count, turn, places)
    assert len(active) == len(set(active)) == min(N, count)
    taken = [sum(i % cores == core for i in active) for core in range(min(N, cores))]
    room = [sum(i % cores == core for i in range(N)) for core in range(min(N, cores))]
    least = min(t for t, r in zip(taken, room, strict=True) if t < r) if len(active) < N else None
    assert least is None or max(taken) <= least + 1
    assert chosen(count, turn, [()] * N) == sorted((turn + i) % N for i in range(min(N, count)))


@given(st.integers(2, 9), st.data())
def test_with_time_everybody_has_a_turn(N, data):
    count = data.draw(st.integers(1, N - 1))
    met = {i for turn in range(N) for i in chosen(count, turn, [()] * N)}
    assert met == set(range(N))


def test_a_plan_says_how_many_to_begin_with():
    assert first_of({"choice": {"actors": 3}}, 4) == 3
    assert first_of({"choice": {"actors": 9}}, 4) == 4
    for plan in ({}, None, {"choice": None}, {"choice": {"actors": "auto"}},
                 {"choice": {"actors": 0}}, {"choice": {"actors": math.inf}}):  # fmt: skip
        assert first_of(plan, 4) == 4


RUN = {
    "env": {"id": "planted/Sleeper", "imports": ["planted"], "kwargs": {"seconds": 0.003}},
    "algorithm": {"name": "planted", "epochs": 1, "minibatches": 1, "update_s": 0.1},
    "network": {"hidden": [8]},
    "scale": {
        "engine": "local", "actors": 4, "envs_per_actor": 2, "rollout_length": 8, "rebalance": True,
    },
    "stop": {"seconds": 8.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["scale.engine=serial"], ["one process", 'Set scale.engine = "local"']),
        (["scale.actors=1"], ["nothing to choose from", "2 or more"]),
        (["scale.relax=sync"], ["would stop all", '"one_step" or "tianji"']),
        (["scale.relax=periodic"], ["would stop all"]),
        (["scale.relax=gorila"], ["would stop all"]),
        (["scale.relax=a3c", "scale.groups=2"], ["acts and learns in turn", '"tianji"']),
        (["scale.relax=gala", "scale.groups=2"], ["acts and learns in turn"]),
    ],
)
def test_where_it_cannot_work_it_is_refused(overrides, words):
    with pytest.raises(Refusal) as refused:
        assembly(load_config(RUN, overrides))
    for word in (*words, "scale.rebalance = true cannot be", "scale.rebalance = false"):
        assert word in str(refused.value)


def test_it_is_no_part_of_what_is_learnt():
    off = load_config(RUN, ["scale.rebalance=false"])
    assert load_config(RUN).identity() == off.identity()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(changing, "WINDOW", 0.6)


class Looking(SilentView):
    """Notes what `tianji ps` would show, and what happens."""

    every = 0.5

    def __init__(self):
        self.folder, self.lines, self.tables = "", [], []

    def begin(self, title, facts):
        self.folder = facts["run"]

    def line(self, text):
        self.lines.append(text)

    def show(self, status):
        table = json.loads(Path(self.folder, "hosts.json").read_text())
        self.tables.append({row["role"]: row["state"] for row in table["hosts"]})


def metrics(result):
    lines = Path(result.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_actors_that_are_too_many_rest_and_are_not_taken_for_hanging(quick, tmp_path):
    """One update takes 0.1 s and four rollouts, a rollout 0.03 s: two actors are enough."""
    view = Looking()
    result = tianji.train(RUN, ["faults.hang=1.5"], runs=tmp_path, view=view)
    assert result.rebalance["active"] == 2
    (change,) = result.rebalance["changes"]
    assert (change["from"], change["to"]) == (4, 2)
    assert 0 < change["steps"] < result.steps
    told = [line for line in view.lines if line.startswith("rebalanced: 4 -> 2 actors: learner")]
    assert len(told) == 1
    assert told[0] in Path(result.run_dir, "log.txt").read_text()
    assert max(list(table.values()).count("inactive") for table in view.tables) == 2
    assert "restarts" not in result.notes
    assert result.staleness["max"] <= 3
    rows = metrics(result)
    assert (rows[0]["scale/active_actors"], rows[-1]["scale/active_actors"]) == (4.0, 2.0)
    assert rows[-1]["util/actor/wait_turn"] > 0.3
    assert result.bottleneck["kind"] == "train-bound"

    updates = [f"stop.updates={result.updates + more}" for more in (15, 30)]
    more = tianji.resume(result.run_dir, ["stop.seconds=600", updates[0]])
    assert more.resumed == "exact"
    assert more.rebalance["active"] == 2
    assert more.rebalance["changes"] == [change]
    assert {row["scale/active_actors"] for row in metrics(more)[len(rows) :]} == {2.0}

    last = Looking()
    all_again = tianji.resume(result.run_dir, [updates[1], "scale.rebalance=false"], view=last)
    assert all_again.resumed == "inexact: store of another size, envs reset"
    assert all_again.rebalance is None
    assert all_again.time["actor"].get("wait_turn", 0.0) == 0.0
    assert last.tables
    assert all("inactive" not in table.values() for table in last.tables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(0.003, 0.009), (0.009, 0.003)], ids=["slower", "faster"]
)
def test_the_number_follows_an_env_that_becomes_slower_or_faster(quick, first, then, tmp_path):
    """A rollout of 8 steps takes 0.03 s or 0.08 s, and 40 of them a second are consumed."""
    overrides = [
        f"env.kwargs.seconds={first}", f"env.kwargs.then={then}", "env.kwargs.after=1000",
        "stop.seconds=28",
    ]  # fmt: skip
    result = tianji.train(RUN, overrides, runs=tmp_path)
    reached = [change["to"] for change in result.rebalance["changes"]]
    assert 2 in reached, result.rebalance
    if first < then:
        assert max(reached[reached.index(2) :]) >= 3, result.rebalance
    else:
        assert metrics(result)[5]["scale/active_actors"] >= 3
    assert result.staleness["max"] <= 3
    assert result.rebalance["active"] == reached[-1]


@pytest.mark.slow
def test_the_number_follows_a_learner_that_becomes_slower(quick, tmp_path):
    """At first four actors cannot make what 25 updates a second consume; two can make what 3 do."""
    overrides = [
        "env.kwargs.seconds=0.009", "algorithm.update_s=0.04", "algorithm.after=100",
        "algorithm.then_s=0.3", "stop.seconds=25",
    ]  # fmt: skip
    result = tianji.train(RUN, overrides, runs=tmp_path)
    assert result.rebalance["active"] <= 2, result.rebalance
    first = result.rebalance["changes"][0]
    assert first["from"] == 4
    assert first["steps"] > 100 * 4 * 16 * 0.9, "while the learner was quick, all were needed"


@pytest.mark.slow
def test_an_inactive_actor_that_dies_is_begun_anew_and_stays_inactive(quick, tmp_path):
    class Killing(Looking):
        killed = ""

        def show(self, status):
            super().show(status)
            table = json.loads(Path(self.folder, "hosts.json").read_text())["hosts"]
            for row in table:
                if row["state"] == "inactive" and not self.killed:
                    self.killed = row["role"]
                    os.kill(row["pid"], signal.SIGKILL)

    view = Killing()
    result = tianji.train(RUN, ["stop.seconds=14"], runs=tmp_path, view=view)
    assert result.notes["restarts"] == 1
    assert result.rebalance["active"] == 2
    assert view.tables[-1][view.killed] == "inactive"


@pytest.mark.slow
def test_replay_keeps_its_ratio_while_actors_rest(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(changing, "TURN", 1.0)
    config = {
        **RUN,
        "algorithm": {
            "name": "dqn", "warmup": 512, "capacity": 2048, "batch_size": 512, "new_steps": 16,
        },
        "network": {"hidden": [256, 256]},
        "env": {**RUN["env"], "kwargs": {"seconds": 0.0002}},
    }  # fmt: skip
    view = Looking()
    result = tianji.train(config, ["stop.seconds=14"], runs=tmp_path, view=view)
    assert result.rebalance["active"] < 4
    assert result.replay_ratio == pytest.approx(512 / 16, rel=0.15)
    resting = {
        role for table in view.tables for role, state in table.items() if state == "inactive"
    }
    assert len(resting) > 4 - result.rebalance["active"], "they take turns"


def test_a_plan_of_the_run_says_how_many_begin(quick, tmp_path, monkeypatch):
    start = LocalEngine.start

    def planned(self, folder):
        (folder / "plan.json").write_text('{"choice": {"actors": 2}}')
        start(self, folder)

    monkeypatch.setattr(LocalEngine, "start", planned)
    result = tianji.train(RUN, ["stop.updates=4"], runs=tmp_path)
    assert result.rebalance == {"active": 2, "changes": []}
