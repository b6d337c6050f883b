"""Presets, what they refuse, and that all they accept runs."""

import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_interleavings import Case, Once, Order, interleave, orders, run
from thorough import examples

from tianji import Refusal
from tianji.algorithm import Traits
from tianji.balance import uneven_rounds
from tianji.build import assembly, build
from tianji.config import load_config
from tianji.relax import PRESETS, Relaxation, Sizes, problem, relaxation
from tianji.testing.algorithm import config_for

PPO = {
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo"},
    "network": {"hidden": [4]},
    "scale": {"engine": "local", "actors": 2, "envs_per_actor": 4, "rollout_length": 4},
    "stop": {"updates": 1},
}
DQN = {**PPO, "algorithm": {"name": "dqn", "warmup": 128, "new_steps": 8}}
ON, OFF = Sizes(on_policy=True, alone=False), Sizes(on_policy=False, alone=False, round=4)
ALONE = Sizes(on_policy=True, alone=True)
MANY = replace(ON, groups=2)
FREE = Relaxation(lead=math.inf, late="pass", take="boundary")
UNPACED = replace(FREE, paced=False)

REPLAY_ONLY, ON_POLICY_ONLY, JOINED = {"apex", "reverb"}, {"periodic", "impala"}, {"a3c", "gala"}


def given_relax(config, *overrides):
    """What a config's run would be relaxed by."""
    return assembly(load_config(config, overrides)).relax


@pytest.mark.parametrize(
    ("preset", "sizes", "expected"),
    [
        ("sync", ON, Relaxation()),
        ("sync", OFF, Relaxation()),
        ("periodic", ON, Relaxation(start="stream")),
        ("one_step", ON, Relaxation(lead=1)),
        ("one_step", OFF, Relaxation(lead=4)),
        ("bounded", ON, Relaxation(lead=4)),
        ("bounded", OFF, Relaxation(lead=16)),
        ("free", ON, Relaxation(lead=math.inf, late="pass", take="boundary")),
        ("free", OFF, Relaxation(lead=math.inf, late="pass", take="boundary", paced=False)),
        ("tianji", ON, Relaxation(lead=1, late="pass", max_staleness=3)),
        ("tianji", OFF, Relaxation(lead=8, late="pass")),
        ("tianji", ALONE, Relaxation()),
        ("tianji", replace(OFF, alone=True), Relaxation()),
        ("gorila", OFF, Relaxation(late="pass")),
        ("seed", ON, replace(FREE, infer="server", correct="vtrace")),
        ("seed", OFF, replace(UNPACED, infer="server")),
        ("a3c", MANY, Relaxation(hosts="worker", join="hogwild", correct="vtrace")),
        ("gala", MANY, Relaxation(hosts="worker", join="gossip", correct="vtrace")),
        ("apex", OFF, replace(UNPACED, explore="ladder")),
        ("impala", ON, replace(FREE, correct="vtrace")),
        ("reverb", OFF, Relaxation(lead=8, credit=8, late="pass", take="boundary")),
    ],
)
def test_a_preset_is_these_fields(preset, sizes, expected):
    assert PRESETS[preset](sizes) == expected
    assert relaxation(preset, sizes, {}) == expected


@pytest.mark.parametrize(
    ("preset", "first", "second", "third"),
    [
        ("sync", "waiting", "inside", "waiting"),
        ("periodic", "waiting", "inside", "bounded"),
        ("one_step", "bounded", "inside", "bounded"),
        ("bounded", "bounded", "inside", "bounded"),
        ("free", "free", "inside", "free"),
        ("tianji", "bounded", "inside", "bounded"),
        ("gorila", "waiting", "inside", "waiting"),
        ("seed", "live", "waiting", "free"),
        ("a3c", "free", "inside", "inside"),
        ("gala", "inside", "inside", "inside"),
        ("apex", "free", "inside", "free"),
        ("impala", "free", "inside", "free"),
        ("reverb", "bounded", "inside", "bounded"),
    ],
)
def test_a_preset_relaxes_these_edges(preset, first, second, third):
    assert PRESETS[preset](ON).edges == {"I": first, "II": second, "III": third}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_preset_can_work_where_it_is_meant_to(name, on_policy, alone, groups):
    sizes = Sizes(on_policy, alone, actors=2, groups=groups)
    refused = problem(relaxation(name, sizes, {}), sizes) is not None
    not_for_it = name in (REPLAY_ONLY if on_policy else ON_POLICY_ONLY)
    never_stops = name in {"free", "seed", "apex"} and not on_policy and alone
    nobody_to_join = name in JOINED and (groups == 1 or alone)
    assert refused == (not_for_it or never_stops or nobody_to_join)


