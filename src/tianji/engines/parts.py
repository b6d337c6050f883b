"""The parts of a checkpoint: gathered from the roles of all groups, and given back to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tianji.build import Topology
from tianji.channel import Conduit
from tianji.role import State
from tianji.types import PRODUCED, Array


def gather(
    topology: Topology,
    memory: Mapping[str, Mapping[str, Array]],
    roles: Mapping[str, State],
    policy: State,
    most_bytes: float,
) -> dict[str, State]:
    """The parts of a checkpoint from the states of all roles of a group and the memory of its
    conduits."""
    learners = [dict(roles[name]) for name in _learners(topology)]
    buffer = dict(roles["buffer"])
    store = buffer["lanes"] is not None and used_bytes(buffer, topology.lanes) <= most_bytes
    actors = [dict(roles[f"actor-{i}"]) for i in range(topology.spec.actors)]
    parts: dict[str, State] = {"policy": policy}
    if store:
        lanes = [lane.name for lane in topology.lanes]
        held = dict(zip(lanes, buffer["lanes"], strict=True))
        held |= {topology.batches_name(i): each["batches"] for i, each in enumerate(learners)}
        told = buffer["priorities"]
        held |= {topology.priorities_name(i): each for i, each in enumerate(told)}
        parts["store"] = {
            name: {leaf: array[: state["used"]] for leaf, array in memory[name].items()}
            for name, state in held.items()
        }
    else:
        _without_store(learners, buffer, actors)
    slots = [lane.slots for lane in topology.lanes]
    parts["trainer"], *others = learners
    parts["run"] = {"buffer": buffer, "actors": actors, "slots": slots, "learners": others}
    if "server" in roles:
        parts["run"]["server"] = dict(roles["server"])
    return parts


def scatter(
    parts: Mapping[str, State], topology: Topology, memory: Mapping[str, Mapping[str, Array]]
) -> dict[str, State]:
    """The states of all roles of a group from a checkpoint's parts; the memory of its conduits is
    filled in place. A store of another size is left out, as if it had not been saved."""
    run = parts["run"]
    learners = [dict(parts["trainer"]), *(dict(state) for state in run["learners"])]
    buffer, actors = dict(run["buffer"]), [dict(state) for state in run["actors"]]
    if has_store(parts, topology):
        for name, leaves in parts["store"].items():
            for leaf, array in leaves.items():
                memory[name][leaf][: len(array)] = array
    else:
        _without_store(learners, buffer, actors)
    states = {f"actor-{i}": state for i, state in enumerate(actors)}
    states |= dict(zip(_learners(topology), learners, strict=True))
    server = {"server": run["server"]} if "server" in run else {}
    return states | server | {"buffer": buffer}


def _without_store(learners: list[State], buffer: State, actors: list[State]) -> None:
    buffer |= {"store": None, "lanes": None, "version": learners[0]["version"]}
    for learner in learners:
        learner["batches"] = None
    for state in actors:  # what they had half made lay there
        state.pop("env", None)


def _learners(topology: Topology) -> list[str]:
    return [name for name in topology.role_names if name.startswith("learner")]


def has_store(parts: Mapping[str, State], topology: Topology) -> bool:
    return "store" in parts and parts["run"]["slots"] == [lane.slots for lane in topology.lanes]


def used_bytes(buffer: State, lanes: Iterable[Conduit]) -> int:
    """What the rollouts of a checkpoint would take."""
    return sum(
        lane.nbytes // lane.slots * state["used"]
        for lane, state in zip(lanes, buffer["lanes"], strict=True)
    )


def of_group(parts: Mapping[str, State], group: int) -> dict[str, State]:
    """The parts of one group of a checkpoint of several."""
    names = {name: part_name(name, group) for name in ("policy", "trainer", "run", "store")}
    return {name: parts[theirs] for name, theirs in names.items() if theirs in parts}


def join_groups(groups: Sequence[Mapping[str, State]]) -> dict[str, State]:
    """The parts of all groups as those of one checkpoint; the policy is the first one's."""
    joined = dict(groups[0])
    for group, parts in enumerate(groups[1:], 1):
        own = {name: part for name, part in parts.items() if name != "policy"}
        joined |= {part_name(name, group): part for name, part in own.items()}
    return joined


def part_name(name: str, group: int) -> str:
    """Of a group's part of a checkpoint."""
    return f"{name}_{group}" if group else name


def updates_of(parts: Mapping[str, State]) -> int:
    """Made by all groups together."""
    return sum(part["version"] for name, part in parts.items() if name.startswith("trainer"))


def advance(parts: dict[str, State], counts: Mapping[str, int], on_policy: bool) -> int:
    """Let a group's parts of a checkpoint go on from where the group was when the run lost a role:
    counts never run backwards. How many updates were lost.

    The account of grants moves by as many updates as the version, or it would let production burst
    ahead. Rollouts of an on-policy run are left out: they would be too stale now.
    """
    run = parts["run"]
    learners, buffer = [parts["trainer"], *run["learners"]], run["buffer"]
    lost = max(0, counts["version"] - int(parts["trainer"]["version"]))
    for learner in learners:
        learner["version"] += lost
        for name in ("consumed", "received"):
            learner[name] = max(learner[name], counts[name])
    if "policy" in parts:
        parts["policy"]["version"] = parts["trainer"]["version"]
    for name in ("received", "filtered"):
        buffer[name] = max(buffer[name], counts[name])
    missing = max(0, counts["produced"] - sum(buffer["produced"]))
    buffer["produced"][0] += missing
    run["actors"][0]["produced"] += missing
    if on_policy or buffer["lanes"] is None:
        parts.pop("store", None)
        return lost
    store = parts["store"]
    first = next(name for name in store if name.endswith("rollouts-0"))
    head = store[first]["head"].copy()
    for slot, _ in buffer["lanes"][0]["pushed"]:  # the buffer has yet to read how far this was
        head[slot, PRODUCED] += missing
    store[first] = store[first] | {"head": head}
    for name in [name for name in store if "counts" in store[name]]:  # batches on their way
        told = store[name]["counts"].copy()
        least = [counts[count] for count in ("produced", "received", "filtered")]
        np.maximum(told[:, :3], least, out=told[:, :3])
        store[name] = store[name] | {"counts": told}
    if lost:
        buffer["base"] += lost
        buffer["expected"] = [[lane, update + lost] for lane, update in buffer["expected"]]
        for conduit in (*buffer["lanes"], *(learner["batches"] for learner in learners)):
            conduit["tag"] += lost
            for kind in ("granted", "pushed"):
                conduit[kind] = [[slot, tag + lost] for slot, tag in conduit[kind]]
    return lost
