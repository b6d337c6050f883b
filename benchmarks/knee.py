"""More actors for a fixed learner: where consumption saturates, and what moves that point.

    python benchmarks/knee.py [--actors 1,2,4,8,14] [--rounds 3] [--seconds 5] [--seeds 5]

PPO on Acrobot (whose steps take long, and alike whatever the policy) with two epochs and networks
that are large enough for learners to share the work, engine local, preset tianji; the envs of all
actors together stay the same, so that whatever their number, the same is learnt.
* Table 1 and Figure 12b of the paper: with one learner on a core, the steps that actors could make
  (those that they made, over the share of time in which they did not wait), the steps that were
  consumed, and what the plan's model says of both; then the seconds to a mean return.
* Figure 6a and 6b: the same with two and four learners, and with twice the batch.
* Figure 6c: groups of two actors and a learner each, as many as there are cores for.
Results: benchmarks/results/knee.json, written after each part; --parts measures some of them again
and keeps the others. docs/knee.svg shows them, and --draw alone draws it again.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as in a run: threads that wait do not spin

import argparse
import json
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import picture
from measure import RESULTS, ROOT, interleaved, run_json, save, table
from speed import spread, timed

from tianji import profiler
from tianji.config import load_config
from tianji.plan import Choice, predict
from tianji.profile import Profile

NAME = "ppo_acrobot"
ENVS, T = 168, 12
"""168 can be split among 1, 2, 3, 4, 6, 7, 8, 12 and 14"""
SERIES = {
    "one learner": (1, 1), "two learners": (2, 1), "four learners": (4, 1),
    "twice the batch": (1, 2),
}  # fmt: skip
"""learners, and batches in one"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", default="1,2,3,4,6,8,12,14", help="how many, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="runs to the target for each")
    parser.add_argument("--target", type=float, default=-90.0, help="mean return")
    parser.add_argument("--groups", default="1,2,4", help="how many, in turn")
    parser.add_argument("--parts", nargs="+", choices=[*SERIES, "target", "groups"])
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    if arguments.draw:
        draw()
        return
    actors = [int(n) for n in arguments.actors.split(",")]
    parts = [*SERIES, "target", "groups"] if arguments.parts is None else arguments.parts
    about = {"envs": ENVS, "config": NAME, "overrides": asked(1), "target": arguments.target}
    found: dict[str, Any] = about | {"series": {}}
    if arguments.parts is not None and (RESULTS / "knee.json").is_file():
        found = json.loads((RESULTS / "knee.json").read_text())
        if any(found.get(key) != value for key, value in about.items()):
            sys.exit("knee.json is of other settings: measure all parts, or move it away")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in parts:
            if part == "target":
                found["to_target"] = to_target(actors, arguments, folder)
            elif part == "groups":
                found["groups"] = groups(arguments, folder)
            elif points := series(part, actors, arguments, folder):
                found["series"][part] = points
                told(part, points)
            save("knee", found)
    if picture.possible():
        draw()


def draw() -> None:
    """Production and consumption over actors; what moves the knee; seconds to the target."""
    found = json.loads((RESULTS / "knee.json").read_text())
    with picture.drawn("knee", 3, (11.5, 3.2)) as (both, moved, target):
        first = found["series"]["one learner"]
        counts = [p["actors"] for p in first]
        for key, words in (("produced_if_unhindered", "could be made"), ("consumed", "consumed")):
            both.plot(counts, [p[key] / 1e3 for p in first], "o-", label=words)
        both.plot(counts, [p["predicted"] / 1e3 for p in first], "k--", linewidth=0.8,
                  label="consumed, predicted")  # fmt: skip
        both.set(xlabel="actors", ylabel="thousand steps/s", title="one learner")
        for name, points in found["series"].items():
            at = [p["actors"] for p in points]
            (line,) = moved.plot(at, [p["consumed"] / 1e3 for p in points], "o-", label=name)
            moved.plot(at, [p["predicted"] / 1e3 for p in points], "--", linewidth=0.8,
                       color=line.get_color())  # fmt: skip
        moved.set(xlabel="actors", ylabel="consumed, thousand steps/s", title="dashed: predicted")
        target.plot([p["actors"] for p in found["to_target"]],
                    [p["seconds"] for p in found["to_target"]], "o-")  # fmt: skip
        target.set(xlabel="actors", ylabel="seconds to the target", ylim=(0, None))
        for axis in (both, moved):
            axis.set_ylim(0, None)
            axis.legend(frameon=False, fontsize=8)


def asked(batches: int) -> list[str]:
    length = f"scale.rollout_length={T * batches}"
    return [
        length, "scale.relax=tianji", "algorithm.epochs=2", "algorithm.learning_rate=3e-3",
        "network.hidden=[128,128]",
    ]  # fmt: skip


