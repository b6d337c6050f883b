"""What several groups bring: received steps and updates per second over the number of groups.

    python benchmarks/groups.py [--groups 1,2,4] [--rounds 7] [--seconds 4] [--only dqn]

A simulated load: an env and an algorithm whose steps and updates take a fixed time, asleep, so that
two cores suffice for all processes and only the going together is measured. Each group has its own
actors, buffer and learner; models are averaged every so many updates. Engine local, preset tianji,
PPO and DQN. The bar is 1.9 for two groups over one, of both rates. `wait_group` is the share of the
learners' time that they wait for another group's model: by default never, beside it with
join.patience = 0, where every round waits for all.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
from typing import Any

import numpy as np
from measure import RESULTS, interleaved, medians, ratio_of_medians, save, table

import tianji

BAR = 1.9
ENV = {"id": "simulated/Env", "imports": ["simulated"], "kwargs": {"step_s": 0.02}}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {
        "env": ENV,
        "algorithm": {"name": "simulated_ppo", "update_s": 0.1},
        "scale": {"actors": 1, "envs_per_actor": 8, "rollout_length": 8},
        "join": {"every": 5},
    },
    "dqn": {
        "env": ENV,
        "algorithm": {
            "name": "simulated_dqn", "update_s": 0.05, "new_steps": 32, "batch_size": 64,
            "warmup": 256, "capacity": 4096,
        },
        "scale": {"actors": 1, "envs_per_actor": 8, "rollout_length": 4},
        "join": {"every": 10},
    },
}  # fmt: skip


def run(case: dict[str, Any], groups: int, seconds: float, waits: bool = False) -> dict[str, Any]:
    """One run: its rates, and what share of their time learners waited for whom."""
    tree = {**case, "stop": {"seconds": seconds}, "checkpoint": {"store": "never"}}
    tree["scale"] = {**case["scale"], "groups": groups, "engine": "local", "relax": "tianji"}
    if groups == 1:
        tree.pop("join")
    elif waits:
        tree["join"] = {**case["join"], "patience": 0}
    with tempfile.TemporaryDirectory() as runs:
        result = tianji.train(tree, runs=runs).tree()
    elapsed = result["steps"] / result["steps_per_s"]["received"]
    spent = result["time"]["learner"]
    return {
        "received": result["steps"] / elapsed,
        "updates": result["updates"] / elapsed,
        "wait_group": spent.get("wait_group", 0.0),
        "wait_buffer": spent.get("wait_buffer", 0.0),
        "staleness_max": result["staleness"]["max"],
        "filtered": result["filtered"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default="1,2,4", help="how many, in turn")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--only", choices=CASES, help="this case; the other's result is kept")
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.groups.split(",")]
    rows, results = [], {}
    if arguments.only:
        results = json.loads((RESULTS / "groups.json").read_text())["cases"]
    about = {"bar": BAR, "rounds": arguments.rounds, "seconds": arguments.seconds}
    for name, case in CASES.items():
        if arguments.only not in (None, name):
            continue
        kinds = [(n, False) for n in counts] + [(2, True)]
        kept: dict[tuple[int, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}

        def task(
            kind: tuple[int, bool], case: dict[str, Any] = case, kept: dict[Any, Any] = kept
        ) -> float:
            kept[kind].append(run(case, kind[0], arguments.seconds, kind[1]))
            return kept[kind][-1]["received"]

        interleaved(
            {str(kind): lambda kind=kind, task=task: task(kind) for kind in kinds},
            arguments.rounds,
        )
        points = []
        for kind in kinds:
            groups, waits = kind
            samples = {key: [one[key] for one in kept[kind]] for key in kept[kind][0]}
            first = kept[kinds[0]]
            over = {
                key: ratio_of_medians(samples[key], [one[key] for one in first])
                for key in ("received", "updates")
            }
            middle = medians(samples)
            points.append({
                "groups": groups, "waits": waits, "median": middle,
                "over_first": {key: ratio[0] for key, ratio in over.items()},
                "interval": {key: ratio[1:] for key, ratio in over.items()},
                "wait_group_max": float(np.max(samples["wait_group"])), "samples": samples,
            })  # fmt: skip
            least = min(ratio[0] for ratio in over.values())
            bar = "" if groups != 2 or waits else "pass" if least >= BAR else "MISS"
            told = [f"{r[0]:.2f} [{r[1]:.2f}, {r[2]:.2f}]" for r in over.values()]
            rows.append((
                f"{name}, {groups}{', patience 0' if waits else ''}",
                f"{middle['received']:,.0f}", told[0], f"{middle['updates']:.1f}", told[1], bar,
                f"{middle['wait_group']:.2%}", f"{middle['wait_buffer']:.1%}",
            ))  # fmt: skip
        results[name] = {"config": case, "points": points}
        print(table(("groups", "steps/s", "over one", "updates/s", "over one", "",
                     "waits for group", "for buffer"), rows), flush=True)  # fmt: skip
        print(save("groups", {**about, "cases": results}), flush=True)


if __name__ == "__main__":
    main()
