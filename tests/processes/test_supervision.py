"""A run outlives its processes, killed, stopped, hanging or spoilt, and a disk that is full."""

import contextlib
import copy
import ctypes
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tomli_w
from faults import RECORD
from local_runs import belongings, beside, fault, launched, marked, metrics, parent, train

import tianji
from tianji import Failure
from tianji.__main__ import main
from tianji.buffer import ARRIVAL
from tianji.build import look
from tianji.channel import Offer
from tianji.checkpoint import Checkpoints
from tianji.config import load_config
from tianji.engines import hosts, wire
from tianji.engines.local import LocalEngine
from tianji.engines.messages import Ready, RoleRequest
from tianji.engines.server import ForkServer
from tianji.machine import process_cpu
from tianji.placement import Placement
from tianji.testing import faults as testing_faults

NOTICED, RESTARTED = 5 * 2.0, 5 * 5.0
"""seconds in which a death must be told and its role restarted, five times over"""
LIMIT = 60.0
"""seconds for whatever is waited for"""

PPO = {
    "env": {
        "id": "testing/Fault", "imports": ["tianji.testing.faults", "faults"],
        "kwargs": {"slows": 1.0, "slow": 0.001},
    },
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [8]},
    "scale": {
        "engine": "local", "relax": "sync", "actors": 2, "envs_per_actor": 2, "rollout_length": 8,
    },
    "stop": {"updates": 10**6, "when": "told"},
}  # fmt: skip
DQN = {
    **PPO,
    "algorithm": {
        "name": "dqn", "warmup": 96, "capacity": 800, "batch_size": 16, "new_steps": 16,
        "n_step": 3,
    },
}  # fmt: skip
BOUNDS = {"sync": 0, "periodic": 0, "one_step": 1, "bounded": 4, "tianji": 3, "free": np.inf}
"""staleness of an on-policy run, at most"""


@pytest.fixture(scope="module", autouse=True)
def _first(one_server, told_soon, tmp_path_factory):
    """What the first run of a process leaves in it for good is left by this one."""
    train(PPO, tmp_path_factory.mktemp("first"), "stop.updates=1")


