"""Triggers against what they say in words, and own ones in every place that a config has."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tianji
from tianji import Refusal, returns
from tianji.algorithms.ppo import PPO
from tianji.build import assembly, build
from tianji.config import RelaxConfig, ScaleConfig, load_config
from tianji.driver import Serial
from tianji.envs.toy import Chain
from tianji.testing.algorithm import config_for
from tianji.trigger import TRIGGERS, Counts, Every, Reached, either, full, register_trigger
from tianji.types import EPISODES, STEPS, UPDATE, Rollout

counts = st.builds(Counts, steps=st.integers(0, 99), updates=st.integers(0, 99))
RUN = {
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [4]},
    "scale": {"envs_per_actor": 2, "rollout_length": 8},
    "stop": {"updates": 6},
}


@pytest.fixture(autouse=True)
def _own_triggers_are_forgotten():
    before = dict(TRIGGERS)
    yield
    TRIGGERS.clear()
    TRIGGERS.update(before)


def train(tmp_path, *overrides):
    return tianji.train(RUN, overrides, runs=tmp_path)


def rows(result):
    lines = Path(result.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def register_at(name, *updates):
    """A trigger that is due when the count of updates passes one of these; what it was asked."""
    asked = []

    @register_trigger(name)
    def due(before, now):
        asked.append((before, now))
        return any(before.updates < n <= now.updates for n in updates)

    return asked


@given(st.integers(1, 50), st.integers(0, 500), st.integers(0, 100))
def test_every_is_due_once_for_each_multiple_that_is_passed(every, before, more):
    passed = any(n % every == 0 for n in range(before + 1, before + more + 1))
    assert Every(every)(Counts(updates=before), Counts(updates=before + more)) == passed


def test_a_trigger_of_zero_is_never_due():
    assert not Every(0)(Counts(), Counts(updates=10**9))


def test_the_first_limit_that_is_reached_gives_the_reason():
    stop = Reached({"return": 475.0, "steps": 1000})
    assert stop.due({"return": 474.9, "steps": 999}) is None
    assert stop.due({"return": 475.0, "steps": 999}) == "return >= 475"
    assert stop.due({"return": 0.0, "steps": 1000}) == "steps >= 1000"
    assert stop.due({"return": math.inf, "steps": 1000}) == "return >= 475"


@given(st.integers(1, 50), st.integers(0, 60))
def test_a_full_rollout_is_one_that_has_all_its_steps(T, steps):
    assert full(T)(Counts(), Counts(steps=steps)) == (steps >= T)


@given(st.lists(st.integers(0, 9), max_size=4), counts, counts)
def test_either_is_due_where_one_is_and_asks_all(every, before, now):
    asked = []

    def watched(trigger):
        return lambda *counts: asked.append(trigger) or trigger(*counts)

    triggers = [Every(n) for n in every]
    due = either(*(watched(trigger) for trigger in triggers))(before, now)
    assert due == any(trigger(before, now) for trigger in triggers)
    assert asked == triggers


def test_a_registered_trigger_is_given_back_and_found_by_its_name():
    def always(before, now):
        return True

    assert register_trigger("always")(always) is always
    assert TRIGGERS["always"] is always
    assert tianji.register_trigger is register_trigger


def test_an_own_trigger_evaluates(tmp_path):
    register_at("at", 2, 5)
    result = train(tmp_path, "eval.when=at", "eval.episodes=2")
    assert [row["updates"] for row in rows(result) if "eval/mean_reward" in row] == [2, 5]


def test_an_own_trigger_evaluates_beside_eval_every(tmp_path):
    register_at("at", 2, 4)
    result = train(tmp_path, "eval.when=at", "eval.every=3", "eval.episodes=2")
    assert [row["updates"] for row in rows(result) if "eval/mean_reward" in row] == [2, 3, 4, 6]


def test_an_own_trigger_saves(tmp_path):
    register_at("at", 2, 5)
    result = train(tmp_path, "checkpoint.when=at", "checkpoint.keep=10")
    saved = [json.loads(path.read_text())["meta"]["updates"] for path in
             Path(result.run_dir, "checkpoints").glob("step_*/MANIFEST.json")]  # fmt: skip
    assert sorted(saved) == [2, 5, 6]


def test_an_own_trigger_stops_and_is_the_reason(tmp_path):
    asked = register_at("at", 4)
    result = train(tmp_path, "stop.when=at")
    assert (result.status, result.updates) == ("done", 4)
    assert result.stop_reason == "stop.when = at"
    assert [now.updates for _, now in asked] == [1, 2, 3, 4]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(asked))
    assert asked[-1][1].steps == result.steps
    assert asked[-1][1].episodes == result.episodes > 0


def test_a_trigger_may_be_the_only_end(tmp_path):
    register_at("at", 3)
    config = {**RUN, "stop": {"when": "at"}}
    assert tianji.train(config, runs=tmp_path).updates == 3


def test_an_own_trigger_publishes(tmp_path):
    """Actors act with the versions that were published, and with no other."""
    asked = register_at("at", 4)
    result = train(tmp_path, "relax.publish_when=at", "scale.relax=free")
    assert [now.updates for _, now in asked] == [1, 2, 3, 4, 5, 6]
    # update 4, the fifth, begins at version 4 and consumes what version 0 or 4 made
    assert result.staleness["max"] >= 3
    other = train(tmp_path, "scale.relax=free")
    assert result.params_sha256 != other.params_sha256


def register_episode_end():
    register_trigger("episode_end")(lambda before, now: now.episodes > 0)


def test_an_own_trigger_sends_early(tmp_path):
    register_episode_end()
    short = "env.kwargs={length = 5}"
    whole, early = train(tmp_path, short), train(tmp_path, short, "relax.send_when=episode_end")
    # 6 rollouts of 8 rows of 2 envs: an episode is 5 steps and a reset
    assert early.steps < whole.steps
    assert early.params_sha256 != whole.params_sha256
    assert early.updates == 6


def padded_and_cut(trigger, updates=12, T=12, B=3, algorithm=None):
    """Every rollout that a run pushed, as it was and without what follows an early end."""
    made = T  # rows of the rollout that is pushed next

    def sends(before, now):
        nonlocal made
        if due := trigger(before, now):
            made = now.steps
        return due

    register_trigger("own")(sends)
    algorithm = algorithm or PPO(minibatches=1, epochs=1)
    config = config_for(
        algorithm,
        scale=ScaleConfig(envs_per_actor=B, rollout_length=T),
        relax=RelaxConfig(send_when="own"),
    )
    built = build(config, lambda num_envs: Chain(num_envs, n=4, limit=9, anywhere=True))
    actor, pairs = built.actors[0], []
    outbox = actor._rollouts

    class Told:
        def push(self, slot):
            nonlocal made
            whole = Rollout.over({k: v.copy() for k, v in slot.arrays.items()})
            pairs.append((whole, cut(whole, made)))
            made = T
            outbox.push(slot)

        def __getattr__(self, name):
            return getattr(outbox, name)

    actor._rollouts = Told()
    built.learner.begin()
    driver = Serial(built.roles)
    while built.learner.version < updates:
        driver.step()
    return built, pairs


def cut(rollout, t):
    return Rollout(
        observation={k: v[: t + 1] for k, v in rollout.observation.items()},
        action=rollout.action[:t],
        reward=rollout.reward[:t],
        terminated=rollout.terminated[:t],
        valid=rollout.valid[:t],
        extras={k: v[:t] for k, v in rollout.extras.items()},
        once=rollout.once,
        head=rollout.head,
        episode_table=rollout.episode_table,
        versions=rollout.versions,
    )


TRIGGERS_THAT_SEND = {
    "at an episode's end": lambda before, now: now.episodes > 0,
    "after some steps": lambda before, now: now.steps >= 5,
    "seldom": lambda before, now: now.episodes >= 6,
}
sent = pytest.mark.parametrize("trigger", TRIGGERS_THAT_SEND.values(), ids=TRIGGERS_THAT_SEND)


@sent
def test_what_follows_an_early_end_is_not_valid_and_the_next_rollout_goes_on(trigger):
    _, pairs = padded_and_cut(trigger)
    assert any(len(whole.reward) > len(part.reward) for whole, part in pairs)
    for whole, part in pairs:
        t = len(part.reward)
        assert not whole.valid[t:].any()
        assert not whole.terminated[t:].any()
        assert not whole.reward[t:].any()
        assert (whole.observation["obs"][t:] == part.observation["obs"][-1]).all()
        assert whole.head[STEPS] == np.count_nonzero(part.valid)
        assert whole.head[EPISODES] == len(whole.episodes)
        ended = np.count_nonzero(part.terminated)
        assert ended <= whole.head[EPISODES] <= np.count_nonzero(part.valid)
    for (before, _), (after, _) in itertools.pairwise(pairs):
        assert (before.observation["obs"][-1] == after.observation["obs"][0]).all()
        assert after.head[UPDATE] == before.head[UPDATE] + 1


@sent
def test_returns_and_advantages_of_padded_rows_are_those_of_the_cut_rollout(trigger):
    _, pairs = padded_and_cut(trigger)
    rng = np.random.default_rng(0)
    for whole, part in pairs:
        T, t = len(whole.reward), len(part.reward)
        value = rng.normal(size=(T + 1, whole.reward.shape[1])).astype(np.float32)
        for estimate in (returns.gae, returns.td_lambda):
            padded, expected = (
                estimate(r.reward, v, r.terminated, r.valid, 0.9, 0.8)
                for r, v in ((whole, value), (part, value[: t + 1]))
            )
            assert (padded[:t] == expected).all()
            assert not padded[t:].any()


@sent
def test_an_update_from_padded_rollouts_is_that_from_cut_ones(trigger):
    algorithm = PPO(minibatches=2, epochs=2, normalise_observation=True)
    built, pairs = padded_and_cut(trigger, algorithm=algorithm)
    trainers = [algorithm.trainer(built.spec) for _ in range(2)]
    for both in pairs:
        for trainer, part in zip(trainers, both, strict=True):
            trainer.take(part)
            trainer.finish()
    padded, expected = (trainer.state.networks() for trainer in trainers)
    for name, array in expected.items():
        # values are computed for all rows at once, and products of other shapes round otherwise
        assert padded[name] == pytest.approx(array, rel=1e-4, abs=1e-5), name


KEYS = ("eval.when", "checkpoint.when", "stop.when", "relax.publish_when", "relax.send_when")


@pytest.mark.parametrize("key", KEYS)
def test_a_trigger_that_nobody_registered_is_refused_with_the_nearest(key):
    register_trigger("reward_rises")(lambda before, now: False)
    with pytest.raises(Refusal, match=r"names no trigger.*reward_rises.*register_trigger") as told:
        load_config(RUN, [f"{key}=reward_rise"])
    assert str(told.value).startswith(f'{key} = "reward_rise"')


def test_publishing_by_an_own_trigger_is_refused_where_actors_wait_for_versions():
    register_at("at", 3)
    for preset in ("sync", "one_step", "bounded"):
        with pytest.raises(Refusal, match="the run would stand still") as told:
            assembly(load_config(RUN, ["relax.publish_when=at", f"scale.relax={preset}"]))
        assert 'relax.lead = inf and relax.take = "boundary"' in str(told.value)
    remedy = ["relax.lead=inf", "relax.take=boundary"]
    assert assembly(load_config(RUN, ["relax.publish_when=at", *remedy])).relax.lead == math.inf


def test_publishing_by_an_own_trigger_is_refused_where_staleness_is_bounded():
    """All that is made until the trigger is due would be filtered, and it would never be due."""
    register_at("at", 30)
    unbound = ["scale.engine=local", "relax.lead=inf", "relax.take=boundary"]
    for bound in (["scale.relax=tianji"], ["scale.relax=free", "relax.max_staleness=3"]):
        with pytest.raises(Refusal, match=r"relax\.max_staleness = 3"):
            assembly(load_config(RUN, ["relax.publish_when=at", *unbound, *bound]))
    free = ["relax.publish_when=at", "scale.engine=local", "scale.relax=free"]
    assert assembly(load_config(RUN, free)).relax.max_staleness is None


def test_two_rules_for_publishing_are_refused():
    register_at("at", 3)
    with pytest.raises(Refusal, match="only one can"):
        load_config(RUN, ["relax.publish_when=at", "relax.publish=2"])


def test_sending_early_is_refused_where_returns_are_followed_across_rollouts():
    register_at("at", 3)
    with pytest.raises(Refusal, match="looks like an episode's end"):
        assembly(load_config(RUN, ["relax.send_when=at", "algorithm.normalise_reward=true"]))
