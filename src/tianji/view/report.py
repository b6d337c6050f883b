"""One page about a run, as HTML and as Markdown; both hold all that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from tianji.critical import waits_for
from tianji.explain import FLOWS, MOST_FAULTS, Explained, Planned
from tianji.plan import Choice
from tianji.trace import Track
from tianji.view import charts, timeline
from tianji.view.charts import Axis, Series
from tianji.view.status import duration, human, number

MOST_BARS = 40
"""of a histogram"""

COLOR = {
    "infer": "c1",
    "simulate": "c2",
    "update": "c3",
    "prioritize": "c4",
    "take": "c6",
    "receive": "c7",
    "serve": "c5",
    "push": "c5",
    "publish": "c5",
    "ask": "c5",
    "mix": "c6",
    "grant": "c6",
    "load": "c7",
    "evaluate": "c4",
}
"""of kinds of work, as in the timeline; others have the last"""
WAITS = {"buffer": "w1", "learner": "w2", "actor": "w3"}

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
    tiles = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts(run))
    verdict = f"<p><strong>{escape(run.verdict)}</strong></p>" if run.verdict else ""
    title = " · ".join(run.about[k] for k in ("algorithm", "environment", "preset", "engine")
                       if k in run.about)  # fmt: skip
    return (
        f'<header><h1>{escape(name)}</h1><p class="soft">{escape(title)}</p>'
        f'<p><span class="pill {mood}">{escape(run.status)}</span> {escape(run.ending)}</p>'
        f'{verdict}<dl class="tiles">{tiles}</dl></header>'
    )


BAD = ("failed", "killed")


def facts(run: Explained) -> list[tuple[str, str]]:
    """The figures of a run that are worth a glance, those that are known."""
    counts, rates, staleness = run.counts, run.rates, run.staleness or {}
    found: list[tuple[str, str | None]] = [
        ("return, last 100 episodes", _told(counts.get("return"), number)),
        ("won", _told(counts.get("win_rate"), _percent)),
        ("steps", _told(counts.get("steps"), human)),
        ("updates", _told(counts.get("updates"), human)),
        ("episodes", _told(counts.get("episodes"), human)),
        ("time", _told(counts.get("seconds"), duration)),
        ("to the first step", _told(counts.get("start_seconds"), "{:.1f} s".format)),
        *((f"steps/s {name}", _told(rates.get(name), human)) for name in FLOWS),
        ("new steps/s by the plan", _foretold(run.planned)),
        ("staleness, mean", _told(staleness.get("mean"), "{:.2f}".format)),
        ("staleness, p95", _told(staleness.get("p95"), "{:.4g}".format)),
        ("staleness, max", _told(staleness.get("max"), "{:.0f}".format)),
        ("freshness", _told(run.freshness, _percent)),
    ]
    return [(name, text) for name, text in found if text is not None]


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
    return f"<p>{escape(_planned(run.planned))}</p>{table(COMPARED, _compared(run.planned))}"


COMPARED = ("steps/s", "predicted", "measured", "error")


def _planned(plan: Planned) -> str:
    binding = f" The plan expected the {plan.binding} to bind." if plan.binding else ""
    return f"Chosen: {_chosen(plan.choice)}.{binding}"


def _chosen(choice: Mapping[str, Any]) -> str:
    """In words; a plan that another version wrote may not have all that they take."""
    try:
        return f"{(found := Choice(**choice))}, rollouts of {found.rollout_length} steps"
    except TypeError:
        return ", ".join(f"{key} {value}" for key, value in choice.items()) or "not known"


def _compared(plan: Planned) -> list[tuple[str, ...]]:
    return [
        (rate.name, human(rate.predicted), _told(rate.measured, human) or "–", _error(rate.error))
        for rate in plan.rates
    ]


def _foretold(plan: Planned | None) -> str | None:
    """New steps per second, as predicted, and how far that is from what came."""
    for rate in plan.rates if plan is not None else ():
        if rate.name == "new":
            error = "" if rate.error is None else f" (error {_error(rate.error)})"
            return f"{human(rate.predicted)}{error}"
    return None


def _time(run: Explained) -> str:
    parts = [_gap(run, "time")]
    for host, shares in run.time.items():
        entries = bar(host, shares)
        told = ", ".join(f"{name} {figure}" for _, _, name, figure in entries)
        seconds = f" <span class='soft'>of {run.time_seconds:.1f} s</span>"
        parts.append(
            f"<h3>{escape(_host(host))}{seconds}</h3>"
            + charts.share(
                [(color, part, f"{name} {figure}") for color, part, name, figure in entries],
                f"{host}: {told}",
            )
            + charts.key([(color, name, figure) for color, _, name, figure in entries])
        )
    return "".join(parts)


def bar(host: str, shares: Mapping[str, float]) -> list[tuple[str, float, str, str]]:
    """(colour, share, name, percent) of what a host's time went into: work before waiting, larger
    ones first; the percents add up to 100."""
    order = sorted(shares.items(), key=lambda item: (bool(waits_for(item[0])), -item[1]))
    percents = charts.rounded([part for _, part in order])
    return [
        (_color(kind), part, _kind(kind), f"{percent:.1f} %")
        for (kind, part), percent in zip(order, percents, strict=True)
    ]


def _color(kind: str) -> str:
    if whom := waits_for(kind):
        return WAITS.get(whom, "w4")
    return COLOR.get(kind.rpartition("/")[2], "c8")


def _kind(kind: str) -> str:
    role, _, tail = kind.rpartition("/")
    whom = waits_for(kind)
    words = f"waits for {whom}" if whom else tail.replace("_", " ")
    return f"{role} {words}" if role else words


def _host(host: str) -> str:
    return {"serial": "one process", "actor": "actors, mean", "worker": "workers, mean"}.get(
        host, host
    )


def _critical(run: Explained) -> str:
    if run.cycle is None:
        return _gap(run, "critical path")
    rows = [
        (phase, milliseconds(seconds), f"{seconds / run.cycle.seconds:.1%}".replace("%", " %"))
        for phase, seconds in sorted(run.cycle.phases.items(), key=lambda item: -item[1])
    ]
    parts = [f"<p>{escape(text)}</p>" for text in critical_words(run)]
    parts.append(table(("in one update's cycle", "time", "of the cycle"), rows))
    if run.chain is not None:
        rows = [(_kind(key), milliseconds(seconds / max(run.chain.updates, 1)), percent)
                for key, seconds, percent in _links(run)]  # fmt: skip
        parts.append(f"<h3>Longest chain</h3><p>{escape(_chain_words(run))}</p>")
        parts.append(table(("on the chain", "for each update", "of it"), rows))
    return "".join(parts)


def critical_words(run: Explained) -> list[str]:
    """Who bounds an update, and whom the learner waited for."""
    cycle = run.cycle
    assert cycle is not None
    if len(cycle.parts.keys() - {"evaluator"}) == 1:
        host = next(iter(cycle.parts))
        most = max(cycle.phases.items(), key=lambda item: item[1], default=("nothing", 0.0))
        return [
            f"An update's cycle takes {milliseconds(cycle.seconds)}. {_host(host).capitalize()} "
            f"does all of it in turn, so every part is on the critical path; the longest is "
            f"{most[0]}, {milliseconds(most[1])}."
        ]
    busy = ", ".join(
        f"{host} {share:.0%}".replace("%", " %")
        for host, share in sorted(cycle.busy.items(), key=lambda item: -item[1])
    )
    texts = [
        f"An update's cycle takes {milliseconds(cycle.seconds)}. Busiest in it is the "
        f"{cycle.bound}: its work bounds the cycle. Busy, of the cycle: {busy}."
    ]
    waits = {
        waits_for(kind): seconds
        for kind, seconds in cycle.parts.get("learner", {}).items()
        if waits_for(kind)
    }
    if waits:
        told = ", ".join(f"{milliseconds(s)} for {whom}" for whom, s in waits.items())
        text = f"The learner waited {told}."
        if "buffer" in waits and "buffer" in cycle.parts:
            back = {
                waits_for(kind): seconds
                for kind, seconds in cycle.parts["buffer"].items()
                if waits_for(kind) in ("actor", "learner")
            }
            behind = " and ".join(f"{milliseconds(s)} for {whom}" for whom, s in back.items())
            if behind:
                text += f" The buffer only passes things on: it waited {behind} meanwhile."
        texts.append(text)
    return texts


LEAST = 0.005
"""share of a chain below which links are told together"""


def _links(run: Explained) -> list[tuple[str, float, str]]:
    assert run.chain is not None
    order = sorted(run.chain.spent.items(), key=lambda item: -item[1])
    shown = [link for link in order if link[1] >= LEAST * run.chain.seconds]
    rest = order[len(shown) :]
    if rest:
        shown.append((f"{len(rest)} more", sum(seconds for _, seconds in rest)))
    order = shown
    percents = charts.rounded([seconds / run.chain.seconds for _, seconds in order])
    return [(key, s, f"{p:.1f} %") for (key, s), p in zip(order, percents, strict=True)]


def _chain_words(run: Explained) -> str:
    chain = run.chain
    assert chain is not None
    return (
        f"Back from the last traced update, over {chain.updates} updates in "
        f"{chain.seconds:.3g} s: through the learner's work, and where it waited, through the work "
        f"of whoever ended the wait. "
        + (
            f"It went from host to host {chain.hops} times."
            if chain.hops
            else "It never left the learner's host."
        )
    )


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
    for over, label, words in (
        ("step", "steps received", "steps"), ("wall_s", "seconds", "seconds"),
    ):  # fmt: skip
        training = Series("in training, mean of the last 100 episodes",
                          run.history.series("rollout/ep_rew_mean", over), "c1")  # fmt: skip
        played = Series("evaluated, greedy", run.history.played(over), "c2")
        chart = charts.lines(
            [training] if training.points else [], Axis(label, zero=True), Axis("return"),
            f"Mean return over the {words} of the run", [played] if played.points else [],
        )  # fmt: skip
        if chart:
            shown = [one for one in (training, played) if one.points]
            key = charts.key([(one.color, one.name, "") for one in shown])
            figures.append(f"<figure><figcaption>over {words}</figcaption>{chart}{key}</figure>")
    if not figures:
        return "<p>No episode had ended when a row was written, so there is no return to show.</p>"
    return f'<div class="two">{"".join(figures)}</div>'


def _staleness(run: Explained) -> str:
    if run.histogram is None:
        return _gap(run, "staleness")
    bins = binned(run.histogram)
    total = sum(count for _, _, count in bins)
    shares = [(low, high, 100 * count / total) for low, high, count in bins]
    figures = [
        "<figure><figcaption>of what updates consumed</figcaption>"
        + charts.bars(
            shares, Axis("staleness, in updates", whole=True), Axis("%"),
            f"How often what staleness was consumed: {staleness_words(run)}",
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
    return (
        f'<p>{escape(_sentence(staleness_words(run)))}</p><div class="two">{"".join(figures)}</div>'
    )


def staleness_words(run: Explained) -> str:
    found = run.staleness
    if found is None:
        return "nothing was consumed."
    p95 = f", 95 % at most {found['p95']:.4g}" if "p95" in found else ""
    fresh = "" if run.freshness is None else f"; {_percent(run.freshness)} of a batch was new"
    return f"mean {found['mean']:.3g}{p95}, largest {found['max']:.0f} updates{fresh}."


def against(run: Explained) -> list[tuple[float, float]]:
    """(mean staleness, mean return) of every row that has both."""
    names = ("staleness/mean", "rollout/ep_rew_mean")
    return [(row[names[0]], row[names[1]]) for row in run.history.rows
            if all(name in row for name in names)]  # fmt: skip


def binned(histogram: Mapping[str, Sequence[float]]) -> list[tuple[float, float, float]]:
    """(from, to, count) in bars of equal width; what was counted in a wide bin is spread over the
    bars that it lies in."""
    rows = list(zip(histogram["low"], histogram["high"], histogram["count"], strict=True))
    begin, end = min(low for low, _, _ in rows), max(high for _, high, _ in rows) + 1
    width = max(1, math.ceil((end - begin) / MOST_BARS))
    counts = [0.0] * math.ceil((end - begin) / width)
    for low, high, count in rows:
        first, last = int((low - begin) // width), int((high - begin) // width)
        for i in range(first, last + 1):
            left, right = begin + i * width, begin + (i + 1) * width
            part = min(right, high + 1) - max(left, low)
            counts[i] += count * part / (high + 1 - low)
    return [(begin + i * width - (0.5 if width == 1 else 0),
             begin + (i + 1) * width - (0.5 if width == 1 else 0), count)
            for i, count in enumerate(counts)]  # fmt: skip


def _faults(run: Explained) -> str:
    parts = []
    if run.notes:
        told = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in run.notes.items())
        parts.append(f"<p>{escape(told)}</p>")
    if run.faults:
        rows = [_fault(fault) for fault in run.faults[-MOST_FAULTS:]]
        more = len(run.faults) - len(rows)
        if more > 0:
            parts.append(f"<p>The last {len(rows)} of {len(run.faults)}:</p>")
        parts.append(table(("when", "who", "what", "what was done"), rows, figures=False))
    return "".join(parts) or "<p>None.</p>"


def _changes(run: Explained) -> str:
    if not run.changes:
        return ""
    return table(CHANGED, [_change(change) for change in run.changes])


CHANGED = ("seconds", "from", "to", "why")


def _change(change: Mapping[str, object]) -> tuple[str, str, str, str]:
    group = f"{change['group']}: " if change.get("group") else ""
    told = [str(change.get(name, "")) for name in ("wall_s", "from", "to", "why")]
    return told[0], told[1], told[2], f"{group}{told[3]}"


def _fault(fault: Mapping[str, object]) -> tuple[str, str, str, str]:
    when, role, cause, action = (
        str(fault.get(name, "")) for name in ("time", "role", "cause", "action")
    )
    return when[:19].replace("T", " "), role, cause, action


def _timeline(run: Explained) -> str:
    if not run.tracks:
        return _gap(run, "timeline")
    shown = newest(run.tracks)
    begin = min((float(track.begin[0]) for track in shown), default=0.0)
    end = max((float(track.end[-1]) for track in shown), default=0.0)
    return timeline.fragment(shown, f"the last {end - begin:.3g} s of the trace", "timeline")


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
    return f'<p class="soft">{escape(_sentence(why))}</p>' if why else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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


def markdown(run: Explained) -> str:
    """The same as text, with tables and bars of characters."""
    name = run.run.resolve().name
    lines = [f"# {_plain(name)}", "", f"**{run.status}**: {_plain(run.ending)}", ""]
    if run.verdict:
        lines += [f"**{_plain(run.verdict)}**", ""]
    lines += _rows(("", ""), facts(run))
    for title, inside in (
        ("What to change next", _advice_lines(run)),
        ("Plan against reality", _plan_lines(run)),
        ("Where the time went", _time_lines(run)),
        ("Critical path", _critical_lines(run)),
        ("Throughput and return over time", _course_lines(run)),
        ("Staleness", _staleness_lines(run)),
        ("Faults and restarts", _fault_lines(run)),
        (
            "Actors that were active",
            run.changes and _rows(CHANGED, [_change(change) for change in run.changes]),
        ),
        ("Timeline", [_plain(_sentence(run.missing.get("timeline", "it is on the HTML page.")))]),
        ("What ran", _rows(("", ""), list(run.about.items()))),
    ):
        if inside:
            lines += ["", f"## {title}", "", *inside]
    return "\n".join(lines) + "\n"


def summary(run: Explained) -> list[str]:
    """A few lines for a terminal."""
    lines = [f"{run.status}: {run.ending}"]
    lines += [f"  {name:<26} {text}" for name, text in facts(run)]
    if run.verdict:
        lines.append(f"  {'bottleneck':<26} {run.verdict}")
    return lines + [f"next: {text}" for text in run.advice]


def _advice_lines(run: Explained) -> list[str]:
    return [f"{i}. {_plain(text)}" for i, text in enumerate(run.advice, 1)] or [
        "Nothing follows from what is known of this run."
    ]


def _plan_lines(run: Explained) -> list[str]:
    if run.planned is None:
        return [_plain(_sentence(run.missing["plan"]))]
    return [_plain(_planned(run.planned)), "", *_rows(COMPARED, _compared(run.planned))]


WIDE = 50
"""characters of a bar"""


def _time_lines(run: Explained) -> list[str]:
    lines = [_plain(_sentence(run.missing["time"])), ""] if "time" in run.missing else []
    for host, shares in run.time.items():
        drawn, end = "", 0.0
        entries = bar(host, shares)
        for i, (color, part, _, _) in enumerate(entries):
            end += part
            glyph = "·" if color.startswith("w") else "█▓▒"[i % 3]
            drawn += glyph * (round(WIDE * end) - len(drawn))
        lines += [f"{_host(host)}, of {run.time_seconds:.1f} s", "", f"    {drawn}", ""]
        lines += [*_rows(("", "share"), [(name, figure) for _, _, name, figure in entries]), ""]
    return lines[:-1] if lines and not lines[-1] else lines


def _critical_lines(run: Explained) -> list[str]:
    if run.cycle is None:
        return [_plain(_sentence(run.missing["critical path"]))]
    lines = [_plain(text) for text in critical_words(run)]
    rows = [(phase, milliseconds(s)) for phase, s in
            sorted(run.cycle.phases.items(), key=lambda item: -item[1])]  # fmt: skip
    lines += ["", *_rows(("in one update's cycle", "time"), rows)]
    if run.chain is not None:
        rows = [(_kind(key), percent) for key, _, percent in _links(run)]
        lines += ["", _plain(_chain_words(run)), "", *_rows(("on the chain", "of it"), rows)]
    return lines


def _course_lines(run: Explained) -> list[str]:
    """Some twelve rows of it."""
    rows = run.history.rows
    if not rows:
        return [_plain(_sentence(run.missing.get("throughput", "No row of metrics was written.")))]
    step = max(1, -(-len(rows) // 12))
    taken = rows[(len(rows) - 1) % step :: step]
    names = [f"flow/{name}_sps" for name in FLOWS]
    told = [
        (
            f"{row['wall_s']:.1f}",
            human(row["step"]),
            *(_told(row.get(name), human) or "–" for name in names),
            _told(row.get("rollout/ep_rew_mean"), number) or "–",
        )
        for row in taken
    ]
    return _rows(("seconds", "steps", *(f"{n}/s" for n in FLOWS), "return"), told)


def _staleness_lines(run: Explained) -> list[str]:
    if run.histogram is None:
        return [_plain(_sentence(run.missing["staleness"]))]
    bins = binned(run.histogram)
    total = sum(count for _, _, count in bins)
    merged = _merged(bins, 12)
    shares = charts.rounded([count / total for _, _, count in merged])
    rows = [
        (_between(low, high), f"{percent:.1f} %", "█" * round(percent / 4))
        for (low, high, _), percent in zip(merged, shares, strict=True)
    ]
    return [_sentence(staleness_words(run)), "", *_rows(("updates behind", "of it", ""), rows)]


def _merged(
    bins: Sequence[tuple[float, float, float]], most: int
) -> list[tuple[float, float, float]]:
    size = -(-len(bins) // most)
    return [
        (part[0][0], part[-1][1], sum(count for _, _, count in part))
        for part in (bins[i : i + size] for i in range(0, len(bins), size))
    ]


def _between(low: float, high: float) -> str:
    first, last = math.ceil(low), math.ceil(high) - 1
    return f"{first}" if last <= first else f"{first} to {last}"


def _fault_lines(run: Explained) -> list[str]:
    lines = [f"{name.replace('_', ' ')}: {value}  " for name, value in run.notes.items()]
    if run.faults:
        lines += ["", *_rows(("when", "who", "what", "what was done"),
                             [_fault(fault) for fault in run.faults[-MOST_FAULTS:]])]  # fmt: skip
    return lines or ["None."]


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(_plain(cell) for cell in row)} |" for row in rows]


def _plain(text: str) -> str:
    """Text that Markdown takes as it is: in one line, with nothing that it would read as markup."""
    text = " ".join(str(text).split())
    for mark in ("\\", "|", "<", ">", "*", "_", "`", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text


def milliseconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _error(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def _told(value: float | None, words: Callable[[float], str]) -> str | None:
    return None if value is None or not math.isfinite(value) else words(value)
