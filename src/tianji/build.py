"""The one place that knows the topology: which roles there are, and what joins them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from tianji.actor import Actor
from tianji.algorithm import Lanes, Policy, Spec
from tianji.balance import Balance
from tianji.buffer import Buffer, batch_layout
from tianji.channel import Channel
from tianji.config import Config
from tianji.env import Env, make_env
from tianji.errors import Refusal
from tianji.evaluator import Evaluator
from tianji.learner import Learner
from tianji.machine import free_memory
from tianji.relax import PRESETS
from tianji.role import Role, generator
from tianji.transports.memory import Memory
from tianji.types import Params, rollout_layout

EVAL_ENVS = 8
"""envs that an evaluation steps together, at most"""


@dataclass
class Built:
    """The roles of a run and the transport between them."""

    spec: Spec
    transport: Memory
    lanes: list[Channel]
    actors: list[Actor]
    buffer: Buffer
    learner: Learner
    evaluator: Evaluator | None

    @property
    def roles(self) -> list[Role]:
        """In the order in which a serial driver steps them; the evaluator is called when due."""
        return [*self.actors, self.buffer, self.learner]

    def close(self) -> None:
        """Close everything, also where one thing fails to."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.transport.close)
            for role in [*self.roles, *([self.evaluator] if self.evaluator else [])]:
                closing.callback(role.close)


def make_spec(config: Config, env: Env) -> Spec:
    """What the algorithm is told, with the derived sizes; refuses what it cannot work with."""
    scale, stop = config.scale, config.stop
    spec = Spec(
        env=env.spec,
        network=config.network,
        actors=scale.actors,
        envs=scale.envs_per_actor,
        T=scale.rollout_length,
        seed=config.seed,
        device=scale.device,
        updates=stop.updates,
        steps=stop.steps,
    )
    config.algorithm.check(spec)
    return spec


def build(config: Config, make: Callable[[int], Env] | None = None) -> Built:
    """The roles of a run, joined; `make(num_envs)` makes its envs, by default as the config says.

    actor-i ── rollouts-i ──▶ buffer ── batches ──▶ learner
       ▲                                               │
       └──────────────────── snapshots ◀───────────────┘──▶ evaluator
    """
    scale, algorithm = config.scale, config.algorithm
    relax = PRESETS[scale.relax]()
    make = make or (lambda num_envs: make_env(config.env.id, num_envs, config.env.kwargs))
    envs = [make(scale.envs_per_actor) for _ in range(scale.actors)]
    spec = make_spec(config, envs[0])
    transport = Memory()
    policies: list[Policy] = [algorithm.policy(spec) for _ in envs]
    layout = rollout_layout(
        spec.env.observation, spec.env.action.leaf, policies[0].extras, spec.T, spec.envs
    )
    balance = Balance(
        rows_per_rollout=spec.rows_per_rollout,
        steps_per_update=algorithm.steps_per_update(spec),
        warmup=algorithm.warmup_steps(spec),
        lead=relax.lead,
    )
    # Beside what the store holds: what is being made for `lead` updates and the current one.
    ahead = (1 + relax.lead) * -(-balance.steps_per_update // (spec.rows_per_rollout * spec.actors))
    lanes = [
        Channel(f"rollouts-{i}", layout, algorithm.slots(spec) + ahead + 1)
        for i in range(scale.actors)
    ]
    _check_memory(lanes)
    memory = Lanes(tuple(transport.memory(lane) for lane in lanes))
    store = algorithm.store(spec, memory)
    depth = 1 + relax.lead
    batches = Channel("batches", batch_layout(store.selection), depth)
    snapshots = transport.newest("snapshots", Params(policies[0].shapes).flat.size)
    actors = [
        Actor(
            index=i,
            env=env,
            policy=policy,
            rollouts=transport.outbox(lane),
            snapshots=snapshots,
            lead=relax.lead,
            rng=generator(spec.seed, "actor", i),
            seed=int(generator(spec.seed, "env", i).integers(2**31)),
        )
        for i, (env, policy, lane) in enumerate(zip(envs, policies, lanes, strict=True))
    ]
    buffer = Buffer(
        store=store,
        balance=balance,
        lanes=[transport.inbox(lane) for lane in lanes],
        batches=transport.outbox(batches),
        rng=generator(spec.seed, "buffer"),
    )
    learner = Learner(
        trainer=algorithm.trainer(spec),
        store=algorithm.store(spec, memory),
        batches=transport.inbox(batches),
        snapshots=[snapshots],
        depth=depth,
    )
    evaluator = None
    if config.eval.every:
        evaluator = Evaluator(
            env=make(min(EVAL_ENVS, config.eval.episodes)),
            policy=algorithm.policy(spec),
            snapshots=snapshots,
            episodes=config.eval.episodes,
            seed=int(generator(spec.seed, "eval_env").integers(2**31)),
        )
    return Built(spec, transport, lanes, actors, buffer, learner, evaluator)


def _check_memory(lanes: list[Channel]) -> None:
    """Refuse rollouts that do not fit, before they are asked for."""
    need, free = sum(lane.nbytes for lane in lanes), free_memory()
    if free is not None and need > free:
        raise Refusal(
            f"rollouts and replay need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: "
            f"the run would be killed. Lower algorithm.capacity, scale.envs_per_actor or "
            f"scale.rollout_length."
        )
