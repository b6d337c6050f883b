"""Real runs of a config, spread in some way, and how quick they are."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import run_json

from tianji.plan import Choice

SKIP = 0.35
"""share of a run, at its beginning, that does not count"""


def spread(choice: Choice) -> list[str]:
    """The overrides that spread a config so."""
    names = {"envs": "envs_per_actor"}
    fields = dataclasses.asdict(choice)
    return [f"scale.{names.get(key, key)}={value}" for key, value in fields.items()]


def timed(config: str, overrides: Sequence[str], seconds: float, folder: Path) -> dict[str, Any]:
    """The result of a run that ends after so many seconds, and `new_sps`: its new steps per second,
    the beginning left out."""
    argv = [
        sys.executable, "-m", "tianji", "train", f"configs/{config}.toml", *overrides,
        f"stop.seconds={seconds:g}", "stop.return=1e9", "stop.steps=1_000_000_000",
        "checkpoint.seconds=inf", "eval.every=0", "--json", "--plain", "--runs", str(folder),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=seconds + 120)
    rows = [json.loads(line) for line in
            (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    learning = [row for row in rows if row["updates"] > 0]
    begin = SKIP * rows[-1]["wall_s"]
    late = [row for row in learning if row["wall_s"] >= begin]
    first, last = late[0], late[-1]
    result["new_sps"] = float(result["steps_per_s"]["received"])
    if last["wall_s"] > first["wall_s"]:
        result["new_sps"] = (last["step"] - first["step"]) / (last["wall_s"] - first["wall_s"])
    return result
