"""The serial engine: all roles in this process, in a fixed order; the reference for all others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tianji import trace
from tianji.build import build
from tianji.config import Config
from tianji.driver import Serial
from tianji.engines.engine import Evaluated, Event, Faulted, Started, Updated, Usage, shares_of
from tianji.engines.event_reporter import EventReporter
from tianji.engines.parts import gather, scatter
from tianji.engines.spent import LATELY, Spent, Told
from tianji.fault import Fault
from tianji.role import State
from tianji.role_names import SERIAL
from tianji.types import sha256
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
        every = [*self._built.roles, *filter(None, [self._built.evaluator])]
        self._reporter = EventReporter(every, fills=True)
        self._reporter.watch = self._watch
        self._trace: trace.Ring | None = None
        self._traced = 0.0
        """when the trace was written last, by the driver's clock"""
        self._disk_said = False
        self.graph, self.setup = self._built.assembly.graph, self._built.assembly.setup
        self.evaluating = False
        self.started = False
        self._spent = Spent()
        self._actors = config.scale.actors

    @property
    def version(self) -> int:
        return self._built.learner.version

    @property
    def settled(self) -> bool:
        return self._built.learner.between_batches

    def start(self, folder: Path) -> None:
        self._trace = trace.Ring(trace.path_of(folder, SERIAL))

    def begin(self, parts: Mapping[str, State] | None) -> None:
        built = self._built
        if parts is None:
            built.learner.begin()
            return
        states = scatter(parts, self.graph, 0, built.assembly.memory(built.transport))
        for name, role in zip(self.graph.roles, built.roles, strict=False):
            role.load_state(states[name])
        built.buffer.active = frozenset(range(self._actors))  # with processes, some may have rested
        self._driver.at = parts["run"]["at"]
        self._watch.load_state(parts["run"]["recorder"])

    def turn(self) -> list[Event]:
        events = self._evaluate() if self.evaluating else self._train()
        if self._driver.now - self._traced > trace.EVERY:
            events += self._write_trace()
        return events

    def _train(self) -> list[Event]:
        driver, after = self._driver, self._reporter.after
        driver.outside()
        end = driver.now + TURN
        while driver.now < end:
            if events := after(driver.step()):
                return self._noted(events)
        return []

    def _noted(self, events: list[Event]) -> list[Event]:
        """Answer what happened here."""
        for event in events:
            if isinstance(event, Started):
                self.started = True
            elif isinstance(event, Updated) and event.due.evaluate:
                self._built.learner.show_evaluator()
                self.evaluating = True
            elif isinstance(event, Evaluated):
                self.evaluating = False
        return events

    def heard(self) -> list[Event]:
        return []

    def settle(self) -> bool:
        """The evaluation under way, if there is one, is given up."""
        self.evaluating = False
        return True

    def go_on(self) -> None:
        self._driver.outside()

    def parts(self, most_bytes: float) -> dict[str, State]:
        built = self._built
        pairs = zip(self.graph.roles, built.roles, strict=False)
        states = {name: role.state() for name, role in pairs}
        memory, policy = built.assembly.memory(built.transport), built.learner.policy_state()
        parts = gather(self.graph, 0, memory, states, policy, most_bytes)
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

    def usage(self, seconds: float) -> Usage:
        self._look()
        return Usage({SERIAL: self._spent.shares(seconds)}, active=self._actors)

    def _look(self) -> None:
        driver = self._driver
        self._spent.note(Told(driver.now, driver.elapsed, dict(driver.seconds), 0.0))

    def time(self) -> dict[str, dict[str, float]]:
        return {SERIAL: shares_of(self._driver.seconds, self._driver.elapsed)}

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
                return [Faulted(Fault(SERIAL, words, "disk", action="goes on"))]
        return []

    def _evaluate(self) -> list[Event]:
        """Let the evaluator play with this very version."""
        player, driver = self._built.evaluator, self._driver
        assert player is not None
        end = driver.now + TURN
        while driver.now < end:
            if events := self._reporter.after(driver.step_other(player)):
                return self._noted(events)
        return []
