"""Graphs that no config makes: roles that are not ours, and several actors in one process."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from local_runs import CHAIN, LOCAL, PPO, beside, hosts_of, learnt, train, until, updates_of

from tianji.build import look
from tianji.channel import Conduit
from tianji.checkpoint import Checkpoints
from tianji.config import load_config
from tianji.graph import Graph, Joint
from tianji.role_names import KINDS, RoleName
from tianji.types import leaf

pytestmark = pytest.mark.usefixtures("one_server", "told_soon")


@pytest.fixture
def own_kinds():
    """They are known here, too, while a test needs them."""
    import own_roles

    KINDS.update({kind.name: kind for kind in own_roles.KINDS})
    yield
    for kind in own_roles.KINDS:
        del KINDS[kind.name]


def with_ticks(graph):
    ticker, counter = RoleName("ticker"), RoleName("counter")
    ticks = Conduit("ticks", "queue", {"number": leaf((1,), np.int64)}, slots=4)
    return Graph(
        (*graph.roles, ticker, counter),
        {**graph.hosts, "ticker": (ticker,), "counter": (counter,)},
        (*graph.joints, Joint("ticks", ticks, ticker, (counter,))),
    )


def with_actors_together(graph):
    actors = tuple(role for role in graph.roles if role.kind == "actor")
    apart = {host: roles for host, roles in graph.hosts.items() if roles[0] not in actors}
    return replace(graph, hosts={"actors": actors, **apart})


def changed(monkeypatch, change):
    def looked(config):
        setup, graph = look(config)
        return setup, change(graph)

    monkeypatch.setattr("tianji.engines.local.look", looked)


def test_a_role_that_is_not_ours_runs_beside_a_run_and_is_saved_with_it(
    own_kinds, tmp_path, monkeypatch
):
    changed(monkeypatch, with_ticks)
    config = {**PPO, "env": CHAIN | {"imports": ["own_roles"]}, "stop": {"updates": 30}}
    result = train(config, tmp_path, LOCAL)
    monkeypatch.undo()
    assert learnt(result) == learnt(train(config, tmp_path))
    run, identity = Path(result.run_dir), load_config(config).identity()
    others = Checkpoints(run / "checkpoints", 1, identity).load().parts["run"]["others"]
    assert set(others) == {"counter", "ticker"}
    count, total = others["counter"]["count"], others["counter"]["sum"]
    assert 0 < count <= others["ticker"]["next"]
    assert total == count * (count - 1) // 2, "none is lost or doubled"
    assert 0 < result.time["counter"]["count"] <= 1
    assert (run / "logs" / "ticker.log").exists()


def test_two_actors_in_one_process_learn_what_one_process_learns(tmp_path, monkeypatch):
    changed(monkeypatch, with_actors_together)
    local = train(PPO, tmp_path, LOCAL)
    serial = train(PPO, tmp_path)
    assert learnt(local) == learnt(serial)
    assert Path(local.run_dir, "logs", "actors.log").exists()


def test_two_actors_in_one_process_are_restarted_together(tmp_path, monkeypatch):
    changed(monkeypatch, with_actors_together)

    folder = tmp_path / "run"

    def act():
        os.kill(hosts_of(folder)["actors"], signal.SIGKILL)
        count = updates_of(folder)
        until(lambda: updates_of(folder) > count + 20)
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(act):
        result = train(PPO, tmp_path, LOCAL, "stop.updates=1_000_000", name="run")
    assert (result.status, result.notes["restarts"]) == ("stopped", 1)
    assert result.staleness["max"] == 0