@pytest.fixture(autouse=True)
def folder(one_server, monkeypatch, tmp_path):
    """Where the run is; afterwards no process, descriptor, thread, handler or limit is left."""
    monkeypatch.setenv("TIANJI_TEST", one_server.mark)
    monkeypatch.chdir(tmp_path)
    before = belongings()
    yield tmp_path / "run"
    end = time.monotonic() + 5  # a process that was killed may still be on its way out
    while (left := marked(one_server.mark).keys() - one_server.pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == set()
    assert belongings() == before


def wait(holds, what, seconds=LIMIT):
    """What holds, once it does."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return found


def table(folder):
    """hosts.json, by role; without those whose pid is not known yet."""
    with contextlib.suppress(OSError, ValueError):
        hosts = json.loads((folder / "hosts.json").read_text())["hosts"]
        return {host["role"]: host for host in hosts if host["pid"] > 0}
    return {}


def progress(folder):
    """(updates, steps, time) of every update that was made, in their order."""
    with contextlib.suppress(OSError):
        data = (folder / "progress").read_bytes()
        return list(RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))
    return []


def told(folder):
    """faults.jsonl, with times in seconds since the epoch."""
    if not (folder / "faults.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    for line in lines:
        stamp = line["time"]
        line["at"] = time.mktime(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")) + float(
            stamp[19:23]
        )
    return lines


def more_updates(folder, count=5):
    """Wait for so many more."""
    made = len(progress(folder))
    wait(lambda: len(progress(folder)) >= made + count, "updates")


def send(folder, role, number=signal.SIGKILL):
    """Send a signal to a role; its row in the table before, and when."""
    row = wait(lambda: table(folder).get(role), f"a {role}")
    assert row["pid"] > 1
    at = time.time()
    os.kill(row["pid"], number)
    return row, at


def killed(folder, role):
    """Kill a role and wait until it is there again; the seconds in which it was noticed."""
    count = len(told(folder))
    row, at = send(folder, role)
    line = wait(lambda: told(folder)[count:], "a fault is told")[0]
    new = wait(
        lambda: (now := table(folder).get(role)) and now["pid"] != row["pid"] and now,
        f"{role} is there again",
    )
    assert line["at"] - at < NOTICED
    assert time.time() - at < RESTARTED
    return row, new, line


def end(folder):
    (folder / "end").touch()


def supervised(config, folder, act, *overrides):
    """Train while `act` does something to the run, and tells it to end; the result."""

    def acting():
        try:
            more_updates(folder, 3)
            act()
        finally:
            end(folder)

    with beside(acting):
        return train(config, folder.parent, *overrides, name="run")


def check_progress(folder, result):
    """Versions follow each other, counts never run backwards, in no record."""
    made = progress(folder)
    assert [m[0] for m in made] == list(range(1, len(made) + 1))
    assert [m[1] for m in made] == sorted(m[1] for m in made)
    assert result.updates == made[-1][0]
    rows = [row for row in metrics(result) if "eval/mean_reward" not in row]
    for name in ("step", "updates"):
        assert [row[name] for row in rows] == sorted(row[name] for row in rows)
    assert all(row["flow/produced_sps"] >= 0 for row in rows)
    assert all(row["flow/consumed_sps"] >= 0 for row in rows)


def presets():
    quick = {("ppo", "sync"), ("ppo", "tianji"), ("dqn", "tianji")}
    for relax in BOUNDS:
        for name, config in (("ppo", PPO), ("dqn", DQN)):
            if (name, relax) != ("dqn", "periodic"):
                marks = [] if (name, relax) in quick else [pytest.mark.slow]
                yield pytest.param(config, relax, id=f"{name}-{relax}", marks=marks)


@pytest.mark.parametrize(("config", "relax"), list(presets()))
def test_actors_that_are_killed_are_begun_anew_and_the_run_keeps_its_bounds(config, relax, folder):
    lives = []

    def act():
        for role in ("actor-1", "actor-0", "actor-1"):
            lives.append(killed(folder, role))
            more_updates(folder, 10)

    result = supervised(config, folder, act, f"scale.relax={relax}")
    assert (result.status, result.exit_code) == ("done", 0)
    assert result.notes["restarts"] == 3
    check_progress(folder, result)
    if config is PPO:
        assert result.staleness["max"] <= BOUNDS[relax]
    assert [(old["role"], old["life"], new["life"]) for old, new, _ in lives] == [
        ("actor-1", 0, 1), ("actor-0", 0, 1), ("actor-1", 1, 2),
    ]  # fmt: skip
    for old, _, line in lives:
        assert (line["role"], line["pid"], line["kind"]) == (old["role"], old["pid"], "role")
        assert (line["signal"], line["oom"]) == ("SIGKILL", False)
        assert line["action"] == f"{old['role']} restarted"
        assert line["step"] > 0
        assert line["seed"] is not None
    assert lives[0][2]["seed"] != lives[2][2]["seed"], "each life has a seed of its own"
    # Of 16 rows of an env one only resets it; each update but the last few follows its own 32.
    rows = result.updates * (32 if config is PPO else 16)
    if relax != "free":
        assert 0.9 * rows < result.steps < rows + 96 + 6 * 32, "steps were lost, or doubled"


def test_a_budget_that_is_spent_ends_the_run_with_the_last_death_as_its_failure(folder, capsys):
    path = folder.parent / "config.toml"
    path.write_text(tomli_w.dumps(PPO))
    argv = ["faults.restarts=1", "--runs", str(folder.parent), "--name", "run", "--json"]
    pids = []

    def act():
        more_updates(folder)
        pids.append(killed(folder, "actor-1")[1]["pid"])
        more_updates(folder)
        send(folder, "actor-1")

    with beside(act):
        assert main(["train", str(path), *argv]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = json.loads((folder / "result.json").read_text())
    assert said["status"] == failed["status"] == "failed"
    assert "actors may be restarted 1 within 600 s: faults.restarts" in failed["message"]
    failure = failed["failure"]
    assert (failure["role"], failure["signal"]) == ("actor-1", "SIGKILL")
    assert (failure["pid"], failure["action"]) == (pids[0], "the run ended")
    assert failure["step"] > 0
    assert tianji.load(folder).version >= 10, "what was learnt is saved"


def faulty(folder, **kwargs):
    """A config whose second actor goes wrong once."""
    config = copy.deepcopy(PPO)
    config["env"]["kwargs"] = {"only": "actor-1", "marker": str(folder.parent / "marks")} | kwargs
    return config


def line_of(words):
    """The number of the line of the env that has these words."""
    lines, first = inspect.getsourcelines(testing_faults.FaultEnv.step)
    (at,) = [i for i, line in enumerate(lines) if words in line]
    return first + at


def test_an_env_that_hangs_is_found_and_its_stack_names_the_line(folder):
    def act():
        wait(lambda: told(folder), "the hang is told")
        wait(lambda: table(folder).get("actor-1", {}).get("life") == 1, "a new life")
        more_updates(folder)

    config = faulty(folder, at={"hangs": 60})
    result = supervised(config, folder, act, "faults.hang=1", "stop.updates=100000")
    assert (result.status, result.notes["restarts"]) == ("done", 1)
    check_progress(folder, result)
    (line,) = told(folder)
    assert re.match(r"it hangs: no step ended for \d+\.\d s \(faults\.hang\)", line["cause"])
    where = f'testing/faults.py", line {line_of("time.sleep(FOREVER)")} in step'
    assert where in line["traceback"]
    assert where in (folder / "logs" / "actor-1.log").read_text()
    assert (line["step"], line["role"]) == (59, "actor-1")


@pytest.mark.slow
def test_a_segmentation_fault_costs_only_its_host(folder):
    seen = []

    def act():
        seen.append(table(folder))
        wait(lambda: told(folder), "the crash is told")
        wait(lambda: table(folder).get("actor-1", {}).get("life") == 1, "a new life")
        more_updates(folder)
        seen.append(table(folder))

    config = faulty(folder, at={"segfaults": 3000}, slows=1.0, slow=0.0005)
    result = supervised(config, folder, act)
    assert (result.status, result.notes["restarts"]) == ("done", 1)
    (line,) = told(folder)
    assert (line["signal"], line["step"]) == ("SIGSEGV", 2999)
    assert f'faults.py", line {line_of("ctypes.string_at(0)")} in step' in line["traceback"]
    before, after = ({role: row["pid"] for role, row in t.items()} for t in seen)
    assert before.pop("actor-1") != after.pop("actor-1")
    assert before == after


def recovery(folder):
    (line,) = [line for line in told(folder) if line["kind"] == "run"]
    found = re.fullmatch(r"went on from (.*), (\d+) updates were lost", line["action"])
    assert found, line["action"]
    return line, found[1], int(found[2])


def saved_at(folder, name):
    """The version of a checkpoint."""
    (found,) = [p for p in (folder / "checkpoints").iterdir() if p.name == name]
    return json.loads((found / "MANIFEST.json").read_text())["meta"]["updates"]


@pytest.mark.parametrize(
    "config", [PPO, pytest.param(DQN, marks=pytest.mark.slow)], ids=["ppo", "dqn"]
)
@pytest.mark.parametrize("saves", [True, False], ids=["saved", "never saved"])
def test_a_learner_that_is_killed_goes_on_from_the_last_checkpoint(config, saves, folder):
    dead = []

    def act():
        more_updates(folder, 25)
        dead.append(time.time() + 0.1)  # what it takes to start anew is longer
        _, new, _ = killed(folder, "learner")
        assert new["life"] == 0, "another engine, whose hosts are all new"
        more_updates(folder, 20)

    argv = ["checkpoint.every=10", "checkpoint.keep=1000"] if saves else []
    result = supervised(config, folder, act, "scale.relax=tianji", *argv)
    assert (result.status, result.exit_code) == ("done", 0)
    line, source, lost = recovery(folder)
    assert (line["role"], line["signal"]) == ("learner", "SIGKILL")
    assert result.notes["recoveries"] == 1
    assert result.notes["updates_lost"] == lost
    # The launcher hears of updates ten times a second: what it did not hear of is made again.
    before = [version for version, _, at in progress(folder) if at <= dead[0]]
    after = [version for version, _, at in progress(folder) if at > dead[0]]
    assert before == list(range(1, len(before) + 1))
    first = after[0]
    assert after == list(range(first, first + len(after)))
    assert before[-1] // 2 < first <= before[-1] + 1, "a version was left out, or many not heard of"
    if saves:
        assert source.startswith("checkpoint step_")
        assert lost == first - 1 - saved_at(folder, source.partition(" ")[2])
    else:
        assert source == "the beginning, as there is no checkpoint"
        assert lost == first - 1
    assert after[-1] == result.updates
    for name in ("step", "updates"):
        values = [row[name] for row in metrics(result)]
        assert values == sorted(values)
    assert tianji.load(folder).version == result.updates
    if config is PPO:
        assert result.staleness["max"] <= BOUNDS["tianji"]


@pytest.mark.parametrize(
    "config", [PPO, pytest.param(DQN, marks=pytest.mark.slow)], ids=["ppo", "dqn"]
)
def test_a_buffer_that_is_killed_costs_no_update(config, folder):
    def act():
        more_updates(folder, 10)
        killed(folder, "buffer")
        more_updates(folder, 10)

    result = supervised(config, folder, act, "scale.relax=tianji")
    line, source, lost = recovery(folder)
    assert (line["role"], source, lost) == ("buffer", "where the learner was", 0)
    assert result.notes["updates_lost"] == 0
    check_progress(folder, result)


def test_the_death_of_the_process_that_hosts_are_forked_from_is_survived(
    folder, one_server, monkeypatch
):
    monkeypatch.setattr("tianji.run.ForkServer", ForkServer)

    def act():
        more_updates(folder, 25)
        pid = parent(table(folder)["buffer"]["pid"])
        assert pid not in {os.getpid(), *one_server.pids}
        os.kill(pid, signal.SIGKILL)
        wait(lambda: told(folder), "it is told")
        more_updates(folder, 10)

    result = supervised(PPO, folder, act, "checkpoint.every=10", "checkpoint.keep=1000")
    assert (result.status, result.exit_code) == ("done", 0)
    line, source, _ = recovery(folder)
    assert line["role"] == "forkserver"
    assert source.startswith("checkpoint step_")


def test_word_of_a_host_that_was_just_forked_is_not_left_to_the_next_run(one_server, tmp_path):
    server = one_server()
    while hosts.readable(server.line.fileno(), 0.2):
        wire.receive(server.line)  # how hosts of the runs before have ended
    of_a_run = hosts.HostTable(server, tmp_path, 1)
    setup, graph = look(load_config(PPO))
    request = RoleRequest("actor-0", {}, "", 1, setup, graph, judges=True)
    of_a_run.start(Placement("actor-0", (), 1), request, Offer("shm", {}))
    of_a_run.close()
    assert hosts.readable(server.line.fileno(), LIMIT)
    assert wire.receive(server.line).kind == "Exited"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["learner", "buffer"])
def test_a_death_while_a_run_is_begun_anew_is_survived_too(role, folder, monkeypatch):
    plain, again = LocalEngine.start, []

    def start(self, where):
        """The second start of the run loses a role in the middle."""
        again.append(role)
        if len(again) != 2:
            return plain(self, where)
        poll = hosts.HostTable.poll

        def polled(self, timeout):
            events = poll(self, timeout)
            host = self.by_name.get("learner")
            if host is not None and host.pid > 0 and len(again) == 2:
                again.append("done")
                os.kill(host.pid, signal.SIGKILL)
            return events

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts.HostTable, "poll", polled)
            return plain(self, where)

    monkeypatch.setattr(LocalEngine, "start", start)

    def act():
        more_updates(folder, 25)
        send(folder, role)
        wait(lambda: [line for line in told(folder) if line["kind"] == "run"], "it went on")
        more_updates(folder, 10)

    result = supervised(PPO, folder, act, "checkpoint.every=10", "checkpoint.keep=1000")
    assert (result.status, result.exit_code) == ("done", 0)
    assert again == [role, role, "done", role]
    _, _, lost = recovery(folder)
    assert lost == 0 or role == "learner"


@pytest.mark.parametrize(
    "moment",
    ["before its state is asked for", pytest.param("while it is written", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("config", [PPO, DQN], ids=["ppo", "dqn"])
def test_an_actor_that_is_killed_while_all_rests_for_a_checkpoint(
    moment, config, folder, monkeypatch
):
    """The checkpoint is whole, and can be gone on from."""
    kind, name = (LocalEngine, "parts") if moment.startswith("before") else (Checkpoints, "save")
    plain, calls = getattr(kind, name), []

    def deadly(self, *args):
        calls.append(name)
        if len(calls) == 2:
            send(folder, "actor-1")
            if kind is LocalEngine:
                time.sleep(0.3)
        return plain(self, *args)

    monkeypatch.setattr(kind, name, deadly)

    def act():
        wait(lambda: table(folder).get("actor-1", {}).get("life") == 1, "a new life")
        more_updates(folder)

    argv = ["scale.relax=tianji", "checkpoint.every=20", "checkpoint.keep=1000"]
    result = supervised(config, folder, act, *argv)
    assert (result.status, result.notes["restarts"]) == ("done", 1)
    check_progress(folder, result)
    second = sorted((folder / "checkpoints").glob("step_*"))[1]
    run = Checkpoints(folder / "checkpoints", 3, identity(folder)).load(second.name).parts["run"]
    made = [state["produced"] for state in run["actors"]]
    assert all(a >= b for a, b in zip(made, run["buffer"]["produced"], strict=True)), "backwards"
    assert all(
        state["seq"] >= seq for state, seq in zip(run["actors"], run["buffer"]["seqs"], strict=True)
    )
    (folder / "end").unlink()
    monkeypatch.setattr(kind, name, plain)
    end = [f"stop.updates={result.updates + 40}"]
    rest = tianji.resume(folder, end, checkpoint=second.name)
    assert rest.updates == result.updates + 40


def identity(folder):
    (newest,) = Checkpoints(folder / "checkpoints", 1, "").list()[-1:]
    return json.loads((newest / "MANIFEST.json").read_text())["identity"]


def test_two_actors_that_are_killed_at_once_are_both_begun_anew(folder):
    def act():
        rows = [send(folder, role)[0] for role in ("actor-0", "actor-2")]
        for row in rows:
            wait(lambda row=row: table(folder).get(row["role"], row)["life"] == 1, "a new life")
        more_updates(folder, 10)

    result = supervised(PPO, folder, act, "scale.actors=3")
    assert (result.status, result.notes["restarts"]) == ("done", 2)
    assert {line["role"] for line in told(folder)} == {"actor-0", "actor-2"}
    assert result.staleness["max"] == 0
    check_progress(folder, result)


@pytest.mark.parametrize(
    "moment",
    ["at once", "before it is heard of", pytest.param("when it is ready", marks=pytest.mark.slow)],
)
def test_an_actor_that_is_killed_again_while_it_is_restarted(moment, folder, monkeypatch):
    slain = []

    def slay(pid):
        slain.append(pid)
        os.kill(pid, signal.SIGKILL)

    poll, receive, hear = hosts.HostTable.poll, wire.receive, LocalEngine._heard

    def polled(self, timeout):
        events = poll(self, timeout)
        host = self.by_name.get("actor-1")
        if moment == "at once" and host and host.life == 1 and host.pid > 0 and not slain:
            slay(host.pid)
        return events

    def received(line):
        """It is dead, and its process is gone, before the launcher hears of it."""
        packet = receive(line)
        if moment.startswith("before") and packet is not None and packet.kind == "Forked":
            forked.append(packet.message().pid)
            if len(forked) == at_start + 1 and not slain:
                slay(forked[-1])
                wait(lambda: not os.path.exists(f"/proc/{forked[-1]}"), "it is reaped")
        return packet

    def heard(self, event):
        ready = isinstance(event.message, Ready)
        if moment.startswith("when") and ready and event.host.life == 1:
            slay(event.host.pid)
        return hear(self, event)

    forked, at_start = [], len(look(load_config(PPO))[1].hosts)
    monkeypatch.setattr(hosts.HostTable, "poll", polled)
    monkeypatch.setattr(hosts.wire, "receive", received)
    monkeypatch.setattr(LocalEngine, "_heard", heard)

    def act():
        send(folder, "actor-1")
        wait(lambda: table(folder).get("actor-1", {}).get("life") == 2, "a second new life")
        more_updates(folder, 10)

    result = supervised(PPO, folder, act)
    assert len(slain) == 1
    assert (result.status, result.notes["restarts"]) == ("done", 2)
    check_progress(folder, result)
    assert result.staleness["max"] == 0


ENGINES = pytest.mark.parametrize("engine", ["serial", "local"])
ALGORITHMS = pytest.mark.parametrize("name", ["test_ppo", "test_dqn"])


def not_finite(name, engine, at, times=1):
    """A run whose updates from `at` on are NaN: the loss, and everything that was learnt."""
    config = fault(stop={"updates": 40})
    config["scale"]["engine"] = engine
    hyper = PPO["algorithm"] if name == "test_ppo" else DQN["algorithm"]
    config["algorithm"] = hyper | {"name": name, "nan_at": at, "nan_times": times}
    return config


def all_finite(folder):
    parts = Checkpoints(folder / "checkpoints", 3, identity(folder)).load().parts
    arrays = parts["policy"]["params"].values()
    return all(np.isfinite(array).all() for array in arrays)


@ALGORITHMS
@ENGINES
def test_an_update_that_is_not_finite_is_left_out_and_the_next_ones_are_finite(
    name, engine, folder
):
    argv = ["faults.nonfinite=skip", "checkpoint.every=1", "checkpoint.keep=1000"]
    result = train(not_finite(name, engine, 5, times=3), folder.parent, *argv, name="run")
    assert (result.status, result.updates) == ("done", 40)
    assert result.notes["updates_skipped"] == 3
    lines = told(folder)
    assert [line["kind"] for line in lines] == ["update"] * 3
    assert [re.match(r"update (\d+) is not", line["cause"])[1] for line in lines] == ["5", "6", "7"]
    assert {line["action"] for line in lines} == {"update left out"}
    batch = safetensors.numpy.load_file(folder / "nonfinite_batch.safetensors")
    assert np.isfinite(batch["part-0.reward"]).all()
    assert len(batch["part-0.reward"]) > 0
    checkpoints = Checkpoints(folder / "checkpoints", 1000, identity(folder))
    learnt = {}
    for path in checkpoints.list():
        policy = checkpoints.load(path.name).parts["policy"]
        learnt[policy["version"]] = np.concatenate([a.ravel() for a in policy["params"].values()])
    assert all(np.isfinite(array).all() for array in learnt.values())
    if len(learnt) == 40:  # versions within one and the same round of steps have one name
        assert (learnt[4] == learnt[7]).all()
    assert (learnt[max(learnt)] != learnt[min(learnt)]).any()


@ENGINES
def test_ten_updates_in_a_row_may_be_left_out_and_the_next_one_ends_the_run(engine, folder):
    with pytest.raises(Failure, match="update 15 is not finite"):
        train(
            not_finite("test_ppo", engine, 5, times=100), folder.parent, "faults.nonfinite=skip",
            name="run",
        )  # fmt: skip
    lines = told(folder)
    assert [line["kind"] for line in lines] == ["update"] * 10
    failed = json.loads((folder / "result.json").read_text())
    assert failed["status"] == "failed"
    assert failed["failure"]["role"] == "learner"
    assert (folder / "nonfinite_batch.safetensors").exists()


@ENGINES
def test_ten_updates_that_are_left_out_are_not_too_many(engine, folder):
    config = not_finite("test_ppo", engine, 5, times=10)
    result = train(config, folder.parent, "faults.nonfinite=skip", name="run")
    assert (result.status, result.notes["updates_skipped"]) == ("done", 10)
    assert all_finite(folder)


@ALGORITHMS
@ENGINES
def test_an_update_that_is_not_finite_is_rolled_back_to_the_last_checkpoint(name, engine, folder):
    """The trainer's count of updates begins anew with it, so the 30th update of each is NaN."""
    argv = ["faults.nonfinite=rollback", "checkpoint.every=7", "checkpoint.keep=1000"]
    result = train(not_finite(name, engine, 30), folder.parent, *argv, name="run")
    assert (result.status, result.updates) == ("done", 40)
    line, source, lost = recovery(folder)
    assert line["role"] == "learner"
    assert "update 30 is not finite" in line["cause"]
    assert lost == 29 - 28 == 29 - saved_at(folder, source.partition(" ")[2])
    assert result.notes["updates_lost"] == lost
    assert all_finite(folder)
    assert (folder / "nonfinite_batch.safetensors").exists()


def arrivals(folder):
    try:
        data = (folder / "arrivals.bin").read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) // ARRIVAL.itemsize * ARRIVAL.itemsize], ARRIVAL)


