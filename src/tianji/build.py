"""Makes the parts of a run, from its config and its graph: each role, joined by a transport."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tianji.actor import Actor
from tianji.algorithm import (
    Acting,
    Chooser,
    Gatherer,
    Gradients,
    Lanes,
    Policy,
    PriorityChooser,
    Spec,
    Trainer,
)
from tianji.balance import Balance
from tianji.buffer import Buffer
from tianji.channel import Conduit, Transport
from tianji.config import Config
from tianji.description import Model, check, check_order, leaves
from tianji.env import Env, EnvSpec
from tianji.errors import Refusal
from tianji.evaluator import Evaluator
from tianji.graph import (
    Graph,
    Setup,
    balance_of,
    check_memory,
    depth,
    exchange,
    make_graph,
    row_of,
)
from tianji.join import Mixer
from tianji.learner import ALONE, Learner
from tianji.relax import Relaxation
from tianji.role import Role, generator
from tianji.role_names import RoleName
from tianji.server import Remote, Server
from tianji.spec import check_halves, make_spec, refuse_gradient, relax_of
from tianji.team import Shared, Team
from tianji.transports.memory import Memory
from tianji.trigger import TRIGGERS, Every
from tianji.types import Array, Row

EVAL_ENVS = 8
"""envs that an evaluation steps together, at most"""

MakeEnv = Callable[[int], Env]


@dataclass(frozen=True)
class Assembly:
    """Makes the roles of one group, for whichever process holds them."""

    config: Config
    setup: Setup
    graph: Graph
    make: MakeEnv
    spare: list[Env] = field(default_factory=list)
    """an env that was made to look at, for the first actor that is made here"""
    devices: Mapping[str, str] = field(default_factory=dict)
    """by role: where it computes, if not on the CPU"""
    clock: Callable[[], float] | None = None
    """of a process that waits for others; where one holds all roles, waiting would bring no more"""

    @property
    def spec(self) -> Spec:
        return self.setup.spec

    @property
    def relax(self) -> Relaxation:
        return self.setup.relax

    @property
    def row(self) -> Row:
        return row_of(self.setup)

    @cached_property
    def balance(self) -> Balance:
        return balance_of(self.config, self.setup)

    def names(self, kind: str = "") -> list[RoleName]:
        """The roles of the group, or those of one kind."""
        return self.graph.roles_of(self.spec.group, kind)

    @property
    def lanes(self) -> list[Conduit]:
        (buffer,) = self.names("buffer")
        return [joint.conduit for joint in self.graph.received("rollouts", buffer)]

    def memory(self, transport: Transport) -> dict[str, Mapping[str, Array]]:
        """What each conduit between actors, buffer and learners of the group holds, by its name."""
        joints = self.graph.stored(self.spec.group)
        return {j.conduit.name: transport.memory(j.conduit) for j in joints}

    def role(
        self,
        name: RoleName,
        transport: Transport,
        life: int = 0,
        team: Team = ALONE,
        shared: Shared | None = None,
    ) -> Role:
        """The role of this name; `life` counts how often an actor was restarted."""
        match name.kind:
            case "actor":
                return self.actor(name.index, transport, life)
            case "server":
                return self.server(transport)
            case "buffer":
                return self.buffer(transport)
            case "learner":
                return self.learner(transport, name.index, team, shared)
            case "evaluator":
                return self.evaluator(transport)
        return MAKERS[name.kind](self, name, transport)

    def chooser(self, transport: Transport) -> Chooser:
        return self.config.algorithm.chooser(self.spec, self._memory(transport))

    def gatherer(self, transport: Transport) -> Gatherer:
        return self.config.algorithm.gatherer(self.spec, self._memory(transport))

    def _memory(self, transport: Transport) -> Lanes:
        return Lanes(tuple(map(transport.memory, self.lanes)), self.spec.env.frames)

    def device(self, role: RoleName) -> str:
        """Where a role computes."""
        return self.devices.get(str(role), "cpu")

    def policy(self, role: RoleName, spec: Spec) -> Policy:
        """As the algorithm has described it."""
        policy = self.config.algorithm.policy(spec, self.device(role))
        state = leaves(policy.initial(1), axis=1)
        check(policy, "its recurrent state", state, self.setup.description.recurrent)
        return policy

    def trainer(self, role: RoleName, spec: Spec) -> Trainer:
        """As the algorithm has described it."""
        said = self.setup.description
        trainer = self.config.algorithm.trainer(spec, self.device(role))
        fates = trainer.state.fates()
        learnt = leaves(trainer.state.networks()).items()
        models = {name: Model(leaf, fates[name]) for name, leaf in learnt if name in fates}
        check(trainer, "what it learns", models, said.models)
        check_order(trainer, "its params", trainer.params(0).layout, said.params)
        optimizers = trainer.state.optimizers.values()
        if self.relax.gradient != "none" and not any(each.transforms for each in optimizers):
            refuse_gradient(self.config.algorithm, self.relax.gradient)
        return trainer

    def actor(self, index: int, transport: Transport, life: int = 0) -> Actor:
        spec, send, name = self.spec, self.config.relax.send_when, self.names("actor")[index]
        (lane,) = self.graph.sent("rollouts", name)
        policy: Acting
        snapshots = None
        if asks := self.graph.sent("asks", name):
            (answers,) = self.graph.received("answers", name)
            policy = Remote(transport.outbox(asks[0].conduit), transport.inbox(answers.conduit))
        else:
            policy = self.policy(name, dataclasses.replace(spec, actor=index))
            (newest,) = self.graph.received("snapshots", name)
            snapshots = transport.subscriber(newest.conduit, index)
        return Actor(
            index=index,
            env=self.spare.pop() if self.spare else self.make(spec.envs),
            policy=policy,
            rollouts=transport.outbox(lane.conduit),
            snapshots=snapshots,
            behind=self.relax.lead if self.relax.take == "barrier" else math.inf,
            rng=generator(spec.seed, "actor", spec.index("actor", index), life),
            seed=int(generator(spec.seed, "env", spec.index("env", index), life).integers(2**31)),
            make=self.make,
            send=TRIGGERS[send] if send else None,
            halves=self.config.scale.halves,
        )

    def server(self, transport: Transport) -> Server:
        (name,) = self.names("server")
        (newest,) = self.graph.received("snapshots", name)
        return Server(
            policy=self.policy(name, self.spec),
            asks=[transport.inbox(joint.conduit) for joint in self.graph.received("asks", name)],
            answers=[transport.outbox(joint.conduit) for joint in self.graph.sent("answers", name)],
            snapshots=transport.subscriber(newest.conduit),
            envs=self.spec.envs,
            rng=generator(self.spec.seed, "server", self.spec.index("server")),
            max_batch=self.relax.max_batch,
            max_wait=self.relax.max_wait,
            clock=self.clock,
        )

    def buffer(self, transport: Transport) -> Buffer:
        chooser, relax, (name,) = self.chooser(transport), self.relax, self.names("buffer")
        most = math.inf if relax.max_staleness is None else relax.max_staleness
        priorities = self.graph.received("priorities", name)
        if priorities and not isinstance(chooser, PriorityChooser):
            raise _incomplete(chooser, "prioritize")
        return Buffer(
            chooser=chooser,
            selection=self.setup.description.selection,
            pieces=self.setup.description.pieces,
            balance=dataclasses.replace(self.balance),
            lanes=[transport.inbox(lane) for lane in self.lanes],
            batches=[transport.outbox(joint.conduit) for joint in self.graph.sent("batches", name)],
            rng=generator(self.spec.seed, "buffer", self.spec.index("buffer")),
            ordered=relax.late == "wait",
            max_staleness=most - (relax.window - 1),
            record=not relax.exact,
            priorities=[transport.inbox(joint.conduit) for joint in priorities],
            most_out=[self.setup.description.grants] * len(self.lanes),
        )

    def learner(
        self,
        transport: Transport,
        index: int = 0,
        team: Team = ALONE,
        shared: Shared | None = None,
    ) -> Learner:
        """Of a group's learners, the one of this index, which is its rank in the `team`."""
        if (team.rank, team.size) != (index, self.spec.learners):
            raise ValueError(f"learner {index} of {self.spec.learners} needs a team of so many")
        gradients, name = Gradients(self.relax.gradient), self.names("learner")[index]
        spec = dataclasses.replace(
            self.spec, learner=index, team=team, shared=shared, gradients=gradients
        )
        trainer, when = self.trainer(name, spec), self.config.relax.publish_when
        (batches,) = self.graph.received("batches", name)
        sent = {
            what: self.graph.sent(what, name) for what in ("snapshots", "evaluations", "priorities")
        }
        if sent["priorities"] and not hasattr(trainer, "priorities"):
            raise _incomplete(trainer, "priorities")
        newest = {
            what: transport.publisher(sent[what][0].conduit) if sent[what] else None
            for what in ("snapshots", "evaluations")
        }
        mixes = exchange(self.config, self.relax) is not None
        return Learner(
            trainer=trainer,
            gatherer=self.gatherer(transport),
            batches=transport.inbox(batches.conduit),
            depth=depth(self.config, self.setup),
            snapshots=newest["snapshots"],
            publish=TRIGGERS[when] if when else Every(self.relax.publish),
            evaluations=newest["evaluations"],
            team=team,
            mixer=self._mixer(name, trainer, transport) if mixes and index == 0 else None,
            joined=mixes,
            skip=self.config.faults.nonfinite == "skip",
            gradients=gradients,
            priorities=next((transport.outbox(j.conduit) for j in sent["priorities"]), None),
        )

    def _mixer(self, name: RoleName, trainer: Trainer, transport: Transport) -> Mixer:
        joined, group = exchange(self.config, self.relax), self.spec.group
        assert joined is not None
        sent, received = self.graph.sent("models", name), self.graph.received("models", name)
        return Mixer(
            trainer.state,
            group,
            self.spec.groups,
            outboxes={j.receivers[0].group or 0: transport.outbox(j.conduit) for j in sent},
            inboxes={(j.sender.group or 0) if j.sender else 0: transport.inbox(j.conduit)
                     for j in received},
            graph=joined.graph,
            every=joined.every,
            patience=joined.patience,
        )  # fmt: skip

    def evaluator(self, transport: Transport) -> Evaluator:
        episodes = self.config.eval.episodes
        (name,) = self.names("evaluator")
        (newest,) = self.graph.received("evaluations", name)
        return Evaluator(
            env=self.make(min(EVAL_ENVS, episodes)),
            policy=self.policy(name, self.spec),
            snapshots=transport.subscriber(newest.conduit),
            episodes=episodes,
            seed=int(generator(self.spec.seed, "eval_env").integers(2**31)),
            make=self.make,
        )


