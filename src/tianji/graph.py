"""Which roles a run has, which process holds which of them, and what joins them: data, made once.

    actor-i ── rollouts-i ──▶ buffer ── batches ───▶ learner ◀── models-i-j ──▶ other groups
       ▲                        ▲ └───── batches-j ──▶ learner-j ...
       │                        └─────── priorities ── learner, learner-j ...
       └────── snapshots ◀────── learner ── evaluations ──▶ evaluator

With an inference server, snapshots go to it alone:

    actor-i ── asks-i ──▶ server ── answers-i ──▶ actor-i

Each group has all of these, but only the first has an evaluator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tianji.actor import FRAMES
from tianji.algorithm import Spec
from tianji.balance import Balance, uneven_rounds
from tianji.buffer import batch_layout, priority_layout
from tianji.channel import Conduit, End, Kind
from tianji.config import Config
from tianji.description import Description
from tianji.errors import Refusal
from tianji.join import Graph as ExchangeGraph
from tianji.join import edges, model_layout
from tianji.machine import free_memory
from tianji.relax import Relaxation
from tianji.role_names import WORKER, RoleName
from tianji.server import answers_layout, asks_layout
from tianji.spec import MIXING
from tianji.team import Shared
from tianji.types import VERSIONS, Layout, Row, leaf, rollout_layout

FREE_LEAD = 4
"""updates' worth of rollouts that lanes have room for where the lead is not bounded"""


@dataclass(frozen=True)
class Setup:
    """What the parts of a run are made from, beside the config: decided once, from one env."""

    spec: Spec
    relax: Relaxation
    description: Description


@dataclass(frozen=True)
class Joint:
    """A conduit and the roles at its ends."""

    what: str
    """what travels: "rollouts", "batches", "snapshots" ..."""
    conduit: Conduit
    sender: RoleName | None
    receivers: tuple[RoleName, ...] = ()
    readers: tuple[RoleName, ...] = ()
    """roles that read its memory in place"""

    @property
    def roles(self) -> set[RoleName]:
        """All that hold an end of it."""
        sender = () if self.sender is None else (self.sender,)
        return {*sender, *self.receivers, *self.readers}

    def ends_of(self, roles: Iterable[RoleName]) -> list[End]:
        """The ends that these roles hold."""
        mine, name = set(roles), self.conduit.name
        ends = [End(name, "send")] if self.sender in mine else []
        ends += [End(name, "receive", i) for i, role in enumerate(self.receivers) if role in mine]
        return ends + ([End(name, "read")] if mine.intersection(self.readers) else [])


@dataclass(frozen=True)
class Graph:
    """The roles of all groups of a run, the hosts that hold them, and the joints between them."""

    roles: tuple[RoleName, ...]
    """in the order in which a serial driver steps them; evaluators only when one is due"""
    hosts: Mapping[str, tuple[RoleName, ...]]
    """roles by the name of the process that holds them"""
    joints: tuple[Joint, ...]

    def roles_of(self, group: int, kind: str = "") -> list[RoleName]:
        """The roles of a group, or those of one kind."""
        mine = (role for role in self.roles if (role.group or 0) == group)
        return [role for role in mine if kind in ("", role.kind)]

    def hosts_of(self, group: int) -> list[str]:
        """The processes of a group."""
        return [host for host, roles in self.hosts.items() if (roles[0].group or 0) == group]

    def host_of(self, role: RoleName) -> str:
        """The process that holds a role."""
        return self._holders[role]

    @cached_property
    def _holders(self) -> dict[RoleName, str]:
        return {role: host for host, roles in self.hosts.items() for role in roles}

    def sent(self, what: str, role: RoleName) -> list[Joint]:
        """The joints of a kind that a role sends into."""
        return [joint for joint in self.joints if (joint.what, joint.sender) == (what, role)]

    def received(self, what: str, role: RoleName) -> list[Joint]:
        """The joints of a kind that a role receives from."""
        return [joint for joint in self.joints if joint.what == what and role in joint.receivers]

    def read(self, what: str, role: RoleName) -> list[Joint]:
        """The joints of a kind whose memory a role reads in place."""
        return [joint for joint in self.joints if joint.what == what and role in joint.readers]

    def stored(self, group: int) -> list[Joint]:
        """The joints of a group whose memory a checkpoint holds."""
        mine, what = set(self.roles_of(group)), ("rollouts", "batches", "priorities")
        return [joint for joint in self.joints if joint.what in what and joint.roles <= mine]

    @cached_property
    def between_hosts(self) -> list[Joint]:
        """The joints that leave a process."""
        return [joint for joint in self.joints if len({*map(self.host_of, joint.roles)}) > 1]

    def part_of(self, host: str) -> Graph:
        """What a process needs to know: all roles and hosts, and joints that it has an end of."""
        mine = set(self.hosts[host])
        return replace(self, joints=tuple(j for j in self.joints if j.roles & mine))

    def inside(self, host: str) -> list[str]:
        """The conduits that do not leave this process."""
        mine = set(self.hosts[host])
        return [joint.conduit.name for joint in self.joints if joint.roles <= mine]

    def ends(self, host: str) -> list[End]:
        """What a process holds of conduits that leave it."""
        mine = self.hosts[host]
        return [end for joint in self.between_hosts for end in joint.ends_of(mine)]


