"""What the trace costs: what a driver keeps of each event, and what a host writes of them.

    python benchmarks/trace.py [--rounds 9] [--seconds 3] [--slices 400]

First in nanoseconds for each event: the driver's real accounting with and without the lines that
keep an event (untraced.py), in turn, and the writing of as many events as gather between two
writes; times the events of an env step, over what that step takes. Then a real actor's loop with
its trace and without, in slices of some rollouts, in turn, by the time of the processor; and whole
runs in turn, with engine local by the processor's time of the actor, with engine serial by that of
the run. The bar is 1 % of a step. A whole run is not exact to a percent on a machine that others
use.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import PATH, interleaved, medians, quartiles, ratio_of_medians, run_json, save, table
from supervision import CASES, FEWER, SLICE, WHOLE
from untraced import TRACE, untraced
from unwatched import SUPERVISION, TOLD

from tianji import trace
from tianji.build import build
from tianji.config import load_config
from tianji.driver import Serial
from tianji.probe import Sink

BAR = 0.01
GATHERED = 4096
"""events between two writes in the figure for one"""
RUN = (
    "import json, sys, time, tianji; result = tianji.train(json.loads(sys.argv[1]), "
    "runs=sys.argv[2]).tree(); print(json.dumps(result | {'cpu': time.process_time()}))"
)


class Untraced(Serial):
    """A driver that keeps nothing of its events."""


Untraced._account = untraced
KINDS = {"with": Serial, "without": Untraced}


def events(rounds: int, times: int = 20_000) -> dict[str, dict[str, Any]]:
    """Nanoseconds of keeping an event, and of writing it, where it is one of many; and what a
    write of a few takes."""
    keys = ("actor/infer", "actor/simulate")
    drivers = {kind: made([]) for kind, made in KINDS.items()}

    def account(kind: str) -> float:
        note, now = drivers[kind]._account, drivers[kind].now
        begun = time.process_time()
        for _ in range(times // 2):
            note(keys[0], now)
            note(keys[1], now)
        return (time.process_time() - begun) / times * 1e9

    tasks = {kind: lambda kind=kind: account(kind) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        ring, driver = trace.Ring(Path(folder, "trace", "actor-0.trace")), Serial([])

        def write(count: int) -> float:
            for i in range(count):
                driver._account(keys[i % 2], driver._clock())
            begun = time.process_time()
            ring.write(*driver.events())
            return time.process_time() - begun

        write(2)
        tasks |= {"many": lambda: write(GATHERED), "few": lambda: write(2)}
        samples = interleaved(tasks, rounds)
    keep = np.subtract(samples["with"], samples["without"])
    many, few = np.array(samples["many"]), np.array(samples["few"])
    found = {"keep": keep, "write": (many - few) / GATHERED * 1e9, "writes": few * 1e9}
    return {
        name: {"ns": float(np.median(values)), "quartiles": quartiles(values)}
        for name, values in found.items()
    }


def sliced(tree: dict[str, Any], slices: int) -> dict[str, Any]:
    """A real actor, and somebody who takes what it makes: what a step of its envs takes."""
    built = build(load_config({**tree, "stop": {"updates": 1}}))
    built.learner.begin()
    actor, sink = built.actors[0], Sink(built.transport.inbox(built.assembly.lanes[0]))
    drivers = {kind: made([actor, sink]) for kind, made in KINDS.items()}
    with tempfile.TemporaryDirectory() as folder:
        ring = trace.Ring(Path(folder, "trace", "actor-0.trace"))
        written = 0.0

        def task(kind: str) -> float:
            nonlocal written
            driver, before = drivers[kind], actor.steps
            until, begun = before + SLICE[built.spec.env.id], time.process_time()
            while actor.steps < until:
                driver.step()
            if kind == "with" and time.perf_counter() - written > trace.EVERY:
                ring.write(*driver.events())
                written = time.perf_counter()
            return (time.process_time() - begun) / (actor.steps - before) * 1e9

        for kind in KINDS:
            task(kind)
        drivers["with"].events()
        before = actor.steps
        for _ in range(4 * SLICE[built.spec.env.id]):
            drivers["with"].step()
        per_step = len(drivers["with"].events()[1]) / (actor.steps - before)
        tasks = {kind: lambda kind=kind: task(kind) for kind in KINDS}
        samples = interleaved(tasks, slices // FEWER[built.spec.env.id])
    ratio, low, high = ratio_of_medians(samples["with"], samples["without"], resamples=2000)
    return {
        "step_ns": medians(samples), "events_per_step": per_step, "ratio": ratio,
        "interval": [low, high], "slices": len(samples["with"]),
        "first_quartile_ns": {kind: quartiles(xs)[0] for kind, xs in samples.items()},
    }  # fmt: skip


def run(tree: dict[str, Any], seconds: float, kind: str, engine: str) -> float:
    """A run of so many seconds: nanoseconds of the processor for a step."""
    whole = {**tree, "stop": {"seconds": seconds}, "checkpoint": {"store": "never"}}
    whole["env"] = {**tree["env"], "imports": ["unwatched", "untraced"]}
    whole["scale"] = {**tree["scale"], "engine": engine}
    with tempfile.TemporaryDirectory() as runs:
        argv = [sys.executable, "-c", RUN, json.dumps(whole), runs]
        result = run_json(argv, PATH | {TRACE: kind, SUPERVISION: "with"})
        if engine == "serial":
            return result["cpu"] / result["steps"] * 1e9
        lines = (Path(result["run_dir"]) / "logs" / "actor-0.log").read_text().splitlines()
    took = json.loads(next(line for line in lines if line.startswith(TOLD))[len(TOLD) :])
    return took["cpu_s"] / took["steps"] * 1e9


def whole_runs(tree: dict[str, Any], rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
    for engine in ("local", "serial"):
        tasks = {
            kind: lambda kind=kind, engine=engine: run(tree, seconds, kind, engine)
            for kind in KINDS
        }
        samples = interleaved(tasks, rounds)
        ratio, low, high = ratio_of_medians(samples["with"], samples["without"])
        found[engine] = {
            "step_ns": medians(samples), "ratio": ratio, "interval": [low, high],
            "samples": samples,
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of whole runs")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each whole run")
    parser.add_argument("--slices", type=int, default=400, help="of the loop, with and without")
    arguments = parser.parse_args()
    told = events(401)
    keep, write, writes = (told[name]["ns"] for name in ("keep", "write", "writes"))
    fixed = writes / 1e9 / trace.EVERY
    print(f"keep {keep:.0f} ns and write {write:.0f} ns an event; a write {writes / 1000:.0f} us, "
          f"{fixed:.4%} of a core", flush=True)  # fmt: skip
    rows, results = [], {}
    for name, tree in CASES.items():
        found = sliced(tree, arguments.slices)
        events_ns = found["events_per_step"] * (keep + write)
        share = events_ns / found["step_ns"]["without"] + fixed
        runs = None
        if name in WHOLE and arguments.rounds:
            runs = whole_runs(tree, arguments.rounds, arguments.seconds)
        results[name] = {
            "config": tree, "events_ns": events_ns, "share": share, "loop": found, "runs": runs,
        }  # fmt: skip
        rows.append((
            name, f"{found['step_ns']['without'] / 1000:.1f}", f"{found['events_per_step']:.2f}",
            f"{events_ns:.0f}", f"{share:.2%}", "pass" if share <= BAR else "MISS",
            _ratio(found), _ratio(runs and runs["local"]), _ratio(runs and runs["serial"]),
        ))  # fmt: skip
        print(table(("", "step, us", "events", "ns of trace", "share (<= 1 %)", "",
                     "loop, with / without", "run, actor's CPU", "serial run, CPU"), rows),
              flush=True)  # fmt: skip
    print(save("trace", {"bar": BAR, "events": told, "cases": results}))


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
