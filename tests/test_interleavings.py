"""Real roles in random orders: nothing stalls, is lost, doubled or overwritten; bounds hold."""

import dataclasses
import itertools
import math
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import examples

from tianji.algorithm import Decision, Traits
from tianji.buffer import MOST_OUT
from tianji.build import build
from tianji.config import RelaxConfig, ReuseConfig, ScaleConfig, load_config
from tianji.description import Description, averaged
from tianji.driver import Serial, Shuffled
from tianji.env import Discrete
from tianji.envs.toy import Toy
from tianji.learner import UPDATE
from tianji.store import Replay, Transitions, chooser_once, gatherer_once, numbers, served_once
from tianji.testing.algorithm import config_for, run_updates
from tianji.train_state import TrainState
from tianji.types import SEQ, SOURCE, STEPS, VERSION, Params, floats, leaf, sha256

UPDATES = 8
"""that a run must reach, unless it says otherwise"""

MOST_TICKS = 20_000
"""steps of roles without an update after which a run is called one that stands still"""


class Marked(Toy):
    """Each observation says whose it is: (maker, ticks so far, env); no two are alike."""

    def __init__(self, num_envs, maker, every):
        self._maker, self._ticks = maker, 0
        super().__init__("toy/Marked", num_envs, 3, Discrete(100), every)

    def _first(self):
        return np.zeros(self.num_envs)

    def _advance(self, action):
        self._ticks += 1
        return np.asarray(action, np.float64), np.zeros(self.num_envs, np.bool_)

    def _observe(self):
        rows = np.empty((self.num_envs, 3), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2] = self._maker, self._ticks, np.arange(self.num_envs)
        return rows


class MarkedPolicy:
    """Actions depend on the version that acts and on the actor's own generator."""

    extras: ClassVar[dict] = {}
    shapes: ClassVar[dict] = {"w": (1,)}

    def initial(self, B):
        return {}

    def load(self, params):
        self._w = int(params["w"][0])

    def act(self, observation, state, rng):
        drawn = rng.integers(100, size=len(observation["obs"]))
        return Decision((drawn + self._w) % 100, state, {})


HASH = {"hash": leaf((1,), np.int64)}


class Hashing:
    """A trainer whose networks are a hash of all that it took, in the order in which it did; it
    looks whether a part is what an actor pushed when it takes it, and again before the update."""

    def __init__(self, witness):
        self._witness = witness
        self._hash, self._parts, self._updates = np.zeros(1, np.int64), [], 0
        self.state = TrainState(learnt={"hash": self._hash})

    def take(self, part):
        self._witness.check(part, self._updates)
        self._parts.append(part)

    def finish(self):
        for part in self._parts:
            self._witness.check(part)
            for array in (part.observation["obs"], part.action, part.reward, part.versions):
                before = int(self._hash[0])
                self._hash[:] = zlib.crc32(np.ascontiguousarray(array).tobytes(), before)
        self._parts, self._updates = [], self._updates + 1
        return {}

    def params(self, version):
        w = (self._hash % 100).astype(np.float32)
        return Params(floats(MarkedPolicy.shapes), w.view(np.uint8))


