"""The inference server: whose state it keeps, which batches it makes, which versions act."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from graphs import ends, role_names
from hypothesis import given
from hypothesis import strategies as st
from test_interleavings import Once
from thorough import examples

import tianji
import tianji.server
from tianji.actor import SIMULATE
from tianji.algorithm import Decision
from tianji.build import build
from tianji.channel import Conduit, End
from tianji.config import RelaxConfig, ScaleConfig, load_config
from tianji.driver import Forever, Serial, Shuffled
from tianji.env import Discrete
from tianji.envs.toy import Toy
from tianji.role import Did
from tianji.role_names import RoleName
from tianji.server import INFER, NO_VERSION, Remote, Server, answers_layout, asks_layout
from tianji.testing.algorithm import config_for, run_updates
from tianji.testing.items import params_of
from tianji.transports.memory import Memory
from tianji.types import VERSION, Params, floats, leaf, sha256

OBSERVATION = {"obs": leaf((2,), np.float32)}
EXTRAS = {"version": leaf((), np.int64), "batch": leaf((), np.int64)}
SERVED = {"lead": float("inf"), "late": "pass", "take": "boundary", "infer": "server"}

SNAPSHOTS = Conduit("snapshots", "newest", {"version": leaf((1,), np.float32)})


class Steps(Toy):
    """Rewards 1 for the number of steps that the episode has lasted; episodes end at random, some
    by termination, some by truncation."""

    def __init__(self, num_envs):
        super().__init__("toy/Steps", num_envs, 2, Discrete(100), limit=7)

    def _first(self):
        return np.zeros(self.num_envs)

    def _advance(self, action):
        return action == self._clock, self._rng.random(self.num_envs) < 0.15

    def _observe(self):
        return np.zeros((self.num_envs, 2), np.float32)


class Counting:
    """Counts the steps of each env's episode in its recurrent state, and chooses that number."""

    extras: ClassVar[dict] = EXTRAS
    shapes: ClassVar[dict] = {"version": (1,)}

    def initial(self, B):
        return {"steps": np.zeros(B, np.int64)}

    def load(self, params):
        self._version = int(params["version"][0])

    def act(self, observation, state, rng):
        steps = state["steps"]
        extras = {k: np.full(len(steps), v) for k, v in
                  (("version", self._version), ("batch", len(steps)))}  # fmt: skip
        return Decision(steps.copy(), {"steps": steps + 1}, extras)


class Seen:
    """What updates took."""

    def __init__(self):
        self.reward, self.versions, self.batches = [], [], set()

    def check(self, part, update=None):
        if update is None:
            return
        self.reward += part.reward[part.valid].tolist()
        self.versions.append((int(part.head[VERSION]), part.extras["version"][:, 0].tolist()))
        self.batches |= set(part.extras["batch"].ravel().tolist())


@dataclass(frozen=True)
class Counted(Once):
    """Counts steps by a server's recurrent state; its parameters are only its version."""

    def describe(self, spec):
        params, recurrent = floats(Counting.shapes), {"steps": leaf((), np.int64)}
        return replace(super().describe(spec), params=params, extras=EXTRAS, recurrent=recurrent)

    def policy(self, spec, device="cpu"):
        return Counting()

    def trainer(self, spec, device="cpu"):
        trainer = super().trainer(spec, device)
        trainer.params = lambda version: Params(
            floats(Counting.shapes), np.array([version], np.float32).view(np.uint8)
        )
        return trainer


def counted(actors, seen, **relax):
    scale = ScaleConfig(engine="local", actors=actors, envs_per_actor=3, rollout_length=5)
    algorithm = Counted(actors, seen)
    fields = RelaxConfig(**SERVED, **relax)
    built = build(config_for(algorithm, scale=scale, relax=fields), Steps)
    built.learner.begin()
    return built