def test_actors_go_on_without_the_learner_until_their_grants_are_spent_and_then_sleep(folder):
    spent, counts = {}, []

    def act():
        actors = {role: row["pid"] for role, row in table(folder).items() if "actor" in role}
        send(folder, "learner", signal.SIGSTOP)
        counts.append(len(arrivals(folder)))
        time.sleep(1.5)
        counts.append(len(arrivals(folder)))
        before = {role: process_cpu(pid) for role, pid in actors.items()}
        time.sleep(1.5)
        spent.update({role: process_cpu(pid) - before[role] for role, pid in actors.items()})
        counts.append(len(arrivals(folder)))
        send(folder, "learner", signal.SIGCONT)
        more_updates(folder, 10)

    argv = ["scale.relax=bounded", "env.kwargs={slows=1.0, slow=0.005}"]
    result = supervised(PPO, folder, act, *argv)
    assert result.status == "done"
    assert told(folder) == [], "it was not taken for dead"
    assert counts[1] > counts[0], "they went on with what they had been granted"
    # 2 rollouts for each update, 4 ahead and the current one, and what was not written down yet
    assert counts[1] - counts[0] <= 2 * (4 + 1) + 2 * 8
    assert counts[2] == counts[1], "production without a grant"
    for role, seconds in spent.items():
        assert seconds < 0.03 + 0.02, f"{role} used {seconds} s of CPU in 1.5 s without work"
    assert result.staleness["max"] <= 4


