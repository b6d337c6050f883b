"""The particle environments in numpy against the package mpe2, both stepped by random actions.

    python benchmarks/mpe.py [--rounds 7] [--seconds 0.5] [--envs 64]

Ours are B worlds stepped together; mpe2's parallel env is one world, and B of them are stepped in a
loop, as a vector of single envs would. Both reset where episodes end. Rates are env steps a second
(one step moves all agents of a world), compared as interleaved medians of one run. That both give
the same observations and rewards is a test, tests/test_envs_mpe.py.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import importlib
import time
from collections.abc import Callable

import numpy as np
from measure import interleaved, medians, ratio_of_medians, save, table

from tianji.env import make_env

WORLDS = ("simple_spread", "simple_tag", "simple_adversary")
DRAWN = 64
"""steps of random actions that are drawn before the clock runs"""


def our_rate(world: str, B: int, seconds: float) -> Callable[[], float]:
    env = make_env(f"mpe/{world}", B, {})
    env.reset(0)
    shape = (DRAWN, B, len(env.spec.agents))
    actions = np.random.default_rng(0).integers(5, size=shape)

    def rate() -> float:
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            for action in actions:
                steps += int(env.step(action).valid.sum())
        return steps / (time.perf_counter() - begun)

    return rate


def mpe2_rate(world: str, seconds: float) -> Callable[[], float]:
    env = importlib.import_module(f"mpe2.{world}_v3").parallel_env()
    env.reset(seed=0)
    agents = list(env.possible_agents)
    drawn = np.random.default_rng(0).integers(5, size=(DRAWN, len(agents)))
    actions = [dict(zip(agents, row.tolist(), strict=True)) for row in drawn]

    def rate() -> float:
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            for action in actions:
                if not env.agents:
                    env.reset()
                env.step(action)
                steps += 1
        return steps / (time.perf_counter() - begun)

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--envs", type=int, default=64)
    args = parser.parse_args()
    comparisons, rows = {}, []
    for world in WORLDS:
        tasks = {
            "tianji": our_rate(world, args.envs, args.seconds),
            "mpe2": mpe2_rate(world, args.seconds),
        }
        samples = interleaved(tasks, args.rounds)
        ratio, low, high = ratio_of_medians(samples["tianji"], samples["mpe2"])
        median = medians(samples)
        comparisons[world] = {
            "unit": "env steps/s",
            "median": median,
            "ratio": ratio,
            "interval": [low, high],
            "samples": samples,
        }
        told = [f"{median[name] / 1e3:.1f} k" for name in tasks]
        rows.append([world, *told, f"{ratio:.0f}", f"{low:.0f} to {high:.0f}"])
    print(table(["world", f"tianji, {args.envs} envs", "mpe2", "ratio", "95 %"], rows))
    print(save("mpe", {"envs": args.envs, "comparisons": comparisons}))


if __name__ == "__main__":
    main()