def test_only_lead_0_that_waits_fixes_what_updates_consume():
    exact = {name for name, preset in PRESETS.items() if preset(ON).exact}
    assert exact == {"sync", "periodic"}
    assert not Relaxation(late="pass").exact
    assert not Relaxation(paced=False).exact


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 3),
        ({"lead": 2}, 3),
        ({"lead": 10}, 10),
        ({"window": 4}, 6),
        ({"lead": 5, "window": 2}, 6),
        ({"max_staleness": 7}, 7),
    ],
)
def test_the_bound_of_a_preset_gives_way_to_a_longer_lead_and_a_window(fields, most):
    found = relaxation("tianji", ON, fields)
    assert found.max_staleness == most
    assert problem(found, ON) is None


REFUSED = {
    "a version that is not published": (
        Relaxation(lead=1, publish=4),
        ON,
        "stops the run: actors would wait for a version that is not published",
        {"lead": 3},
    ),
    "a boundary at lead 0": (
        Relaxation(take="boundary"),
        ON,
        "rollouts would be stale",
        {"take": "barrier"},
    ),
    "a stream of replay": (
        Relaxation(start="stream"),
        OFF,
        "nothing would overlap",
        {"start": "batch"},
    ),
    "a stream of a window": (
        Relaxation(start="stream", window=2),
        ON,
        "not known before all are there",
        {"start": "batch"},
    ),
    "a window of replay": (
        Relaxation(lead=1, window=2),
        OFF,
        "would do nothing",
        {"window": 1},
    ),
    "a bound on replay": (
        Relaxation(lead=1, max_staleness=5),
        OFF,
        "throw nearly all of replay away",
        {"max_staleness": None},
    ),
    "a bound below the lead": (
        Relaxation(lead=4, max_staleness=2),
        ON,
        "made only to be thrown away",
        {"max_staleness": 4},
    ),
    "a bound below lead and window": (
        Relaxation(lead=1, window=4, max_staleness=3),
        ON,
        "made only to be thrown away",
        {"max_staleness": 4},
    ),
    "a bound that no version keeps": (
        Relaxation(lead=math.inf, publish=5, max_staleness=3),
        ON,
        "stops the run: all that actors make before the next version is published",
        {"max_staleness": 4},
    ),
    "a bound below the window": (
        Relaxation(lead=math.inf, window=4, max_staleness=0),
        ON,
        "stops the run",
        {"max_staleness": 3},
    ),
    "replay that never stops": (
        Relaxation(lead=math.inf, late="pass", take="boundary", paced=False),
        replace(OFF, alone=True),
        "the learner would never stop for the actors",
        None,
    ),
    "a worker where there is one process": (
        Relaxation(hosts="worker"),
        ALONE,
        "nothing would run beside anything",
        None,
    ),
    "a worker that asks another process": (
        replace(FREE, hosts="worker", infer="server"),
        ON,
        "wait for another one at every step",
        {"infer": "actor", "lead": 0, "take": "barrier"},
    ),
    "a worker that runs ahead of itself": (
        Relaxation(hosts="worker", lead=3, publish=4),
        ON,
        "would only make rollouts stale",
        {"lead": 0, "publish": 1},
    ),
    "a worker that only learns": (
        Relaxation(hosts="worker", paced=False),
        OFF,
        "would never have its turn",
        {"paced": True},
    ),
    "gossip of one": (
        Relaxation(join="gossip"),
        ON,
        "there is one, so it would do nothing",
        {"join": "none"},
    ),
    "a server at lead 0": (
        Relaxation(infer="server", take="boundary"),
        ON,
        "rollouts would be stale",
        {"lead": 1},
    ),
    "a server and actors that wait for versions": (
        Relaxation(infer="server", lead=2),
        ON,
        "could not be kept",
        {"take": "boundary"},
    ),
    "batches of less than an actor": (
        replace(FREE, infer="server", max_batch=4),
        replace(ON, envs=8),
        "nobody would be answered",
        {"max_batch": 8},
    ),
    "a credit for what is consumed once": (
        Relaxation(lead=2, late="pass", credit=2),
        ON,
        "no update can begin before its own are there",
        {"credit": 0},
    ),
    "a credit where updates wait for their own": (
        Relaxation(lead=2, credit=2),
        OFF,
        "makes every update wait for its own rollouts",
        {"credit": 0},
    ),
    "a credit where nobody counts": (
        replace(UNPACED, credit=2),
        OFF,
        "do not wait for new steps at all",
        {"credit": 0},
    ),
    "V-trace of single steps": (
        Relaxation(lead=1, correct="vtrace"),
        OFF,
        "nothing would be corrected",
        {"correct": "none"},
    ),
    "a ladder on-policy": (
        Relaxation(lead=1, explore="ladder"),
        replace(ON, actors=2),
        "would learn from what it never chose",
        {"explore": "alike"},
    ),
    "a ladder in a server": (
        replace(UNPACED, infer="server", explore="ladder"),
        replace(OFF, actors=2),
        "all would explore alike",
        {"explore": "alike"},
    ),
    "a ladder of one rung": (
        Relaxation(lead=1, explore="ladder"),
        OFF,
        "random for ever",
        {"explore": "alike"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_consequence_and_remedy(name):
    relax, sizes, consequence, remedy = REFUSED[name]
    told = problem(relax, sizes)
    assert told is not None
    assert consequence in told
    assert re.search(r"\. (Set|Leave) [^.]*(scale|relax|reuse|algorithm)?\.?", told)
    if remedy is None:
        assert 'Set scale.engine = "local"' in told
        assert problem(relax, replace(sizes, alone=False)) is None
    else:
        assert problem(replace(relax, **remedy), sizes) is None


def remedied(told, relax, sizes):
    """The relaxation and the sizes after the first remedy that a message names."""
    remedy = told[told.rindex(". ", 0, told.index("Set ") if "Set " in told else len(told)) :]
    if "Set relax.lead to 0 and relax.publish to 1" in remedy:
        return replace(relax, lead=0, publish=1), sizes
    if number := re.search(r"Set relax\.(lead|max_staleness|credit|max_batch) to (\d+)", remedy):
        return replace(relax, **{number[1]: int(number[2])}), sizes
    if word := re.search(r'Set relax\.(take|start|infer|correct|explore|join) = "(\w+)"', remedy):
        return replace(relax, **{word[1]: word[2]}), sizes
    if preset := re.search(r'Set scale\.relax = "(\w+)"', remedy):
        return PRESETS[preset[1]](sizes), sizes
    if "Set scale.engine" in remedy:
        return relax, replace(sizes, alone=False)
    if "Set algorithm.capacity instead" in remedy:
        return replace(relax, window=1), sizes
    assert "Leave it out" in remedy, told
    return replace(relax, max_staleness=None), sizes


anything = st.builds(
    Relaxation,
    lead=st.sampled_from([0, 1, 2, 4, math.inf]),
    late=st.sampled_from(["wait", "pass"]),
    take=st.sampled_from(["barrier", "boundary"]),
    start=st.sampled_from(["batch", "stream"]),
    paced=st.booleans(),
    window=st.sampled_from([1, 2, 4]),
    publish=st.integers(1, 6),
    max_staleness=st.none() | st.integers(0, 8),
    credit=st.sampled_from([0, 0, 1, 4]),
    infer=st.sampled_from(["actor", "server"]),
    max_batch=st.none() | st.integers(1, 16),
    correct=st.sampled_from(["none", "vtrace"]),
    explore=st.sampled_from(["alike", "ladder"]),
    hosts=st.sampled_from(["apart", "apart", "worker"]),
    join=st.sampled_from(["none", "none", "average", "gossip", "hogwild"]),
)
some_sizes = st.builds(
    Sizes, st.booleans(), st.booleans(), *(st.integers(1, n) for n in (3, 3, 4, 2))
)


@given(anything, some_sizes)
@settings(max_examples=600)
def test_following_the_remedies_always_leads_to_what_works(relax, sizes):
    for _ in range(12):
        if (told := problem(relax, sizes)) is None:
            return
        relax, sizes = remedied(told, relax, sizes)
    raise AssertionError(f"the remedies go round in circles: {told}")


@given(anything, st.booleans(), st.integers(1, 4), st.data())
@examples(150)
def test_whatever_is_accepted_runs_without_a_stall(relax, on_policy, actors, data):
    relax = replace(relax, paced=True, join="none")  # only a preset sets the first; see `free`
    if relax.hosts == "worker":
        relax = replace(relax, lead=0, publish=1, take="barrier", infer="actor")
    if relax.infer == "server":
        relax = replace(relax, lead=relax.lead or 1, take="boundary")
    if relax.late == "wait" or on_policy:
        relax = replace(relax, credit=0, explore="alike")
    relax = replace(relax, correct="none" if not on_policy else relax.correct)
    assume(problem(relax, Sizes(on_policy, alone=False, actors=actors, envs=4)) is None)
    fields = dataclasses.asdict(relax)
    if relax.infer == "actor":
        fields |= {"max_batch": None, "max_wait": None}
    new = 4 * 4 * actors
    case = Case(actors, fields, actors if on_policy else 0, replay=(new, 16, 3), T=2, B=4)
    run(case, data.draw(orders(actors)))


@pytest.mark.parametrize(
    ("preset", "replay", "actors"),
    [(name, replay, actors) for name in PRESETS for replay in (False, True) for actors in (1, 3)
     if name not in JOINED | (ON_POLICY_ONLY if replay else REPLAY_ONLY)
     and not (name == "apex" and actors == 1)],
)  # fmt: skip
def test_every_preset_runs_without_a_stall(preset, replay, actors):
    case = Case(actors, {}, 0 if replay else actors, preset=preset)
    for seed in range(5):
        naps = ((seed % (actors + 2), 30, 200),)
        built, _ = run(case, Order(seed, naps=naps))
        assert built.assembly.relax == PRESETS[preset](
            Sizes(not replay, alone=False, round=4 * actors if replay else 1)
        )


@pytest.mark.parametrize("actors", [1, 2, 4])
def test_gorilas_actors_wait_so_that_nothing_on_policy_is_stale(actors):
    for seed in range(10):
        case = Case(actors, {}, actors, preset="gorila")
        _, witness = run(case, Order(seed, naps=((seed % (actors + 2), 30, 200),)))
        assert {behind for _, behind, _, _ in witness.taken} == {0}


def test_reverbs_learner_runs_ahead_of_its_data_and_its_actors_of_the_learner():
    """By 2 rollouts of every actor, as far as the error buffer goes, and no further."""
    ahead = {"learner": 0, "actors": 0}
    for weights in ((0.01, 0.01, 1, 1), (1, 1, 1, 0.001)):
        built, _ = Case(2, {}, preset="reverb", replay=(1, 8, 3)).build()
        balance = built.buffer._balance

        def look(built=built, balance=balance):
            rows = balance.received * balance.rows_per_rollout - balance.warmup
            ahead["learner"] = max(ahead["learner"], built.learner.version - rows)
            ahead["actors"] = max(ahead["actors"], rows - built.learner.version)

        interleave(built, Order(0, weights=weights), 60, look)
        error = built.assembly.relax.credit
        assert error == built.assembly.relax.lead == 16
    assert ahead["learner"] == error
    assert error <= ahead["actors"] <= error + 1 + balance.rows_per_rollout


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 500))
@settings(max_examples=300)
def test_the_nearest_fit_for_uneven_rounds_fits_and_none_is_nearer(rows, actors, steps):
    told = uneven_rounds(rows, actors, steps)
    fits = [n for n in range(1, 2 * (steps + rows * actors))
            if uneven_rounds(rows, actors, n) is None]  # fmt: skip
    if told is None:
        assert steps % (rows * actors) == 0 or rows * actors % steps == 0
        return
    fit = int(re.search(r"that fits is (\d+)\.", told)[1])
    assert fit in fits
    assert abs(fit - steps) == min(abs(n - steps) for n in fits)


def test_a_config_names_a_preset_and_may_set_single_fields():
    assert given_relax(PPO) == PRESETS["tianji"](ON)
    for preset in ("sync", "periodic", "one_step", "bounded", "free"):
        assert given_relax(PPO, f"scale.relax={preset}") == PRESETS[preset](ON)
    overrides = ["scale.relax=bounded", "relax.lead=2", "relax.late=pass", "relax.publish=2",
                 "relax.max_staleness=5", "relax.take=boundary", "reuse.window=2"]  # fmt: skip
    assert given_relax(PPO, *overrides) == Relaxation(
        lead=2, late="pass", take="boundary", publish=2, max_staleness=5, window=2
    )
    assert given_relax(PPO, "relax.lead=inf").lead == math.inf
    assert given_relax(PPO, "reuse.window=4").max_staleness == 6
    assert given_relax(PPO, "scale.engine=serial").exact


def test_leads_of_presets_are_rounds_of_all_actors_for_replay():
    """One rollout of both actors is 32 steps, so 4 updates of 8."""
    assert given_relax(DQN, "scale.relax=one_step").lead == 4
    assert given_relax(DQN, "scale.relax=bounded").lead == 16
    assert given_relax(DQN).lead == 8
    assert given_relax(DQN, "algorithm.new_steps=64", "scale.relax=one_step").lead == 1


@pytest.mark.parametrize(
    ("config", "overrides", "told"),
    [
        (PPO, ["scale.relax=tianij"], "tianji"),
        (PPO, ["relax.lead=1.5"], "is no number of updates. Set a whole number, or inf"),
        (PPO, ["relax.lead=-1"], "at least 0"),
        (PPO, ["relax.late=later"], "one of wait, pass"),
        (PPO, ["relax.window=2"], "is no key of a config"),
        (PPO, ["reuse.window=0"], "at least 1"),
        (PPO, ["reuse.window=3"], "does not divide the 8 envs of a batch"),
        (PPO, ["scale.relax=sync", "relax.publish=4"], "Set relax.lead to 3 or more"),
        (PPO, ["scale.relax=sync", "relax.take=boundary"], 'Set relax.take = "barrier"'),
        (PPO, ["relax.max_staleness=0"], "Set relax.max_staleness to 1 or more"),
        (PPO, ["scale.relax=periodic", "reuse.window=2"], 'Set relax.start = "batch"'),
        (DQN, ["scale.relax=periodic"], 'Set scale.relax = "sync"'),
        (DQN, ["reuse.window=2"], "Set algorithm.capacity instead"),
        (DQN, ["relax.max_staleness=9"], "Leave it out"),
        (DQN, ["scale.relax=free", "scale.engine=serial"], 'Set scale.engine = "local"'),
        (DQN, ["scale.relax=sync", "algorithm.new_steps=5"], "that fits is 4"),
        (DQN, ["scale.relax=impala"], 'Set relax.correct = "none"'),
        (PPO, ["scale.relax=apex"], 'Set relax.explore = "alike"'),
        (PPO, ["scale.relax=reverb"], "Set relax.credit to 0"),
        (PPO, ["scale.relax=a3c"], "scale.groups to 2 or more"),
        (PPO, ["scale.relax=a3c", "scale.engine=serial"], 'Set scale.engine = "local"'),
        (PPO, ["scale.relax=gala"], "there is one, so it would do nothing"),
        (PPO, ["scale.relax=seed", "relax.lead=0"], "Set relax.lead to 1 or more"),
        (PPO, ["scale.relax=sync", "relax.infer=server"], "rollouts would be stale"),
        (PPO, ["scale.relax=seed", "relax.take=barrier"], 'Set relax.take = "boundary"'),
        (PPO, ["scale.relax=seed", "relax.max_batch=3"], "Set relax.max_batch to 4 or more"),
        (PPO, ["relax.max_batch=8"], "there is none, so it would do nothing"),
        (PPO, ["relax.max_wait=0.1"], "there is none, so it would do nothing"),
        (DQN, ["scale.relax=apex", "scale.actors=1"], "has one rung"),
        (DQN, ["scale.relax=apex", "scale.engine=serial"], 'Set scale.engine = "local"'),
    ],
)
def test_a_config_that_cannot_work_is_refused(config, overrides, told):
    with pytest.raises(Refusal, match=re.escape(told)):
        build(load_config(config, overrides))


def test_the_remedies_for_uneven_rounds_work_in_every_engine():
    for engine in ("serial", "local"):
        uneven = [f"scale.engine={engine}", "scale.relax=sync", "algorithm.new_steps=5"]
        with pytest.raises(Refusal) as refused:
            build(load_config(DQN, uneven))
        told = str(refused.value)
        fit = re.search(r"that fits is (\d+)", told)[1]
        build(load_config(DQN, [*uneven, f"algorithm.new_steps={fit}"])).close()
        named = [preset for preset in PRESETS if re.search(rf"\b{preset}\b", told)]
        assert named
        for preset in named:
            build(load_config(DQN, [*uneven, f"scale.relax={preset}"])).close()


def test_a_store_that_cannot_stream_or_window_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Plain(Once):
        traits = Traits(on_policy=True)

    from tianji.config import RelaxConfig
    from tianji.envs.toy import Identity

    config = config_for(Plain(2, None), relax=RelaxConfig(start="stream"))
    with pytest.raises(Refusal, match=re.escape("or use store.Fresh")):
        build(config, Identity)


def test_an_on_policy_update_of_less_than_a_round_is_one_step_ahead_all_the_same():
    """Two updates for each round of four actors: the lead is 1 update, not 2."""
    built, _ = Case(4, {}, rollouts=2, preset="one_step").build()
    assert built.assembly.relax.lead == 1


def test_the_table_of_the_page_is_what_the_presets_are():
    text = (Path(__file__).parents[1] / "docs" / "balance.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", text, re.MULTILINE)
    found = {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows
             if name in PRESETS}  # fmt: skip
    assert list(found) == list(PRESETS)
    more = ("credit", "infer", "correct", "explore", "hosts", "join")
    for name, cells in found.items():
        relax = PRESETS[name](Sizes(on_policy=name not in REPLAY_ONLY, alone=False))
        own = [f"{key} `{value}`" for key in more
               if (value := getattr(relax, key)) != getattr(Relaxation(), key)]  # fmt: skip
        if list(PRESETS).index(name) >= list(PRESETS).index("gorila"):
            assert cells.pop() == (", ".join(own) or "-"), name
        else:
            assert not own
        most = relax.max_staleness
        if most is None and (relax.late == "wait" or relax.lead == 0) and relax.join == "none":
            most = relax.lead
        assert cells == [
            "∞" if math.isinf(relax.lead) else f"{relax.lead:g}",
            f"`{relax.late}`",
            f"`{relax.take}`",
            f"`{relax.start}`",
            "none" if most is None else f"{most:g}",
            *relax.edges.values(),
        ], name
