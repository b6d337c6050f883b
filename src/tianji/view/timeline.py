"""The timeline of a run as a page: the paper's Figure 1, to zoom into. It needs no network."""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tianji.role_names import KINDS
from tianji.trace import NUMBERS, Track, kind_of

UNIT = 1e-7
"""seconds of one unit of the durations in a page"""
LONGEST = 2**32 - 1
"""units of one stored duration; what takes longer is several"""
GAP = 255
"""key of a time of which nothing is known"""
SHOWN = 4
"""updates that a page shows first"""

LEGEND = {
    "inference": "1 inference",
    "simulation": "2 simulation",
    "update": "3 update",
    "priorities": "4 priorities",
    "push": "push",
    "probe": "probe",
    "wait": "wait",
    "evaluation": "evaluation",
    "other": "other",
}
"""what is drawn in a colour of its own, and how it is called"""


def page(tracks: Sequence[Track], title: str) -> str:
    """A whole page with one timeline."""
    return document(title, fragment(tracks, title, "timeline"), f"{BODY}{STYLE}", SCRIPT)


def document(title: str, inside: str, style: str, script: str = "") -> str:
    """A whole HTML page, which reaches for nothing outside of it."""
    scripted = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body>{inside}{scripted}</body></html>\n"
    )


def fragment(tracks: Sequence[Track], title: str, id: str) -> str:
    """One timeline, for a page that has STYLE and SCRIPT once. Those of a page show the same
    stretch of time, each from where it begins to show."""
    return _section([_part(tracks, title, id)], title, id, "tj-timeline", KEYS)


def stack(runs: Mapping[str, Sequence[Track]], title: str, id: str) -> str:
    """The rows of several runs by their names, one directly above the other: with one legend, one
    axis of time, and one table of shares below them all."""
    parts = [
        _part(tracks, name, f"{id}-{name}", f"<h3>{html.escape(name)}</h3>\n")
        for name, tracks in runs.items()
    ]
    return _section(parts, title, id, "tj-timeline tj-stack", f"{KEYS} {ZERO}")


def _section(parts: Sequence[str], title: str, id: str, kind: str, keys: str) -> str:
    name, own = html.escape(title), html.escape(id)
    legend = "".join(
        f'<li><i style="background:var(--tj-{kind})"></i>{label}</li>'
        for kind, label in LEGEND.items()
    )
    return (
        f'<section class="{kind}" id="{own}" aria-labelledby="{own}-title">\n'
        f'<header><h2 id="{own}-title">{name}</h2>\n{TOOLS}</header>\n'
        f'<ul class="tj-legend">{legend}</ul>\n{"".join(parts)}'
        f'<p class="tj-keys">{keys}</p>\n'
        '<p class="tj-said" aria-live="polite"></p>\n'
        '<div class="tj-scroll"><table class="tj-shares"></table></div>\n'
        "<noscript>The timeline is drawn by a script, which this browser does not run.</noscript>\n"
        "</section>"
    )


def _part(tracks: Sequence[Track], title: str, id: str, heading: str = "") -> str:
    """The rows of one run."""
    return (
        f'<div class="tj-part" id="{html.escape(id)}-rows">{heading}'
        f'<div class="tj-stage"><canvas tabindex="0" role="application" '
        f'aria-label="timeline of {html.escape(title)}" aria-description="{KEYS}"></canvas>'
        '<div class="tj-tip" hidden></div></div>\n'
        f'<script type="application/json" class="tj-data">{_json(_content(tracks))}</script>\n'
        "</div>\n"
    )


def home(tracks: Sequence[Track]) -> tuple[float, float]:
    """What is shown first: a few updates from the middle of the time that all tracks know of, as
    ends of runs are not like the rest of them; without updates, a tenth of that time."""
    full = [track for track in tracks if len(track.key)]
    if not full:
        return 0.0, 1.0
    begin, end = max(t.begin[0] for t in full), min(t.end[-1] for t in full)
    if begin >= end:  # one of them was killed long before the others ended
        begin, end = min(t.begin[0] for t in full), max(t.end[-1] for t in full)
    middle = (begin + end) / 2
    for track in full:
        ends = track.end[track.updates()]
        ends = ends[(ends >= begin) & (ends <= end)]
        if len(ends) >= 2:
            first = int(np.searchsorted(ends, middle)) - SHOWN // 2
            first = max(0, min(first, len(ends) - 1 - SHOWN))
            last = min(first + SHOWN, len(ends) - 1)
            margin = 0.02 * (ends[last] - ends[first])
            return float(ends[first] - margin), float(ends[last] + margin)
    tenth = (end - begin) / 20
    return float(middle - tenth), float(middle + tenth)


