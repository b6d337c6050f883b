"""What an update of DQN on an Atari game's pictures takes, against plain torch.

    python benchmarks/learner.py [--rounds 7] [--updates 12]

The plain one is what one writes first: the Nature network in float32, double targets, the Huber
loss, clipping, torch.optim.Adam, a target network that follows, and the C library's own habits with
memory. Ours is the trainer with network.precision = "float32" and "bfloat16" in a process as hosts
are, which keeps its memory. Every measurement is a process of its own with one thread, in turn; the
figure is the median CPU time of an update, since others may use the machine. The bar is 1.5 times
as many updates with bfloat16, at batches of 32 and 256.
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
WAYS = ("plain", "float32", "bfloat16")
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


def plain(N: int) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.nn import functional

    online = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, ACTIONS),
    )  # fmt: skip
    target, optimizer = copy.deepcopy(online), torch.optim.Adam(online.parameters(), 1e-4)
    part = batch_of(N)

    def update() -> None:
        now, then = torch.from_numpy(part.observation["obs"]).float() / 255
        action = torch.from_numpy(part.action)[0].unsqueeze(-1)
        reward, discount = (torch.from_numpy(x)[0] for x in (part.reward, part.extras["discount"]))
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

    return update


def ours(N: int, precision: Any) -> Callable[[], None]:
    from tianji.algorithm import Network, Spec
    from tianji.algorithms.dqn import DQN
    from tianji.env import Discrete, EnvSpec
    from tianji.machine import keep_memory
    from tianji.types import leaf

    keep_memory()
    env = EnvSpec("Pictures", {"obs": leaf((4, 84, 84), np.uint8)}, Discrete(ACTIONS))
    spec = Spec(env, Network(precision=precision), 1, 1, 1, 0, "cpu", None, None)
    trainer, part = DQN(batch_size=N, learning_rate=1e-4).trainer(spec), batch_of(N)

    def update() -> None:
        trainer.take(part)
        trainer.finish()

    return update


def measure(way: str, N: int, updates: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    update = plain(N) if way == "plain" else ours(N, way)
    taken = []
    for _ in range(updates + 2):
        begun = time.process_time()
        update()
        taken.append(time.process_time() - begun)
    return {"seconds": float(np.median(taken[2:]))}


def apart(way: str, N: int, updates: int) -> float:
    """Samples per CPU-second, in a process of its own."""
    argv = [sys.executable, __file__, "--one", way, str(N), "--updates", str(updates)]
    return N / float(run_json(argv)["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse_args()
    if arguments.one:
        way, N = arguments.one
        print(json.dumps(measure(way, int(N), arguments.updates)))
        return
    cases, rows = {}, []
    for N in BATCHES:
        updates = max(4, arguments.updates * 32 // N)
        samples = interleaved(
            {way: partial(apart, way, N, updates) for way in WAYS}, arguments.rounds
        )
        found = medians(samples)
        ratios = {way: ratio_of_medians(samples[way], samples["plain"]) for way in WAYS[1:]}
        cases[f"batch of {N}"] = {
            "unit": "samples per CPU-second",
            "median": found,
            "over_plain": ratios,
            "bar": BAR,
            "samples": samples,
        }
        rows += [
            (f"{N}, {way}", f"{found[way]:.0f}", *(f"{x:.2f}" for x in ratios.get(way, ())))
            for way in WAYS
        ]
        rows[-3] = (*rows[-3], "", "", "")
    print(table(("batch, way", "samples/s", "over plain", "from", "to"), rows))
    print(f"written: {save('learner', {'cases': cases})}")


if __name__ == "__main__":
    main()
