"""What an actor on Atari costs beside the game and the network, and what halves and bfloat16 bring.

    python benchmarks/atari.py [--rounds 7] [--seconds 1]

The actor runs Pong under its driver, through a conduit, on one core: stacks held once, episodes
counted, rows checked. The bare loop is the same vector env and the same network on the same core,
and nothing else. Rates of these are steps per second of CPU time, as others may use the machine.
Halves: steps per second on two cores, where the game has a thread of its own, with and without one
half simulating while actions are chosen for the other. All are measured in turn, in one run.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from measure import interleaved, medians, ratio_of_medians, save, table

from tianji import networks
from tianji.algorithm import Network
from tianji.algorithms.ppo import PPO
from tianji.build import Built, build
from tianji.config import EnvConfig, ScaleConfig
from tianji.driver import Serial
from tianji.probe import Sink
from tianji.testing.algorithm import config_for
from tianji.types import leaf

BAR = 0.85
T = 16
GAME = EnvConfig("ALE/Pong-v5")
ENVS = (8, 32, 64)
HALVED = 32
"""envs where halves are measured"""


def built_for(B: int, precision: str, halves: bool = False) -> Built:
    scale = ScaleConfig(envs_per_actor=B, rollout_length=T, halves=halves)
    config = config_for(PPO(epochs=1, minibatches=1), scale=scale)
    config = replace(config, env=GAME, network=Network(precision=precision))
    built = build(config)
    built.learner.begin()
    return built


def actor_rate(
    B: int,
    seconds: float,
    clock: Callable[[], float],
    precision: str = "bfloat16",
    halves: bool = False,
    cores: set[int] | None = None,
) -> Callable[[], float]:
    os.sched_setaffinity(0, cores or {0})
    built = built_for(B, precision, halves)
    actor = built.actors[0]
    driver = Serial([actor, Sink(built.transport.inbox(built.assembly.lanes[0]))])

    def rate() -> float:
        os.sched_setaffinity(0, cores or {0})
        before, begun = actor._seq, clock()
        while clock() - begun < seconds:
            end = actor._seq + 1
            while actor._seq < end:
                driver.step()
        return (actor._seq - before) * T * B / (clock() - begun)

    rate()
    return rate


def bare_rate(
    B: int, seconds: float, clock: Callable[[], float], core: int, precision: str = "bfloat16"
) -> Callable[[], float]:
    from ale_py.vector_env import AtariVectorEnv

    os.sched_setaffinity(0, {core})
    built = built_for(1, precision)
    policy = built.actors[0]._policy
    policy.load(built.learner._trainer.params(0))
    (network,), over, params = policy._networks, policy._over, policy._params
    env = AtariVectorEnv("pong", B, num_threads=1, repeat_action_probability=0.25)
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)

    def rate() -> float:
        nonlocal observation
        os.sched_setaffinity(0, {core})
        steps, begun = 0, clock()
        while clock() - begun < seconds:
            for _ in range(T):
                action, _ = over.sample(network(observation), params, rng)
                observation, *_ = env.step(action)
            steps += T * B
        return steps / (clock() - begun)

    rate()
    return rate


def inference_rate(B: int, seconds: float, precision: str) -> Callable[[], float]:
    """Rows that a network answers, per second of CPU time."""
    network, observation = Network(precision=precision), leaf((4, 84, 84), np.uint8)
    (module,) = networks.build(network, observation, 6)
    params = {f"n.{name}": p.detach().numpy().copy() for name, p in module.named_parameters()}
    answer = networks.inference(network, observation, module, "n")
    answer.load(params)
    x = np.random.default_rng(0).integers(0, 255, (B, 4, 84, 84), dtype=np.uint8)

    def rate() -> float:
        rows, begun = 0, time.process_time()
        while time.process_time() - begun < seconds:
            answer(x)
            rows += B
        return rows / (time.process_time() - begun)

    rate()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    arguments = parser.parse_args()
    seconds, rounds = arguments.seconds, arguments.rounds
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    one, two = cores[-1], set(cores[:2])
    cpu, wall = time.process_time, time.perf_counter
    tasks: dict[str, Callable[[], float]] = {}
    for B in ENVS:
        tasks[f"actor, {B} envs"] = actor_rate(B, seconds, cpu, cores={one})
        tasks[f"bare, {B} envs"] = bare_rate(B, seconds, cpu, one)
        for precision in ("float32", "bfloat16"):
            tasks[f"{precision}, {B} rows"] = inference_rate(B, seconds / 2, precision)
    if len(cores) > 1:
        for halves in (False, True):
            name = f"halves {'on' if halves else 'off'}"
            tasks[name] = actor_rate(HALVED, 2 * seconds, wall, halves=halves, cores=two)
    taken = interleaved(tasks, rounds)
    middle = medians(taken)
    pairs = {
        f"actor over bare loop, {B} envs": (f"actor, {B} envs", f"bare, {B} envs") for B in ENVS
    }
    for B in ENVS:
        pairs[f"bfloat16 over float32, {B} rows"] = (f"bfloat16, {B} rows", f"float32, {B} rows")
    if len(cores) > 1:
        pairs[f"halves on over off, {HALVED} envs"] = ("halves on", "halves off")
    results, rows = {}, []
    for name, (a, b) in pairs.items():
        ratio, low, high = ratio_of_medians(taken[a], taken[b])
        results[name] = {
            "median": {a: middle[a], b: middle[b]},
            "ratio": ratio,
            "interval": [low, high],
            "unit": "steps/s" if "halves" in name else "steps/CPU s",
        }
        interval = f"[{low:.2f}, {high:.2f}]"
        rows.append([name, f"{middle[a]:,.0f}", f"{middle[b]:,.0f}", f"{ratio:.2f}", interval])
    print(table(["comparison", "first", "second", "ratio", "95 %"], rows))
    save("atari", {"bar": BAR, "rounds": rounds, "comparisons": results, "samples": taken})
    below = [name for name in results if "bare" in name and results[name]["ratio"] < BAR]
    if below:
        sys.exit(f"below {BAR}: {', '.join(below)}")


if __name__ == "__main__":
    main()
