"""One page about a run, as HTML; it holds all that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np

from tianji.explain import FLOWS, MOST_FAULTS, Explained
from tianji.trace import Track
from tianji.view import charts, timeline, words
from tianji.view.charts import Axis, Series
from tianji.view.status import human

STYLE = (
    charts.STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 3rem}
h1{font-size:1.5rem;margin:.5rem 0 0;overflow-wrap:anywhere}
main>section>h2{font-size:1.15rem;margin:2rem 0 .6rem;padding-top:.8rem;
border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.1rem 0 .35rem}
p{margin:.4rem 0;max-width:75ch}
.soft{color:var(--soft)}
.pill{display:inline-block;padding:.05rem .6rem;border-radius:1rem;border:1px solid currentColor;
font-size:.85rem;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:.6rem;
margin:1rem 0;padding:0}
.tiles div{background:var(--card);border-radius:8px;padding:.55rem .8rem}
.tiles dt{font-size:.8rem;color:var(--soft)}
.tiles dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:1rem 2rem}
figure{margin:0;min-width:0}
figcaption{font-size:.9rem;font-weight:600;margin-bottom:.2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{font-weight:600;color:var(--soft)}
td.n,th.n{text-align:right}
dl.facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15rem 1rem;margin:0;
font-size:.92rem}
dl.facts dt{color:var(--soft)}
dl.facts dd{margin:0;overflow-wrap:anywhere}
ol.advice{max-width:75ch;padding-left:1.3rem}
ol.advice li{margin:.4rem 0}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
"""
)


def html(run: Explained) -> str:
    """The page, self-contained."""
    name = run.run.resolve().name
    sections = "".join(
        f"<section><h2>{escape(title)}</h2>{inside}</section>"
        for title, inside in (
            ("What to change next", _advice(run)),
            ("Plan against reality", _plan(run)),
            ("Where the time went", _time(run)),
            ("Critical path", _critical(run)),
            ("Throughput", _throughput(run)),
            ("Return", _return(run)),
            ("Staleness", _staleness(run)),
            ("Faults and restarts", _faults(run)),
            ("Actors that were active", _changes(run)),
            ("Timeline", _timeline(run)),
            ("What ran", _about(run)),
        )
        if inside
    )
    style, script = (timeline.STYLE, timeline.SCRIPT) if run.tracks else ("", "")
    return page(f"{name}: how the run went", _head(run, name) + sections, style, script)


def page(title: str, inside: str, style: str = "", script: str = "") -> str:
    """A whole HTML page around what is inside of it."""
    scripted = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><main>{inside}</main>{scripted}</body></html>\n"
    )


def _head(run: Explained, name: str) -> str:
    mood = "good" if run.status == "done" else "bad" if run.status in BAD else "soft"
    tiles = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in words.facts(run)
    )
    verdict = f"<p><strong>{escape(run.verdict)}</strong></p>" if run.verdict else ""
    title = " · ".join(run.about[k] for k in ("algorithm", "environment", "preset", "engine")
                       if k in run.about)  # fmt: skip
    return (
        f'<header><h1>{escape(name)}</h1><p class="soft">{escape(title)}</p>'
        f'<p><span class="pill {mood}">{escape(run.status)}</span> {escape(run.ending)}</p>'
        f'{verdict}<dl class="tiles">{tiles}</dl></header>'
    )


BAD = ("failed", "killed")


def _advice(run: Explained) -> str:
    if not run.advice:
        why = "Nothing follows from what is known of this run."
        if not run.time:
            why = f"Nothing can be said: {run.missing.get('time', '')}"
        return f"<p>{escape(why)}</p>"
    items = "".join(f"<li>{escape(text)}</li>" for text in run.advice)
    return f'<ol class="advice">{items}</ol>'


def _plan(run: Explained) -> str:
    if run.planned is None:
        return _gap(run, "plan")
    rows = words.compared_rows(run.planned)
    told = " ".join(run.planned.deviation)
    return (
        f"<p>{escape(words.planned(run.planned))}</p>{table(words.COMPARED, rows)}"
        f"{told and f'<p>{escape(told)}</p>'}"
    )


def _time(run: Explained) -> str:
    parts = [_gap(run, "time")]
    for host, shares in run.time.items():
        entries = words.bar(host, shares)
        told = ", ".join(f"{name} {figure}" for _, _, name, figure in entries)
        seconds = f" <span class='soft'>of {run.time_seconds:.1f} s</span>"
        parts.append(
            f"<h3>{escape(words.host_words(host))}{seconds}</h3>"
            + charts.share(
                [(color, part, f"{name} {figure}") for color, part, name, figure in entries],
                f"{host}: {told}",
            )
            + charts.key([(color, name, figure) for color, _, name, figure in entries])
        )
    return "".join(parts)


def _critical(run: Explained) -> str:
    if run.cycle is None:
        return _gap(run, "critical path")
    rows = [
        (
            phase,
            words.milliseconds(seconds),
            f"{seconds / run.cycle.seconds:.1%}".replace("%", " %"),
        )
        for phase, seconds in sorted(run.cycle.phases.items(), key=lambda item: -item[1])
    ]
    parts = [f"<p>{escape(text)}</p>" for text in words.critical(run)]
    parts.append(table(("in one update's cycle", "time", "of the cycle"), rows))
    if run.chain is not None:
        updates = max(run.chain.updates, 1)
        rows = [(words.kind_words(key), words.milliseconds(seconds / updates), percent)
                for key, seconds, percent in words.links(run)]  # fmt: skip
        parts.append(f"<h3>Longest chain</h3><p>{escape(words.chain(run))}</p>")
        parts.append(table(("on the chain", "for each update", "of it"), rows))
    return "".join(parts)


