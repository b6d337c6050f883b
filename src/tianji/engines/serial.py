"""The serial engine: all roles in this process, in a fixed order; the reference for all others."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tianji import actor, evaluator, trace
from tianji.actor import SIMULATE, Actor
from tianji.buffer import RECEIVE
from tianji.build import Topology, build
from tianji.config import Config
from tianji.driver import Serial
from tianji.engines.engine import Evaluated, Event, Faulted, Updated, shares_of
from tianji.engines.parts import gather, scatter
from tianji.engines.spent import LATELY, Spent, Told
from tianji.evaluator import EVALUATED, Evaluator
from tianji.fault import Fault
from tianji.folder import read_plan, skipped
from tianji.learner import UPDATE
from tianji.machine import cores
from tianji.role import State
from tianji.types import sha256
from tianji.verdict import Setting, Time
from tianji.watch import Watch

TURN = 0.02
"""seconds after which a turn ends, once a step has"""


class SerialEngine:
    """Whatever happens, happens in `turn`."""

    beside = False
    stuck = False
    active = None

    def __init__(self, config: Config) -> None:
        self._built = build(config)
        self._driver = Serial(self._built.roles)
        self._watch = Watch(config)
        self._folder = Path()
        self._trace: trace.Ring | None = None
        self._traced = 0.0
        """when the trace was written last, by the driver's clock"""
        self._disk_said = False
        self.topology: Topology = self._built.topology
        self.evaluating = False
        self.started = False
        self._spent = Spent()
        self._actors = config.scale.actors
        self._planned = False

    @property
    def version(self) -> int:
        return self._built.learner.version

    @property
    def settled(self) -> bool:
        return self._built.learner.between_batches

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._planned = bool(read_plan(folder))
        self._trace = trace.Ring(trace.path_of(folder, "serial"))

    def begin(self, parts: Mapping[str, State] | None) -> None:
        built = self._built
        if parts is None:
            built.learner.begin()
            return
        states = scatter(parts, self.topology, self.topology.memory(self._built.transport))
        for role in built.roles:
            role.load_state(states[str(role.name)])
        built.buffer.active = frozenset(range(self._actors))  # with processes, some may have rested
        self._driver.at = parts["run"]["at"]
        self._watch.load_state(parts["run"]["recorder"])

    def turn(self) -> list[Event]:
        events = self._evaluate() if self.evaluating else self._train()
        if self._driver.now - self._traced > trace.EVERY:
            events += self._write_trace()
        return events

    def _train(self) -> list[Event]:
        driver, learner, buffer = self._driver, self._built.learner, self._built.buffer
        driver.outside()
        end = driver.now + TURN
        while driver.now < end:
            did = driver.step()
            if did is UPDATE:
                assert learner.report is not None
                due = self._watch.note(learner.report)
                if due.evaluate:
                    learner.show_evaluator()
                    self.evaluating = True
                events: list[Event] = [Updated(learner.report, due)]
                if learner.skipped is not None:
                    events.append(Faulted(skipped(learner.skipped, self._folder, os.getpid())))
                return events
            if did is SIMULATE:
                if not self.started:
                    self.started = True
                    return []
            elif did is RECEIVE and buffer.filling:
                # No update is near that would report or judge: show what arrives, end if told to.
                report = buffer.report(learner.version, learner.consumed)
                return [Updated(report, self._watch.note(report))]
            elif did is actor.REBUILD:
                faults = [role.fault for role in self._built.actors]
                at = next(i for i, fault in enumerate(faults) if fault is not None)
                return [self._faulted(self._built.actors[at])]
        return []

    def _faulted(self, role: Actor | Evaluator) -> Faulted:
        fault, role.fault = role.fault, None
        assert fault is not None
        return Faulted(dataclasses.replace(fault, pid=os.getpid()))

    def heard(self) -> list[Event]:
        return []

    def settle(self) -> bool:
        """The evaluation under way, if there is one, is given up."""
        self.evaluating = False
        return True

    def go_on(self) -> None:
        self._driver.outside()

    def parts(self, most_bytes: float) -> dict[str, State]:
        learner, roles = self._built.learner, self._built.roles
        states = {str(role.name): role.state() for role in roles}
        parts = gather(
            self.topology,
            self.topology.memory(self._built.transport),
            states,
            learner.policy_state(),
            most_bytes,
        )
        parts["run"]["at"] = self._driver.at
        return parts

    def rescue(self, seconds: float) -> dict[str, State] | None:
        return self.parts(-1) if self.settled else None

    def networks_sha256(self) -> str:
        return sha256(self._built.learner.networks())

    def counts(self) -> list[dict[str, int]]:
        learner, buffer = self._built.learner, self._built.buffer
        return [
            {
                "version": learner.version,
                "produced": buffer.produced,
                "received": buffer.received,
                "consumed": learner.consumed,
                "filtered": buffer.filtered,
            }
        ]

    def shares(self) -> dict[str, float]:
        self._look()
        return self._spent.shares(LATELY)

    def load(self, seconds: float) -> tuple[Time, Setting]:
        self._look()
        setting = Setting(actors=self._actors, available=cores(), turns=True, planned=self._planned)
        return {"serial": self._spent.shares(seconds)}, setting

    def _look(self) -> None:
        driver = self._driver
        self._spent.note(Told(driver.now, driver.elapsed, dict(driver.seconds), 0.0))

    def time(self) -> dict[str, dict[str, float]]:
        return {"serial": shares_of(self._driver.seconds, self._driver.elapsed)}

    def kill(self) -> None:
        """There are none."""

    def close(self) -> None:
        self._write_trace()
        if self._trace is not None:
            self._trace.close()
        self._built.close()

    def _write_trace(self) -> list[Event]:
        """Write down what was done; a disk that is full is said once and stops nothing."""
        self._traced = self._driver.now
        try:
            if self._trace is not None:
                self._trace.write(*self._driver.events())
        except OSError as error:
            if not self._disk_said and self._trace is not None:
                self._disk_said = True
                words = f"{self._trace.path} is not complete: {error}"
                return [Faulted(Fault("serial", words, "disk", os.getpid(), action="goes on"))]
        return []

    def _evaluate(self) -> list[Event]:
        """Let the evaluator play with this very version."""
        player, driver = self._built.evaluator, self._driver
        assert player is not None
        end = driver.now + TURN
        while driver.now < end:
            did = driver.step_other(player)
            if did is evaluator.REBUILD:
                return [self._faulted(player)]
            if did is EVALUATED:
                self.evaluating = False
                steps = self._watch.counts.steps
                return [Evaluated(player.version, steps, player.result)]
        return []