def choice_of(actors: int, learners: int, batches: int) -> Choice:
    return Choice("local", actors, ENVS // actors, T * batches, learners=learners)


def series(
    name: str, actors: list[int], arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """One curve: a profile, and runs with every number of actors that leaves the learners alone and
    gives them equal shares."""
    learners, batches = SERIES[name]
    here = len(os.sched_getaffinity(0))
    actors = [n for n in actors if n + learners <= here and n % learners == 0]
    if not actors:
        return []
    measured = profiled(batches)
    kept: dict[int, list[dict[str, Any]]] = {n: [] for n in actors}

    def task(n: int) -> float:
        overrides = [*asked(batches), *spread(choice_of(n, learners, batches))]
        kept[n].append(timed(NAME, overrides, arguments.seconds, folder, rows_of(batches)))
        return float(kept[n][-1]["new_sps"])

    samples = interleaved({str(n): partial(task, n) for n in actors}, arguments.rounds)
    points = []
    for n in actors:
        p = predict(measured.task, measured.rates, choice_of(n, learners, batches), here)
        busy = [1 - waiting(run["time"]["actor"]) for run in kept[n]]
        new = float(np.median(samples[str(n)]))
        points.append({
            "actors": n, "consumed": new, "samples": samples[str(n)],
            "produced_if_unhindered": new / float(np.median(busy)),
            "actors_busy": float(np.median(busy)), "verdict": kept[n][-1]["verdict"],
            "predicted": p.new, "predicted_production": p.capacity["actors"],
            "predicted_consumption": p.capacity["learner"], "binding": p.binding,
        })  # fmt: skip
    return points


@cache
def profiled(batches: int) -> Profile:
    overrides = [*asked(batches), f"scale.envs_per_actor={ENVS}"]
    return profiler.measure(load_config(ROOT / "configs" / f"{NAME}.toml", overrides))


def rows_of(batches: int) -> float:
    """Steps of a batch that are not resets."""
    measured = profiled(batches)
    return measured.task.rows * measured.rates.valid


def waiting(spent: dict[str, float]) -> float:
    """The share of its time that a role waited for another."""
    return sum(share for kind, share in spent.items() if kind.startswith("wait"))


def told(name: str, points: list[dict[str, Any]]) -> None:
    rows = [
        (p["actors"], f"{p['produced_if_unhindered']:,.0f}", f"{p['predicted_production']:,.0f}",
         f"{p['consumed']:,.0f}", f"{p['predicted']:,.0f}",
         f"{p['predicted'] / p['consumed'] - 1:+.1%}", f"{p['actors_busy']:.0%}", p["binding"])
        for p in points
    ]  # fmt: skip
    header = ("actors", "could make", "predicted", "consumed", "predicted", "error", "busy", "")
    print(f"\n{name}, new steps per second\n{table(header, rows)}", flush=True)


def to_target(
    actors: list[int], arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Seconds until the mean return of 100 episodes is reached."""
    runs: dict[int, list[dict[str, Any]]] = {n: [] for n in actors}
    for seed in range(1, arguments.seeds + 1):
        for n in actors:
            argv = [
                sys.executable, "-m", "tianji", "train", f"configs/{NAME}.toml", *asked(1),
                *spread(choice_of(n, 1, 1)), f"seed={seed}", f"stop.return={arguments.target}",
                "stop.seconds=90", "--json", "--plain", "--runs", str(folder),
            ]  # fmt: skip
            result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=150)
            rate = result["steps_per_s"]["received"]
            runs[n].append({"seed": seed, "steps": result["steps"],
                            "seconds": result["steps"] / rate})  # fmt: skip
    found = [
        {"actors": n, "runs": runs[n], "seconds": float(np.median([r["seconds"] for r in runs[n]])),
         "steps": float(np.median([r["steps"] for r in runs[n]]))}
        for n in actors
    ]  # fmt: skip
    rows = [(p["actors"], f"{p['seconds']:.1f}", f"{p['steps']:,.0f}") for p in found]
    print(f"\nto a return of {arguments.target:g}\n{table(('actors', 'seconds', 'steps'), rows)}",
          flush=True)  # fmt: skip
    return found


def groups(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """New steps and updates per second with several groups."""
    here = len(os.sched_getaffinity(0))
    counts = [n for n in map(int, arguments.groups.split(",")) if 3 * n <= here]
    if not counts:
        return []
    kept: dict[int, list[dict[str, Any]]] = {n: [] for n in counts}

    def task(n: int) -> float:
        choice = Choice("local", 2, ENVS // 2, T, groups=n)
        overrides = [*asked(1), *spread(choice)]
        kept[n].append(timed(NAME, overrides, arguments.seconds, folder, rows_of(1)))
        return float(kept[n][-1]["new_sps"])

    samples = interleaved({str(n): partial(task, n) for n in counts}, arguments.rounds)
    found: list[dict[str, Any]] = []
    rows = []
    for n in counts:
        received = float(np.median(samples[str(n)]))
        consumed = float(np.median([run["steps_per_s"]["consumed"] for run in kept[n]]))
        point: dict[str, Any] = {"groups": n, "received": received, "consumed": consumed,
                 "samples": samples[str(n)]}  # fmt: skip
        found.append(point)
        first = found[0]
        rows.append((n, f"{received:,.0f}", f"{received / first['received'] / n:.2f}",
                     f"{consumed:,.0f}", f"{consumed / first['consumed'] / n:.2f}"))  # fmt: skip
    header = ("groups", "received", "of linear", "consumed", "of linear")
    print(f"\ngroups of two actors and a learner, steps per second\n{table(header, rows)}",
          flush=True)  # fmt: skip
    return found


if __name__ == "__main__":
    main()
