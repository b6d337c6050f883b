"""The parts of a checkpoint: gathered from the roles of all groups, and given back to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tianji.graph import Graph, Joint
from tianji.role import State
from tianji.role_names import RoleName
from tianji.types import PRODUCED, Array

SPECIAL = ("actor", "buffer", "learner")
"""kinds of roles whose states have places of their own in a checkpoint"""


def gather(
    graph: Graph,
    group: int,
    memory: Mapping[str, Mapping[str, Array]],
    roles: Mapping[RoleName, State],
    policy: State,
    most_bytes: float,
) -> dict[str, State]:
    """The parts of a checkpoint from the states of all roles of a group and the memory of its
    conduits."""
    learners, actors, (buffer,) = (
        [dict(roles[name]) for name in graph.roles_of(group, kind)]
        for kind in ("learner", "actor", "buffer")
    )
    lanes = _lanes(graph, group)
    store = buffer["lanes"] is not None and used_bytes(buffer, lanes) <= most_bytes
    parts: dict[str, State] = {"policy": policy}
    if store:
        states = [
            *buffer["lanes"], *(each["batches"] for each in learners), *buffer["priorities"]
        ]  # fmt: skip
        (name,) = graph.roles_of(group, "buffer")
        held = [*lanes, *graph.sent("batches", name), *graph.received("priorities", name)]
        parts["store"] = {
            joint.conduit.name: {
                leaf: array[: state["used"]] for leaf, array in memory[joint.conduit.name].items()
            }
            for joint, state in zip(held, states, strict=True)
        }
    else:
        _without_store(learners, buffer, actors)
    slots = [lane.conduit.slots for lane in lanes]
    parts["trainer"], *others = learners
    parts["run"] = {"buffer": buffer, "actors": actors, "slots": slots, "learners": others}
    parts["run"]["others"] = {str(name): dict(roles[name]) for name in _others(graph, group)}
    return parts


def scatter(
    parts: Mapping[str, State],
    graph: Graph,
    group: int,
    memory: Mapping[str, Mapping[str, Array]],
) -> dict[RoleName, State]:
    """The states of all roles of a group from a checkpoint's parts; the memory of its conduits is
    filled in place. A store of another size is left out, as if it had not been saved."""
    run = parts["run"]
    learners = [dict(parts["trainer"]), *(dict(state) for state in run["learners"])]
    buffer, actors = dict(run["buffer"]), [dict(state) for state in run["actors"]]
    if has_store(parts, graph, group):
        for name, leaves in parts["store"].items():
            for leaf, array in leaves.items():
                memory[name][leaf][: len(array)] = array
    else:
        _without_store(learners, buffer, actors)
    states = {name: run["others"][str(name)] for name in _others(graph, group)}
    for kind, of_kind in (("actor", actors), ("buffer", [buffer]), ("learner", learners)):
        states |= dict(zip(graph.roles_of(group, kind), of_kind, strict=True))
    return states


def _without_store(learners: list[State], buffer: State, actors: list[State]) -> None:
    buffer |= {"store": None, "lanes": None, "version": learners[0]["version"]}
    for learner in learners:
        learner["batches"] = None
    for state in actors:  # what they had half made lay there
        state.pop("env", None)


def _lanes(graph: Graph, group: int) -> list[Joint]:
    return graph.received("rollouts", graph.roles_of(group, "buffer")[0])


def _others(graph: Graph, group: int) -> list[RoleName]:
    roles = graph.roles_of(group)
    return [name for name in roles if name.of.checkpointed and name.kind not in SPECIAL]


def has_store(parts: Mapping[str, State], graph: Graph, group: int) -> bool:
    slots = [lane.conduit.slots for lane in _lanes(graph, group)]
    return "store" in parts and parts["run"]["slots"] == slots


def used_bytes(buffer: State, lanes: Iterable[Joint]) -> int:
    """What the rollouts of a checkpoint would take."""
    return sum(
        lane.conduit.nbytes // lane.conduit.slots * state["used"]
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
    for slot, *_ in buffer["lanes"][0]["pushed"]:  # the buffer has yet to read how far this was
        head[slot, PRODUCED] += missing
    store[first] = store[first] | {"head": head}
    for name in [name for name in store if "counts" in store[name]]:  # batches on their way
        told = store[name]["counts"].copy()
        least = [counts[count] for count in ("produced", "received", "filtered")]
        np.maximum(told[:, :3], least, out=told[:, :3])
        store[name] = store[name] | {"counts": told}
    if lost:
        buffer["base"] += lost
        buffer["numbers"] = [[update + lost, n] for update, n in buffer["numbers"]]
        buffer["early"] = [
            [lane, slot, update + lost, n] for lane, slot, update, n in buffer["early"]
        ]
        buffer["expected"] = [[lane, update + lost, n] for lane, update, n in buffer["expected"]]
        for conduit in (*buffer["lanes"], *(learner["batches"] for learner in learners)):
            conduit["tag"] += lost
            for kind in ("granted", "pushed"):
                conduit[kind] = [[slot, update + lost, n] for slot, update, n in conduit[kind]]
    return lost