def _throughput(run: Explained) -> str:
    series = [
        Series(name, points, color, width, dashes)
        for name, color, width, dashes in zip(
            FLOWS, ("c2", "c1", "c3"), (5.0, 2.5, 1.5), ("", "", "5 4"), strict=True
        )
        if (points := run.history.flow(f"flow/{name}_sps"))
    ]
    if not series:
        return _gap(run, "throughput") or "<p>No row of metrics was written.</p>"
    chart = charts.lines(
        series, Axis("seconds", zero=True), Axis("steps/s", zero=True),
        "Steps per second that were produced, received and consumed, over the seconds of the run",
    )  # fmt: skip
    entries = [(one.color, one.name, f"{human(run.rates[one.name])}/s" if one.name in run.rates
                else "") for one in series]  # fmt: skip
    return f"<figure>{chart}{charts.key(entries)}</figure>{_thinned(run)}"


def _return(run: Explained) -> str:
    figures = []
    for over, label, what in (
        ("step", "steps received", "steps"), ("wall_s", "seconds", "seconds"),
    ):  # fmt: skip
        training = Series("in training, mean of the last 100 episodes",
                          run.history.series("rollout/ep_rew_mean", over), "c1")  # fmt: skip
        played = Series("evaluated, greedy", run.history.played(over), "c2")
        chart = charts.lines(
            [training] if training.points else [], Axis(label, zero=True), Axis("return"),
            f"Mean return over the {what} of the run", [played] if played.points else [],
        )  # fmt: skip
        if chart:
            shown = [one for one in (training, played) if one.points]
            key = charts.key([(one.color, one.name, "") for one in shown])
            figures.append(f"<figure><figcaption>over {what}</figcaption>{chart}{key}</figure>")
    if not figures:
        return "<p>No episode had ended when a row was written, so there is no return to show.</p>"
    return f'<div class="two">{"".join(figures)}</div>'


def _staleness(run: Explained) -> str:
    if run.histogram is None:
        return _gap(run, "staleness")
    bins = words.binned(run.histogram)
    total = sum(count for _, _, count in bins)
    shares = [(low, high, 100 * count / total) for low, high, count in bins]
    figures = [
        "<figure><figcaption>of what updates consumed</figcaption>"
        + charts.bars(
            shares, Axis("staleness, in updates", whole=True), Axis("%"),
            f"How often what staleness was consumed: {words.staleness(run)}",
        )
        + "</figure>"
    ]  # fmt: skip
    points = against(run)
    if points:
        figures.append(
            "<figure><figcaption>against return, a dot for each row, later ones darker"
            "</figcaption>"
            + charts.dots(
                points, Axis("mean staleness of a row, in updates"), Axis("return"),
                "Mean return against the mean staleness in the same second",
            )
            + "</figure>"
        )  # fmt: skip
    told = escape(words.sentence(words.staleness(run)))
    return f'<p>{told}</p><div class="two">{"".join(figures)}</div>'


def against(run: Explained) -> list[tuple[float, float]]:
    """(mean staleness, mean return) of every row that has both."""
    names = ("staleness/mean", "rollout/ep_rew_mean")
    return [(row[names[0]], row[names[1]]) for row in run.history.rows
            if all(name in row for name in names)]  # fmt: skip


def _faults(run: Explained) -> str:
    parts = []
    if run.notes:
        told = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in run.notes.items())
        parts.append(f"<p>{escape(told)}</p>")
    if run.faults:
        rows = [words.fault_row(fault) for fault in run.faults[-MOST_FAULTS:]]
        more = len(run.faults) - len(rows)
        if more > 0:
            parts.append(f"<p>The last {len(rows)} of {len(run.faults)}:</p>")
        parts.append(table(("when", "who", "what", "what was done"), rows, figures=False))
    return "".join(parts) or "<p>None.</p>"


def _changes(run: Explained) -> str:
    if not run.changes:
        return ""
    return table(words.CHANGED, [words.change_row(change) for change in run.changes])


def _timeline(run: Explained) -> str:
    if not run.tracks:
        return _gap(run, "timeline")
    shown = newest(run.tracks)
    begin = min((float(track.begin[0]) for track in shown), default=0.0)
    end = max((float(track.end[-1]) for track in shown), default=0.0)
    drawn = timeline.fragment(shown, f"the last {end - begin:.3g} s of the trace", "timeline")
    return _gap(run, "timeline") + drawn


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


def _about(run: Explained) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.about.items()
    )
    return f'{_gap(run, "what ran")}<dl class="facts">{rows}</dl>'


def _thinned(run: Explained) -> str:
    every = run.history.every
    return f'<p class="soft">Every {every}th row is shown.</p>' if every > 1 else ""


def _gap(run: Explained, section: str) -> str:
    """What a section has not, and why."""
    why = run.missing.get(section)
    return f'<p class="soft">{escape(words.sentence(why))}</p>' if why else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = True) -> str:
    """The first column is a name, the others are figures."""

    def cells(tag: str, row: Sequence[str]) -> str:
        figure = ' class="n"' if figures else ""
        return "".join(
            f"<{tag}{figure if i else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
