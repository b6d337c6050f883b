"""How much of a config a profile measures, and what it makes of that."""

import dataclasses

import pytest
from measured import CARTPOLE, REPLAY

from tianji import profiler
from tianji.asked import STEPPING, Acted, Asked
from tianji.config import load_config
from tianji.probe import SLICES
from tianji.ratios import Ratios


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIANJI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def learnt(monkeypatch):
    """With what learning was measured; an update takes as long as it consumes steps."""
    found = []

    def acting(config, envs):
        step = 0.01 * envs
        told = {"step": step, "slices": [step] * SLICES, "infer": step / 2}
        return told | {"load": 1e-5, "rests": 0.0, "valid": 1.0}

    def learning(config, most_envs, real_steps=None, share=1):
        found.append((config, most_envs, real_steps, share))
        envs = config.scale.envs_per_actor // share  # of a share, as shape.with_share has it
        rows = share * envs * config.scale.rollout_length
        consumed = getattr(config.algorithm, "batch_size", rows)
        told = {"learn": float(consumed), "consumed": consumed, "act": 0.015 * envs, "envs": envs}
        return told | {"take": 1e-4, "serve": 1e-5}

    monkeypatch.setattr(profiler, "acting", acting)
    monkeypatch.setattr(profiler, "learning", learning)
    monkeypatch.setattr(profiler, "alone", lambda prepare, cores, /, **how: prepare())
    return found


class Here:
    """In the place of a process that measures."""

    def __init__(self, prepare, cores):
        self._prepare = prepare

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ready(self):
        pass

    def close(self):
        pass

    def ask(self, **how):
        return self._prepare()


class Nothing:
    """In the place of what is compared."""

    def __init__(self, *_):
        self.ratios = Ratios()

    def jobs(self):
        return []

    def once(self, jobs):
        return jobs

    def repeat(self, jobs, rates):
        pass


def with_making(config, seconds):
    """A profile of envs that take so long to make."""
    one = profiler._Profiler(config, lambda what, left: None)
    one._asked = dataclasses.replace(one._asked, making=seconds)
    return one


def acts(step, envs=8):
    """An actor whose step takes `step` seconds for each env, half of them to infer."""
    return Acted({1: step, envs: envs * step}, {1: 0.5, envs: 0.5}, {}, envs, {}, None)


def test_steps_are_shown_again_only_where_what_an_update_follows_takes_long():
    """64 steps of 8 envs."""
    config = load_config(CARTPOLE)
    known = dataclasses.replace(Asked.of(config), making=0.01)
    assert known.fed(acts(0.9 * STEPPING / 64)) == (200, None)
    assert known.fed(acts(0.1)) == (1, 20), "all that is made in half of the time"
    slow = dataclasses.replace(known, making=1.0)
    assert slow.fed(acts(0.1)) == (2, None), "two envs make a quarter of the steps"
    assert slow.fed(acts(0.3)) == (1, 6)
    # Of one env a step is short: it is one that is stepped then.
    together = Acted({1: 0.2, 8: 8.0}, {}, {}, 8, {}, None)
    assert known.fed(together) == (1, 10)


def test_a_real_run_is_long_enough_for_its_warm_up_and_some_updates():
    on_policy, replay = (Asked.of(load_config(tree)) for tree in (CARTPOLE, REPLAY))
    assert on_policy.long_enough(0.1, 0.2) == 2.0
    assert on_policy.long_enough(0.5, 1.0) == pytest.approx(1.0 + 4 * 1.0)
    assert on_policy.long_enough(3.0, 1.0) == pytest.approx(1.0 + 4 * 3.0)
    assert (replay.sooner.algorithm.warmup, replay.task.rows) == (256, 8)
    assert replay.long_enough(0.05, 0.1) == pytest.approx(256 / 8 * 0.1 + 4 * 0.1)


