"""The roles of a run: how one is named, and what its kind is like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoleKind:
    """What all roles of a kind have in common."""

    name: str
    stream: int
    """its number among the random streams of a run; weights depend on it"""
    numbered: bool = False
    """are there usually several? Then the first one's name has its number, too"""
    steps_envs: bool = False
    """does it step envs, which may raise, hang or leave processes behind?"""
    learns: bool = False
    """does it compute updates?"""
    replaceable: bool = False
    """can it be restarted while all others go on?"""
    checkpointed: bool = True
    """is its state part of a checkpoint?"""
    works_on: tuple[str, ...] = ()
    """waits that are a part of its own work: they do not make it idle"""


KINDS: dict[str, RoleKind] = {}
"""every kind of role by its name, in the order in which data flows through them"""


def register_role(kind: RoleKind) -> RoleKind:
    """Make a kind of role known; streams are numbers that no other kind has."""
    taken = {other.stream: other.name for other in KINDS.values() if other.name != kind.name}
    if kind.stream in taken or kind.stream in STREAMS.values():
        raise ValueError(f"{kind.name}: stream {kind.stream} belongs to another kind")
    KINDS[kind.name] = kind
    return kind


STREAMS = {"env": 4, "eval_env": 5, "init": 6}
"""random streams that belong to no role: seeds of envs, and the first weights"""

register_role(RoleKind("server", stream=7))
register_role(
    RoleKind(
        "actor",
        stream=0,
        numbered=True,
        steps_envs=True,
        replaceable=True,
        works_on=("wait_server",),
    )
)
register_role(RoleKind("buffer", stream=1))
register_role(RoleKind("learner", stream=2, learns=True, works_on=("wait_group",)))
register_role(
    RoleKind("evaluator", stream=3, steps_envs=True, replaceable=True, checkpointed=False)
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
