"""Learners that share batches learn what one learner does; parameters shared without locks."""

import mmap
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from graphs import conduits, ends, role_names
from torch import nn

from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.buffer import batch_layout
from tianji.build import assembly
from tianji.channel import End
from tianji.config import RelaxConfig, ReuseConfig, ScaleConfig, StopConfig
from tianji.driver import Serial
from tianji.env import make_env
from tianji.errors import Failure, Refusal
from tianji.moments import Moments
from tianji.optim import Optimizer, mean_over, spread
from tianji.spec import make_spec
from tianji.store import served_once
from tianji.team import Alone, Desk, Lost, Shared, Together
from tianji.testing.algorithm import config_for
from tianji.transports.memory import Memory
from tianji.types import Rollout, Row, rollout_layout

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "tianji.build"])  # these take seconds
DEADLINE = 120.0
"""seconds after which a child that hangs is a failure"""

WIDE = PPO(
    epochs=4, minibatches=1, normalise_observation=True, entropy_coef=0.01, learning_rate=1e-3,
    value_clip=0.5,
)  # fmt: skip
CASES = {
    "ppo": (WIDE, {"continuous": True}, (0.9, 0.3)),
    "ppo with discrete actions": (replace(WIDE, normalise_advantage=False), {}, (0.9, 0.3)),
    "ppo with nothing for one learner": (WIDE, {"continuous": True}, (0.9, 0.0)),
    "dqn": (DQN(batch_size=64, warmup=64, capacity=256), {}, (1.0, 1.0)),
    "unweighted": (WIDE, {"continuous": True}, (0.9, 0.3)),
}
"""algorithm, kwargs of the env, share of valid steps in each half of the batch"""


def specs(algorithm, kwargs):
    scale = ScaleConfig(engine="local", actors=4, envs_per_actor=4, rollout_length=8, learners=2)
    env = make_env("toy/Identity", 4, kwargs)
    halved = make_spec(config_for(algorithm, scale=scale), env.spec)
    env.close()
    return replace(halved, learners=1), halved


