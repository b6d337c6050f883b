"""How learning slows as staleness grows: PPO with windows of 1, 2, 4 and 8 batches (Figure 12a).

    python benchmarks/lag.py [--seeds 5] [--jobs 1] [--steps 300000] [--config ppo_cartpole]

Each update draws one batch out of the newest K, of which 1/K is new: the paper's New, Lag2, Lag4
and Lag8. Whatever K is, an update follows as many new steps as a batch has, so that curves over env
steps compare alike; what differs is how old a batch is on average. Engine serial, so that nothing
depends on speed. The mean return over the first --steps steps (the area under the curve)
is compared, with bootstrap intervals over seeds, and the steps to the target.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measure import run_json, save, table

WINDOWS = {"New": 1, "Lag2": 2, "Lag4": 4, "Lag8": 8}
POINTS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--steps", type=int, default=300_000, help="of each run")
    parser.add_argument("--config", default="ppo_cartpole")
    parser.add_argument("--target", type=float, default=475)
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    work = [(name, seed) for seed in seeds for name in WINDOWS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(lambda w: once(*w, arguments, Path(folder)), work))
    cases, rows = {}, []
    for name in WINDOWS:
        mine = [run for run in runs if run["name"] == name]
        areas = [area(run["curve"], arguments.steps) for run in mine]
        reached = [run["target_at"] for run in mine if run["target_at"] is not None]
        middle, low, high = spread(areas)
        staleness = float(np.mean([run["staleness"] for run in mine]))
        cases[name] = {
            "window": WINDOWS[name], "area": areas, "mean": middle, "interval": [low, high],
            "reached": len(reached), "steps_to_target": reached, "staleness": staleness,
            "freshness": float(np.mean([run["freshness"] for run in mine])), "runs": mine,
        }  # fmt: skip
        rows.append((name, f"{staleness:.2f}", f"{middle:.0f}", f"{low:.0f}", f"{high:.0f}",
                     f"{len(reached)} of {len(mine)}",
                     f"{np.median(reached):,.0f}" if reached else "-"))  # fmt: skip
    print(table(("", "staleness", "mean return", "from", "to", "reached", "steps to it"), rows))
    print(f"written: {save('lag', {'cases': cases, 'config': arguments.config})}")


def once(name: str, seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of so many steps, and its curve."""
    argv = [
        sys.executable, "-m", "tianji", "train", arguments.config, f"seed={seed}",
        "scale.engine=serial", f"reuse.window={WINDOWS[name]}", f"stop.steps={arguments.steps}",
        "stop.return=1e9", "--json", "--plain", "--runs", str(folder / f"{name}-{seed}"),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=1800)
    rows = [json.loads(line) for line in
            (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    curve = [[row["step"], row["rollout/ep_rew_mean"]] for row in rows
             if row.get("rollout/ep_rew_mean") is not None]  # fmt: skip
    at = next((step for step, value in curve if value >= arguments.target), None)
    fresh = [row["staleness/freshness"] for row in rows if "staleness/freshness" in row]
    keep = np.unique(np.linspace(0, len(curve) - 1, POINTS).round().astype(int)).tolist()
    return {
        "name": name, "seed": seed, "curve": [curve[i] for i in keep], "target_at": at,
        "staleness": result["staleness"]["mean"], "freshness": float(np.mean(fresh)),
    }  # fmt: skip


def area(curve: list[list[float]], steps: int) -> float:
    """The mean return over the first steps."""
    xs, ys = np.array(curve, float).T
    at = np.linspace(0, steps, 200)
    return float(np.interp(at, xs, ys).mean())


def spread(values: list[float]) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    xs = np.asarray(values)
    means = xs[rng.integers(len(xs), size=(10_000, len(xs)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(xs.mean()), float(low), float(high)


if __name__ == "__main__":
    main()
