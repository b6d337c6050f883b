"""Runs of one process that share what their hosts are forked from."""

import os
import select
import signal
import threading

import pytest
from local_runs import LOCAL, PPO, belongings, fault, parent, train

import tianji
from tianji import Failure, run
from tianji.engines.server import ForkServer

SHORT = LOCAL, "stop.updates=2"


@pytest.fixture
def started(monkeypatch):
    """The servers of runs, in order."""
    servers = []

    class Counted(ForkServer):
        def __init__(self):
            super().__init__()
            servers.append(self)

    monkeypatch.setattr("tianji.run.ForkServer", Counted)
    yield servers
    for server in servers:
        assert server.process.poll() is not None, "and none is left"


def test_runs_share_what_hosts_are_forked_from_and_learn_the_same(started, tmp_path):
    alone = train(PPO, tmp_path, *SHORT)
    assert started[0].process.poll() is not None
    before = belongings()
    with tianji.warm():
        first = train(PPO, tmp_path, *SHORT)
        assert started[1].process.poll() is None
        with tianji.warm():  # as `compare` has it
            second = train(PPO, tmp_path, *SHORT)
        third = train(PPO, tmp_path, *SHORT, "seed=5")
        assert len(started) == 2
    assert belongings() == before
    assert alone.params_sha256 == first.params_sha256 == second.params_sha256
    assert third.params_sha256 != first.params_sha256


def test_a_run_that_fails_does_not_take_the_others_with_it(started, tmp_path):
    with tianji.warm():
        with pytest.raises(Failure):
            train(fault(who="actor", what="raise"), tmp_path, LOCAL, "faults.env_restarts=0")
        train(PPO, tmp_path, *SHORT)
        assert len(started) == 1


def test_what_hosts_are_forked_from_is_not_kept_where_it_would_not_be_the_same(
    started, monkeypatch, tmp_path
):
    with tianji.warm():
        train(PPO, tmp_path, *SHORT)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        train(PPO, tmp_path, *SHORT)
        assert len(started) == 2, "hosts would not have seen it"
        assert started[0].process.poll() is not None
        here = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(here)[:1])
        try:
            train(PPO, tmp_path, *SHORT, "scale.pin=false")
        finally:
            os.sched_setaffinity(0, here)
        assert len(started) == 3, "hosts would have run on other cores"
        monkeypatch.syspath_prepend(str(tmp_path))
        train(PPO, tmp_path, *SHORT)
        assert len(started) == 4
        os.kill(started[3].process.pid, signal.SIGKILL)
        started[3].process.wait()
        train(PPO, tmp_path, *SHORT)
        assert len(started) == 5


def test_what_was_cut_off_is_not_kept(started):
    """It may still have something to say to the run that is gone."""
    with tianji.warm():
        with pytest.raises(Failure), run._server(PPO, LOCAL):
            raise Failure("planted")
        assert run._spare == started, "a run that failed has heard all"
        with pytest.raises(KeyboardInterrupt), run._server(PPO, LOCAL):
            raise KeyboardInterrupt
        assert run._spare == []
        assert len(started) == 1
        assert started[0].process.poll() is not None


def test_another_thread_starts_its_own(started, tmp_path):
    """What it starts is killed when it ends."""
    with tianji.warm():
        thread = threading.Thread(target=lambda: train(PPO, tmp_path, *SHORT))
        thread.start()
        thread.join()
        train(PPO, tmp_path, *SHORT)
        assert len(started) == 2


def test_the_processes_end_with_the_program_that_keeps_them(tmp_path):
    down, up = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with tianji.warm():
                train(PPO, tmp_path, *SHORT)
                os.write(up, str(run._spare[0].process.pid).encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(up)
    server = int(os.read(down, 20))
    assert parent(server) == pid
    fd = os.pidfd_open(server)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert select.select([fd], [], [], 5.0)[0], "it outlived the program"
    for each in (down, fd):
        os.close(each)