@dataclass(frozen=True)
class Once:
    """On-policy: an update consumes so many rollouts, each once."""

    rollouts: int
    witness: "Witness" = field(compare=False)

    name: ClassVar[str] = "once"
    traits: ClassVar[Traits] = Traits(on_policy=True, corrects=("vtrace",), once=True)

    def check(self, spec):
        pass

    def steps_per_update(self, spec):
        return self.rollouts * spec.rows_per_rollout

    def warmup_steps(self, spec):
        return 0

    def describe(self, spec):
        slots = -(-self.rollouts // spec.actors) * spec.window
        served = served_once(spec, self.rollouts)
        return Description(floats(MarkedPolicy.shapes), averaged(HASH), *served, slots)

    def policy(self, spec, device="cpu"):
        return MarkedPolicy()

    def chooser(self, spec, lanes):
        return chooser_once(spec, lanes)

    def gatherer(self, spec, lanes):
        return gatherer_once(spec, lanes)

    def trainer(self, spec, device="cpu"):
        return Hashing(self.witness)


@dataclass(frozen=True)
class Again:
    """Off-policy: an update draws from replay."""

    new_steps: int
    warmup: int
    held: int
    witness: "Witness" = field(compare=False)

    name: ClassVar[str] = "again"
    traits: ClassVar[Traits] = Traits(on_policy=False, explores=("ladder",))
    batch: ClassVar[int] = 4

    def check(self, spec):
        pass

    def steps_per_update(self, spec):
        return self.new_steps

    def warmup_steps(self, spec):
        return self.warmup

    def describe(self, spec):
        selection = numbers(("lane", "step"), self.batch)
        params, models = floats(MarkedPolicy.shapes), averaged(HASH)
        return Description(params, models, selection, slots=self.held)

    def policy(self, spec, device="cpu"):
        return MarkedPolicy()

    def chooser(self, spec, lanes):
        return Replay(lanes, self.batch, self.held, n=1)

    def gatherer(self, spec, lanes):
        return Transitions(lanes, gamma=0.9, n=1)

    def trainer(self, spec, device="cpu"):
        return Hashing(self.witness)


class Witness:
    """Stands at every channel and notes what passes; knows what each observation belongs to."""

    def __init__(self):
        self.granted = []
        """(lane, number in that lane) in the order of the grants"""
        self.pushed = {}
        """(lane, number there) -> what was pushed, a copy"""
        self.arrived = []
        """(lane, number) in the order in which the buffer received them"""
        self.taken = []
        """(update, staleness, (lane, number), env) of each column or step that an update took"""
        self.pieces = []
        """slots that each piece names, in the order in which they were served"""
        self.released = 0
        self._rows = {}
        """(maker, tick) -> (lane, number, row)"""

    def attend(self, built):
        self._buffer = built.buffer
        self._ahead = built.assembly.relax.lead > 0
        self._lanes = built.buffer._lanes
        for i, actor in enumerate(built.actors):
            actor._rollouts = Sender(actor._rollouts, lambda slot, i=i: self._push(i, slot))
            built.buffer._lanes[i] = Receiver(built.buffer._lanes[i], i, self)
        rows = built.spec.rows_per_rollout
        built.buffer._batches[0] = Sender(
            built.buffer._batches[0], lambda slot: self.pieces.append(named(slot, rows))
        )
        built.learner._batches = Releases(built.learner._batches, self)

    def check(self, part, update=None):
        """Does the part hold what was pushed? Note it, where it is new."""
        obs = part.observation["obs"]
        T = len(part.reward)
        replayed = part.head[SOURCE] == 0 and len(obs) == 2 and "discount" in part.extras
        for b in range(obs.shape[1]):
            maker, tick, env = (int(x) for x in obs[0, b])
            key, row = self._rows[maker, tick]
            copy = self.pushed[key]
            end = row + T
            assert (obs[:, b] == copy["obs"][row : end + 1, env]).all(), "a slot was overwritten"
            for name in ("action", "reward") if replayed else ("action", "reward", "valid"):
                same = getattr(part, name)[:, b] == copy[name][row:end, env]
                assert same.all(), f"{name} of a slot was overwritten"
            if part.head[SOURCE] >= 0 and not replayed:
                assert part.head.tolist() == copy["head"].tolist(), "a head was overwritten"
            if update is not None:
                version = copy["head"][VERSION]
                if replayed and "extras.version" in copy:
                    version = copy["extras.version"][row, env]
                behind = update - int(version)
                self.taken.append((update, behind, key, env))

    def grant(self, lane, index, out):
        """No piece that the learner has not given back may name the slot. Unless rounds are fixed,
        it goes to one of those who are active and have least to do, and have a slot to do it in."""
        active = self._buffer.active
        assert lane in active, "an inactive actor got more to do"
        others = [other.out for i, other in enumerate(self._lanes) if other._free and i in active]
        assert not self._ahead or out <= min(others, default=out), "a busy actor got more to do"
        assert not any((lane, index) in piece for piece in self.pieces[self.released :]), (
            "a slot was granted while a batch that names it is in use"
        )
        number = sum(1 for where, _ in self.granted if where == lane)
        self.granted.append((lane, number))

    def _push(self, lane, slot):
        arrays = {name: array.copy() for name, array in slot.arrays.items()}
        arrays["obs"] = arrays.pop("observation.obs")
        head = arrays["head"]
        key = int(head[SOURCE]), int(head[SEQ])
        assert key == (lane, sum(1 for where, _ in self.pushed if where == lane))
        self.pushed[key] = arrays
        for row, (maker, tick, _) in enumerate(arrays["obs"][:-1, 0].tolist()):
            self._rows[int(maker), int(tick)] = key, row


def named(slot, rows):
    lanes = slot.leaf("lane").tolist()
    if "step" in slot.memory:
        return set(zip(lanes, (slot.leaf("step") // rows).tolist(), strict=True))
    return set(zip(lanes, slot.leaf("slot").tolist(), strict=True))


class Sender:
    """An outbox that tells what is pushed."""

    def __init__(self, outbox, tell):
        self._outbox, self._tell = outbox, tell

    def push(self, slot):
        self._tell(slot)
        self._outbox.push(slot)

    def __getattr__(self, name):
        return getattr(self._outbox, name)


class Receiver:
    """A lane's inbox that tells what is granted and probed."""

    def __init__(self, inbox, lane, witness):
        self._inbox, self._lane, self._witness = inbox, lane, witness

    def grant(self, *number):
        out = self._inbox.out
        given = self._inbox.grant(*number)
        if given:
            self._witness.grant(self._lane, self._inbox._granted[-1].index, out)
        return given

    def probe(self):
        slot = self._inbox.probe()
        if slot is not None:
            head = slot.leaf("head")
            self._witness.arrived.append((int(head[SOURCE]), int(head[SEQ])))
        return slot

    def __getattr__(self, name):
        return getattr(self._inbox, name)


class Releases:
    """The learner's inbox that tells what is given back."""

    def __init__(self, inbox, witness):
        self._inbox, self._witness = inbox, witness

    def release(self, slot):
        self._inbox.release(slot)
        self._witness.released += 1

    def __getattr__(self, name):
        return getattr(self._inbox, name)


@dataclass(frozen=True)
class Case:
    """A run to be interleaved."""

    actors: int
    relax: dict
    rollouts: int = 0
    """that an update consumes; 0: replay"""
    replay: tuple[int, int, int] = (1, 8, 3)
    """new steps for an update, warm-up in steps, rollouts held of each actor"""
    T: int = 2
    B: int = 2
    preset: str = "sync"
    rebalance: bool = False

    def build(self):
        """Roles with a witness at every channel."""
        witness = Witness()
        algorithm = Once(self.rollouts, witness) if self.rollouts else Again(*self.replay, witness)
        scale = ScaleConfig(
            engine="local", relax=self.preset, actors=self.actors,
            envs_per_actor=self.B, rollout_length=self.T, rebalance=self.rebalance,
        )  # fmt: skip
        fields = {k: v for k, v in self.relax.items() if k not in ("window", "paced")}
        config = config_for(algorithm, scale=scale, relax=RelaxConfig(**fields))
        window = ReuseConfig(self.relax.get("window", 1))
        makers = itertools.count()
        built = build(
            dataclasses.replace(config, reuse=window),
            lambda num_envs: Marked(num_envs, next(makers), every=3),
        )
        witness.attend(built)
        built.learner.begin()
        return built, witness


@dataclass(frozen=True)
class Order:
    """Who is stepped when: roles in a random order by their weights; some sleep for a while."""

    seed: int
    weights: tuple[float, ...] = ()
    """of each role, actors first, then buffer and learner; missing ones are 1"""
    naps: tuple[tuple[int, int, int], ...] = ()
    """(role, first tick, ticks) in which it is not stepped, unless all others wait"""
    stopped: tuple[tuple[int, int], ...] = ()
    """(role, tick) from which on it is never stepped again"""
    active: tuple[tuple[int, frozenset[int]], ...] = ()
    """(tick, the actors that are active from then on)"""


class StandsStill(AssertionError):
    """Nobody works any more, or nothing comes of it."""


def interleave(built, order, updates=UPDATES, seen=lambda: None):
    """Step the roles until so many updates are made; `seen()` is called after each."""
    roles, draw = built.roles, random.Random(order.seed)
    weights = [*order.weights, *[1.0] * len(roles)]
    naps, waiting = list(order.naps), set()
    tick = last = 0
    while built.learner.version < updates:
        tick += 1
        if tick > last + MOST_TICKS:
            raise StandsStill(f"no update after {built.learner.version}, in {MOST_TICKS} steps")
        for begin, actors in order.active:
            if begin == tick:
                built.buffer.activate(actors)
                for i, actor in enumerate(built.actors):
                    actor.active = i in actors
                waiting.clear()
        asleep = {role for role, begin, ticks in naps if begin <= tick < begin + ticks}
        stopped = {role for role, begin in order.stopped if begin <= tick}
        # A role that waited waits until another has worked.
        awake = [i for i in range(len(roles)) if i not in asleep | stopped | waiting]
        if not awake:
            if not asleep - stopped:
                told = ", ".join(f"{role.name} {role.step()}" for role in roles)
                raise StandsStill(f"after {built.learner.version} updates: {told}")
            naps = [nap for nap in naps if nap[0] not in asleep]
            continue
        (i,) = draw.choices(awake, [weights[j] for j in awake])
        did = roles[i].step()
        if not did:
            waiting.add(i)
            continue
        waiting.clear()
        if did is UPDATE:
            last = tick
            seen()


def orders(actors, most_stopped=0):
    """Random orders for so many actors, of whom at most so many stop for ever."""
    roles = st.integers(0, actors + 1)
    stops = st.tuples(st.integers(0, actors - 1), st.integers(0, 200))
    return st.builds(
        Order,
        seed=st.integers(0, 2**32 - 1),
        weights=st.lists(
            st.sampled_from([0.03, 0.2, 1.0]), min_size=actors + 2, max_size=actors + 2
        ).map(tuple),
        naps=st.lists(st.tuples(roles, st.integers(0, 300), st.integers(1, 400)), max_size=4).map(
            tuple
        ),
        stopped=st.lists(
            stops, min_size=min(1, most_stopped), max_size=most_stopped, unique_by=lambda s: s[0]
        ).map(tuple),
    )


@st.composite
def relaxations(draw, actors, leads=(0, 1, 2, 4, math.inf), lates=("wait", "pass")):
    """Fields that can be kept together, for an on-policy algorithm."""
    lead, late = draw(st.sampled_from(leads)), draw(st.sampled_from(lates))
    window = draw(st.sampled_from([1, 1, 2, 4]))
    publish = draw(st.integers(1, int(min(3, lead + 1))))
    least = (lead if math.isfinite(lead) else publish - 1) + window - 1
    take = "barrier" if lead == 0 else draw(st.sampled_from(["barrier", "boundary"]))
    return {
        "lead": float(lead),
        "late": late,
        "take": take,
        "infer": "actor" if take == "barrier" else draw(st.sampled_from(["actor", "server"])),
        "start": "batch" if window > 1 else draw(st.sampled_from(["batch", "stream"])),
        "publish": publish,
        "window": window,
        "max_staleness": draw(st.none() | st.integers(0, 3).map(lambda n: int(least + n))),
    }


@st.composite
def once_cases(draw, **choices):
    """Runs of an on-policy algorithm: 1 to 5 actors, batches of one or two rounds, or uneven."""
    actors = draw(st.integers(1, 5))
    relax = draw(relaxations(actors, **choices))
    rounds = st.sampled_from([actors, actors, 2 * actors])
    parts = st.sampled_from([n for n in range(1, actors + 1) if actors % n == 0])
    rollouts = draw(rounds | (parts if relax["lead"] == 0 else st.integers(1, 7)))
    B = relax["window"] if rollouts * 2 % relax["window"] else 2
    return Case(actors, relax, rollouts, B=B)


@st.composite
def again_cases(draw, leads=(0, 1, 2, 4, math.inf), lates=("wait", "pass")):
    """Runs of an off-policy algorithm; at lead 0 updates and rounds fit into each other."""
    actors = draw(st.integers(1, 5))
    rows = 4 * actors
    lead = draw(st.sampled_from(leads))
    news = [1, 2, 4, rows, 2 * rows]
    new = draw(st.sampled_from(news) if lead == 0 else st.sampled_from(news) | st.integers(1, 30))
    relax = {
        "lead": float(lead),
        "late": draw(st.sampled_from(lates)),
        "take": "barrier" if lead == 0 else draw(st.sampled_from(["barrier", "boundary"])),
        "publish": draw(st.integers(1, int(min(3, lead + 1)))),
    }
    if relax["take"] == "boundary":
        relax["infer"] = draw(st.sampled_from(["actor", "server"]))
    if relax["late"] == "pass":
        relax["credit"] = draw(st.sampled_from([0, 1, 5]))
    warmup = draw(st.integers(4, 2 * rows))
    return Case(actors, relax, replay=(new, warmup, draw(st.integers(2, 4))))


def with_orders(cases, most_stopped=lambda case: 0):
    return cases.flatmap(
        lambda case: st.tuples(st.just(case), orders(case.actors, most_stopped(case)))
    )


def bound(relax):
    """Versions behind, at most, of what an update consumes, by what the page on balance proves."""
    # A boundary asks for no version: what was published last may be publish - 1 old.
    behind = relax.lead + (relax.publish - 1 if relax.take == "boundary" else 0)
    most = behind + relax.window - 1 if relax.late == "wait" else math.inf
    return most if relax.max_staleness is None else min(most, relax.max_staleness)


def check_account(built):
    """Rows received stay between what the updates ask for and what the lead allows."""
    balance, version, lead = built.buffer._balance, built.learner.version, built.assembly.relax.lead
    if not balance.paced:
        return
    rows = balance.received * balance.rows_per_rollout
    due = max(0, version - balance.credit)
    assert rows >= balance.warmup + due * balance.steps_per_update
    ahead = balance.warmup + (version + lead + 1) * balance.steps_per_update
    assert rows < ahead + balance.round * balance.rows_per_rollout


def versions(witness, key, env):
    """That made the steps of a column."""
    copy = witness.pushed[key]
    if "extras.version" in copy:
        return set(copy["extras.version"][copy["valid"][:, env], env].tolist())
    return {int(copy["head"][VERSION])}


def check_report(case, learner, witness):
    """What the learner says of its last update is what was seen."""
    update, report = learner.version - 1, learner.report
    assert (report.version, report.consumed) == (learner.version, learner.consumed)
    taken = [(behind, (key, env)) for u, behind, key, env in witness.taken if u == update]
    behind = {behind for behind, _ in taken}
    if case.rollouts:  # where a server chose, each step of a column has its own
        columns = (column for _, column in taken)
        behind = {update - version for column in columns for version in versions(witness, *column)}
    assert set(report.staleness.tolist()) == behind
    if case.rollouts:
        before = {(key, env) for u, _, key, env in witness.taken if u < update}
        fresh = sum(column not in before for _, column in taken)
        assert report.freshness == pytest.approx(fresh / len(taken))


def check_books(case, built, witness):
    """Nothing is lost and nothing doubled; what is thrown away is counted, and only that."""
    buffer, relax, R = built.buffer, built.assembly.relax, case.rollouts
    steps = {key: int(copy["head"][STEPS]) for key, copy in witness.pushed.items()}
    arrived = witness.arrived
    assert len(set(arrived)) == len(arrived), "a rollout arrived twice"
    waiting = sum(len(lane._pushed) for lane in buffer._lanes)
    assert len(witness.pushed) == len(arrived) + waiting, "a rollout was lost on its way"
    if relax.late == "wait":
        assert arrived == witness.granted[: len(arrived)], "not in the order of the grants"

    most = math.inf if relax.max_staleness is None else relax.max_staleness
    kept, filtered = [], 0
    for key in arrived:
        update = len(kept) // R if R else 0
        if update - witness.pushed[key]["head"][VERSION] <= most - (relax.window - 1):
            kept.append(key)
        else:
            filtered += steps[key]
    assert buffer.filtered == filtered
    assert buffer.received == buffer.produced == sum(steps[key] for key in arrived)
    assert buffer._balance.received == len(kept)
    out = sum(lane.out for lane in buffer._lanes)
    assert buffer._balance.granted == len(kept) + waiting + out, "a grant was lost"
    return kept


def check_consumption(case, built, witness, kept):
    """Update k consumes exactly rollouts k R to (k + 1) R - 1 of those kept, each column once; with
    a window of K, columns of the last K batches, each at most once an update."""
    R, B, K, updates = case.rollouts, case.B, built.assembly.relax.window, built.learner.version
    place = {key: i // R for i, key in enumerate(kept)}
    for update in range(updates):
        taken = [(key, env) for u, _, key, env in witness.taken if u == update]
        assert len(taken) == len(set(taken)) == R * B
        ages = Counter(update - place[key] for key, _ in taken)
        held = min(K, update + 1)
        assert set(ages) == set(range(held))
        assert max(ages.values()) - min(ages.values()) <= 1
        if K == 1:
            assert taken == [(key, b) for key in kept[update * R : (update + 1) * R]
                             for b in range(B)]  # fmt: skip


def check_slots(built):
    """Each slot is free, granted, pushed, held by the store, or on its way back: none is lost."""
    store, buffer = built.buffer._chooser, built.buffer
    held = Counter(store._waiting) + Counter(x for b in getattr(store, "_held", ()) for x in b)
    leaving = Counter((lane, slot) for lane, slot, _ in buffer._leaving)
    for i, lane in enumerate(buffer._lanes):
        total = len(lane.memory["head"])
        places = Counter([*lane._free, *(s.index for s in (*lane._granted, *lane._pushed))])
        places += Counter(slot for where, slot in (held + leaving).elements() if where == i)
        assert places == Counter(range(total)), "a slot is in two places, or in none"


def updates_of(case):
    """So many that every actor makes several rollouts, and replay has retired some."""
    if case.rollouts:
        return UPDATES
    new, _, held = case.replay
    return max(UPDATES, -(-(held + 2) * case.actors * case.T * case.B // new))


def run(case, order):
    """One run with all that is checked of any."""
    built, witness = case.build()
    relax = built.assembly.relax

    def updated():
        check_account(built)
        check_report(case, built.learner, witness)

    interleave(built, order, updates_of(case), updated)
    kept = check_books(case, built, witness)
    if case.rollouts:
        check_consumption(case, built, witness, kept)
        check_slots(built)
        assert max(behind for _, behind, _, _ in witness.taken) <= bound(relax)
    else:
        assert built.learner.consumed == built.learner.version * Again.batch == len(witness.taken)
    built.close()
    return built, witness


@examples(200)
@given(with_orders(once_cases()))
def test_on_policy_runs_keep_their_promises_in_any_order(drawn):
    run(*drawn)


@examples(100)
@given(with_orders(again_cases()))
def test_replay_runs_keep_their_promises_in_any_order(drawn):
    run(*drawn)


def may_stop(case):
    """Actors that may stop where late = "pass": each holds at most so many grants, and the lead,
    less what publishing seldom takes of it, must have room for them; the other half carries on."""
    ahead = case.relax["lead"] + 1 - case.relax["publish"]
    rows = case.T * case.B
    update = case.rollouts * rows or case.replay[0]
    return int(min(case.actors // 2, ahead * update // (MOST_OUT * rows)))


@examples(100)
@given(
    with_orders(
        (once_cases(lates=("pass",)) | again_cases(lates=("pass",))).filter(may_stop), may_stop
    )
)
def test_where_late_rollouts_pass_half_of_the_actors_may_stop_for_ever(drawn):
    run(*drawn)


def rebalanced(cases):
    """With orders in which actors become inactive and active again, down to any one of them."""

    def orders_of(case):
        sets = st.frozensets(st.integers(0, case.actors - 1), min_size=1)
        events = st.lists(st.tuples(st.integers(1, 600), sets), min_size=1, max_size=8).map(tuple)
        order = st.builds(
            lambda order, active: dataclasses.replace(order, active=active),
            orders(case.actors), events,
        )  # fmt: skip
        return st.tuples(st.just(dataclasses.replace(case, rebalance=True)), order)

    return cases.filter(lambda case: case.actors > 1).flatmap(orders_of)


@examples(150)
@given(rebalanced(once_cases(leads=(1, 2, 4, math.inf)) | again_cases(leads=(1, 2, 4, math.inf))))
def test_promises_hold_while_actors_become_inactive_and_active_again(drawn):
    """Nothing is lost, doubled or overwritten, nothing stands still; staleness and the account of
    rows stay within their bounds; and an inactive actor is granted nothing."""
    run(*drawn)


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("late", ["wait", "pass"])
def test_one_active_actor_alone_fills_all_batches(late, window):
    relax = {**RELAX, "late": late, "window": window}
    case = Case(4, relax, rollouts=4, B=8, rebalance=True)
    built, witness = run(case, Order(0, active=((30, frozenset({2})),)))
    made = Counter(lane for lane, _ in witness.arrived)
    assert made[2] > 3 * max(made[0], made[1], made[3])
    assert built.actors[0].step().waits == "turn"


@examples(60)
@given(with_orders(once_cases(leads=(0,), lates=("wait",))))
def test_at_lead_0_all_orders_learn_the_same_and_so_do_batch_and_stream(drawn):
    case, order = drawn
    learnt = set()
    for start in ("batch", "stream") if case.relax["window"] == 1 else ("batch",):
        same = dataclasses.replace(case, relax={**case.relax, "start": start})
        for steps in (lambda built: Serial(built.roles), lambda b: Shuffled(b.roles, order.seed)):
            built, _ = same.build()
            driver = steps(built)
            while built.learner.version < UPDATES:
                driver.step()
            learnt.add(int(built.learner.networks()["hash"][0]))
        built, _ = run(same, order)
        learnt.add(int(built.learner.networks()["hash"][0]))
    assert len(learnt) == 1


@examples(40)
@given(with_orders(again_cases(leads=(0,), lates=("wait",))))
def test_at_lead_0_replay_draws_the_same_in_all_orders(drawn):
    case, order = drawn
    built, _ = case.build()
    driver = Serial(built.roles)
    while built.learner.version < updates_of(case):
        driver.step()
    other, _ = run(case, order)
    assert other.learner.networks() == built.learner.networks()


def test_at_lead_0_all_actors_of_a_round_work_at_once_with_replay():
    built, _ = Case(3, {"lead": 0.0}, replay=(1, 12, 3)).build()
    for _ in range(12):
        while built.buffer.step() or built.learner.step():
            pass
        assert len({lane.out for lane in built.buffer._lanes}) == 1
        assert built.buffer._lanes[0].out > 0
        for actor in built.actors:
            while actor.step():
                pass
    assert built.learner.version == 12 * 12 - 12  # rows of 12 rounds, less the warm-up


def make(built, witness, i):
    """Let an actor make one rollout."""
    before = len(witness.pushed)
    while len(witness.pushed) == before:
        assert built.actors[i].step(), "an actor waits"


def settle(*roles):
    """Step them until none has anything to do."""
    while any(role.step() for role in roles):
        pass


@pytest.mark.parametrize("late", ["wait", "pass"])
def test_who_just_began_takes_nothing_that_another_will_soon_be_idle_for(late):
    """Two of four actors are done a little before the others when a version arrives: there is one
    rollout more for each, and not two for those."""
    built, witness = Case(4, {**RELAX, "late": late}, rollouts=4).build()
    settle(built.buffer, built.learner)
    for i in (0, 1, 2, 3, 2, 3):
        make(built, witness, i)
        settle(built.buffer)
    assert built.learner.version == 0
    settle(built.learner, built.buffer)
    assert built.learner.version == 1
    assert [sum(lane == i for lane, _ in witness.granted) for i in range(4)] == [3, 3, 3, 3]


def test_who_began_first_is_told_by_what_was_received():
    """All four were granted in their order; the last two were received first, so they are the ones
    that have been at their second rollout for longest."""
    built, witness = Case(4, {**RELAX, "late": "pass"}, rollouts=4).build()
    settle(built.buffer, built.learner)
    for i in (2, 3, 0, 1):
        make(built, witness, i)
        settle(built.buffer)
    before = len(witness.granted)
    settle(built.learner, built.buffer)
    assert [lane for lane, _ in witness.granted[before:]] == [2, 3, 0, 1]


RELAX = {
    "lead": 1.0, "late": "wait", "take": "barrier", "start": "batch", "publish": 1, "window": 1,
    "max_staleness": None,
}  # fmt: skip


@pytest.mark.parametrize("lead", [0, 1, 2, 4])
@pytest.mark.parametrize("window", [1, 2])
def test_the_bound_is_reached_so_it_could_not_be_smaller(lead, window):
    """A learner that is stepped only when all others wait lets production run ahead."""
    case = Case(3, {**RELAX, "lead": float(lead), "window": window}, rollouts=3)
    _, witness = run(case, Order(0, weights=(1, 1, 1, 1, 1e-9)))
    assert max(behind for _, behind, _, _ in witness.taken) == lead + window - 1


@pytest.mark.parametrize("rollouts", [1, 2])
def test_at_lead_0_an_update_of_less_than_a_round_consumes_nothing_stale(rollouts):
    case = Case(4, {**RELAX, "lead": 0.0}, rollouts=rollouts)
    _, witness = run(case, Order(0))
    assert max(behind for _, behind, _, _ in witness.taken) == 0


@pytest.mark.parametrize("publish", [2, 3])
def test_at_a_boundary_nobody_waits_and_the_bound_is_that_of_what_was_published(publish):
    relax = {**RELAX, "lead": 2.0, "take": "boundary", "publish": publish}
    _, witness = run(Case(3, relax, rollouts=3), Order(0, weights=(1, 1, 1, 1, 1e-9)))
    assert max(behind for _, behind, _, _ in witness.taken) == 2 + publish - 1


def test_a_gate_alone_does_not_bound_staleness_where_late_rollouts_pass():
    slow = Order(1, naps=((0, 22, 200),))
    gate = Case(3, {**RELAX, "late": "pass"}, rollouts=3)
    built, witness = run(gate, slow)
    assert max(behind for _, behind, _, _ in witness.taken) > 1
    assert built.buffer.filtered == 0
    both = dataclasses.replace(gate, relax={**gate.relax, "max_staleness": 1})
    built, witness = run(both, slow)
    assert max(behind for _, behind, _, _ in witness.taken) <= 1
    assert built.buffer.filtered > 0


def test_where_late_rollouts_are_waited_for_a_stopped_actor_stops_all():
    with pytest.raises(StandsStill):
        run(Case(3, RELAX, rollouts=3), Order(0, stopped=((1, 40),)))


def test_a_window_of_eight_batches_goes_on_where_half_of_the_actors_stop():
    """The other half's slots then hold all eight batches."""
    for actors, lead in ((2, 1.0), (2, 2.0), (4, 1.0)):
        relax = {**RELAX, "lead": lead, "late": "pass", "window": 8}
        stopped = tuple((actor, 30) for actor in range(actors // 2))
        case = Case(actors, relax, rollouts=actors, B=8)
        built, _ = case.build()
        interleave(built, Order(0, stopped=stopped), 2 * UPDATES)


def test_where_replay_is_not_paced_a_fast_learner_leaves_actors_their_grants():
    """Between any two steps of the buffer the learner is done with all that it has."""
    built, _ = Case(2, {}, preset="free").build()
    assert not built.assembly.relax.paced
    for _ in range(1000):
        for actor in built.actors:
            actor.step()
        built.buffer.step()
        while built.learner.step():
            pass
    assert built.learner.version > 100
    assert built.buffer._balance.received > 100


REAL = {
    "env": {"id": "toy/Identity"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 2, "normalise_reward": True},
    "network": {"hidden": [8]},
    "scale": {"actors": 2, "envs_per_actor": 4, "rollout_length": 8, "relax": "sync"},
    "stop": {"updates": 40},
}
REPLAY = {
    **REAL,
    "algorithm": {
        "name": "dqn", "warmup": 100, "capacity": 400, "batch_size": 16, "new_steps": 8, "n_step": 2
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "updates", "presets"),
    [(REAL, 6, ["sync", "periodic"]), (REPLAY, 40, ["sync"])],
    ids=["ppo", "dqn"],
)
def test_at_lead_0_shipped_algorithms_learn_the_same_in_all_orders(config, updates, presets):
    learnt = set()
    for preset in presets:
        for order in (None, 0, 1, 2):
            built = build(load_config(config, [f"scale.relax={preset}"]))
            built.learner.begin()
            driver = Serial(built.roles) if order is None else Shuffled(built.roles, order)
            run_updates(built, driver, updates)
            learnt.add(sha256(built.learner.networks()))
            built.close()
    assert len(learnt) == 1
