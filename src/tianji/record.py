"""What a run leaves to be read: rows of metrics, TensorBoard events, a log, a summary."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tianji.fault import Fault
from tianji.folder import FAULTS, STALENESS
from tianji.histogram import Histogram
from tianji.rebalance import Change
from tianji.role import State
from tianji.rows import Appender, Board, drop_torn_line
from tianji.tally import Tally
from tianji.types import Array, Report
from tianji.verdict import Verdict
from tianji.view.status import Staleness, Status, View, duration, human, number, percent
from tianji.watch import Progress, mean_of

COUNTED = {
    "env": "env_restarts",
    "role": "restarts",
    "run": "recoveries",
    "update": "updates_skipped",
    "disk": "disk",
}
"""what a kind of fault is counted as"""

SPREAD = 10.0
"""seconds between two files of how staleness is spread, at least"""

Util = Mapping[str, float]
"""Shares of a role's time, 0 to 1, by "role/kind"."""


RECENT = 5.0
"""seconds over which rates are compared with how busy the roles are"""


class Recorder:
    """Aggregates the learner's reports; writes a row of them when an interval is over."""

    def __init__(
        self,
        folder: Path,
        view: View,
        limits: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        interval: float = 1.0,
        started: float | None = None,
    ) -> None:
        """`limits` are the stop conditions, as `trigger.Reached` has them; `started` is the clock's
        reading that elapsed seconds count from; `interval` is in seconds."""
        self.rows_lost = 0
        self.predicted: float | None = None
        """new steps per second, by the plan that the run follows"""
        self._view = view
        self._limits = dict(limits)
        self._clock = clock
        self._interval = interval
        self._started = clock() if started is None else started
        folder.mkdir(parents=True, exist_ok=True)
        self._log = Appender(folder / "log.txt")
        self._rows = Appender(folder / "metrics.jsonl")
        self._faults = Appender(folder / FAULTS)
        self._spread = folder / STALENESS
        self._spread_due = 0.0
        self._board = Board(folder / "tb")
        drop_torn_line(folder / "metrics.jsonl")
        self._elapsed_before = 0.0
        self.progress = Progress()
        self._return_first: float | None = None
        self._return_best: float | None = None
        self._curve = Curve()
        self._recent, self._whole = Tally(), Histogram()
        self._util: Util = {}
        self.active: int | None = None
        """actors that are active; None where that does not change"""
        self.rebalanced: list[dict[str, Any]] = []
        """each change of that number: when, from what to what, and why"""
        self.verdict: Verdict | None = None
        """what holds the run up, as of the last tick"""
        self.conclusion: Verdict | None = None
        """what held the whole run up, once it has ended"""
        self.faults: Counter[str] = Counter()
        """how often something went wrong, by what was done about it"""
        self._traced: set[str] = set()
        self._trouble_said = False
        self._closed = False
        self.begin()
        if unknown := self._limits.keys() - self._counts().keys():
            raise ValueError(
                f"no progress can be shown towards {', '.join(sorted(unknown))}: "
                f"the counts of a run are {', '.join(self._counts())}"
            )

    def begin(self) -> None:
        """The first step is about to be made: rates are over the time from here."""
        now = self._clock()
        self._base = self._mark = Mark(now, self.progress.last)
        self._marks = deque([self._base])
        """so that rates of recent time are known; the first is at least so old, if there is one"""
        self._shown: tuple[Rates, Staleness | None] | None = None
        self._row_due = now + self._interval
        self._view_due = now + min(self._view.every, self._interval)
        self._due = min(self._row_due, self._view_due)

    def update(self, report: Report) -> None:
        """Note one report. One with no staleness and no metrics only brings the counts."""
        self._note(report, report.episodes)
        self._recent.add(report)

    def merge(self, tally: Tally) -> None:
        """Note several updates at once."""
        assert tally.last is not None
        self._note(tally.last, tally.episodes)
        self._recent.merge(tally)

    def tick(
        self,
        util: Util | Callable[[], Util] | None = None,
        judge: Callable[[], Verdict | None] | None = None,
    ) -> None:
        """Write a row, refresh the view, where due. Functions are called only then: `judge` says
        what holds the run up."""
        now = self._clock()
        if now < self._due:
            return
        if util is not None:
            self._util = util() if callable(util) else util
        if judge is not None:
            self.verdict = judge()
        if now >= self._row_due:
            self._write_interval(now)
            self._row_due = now + self._interval
        if now >= self._view_due:
            rates, spread = (
                self._mark.rates(now, self.progress.last),
                self._recent.staleness.spread(),
            )
            recent = self._shown or (rates, spread)
            before = self._clock()
            self._view.show(self._status(*recent))
            # a view takes at most a hundredth of the time
            self._view_due = now + max(self._view.every, 100 * (self._clock() - before))
        self._due = min(self._row_due, self._view_due)

    def evaluation(self, steps: int, version: int, episodes: Array) -> None:
        """EPISODE records, played with a version that had seen so many steps."""
        played = Progress()
        played.add(episodes)
        mean = mean_of(episodes["return"].tolist())
        length = mean_of(episodes["length"].tolist())
        row = {"eval/mean_reward": mean, "eval/mean_ep_length": length}
        said = "no episode" if mean is None else f"return {number(mean)}, {len(episodes)} episodes"
        if (win_rate := played.win_rate) is not None:
            row["eval/win_rate"] = win_rate
            said += f", {win_rate:.0%} won"
        self._write(steps, version, row)
        self.event(f"evaluated version {version} at {human(steps)} steps: {said}")

    def rebalance(self, change: Change, group: str, active: int | None) -> None:
        """Another number of actors is active."""
        self.active = active
        when = {"wall_s": round(self.elapsed, 3), "steps": self.progress.last.received}
        whose = {"group": group} if group else {}
        about = {"from": change.before, "to": change.after, "why": change.why}
        self.rebalanced.append(when | whose | about)
        self.event(f"{group}: {change}" if group else str(change))

    def event(self, text: str) -> None:
        """A line to the log and the view."""
        self._view.line(text)
        self.log(text)

    def fault(self, fault: Fault) -> None:
        """Something went wrong: a line to the faults, the log and the view; a traceback once."""
        self.faults[COUNTED[fault.kind]] += 1
        self.faults["episodes_aborted"] += fault.aborted
        self.event(f"{fault.role}: {fault.cause}: {fault.action}")
        if fault.traceback and (what := fault.exception or fault.cause) not in self._traced:
            self._traced.add(what)
            self.log(fault.traceback.rstrip())
        when = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        with self._saying_trouble():
            self._faults.write(json.dumps({"time": when} | fault.tree()).encode() + b"\n")

    def log(self, text: str) -> None:
        """A line to the log alone."""
        when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        with self._saying_trouble():
            self._log.write(f"{when} {text}\n".encode())
            self._log.close()

    def close(self) -> None:
        """A last row; the last thing shown is of the whole run. The view is not ended."""
        if self._closed:
            return
        self._closed = True
        now = self._clock()
        self.verdict = self.verdict or self.conclusion
        if self.progress.last is not self._mark.report:
            self._write_interval(now)
        self._write_spread()
        self.verdict = self.conclusion or self.verdict
        self._view.show(self._status(self._base.rates(now, self.progress.last), self._staleness()))
        self._due = math.inf
        for file in (self._rows, self._board, self._log, self._faults):
            with self._saying_trouble():  # a network disk may find out only now that it is full
                file.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the run started, those of the processes before a resume included."""
        return self._elapsed_before + self._clock() - self._started

    def summary(self) -> dict[str, Any]:
        last, now = self.progress.last, self._clock()
        rates = self._base.rates(now, last)
        staleness = self._staleness()
        summary: dict[str, Any] = {
            "episodes": self.progress.episodes,
            "return_mean": finite(self.progress.return_mean),
            "length_mean": self.progress.length_mean,
            "steps_per_s": rates._asdict(),
            "measured": {
                "begin": self._elapsed_before + self._base.time - self._started,
                "seconds": now - self._base.time,
                "updates": last.version - self._base.report.version,
                "steps": last.received - self._base.report.received,
            },
            "staleness": None if staleness is None else staleness._asdict(),
            "replay_ratio": last.consumed / last.received if last.received else None,
            "filtered": last.filtered,
        }
        if (win_rate := self.progress.win_rate) is not None:
            summary["win_rate"] = win_rate
        return summary | ({"rows_lost": self.rows_lost} if self.rows_lost else {})

    def state(self) -> State:
        return {
            "elapsed": self.elapsed,
            **self.progress.state(),
            "rows_lost": self.rows_lost,
            "return_first": self._return_first,
            "return_best": self._return_best,
            "curve": np.array(self._curve.points, np.float64).reshape(-1, 2),
            "faults": dict(self.faults),
            "staleness": self._whole.plus(self._recent.staleness).state(),
            "rebalanced": list(self.rebalanced),
        }

    def load_state(self, state: State) -> None:
        """Go on from a state, before `begin`: totals continue, rates are of this process alone."""
        self._elapsed_before = state["elapsed"]
        self.progress.load_state(state)
        self.rows_lost = state["rows_lost"]
        self.faults = Counter(state["faults"])
        self.rebalanced = list(state.get("rebalanced", []))
        self._return_first, self._return_best = state["return_first"], state["return_best"]
        self._curve = Curve([(x, y) for x, y in state["curve"].tolist()])
        self._whole = Histogram.of(state["staleness"])
        self._board.resume(self.progress.last.received)
        self.begin()

    def _note(self, last: Report, episodes: Array) -> None:
        self.progress.note(last, episodes)
        mean = finite(self.progress.return_mean)
        if mean is None or not len(episodes):
            return
        if self._return_first is None:
            self._return_first = mean
        if self.progress.full:
            self._return_best = mean if self._return_best is None else max(mean, self._return_best)
        self._curve.add(last.received, mean)

    def _staleness(self) -> Staleness | None:
        """Of the whole run."""
        return self._whole.plus(self._recent.staleness).spread()

    def _counts(self) -> dict[str, float | None]:
        return {
            "steps": self.progress.last.received,
            "updates": self.progress.last.version,
            "episodes": self.progress.episodes,
            "seconds": self._elapsed_before + self._clock() - self._base.time,  # as stop.seconds
            "return": finite(self.progress.return_mean),
            "win_rate": self.progress.win_rate,
        }

    def _status(self, rates: Rates, staleness: Staleness | None) -> Status:
        fraction, goals = progress(self._limits, self._counts(), self._return_first)
        return Status(
            elapsed=self.elapsed,
            steps=self.progress.last.received,
            updates=self.progress.last.version,
            episodes=self.progress.episodes,
            produced=rates.produced,
            received=rates.received,
            consumed=rates.consumed,
            fraction=fraction,
            goals=goals,
            return_mean=finite(self.progress.return_mean),
            return_best=self._return_best,
            length_mean=self.progress.length_mean,
            win_rate=self.progress.win_rate,
            staleness=staleness,
            util=self._util,
            verdict=self.verdict,
            curve=tuple(self._curve.points),
        )

    def _write_interval(self, now: float) -> None:
        last, before = self.progress.last, self._mark.report
        recent = self._recent
        rates, staleness = self._mark.rates(now, last), recent.staleness.spread()
        row: dict[str, float | None] = {
            "rollout/ep_rew_mean": self.progress.return_mean,
            "rollout/ep_len_mean": self.progress.length_mean,
            "train/n_updates": last.version,
            "time/fps": self._base.rates(now, last).received,
            "time/total_timesteps": last.received,
            "time/time_elapsed": self.elapsed,
            "flow/produced_sps": rates.produced,
            "flow/received_sps": rates.received,
            "flow/consumed_sps": rates.consumed,
        }
        if self.predicted is not None:
            row["plan/predicted_sps"] = self.predicted
        if (win_rate := self.progress.win_rate) is not None:
            row["rollout/win_rate"] = win_rate
        if (received := last.received - before.received) > 0:
            row["flow/replay_ratio"] = (last.consumed - before.consumed) / received
        if staleness is not None:
            row |= {f"staleness/{name}": value for name, value in staleness._asdict().items()}
            row |= {
                "staleness/freshness": recent.freshness,
                "staleness/P": last.share,
                "staleness/filtered": last.filtered,
            }
        row |= {f"train/{name}": total / recent.uses[name] for name, total in recent.sums.items()}
        row |= {f"faults/{name}": count for name, count in self.faults.items() if count}
        row |= {f"util/{name}": share for name, share in self._util.items()}
        if self.active is not None:
            row["scale/active_actors"] = self.active
        if self.verdict is not None:
            row |= self.verdict.metrics(self._recent_rates(now)._asdict())
        self._write(last.received, last.version, row)
        self._whole = self._whole.plus(recent.staleness)
        self._recent = Tally()
        self._mark = Mark(now, last)
        self._shown = rates, staleness
        if now >= self._spread_due:
            self._spread_due = now + SPREAD
            self._write_spread()

    def _write_spread(self) -> None:
        """How often what staleness was consumed so far, in a file of its own; the one before it is
        kept where that does not fit."""
        whole = self._whole.plus(self._recent.staleness)
        if whole.size == 0:
            return
        new = self._spread.with_name(f"{STALENESS}.new")
        with self._saying_trouble():
            new.write_text(json.dumps(whole.tree()) + "\n")
            new.replace(self._spread)

    def _recent_rates(self, now: float) -> Rates:
        """Over as long as a verdict is made of."""
        self._marks.append(Mark(now, self.progress.last))
        while len(self._marks) > 2 and self._marks[1].time <= now - RECENT:
            self._marks.popleft()
        return self._marks[0].rates(now, self.progress.last)

    def _write(self, steps: int, version: int, values: Mapping[str, float | None]) -> None:
        """One row to metrics.jsonl and to TensorBoard; one that does not fit is counted as lost."""
        scalars = {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
        head = {"step": steps, "wall_s": round(self.elapsed, 3), "updates": version}
        row = head | {"episodes": self.progress.episodes} | scalars
        error: OSError | None = None
        try:
            self._rows.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        except OSError as raised:
            error = raised
        try:
            self._board.write(steps, scalars)
        except OSError as raised:
            error = error or raised
        if error is not None:
            self.rows_lost += 1
            self._say_trouble(error)

    @contextlib.contextmanager
    def _saying_trouble(self) -> Iterator[None]:
        """What the disk does not take is said, and stops nothing."""
        try:
            yield
        except OSError as error:
            self._say_trouble(error)

    def _say_trouble(self, error: OSError) -> None:
        if not self._trouble_said:
            self._trouble_said = True
            self.event(f"metrics are lost: {error}. Training goes on, and each row is tried.")


class Rates(NamedTuple):
    """Steps per second."""

    produced: float
    received: float
    consumed: float


class Mark(NamedTuple):
    """A moment that rates are measured from."""

    time: float
    report: Report

    def rates(self, now: float, last: Report) -> Rates:
        seconds, then = now - self.time, self.report
        if seconds <= 0:
            return Rates(0.0, 0.0, 0.0)
        return Rates(
            (last.produced - then.produced) / seconds,
            (last.received - then.received) / seconds,
            (last.consumed - then.consumed) / seconds,
        )


def progress(
    limits: Mapping[str, float], counts: Mapping[str, float | None], first_return: float | None
) -> tuple[float | None, tuple[str, ...]]:
    """How far the nearest stop condition is reached, 0 to 1, and each of them in words.

    A return counts from the first mean that there was, every other count from 0.
    """
    nearest, goals = 0.0, []
    for name, limit in limits.items():
        count, start = counts[name], 0.0
        say: Callable[[float], str] = human
        if name == "seconds":
            say, name = duration, "time"
        elif name == "win_rate":
            say, name = percent, "won"
        elif name == "return":
            say, start = "{:.4g}".format, limit if first_return is None else first_return
        goals.append(f"{name} {'-' if count is None else say(count)} of {say(limit)}")
        if count is None:
            continue
        if count >= limit:
            nearest = 1.0
        elif limit > start:
            nearest = max(nearest, (count - start) / (limit - start))
    return (nearest if goals else None), tuple(goals)


class Curve:
    """At most 256 points, spread over the run: when full, every other one goes."""

    ROOM = 256

    def __init__(self, points: Sequence[tuple[float, float]] = ()) -> None:
        self.points = list(points)
        self._next = 0.0

    def add(self, x: float, y: float) -> None:
        if x < self._next:
            return
        self.points.append((x, y))
        if len(self.points) >= self.ROOM:
            del self.points[1:-1:2]
        if len(self.points) > self.ROOM // 2:
            self._next = x + (x - self.points[0][0]) / len(self.points)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
