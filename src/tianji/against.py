"""A plan against what came of it: by how much it was off, and which side is why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianji.critical import worked
from tianji.folder import PLAN, read_json
from tianji.role_names import by_flow
from tianji.verdict import alone, busy
from tianji.view.status import human

OFF = 0.15
"""error of a prediction from which it is looked into"""
SHORT = 10.0
"""seconds of training below which how a run begins weighs much in its rates"""


@dataclass(frozen=True)
class Compared:
    """A rate that was predicted, and what came of it, in steps per second."""

    name: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


@dataclass(frozen=True)
class Planned:
    """What the plan said."""

    choice: Mapping[str, Any]
    binding: str
    rates: tuple[Compared, ...]
    deviation: tuple[str, ...] = ()
    """where it is off by more than 15 %: which side is not as fast as was measured, and what to do;
    sentences"""

    @property
    def new(self) -> Compared | None:
        """New steps per second, which a plan is made for."""
        return next((rate for rate in self.rates if rate.name == "new"), None)


def new_speed(received: float, filtered: float, steps: float) -> float:
    """Steps per second that could be consumed, of those received."""
    return received * (1.0 - filtered / steps) if steps else received


def predicted_speed(run: Path) -> float | None:
    """New steps per second that the plan of a run predicts; None where it follows none."""
    predicted = (read_json(run / PLAN) or {}).get("predicted")
    speed = predicted.get("new") if isinstance(predicted, Mapping) else None
    return float(speed) if isinstance(speed, int | float) and speed > 0 else None


SIDES = {"actors": "produced", "learner": "consumed", "channel": "received"}
"""of a plan, and what happens to steps there"""
NAMES = {"actors": "the actors", "learner": "the learner", "channel": "the buffer"}


def _could(time: Mapping[str, Mapping[str, float]], rates: Mapping[str, float]) -> dict[str, float]:
    """New steps per second that each side of a plan could have done if it never waited."""
    shares: Mapping[str, float | None]
    if host := alone(time):
        shares = worked(time[host])
    else:
        shares = by_flow({role: busy(role, kinds) for role, kinds in time.items()})
    found = {}
    for side, flow in SIDES.items():
        rate = rates.get("produced" if side == "actors" else "new")
        if rate and (share := shares.get(flow)):
            found[side] = rate / share
    return found


def deviation(
    found: Planned,
    plan: Mapping[str, Any],
    time: Mapping[str, Mapping[str, float]],
    rates: Mapping[str, float],
    seconds: float,
) -> tuple[str, ...]:
    """What is to be said where it was off by more than 15 %: by the plan's file, and by the shares
    of time and the rates of so many seconds of training."""
    if found.new is None or found.new.error is None or abs(found.new.error) <= OFF:
        return ()
    capacity = plan.get("capacity")
    capacity = capacity if isinstance(capacity, Mapping) else {}
    told = _why(found.new, found.binding, capacity, _could(time, rates))
    if seconds < SHORT:
        told.append(
            f"Only {seconds:.1f} s of training were measured, of which the beginning is a large "
            f"part."
        )
    looked = " (the plan came from a look of 2 s)" * (plan.get("whole") is False)
    told.append(f"`tianji plan CONFIG --again` measures this machine anew{looked}.")
    return tuple(told)


def _why(
    new: Compared, binding: str, capacity: Mapping[str, Any], could: Mapping[str, float]
) -> list[str]:
    """Which sides are why a plan was off, by more than 15 % each."""
    assert new.measured
    change = new.measured / new.predicted - 1.0
    told = [f"The run was {abs(change):.0%} {'slower' if change < 0 else 'faster'} than predicted."]
    planned = {side: float(rate) for side in could
               if isinstance(rate := capacity.get(side), int | float) and rate > 0}  # fmt: skip
    off = {side: could[side] / rate - 1.0 for side, rate in planned.items()}
    took = {side: 1.0 / could[side] - 1.0 / rate for side, rate in planned.items()}
    """seconds that each took longer for a step"""
    if binding == "turns":  # they add up
        whole = 1.0 / new.measured - 1.0 / new.predicted
        why = [side for side in planned if took[side] / whole > 0.25]
    elif change < 0:  # what kept it from being as fast as it should have been
        why = [side for side in planned if could[side] < new.predicted]
    else:  # what would have kept it, as slow as the plan took it to be
        why = [side for side, rate in planned.items() if rate < new.measured]
    why = [side for side in why if off[side] * change > 0 and abs(off[side]) > OFF]
    told += [
        f"{NAMES[side].capitalize()} could do {human(could[side])} new steps/s without ever "
        f"waiting, where the plan took {human(planned[side])} ({off[side]:+.0%})."
        for side in sorted(why, key=lambda side: -abs(took[side]))
    ]
    if planned and not why:
        each = ", ".join(f"{NAMES[side]} {share:+.0%}" for side, share in off.items())
        told.append(
            f"No side explains it (what each could do without ever waiting, against the plan: "
            f"{each}): time went by between them, which the plan does not know."
        )
    return [text.replace("%", " %") for text in told]
