"""What an algorithm is: hyperparameters and one part for each role, in one file."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tianji.description import Description
from tianji.env import EnvSpec
from tianji.errors import Refusal, nearest
from tianji.role import Did, State
from tianji.team import Alone, Shared, Team
from tianji.train_state import TrainState
from tianji.types import Array, Leaves, Params, Rollout


@dataclass(frozen=True)
class Bound:
    """What a number in a config may be."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """True: more than `low`, not equal to it"""
    infinite: bool = False
    """True: inf is a value, too"""

    def holds(self, value: float) -> bool:
        return (
            (math.isfinite(value) or self.infinite)
            and (value > self.low if self.above else value >= self.low)
            and value <= self.high
        )

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:g} in this version"
        low = f"more than {self.low:g}" if self.above else f"at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:g}"


Count = Annotated[int, Bound(1)]
Whole = Annotated[int, Bound(0)]
Positive = Annotated[float, Bound(0, above=True)]
NotNegative = Annotated[float, Bound(0)]
Fraction = Annotated[float, Bound(0, 1)]


@dataclass(frozen=True)
class Network:
    """The shape of the networks: the config's [network]."""

    kind: Literal["auto", "mlp", "cnn"] = "auto"
    """multi-layer perceptron or convolutions; auto: convolutions for pictures"""
    hidden: tuple[Count, ...] = (64, 64)
    """widths of the hidden layers of an mlp"""
    activation: Literal["tanh", "relu"] = "tanh"
    """between the layers of an mlp"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """what convolutions compute in on a CPU; parameters, targets and losses stay float32"""
    recurrent: Literal["none", "gru"] = "none"
    """gru: a gated recurrent unit remembers what was observed; in the place of hidden layers"""
    memory: Count = 64
    """width of a recurrent network and of its state"""


@dataclass
class Gradients:
    """What becomes of gradients before a step: the learner says how stale its batch is, optimizers
    say what they did."""

    kind: str = "none"
    """the word of relax.gradient"""
    staleness: float = 0.0
    """versions behind, of the batch in hand: the mean over this learner's share"""
    steps: int = 0
    """that optimizers were asked for since the last update"""
    skipped: int = 0
    """of them, left out"""
    damped: int = 0
    """of them, made smaller than they would have been"""

    def told(self) -> Metrics:
        """Of the update that ended, as shares of its steps; then count anew."""
        if self.kind == "none":
            return {}
        steps, skipped, damped = max(1, self.steps), self.skipped, self.damped
        self.steps = self.skipped = self.damped = 0
        return {"gradient_skipped": skipped / steps, "gradient_damped": damped / steps}


@dataclass(frozen=True)
class Spec:
    """All that an algorithm's parts are told of the run."""

    env: EnvSpec
    network: Network
    actors: int
    envs: int
    """envs per actor"""
    T: int
    """steps per rollout"""
    seed: int
    updates: int | None
    """updates after which the run stops by its config, for schedules; None: no such end"""
    steps: int | None
    """valid steps after which it stops, likewise"""
    start: str = "batch"
    """stream: parts of a batch are served as they arrive; batch: when all of it is there"""
    window: int = 1
    """batches of which each update draws one; 1: each is consumed once"""
    sends_early: bool = False
    """rollouts may be pushed before they are full; the rest of them is rows that are not valid"""
    correct: str = "none"
    """what is done against staleness, of `Traits.corrects`"""
    explore: str = "alike"
    """how actors differ in exploring, of `Traits.explores`"""
    actor: int | None = None
    """which one a policy is for; None: for any, or for all"""
    join: str = "none"
    """how the learners of groups are joined"""
    learners: int = 1
    """learners of a group; each takes an equal share of every batch"""
    learner: int = 0
    """which of them this is for"""
    groups: int = 1
    """groups of actors, buffer and learners"""
    group: int = 0
    """which of them this is for"""
    team: Team = field(default=Alone(), compare=False)
    """the learners of the group, for the optimizer and for whatever is a mean over a batch"""
    shared: Shared | None = field(default=None, compare=False)
    """parameters that the learners of all groups step without locks"""
    gradients: Gradients = field(default_factory=Gradients, compare=False)
    """what becomes of gradients against staleness: for every optimizer of a trainer"""

    @property
    def rows_per_rollout(self) -> int:
        return self.T * self.envs

    def index(self, role: str, of: int = 0) -> int:
        """The number of a role among those of all groups, for its generator: groups differ."""
        each = {"actor": self.actors, "env": self.actors, "learner": self.learners}
        return self.group * each.get(role, 1) + of


class Decision(NamedTuple):
    action: Array
    """[B, ...]"""
    state: Leaves
    """recurrent state after it, each [B, ...]"""
    extras: Leaves
    """what training needs of the moment of acting, each [B, ...]"""
    version: int = -1
    """that chose, where it was not the actor's own"""
    before: Leaves | None = None
    """recurrent state that it was chosen with, where it was not the actor's own"""


class Policy(Protocol):
    """Chooses actions, on the actor; holds nothing that only training needs."""

    def initial(self, B: int) -> Leaves:
        """The recurrent state before the first step."""

    def load(self, params: Params) -> None: ...

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        """Choose for B envs; without `rng`, greedily."""


class Acting(Protocol):
    """What an actor asks for actions: a policy of its own, or one elsewhere that answers later."""

    def initial(self, B: int) -> Leaves: ...

    def load(self, params: Params) -> None: ...

    def act(
        self, observation: Leaves, state: Leaves, rng: np.random.Generator | None
    ) -> Decision | Did:
        """As a policy's; or what was done instead, or is waited for: then call it again."""


