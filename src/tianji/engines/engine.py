"""What an engine is: it starts the roles of a run, keeps them going and says what happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tianji.build import Topology
from tianji.channel import Channel
from tianji.errors import Failure
from tianji.fault import Fault
from tianji.role import State
from tianji.tally import Tally
from tianji.types import PRODUCED, Array, Report
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


class Faulted(NamedTuple):
    """Something went wrong, and the run goes on."""

    fault: Fault


Event = Updated | Evaluated | Faulted


class HostFailed(Failure):
    """A host raised or died, and the roles cannot go on without it; the message names it and says
    why."""

    def __init__(self, fault: Fault, also: str, final: bool) -> None:
        """`final`: beginning anew would not help, or was tried often enough."""
        tail = (
            ""
            if fault.exception or not fault.traceback
            else f"; the last it wrote:\n{fault.traceback}"
        )
        super().__init__(f"{fault.role} failed: {fault.cause}{also}{tail}")
        self.fault = fault
        self.final = final


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
    return parts


def advance(parts: dict[str, State], recorded: State, on_policy: bool) -> int:
    """Let a checkpoint's parts go on from where the run was when it lost a role, by the recorder's
    state: counts never run backwards. How many updates were lost with it.

    The account of grants moves by as many updates as the version, or it would let production burst
    ahead. Rollouts of an on-policy run are left out: they would be too stale now.
    """
    learner, run = parts["trainer"], parts["run"]
    lost = max(0, int(recorded["version"]) - int(learner["version"]))
    buffer = run["buffer"]
    learner |= {
        "version": learner["version"] + lost,
        "consumed": recorded["consumed"],
        "received": recorded["received"],
    }
    parts["policy"]["version"] = learner["version"]
    buffer |= {"received": recorded["received"], "filtered": recorded["filtered"]}
    missing = max(0, recorded["produced"] - sum(buffer["produced"]))
    buffer["produced"][0] += missing
    run["actors"][0]["produced"] += missing
    run["recorder"] = recorded
    if on_policy or buffer["lanes"] is None:
        parts.pop("store", None)
        return lost
    first = dict(parts["store"]["rollouts-0"])
    first["head"] = first["head"].copy()
    for slot, _ in buffer["lanes"][0]["pushed"]:  # the buffer has yet to read how far this was
        first["head"][slot, PRODUCED] += missing
    parts["store"]["rollouts-0"] = first
    batches = dict(parts["store"]["batches"])
    counts = [recorded[name] for name in ("produced", "received", "filtered")]
    batches["counts"] = batches["counts"].copy()
    np.maximum(batches["counts"][:, :3], counts, out=batches["counts"][:, :3])
    parts["store"]["batches"] = batches
    if lost:
        buffer["base"] += lost
        buffer["expected"] = [[lane, update + lost] for lane, update in buffer["expected"]]
        for channel in (*buffer["lanes"], learner["batches"]):
            channel["tag"] += lost
            for kind in ("granted", "pushed"):
                channel[kind] = [[slot, tag + lost] for slot, tag in channel[kind]]
    return lost


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
        for state in actors:  # what they had half made lay there
            state.pop("env", None)
    states = {f"actor-{i}": state for i, state in enumerate(actors)}
    return states | {"buffer": buffer, "learner": learner}


def has_store(parts: Mapping[str, State], topology: Topology) -> bool:
    return "store" in parts and parts["run"]["slots"] == [lane.slots for lane in topology.lanes]


def shares_of(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Times as shares of the time that went by."""
    return {key: value / elapsed for key, value in seconds.items()} if elapsed > 0 else {}