@pytest.mark.parametrize("actors", [1, 3])
@pytest.mark.parametrize("order", [None, 0, 1, 2])
@pytest.mark.parametrize("max_batch", [None, 3, 8])
def test_the_server_keeps_and_restarts_the_state_of_every_env(actors, order, max_batch):
    seen = Seen()
    built = counted(actors, seen, max_batch=max_batch)
    driver = Serial(built.roles) if order is None else Shuffled(built.roles, order)
    run_updates(built, driver, 12)
    assert len(seen.reward) > 100
    assert set(seen.reward) == {1.0}
    if order is None and max_batch is None:
        assert seen.batches == {3 * actors}, "all that had asked were not one batch"
    elif max_batch is not None:
        assert max(seen.batches) <= max_batch
    elif actors > 1:
        assert len(seen.batches) > 1, "asks at different times made no different batches"


@pytest.mark.parametrize("actors", [1, 3])
def test_a_server_that_did_not_restart_states_would_be_noticed(actors, monkeypatch):
    monkeypatch.setattr("tianji.server.restart", lambda *_: None)
    seen = Seen()
    built = counted(actors, seen)
    run_updates(built, Serial(built.roles), 12)
    assert 0 < np.mean(seen.reward) < 1


@pytest.mark.parametrize("order", range(3))
def test_a_rollout_is_of_the_version_of_its_first_step_and_later_ones_may_be_newer(order):
    seen = Seen()
    built = counted(2, seen)
    run_updates(built, Shuffled(built.roles, order), 30)
    for version, steps in seen.versions:
        assert version == steps[0]
        assert steps == sorted(steps)
    assert any(steps[0] < steps[-1] for _, steps in seen.versions), "no version came in between"
    assert max(version for version, _ in seen.versions) > 20


class Asking:
    """A server with a clock that stands still until it is told, and actors that ask by hand."""

    def __init__(self, actors, envs=2, published=True, **limits):
        self.now, self.batches = 0.0, []
        transport, policy = Memory(), Counting()
        asks = [
            Conduit(f"asks-{i}", "queue", asks_layout(OBSERVATION, envs)) for i in range(actors)
        ]
        before = {k: leaf(a.shape[1:], a.dtype) for k, a in policy.initial(1).items()}
        layout = answers_layout(leaf((), np.int64), EXTRAS, before, envs)
        answers = [Conduit(f"answers-{i}", "queue", layout) for i in range(actors)]
        self.remotes = [
            Remote(transport.outbox(a), transport.inbox(b))
            for a, b in zip(asks, answers, strict=True)
        ]
        self.states = [remote.initial(envs) for remote in self.remotes]
        self.inboxes = [transport.inbox(conduit) for conduit in asks]
        self.publisher = transport.publisher(SNAPSHOTS)
        self.server = Server(
            policy, self.inboxes, [transport.outbox(conduit) for conduit in answers],
            transport.subscriber(SNAPSHOTS), envs, np.random.default_rng(0),
            clock=lambda: self.now, **limits,
        )  # fmt: skip
        self.envs = envs
        if published:
            self.publisher.push(0, Params(SNAPSHOTS.layout))
        while self.server.step():
            pass

    def ask(self, *actors):
        """Each acts; its answer where there is one."""
        observation = {"obs": np.zeros((self.envs, 2), np.float32)}
        found = [self.remotes[i].act(observation, self.states[i], None) for i in actors]
        for i, decision in zip(actors, found, strict=True):
            if isinstance(decision, Decision):
                self.states[i] = decision.state
        return found[0] if len(found) == 1 else found

    def serve(self):
        """Step the server until it waits; what it waits for, and the batches that it made."""
        before = len(self.batches)
        act = self.server._policy.act
        self.server._policy.act = lambda o, s, rng: (
            self.batches.append(len(o["obs"])) or act(o, s, rng)
        )
        while did := self.server.step():
            pass
        self.server._policy.act = act
        return did, self.batches[before:]


