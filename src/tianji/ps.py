"""Which processes a running run has, and how they are: what `tianji ps` prints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tianji.errors import Refusal
from tianji.folder import HOSTS, find_run
from tianji.machine import process_cpu, process_rss, process_started
from tianji.view.status import columns

MEASURE = 0.3
"""seconds over which CPU time is measured"""


def hosts(run: str | None, runs: str = "runs") -> list[dict[str, Any]]:
    """The hosts of a run, or of every run in `runs` that has some: one object for each, with the
    role, pid, cores, state, steps per second, CPU share in percent and resident bytes."""
    folders = [find_run(run)] if run else sorted(p.parent for p in Path(runs).glob(f"*/{HOSTS}"))
    rows = [row for folder in folders for row in _table(folder)]
    if run and not rows:
        raise Refusal(
            f"{run} has no running processes: it has ended, was killed, or runs in one process "
            f'(scale.engine = "serial"). `tianji ps` without a name lists all that run.'
        )
    before = {row["pid"]: process_cpu(row["pid"]) for row in rows}
    began = time.monotonic()
    if rows:
        time.sleep(MEASURE)
    seconds = time.monotonic() - began
    alive = []
    for row in rows:
        spent, old = process_cpu(row["pid"]), before[row["pid"]]
        if spent is None or old is None:
            continue
        row["cpu_percent"] = round(100 * (spent - old) / seconds, 1)
        row["rss"] = process_rss(row["pid"])
        alive.append(row)
    return alive


def told(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no run has processes here; runs of engine serial are one process and not listed"
    lines = [("run", "role", "pid", "cores", "state", "steps/s", "CPU %", "RSS MiB")]
    for row in rows:
        rate = row["steps_per_s"]
        lines.append(
            (
                row["run"],
                row["role"],
                str(row["pid"]),
                ",".join(map(str, row["cores"])) or "any",
                row["state"],
                "" if rate is None else f"{rate:,.0f}",
                f"{row['cpu_percent']:.0f}",
                f"{row['rss'] / 2**20:.0f}",
            )
        )
    return "\n".join(columns(lines))


def _table(folder: Path) -> list[dict[str, Any]]:
    try:
        table = json.loads((folder / HOSTS).read_text())
    except FileNotFoundError:
        return []
    if process_started(table["launcher"]) != table["started"]:
        return []  # it was killed and could not take its table away
    return [{"run": str(folder), **row} for row in table["hosts"]]
