"""The arithmetic of plans: predictions, the search, equation (1). Pure, so by properties."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianji import shape
from tianji.config import load_config
from tianji.plan import (
    Choice,
    Rates,
    Task,
    choices,
    collection_seconds,
    different,
    knee,
    more_actors,
    plan,
    predict,
    queued,
    search,
    tight,
    unbalanced,
)
from tianji.view.status import human

CONFIGS = Path(__file__).parent.parent / "configs"
REPLAY = Task(rows=32, batch=128, on_policy=False, lead=8, streams=False, envs=8, T=4,
              most_rows=4096)  # fmt: skip
FRESH = Task(rows=2048, batch=2048, on_policy=True, lead=1, streams=False, envs=64, T=32)


def rates(**changes):
    """An env of 0.1 ms and 10 µs for each more, an update of 10 ms that two cores halve."""
    act = {n: 1e-4 + 1e-5 * n for n in (1, 4, 16, 64, 256, 512)}
    plain = Rates(
        act=act, begin=5e-5, send=5e-6, receive=4e-5, serve=1e-4, learn={1: 1e-2, 2: 5e-3},
        take=1e-3, wake=3e-5, slow_act={1: 1.0}, slow_learn={1: 1.0},
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def seconds(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def some_rates(draw):
    act = {1: draw(seconds(1e-5, 1e-2))}
    for n in (8, 64, 512):
        act[n] = act[n // 8] * draw(st.floats(1.0, 8.0))
    learn = {1: draw(seconds(1e-4, 1.0))}
    for n in (2, 4, 8):
        learn[n] = learn[n // 2] * draw(st.floats(0.5, 1.3))
    slow = {1: 1.0, 2: draw(st.floats(1.0, 1.5))}
    slow[16] = slow[2] * draw(st.floats(1.0, 1.5))
    return rates(
        act=act,
        learn=learn,
        slow_act=slow,
        slow_learn=slow,
        slowest={1: 1.0, 16: draw(st.floats(1.0, 1.5))},
        infer={n: whole * draw(st.floats(0.1, 0.9)) for n, whole in act.items()},
        ask=draw(seconds(1e-6, 1e-4)),
        answer=draw(seconds(1e-6, 1e-4)),
        receive=draw(seconds(1e-6, 1e-2)),
        serve=draw(seconds(1e-6, 1e-2)),
        take=learn[1] * draw(st.floats(0, 1)),
        team={1: 1.0, 2: draw(st.floats(0.5, 1.2))},
        valid=draw(st.floats(0.5, 1.0)),
    )


tasks = st.builds(
    dataclasses.replace,
    st.sampled_from([REPLAY, FRESH]),
    lead=st.sampled_from([0.0, 1.0, 8.0, math.inf]),
    streams=st.booleans(),
    abreast=st.booleans(),
    passes=st.booleans(),
    server=st.booleans(),
    max_batch=st.sampled_from([None, 8, 64]),
    envs=st.sampled_from([1, 6, 8, 12, 64]),
)


@settings(deadline=None)
@given(tasks, some_rates(), st.integers(1, 17))
def test_the_search_finds_what_trying_everything_finds(task, measured, cores):
    """Brute force over all counts, by loops of its own."""
    best = 0.0
    lengths = {task.T} if task.on_policy else {task.T, max(1, task.T // 2), 2 * task.T}
    numbers = range(1, cores + 1)
    for actors, learners, c, T in itertools.product(numbers, (1, 2), (1, 2, 4, 8), lengths):
        counts = {2**i for i in range(10)} | {max(1, task.envs // actors)}
        if task.on_policy:
            counts = {task.envs // actors} if task.envs % actors == 0 else set()
        for envs in counts:
            if not task.on_policy and actors * envs * T > task.most_rows:
                continue
            if actors + learners * c <= cores:
                choice = Choice("local", actors, envs, T, cores=c, learners=learners)
                best = max(best, predict(task, measured, choice, cores).new)
            if actors == 1 and c <= cores:
                choice = Choice("serial", 1, envs, T, cores=c)
                best = max(best, predict(task, measured, choice, cores).new)
    found = list(search(task, measured, cores))
    assert max(p.new for p in found) == pytest.approx(best)
    assert found[0].new >= best / 1.01 * (1 - 1e-9), "of equals the cheapest, but no worse ones"
    assert all(p.choice.cores_used <= cores for p in found), "no core is used twice"


def test_what_is_not_allowed_is_not_found_and_the_next_best_is():
    every = list(search(REPLAY, rates(), 8))
    first = every[0].choice
    others = list(search(REPLAY, rates(), 8, lambda choice: choice != first))
    assert others[0].choice == every[1].choice
    assert len(others) == len(every) - 1
    assert list(search(REPLAY, rates(), 8, lambda choice: False)) == []
    assert plan(REPLAY, rates(), 8, lambda choice: False) is None


def test_learners_share_an_update_and_groups_multiply():
    measured = rates(act={1: 1e-5, 512: 1e-4}, team={1: 1.0, 2: 0.6})
    one = predict(FRESH, measured, Choice("local", 2, 32, 32), 16)
    two = predict(FRESH, measured, Choice("local", 2, 32, 32, learners=2), 16)
    assert one.binding == two.binding == "learner"
    assert two.new == pytest.approx(one.new / 0.6)
    groups = predict(FRESH, measured, Choice("local", 2, 32, 32, groups=3), 16)
    assert groups.new == pytest.approx(3 * one.new)


def test_one_process_learns_at_the_pace_of_one_that_also_acts():
    serial = Choice("serial", 1, 64, 32, cores=1)
    plain = predict(FRESH, rates(), serial, 2)
    slower = predict(FRESH, rates(inside={1: 3e-2, 2: 1e-2}), serial, 2)
    assert 2048 / slower.new - 2048 / plain.new == pytest.approx(2e-2)
    apart = Choice("local", 1, 64, 32)
    assert predict(FRESH, rates(inside={1: 3e-2}), apart, 2) == predict(FRESH, rates(), apart, 2)


def test_a_plan_says_what_a_gpu_and_groups_would_bring():
    slow = rates(learn={1: 0.1, 2: 0.09})
    notes = " ".join(plan(FRESH, slow, 8).notes)
    assert "a GPU would bring +" in notes
    assert "--groups" in notes
    assert "--groups" not in " ".join(plan(FRESH, slow, 8, groups=range(1, 5)).notes)
    assert plan(FRESH, slow, 8, groups=range(1, 5)).best.choice.groups == 4
    on_gpu = " ".join(plan(FRESH, rates(device="cuda"), 8).notes)
    assert "a GPU" not in on_gpu
    idle = " ".join(plan(FRESH, rates(act={1: 1e-2, 512: 5.0}), 4).notes)
    assert "a GPU would bring less than 5 %" in idle


@settings(deadline=None)
@given(tasks, some_rates(), st.integers(1, 17))
def test_a_prediction_is_never_more_than_any_side_could_do(task, measured, cores):
    for choice in choices(task, cores, (1,), measured):
        p = predict(task, measured, choice, cores)
        assert 0 < p.new <= min(p.capacity.values()) * (1 + 1e-9)
        assert p.produced == p.received == p.new
        assert p.consumed > 0


@settings(deadline=None)
@given(some_rates(), st.integers(2, 16))
def test_overlap_is_never_slower_than_taking_turns(measured, cores):
    for choice in choices(FRESH, cores, (1,), measured):
        at = {
            name: predict(dataclasses.replace(FRESH, **fields), measured, choice, cores).new
            for name, fields in {
                "sync": {"lead": 0.0},
                "periodic": {"lead": 0.0, "streams": True},
                "one_step": {"lead": 1.0},
            }.items()
        }
        assert at["sync"] <= at["periodic"] * (1 + 1e-9)
        if choice.engine == "local":
            assert at["periodic"] <= at["one_step"] * (1 + 1e-9)
        else:
            assert at["sync"] == at["one_step"], "one process has nothing to overlap"


@settings(deadline=None)
@given(tasks, some_rates(), st.integers(1, 16))
def test_a_core_more_never_makes_the_best_plan_worse(task, measured, cores):
    alone = {1: 1.0}
    quiet = dataclasses.replace(measured, slow_act=alone, slow_learn=alone, slowest=alone)
    fewer = next(search(task, quiet, cores)).new
    assert next(search(task, quiet, cores + 1)).new >= fewer / 1.011


def test_replay_gets_as_many_actors_as_balance_the_learner_with_some_slack_and_no_more():
    slow_env = rates(act={n: 1e-2 * n for n in (1, 8, 512)}, learn={1: 0.08})
    found = plan(REPLAY, slow_env, cores=16)
    # The learner follows 32 steps each 80 ms: 400 a second, and an actor makes a little less than
    # 100, so that five are 24 % more.
    assert found.best.choice.actors == 6, "a seventh would only wait"
    assert found.best.new == pytest.approx(400, rel=0.02)
    assert found.best.binding == "learner"
    assert "wait 33 %" in found.why
    assert "some are to spare" in found.why
    # Where there is no core for a fifth, four are as good as it gets.
    few = plan(REPLAY, slow_env, cores=5)
    assert few.best.choice.actors == 4
    assert few.best.binding == "actors"
    assert "all 5 cores are taken" in few.why


@settings(deadline=None)
@given(tasks, some_rates(), st.integers(1, 17))
def test_actors_have_slack_wherever_that_costs_cores_alone(task, measured, cores):
    found = list(search(task, measured, cores))
    best, most = found[0], max(p.new for p in found)

    def has_slack(p):
        others = min(p.capacity["learner"], p.capacity["channel"])
        return p.binding == "turns" or p.capacity["actors"] >= 1.25 * others

    with_slack = [p.new for p in found if has_slack(p)]
    if has_slack(best):
        return
    assert max(with_slack, default=0.0) <= most / 1.01 * (1 + 1e-9)
    assert best.choice.cores_used <= min(p.choice.cores_used for p in found if p.new == most)


def test_actors_that_just_suffice_are_tight():
    slow_env = rates(act={n: 1e-2 * n for n in (1, 8, 512)}, learn={1: 0.08})
    few, enough = (
        predict(REPLAY, slow_env, Choice("local", actors, 8, 4), 16) for actors in (5, 6)
    )
    assert tight(few)
    assert not tight(enough)
    turns = dataclasses.replace(REPLAY, lead=0.0)
    assert not tight(predict(turns, slow_env, few.choice, 16)), "there is no slack to be had"


def test_workers_take_longer_by_what_was_measured_of_so_many():
    task = dataclasses.replace(FRESH, workers=True, lead=0.0)
    busy = {1: 1.0, 16: 3.0}
    measured = rates(slow_act=busy, slow_learn=busy)
    alone = predict(task, measured, Choice("serial", 1, 64, 32), 16).new

    def new(workers, measured):
        choice = Choice("local", 1, 64, 32, groups=workers, hosts="worker")
        return predict(task, measured, choice, 16).new

    assert new(16, measured) == pytest.approx(16 * alone / 3), "by what busy cores cost"
    known = dataclasses.replace(measured, together={1: 1.0, 2: 1.1, 16: 1.6})
    assert new(1, known) == pytest.approx(alone)
    assert new(2, known) == pytest.approx(2 * alone / 1.1)
    assert new(16, known) == pytest.approx(16 * alone / 1.6)
    assert 4 * alone / 1.6 < new(4, known) < 4 * alone / 1.1
    two_cores = Choice("local", 1, 64, 32, groups=8, cores=2, hosts="worker")
    both = dataclasses.replace(known, learn={1: 1e-2, 2: 1e-2})
    assert predict(task, both, two_cores, 16).new == pytest.approx(8 * alone / 1.6), "all are busy"


def test_actors_that_wait_for_each_other_go_as_the_slowest_does():
    slow_env = rates(act={n: 1e-3 * n for n in (1, 64, 512)}, learn={1: 1e-3},
                     slowest={1: 1.0, 5: 1.25})  # fmt: skip
    choice = Choice("local", 4, 16, 32)
    free = predict(FRESH, slow_env, choice, 16)
    together = predict(dataclasses.replace(FRESH, abreast=True), slow_env, choice, 16)
    assert free.binding == together.binding == "actors"
    assert together.new == pytest.approx(free.new / 1.25)
    alone = dataclasses.replace(choice, actors=1, envs=64)
    assert predict(dataclasses.replace(FRESH, abreast=True), slow_env, alone, 16).new == (
        predict(FRESH, slow_env, alone, 16).new
    ), "one has nobody to wait for"


def test_quick_updates_let_actors_overtake_where_first_arrivals_serve():
    task = dataclasses.replace(FRESH, abreast=True, passes=True)
    slow_env = rates(act={n: 1e-3 * n for n in (1, 64, 512)}, slowest={1: 1.0, 5: 1.25})
    choice = Choice("local", 4, 16, 32)
    free = predict(FRESH, slow_env, choice, 16)
    collecting = FRESH.rows / free.capacity["actors"]
    for share, pace in ((1e-6, 1.0), (0.2, 1.125), (0.4, 1.25), (0.6, 1.25)):
        quick = dataclasses.replace(slow_env, learn={1: share * collecting})
        assert predict(task, quick, choice, 16).new == pytest.approx(free.new / pace, rel=1e-3)


def test_a_server_chooses_for_all_actors_at_once_or_for_as_many_as_it_may():
    measured = rates(
        act={16: 3e-3, 64: 6e-3}, infer={16: 1e-3, 32: 1.5e-3, 64: 2e-3}, ask=1e-4, answer=1e-5,
        wake=5e-5,
    )  # fmt: skip
    whole = measured.asked(16, 4, None)
    # Simulating takes 2 ms; then four have asked, and 64 rows are inferred.
    assert whole.own == pytest.approx(2.1e-3)
    assert whole.serving == pytest.approx(2e-3 + 4e-5)
    assert whole.step == pytest.approx(2.1e-3 + 2e-3 + 4e-5 + 1e-4)
    halves = measured.asked(16, 4, 32)
    assert halves.serving == pytest.approx(2 * (1.5e-3 + 2e-5))
    assert halves.step == pytest.approx(2.1e-3 + 1.5e-3 + 2e-5 + 1e-4)
    busy = measured.asked(16, 40, 16)
    assert busy.step == busy.serving == pytest.approx(40 * (1e-3 + 1e-5)), "one after the other"


def test_a_server_without_a_core_of_its_own_takes_what_it_needs_from_the_actors():
    task = dataclasses.replace(FRESH, server=True, lead=math.inf)
    measured = rates(act={32: 3e-3, 64: 6e-3}, infer={32: 1e-3, 64: 2e-3}, learn={1: 1e-4})
    two = Choice("local", 2, 32, 32)
    step = measured.asked(32, 2, None)
    apart = predict(task, measured, two, cores=5)
    assert apart.new == pytest.approx(64 / step.step, rel=0.01)
    # Two actors on one core, and the server with them: all that each does is done in turn.
    crowded = predict(task, measured, two, cores=2)
    assert crowded.new == pytest.approx(64 / (2 * step.own + step.serving), rel=0.01)


def test_more_processes_than_cores_share_what_there_is():
    measured = rates(act={64: 1e-2}, learn={1: 0.32})
    one = predict(FRESH, measured, Choice("local", 1, 64, 32), cores=1)
    # 2,048 rows take 32 steps of 10 ms and an update of 320 ms, one after the other.
    assert one.new == pytest.approx(2048 / 0.64, rel=0.01)


def test_groups_that_were_asked_about_and_not_chosen_are_told():
    cheap = rates(act={n: 1e-6 * n for n in (1, 64, 512)}, learn={1: 1e-2})
    found = plan(FRESH, cheap, cores=2, groups=range(1, 3))
    assert "2 groups need 4 cores or more, and there are 2" in found.notes
    crowded = dataclasses.replace(cheap, slow_learn={1: 1.0, 4: 5.0})
    told = plan(FRESH, crowded, cores=4, groups=range(1, 3))
    assert told.best.choice.groups == 1
    assert any(note.startswith("2 groups of 1 actor") for note in told.notes)


@pytest.mark.parametrize(
    ("relax", "abreast"),
    [("sync", True), ("periodic", True), ("one_step", True), ("tianji", True), ("bounded", False),
     ("free", False), ("impala", False)],
)  # fmt: skip
def test_who_waits_for_the_slowest(relax, abreast):
    config = shape.template(load_config(CONFIGS / "ppo_cartpole.toml", [f"scale.relax={relax}"]))
    assert shape.task_of(config, shape.see(config).env).abreast == abreast


def test_a_cheap_env_is_best_in_one_process():
    cheap = rates(act={n: 1e-6 * n for n in (1, 64, 512)}, slow_act={1: 1.0, 2: 1.3},
                  slow_learn={1: 1.0, 2: 1.3}, learn={1: 1e-2})  # fmt: skip
    found = plan(FRESH, cheap, cores=2)
    assert found.best.choice.engine == "serial"
    assert "one process makes" in found.why


def test_more_learner_cores_are_taken_where_learning_is_the_limit():
    heavy = rates(learn={1: 1.0, 2: 0.52, 4: 0.3})
    found = plan(FRESH, heavy, cores=8)
    assert found.best.choice.cores == 4
    assert found.best.choice.actors == 1, "more would wait"


def test_groups_multiply_what_one_does():
    measured = rates()
    one = Choice("local", 2, 32, 32)
    two = dataclasses.replace(one, groups=2)
    assert two.cores_used == 6
    assert predict(FRESH, measured, two, 6).new == pytest.approx(
        2 * predict(FRESH, measured, one, 3).new
    )


def test_the_buffer_that_shares_a_core_with_an_actor_slows_it():
    measured = rates(receive=5e-3)
    alone = predict(REPLAY, measured, Choice("local", 1, 8, 4), cores=3)
    shared = predict(REPLAY, measured, Choice("local", 1, 8, 4), cores=2)
    assert shared.capacity["actors"] < 0.5 * alone.capacity["actors"]


def test_equation_1_with_the_number_of_actors_that_its_condition_implies():
    measured = rates(receive=1e-3)
    one = knee(measured, envs=64, T=32)
    assert one.sample == pytest.approx(32 * measured.act[64] + measured.begin)
    assert one.actors == pytest.approx((one.sample + one.send) / 1e-3)
    below, above = int(one.actors), math.ceil(one.actors) + 1

    def collecting(actors):
        choice = Choice("local", actors, 64, 32)
        return collection_seconds(measured, choice, 100 * choice.rows_per_rollout)

    assert collecting(below) == pytest.approx(100 * (one.sample + one.send) / below)
    assert collecting(above) == pytest.approx(100 * 1e-3)
    assert collecting(2 * above) == pytest.approx(100 * 1e-3)


def test_between_measurements_rates_lie_on_lines_in_logarithms():
    measured = rates(act={1: 1.0, 4: 4.0, 16: 8.0})
    assert measured.step(2) == pytest.approx(2.0)
    assert measured.step(8) == pytest.approx(4.0 * 2**0.5)
    assert measured.step(32) == pytest.approx(16.0), "beyond the last, in proportion"
    assert measured.update(1) == 1e-2
    assert measured.update(8) == 5e-3, "beyond the last, no better than that"


def test_the_next_best_are_other_ways_and_not_the_same_with_other_envs():
    ranked = list(search(REPLAY, rates(), 8))
    others = list(different(ranked))
    assert others[0] == ranked[0]
    ways = [(p.choice.engine, p.choice.actors, p.choice.cores) for p in others]
    assert len(set(ways)) == len(ways) < len(ranked)


def test_a_plan_says_what_a_core_more_would_bring():
    slow_env = rates(act={n: 1e-2 * n for n in (1, 8, 512)}, learn={1: 0.01})
    said = " ".join(plan(REPLAY, slow_env, cores=4).notes)
    assert "one core more would bring +3" in said
    assert "less than 5 %" in " ".join(plan(FRESH, rates(learn={1: 1.0}), cores=4).notes)


def test_what_cannot_be_balanced_says_which_side_and_what_would_help():

    def said(task, measured, cores):
        """The note of a plan, and the plan's own figures, which it repeats."""
        found = plan(task, measured, cores)
        notes = [note for note in found.notes if note.startswith("cannot be balanced")]
        for note in notes:
            capacity = found.best.capacity
            assert f"the actors make up to {human(capacity['actors'])} new steps/s" in note
            assert f"the learner follows {human(capacity['learner'])}" in note
        return " ".join(notes)

    slow_learner = rates(learn={1: 10.0, 2: 6.0})
    train_bound = said(FRESH, slow_learner, 2)
    assert train_bound.endswith(
        "A smaller network or fewer passes over a batch would let it keep up"
    )
    assert "more new steps an update" in said(REPLAY, slow_learner, 2)
    slow_env = rates(act={n: 0.1 * n for n in (1, 512)}, learn={1: 1e-3})
    assert said(FRESH, slow_env, 4).endswith(
        "A faster env or more cores would let them keep up; more learner cores would not"
    )
    wide = rates(act={1: 0.1, 512: 0.2}, learn={1: 1e-3})
    assert "more envs an actor" in said(FRESH, wide, 4), "with which a step takes little longer"
    assert "more envs an actor" not in said(REPLAY, wide, 4), "the plan has chosen those"
    deep = rates(act={n: 0.1 * n for n in (1, 512)}, infer={1: 0.09, 512: 46.0}, learn={1: 1e-3})
    assert "A faster env, a smaller network or more cores" in said(FRESH, deep, 4)
    near = rates(act={n: 2e-4 * n for n in (1, 64, 512)}, learn={1: 0.3})
    assert said(FRESH, near, 4) == ""
    assert unbalanced(FRESH, slow_learner, 1, next(search(FRESH, slow_learner, 1))) is None


