"""Who watches a run's counts, beside the learner: what is due after an update?"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tianji.config import Config
from tianji.errors import Failure
from tianji.role import State
from tianji.tally import only_counts
from tianji.trigger import TRIGGERS, Counts, Every, Reached, Trigger, either
from tianji.types import Array, Report

COUNTS = ("version", "produced", "received", "consumed", "filtered")

WINDOW = 100
"""episodes that mean returns and lengths are over"""


class Progress:
    """How far a run is: its newest counts, and its last 100 episodes."""

    def __init__(self) -> None:
        self.last = only_counts(0, 0, 0, 0)
        self.episodes = 0
        self.return_mean: float | None = None
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.wins: deque[int] = deque(maxlen=WINDOW)
        """1 or 0, of those that could be won"""

    @property
    def length_mean(self) -> float | None:
        return sum(self.lengths) / len(self.lengths) if self.lengths else None

    @property
    def win_rate(self) -> float | None:
        """None: the env knows no winning."""
        return sum(self.wins) / len(self.wins) if self.wins else None

    @property
    def full(self) -> bool:
        return len(self.returns) == WINDOW

    def note(self, last: Report, episodes: Array) -> None:
        """The counts now, and EPISODE records since those before."""
        self.last = last
        self.add(episodes)

    def add(self, episodes: Array) -> None:
        """EPISODE records. Sums are made anew, exactly: a running sum of floats would drift."""
        if len(episodes) == 0:
            return
        self.episodes += len(episodes)
        latest = episodes[-WINDOW:]
        self.returns.extend(latest["return"].tolist())
        self.lengths.extend(latest["length"].tolist())
        self.wins.extend(win for win in latest["win"].tolist() if win >= 0)
        self.return_mean = mean_of(self.returns)

    def state(self) -> State:
        return {
            **{name: getattr(self.last, name) for name in COUNTS},
            "episodes": self.episodes,
            "returns": np.array(self.returns, np.float64),
            "lengths": np.array(self.lengths, np.int64),
            "wins": np.array(self.wins, np.int64),
        }

    def load_state(self, state: State) -> None:
        self.last = only_counts(*(state[name] for name in COUNTS))
        self.episodes = state["episodes"]
        self.returns.extend(state["returns"].tolist())
        self.lengths.extend(state["lengths"].tolist())
        self.wins.extend(state["wins"].tolist())
        self.return_mean = mean_of(self.returns)


@dataclass(frozen=True)
class Due:
    """What an update gave occasion to."""

    stop: str | None = None
    """the reason to end, in words"""
    evaluate: bool = False
    save: bool = False

    def __bool__(self) -> bool:
        return self.stop is not None or self.evaluate or self.save


class Watch:
    """Judges each report of the learner by the config's triggers."""

    def __init__(
        self, config: Config, clock: Callable[[], float] = time.perf_counter, elapsed: float = 0.0
    ) -> None:
        """`elapsed` are the seconds that the run took before `clock` was asked first."""
        self.counts = Counts(seconds=elapsed)
        self._clock = clock
        self._started = clock() - elapsed
        self._progress = Progress()
        self._stop = Reached(limits(config))
        self._stop_when = TRIGGERS.get(config.stop.when or "")
        self._stop_name = config.stop.when
        self._evaluate = _trigger(config.eval.every, config.eval.when)
        self._save = _trigger(config.checkpoint.every, config.checkpoint.when)
        self._save_seconds = config.checkpoint.seconds
        self._saved = elapsed

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def note(self, report: Report) -> Due:
        """Count it; what is due now."""
        self._progress.note(report, report.episodes)
        before, self.counts = self.counts, self._counts()
        if before.updates == report.version:  # nothing was learnt: only the end may be near
            return Due(stop=self.ended(before))
        late = self.counts.seconds - self._saved >= self._save_seconds
        save = self._save(before, self.counts) or late
        if save:
            self._saved = self.counts.seconds
        return Due(stop=self.ended(before), evaluate=self._evaluate(before, self.counts), save=save)

    def ended(self, before: Counts) -> str | None:
        """The reason to stop now, if there is one."""
        if reason := self._stop.due(self.counts.by_name()):
            return reason
        if self._stop_when is not None and self._stop_when(before, self.counts):
            return f"stop.when = {self._stop_name}"
        return None

    def load_state(self, recorded: State) -> None:
        """Go on from what a recorder's state says."""
        self._progress.load_state(recorded)
        self._started = self._clock() - recorded["elapsed"]
        self.counts = self._counts()
        self._saved = recorded["elapsed"]

    def _counts(self) -> Counts:
        progress = self._progress
        mean, win_rate = (
            (progress.return_mean, progress.win_rate) if progress.full else (None, None)
        )
        if progress.full and win_rate is None and "win_rate" in self._stop.limits:
            raise Failure(
                "stop.win_rate can never hold: 100 episodes have ended, and the env says of none "
                "whether it was won. Set stop.return or stop.steps instead."
            )
        return Counts(
            steps=progress.last.received,
            updates=progress.last.version,
            episodes=progress.episodes,
            seconds=self.seconds,
            return_mean=-math.inf if mean is None else mean,
            win_rate=-math.inf if win_rate is None else win_rate,
        )


def limits(config: Config) -> Mapping[str, float]:
    """The stop conditions that have a number."""
    stop = config.stop
    named = {
        "return": stop.return_,
        "win_rate": stop.win_rate,
        "steps": stop.steps,
        "updates": stop.updates,
        "seconds": stop.seconds,
    }
    return {name: limit for name, limit in named.items() if limit is not None}


def _trigger(every: int, when: str | None) -> Trigger:
    return either(Every(every), TRIGGERS[when]) if when else Every(every)


def mean_of(values: Sequence[float] | deque[float] | Array) -> float | None:
    """Rounded once, whatever the order; None of nothing, nan where it has no value."""
    if len(values) == 0:
        return None
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # beyond the range of floats; inf and -inf
        return math.nan
