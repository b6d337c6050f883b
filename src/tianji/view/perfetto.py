"""A trace in the Chrome trace event format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tianji.role_names import waits_for
from tianji.trace import Track, kind_of
from tianji.types import Array
from tianji.view.timeline import LEGEND

RUN = 1
"""process that stands for the run itself; hosts follow"""


def write(tracks: Sequence[Track], title: str, path: Path) -> None:
    """Write a file; one whose name ends with .gz is compressed, which Perfetto reads too."""
    with gzip.open(path, "wt", 5) if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps({"title": title}))
        file.write(',"traceEvents":[\n')
        for i, event in enumerate(events(tracks)):
            file.write(f",\n{event}" if i else event)
        file.write("\n]}\n")


def events(tracks: Sequence[Track]) -> Iterator[str]:
    """Each event as JSON: a process for each host, a thread for each of its roles."""
    for at, track in enumerate(tracks, RUN + 1):
        yield from _names(at, track)
        yield from _slices(at, track)
    if len(tracks) > 1:
        yield _meta("process_name", RUN, 0, {"name": "run"})
        for time, count in zip(*_at_work(tracks), strict=True):
            yield (
                f'{{"ph":"C","name":"hosts at work","pid":{RUN},"tid":0,"ts":{time / 1000:.3f},'
                f'"args":{{"hosts":{count}}}}}'
            )


def _names(process: int, track: Track) -> Iterator[str]:
    yield _meta("process_name", process, 0, {"name": track.host})
    yield _meta("process_sort_index", process, 0, {"sort_index": process})
    for i, role in enumerate(roles(track)):
        yield _meta("thread_name", process, i + 1, {"name": role})
        yield _meta("thread_sort_index", process, i + 1, {"sort_index": i + 1})


def _slices(process: int, track: Track) -> Iterator[str]:
    threads = roles(track)
    heads = []
    for key in track.keys:
        role, _, kind = key.partition("/")
        name = f"waits for {whom}" if (whom := waits_for(kind)) else kind
        words = f'"name":{json.dumps(name)},"cat":{json.dumps(LEGEND[kind_of(key)])}'
        thread = threads.index("run" if role == "driver" else role) + 1
        heads.append(f'{{"ph":"X",{words},"pid":{process},"tid":{thread},"ts":')
    begins, ends = _nanoseconds(track.begin), _nanoseconds(track.end)
    columns = track.key.tolist(), begins.tolist(), (ends - begins).tolist()
    for key, begin, length in zip(*columns, strict=True):
        yield f'{heads[key]}{begin / 1000:.3f},"dur":{length / 1000:.3f}}}'


def roles(track: Track) -> list[str]:
    """The roles of a host; what is none of theirs is the run's."""
    named = (key.partition("/")[0] for key in track.keys)
    found = dict.fromkeys("run" if role == "driver" else role for role in named)
    return sorted(found, key=lambda role: (role == "run", role))


def _at_work(tracks: Sequence[Track]) -> tuple[list[int], list[int]]:
    """How many hosts do not wait, and since when: nanoseconds, counts."""
    times, steps = [], []
    for track in tracks:
        waits = np.array([kind_of(key) == "wait" for key in track.keys])[track.key]
        begin, end = track.begin[~waits], track.end[~waits]
        times += [begin, end]
        steps += [np.ones(len(begin), np.int64), -np.ones(len(end), np.int64)]
    time, step = _nanoseconds(np.concatenate(times)), np.concatenate(steps)
    order = np.argsort(time, kind="stable")
    time, count = time[order], np.cumsum(step[order])
    last = np.append(time[1:] != time[:-1], True)  # of those at one moment
    time, count = time[last], count[last]
    changes = np.append(True, count[1:] != count[:-1])
    return time[changes].tolist(), count[changes].tolist()


def _nanoseconds(seconds: Array) -> Array:
    return np.rint(seconds * 1e9).astype(np.int64)


def _meta(name: str, process: int, thread: int, about: Mapping[str, Any]) -> str:
    event = {"ph": "M", "name": name, "pid": process, "tid": thread, "args": about}
    return json.dumps(event, separators=(",", ":"))
