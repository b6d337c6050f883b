"""Whole runs through the Python interface: exactness, resuming, what a folder holds."""

import dataclasses
import json
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import tianji
from tianji import Failure, Refusal
from tianji.build import build
from tianji.config import load_config
from tianji.driver import Serial
from tianji.env import Discrete, EnvSpec, TimeStep, register_env
from tianji.machine import cores
from tianji.plan import Choice
from tianji.profile import subject
from tianji.testing.algorithm import run_updates
from tianji.types import leaf, sha256

PPO = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2},
    "network": {"hidden": [16]},
    "scale": {"envs_per_actor": 4, "rollout_length": 16},
    "stop": {"updates": 6},
}
DQN = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {
        "name": "dqn", "warmup": 200, "capacity": 600, "batch_size": 32, "new_steps": 8,
        "n_step": 3,
    },
    "network": {"hidden": [16]},
    "scale": {"actors": 2, "envs_per_actor": 4, "rollout_length": 8},
    "stop": {"updates": 60},
}  # fmt: skip
NORMALISED = {
    **PPO,
    "env": {"id": "toy/Identity", "kwargs": {"continuous": True}},
    "algorithm": {
        "name": "ppo", "epochs": 2, "normalise_observation": True, "normalise_reward": True,
    },
}  # fmt: skip
both = pytest.mark.parametrize("config", [PPO, DQN], ids=["ppo", "dqn"])


def train(config, tmp_path, *overrides, **kwargs):
    return tianji.train(config, overrides, runs=tmp_path, **kwargs)