@pytest.mark.parametrize(
    ("config", "relax"),
    [
        (PPO, "tianji"),
        pytest.param(PPO, "free", marks=pytest.mark.slow),
        (DQN, "tianji"),
        pytest.param(DQN, "free", marks=pytest.mark.slow),
    ],
    ids=["ppo-tianji", "ppo-free", "dqn-tianji", "dqn-free"],
)
def test_updates_go_on_without_an_actor_that_stands_still(config, relax, folder):
    during = []

    def act():
        send(folder, "actor-1", signal.SIGSTOP)
        time.sleep(0.6)  # what it had pushed is written down
        before = len(arrivals(folder))
        more_updates(folder, 60)
        time.sleep(0.6)
        during.extend(arrivals(folder)[before:]["actor"].tolist())
        send(folder, "actor-1", signal.SIGCONT)
        more_updates(folder, 5)

    argv = [f"scale.relax={relax}", "scale.actors=3"]
    if config is PPO:
        argv.append("scale.rollout_length=4")
    result = supervised(config, folder, act, *argv)
    assert result.status == "done"
    assert told(folder) == []
    assert set(during) == {0, 2}
    share = during.count(0) / len(during)
    assert 0.25 < share < 0.75, "the others share its part"
    check_progress(folder, result)


@pytest.mark.slow
def test_one_that_stood_still_over_a_checkpoint_rests_with_the_others_at_the_next(
    folder, monkeypatch
):
    """Its late word that it rests is not believed: it was told to go on meanwhile."""
    plain, saves = LocalEngine.parts, []

    def parts(self, most_bytes):
        board = self._hosts._board
        places = [8 * h.place + hosts.BEAT for h in self._loop_hosts() if h.role not in self._due]
        before = [board[place] for place in places]
        time.sleep(0.2)
        saves.append([board[place] for place in places] == before)
        return plain(self, most_bytes)

    monkeypatch.setattr(LocalEngine, "parts", parts)

    def act():
        wait(lambda: saves, "a checkpoint")
        send(folder, "actor-1", signal.SIGSTOP)
        more_updates(folder, 61)  # one is saved without it meanwhile
        send(folder, "actor-1", signal.SIGCONT)
        count = len(saves)
        wait(lambda: len(saves) > count + 1, "checkpoints")

    argv = ["scale.relax=tianji", "scale.actors=3", "scale.rollout_length=4"]
    result = supervised(PPO, folder, act, *argv, "checkpoint.every=60")
    assert result.status == "done"
    assert all(saves), "somebody worked while a checkpoint was taken"


