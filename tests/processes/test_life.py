"""How runs with processes end, well or badly: told truthfully, and nothing of them is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import safetensors.numpy
import tomli_w
from local_runs import (
    FAULT,
    LOCAL,
    PPO,
    belongings,
    beside,
    fault,
    hosts_of,
    launched,
    learnt,
    marked,
    parent,
    train,
    until,
    updates_of,
)

import tianji
from tianji import Failure, Refusal
from tianji.__main__ import main
from tianji.engines.server import ForkServer
from tianji.env import register_env
from tianji.envs.toy import Identity

NOTICED = 5 * 2.0
"""seconds in which a death must be told, five times over"""


@pytest.fixture(scope="module", autouse=True)
def _first(one_server, told_soon, tmp_path_factory):
    """What the first run of a process leaves in it for good is left by this one."""
    train(PPO, tmp_path_factory.mktemp("runs"), LOCAL, "stop.updates=1")


@pytest.fixture(autouse=True)
def mark(one_server, monkeypatch, tmp_path):
    """Afterwards there is no process, descriptor, thread, handler or limit that was not before."""
    monkeypatch.setenv("TIANJI_TEST", one_server.mark)
    monkeypatch.chdir(tmp_path)
    before = belongings()
    yield one_server.mark
    end = time.monotonic() + 5  # a process that was killed may still be on its way out
    while (left := marked(one_server.mark).keys() - one_server.pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == set()
    assert belongings() == before


@pytest.fixture
def own_server(monkeypatch):
    """Each run has a process of its own that hosts are forked from, as outside of tests."""
    monkeypatch.setattr("tianji.run.ForkServer", ForkServer)


def written(folder, name="result.json"):
    text = (folder / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


@pytest.mark.usefixtures("own_server")
def test_runs_of_one_process_follow_each_other_and_leave_no_table(tmp_path):
    first, second = (train(PPO, tmp_path, LOCAL) for _ in range(2))
    assert learnt(first) == learnt(second)
    for result in (first, second):
        assert (result.status, result.exit_code) == ("done", 0)
        assert not Path(result.run_dir, "hosts.json").exists()
        names = {path.stem for path in Path(result.run_dir, "logs").iterdir()}
        assert names == {"actor-0", "actor-1", "buffer", "learner"}


@pytest.mark.parametrize(
    ("config", "words", "trace", "saved"),
    [
        (
            fault(who="actor-1", what="segv", at=44),
            ["actor-1 failed", "SIGSEGV", "Segmentation fault", "faults.py", "faults.restarts"],
            [],
            15,
        ),
        (
            fault({"raise_at": 5}),
            ["learner failed", "ZeroDivisionError: the trainer broke"],
            ["faults.py", "the trainer broke"],
            None,
        ),
        (
            fault({"store_breaks": True}),
            ["buffer failed", "the store broke"],
            ["faults.py", "KeyError"],
            0,
        ),
    ],
    ids=["env crashes", "trainer", "store"],
)
def test_what_goes_wrong_in_a_host_is_named_with_its_cause(config, words, trace, saved, tmp_path):
    with pytest.raises(Failure) as failed:
        train(config, tmp_path, "faults.restarts=2", name="run")
    folder = tmp_path / "run"
    told, log = written(folder), written(folder, "log.txt")
    assert told["status"] == "failed"
    for word in words:
        assert word in str(failed.value)
        assert word in told["message"]
    for word in trace:
        assert word in log
    if saved is None:
        assert not (folder / "checkpoints").exists()
    else:
        check_saved(folder, saved)


def check_saved(folder, least):
    """The newest checkpoint holds what was learnt until then, and knows how far that was."""
    updates = tianji.load(folder).version
    assert least <= updates <= least + 50
    steps = int((folder / "checkpoints" / "latest").resolve().name.removeprefix("step_"))
    # rounds of 2 actors x 2 envs x 8 rows, of which a few only reset an env
    assert 28 * updates <= steps <= 32 * updates
    return updates


def test_a_failed_run_goes_on_from_what_was_saved(tmp_path, capsys):
    """The command line's view of it: exit code 1, no traceback, and a run that can be resumed."""
    path = tmp_path / "broken.toml"
    path.write_text(tomli_w.dumps(fault(who="actor-1", what="raise", at=44)))
    argv = ["faults.env_restarts=0", "--runs", str(tmp_path), "--name", "run", "--json"]
    assert main(["train", str(path), *argv]) == 1
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    failed = json.loads(told.out.splitlines()[-1])
    assert failed["status"] == "failed"
    assert "actor-1 failed: " in failed["message"]
    assert "RuntimeError: the simulator broke in step 43" in failed["message"]
    assert "faults.py" in written(tmp_path / "run", "log.txt")
    end = check_saved(tmp_path / "run", 5) + 3
    argv = [f"stop.updates={end}", "faults.env_restarts=20", "--json"]
    assert main(["resume", str(tmp_path / "run"), *argv]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["resumed"] == "inexact: store not saved, envs reset"
    assert result["updates"] == end
    assert result["steps"] > 28 * end


def test_what_was_learnt_is_saved_though_the_learner_waits_for_the_rest_of_a_batch(tmp_path):
    argv = "scale.relax=periodic", "faults.env_restarts=0"
    with pytest.raises(Failure, match=r"actor-1 failed.*What was learnt so far is saved"):
        train(fault(who="actor-1", what="raise", at=44), tmp_path, *argv, name="run")
    check_saved(tmp_path / "run", 5)


def test_an_evaluation_that_fails_again_and_again_fails_the_run(tmp_path):
    config = fault(who="evaluator", what="raise", at=7)
    with pytest.raises(Failure, match=r"evaluator failed.*the simulator broke"):
        train(config, tmp_path, "eval.every=5", name="run")
    assert "faults.py" in written(tmp_path / "run", "log.txt")


def test_a_loss_that_is_not_finite_is_not_published_and_its_batch_is_saved(tmp_path):
    with pytest.raises(Failure, match=r"learner failed: update 5 is not finite \(loss = nan\)"):
        train(fault({"nan_at": 5}), tmp_path, "checkpoint.every=2", name="run")
    batch = safetensors.numpy.load_file(tmp_path / "run" / "nonfinite_batch.safetensors")
    assert batch["part-0.reward"].shape == (8, 2)
    assert (batch["part-0.versions"] == 4).all()
    assert tianji.load(tmp_path / "run").version == 4


@register_env("test/OnlyHere")
class OnlyHere(Identity):
    """Known to this process alone."""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (fault(who="actor-1", what="reset"), ["OSError", "no licence"]),
        ({**PPO, "env": {"id": "test/OnlyHere"}}, ["test/OnlyHere", "env.imports"]),
    ],
    ids=["first reset raises", "env known to the launcher alone"],
)
def test_what_a_host_cannot_start_with_is_refused(config, words, tmp_path):
    with pytest.raises(Refusal) as refused:
        train(config, tmp_path / "runs", LOCAL)
    for word in words:
        assert word in str(refused.value)
    assert list((tmp_path / "runs").iterdir()) == [], "something half-made was left"


