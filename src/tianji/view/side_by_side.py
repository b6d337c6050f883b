"""The page of a comparison: figures, curves and timelines of several presets."""

from __future__ import annotations

from html import escape
from pathlib import Path

from tianji import trace
from tianji.compare import Comparison, Entry
from tianji.errors import Refusal
from tianji.history import History
from tianji.role_names import role_kind
from tianji.view import charts, timeline
from tianji.view.charts import Axis, Series
from tianji.view.parts import Part, figures, shares, table, text
from tianji.view.report import page
from tianji.view.sections import NO_RETURN
from tianji.view.words import bar

DASHES = ("", "6 4", "2 3")
"""of the lines beyond the first so many colours"""


def html(comparison: Comparison) -> str:
    """The page, self-contained."""
    name = comparison.folder.resolve().name
    head, *rows = comparison.rows()
    target = f", to {comparison.target}" if comparison.target else ""
    about = f"{comparison.task}, {comparison.name}{target}"
    return page(
        f"{name}: presets side by side",
        f'<h1>{escape(name)}</h1><p class="soft">{escape(about)}</p>',
        (
            ("Side by side", [table(head, rows), *_notes(comparison)]),
            ("Return", _curves(comparison)),
            ("Timelines", _timelines(comparison)),
            ("Where the time went", _time(comparison)),
        ),
        timeline.STYLE,
        timeline.SCRIPT,
    )


def _notes(comparison: Comparison) -> list[Part]:
    told = []
    if comparison.seeds > 1:
        told.append(f"Medians over the runs of {comparison.seeds} seeds.")
    if comparison.stopped:
        told.append(f"It was given up before all had run ({comparison.stopped}).")
    told += comparison.told_undone()
    told.append(
        "Staleness is in updates; freshness is the share of a batch that was never consumed "
        "before; idle is the share of its time that a role does not work; seconds count from a "
        "run's first step."
    )
    return [text(*told, soft=True)]


def _curves(comparison: Comparison) -> list[Part]:
    histories = [(entry, History.read(Path(entry.run_dir))) for entry in comparison.entries]
    drawn = []
    for over, words in (("wall_s", "seconds"), ("step", "steps received")):
        series = [
            Series(
                f"{entry.preset}, seed {entry.seed}",
                [(x - entry.begin, y) for x, y in points] if over == "wall_s" else points,
                color(comparison, entry.preset),
                dashes=_dashes(comparison, entry.preset),
                opacity=1.0 if comparison.seeds == 1 else 0.65,
            )
            for entry, history in histories
            if (points := history.series("rollout/ep_rew_mean", over))
        ]
        if series:
            chart = charts.lines(
                series, Axis(words, zero=True), Axis("return"),
                f"Mean return of the last 100 episodes over {words}, a line for each run",
            )  # fmt: skip
            drawn.append((f"over {words}", chart))
    if not drawn:
        return [NO_RETURN]
    key = charts.key([(color(comparison, preset), preset, "") for preset in comparison.ran])
    return [figures(drawn), Part(key)]


def color(comparison: Comparison, preset: str) -> str:
    return f"c{comparison.presets.index(preset) % charts.COLORS + 1}"


def _dashes(comparison: Comparison, preset: str) -> str:
    """Presets of one colour differ by these."""
    return DASHES[comparison.presets.index(preset) // charts.COLORS % len(DASHES)]


def _timelines(comparison: Comparison) -> list[Part]:
    """Of the first run of each preset, one above the other; they are zoomed together."""
    runs, notes = {}, []
    for preset in comparison.presets:
        entry = first(comparison, preset)
        if entry is None:
            continue
        try:
            tracks, broken = trace.salvage(Path(entry.run_dir))
        except Refusal as error:
            tracks, broken = [], {"": str(error)}
        if tracks:
            runs[preset] = timeline.newest(tracks)
        notes += [text(f"{preset}: {why}", soft=True) for why in broken.values()]
    if not runs:
        return notes
    return [Part(timeline.stack(runs, "The newest events of each run", "timelines")), *notes]


def _time(comparison: Comparison) -> list[Part]:
    """Actors and learner of each preset, of its first run that has an account."""
    parts = []
    for preset in comparison.presets:
        entry = first(comparison, preset)
        if entry is None:
            continue
        parts.append(Part(f"<h3>{escape(preset)}</h3>"))
        if entry.verdict:
            parts.append(text(entry.verdict, soft=True))
        for host, spent in entry.time.items():
            if role_kind(host).flow != "received" and not role_kind(host).beside:
                parts += [text(host), shares(f"{preset}, {host}", bar(host, spent), least=0.005)]
    return parts


def first(comparison: Comparison, preset: str) -> Entry | None:
    return next((entry for entry in comparison.of(preset) if entry.time), None)