class Exchange(NamedTuple):
    """How models are exchanged between groups."""

    graph: ExchangeGraph
    every: int
    patience: float


def exchange(config: Config, relax: Relaxation) -> Exchange | None:
    """None: groups share one set of parameters, or none."""
    if relax.join not in MIXING:
        return None
    own, gossips = config.join, relax.join == "gossip"
    patience = own.patience
    if patience is None:
        waits = relax.lead == 0 and relax.hosts == "apart"
        patience = 10.0 if gossips else 0.0 if waits else math.inf
    graph = own.graph or ("ring" if gossips else "complete")
    if (graph == "complete") == gossips:
        other = "average" if gossips else "gossip"
        raise Refusal(
            f'join.graph = "{graph}" is not how models are exchanged by relax.join = '
            f'"{relax.join}". Set relax.join = "{other}", or leave join.graph out.'
        )
    return Exchange(graph, own.every or (1 if gossips else 10), patience)


def balance_of(config: Config, setup: Setup) -> Balance:
    """The account at the start of a run."""
    algorithm, spec, relax = config.algorithm, setup.spec, setup.relax
    steps = algorithm.steps_per_update(spec)
    wrong = uneven_rounds(spec.rows_per_rollout, spec.actors, steps)
    if relax.lead == 0 and spec.actors > 1 and wrong is not None:
        raise Refusal(f'{wrong} Or set scale.relax = "one_step".')
    return Balance(
        rows_per_rollout=spec.rows_per_rollout,
        steps_per_update=steps,
        warmup=algorithm.warmup_steps(spec),
        lead=relax.lead,
        round=spec.actors if relax.lead == 0 and not algorithm.traits.on_policy else 1,
        pieces=setup.description.pieces,
        paced=relax.paced,
        credit=relax.credit,
    )


def evaluates(config: Config) -> bool:
    return config.eval.every > 0 or config.eval.when is not None


def row_of(setup: Setup) -> Row:
    """What one step of one env leaves in a rollout."""
    env, once = setup.spec.env, dict(setup.description.recurrent)
    if env.frames > 1:
        obs = env.observation["obs"]
        once[FRAMES] = leaf((env.frames - 1, *obs.shape[1:]), obs.dtype)
    extras = dict(setup.description.extras)
    if setup.relax.infer == "server":
        extras[VERSIONS] = leaf((), np.int64)
    return Row(env.held, env.action_leaf, extras, once, env.reward_leaf)


def depth(config: Config, setup: Setup) -> int:
    """Pieces that a learner asks for ahead: this batch's, and the next one's; only this batch's
    where the first of several learners may wait for other groups: they begin together."""
    joined = exchange(config, setup.relax)
    waits = joined is not None and setup.spec.learners > 1 and math.isfinite(joined.patience)
    return setup.description.pieces * (1 if setup.relax.lead == 0 or waits else 2)


def make_graph(config: Config, setup: Setup) -> Graph:
    """The graph of a run; refuses what cannot be joined."""
    spec, roles, joints = setup.spec, [], []
    hosts: dict[str, tuple[RoleName, ...]] = {}
    for group in range(spec.groups):
        mine = _roles(config, setup, group)
        roles += mine
        hosts |= _hosts(mine, setup.relax)
        joints += _joints(config, setup, mine)
    first = [role for role in roles if role.kind == "learner" and role.index == 0]
    return Graph(tuple(roles), hosts, (*joints, *_between(config, setup, first)))


def _roles(config: Config, setup: Setup, group: int) -> list[RoleName]:
    spec, own = setup.spec, group if setup.spec.groups > 1 else None
    kinds = ["actor"] * spec.actors
    kinds += ["server"] if setup.relax.infer == "server" else []
    kinds += ["buffer"] + ["learner"] * spec.learners
    kinds += ["evaluator"] if evaluates(config) and group == 0 else []
    return [RoleName(kind, kinds[:i].count(kind), own) for i, kind in enumerate(kinds)]


def _hosts(roles: list[RoleName], relax: Relaxation) -> dict[str, tuple[RoleName, ...]]:
    """Each role has a host of its own, or actor, buffer and learner have one together."""
    inside = ("actor", "buffer", "learner") if relax.hosts == "worker" else ()
    within = tuple(role for role in roles if role.kind in inside)
    worker = {str(RoleName(WORKER, 0, roles[0].group)): within} if within else {}
    return worker | {str(role): (role,) for role in roles if role not in within}


