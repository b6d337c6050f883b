"""The page of a run in sections, which HTML and Markdown have alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tianji.explain import FLOWS, MOST_FAULTS, Explained
from tianji.view import charts, timeline, words
from tianji.view.charts import Axis, Series
from tianji.view.parts import Part, figures, numbered, shares, table, text
from tianji.view.parts import facts as facts_of
from tianji.view.status import human, number


def sections(run: Explained) -> list[tuple[str, list[Part]]]:
    """Each with its title."""
    return [
        ("What to change next", [_advice(run)]),
        ("Plan against reality", _plan(run)),
        ("Where the time went", _time(run)),
        ("Critical path", _critical(run)),
        ("Throughput and return over time", [_course(run)]),
        ("Throughput", _throughput(run)),
        ("Return", [_return(run)]),
        ("Staleness", _staleness(run)),
        ("Faults and restarts", _faults(run)),
        ("Actors that were active", _changes(run)),
        ("Timeline", _timeline(run)),
        ("What ran", [*on_page(*_gap(run, "what ran")), facts_of(list(run.about.items()))]),
    ]


def on_page(*parts: Part) -> list[Part]:
    """Parts that Markdown does not have."""
    return [Part(part.html) for part in parts]


def _gap(run: Explained, section: str) -> list[Part]:
    """What a section has not, and why."""
    why = run.missing.get(section)
    return [text(words.sentence(why), soft=True)] if why else []


def _advice(run: Explained) -> Part:
    if run.advice:
        return numbered(run.advice)
    nothing = text("Nothing follows from what is known of this run.")
    if run.time:
        return nothing
    return nothing._replace(html=text(f"Nothing can be said: {run.missing.get('time', '')}").html)


def _plan(run: Explained) -> list[Part]:
    plan = run.planned
    if plan is None:
        return _gap(run, "plan")
    told = [text(" ".join(plan.deviation))] if plan.deviation else []
    return [text(words.planned(plan)), table(words.COMPARED, words.compared_rows(plan)), *told]


def _time(run: Explained) -> list[Part]:
    parts = _gap(run, "time")
    seconds = f"of {run.time_seconds:.1f} s"
    for host, spent in run.time.items():
        name = words.host_words(host)
        heading = f"<h3>{escape(name)} <span class='soft'>{seconds}</span></h3>"
        parts += [Part(heading, [f"{name}, {seconds}"]), shares(host, words.bar(host, spent))]
    return parts


def _critical(run: Explained) -> list[Part]:
    cycle, chain = run.cycle, run.chain
    if cycle is None:
        return _gap(run, "critical path")
    rows = [
        (phase, words.milliseconds(s), f"{s / cycle.seconds:.1%}".replace("%", " %"))
        for phase, s in sorted(cycle.phases.items(), key=lambda item: -item[1])
    ]
    head = ("in one update's cycle", "time", "of the cycle")
    parts = [text(*words.critical(run)), table(head, rows, columns=(0, 1))]
    if chain is not None:
        updates = max(chain.updates, 1)
        rows = [(words.kind_words(key), words.milliseconds(seconds / updates), percent)
                for key, seconds, percent in words.links(run)]  # fmt: skip
        head = ("on the chain", "for each update", "of it")
        parts += [Part("<h3>Longest chain</h3>"), text(words.chain(run))]
        parts.append(table(head, rows, columns=(0, 2)))
    return parts


def _course(run: Explained) -> Part:
    """Some twelve rows of it, where no curve can be drawn."""
    rows = run.history.rows
    if not rows:
        why = run.missing.get("throughput", "No row of metrics was written.")
        return text(words.sentence(why))._replace(html="")
    step = max(1, -(-len(rows) // 12))
    told = [
        (
            f"{row['wall_s']:.1f}",
            human(row["step"]),
            *(words.if_known(row.get(f"flow/{name}_sps"), human) or "–" for name in FLOWS),
            words.if_known(row.get("rollout/ep_rew_mean"), number) or "–",
        )
        for row in rows[(len(rows) - 1) % step :: step]
    ]
    head = ("seconds", "steps", *(f"{n}/s" for n in FLOWS), "return")
    return table(head, told)._replace(html="")


def _throughput(run: Explained) -> list[Part]:
    series = [
        Series(name, points, color, width, dashes)
        for name, color, width, dashes in zip(
            FLOWS, ("c2", "c1", "c3"), (5.0, 2.5, 1.5), ("", "", "5 4"), strict=True
        )
        if (points := run.history.flow(f"flow/{name}_sps"))
    ]
    if not series:
        return on_page(*(_gap(run, "throughput") or [text("No row of metrics was written.")]))
    chart = charts.lines(
        series, Axis("seconds", zero=True), Axis("steps/s", zero=True),
        "Steps per second that were produced, received and consumed, over the seconds of the run",
    )  # fmt: skip
    entries = [(one.color, one.name, f"{human(run.rates[one.name])}/s" if one.name in run.rates
                else "") for one in series]  # fmt: skip
    every = run.history.every
    thinned = [text(f"Every {every}th row is shown.", soft=True)] if every > 1 else []
    return on_page(Part(f"<figure>{chart}{charts.key(entries)}</figure>"), *thinned)


NO_RETURN = text(
    "No episode had ended when a row was written, so there is no return to show."
)._replace(markdown=())


def _return(run: Explained) -> Part:
    drawn = []
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
            drawn.append((f"over {what}", chart + key))
    return figures(drawn) if drawn else NO_RETURN


def _staleness(run: Explained) -> list[Part]:
    if run.histogram is None:
        return _gap(run, "staleness")
    bins = words.binned(run.histogram)
    total = sum(count for _, _, count in bins)
    chart = charts.bars(
        [(low, high, 100 * count / total) for low, high, count in bins],
        Axis("staleness, in updates", whole=True), Axis("%"),
        f"How often what staleness was consumed: {words.staleness(run)}",
    )  # fmt: skip
    drawn = [("of what updates consumed", chart)]
    if points := against(run):
        chart = charts.dots(
            points, Axis("mean staleness of a row, in updates"), Axis("return"),
            "Mean return against the mean staleness in the same second",
        )  # fmt: skip
        drawn.append(("against return, a dot for each row, later ones darker", chart))
    merged = _merged(bins, 12)
    percents = charts.rounded([count / total for _, _, count in merged])
    rows = [
        (_between(low, high), f"{percent:.1f} %", "█" * round(percent / 4))
        for (low, high, _), percent in zip(merged, percents, strict=True)
    ]
    spread = table(("updates behind", "of it", ""), rows).markdown
    told = text(words.sentence(words.staleness(run)))
    return [told, figures(drawn)._replace(markdown=spread)]


def against(run: Explained) -> list[tuple[float, float]]:
    """(mean staleness, mean return) of every row that has both."""
    names = ("staleness/mean", "rollout/ep_rew_mean")
    return [(row[names[0]], row[names[1]]) for row in run.history.rows
            if all(name in row for name in names)]  # fmt: skip


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


def _faults(run: Explained) -> list[Part]:
    parts = []
    if run.notes:
        told = [f"{name.replace('_', ' ')}: {value}" for name, value in run.notes.items()]
        below = [f"{line}  " for line in told]
        parts.append(text("; ".join(told))._replace(markdown=below))
    if run.faults:
        rows = [words.fault_row(fault) for fault in run.faults[-MOST_FAULTS:]]
        if len(run.faults) > len(rows):
            parts += on_page(text(f"The last {len(rows)} of {len(run.faults)}:"))
        parts.append(table(("when", "who", "what", "what was done"), rows, figures=False))
    return parts or [text("None.")]


def _changes(run: Explained) -> list[Part]:
    rows = [words.change_row(change) for change in run.changes]
    return [table(words.CHANGED, rows)] if rows else []


def _timeline(run: Explained) -> list[Part]:
    gap = _gap(run, "timeline")
    if not run.tracks:
        return gap
    shown = timeline.newest(run.tracks)
    begin = min((float(track.begin[0]) for track in shown), default=0.0)
    end = max((float(track.end[-1]) for track in shown), default=0.0)
    drawn = timeline.fragment(shown, f"the last {end - begin:.3g} s of the trace", "timeline")
    where = " ".join(["It is on the HTML page.", *(line for part in gap for line in part.markdown)])
    return [*on_page(*gap), Part(drawn, [where])]