def metrics(result):
    lines = Path(result.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@both
def test_the_same_config_and_seed_learn_the_same_and_another_seed_does_not(config, tmp_path):
    hashes = [train(config, tmp_path, f"seed={seed}").params_sha256 for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


PRIORITISED = {**DQN, "algorithm": {**DQN["algorithm"], "prioritized": True}}


@pytest.mark.parametrize(
    "config",
    [PPO, DQN, NORMALISED, PRIORITISED],
    ids=["ppo", "dqn", "normalised", "prioritised"],
)
@pytest.mark.parametrize("relax", ["sync", "one_step"])
def test_a_resumed_run_equals_one_that_was_never_stopped(config, relax, tmp_path):
    updates = config["stop"]["updates"]
    whole = train(config, tmp_path, f"scale.relax={relax}")
    for first in (updates // 2, updates - 1):
        half = train(config, tmp_path, f"scale.relax={relax}", f"stop.updates={first}")
        rest = tianji.resume(half.run_dir, [f"stop.updates={updates}"])
        assert rest.resumed == "exact"
        assert rest.params_sha256 == whole.params_sha256
        assert (rest.steps, rest.episodes) == (whole.steps, whole.episodes)
        assert rest.return_mean == pytest.approx(whole.return_mean)


@both
def test_a_resumed_run_ends_at_the_same_update_by_its_count_of_steps(config, tmp_path):
    """Stop conditions are judged at updates, also by a process that has not made one yet."""
    half = train(config, tmp_path, name="half")
    for more in (1, 20, 100):
        end = ["stop.updates=1000", f"stop.steps={half.steps + more}"]
        whole = train(config, tmp_path, *end)
        shutil.copytree(tmp_path / "half", tmp_path / f"rest-{more}", symlinks=True)
        rest = tianji.resume(tmp_path / f"rest-{more}", end)
        assert (rest.updates, rest.params_sha256) == (whole.updates, whole.params_sha256)


@both
def test_checkpoints_on_the_way_change_nothing(config, tmp_path):
    plain = train(config, tmp_path)
    often = train(config, tmp_path, "checkpoint.every=1", "checkpoint.keep=2")
    assert often.params_sha256 == plain.params_sha256


@both
def test_evaluation_beside_training_changes_nothing_and_is_recorded(config, tmp_path):
    plain = train(config, tmp_path)
    every = config["stop"]["updates"] // 3
    evaluated = train(config, tmp_path, f"eval.every={every}", "eval.episodes=3")
    assert evaluated.params_sha256 == plain.params_sha256
    rows = [row for row in metrics(evaluated) if "eval/mean_reward" in row]
    assert [row["updates"] for row in rows] == [every, 2 * every, 3 * every]


def test_the_best_checkpoint_is_the_one_that_was_evaluated_best(tmp_path):
    argv = ["eval.every=2", "eval.episodes=4", "checkpoint.every=2", "checkpoint.keep=10"]
    result = train(PPO, tmp_path, *argv, "stop.updates=8")
    rows = [row for row in metrics(result) if "eval/mean_reward" in row]
    scores = {}
    for path in Path(result.run_dir, "checkpoints").glob("step_*/MANIFEST.json"):
        manifest = json.loads(path.read_text())
        scores[manifest["meta"]["updates"]] = manifest["score"]
    assert scores == {row["updates"]: row["eval/mean_reward"] for row in rows}
    best = json.loads(Path(result.run_dir, "checkpoints", "best", "MANIFEST.json").read_text())
    assert best["score"] == max(scores.values())


def test_resuming_an_env_that_cannot_be_saved_says_so(tmp_path):
    config = {**PPO, "env": {"id": "Acrobot-v1"}}
    half = train(config, tmp_path, "stop.updates=2")
    rest = tianji.resume(half.run_dir, ["stop.updates=4"])
    assert rest.resumed == "inexact: envs reset"
    assert rest.updates == 4
    assert rest.steps > half.steps


def test_resuming_without_the_store_fills_it_again(tmp_path):
    half = train(DQN, tmp_path, "stop.updates=20", "checkpoint.store=never")
    rest = tianji.resume(half.run_dir, ["stop.updates=40"])
    assert rest.resumed == "inexact: store not saved, envs reset"
    assert rest.updates == 40
    # 200 steps to fill up and 8 for each update, in whole rollouts of 32 rows, a few only resets
    assert 280 <= rest.steps - half.steps <= 200 + 20 * 8 + 64


def pauses(config, *overrides, stride):
    """A run that pauses again and again, `stride` driver steps apart."""
    resolved = load_config(config, overrides)
    built = build(resolved)
    built.learner.begin()
    driver = Serial(built.roles)
    while True:
        for _ in range(stride):
            driver.step()
        while not built.learner.between_batches:
            driver.step()
        if built.learner.version > 4:
            return
        yield resolved, built, driver


@pytest.mark.parametrize("relax", ["sync", "one_step"])
@both
def test_what_was_learnt_goes_on_from_any_moment_without_the_store(config, relax):
    """Also from right after a batch was served, which is lost with the store."""
    served = 0
    for resolved, built, _ in pauses(config, f"scale.relax={relax}", stride=2):
        served += built.buffer._balance.served > built.learner.version
        version = built.learner.version
        again = build(resolved)
        again.learner.load_state(built.learner.state() | {"batches": None})
        again.buffer.load_state(built.buffer.state() | {"store": None, "version": version})
        for actor, old in zip(again.actors, built.actors, strict=True):
            actor.load_state({k: v for k, v in old.state().items() if k != "env"})
        run_updates(again, Serial(again.roles), 2)
    assert served > 0, "no moment with a batch on its way was among them"


def copy_memory(source, target):
    """What channels hold, as a checkpoint brings it."""
    for name, pipe in source.transport._pipes.items():
        for key, array in pipe.memory.items():
            target.transport._pipes[name].memory[key][:] = array


def whole_run(config, *overrides):
    """What is learnt in six updates."""
    whole = build(load_config(config, overrides))
    whole.learner.begin()
    run_updates(whole, Serial(whole.roles), 6)
    return sha256(whole.learner.networks())


def gone_on(resolved, built, driver):
    """What is learnt in six updates, of which another process makes the rest."""
    again = build(resolved)
    copy_memory(built, again)
    again.learner.load_state(built.learner.state())
    again.buffer.load_state(built.buffer.state())
    for actor, old in zip(again.actors, built.actors, strict=True):
        actor.load_state(old.state())
    going_on = Serial(again.roles)
    going_on.at = driver.at
    run_updates(again, going_on, 6 - again.learner.version)
    return sha256(again.learner.networks())


@pytest.mark.parametrize("relax", ["sync", "one_step", "bounded"])
@both
def test_a_run_goes_on_exactly_from_any_moment(config, relax):
    override = f"scale.relax={relax}"
    expected = whole_run(config, override)
    for paused in pauses(config, override, stride=37):
        assert gone_on(*paused) == expected


def test_a_run_goes_on_exactly_from_a_rollout_that_is_full_and_not_pushed():
    expected, full = whole_run(PPO, "scale.relax=one_step"), 0
    for resolved, built, driver in pauses(PPO, "scale.relax=one_step", stride=1):
        actor = built.actors[0]
        if actor._rollout is not None and actor._parts[0].t == resolved.scale.rollout_length:
            assert gone_on(resolved, built, driver) == expected
            full += 1
        if full == 3:
            return
    raise AssertionError("no such moment was found")


def test_who_is_granted_the_next_rollout_is_no_other_after_a_pause():
    overrides = ["scale.relax=one_step", "scale.actors=3", "scale.envs_per_actor=2"]
    paused = 0
    for resolved, built, _ in pauses(PPO, *overrides, stride=5):
        again = build(resolved)
        again.buffer.load_state(built.buffer.state())
        assert again.buffer._began == built.buffer._began
        again.buffer._begin(0)
        assert again.buffer._began[0] > max(built.buffer._began)
        paused += len(set(built.buffer._began)) == 3
    assert paused, "in no pause had all three begun"


def test_a_streamed_run_goes_on_exactly_from_any_moment():
    test_a_run_goes_on_exactly_from_any_moment(PPO, "periodic")


def test_envs_that_begin_anew_do_not_repeat_the_first_episodes(tmp_path):
    config = load_config({**PPO, "env": {"id": "Acrobot-v1"}})
    first, second = build(config).actors[0], build(config).actors[0]
    assert np.array_equal(first._parts[0].observation["obs"], second._parts[0].observation["obs"])
    state = first.state()
    second.load_state(state)
    assert not np.array_equal(
        first._parts[0].observation["obs"], second._parts[0].observation["obs"]
    )


def test_a_run_that_has_ended_is_not_resumed_without_a_later_end(tmp_path):
    done = train(PPO, tmp_path)
    with pytest.raises(Refusal, match=r"already ended.*stop\.updates=12"):
        tianji.resume(done.run_dir)


def test_resuming_with_another_algorithm_is_refused(tmp_path):
    done = train(PPO, tmp_path, "stop.updates=1")
    with pytest.raises(Refusal, match="another run"):
        tianji.resume(done.run_dir, ["algorithm.gamma=0.5"])


def test_a_checkpoint_of_another_config_is_refused(tmp_path):
    done = train(PPO, tmp_path, "stop.updates=1")
    path = Path(done.run_dir, "config.toml")
    path.write_text(path.read_text().replace("gamma = 0.99", "gamma = 0.5"))
    with pytest.raises(Refusal, match="config"):
        tianji.resume(done.run_dir, ["stop.updates=2"])


def test_the_run_folder_holds_what_one_needs_to_know(tmp_path):
    result = train(PPO, tmp_path, name="first")
    folder = tmp_path / "first"
    assert str(folder) == result.run_dir
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["algorithm"]["gamma"] == 0.99
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["packages"]["torch"]
    assert {"seed", "command", "commit", "machine", "python", "created"} <= manifest.keys()
    assert (folder / "log.txt").read_text()
    assert json.loads((folder / "result.json").read_text())["params_sha256"] == result.params_sha256
    assert (folder / "checkpoints" / "latest").resolve().is_dir()
    assert list((folder / "tb").iterdir())


def test_a_run_folder_that_exists_is_refused(tmp_path):
    train(PPO, tmp_path, "stop.updates=1", name="twice")
    with pytest.raises(Refusal, match="exists already"):
        train(PPO, tmp_path, "stop.updates=1", name="twice")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    folders = {train(PPO, tmp_path, "stop.updates=1").run_dir for _ in range(4)}
    assert len(folders) == 4


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(Refusal):
        train(PPO, tmp_path, "env.id=CartPol-v1")
    with pytest.raises(Refusal):
        train({**DQN, "env": {"id": "Pendulum-v1"}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_learnt_policy_can_be_loaded_and_acts(tmp_path):
    result = train(PPO, tmp_path)
    trained = tianji.load(result.run_dir)
    one = trained.policy.act(np.zeros(4))
    many = trained.policy.act(np.zeros((5, 4)))
    assert one in (0, 1)
    assert many.tolist() == [one] * 5
    with pytest.raises(ValueError, match="shape"):
        trained.policy.act(np.zeros(3))


def test_an_action_is_not_changed_by_the_next_one(tmp_path):
    policy = tianji.load(train(NORMALISED, tmp_path).run_dir).policy
    shape = policy._shape
    first = policy.act(np.ones(shape))
    kept = first.copy()
    policy.act(-np.ones(shape))
    assert np.array_equal(first, kept)


def test_an_evaluation_has_as_many_episodes_as_asked(tmp_path):
    trained = tianji.load(train(PPO, tmp_path).run_dir)
    assert len(trained.evaluate(episodes=3)) == 3


def test_each_stop_condition_ends_a_run(tmp_path):
    for stop, reason in (
        ({"steps": 200}, "steps >= 200"),
        ({"updates": 2}, "updates >= 2"),
        ({"seconds": 0.2}, "seconds >= 0.2"),
        ({"return": 5.0, "updates": 500}, "return >= 5"),
    ):
        result = train({**PPO, "stop": stop}, tmp_path)
        assert (result.status, result.stop_reason, result.exit_code) == ("done", reason, 0)


def test_a_run_can_end_before_the_first_update(tmp_path):
    result = train(DQN, tmp_path, "algorithm.warmup=2000", "algorithm.capacity=2000",
                   "stop.steps=500")  # fmt: skip
    assert result.stop_reason == "steps >= 500"
    assert 500 <= result.steps < 1000
    assert result.updates == 0


def test_a_linear_schedule_reaches_zero_at_the_end_and_not_before(tmp_path):
    config = {
        **PPO,
        "env": {"id": "toy/Identity", "kwargs": {"length": 2}},
        "stop": {"steps": 3000},
    }
    result = train(config, tmp_path, "algorithm.schedule=linear", "algorithm.learning_rate=1.0")
    resolved = load_config(config, ["algorithm.schedule=linear", "algorithm.learning_rate=1.0"])
    built = build(resolved)
    built.learner.begin()
    run_updates(built, Serial(built.roles), result.updates)
    assert 0 < built.learner.report.metrics["learning_rate"] < 0.05


@pytest.mark.parametrize(("length", "envs"), [(1, 1), (1, 2), (2, 1)])
def test_the_smallest_batches_train(length, envs, tmp_path):
    config = {**PPO, "env": {"id": "toy/Identity", "kwargs": {"length": 1}}}
    overrides = [f"scale.rollout_length={length}", f"scale.envs_per_actor={envs}"]
    assert train(config, tmp_path, *overrides, "algorithm.minibatches=1").updates == 6


def test_a_return_is_only_believed_after_100_episodes(tmp_path):
    result = train({**PPO, "stop": {"return": 5.0, "updates": 500}}, tmp_path)
    assert result.episodes >= 100


def test_counts_agree_with_each_other(tmp_path):
    result = train(DQN, tmp_path)
    rows = metrics(result)
    assert rows[-1]["step"] == result.steps == rows[-1]["time/total_timesteps"]
    # replay ratio: 32 consumed for each 8 rows; rows that only reset an env are not steps
    assert rows[-1]["updates"] == 60
    assert result.staleness["max"] > 0


@register_env("test/Faulty")
class Faulty:
    """Gives a NaN, raises, or explodes after some steps, as asked."""

    def __init__(
        self, num_envs, nan_after=10**9, raise_after=10**9, reward=0.0, close_raises=False
    ):
        self._close_raises = close_raises
        self.spec = EnvSpec("test/Faulty", {"obs": leaf((2,), np.float32)}, Discrete(2))
        self.num_envs = num_envs
        self._nan, self._raise, self._reward, self._t = nan_after, raise_after, reward, 0

    def _observation(self):
        value = np.nan if self._t > self._nan else 0.5
        return {"obs": np.full((self.num_envs, 2), value, np.float32)}

    def reset(self, seed):
        return self._observation()

    def step(self, action):
        self._t += 1
        if self._t > self._raise:
            raise RuntimeError("the simulator broke")
        no = np.zeros(self.num_envs, np.bool_)
        reward = np.full(self.num_envs, self._reward, np.float32)
        return TimeStep(self._observation(), reward, no, no, ~no)

    def close(self):
        if self._close_raises:
            raise RuntimeError("stuck")


def faulty(**kwargs):
    return {**PPO, "env": {"id": "test/Faulty", "kwargs": kwargs}}


def faults(folder):
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


def test_an_env_that_returns_nan_is_rebuilt_and_the_fault_says_where(tmp_path):
    result = train(faulty(nan_after=40), tmp_path, name="nan")
    assert result.status == "done"
    assert result.notes["env_restarts"] == len(faults(tmp_path / "nan")) > 0
    first = faults(tmp_path / "nan")[0]
    words = r"test/Faulty returned nan in its obs \(env 0, row 9 of rollout 2\)"
    assert re.match(words, first["cause"])
    assert (first["role"], first["kind"], first["aborted"]) == ("actor-0", "env", 4)


def test_an_env_that_raises_is_rebuilt_and_its_traceback_is_told_once(tmp_path):
    result = train(faulty(raise_after=20), tmp_path, name="raise")
    assert result.status == "done"
    told = faults(tmp_path / "raise")
    assert result.notes["env_restarts"] == len(told) > 1
    assert result.notes["episodes_aborted"] == 4 * len(told)
    assert result.episodes == 0, "an aborted episode has no return"
    for fault in told:
        assert fault["exception"] == "RuntimeError: the simulator broke"
        assert (fault["step"], fault["action"]) == (20, "env rebuilt")
        assert "test_run.py" in fault["traceback"]
    assert len({fault["seed"] for fault in told}) == len(told), "each life has a seed of its own"
    log = (tmp_path / "raise" / "log.txt").read_text()
    assert log.count("Traceback") == 1
    assert log.count("env rebuilt") == len(told)
    row = metrics(result)[-1]
    assert row["faults/env_restarts"] == len(told)


def test_an_env_that_raises_too_often_fails_the_run_with_its_own_error(tmp_path):
    argv = "faults.env_restarts=2", "stop.updates=20"
    with pytest.raises(Failure, match=r"the simulator broke in step 40.*2 within 600 s"):
        train(faulty(raise_after=40), tmp_path, *argv, name="raise")
    folder = tmp_path / "raise"
    assert "the simulator broke" in (folder / "log.txt").read_text()
    told = json.loads((folder / "result.json").read_text())
    assert told["status"] == "failed"
    failure = told["failure"]
    assert (failure["role"], failure["step"], failure["action"]) == ("actor-0", 40, "the run ended")
    assert failure["seed"] == faults(folder)[-1]["seed"]
    saved = tianji.load(folder)
    assert saved.version == 7, "120 rows make 7 updates of 16, and they must be kept"


def test_an_env_that_cannot_be_closed_does_not_hide_the_result(tmp_path):
    with pytest.raises(RuntimeError, match="stuck"):
        train(faulty(close_raises=True), tmp_path, name="stuck")
    assert json.loads((tmp_path / "stuck" / "result.json").read_text())["status"] == "done"


def test_a_loss_that_is_not_finite_is_not_published_and_its_batch_is_saved(tmp_path):
    with pytest.raises(Failure, match="not finite"):
        train(faulty(reward=1e30), tmp_path, name="loss")
    batch = safetensors.numpy.load_file(tmp_path / "loss" / "nonfinite_batch.safetensors")
    assert batch["part-0.reward"].shape == (16, 4)
    assert (batch["part-0.reward"] == np.float32(1e30)).all()
    assert not (tmp_path / "loss" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ({"reset_shape": 3}, Refusal, r"first reset gave .*\(4, 3\), not \(4, 2\)"),
        ({"reset_raises": True}, Refusal, "ZeroDivisionError in its first reset"),
        ({"step_shape": 3}, Failure, r"first step gave .*\(4, 3\), not \(4, 2\)"),
        ({"scalar_reward": True}, Failure, r"reward of shape \(\), not \(4,\)"),
    ],
)
def test_an_own_env_that_breaks_its_spec_is_named(broken, error, words, tmp_path):
    with pytest.raises(error, match=words):
        train({**PPO, "env": {"id": "test/Misfit", "kwargs": broken}}, tmp_path)


@register_env("test/Misfit")
class Misfit(Faulty):
    """Does not do what its spec says."""

    def __init__(self, num_envs, reset_shape=2, step_shape=2, reset_raises=False, scalar_reward=0):
        super().__init__(num_envs)
        self._shapes, self._reset_raises = (reset_shape, step_shape), reset_raises
        self._scalar = scalar_reward

    def reset(self, seed):
        if self._reset_raises:
            raise ZeroDivisionError
        return {"obs": np.zeros((self.num_envs, self._shapes[0]), np.float32)}

    def step(self, action):
        step = super().step(action)
        obs = {"obs": np.zeros((self.num_envs, self._shapes[1]), np.float32)}
        return step._replace(observation=obs, reward=0.0 if self._scalar else step.reward)


def test_a_win_rate_that_no_env_tells_ends_the_run_with_the_remedy(tmp_path):
    config = {**PPO, "stop": {"win_rate": 0.9}}
    with pytest.raises(tianji.Failure, match=r"of none whether it was won. Set stop.return"):
        train(config, tmp_path)
    with pytest.raises(tianji.Refusal, match="more than all episodes"):
        train(config, tmp_path, "stop.win_rate=3")


def test_a_win_rate_ends_the_run_where_the_env_tells_it(tmp_path):
    config = {
        "env": {"id": "skirmish/3m"},
        "algorithm": {"name": "mappo", "epochs": 1},
        "scale": {"envs_per_actor": 32, "rollout_length": 32},
        "stop": {"win_rate": 0.0},
    }
    result = train(config, tmp_path)
    assert result.stop_reason == "win_rate >= 0"
    assert result.episodes >= 100
    assert 0 <= result.win_rate <= 1


def test_more_threads_than_cores_are_never_used_silently(tmp_path):
    here, local = cores(), ("scale.engine=local", "scale.envs_per_actor=8")
    result = train(PPO, tmp_path, *local, f"scale.actors={max(1, here - 1)}")
    assert ("slow each other" in Path(result.run_dir, "log.txt").read_text()) == (here == 1)
    result = train(PPO, tmp_path, *local, f"scale.actors={here}")
    told = f"{here + 1} threads and {here} cores, so that they slow each other"
    assert told in Path(result.run_dir, "log.txt").read_text()


@pytest.mark.parametrize("share", [True, False])
def test_a_plan_by_which_actors_share_a_core_is_not_warned_of(tmp_path, share):
    """Their envs wait, which it has measured."""
    actors = cores() + 1
    config = load_config(PPO, ["scale.envs_per_actor=8", f"scale.actors={actors}"])
    choice = Choice("local", actors, 8, config.scale.rollout_length,
                    actor_cores=1 if share else None)  # fmt: skip
    plan = {"choice": dataclasses.asdict(choice), "predicted": {"new": 1.0},
            "config": subject(config)}  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    local = ["scale.engine=local", "scale.envs_per_actor=8", f"scale.actors={actors}"]
    if not share or cores() < 2:
        with pytest.raises(Refusal, match=f"wants {choice.cores_used} cores"):
            tianji.train(PPO, local, runs=tmp_path, plan=path)
        return
    result = tianji.train(PPO, local, runs=tmp_path, plan=path)
    log = Path(result.run_dir, "log.txt").read_text()
    assert f"{actors} actors on 1 core with 8 envs each" in log
    assert "slow each other" not in log
