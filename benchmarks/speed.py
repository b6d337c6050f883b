"""Real runs of a config, spread in some way, and how quick they are."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import run_json

from tianji import trace
from tianji.plan import Choice

SKIP = 0.35
"""share of a run, at its beginning, that does not count"""


def spread(choice: Choice) -> list[str]:
    """The overrides that spread a config so."""
    names = {"envs": "envs_per_actor"}
    fields = dataclasses.asdict(choice)
    return [
        f"scale.{names.get(key, key)}={value}" for key, value in fields.items() if key != "hosts"
    ]


def timed(
    config: str, overrides: Sequence[str], seconds: float, folder: Path, rows: float
) -> dict[str, Any]:
    """The result of a run that ends after so many seconds, and `new_sps`: its new steps per second,
    as many as updates follow, each of them `rows`."""
    argv = [
        sys.executable, "-m", "tianji", "train", f"configs/{config}.toml", *overrides,
        f"stop.seconds={seconds:g}", "stop.return=1e9", "stop.steps=1_000_000_000",
        "checkpoint.seconds=inf", "eval.every=0", "--json", "--plain", "--runs", str(folder),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=seconds + 120)
    result["new_sps"] = rows * updates_per_s(Path(result["run_dir"]))
    return result


def updates_per_s(run: Path) -> float:
    """Of all groups together, from the moments at which updates ended, by the traces of those that
    learn; of several learners that share batches, by the first one's."""
    rate = 0.0
    for track in trace.read(run):
        kind = track.host.rpartition(".")[2]
        if kind not in ("serial", "learner", "worker") or "learner/update" not in track.keys:
            continue
        ends = track.end[track.key == track.keys.index("learner/update")]
        ends = ends[ends >= SKIP * ends[-1]]
        if len(ends) > 1:
            rate += (len(ends) - 1) / (ends[-1] - ends[0])
    return rate