@pytest.mark.parametrize("hang", [False, True], ids=["until it goes on", "until it is replaced"])
def test_where_all_wait_for_each_other_they_wait_for_one_that_stands_still(hang, folder):
    made = []

    def act():
        row, _ = send(folder, "actor-1", signal.SIGSTOP)
        time.sleep(0.4)
        made.append(len(progress(folder)))
        if hang:
            wait(lambda: told(folder), "the hang is told")
        else:
            time.sleep(1.0)
            made.append(len(progress(folder)))
            os.kill(row["pid"], signal.SIGCONT)
        more_updates(folder, 10)

    argv = ["scale.actors=3", "faults.hang=1"] if hang else ["scale.actors=3"]
    result = supervised(PPO, folder, act, *argv)
    assert result.status == "done"
    assert result.staleness["max"] == 0
    check_progress(folder, result)
    if hang:
        (line,) = told(folder)
        assert line["cause"].startswith("it hangs")
        assert result.notes["restarts"] == 1
    else:
        assert made[0] == made[1], "an update without its rollouts"
        assert told(folder) == []


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGUSR1")), "SIGHUP"],
)
def test_a_signal_to_all_processes_ends_the_run_with_75_and_it_can_be_resumed(name, folder):
    config = copy.deepcopy(PPO)
    config["stop"].pop("when")
    with launched(config, folder.parent, "faults.grace=5") as (process, _):
        begin = time.monotonic()
        os.killpg(process.pid, signal.Signals[name])
        out, err = process.communicate(timeout=LIMIT)
        assert time.monotonic() - begin < 5 * 5.0
    assert process.returncode == 75, err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert (result["status"], result["stop_reason"]) == ("stopped", name)
    assert told(folder) == [], "nothing went wrong"
    rest = tianji.resume(folder, [f"stop.updates={result['updates'] + 3}"])
    assert (rest.resumed, rest.updates) == ("exact", result["updates"] + 3)


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"no disk can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place
    assert libc.umount2(bytes(place), 2) == 0, os.strerror(ctypes.get_errno())