def test_where_all_actors_have_asked_nobody_waits():
    asking = Asking(3, max_wait=1.0)
    assert asking.serve()[1] == []
    assert all(did.kind == "ask" for did in asking.ask(0, 1, 2))
    assert asking.serve()[1] == [6]
    assert all(isinstance(answer, Decision) for answer in asking.ask(0, 1, 2))


def test_the_first_ask_waits_for_others_as_long_as_it_may():
    asking = Asking(3, max_wait=1.0)
    asking.ask(0)
    did, made = asking.serve()
    assert (did.waits, did.nap, made) == ("actor", 1.0, [])
    asking.now = 0.75
    asking.ask(1)
    did, made = asking.serve()
    assert (did.nap, made) == (0.25, [])
    assert asking.ask(0).waits == "server"
    asking.now = 1.0
    assert asking.serve()[1] == [4]
    asking.ask(2)
    did, made = asking.serve()
    assert (did.nap, made) == (1.0, []), "a new batch has a wait of its own"


def test_a_full_batch_waits_for_nobody_and_the_rest_keeps_its_place():
    asking = Asking(5, envs=2, max_batch=5, max_wait=1.0)
    asking.ask(3, 0, 4)
    did, made = asking.serve()
    assert made == [4]
    assert did.nap == 1.0
    asking.now = 0.5
    asking.ask(1)
    assert asking.serve()[1] == [4]


def test_actors_that_are_gone_are_not_waited_for():
    asking = Asking(2, max_wait=1.0)
    asking.inboxes[1].ended = True
    asking.ask(0)
    assert asking.serve()[1] == [2]


def test_before_the_first_version_the_server_waits_for_the_learner():
    asking = Asking(1, published=False)
    asking.ask(0)
    assert asking.serve()[0] is NO_VERSION
    asking.publisher.push(7, params_of(SNAPSHOTS, 7))
    assert asking.serve()[1] == [2]
    assert asking.ask(0).version == 7


def test_an_ask_waits_until_the_server_has_room_for_it():
    transport = Memory()
    asks = Conduit("asks-0", "queue", asks_layout(OBSERVATION, 2))
    answers = Conduit("answers-0", "queue", answers_layout(leaf((), np.int64), {}, {}, 2))
    remote = Remote(transport.outbox(asks), transport.inbox(answers))
    observation = {"obs": np.zeros((2, 2), np.float32)}
    assert not remote.act(observation, remote.initial(2), None)
    transport.inbox(asks).grant(0)
    assert remote.act(observation, remote.initial(2), None).kind == "ask"
    assert remote.act(observation, remote.initial(2), None).waits == "server"


@given(
    st.integers(1, 4), st.integers(1, 3), st.none() | st.integers(3, 12),
    st.lists(st.sampled_from(["ask", "ask", "tick", "serve"]), max_size=120), st.randoms(),
)  # fmt: skip
@examples(150)
def test_batches_keep_to_their_limits_and_every_ask_is_answered_once(
    actors, envs, max_batch, events, draw
):
    asking = Asking(actors, envs, max_batch=max_batch, max_wait=3.0)
    asked, answers = {}, [0] * actors
    for event in events:
        if event == "tick":
            asking.now += draw.choice([0.5, 1.0, 4.0])
        elif event == "serve":
            did, made = asking.serve()
            assert all(rows <= (max_batch or actors * envs) for rows in made)
            assert did.nap == float("inf") or 0 < did.nap <= 3.0
        else:
            actor = draw.randrange(actors)
            found = asking.ask(actor)
            if isinstance(found, Decision):
                assert found.action.tolist() == [answers[actor]] * envs
                answers[actor] += 1
                del asked[actor]
            elif found.kind == "ask":
                assert actor not in asked
                asked[actor] = asking.now
    asking.serve()  # those that nobody had looked at begin their wait here
    asking.now += 3.0
    asking.serve()
    for actor in asked:
        assert asking.ask(actor).action.tolist() == [answers[actor]] * envs


