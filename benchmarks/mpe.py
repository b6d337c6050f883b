"""The particle environments in numpy against the package mpe2, both stepped by random actions.

    python benchmarks/mpe.py [--rounds 7] [--seconds 0.5] [--envs 64]

Ours are B worlds stepped together; mpe2's parallel env is one world, and B of them are stepped in a
loop, as a vector of single envs would. Both reset where episodes end. Rates are env steps a second
(one step moves all agents of a world), compared as interleaved medians of one run. That both give
the same observations and rewards is a test, tests/test_envs_mpe.py.

For what learners come to, the mean returns of two that do not learn: uniform random actions, and in
simple_spread a rule that knows everything. It sends each agent straight to its landmark, by the
shortest of all assignments at the episode's begin, and brakes there.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import importlib
import itertools
import time
from collections.abc import Callable

import numpy as np
from measure import interleaved, medians, ratio_of_medians, save, table

from tianji.env import make_env
from tianji.envs.mpe import SimpleSpread
from tianji.ledger import Ledger

WORLDS = ("simple_spread", "simple_tag", "simple_adversary")
DRAWN = 64
"""steps of random actions that are drawn before the clock runs"""
EPISODES = 5120
"""that a mean return is of"""


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


def mean_return(env, choose: Callable[[], np.ndarray]) -> float:
    """Of what is reported of each episode."""
    ledger, returns = Ledger(env.num_envs), []
    env.reset(0)
    while len(returns) < EPISODES:
        returns += ledger.count(env.step(choose()))[1]["return"].tolist()
    return float(np.mean(returns))


def random_return(world: str) -> float:
    env, rng = make_env(f"mpe/{world}", 256, {}), np.random.default_rng(0)
    return mean_return(env, lambda: rng.integers(5, size=(256, len(env.spec.agents))))


def rule_return() -> float:
    env = SimpleSpread(256)
    ways = np.array(list(itertools.permutations(range(3))))
    every = np.arange(256)
    chosen = np.zeros(256, np.int64)

    def choose() -> np.ndarray:
        agents, landmarks = env._place[:, :3], env._place[:, 3:]
        distance = np.linalg.norm(agents[:, :, None] - landmarks[:, None], axis=-1)
        best = np.stack([distance[:, range(3), way].sum(1) for way in ways]).argmin(0)
        chosen[:] = np.where(env._clock == 0, best, chosen)
        # 0.4 s: as far as a velocity carries on by itself, at a damping of 0.25 a step of 0.1 s.
        want = landmarks[every[:, None], ways[chosen]] - agents - 0.4 * env._velocity
        axis = np.abs(want).argmax(-1)
        along = np.take_along_axis(want, axis[..., None], -1)[..., 0]
        return np.where(np.abs(along) < 0.03, 0, 1 + 2 * axis + (along > 0))

    return mean_return(env, choose)


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
    returns = {world: {"random": random_return(world)} for world in WORLDS}
    returns["simple_spread"]["rule"] = rule_return()
    print(returns)
    payload = {"envs": args.envs, "comparisons": comparisons, "returns": returns}
    print(save("mpe", {**payload, "episodes": EPISODES}))


if __name__ == "__main__":
    main()
