"""The inference server: chooses the actions of many actors, in batches of those that have asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tianji.algorithm import Decision, Policy, restart
from tianji.channel import Inbox, Outbox, Slot, Subscriber
from tianji.newest import Newest
from tianji.role import Did, State, generator_state, load_generator_state
from tianji.role_names import RoleName
from tianji.types import Array, Layout, Leaf, Leaves, Params, leaf

GRANT, RECEIVE, LOAD, INFER = Did("grant"), Did("receive"), Did("load"), Did("infer")
NO_ASK, NO_VERSION = Did(waits="actor"), Did(waits="learner")
ASK, NO_ANSWER = Did("ask"), Did(waits="server")


def asks_layout(observation: Layout, B: int) -> Layout:
    """What an actor asks with; arguments describe one env."""
    layout = {f"observation.{k}": leaf((B, *v.shape), v.dtype) for k, v in observation.items()}
    return layout | {"restart": leaf((B,), np.bool_)}


def answers_layout(action: Leaf, extras: Layout, before: Layout, B: int) -> Layout:
    """What it is answered, with the version that chose and the recurrent state that it had before;
    arguments describe one env."""
    layout = {f"extras.{k}": leaf((B, *v.shape), v.dtype) for k, v in extras.items()}
    layout |= {f"before.{k}": leaf((B, *v.shape), v.dtype) for k, v in before.items()}
    layout["action"] = leaf((B, *action.shape), action.dtype)
    return layout | {"version": leaf((1,), np.int64)}


def _under(prefix: str, arrays: Leaves) -> Leaves:
    return {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}


class _Asked(NamedTuple):
    actor: int
    slot: Slot
    at: float
    """when it was seen, by the clock"""


class Server:
    """Task 1 for all actors, with the newest version there is. It keeps the recurrent state of each
    actor's envs, and begins it anew where an ask says that an episode began."""

    name = RoleName("server")

    def __init__(
        self,
        policy: Policy,
        asks: Sequence[Inbox],
        answers: Sequence[Outbox],
        snapshots: Subscriber,
        envs: int,
        rng: np.random.Generator,
        max_batch: int | None = None,
        max_wait: float = 0.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """A batch is made as soon as all actors have asked or `max_batch` rows are there, and
        `max_wait` seconds after its first ask at the latest. Without a clock it is made of what is
        there: where one process holds all roles, waiting would bring no more."""
        self._policy = policy
        self._asks = asks
        self._answers = answers
        self._newest = Newest(snapshots, policy)
        self._envs = envs
        self._rng = rng
        self._most = len(asks) if max_batch is None else max_batch // envs
        """asks in a batch"""
        self._max_wait = max_wait
        self._clock = clock
        self._recurrent = [policy.initial(envs) for _ in asks]
        self._waiting: deque[_Asked] = deque()
        self._granted = False

    @property
    def version(self) -> int:
        """Of the policy that acts; -1 before the first."""
        return self._newest.version

    def step(self) -> Did:
        if not self._granted:
            self._granted = True
            for inbox in self._asks:
                inbox.grant(0)
            return GRANT
        if self._receive():
            return RECEIVE
        if not self._waiting:
            return NO_ASK
        if (rest := self._rest()) > 0:
            return Did(waits="actor", nap=rest)
        if self._newest.take():
            return LOAD
        if self.version < 0:
            return NO_VERSION
        self._infer([self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))])
        return INFER

    def lost(self, actor: int) -> None:
        """An actor is dead: what it asked is forgotten, and so are its envs."""
        inbox = self._asks[actor]
        asked = [ask for ask in self._waiting if ask.actor == actor]
        self._waiting = deque(ask for ask in self._waiting if ask.actor != actor)
        for ask in asked:
            inbox.release(ask.slot)
        while (slot := inbox.probe()) is not None:
            inbox.release(slot)
        inbox.reclaim()
        self._recurrent[actor] = self._policy.initial(self._envs)

    def found(self, actor: int) -> None:
        """Another one has taken its place: it may ask."""
        if self._granted:
            self._asks[actor].grant(0)

    def state(self) -> State:
        """Actors begin new episodes when they go on from a state, so no recurrent one is kept."""
        return {"rng": generator_state(self._rng)}

    def load_state(self, state: State) -> None:
        load_generator_state(self._rng, state["rng"])

    def close(self) -> None:
        pass

    def _receive(self) -> bool:
        """Take the asks that have come; each actor has one at a time."""
        before, now = len(self._waiting), self._clock() if self._clock else 0.0
        for actor, inbox in enumerate(self._asks):
            if (slot := inbox.probe()) is not None:
                self._waiting.append(_Asked(actor, slot, now))
        return len(self._waiting) > before

    def _rest(self) -> float:
        """Seconds for which a larger batch is worth waiting for."""
        if self._clock is None or len(self._waiting) >= self._most:
            return 0.0
        asked = {ask.actor for ask in self._waiting}
        if all(i in asked or inbox.ended for i, inbox in enumerate(self._asks)):
            return 0.0
        return self._max_wait - (self._clock() - self._waiting[0].at)

    def _infer(self, batch: list[_Asked]) -> None:
        asks = [ask.slot.arrays for ask in batch]
        for ask, arrays in zip(batch, asks, strict=True):
            restart(self._policy, self._recurrent[ask.actor], arrays["restart"])
        observation = _stacked([_under("observation.", arrays) for arrays in asks])
        before = _stacked([self._recurrent[ask.actor] for ask in batch])
        action, after, extras, *_ = self._policy.act(observation, before, self._rng)
        for i, ask in enumerate(batch):
            rows = slice(i * self._envs, (i + 1) * self._envs)
            self._recurrent[ask.actor] = {k: array[rows].copy() for k, array in after.items()}
            also = {f"extras.{k}": a[rows] for k, a in extras.items()}
            also |= {f"before.{k}": a[rows] for k, a in before.items()}
            self._answer(ask.actor, action[rows], also)
            self._asks[ask.actor].release(ask.slot)
            self._asks[ask.actor].grant(0)

    def _answer(self, actor: int, action: Array, also: Leaves) -> None:
        slot, *_ = self._answers[actor].granted()  # an actor asks only where there is room for it
        answer = slot.arrays
        answer["action"][:] = action
        answer["version"][:] = self.version
        for name, array in also.items():
            answer[name][:] = array
        self._answers[actor].push(slot)


