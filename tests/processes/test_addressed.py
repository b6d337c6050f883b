"""A transport whose offers are addresses, and which says nothing of descriptors."""

import os
import signal

import addressed
import pytest
from local_runs import LOCAL, PPO, beside, hosts_of, learnt, train, until, updates_of

from tianji.engines.local import LocalEngine
from tianji.testing import check_transport

pytestmark = pytest.mark.usefixtures("one_server", "told_soon")

CARTPOLE = {**PPO, "env": {"id": "CartPole-v1", "imports": ["addressed"]}}


def test_it_keeps_its_promises():
    before = set(os.listdir("/proc/self/fd"))
    check_transport(addressed.Addressed, items=100, processes=True, deadline=20.0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_cartpole_learns_the_same_over_it(tmp_path, monkeypatch):
    ours = train(CARTPOLE, tmp_path, LOCAL)
    monkeypatch.setattr(LocalEngine, "transport", "addressed")
    assert learnt(train(CARTPOLE, tmp_path, LOCAL)) == learnt(ours)


def test_an_actor_that_is_killed_is_followed_by_one_that_connects_again(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalEngine, "transport", "addressed")
    folder = tmp_path / "run"

    def act():
        os.kill(hosts_of(folder)["actor-1"], signal.SIGKILL)
        count = updates_of(folder)
        until(lambda: updates_of(folder) > count + 20)
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(act):
        result = train(CARTPOLE, tmp_path, LOCAL, "stop.updates=1_000_000", name="run")
    assert (result.status, result.notes["restarts"]) == ("stopped", 1)
    assert result.staleness["max"] == 0
