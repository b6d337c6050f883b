"""The local engine: the same as serial where nothing is relaxed, within its bounds where it is."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from local_runs import (
    CHAIN,
    DQN,
    LOCAL,
    NORMALISED,
    PPO,
    beside,
    fault,
    hosts_of,
    learnt,
    metrics,
    train,
)

import tianji
from tianji.machine import cores
from tianji.placement import Placement, placements
from tianji.role_names import parse_role

pytestmark = pytest.mark.usefixtures("one_server")


@pytest.mark.parametrize("actors", [2, 3])
@pytest.mark.parametrize(
    ("config", "relax"),
    [(NORMALISED, "sync"), (NORMALISED, "periodic"), (PPO, "sync"), (DQN, "sync")],
    ids=["normalised-sync", "normalised-periodic", "ppo-sync", "dqn-sync"],
)
def test_processes_learn_exactly_what_one_process_learns(config, relax, actors, tmp_path):
    """Observations and rewards are normalised in an order that counts; a round of DQN's actors is
    for several updates, and its targets sum three rewards."""
    scale = [f"scale.relax={relax}", f"scale.actors={actors}"]
    fit = ["algorithm.new_steps=24"] if config is DQN and actors == 3 else []
    serial = train(config, tmp_path, *scale, *fit)
    local = train(config, tmp_path, *scale, *fit, LOCAL)
    assert learnt(local) == learnt(serial)


def test_rollouts_that_the_launcher_has_allocated_are_not_refused_by_hosts(tmp_path):
    config = {**PPO, "env": CHAIN | {"imports": ["full_memory"]}}
    assert train(config, tmp_path, LOCAL).updates == 8


def test_a_window_of_batches_is_drawn_from_alike_and_its_freshness_is_told(tmp_path):
    serial = train(PPO, tmp_path, "reuse.window=2")
    local = train(PPO, tmp_path, "reuse.window=2", LOCAL)
    assert learnt(local) == learnt(serial)
    assert local.staleness["max"] == 1
    told = [
        {key: value for key, value in metrics(result)[-1].items() if key.startswith("staleness/")}
        for result in (serial, local)
    ]
    assert told[0] == told[1]
    # half of a batch is from the newest rollouts; of the others, about half was drawn before
    assert 0.6 < told[1]["staleness/freshness"] < 0.9
    assert told[1]["staleness/P"] == 0.5
    assert 0 < told[1]["staleness/mean"] < told[1]["staleness/max"] == 1


@pytest.mark.parametrize("stop", [{"return": 0.8, "updates": 500}, {"steps": 450}])
def test_a_run_ends_at_the_same_update_wherever_its_roles_are(stop, tmp_path):
    config = {**PPO, "stop": stop}
    serial, local = train(config, tmp_path), train(config, tmp_path, LOCAL)
    assert learnt(local) == learnt(serial)
    assert local.stop_reason != "updates >= 500"


def test_a_run_can_end_while_replay_still_fills_up(tmp_path):
    """Its warm-up is of more rollouts than a pipe has room for grants."""
    argv = ["scale.envs_per_actor=1", "scale.rollout_length=1", "algorithm.new_steps=2"]
    warmup = ["algorithm.warmup=6000", "algorithm.capacity=6000", "stop.steps=500"]
    result = train(DQN, tmp_path, *argv, *warmup, LOCAL)
    assert (result.stop_reason, result.updates) == ("steps >= 500", 0)


@pytest.mark.parametrize(
    ("config", "first", "then"),
    [
        (NORMALISED, "local", "local"),
        (NORMALISED, "serial", "local"),
        (DQN, "local", "local"),
        (DQN, "local", "serial"),
    ],
    ids=["ppo-local-local", "ppo-serial-local", "dqn-local-local", "dqn-local-serial"],
)
def test_a_run_that_was_stopped_goes_on_exactly_wherever_it_does(config, first, then, tmp_path):
    updates = config["stop"]["updates"]
    whole = train(config, tmp_path)
    half = train(config, tmp_path, f"scale.engine={first}", f"stop.updates={updates // 2}")
    rest = tianji.resume(half.run_dir, [f"stop.updates={updates}", f"scale.engine={then}"])
    assert rest.resumed == "exact"
    assert learnt(rest) == learnt(whole)


def test_checkpoints_on_the_way_change_nothing(tmp_path):
    """They are taken while actors are in the middle of rollouts that the next update streams."""
    plain = train(PPO, tmp_path, "scale.relax=periodic")
    often = ["checkpoint.every=1", "checkpoint.keep=20", "scale.relax=periodic"]
    result = train(PPO, tmp_path, *often, LOCAL)
    assert learnt(result) == learnt(plain)
    saved = list(Path(result.run_dir, "checkpoints").glob("step_*"))
    assert len(saved) == PPO["stop"]["updates"]


@pytest.mark.parametrize(("relax", "lead"), [("one_step", 1), ("bounded", 4)])
def test_staleness_is_at_most_the_lead(relax, lead, tmp_path):
    result = train(PPO, tmp_path, f"scale.relax={relax}", "stop.updates=60", LOCAL)
    assert result.updates == 60
    assert 0 < result.staleness["max"] <= lead
    assert result.filtered == 0


def test_a_free_run_and_a_balanced_one_end(tmp_path):
    for relax in ("free", "tianji"):
        result = train(PPO, tmp_path, f"scale.relax={relax}", "stop.updates=40", LOCAL)
        assert result.updates == 40
        assert result.staleness["max"] > 0
        assert Path(result.run_dir, "arrivals.bin").stat().st_size > 0
    assert result.staleness["max"] <= 3


def test_what_a_slow_actor_sends_too_late_is_filtered_and_counted(tmp_path):
    config = fault(who="actor-1", sleep=0.02, stop={"updates": 60})
    argv = ["scale.relax=tianji", "relax.max_staleness=1", "scale.actors=3"]
    result = train(config, tmp_path, *argv, "algorithm.sleep=0.005")
    assert result.staleness["max"] <= 1
    assert result.filtered > 0
    assert metrics(result)[-1]["staleness/filtered"] == result.filtered


REPLAY = {
    **fault(),
    "algorithm": {
        "name": "test_dqn", "warmup": 64, "capacity": 4000, "batch_size": 16, "new_steps": 8,
        "n_step": 3,
    },
    "stop": {"updates": 400},
}  # fmt: skip


@pytest.mark.slow
def test_a_run_without_its_store_fills_it_again_and_goes_on(tmp_path):
    """Its envs are slow, so that there are rows of metrics while it fills."""
    argv = ['env.kwargs={who="actor", sleep=0.08}', "checkpoint.store=never", "stop.updates=4"]
    half = train(REPLAY, tmp_path, *argv)
    rest = tianji.resume(half.run_dir, ["stop.updates=8"])
    assert rest.resumed == "inexact: store not saved, envs reset"
    assert rest.updates == 8
    # 64 steps to fill up and 8 for each update, in whole rounds of 32 rows, a few only resets
    assert 80 <= rest.steps - half.steps <= 64 + 4 * 8 + 32
    assert rest.replay_ratio == pytest.approx(8 * 16 / rest.steps)
    assert all(row["flow/consumed_sps"] >= 0 for row in metrics(rest))


@pytest.fixture(scope="module")
def serial_ratio(tmp_path_factory):
    return train(REPLAY, tmp_path_factory.mktemp("runs"), "scale.engine=serial").replay_ratio


def waits(result, role):
    return sum(v for kind, v in result.time[role].items() if kind.startswith("wait"))


def check_accounts(result):
    """The time of each kind of host adds up to all of it, in the end and in every row."""
    assert set(result.time) == {"actor", "buffer", "learner"}
    for shares in result.time.values():
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    rows = [row for row in metrics(result) if any(key.startswith("util/") for key in row)]
    assert rows
    for row in rows:
        roles = {}
        for key, share in row.items():
            if key.startswith("util/"):
                role = key.split("/")[1]
                roles[role] = roles.get(role, 0.0) + share
        assert roles, "a row without any role"
        for role, total in roles.items():
            assert total == pytest.approx(1, abs=0.01), role


@pytest.mark.parametrize(
    ("slow", "waiting"),
    [
        pytest.param(['env.kwargs={who="actor", sleep=0.01}'], "learner", marks=pytest.mark.slow),
        (["algorithm.sleep=0.01"], "actor"),
    ],
    ids=["slow env", "slow learner"],
)
def test_the_replay_ratio_is_held_whoever_is_slow_and_the_other_one_waits(
    slow, waiting, serial_ratio, tmp_path
):
    """An update takes about 1.5 ms and a step 0.2 ms: one side is slowed at least four times."""
    result = train(REPLAY, tmp_path, "scale.relax=tianji", *slow)
    assert result.replay_ratio == pytest.approx(serial_ratio, rel=0.02)
    assert waits(result, waiting) > 0.5
    working = "actor" if waiting == "learner" else "learner"
    assert waits(result, working) < 0.5
    check_accounts(result)


def test_evaluation_beside_training_finds_what_a_serial_one_finds(tmp_path):
    argv = ["eval.every=2", "eval.episodes=3"]
    plain = train(PPO, tmp_path)
    serial, local = train(PPO, tmp_path, *argv), train(PPO, tmp_path, *argv, LOCAL)
    assert local.params_sha256 == serial.params_sha256 == plain.params_sha256
    found = [
        {
            row["updates"]: (row["step"], row["eval/mean_reward"], row["eval/mean_ep_length"])
            for row in metrics(result)
            if "eval/mean_reward" in row
        }
        for result in (serial, local)
    ]
    assert list(found[0]) == [2, 4, 6, 8]
    assert 8 in found[1], "the last version was not evaluated"
    assert found[1].items() <= found[0].items()


def test_an_evaluation_may_be_done_before_the_word_of_it_arrives(tmp_path):
    """It then neither counts as step 0, nor is it waited for again."""
    config = fault(length=1, stop={"updates": 3})
    config["env"]["imports"].append("late_word")
    argv = ["eval.every=3", "eval.episodes=1"]
    waiting = threading.Timer(20, os.kill, (os.getpid(), signal.SIGTERM))
    waiting.start()
    result = train(config, tmp_path, *argv)
    waiting.cancel()
    assert result.wall_s < 20, "it was waited for until the signal came"
    assert result.stop_reason == "updates >= 3"
    (row,) = [row for row in metrics(result) if "eval/mean_reward" in row]
    assert row["step"] == result.steps


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def allowed(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [x for x in status.splitlines() if x.startswith("Cpus_allowed_list")]
    cores = set()
    for part in line.split()[1].split(","):
        low, _, high = part.partition("-")
        cores |= set(range(int(low), int(high or low) + 1))
    return cores


def test_hosts_that_wait_sleep_and_run_where_they_were_placed(tmp_path):
    """The learner sleeps through its second update: all others wait for it."""
    spent, found = {}, {}

    def watch():
        hosts = hosts_of(tmp_path / "run")
        found.update({role: allowed(pid) for role, pid in hosts.items()})
        before = {role: cpu_seconds(pid) for role, pid in hosts.items()}
        time.sleep(2)
        spent.update({role: cpu_seconds(pid) - before[role] for role, pid in hosts.items()})

    config = fault({"sleep": 2.2}, stop={"updates": 2})
    with beside(watch):
        result = train(config, tmp_path, name="run")
    for role in ("actor-0", "actor-1", "buffer"):
        # 2 % of 2 s, and a tick of the clock that CPU time is counted by
        assert spent[role] < 0.04 + 0.02, f"{role} used {spent[role]} s of CPU in 2 s of waiting"
    placed = placements(
        {name: (parse_role(name),) for name in found}, sorted(os.sched_getaffinity(0)), 1, pin=True
    )
    expected = {p.host: set(p.cores) or os.sched_getaffinity(0) for p in placed}
    assert found == expected
    row = metrics(result)[-1]
    assert (row["train/threads"], row["train/cores"]) == (1, len(expected["learner"]))


def test_the_learner_computes_with_as_many_threads_as_it_has_cores(tmp_path):
    n = min(2, cores())
    result = train(fault(stop={"updates": 1}), tmp_path, f"scale.cores={n}")
    assert metrics(result)[-1]["train/threads"] == n


def test_an_actor_on_one_core_serves_a_learner_on_several(tmp_path, monkeypatch):
    first = min(os.sched_getaffinity(0))

    def placed(roles, cores, learner_cores, pin, env_threads, device):
        return [
            Placement(role, () if role == "learner" else (first,), learner_cores) for role in roles
        ]

    monkeypatch.setattr("tianji.engines.local.placements", placed)
    result = train(fault(stop={"updates": 1}), tmp_path, f"scale.cores={cores()}")
    assert result.updates == 1
