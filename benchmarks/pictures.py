"""What a learner on a CPU takes to look at all pictures of a rollout: at once, and a few at a time.

    python benchmarks/pictures.py [--rounds 7] [--rows 2640]

The value network of ppo_pong answers as many pictures as 80 envs make in 32 steps and one more: all
at once, which needs fresh memory for what every layer makes of them, and as
`tianji.columns.chunked` shows them. In turn, with one thread and with two; the figure is the ratio
of medians. Results: benchmarks/results/pictures.json.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measure import ROOT, interleaved, medians, ratio_of_medians, save, table

from tianji import networks
from tianji.columns import chunked
from tianji.config import load_config
from tianji.machine import cores, keep_memory
from tianji.types import leaf

THREADS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=2640, help="pictures")
    arguments = parser.parse_args()
    keep_memory()  # as hosts do
    network = load_config(ROOT / "configs" / "ppo_pong.toml").network
    picture = leaf((4, 84, 84), np.uint8)
    (value,) = networks.build(network, picture, 1)
    x = torch.randint(0, 256, (1, arguments.rows, *picture.shape), dtype=torch.uint8)
    ways = {"at once": lambda: value(x[0]), "a few at a time": lambda: chunked(value, x, None)}
    tasks = {
        f"{name}, {threads} threads": partial(seconds, way, threads)
        for threads in THREADS
        if threads <= cores()
        for name, way in ways.items()
    }
    samples = interleaved(tasks, arguments.rounds)
    found, rows, ratios = medians(samples), [], {}
    for threads in [threads for threads in THREADS if threads <= cores()]:
        whole, few = (f"{name}, {threads} threads" for name in ways)
        ratios[threads] = ratio_of_medians(samples[few], samples[whole])
        ratio, low, high = ratios[threads]
        rows.append((threads, f"{found[whole]:.3f} s", f"{found[few]:.3f} s",
                     f"{ratio:.2f} [{low:.2f}, {high:.2f}]"))  # fmt: skip
    print(table(("threads", *ways, "ratio"), rows))
    save("pictures", {"rows": arguments.rows, "samples": samples, "ratios": ratios})


def seconds(way: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    begun = time.perf_counter()
    with torch.no_grad():
        way()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
