"""What went wrong: how it is told, how often it may, and how a run goes on from a checkpoint."""

import copy
import json
import math
from itertools import pairwise

import pytest
from thorough import THOROUGH

from tianji.actor import SIMULATE
from tianji.annotated import read
from tianji.buffer import GRANT
from tianji.build import build
from tianji.config import FaultsConfig, load_config
from tianji.driver import Serial, Shuffled
from tianji.engines.hosts import Host
from tianji.engines.parts import advance, gather, scatter
from tianji.engines.supervisor import Supervisor
from tianji.errors import Failure
from tianji.fault import Budget, Fault, raised
from tianji.learner import UPDATE
from tianji.machine import oom_kills
from tianji.placement import Placement
from tianji.record import Recorder
from tianji.types import sha256
from tianji.view.status import SilentView


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_budget_is_spent_after_so_many_times_and_its_window_slides():
    clock = Clock()
    budget = Budget(2, 10.0, clock)
    assert budget.spend()
    clock.now += 6
    assert budget.spend()
    assert not budget.spend()
    clock.now += 3.9
    assert not budget.spend(), "9.9 s after the first"
    clock.now += 0.1
    assert budget.spend()
    assert not budget.spend(), "the second and the third are within 10 s"
    clock.now += 100
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_what_was_refused_does_not_count_as_spent():
    clock = Clock()
    budget = Budget(1, 10.0, clock)
    budget.spend()
    for _ in range(5):
        clock.now += 1.5
        assert not budget.spend()
    clock.now += 2.5
    assert budget.spend(), "tries that were refused would else move the window on for ever"


def test_a_budget_of_nothing_is_spent_at_once_and_says_what_it_is():
    budget = Budget(0, 600.0, Clock())
    assert not budget.spend()
    assert str(Budget(3, 600.0)) == "3 within 600 s"


def test_a_fault_survives_json_and_refuses_keys_that_are_not_its_own():
    fault = Fault("actor-1", "it hangs", "role", 17, "SIGKILL", None, True, "File x", 5, 6, 7, "y")
    assert len(set(map(repr, fault.tree().values()))) == len(fault.tree()), "fields are told apart"
    tree = json.loads(json.dumps(fault.tree()))
    assert read(Fault, tree) == fault
    assert read(Fault, fault.then("restarted").tree()).action == "restarted"
    with pytest.raises(ValueError, match='it has no "cause"'):
        read(Fault, {"role": "actor-1"})
    with pytest.raises(ValueError, match='"time" is unknown here'):
        read(Fault, tree | {"time": "2026"})


def test_an_env_that_raised_is_told_with_all_that_is_needed_to_see_it_again():
    try:
        raise ZeroDivisionError("broken")
    except ZeroDivisionError as error:
        fault = raised(error, "actor-3", "toy/X", seed=11, step=22, aborted=4)
    assert (fault.kind, fault.seed, fault.step, fault.aborted) == ("env", 11, 22, 4)
    assert fault.exception == "ZeroDivisionError: broken"
    assert "raised ZeroDivisionError: broken in step 22 after its reset with seed 11" in fault.cause
    assert "test_fault.py" in fault.traceback
    spoilt = raised(Failure("nan in its obs"), "actor-3", "toy/X", 11, 22, 4)
    assert "toy/X returned nan in its obs in step 22" in spoilt.cause
    assert (spoilt.exception, spoilt.traceback) == (None, "")


def groups(tmp_path, lines, files):
    mine, root = tmp_path / "cgroup", tmp_path / "fs"
    mine.write_text("".join(f"{line}\n" for line in lines))
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return oom_kills(root, mine)


def test_kills_for_lack_of_memory_are_read_from_the_newer_control_groups(tmp_path):
    files = {
        "jobs/mine/memory.events": "low 0\nhigh 8\nmax 9\noom 3\noom_kill 2\noom_group_kill 5\n",
        "jobs/memory.events": "low 0\noom 3\noom_kill 4\n",
        "other/memory.events": "oom_kill 90\n",
    }
    assert groups(tmp_path, ["0::/jobs/mine"], files) == 4, "groups around it count theirs, too"


def test_kills_for_lack_of_memory_are_read_from_the_older_control_groups(tmp_path):
    files = {
        "memory/mine/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 3\n",
        "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "cpu/mine/memory.oom_control": "oom_kill 90\n",
        "mine/memory.events": "oom_kill 91\n",
    }
    lines = ["5:cpu:/mine", "4:memory:/mine", "0::/"]
    assert groups(tmp_path, lines, files) == 3


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ([], {}),
        (["0::/"], {}),
        (["4:memory:/x"], {"memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}),
    ],
    ids=["nothing", "no file", "an old kernel that does not count"],
)
def test_where_kills_are_not_told_there_are_none(lines, files, tmp_path):
    assert groups(tmp_path, lines, files) == 0
    assert oom_kills(tmp_path, tmp_path / "no such file") == 0


