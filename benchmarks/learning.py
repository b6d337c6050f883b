"""Does every algorithm learn what it is meant to, over seeds, and how far is that from chance?

    python benchmarks/learning.py [--seeds 3] [--jobs 1] [--seconds 600] [NAME ...] [-- K=V ...]

Each run is `tianji train` of a shipped config. It has reached its target where the return or the
win rate ended it; a run that --seconds end tells how far it came. What follows `--` overrides keys
of the configs, as on the command line, and is told with the result. Results are written to
benchmarks/results/learning/, a file for each config, with the curve of every seed.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, ROOT, run_json, save, split_overrides, table

import tianji
from tianji.env import Continuous, Discrete, EnvSpec, MultiDiscrete
from tianji.ledger import Ledger
from tianji.types import Array, Leaves

TARGETS: dict[str, float] = {
    "dqn_cartpole": 475, "ppo_cartpole": 475, "a2c_cartpole": 475, "impala_cartpole": 475,
    "appo_cartpole": 475, "apex_cartpole": 350,
    "ppo_pendulum": -200, "sac_pendulum": -200, "td3_pendulum": -200,
    "dqn_breakout_minatar": 5, "ppo_breakout_minatar": 5,
    "dqn_pong": 18, "ppo_pong": 18,
    "maddpg_spread": -35, "mappo_spread": -45, "ppo_recall": 0.95,
    "qmix_3m": 0.8, "vdn_3m": 0.8, "mappo_3m": 0.8, "qmix_smax_3m": 0.8,
}  # fmt: skip
"""mean return of the last 100 training episodes, or share of them that were won"""

POINTS = 60
"""of a curve, at most"""
CHANCE, MOST = 100, 4000
"""episodes that random actions play, at least, and steps of each of 8 envs, at most"""


def main() -> None:
    own, more = split_overrides()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of configs (default: all known)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--seconds", type=float, default=600, help="of training, at most")
    arguments = parser.parse_args(own)
    names = arguments.names or [n for n in TARGETS if (ROOT / "configs" / f"{n}.toml").is_file()]
    runs = [(name, seed) for seed in range(1, arguments.seeds + 1) for name in names]
    overrides = [f"stop.seconds={arguments.seconds:g}", *more]
    by_chance = {name: chance(name) for name in names}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda run: once(*run, overrides, Path(folder)), runs))
    rows = []
    for name in names:
        mine = [r for r in results if r["config"] == name]
        payload = {
            "config": name, "target": TARGETS.get(name), "by": mine[0]["by"],
            "chance": by_chance[name], "overrides": more, "runs": mine, "jobs": arguments.jobs,
        }  # fmt: skip
        (RESULTS / "learning").mkdir(parents=True, exist_ok=True)
        save(f"learning/{name}", payload)
        said = [" ".join(f"{r[key]:,.{digits}f}" for r in mine)
                for key, digits in (("value", 2), ("steps", 0), ("total_s", 0))]  # fmt: skip
        rows.append((name, f"{sum(r['reached'] for r in mine)} of {len(mine)}",
                     f"{payload['chance']:.2f}", *said))  # fmt: skip
    print(table(("config", "reached", "chance", "value", "steps", "wall s"), rows))


def once(name: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run: what it came to, and its curve."""
    argv = [
        sys.executable, "-m", "tianji", "train", f"configs/{name}.toml", f"seed={seed}",
        *overrides, "--json", "--plain", "--runs", str(folder / f"{name}-{seed}"),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=7200)
    by = "win_rate" if result["win_rate"] is not None else "return"
    value = result["win_rate"] if by == "win_rate" else result["return_mean"]
    target = TARGETS.get(name)
    reached = result["stop_reason"].startswith(by) or (target is not None and value >= target)
    print(f"{name} seed {seed}: {by} {value:.3f}, {result['stop_reason']}, "
          f"{result['total_s']:.0f} s", flush=True)  # fmt: skip
    kept = {key: result[key] for key in ("steps", "updates", "total_s", "stop_reason")}
    return {
        "config": name, "seed": seed, "by": by, "value": value, "reached": bool(reached),
        "return_mean": result["return_mean"], "win_rate": result["win_rate"], **kept,
        "curve": curve(Path(result["run_dir"]) / "metrics.jsonl", by),
    }  # fmt: skip


def curve(path: Path, by: str) -> list[list[float]]:
    """(steps, seconds, value) along a run."""
    tag = "rollout/win_rate" if by == "win_rate" else "rollout/ep_rew_mean"
    points = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get(tag) is not None:
            at = row["time/total_timesteps"], round(row["time/time_elapsed"], 2)
            points.append([*at, round(row[tag], 4)])
    keep = np.unique(np.linspace(0, len(points) - 1, POINTS).round().astype(int)) if points else []
    return [points[i] for i in keep]


def chance(name: str) -> float:
    """What random actions come to in the env of a config: the mean return, or the win rate."""
    config = tianji.load_config(ROOT / "configs" / f"{name}.toml")
    env = config.env.make(8)
    rng = np.random.default_rng(0)
    ledger, observation, ended = Ledger(8), env.reset(0), []
    for _ in range(MOST):
        if sum(map(len, ended)) >= CHANCE:
            break
        step = env.step(anything(env.spec, observation, rng))
        observation = step.observation
        ended.append(ledger.count(step)[1])
    env.close()
    played = np.concatenate(ended)
    known = played["win"] >= 0
    return float((played["win"][known] if known.any() else played["return"]).mean())


def anything(spec: EnvSpec, observation: Leaves, rng: np.random.Generator) -> Array:
    """Random actions for 8 envs; legal ones."""
    shape, action = (8, *spec.action_leaf.shape), spec.action
    if isinstance(action, Continuous):
        low, high = np.clip([action.low, action.high], -1e3, 1e3)
        return rng.uniform(low, high, shape).astype(np.float32)
    if isinstance(action, MultiDiscrete):
        return rng.integers(0, action.nvec, shape)
    assert isinstance(action, Discrete)
    drawn = rng.random((*shape, action.n))
    return np.where(observation["mask"], drawn, -1).argmax(-1) if "mask" in observation else (
        drawn.argmax(-1)
    )  # fmt: skip


if __name__ == "__main__":
    main()
