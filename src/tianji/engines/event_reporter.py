"""Says what a step of the roles in one process means to the run, whichever engine steps them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import TypeVar

from tianji import actor, evaluator
from tianji.actor import SIMULATE, Actor
from tianji.buffer import RECEIVE, Buffer
from tianji.engines.engine import Evaluated, Event, Faulted, Started, Updated
from tianji.evaluator import EVALUATED, Evaluator
from tianji.fault import Fault
from tianji.folder import batch_arrays
from tianji.learner import UPDATE, Learner
from tianji.role import Did, Role
from tianji.watch import Due, Watch

T = TypeVar("T")


class EventReporter:
    """Knows the roles, and what they set beside a step that others must hear of."""

    def __init__(self, roles: Iterable[Role], host: str = "", fills: bool = False) -> None:
        """`host` names these roles in faults; `fills`: a store that fills up is reported, too."""
        self.watch: Watch | None = None
        """what decides whether something is due after an update; None: somebody else does"""
        self._host = host
        self._fills = fills
        roles = list(roles)
        self._envs = [role for role in roles if isinstance(role, Actor | Evaluator)]
        self._buffer, self._learner = one(roles, Buffer), one(roles, Learner)
        self._evaluator = one(roles, Evaluator)
        self.heeded = {
            UPDATE: self._update,
            SIMULATE: self._simulation,
            RECEIVE: self._receipt,
            EVALUATED: self._evaluation,
            actor.REBUILD: self._rebuild,
            evaluator.REBUILD: self._rebuild,
        }
        """what may come of a step; of others, nothing does"""

    def after(self, did: Did) -> list[Event]:
        """What came of a step."""
        answer = self.heeded.get(did)
        return [] if answer is None else answer()

    def _update(self) -> list[Event]:
        learner = self._learner
        assert learner is not None
        assert learner.report is not None
        if not learner.leads:
            return []
        due = Due() if self.watch is None else self.watch.note(learner.report)
        events: list[Event] = [Updated(learner.report, due)]
        if (skipped := learner.skipped) is not None:
            fault = Fault("learner", str(skipped), "update", os.getpid())
            events.append(Faulted(fault, batch_arrays(skipped.batch)))
        return events

    def _simulation(self) -> list[Event]:
        del self.heeded[SIMULATE]  # only the first one is news
        return [Started()]

    def _receipt(self) -> list[Event]:
        """No update is near that would report or judge: report what arrives."""
        if not self._fills or self.watch is None or self._buffer is None or self._learner is None:
            return []
        if not self._buffer.filling:
            return []
        report = self._buffer.report(self._learner.version, self._learner.consumed)
        return [Updated(report, self.watch.note(report))]

    def _evaluation(self) -> list[Event]:
        assert self._evaluator is not None
        steps = 0 if self.watch is None else self.watch.counts.steps
        return [Evaluated(self._evaluator.version, steps, self._evaluator.result)]

    def _rebuild(self) -> list[Event]:
        events: list[Event] = []
        for role in self._envs:
            fault, role.fault = role.fault, None
            if fault is not None:
                name = self._host or fault.role
                events.append(Faulted(dataclasses.replace(fault, role=name, pid=os.getpid())))
        return events


def all_of(roles: Iterable[Role], kind: type[T]) -> list[T]:
    """The roles of this class."""
    return [role for role in roles if isinstance(role, kind)]


def one(roles: Iterable[Role], kind: type[T]) -> T | None:
    """The role of this class, if there is one."""
    return next(iter(all_of(roles, kind)), None)