def _stacked(parts: list[Leaves]) -> Leaves:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Remote:
    """A policy that is elsewhere, for an actor: it asks the server, and hears the answer later.
    Its recurrent state is only which envs begin an episode; the server has the rest."""

    def __init__(self, asks: Outbox, answers: Inbox) -> None:
        self._asks = asks
        self._answers = answers
        self._asked = False

    def initial(self, B: int) -> Leaves:
        return {"restart": np.ones(B, np.bool_)}

    def load(self, params: Params) -> None:
        """There are none here."""

    def act(
        self, observation: Leaves, state: Leaves, rng: np.random.Generator | None
    ) -> Decision | Did:
        if not self._asked:
            return self._ask(observation, state["restart"])
        if (slot := self._answers.probe()) is None:
            return NO_ANSWER
        answer = {name: array.copy() for name, array in slot.arrays.items()}
        self._answers.release(slot)
        self._asked = False
        begun = {"restart": np.zeros_like(state["restart"])}
        version = int(answer["version"][0])
        before = _under("before.", answer)
        return Decision(answer["action"], begun, _under("extras.", answer), version, before)

    def _ask(self, observation: Leaves, restarted: Array) -> Did:
        if not (granted := self._asks.granted()):
            return NO_ANSWER
        slot = granted[0]
        self._answers.grant(0)
        ask = slot.arrays
        for name, array in observation.items():
            ask[f"observation.{name}"][:] = array
        ask["restart"][:] = restarted
        self._asks.push(slot)
        self._asked = True
        return ASK