@runtime_checkable
class Copying(Protocol):
    """A policy that says whether it copies in `load`. Where it does, it is given the memory of the
    sender, and called again where that was overwritten meanwhile: nothing else is copied. An actor
    then has no params to save, so that it goes on from a reset after a restart."""

    copies: bool


def restart(policy: Acting, state: Leaves, ended: Array) -> None:
    """Begin the recurrent state of these envs anew, in place."""
    if state and ended.any():
        initial = policy.initial(len(ended))
        for name, array in state.items():
            array[ended] = initial[name][ended]


@dataclass(frozen=True)
class Lanes:
    """The memory of all actors' rollouts, leaf by leaf, each [slots, T or T + 1, B, ...]."""

    memory: tuple[Mapping[str, Array], ...]
    frames: int = 1
    """pictures that "obs" is a stack of; the memory holds each of them once"""


class Chooser(Protocol):
    """Picks what an update consumes, on the buffer."""

    any_order: bool
    """may an actor push its rollouts in another order than that of their grants? Not where a lane
    is read as a ring in time"""

    def add(self, lane: int, slot: int) -> None:
        """A rollout has arrived in this slot."""

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        """Write the next selection into `out`, with the leaves that are described; the share of it
        that is fresh: never consumed before."""

    @property
    def share(self) -> float:
        """A batch over all that it is drawn from: the paper's P = Bs / Ns."""

    def retired(self) -> Iterable[tuple[int, int]]:
        """Lanes and slots that no later choice will name, oldest first, each once."""

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


@runtime_checkable
class PriorityChooser(Chooser, Protocol):
    """A chooser that is told after every update how much each of the steps it chose is worth."""

    def prioritize(self, selection: Leaves, priority: Array) -> None:
        """The trainer's `priorities` of what `choose` wrote into `selection`."""


class Gatherer(Protocol):
    """Makes parts of a batch of what was chosen, on the learner."""

    def parts(self, selection: Leaves) -> Iterable[Rollout]:
        """What the selection names, from the lanes."""


Metrics = dict[str, float]


class Trainer(Protocol):
    """Turns batches into policy versions, on the learner."""

    def take(self, part: Rollout) -> None:
        """Part of a batch; its memory is valid until `finish` has returned."""

    def finish(self) -> Metrics:
        """Make the update from the parts taken since the last one."""

    def params(self, version: int) -> Params:
        """What the policy needs in order to act; schedules are functions of the version."""

    @property
    def state(self) -> TrainState:
        """All that was learnt, and all that going on exactly needs beside it."""


class PriorityTrainer(Trainer, Protocol):
    """A trainer whose chooser wants priorities."""

    def priorities(self) -> Array:
        """[N], of the steps of the last update in their order."""


@dataclass(frozen=True)
class Traits:
    """What holds for an algorithm whatever its hyperparameters are."""

    on_policy: bool
    """True: rollouts are consumed soon after they were made; False: they are replayed"""
    corrects: tuple[str, ...] = ()
    """words of relax.correct that it heeds by `Spec.correct`, beside "none"; others are refused"""
    explores: tuple[str, ...] = ()
    """words of relax.explore that it heeds by `Spec.explore`, beside "alike"; others are refused"""
    remembers: bool = False
    """does it heed network.recurrent?"""
    once: bool = False
    """do its chooser and gatherer heed `Spec.start` and `Spec.window`, as those of `store` do?"""


class Algorithm(Protocol):
    """A frozen dataclass of hyperparameters that makes the parts."""

    name: ClassVar[str]
    traits: ClassVar[Traits]

    def check(self, spec: Spec) -> None:
        """Refuse what cannot work, before anything is built."""

    def steps_per_update(self, spec: Spec) -> int:
        """New rows that one update is meant to follow."""

    def warmup_steps(self, spec: Spec) -> int:
        """Rows before the first update's own."""

    def describe(self, spec: Spec) -> Description:
        """What the parts will be like; none of them is made for it."""

    def policy(self, spec: Spec, device: str = "cpu") -> Policy: ...

    def chooser(self, spec: Spec, lanes: Lanes) -> Chooser: ...

    def gatherer(self, spec: Spec, lanes: Lanes) -> Gatherer: ...

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer: ...


ALGORITHMS: dict[str, str | type[Any]] = {
    "a2c": "tianji.algorithms.a2c:A2C",
    "appo": "tianji.algorithms.appo:APPO",
    "dqn": "tianji.algorithms.dqn:DQN",
    "impala": "tianji.algorithms.impala:IMPALA",
    "maddpg": "tianji.algorithms.maddpg:MADDPG",
    "mappo": "tianji.algorithms.mappo:MAPPO",
    "ppo": "tianji.algorithms.ppo:PPO",
    "qmix": "tianji.algorithms.qmix:QMIX",
    "sac": "tianji.algorithms.sac:SAC",
    "td3": "tianji.algorithms.td3:TD3",
    "vdn": "tianji.algorithms.qmix:VDN",
}


def hyperparameter(algorithm: Algorithm, name: str, default: int) -> int:
    """A hyperparameter that many algorithms have by this name; the default: it has none."""
    return int(vars(algorithm).get(name, default))


def register_algorithm(name: str) -> Callable[[type[Any]], type[Any]]:
    """Decorator: make an own algorithm known by a name that configs can use as algorithm.name."""

    def register(algorithm: type[Any]) -> type[Any]:
        ALGORITHMS[name] = algorithm
        return algorithm

    return register


def algorithm_class(name: str) -> type[Any]:
    found = ALGORITHMS.get(name)
    if found is None:
        raise Refusal(
            f'algorithm.name = "{name}" is not known, so there is nothing to train with.'
            f"{nearest(name, ALGORITHMS)} Known: {', '.join(sorted(ALGORITHMS))}. Own algorithms "
            f"register themselves in a module that env.imports names."
        )
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, type)
    return found