def test_acting_where_one_process_also_learns_is_compared_with_acting_alone():
    config = load_config(CARTPOLE)
    one = with_making(config, 1e-3)
    act = {1: 1e-3, 8: 8e-3}
    assert one._inside_act(act, {"act": 12e-3, "envs": 8}) == pytest.approx(1.5)
    assert one._inside_act(act, {"act": 7e-3, "envs": 8}) == 1.0, "nobody is quicker by that"
    assert one._inside_act(act, {"envs": 8}) == 1.0
    assert one._inside_act({1: 1e-3, 4: 4e-3}, {"act": 12e-3, "envs": 8}) == 1.0, "not known"
    fixed = {1: 7.2e-3, 8: 8e-3}
    assert one._inside_act(fixed, {"act": 1.5 * 7.2e-3 * (8 / 7.2) ** (1 / 3), "envs": 2}) == (
        pytest.approx(1.5)
    ), "of a share of its envs, which a step does not take that share of its time"
    slow = with_making(config, 0.5)
    assert slow._inside_act(act, {"act": 12e-3, "envs": 8}) == 1.0, "there were four of them"


@pytest.mark.parametrize(("tree", "batch"), [(CARTPOLE, 64), (REPLAY, 16)])
def test_half_of_a_batch_and_twice_of_it_are_measured(tree, batch, learnt):
    one = with_making(load_config(tree), 0.01)
    found = one._batches(acts(1e-3), batch, 5.0, 0.5)
    assert found == {batch: 5.0, batch / 2: batch / 2, 2 * batch: 2.0 * batch}
    assert [how[1:] for how in learnt] == [(200, None, 1)] * 2


@pytest.mark.parametrize(
    ("envs", "learns"), [(4, {32: 1.0, 16: 16.0, 64: 64.0}), (6, {48: 1.0, 96: 96.0})]
)
def test_a_batch_of_whose_envs_no_such_share_can_be_taken_is_not_measured(envs, learns, learnt):
    """Half of 6 envs are 3, which no two equal shares make up."""
    algorithm = {**CARTPOLE["algorithm"], "minibatches": 2}
    config = load_config({**CARTPOLE, "algorithm": algorithm}, [f"scale.envs_per_actor={envs}"])
    one, acted = with_making(config, 0.01), acts(0.08, envs)
    assert one._asked.share(acted.inference) == 2
    assert one._batches(acted, 8 * envs, 1.0, 0.5) == learns
    assert {how[-1] for how in learnt} == {2}


@pytest.mark.parametrize(("T", "epochs", "share"), [(2, 1, 1), (8, 1, 4), (8, 2, 8)])
def test_a_look_learns_from_a_share_of_what_would_take_long(T, epochs, share, learnt):
    """Of 8 envs, each of whose rows takes 5 ms to infer: of 64 rows an epoch takes about 1 s."""
    config = load_config(CARTPOLE, [f"algorithm.epochs={epochs}", f"scale.rollout_length={T}"])
    with_making(config, 0.01).glance()
    assert [how[1:] for how in learnt] == [(30, None, share)]


@pytest.mark.parametrize(("T", "share", "how"), [(8, 1, (200, None)), (80, 4, (1, 200))])
def test_a_profile_learns_from_what_there_is_time_for_and_knows_what_that_costs_acting(
    T, share, how, learnt, monkeypatch
):
    """A step of 8 envs takes 80 ms alone, half of it to infer, and 120 ms where one process also
    learns: of 80 of them an update would take 9.6 s."""
    monkeypatch.setattr(profiler, "Probe", Here)
    monkeypatch.setattr(profiler, "Contrasts", Nothing)
    monkeypatch.setattr(
        profiler, "channel", lambda _: dict.fromkeys(("push", "receive", "wake"), 0.0)
    )
    config = load_config(CARTPOLE, [f"scale.rollout_length={T}", "algorithm.minibatches=8"])
    found = with_making(config, 0.01).whole()
    assert found.rates.act[8] == pytest.approx(0.08)
    assert found.rates.inside_act == pytest.approx(1.5)
    assert {told[1:] for told in learnt} == {(*how, share)}
