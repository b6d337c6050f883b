"""What holds a run up: the model's arithmetic, and bottlenecks that were planted in real runs."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tianji
from tianji import Refusal
from tianji.flow import Flow
from tianji.folder import read_plan
from tianji.verdict import (
    BALANCED,
    COMMUNICATION,
    HARMLESS,
    KINDS,
    SAMPLE,
    TRAIN,
    Setting,
    Verdict,
    busy,
    by_role,
    judge,
    scaling_of,
)

IDLE_BUFFER = {"serve": 0.05, "wait_actor": 0.95}


def of(actor_waits, learner_waits, buffer=IDLE_BUFFER):
    return {
        "actor": {"simulate": 1 - actor_waits, "wait_buffer": actor_waits},
        "learner": {"update": 1 - learner_waits, "wait_buffer": learner_waits},
        "buffer": buffer,
    }


@pytest.mark.parametrize(
    ("time", "kind", "told"),
    [
        (of(0.41, 0.07), TRAIN, "learner 93 % busy; actors blocked 41 % on learner"),
        (of(0.03, 0.60), SAMPLE, "actors 97 % busy; learner blocked 60 % on actors"),
        (of(0.05, 0.10), BALANCED, "learner 90 % busy; actors 95 % busy"),
        (of(0.5, 0.5, {"serve": 0.9, "wait_actor": 0.1}), COMMUNICATION,
         "buffer 90 % busy: actors and learner wait for it"),
        (of(0.6, 0.55), COMMUNICATION,
         "nobody is busy: actors 40 %, buffer 5 %, learner 45 %: time goes by between them"),
        (of(0.5, 0.1) | {"learner": {"update": 0.2, "wait_group": 0.8}}, COMMUNICATION,
         "learners wait 80 % for other groups"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named_with_its_evidence(time, kind, told):
    found = judge(time)
    assert (found.kind, found.text) == (kind, told)


def test_fewer_actors_and_more_learner_cores_are_advised_by_the_model():
    """Actors could make 1 / 0.59 of what passes, the learner consume 1 / 0.96: so 0.59 / 0.96 of
    the actors are enough, 5 of 8."""
    setting = Setting(actors=8, cores=1, scaling={1: 100.0, 2: 138.0})
    found = judge(of(0.41, 0.04), setting)
    assert found.advice == ("3 fewer actors cost nothing", "1 more learner core = +38 %")
    assert found.line == (
        "train-bound: learner 96 % busy; actors blocked 41 % on learner: 3 fewer actors cost "
        "nothing; 1 more learner core = +38 %"
    )
    assert found.tree() == {"kind": TRAIN, "text": found.text, "advice": list(found.advice)}


def test_where_the_number_of_actors_follows_the_run_fewer_are_not_advised():
    setting = Setting(actors=8, cores=1, scaling={1: 100.0, 2: 138.0}, rebalances=True)
    assert judge(of(0.41, 0.04), setting).advice == ("1 more learner core = +38 %",)


def test_where_actors_compete_for_cores_none_rests_so_that_fewer_are_advised_there():
    time = {**of(0.0, 0.02), "buffer": {"serve": 0.01, "wait_actor": 0.99}}
    crowded = Setting(actors=8, places=2, crowd=0.97)
    fewer = judge(time, crowded).advice
    assert fewer == ("6 fewer actors cost nothing",)
    assert judge(time, replace(crowded, rebalances=True)).advice == fewer


def test_a_plan_may_keep_the_slack_that_it_chose():
    """5 of 8 actors would do, and a plan means them to be able to make a quarter more: 7."""
    advice = judge(of(0.41, 0.04), Setting(actors=8, slack=0.25)).advice
    assert advice == ("1 fewer actor costs nothing",)
    assert judge(of(0.3, 0.04), Setting(actors=8, slack=0.25)).advice == ()
    assert judge(of(0.3, 0.04), Setting(actors=8)).advice != ()
    turns = Setting(actors=8, slack=0.25, turns=True)
    assert judge(of(0.41, 0.04), turns) == judge(of(0.41, 0.04), replace(turns, slack=0.0))


def test_what_is_not_measured_is_not_advised():
    assert judge(of(0.0, 0.04), Setting(actors=1)).advice == ()
    assert judge(of(0.3, 0.04), Setting(actors=1, cores=2, scaling={1: 9.0, 2: 18.0})).advice == ()


def test_where_nobody_is_busy_no_faster_side_is_advised():
    scaling = {1: 100.0, 2: 190.0}
    found = judge(of(0.6, 0.5), Setting(actors=2, scaling=scaling))
    assert (found.kind, found.advice) == (COMMUNICATION, ())
    assert judge(of(0.6, 0.3), Setting(actors=2, scaling=scaling)).advice != ()


def test_more_actors_help_as_far_as_the_learner_can_follow():
    """The learner is busy for half of its time, so that twice as much can pass."""
    assert judge(of(0.0, 0.5), Setting(actors=2)).advice == ("2 more actors = +100 %",)
    assert judge(of(0.0, 0.5), Setting(actors=8)).advice == ("8 more actors = +100 %",)
    assert judge(of(0.0, 0.04), Setting(actors=8)).advice == ()
    assert judge(of(0.0, 0.75), Setting(actors=2, grows=True)).advice == (
        "6 more actors = +300 % (an update then follows 4 times the steps)",
    )


def test_groups_have_as_many_actors_each():
    assert judge(of(0.6, 0.04), Setting(actors=2)).advice == ("1 fewer actor costs nothing",)
    assert judge(of(0.6, 0.04), Setting(actors=2, groups=2)).advice == (), "each has one"
    assert judge(of(0.41, 0.04), Setting(actors=8, groups=2)).advice == (
        "1 fewer actor in each group costs nothing",
    )
    assert judge(of(0.0, 0.5), Setting(actors=4, groups=2)).advice == (
        "2 more actors in each group = +100 %",
    )


def test_where_actors_share_cores_more_of_them_bring_nothing_and_fewer_cost_nothing():
    crowded = Setting(actors=6, places=2, crowd=0.99)
    advice = judge(of(0.0, 0.5), crowded).advice
    assert advice == ("4 fewer actors cost nothing", "1 more core for actors = +50 %")
    asleep = Setting(actors=6, places=2, crowd=0.05)
    assert judge(of(0.0, 0.5), asleep).advice == ("6 more actors = +100 %",)


def test_taking_turns_has_words_of_its_own():
    setting = Setting(actors=2, turns=True, available=4, crowd=0.4)
    found = judge(of(0.6, 0.45), setting)
    assert found.kind == TRAIN
    assert found.text == "lead 0, each waits for the other: actors 40 % busy, learner 55 % busy"
    assert found.advice == ('overlap, scale.relax = "one_step" or "tianji", = +81 %',)
    assert judge(of(0.5, 0.5), setting).kind == BALANCED
    assert judge(of(0.2, 0.8), setting).kind == SAMPLE
    assert judge(of(0.8, 0.8), setting).kind == COMMUNICATION
    alone = Setting(actors=2, turns=True, available=1, crowd=0.4)
    assert judge(of(0.6, 0.45), alone).advice == ()


def test_one_slow_actor_that_all_wait_for_is_not_hidden_by_the_mean():
    time = of(0.6, 0.7)
    assert judge(time, Setting(actors=4)).kind == COMMUNICATION
    found = judge(time, Setting(actors=4, ordered=True, busiest=1.0))
    assert found.kind == SAMPLE
    assert found.text == "one actor 100 % busy, 40 % in the mean: all wait for it"
    assert 'relax.late = "pass" = +150 %' in found.advice


def test_actors_that_wait_for_a_server_are_told_from_those_that_wait_for_the_learner():
    time = of(0.1, 0.3) | {"server": {"infer": 0.4, "wait_actor": 0.6}}
    assert judge(time).text == "actors 90 % busy; learner blocked 30 % on actors"
    time["actor"] = {"simulate": 0.3, "wait_server": 0.6, "wait_buffer": 0.1}
    found = judge(time)
    assert (found.kind, found.text) == (SAMPLE, "server 40 % busy; actors blocked 60 % on server")
    time["actor"] = {"simulate": 0.3, "wait_server": 0.1, "wait_buffer": 0.6}
    assert judge(time).text == "learner 70 % busy; actors blocked 70 % on learner"


def test_a_host_that_says_nothing_comes_first():
    found = judge(of(0.3, 0.5), Setting(silent={"actor-1": 12.3}))
    assert found.text.startswith("actor-1 in one step for 12 s; ")


def test_pauses_are_nobodys_fault():
    time = of(0.0, 0.0)
    for kinds in time.values():
        kinds["wait_checkpoint"] = 5.0
    time["actor"]["wait_turn"] = 2.0
    assert judge(time).kind == BALANCED
    assert busy("actor", time["actor"]) == 1.0
    assert busy("actor", {"wait_turn": 1.0}) is None


def test_in_one_process_the_largest_parts_are_named_and_whether_another_would_help():
    time = {"serial": {"learner/update": 0.71, "actor/simulate": 0.18, "actor/infer": 0.08,
                       "buffer/serve": 0.02, "run/other": 0.01}}  # fmt: skip
    found = judge(time, Setting(available=2))
    assert found.kind == TRAIN
    assert found.text == "one process: update 71 %, simulate 18 %, infer 8 %"
    assert found.advice == (
        'processes, scale.engine = "local" with scale.relax = "tianji", = +23 %',
    )
    assert judge(time, Setting(available=1)).advice == ()
    assert judge(time, Setting(available=2, planned=True)).advice == (), "a plan knows better"
    long = {"serial": {"learner/update": 0.92, "actor/simulate": 0.08}}
    assert judge(long, Setting(available=8)).advice == ()
    short = {"serial": {"learner/update": 0.2, "actor/simulate": 0.8}}
    assert judge(short, Setting(actors=4, available=2)).advice[0].endswith("= +10 %")
    assert judge(short, Setting(actors=4, available=8)).advice[0].endswith("= +340 %")
    even = {"serial": {"learner/update": 0.5, "actor/simulate": 0.5}}
    assert judge(even).kind == BALANCED
    assert judge({"worker": time["serial"]}, Setting(available=8)).advice == ()
    assert judge({"worker": time["serial"]}).text.startswith("each worker: update")


@pytest.mark.parametrize(
    "time", [{}, {"serial": {}}, {"actor": {"simulate": 1.0}}, of(0.1, 0.1) | {"buffer": {}},
             of(0.1, 0.1) | {"learner": {"update": 0.0}}]
)  # fmt: skip
def test_where_too_little_is_known_nothing_is_said(time):
    assert judge(time) is None


shares = st.floats(0.0, 1.0) | st.sampled_from([0.0, 1.0, math.nan, -0.1, 1e9])
apart = st.fixed_dictionaries(
    {
        "actor": st.dictionaries(
            st.sampled_from(["simulate", "infer", "wait_buffer", "wait_server", "wait_turn"]),
            shares,
        ),
        "buffer": st.dictionaries(st.sampled_from(["receive", "wait_actor"]), shares),
        "learner": st.dictionaries(
            st.sampled_from(["update", "wait_buffer", "wait_group", "wait_checkpoint"]), shares
        ),
    }
)
alone = st.builds(
    lambda kinds: {"serial": kinds},
    st.dictionaries(
        st.sampled_from(["learner/update", "actor/infer", "buffer/serve", "driver/turn"]), shares
    ),
)
settings = st.builds(
    Setting,
    actors=st.integers(1, 40),
    cores=st.integers(1, 3),
    available=st.integers(1, 64),
    places=st.integers(1, 40),
    crowd=st.floats(0, 1.2),
    turns=st.booleans(),
    ordered=st.booleans(),
    busiest=st.floats(0, 1),
    scaling=st.dictionaries(st.integers(1, 4), st.floats(0.1, 1e6)),
)


@given(apart | alone, settings)
def test_every_run_is_of_one_kind_and_no_advice_is_for_less_than_5_percent(time, setting):
    found = judge(time, setting)
    if found is None:
        return
    assert found.kind in KINDS
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in found.busy.values())
    for advice in found.advice:
        assert "cost" in advice or int(re.search(r"\+(\d+) %$", advice)[1]) >= 5
    numbers = found.metrics({"produced": 3.0, "received": 2.0, "consumed": 9.0})
    assert sum(value for key, value in numbers.items() if key.startswith("verdict/")) == 1.0
    assert all(math.isfinite(value) for value in numbers.values())


@given(apart, settings)
def test_no_advice_claims_more_than_the_other_sides_could_do(time, setting):
    """More actors pass no more than learner and buffer could; fewer leave no less than those need,
    and a core more makes the learner no quicker than was measured."""
    found = judge(time, setting)
    if found is None or setting.turns:
        return
    learner = time["learner"].get("wait_group", 0.0)
    whole = sum(s for k, s in time["learner"].items() if k != "wait_checkpoint" and s > 0)
    consumed = found.busy["consumed"] + (learner / whole if learner > 0 else 0.0)
    other = max(consumed, found.busy["received"], 1e-4)
    for advice in found.advice:
        claimed = re.search(r"\+(\d+) %$", advice)
        if claimed and "learner core" in advice:
            measured = setting.scaling[setting.cores + 1] / setting.scaling[setting.cores]
            assert int(claimed[1]) <= 100 * (measured - 1) + 1e-6
        elif claimed:
            assert int(claimed[1]) <= 100 * (1 / other - 1) + 1e-6


flows = st.builds(
    Flow,
    actors=st.floats(0.01, 1),
    learner=st.floats(0.01, 1),
    buffer=st.floats(0.01, 1),
    cores=st.floats(0, 1),
    turns=st.booleans(),
)


@given(flows, st.floats(0.1, 1), st.floats(1, 10))
def test_slower_sides_pass_no_more_and_quicker_ones_no_less(flow, slower, quicker):
    assert flow.gain() == 0.0
    assert flow.gain(actors=slower) <= 1e-9
    assert flow.gain(actors=quicker) >= -1e-9
    assert flow.gain(learner=quicker) >= -1e-9
    assert flow.gain(actors=quicker) <= quicker - 1 + 1e-9
    assert flow.gain(learner=quicker) <= quicker - 1 + 1e-9
    assert flow.overlapped().rate() >= flow.rate() - 1e-9


@given(st.integers(2, 30), st.floats(0.05, 1), st.floats(0.05, 1))
def test_actors_that_cost_nothing_are_all_of_those_that_do(N, acting, learning):
    time = of(1 - acting, 1 - learning, {"serve": 0.01, "wait_actor": 0.99})
    told = [a for a in judge(time, Setting(actors=N)).advice if "fewer" in a]
    fewer = int(told[0].split()[0]) if told else 0
    assert 0 <= fewer < N

    def loss(k):
        before = 1 / max(acting, learning, 0.01)
        return 1 - 1 / max(acting * N / (N - k), learning, 0.01) / before

    assert loss(fewer) < HARMLESS + 1e-9
    assert fewer == N - 1 or loss(fewer + 1) >= HARMLESS - 1e-9


def test_what_a_plan_has_measured_is_read_with_care(tmp_path):
    assert scaling_of({"rates": {"learn": {"1": 0.1, "2": 0.05}}}) == {1: 10.0, 2: 20.0}
    for plan in ({}, None, [], {"rates": 3}, {"rates": {"learn": [1, 2]}},
                 {"rates": {"learn": {"a": 1, "2": "x", "3": -1}}}):  # fmt: skip
        assert scaling_of(plan) == {}
    assert read_plan(tmp_path) == {}
    (tmp_path / "plan.json").write_text('{"rates": {}}')
    assert read_plan(tmp_path) == {"rates": {}}
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(Refusal, match="Delete it"):
        read_plan(tmp_path)


def test_shares_are_sorted_by_role():
    shares = {"actor/infer": 0.2, "actor/wait_buffer": 0.8, "learner/update": 1.0}
    assert by_role(shares) == {
        "actor": {"infer": 0.2, "wait_buffer": 0.8},
        "learner": {"update": 1.0},
    }


def test_capacities_are_rates_over_busy_shares():
    busy = {"produced": 0.5, "received": 0.0, "consumed": 1.0}
    numbers = Verdict(TRAIN, "", busy=busy).metrics({"produced": 10.0, "consumed": 40.0})
    assert numbers["capacity/produced_sps"] == 20.0
    assert numbers["capacity/consumed_sps"] == 40.0
    assert numbers["verdict/train_bound"] == 1.0
    assert numbers["verdict/sample_bound"] == 0.0
    assert "capacity/received_sps" not in numbers


PLANTED = {
    "env": {"id": "planted/Sleeper", "imports": ["planted"], "kwargs": {"seconds": 0.0}},
    "algorithm": {"name": "planted", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [8]},
    "scale": {"engine": "local", "actors": 2, "envs_per_actor": 2, "rollout_length": 8},
    "stop": {"seconds": 2.2},
}


def planted(tmp_path, *overrides):
    return tianji.train(PLANTED, overrides, runs=tmp_path)


def metrics(result):
    lines = Path(result.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (SAMPLE, ["env.kwargs.seconds=0.005"]),
        (TRAIN, ["algorithm.update_s=0.05", "env.kwargs.seconds=0.001"]),
        (COMMUNICATION, ["algorithm.receive_s=0.03", "env.kwargs.seconds=0.0005"]),
        (BALANCED, ["env.kwargs.seconds=0.01", "algorithm.update_s=0.08", "relax.lead=2",
                    "relax.max_staleness=8"]),
    ],
)  # fmt: skip
def test_a_planted_bottleneck_is_found(kind, overrides, tmp_path):
    result = planted(tmp_path, *overrides)
    assert result.bottleneck["kind"] == kind, result.verdict
    assert result.verdict.startswith(f"{kind}: {result.bottleneck['text']}")
    assert result.tree()["bottleneck"] == result.bottleneck
    rows = metrics(result)
    # each row is of the last seconds, in which others may have used the machine
    assert 1.0 in [row.get(f"verdict/{kind.replace('-', '_')}") for row in rows[-3:]], rows[-3:]
    flow, could = rows[-1]["flow/received_sps"], rows[-1]["capacity/received_sps"]
    assert 0 < flow < 1.5 * could
    if kind == SAMPLE:
        assert any("times the steps)" in advice for advice in result.bottleneck["advice"])
    if kind == TRAIN:
        assert "1 fewer actor costs nothing" in result.bottleneck["advice"]


@pytest.mark.parametrize(("plan", "slack"), [({}, 0.0), ({"rates": None}, 0.25)])
def test_a_run_in_processes_is_judged_with_the_slack_of_its_plan(
    plan, slack, tmp_path, monkeypatch
):
    seen = []

    def judged(time, setting):
        seen.append((time, setting))
        return judge(time, setting)

    monkeypatch.setattr("tianji.run.judge", judged)
    monkeypatch.setattr("tianji.run.read_plan", lambda folder: plan)
    planted(tmp_path, "stop.seconds=0.5")
    assert {setting.slack for _, setting in seen} == {slack}


@pytest.mark.slow
def test_a_run_that_takes_turns_says_what_overlap_would_bring(tmp_path):
    result = planted(
        tmp_path, "scale.relax=sync", "algorithm.update_s=0.04", "env.kwargs.seconds=0.005"
    )
    assert "each waits for the other" in result.bottleneck["text"]
    assert any("overlap" in advice for advice in result.bottleneck["advice"])


def test_one_process_says_where_its_time_goes(tmp_path):
    result = planted(tmp_path, "scale.engine=serial", "env.kwargs.seconds=0.002", "stop.seconds=1")
    assert result.bottleneck["kind"] == SAMPLE
    assert result.bottleneck["text"].startswith("one process: simulate")


FAULTY = {
    **PLANTED,
    "env": {"id": "testing/Fault", "imports": ["tianji.testing.faults", "planted"]},
    "faults": {"hang": 60.0, "grace": 2.0},
}


@pytest.mark.slow
def test_an_actor_that_hangs_in_a_step_is_what_the_others_wait_for(tmp_path):
    """It tells nothing, so that the mean of those that do would say that the learner is idle for
    want of nobody."""
    kwargs = {"at": {"hangs": 200}, "only": "actor-1", "marker": str(tmp_path / "marker")}
    config = {**FAULTY, "env": {**FAULTY["env"], "kwargs": kwargs}}
    result = tianji.train(config, ["scale.relax=one_step", "stop.seconds=9"], runs=tmp_path)
    last = metrics(result)[-2]
    assert last["verdict/sample_bound"] == 1.0, last
    assert last["util/actor/silent"] > 0.4
    assert result.bottleneck["kind"] == SAMPLE
    assert result.bottleneck["text"].startswith("actor-1 in one step for ")


@pytest.mark.slow
def test_a_learner_in_a_long_update_is_what_the_others_wait_for(tmp_path):
    result = planted(tmp_path, "algorithm.update_s=4", "stop.seconds=7", "stop.updates=2")
    rows = [row for row in metrics(result) if "util/learner/silent" in row]
    assert rows[-1]["verdict/train_bound"] == 1.0
    assert result.bottleneck["kind"] == TRAIN
