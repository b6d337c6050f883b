"""The one place that knows the topology: which roles there are, and what joins them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tianji.actor import FRAMES, Actor
from tianji.algorithm import (
    Acting,
    Gradients,
    Lanes,
    OnceStore,
    Policy,
    PriorityStore,
    Spec,
    Store,
    Trainer,
)
from tianji.balance import Balance, uneven_rounds
from tianji.buffer import MOST_OUT, Buffer, batch_layout, priority_layout
from tianji.channel import Conduit, End, Transport
from tianji.config import Config
from tianji.env import Env
from tianji.errors import Refusal
from tianji.evaluator import Evaluator
from tianji.join import Graph, Mixer, edges, model_conduit, model_layout
from tianji.learner import ALONE, Learner
from tianji.machine import free_memory
from tianji.relax import Relaxation
from tianji.role import Role, generator
from tianji.server import Remote, Server, answers_layout, asks_layout
from tianji.spec import MIXING, check_halves, make_spec, relax_of
from tianji.team import Shared, Team
from tianji.transports.memory import Memory
from tianji.trigger import TRIGGERS, Every
from tianji.types import Array, Layout, Row, leaf, rollout_layout

EVAL_ENVS = 8
"""envs that an evaluation steps together, at most"""

FREE_LEAD = 4
"""updates' worth of rollouts that lanes have room for where the lead is not bounded"""

SNAPSHOTS, EVALUATIONS = "snapshots", "evaluations"
"""newest-only conduits from the first learner to the actors, and to the evaluator"""

MakeEnv = Callable[[int], Env]


class Joined(NamedTuple):
    """What a `Mixer` is told."""

    graph: Graph
    every: int
    patience: float


