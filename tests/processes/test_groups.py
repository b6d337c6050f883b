"""Several learners of a group, several groups, and workers: in processes, as a user runs them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from local_runs import (
    DQN,
    FAULT,
    LOCAL,
    PPO,
    belongings,
    beside,
    fault,
    hosts_of,
    learnt,
    metrics,
    parent,
    train,
    until,
    updates_of,
)

import tianji
from tianji import Failure, Refusal
from tianji.__main__ import main
from tianji.build import assembly
from tianji.checkpoint import Checkpoints
from tianji.config import load_config

WHOLE = {**PPO, "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 1}}
"""several learners have the same minibatches as one alone only where there is one"""
ENDLESS = "stop.updates=1000000000"
TWO, GROUPS = "scale.learners=2", "scale.groups=2"
WORKERS = "scale.groups=3", "scale.actors=1"


@pytest.fixture(scope="module", autouse=True)
def _first(one_server, told_soon, tmp_path_factory):
    """What the first run of a process leaves in it for good is left by this one."""
    train(PPO, tmp_path_factory.mktemp("runs"), LOCAL, "stop.updates=1")


@pytest.fixture(autouse=True)
def _nothing_left(one_server, monkeypatch, tmp_path):
    """Afterwards there is no host, descriptor, thread, handler or limit that was not before."""
    monkeypatch.chdir(tmp_path)
    before = belongings()
    yield
    end = time.monotonic() + 5  # a process that was killed may still be on its way out
    while (left := children(one_server.pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []
    assert belongings() == before
    for name in ("hosts.json", "team-*"):
        assert list(tmp_path.rglob(name)) == []


def children(pids):
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if parent(path.name) in pids:
                    found.append(int(path.name))
    return found


def parts_of(result):
    """Of the newest checkpoint."""
    folder = Path(result.run_dir)
    identity = load_config(folder / "config.toml").identity()
    return Checkpoints(folder / "checkpoints", 3, identity).load("latest").parts


def trainers(result):
    """The first learners' parts of the newest checkpoint, by group."""
    parts = parts_of(result)
    names = sorted(name for name in parts if name.startswith("trainer"))
    return [parts[name] for name in names]


def optimizer(learner):
    (state,) = learner["trainer"]["optimizers"].values()
    return state


def weights(learner):
    parameters = optimizer(learner)["parameters"]
    return np.concatenate([np.ravel(array) for array in parameters.values()])


def spread(result):
    """How far the groups' weights are apart, at most."""
    each = np.stack([weights(learner) for learner in trainers(result)])
    return float((each.max(0) - each.min(0)).max())


def log_of(folder):
    path = folder / "log.txt"
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def ending():
    """Whatever happens in here, the run that is under way is told to end afterwards."""
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)


def rises(rows, *names):
    """Are these columns monotone, in the rows that have them?"""
    for name in names:
        column = [row[name] for row in rows if name in row]
        if not column or column != sorted(column):
            return False
    return True


# Several learners of a group


@pytest.mark.parametrize(
    ("config", "argv"),
    [
        (WHOLE, ["stop.updates=20"]),
        (DQN, []),
        (WHOLE, ["scale.relax=periodic"]),
        (WHOLE, ["reuse.window=2", "stop.updates=20"]),
    ],
    ids=["ppo", "dqn", "stream", "window"],
)
def test_two_learners_learn_and_tell_what_one_does(config, argv, tmp_path):
    """Sums of gradients are rounded in another order, 1e-7 of weights that are about 1."""
    one = train(config, tmp_path, *argv)
    two = train(config, tmp_path, *argv, TWO, LOCAL)
    still = train(config, tmp_path, *argv, "algorithm.learning_rate=1e-12")
    (expected,), (found,), (begin,) = trainers(one), trainers(two), trainers(still)
    assert np.abs(weights(expected) - weights(begin)).max() > 3e-3, "nothing was learnt"
    np.testing.assert_allclose(weights(found), weights(expected), rtol=0, atol=2e-6)
    told, expected = learnt(two), learnt(one)
    assert told.pop("params_sha256") != expected.pop("params_sha256")
    assert told == expected, "updates, steps, consumed and staleness are of the whole batch"


