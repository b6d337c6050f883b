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
from tianji.view.report import newest, page, table
from tianji.view.words import bar

DASHES = ("", "6 4", "2 3")
"""of the lines beyond the first so many colours"""


def html(comparison: Comparison) -> str:
    """The page, self-contained."""
    name = comparison.folder.resolve().name
    head, *rows = comparison.rows()
    sections = "".join(
        f"<section><h2>{escape(title)}</h2>{inside}</section>"
        for title, inside in (
            ("Side by side", table(head, rows) + _notes(comparison)),
            ("Return", _curves(comparison)),
            ("Timelines", _timelines(comparison)),
            ("Where the time went", _time(comparison)),
        )
        if inside
    )
    target = f", to {comparison.target}" if comparison.target else ""
    header = (
        f'<header><h1>{escape(name)}</h1><p class="soft">{escape(comparison.task)}, '
        f"{escape(comparison.name)}{escape(target)}</p></header>"
    )
    return page(f"{name}: presets side by side", header + sections, timeline.STYLE, timeline.SCRIPT)


def _notes(comparison: Comparison) -> str:
    told = []
    if comparison.seeds > 1:
        told.append(f"Medians over the runs of {comparison.seeds} seeds.")
    if comparison.stopped:
        told.append(f"It was given up before all had run ({comparison.stopped}).")
    told += comparison.told_left_out()
    told += [
        f"{entry.preset}, seed {entry.seed}, {entry.status}: {entry.reason}"
        for entry in comparison.entries
        if entry.status != "done"
    ]
    told.append(
        "Staleness is in updates; freshness is the share of a batch that was never consumed "
        "before; idle is the share of its time that a role does not work; seconds count from a "
        "run's first step."
    )
    return "".join(f'<p class="soft">{escape(text)}</p>' for text in told)


def _curves(comparison: Comparison) -> str:
    histories = [(entry, History.read(Path(entry.run_dir))) for entry in comparison.entries]
    figures = []
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
            figures.append(f"<figure><figcaption>over {words}</figcaption>{chart}</figure>")
    if not figures:
        return "<p>No episode had ended when a row was written, so there is no return to show.</p>"
    ran = [preset for preset in comparison.presets if comparison.of(preset)]
    key = charts.key([(color(comparison, preset), preset, "") for preset in ran])
    return f'<div class="two">{"".join(figures)}</div>{key}'


def color(comparison: Comparison, preset: str) -> str:
    return f"c{comparison.presets.index(preset) % charts.COLORS + 1}"


def _dashes(comparison: Comparison, preset: str) -> str:
    """Presets of one colour differ by these."""
    return DASHES[comparison.presets.index(preset) // charts.COLORS % len(DASHES)]


def _timelines(comparison: Comparison) -> str:
    """Of the first run of each preset, one above the other; they are zoomed together."""
    runs, notes = {}, ""
    for preset in comparison.presets:
        entry = first(comparison, preset)
        if entry is None:
            continue
        try:
            tracks, broken = trace.salvage(Path(entry.run_dir))
        except Refusal as error:
            tracks, broken = [], {"": str(error)}
        if tracks:
            runs[preset] = newest(tracks)
        notes += "".join(
            f'<p class="soft">{escape(preset)}: {escape(why)}</p>' for why in broken.values()
        )
    if not runs:
        return notes
    return timeline.stack(runs, "The newest events of each run", "timelines") + notes


def _time(comparison: Comparison) -> str:
    """Actors and learner of each preset, of its first run that has an account."""
    parts = []
    for preset in comparison.presets:
        entry = first(comparison, preset)
        if entry is None:
            continue
        parts.append(f"<h3>{escape(preset)}</h3>")
        if entry.verdict:
            parts.append(f'<p class="soft">{escape(entry.verdict)}</p>')
        for host, shares in entry.time.items():
            if role_kind(host).flow == "received" or role_kind(host).beside:
                continue
            entries = bar(host, shares)
            told = ", ".join(f"{name} {figure}" for _, _, name, figure in entries)
            parts.append(
                f"<p>{escape(host)}</p>"
                + charts.share([(c, part, f"{name} {figure}") for c, part, name, figure in entries],
                               f"{preset}, {host}: {told}")
                + charts.key([(c, name, figure) for c, part, name, figure in entries
                              if part >= 0.005])
            )  # fmt: skip
    return "".join(parts)


def first(comparison: Comparison, preset: str) -> Entry | None:
    return next((entry for entry in comparison.of(preset) if entry.time), None)
