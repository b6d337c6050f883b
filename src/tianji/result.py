"""How a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

EXIT = {"done": 0, "interrupted": 130, "stopped": 75}


@dataclass(frozen=True)
class Result:
    """How a run ended; `tianji train --json` prints it."""

    status: str
    """"done": a stop condition holds; "interrupted": Ctrl-C; "stopped": SIGTERM or SIGUSR1"""
    run_dir: str
    wall_s: float
    """from launch to end"""
    start_s: float
    """from launch to the first env step"""
    steps: int
    updates: int
    episodes: int
    return_mean: float | None
    """of the last 100 training episodes"""
    win_rate: float | None
    """share of them that were won; None where the env does not say"""
    steps_per_s: Mapping[str, float]
    replay_ratio: float | None
    """steps consumed for each step received"""
    staleness: Mapping[str, float] | None
    """versions behind, of what updates consumed: mean, p95, max"""
    filtered: int
    """steps received that were too stale to be consumed"""
    time: Mapping[str, Mapping[str, float]]
    """where the time went: for each kind of host, shares that add up to 1, work by its kind and
    waiting by whom for"""
    verdict: str
    """what held the run up, the evidence and advice, in one line"""
    bottleneck: Mapping[str, Any] | None
    """the same apart: `kind` (sample-bound, train-bound, communication-bound or balanced), `text`
    and `advice`, a list; None where no time was spent"""
    rebalance: Mapping[str, Any] | None
    """with scale.rebalance: how many actors are `active` at the end, and the `changes` of that
    number, each with `wall_s`, `steps`, `from`, `to` and `why`"""
    params_sha256: str
    stop_reason: str
    stop_s: float | None = None
    """seconds after which a stop condition held, as `wall_s` of the metrics counts them; None: none
    did"""
    measured: Mapping[str, float] = field(default_factory=dict)
    """what steps_per_s and time are measured over: seconds, updates and steps of this process, and
    when that began, as `wall_s` of the metrics counts"""
    resumed: str | None = None
    """"exact", or "inexact: " and why; None where the run was not resumed"""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """what went wrong without ending the run"""

    @property
    def exit_code(self) -> int:
        return EXIT[self.status]

    def tree(self) -> dict[str, Any]:
        return asdict(self)
