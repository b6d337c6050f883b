"""What supervision costs: what hosts write down of how far they are, and the launcher's look at it.

    python benchmarks/supervision.py [--rounds 9] [--seconds 3] [--slices 400] [--more CASE]

First in nanoseconds for each event: a host's real loop with and without the lines that write the
beat and the step of an env (unwatched.py), in turn, over roles that do nothing; times the events of
an env step, over what that step of an actor takes. What the launcher takes is its time each second.
Then the same loop with a real actor, in slices of some rollouts, in turn, by the time of the
processor; and whole runs with engine local in turn, by that of the actor and by the steps received.
The bar is 1 % of a step. A whole run is not exact to a percent on a machine that others use.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import math
import mmap
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import (
    PATH,
    RESULTS,
    interleaved,
    medians,
    quartiles,
    ratio_of_medians,
    run_json,
    save,
    table,
)
from unwatched import SUPERVISION, TOLD, unwatched

from tianji.actor import SIMULATE
from tianji.build import build
from tianji.config import load_config
from tianji.driver import Serial
from tianji.engines.event_reporter import EventReporter
from tianji.engines.host import Host
from tianji.engines.hosts import Host as Known
from tianji.engines.hosts import HostTable
from tianji.engines.supervisor import LOOK
from tianji.placement import Placement
from tianji.probe import Sink
from tianji.role import Did
from tianji.role_names import RoleName

BAR = 0.01
PPO = {"name": "ppo", "epochs": 1, "minibatches": 4}
CASES: dict[str, dict[str, Any]] = {
    "CartPole, 1 env": {
        "env": {"id": "CartPole-v1"},
        "algorithm": PPO,
        "scale": {"envs_per_actor": 1, "rollout_length": 128},
    },
    "CartPole, 8 envs": {
        "env": {"id": "CartPole-v1"},
        "algorithm": PPO,
        "scale": {"envs_per_actor": 8, "rollout_length": 32},
    },
    "frames, 8 envs": {
        "env": {"id": "toy/Frames"},
        "algorithm": PPO,
        "scale": {"envs_per_actor": 8, "rollout_length": 16},
    },
}
RUN = (
    "import json, sys, tianji; "
    "print(json.dumps(tianji.train(json.loads(sys.argv[1]), runs=sys.argv[2]).tree()))"
)
SLICE = {"CartPole-v1": 256, "toy/Frames": 16}
"""env steps of an actor between one turn and the next, at least"""
FEWER = {"CartPole-v1": 1, "toy/Frames": 10}
"""by which the number of slices is divided"""
WHOLE = ("CartPole, 8 envs", "frames, 8 envs")
"""cases that whole runs are made of, too"""
HOSTS = 16
"""that a launcher looks at in the figure for one"""


class Watched(Host):
    """A host's loop and what it touches, without a process, a line or a launcher."""

    def __init__(self, driver: Any, actor: Any) -> None:
        self._board, self._place = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q"), 8
        self._driver, self._actors, self._learner = driver, [actor], None
        self._reporter = EventReporter([actor])
        self._stopping = self._resting = self._settling = False
        self._heard, self._told, self._trace = 0, math.inf, None
        self._roles, self._transport = {}, SimpleNamespace(close=lambda: None)

    def _say(self, message: Any) -> None:
        """Nobody hears it."""


class Unwatched(Watched):
    """The same without supervision."""


for _name, _function in unwatched().items():
    setattr(Unwatched, _name, _function)

KINDS = {"with": Watched, "without": Unwatched}


class Nothing:
    """A driver whose roles do nothing, so many times."""

    now = 0.0

    def __init__(self, did: Did, times: int) -> None:
        self._did, self._times, self._left = did, times, times
        self.host: Host | None = None

    def step(self) -> Did:
        self._left -= 1
        if not self._left:
            self._left = self._times
            self.host._stopping = True
        return self._did


