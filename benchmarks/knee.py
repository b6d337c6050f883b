"""More actors for a fixed learner: where consumption saturates, and what moves that point.

    python benchmarks/knee.py [--actors 1,2,4,8,14] [--rounds 3] [--seconds 5] [--seeds 5]

PPO on Acrobot (whose steps take long, and alike whatever the policy) with two epochs and networks
that are large enough for learners to share the work, engine local, preset tianji; the envs of all
actors together stay the same, so that whatever their number, the same is learnt.
* Table 1 and Figure 12b of the paper: with one learner on a core, the steps that actors could make
  (those that they made, over the share of time in which they did not wait), the steps that were
  consumed, and what the plan's model says of both; then the seconds to a mean return.
* Figure 6a and 6b: the same with two and four learners, and with twice the batch.
* Figure 6c: groups of two actors and a learner each, as many as there are cores for; beside it, as
  many separate runs at once, which is what the machine has for that many.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import picture
from measure import RESULTS, ROOT, continued, interleaved, run_json, save, table
from speed import spread, timed

from tianji import profiler
from tianji.config import load_config
from tianji.plan import Choice, Prediction, predict
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
        found = continued(RESULTS / "knee.json")
        if any(found.get(key) != value for key, value in about.items()):
            sys.exit("knee.json is of other settings: measure all parts, or move it away")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wanted := [part for part in parts if part in SERIES]:
            for part, points in curves(wanted, actors, arguments, folder).items():
                found["series"][part] = points
                told(part, points)
            save("knee", found)
        if "target" in parts:
            found["to_target"] = to_target(actors, arguments, folder)
            save("knee", found)
        if "groups" in parts:
            found["groups"] = groups(arguments, folder)
            save("knee", found)
    if picture.possible() and "one learner" in found["series"] and "to_target" in found:
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


def curves(
    parts: list[str], actors: list[int], arguments: argparse.Namespace, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """In each round, for each batch: a profile, and runs of all these curves, with every number of
    actors that leaves the learners alone and gives them equal shares."""
    here = len(os.sched_getaffinity(0))
    choices = {
        (part, n): Choice("local", n, ENVS // n, T * SERIES[part][1], learners=SERIES[part][0])
        for part in parts
        for n in actors
        if n + SERIES[part][0] <= here and n % SERIES[part][0] == 0
    }
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in choices}
    told: dict[tuple[str, int], list[Prediction]] = {key: [] for key in choices}

    def task(key: tuple[str, int], measured: Profile) -> float:
        batches = SERIES[key[0]][1]
        overrides = [*asked(batches), *spread(choices[key])]
        found = timed(NAME, overrides, arguments.seconds, folder, rows(measured))
        runs[key].append(found)
        return float(found["new_sps"])

    for at in range(arguments.rounds):
        for batches in sorted({SERIES[part][1] for part, _ in choices}):
            measured = profiled(batches)
            mine = [key for key in choices if SERIES[key[0]][1] == batches]
            for key in mine:
                told[key].append(predict(measured.task, measured.rates, choices[key], here))
            interleaved({str(key): partial(task, key, measured) for key in mine}, 1, at)
    return {
        part: [point(n, runs[p, n], told[p, n]) for p, n in choices if p == part] for part in parts
    }


def point(actors: int, runs: list[dict[str, Any]], predictions: list[Prediction]) -> dict[str, Any]:
    """Medians of the runs and of the predictions with so many actors."""
    new = [float(run["new_sps"]) for run in runs]
    busy = float(np.median([1 - waiting(run["time"]["actor"]) for run in runs]))
    predicted, production, consumption = np.median(
        [(p.new, p.capacity["actors"], p.capacity["learner"]) for p in predictions], axis=0
    ).tolist()
    return {
        "actors": actors, "consumed": float(np.median(new)), "samples": new,
        "produced_if_unhindered": float(np.median(new)) / busy, "actors_busy": busy,
        "verdict": runs[-1]["verdict"], "predicted": predicted,
        "predictions": [p.new for p in predictions], "predicted_production": production,
        "predicted_consumption": consumption,
        "binding": "actors" if production < consumption else "learner",
    }  # fmt: skip


def profiled(batches: int) -> Profile:
    overrides = [*asked(batches), f"scale.envs_per_actor={ENVS}"]
    return profiler.measure(load_config(ROOT / "configs" / f"{NAME}.toml", overrides))


def rows(measured: Profile) -> float:
    """Steps of a batch that are not resets."""
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
                *spread(Choice("local", n, ENVS // n, T)), f"seed={seed}",
                f"stop.return={arguments.target}", "stop.seconds=90", "--json", "--plain",
                "--runs", str(folder),
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
    """New and consumed steps per second with several groups; and, since cores that work at once
    slow each other down, of as many runs of one group each, side by side."""
    here = sorted(os.sched_getaffinity(0))
    counts = [n for n in map(int, arguments.groups.split(",")) if 3 * n <= len(here)]
    if not counts:
        return []
    new, consumed = rows(profiled(1)), dict[str, list[float]]()

    def one(groups: int, cores: list[int]) -> dict[str, Any]:
        os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
        choice = Choice("local", 2, ENVS // 2, T, groups=groups)
        return timed(NAME, [*asked(1), *spread(choice)], arguments.seconds, folder, new)

    def task(name: str, runs: int, groups: int) -> float:
        shares = [here[i::runs] for i in range(runs)]
        with ThreadPoolExecutor(runs) as pool:
            found = list(pool.map(one, [groups] * runs, shares))
        consumed.setdefault(name, []).append(sum(run["steps_per_s"]["consumed"] for run in found))
        return sum(float(run["new_sps"]) for run in found)

    tasks = {f"{n} together": partial(task, f"{n} together", 1, n) for n in counts}
    tasks |= {f"{n} apart": partial(task, f"{n} apart", n, 1) for n in counts if n > 1}
    samples = interleaved(tasks, arguments.rounds)
    found = [
        {"groups": int(name.split()[0]), "together": name.endswith("together"),
         "received": float(np.median(samples[name])),
         "consumed": float(np.median(consumed[name])),
         "samples": samples[name], "consumed_samples": consumed[name]}
        for name in tasks
    ]  # fmt: skip
    first = next(point for point in found if point["groups"] == 1)
    told = [
        (point["groups"], "groups of one run" if point["together"] else "runs side by side",
         *(cell for key in ("received", "consumed")
           for cell in (f"{point[key]:,.0f}", f"{point[key] / first[key] / point['groups']:.2f}")))
        for point in found
    ]  # fmt: skip
    header = ("", "", "received", "of linear", "consumed", "of linear")
    print(f"\ntwo actors and a learner each, steps per second\n{table(header, told)}", flush=True)
    return found


if __name__ == "__main__":
    main()
