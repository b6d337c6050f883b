"""How learning slows as staleness grows: PPO with windows of 1, 2, 4 and 8 batches (Figure 12a).

    python benchmarks/lag.py [--config ppo_acrobot] [--seeds 10] [--jobs 1] [--steps 500000]

Each update draws one batch out of the newest K, of which 1/K is new: the paper's New, Lag2, Lag4
and Lag8. Whatever K is, an update follows as many new steps as a batch has, so that runs compare by
env steps; what differs is how old a batch is on average. Engine serial, so that nothing depends on
speed. A run ends when the config's target is reached: the steps that this took are compared, with
bootstrap intervals over seeds. A run that has not reached it after --steps counts with these.
docs/lag.svg shows it; --draw alone draws it again.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import picture
from measure import RESULTS, run_json, save, table

WINDOWS = {"New": 1, "Lag2": 2, "Lag4": 4, "Lag8": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--steps", type=int, default=500_000, help="of a run, at most")
    parser.add_argument("--config", default="ppo_acrobot")
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    if arguments.draw:
        draw()
        return
    seeds = range(1, arguments.seeds + 1)
    work = [(name, seed) for seed in seeds for name in WINDOWS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(lambda w: once(*w, arguments, Path(folder)), work))
    cases, rows = {}, []
    fresh = [run["steps"] for run in runs if run["name"] == "New"]
    for name in WINDOWS:
        mine = [run for run in runs if run["name"] == name]
        steps = [run["steps"] for run in mine]
        middle, low, high = spread(steps)
        staleness = float(np.mean([run["staleness"] for run in mine]))
        cases[name] = {
            "window": WINDOWS[name], "steps": steps, "mean": middle, "interval": [low, high],
            "reached": sum(run["reached"] for run in mine), "staleness": staleness,
            "freshness": float(np.mean([run["freshness"] for run in mine])),
            "over_new": middle / float(np.mean(fresh)), "curves": [run["curve"] for run in mine],
        }  # fmt: skip
        rows.append((name, f"{cases[name]['freshness']:.2f}", f"{staleness:.2f}", f"{middle:,.0f}",
                     f"{low:,.0f} to {high:,.0f}", f"{cases[name]['over_new']:.2f}",
                     f"{cases[name]['reached']} of {len(mine)}"))  # fmt: skip
    print(table(("", "first use", "staleness", "steps to target", "95 %", "over New", "reached"),
                rows))  # fmt: skip
    payload = {"cases": cases, "config": arguments.config, "most_steps": arguments.steps}
    print(f"written: {save('lag', payload)}")
    if picture.possible():
        draw()


def draw() -> None:
    """Returns over steps, the mean over seeds; and steps to the target over staleness."""
    results = json.loads((RESULTS / "lag.json").read_text())
    with picture.drawn("lag", 2, (8.4, 3.2)) as (curves, bars):
        for name, case in results["cases"].items():
            end = float(np.mean(case["steps"]))
            at = np.linspace(0, end, 60)
            ys = [np.interp(at, *np.array(curve, float).T) for curve in case["curves"]]
            curves.plot(at / 1e3, np.mean(ys, axis=0), label=name)
            low, high = case["interval"]
            middle = case["mean"] / 1e3
            bars.errorbar(case["staleness"], middle, [[middle - low / 1e3], [high / 1e3 - middle]],
                          fmt="o", capsize=3, label=name)  # fmt: skip
        curves.set(xlabel="env steps, thousands", ylabel="return, last 100 episodes",
                   title=results["config"])  # fmt: skip
        curves.legend(frameon=False, fontsize=8)
        bars.set(xlabel="staleness, mean", ylabel="steps to the target, thousands", ylim=(0, None))


def once(name: str, seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run to the target, and its curve."""
    argv = [
        sys.executable, "-m", "tianji", "train", arguments.config, f"seed={seed}",
        "scale.engine=serial", f"reuse.window={WINDOWS[name]}", f"stop.steps={arguments.steps}",
        "--json", "--plain", "--runs", str(folder / f"{name}-{seed}"),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=1800)
    rows = [json.loads(line) for line in
            (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    curve = [[row["step"], row["rollout/ep_rew_mean"]] for row in rows
             if row.get("rollout/ep_rew_mean") is not None]  # fmt: skip
    fresh = [row["staleness/freshness"] for row in rows if "staleness/freshness" in row]
    return {
        "name": name, "seed": seed, "steps": min(result["steps"], arguments.steps),
        "reached": result["steps"] < arguments.steps, "curve": curve,
        "staleness": result["staleness"]["mean"], "freshness": float(np.mean(fresh)),
    }  # fmt: skip


def spread(values: list[int]) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    xs = np.asarray(values, float)
    means = xs[rng.integers(len(xs), size=(10_000, len(xs)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(xs.mean()), float(low), float(high)


if __name__ == "__main__":
    main()