@pytest.mark.parametrize("config", [WHOLE, DQN], ids=["ppo", "dqn"])
def test_checkpoints_of_several_learners_change_nothing_and_are_gone_on_from_exactly(
    config, tmp_path
):
    updates = config["stop"]["updates"]
    whole = train(config, tmp_path, TWO, LOCAL)
    often = [f"checkpoint.every={updates // 4}", "checkpoint.keep=9", f"stop.updates={updates - 1}"]
    half = train(config, tmp_path, TWO, LOCAL, *often)
    assert len(list(Path(half.run_dir, "checkpoints").glob("step_*"))) == 4
    rest = tianji.resume(half.run_dir, [f"stop.updates={updates}"])
    assert rest.resumed == "exact"
    assert learnt(rest) == learnt(whole)


def test_several_learners_that_are_told_to_end_rest_together_and_go_on_exactly(tmp_path):
    def end():
        with ending():
            hosts = hosts_of(tmp_path / "run")
            assert {"learner", "learner-1"} < set(hosts)

    with beside(end):
        result = train(WHOLE, tmp_path, TWO, LOCAL, ENDLESS, name="run")
    assert result.status == "stopped"
    end = result.updates + 3
    rest = tianji.resume(tmp_path / "run", [f"stop.updates={end}"])
    assert (rest.resumed, rest.updates) == ("exact", end)
    assert learnt(rest) == learnt(train(WHOLE, tmp_path, TWO, LOCAL, f"stop.updates={end}"))


@pytest.mark.parametrize("role", ["learner-1", "learner"])
def test_a_run_recovers_from_the_death_of_one_of_its_learners(role, tmp_path):
    """The other one loses its team, which is a consequence and not told as the cause."""
    folder = tmp_path / "run"

    with killing(folder, role, "went on from"):
        result = train(WHOLE, tmp_path, TWO, LOCAL, ENDLESS, "checkpoint.every=5", name="run")
    assert (result.status, result.notes["recoveries"]) == ("stopped", 1)
    (told,) = [line for line in log_of(folder).splitlines() if "went on from" in line]
    assert f" {role}: its process (pid " in told
    assert "was killed by SIGKILL" in told
    assert f"{result.notes['updates_lost']} updates were lost" in told
    assert result.notes["updates_lost"] < 20
    assert rises(metrics(result), "step", "updates")


@pytest.mark.slow
def test_what_two_learners_know_is_saved_though_an_env_hangs(tmp_path):
    """They cannot agree after an update that never comes; the second one's state is the first's."""
    config = fault(who="actor-1", what="hang", at=44)
    argv = TWO, "stop.seconds=1", "faults.grace=1"
    result = train(config, tmp_path, *argv)
    assert (result.stop_reason, result.updates) == ("seconds >= 1", 5)
    rest = tianji.resume(result.run_dir, ["stop.seconds=1000", "stop.updates=8"])
    assert rest.updates == 8


@pytest.mark.slow
def test_a_first_update_that_takes_longer_than_learners_wait_for_each_other_is_no_failure(tmp_path):
    result = train(fault({"sleep": 62.0}, stop={"updates": 1}), tmp_path, TWO)
    assert (result.updates, result.notes) == (1, {})


# Several groups


def check_sums(result, groups, paced=True):
    """A run's counts are those of all of its groups. Where production is not `paced`, actors go on
    after the last report, for as long as the others take to come to rest."""
    parts, learners = parts_of(result), trainers(result)
    assert len(learners) == groups
    assert result.updates == sum(learner["version"] for learner in learners)
    buffers = [parts[f"run_{g}" if g else "run"]["buffer"] for g in range(groups)]
    more = sum(buffer["received"] for buffer in buffers) - result.steps
    assert more >= 0
    assert more <= 200 * groups or not paced
    assert result.steps == sum(learner["received"] for learner in learners)
    consumed = sum(learner["consumed"] for learner in learners)
    assert result.replay_ratio == pytest.approx(consumed / result.steps, rel=1e-6)
    assert min(learner["version"] for learner in learners) > 0