def events(rounds: int, times: int = 20_000) -> dict[str, dict[str, Any]]:
    """Nanoseconds of a beat, and of the note of an env's step."""
    tasks = {}
    for name, did in (("infer", Did("infer")), ("simulate", SIMULATE)):
        for kind, made in KINDS.items():
            driver = Nothing(did, times)
            driver.host = made(driver, SimpleNamespace(steps=1, seed=0))
            tasks[name, kind] = lambda host=driver.host: _spent(host) / times * 1e9
    samples = interleaved(tasks, rounds)
    more = {
        name: np.subtract(samples[name, "with"], samples[name, "without"])
        for name in ("infer", "simulate")
    }
    found = {"beat": more["infer"], "step": more["simulate"] - more["infer"]}
    return {
        name: {"ns": float(np.median(values)), "quartiles": quartiles(values)}
        for name, values in found.items()
    }


def _spent(host: Host) -> float:
    """Seconds of the processor for one run of the loop."""
    host._stopping = False
    begun = time.process_time()
    host.run()
    return time.process_time() - begun


def launcher(rounds: int) -> dict[str, float]:
    """What the launcher's look at its hosts takes."""
    hosts = HostTable.__new__(HostTable)
    hosts._board = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    roles = [RoleName("actor", i) for i in range(HOSTS)]
    hosts.by_name = {
        str(role): Known(Placement(str(role), (), 1), (role,), 8 * i, None, resting=False)
        for i, role in enumerate(roles)
    }
    times, samples = 500, []
    for _ in range(rounds):
        begun = time.process_time()
        for beat in range(times):
            hosts._board[9] = beat
            hosts.hanging(None)
        samples.append((time.process_time() - begun) / times)
    look = float(np.median(samples))
    return {
        "hosts": HOSTS, "look_us": look * 1e6, "looks_per_s": 1 / LOOK, "share": look / LOOK,
    }  # fmt: skip


class Ending(Sink):
    """Takes rollouts; when it has had so many and there is no other, the host's loop ends."""

    def __init__(self, inbox: Any, rollouts: int) -> None:
        super().__init__(inbox)
        self._rollouts, self._taken = rollouts, 0
        self.host: Host | None = None

    def step(self) -> Did:
        did = super().step()
        if did:
            self._taken += 1
        elif self._taken >= self._rollouts:
            self._taken = 0
            self.host._stopping = True
        return did


def sliced(tree: dict[str, Any], slices: int) -> dict[str, Any]:
    """The loop with a real actor: what a step of its envs takes, with supervision and without."""
    built = build(load_config({**tree, "stop": {"updates": 1}}))
    built.learner.begin()
    actor, rollouts = built.actors[0], SLICE[built.spec.env.id] // built.spec.T
    sink = Ending(built.transport.inbox(built.assembly.lanes[0]), rollouts)
    driver = Serial([actor, sink])
    count = 0
    step = driver.step

    def counted() -> Did:
        nonlocal count
        count += 1
        return step()

    driver.step = counted  # how many beats an env step has, once
    sink.host = Watched(driver, actor)
    _spent(sink.host)
    before, count = actor.steps, 0
    _spent(sink.host)
    beats = count / (actor.steps - before)
    del driver.step

    def task(kind: str) -> float:
        sink.host, before = KINDS[kind](driver, actor), actor.steps
        return _spent(sink.host) / (actor.steps - before) * 1e9

    slices //= FEWER[built.spec.env.id]
    samples = interleaved({kind: lambda kind=kind: task(kind) for kind in KINDS}, slices)
    ratio, low, high = ratio_of_medians(samples["with"], samples["without"], resamples=2000)
    return {
        "step_ns": medians(samples), "beats_per_step": beats, "ratio": ratio,
        "interval": [low, high], "slices": slices,
        "first_quartile_ns": {kind: quartiles(xs)[0] for kind, xs in samples.items()},
    }  # fmt: skip