EVENTS = 4096
"""of a host that a page shows, at most: a few cycles; `tianji trace` has all"""


def newest(tracks: Sequence[Track], most: int = EVENTS) -> list[Track]:
    """The last stretch of time in which no host has more than so many events."""
    full = [track for track in tracks if len(track.key)]
    since = max((float(track.begin[-most:][0]) for track in full), default=0.0)
    cut = []
    for track in full:
        first = int(np.searchsorted(track.end, since, side="right"))
        if first < len(track.key):
            part = slice(first, None)
            cut.append(replace(track, key=track.key[part], begin=track.begin[part],
                               end=track.end[part]))  # fmt: skip
    return cut


def _content(tracks: Sequence[Track]) -> dict[str, Any]:
    return {
        "home": home(tracks),
        "unit": UNIT,
        "gap": GAP,
        "roles": [*KINDS, "run"],
        "kinds": list(LEGEND),
        "labels": list(LEGEND.values()),
        "numbers": [NUMBERS.get(kind, "") for kind in LEGEND],
        "tracks": [_packed(track) for track in tracks if len(track.key)],
    }


def _packed(track: Track) -> dict[str, Any]:
    """A track as few bytes: keys, then durations by the significance of their bytes, deflated."""
    first = float(track.begin[0])
    begin = np.rint((track.begin - first) / UNIT).astype(np.int64)
    end = np.rint((track.end - first) / UNIT).astype(np.int64)
    gaps = np.maximum(begin - np.append(0, end[:-1]), 0)
    duration = np.stack([gaps, end - begin], axis=1).ravel()
    key = np.stack([np.full(len(gaps), GAP), track.key], axis=1).ravel()
    kept = np.stack([gaps > 0, np.full(len(gaps), True)], axis=1).ravel()
    duration, key = duration[kept], key[kept]
    pieces = np.maximum(1, -(-duration // LONGEST))
    last = np.cumsum(pieces) - 1
    whole = np.full(int(pieces.sum()), LONGEST, np.int64)
    whole[last] = duration - (pieces - 1) * LONGEST
    keys = np.repeat(key, pieces).astype(np.uint8)
    planes = whole.astype("<u4").view(np.uint8).reshape(-1, 4).T
    data = zlib.compress(keys.tobytes() + planes.tobytes(), 6)
    return {
        "host": track.host,
        "keys": track.keys,
        "kind": [list(LEGEND).index(kind_of(key)) for key in track.keys],
        "begin": first,
        "n": len(keys),
        "data": base64.b64encode(data).decode(),
    }


def _json(content: Any) -> str:
    """JSON that cannot end the element it is in."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


TOOLS = (
    '<div class="tj-tools" role="group" aria-label="zoom">'
    '<button type="button" data-do="left" title="earlier (left arrow)">◀</button>'
    '<button type="button" data-do="right" title="later (right arrow)">▶</button>'
    '<button type="button" data-do="in" title="zoom in (+)">+</button>'
    '<button type="button" data-do="out" title="zoom out (-)">−</button>'
    '<button type="button" data-do="home" title="a few updates (double-click, 0)">updates</button>'
    '<button type="button" data-do="all" title="all there is (a)">all</button>'
    '<output class="tj-range"></output></div>'
)

KEYS = (
    "Drag over a stretch of time or turn the wheel to zoom, Shift and drag to move, double-click "
    "to go back. Keys: + and −, arrows, a for all, 0 to go back; Shift and an arrow go from one "
    "event to the next."
)

ZERO = "0 s is where what is shown first of each run begins."

BODY = (
    ":root{color-scheme:light dark}body{margin:16px;background:#fff}"
    "@media(prefers-color-scheme:dark){body{background:#14171b}}"
)
STYLE = _asset("timeline.css")
SCRIPT = _asset("timeline.js")