@dataclass(frozen=True)
class Topology:
    """The roles of a group and what joins them, for whichever process makes which of them.

    actor-i ── rollouts-i ──▶ buffer ── batches ───▶ learner ◀── models-i-j ──▶ other groups
       ▲                         └───── batches-j ──▶ learner-j ...
       │
       └────── snapshots ◀────── learner ── evaluations ──▶ evaluator

    With an inference server, snapshots go to it alone:

    actor-i ── asks-i ──▶ server ── answers-i ──▶ actor-i

    Of several groups each has a topology of its own; conduits have its prefix, and only the first
    has an evaluator.
    """

    config: Config
    spec: Spec
    make: MakeEnv
    spare: list[Env] = field(default_factory=list)
    """an env that was made to look at, for the first actor that is made here"""

    def ends(self, role: str) -> list[End]:
        """Every end of a conduit that a role holds."""
        lanes = [lane.name for lane in self.lanes]
        kind, _, index = role.partition("-")
        match kind:
            case "actor":
                lane = End(lanes[int(index)], "send")
                if self.serves:
                    asks, answers = self.asks[int(index)].name, self.answers[int(index)].name
                    return [lane, End(asks, "send"), End(answers, "receive")]
                return [lane, End(self.snapshots.name, "receive", int(index))]
            case "server":
                return [
                    *(End(conduit.name, "receive") for conduit in self.asks),
                    *(End(conduit.name, "send") for conduit in self.answers),
                    End(self.snapshots.name, "receive"),
                ]
            case "buffer":
                batches = [End(self.batches_name(i), "send") for i in range(self.spec.learners)]
                told = [End(self.priorities_name(i), "receive") for i in range(self.spec.learners)]
                told = told if self.prioritizes else []
                return [*(End(lane, "receive") for lane in lanes), *batches, *told]
            case "learner":
                batches = [End(self.batches_name(int(index or 0)), "receive")]
                if self.prioritizes:
                    batches.append(End(self.priorities_name(int(index or 0)), "send"))
                ends = [*(End(lane, "read") for lane in lanes), *batches]
                return ends if index else [*ends, *self._ends_of_the_first()]
            case _:
                return [End(self.evaluations.name, "receive")]

    def _ends_of_the_first(self) -> list[End]:
        """What the first learner of a group holds beside those that all have."""
        group = self.spec.group
        evaluations = [End(self.evaluations.name, "send")] if self.evaluates else []
        models = [
            End(conduit.name, "send" if i == group else "receive")
            for (i, j), conduit in self.models.items()
            if group in (i, j)
        ]
        shared = [End("shared", "read")] if self.shared else []
        return [End(self.snapshots.name, "send"), *evaluations, *models, *shared]

    def holder(self, end: End) -> str:
        """The host that holds this end."""
        return next(host for host in self.hosts if end in self.host_ends(host))

    @property
    def role_names(self) -> list[str]:
        """In the order in which a serial driver steps them."""
        actors = [f"actor-{i}" for i in range(self.spec.actors)]
        server = ["server"] if self.serves else []
        more = [f"learner-{i}" for i in range(1, self.spec.learners)]
        evaluator = ["evaluator"] if self.evaluates else []
        return [*actors, *server, "buffer", "learner", *more, *evaluator]

    @property
    def serves(self) -> bool:
        """Does a server choose the actions?"""
        return self.relax.infer == "server"

    @property
    def prefix(self) -> str:
        """Of the names of this group's conduits; the models' have none, being between groups."""
        return f"g{self.spec.group}." if self.spec.groups > 1 else ""

    @cached_property
    def snapshots(self) -> Conduit:
        """From the first learner to the actors, or to the server."""
        receivers = 1 if self.serves else self.spec.actors
        name = f"{self.prefix}{SNAPSHOTS}"
        return Conduit(name, "newest", self.params, receivers=receivers)

    @cached_property
    def evaluations(self) -> Conduit:
        return Conduit(f"{self.prefix}{EVALUATIONS}", "newest", self.params)

    def priorities_name(self, learner: int) -> str:
        return f"{self.prefix}priorities-{learner}" if learner else f"{self.prefix}priorities"

    def batches_name(self, learner: int) -> str:
        return f"{self.prefix}batches-{learner}" if learner else f"{self.prefix}batches"

    @property
    def prioritizes(self) -> bool:
        """Does the store want to know what its steps were worth?"""
        return bool(getattr(self.config.algorithm, "prioritizes", False))

    @property
    def evaluates(self) -> bool:
        evaluates = self.config.eval.every > 0 or self.config.eval.when is not None
        return evaluates and self.spec.group == 0

    @property
    def mixes(self) -> bool:
        """Do groups exchange models, rather than share one set of parameters or none?"""
        return self.relax.join in MIXING

    @property
    def joined(self) -> Joined:
        """How models are exchanged, where they are."""
        own, relax = self.config.join, self.relax
        gossips = relax.join == "gossip"
        waits = relax.lead == 0 and relax.hosts == "apart"
        patience = own.patience
        if patience is None:
            patience = 10.0 if gossips else 0.0 if waits else math.inf
        graph = own.graph or ("ring" if gossips else "complete")
        if (graph == "complete") == gossips:
            other = "average" if gossips else "gossip"
            raise Refusal(
                f'join.graph = "{graph}" is not how models are exchanged by relax.join = '
                f'"{relax.join}". Set relax.join = "{other}", or leave join.graph out.'
            )
        return Joined(graph, own.every or (1 if gossips else 10), patience)

    @cached_property
    def relax(self) -> Relaxation:
        return relax_of(self.config, self.spec)

    @cached_property
    def balance(self) -> Balance:
        """The account at the start of a run."""
        algorithm, spec, relax = self.config.algorithm, self.spec, self.relax
        steps = algorithm.steps_per_update(spec)
        wrong = uneven_rounds(spec.rows_per_rollout, spec.actors, steps)
        if relax.lead == 0 and spec.actors > 1 and wrong is not None:
            raise Refusal(f'{wrong} Or set scale.relax = "one_step".')
        return Balance(
            rows_per_rollout=spec.rows_per_rollout,
            steps_per_update=steps,
            warmup=algorithm.warmup_steps(spec),
            lead=relax.lead,
            round=spec.actors if relax.lead == 0 and not algorithm.on_policy else 1,
            paced=relax.paced,
            credit=relax.credit,
        )

    @cached_property
    def policy(self) -> Policy:
        """One to look at; every actor has its own."""
        return self.config.algorithm.policy(self.spec)

    @cached_property
    def recurrent(self) -> Layout:
        """Leaves of the policy's recurrent state, of one env."""
        state = self.policy.initial(1)
        return {name: leaf(array.shape[1:], array.dtype) for name, array in state.items()}

    @property
    def row(self) -> Row:
        """What one step of one env leaves in a rollout."""
        env, once = self.spec.env, dict(self.recurrent)
        if env.frames > 1:
            obs = env.observation["obs"]
            once[FRAMES] = leaf((env.frames - 1, *obs.shape[1:]), obs.dtype)
        return Row(env.held, env.action_leaf, self.policy.extras, once, env.reward_leaf)

    @cached_property
    def params(self) -> Layout:
        """What a policy needs in order to act."""
        shapes = self.policy.shapes
        return {name: leaf(shape, np.float32) for name, shape in shapes.items()}

    @cached_property
    def lanes(self) -> list[Conduit]:
        spec, relax = self.spec, self.relax
        layout = rollout_layout(self.row, spec.T, spec.envs)
        # Beside what the store holds: what is being made for `lead` updates and the current one,
        # and what the learner has in hand.
        each = -(-self.balance.steps_per_update // (spec.rows_per_rollout * spec.actors))
        more = each * (2 + int(min(relax.lead, FREE_LEAD)))
        if relax.lead > 0 and not self.config.algorithm.on_policy:
            more = MOST_OUT + 2
        slots = self.config.algorithm.slots(spec) * relax.window + more
        if self.config.scale.rebalance and self.config.algorithm.on_policy:
            slots *= spec.actors  # one of them may be active alone
        elif relax.late == "pass" and self.config.algorithm.on_policy:
            slots *= 2  # half of the actors can stand still, and the others go on
        names = (f"{self.prefix}rollouts-{i}" for i in range(spec.actors))
        return [Conduit(name, "lane", layout, slots) for name in names]

    @cached_property
    def models(self) -> dict[tuple[int, int], Conduit]:
        """What the first learners of two groups exchange, by (from, to); all groups' are here."""
        if not self.mixes:
            return {}
        layout = model_layout(self._trainer)
        pairs = edges(self.joined.graph, self.spec.groups)
        return {(i, j): model_conduit(i, j, layout) for i, j in pairs}

    @cached_property
    def shared(self) -> Conduit | None:
        """The memory in which the learners of all groups have one set of parameters, with room for
        all that they learn; None: each has its own."""
        if self.relax.join != "hogwild":
            return None
        size = Shared.size(sum(array.size for array in self._trainer.networks().values()))
        return Conduit("shared", "memory", {"flat": leaf((size,), np.float32)})

    @property
    def hosts(self) -> dict[str, list[str]]:
        """The processes of this group, by name, and the roles that each holds."""
        inside = ("actor", "buffer", "learner") if self.relax.hosts == "worker" else ()
        within = [name for name in self.role_names if name.split("-")[0] in inside]
        apart = {f"{self.prefix}{name}": [name] for name in self.role_names if name not in within}
        return ({f"{self.prefix}worker": within} if within else {}) | apart

    def host_ends(self, host: str) -> list[End]:
        """As `ends`, of all conduits that leave a host."""
        ends = [end for role in self.hosts[host] for end in self.ends(role)]
        if self.relax.hosts == "apart":
            return ends
        between = {self.evaluations.name, "shared", *(c.name for c in self.models.values())}
        return [end for end in ends if end.conduit in between]

    @property
    def leader(self) -> str:
        """The host of the first learner."""
        return next(host for host, roles in self.hosts.items() if "learner" in roles)

    @cached_property
    def _trainer(self) -> Trainer:
        """One to look at; every learner has its own."""
        return self.config.algorithm.trainer(dataclasses.replace(self.spec, device="cpu"))

    @property
    def asks(self) -> list[Conduit]:
        layout = asks_layout(self.spec.env.observation, self.spec.envs)
        return [
            Conduit(f"{self.prefix}asks-{i}", "queue", layout)
            for i in range(self.spec.actors)
            if self.serves
        ]

    @property
    def answers(self) -> list[Conduit]:
        env, envs = self.spec.env, self.spec.envs
        layout = answers_layout(env.action_leaf, self.policy.extras, self.recurrent, envs)
        return [
            Conduit(f"{self.prefix}answers-{i}", "queue", layout)
            for i in range(self.spec.actors)
            if self.serves
        ]

    def store(self, transport: Transport) -> Store:
        lanes = tuple(transport.memory(lane) for lane in self.lanes)
        memory = Lanes(lanes, self.spec.env.frames)
        store, learners = self.config.algorithm.store(self.spec, memory), self.spec.learners
        if self.relax.start == "batch" and self.relax.window == 1:
            return _shared_equally(store, learners)
        if not isinstance(store, OnceStore):
            raise Refusal(
                f'relax.start = "{self.relax.start}" and reuse.window = {self.relax.window} need a '
                f"store that can serve so; {self.config.algorithm.name}'s {type(store).__name__} "
                f'cannot. Set relax.start = "batch" and reuse.window = 1, or use store.Fresh.'
            )
        if self.relax.start == "stream":
            _shared_equally(store, learners)
            return store.streamed(learners)
        return _shared_equally(store.windowed(self.relax.window), learners)

    def batches(self, store: Store, learner: int = 0) -> Conduit:
        layout = batch_layout(store.selection, self.spec.learners)
        return Conduit(self.batches_name(learner), "queue", layout, self._depth(store))

    def priorities(self, store: Store, learner: int = 0) -> Conduit | None:
        """What a learner tells of the steps of its updates, where the store wants to know."""
        if not self.prioritizes:
            return None
        if not isinstance(store, PriorityStore):
            raise _incomplete(store, "prioritize")
        layout = priority_layout(store.selection, self.spec.learners)
        return Conduit(self.priorities_name(learner), "queue", layout, self._depth(store) + 1)

    def memory(self, transport: Transport) -> dict[str, Mapping[str, Array]]:
        """What each conduit of the group holds, by its name."""
        store, learners = self.store(transport), range(self.spec.learners)
        conduits = [*self.lanes, *(self.batches(store, i) for i in learners), *self.told(store)]
        return {conduit.name: transport.memory(conduit) for conduit in conduits}

    def _depth(self, store: Store) -> int:
        """Pieces that a learner asks for ahead: this batch's, and the next one's; only this batch's
        where the first of several learners may wait for other groups: they begin together."""
        waits = self.mixes and self.spec.learners > 1 and math.isfinite(self.joined.patience)
        return store.pieces * (1 if self.relax.lead == 0 or waits else 2)

    def actor(self, index: int, transport: Transport, life: int = 0) -> Actor:
        """The actor of this index; `life` counts how often it was restarted."""
        spec, send = self.spec, self.config.relax.send_when
        policy: Acting
        if self.serves:
            asks, answers = self.asks[index], self.answers[index]
            policy = Remote(transport.outbox(asks), transport.inbox(answers))
            snapshots = None
        else:
            policy = self.config.algorithm.policy(dataclasses.replace(spec, actor=index))
            snapshots = transport.subscriber(self.snapshots, index)
        return Actor(
            index=index,
            env=self.spare.pop() if self.spare else self.make(spec.envs),
            policy=policy,
            rollouts=transport.outbox(self.lanes[index]),
            snapshots=snapshots,
            behind=self.relax.lead if self.relax.take == "barrier" else math.inf,
            rng=generator(spec.seed, "actor", spec.index("actor", index), life),
            seed=int(generator(spec.seed, "env", spec.index("env", index), life).integers(2**31)),
            make=self.make,
            send=TRIGGERS[send] if send else None,
            halves=self.config.scale.halves,
        )

    def server(self, transport: Transport, clock: Callable[[], float] | None = None) -> Server:
        return Server(
            policy=self.config.algorithm.policy(self.spec),
            asks=[transport.inbox(conduit) for conduit in self.asks],
            answers=[transport.outbox(conduit) for conduit in self.answers],
            snapshots=transport.subscriber(self.snapshots),
            envs=self.spec.envs,
            rng=generator(self.spec.seed, "server", self.spec.index("server")),
            max_batch=self.relax.max_batch,
            max_wait=self.relax.max_wait,
            clock=clock,
        )

    def buffer(self, transport: Transport) -> Buffer:
        store, relax = self.store(transport), self.relax
        most = math.inf if relax.max_staleness is None else relax.max_staleness
        return Buffer(
            store=store,
            balance=dataclasses.replace(self.balance, pieces=store.pieces),
            lanes=[transport.inbox(lane) for lane in self.lanes],
            batches=[transport.outbox(self.batches(store, i)) for i in range(self.spec.learners)],
            rng=generator(self.spec.seed, "buffer", self.spec.index("buffer")),
            ordered=relax.late == "wait",
            max_staleness=most - (relax.window - 1),
            record=not relax.exact,
            priorities=[transport.inbox(conduit) for conduit in self.told(store)],
        )

    def told(self, store: Store) -> list[Conduit]:
        """The priorities of all learners, where there are such."""
        told = (self.priorities(store, i) for i in range(self.spec.learners))
        return [conduit for conduit in told if conduit is not None]

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
        gradients = Gradients(self.relax.gradient)
        spec = dataclasses.replace(
            self.spec, learner=index, team=team, shared=shared, gradients=gradients
        )
        store, when = self.store(transport), self.config.relax.publish_when
        trainer, first = self.config.algorithm.trainer(spec), index == 0
        told = self.priorities(store, index)
        if told is not None and not hasattr(trainer, "priorities"):
            raise _incomplete(trainer, "priorities")
        return Learner(
            trainer=trainer,
            store=store,
            batches=transport.inbox(self.batches(store, index)),
            depth=self._depth(store),
            snapshots=transport.publisher(self.snapshots) if first else None,
            publish=TRIGGERS[when] if when else Every(self.relax.publish),
            evaluations=(
                transport.publisher(self.evaluations) if first and self.evaluates else None
            ),
            team=team,
            mixer=self._mixer(trainer, transport) if first and self.mixes else None,
            joined=self.mixes,
            skip=self.config.faults.nonfinite == "skip",
            gradients=gradients,
            priorities=None if told is None else transport.outbox(told),
        )

    def _mixer(self, trainer: Trainer, transport: Transport) -> Mixer:
        join, group, models = self.joined, self.spec.group, self.models.items()
        return Mixer(
            trainer,
            group,
            self.spec.groups,
            outboxes={j: transport.outbox(conduit) for (i, j), conduit in models if i == group},
            inboxes={i: transport.inbox(conduit) for (i, j), conduit in models if j == group},
            graph=join.graph,
            every=join.every,
            patience=join.patience,
        )

    def evaluator(self, transport: Transport) -> Evaluator:
        episodes = self.config.eval.episodes
        return Evaluator(
            env=self.make(min(EVAL_ENVS, episodes)),
            policy=self.config.algorithm.policy(self.spec),
            snapshots=transport.subscriber(self.evaluations),
            episodes=episodes,
            seed=int(generator(self.spec.seed, "eval_env").integers(2**31)),
            make=self.make,
        )

    def check_memory(self) -> None:
        """Refuse rollouts that do not fit, before they are asked for."""
        conduits = [*self.lanes * self.spec.groups, *self.models.values()]
        need, free = sum(conduit.nbytes for conduit in conduits), free_memory()
        if free is not None and need > free:
            raise Refusal(
                f"rollouts and replay need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
                f"free: the run would be killed. Lower algorithm.capacity, scale.actors, "
                f"scale.envs_per_actor, scale.rollout_length, scale.groups, relax.lead or "
                f"reuse.window{', or set scale.rebalance = false' * self.config.scale.rebalance}."
            )


def _incomplete(part: Store | Trainer, method: str) -> Refusal:
    return Refusal(
        f"{type(part).__name__} has no {method}(), so nobody would know what steps are worth. "
        f"Write it, or let the algorithm's `prioritizes` be False."
    )


def _shared_equally(store: Store, learners: int) -> Store:
    """The store itself, if every learner of a group can take an equal share of what it chooses."""
    lengths = {whole.shape[0] for whole in store.selection.values()}
    if learners == 1 or (len(lengths) == 1 and not min(lengths) % learners):
        return store
    if len(lengths) > 1:
        raise Refusal(
            f"scale.learners = {learners} take equal shares of what {type(store).__name__} "
            f"chooses, but its leaves have different lengths, {sorted(lengths)}, so there are "
            f"none. Give all leaves of `selection` one length, or set scale.learners = 1."
        )
    (length,) = lengths
    near = min((n for n in range(1, 65) if length % n == 0), key=lambda n: abs(n - learners))
    fit = max(1, round(length / learners)) * learners
    raise Refusal(
        f"scale.learners = {learners} does not divide the {length} that a batch is made of "
        f"({', '.join(store.selection)}), so that their shares could not be equal. Set "
        f"scale.learners = {near}, or let a batch be made of {fit} (scale.actors for rollouts, "
        f"algorithm.batch_size for replay)."
    )


def topology(config: Config, make: MakeEnv | None = None, spec: Spec | None = None) -> Topology:
    """`make(num_envs)` makes envs, by default as the config says; without a `spec`, an env is made
    to look at, which is then the first actor's. With one, another process has checked the memory,
    and has taken it since."""
    make = make or _makes(config)
    if spec is not None:
        return Topology(config, spec, make)
    spare = [make(config.scale.envs_per_actor)]
    joined = Topology(config, _seen(config, spare[0]), make, spare)
    joined.check_memory()
    return joined


def topologies(config: Config, make: MakeEnv | None = None) -> list[Topology]:
    """One for each group, of roles that other processes make: the env to look at is a small one,
    as envs may take long to make, and is closed."""
    make = make or _makes(config)
    with contextlib.closing(make(1 + config.scale.halves)) as env:
        first = topology(config, make, _seen(config, env))
    first.check_memory()
    others = (
        Topology(config, dataclasses.replace(first.spec, group=group), make)
        for group in range(1, first.spec.groups)
    )
    return [first, *others]


def _makes(config: Config) -> MakeEnv:
    threads, halves = config.scale.env_threads, config.scale.halves
    return lambda num_envs: config.env.make(num_envs, False, threads, halves)


def _seen(config: Config, env: Env) -> Spec:
    check_halves(config, env)
    return make_spec(config, env.spec)


@dataclass
class Built:
    """All roles of a run, in one process."""

    topology: Topology
    transport: Memory
    actors: list[Actor]
    buffer: Buffer
    learner: Learner
    evaluator: Evaluator | None
    server: Server | None = None

    @property
    def spec(self) -> Spec:
        return self.topology.spec

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
    return assemble(topology(config, make), Memory())


def assemble(joined: Topology, transport: Memory) -> Built:
    """All roles of a group, in this process."""
    return Built(
        topology=joined,
        transport=transport,
        actors=[joined.actor(i, transport) for i in range(joined.spec.actors)],
        buffer=joined.buffer(transport),
        learner=joined.learner(transport),
        evaluator=joined.evaluator(transport) if joined.evaluates else None,
        server=joined.server(transport) if joined.serves else None,
    )