@pytest.mark.parametrize(
    ("config", "relax", "groups", "updates"),
    [
        (PPO, "sync", 3, 80),
        (PPO, "tianji", 2, 60),
        (PPO, "free", 2, 60),
        (DQN, "sync", 2, 80),
        (DQN, "tianji", 3, 80),
        pytest.param(DQN, "free", 3, 200, marks=pytest.mark.slow),
        pytest.param(PPO, "seed", 2, 60, marks=pytest.mark.slow),
    ],
)
def test_groups_learn_together_and_their_counts_are_summed(
    config, relax, groups, updates, tmp_path
):
    argv = [f"scale.groups={groups}", f"scale.relax={relax}", f"stop.updates={updates}"]
    often = ["eval.every=15", "eval.episodes=2", "checkpoint.every=25"]
    result = train(config, tmp_path, *argv, *often, LOCAL, name="run")
    assert result.updates >= updates
    check_sums(result, groups, paced=relax != "free")
    rounds = [learner["mixer"]["round"] for learner in trainers(result)]
    assert max(rounds) - min(rounds) <= 1
    if relax == "sync":
        assert min(rounds) >= 1
        for learner in trainers(result):  # nobody is ahead of a round by more than 10 updates
            done, version = learner["mixer"]["round"], learner["version"]
            assert 10 * done <= version <= 10 * (done + 1)
    rows = metrics(result)
    evaluated = [row for row in rows if "eval/mean_reward" in row]
    assert evaluated
    assert rises(evaluated, "step", "updates")
    assert rises([row for row in rows if row not in evaluated], "step", "updates")
    names = {path.stem for path in (tmp_path / "run" / "logs").iterdir()}
    assert {"g0.evaluator", *(f"g{g}.actor-1" for g in range(groups))} < names
    assert "g1.evaluator" not in names
    for group in range(groups):  # whoever joins others depends on when they are done
        assert len(tianji.arrivals(result.run_dir, group)) > 0


@contextlib.contextmanager
def by_itself(seconds=30.0):
    """A run that stands still is told to end, and that is a failure."""
    told = threading.Event()

    def end():
        told.set()
        os.kill(os.getpid(), signal.SIGTERM)

    waiting = threading.Timer(seconds, end)
    waiting.start()
    yield
    waiting.cancel()
    waiting.join()
    assert not told.is_set(), "it stood still"


def test_groups_with_several_learners_each_save_while_one_group_waits_for_the_other(tmp_path):
    """The second group is slower, so that the first one waits for its model when it is to rest."""
    config = fault(who="g1.actor", sleep=0.06, stop={"updates": 10})
    argv = TWO, GROUPS, "join.every=1", "checkpoint.every=1", "faults.grace=60"
    with by_itself():
        result = train(config, tmp_path, *argv)
    assert result.updates >= 10
    check_sums(result, 2)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({"steps": 30_000}, "steps >="),
        ({"seconds": 1.0}, "seconds >="),
        ({"return": 0.5}, "return"),
    ],
    ids=["steps", "seconds", "return"],
)
def test_groups_end_by_what_all_of_them_have_done(stop, reason, tmp_path):
    result = train({**PPO, "stop": stop}, tmp_path, GROUPS, LOCAL, "scale.relax=tianji")
    assert result.stop_reason.startswith(reason)
    if "steps" in stop:  # one group alone would need twice as long
        assert 30_000 <= result.steps < 45_000
    check_sums(result, 2)


def test_each_group_goes_on_with_a_model_of_its_own(tmp_path, capsys):
    """After ten updates nothing changes any more, so models must be the very same later."""
    config = fault({"learns": 10}, stop={"updates": 60})
    argv = GROUPS, "scale.relax=free", "join.every=1000", "checkpoint.every=20"
    half = train(config, tmp_path, *argv)
    before = [weights(learner) for learner in trainers(half)]
    assert min(learner["version"] for learner in trainers(half)) >= 10
    assert spread(half) > 1e-4, "the groups have one model, so that nothing is tested"
    rest = tianji.resume(half.run_dir, [f"stop.updates={half.updates + 10}"])
    assert rest.resumed == "exact"
    for old, new in zip(before, trainers(rest), strict=True):
        np.testing.assert_array_equal(old, weights(new))
    trained = tianji.load(rest.run_dir)
    assert trained.version == trainers(rest)[0]["version"]
    assert len(trained.evaluate(3)) == 3
    assert main(["eval", rest.run_dir, "--episodes", "2"]) == 0
    assert "2 episodes" in capsys.readouterr().out


def killing(folder, role, told, more=5):
    """Kill a role once the run goes on, and end it when it has got over that."""

    def kill():
        with ending():
            hosts = hosts_of(folder)
            until(lambda: updates_of(folder) > 20)  # with a checkpoint, where they are made
            os.kill(hosts[role], signal.SIGKILL)
            until(lambda: told in log_of(folder))
            before = updates_of(folder)
            until(lambda: updates_of(folder) > before + more)

    return beside(kill)


