"""The buffer: takes rollouts in, serves batches, and grants what may be produced next."""

from __future__ import annotations

from collections import deque

import numpy as np

from tianji.algorithm import Store
from tianji.balance import Balance
from tianji.channel import Inbox, Outbox, Slot
from tianji.role import Did, State, generator_state, load_generator_state
from tianji.types import (
    EPISODE,
    EPISODES,
    PRODUCED,
    STEPS,
    Array,
    Layout,
    Leaves,
    Report,
    leaf,
)

RECEIVE, SERVE, GRANT = Did("receive"), Did("serve"), Did("grant")
NO_ROLLOUT, NO_ROOM = Did(waits="actor"), Did(waits="learner")

MOST_EPISODES = 4096
"""ended episodes that one batch carries; more travel with the next"""


def batch_layout(selection: Layout) -> Layout:
    """What travels to the learner: a selection, the counts so far, the episodes that ended."""
    return selection | {
        "counts": leaf((3,), np.int64),
        "episodes": leaf((MOST_EPISODES,), EPISODE),
    }


class Buffer:
    """Holds a store between actors and learner, and the account that balances the two."""

    name = "buffer"

    def __init__(
        self,
        store: Store,
        balance: Balance,
        lanes: list[Inbox],
        batches: Outbox,
        rng: np.random.Generator,
    ) -> None:
        self.received = 0
        """valid steps so far"""
        self._store = store
        self._balance = balance
        self._lanes = lanes
        self._batches = batches
        self._rng = rng
        self._produced = [0] * len(lanes)
        self._expected: deque[int] = deque()
        """lanes in the order of their grants: rollouts are taken in this order, not as they come"""
        self._pushed = 0
        self._episodes: list[Array] = []
        self._leaving: deque[tuple[int, int, int]] = deque()
        """(lane, slot, batches pushed when it retired): free once the learner is past them"""

    def step(self) -> Did:
        if self._expected and (slot := self._lanes[self._expected[0]].probe()) is not None:
            self._receive(self._expected.popleft(), slot)
            return RECEIVE
        if self._balance.may_serve() and (slot := self._batches.reserve()) is not None:
            self._serve(slot)
            return SERVE
        self._free()
        if self._balance.may_grant(self._batches.tag):
            lane = self._balance.granted % len(self._lanes)
            if self._lanes[lane].grant(self._balance.next_update()):
                self._expected.append(lane)
                self._balance.granted += 1
                return GRANT
        return NO_ROLLOUT if self._expected else NO_ROOM

    @property
    def filling(self) -> bool:
        """Is the store still filling up, so that the learner cannot report?"""
        return self._balance.filling()

    def report(self, version: int, consumed: int) -> Report:
        """The counts so far, for whoever watches while the learner has nothing to say."""
        counts = version, sum(self._produced), self.received, consumed
        return Report(*counts, np.empty(0, EPISODE), {}, np.empty(0, np.int64))

    def state(self) -> State:
        return {
            "received": self.received,
            "produced": list(self._produced),
            "granted": self._balance.granted,
            "rollouts": self._balance.received,
            "served": self._balance.served,
            "base": self._balance.base,
            "pushed": self._pushed,
            "expected": list(self._expected),
            "leaving": [list(x) for x in self._leaving],
            "episodes": np.concatenate([np.empty(0, EPISODE), *self._episodes]),
            "rng": generator_state(self._rng),
            "store": self._store.state(),
        }

    def load_state(self, state: State) -> None:
        """Go on where the state was taken. Where it has no store, the account begins anew and the
        store fills up before the next batch."""
        self.received = state["received"]
        self._produced = list(state["produced"])
        load_generator_state(self._rng, state["rng"])
        if state["store"] is None:
            # The learner's version: batches that it had not consumed are gone with the store.
            self._balance.base = self._batches.tag
            self._episodes = [state["episodes"]]
            return
        self._balance.granted = state["granted"]
        self._balance.received = state["rollouts"]
        self._balance.served, self._balance.base = state["served"], state["base"]
        self._pushed = state["pushed"]
        self._expected = deque(state["expected"])
        self._leaving = deque((lane, slot, pushed) for lane, slot, pushed in state["leaving"])
        self._episodes = [state["episodes"]]
        self._store.load_state(state["store"])

    def close(self) -> None:
        pass

    def _receive(self, lane: int, slot: Slot) -> None:
        head = slot.arrays["head"]
        self.received += int(head[STEPS])
        self._produced[lane] = int(head[PRODUCED])
        self._balance.received += 1
        if head[EPISODES]:
            self._episodes.append(slot.arrays["episodes"][: head[EPISODES]].copy())
        self._store.add(lane, slot.index)
        self._retire()

    def _serve(self, slot: Slot) -> None:
        self._store.choose(self._rng, slot.arrays)
        self._write_counts(slot.arrays)
        self._batches.push(slot)
        self._balance.served += 1
        self._pushed += 1
        self._retire()

    def _write_counts(self, out: Leaves) -> None:
        episodes = 0
        if self._episodes:
            ended = np.concatenate(self._episodes)
            episodes = min(len(ended), MOST_EPISODES)
            out["episodes"][:episodes] = ended[:episodes]
            self._episodes = [ended[episodes:]] if episodes < len(ended) else []
        out["counts"][:] = sum(self._produced), self.received, episodes

    def _retire(self) -> None:
        for lane, slot in self._store.retired():
            self._leaving.append((lane, slot, self._pushed))

    def _free(self) -> None:
        """Give slots back that no batch on its way to the learner or in its hands may name."""
        while self._leaving and self._leaving[0][2] <= self._batches.released:
            lane, slot, _ = self._leaving.popleft()
            self._lanes[lane].release(self._lanes[lane].slot(slot))