def rollouts(spec, algorithm, valid_shares):
    """Four rollouts, the first and the last two of them with so many valid steps."""
    rng = np.random.default_rng(5)
    row = Row(spec.env.observation, spec.env.action.leaf, algorithm.describe(spec).extras, {})
    layout = rollout_layout(row, spec.T, spec.envs)
    for i in range(4):
        part = Rollout.over({k: np.zeros(v.shape, v.dtype) for k, v in layout.items()})
        part.observation["obs"][:] = rng.normal(2.0, 3.0, part.observation["obs"].shape)
        if part.action.dtype == np.int64:
            part.action[:] = rng.integers(0, spec.env.action.n, part.action.shape)
        else:
            part.action[:] = rng.normal(size=part.action.shape)
        part.reward[:] = rng.normal(1.0, 2.0, part.reward.shape)
        part.valid[:] = rng.random(part.valid.shape) < valid_shares[i // 2]
        part.terminated[:] = part.valid & (rng.random(part.valid.shape) < 0.1)
        part.extras["log_prob"][:] = rng.normal(-1.0, 0.2, part.valid.shape)
        yield part


def replayed(spec):
    """What replay draws: one row, 64 steps of it."""
    rng = np.random.default_rng(6)
    N, (obs,) = 64, spec.env.observation.values()
    return Rollout(
        observation={"obs": rng.normal(size=(2, N, *obs.shape)).astype(np.float32)},
        action=rng.integers(0, spec.env.action.n, (1, N)),
        reward=rng.normal(size=(1, N)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={"discount": np.full((1, N), 0.9, np.float32)},
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0),
        versions=np.zeros(N, np.int64),
    )


def columns(part, begin, end):
    """Some of the steps that replay drew."""
    cut = {k: v[:, begin:end] for k, v in part.observation.items()}
    rest = {k: getattr(part, k)[:, begin:end] for k in ("action", "reward", "terminated", "valid")}
    discount = {"discount": part.extras["discount"][:, begin:end]}
    return replace(part, observation=cut, extras=discount, **rest)


def learn_once(name, spec, share):
    """One update of a trainer on its share of the case's batch: what it learnt, and its metrics."""
    algorithm, _, valid = CASES[name]
    trainer = algorithm.trainer(spec)
    if algorithm.name == "ppo":
        parts = list(rollouts(spec, algorithm, valid))[share]
        moments = {"obs.mean": 1.0, "obs.variance": 4.0, "obs.count": 50.0}
        seen = {
            k: np.full_like(a, moments.get(k, 0.0)) for k, a in trainer.state.networks().items()
        }
        trainer.state.load_networks({k: seen[k] if k in moments else a for k, a in
                               trainer.state.networks().items()})  # fmt: skip
    else:
        whole = replayed(spec)
        begin, end, _ = slice(share.start, share.stop).indices(4)
        parts = [columns(whole, begin * 16, end * 16)]
    for part in parts:
        trainer.take(part)
    metrics = trainer.finish()
    if algorithm.name == "ppo":
        metrics["steps of the schedule"] = trainer.state.counters["steps"]
    return {k: np.array(a) for k, a in trainer.state.networks().items()} | {
        f"metric {k}": np.array(v) for k, v in metrics.items()
    }


STEP = Optimizer.step


def unweighted(self, loss, rate, rows):
    """A mutation: every learner's gradient counts the same, whatever the number of its rows."""
    return STEP(self, loss, rate, min(rows, 1))


def meet(path):
    """The file in which learners meet, open."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def half(rank, path, results):
    """One of two learners, a process of its own: all cases, one after the other."""
    torch.set_num_threads(1)
    team = Together(meet(path), rank, 2, timeout=60.0)
    told = {}
    for name, (algorithm, kwargs, _) in CASES.items():
        spec = replace(specs(algorithm, kwargs)[1], learner=rank, team=team)
        share = slice(0, 2) if rank == 0 else slice(2, 4)
        with mock.patch.object(Optimizer, "step", unweighted if name == "unweighted" else STEP):
            told |= {f"{name}/{k}": a for k, a in learn_once(name, spec, share).items()}
    few = replace(WIDE, minibatches=5)
    trainer = few.trainer(replace(specs(few, {"continuous": True})[1], learner=rank, team=team))
    for part in rollouts(trainer._spec, few, (0.02, 0.05)):
        trainer.take(part)
    trainer.finish()
    told |= {f"few/{k}": np.array(a) for k, a in trainer.state.networks().items()}
    for i, array in enumerate(team.gather(np.arange(3 * rank + 1))):
        told[f"gathered/{i}"] = array
    told["shared"] = team.share(np.array([rank + 7]))
    np.savez(results, **told)
    team.close()


def run_together(target, *arguments):
    """Two processes of `target(rank, *arguments)`; their exit codes."""
    children = [FORKS.Process(target=target, args=(rank, *arguments)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE)
        if child.is_alive():
            child.kill()
            child.join()
    return [child.exitcode for child in children]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """What two learners in processes of their own have learnt, each case from equal weights."""
    folder = tmp_path_factory.mktemp("team")
    paths = [folder / f"{rank}.npz" for rank in range(2)]
    children = [
        FORKS.Process(target=half, args=(rank, folder / "meet", paths[rank])) for rank in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE)
        child.kill()
    assert [child.exitcode for child in children] == [0, 0]
    return [dict(np.load(path)) for path in paths]


def difference(halves, name):
    """The largest, of anything learnt, between two learners on halves and one on the whole."""
    algorithm, kwargs, _ = CASES[name]
    whole = learn_once(name, specs(algorithm, kwargs)[0], slice(0, 4))
    learnt = {k: a for k, a in whole.items() if not k.startswith("metric ")}
    return max(np.abs(halves[0][f"{name}/{k}"] - a).max() for k, a in learnt.items())


@pytest.mark.parametrize("name", [name for name in CASES if name != "unweighted"])
def test_two_learners_on_halves_learn_what_one_does_on_the_whole(halves, name):
    assert difference(halves, name) < 1e-6


@pytest.mark.parametrize("name", [name for name in CASES if name != "unweighted"])
def test_two_learners_tell_what_one_would(halves, name):
    algorithm, kwargs, _ = CASES[name]
    whole = learn_once(name, specs(algorithm, kwargs)[0], slice(0, 4))
    for key, value in whole.items():
        if key.startswith("metric "):
            np.testing.assert_allclose(halves[0][f"{name}/{key}"], value, 2e-4, 1e-5, err_msg=key)


def test_without_the_weights_by_valid_steps_two_learners_would_learn_something_else(halves):
    """The mutation that the test above must find."""
    assert difference(halves, "unweighted") > 1e-4


def test_both_learners_have_the_same_networks_bit_for_bit(halves):
    first, second = halves
    for key in first:
        if "/" in key and not key.startswith("gathered"):
            assert np.array_equal(first[key], second[key], equal_nan=True), key


def test_minibatches_that_are_empty_for_one_or_both_learners_hang_nobody(halves):
    assert all(np.isfinite(a).all() for key, a in halves[0].items() if key.startswith("few/"))


def test_arrays_of_different_lengths_are_gathered_and_the_first_ones_shared(halves):
    for told in halves:
        assert told["gathered/0"].tolist() == [0]
        assert told["gathered/1"].tolist() == [0, 1, 2, 3]
        assert told["shared"].tolist() == [7]


def leaves_early(rank, path, results):
    team = Together(meet(path), rank, 2, timeout=5.0)
    team.sum(torch.ones(4))
    if rank == 1:
        os._exit(0)
    try:
        team.sum(torch.ones(4))
    except Lost as failure:
        results.write_text(str(failure))
    team.close()


def test_a_learner_whose_team_is_gone_fails_and_says_so(tmp_path):
    assert run_together(leaves_early, tmp_path / "meet", tmp_path / "said") == [0, 0]
    assert "lost the other 1 of its group" in (tmp_path / "said").read_text()


PIECES = [(7, torch.float64), (Desk.PIECE // 4 + 3, torch.float32), (5, torch.int64)]
"""sizes and kinds of what is added up: one of them takes two pieces"""


def numbers(rank, turn, n, dtype):
    return (torch.rand(n, generator=torch.manual_seed(100 * turn + rank)) * 1000).to(dtype)


def lays_down(rank, size, path, results):
    """One of several processes that add up, each slow at another time."""
    desk, rng = Desk(meet(path), rank, size), np.random.default_rng(rank)
    told = {}
    for turn in range(60):
        n, dtype = PIECES[turn % len(PIECES)]
        tensor = numbers(rank, turn, n, dtype)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 2e-3)
        desk.add_up(tensor)
        told[f"{turn}"] = tensor.numpy()
    np.savez(results / f"{rank}.npz", **told)
    desk.close()


def test_a_desk_adds_up_in_the_order_of_ranks_whoever_is_late(tmp_path):
    children = [
        FORKS.Process(target=lays_down, args=(rank, 3, tmp_path / "meet", tmp_path))
        for rank in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE)
        child.kill()
    assert [child.exitcode for child in children] == [0, 0, 0]
    for rank in range(3):
        told = np.load(tmp_path / f"{rank}.npz")
        for turn in range(60):
            n, dtype = PIECES[turn % len(PIECES)]
            first, second, third = (numbers(r, turn, n, dtype) for r in range(3))
            assert np.array_equal(told[f"{turn}"], (first + second + third).numpy()), turn


def test_a_part_of_a_tensor_is_added_up_in_its_place(tmp_path):
    """A view with gaps, whose other elements stay."""
    desks = [None, None]

    def come(rank):
        desks[rank] = Desk(meet(tmp_path / "meet"), rank, 2)

    def add(rank, table):
        desks[rank].add_up(table[:, 1])

    tables = [torch.full((3, 2), rank + 1.0) for rank in range(2)]
    for target, arguments in ((come, [(0,), (1,)]), (add, [(0, tables[0]), (1, tables[1])])):
        threads = [threading.Thread(target=target, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    for rank, table in enumerate(tables):
        assert table[:, 1].tolist() == [3.0] * 3
        assert table[:, 0].tolist() == [rank + 1.0] * 3
    for desk in desks:
        desk.close()
        desk.close()


def is_killed(rank, path, results):
    team = Together(meet(path), rank, 2, timeout=60.0)
    team.sum(torch.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        team.sum(torch.ones(4))
    except Lost as failure:
        results.write_text(f"{time.monotonic() - begun} {failure}")


def test_a_learner_that_is_killed_is_noticed_at_once(tmp_path):
    codes = run_together(is_killed, tmp_path / "meet", tmp_path / "said")
    assert codes == [0, -signal.SIGKILL]
    seconds, _, said = (tmp_path / "said").read_text().partition(" ")
    assert float(seconds) < 10, "and not after the timeout"
    assert "learner 1 is gone" in said


def test_a_learner_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(RuntimeError, match="learner 1 has not come"):
        Desk(meet(tmp_path / "meet"), 0, 2, timeout=0.1)


class Threads:
    """A team within one process, for learners in threads."""

    def __init__(self, rank, size, desk=None):
        self.rank, self.size = rank, size
        self._desk = desk or (threading.Barrier(size, timeout=30.0), [None] * size)

    def other(self, rank):
        return Threads(rank, self.size, self._desk)

    def _all(self, item):
        barrier, places = self._desk
        places[self.rank] = item
        barrier.wait()
        items = list(places)
        barrier.wait()
        return items

    def sum(self, tensor):
        return tensor.copy_(sum(self._all(tensor.clone())))

    def gather(self, array):
        return self._all(array.copy())

    def share(self, array):
        return self._all(array.copy())[0]

    def close(self):
        pass


def toy(name, **kwargs):
    return lambda num_envs: make_env(f"toy/{name}", num_envs, kwargs)


def learn_in_a_group(algorithm, learners, updates, actors=4, relax="sync", window=1):
    """All roles of a group in this process, further learners in threads; learners and reports."""
    scale = ScaleConfig(
        engine="local", actors=actors, envs_per_actor=4, rollout_length=8, learners=learners,
        relax=relax,
    )  # fmt: skip
    config = replace(config_for(algorithm, scale=scale), reuse=ReuseConfig(window))
    joined, transport = assembly(config, toy("Chain")), Memory()
    team = Threads(0, learners) if learners > 1 else Alone()
    first = joined.learner(transport, 0, team)
    others = [joined.learner(transport, i, team.other(i)) for i in range(1, learners)]
    actors = [joined.actor(i, transport) for i in range(actors)]
    assert [str(r.name) for r in (*actors, first, *others)] == [
        name for name in role_names(joined) if name != "buffer"
    ]
    roles = [*actors, joined.buffer(transport), first]
    for learner in (first, *others):
        learner.begin()

    def follow(learner):
        while learner.version < updates:
            if not learner.step():
                time.sleep(0.001)

    threads = [threading.Thread(target=follow, args=(x,), daemon=True) for x in others]
    for thread in threads:
        thread.start()
    reports, end = [], time.monotonic() + 60
    while first.version < updates:
        assert time.monotonic() < end, "the group stands still"
        for role in roles:
            role.step()
        if len(reports) < first.version:
            reports.append(first.report)
    for thread in threads:
        thread.join(30)
    return [first, *others], reports


SMALL_DQN = DQN(batch_size=16, warmup=128, capacity=512, new_steps=32)


@pytest.mark.parametrize(
    ("algorithm", "learners", "relax"),
    [
        (PPO(epochs=2, minibatches=1), 2, "sync"),
        (PPO(epochs=2, minibatches=1, normalise_observation=True), 4, "sync"),
        (PPO(epochs=2, minibatches=1), 2, "periodic"),
        (SMALL_DQN, 2, "sync"),
    ],
    ids=["ppo", "four", "streamed", "dqn"],
)
def test_a_group_of_several_learners_learns_and_reports_what_one_learner_does(
    algorithm, learners, relax
):
    (one,), alone = learn_in_a_group(algorithm, 1, 4, relax=relax)
    team, together = learn_in_a_group(algorithm, learners, 4, relax=relax)
    for learner in team:
        for name, array in learner.networks().items():
            np.testing.assert_allclose(array, one.networks()[name], atol=2e-5, err_msg=name)
    for mine, theirs in zip(alone, together, strict=True):
        assert (mine.consumed, mine.received) == (theirs.consumed, theirs.received)
        assert mine.staleness.tolist() == theirs.staleness.tolist()
        assert mine.episodes.tolist() == theirs.episodes.tolist()
        assert mine.freshness == theirs.freshness


def test_a_window_of_batches_is_shared_too():
    """Shares of 6 envs' time are no whole number of rollouts of 4."""
    algorithm = PPO(epochs=1, minibatches=1)
    (one,), _ = learn_in_a_group(algorithm, 1, 3, actors=3, window=2)
    team, _ = learn_in_a_group(algorithm, 2, 3, actors=3, window=2)
    for name, array in team[1].networks().items():
        np.testing.assert_allclose(array, one.networks()[name], atol=2e-5, err_msg=name)


def test_only_the_first_learner_publishes_and_is_told_of_episodes():
    team, _ = learn_in_a_group(PPO(epochs=1, minibatches=1), 2, 6)
    assert [learner._snapshots is None for learner in team] == [False, True]
    assert len(team[1].report.episodes) == 0
    assert team[1].report.received == 0
    assert team[1].report.consumed == team[0].report.consumed


def test_rollouts_are_granted_and_slots_freed_by_the_slowest_of_the_learners():
    scale = ScaleConfig(
        engine="local", actors=2, envs_per_actor=2, rollout_length=4, learners=2, relax="one_step"
    )
    joined = assembly(config_for(PPO(minibatches=1), scale=scale), toy("Chain"))
    transport = Memory()
    buffer = joined.buffer(transport)
    lanes = [transport.outbox(lane) for lane in joined.lanes]
    inboxes = [transport.inbox(conduit) for conduit in conduits(joined, "batches")]

    def settle():
        """All that may be made is made, and all that may be served is."""
        while buffer.step() or any(lane.granted() for lane in lanes):
            for lane in lanes:
                for slot in lane.granted()[:1]:
                    lane.push(slot)

    for inbox in inboxes:
        assert inbox.grant(0)
        assert inbox.grant(0)
    settle()
    pieces = [inbox.probe() for inbox in inboxes]
    assert buffer._balance.granted == 4, "two rollouts for update 0 and two for update 1"
    inboxes[0].release(pieces[0])
    inboxes[0].grant(1)
    settle()
    assert buffer._balance.granted == 4, "the second learner is still at version 0"
    assert all(0 not in lane._free for lane in lanes), "it still needs the first slots"
    inboxes[1].release(pieces[1])
    inboxes[1].grant(1)
    settle()
    assert buffer._balance.granted == 6
    assert all(0 in lane._free for lane in lanes)


def share_of(algorithm, learners, actors=4, **fields):
    scale = ScaleConfig(
        engine="local", actors=actors, envs_per_actor=2, rollout_length=4, learners=learners
    )
    config = config_for(algorithm, scale=scale, relax=RelaxConfig(**fields))
    joined = assembly(config, toy("Chain"))
    return joined.buffer(Memory())


@pytest.mark.parametrize("fields", [{}, {"start": "stream", "late": "wait", "max_staleness": None}])
def test_learners_that_do_not_divide_a_batch_of_rollouts_are_refused(fields):
    with pytest.raises(Refusal, match=r"scale\.learners = 3 does not divide.*scale\.learners = 2"):
        share_of(PPO(minibatches=1), 3, **fields)
    share_of(PPO(minibatches=1), 2, **fields)


def test_learners_that_do_not_divide_a_batch_from_replay_are_refused_with_one_that_fits():
    with pytest.raises(Refusal, match=r"Set batch_size to 126\b"):
        share_of(DQN(batch_size=127), 3)
    share_of(DQN(batch_size=126), 3)


def test_several_learners_cannot_follow_an_envs_rewards_and_say_so():
    with pytest.raises(Refusal, match=r"normalise_reward = false, or scale\.learners = 1"):
        share_of(PPO(minibatches=1, normalise_reward=True), 2)


def test_a_learner_without_its_team_is_not_made():
    scale = ScaleConfig(engine="local", actors=2, learners=2)
    joined = assembly(config_for(PPO(minibatches=1), scale=scale), toy("Chain"))
    with pytest.raises(ValueError, match="needs a team"):
        joined.learner(Memory())


def test_pieces_of_a_streamed_batch_are_one_rollout_for_each_learner():
    scale = ScaleConfig(engine="local", actors=6, learners=2, relax="periodic")
    spec = assembly(config_for(PPO(minibatches=1), scale=scale), toy("Chain")).spec
    selection, pieces = served_once(spec, spec.actors)
    assert (pieces, selection["slot"].shape) == (3, (2,))
    assert batch_layout(selection, 2)["slot"].shape == (1,)


def test_ends_of_every_learner_are_known():
    scale = ScaleConfig(engine="local", actors=2, learners=2)
    joined = assembly(config_for(PPO(minibatches=1), scale=scale), toy("Chain"))
    assert End("batches", "send") in ends(joined, "buffer")
    assert End("batches-1", "send") in ends(joined, "buffer")
    assert End("batches-1", "receive") in ends(joined, "learner-1")
    assert End("snapshots", "send") in ends(joined, "learner")
    assert End("snapshots", "send") not in ends(joined, "learner-1")


def test_an_empty_share_leaves_parameters_and_moments_alone():
    module = nn.Linear(2, 1)
    optimizer = Optimizer({"m": module})
    optimizer.step(module(torch.ones(3, 2)).sum(), 0.1, 3)
    before = optimizer.state()
    assert optimizer.step(None, 0.1, 0) == 0
    after = optimizer.state()
    assert before["moments"]["steps"] == after["moments"]["steps"] == 1
    assert all(np.array_equal(before["parameters"][k], after["parameters"][k])
               for k in before["parameters"])  # fmt: skip


class Both(Alone):
    """A team of two learners that have the same rows."""

    def __init__(self):
        super().__init__(0, 2)

    def sum(self, tensor):
        return tensor.mul_(2)

    def gather(self, array):
        return [array, array]


def test_means_and_deviations_over_a_team_are_those_of_all_rows():
    x = torch.arange(6.0)
    rows, ((mean, deviation),) = spread(Both(), x)
    assert (rows, float(mean)) == (12, 2.5)
    assert float(deviation) == pytest.approx(float(x.std(correction=0)))
    assert spread(Both(), x[:0])[0] == spread(Alone(), x[:0])[0] == 0
    values = torch.tensor([[1.0], [float("nan")]])
    for team in (Alone(), Both()):
        assert mean_over(team, values, [3, 0]).tolist() == [[1.0]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_moments_joined_over_a_team_are_those_of_all_rows(shape):
    rows = np.random.default_rng(0).normal(1e3, 2.0, (20, *shape))
    one, two = Moments(shape), Moments(shape)
    one.update(rows[:4])
    two.update(rows[:4])
    one.update(np.concatenate([rows[4:], rows[4:]]))
    two.update_together(Both(), [rows[4:9], rows[9:9], rows[9:]])
    two.update_together(Both(), [rows[:0]])
    two.update_together(Both(), [])
    for name, array in one.arrays().items():
        assert isinstance(two.arrays()[name], np.ndarray)
        np.testing.assert_allclose(two.arrays()[name], array, rtol=1e-12)


def shared_memory(fd, numbers):
    return np.frombuffer(mmap.mmap(fd, 4 * numbers), np.float32)


class Point(nn.Module):
    """As many parameters as asked for."""

    def __init__(self, n):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(n))


STEPS_EACH = 600


def descend(rank, path):
    """Without locks, each process moves its own half of the parameters to its own place."""
    torch.set_num_threads(1)
    fd = os.open(path, os.O_RDWR)
    flat = shared_memory(fd, Shared.size(8))
    point = Point(8)
    optimizer = Optimizer({"p": point}, shared=Shared(flat, first=False))
    mine = slice(0, 4) if rank == 0 else slice(4, 8)
    for _ in range(STEPS_EACH):
        optimizer.refresh()
        loss = (point.x[mine] - (1.0 if rank == 0 else -2.0)).square().sum()
        optimizer.step(loss, 0.02, 1)
        time.sleep(0)


def test_two_processes_step_one_set_of_parameters_without_locks():
    fd = os.memfd_create("tianji-test")
    os.ftruncate(fd, 4 * Shared.size(8))
    flat = shared_memory(fd, Shared.size(8))
    point = Point(8)
    optimizer = Optimizer({"p": point}, shared=Shared(flat, first=True))
    assert run_together(descend, f"/proc/{os.getpid()}/fd/{fd}") == [0, 0]
    assert (point.x == 0).all(), "the local copy moves only when it is refreshed"
    optimizer.refresh()
    np.testing.assert_allclose(point.x.detach().numpy(), [1.0] * 4 + [-2.0] * 4, atol=0.05)
    steps = float(optimizer.state()["moments"]["steps"])
    assert STEPS_EACH < steps <= 2 * STEPS_EACH, "the steps of one of them did not arrive"
    os.close(fd)


def test_a_gradient_is_that_of_the_local_copy_and_the_step_that_of_the_shared_one():
    flat = np.zeros(Shared.size(1), np.float32)
    ours, theirs = Point(1), Point(1)
    first = Optimizer({"p": ours}, shared=Shared(flat, first=True))
    second = Optimizer({"p": theirs}, shared=Shared(flat, first=False))
    for _ in range(50):
        first.step((ours.x - 1.0).square().sum(), 0.1, 1)
    moment = flat[3]
    assert flat[2] == ours.x.item() > 0.5
    assert theirs.x.item() == 0.0
    second.step((theirs.x - 1.0).square().sum(), 0.0, 1)
    assert flat[3] == pytest.approx(0.9 * moment + 0.1 * -2.0)
    assert theirs.x.item() == flat[2]


def test_a_step_before_the_parameters_are_laid_out_fails_and_says_so():
    point = Point(2)
    late = Optimizer({"p": point}, shared=Shared(np.zeros(Shared.size(2), np.float32), first=False))
    late.refresh()
    with pytest.raises(Failure, match="before any other begins"):
        late.step(point.x.sum(), 0.1, 1)


def test_shared_parameters_are_loaded_by_the_first_learner_alone():
    flat = np.zeros(Shared.size(2), np.float32)
    first = Optimizer({"p": Point(2)}, shared=Shared(flat, first=True))
    second = Optimizer({"p": Point(2)}, shared=Shared(flat, first=False))
    state = first.state()
    state["parameters"]["p.x"] = np.array([3.0, 4.0], np.float32)
    second.load_state(state)
    assert flat[2:4].tolist() == [0.0, 0.0]
    first.load_state(state)
    assert flat[2:4].tolist() == [3.0, 4.0]
    with pytest.raises(Refusal, match=r"scale\.learners = 1"):
        Optimizer({"p": Point(2)}, team=Both(), shared=Shared(flat, first=True))


@pytest.mark.parametrize("algorithm", [PPO(epochs=2, minibatches=2), SMALL_DQN])
def test_algorithms_step_the_shared_parameters(algorithm):
    scale = ScaleConfig(
        engine="local", relax="a3c", groups=2, actors=2, envs_per_actor=4, rollout_length=8
    )
    joined, transport = assembly(config_for(algorithm, scale=scale), toy("Chain")), Memory()
    flat = np.zeros(conduits(joined, "shared")[0].layout["flat"].shape, np.float32)
    learner = joined.learner(transport, shared=Shared(flat, first=True))
    start = flat.copy()
    actors = [joined.actor(i, transport) for i in range(2)]
    learner.begin()
    driver = Serial([*actors, joined.buffer(transport), learner])
    while learner.version < 3:
        driver.step()
    assert not np.array_equal(start, flat)
    parameters = learner._trainer._optimizer.flat.array()
    assert np.array_equal(flat[2 : 2 + len(parameters)], parameters)
    flat[2 : 2 + len(parameters)] += 1.0
    learner._trainer._optimizer.refresh()
    assert np.array_equal(flat[2 : 2 + len(parameters)], learner._trainer._optimizer.flat.array())


def test_a_spec_differs_by_its_numbers_not_by_its_team():
    spec = specs(WIDE, {"continuous": True})[0]
    assert replace(spec, team=Both()) == spec != replace(spec, group=1)


def test_workers_that_share_parameters_refuse_normalisers_that_they_do_not_share():
    scale = ScaleConfig(engine="local", relax="a3c", groups=2, actors=1, rollout_length=8)
    env = make_env("toy/Identity", 8, {})
    for key in ("normalise_observation", "normalise_reward"):
        with pytest.raises(Refusal, match=r"differently scaled.*gala"):
            make_spec(config_for(PPO(**{key: True}), scale=scale), env.spec)
    make_spec(config_for(PPO(), scale=scale), env.spec)


@pytest.mark.parametrize(("groups", "rate"), [(1, 0.5), (2, 0.0)])
def test_a_linear_schedule_ends_with_the_run_whose_updates_are_those_of_all_groups(groups, rate):
    hyper = PPO(schedule="linear", learning_rate=1.0)
    scale = ScaleConfig(engine="local", actors=1, rollout_length=8, groups=groups)
    env = make_env("toy/Identity", 8, {})
    config = replace(config_for(hyper, scale=scale), stop=StopConfig(updates=10))
    trainer = hyper.trainer(make_spec(config, env.spec))
    trainer.state.counters["updates"] = 5
    assert trainer._learning_rate() == rate
