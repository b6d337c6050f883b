"""What an engine is: it starts the roles of a run, keeps them going and says what happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from tianji.build import Topology
from tianji.channel import Channel
from tianji.role import State
from tianji.tally import Tally
from tianji.types import Array, Report
from tianji.watch import Due


class Updated(NamedTuple):
    """Updates were made, or steps were received before the first one."""

    report: Report | Tally
    due: Due


class Evaluated(NamedTuple):
    """An evaluation ended."""

    version: int
    steps: int
    """received when that version was made"""
    episodes: Array
    """EPISODE records"""


Event = Updated | Evaluated


class Engine(Protocol):
    """Runs the roles. Nothing happens outside of `turn`, as far as can be seen from here."""

    topology: Topology
    beside: bool
    """do evaluations run beside training?"""
    started: bool
    """was the first env step made?"""

    @property
    def version(self) -> int:
        """Updates that were heard of."""

    @property
    def evaluating(self) -> bool:
        """Is an evaluation under way?"""

    @property
    def settled(self) -> bool:
        """Does everything rest, between two updates?"""

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

    def shares(self) -> dict[str, float]:
        """Where the time since the last call went, by "role/kind": shares of each host's time, or
        of all the time where one host has all roles."""

    def time(self) -> dict[str, dict[str, float]]:
        """Where the time of the whole run went: for each kind of host, shares that add up to 1."""

    def kill(self) -> None:
        """End all other processes at once; `close` follows."""

    def close(self) -> None:
        """End everything, in bounded time."""


def gather(
    topology: Topology,
    memory: Mapping[str, Mapping[str, Array]],
    roles: Mapping[str, State],
    policy: State,
    most_bytes: float,
) -> dict[str, State]:
    """The parts of a checkpoint from the states of all roles and the memory of all channels."""
    learner, buffer = dict(roles["learner"]), dict(roles["buffer"])
    store = buffer["lanes"] is not None and used_bytes(buffer, topology.lanes) <= most_bytes
    actors = [dict(roles[f"actor-{i}"]) for i in range(topology.spec.actors)]
    parts: dict[str, State] = {"policy": policy}
    if store:
        held = {f"rollouts-{i}": s for i, s in enumerate(buffer["lanes"])}
        held["batches"] = learner["batches"]
        parts["store"] = {
            name: {leaf: array[: state["used"]] for leaf, array in memory[name].items()}
            for name, state in held.items()
        }
    else:
        buffer |= {"store": None, "lanes": None, "version": learner["version"]}
        learner["batches"] = None
        for state in actors:
            state.pop("env", None)
    slots = [lane.slots for lane in topology.lanes]
    parts["trainer"] = learner
    parts["run"] = {"buffer": buffer, "actors": actors, "slots": slots}
    if "server" in roles:
        parts["run"]["server"] = dict(roles["server"])
    return parts


def used_bytes(buffer: State, lanes: Iterable[Channel]) -> int:
    """What the rollouts of a checkpoint would take."""
    return sum(
        lane.nbytes // lane.slots * state["used"]
        for lane, state in zip(lanes, buffer["lanes"], strict=True)
    )


def scatter(
    parts: Mapping[str, State], topology: Topology, memory: Mapping[str, Mapping[str, Array]]
) -> dict[str, State]:
    """The states of all roles from a checkpoint's parts; channel memory is filled in place. A
    store of another size is left out, as if it had not been saved."""
    run, learner = parts["run"], dict(parts["trainer"])
    buffer, actors = dict(run["buffer"]), [dict(state) for state in run["actors"]]
    if has_store(parts, topology):
        for name, leaves in parts["store"].items():
            for leaf, array in leaves.items():
                memory[name][leaf][: len(array)] = array
    else:
        buffer |= {"store": None, "lanes": None, "version": learner["version"]}
        learner["batches"] = None
    states = {f"actor-{i}": state for i, state in enumerate(actors)}
    server = {"server": run["server"]} if "server" in run else {}
    return states | server | {"buffer": buffer, "learner": learner}


def has_store(parts: Mapping[str, State], topology: Topology) -> bool:
    return "store" in parts and parts["run"]["slots"] == [lane.slots for lane in topology.lanes]


def shares_of(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Times as shares of the time that went by."""
    return {key: value / elapsed for key, value in seconds.items()} if elapsed > 0 else {}
