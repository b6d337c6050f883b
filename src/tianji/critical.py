"""What bounds an update: the seconds of its cycle by role and kind, and the chain of work that
made it as long as it was. Arithmetic on accounts and traced events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tianji.role_names import by_flow, parse_role, role_kind, waiting, waits_for
from tianji.trace import Track
from tianji.verdict import by_role

Shares = Mapping[str, Mapping[str, float]]
"""For each kind of host, shares of its time that add up to 1."""

STEPS = 20_000
"""pieces of a chain that are followed, at most"""
UPDATES = 50
"""updates that a chain is followed over, at most"""


@dataclass(frozen=True)
class Cycle:
    """One update of one learner, on average."""

    seconds: float
    """from one update to the next"""
    parts: Mapping[str, Mapping[str, float]]
    """seconds that each kind of host spent in it, by kind of work and by whom it waited for; of
    one host where there are several of a kind"""
    phases: Mapping[str, float]
    """seconds of acting, receiving, taking, updating and of the learner's waiting"""
    bound: str
    """the kind of host whose own work takes most of the cycle"""
    busy: Mapping[str, float]
    """share of the cycle that each kind of host works"""


def cycle(time: Shares, seconds: float, updates: float) -> Cycle | None:
    """From the account of a run: `updates` are those that one learner made in so many seconds.
    None where there was none."""
    if updates <= 0 or seconds <= 0 or not time:
        return None
    each = seconds / updates
    parts = {host: {kind: share * each for kind, share in kinds.items()}
             for host, kinds in time.items()}  # fmt: skip
    busy = {
        host: 1.0 - waiting(kinds) for host, kinds in time.items() if not role_kind(host).beside
    }
    return Cycle(each, parts, _phases(parts), max(busy, key=lambda host: busy[host]), busy)


def worked(shares: Mapping[str, float]) -> dict[str, float]:
    """Of a host with several roles: the shares of work, of those that all steps pass through."""
    roles = {role: sum(share for kind, share in kinds.items() if not waits_for(kind))
             for role, kinds in by_role(shares).items()}  # fmt: skip
    return by_flow(roles)


def _phases(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Where one host has several roles, its keys name them."""
    spent: dict[str, float] = {}
    for host, kinds in parts.items():
        for key, seconds in kinds.items():
            role, _, kind = key.rpartition("/")
            about = role_kind(role or host)
            if not waits_for(kind):
                phase = about.activity(kind).phase
            else:
                phase = "the learner waits" if about.learns else ""
            if phase:
                spent[phase] = spent.get(phase, 0.0) + seconds
    return spent


@dataclass(frozen=True)
class Chain:
    """What the last updates had to wait for, back from the last: every moment belongs to one host
    and one kind of work, or to a wait that nothing seen explains."""

    seconds: float
    updates: int
    spent: Mapping[str, float]
    """seconds by "role/kind"; "role/wait_whom": nobody's work that was seen ended that wait;
    "handover": from the end of what was waited for to the end of the wait"""
    hops: int
    """how often it went from one host to another"""


def chain(tracks: Sequence[Track], updates: int = UPDATES) -> Chain | None:
    """Follow the learner back from its last update: through its own work, and where it waited,
    through the work of whoever ended that wait. None where no two updates were traced."""
    learner = next((track for track in tracks if len(track.updates()) >= 2), None)
    if learner is None:
        return None
    ends = learner.end[learner.updates()[-(updates + 1) :]]
    until = float(ends[0])
    group = parse_role(learner.host).group
    mine = [_Lane(track, until) for track in tracks if parse_role(track.host).group == group]
    first = next(lane for lane in mine if lane.host == learner.host)
    spent: dict[str, float] = {}
    lane, place, hops = first, bisect_right(first.end, float(ends[-1])) - 1, 0
    start = now = first.end[place]
    for _ in range(STEPS):
        if now <= until or place < 0:
            break
        key, begin = lane.name[place], lane.begin[place]
        whom = waits_for(key)
        released = _released(mine, lane, whom, begin, now) if whom else None
        if released is None:
            spent[key] = spent.get(key, 0.0) + now - max(begin, until)
            now, place = begin, place - 1
            if place >= 0 and lane.end[place] < now:  # what the ring has no event of
                gap = now - max(lane.end[place], until)
                spent["untraced"] = spent.get("untraced", 0.0) + max(gap, 0.0)
                now = lane.end[place]
        else:
            other, at = released
            spent["handover"] = spent.get("handover", 0.0) + now - max(other.end[at], until)
            lane, place, now, hops = other, at, other.end[at], hops + 1
    seconds = start - max(now, until)
    made = int((ends[1:] > now).sum())
    return Chain(seconds, made, spent, hops) if seconds > 0 else None


class _Lane:
    """A track from some moment on, in the form that it is followed in."""

    def __init__(self, track: Track, since: float) -> None:
        part = slice(int(np.searchsorted(track.end, since, side="right")), None)
        key = track.key[part]
        self.host = track.host
        self.kind = parse_role(track.host).kind
        self.begin: list[float] = track.begin[part].tolist()
        self.end: list[float] = track.end[part].tolist()
        self.name = [track.keys[k] for k in key.tolist()]
        works = np.array([not waits_for(name) for name in track.keys], np.bool_)
        self.work: list[int] = np.flatnonzero(works[key]).tolist()
        self.work_end = [self.end[i] for i in self.work]

    def last_work(self, now: float) -> int | None:
        """The last piece of work that ended by then."""
        at = bisect_right(self.work_end, now) - 1
        return self.work[at] if at >= 0 else None


def _released(
    lanes: Sequence[_Lane], waiter: _Lane, whom: str, begin: float, now: float
) -> tuple[_Lane, int] | None:
    """Whose work ended the wait from `begin` to `now`: of those waited for, the one that ended
    its work last; None where none did meanwhile."""
    found: tuple[_Lane, int] | None = None
    for lane in lanes:
        if lane is waiter or lane.kind != whom:
            continue
        at = lane.last_work(now)
        if at is None or lane.end[at] <= begin:
            continue
        if found is None or lane.end[at] > found[0].end[found[1]]:
            found = lane, at
    return found
