"""Real runs of a config, spread in some way, and how quick they are."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import BARE, ROOT, run_json

import tianji
from tianji import trace
from tianji.plan import Choice
from tianji.planner import FIELDS
from tianji.probe import Measured, Probe

SKIP = 0.35
"""share of a run, at its beginning, that does not count"""


def spread(choice: Choice) -> list[str]:
    """The overrides that spread a config so."""
    names = {"envs": "envs_per_actor"}
    return [f"scale.{names.get(key, key)}={getattr(choice, key)}" for key in FIELDS]


def timed(
    config: str, overrides: Sequence[str], seconds: float, folder: Path, rows: float
) -> dict[str, Any]:
    """The result of a run that ends after so many seconds, and `new_sps`: its new steps per second,
    as many as updates follow, each of them `rows`."""
    argv = [
        sys.executable, "-m", "tianji", "train", f"configs/{config}.toml", *overrides,
        f"stop.seconds={seconds:g}", *BARE, "--json", "--plain", "--runs", str(folder),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=seconds + 120)
    result["new_sps"] = rows * updates_per_s(Path(result["run_dir"]))
    return result


def source(name: str) -> Path:
    """Of a shipped config, or one that lies here."""
    shipped = ROOT / "configs" / f"{name}.toml"
    return shipped if shipped.is_file() else ROOT / "benchmarks" / f"{name}.toml"


def runner() -> Probe:
    """A process that makes runs, one after the other: nothing is imported twice."""
    return Probe(Runs, sorted(os.sched_getaffinity(0)), patience=900.0)


class Runs:
    """What that process does when it is asked to."""

    def __init__(self) -> None:
        self._warm = tianji.warm()
        self._warm.__enter__()  # as long as this process lives

    def __call__(self, config: str, overrides: list[str], folder: str) -> Measured:
        result = tianji.train(source(config), overrides, runs=folder)
        return {"run_dir": str(result.run_dir)}


def forked(
    runs: Probe, config: str, overrides: Sequence[str], seconds: float, folder: Path, rows: float
) -> float:
    """New steps per second of a run that ends after so many seconds, of whose updates each has
    `rows`."""
    every = [*overrides, f"stop.seconds={seconds:g}", *BARE]
    run = Path(runs.ask(config=config, overrides=every, folder=str(folder))["run_dir"])
    return rows * updates_per_s(run)


def updates_per_s(run: Path) -> float:
    """Of all groups together, from the moments at which updates ended; 0 where one of them made
    fewer than two, so that it is not known how quick it was."""
    found = updates(run)
    if any(len(ends) < 2 for ends in found):
        return 0.0
    return sum((len(ends) - 1) / (ends[-1] - ends[0]) for ends in found)


def updates(run: Path) -> list[np.ndarray]:
    """The moments at which updates ended, by the traces of those that learn; of several learners
    that share batches, by the first one's."""
    found = []
    for track in trace.read(run):
        kind = track.host.rpartition(".")[2]
        if kind not in ("serial", "learner", "worker"):
            continue
        known = "learner/update" in track.keys
        ends = track.end[track.key == track.keys.index("learner/update")] if known else np.empty(0)
        found.append(ends[ends >= SKIP * ends[-1]] if len(ends) else ends)
    return found
