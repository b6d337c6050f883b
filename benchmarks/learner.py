"""What an update of DQN on an Atari game's pictures takes, against plain torch.

    python benchmarks/learner.py [--rounds 7] [--updates 12] [--device cuda]

The plain one is what one writes first: the Nature network in float32, double targets, the Huber
loss, clipping, torch.optim.Adam, a target network that follows, and the C library's own habits with
memory. Ours is the trainer with network.precision = "float32" and "bfloat16" in a process as hosts
are, which keeps its memory. Every measurement is a process of its own with one thread, in turn; the
figure is the median CPU time of an update, since others may use the machine. The bar is 1.5 times
as many updates with bfloat16, at batches of 32 and 256.

On a GPU the figure is wall time, and ours is measured as the trainer is, with its kernels recorded
("recorded"), and told kernel by kernel ("told").
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from measure import interleaved, medians, ratio_of_medians, run_json, save, table

BAR = 1.5
BATCHES = (32, 256)
WAYS = {"cpu": ("plain", "float32", "bfloat16"), "cuda": ("plain", "told", "recorded")}
ACTIONS = 6


def batch_of(N: int) -> Any:
    """Steps as replay hands them out."""
    from tianji.types import EPISODE, Rollout

    rng = np.random.default_rng(0)
    return Rollout(
        observation={"obs": rng.integers(0, 256, (2, N, 4, 84, 84), np.uint8)},
        action=rng.integers(0, ACTIONS, (1, N)),
        reward=rng.normal(size=(1, N)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={"discount": np.full((1, N), 0.99, np.float32)},
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0, EPISODE),
        versions=np.zeros(N, np.int64),
    )


def plain(N: int, device: str) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.nn import functional

    online = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, ACTIONS),
    ).to(device)  # fmt: skip
    target, optimizer = copy.deepcopy(online), torch.optim.Adam(online.parameters(), 1e-4)
    part = batch_of(N)

    def update() -> None:
        now, then = torch.from_numpy(part.observation["obs"]).to(device).float() / 255
        action, reward, discount = (
            torch.from_numpy(x)[0].to(device)
            for x in (part.action, part.reward, part.extras["discount"])
        )
        action = action.unsqueeze(-1)
        with torch.no_grad():
            best = online(then).argmax(-1, keepdim=True)
            wanted = reward + discount * target(then).gather(-1, best).squeeze(-1)
        loss = functional.smooth_l1_loss(online(now).gather(-1, action).squeeze(-1), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for theirs, mine in zip(target.parameters(), online.parameters(), strict=True):
                theirs.lerp_(mine, 0.01)
        loss.item()  # is told, and a GPU waited for

    return update


def ours(N: int, way: Any, device: str) -> Callable[[], None]:
    from tianji.algorithm import Network, Spec
    from tianji.algorithms.dqn import DQN
    from tianji.env import Discrete, EnvSpec
    from tianji.machine import keep_memory
    from tianji.types import leaf

    keep_memory()
    env = EnvSpec("Pictures", {"obs": leaf((4, 84, 84), np.uint8)}, Discrete(ACTIONS))
    network = Network() if device == "cuda" else Network(precision=way)
    spec = Spec(env, network, 1, 1, 1, 0, None, None)
    trainer, part = DQN(batch_size=N, learning_rate=1e-4).trainer(spec, device), batch_of(N)
    if way == "told":
        trainer._step._records = False

    def update() -> None:
        trainer.take(part)
        trainer.finish()

    return update


def measure(way: str, N: int, updates: int, device: str) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    update = plain(N, device) if way == "plain" else ours(N, way, device)
    clock = time.perf_counter if device == "cuda" else time.process_time
    taken = []
    for _ in range(updates + 8):
        begun = clock()
        update()
        taken.append(clock() - begun)
    return {"seconds": float(np.median(taken[8:]))}


def apart(way: str, N: int, updates: int, device: str) -> float:
    """Samples per second, in a process of its own."""
    argv = [sys.executable, __file__, "--one", way, str(N), "--updates", str(updates)]
    argv += ["--device", device]
    return N / float(run_json(argv)["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse_args()
    device, ways = arguments.device, WAYS[arguments.device]
    if arguments.one:
        way, N = arguments.one
        print(json.dumps(measure(way, int(N), arguments.updates, device)))
        return
    cases, rows = {}, []
    for N in BATCHES:
        updates = max(4, arguments.updates * 32 // N)
        samples = interleaved(
            {way: partial(apart, way, N, updates, device) for way in ways}, arguments.rounds
        )
        found = medians(samples)
        ratios = {way: ratio_of_medians(samples[way], samples["plain"]) for way in ways[1:]}
        cases[f"batch of {N}"] = {
            "unit": "samples per second" if device == "cuda" else "samples per CPU-second",
            "median": found,
            "over_plain": ratios,
            "bar": BAR,
            "samples": samples,
        }
        rows += [
            (f"{N}, {way}", f"{found[way]:.0f}", *(f"{x:.2f}" for x in ratios.get(way, ())))
            for way in ways
        ]
        rows[-3] = (*rows[-3], "", "", "")
    print(table(("batch, way", "samples/s", "over plain", "from", "to"), rows))
    print(f"written: {save('learner' if device == 'cpu' else 'learner_gpu', {'cases': cases})}")


if __name__ == "__main__":
    main()