MAKERS: dict[str, Callable[[Assembly, RoleName, Transport], Role]] = {}
"""what makes roles that are not ours, by their kind"""


def _incomplete(part: Any, method: str) -> Refusal:
    return Refusal(
        f"{type(part).__name__} has no {method}(), so nobody would know what steps are worth. "
        f"Write it, or let the description's `prioritizes` be False."
    )


def make_setup(config: Config, env: EnvSpec) -> Setup:
    """What the parts are made from, by what one env is like; refuses what cannot work."""
    spec = make_spec(config, env)
    relax = relax_of(config, spec)
    return Setup(spec, relax, config.algorithm.describe(spec))


def assembly(config: Config, make: MakeEnv | None = None) -> Assembly:
    """Of the first group. `make(num_envs)` makes envs, by default as the config says; the one that
    is made to look at becomes the first actor's."""
    make = make or makes(config)
    env = make(config.scale.envs_per_actor)
    check_halves(config, env)
    setup = make_setup(config, env.spec)
    graph, device = _checked(config, setup), config.scale.device
    learners = {str(role): device for role in graph.roles if role.of.learns}
    return Assembly(config, setup, graph, make, [env], learners)


def look(config: Config, make: MakeEnv | None = None) -> tuple[Setup, Graph]:
    """Of a run whose roles other processes make: the env to look at is a small one, as envs may
    take long to make, and is closed."""
    with contextlib.closing((make or makes(config))(1 + config.scale.halves)) as env:
        check_halves(config, env)
        setup = make_setup(config, env.spec)
    return setup, _checked(config, setup)


