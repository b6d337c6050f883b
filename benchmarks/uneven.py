"""Actors that are not equally quick: what a plan's arithmetic says of each preset, and what is so.

    python benchmarks/uneven.py [--actors 4] [--rounds 3] [--seconds 4]

A simulated load: steps and updates take fixed times, asleep, so that two cores suffice for all
processes, nothing is left to chance, and only the arithmetic is at stake. PPO, engine local; an
update takes 0.1, 0.4 or 0.8 of the time in which the actors together make its rollouts.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import tempfile
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from measure import PATH, interleaved, save, table
from speed import updates_per_s

import tianji
from tianji import probe, shape
from tianji.config import load_config
from tianji.plan import Rates, predict
from tianji.planner import choice_of

STEP, T, ENVS = 0.005, 8, 4
SPREADS = (0.0, 0.2)
UPDATES = (0.1, 0.4, 0.8)
WAYS = ("sync", "periodic", "one_step", "tianji", "bounded", "free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    arguments = parser.parse_args()
    os.environ.update(PATH)  # for the hosts
    ways = {
        f"{relax}, actors +- {spread:.0%}, update {share:g} of collecting": (relax, spread, share)
        for spread, share, relax in product(SPREADS, UPDATES, WAYS)
    }
    trees = {name: asked(*way, arguments.actors) for name, way in ways.items()}
    told = {name: predicted(tree) for name, tree in trees.items()}
    stop = {"stop": {"seconds": arguments.seconds}}
    samples = interleaved(
        {name: partial(measured, tree | stop) for name, tree in trees.items()}, arguments.rounds
    )
    found, rows = [], []
    for name, taken in samples.items():
        rate, (relax, spread, share) = float(np.median(taken)), ways[name]
        found.append({"relax": relax, "spread": spread, "update": share, "measured": rate,
                      "predicted": told[name], "samples": taken})  # fmt: skip
        rows.append((name, f"{told[name]:.1f}", f"{rate:.1f}", f"{told[name] / rate - 1:+.1%}"))
    print(table(("way", "updates/s predicted", "measured", "error"), rows))
    print(f"written: {save('uneven', {'actors': arguments.actors, 'ways': found})}")


def asked(relax: str, spread: float, share: float, actors: int) -> dict[str, Any]:
    factors = np.linspace(1 - spread, 1 + spread, actors).tolist()
    return {
        "env": {"id": "simulated/Env", "imports": ["simulated"],
                "kwargs": {"step_s": STEP, "uneven": factors}},
        "algorithm": {"name": "simulated_ppo", "update_s": share * T * STEP},
        "scale": {"engine": "local", "actors": actors, "envs_per_actor": ENVS,
                  "rollout_length": T, "relax": relax},
        "stop": {"updates": 1 << 40},
        "checkpoint": {"store": "never"},
    }  # fmt: skip


def predicted(tree: dict[str, Any]) -> float:
    """Updates per second, by a plan's arithmetic."""
    config = load_config(tree)
    factors = tree["env"]["kwargs"]["uneven"]
    mean = statistics.harmonic_mean(factors)
    step, update = times(tree["algorithm"]["update_s"])
    rates = Rates(
        act={ENVS: step * mean}, begin=2e-4, send=1e-5, receive=5e-5, serve=1e-4,
        learn={1: update}, take=0.0, wake=1e-4, slow_act={1: 1.0}, slow_learn={1: 1.0},
        slowest={1: 1.0, len(factors): max(factors) / mean},
    )  # fmt: skip
    task = shape.task_of(config, shape.see(config).env)
    return predict(task, rates, choice_of(config), cores=len(factors) + 2).new / task.rows


@cache
def times(update_s: float) -> tuple[float, float]:
    """Seconds of a step and of an update, each alone: somewhat more than what is slept."""
    config = shape.template(load_config(asked("sync", 0.0, update_s / (T * STEP), 4)))
    mine = sorted(os.sched_getaffinity(0))[:1]
    acted = probe.alone(lambda: probe.acting(config, ENVS), mine, seconds=1.0)
    learnt = probe.alone(lambda: probe.learning(config, 64), mine, cores=mine, seconds=1.0)
    return acted["step"], learnt["learn"]


def measured(tree: dict[str, Any]) -> float:
    """Updates per second of a real run."""
    with tempfile.TemporaryDirectory() as runs:
        return updates_per_s(Path(tianji.train(tree, runs=runs).run_dir))


if __name__ == "__main__":
    main()
