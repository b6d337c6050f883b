"""What every host did, and when: a ring of its newest events in a file, and how it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tianji.errors import Refusal
from tianji.folder import find_run
from tianji.role_names import KINDS, UPDATING, in_picture, parse_role, role_kind, waits_for
from tianji.types import Array

TRACE = "trace"
"""folder of a run's rings, a file for each host"""

ROOM = 2**16
"""events that a ring holds: the newest"""

EVERY = 0.25
"""seconds between two writes, where nobody else says when"""

EVENT = np.dtype([("end", "<f8"), ("key", "<i2")])
"""One event: it begins where the one before it ends."""

FORMAT = "tianji trace 1"
HEADER = 4096
"""bytes before the events: one page, which a killed process has written or has not"""

FIXED = 512
"""bytes of the header that are not names of keys, at most"""

GAP = -1
"""key of an event of which nothing is known"""

OTHER = "run/other"

NUMBERS = {"inference": "1", "simulation": "2", "update": "3", "priorities": "4"}
"""by which the paper calls them"""


@dataclass(frozen=True)
class Track:
    """What one host did: events in order, each in seconds since the run's first step. They follow
    each other without a break, but for the time between two lives of the host."""

    host: str
    keys: tuple[str, ...]
    """ "role/kind of work" or "role/wait_whom" """
    key: Array
    """int16 [n]: which of `keys`"""
    begin: Array
    """float64 [n]"""
    end: Array
    """float64 [n]"""

    def seconds(self) -> dict[str, float]:
        """Time spent, by key."""
        spent = np.bincount(self.key, self.end - self.begin, len(self.keys))
        return {key: float(s) for key, s in zip(self.keys, spent, strict=True) if s > 0}

    def updates(self) -> Array:
        """Which of its events are updates."""
        parts = [key.partition("/") for key in self.keys]
        made = [role_kind(role).activity(work).phase == UPDATING for role, _, work in parts]
        return np.flatnonzero(np.array(made, np.bool_)[self.key])


def kind_of(key: str) -> str:
    """What the paper's Figure 1 would call an event, or "wait", or "other"."""
    role, _, kind = key.partition("/")
    return "wait" if waits_for(kind) else in_picture(role, kind)