@pytest.mark.parametrize(
    ("role", "counted", "told"),
    [
        ("g1.actor-0", "restarts", "g1.actor-0 restarted"),
        ("g1.learner", "recoveries", "went on from checkpoint"),
        pytest.param("g0.learner", "recoveries", "went on from", marks=pytest.mark.slow),
        pytest.param("g1.buffer", "recoveries", "went on from where", marks=pytest.mark.slow),
    ],
)
def test_a_process_of_a_group_dies_and_the_run_goes_on(role, counted, told, tmp_path):
    folder = tmp_path / "run"
    argv = GROUPS, "scale.relax=tianji", LOCAL, ENDLESS, "checkpoint.every=10"
    with killing(folder, role, told):
        result = train(PPO, tmp_path, *argv, name="run")
    assert (result.status, result.notes[counted]) == ("stopped", 1)
    assert f"{role}: its process (pid " in log_of(folder)
    assert rises(metrics(result), "step", "updates")
    if counted == "recoveries":
        assert f"{result.notes['updates_lost']} updates were lost" in log_of(folder)
    check_sums(result, 2)


def test_groups_that_begin_with_different_weights_are_refused(tmp_path):
    with pytest.raises(Refusal, match=r"different weights \(g0.learner \w{8}, g1.learner .*'init'"):
        train(fault({"begins_apart": True}), tmp_path / "runs", GROUPS)
    assert list((tmp_path / "runs").iterdir()) == []


def stopping(folder, role, more, also=lambda: None, first=lambda: None):
    """Stop a role for a while, in which the others must make so many updates; then end the run."""

    def stop():
        with ending():
            pid = hosts_of(folder)[role]
            first()
            os.kill(pid, signal.SIGSTOP)
            try:
                before = updates_of(folder)
                until(lambda: updates_of(folder) >= before + more)
                also()
            finally:
                os.kill(pid, signal.SIGCONT)

    return beside(stop)


@pytest.mark.parametrize(
    ("config", "every"), [(PPO, 100), pytest.param(DQN, 1000, marks=pytest.mark.slow)]
)
def test_free_groups_do_not_wait_for_one_that_stands_still(config, every, tmp_path):
    """Not even where it is time to save: after the grace time they go on."""
    folder = tmp_path / "run"
    often = f"checkpoint.every={every}", "faults.grace=0.5"
    argv = GROUPS, "scale.relax=free", LOCAL, ENDLESS, *often

    def not_saved():
        until(lambda: "not saved: " in log_of(folder))
        before = updates_of(folder)
        until(lambda: updates_of(folder) > before)

    def saved():
        """One that is stopped while it is saved has a minute to answer."""
        until(lambda: "checkpoint step" in log_of(folder))

    with stopping(folder, "g1.learner", 20, not_saved, saved):
        result = train(config, tmp_path, *argv, name="run")
    assert result.status == "stopped"
    assert result.notes["checkpoints_not_saved"] >= 1
    assert tianji.resume(folder, [f"stop.updates={result.updates + 5}"]).updates > result.updates


def test_an_evaluation_that_is_due_twice_for_one_version_is_waited_for_once(tmp_path):
    """The first group is slow, so that the counts of both call for several while it has nothing
    new to show."""
    config = fault(who="g0.actor", sleep=0.15, length=1)
    argv = GROUPS, "scale.relax=free", "eval.every=2", "eval.episodes=1", "stop.updates=40"
    with by_itself():
        result = train(config, tmp_path, *argv, name="run")
    evaluated = [row for row in metrics(result) if "eval/mean_reward" in row]
    assert rises(evaluated, "step", "updates")
    assert all(row["step"] > 0 for row in evaluated)