def test_a_run_that_is_refused_leaves_a_file_alone_that_is_called_as_its_table(tmp_path):
    Path("hosts.json").write_text("mine")
    with pytest.raises(Refusal, match=r"relax\.publish"):
        train(PPO, tmp_path / "runs", LOCAL, "relax.publish=2")
    assert Path("hosts.json").read_text() == "mine"


def test_a_role_that_cannot_be_made_leaves_its_traceback(tmp_path):
    with pytest.raises(Failure, match="learner failed: OSError: no licence"):
        train(fault({"raise_at": 0}), tmp_path, name="run")
    assert written(tmp_path / "run")["status"] == "failed"
    assert "faults.py" in written(tmp_path / "run", "log.txt")


@pytest.mark.parametrize("role", ["actor-1", "buffer", "learner", "forkserver"])
def test_the_death_of_a_process_is_told_soon(role, request, tmp_path):
    if role == "forkserver":
        request.getfixturevalue("own_server")
    killed = []

    def kill():
        hosts = hosts_of(tmp_path / "run")
        until(lambda: updates_of(tmp_path / "run") > 5)
        pid = parent(hosts["buffer"]) if role == "forkserver" else hosts[role]
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    cause = "code -9" if role == "forkserver" else "killed by SIGKILL"
    argv = "checkpoint.every=1", "faults.restarts=0", "faults.recoveries=0"
    with beside(kill), pytest.raises(Failure, match=f"^{role} failed.*{cause}"):
        train(FAULT, tmp_path, *argv, name="run")
    assert time.monotonic() - killed[0] < NOTICED
    assert written(tmp_path / "run")["status"] == "failed"
    assert tianji.load(tmp_path / "run").version >= 5


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, mark):
    """Memory neither: what hosts share has no name in /dev/shm, so it goes with them."""
    with launched(FAULT, tmp_path, "checkpoint.every=5") as (process, hosts):
        assert set(hosts.values()) < set(marked(mark)), "the mark does not find the hosts"
        for pid in (process.pid, *hosts.values()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "/memfd:tianji (deleted)" in maps
            assert "/dev/shm" not in maps
        process.kill()
    assert tianji.load(tmp_path / "run").version >= 5


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
        (signal.SIGTERM, 75, "stopped"),
    ],
)
def test_a_signal_to_the_whole_group_saves_and_the_run_goes_on(number, code, status, tmp_path):
    """Ctrl-C in a terminal reaches every process, and so does what a batch system sends."""
    with launched(FAULT, tmp_path) as (process, hosts):
        begin = time.monotonic()
        if number == signal.SIGTERM:
            for pid in (parent(hosts["buffer"]), *hosts.values()):
                os.kill(pid, signal.SIGUSR1)  # sent before it, by some
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - begin < 5 * 10
    assert process.returncode == code, err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == status
    end = result["updates"] + 3
    rest = tianji.resume(tmp_path / "run", [f"stop.updates={end}", "scale.engine=serial"])
    assert rest.resumed == "exact"
    whole = train(FAULT, tmp_path, f"stop.updates={end}", "scale.engine=serial")
    assert rest.params_sha256 == whole.params_sha256