def waiting(**changes):
    """Envs that take half a millisecond each, of which they compute for a twentieth."""
    act = {n: 5e-4 * n for n in (1, 8, 64, 512)}
    return rates(act=act, rests=dict.fromkeys(act, 0.95), learn={1: 1e-3}, **changes)


def test_actors_whose_envs_wait_share_cores():
    alone = predict(FRESH, waiting(), Choice("local", 1, 64, 32), 2)
    found = plan(FRESH, waiting(), 2)
    assert (found.best.choice.actors, found.best.choice.actor_cores) == (8, 1)
    assert found.best.choice.cores_used == 2
    assert found.best.new > 6 * alone.new
    assert str(found.best.choice) == "8 actors on 1 core with 8 envs each, a learner with 1 core"
    assert "their envs wait, so that they compute for 40 % of 1 core" in found.why
    busy = rates(act=waiting().act, learn={1: 1e-3})
    assert plan(FRESH, busy, 2).best.choice.actors == 1, "which compute all that time"
    more = plan(FRESH, dataclasses.replace(waiting(), rests={1: 0.6, 512: 0.6}), 3)
    assert (more.best.choice.actors, more.best.choice.actor_cores) == (4, 2), "two fill a core"
    # What they compute is more than the core has, if they had no time left to wait.
    full = predict(FRESH, waiting(), Choice("local", 64, 1, 32), 2)
    assert full.capacity["actors"] < 1 / (0.05 * 5e-4)


