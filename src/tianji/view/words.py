"""What a page about a run says, whatever it is written in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tianji.against import Planned
from tianji.explain import FLOWS, Explained
from tianji.plan import Choice
from tianji.role_names import SERIAL, WORKER, by_flow, role_kind, waits_for
from tianji.view import charts
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
    "ask": "c5",
    "mix": "c6",
    "grant": "c6",
    "load": "c7",
    "evaluate": "c4",
}
"""of kinds of work, as in the timeline; others have the last"""

WAITS = {"received": "w1", "consumed": "w2", "produced": "w3"}
"""of waits for those through whom steps pass; others have the last"""


def facts(run: Explained) -> list[tuple[str, str]]:
    """The figures of a run that are worth a glance, those that are known."""
    counts, rates, staleness = run.counts, run.rates, run.staleness or {}
    found: list[tuple[str, str | None]] = [
        ("return, last 100 episodes", if_known(counts.get("return"), number)),
        ("won", if_known(counts.get("win_rate"), percent)),
        ("steps", if_known(counts.get("steps"), human)),
        ("updates", if_known(counts.get("updates"), human)),
        ("episodes", if_known(counts.get("episodes"), human)),
        ("time", if_known(counts.get("seconds"), duration)),
        ("to the first step", if_known(counts.get("start_seconds"), "{:.1f} s".format)),
        *((f"steps/s {name}", if_known(rates.get(name), human)) for name in FLOWS),
        ("new steps/s by the plan", foretold(run.planned)),
        ("staleness, mean", if_known(staleness.get("mean"), "{:.2f}".format)),
        ("staleness, p95", if_known(staleness.get("p95"), "{:.4g}".format)),
        ("staleness, max", if_known(staleness.get("max"), "{:.0f}".format)),
        ("freshness", if_known(run.freshness, percent)),
    ]
    return [(name, text) for name, text in found if text is not None]


COMPARED = ("steps/s", "predicted", "measured", "error")


def planned(plan: Planned) -> str:
    binding = f" The plan expected the {plan.binding} to bind." if plan.binding else ""
    return f"Chosen: {chosen(plan.choice)}.{binding}"


def chosen(choice: Mapping[str, Any]) -> str:
    """In words; a plan that another version wrote may not have all that they take."""
    try:
        return f"{(found := Choice(**choice))}, rollouts of {found.rollout_length} steps"
    except TypeError:
        return ", ".join(f"{key} {value}" for key, value in choice.items()) or "not known"


def compared_rows(plan: Planned) -> list[tuple[str, ...]]:
    return [
        (
            rate.name,
            human(rate.predicted),
            if_known(rate.measured, human) or "–",
            error_of(rate.error),
        )
        for rate in plan.rates
    ]


def foretold(plan: Planned | None) -> str | None:
    """New steps per second, as predicted, and how far that is from what came."""
    if plan is None or plan.new is None:
        return None
    error = "" if plan.new.error is None else f" (error {error_of(plan.new.error)})"
    return f"{human(plan.new.predicted)}{error}"


def bar(host: str, shares: Mapping[str, float]) -> list[tuple[str, float, str, str]]:
    """(colour, share, name, percent) of what a host's time went into: work before waiting, larger
    ones first; the percents add up to 100."""
    order = sorted(shares.items(), key=lambda item: (bool(waits_for(item[0])), -item[1]))
    percents = charts.rounded([part for _, part in order])
    return [
        (color(kind), part, kind_words(kind), f"{percent:.1f} %")
        for (kind, part), percent in zip(order, percents, strict=True)
    ]


def color(kind: str) -> str:
    if whom := waits_for(kind):
        return WAITS.get(role_kind(whom).flow, "w4")
    return COLOR.get(kind.rpartition("/")[2], "c8")


def kind_words(kind: str) -> str:
    role, _, tail = kind.rpartition("/")
    whom = waits_for(kind)
    words = f"waits for {whom}" if whom else tail.replace("_", " ")
    return f"{role} {words}" if role else words


def host_words(host: str) -> str:
    if host == SERIAL:
        return "one process"
    return f"{host}s, mean" if host == WORKER or role_kind(host).numbered else host


def critical(run: Explained) -> list[str]:
    """Who bounds an update, and whom the learner waited for."""
    cycle = run.cycle
    assert cycle is not None
    loop = [host for host in cycle.parts if not role_kind(host).beside]
    if len(loop) == 1:
        host = loop[0]
        most = max(cycle.phases.items(), key=lambda item: item[1], default=("nothing", 0.0))
        return [
            f"An update's cycle takes {milliseconds(cycle.seconds)}. "
            f"{host_words(host).capitalize()} does all of it in turn, so every part is on the "
            f"critical path; the longest is {most[0]}, {milliseconds(most[1])}."
        ]
    busy = ", ".join(
        f"{host} {share:.0%}".replace("%", " %")
        for host, share in sorted(cycle.busy.items(), key=lambda item: -item[1])
    )
    texts = [
        f"An update's cycle takes {milliseconds(cycle.seconds)}. Busiest in it is the "
        f"{cycle.bound}: its work bounds the cycle. Busy, of the cycle: {busy}."
    ]
    sides = by_flow(cycle.parts)
    waits = {
        waits_for(kind): seconds
        for kind, seconds in sides.get("consumed", {}).items()
        if waits_for(kind)
    }
    if waits:
        told = ", ".join(f"{milliseconds(s)} for {whom}" for whom, s in waits.items())
        text = f"The learner waited {told}."
        if "received" in by_flow(waits) and "received" in sides:
            back = {
                waits_for(kind): seconds
                for kind, seconds in sides["received"].items()
                if role_kind(waits_for(kind)).flow
            }
            behind = " and ".join(f"{milliseconds(s)} for {whom}" for whom, s in back.items())
            if behind:
                text += f" The buffer only passes things on: it waited {behind} meanwhile."
        texts.append(text)
    return texts


LEAST = 0.005
"""share of a chain below which links are told together"""


def links(run: Explained) -> list[tuple[str, float, str]]:
    assert run.chain is not None
    order = sorted(run.chain.spent.items(), key=lambda item: -item[1])
    shown = [link for link in order if link[1] >= LEAST * run.chain.seconds]
    rest = order[len(shown) :]
    if rest:
        shown.append((f"{len(rest)} more", sum(seconds for _, seconds in rest)))
    order = shown
    percents = charts.rounded([seconds / run.chain.seconds for _, seconds in order])
    return [(key, s, f"{p:.1f} %") for (key, s), p in zip(order, percents, strict=True)]


def chain(run: Explained) -> str:
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


def staleness(run: Explained) -> str:
    found = run.staleness
    if found is None:
        return "nothing was consumed."
    p95 = f", 95 % at most {found['p95']:.4g}" if "p95" in found else ""
    fresh = "" if run.freshness is None else f"; {percent(run.freshness)} of a batch was new"
    return f"mean {found['mean']:.3g}{p95}, largest {found['max']:.0f} updates{fresh}."


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


CHANGED = ("seconds", "from", "to", "why")


def change_row(change: Mapping[str, object]) -> tuple[str, str, str, str]:
    group = f"{change['group']}: " if change.get("group") else ""
    told = [str(change.get(name, "")) for name in ("wall_s", "from", "to", "why")]
    return told[0], told[1], told[2], f"{group}{told[3]}"


def fault_row(fault: Mapping[str, object]) -> tuple[str, str, str, str]:
    when, role, cause, action = (
        str(fault.get(name, "")) for name in ("time", "role", "cause", "action")
    )
    return when[:19].replace("T", " "), role, cause, action


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def milliseconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def error_of(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def if_known(value: float | None, words: Callable[[float], str]) -> str | None:
    return None if value is None or not math.isfinite(value) else words(value)
