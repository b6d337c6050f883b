"""What roles in processes reach together, against the slower of the two alone on its core.

    python benchmarks/pipeline.py [--rounds 7] [--seconds 6]

For PPO and DQN, on CartPole and on pictures of an Atari game's size: new steps per second of a run
with engine local on 2 cores (one actor; the learner has a core of its own), the actor alone on its
core with grants that are always there, and the learner alone on its core with batches that are
always there (updates per second times the new steps that an update follows). The bar is 0.85 of the
smaller one. All are measured in turn, in one run; a share of it is also what engine serial reaches.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import json
import sys
import tempfile
import time
from typing import Any

from measure import RESULTS, interleaved, medians, ratio_of_medians, run_json, save, table

BAR = 0.85
PPO_FRAMES = {"name": "ppo", "epochs": 1, "minibatches": 4}
DQN_FRAMES = {"name": "dqn", "batch_size": 32, "new_steps": 4, "capacity": 2000, "warmup": 256}
CASES: dict[str, dict[str, Any]] = {
    "ppo, CartPole": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo", "epochs": 5},
        "scale": {"envs_per_actor": 64, "rollout_length": 32},
    },
    "dqn, CartPole": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn", "new_steps": 48, "n_step": 3, "warmup": 2000},
        "scale": {"envs_per_actor": 48, "rollout_length": 4},
    },
    "ppo, frames": {
        "env": {"id": "toy/Frames"},
        "algorithm": PPO_FRAMES,
        "scale": {"envs_per_actor": 16, "rollout_length": 16},
    },
    "dqn, frames": {
        "env": {"id": "toy/Frames"},
        "algorithm": DQN_FRAMES,
        "scale": {"envs_per_actor": 8, "rollout_length": 4},
    },
}


def actor_alone(tree: dict[str, Any], seconds: float) -> float:
    """Steps per second of an actor whose rollouts are taken at once."""
    from tianji.build import build
    from tianji.config import load_config
    from tianji.driver import Serial
    from tianji.probe import Sink

    built = build(load_config({**tree, "stop": {"updates": 1}}))
    built.learner.begin()
    actor = built.actors[0]
    driver = Serial([actor, Sink(built.transport.inbox(built.assembly.lanes[0]))])
    rows = built.spec.rows_per_rollout
    for _ in range(200):
        driver.step()
    before, begun = actor._seq, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        driver.step()
    return (actor._seq - before) * rows / (time.perf_counter() - begun)


def learner_alone(tree: dict[str, Any], seconds: float) -> float:
    """New steps per second that a learner could follow: only its own time is counted."""
    from tianji.build import build
    from tianji.config import load_config
    from tianji.driver import Serial
    from tianji.learner import UPDATE
    from tianji.testing.algorithm import run_updates

    config = load_config({**tree, "stop": {"updates": 1}})
    built = build(config)
    built.learner.begin()
    driver = Serial(built.roles)
    run_updates(built, driver, 3)
    for _ in ("to warm up", "to measure"):
        driver.seconds.clear()
        updates, spent = 0, 0.0
        while spent < seconds:
            if driver.step() is UPDATE:
                updates += 1
                spent = sum(v for k, v in driver.seconds.items() if k.startswith("learner"))
    return updates / spent * config.algorithm.steps_per_update(built.spec)


def alone(part: str, tree: dict[str, Any], seconds: float, core: int) -> float:
    """Measure one role in a process of its own, on its core."""
    argv = [sys.executable, __file__, "--part", part, "--tree", json.dumps(tree)]
    argv += ["--seconds", str(seconds), "--core", str(core)]
    return run_json(argv)["rate"]


def together(tree: dict[str, Any], seconds: float, engine: str) -> dict[str, Any]:
    """A run of so many seconds."""
    with tempfile.TemporaryDirectory() as runs:
        code = (
            "import json, sys, tianji; "
            "r = tianji.train(json.loads(sys.argv[1]), runs=sys.argv[2]); "
            "print(json.dumps(r.tree()))"
        )
        whole = {**tree, "stop": {"seconds": seconds}}
        whole["scale"] = {**tree["scale"], "engine": engine}
        result = run_json([sys.executable, "-c", code, json.dumps(whole), runs])
    # By updates, so that what fills replay before the first one does not count.
    scale = tree["scale"]
    per_update = tree["algorithm"].get(
        "new_steps", scale["envs_per_actor"] * scale["rollout_length"]
    )
    elapsed = result["steps"] / result["steps_per_s"]["received"]
    return result | {"rate": result["updates"] * per_update / elapsed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--only", help="cases whose name has this in it; the others' are kept")
    parser.add_argument("--part", choices=["actor", "learner"], help=argparse.SUPPRESS)
    parser.add_argument("--tree", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        os.sched_setaffinity(0, [arguments.core])
        import torch

        torch.set_num_threads(1)
        measure = actor_alone if arguments.part == "actor" else learner_alone
        print(json.dumps({"rate": measure(json.loads(arguments.tree), arguments.seconds)}))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed: one for the actor, one for the learner")
    rows, results = [], {}
    for name, tree in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        verdicts: list[str] = []

        def local(tree: dict[str, Any] = tree, verdicts: list[str] = verdicts) -> float:
            result = together(tree, arguments.seconds, "local")
            verdicts.append(result["verdict"])
            return result["rate"]

        def part(which: str, core: int, tree: dict[str, Any] = tree) -> float:
            return alone(which, tree, arguments.seconds / 2, core)

        def serial(tree: dict[str, Any] = tree) -> float:
            return together(tree, arguments.seconds, "serial")["rate"]

        samples = interleaved(
            {
                "local": local,
                "actor": lambda part=part: part("actor", cores[1]),
                "learner": lambda part=part: part("learner", cores[0]),
                "serial": serial,
            },
            arguments.rounds,
        )
        middle = medians(samples)
        slower = min(("actor", "learner"), key=lambda role: middle[role])
        ratio, low, high = ratio_of_medians(samples["local"], samples[slower])
        speedup = ratio_of_medians(samples["local"], samples["serial"])
        results[name] = {
            "unit": "new steps/s", "median": middle, "slower": slower, "ratio": ratio,
            "interval": [low, high], "bar": BAR, "over_serial": speedup, "verdicts": verdicts,
            "samples": samples, "config": tree,
        }  # fmt: skip
        rows.append((
            name, f"{middle['local']:,.0f}", f"{middle['actor']:,.0f}",
            f"{middle['learner']:,.0f}", f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
            "pass" if ratio >= BAR else "MISS", f"{speedup[0]:.2f}",
        ))  # fmt: skip
        print(table(("new steps/s", "local", "actor alone", "learner alone",
                     f"local / slower (>= {BAR})", "", "local / serial"), rows))  # fmt: skip
    if arguments.only:
        saved = json.loads((RESULTS / "pipeline.json").read_text())["cases"]
        results = saved | results
    print(save("pipeline", {"cases": results}))


if __name__ == "__main__":
    main()