@settings(deadline=None)
@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(1, 30))
def test_actors_of_one_core_queue_for_it(computing, resting, n):
    """Between nobody in the way and all others before it, and the core is never full."""
    took = queued(computing, resting, n)
    assert computing * (1 - 1e-9) <= took <= n * computing * (1 + 1e-9)
    assert n / (resting + took) <= 1 / computing * (1 + 1e-9)
    assert queued(computing, resting, 1) == computing
    assert queued(computing, 0.0, n) == pytest.approx(n * computing), "they never rest"


def test_two_actors_of_one_core_wait_as_a_queue_of_two_does():
    """The other one is found computing for the share of its time that it does: 1 of 1 + 3."""
    assert queued(1.0, 3.0, 2) == pytest.approx(1.25)


@settings(deadline=None)
@given(tasks, some_rates(), st.floats(0.0, 0.99), st.integers(1, 9))
def test_the_search_finds_what_trying_everything_finds_where_envs_wait(task, known, rest, cores):
    """A core has as many actors as compute for four fifths of its time, and eight at most."""
    rests, infer = dict.fromkeys(known.act, max(rest, 1e-3)), dict.fromkeys(known.act, 1e-9)
    measured = dataclasses.replace(known, rests=rests, infer=infer)
    on_one = max(1, min(8, math.floor(0.8 / (1 - max(rest, 1e-3)))))
    best = 0.0
    for actors, learners, c in itertools.product(range(1, 8 * cores + 1), (1, 2), (1, 2, 4, 8)):
        needed = math.ceil(actors / on_one)
        if needed + learners * c > cores or not task.on_policy or task.envs % actors:
            continue
        shared = needed if on_one > 1 and actors > 1 else None
        choice = Choice("local", actors, task.envs // actors, task.T, cores=c, learners=learners,
                        actor_cores=shared)  # fmt: skip
        best = max(best, predict(task, measured, choice, cores).new)
    found = [p for p in search(task, measured, cores) if p.choice.engine == "local"]
    assert all(p.choice.cores_used <= cores for p in found)
    if task.on_policy:
        assert max((p.new for p in found), default=0.0) == pytest.approx(best)