def run(tree: dict[str, Any], seconds: float, kind: str) -> dict[str, float]:
    """A run of so many seconds: steps received per second, nanoseconds of the actor for a step."""
    whole = {**tree, "stop": {"seconds": seconds}, "checkpoint": {"store": "never"}}
    whole["env"] = {**tree["env"], "imports": ["unwatched"]}
    whole["scale"] = {**tree["scale"], "engine": "local"}
    with tempfile.TemporaryDirectory() as runs:
        argv = [sys.executable, "-c", RUN, json.dumps(whole), runs]
        result = run_json(argv, PATH | {SUPERVISION: kind})
        lines = (Path(result["run_dir"]) / "logs" / "actor-0.log").read_text().splitlines()
    took = json.loads(next(line for line in lines if line.startswith(TOLD))[len(TOLD) :])
    return {
        "received": result["steps_per_s"]["received"],
        "actor_ns": took["cpu_s"] / took["steps"] * 1e9,
    }


def whole_runs(
    tree: dict[str, Any], rounds: int, seconds: float, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """So many runs with and without, beside those that were made earlier."""
    kept: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}

    def task(kind: str) -> float:
        kept[kind].append(run(tree, seconds, kind))
        return 0.0

    interleaved({kind: lambda kind=kind: task(kind) for kind in KINDS}, rounds)
    found: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
    if earlier is not None:
        found["rounds"] += earlier["rounds"]
    for key in ("received", "actor_ns"):
        samples = {kind: [one[key] for one in runs] for kind, runs in kept.items()}
        if earlier is not None:
            samples = {kind: earlier[key]["samples"][kind] + xs for kind, xs in samples.items()}
        ratio, low, high = ratio_of_medians(samples["with"], samples["without"])
        found[key] = {
            "median": medians(samples), "ratio": ratio, "interval": [low, high],
            "samples": samples,
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of whole runs")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each whole run")
    parser.add_argument("--slices", type=int, default=400, help="of the loop, with and without")
    parser.add_argument("--more", choices=WHOLE, help="only whole runs of it, beside all there is")
    arguments = parser.parse_args()
    if arguments.more:
        saved = json.loads((RESULTS / "supervision.json").read_text())
        case = saved["cases"][arguments.more]
        case["runs"] = whole_runs(case["config"], arguments.rounds, arguments.seconds, case["runs"])
        print({key: _ratio(case["runs"][key]) for key in ("actor_ns", "received")})
        print(save("supervision", {k: saved[k] for k in ("bar", "events", "launcher", "cases")}))
        return
    told = events(201)
    looks = launcher(51)
    beat, step = told["beat"]["ns"], told["step"]["ns"]
    print(f"a beat {beat:.0f} ns, a step {step:.0f} ns; the launcher's look at {HOSTS} hosts "
          f"{looks['look_us']:.1f} us, {looks['share']:.4%} of a core", flush=True)  # fmt: skip
    rows, results = [], {}
    for name, tree in CASES.items():
        found = sliced(tree, arguments.slices)
        events_ns = found["beats_per_step"] * beat + step
        share = events_ns / found["step_ns"]["without"]
        runs = whole_runs(tree, arguments.rounds, arguments.seconds) if name in WHOLE else None
        results[name] = {
            "config": tree, "events_ns": events_ns, "share": share, "loop": found, "runs": runs,
        }  # fmt: skip
        rows.append((
            name, f"{found['step_ns']['without'] / 1000:.1f}", f"{found['beats_per_step']:.2f}",
            f"{events_ns:.0f}", f"{share:.2%}", "pass" if share <= BAR else "MISS",
            _ratio(found), _ratio(runs and runs["actor_ns"]), _ratio(runs and runs["received"]),
        ))  # fmt: skip
        print(table(("", "step, us", "beats", "ns of supervision", "share (<= 1 %)", "",
                     "loop, with / without", "run, actor's CPU", "run, steps/s"), rows),
              flush=True)  # fmt: skip
    print(save("supervision", {"bar": BAR, "events": told, "launcher": looks, "cases": results}))


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