HANGS = fault(who="actor-1", what="hang", at=44)


def test_ctrl_c_twice_ends_a_run_at_once_though_an_env_hangs(tmp_path):
    with launched(HANGS, tmp_path) as (process, _):
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.3)
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - begin < 5, "it waited for the env"
    assert process.returncode == 130, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_whose_env_hangs_ends_when_its_time_is_over_with_what_was_learnt(tmp_path):
    """As it does after one Ctrl-C, within ten seconds."""
    begin = time.monotonic()
    result = train(HANGS, tmp_path, "stop.seconds=1")
    assert time.monotonic() - begin < 5 * (1 + 10)
    assert (result.status, result.stop_reason) == ("done", "seconds >= 1")
    assert result.updates == 5
    check_saved(Path(result.run_dir), 5)
    rest = tianji.resume(result.run_dir, ["stop.seconds=1000", "stop.updates=8",
                                          "scale.engine=serial"])  # fmt: skip
    assert (rest.resumed, rest.updates) == ("inexact: store not saved, envs reset", 8)


@pytest.mark.slow
def test_a_run_may_have_more_hosts_than_a_page_has_words_for(tmp_path):
    argv = ["scale.actors=63", "scale.envs_per_actor=1", "scale.rollout_length=2"]
    local = train(PPO, tmp_path, *argv, "stop.updates=2", LOCAL)
    serial = train(PPO, tmp_path, *argv, "stop.updates=2")
    assert local.params_sha256 == serial.params_sha256