def test_hosts_of_groups_are_listed_by_their_names(tmp_path):
    folder, listed = tmp_path / "run", []

    def look():
        with ending():
            hosts_of(folder)
            told = subprocess.run(
                [sys.executable, "-m", "tianji", "ps", str(folder), "--json"],
                capture_output=True, text=True, check=True, env=os.environ
                | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            listed.extend(row["role"] for row in json.loads(told.stdout))

    with beside(look):
        train(PPO, tmp_path, GROUPS, "scale.actors=1", LOCAL, ENDLESS, name="run")
    assert listed == [f"g{g}.{role}" for g in range(2) for role in ("actor-0", "buffer", "learner")]


# Workers


@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_of_a3c_step_one_set_of_parameters(workers, tmp_path):
    argv = f"scale.groups={workers}", "scale.actors=1", "scale.relax=a3c", LOCAL
    result = train(PPO, tmp_path, *argv, "stop.updates=40", "eval.every=10", name="run")
    check_sums(result, workers)
    assert spread(result) == 0.0, "at rest nothing is in flight"
    steps = 4 * result.updates  # 2 epochs of 2 minibatches; without locks, a few may be lost
    found = [float(optimizer(x)["moments"]["steps"]) for x in trainers(result)]
    assert all(0.9 * steps <= count <= steps for count in found)
    names = {path.stem for path in (tmp_path / "run" / "logs").iterdir()}
    assert names == {"g0.evaluator", *(f"g{g}.worker" for g in range(workers))}
    rest = tianji.resume(result.run_dir, [f"stop.updates={result.updates + 20}"])
    assert rest.resumed == "inexact: store not saved, envs reset"
    check_sums(rest, workers)
    more = float(optimizer(trainers(rest)[0])["moments"]["steps"]) - found[0]
    assert 0.9 * 4 <= more / (rest.updates - result.updates) <= 4
    assert np.abs(weights(trainers(rest)[0]) - weights(trainers(result)[0])).max() < 0.1


def test_workers_that_gossip_stay_together_and_become_one_when_they_stop_learning(tmp_path):
    config = fault({"learns": 10}, stop={"updates": 30})
    argv = *WORKERS, "scale.relax=gala"
    first = train(config, tmp_path, *argv)
    assert spread(first) < 0.1
    rest = tianji.resume(first.run_dir, ["stop.updates=200"])
    check_sums(rest, 3)
    assert min(learner["version"] for learner in trainers(rest)) > 20
    assert spread(rest) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("relax", ["a3c", "gala"])
def test_workers_train_to_the_target(relax, tmp_path):
    config = {
        **PPO,
        "env": {"id": "toy/Identity"},
        "algorithm": {"name": "ppo", "epochs": 1, "learning_rate": 2e-2, "gamma": 0.0},
        "network": {"hidden": [16]},
        "scale": {"actors": 1, "groups": 2, "envs_per_actor": 8, "rollout_length": 16},
        "stop": {"return": 15.0, "updates": 3000},
    }
    result = train(config, tmp_path, f"scale.relax={relax}", LOCAL)
    assert result.stop_reason.startswith("return")


@pytest.mark.parametrize("relax", ["a3c", "gala"])
def test_the_death_of_a_worker_costs_a_recovery(relax, tmp_path):
    folder = tmp_path / "run"
    argv = *WORKERS, f"scale.relax={relax}", LOCAL, ENDLESS, "checkpoint.every=10"
    with killing(folder, "g1.worker", "went on from checkpoint"):
        result = train(PPO, tmp_path, *argv, name="run")
    assert (result.status, result.notes["recoveries"]) == ("stopped", 1)
    assert "g1.worker: its process (pid " in log_of(folder)
    assert rises(metrics(result), "step", "updates")
    check_sums(result, 3)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("segv", "killed by SIGSEGV"),
        pytest.param("hang", "it hangs: no step ended for", marks=pytest.mark.slow),
    ],
)
def test_an_env_that_crashes_or_hangs_in_a_worker_costs_a_recovery(what, words, tmp_path):
    """It does so in every life of that worker, so that the run fails in the end, and says why."""
    config = fault(who="g1.worker", what=what, at=100)
    argv = "scale.groups=2", "scale.actors=1", "scale.relax=a3c", "faults.recoveries=1"
    with pytest.raises(Failure, match=f"g1.worker failed: .*{words}"):
        train(config, tmp_path, *argv, "faults.hang=1", "checkpoint.every=10", name="run")
    log = log_of(tmp_path / "run")
    assert "went on from" in log  # a checkpoint, if there was one by then
    assert words in log


def test_workers_of_a3c_do_not_wait_for_one_that_stands_still(tmp_path):
    folder = tmp_path / "run"
    with stopping(folder, "g1.worker", 60):
        result = train(PPO, tmp_path, *WORKERS, "scale.relax=a3c", LOCAL, ENDLESS, name="run")
    assert result.status == "stopped"


