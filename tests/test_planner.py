"""From a profile to a plan, and from a plan to a run."""

import dataclasses
import json
from pathlib import Path

import pytest
import tomli_w
from measured import CARTPOLE, REPLAY, a_profile, ask

import tianji
from tianji import planner, profiler, shape
from tianji import profile as profiles
from tianji.__main__ import main
from tianji.config import load_config
from tianji.errors import Refusal
from tianji.plan import Choice, Rates
from tianji.view.status import human

LOCAL = ["scale.engine=local"]
WORKING = {
    **CARTPOLE,
    "scale": {**CARTPOLE["scale"], "relax": "gala", "engine": "local", "groups": 2},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_plan_changes_nothing_of_what_is_learnt(monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 8)
    config = load_config(CARTPOLE)
    found = planner.make(config, a_profile(config))
    other = shape.spread(config, found.best.choice)
    scale = other.scale
    assert scale.engine == "local", "its env is slow"
    assert scale.actors > 1
    assert scale.actors * scale.envs_per_actor * scale.rollout_length == 64
    assert other.algorithm == config.algorithm


def test_more_cores_than_there_are_are_refused():
    config = load_config(CARTPOLE)
    with pytest.raises(Refusal, match="--cores 999 is more than"):
        planner.make(config, a_profile(config), cores=999)


def test_what_if_answers_from_the_model(monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    four, eight = (ask(config, profile, f"actors={n}", "envs=1").capacity["actors"] for n in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.01)
    wrongs = {
        "actors": "actors can be a whole number from 1 to 1,000",
        "actors=0": "from 1 to 1,000",
        "actors=x": "from 1 to 1,000",
        "actors=1001": "from 1 to 1,000",
        "actors=" + "9" * 5000: "from 1 to 1,000",
        "envs=1000001": "envs can be a whole number from 1 to 1,000,000",
        "colour=3": "colour is not one of these",
        "engine=ray": 'engine cannot be "ray"',
    }
    for wrong, words in wrongs.items():
        with pytest.raises(Refusal, match=f"cannot be asked: .*{words}"):
            planner.what_if(config, profile, [wrong], None)


def test_what_if_knows_that_a_batch_grows_with_what_is_consumed_once():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    rows = profile.task.rows
    batches = {rows // 2: 1.5e-3, rows: 2e-3, 2 * rows: 3e-3}
    known = dataclasses.replace(profile, batches=batches)
    one = ask(config, known, "actors=1")
    two = ask(config, known, "actors=2")
    assert two.capacity["learner"] / one.capacity["learner"] == pytest.approx(2 * 2e-3 / 3e-3)
    blind = ask(config, profile, "actors=2")
    assert blind.capacity["learner"] == pytest.approx(one.capacity["learner"], rel=0.01)


def test_what_if_lets_all_that_an_update_takes_grow_with_its_batch():
    """Also in one process, and what of it is done as rollouts arrive."""
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    rows = profile.task.rows
    known = dataclasses.replace(
        profile,
        rates=dataclasses.replace(profile.rates, inside={1: 4e-3}, take=1e-3),
        batches={rows: 2e-3, 2 * rows: 3e-3},
    )
    _, rates = planner._with_batch(known, Choice("local", 2, 8, 8))
    assert rates.learn[1] == pytest.approx(1.5 * known.rates.learn[1])
    assert rates.inside[1] == pytest.approx(1.5 * 4e-3)
    assert rates.take == pytest.approx(1.5 * 1e-3)
    _, same = planner._with_batch(known, Choice("local", 2, 4, 8))
    assert same == known.rates, "the same envs in other hands"


def test_what_if_of_learners_and_groups_needs_processes_of_their_own():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    groups = ask(config, profile, "groups=2")
    assert groups.choice.engine == "local"
    with pytest.raises(Refusal, match="2 learners take for an update is not known"):
        planner.what_if(config, profile, ["learners=2"], None)
    rates = dataclasses.replace(profile.rates, team={1: 1.0, 2: 0.6})
    known = dataclasses.replace(profile, rates=rates)
    assert ask(config, known, "learners=2").choice.learners == 2


def test_a_plan_for_a_server_needs_only_a_look():
    overrides = ["scale.relax=seed", "scale.engine=local", "algorithm.epochs=1"]
    config = load_config(CARTPOLE, [*overrides, "scale.actors=2", "scale.envs_per_actor=4"])
    found = profiler.look(config)
    assert found.rates.ask > 0
    assert found.rates.answer > 0
    planned = planner.make(config, found)
    assert planned.best.new > 0
    assert "knee" in planner.tree(planned, found)
    few = load_config(CARTPOLE, [*overrides, "scale.actors=2", "relax.max_batch=8"])
    assert profiler.look(few).task.max_batch == 8, "less than all envs, which the run begins with"


def test_a_plan_of_workers_has_one_on_every_core(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "cores_here", lambda: 4)
    overrides = ["scale.relax=a3c", "scale.engine=local", "scale.groups=2"]
    config = load_config(CARTPOLE, overrides)
    profile = a_profile(config)
    task = dataclasses.replace(profile.task, workers=True)
    profile = dataclasses.replace(profile, task=task)
    found = planner.make(config, profile)
    assert (found.best.choice.groups, found.best.choice.hosts) == (4, "worker")
    two = ask(config, profile, "groups=2")
    assert found.best.new == pytest.approx(2 * two.new)
    assert planner.make(config, profile, groups=3).best.choice.groups == 3
    with pytest.raises(Refusal, match="no way to spread"):
        planner.make(config, profile, groups=1)
    with pytest.raises(Refusal, match="cannot be asked of workers"):
        planner.what_if(config, profile, ["actors=3"], None)
    assert "knee" not in planner.tree(found, profile)
    assert "the knee" not in planner.told(found, profile, config, None)
    assert "one core more" in found.notes[0]
    assert "5 workers" in found.notes[0]
    planner.write(tmp_path / "plan.json", planner.tree(found, profile))
    followed, _ = planner.follow(config, tmp_path / "plan.json")
    assert followed.scale.groups == 4
    for other in ([], [*overrides, "scale.envs_per_actor=16"], [*overrides, "network.hidden=[8]"]):
        with pytest.raises(Refusal, match="was made for another config"):
            planner.follow(load_config(CARTPOLE, other), tmp_path / "plan.json")


def test_a_plan_keeps_the_groups_of_a_config(monkeypatch, cache, tmp_path):
    """Each has batches of its own, so that with fewer something else would be learnt."""
    several = ["scale.engine=local", "scale.groups=2", "relax.join=average", "join.every=3"]
    config = load_config(CARTPOLE, [*several, "scale.actors=auto"])
    profile = a_profile(config)
    profiles.save(profile, config)
    monkeypatch.setattr(planner, "cores_here", lambda: 8)
    followed, written = planner.follow(config, None)
    assert (followed.scale.groups, written["choice"]["groups"]) == (2, 2)
    for p in (found := planner.make(config, profile)).others:
        assert p.choice.groups == 2
    assert not any("--groups" in note for note in found.notes)
    assert planner.make(load_config(CARTPOLE), profile).best.choice.groups == 1
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    with pytest.raises(Refusal, match=r"has 2 groups.* need 4 cores, and there are 2") as raised:
        planner.make(config, profile)
    assert "--groups 1," in str(raised.value), "which is a way out:"
    found = planner.make(config, profile, groups=1)
    assert found.best.choice.groups == 1, "who has nobody to join"
    planner.write(tmp_path / "plan.json", planner.tree(found, profile))
    followed, _ = planner.follow(config, tmp_path / "plan.json")
    assert followed.scale.groups == 1
    assert followed.join.every is None
    assert tianji.train(followed, runs=tmp_path).updates == 3
    alone = load_config(CARTPOLE, ["scale.groups=2", "scale.engine=local"])
    assert planner.make(alone, profile, groups=1).best.choice.groups == 1


def test_a_run_with_auto_looks_itself_where_what_was_kept_cannot_be_read(cache, tmp_path, capsys):
    config = load_config(CARTPOLE, ["scale.actors=auto"])
    profiles.save(a_profile(config), config).write_text('{"format": 5}')
    result = tianji.train(CARTPOLE, ["scale.actors=auto"], runs=tmp_path)
    assert result.updates == 3
    told = capsys.readouterr().err
    assert f"no profile that can be read (its format is 5, not {profiles.FORMAT})" in told
    assert "a look of 2 s is in its place" in told
    assert "looking at run for 2 s, to plan it" in told
    assert not json.loads(Path(result.run_dir, "plan.json").read_text())["whole"]


def test_a_plan_from_elsewhere_says_so(tmp_path):
    config = load_config(CARTPOLE)
    found = planner.make(config, profile := a_profile(config))
    assert "elsewhere" not in planner.said(planner.tree(found, profile))
    there = dataclasses.replace(profile, facts=profile.facts | {"cpu": "Z80"})
    assert "but elsewhere (cpu: Z80, here" in planner.said(planner.tree(found, there))


def test_what_more_cores_than_were_measured_would_take_is_not_known():
    config = load_config(CARTPOLE)
    with pytest.raises(Refusal, match=r"8 cores of a learner .* not known.* at most 2"):
        planner.what_if(config, a_profile(config), ["cores=8"], None)


def test_auto_is_shown_as_such_and_counts_as_one_actor_until_it_is_planned():
    config = load_config(CARTPOLE, ["scale.actors=auto"])
    assert config.auto
    assert config.scale.actors == 1
    assert next(v for k, v, *_ in config.rows() if k == "scale.actors") == "auto"
    assert not shape.spread(config, Choice("serial", 1, 8, 8)).auto
    with pytest.raises(Refusal, match=r"scale\.actors = 'many'"):
        load_config(CARTPOLE, ["scale.actors=many"])


def test_auto_in_place_of_a_number_of_actors_shares_out_the_envs_of_all(tmp_path):
    several = {**CARTPOLE, "scale": {**CARTPOLE["scale"], "engine": "local", "actors": 4}}
    (tmp_path / "several.toml").write_text(tomli_w.dumps(several))
    for source in (several, tmp_path / "several.toml"):
        config = load_config(source, ["scale.actors=auto"])
        assert config.scale.actors * config.scale.envs_per_actor == 4 * 8
        row = next(row for row in config.rows() if row[0] == "scale.envs_per_actor")
        assert row[1] == 32
        assert row[2].endswith(", of 4 actors")
    assert several["scale"]["envs_per_actor"] == 8, "what was given is as it was"
    mine = load_config(several, ["scale.actors=auto", "scale.envs_per_actor=6"])
    assert mine.scale.envs_per_actor == 6, "of the whole run, as it is said"
    unsaid = {**several, "scale": {"engine": "local", "actors": 3, "rollout_length": 8}}
    known = load_config(unsaid).scale.envs_per_actor
    assert load_config(unsaid, ["scale.actors=auto"]).scale.envs_per_actor == 3 * known
    wrong = {**several, "scale": {**several["scale"], "envs_per_actor": "x"}}
    with pytest.raises(Refusal, match=r"scale\.envs_per_actor"):
        load_config(wrong, ["scale.actors=auto"])


def test_a_run_with_auto_looks_first_and_keeps_its_plan(tmp_path):
    result = tianji.train(CARTPOLE, ["scale.actors=auto"], runs=tmp_path)
    run = Path(result.run_dir)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["choice"]["actors"] * plan["choice"]["envs"] == 8
    assert plan["predicted"]["new"] > 0
    assert not plan["whole"]
    assert "tianji profile` would know better" in (run / "log.txt").read_text()
    kept = load_config(run / "config.toml")
    assert not kept.auto
    assert kept.scale.engine == plan["choice"]["engine"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["plan/predicted_sps"] == plan["predicted"]["new"]
    tianji.resume(run, ["stop.updates=6"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["updates"] == 6
    assert rows[-1]["plan/predicted_sps"] == plan["predicted"]["new"], "and when it goes on"
    again = tianji.train(CARTPOLE, runs=tmp_path, plan=run / "plan.json")
    assert again.updates == 3
    assert load_config(Path(again.run_dir) / "config.toml").scale == kept.scale


def test_a_plan_that_needs_more_cores_than_there_are_is_not_followed(tmp_path):
    path = tmp_path / "plan.json"
    choice = dataclasses.asdict(Choice("local", 999, 1, 8))
    path.write_text(json.dumps({"choice": choice, "predicted": {"new": 1.0}}))
    with pytest.raises(Refusal, match="wants 1000 cores"):
        tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    wrongs = {
        "[]": r"it is \[\], no table", "{}": 'has no "choice"', "nonsense": "no JSON",
        json.dumps({"choice": choice}): 'has no "predicted"',
        '{"choice": {}, "predicted": {"new": 1}}': 'it has no "choice.engine"',
        json.dumps({"choice": choice, "predicted": {"new": "many"}}): "new is 'many', no number",
        json.dumps({"choice": choice, "predicted": {"new": 0}}): "predicted.new is 0, no number",
        json.dumps({"choice": choice, "predicted": {"new": 10**400}}): "predicted.new is 1000",
        json.dumps({"choice": choice, "predicted": {"old": 1}}): 'it has no "predicted.new"',
        json.dumps({"choice": choice, "predicted": {"new": 1}, "facts": None}):
            "facts is None, no table",
        json.dumps({"choice": choice, "predicted": 7}): "predicted is 7, no table",
        json.dumps({"choice": choice | {"cats": 2}, "predicted": {"new": 1}}):
            '"choice.cats" is unknown here',
        json.dumps({"choice": choice | {"engine": "ray"}, "predicted": {"new": 1}}):
            "choice.engine is 'ray', not serial or local",
        json.dumps({"choice": choice | {"actors": 0}, "predicted": {"new": 1}}):
            "choice.actors is 0, no whole number from 1",
    }  # fmt: skip
    for wrong, words in wrongs.items():
        path.write_text(wrong)
        with pytest.raises(Refusal, match=f"no plan that can be read .*{words}"):
            tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    with pytest.raises(Refusal, match="No such file"):
        tianji.train(CARTPOLE, runs=tmp_path, plan=tmp_path / "none.json")


def test_a_plan_that_was_edited_is_not_followed(tmp_path):
    config, path = load_config(CARTPOLE), tmp_path / "plan.json"
    written = planner.tree(planner.make(config, a_profile(config)), a_profile(config))
    for changed in ({"envs": 7}, {"engine": "serial", "actors": 3}):
        choice = dict(written["choice"]) | {"engine": "serial", "actors": 1, "envs": 16} | changed
        path.write_text(json.dumps(written | {"choice": choice}))
        with pytest.raises(Refusal, match=r"would let an update follow \d+ steps .* instead of"):
            tianji.train(CARTPOLE, runs=tmp_path, plan=path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("followed", ["plan", "auto"])
def test_what_is_asked_for_beside_a_plan_is_not_dropped(tmp_path, followed):
    config = load_config(CARTPOLE, ["scale.actors=auto"] if followed == "auto" else [])
    profile = a_profile(config)
    profiles.save(profile, config)
    found = planner.make(config, profile)
    path = tmp_path / "plan.json"
    planner.write(path, planner.tree(found, profile))
    other = "serial" if found.best.choice.engine == "local" else "local"
    plan = path if followed == "plan" else None
    mine = ["scale.actors=auto"] if followed == "auto" else []
    with pytest.raises(Refusal, match=rf"scale.engine = {other} is asked for and the plan says"):
        tianji.train(CARTPOLE, [*mine, f"scale.engine={other}"], runs=tmp_path, plan=plan)
    same = f"scale.engine={found.best.choice.engine}"
    assert tianji.train(CARTPOLE, [*mine, same], runs=tmp_path, plan=plan).updates == 3


def test_where_no_way_is_possible_the_reason_is_told():
    config = load_config(CARTPOLE, ["scale.rebalance=true"])
    with pytest.raises(
        Refusal, match=r"need 3 cores in each group, and there are 1, .*rebalance = f"
    ):
        planner.make(config, a_profile(load_config(CARTPOLE)), 1)


def test_a_run_that_rebalances_is_planned_with_actors_of_which_some_may_rest(monkeypatch):
    config = load_config(CARTPOLE, [*LOCAL, "scale.rebalance=true", "scale.actors=2"])
    monkeypatch.setattr(planner, "cores_here", lambda: 4)
    profile = a_profile(config)
    assert profile == a_profile(load_config(CARTPOLE, [*LOCAL, "scale.actors=2"]))
    found = planner.make(config, profile)
    ways = [p.choice for p in (found.best, *found.others)]
    assert min(way.actors for way in ways) == 2
    assert {way.engine for way in ways} == {"local"}


def test_a_plan_gives_an_actor_one_core_and_so_refuses_several_threads():
    threads = {"id": "ALE/Pong-v5"}
    config = load_config({**CARTPOLE, "env": threads}, ["scale.env_threads=2"])
    with pytest.raises(Refusal, match=r"env_threads = 2 .* a plan gives each one core"):
        planner.check(config, None, [])


def test_what_a_config_sets_and_a_plan_replaces_is_told(tmp_path):
    profile = a_profile(load_config(CARTPOLE))
    config = load_config(CARTPOLE, ["scale.engine=local", "scale.cores=2"])
    planner.write(tmp_path / "plan.json", planner.tree(planner.make(config, profile), profile))
    tree = json.loads((tmp_path / "plan.json").read_text())
    tree["choice"] |= {"engine": "serial", "actors": 1, "envs": 8, "cores": 1}
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    _, written = planner.follow(config, tmp_path / "plan.json")
    assert written["replaced"] == {"engine": "local", "cores": 2}
    assert "in place of scale.engine = local, scale.cores = 2" in planner.said(written)
    _, written = planner.follow(load_config(CARTPOLE), tmp_path / "plan.json")
    assert "in place of" not in planner.said(written)
    shared = load_config(CARTPOLE, ["scale.actors=2", "scale.envs_per_actor=4",
                                    "scale.engine=local"])  # fmt: skip
    _, written = planner.follow(shared, tmp_path / "plan.json")
    assert written["replaced"] == {"engine": "local"}, "the same envs in other hands"


@pytest.mark.parametrize(
    ("tree", "overrides", "changes", "told"),
    [
        (CARTPOLE, [], ["rollout_length=16", "envs=4"], "rollouts would have 16 steps of each env"),
        (CARTPOLE, [], ["actors=2"], "an update would follow 128 steps instead of 64"),
        (CARTPOLE, [], ["groups=2"], "every group has batches of its own"),
        (CARTPOLE, ["scale.groups=2", "scale.engine=local"], ["groups=1"], "every group has"),
        (WORKING, [], ["envs=32"], "an update would follow 256 steps instead of 64"),
        (REPLAY, [], ["envs=6000"], "such a run would be refused: algorithm.warmup = 5000"),
        (
            CARTPOLE,
            [],
            ["envs=16"],
            "an update would follow 128 steps instead of 64, which changes",
        ),
        (CARTPOLE, [], ["actors=2", "envs=4"], None),
        (REPLAY, [], ["actors=2"], None),
        (WORKING, [], ["groups=3"], None),
    ],
)
def test_what_if_says_what_would_be_learnt_otherwise(tree, overrides, changes, told, monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 4)
    config = load_config(tree, overrides)
    profile = a_profile(config)
    task = dataclasses.replace(profile.task, workers=tree is WORKING)
    profile = dataclasses.replace(profile, task=task)
    notes = planner.what_if(config, profile, changes, None).notes
    assert len(notes) == (told is not None)
    assert told is None or notes[0].startswith(told)
    assert "changes what is learnt" in " ".join(notes) or told is None or "refused" in told
    hint = "--what-if envs=4 shares the same envs"
    assert (hint in " ".join(notes)) == (changes == ["actors=2"] and tree is CARTPOLE)


def test_what_if_says_that_it_answers_as_if_there_were_more_cores(monkeypatch):
    monkeypatch.setattr(planner, "cores_here", lambda: 2)
    config = load_config(REPLAY)
    (note,) = planner.what_if(config, a_profile(config), ["actors=3"], None).notes
    assert note.startswith("this is as if there were 4 cores: on the 2 that there are, roles would")
    assert planner.what_if(config, a_profile(config), ["actors=1"], None).notes == ()


def test_one_process_may_be_asked_about_with_several_actors():
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    several = ask(config, profile, "engine=serial", "actors=2")
    assert several.choice.engine == "serial"
    assert several.choice.actors == 2
    with pytest.raises(Refusal, match="engine=serial is one process"):
        planner.what_if(config, profile, ["engine=serial", "groups=2"], None)


def test_figures_of_a_profile_do_not_contradict_each_other():
    """Updates take longer in a process of their own; batches were measured in one that acts."""
    config = load_config(CARTPOLE)
    profile = a_profile(config)
    batch = profile.task.batch
    rates = dataclasses.replace(profile.rates, inside={1: 1e-3})
    batches = {batch // 2: 0.6e-3, batch: 1e-3, 2 * batch: 1.8e-3}
    told = profiles.told(dataclasses.replace(profile, rates=rates, batches=batches))
    assert f"{batch:>6} steps: 2 ms" in told, "as the learner takes, in the lines above"
    quick = Rates(
        act={16: 1e-5}, begin=0.0, send=0.0, receive=1e-9, serve=1e-9, learn={1: 2e-2}, take=0.0,
        wake=0.0, slow_act={1: 1.0}, slow_learn={1: 1.0}, inside={1: 1e-2},
    )  # fmt: skip
    plan = planner.make(config, dataclasses.replace(profile, rates=quick))
    assert plan.best.consumed == plan.best.new, "each step is consumed once"
    (note,) = (note for note in plan.notes if "cannot be balanced" in note)
    follows = profile.task.rows / 1e-2
    assert f"follows {human(follows)}" in note, "as in one process, where updates are quicker"


def test_the_plan_on_the_command_line(tmp_path, capsys):
    config = load_config("ppo_cartpole")
    profile = a_profile(config)
    profiles.save(profile, config)
    assert main(["plan", "ppo_cartpole"]) == 0
    said = capsys.readouterr().out
    for word in ("plan  ", "predicted", "binding", "more actors", "the knee", "(Tc)", "next best"):
        assert word in said
    assert main(["plan", "ppo_cartpole", "--json", "--save", str(tmp_path / "p.json")]) == 0
    tree = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"predicted", "choice", "binding", "alternatives"} <= tree.keys()
    assert json.loads((tmp_path / "p.json").read_text())["choice"] == tree["choice"]
    assert main(["plan", "ppo_cartpole", "--save", str(tmp_path / "nowhere" / "p.json")]) == 2
    assert "Choose another place with --save" in capsys.readouterr().err
    assert main(["plan", "ppo_cartpole", "--save", str(tmp_path / "p.json")]) == 0
    assert f"--plan {tmp_path / 'p.json'} follows it" in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "actors=16"]) == 0
    asked = capsys.readouterr().out
    assert "16 actors with 64 envs each, a learner with 1 core (17 cores)" in asked
    assert ("as if there were 17 cores" in asked) == (profile.facts["cores"] < 17)
    assert "an update would follow 32,768 steps instead of 2,048" in asked
    assert "--what-if envs=4 shares the same envs" in asked
    more = ["--what-if", "actors=16", "--what-if", "envs=4"]
    assert main(["plan", "ppo_cartpole", *more]) == 0
    assert "instead of" not in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "groups=2", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tree["notes"][0] == "every group has batches of its own, which changes what is learnt"
    assert tree["cores"] == 4
    assert main(["plan", "ppo_cartpole", "--what-if", "rollout_length=64"]) == 0
    assert "one process: 64 envs, rollouts of 64 steps (1 core)" in capsys.readouterr().out
    assert main(["plan", "ppo_cartpole", "--what-if", "engine=serial"]) == 0
    asked = capsys.readouterr().out
    assert "(1 core)" in asked
    assert "instead of" not in asked
    assert main(["plan", "ppo_cartpole", "--what-if", "actors=2", "--save", "p.json"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err
    assert main(["plan", "ppo_cartpole", "--cores", "999"]) == 2
    assert "--what-if actors=998" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--cores", "999"], "is more than"),
        (["--what-if", "actor=3"], "cannot be asked"),
        (["--what-if", "actors=16,envs=4"], "to change several, give --what-if for each"),
        (["--what-if", "actors=2", "--what-if", "actors=3"], "actors is asked more than once"),
        (["--what-if", "actors=3", "--cores", "1"], "needs 4 cores and --cores says 1"),
        (["--what-if", "engine=serial", "--what-if", "groups=2"], "Ask engine=local"),
        (["--what-if", "actors=2", "--groups", "2"], "Ask --what-if groups=2"),
        (["--again", "--profile", "p.json"], "--again measures"),
    ],
)
def test_what_could_not_be_answered_is_refused_before_anything_is_measured(
    asked, told, capsys, monkeypatch
):
    monkeypatch.setattr("tianji.__main__._measured", lambda config: pytest.fail("it measures"))
    assert main(["plan", "ppo_cartpole", *asked]) == 2
    assert told in capsys.readouterr().err
