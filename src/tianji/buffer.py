"""The buffer: takes rollouts in, serves batches, and grants what may be produced next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from tianji.algorithm import Chooser, PriorityChooser
from tianji.balance import Balance
from tianji.channel import Inbox, Outbox, Slot
from tianji.errors import Refusal
from tianji.role import Did, State, generator_state, load_generator_state
from tianji.role_names import RoleName
from tianji.types import (
    EPISODE,
    EPISODES,
    PRODUCED,
    SEQ,
    STEPS,
    VERSION,
    Array,
    Layout,
    Leaves,
    Report,
    leaf,
)

RECEIVE, SERVE, GRANT = Did("receive"), Did("serve"), Did("grant")
PRIORITIZE = Did("prioritize")
NO_ROLLOUT, NO_ROOM = Did(waits="actor"), Did(waits="learner")

MOST_EPISODES = 4096
"""ended episodes that one batch carries; more travel with the next"""

MOST_OUT = 2
"""grants that an actor may hold: the rollout that it makes, and the one that it makes next"""

ARRIVAL = np.dtype([(name, np.int64) for name in ("actor", "seq", "version", "update", "kept")])
"""One rollout that arrived: whose, its number there, the policy version that made it, the update
that it serves, and 0 where it was filtered."""


def batch_layout(selection: Layout, learners: int = 1) -> Layout:
    """What travels to a learner: its share of a selection, the counts so far, how fresh the
    selection is, the episodes that ended."""
    share = {
        name: leaf((whole.shape[0] // learners, *whole.shape[1:]), whole.dtype)
        for name, whole in selection.items()
    }
    return share | {
        "counts": leaf((5,), np.int64),
        "freshness": leaf((2,), np.float64),
        "episodes": leaf((MOST_EPISODES,), EPISODE),
    }


def priority_layout(selection: Layout, learners: int = 1) -> Layout:
    """What a learner tells after an update: what its share of a selection was, and how much each
    step of it is worth."""
    share = batch_layout(selection, learners)
    (length,) = {leaf.shape[0] for name, leaf in share.items() if name in selection}
    told = {name: share[name] for name in selection}
    return told | {"priority": leaf((length,), np.float32)}


class Buffer:
    """Holds rollouts between actors and learner, and the account that balances the two."""

    name = RoleName("buffer")

    def __init__(
        self,
        chooser: Chooser,
        selection: Layout,
        pieces: int,
        balance: Balance,
        lanes: list[Inbox],
        batches: Sequence[Outbox],
        rng: np.random.Generator,
        ordered: bool = True,
        max_staleness: float = float("inf"),
        record: bool = False,
        priorities: Sequence[Inbox] = (),
        most_out: Sequence[int] = (),
    ) -> None:
        """The chooser writes a `selection` for each of the `pieces` of an update. Each learner gets
        an equal share of every batch by one of the `batches`, and tells what each step of it was
        worth by one of the `priorities`, where the chooser wants that. `ordered`:
        rollouts are taken in the order of their grants, not as they come; those that are more than
        `max_staleness` behind when their turn comes are filtered; with `record`, what arrived is
        kept for `arrivals`; `most_out`: grants that the actor of each lane may hold, by default
        MOST_OUT."""
        if not all(lane.ordered for lane in lanes) and not chooser.any_order:
            raise Refusal(
                f"{type(chooser).__name__} holds lanes as rings in time, and rollouts that are "
                f"pushed in any order are none: windows would join steps that do not follow each "
                f"other. Let lanes be ordered, or use a chooser whose any_order is True, as "
                f"Fresh's."
            )
        self.received = 0
        """valid steps so far"""
        self.filtered = 0
        """valid steps thrown away so far, of those received"""
        self._chooser = chooser
        self._pieces = pieces
        self._balance = balance
        self._lanes = lanes
        self._batches = list(batches)
        self._priorities = list(priorities)
        self._asks_priorities = True
        """are the learners still to be given room for their priorities?"""
        self._told = 0
        """how often one has told them"""
        self._whole: Leaves = {
            name: np.empty(whole.shape, whole.dtype) for name, whole in selection.items()
        }
        """a selection, where several learners share it"""
        self._rng = rng
        self._ordered = ordered
        self._max_staleness = max_staleness
        self._record = record
        self._arrivals: list[tuple[int, int, int, int, int]] = []
        self._produced = [0] * len(lanes)
        self._seqs = [0] * len(lanes)
        """rollouts that each actor had made when it last sent one"""
        self._most_out = list(most_out) or [MOST_OUT] * len(lanes)
        self._numbers: dict[int, int] = {}
        """rollouts granted for each update that is not served, lost ones too"""
        self._expected: deque[tuple[int, int, int]] = deque()
        """where ordered: lanes and numbers of grants in their order"""
        self._early: dict[tuple[int, int, int], Slot] = {}
        """what came before its turn"""
        self._events = 0
        """rollouts granted to idle actors, and received"""
        self._began = [0] * len(lanes)
        """the event at which each actor began what it makes, or became idle"""
        self.active = frozenset(range(len(lanes)))
        """lanes that are granted rollouts; what was granted before is kept"""
        self._turn = 0
        """the lane that is looked at first"""
        self._pushed = 0
        self._episodes: list[Array] = []
        self._leaving: deque[tuple[int, int, int]] = deque()
        """(lane, slot, pieces pushed when it retired): free once the learner is past them"""

    def step(self) -> Did:
        # First of all: a rollout that was granted since they were told may not come before them.
        if self._prioritize():
            return PRIORITIZE
        if self._receive_next():
            return RECEIVE
        if not self._balance.paced and self._grant():
            return GRANT  # a batch is always due, and a fast learner would starve the actors
        if self._may_serve() and (slots := self._room()) is not None:
            # A learner tells priorities before it asks for more: those it owes are there by now.
            if self._prioritize():
                return PRIORITIZE
            self._serve(slots)
            return SERVE
        if self._grant():
            return GRANT
        return NO_ROLLOUT if any(lane.out for lane in self._lanes) else NO_ROOM

    def activate(self, lanes: Iterable[int]) -> None:
        """From now on, grant rollouts to these alone. Not at lead 0, where each has its turn."""
        active = frozenset(lanes)
        if not active or not active <= set(range(len(self._lanes))) or self._balance.lead == 0:
            raise ValueError(f"{sorted(active)} of {len(self._lanes)} lanes cannot be the active")
        self.active = active

    @property
    def produced(self) -> int:
        """Valid steps that actors had made when they last sent a rollout."""
        return sum(self._produced)

    @property
    def filling(self) -> bool:
        """Is the buffer still filling up, so that the learner cannot report?"""
        return self._balance.filling()

    def report(self, version: int, consumed: int) -> Report:
        """The counts so far, for whoever watches while the learner has nothing to say."""
        counts = version, self.produced, self.received, consumed
        return Report(
            *counts, np.empty(0, EPISODE), {}, np.empty(0, np.int64), filtered=self.filtered
        )

    def arrivals(self) -> Array:
        """What arrived since the last call, in order: ARRIVAL records."""
        arrived, self._arrivals = self._arrivals, []
        return np.array(arrived, ARRIVAL)

    def lost(self, lane: int) -> tuple[int, int]:
        """The actor of a lane is dead; how many valid steps and rollouts it has left. Where updates
        take what comes first, others make what it had been granted; else the one that takes its
        place does, so that every update gets its own."""
        inbox = self._lanes[lane]
        self._begin(lane)  # whoever takes its place does
        if not self._ordered:
            self._balance.granted -= len(inbox.reclaim())
        arrived = [slot.index for (of, *_), slot in self._early.items() if of == lane]
        arrived += [index for index, *_ in inbox.state()["pushed"]]
        heads = [inbox.slot(index).leaf("head") for index in arrived]
        produced = max((int(head[PRODUCED]) for head in heads), default=self._produced[lane])
        return produced, max((int(head[SEQ]) + 1 for head in heads), default=self._seqs[lane])

    def state(self) -> State:
        return {
            "received": self.received,
            "filtered": self.filtered,
            "produced": list(self._produced),
            "seqs": list(self._seqs),
            "granted": self._balance.granted,
            "rollouts": self._balance.received,
            "served": self._balance.served,
            "base": self._balance.base,
            "pushed": self._pushed,
            "turn": self._turn,
            "active": sorted(self.active),
            "events": self._events,
            "began": list(self._began),
            "numbers": [list(x) for x in self._numbers.items()],
            "expected": [list(x) for x in self._expected],
            "early": [[key[0], slot.index, *slot.number] for key, slot in self._early.items()],
            "leaving": [list(x) for x in self._leaving],
            "episodes": np.concatenate([np.empty(0, EPISODE), *self._episodes]),
            "rng": generator_state(self._rng),
            "store": self._chooser.state(),
            "lanes": [lane.state() for lane in self._lanes],
            "priorities": [inbox.state() for inbox in self._priorities],
            "told": self._told,
        }

    def load_state(self, state: State) -> None:
        """Go on where the state was taken. Where it has no store, the account begins anew and the
        store fills up before the next batch."""
        self.received, self.filtered = state["received"], state["filtered"]
        self._produced, self._seqs = list(state["produced"]), list(state["seqs"])
        self.active = frozenset(state.get("active", self.active))
        load_generator_state(self._rng, state["rng"])
        self._episodes = [state["episodes"]]
        if state["store"] is None:
            # The learner's version: batches that it had not consumed are gone with the store.
            self._balance.base = state["version"]
            return
        self._balance.granted = state["granted"]
        self._balance.received = state["rollouts"]
        self._balance.served, self._balance.base = state["served"], state["base"]
        self._pushed, self._turn = state["pushed"], state["turn"]
        self._events, self._began = state["events"], list(state["began"])
        self._numbers = dict(state["numbers"])
        self._expected = deque((lane, update, n) for lane, update, n in state["expected"])
        for lane, index, *number in state["early"]:
            slot = self._lanes[lane].slot(index)
            slot.update, slot.grant = number
            self._early[lane, *slot.number] = slot
        self._leaving = deque((lane, slot, pushed) for lane, slot, pushed in state["leaving"])
        self._chooser.load_state(state["store"])
        for lane, held in zip(self._lanes, state["lanes"], strict=True):
            lane.load_state(held)
        self._told = state["told"]
        for inbox, held in zip(self._priorities, state["priorities"], strict=True):
            inbox.load_state(held)
            self._asks_priorities = False

    def close(self) -> None:
        pass

    def _may_serve(self) -> bool:
        """Is the next piece due? Where ordered, all that was or is yet to be granted for its update
        must have arrived: then nothing depends on who was quicker."""
        balance = self._balance
        if not balance.may_serve():
            return False
        if not self._ordered or self._pieces > 1:
            return True
        update = balance.serving_update()
        arrived = not self._expected or self._expected[0][1] > update
        return arrived and balance.next_update() > update

    def _receive_next(self) -> bool:
        if self._ordered:
            if self._expected and (slot := self._next_expected(*self._expected[0])) is not None:
                self._receive(self._expected.popleft()[0], slot)
                return True
            return False
        for i in range(len(self._lanes)):
            lane = (self._turn + i) % len(self._lanes)
            if (slot := self._lanes[lane].probe()) is not None:
                self._turn = lane + 1
                self._receive(lane, slot)
                return True
        return False

    def _next_expected(self, lane: int, update: int, grant: int) -> Slot | None:
        """The rollout of this grant; others that have come are held until their turn."""
        if (early := self._early.pop((lane, update, grant), None)) is not None:
            return early
        while (slot := self._lanes[lane].probe()) is not None:
            if slot.update == update and slot.grant == grant:
                return slot
            self._early[lane, *slot.number] = slot
        return None

    def _receive(self, lane: int, slot: Slot) -> None:
        head = slot.leaf("head")
        self._begin(lane)  # the next one, or to wait
        self.received += int(head[STEPS])
        self._produced[lane] = max(self._produced[lane], int(head[PRODUCED]))
        self._seqs[lane] = max(self._seqs[lane], int(head[SEQ]) + 1)
        if head[EPISODES]:
            self._episodes.append(slot.leaf("episodes")[: head[EPISODES]].copy())
        update = self._balance.arriving_update()
        kept = update - int(head[VERSION]) <= self._max_staleness
        if self._record:
            arrival = lane, int(head[SEQ]), int(head[VERSION]), update, int(kept)
            self._arrivals.append(arrival)
        if kept:
            self._balance.received += 1
            self._chooser.add(lane, slot.index)
            self._retire()
        else:
            # Its place in the account is granted again, so that the update still gets its steps.
            self._balance.granted -= 1
            self.filtered += int(head[STEPS])
            self._lanes[lane].release(slot)

    def _prioritize(self) -> bool:
        """Hand on what learners have told of their last updates."""
        if self._asks_priorities:
            self._asks_priorities = False
            for inbox in self._priorities:
                while inbox.grant(0):
                    pass
        if not self._priorities:
            return False
        # In turn: where two learners' shares name one step, it must not matter who was quicker.
        inbox = self._priorities[self._told % len(self._priorities)]
        if (slot := inbox.probe()) is None:
            return False
        assert isinstance(self._chooser, PriorityChooser)
        told = slot.arrays
        self._chooser.prioritize(told, told["priority"])
        self._told += 1
        inbox.release(slot)
        inbox.grant(0)
        return True

    def _room(self) -> list[Slot] | None:
        """A place for the next piece's share of each learner; None: one of them is behind."""
        slots = []
        for batches in self._batches:
            if not (granted := batches.granted()):
                return None
            slots.append(granted[0])
        return slots

    def _serve(self, slots: list[Slot]) -> None:
        shares = [slot.arrays for slot in slots]
        fresh = self._choose(shares)
        self._balance.served += 1
        last = self._balance.served % self._pieces == 0
        for share in shares:
            share["counts"][:] = 0, 0, 0, 0, last
            share["freshness"][:] = fresh, self._chooser.share
        # Counts and episodes are told once, to the first learner.
        episodes = self._write_episodes(shares[0]["episodes"]) if last else 0
        shares[0]["counts"][:] = self.produced, self.received, self.filtered, episodes, last
        for batches, slot in zip(self._batches, slots, strict=True):
            batches.push(slot)
        self._pushed += 1
        serving = self._balance.serving_update()
        self._numbers = {update: n for update, n in self._numbers.items() if update >= serving}
        self._retire()

    def _choose(self, shares: list[Leaves]) -> float:
        """Let the chooser choose, and give each learner its share; how fresh the whole is."""
        if len(shares) == 1:
            return self._chooser.choose(self._rng, shares[0])
        fresh = self._chooser.choose(self._rng, self._whole)
        for name, whole in self._whole.items():
            each = len(whole) // len(shares)
            for i, share in enumerate(shares):
                share[name][:] = whole[i * each : (i + 1) * each]
        return fresh

    def _write_episodes(self, out: Array) -> int:
        if not self._episodes:
            return 0
        ended = np.concatenate(self._episodes)
        count = min(len(ended), MOST_EPISODES)
        out[:count] = ended[:count]
        self._episodes = [ended[count:]] if count < len(ended) else []
        return count

    def _grant(self) -> bool:
        self._free()
        version = min(batches.tag for batches in self._batches)
        return self._balance.may_grant(version) and self._grant_next()

    def _grant_next(self) -> bool:
        """Grant a rollout: at lead 0 to each actor in turn, else to whoever of the active ones has
        least to do, and of those to who will be done first: it began before the others. Otherwise
        one that just began could take what another will soon be idle for."""
        lanes, update = self._lanes, self._balance.next_update()
        if self._balance.lead == 0:
            order = [self._balance.granted % len(lanes)]
        else:
            out = [lane.out for lane in lanes]
            first = self._balance.granted % len(lanes)
            order = sorted(
                (i for i in self.active if out[i] < self._most_out[i]),
                key=lambda i: (out[i], self._began[i], (i - first) % len(lanes)),
            )
        number = self._numbers.get(update, 0)
        for i in order:
            idle = lanes[i].out == 0
            if lanes[i].grant(update, number):
                self._numbers[update] = number + 1
                if idle:
                    self._begin(i)
                if self._ordered:
                    self._expected.append((i, update, number))
                self._balance.granted += 1
                return True
        return False

    def _begin(self, lane: int) -> None:
        self._events += 1
        self._began[lane] = self._events

    def _retire(self) -> None:
        for lane, slot in self._chooser.retired():
            self._leaving.append((lane, slot, self._pushed))

    def _free(self) -> None:
        """Give slots back that no batch on its way to a learner or in its hands may name."""
        released = min(batches.released for batches in self._batches)
        while self._leaving and self._leaving[0][2] <= released:
            lane, slot, _ = self._leaving.popleft()
            self._lanes[lane].release(self._lanes[lane].slot(slot))