def _checked(config: Config, setup: Setup) -> Graph:
    graph = make_graph(config, setup)
    check_memory(config, graph)
    return graph


def makes(config: Config) -> MakeEnv:
    threads, halves = config.scale.env_threads, config.scale.halves
    return lambda num_envs: config.env.make(num_envs, False, threads, halves)


@dataclass
class Built:
    """All roles of a run, in one process."""

    assembly: Assembly
    transport: Memory
    actors: list[Actor]
    buffer: Buffer
    learner: Learner
    evaluator: Evaluator | None
    server: Server | None = None

    @property
    def spec(self) -> Spec:
        return self.assembly.spec

    @property
    def roles(self) -> list[Role]:
        """In the order in which a serial driver steps them; the evaluator is called when due."""
        server = [self.server] if self.server else []
        return [*self.actors, *server, self.buffer, self.learner]

    def close(self) -> None:
        """Close everything, also where one thing fails to."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.transport.close)
            for role in [*self.roles, *([self.evaluator] if self.evaluator else [])]:
                closing.callback(role.close)


def build(config: Config, make: MakeEnv | None = None) -> Built:
    """All roles of a run, joined, in this process."""
    return assemble(assembly(config, make), Memory())


def assemble(joined: Assembly, transport: Memory) -> Built:
    """All roles of a group, in this process."""
    return Built(
        assembly=joined,
        transport=transport,
        actors=[joined.actor(i, transport) for i in range(joined.spec.actors)],
        buffer=joined.buffer(transport),
        learner=joined.learner(transport),
        evaluator=joined.evaluator(transport) if joined.names("evaluator") else None,
        server=joined.server(transport) if joined.names("server") else None,
    )