def test_workers_that_gossip_wait_for_one_that_stands_still_once_their_patience_is_over(tmp_path):
    """On a ring of three, with patience for five updates; afterwards they go on."""
    folder, made = tmp_path / "run", []

    def look():
        with ending():
            pid = hosts_of(folder)["g1.worker"]
            until(lambda: updates_of(folder) > 20)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1)  # rows are written five times a second
            made.append(updates_of(folder))
            time.sleep(1)
            made.append(updates_of(folder))
            os.kill(pid, signal.SIGCONT)
            until(lambda: updates_of(folder) > made[-1] + 20)

    argv = *WORKERS, "scale.relax=gala", "join.patience=5", LOCAL, ENDLESS
    with beside(look):
        result = train(PPO, tmp_path, *argv, name="run")
    assert made[0] == made[1]
    check_sums(result, 3)


# What is refused

A3C, GALA = "scale.relax=a3c", "scale.relax=gala"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("scale.learners=0", ["scale.learners = 0", "at least 1"]),
        ("scale.learners=65", ["scale.learners = 65", "at most 64"]),
        ("scale.learners=two", ["scale.learners", "whole number"]),
        ("scale.learners=3", ["does not divide the 2", "Set scale.learners = 2"]),
        ("scale.learners=2 scale.engine=serial", ["needs processes", "scale.learners = 1"]),
        ("scale.groups=0", ["scale.groups = 0", "at least 1"]),
        ("scale.groups=2 scale.engine=serial", ["needs processes", "scale.groups = 1"]),
        ("scale.groups=2 relax.join=none", ["never meet", 'relax.join = "average"']),
        ("scale.groups=2 relax.join=hogwild", ["makes none", 'scale.relax = "a3c"']),
        ("scale.groups=2 relax.join=mean", ["'mean' is not known", "average, gossip"]),
        ("relax.join=average", ["there is one", "scale.groups to 2"]),
        ("scale.groups=2 join.graph=ring", ["is not how", 'relax.join = "gossip"']),
        ("scale.groups=2 join.graph=star", ["'star' is not known", "ring"]),
        ("scale.groups=2 join.every=0", ["join.every = 0", "at least 1"]),
        ("scale.groups=2 join.patience=1.5", ["no number of updates", "whole number"]),
        ("scale.groups=2 join.patience=-1", ["join.patience = -1", "at least 0"]),
        ("scale.groups=2 join.evry=3", ["join.evry", "would do nothing", "join.every"]),
        ("join.every=3", ["would do nothing", "Leave join.every out", "scale.groups to 2"]),
        ("join.graph=ring", ["would do nothing", "Leave join.graph out"]),
        ("scale.groups=2 scale.actors=1 scale.relax=a3c join.patience=3", ["Leave join.patience"]),
        (A3C, ["there is one", "scale.groups to 2"]),
        (GALA, ["there is one", "scale.groups to 2"]),
        (f"{A3C} scale.groups=2 scale.engine=serial", ["needs processes", "scale.engine"]),
        (f"{A3C} scale.groups=2 scale.learners=2", ["for ever", "Set scale.learners = 1"]),
        (f"{GALA} scale.groups=2 scale.learners=2", ["for ever", "Set scale.learners = 1"]),
        (f"{A3C} scale.groups=2 relax.lead=1", ["stale", "Set relax.lead to 0"]),
        (f"{A3C} scale.groups=2 faults.nonfinite=skip", ["NaN", '"rollback"']),
        ("relax.hosts=worker relax.infer=server", ["at every step", 'relax.infer = "actor"']),
        ("relax.hosts=beside", ["'beside' is not known", "apart, worker"]),
        ("scale.cores=2 scale.learners=64", ["128 threads", "Set scale.cores = 1"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_consequence_and_its_remedy(
    argv, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("tianji.config.cores", lambda: 64)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(PPO | {"scale": PPO["scale"] | {"engine": "local"}}))
    assert main(["train", str(path), *argv.split(), "--runs", str(tmp_path / "runs")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_a_gpu_cannot_step_what_workers_share(tmp_path):
    config = load_config(FAULT, [A3C, GROUPS, "scale.actors=1", "scale.device=cuda"])
    with pytest.raises(Refusal, match=r'scale.device = "cuda" cannot .* Set scale.device = "cpu"'):
        assembly(config)
