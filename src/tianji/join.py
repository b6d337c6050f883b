"""Groups joined learner to learner: models are exchanged in rounds and mixed, without a server.

In round r group i pushes its model x_i to its out-peers of that round. Once exactly one round-r
model of every in-peer has arrived, it moves by w * sum_p (x_p - x_i) with w = 1 / (in-peers + 1).
What is added is the difference of models of one round, so that the progress made meanwhile stays,
and the moves of all groups add up to 0: the mean over groups is kept, however far apart they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from tianji.channel import Inbox, Outbox, Slot
from tianji.description import Model
from tianji.role import Did, State
from tianji.train_state import TrainState
from tianji.types import Array, Layout, Leaves, leaf

MIX, NO_MODEL = Did("mix"), Did(waits="group")

Graph = Literal["complete", "ring", "exponential"]

ROUND = "round"
"""the leaf of a message that says which round its model is for"""


def out_peers(graph: Graph, round: int, group: int, groups: int) -> list[int]:
    """Those that a group's model goes to in a round."""
    if groups == 1:
        return []
    if graph == "complete":
        return [peer for peer in range(groups) if peer != group]
    hops = (groups - 1).bit_length()  # log2, rounded up
    hop = 1 if graph == "ring" else 2 ** (round % hops)
    return [(group + hop) % groups]


def in_peers(graph: Graph, round: int, group: int, groups: int) -> list[int]:
    """Those whose models a group takes in in a round."""
    return [p for p in range(groups) if group in out_peers(graph, round, p, groups)]


def edges(graph: Graph, groups: int) -> list[tuple[int, int]]:
    """All that models ever travel along: from, to."""
    rounds = range((groups - 1).bit_length()) if graph == "exponential" else range(1)
    pairs = {(i, j) for r in rounds for i in range(groups) for j in out_peers(graph, r, i, groups)}
    return sorted(pairs)


def averaged(state: TrainState) -> Leaves:
    """What groups join of all that is learnt; views where there are some."""
    fates = state.fates()
    return {n: array for n, array in state.networks().items() if fates[n] == "averaged"}


def model_layout(models: Mapping[str, Model]) -> Layout:
    """What a message holds: the round, and each array that groups join, flat."""
    joined = {name: model.leaf for name, model in models.items() if model.fate == "averaged"}
    return {ROUND: leaf((1,), np.int64)} | {
        name: leaf((math.prod(one.shape),), one.dtype) for name, one in joined.items()
    }


class Mixer:
    """One group's end of it. It never waits: it says when the learner has reason to."""

    def __init__(
        self,
        learnt: TrainState,
        group: int,
        groups: int,
        outboxes: Mapping[int, Outbox],
        inboxes: Mapping[int, Inbox],
        graph: Graph = "complete",
        every: int = 1,
        patience: float = float("inf"),
    ) -> None:
        """Boxes are by peer. A round is due `every` updates after the last one began; `patience`
        updates later the learner waits for what is missing (0: at once, inf: never)."""
        self.round = 0
        """rounds done"""
        self.skipped = 0
        """updates after which a round was due and a peer was not done with the last model"""
        self.dropped = 0
        """models that arrived for a round that was done"""
        self._learnt = learnt
        self._group, self._groups = group, groups
        self._outboxes, self._inboxes = outboxes, inboxes
        self._graph, self._every, self._patience = graph, every, patience
        self._due = every
        """version after which the round is due"""
        self._asked = 0
        """version after which it was last tried to begin it"""
        self._mine: Leaves = {}
        """the model pushed last"""
        self._pushed = -1
        """the round that it was for"""
        self._again: list[int] = []
        """peers that it goes to once more, after a restart"""
        self._held: dict[int, Slot] = {}
        """by peer, a model for this round or for a later one"""

    def begin(self) -> None:
        """Let the others push their first models."""
        for inbox in self._inboxes.values():
            inbox.grant(self.round)

    def step(self, version: int) -> Did | None:
        """MIX: the trainer's networks have changed; NO_MODEL: it is time to wait; None: go on."""
        self._push_again()
        if self._pushed < self.round and version >= self._due:
            self._begin_round(version)
        self._receive()
        if self._pushed == self.round and (models := self._complete()) is not None:
            self._mix(models)
            self.round += 1
            self._due = max(self._due + self._every, version + 1)
            return MIX
        return NO_MODEL if version >= self._due + self._patience else None

    def state(self) -> State:
        return {
            "round": self.round,
            "due": self._due,
            "pushed": self._pushed,
            "mine": {name: array.copy() for name, array in self._mine.items()},
            "skipped": self.skipped,
            "dropped": self.dropped,
        }

    def load_state(self, state: State) -> None:
        """Go on with conduits that are new. What had arrived for the round under way is pushed
        again by all, and dropped by those that have done it."""
        self.round, self._due, self._pushed = state["round"], state["due"], state["pushed"]
        self.skipped, self.dropped = state["skipped"], state["dropped"]
        self._mine = {name: np.array(array) for name, array in state["mine"].items()}
        if self._pushed >= 0:
            self._again = out_peers(self._graph, self._pushed, self._group, self._groups)
        self.begin()

    def _begin_round(self, version: int) -> None:
        """Push the model, if every peer is done with all that it was sent; else try again after
        the next update."""
        if self._again or any(not box.granted() for box in self._outboxes.values()):
            self.skipped += version > self._asked
            self._asked = version
            return
        self._mine = {name: array.copy() for name, array in averaged(self._learnt).items()}
        self._pushed, self._due = self.round, version
        for peer in out_peers(self._graph, self.round, self._group, self._groups):
            self._push(peer)

    def _push_again(self) -> None:
        self._again = [peer for peer in self._again if not self._push(peer)]

    def _push(self, peer: int) -> bool:
        if not (granted := self._outboxes[peer].granted()):
            return False
        slot = granted[0]
        slot.leaf(ROUND)[0] = self._pushed
        for name, array in self._mine.items():
            slot.leaf(name)[:] = array.ravel()
        self._outboxes[peer].push(slot)
        return True

    def _receive(self) -> None:
        """Hold one model of each peer; what is for a round that is done goes back unread."""
        for peer, inbox in self._inboxes.items():
            while peer not in self._held and (slot := inbox.probe()) is not None:
                if int(slot.leaf(ROUND)[0]) >= self.round:
                    self._held[peer] = slot
                else:
                    self.dropped += 1
                    inbox.release(slot)
                    inbox.grant(self.round)

    def _complete(self) -> dict[int, Slot] | None:
        """This round's model of each in-peer; None: one is missing."""
        models = {}
        for peer in in_peers(self._graph, self.round, self._group, self._groups):
            slot = self._held.get(peer)
            if slot is None or int(slot.leaf(ROUND)[0]) != self.round:
                return None
            models[peer] = slot
        return models

    def _mix(self, models: Mapping[int, Slot]) -> None:
        now = self._learnt.networks()
        mixed = {
            name: moved(now[name], mine, [slot.leaf(name) for slot in models.values()])
            for name, mine in self._mine.items()
        }
        self._learnt.load_networks(now | mixed)
        for peer, slot in models.items():
            del self._held[peer]
            self._inboxes[peer].release(slot)
            self._inboxes[peer].grant(self.round + 1)


def moved(now: Array, mine: Array, theirs: Iterable[Array]) -> Array:
    """now + w * sum_p (x_p - mine), w = 1 / (peers + 1), rounded once."""
    differences = [x.reshape(mine.shape).astype(np.float64) - mine for x in theirs]
    change = np.sum(differences, axis=0) / (len(differences) + 1)
    return np.asarray(now + change).astype(now.dtype)