class Ring:
    """The file of one host, written a piece at a time. What was written outlives the process,
    however that ends, and a host that is restarted goes on with it."""

    def __init__(self, path: Path, room: int = ROOM, fd: int | None = None) -> None:
        """`fd`: the file, where somebody else has opened it."""
        self.path = path
        self._room = room
        self._fd = fd
        self._begun = False
        self._written = 0
        """events so far, those that were overwritten included"""
        self._first = self._last = -1.0
        """when the first event began and the newest ended, by the clock"""
        self._key = GAP
        """of the newest event"""
        self._keys: list[str] = []
        self._ids: dict[str, int] = {}

    def write(self, begin: float, keys: Sequence[str], ends: Sequence[float]) -> None:
        """Add events; `begin` is when the first of them began. Raises OSError where the disk does
        not take them: they are lost then, and what follows comes after a gap."""
        if not keys:
            return
        if not self._begun:
            self._begin()
        events = np.empty(len(keys) + 1, EVENT)
        events["key"][1:] = self._numbers(keys)
        events["end"][1:] = np.fromiter(ends, np.float64, len(ends))
        # Either a gap ends where the first one begins, or the newest event is written again: it
        # may go on, as events of one key that follow each other are one.
        goes_on = begin == self._last
        events[0] = begin, self._key if goes_on else GAP
        events = events[np.append(events["key"][1:] != events["key"][:-1], True)]
        written = self._written - goes_on + len(events)
        self._last = -1.0
        self._put(events[-self._room :], written, begin)
        self._written, self._key = written, int(events["key"][-1])
        self._last = float(events["end"][-1])

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _begin(self) -> None:
        if self._fd is None:
            self.path.parent.mkdir(exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._begun = True
        found = _header(os.pread(self._fd, HEADER, 0))
        if found is not None and found["room"] == self._room:
            self._written, self._first = found["written"], found["first"]
            self._keys = found["keys"]
            self._ids = {key: i for i, key in enumerate(self._keys)}

    def _numbers(self, keys: Sequence[str]) -> Array:
        try:
            return np.fromiter(map(self._ids.__getitem__, keys), np.int16, len(keys))
        except KeyError:
            self._name(dict.fromkeys(keys))
            return self._numbers(keys)

    def _name(self, names: Iterable[str]) -> None:
        """Number the keys that are new; those that the header has no room for are "other"."""
        for key in (OTHER, *names):
            if key in self._ids:
                continue
            if len(json.dumps([*self._keys, key])) > HEADER - FIXED:
                self._ids[key] = self._ids[OTHER]
            else:
                self._ids[key] = len(self._keys)
                self._keys.append(key)

    def _put(self, events: Array, written: int, begin: float) -> None:
        """The newest events, and only then how many there are now."""
        assert self._fd is not None
        at = (written - len(events)) % self._room
        fit = self._room - at
        _write_all(self._fd, events[:fit].tobytes(), HEADER + at * EVENT.itemsize)
        _write_all(self._fd, events[fit:].tobytes(), HEADER)
        if self._written == 0:
            self._first = begin
        about = {
            "format": FORMAT,
            "room": self._room,
            "written": written,
            "first": self._first,
            "last": float(events["end"][-1]),
            "keys": self._keys,
        }
        _write_all(self._fd, json.dumps(about).encode().ljust(HEADER - 1) + b"\n", 0)


def _write_all(fd: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(fd, rest, at)
        rest, at = rest[done:], at + done


def _header(data: bytes) -> dict[str, Any] | None:
    """What a file says of itself; None where it is no trace."""
    found = _object(data)
    whole = found.get("format") == FORMAT and all(
        isinstance(found.get(name), kind) for name, kind in SAID.items()
    )
    return found if whole and found["room"] > 0 and found["written"] >= 0 else None


SAID = {"room": int, "written": int, "first": int | float, "last": int | float, "keys": list}
"""by a header, and of which kinds"""


def _is_other(data: bytes) -> bool:
    """Is it of another format, and so perhaps whole?"""
    return bool(_object(data).get("format", FORMAT) != FORMAT)


def _object(data: bytes) -> dict[str, Any]:
    """Empty where there is none."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def path_of(run: Path, host: str) -> Path:
    """Where a host of a run keeps its ring."""
    return run / TRACE / f"{host}.trace"


def clear(run: Path) -> None:
    """Begin a new trace: clocks of another process, or another day, say nothing beside these."""
    for path in (run / TRACE).glob("*.trace"):
        os.truncate(path, 0)  # hosts may have it open by now


def read(run: Path) -> list[Track]:
    """The tracks of a run's hosts, as far as their rings reach back; also while it goes on."""
    tracks, broken = salvage(run)
    for why in broken.values():
        raise Refusal(why)
    return tracks


def salvage(run: Path) -> tuple[list[Track], dict[str, str]]:
    """The tracks that can be read, and for each host whose file cannot, what is wrong with it.
    Refused where there is none, and where the run's trace is of another version."""
    folder = find_run(run)
    found, broken = {}, {}
    for path in sorted((folder / TRACE).glob("*.trace")):
        try:
            data = path.read_bytes()
            if data[:HEADER].strip(b"\0"):  # else it was killed while it wrote the first events
                ring = _events(path, data)
                if len(ring[-1]):
                    found[path.stem] = ring
        except FileNotFoundError:  # a new trace is begun meanwhile
            continue
        except OSError as error:
            broken[path.stem] = (
                f"{path} cannot be read ({error.strerror}), so nothing of it can be drawn. Make it "
                f"readable, or delete it."
            )
        except _Broken as error:
            broken[path.stem] = str(error)
    if not found:
        if broken:
            raise Refusal(" ".join(broken.values()))
        raise Refusal(
            f"there is no trace in {folder}, so that there is nothing to draw. A run keeps one "
            f"from its first quarter of a second on; one of tianji 0.4 or older does not: train "
            f"it again."
        )
    zero = min(first for first, *_ in found.values())
    tracks = []
    for host in sorted(found, key=_place):
        _, keys, begin, events = found[host]
        used, key = np.unique(events["key"], return_inverse=True)
        names = tuple(keys[i] for i in used)
        tracks.append(Track(host, names, key.astype(np.int16), begin - zero, events["end"] - zero))
    return tracks, broken


class _Broken(Exception):
    """One host's file cannot be read; the others may."""


REMEDY = "Restore it from a copy, or delete it."


def _events(path: Path, data: bytes) -> tuple[float, list[str], Array, Array]:
    """When the first one began, the names of keys, when each one that is left began, and these."""
    header = _checked(path, data[:HEADER])
    whole = data[HEADER : len(data) - (len(data) - HEADER) % EVENT.itemsize]
    stored, written, room = np.frombuffer(whole, EVENT), header["written"], header["room"]
    count = min(written, room)
    if len(stored) < count:
        raise _Broken(
            f"{path} is cut short: {len(stored)} of its {count} events are there, so nothing of it "
            f"can be drawn. {REMEDY}"
        )
    events = stored[np.arange(written - count, written) % room]
    if not count:
        return header["first"], header["keys"], events["end"], events
    # Killed before it could write the header, it has written over the oldest ones, and the newest
    # may go on for longer.
    events["end"][-1] = min(events["end"][-1], header["last"])
    (later,) = np.nonzero(events["end"] > header["last"])
    events = events[later[-1] + 1 if len(later) else 0 :]
    ends, keys = events["end"], events["key"]
    in_order = np.isfinite(ends).all() and (ends[1:] >= ends[:-1]).all()
    if not in_order or not ((keys >= GAP) & (keys < len(header["keys"]))).all():
        raise _Broken(
            f"{path} is damaged: its events are not in order, so nothing of it can be drawn. "
            f"{REMEDY}"
        )
    begin, events = events["end"][:-1], events[1:]
    known = events["key"] != GAP
    return header["first"], header["keys"], begin[known], events[known]


def _checked(path: Path, data: bytes) -> dict[str, Any]:
    """What a file says of itself."""
    header = _header(data)
    if header is None:
        if _is_other(data):
            raise Refusal(
                f"{path} is no trace, or one of another version of tianji, so it cannot be drawn. "
                f"Delete it, or use the version that wrote it."
            )
        raise _Broken(
            f"{path} is damaged: its first {HEADER} bytes do not say what it holds, so nothing of "
            f"it can be drawn. {REMEDY}"
        )
    return header


def _place(host: str) -> tuple[int, int, int]:
    """By group, then as data flow, then by number."""
    name = parse_role(host)
    group = -1 if name.group is None else name.group
    return group, list(KINDS).index(name.kind) if name.kind in KINDS else 0, name.index