PPO = {
    "env": {"id": "toy/Chain", "kwargs": {"anywhere": True, "limit": 20}},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [4]},
    "scale": {"actors": 2, "envs_per_actor": 2, "rollout_length": 4},
    "stop": {"updates": 10**6},
}
DQN = {
    **PPO,
    "algorithm": {
        "name": "dqn", "warmup": 96, "capacity": 200, "batch_size": 8, "new_steps": 4, "n_step": 3,
    },
}  # fmt: skip
ROWS = 8
"""of a rollout"""
AT, LOST, MORE = 9, 40, 24
"""the checkpoint's version, updates that are lost after it, and updates that follow"""
BOUNDS = {"sync": 0, "periodic": 0, "one_step": 1, "bounded": 4, "tianji": 3, "free": math.inf}
"""staleness of an on-policy run, at most"""
MOST_TICKS = 50_000


def presets():
    for name in BOUNDS:
        yield pytest.param(PPO, name, id=f"ppo-{name}")
        if name != "periodic":
            yield pytest.param(DQN, name, id=f"dqn-{name}")


class Going:
    """A run in one thread, whose roles take turns in a random order, as far as it was recorded."""

    def __init__(self, config, relax, folder, seed, parts=None):
        # The presets are those of processes, though there are none here.
        self.config = load_config(config, [f"scale.relax={relax}", "scale.engine=local"])
        self.built = build(self.config)
        self.driver = Shuffled(self.built.roles, seed)
        self.recorder = Recorder(folder, SilentView(), {})
        self.reports, self.grants, self.counts = [], 0, []
        if parts is None:
            self.built.learner.begin()
        else:
            self.recorder.load_state(parts["run"]["recorder"])
            joined = self.built.assembly
            states = scatter(parts, joined.graph, 0, joined.memory(self.built.transport))
            for role in self.built.roles:
                role.load_state(states[role.name])

    def until(self, version):
        learner, buffer = self.built.learner, self.built.buffer
        for _ in range(MOST_TICKS):
            did = self.driver.step()
            self.grants += did is GRANT
            if did is UPDATE:
                self.reports.append(learner.report)
                self.recorder.update(learner.report)
            self.counts.append((buffer.produced, buffer.received, learner.consumed))
            if learner.version >= version and learner.between_batches:
                return self
        raise AssertionError(f"it stands still at update {learner.version}")

    def parts(self):
        joined, roles = self.built.assembly, self.built.roles
        memory = joined.memory(self.built.transport)
        states = {role.name: role.state() for role in roles}
        policy = self.built.learner.policy_state()
        return copy.deepcopy(gather(joined.graph, 0, memory, states, policy, math.inf))


def recovered(config, relax, tmp_path, seed, lost=LOST):
    """The run before, what was recorded of it, what was taken of it before, and the run after."""
    before = Going(config, relax, tmp_path / f"before-{seed}", seed).until(AT)
    parts = before.parts()
    if lost:
        before.until(AT + lost)
    state = before.recorder.state()
    assert advance(parts, state, config is PPO) == before.built.learner.version - AT
    parts["run"]["recorder"] = state
    after = Going(config, relax, tmp_path / f"after-{seed}", seed + 1, copy.deepcopy(parts))
    return before, state, parts, after


@pytest.mark.parametrize(("config", "relax"), list(presets()))
def test_a_run_that_lost_updates_goes_on_without_a_burst_and_counts_only_rise(
    config, relax, tmp_path
):
    for seed in range(4 if THOROUGH else 1):
        _, recorded, parts, after = recovered(config, relax, tmp_path, seed)
        version = recorded["version"]
        assert parts["policy"]["version"] == parts["trainer"]["version"] == version
        lead, balance = after.built.assembly.relax.lead, after.built.buffer._balance
        filling = config is PPO or balance.filling()
        after.until(version + MORE)
        versions = [report.version for report in after.reports]
        assert versions == list(range(version + 1, version + 1 + len(versions)))
        for name in ("produced", "received", "consumed"):
            told = [recorded[name], *(getattr(report, name) for report in after.reports)]
            assert all(a <= b for a, b in pairwise(told)), f"{name}: {told}"
        first = tuple(recorded[name] for name in ("produced", "received", "consumed"))
        for a, b in pairwise([first, *after.counts]):
            assert all(x <= y for x, y in zip(a, b, strict=True)), (a, b)
        if config is PPO:
            assert max(r.staleness.max() for r in after.reports) <= BOUNDS[relax]
            assert min(r.staleness.min() for r in after.reports) >= 0, "not yet made, or stale"
        if balance.paced and math.isfinite(lead):
            # one round more, as grants come in whole ones; replay that is full needs no warm-up
            rows = (len(versions) + 1 + lead) * balance.steps_per_update
            rows += balance.warmup if filling and config is DQN else 0
            assert after.grants <= rows / ROWS + 2, "production ran ahead of the learner"