def _joints(config: Config, setup: Setup, roles: list[RoleName]) -> list[Joint]:
    """What joins the roles of one group."""
    spec, made = setup.spec, setup.description
    of = {role.kind: tuple(r for r in roles if r.kind == role.kind) for role in roles}
    actors, learners, (buffer,) = of["actor"], of["learner"], of["buffer"]
    group = "" if buffer.group is None else f"g{buffer.group}."
    slots, ahead = _lane_slots(config, setup), depth(config, setup)
    lane = rollout_layout(row_of(setup), spec.T, spec.envs)
    batch = batch_layout(made.selection, spec.learners)
    asks = asks_layout(spec.env.observation, spec.envs)
    answers = answers_layout(spec.env.action_leaf, made.extras, made.recurrent, spec.envs)
    joints = []

    def join(
        what: str, number: str, sender: RoleName, receivers: tuple[RoleName, ...], layout: Layout,
        kind: Kind = "queue", slots: int = 1, readers: tuple[RoleName, ...] = (),
    ) -> None:  # fmt: skip
        name = f"{group}{what}{number}"
        ordered = not (kind == "lane" and made.any_order)
        conduit = Conduit(name, kind, layout, slots, len(receivers), ordered)
        joints.append(Joint(what, conduit, sender, receivers, readers))

    for i, actor in enumerate(actors):
        join("rollouts", f"-{i}", actor, (buffer,), lane, "lane", slots, learners)
    for i, learner in enumerate(learners):
        number = f"-{i}" * (i > 0)
        join("batches", number, buffer, (learner,), batch, slots=ahead)
        if made.prioritizes:
            worth = priority_layout(made.selection, spec.learners)
            join("priorities", number, learner, (buffer,), worth, slots=ahead + 1)
    for server in of.get("server", ()):
        for i, actor in enumerate(actors):
            join("asks", f"-{i}", actor, (server,), asks)
            join("answers", f"-{i}", server, (actor,), answers)
    subscribers = of.get("server", actors)
    join("snapshots", "", learners[0], subscribers, made.params, "newest")
    if "evaluator" in of:
        join("evaluations", "", learners[0], of["evaluator"], made.params, "newest")
    return joints


def _between(config: Config, setup: Setup, first: list[RoleName]) -> list[Joint]:
    """What joins the first learners of all groups: models that they exchange, or memory with room
    for all that they learn, in which they have one set of parameters."""
    joints, models = [], setup.description.models
    if (joined := exchange(config, setup.relax)) is not None:
        layout = model_layout(models)
        for i, j in edges(joined.graph, len(first)):
            # One slot: a model is overwritten only when its receiver is done with it.
            conduit = Conduit(f"models-{i}-{j}", "queue", layout)
            joints.append(Joint("models", conduit, first[i], (first[j],)))
    if setup.relax.join == "hogwild":
        size = Shared.size(sum(math.prod(model.leaf.shape) for model in models.values()))
        layout = {"flat": leaf((size,), np.float32)}
        joints.append(Joint("shared", Conduit("shared", "memory", layout), None, (), tuple(first)))
    return joints


def _lane_slots(config: Config, setup: Setup) -> int:
    """Beside what the store holds: what is being made for `lead` updates and the current one, and
    what the learner has in hand."""
    spec, relax, on_policy = setup.spec, setup.relax, config.algorithm.traits.on_policy
    steps = config.algorithm.steps_per_update(spec)
    each = -(-steps // (spec.rows_per_rollout * spec.actors))
    more = each * (2 + int(min(relax.lead, FREE_LEAD)))
    if relax.lead > 0 and not on_policy:
        more = setup.description.grants + 2
    slots = setup.description.slots + max(more, setup.description.grants)
    if config.scale.rebalance and on_policy:
        slots *= spec.actors  # one of them may be active alone
    elif relax.late == "pass" and on_policy:
        slots *= 2  # half of the actors can stand still, and the others go on
    return slots


def check_memory(config: Config, graph: Graph) -> None:
    """Refuse rollouts that do not fit, before they are asked for."""
    need = sum(j.conduit.nbytes for j in graph.joints if j.what in ("rollouts", "models"))
    free = free_memory()
    if free is not None and need > free:
        raise Refusal(
            f"rollouts and replay need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
            f"free: the run would be killed. Lower algorithm.capacity, scale.actors, "
            f"scale.envs_per_actor, scale.rollout_length, scale.groups, relax.lead or "
            f"reuse.window{', or set scale.rebalance = false' * config.scale.rebalance}."
        )
