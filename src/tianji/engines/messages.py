"""What a launcher and its hosts say to each other: one frozen dataclass for each message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tianji.channel import Offer
from tianji.engines.engine import Evaluated, Faulted, Started
from tianji.fault import Fault
from tianji.graph import Graph, Setup
from tianji.placement import Placement
from tianji.role import State
from tianji.role_names import RoleName
from tianji.types import Leaves
from tianji.watch import Due


@dataclass(frozen=True)
class RoleRequest:
    """All that a process needs in order to be a host; descriptors come beside it."""

    host: str
    config: State
    """the config's tree"""
    name: str
    """of the config"""
    available: int
    """cores that the launcher may use; this host may be tied to fewer"""
    setup: Setup
    """of its group"""
    graph: Graph
    judges: bool
    """does its learner decide when the run ends, is saved, is evaluated? Else the launcher does"""
    files: Mapping[str, str] = field(default_factory=dict)
    """paths of the files that come open with it, by what is written to each"""


@dataclass(frozen=True)
class Fork:
    """To the process that hosts are forked from."""

    request: RoleRequest
    placement: Placement
    offer: Offer
    place: int
    """where its words on the board begin"""
    life: int
    """how often it was restarted"""


@dataclass(frozen=True)
class Forked:
    """In the order of the requests."""

    pid: int


@dataclass(frozen=True)
class Exited:
    pid: int
    code: int


@dataclass(frozen=True)
class Load:
    """Go on from these states, by the names of the roles."""

    roles: Mapping[str, State]
    recorder: State


@dataclass(frozen=True)
class Go:
    elapsed: float
    """seconds that the run has taken"""


@dataclass(frozen=True)
class Settle:
    """Come to rest between two updates."""


@dataclass(frozen=True)
class Pause:
    """Rest now; `goes` is how often all were sent on before."""

    goes: int


@dataclass(frozen=True)
class Show:
    """Let the evaluator play with the newest version."""


@dataclass(frozen=True)
class Ask:
    """Send the roles' states; `number` comes back with them."""

    number: int


@dataclass(frozen=True)
class Activate:
    """Only these actors are granted rollouts from now on."""

    actors: tuple[int, ...]


@dataclass(frozen=True)
class Renew:
    """A role at the other end of conduits died, and another process takes its place."""

    host: str
    """that died"""
    roles: tuple[RoleName, ...]
    """that it held"""
    number: int
    offer: Offer


@dataclass(frozen=True)
class Made:
    """How far an actor was: valid steps and rollouts."""

    produced: int
    seq: int


@dataclass(frozen=True)
class Follow:
    """Go on in the place of roles that died: how far they were, by name, where the buffer knows."""

    made: Mapping[str, Made] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """End."""


@dataclass(frozen=True)
class Ready:
    """It is made, or has loaded its states."""

    sha256: str = ""
    """of the weights that its learner begins with"""


@dataclass(frozen=True)
class Status:
    """How a host is: where its time went, and what it has counted, where it counts."""

    elapsed: float
    seconds: Mapping[str, float]
    cpu: float
    state: str
    version: int | None = None
    produced: int = 0
    received: int = 0
    filtered: int = 0
    filling: bool = False


@dataclass(frozen=True)
class Learnt:
    """Updates that were made since the last of these, and what they gave occasion to."""

    tally: State
    due: Due


@dataclass(frozen=True)
class Shown:
    version: int


@dataclass(frozen=True)
class Settled:
    """It rests between two updates."""


@dataclass(frozen=True)
class Paused:
    goes: int


@dataclass(frozen=True)
class States:
    """The states of a host's roles, by their names."""

    number: int
    roles: Mapping[str, State]
    policy: State | None = None
    """of its first learner"""
    sha256: str = ""


@dataclass(frozen=True)
class Renewed:
    """The living side is ready for the role that takes a dead one's place."""

    host: str
    number: int
    made: Mapping[str, Made] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The host ends."""

    fault: Fault
    expected: bool
    """did it end by its own word, for a reason that would come again?"""
    refused: bool
    batch: Leaves = field(default_factory=dict)
    """the arrays that an update failed with"""


MESSAGES = {
    kind.__name__: kind
    for kind in (
        Fork, Forked, Exited, Load, Go, Settle, Pause, Show, Ask, Activate, Renew, Follow, Stop,
        Ready, Started, Status, Learnt, Shown, Evaluated, Settled, Paused, States, Renewed, Faulted,
        Failed,
    )
}  # fmt: skip
