"""Does a plan's prediction come true, and is its choice the best that there is?

    python benchmarks/plan.py [NAME ...] [--rounds 3] [--turns 1] [--seconds 8] [--most 12]
                              [--sweep 4] [--limit 600] [--add] [-- K=V ...]

For each config: a profile; a prediction for every way to spread it over the cores of this machine
that changes nothing of what is learnt (replay: with the envs that are best for it); then real runs
of these, interleaved with further profiles: in each round --turns of every way, in turn. As the
machine's own speed drifts, a round's runs are compared with the prediction of the profile just
before them, and a sweep's, which take longer, with that of the one before the sweep; the median of
these errors counts. What the plan's way reached of the best is told by the mean of all runs of each
in all rounds, with a 95 % interval over turns: where others use the machine, too, one run differs
from the next of the same way by a tenth or more, so that many short runs tell ways apart, and few
long ones do not. --add makes further rounds, at another time, of the same ways. Where there are
more ways than --most, half of those that are run are predicted to be best, and the others are
spread from there to the worst. With --sweep S every single way is run before, in random order, for
S seconds or until ten updates follow the warm-up; then again the better third by their quickest
run, and so on until --most are left; rounds are made of the best of them and of the plan's. --add
goes on with a sweep that --limit cut. New steps are those that updates follow; the share of rows
that are steps, which grows with the length of episodes, is the profile's. The bars are an error of
at most 15 % for each plan and of 8 % in the median, and a plan that reaches 0.95 of the best.
Results: benchmarks/results/plan/NAME_N_cores.json, written after each run of a sweep and each
round, and docs/plan.svg. --draw alone concludes anew from the runs that they hold, and draws.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as in a run: threads that wait do not spin

import argparse
import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import picture
from measure import (
    PATH,
    RESULTS,
    continued,
    interleaved,
    machine,
    save,
    split_overrides,
    table,
)
from speed import forked, runner, source, spread

from tianji import planner, profiler, shape
from tianji.annotated import tree
from tianji.config import Config, load_config
from tianji.machine import cores
from tianji.plan import Choice, Prediction, Task, different, predict, search
from tianji.probe import Probe
from tianji.profile import Profile

NAMES = ("ppo_cartpole", "dqn_cartpole", "ppo_pong", "dqn_pong", "qmix_3m")
BAR, MEDIAN_BAR, BEST_BAR = 0.15, 0.08, 0.95
ENOUGH_TURNS = 5
"""from which an interval over them is told"""
DISTURBED = 0.6
"""of what it makes on a quiet machine, a way makes at least so much"""


def main() -> None:
    own, more = split_overrides()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="of each way in a round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, at least")
    parser.add_argument("--add", action="store_true",
                        help="to what was measured before, of the same ways")  # fmt: skip
    parser.add_argument("--draw", action="store_true",
                        help="only conclude anew from kept runs, and draw")  # fmt: skip
    parser.add_argument("--most", type=int, default=12, help="ways that are run for each config")
    parser.add_argument("--sweep", type=float, default=0.0, metavar="S",
                        help="before, run every way so long, and better ones again")  # fmt: skip
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S",
                        help="then begin no further run of a config's sweep, and no round that "
                        "would end later")  # fmt: skip
    arguments = parser.parse_args(own)
    os.environ.update(PATH)  # for hosts of envs that are simulated here
    if arguments.draw:
        for path in sorted((RESULTS / "plan").glob("*_cores.json")):
            case = json.loads(path.read_text())
            if case["ways"]:
                path.write_text(json.dumps(compared(case), indent=2) + "\n")
        draw()
        return
    cases, rows = {}, []
    for name in arguments.names or NAMES:
        for case in measured(name, more, arguments):
            save(f"plan/{name}_{machine()['cores']}_cores",
                 {"name": name, "overrides": more, **case})  # fmt: skip
            cases[name] = case
        if name not in cases:
            print(f"{name}: nothing was run; let there be more time or rounds")
            continue
        case = cases[name]
        if case["sweep"]:
            print(f"{name}: {sum(bool(way['new']) for way in case['sweep'])} of "
                  f"{len(case['sweep'])} ways were run")  # fmt: skip
        if not case["ways"]:
            print(f"{name}: no round was made; --add goes on")
            del cases[name]
            continue
        for way in case["ways"]:
            words = f"{name}: {way['words']}" + (" *" if way["chosen"] else "")
            speeds = f"{way['predicted']:,.0f}", f"{way['measured']:,.0f}"
            rows.append((words, *speeds, f"{way['error']:+.1%}"))
        print(f"{name}: plan {told_reached(case)} of the best; error of the plan "
              f"{case['error']:+.1%}; profile {case['profile_s']:.0f} s", flush=True)  # fmt: skip
    if not cases:
        return
    print(table(("way (* the plan)", "predicted", "measured", "error"), rows))
    errors = [abs(case["error"]) for case in cases.values()]
    summary = {"worst": max(errors), "median": float(np.median(errors)),
               "least_reached": min(case["reached"] for case in cases.values())}  # fmt: skip
    print(f"errors of the plans: {summary['median']:.1%} in the median, {summary['worst']:.1%} at "
          f"most; the plans reach {summary['least_reached']:.2f} of the best or more")  # fmt: skip
    print(f"bars: {MEDIAN_BAR:.0%}, {BAR:.0%} and {BEST_BAR:.2f}")
    if picture.possible():
        draw()


def draw() -> None:
    """What was predicted against what was measured, for every way and every machine; for those of
    rounds as far from each other as in the median, with smaller dots for each of a sweep."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / "plan").glob("*_cores.json")):
        case = json.loads(path.read_text())
        if case["ways"]:  # a sweep that was cut has none yet
            found.setdefault(case["machine"]["cores"], []).append(case)
    with picture.drawn("plan", len(found), (4.2 * len(found), 3.6)) as axes:
        for axis, (count, cases) in zip(axes, sorted(found.items()), strict=True):
            every: list[float] = []
            for case in cases:
                ways, name = case["ways"], case["name"]
                xs = [way["measured"] for way in ways]
                ys = [way["measured"] * (1 + way["error"]) for way in ways]
                (dots,) = axis.plot(xs, ys, "o", markersize=4, alpha=0.4, label=name)
                mine = next(way for way in ways if way["chosen"])
                axis.plot(mine["measured"], mine["measured"] * (1 + mine["error"]), "o",
                          markersize=9, fillstyle="none", color=dots.get_color())  # fmt: skip
                once = [way for way in case.get("sweep", []) if way["new"]]
                sweep = ([np.mean(way["new"]) for way in once],
                         [np.mean(way["predictions"]) for way in once])  # fmt: skip
                axis.plot(*sweep, ".", markersize=3, alpha=0.4, color=dots.get_color())
                every += [*xs, *ys, *sweep[0], *sweep[1]]
            ends = np.array([0.8 * min(every), 1.25 * max(every)])
            axis.plot(ends, ends, color="grey", linewidth=0.8)
            axis.fill_between(ends, ends * (1 - BAR), ends * (1 + BAR), color="grey", alpha=0.15)
            axis.set(xscale="log", yscale="log", xlabel="measured, new steps/s",
                     ylabel="predicted", title=f"{count} cores")  # fmt: skip
            axis.legend(frameon=False, fontsize=7)


