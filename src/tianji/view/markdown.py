"""One page about a run, as Markdown, and the few lines of it that a terminal shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tianji.explain import FLOWS, MOST_FAULTS, Explained
from tianji.view import charts, words
from tianji.view.status import human, number


def markdown(run: Explained) -> str:
    """A run's page as text, with tables and bars of characters."""
    name = run.run.resolve().name
    lines = [f"# {_plain(name)}", "", f"**{run.status}**: {_plain(run.ending)}", ""]
    if run.verdict:
        lines += [f"**{_plain(run.verdict)}**", ""]
    lines += _rows(("", ""), words.facts(run))
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
            run.changes
            and _rows(words.CHANGED, [words.change_row(change) for change in run.changes]),
        ),
        ("Timeline", _timeline_lines(run)),
        ("What ran", _rows(("", ""), list(run.about.items()))),
    ):
        if inside:
            lines += ["", f"## {title}", "", *inside]
    return "\n".join(lines) + "\n"


def summary(run: Explained) -> list[str]:
    """A few lines for a terminal."""
    lines = [f"{run.status}: {run.ending}"]
    lines += [f"  {name:<26} {text}" for name, text in words.facts(run)]
    if run.verdict:
        lines.append(f"  {'bottleneck':<26} {run.verdict}")
    if run.planned is not None and run.planned.deviation:
        lines.append(f"plan: {' '.join(run.planned.deviation)}")
    return lines + [f"next: {text}" for text in run.advice]


def _advice_lines(run: Explained) -> list[str]:
    return [f"{i}. {_plain(text)}" for i, text in enumerate(run.advice, 1)] or [
        "Nothing follows from what is known of this run."
    ]


def _plan_lines(run: Explained) -> list[str]:
    if run.planned is None:
        return [_plain(words.sentence(run.missing["plan"]))]
    return [
        _plain(words.planned(run.planned)),
        "",
        *_rows(words.COMPARED, words.compared_rows(run.planned)),
        *(["", _plain(" ".join(told))] if (told := run.planned.deviation) else []),
    ]


WIDE = 50
"""characters of a bar"""


def _time_lines(run: Explained) -> list[str]:
    lines = [_plain(words.sentence(run.missing["time"])), ""] if "time" in run.missing else []
    for host, shares in run.time.items():
        drawn, end = "", 0.0
        entries = words.bar(host, shares)
        for i, (color, part, _, _) in enumerate(entries):
            end += part
            glyph = "·" if color.startswith("w") else "█▓▒"[i % 3]
            drawn += glyph * (round(WIDE * end) - len(drawn))
        lines += [f"{words.host_words(host)}, of {run.time_seconds:.1f} s", "", f"    {drawn}", ""]
        lines += [*_rows(("", "share"), [(name, figure) for _, _, name, figure in entries]), ""]
    return lines[:-1] if lines and not lines[-1] else lines


def _critical_lines(run: Explained) -> list[str]:
    if run.cycle is None:
        return [_plain(words.sentence(run.missing["critical path"]))]
    lines = [_plain(text) for text in words.critical(run)]
    rows = [(phase, words.milliseconds(s)) for phase, s in
            sorted(run.cycle.phases.items(), key=lambda item: -item[1])]  # fmt: skip
    lines += ["", *_rows(("in one update's cycle", "time"), rows)]
    if run.chain is not None:
        rows = [(words.kind_words(key), percent) for key, _, percent in words.links(run)]
        lines += ["", _plain(words.chain(run)), "", *_rows(("on the chain", "of it"), rows)]
    return lines


def _course_lines(run: Explained) -> list[str]:
    """Some twelve rows of it."""
    rows = run.history.rows
    if not rows:
        return [
            _plain(words.sentence(run.missing.get("throughput", "No row of metrics was written.")))
        ]
    step = max(1, -(-len(rows) // 12))
    taken = rows[(len(rows) - 1) % step :: step]
    names = [f"flow/{name}_sps" for name in FLOWS]
    told = [
        (
            f"{row['wall_s']:.1f}",
            human(row["step"]),
            *(words.if_known(row.get(name), human) or "–" for name in names),
            words.if_known(row.get("rollout/ep_rew_mean"), number) or "–",
        )
        for row in taken
    ]
    return _rows(("seconds", "steps", *(f"{n}/s" for n in FLOWS), "return"), told)


def _staleness_lines(run: Explained) -> list[str]:
    if run.histogram is None:
        return [_plain(words.sentence(run.missing["staleness"]))]
    bins = words.binned(run.histogram)
    total = sum(count for _, _, count in bins)
    merged = _merged(bins, 12)
    shares = charts.rounded([count / total for _, _, count in merged])
    rows = [
        (_between(low, high), f"{percent:.1f} %", "█" * round(percent / 4))
        for (low, high, _), percent in zip(merged, shares, strict=True)
    ]
    return [
        words.sentence(words.staleness(run)),
        "",
        *_rows(("updates behind", "of it", ""), rows),
    ]


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


def _timeline_lines(run: Explained) -> list[str]:
    gap = [words.sentence(run.missing["timeline"])] if "timeline" in run.missing else []
    return [_plain(" ".join(["It is on the HTML page."] * bool(run.tracks) + gap))]


def _fault_lines(run: Explained) -> list[str]:
    lines = [f"{name.replace('_', ' ')}: {value}  " for name, value in run.notes.items()]
    if run.faults:
        last = [words.fault_row(fault) for fault in run.faults[-MOST_FAULTS:]]
        lines += ["", *_rows(("when", "who", "what", "what was done"), last)]
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
