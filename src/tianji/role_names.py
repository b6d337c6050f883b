"""The roles of a run: how one is named, and what its kind is like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, get_args

T = TypeVar("T")

Picture = Literal[
    "inference", "simulation", "update", "priorities", "push", "probe", "evaluation", "other"
]
"""what is drawn in a colour of its own, beside waiting"""


class Activity(NamedTuple):
    """What a kind of work is called elsewhere."""

    picture: Picture = "other"
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
    """what its work does to steps, if they all pass through it"""
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

    def activity(self, work: str) -> Activity:
        return self.activities.get(work, self.others)


NONE = RoleKind("", stream=-1)


def _all(phase: str, **pictures: Picture) -> dict[str, Activity]:
    """Kinds of work of one phase."""
    return {work: Activity(picture, phase) for work, picture in pictures.items()}


KINDS = {
    kind.name: kind
    for kind in (
        RoleKind(
            "server", stream=7,
            activities=_all("choosing on the server", grant="push", receive="probe", load="probe",
                            infer="inference"),
            others=Activity(phase="choosing on the server"),
        ),
        RoleKind(
            "actor", stream=0, numbered=True, flow="produced", steps_envs=True, replaceable=True,
            works_on=("wait_server",),
            activities=_all("acting", load="probe", infer="inference", ask="push",
                            simulate="simulation", push="push", rebuild="other"),
        ),
        RoleKind(
            "buffer", stream=1, flow="received",
            activities=_all("receiving", grant="push", receive="probe", serve="push",
                            prioritize="priorities"),
        ),
        RoleKind(
            "learner", stream=2, flow="consumed", works_on=("wait_group",),
            activities={"take": Activity("update", "taking"), "push": Activity("push"),
                        "update": Activity("update", UPDATING),
                        "mix": Activity("update", "mixing models")},
        ),
        RoleKind(
            "evaluator", stream=3, beside=True, checkpointed=False, steps_envs=True,
            replaceable=True,
            activities=_all("", load="probe", evaluate="evaluation", evaluated="evaluation"),
        ),
    )
}  # fmt: skip
"""every kind of role by its name, in the order in which data flows through them"""

STREAMS = {"env": 4, "eval_env": 5, "init": 6}
"""random streams that belong to no role: seeds of envs, and the first weights"""

WORKER, SERIAL = "worker", "serial"
"""names of hosts that hold several roles: one of each group, or all of a run"""


def register_role(kind: RoleKind) -> RoleKind:
    """Make a kind of role known; a module of env.imports does so in every process of a run."""
    if not kind.name.isidentifier() or kind.name in (WORKER, SERIAL, "driver", "run"):
        raise ValueError(
            f'"{kind.name}" cannot name a role: files would not tell it from others. Use one word '
            f"that is not {WORKER}, {SERIAL}, driver or run."
        )
    if unknown := {work.picture for work in kind.activities.values()} - set(get_args(Picture)):
        raise ValueError(
            f"{kind.name}: {', '.join(sorted(unknown))} has no colour, so it cannot be drawn. Use "
            f"one of {', '.join(get_args(Picture))}."
        )
    taken = {other.stream: name for name, other in KINDS.items() if name != kind.name}
    taken |= {stream: name for name, stream in STREAMS.items()}
    if kind.stream in taken:
        raise ValueError(
            f"stream {kind.stream} is that of {taken[kind.stream]}, so {kind.name} would draw the "
            f"same random numbers. Give it a number of its own; {max(taken) + 1} is free."
        )
    KINDS[kind.name] = kind
    return kind


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
        numbered = self.index > 0 or role_kind(self.kind).numbered
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


def role_kind(role: str) -> RoleKind:
    """A kind of role by its name; one without facts for what is none, or not known here."""
    return KINDS.get(role, NONE)


def by_flow(found: Mapping[str, T]) -> dict[str, T]:
    """What is known by kind of role: of those that all steps pass through, by what happens to
    steps there."""
    return {flow: value for role, value in found.items() if (flow := role_kind(role).flow)}


def waits_for(kind: str) -> str:
    """Whom a kind of time was spent waiting for; empty where it was work."""
    tail = kind.rpartition("/")[2]
    return tail.removeprefix("wait_") if tail.startswith("wait_") else ""


def waiting(kinds: Mapping[str, float]) -> float:
    """What of it is waiting."""
    return sum(value for kind, value in kinds.items() if waits_for(kind))


def in_picture(role: str, work: str) -> str:
    """What a kind of work is in the picture; where its role does not say, what others say of it."""
    kinds = (role_kind(role), *KINDS.values())
    return next((kind.activities[work] for kind in kinds if work in kind.activities), OTHER).picture
