"""What drawing from replay takes: priorities, and stacks of pictures that are held once.

    python benchmarks/replay.py [--rounds 9]

Microseconds of CPU time per batch, medians over rounds in turn. Priorities: drawing a batch and
setting its new priorities, of 2^20 steps, by the tree alone and by the chooser; the bar is 200 for
256 steps by the tree. Stacks: gathering a batch of 4 x 84 x 84 bytes, now and then, out of pictures
held once, of one actor and of 14, against memory that holds whole stacks; and the bytes of a
million steps by the length of rollouts.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import time
from collections.abc import Callable

import numpy as np
from measure import interleaved, medians, ratio_of_medians, save, table

from tianji.algorithm import Lanes
from tianji.env import Discrete, EnvSpec
from tianji.prioritized import RECORDED, Prioritized, weights
from tianji.store import Replay, Transitions, numbers
from tianji.sumtree import SumTree
from tianji.types import Leaves, Row, leaf, rollout_layout

BAR = 200.0
CAPACITY = 1 << 20
MANY = 14
"""actors whose rollouts a batch is gathered from"""


def timed(work: Callable[[], object], times: int) -> Callable[[], float]:
    """Microseconds of CPU time for each of so many."""

    def run() -> float:
        begun = time.process_time()
        for _ in range(times):
            work()
        return (time.process_time() - begun) / times * 1e6

    return run


def lanes_of(row: Row, slots: int, T: int, B: int, pictures: int = 1, actors: int = 1) -> Lanes:
    layout = rollout_layout(row, T, B)
    rng, lanes = np.random.default_rng(0), list[Leaves]()
    for _ in range(actors):
        memory = {k: np.zeros((slots, *v.shape), v.dtype) for k, v in layout.items()}
        memory["valid"][:] = True
        memory["reward"][:] = rng.normal(size=memory["reward"].shape)
        memory["observation.obs"].reshape(-1)[::97] = 1  # so that its pages are there
        lanes.append(memory)
    return Lanes(tuple(lanes), pictures)


def filled(chooser: Replay, N: int, slots: int, actors: int = 1) -> Leaves:
    for slot in range(slots):
        for lane in range(actors):
            chooser.add(lane, slot)
    selection = numbers(("lane", "step"), N) | weights(N)
    return {k: np.zeros(v.shape, v.dtype) for k, v in selection.items()}


def by_tree(N: int) -> Callable[[], object]:
    rng, tree = np.random.default_rng(0), SumTree(CAPACITY)
    tree.set(np.arange(CAPACITY), rng.random(CAPACITY))
    prefix, values = np.arange(N) + rng.random(N), rng.random(N)

    def work() -> None:
        tree.set(tree.sample(prefix * (tree.total / N)), values)

    return work


def by_chooser(N: int, prioritised: bool) -> Callable[[], object]:
    row = Row({"obs": leaf((4,), np.float32)}, leaf((), np.int64), RECORDED, {})
    slots, T, B, rng = CAPACITY // 4096, 64, 64, np.random.default_rng(0)
    lanes = lanes_of(row, slots, T, B)
    if not prioritised:
        uniform = Replay(lanes, N, slots, 1)
        chosen = filled(uniform, N, slots)
        return lambda: uniform.choose(rng, chosen)
    chooser = Prioritized(lanes, N, slots, 0.99, 1, 0.6, 0.4, 0, "actor")
    told, priority = filled(chooser, N, slots), rng.random(N).astype(np.float32)

    def work() -> None:
        chooser.choose(rng, told)
        chooser.prioritize(told, priority)

    return work


def gathered(N: int, once: bool, actors: int = 1) -> Callable[[], object]:
    """Half a gigabyte of pictures, in rollouts of 32 steps of 8 envs, of so many actors."""
    K, T, B = 4, 32, 8
    stack = leaf((K, 84, 84), np.uint8)
    env = EnvSpec("Pictures", {"obs": stack}, Discrete(6), frames=K if once else 1)
    older = {"frames": leaf((K - 1, 84, 84), np.uint8)} if once else {}
    slots = (256 if once else 64) // actors
    row = Row(env.held, leaf((), np.int64), {}, older)
    lanes = lanes_of(row, slots, T, B, env.frames, actors)
    for memory in lanes.memory:
        memory["valid"][:, 20] = False  # some episodes end
    chooser, rng = Replay(lanes, N, slots, 1), np.random.default_rng(0)
    chosen = filled(chooser, N, slots, actors)
    choices = []
    for _ in range(20):
        chooser.choose(rng, chosen)
        choices.append({k: v.copy() for k, v in chosen.items()})
    gatherer, turn = Transitions(lanes, 0.99, 1), iter(range(1 << 60))
    return lambda: list(gatherer.parts(choices[next(turn) % len(choices)]))


def bytes_per_million(T: int, once: bool) -> float:
    stack = leaf((4, 84, 84), np.uint8)
    env = EnvSpec("Pictures", {"obs": stack}, Discrete(6), frames=4 if once else 1)
    older = {"frames": leaf((3, 84, 84), np.uint8)} if once else {}
    layout = rollout_layout(Row(env.held, leaf((), np.int64), {}, older), T, 1)
    return sum(x.nbytes for x in layout.values()) / T * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    tasks: dict[str, Callable[[], float]] = {}
    for N in (32, 256):
        tasks[f"{N}: tree, draw and set"] = timed(by_tree(N), 100)
        tasks[f"{N}: prioritised, choose and prioritise"] = timed(by_chooser(N, True), 100)
        tasks[f"{N}: uniform, choose"] = timed(by_chooser(N, False), 100)
        tasks[f"{N}: stacks of pictures held once"] = timed(gathered(N, True), 20)
        tasks[f"{N}: stacks of pictures of {MANY} actors"] = timed(gathered(N, True, MANY), 20)
        tasks[f"{N}: stacks held whole"] = timed(gathered(N, False), 20)
    samples = interleaved(tasks, rounds)
    found = medians(samples)
    memory = {
        f"T = {T}, {'pictures once' if once else 'whole stacks'}": bytes_per_million(T, once)
        for T in (32, 128)
        for once in (True, False)
    }
    ratios = {
        f"{N}: held whole over held once": ratio_of_medians(
            samples[f"{N}: stacks held whole"], samples[f"{N}: stacks of pictures held once"]
        )
        for N in (32, 256)
    } | {
        f"{N}: of {MANY} actors over of one": ratio_of_medians(
            samples[f"{N}: stacks of pictures of {MANY} actors"],
            samples[f"{N}: stacks of pictures held once"],
        )
        for N in (32, 256)
    }
    print(table(("batch", "microseconds"), [(k, f"{v:.0f}") for k, v in found.items()]))
    print(table(("a million steps", "GB"), [(k, f"{v / 1e9:.2f}") for k, v in memory.items()]))
    print(
        table(
            ("ratio", "", "from", "to"), [(k, *(f"{x:.2f}" for x in v)) for k, v in ratios.items()]
        )
    )
    payload = {
        "unit": "microseconds of CPU time per batch",
        "median": found,
        "bar": {"256: tree, draw and set": BAR},
        "ratios": ratios,
        "bytes_per_million_steps": memory,
        "samples": samples,
    }
    print(f"written: {save('replay', payload)}")


if __name__ == "__main__":
    main()