def measured(name: str, more: list[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One config: what was predicted and what was measured of every way, after each run of a sweep
    and after each round."""
    config = load_config(source(name), more)
    case = earlier(name, more) if arguments.add else {"ways": [], "sweep": []}
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as folder, runner() as runs:
        one = partial(run, runs, name, more, folder=Path(folder))
        if arguments.sweep and case["ways"] and not case["sweep"]:
            sys.exit(f"rounds of {name} were made without a sweep: leave --add or --sweep out")
        if arguments.sweep and not case["ways"]:
            yield from swept(config, case, one, arguments, end)
        begun = time.monotonic()
        if begun > end or (not case["ways"] and not is_whole(case["sweep"], arguments.most)):
            return
        for round in range(1, arguments.rounds + 1):
            found = profiler.measure(config)
            if not case["ways"]:
                case |= started(config, found, arguments.most, case["sweep"])
            tasks = {}
            for i, way in enumerate(case["ways"]):
                p = predict(found.task, found.rates, Choice(**way["choice"]), cores())
                way["predictions"].append(p.new)
                least = long_enough(config, found.task, p, arguments.seconds)
                tasks[str(i)] = partial(one, found, p, least)
            before = sum(map(len, case["ways"][0]["runs"]))
            for i, speeds in interleaved(tasks, arguments.turns, before).items():
                case["ways"][int(i)]["runs"].append(speeds)
            now = time.monotonic()
            print(f"{now - begun:4.0f} s", flush=True)
            case = compared(case)
            yield case
            if now + (now - begun) / round > end:
                return


def swept(
    config: Config,
    case: dict[str, Any],
    one: Callable[[Profile, Prediction, float], float],
    arguments: argparse.Namespace,
    end: float,
) -> Iterator[dict[str, Any]]:
    """Every way is run, and the better ones again, as long as there is time; what was run before
    counts."""
    found = profiler.measure(config)
    case["sweep"] = sweep = case["sweep"] or unseen(every_way(config, found))
    turn = 0
    while ways := left(sweep, turn, arguments.most):
        for way in ways:
            if len(way["new"]) > turn:
                continue
            if time.monotonic() >= end:
                return
            p = predict(found.task, found.rates, Choice(**way["choice"]), cores())
            way["predictions"].append(p.new)
            way["new"].append(one(found, p, long_enough(config, found.task, p, arguments.sweep)))
            yield case
        turn += 1


def left(sweep: list[dict[str, Any]], turn: int, most: int) -> list[dict[str, Any]]:
    """The ways that are run in this turn of a sweep, by those before: first all, then always the
    better third, at least `most`, without those that cannot have been disturbed so much; none once
    there were so few."""
    ways = sweep
    for turns in range(1, turn + 1):
        if len(ways) <= most:
            return []
        ways = sorted(ways, key=lambda way: -quickest(way, turns))[: max(most, len(ways) // 3)]
        best = quickest(ways[0], turns)
        ways = [way for way in ways if quickest(way, turns) >= DISTURBED * best]
    return ways


def quickest(way: dict[str, Any], turns: int) -> float:
    """New steps per second of a way of a sweep in its best run, of so many turns."""
    return max(way["new"][:turns], default=0.0)


def is_whole(sweep: list[dict[str, Any]], most: int) -> bool:
    """Was everything run that was to be?"""
    turn = 0
    while ways := left(sweep, turn, most):
        turn += 1
        if any(len(way["new"]) < turn for way in ways):
            return False
    return True


def earlier(name: str, more: list[str]) -> dict[str, Any]:
    """What was measured of a config before, on such a machine."""
    here = machine()
    path = RESULTS / "plan" / f"{name}_{here['cores']}_cores.json"
    if not path.is_file():
        sys.exit(f"there is no {path.name} to add to: leave --add out")
    case = {"sweep": []} | continued(path)
    there = case["before"][-1]["machine"]
    for key in ("cpu", "cores", "torch"):
        if there[key] != here[key]:
            sys.exit(f"{path.name}: {key} was {there[key]}, here it is {here[key]}")
    if case["overrides"] != more:
        sys.exit(f"{path.name} is of a config with {case['overrides']}: repeat them after --")
    return case


def unseen(ways: list[Prediction]) -> list[dict[str, Any]]:
    """All of them in random order, as the machine's speed drifts; none was run yet."""
    found = [{"choice": dataclasses.asdict(way.choice), "words": str(way.choice),
              "predictions": [], "new": []} for way in ways]  # fmt: skip
    random.Random(0).shuffle(found)
    return found


def started(
    config: Config, found: Profile, most: int, swept: list[dict[str, Any]]
) -> dict[str, Any]:
    """The ways that rounds are made of, and of which nothing was measured in one yet."""
    best = planner.make(config, found).best
    if swept:
        fastest = sorted(swept, key=lambda way: (-len(way["new"]), -np.mean(way["new"])))
        others = [Choice(**way["choice"]) for way in fastest]
        other = (choice for choice in others if choice.way != best.choice.way)
        picked = [best.choice, *other][:most]
        ranked = [predict(found.task, found.rates, choice, cores()) for choice in picked]
    else:
        ranked = some(every_way(config, found), best, most)
    ways = [
        {"choice": dataclasses.asdict(way.choice), "words": str(way.choice),
         "binding": way.binding, "chosen": way.choice == best.choice,
         "runs": [], "predictions": []}
        for way in ranked
    ]  # fmt: skip
    return {"ways": ways, "profile_s": found.seconds, "rates": tree(found.rates),
            "task": found.tree()["task"]}  # fmt: skip


def run(
    runs: Probe,
    name: str,
    more: list[str],
    found: Profile,
    way: Prediction,
    seconds: float,
    *,
    folder: Path,
) -> float:
    """New steps per second of a real run, which is made again, and longer, if it was too short."""
    rows = found.task.rows * found.rates.valid
    for long in (seconds, 4 * seconds):
        speed = forked(runs, name, [*more, *spread(way.choice)], long, folder, rows)
        if speed > 0:
            print(f"{name}: {way.choice}: {speed:,.0f} new steps/s, {way.new:,.0f} predicted",
                  flush=True)  # fmt: skip
            return speed
    sys.exit(f"{name}: {way.choice}: {4 * seconds:.0f} s are less than two updates. Set --seconds")


def compared(case: dict[str, Any]) -> dict[str, Any]:
    """With what was predicted and measured of every way, in the median of the rounds and of the
    sweep; the error of each, and in their median; and what the plan's own way reached of the best:
    in each round, and in the mean of all runs of the rounds, with an interval over turns. Runs of
    a sweep do not count there, as ways are in rounds because they were lucky in it."""
    for way in case["ways"]:
        pairs = [(np.mean(one["predictions"]), one["new"]) for one in case["sweep"]
                 if one["new"] and way_of(one) == way_of(way)]  # fmt: skip
        pairs += zip(way["predictions"], way["runs"], strict=True)
        predictions = np.array([predicted for predicted, _ in pairs])
        measured = np.array([np.mean(runs) for _, runs in pairs])
        way["predicted"] = float(np.median(predictions))
        way["measured"] = float(np.median(measured))
        way["errors"] = (predictions / measured - 1).tolist()
        way["error"] = float(np.median(way["errors"]))
    mine = next(way for way in case["ways"] if way["chosen"])
    own, all_ways = turns_of(mine), np.array([turns_of(way) for way in case["ways"]])
    best = [max(np.mean(way["runs"][i]) for way in case["ways"]) for i in range(len(mine["runs"]))]
    rounds = [float(np.mean(runs) / most) for runs, most in zip(mine["runs"], best, strict=True)]
    return case | {
        "error": mine["error"], "reached": float(own.mean() / all_ways.mean(axis=1).max()),
        "rounds": rounds, "turns": len(own),
        "interval": interval(own, all_ways) if len(own) >= ENOUGH_TURNS else None,
    }  # fmt: skip


def way_of(way: dict[str, Any]) -> tuple[Any, ...]:
    """How its roles are spread, whatever envs each has."""
    return Choice(**way["choice"]).way


def told_reached(case: dict[str, Any]) -> str:
    """What a plan reached of the best; with its interval, where there were turns to tell it by."""
    told = f"{case['reached']:.2f}"
    if case["interval"] is None:
        return told
    low, high = case["interval"]
    return f"{told} [{low:.2f}, {high:.2f}]"


def turns_of(way: dict[str, Any]) -> np.ndarray:
    """New steps per second of its runs in all rounds."""
    return np.concatenate(way["runs"])


def interval(own: np.ndarray, all_ways: np.ndarray, resamples: int = 10_000) -> list[float]:
    """The ends of the 95 % bootstrap interval of what one way reached of the best: of all [ways,
    turns], which were run in every turn. Which of them is the best may differ."""
    picked = np.random.default_rng(0).integers(len(own), size=(resamples, len(own)))
    best = all_ways[:, picked].mean(axis=2).max(axis=0)
    return np.percentile(own[picked].mean(axis=1) / best, [2.5, 97.5]).tolist()


def long_enough(config: Config, task: Task, way: Prediction, seconds: float) -> float:
    """Seconds of a run: so many, or until ten updates of every group follow the warm-up."""
    warmup, groups = getattr(config.algorithm, "warmup", 0), way.choice.groups
    of_each = 10 * task.rows / way.new + 2 * warmup / way.capacity["actors"]
    return max(seconds, groups * of_each)


def every_way(config: Config, found: Profile) -> list[Prediction]:
    """As ranked; where the plan is free to choose envs and rollouts, each with those that are
    predicted to be best for it."""
    env = shape.see(shape.template(config)).env

    def allowed(choice: Choice) -> bool:
        return shape.possible(config, choice, env, found.task)

    return list(different(search(found.task, found.rates, cores(), allowed)))


def some(ranked: list[Prediction], best: Prediction, most: int) -> list[Prediction]:
    """So many of them, and the plan's own."""
    if best.choice not in [p.choice for p in ranked]:
        ranked = [best, *ranked]
    if len(ranked) <= most:
        return ranked
    rest = np.linspace(most // 2, len(ranked) - 1, most - most // 2).round().astype(int)
    mine = [p.choice for p in ranked].index(best.choice)
    return [ranked[i] for i in sorted({mine, *range(most // 2), *rest.tolist()})]


if __name__ == "__main__":
    main()