class Waiting:
    """A role that waits, and says how long it may be left alone."""

    def __init__(self, name, *naps):
        self.name, self._naps = RoleName(name), list(naps)

    def step(self):
        nap = self._naps.pop(0) if self._naps else None
        return (
            Did("work") if nap == 0 else Did(waits="x") if nap is None else Did(waits="x", nap=nap)
        )


def test_a_process_sleeps_no_longer_than_its_most_impatient_role_allows():
    slept = []
    driver = Forever([Waiting("a", 0.05, 9.0), Waiting("b", 0.02)], slept.append)
    for _ in range(6):
        driver.step()
    assert slept == [0.02, Forever.NAP, Forever.NAP]


def test_work_between_two_waits_begins_a_new_sleep():
    slept = []
    driver = Forever([Waiting("a", 0.01, 0, 0.03), Waiting("b", 0)], slept.append)
    for _ in range(6):
        driver.step()
    assert slept == [0.03]


PPO = {
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo", "epochs": 1, "learning_rate": 2e-2, "gamma": 0.0},
    "network": {"hidden": [16]},
    "scale": {"relax": "seed", "actors": 3, "envs_per_actor": 8, "rollout_length": 16},
    "stop": {"updates": 100},
}


@pytest.mark.parametrize("order", [None, 0])
def test_ppo_learns_with_a_server_for_all_actors_in_one_thread(order):
    built = build(load_config(PPO))
    assert [str(role.name) for role in built.roles] == role_names(built.assembly)
    built.learner.begin()
    driver = Serial(built.roles) if order is None else Shuffled(built.roles, order)
    returns = []
    while built.learner.version < 100:
        version = built.learner.version
        run_updates(built, driver, 1)
        returns.append((version, built.learner.report.episodes["return"]))
    built.close()
    last = np.concatenate([episodes for version, episodes in returns if version >= 90])
    assert len(last) > 20
    assert last.mean() > 15, "of 16"


def test_one_process_with_a_server_repeats_itself():
    learnt = set()
    for _ in range(2):
        built = build(load_config(PPO))
        built.learner.begin()
        run_updates(built, Serial(built.roles), 5)
        learnt.add(sha256(built.learner.networks()))
        built.close()
    assert len(learnt) == 1


def test_actors_of_a_server_hold_no_parameters():
    built = build(load_config(PPO))
    assert ends(built.assembly, "actor-1") == [
        End("rollouts-1", "send"), End("asks-1", "send"), End("answers-1", "receive"),
    ]  # fmt: skip
    assert End("snapshots", "receive") in ends(built.assembly, "server")
    assert all(actor._newest.params.buffer.size == 0 for actor in built.actors)
    built.close()


def test_a_server_is_stepped_between_the_ask_and_the_step():
    built = build(load_config(PPO, ["scale.actors=1"]))
    built.learner.begin()
    driver = Serial(built.roles)
    order = [did for _ in range(60) if (did := driver.step())]
    assert order.index(INFER) < order.index(SIMULATE)
    assert {did.kind for did in order} >= {"ask", "receive", "infer", "simulate"}
    built.close()


def test_a_run_with_a_server_goes_on_from_a_checkpoint_with_new_episodes(tmp_path):
    first = tianji.train(PPO, ["stop.updates=4"], runs=tmp_path)
    again = tianji.resume(first.run_dir, ["stop.updates=9"])
    assert again.updates == 9
    assert again.resumed == "inexact: envs reset"


def test_states_are_right_after_a_checkpoint_too():
    built = counted(2, Seen())
    run_updates(built, Shuffled(built.roles, 3), 5)
    states = {str(role.name): role.state() for role in (*built.actors, built.server)}
    other = counted(2, seen := Seen())
    for role in (*other.actors, other.server):
        role.load_state(states[str(role.name)])
    run_updates(other, Shuffled(other.roles, 4), 8)
    assert len(seen.reward) > 100
    assert set(seen.reward) == {1.0}
