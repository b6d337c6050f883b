"""What an algorithm's parts will be like, found by making them: to be replaced by what it says."""

from __future__ import annotations

import dataclasses

import numpy as np

from tianji.algorithm import Lanes, OnceStore, PriorityStore, Spec, Store
from tianji.config import Config
from tianji.errors import Refusal
from tianji.relax import Relaxation
from tianji.types import Layout, Leaf, Row, floats, leaf, rollout_layout


@dataclasses.dataclass(frozen=True)
class Model:
    leaf: Leaf
    fate: str


@dataclasses.dataclass(frozen=True)
class Description:
    params: Layout
    extras: Layout
    recurrent: Layout
    selection: Layout
    pieces: int
    slots: int
    models: dict[str, Model]
    prioritizes: bool


def describe(config: Config, spec: Spec, relax: Relaxation) -> Description:
    policy = config.algorithm.policy(spec)
    trainer = config.algorithm.trainer(dataclasses.replace(spec, device="cpu"))
    fates = trainer.state.fates()
    state = policy.initial(1)
    recurrent = {name: leaf(array.shape[1:], array.dtype) for name, array in state.items()}
    env, once = spec.env, dict(recurrent)
    if env.frames > 1:
        obs = env.observation["obs"]
        once["frames"] = leaf((env.frames - 1, *obs.shape[1:]), obs.dtype)
    row = Row(env.held, env.action_leaf, policy.extras, once, env.reward_leaf)
    layout = rollout_layout(row, spec.T, spec.envs)
    memory = tuple(
        {name: np.zeros((2, *each.shape), each.dtype) for name, each in layout.items()}
        for _ in range(spec.actors)
    )
    store = _store(config, spec, relax, config.algorithm.store(spec, Lanes(memory, env.frames)))
    prioritizes = bool(getattr(config.algorithm, "prioritizes", False))
    if prioritizes and not isinstance(store, PriorityStore):
        raise Refusal(
            f"{type(store).__name__} has no prioritize(), so nobody would know what steps are "
            f"worth. Write it, or let the algorithm's `prioritizes` be False."
        )
    return Description(
        params=floats(policy.shapes),
        extras=dict(policy.extras),
        recurrent=recurrent,
        selection=dict(store.selection),
        pieces=store.pieces,
        slots=config.algorithm.slots(spec),
        models={
            name: Model(leaf(array.shape, array.dtype), fates[name])
            for name, array in trainer.state.networks().items()
        },
        prioritizes=prioritizes,
    )


def _store(config: Config, spec: Spec, relax: Relaxation, store: Store) -> Store:
    if relax.start == "batch" and relax.window == 1:
        return shared_equally(store, spec.learners)
    if not isinstance(store, OnceStore):
        raise Refusal(
            f'relax.start = "{relax.start}" and reuse.window = {relax.window} need a '
            f"store that can serve so; {config.algorithm.name}'s {type(store).__name__} "
            f'cannot. Set relax.start = "batch" and reuse.window = 1, or use store.Fresh.'
        )
    if relax.start == "stream":
        shared_equally(store, spec.learners)
        return store.streamed(spec.learners)
    return shared_equally(store.windowed(relax.window), spec.learners)


def shared_equally(store: Store, learners: int) -> Store:
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
