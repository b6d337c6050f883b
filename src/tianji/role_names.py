"""The roles of a run: how one is named, and what its kind is like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")


class Activity(NamedTuple):
    """What a kind of work is called elsewhere."""

    picture: str = "other"
    """in the paper's Figure 1, drawn of a run"""
    phase: str = ""
    """in the cycle of an update; empty: it is no part of it that is shown"""


OTHER = Activity()
UPDATING = "updating"
"""the phase in which updates are made: each of its events is one"""


@dataclass(frozen=True)
class RoleKind:
    """What all roles of a kind have in common."""

    name: str
    stream: int
    """its number among the random streams of a run; weights depend on it"""
    numbered: bool = False
    """are there usually several? Then the first one's name has its number, too"""
    flow: Literal["", "produced", "received", "consumed"] = ""
    """what happens to steps by its work, if all pass through it"""
    beside: bool = False
    """does it work beside the loop, where nobody waits for it?"""
    steps_envs: bool = False
    """does it step envs, which may raise, hang or leave processes behind?"""
    replaceable: bool = False
    """can it be restarted while all others go on?"""
    checkpointed: bool = True
    """is its state part of a checkpoint?"""
    works_on: tuple[str, ...] = ()
    """waits that are a part of its own work: they do not make it idle"""
    activities: Mapping[str, Activity] = field(default_factory=dict)
    """its kinds of work"""
    others: Activity = OTHER
    """any other work of its host"""

    @property
    def learns(self) -> bool:
        """Does it compute updates?"""
        return self.flow == "consumed"


KINDS: dict[str, RoleKind] = {}
"""every kind of role by its name, in the order in which data flows through them"""

STREAMS = {"env": 4, "eval_env": 5, "init": 6}
"""random streams that belong to no role: seeds of envs, and the first weights"""


def register_role(kind: RoleKind) -> RoleKind:
    """Make a kind of role known; streams are numbers that no other kind has."""
    taken = {other.stream: other.name for other in KINDS.values() if other.name != kind.name}
    taken |= {stream: name for name, stream in STREAMS.items()}
    if kind.stream in taken:
        free = next(n for n in range(len(taken) + 1) if n not in taken)
        raise ValueError(
            f"stream {kind.stream} is that of {taken[kind.stream]}, so {kind.name} would draw the "
            f"same random numbers. {free} is free."
        )
    KINDS[kind.name] = kind
    return kind


register_role(
    RoleKind(
        "server",
        stream=7,
        activities={
            "grant": Activity("push", "choosing on the server"),
            "receive": Activity("probe", "choosing on the server"),
            "load": Activity("probe", "choosing on the server"),
            "infer": Activity("inference", "choosing on the server"),
        },
        others=Activity(phase="choosing on the server"),
    )
)
register_role(
    RoleKind(
        "actor",
        stream=0,
        numbered=True,
        flow="produced",
        steps_envs=True,
        replaceable=True,
        works_on=("wait_server",),
        activities={
            "load": Activity("probe", "acting"),
            "infer": Activity("inference", "acting"),
            "ask": Activity("push", "acting"),
            "simulate": Activity("simulation", "acting"),
            "push": Activity("push", "acting"),
            "rebuild": Activity(phase="acting"),
        },
    )
)
register_role(
    RoleKind(
        "buffer",
        stream=1,
        flow="received",
        activities={
            "grant": Activity("push", "receiving"),
            "receive": Activity("probe", "receiving"),
            "serve": Activity("push", "receiving"),
            "prioritize": Activity("priorities", "receiving"),
        },
    )
)
register_role(
    RoleKind(
        "learner",
        stream=2,
        flow="consumed",
        works_on=("wait_group",),
        activities={
            "take": Activity("update", "taking"),
            "update": Activity("update", UPDATING),
            "push": Activity("push"),
            "mix": Activity("update", "mixing models"),
        },
    )
)
register_role(
    RoleKind(
        "evaluator",
        stream=3,
        beside=True,
        steps_envs=True,
        replaceable=True,
        checkpointed=False,
        activities={
            "load": Activity("probe"),
            "evaluate": Activity("evaluation"),
            "evaluated": Activity("evaluation"),
        },
    )
)

WORKER, SERIAL = "worker", "serial"
"""names of hosts that hold several roles: one of each group, or all of a run"""


@dataclass(frozen=True, order=True)
class RoleName:
    """One role of a run; or a host, which is named by its only role, WORKER or SERIAL."""

    kind: str
    index: int = 0
    group: int | None = None
    """None: the run has one group"""

    def __str__(self) -> str:
        """As files and messages have it: actor-0, learner, g1.learner-2."""
        group = "" if self.group is None else f"g{self.group}."
        numbered = self.index > 0 or (self.kind in KINDS and KINDS[self.kind].numbered)
        return f"{group}{self.kind}{f'-{self.index}' * numbered}"

    @property
    def of(self) -> RoleKind:
        """Its kind."""
        return KINDS[self.kind]


def parse_role(text: str) -> RoleName:
    """The role, or the host, that a file names."""
    group, _, name = text.rpartition(".")
    kind, _, index = name.partition("-")
    number = group.removeprefix("g")
    return RoleName(
        kind, int(index) if index.isdecimal() else 0, int(number) if number.isdecimal() else None
    )


def stream_of(kind: str) -> int:
    """The number of a random stream, of a kind of role or of one that belongs to none."""
    return STREAMS[kind] if kind in STREAMS else KINDS[kind].stream


def flow_of(kind: str) -> str:
    """Of a kind of role; empty also where it is not known here."""
    return KINDS[kind].flow if kind in KINDS else ""


def by_flow(found: Mapping[str, T]) -> dict[str, T]:
    """What is known by kind of role: of those that all steps pass through, by what happens to
    steps there."""
    return {KINDS[kind].flow: value for kind, value in found.items() if flow_of(kind)}


def waits_of(kind: str) -> tuple[str, ...]:
    """Waits that are a part of a kind of role's work."""
    return KINDS[kind].works_on if kind in KINDS else ()


def beside(kind: str) -> bool:
    """Does a kind of role work beside the loop?"""
    return kind in KINDS and KINDS[kind].beside


def in_picture(kind: str, work: str) -> str:
    """What a kind of role's work is in the picture; where it does not say, what it is for others
    that do such work."""
    known = [KINDS[kind]] if kind in KINDS else []
    return next(
        (role.activities[work].picture for role in (*known, *KINDS.values())
         if work in role.activities), OTHER.picture,
    )  # fmt: skip


def in_cycle(kind: str, work: str) -> str:
    """The phase of an update's cycle that a kind of role's work is part of; empty: none."""
    if kind not in KINDS:
        return ""
    return KINDS[kind].activities.get(work, KINDS[kind].others).phase