def test_why_not_more_actors_is_said_for_every_kind_of_limit():
    all_taken = rates(act={n: 1e-2 * n for n in (1, 8, 512)}, learn={1: 1e-3})
    best = plan(REPLAY, all_taken, cores=4).best
    assert more_actors(REPLAY, all_taken, best, 4).startswith("all 4 cores are taken")
    slow_buffer = rates(receive=1.0)
    best = predict(REPLAY, slow_buffer, Choice("local", 2, 8, 4), 8)
    assert more_actors(REPLAY, slow_buffer, best, 8).startswith("the buffer can pass on")
    best = predict(FRESH, all_taken, Choice("local", 2, 32, 32), 4)
    assert "cannot be split equally among 3" in more_actors(FRESH, all_taken, best, 4)
    best = predict(FRESH, all_taken, Choice("local", 2, 32, 32), 8)
    said = more_actors(FRESH, all_taken, best, 8)
    four = predict(FRESH, all_taken, Choice("local", 4, 16, 32), 8).new
    assert said == f"4 would make {human(four)} new steps/s instead of {human(best.new)}"
    said = more_actors(FRESH, all_taken, best, 8, lambda way: way.actors != 4)
    assert said == "64 envs cannot be split equally among 3 actors"
    steps = predict(REPLAY, all_taken, Choice("local", 2, 8, 4), 8)
    said = more_actors(REPLAY, all_taken, steps, 8, lambda way: way.actors <= 2)
    assert said == "a run with more of them would be refused", "there are cores for them"
    one = predict(FRESH, all_taken, Choice("serial", 1, 64, 32), 8)
    said = more_actors(FRESH, all_taken, one, 8, lambda way: way.actors <= 2)
    assert "; 2 actors with 32 envs each" in said, "the best that is possible"
    assert "not possible" in more_actors(FRESH, all_taken, one, 8, lambda way: False)
    assert "no core for a second" in more_actors(FRESH, all_taken, one, 1)


def test_where_nothing_is_allowed_there_is_no_plan():
    assert plan(FRESH, rates(), 4, allowed=lambda choice: False) is None


def test_a_plan_is_json():
    measured = rates(slow_act={1: 1.0, 2: 1.2})
    tree = json.loads(json.dumps(plan(FRESH, measured, 4).tree()))
    assert Choice(**tree["choice"]).cores_used <= 4
    assert set(tree["predicted"]) == {"produced", "received", "consumed", "new"}
    assert len(tree["alternatives"]) == 3
    assert tree["binding"] in ("actors", "learner", "channel", "turns")


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice("serial", 1, 64, 32), "one process: 64 envs"),
        (Choice("serial", 4, 16, 32), "one process: 4 actors with 16 envs each"),
        (Choice("serial", 1, 1, 32, cores=2), "one process: 1 env, 2 cores to learn with"),
        (Choice("local", 1, 8, 4), "1 actor with 8 envs, a learner with 1 core"),
        (
            Choice("local", 3, 8, 4, cores=2, groups=2),
            "2 groups of 3 actors with 8 envs each, a learner with 2 cores",
        ),
    ],
)
def test_a_choice_in_words(choice, said):
    assert str(choice) == said
