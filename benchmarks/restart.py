"""What the death of an actor costs a run: SIGKILL at random moments, from the run's own records.

    python benchmarks/restart.py [--kills 12] [--seed 0]

A run of three actors with engine local and PPO, whose env takes 10 ms for a step and writes down
when each one ended (simulated.py); once with an env that is made at once, once with one that takes
0.3 s to be made. Of every kill:

    detected    from the kill to the line of faults.jsonl
    restarted   from there to the end of the successor's first step; what making the env and that
                one step take, by the config, is taken off: it is the env's own
    lost        production of that actor beyond detection: seconds at its usual rate, over the time
                to 1.5 s after the successor's first step, the making of the env taken off

and where the time went: until the successor makes its env (process, config, memory), makes it, and
steps it first. Steps of the rollout that was half made are lost, too, at most a rollout's length.
Kills are further apart than faults.window, so that none waits longer for those before it.
"""

import argparse
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from measure import PATH, ROOT, save, table

BARS = {"detected": 2.0, "restarted": 5.0, "lost": 1.0}
"""seconds at most, of the median"""
STEP_S, LENGTH = 0.01, 16
AFTER = 1.5
"""seconds after a successor's first step in which it must have its usual rate"""
WINDOW = 2.0
"""faults.window; kills are further apart"""
RECENT = 16384
"""bytes of the log's end in which a role that lives has made a step"""
LIMIT = 60.0
"""seconds for each thing that is waited for"""
CASES = {"made at once": 0.0, "made in 0.3 s": 0.3}


def config(make_s: float, log: Path) -> dict[str, Any]:
    kwargs = {"step_s": STEP_S, "make_s": make_s, "log": str(log)}
    return {
        "env": {"id": "simulated/Env", "imports": ["simulated"], "kwargs": kwargs},
        "algorithm": {"name": "simulated_ppo", "update_s": 0.02},
        "scale": {"engine": "local", "actors": 3, "envs_per_actor": 8, "rollout_length": LENGTH},
        "faults": {"restarts": 3, "window": WINDOW},
        "stop": {"seconds": 3600},
    }


class Line(NamedTuple):
    """Of the env's log."""

    what: str
    role: str
    pid: int
    at: float
    """seconds since the epoch"""


def read(log: Path) -> list[Line]:
    lines = (line.split() for line in log.read_text().splitlines()) if log.exists() else ()
    return [Line(what, role, int(pid), float(at)) for what, role, pid, at in lines]


def until(holds: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT
    while not (found := holds()):
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not happen within {LIMIT:g} s")
        time.sleep(0.05)
    return found


def last_pid(log: Path, role: str) -> int:
    """Of the process that made this role's last step; 0 where there is none of late."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - RECENT))
        lines = [line.split() for line in file.read().decode().splitlines()[1:]]
    found = [int(line[2]) for line in lines if line[:2] == ["step", role] and len(line) == 4]
    return found[-1] if found else 0


def measured(make_s: float, kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """One run with so many kills."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        log, folder = place / "steps", place / "runs" / "run"
        (place / "config.toml").write_text(tomli_w.dumps(config(make_s, log)))
        with (place / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "tianji", "train", str(place / "config.toml"), "--plain",
                 "--json", "--runs", str(place / "runs"), "--name", "run"],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                start_new_session=True, env=os.environ | PATH | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        try:
            killed = _kill(log, kills, rng)
            process.send_signal(signal.SIGTERM)
            code = process.wait(LIMIT)
        finally:
            if process.poll() is None:
                process.kill()  # its hosts end with it
                process.wait()
        if code != 75:
            raise RuntimeError(f"the run ended with {code}: {(place / 'err').read_text()[-2000:]}")
        faults = [json.loads(line) for line in (folder / "faults.jsonl").open()]
        _check_whole(folder)
        return [_account(kill, faults, read(log), make_s) for kill in killed]


def _kill(log: Path, kills: int, rng: random.Random) -> list[tuple[str, int, float]]:
    """Kill an actor so many times: the role, its pid, and when."""
    roles, killed = ["actor-0", "actor-1", "actor-2"], []
    until(lambda: all(last_pid(log, role) for role in roles), "the start of all actors")
    for _ in range(kills):
        time.sleep(WINDOW + AFTER / 2 + rng.uniform(0, 1))
        role = rng.choice(roles)
        pid, at = last_pid(log, role), time.time()
        os.kill(pid, signal.SIGKILL)
        killed.append((role, pid, at))
        until(lambda role=role, pid=pid: last_pid(log, role) != pid, "a restart")
    time.sleep(AFTER + 0.5)
    return killed


def _check_whole(folder: Path) -> None:
    """Of every actor's rollouts each must have arrived once, in order, across its deaths."""
    import tianji

    arrived = tianji.arrivals(folder)
    for actor in np.unique(arrived["actor"]):
        seqs = arrived["seq"][arrived["actor"] == actor]
        if not np.array_equal(seqs, np.arange(len(seqs))):
            raise RuntimeError(f"rollouts of actor {actor} were lost or came twice: {seqs}")


def _account(
    kill: tuple[str, int, float], faults: list[dict[str, Any]], lines: list[Line], make_s: float
) -> dict[str, Any]:
    role, pid, at = kill
    when = next(fault["time"] for fault in faults if fault["pid"] == pid)
    detected = datetime.datetime.fromisoformat(when).timestamp()
    mine = [line for line in lines if line.role == role]
    after = next(line.pid for line in mine if line.at > at and line.pid != pid)
    make, made, first = (
        next(line.at for line in mine if line.pid == after and line.what == what)
        for what in ("make", "made", "step")
    )
    end = first + AFTER
    steps = sum(line.what == "step" and at < line.at <= end for line in mine)
    usual = _usual_s(lines)
    return {
        "role": role,
        "detected": detected - at,
        "restarted": first - detected - make_s - STEP_S,
        "lost": end - detected - make_s - steps * usual,
        "until_make": make - detected,
        "making": made - make,
        "until_step": first - made,
        "half_made": sum(line.what == "step" and line.pid == pid for line in mine) % LENGTH,
        "made": sum(line.pid == after and line.what == "make" for line in mine),
        "usual_s": usual,
    }


def _usual_s(lines: list[Line]) -> float:
    """Mean seconds from one step of an actor to the next, over all that lived through both."""
    spent, count = 0.0, 0
    for pid in {line.pid for line in lines}:
        times = [line.at for line in lines if line.pid == pid and line.what == "step"]
        if len(times) > 1:
            spent, count = spent + times[-1] - times[0], count + len(times) - 1
    return spent / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the actors")
    arguments = parser.parse_args()
    rng, rows, results = random.Random(arguments.seed), [], {}
    for name, make_s in CASES.items():
        kills = measured(make_s, arguments.kills, rng)
        figures = {}
        for key in (*BARS, "until_make", "making", "until_step", "half_made", "usual_s"):
            values = [kill[key] for kill in kills]
            figures[key] = {"median": float(np.median(values)), "max": float(np.max(values))}
            bar = BARS.get(key)
            told = "" if bar is None else "pass" if figures[key]["median"] <= bar else "MISS"
            rows.append((name, key, *(f"{x:.3f}" for x in figures[key].values()), bar or "", told))
        results[name] = {"make_s": make_s, "figures": figures, "kills": kills}
    print(table(("env", "seconds", "median", "max", "bar", ""), rows))
    about = {"bars": BARS, "step_s": STEP_S, "rollout_length": LENGTH}
    print(save("restart", {**about, "cases": results}))


if __name__ == "__main__":
    main()
