"""What an engine is: it starts the roles of a run, keeps them going and says what happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from tianji.errors import Failure
from tianji.fault import Fault
from tianji.graph import Graph, Setup
from tianji.rebalance import Change
from tianji.role import State
from tianji.tally import Tally
from tianji.types import Array, Leaves, Report
from tianji.verdict import Time
from tianji.watch import Due


@dataclass(frozen=True)
class Started:
    """An env has made its first step."""


class Updated(NamedTuple):
    """Updates were made, or steps were received before the first one."""

    report: Report | Tally
    due: Due


@dataclass(frozen=True)
class Evaluated:
    """An evaluation ended."""

    version: int
    steps: int
    """received when that version was made"""
    episodes: Array
    """EPISODE records"""


@dataclass(frozen=True)
class Faulted:
    """Something went wrong, and the run goes on."""

    fault: Fault
    batch: Leaves = field(default_factory=dict)
    """the arrays of an update that was left out"""


class Rebalanced(NamedTuple):
    """Another number of actors is active."""

    change: Change
    group: str
    """whose actors they are, "" where there is one group"""


Event = Started | Updated | Evaluated | Faulted | Rebalanced


class Usage(NamedTuple):
    """What hosts spent their time on, as far as an engine knows it and a config does not."""

    time: Time
    """mean shares of the time of each kind of host, by kind of work"""
    active: float = 1.0
    """actors that were active, of all groups"""
    places: int = 0
    """cores that actors may run on"""
    crowd: float = 0.0
    """share of these cores in use"""
    busiest: float = 0.0
    """share of its time that the busiest actor worked"""
    silent: Mapping[str, float] = {}
    """hosts that work and have reported nothing for n seconds"""


class NoAnswer(Failure):
    """A host that rests does not say how it is in time."""


class HostFailed(Failure):
    """A host raised or died, and the roles cannot go on without it; the message names it and says
    why."""

    def __init__(self, fault: Fault, also: str, final: bool, batch: Leaves | None = None) -> None:
        """`final`: a restart would not help, or was tried often enough; `batch`: the arrays of an
        update that is not finite."""
        tail = (
            ""
            if fault.exception or not fault.traceback
            else f"; the last it wrote:\n{fault.traceback}"
        )
        super().__init__(f"{fault.role} failed: {fault.cause}{also}{tail}")
        self.fault = fault
        self.final = final
        self.batch = batch or {}


class Engine(Protocol):
    """Runs the roles. Nothing happens outside of `turn`, as far as can be seen from here."""

    graph: Graph
    setup: Setup
    """of the first group"""
    beside: bool
    """do evaluations run beside training?"""
    started: bool
    """was the first env step made?"""

    @property
    def version(self) -> int:
        """Updates that were heard of."""

    @property
    def active(self) -> int | None:
        """Actors that are active, of all groups; None where all are and will be."""

    @property
    def evaluating(self) -> bool:
        """Is an evaluation under way?"""

    @property
    def settled(self) -> bool:
        """Does everything rest, between two updates?"""

    @property
    def stuck(self) -> bool:
        """Does the learner rest, and somebody else has not come to rest in time?"""

    def start(self, folder: Path) -> None:
        """Make everything ready that may still be refused; hosts keep their logs in the folder."""

    def begin(self, parts: Mapping[str, State] | None) -> None:
        """Make the first move; from a checkpoint's parts, where there are some."""

    def turn(self) -> Iterable[Event]:
        """Go on for a little while; what happened."""

    def heard(self) -> Iterable[Event]:
        """What happened since the last turn, once there will be no more."""

    def settle(self) -> bool:
        """Come to rest between two updates, in the turns that follow; False where waiting longer
        would not help, because somebody does not answer."""

    def go_on(self) -> None:
        """Work again after a rest."""

    def parts(self, most_bytes: float) -> dict[str, State]:
        """The roles' parts of a checkpoint, at rest. Where the rollouts that are held take more
        than `most_bytes`, only what was learnt: envs and buffer begin anew when it is resumed."""

    def rescue(self, seconds: float) -> dict[str, State] | None:
        """What was learnt, after a failure; None where it cannot be had in so many seconds."""

    def networks_sha256(self) -> str:
        """Of everything learnt, at rest."""

    def counts(self) -> list[dict[str, int]]:
        """Of each group: the version, and steps produced, received, consumed and filtered, as far
        as was heard."""

    def shares(self) -> dict[str, float]:
        """Where the time went lately, by "role/kind": shares of each host's time, or of all the
        time where one host has all roles."""

    def usage(self, seconds: float) -> Usage:
        """Of the last n seconds; inf: of the whole run."""

    def time(self) -> dict[str, dict[str, float]]:
        """Where the time of the whole run went: for each kind of host, shares that add up to 1."""

    def kill(self) -> None:
        """End all other processes at once; `close` follows."""

    def close(self) -> None:
        """End everything, in bounded time."""


def shares_of(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Times as shares of the time that went by."""
    return {key: value / elapsed for key, value in seconds.items()} if elapsed > 0 else {}