def fill(disk, leave):
    """Leave so many bytes of a disk, about."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        if leave:
            file.truncate(file.tell() - leave)


def test_a_disk_that_is_full_costs_checkpoints_and_nothing_else(disk):
    folder = disk / "run"
    good = []

    def act():
        wait(lambda: (folder / "checkpoints" / "latest").exists(), "a checkpoint")
        fill(disk, 96 * 1024)
        time.sleep(0.1)  # one that was under way
        good.append((folder / "checkpoints" / "latest").resolve().name)
        wait(lambda: (folder / "log.txt").read_text().count("was not saved") >= 2, "an alarm")
        more_updates(folder, 5)

    argv = ["checkpoint.every=40", "checkpoint.keep=1000", "network.hidden=[96, 96]"]
    result = supervised(PPO, folder, act, *argv)
    assert (result.status, result.exit_code) == ("done", 0)
    log = (folder / "log.txt").read_text()
    assert result.notes["checkpoints_not_saved"] == log.count("was not saved") >= 3
    assert "No space left on device" in log
    assert (folder / "checkpoints" / "latest").resolve().name == good[-1]
    assert tianji.load(folder).version < result.updates
    assert {p.name for p in (folder / "checkpoints").iterdir()} >= {good[-1]}
    Path(disk / "ballast").unlink()
    (folder / "end").unlink()
    rest = tianji.resume(folder, [f"stop.updates={result.updates + 1}"])
    assert rest.updates == result.updates + 1


@pytest.mark.slow
def test_a_disk_without_a_byte_left_costs_rows_and_arrivals_and_stops_nothing(disk):
    folder = disk / "run"

    def act():
        wait(lambda: len(arrivals(folder)), "arrivals")
        fill(disk, 0)
        full = len(arrivals(folder))
        wait(lambda: len(arrivals(folder)) >= full, "it is full")
        time.sleep(3.0)  # rows are written once a second
        (disk / "ballast").unlink()
        more_updates(folder, 5)

    result = supervised(PPO, folder, act, "scale.relax=free")
    assert (result.status, result.exit_code) == ("done", 0)
    assert result.notes["disk"] == 1, "it is said once"
    assert result.notes["rows_lost"] > 0
    assert (folder / "arrivals.bin").stat().st_size % ARRIVAL.itemsize == 0
    found = arrivals(folder)
    assert set(found["actor"].tolist()) == {0, 1}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@contextlib.contextmanager
def memory_group(limit):
    """A control group of so many bytes, within this process's own."""
    own = [li.split(":", 2) for li in Path("/proc/self/cgroup").read_text().splitlines()]
    mine = [path for _, controllers, path in own if controllers == "memory"]
    if not mine:
        pytest.skip("no control group of the first version holds this process's memory")
    place = Path("/sys/fs/cgroup/memory") / mine[0].strip("/") / f"tianji-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (place / "memory.limit_in_bytes").write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no limit can be set here: {error}")
        yield place
    finally:
        end = time.monotonic() + 5
        while True:
            try:
                place.rmdir()
                break
            except OSError:  # the last process is on its way out
                assert time.monotonic() < end
                time.sleep(0.05)


def test_a_host_that_is_killed_for_lack_of_memory_is_named_so(folder):
    config = copy.deepcopy(PPO)
    config["env"] = {
        "id": "test/Hungry", "imports": ["faults"],
        "kwargs": {"marker": str(folder.parent / "eaten")},
    }  # fmt: skip
    config["stop"] = {"updates": 60}
    (folder.parent / "config.toml").write_text(tomli_w.dumps(config))
    with memory_group(1 << 30) as place:
        words = ["-m", "tianji", "train", str(folder.parent / "config.toml"), "--runs",
                 str(folder.parent), "--name", "run", "--json"]  # fmt: skip
        paths = [str(Path(__file__).parent), *sys.path]
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'echo $$ > {place}/cgroup.procs && exec "$@"', "sh",
             sys.executable, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert process.returncode == 0, err
    (line,) = told(folder)
    assert (line["role"], line["signal"], line["oom"]) == ("actor-1", "SIGKILL", True)
    assert "for lack of memory" in line["cause"]
    assert "scale.envs_per_actor" in line["cause"]
    assert json.loads(out.splitlines()[-1])["notes"]["restarts"] == 1