@pytest.mark.parametrize("relax", ["sync", "one_step"])
@pytest.mark.parametrize("config", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_checkpoint_of_which_nothing_was_lost_goes_on_as_if_nothing_had_been(
    config, relax, tmp_path
):
    before, _, parts, after = recovered(config, relax, tmp_path, 0, lost=0)
    assert after.built.learner.version == AT
    assert sha256(after.built.learner.networks()) == sha256(before.built.learner.networks())
    assert ("store" in parts) == (config is DQN), "rollouts of an on-policy run are left out"
    after.until(AT + 3)
    assert after.reports[0].version == AT + 1


def test_replay_that_was_saved_is_not_filled_again_after_a_loss(tmp_path):
    _, _, _, after = recovered(DQN, "tianji", tmp_path, 0)
    simulated = 0
    while not after.reports:
        did = after.driver.step()
        simulated += did is SIMULATE
        if did is UPDATE:
            after.reports.append(after.built.learner.report)
    assert simulated < 96 // 2, "steps of two envs each; the warm-up is 96"


def test_what_was_learnt_without_its_store_goes_on_from_the_recorded_counts(tmp_path):
    before = Going(DQN, "tianji", tmp_path / "before", 0).until(AT)
    joined, memory = before.built.assembly, before.built.assembly.memory(before.built.transport)
    states = {role.name: role.state() for role in before.built.roles}
    policy = before.built.learner.policy_state()
    parts = copy.deepcopy(gather(joined.graph, 0, memory, states, policy, -1))
    before.until(AT + 5)
    state = before.recorder.state()
    assert advance(parts, state, on_policy=False) == before.built.learner.version - AT
    parts["run"]["recorder"] = state
    after = Going(DQN, "tianji", tmp_path / "after", 1, parts).until(state["version"] + 3)
    assert after.reports[0].version == state["version"] + 1
    assert after.reports[0].received >= state["received"] + 96, "it fills up again first"


def test_a_serial_run_that_lost_updates_goes_on(tmp_path):
    """In the fixed order of a serial run, where standing still is an error."""
    for config in (PPO, DQN):
        _, recorded, _, after = recovered(config, "sync", tmp_path / str(config is PPO), 0)
        after.driver = Serial(after.built.roles)
        after.until(recorded["version"] + MORE)
        assert after.reports[-1].version == recorded["version"] + MORE


def test_more_that_was_recorded_than_the_checkpoint_knows_is_the_first_actors(tmp_path):
    before = Going(DQN, "tianji", tmp_path, 0).until(AT)
    parts, state = before.parts(), before.recorder.state()
    made = sum(parts["run"]["buffer"]["produced"])
    advance(parts, state | {"produced": made + 100, "received": made + 90}, on_policy=False)
    assert sum(parts["run"]["buffer"]["produced"]) == made + 100
    assert parts["run"]["buffer"]["received"] == parts["trainer"]["received"] == made + 90
    assert (parts["store"]["batches"]["counts"][:, 0] >= made + 100).all()


def test_a_host_is_begun_anew_at_once_unless_its_lives_are_short_again_and_again(monkeypatch):
    """What dies at once would die again; what dies now and then costs the run no waiting."""
    clock = Clock()
    monkeypatch.setattr("tianji.engines.supervisor.time.monotonic", clock)
    supervisor = Supervisor(FaultsConfig(), [], None, None, None)

    def lived(seconds, role="actor-0"):
        host = Host(Placement(role, (), 1), 0, 0, None, born=clock.now)
        clock.now += seconds
        return supervisor._wait(host)

    assert [lived(1) for _ in range(7)] == [0, 0.25, 0.5, 1, 2, 4, 4]
    assert lived(1, "actor-1") == 0, "another one's lives are its own"
    assert [lived(60), lived(1), lived(1)] == [0, 0, 0.25]
