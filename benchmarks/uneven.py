"""Actors that are not equally quick: what a plan's arithmetic says of each preset, and what is so.

    python benchmarks/uneven.py [--actors 4] [--rounds 3] [--seconds 4]

A simulated load: steps and updates take fixed times, asleep, so that two cores suffice for all
processes, nothing is left to chance, and only the arithmetic is at stake. PPO, engine local; an
update takes 0.4 or 0.8 of the time in which the actors together make its rollouts.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import PATH, interleaved, save, table
from speed import updates_per_s

import tianji
from tianji import profiler
from tianji.config import load_config
from tianji.plan import Rates, predict
from tianji.planner import choice_of

STEP, T, ENVS = 0.005, 8, 4
SPREADS = (0.0, 0.2)
UPDATES = (0.4, 0.8)
WAYS = ("sync", "periodic", "one_step", "tianji", "bounded", "free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    arguments = parser.parse_args()
    os.environ.update(PATH)  # for the hosts
    tasks, told = {}, {}
    for spread in SPREADS:
        for share in UPDATES:
            for relax in WAYS:
                name = f"{relax}, actors +- {spread:.0%}, update {share:g} of collecting"
                tree = asked(relax, spread, share, arguments)
                told[name] = predicted(tree)
                tasks[name] = partial(measured, tree)
    samples = interleaved(tasks, arguments.rounds)
    found, rows = {}, []
    for name, taken in samples.items():
        rate = float(np.median(taken))
        found[name] = {"measured": rate, "predicted": told[name], "samples": taken}
        rows.append((name, f"{told[name]:.1f}", f"{rate:.1f}", f"{told[name] / rate - 1:+.1%}"))
    print(table(("way", "updates/s predicted", "measured", "error"), rows))
    print(f"written: {save('uneven', {'ways': found})}")


def asked(relax: str, spread: float, share: float, arguments: argparse.Namespace) -> dict[str, Any]:
    factors = np.linspace(1 - spread, 1 + spread, arguments.actors).tolist()
    return {
        "env": {"id": "simulated/Env", "imports": ["simulated"],
                "kwargs": {"step_s": STEP, "uneven": factors}},
        "algorithm": {"name": "simulated_ppo", "update_s": share * T * STEP},
        "scale": {"engine": "local", "actors": arguments.actors, "envs_per_actor": ENVS,
                  "rollout_length": T, "relax": relax},
        "stop": {"seconds": arguments.seconds},
        "checkpoint": {"store": "never"},
    }  # fmt: skip


def predicted(tree: dict[str, Any]) -> float:
    """Updates per second, by a plan's arithmetic."""
    config = load_config(tree)
    factors = tree["env"]["kwargs"]["uneven"]
    mean = statistics.harmonic_mean(factors)
    update = tree["algorithm"]["update_s"]
    rates = Rates(
        act={ENVS: STEP * mean}, begin=2e-4, send=1e-5, receive=5e-5, serve=1e-4,
        learn={1: update}, take=0.0, wake=1e-4, slow_act={1: 1.0}, slow_learn={1: 1.0},
        slowest={1: 1.0, len(factors): max(factors) / mean},
    )  # fmt: skip
    task = profiler.task_of(config, profiler.see(config).env)
    cores = len(factors) + 2
    return predict(task, rates, choice_of(config), cores).new / task.rows


def measured(tree: dict[str, Any]) -> float:
    """Updates per second of a real run."""
    with tempfile.TemporaryDirectory() as runs:
        return updates_per_s(Path(tianji.train(tree, runs=runs).run_dir))


if __name__ == "__main__":
    main()
