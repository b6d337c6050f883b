"""New steps per second over the number of actors, for an env that is expensive to simulate.

    python benchmarks/scaling.py [--actors 1,2,4,8,14] [--rounds 3] [--seconds 8]

PPO on LunarLander (a physics simulation in C++, one env after the other) with one epoch, engine
local, preset tianji: from 1 actor on, until actors and learner are balanced or cores run out.
"""

import argparse
import json
import os
import sys
import tempfile
from typing import Any

from measure import interleaved, medians, ratio_of_medians, run_json, save, table

CONFIG: dict[str, Any] = {
    "env": {"id": "LunarLander-v3"},
    "algorithm": {"name": "ppo", "epochs": 1},
    "scale": {"engine": "local", "envs_per_actor": 32, "rollout_length": 128},
}
RUN = (
    "import json, sys, tianji; "
    "print(json.dumps(tianji.train(json.loads(sys.argv[1]), runs=sys.argv[2]).tree()))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", default="1,2,4,8,14", help="how many, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.actors.split(",")]
    kept: dict[int, list[dict[str, Any]]] = {n: [] for n in counts}

    def task(n: int) -> float:
        tree = {**CONFIG, "stop": {"seconds": arguments.seconds}}
        tree["scale"] = {**CONFIG["scale"], "actors": n}
        with tempfile.TemporaryDirectory() as runs:
            kept[n].append(run_json([sys.executable, "-c", RUN, json.dumps(tree), runs]))
        return kept[n][-1]["steps_per_s"]["received"]

    samples = interleaved(
        {str(n): lambda n=n: task(n) for n in counts}, arguments.rounds
    )  # fmt: skip
    middle, rows, results = medians(samples), [], []
    for n in counts:
        over, low, high = ratio_of_medians(samples[str(n)], samples[str(counts[0])])
        last = kept[n][-1]
        stale = max(run["staleness"]["max"] for run in kept[n] if run["staleness"])
        results.append({
            "actors": n, "steps_per_s": middle[str(n)], "over_first": over,
            "interval": [low, high], "staleness_max": stale, "verdict": last["verdict"],
            "samples": samples[str(n)],
        })  # fmt: skip
        rows.append((n, f"{middle[str(n)]:,.0f}", f"{over:.2f} [{low:.2f}, {high:.2f}]", stale,
                     last["verdict"]))  # fmt: skip
    print(table(("actors", "new steps/s", f"over {counts[0]} actor", "staleness max", ""), rows))
    cores = len(os.sched_getaffinity(0))
    print(save("scaling", {"config": CONFIG, "cores": cores, "points": results}))


if __name__ == "__main__":
    main()
