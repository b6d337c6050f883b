"""Does a run that goes on and on take more and more memory or descriptors?

    python benchmarks/soak.py [--seconds 600] [--every 2]

DQN and PPO side by side with engine local, small envs, checkpoints and evaluations on. Resident
memory and open descriptors of every process are sampled; the first third is left out, because
replay fills and caches warm up in it. Memory grows where its slope is over the bound and the median
of every quarter of the rest is above the one before: what is taken once and kept makes one step,
what leaks makes many. Descriptors grow where their minimum over the last quarter is above that of
the first: those of a checkpoint or a message come and go. Where something grows, or a process does
not live through it, the exit code is 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from measure import ROOT, save, table

MOST_MIB_PER_HOUR = 16.0
"""by which the resident memory of a process may grow, by a fit over the whole soak"""
START = 120.0
"""seconds in which a run must have started"""
SCALE = {"engine": "local", "actors": 2, "envs_per_actor": 8}
BESIDE = {"eval": {"every": 100, "episodes": 4}, "checkpoint": {"every": 200}}
CONFIGS: dict[str, dict[str, Any]] = {
    "ppo, CartPole": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo", "epochs": 2},
        "scale": {**SCALE, "rollout_length": 32},
        **BESIDE,
    },
    "dqn, CartPole": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn", "warmup": 1000, "capacity": 20_000, "new_steps": 16},
        "scale": {**SCALE, "rollout_length": 4},
        **BESIDE,
    },
}


@dataclass
class Sampled:
    """One process."""

    role: str
    pid: int
    at: list[float] = field(default_factory=list)
    """seconds since the soak began"""
    rss: list[int] = field(default_factory=list)
    """bytes"""
    descriptors: list[int] = field(default_factory=list)

    def sample(self, now: float) -> None:
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        except OSError:
            return
        self.at.append(now)
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(descriptors)

    def judged(self, begin: float, expected: int) -> dict[str, Any]:
        """What the samples after `begin` say; `expected` are those of a process that lived on."""
        keep = np.array(self.at) >= begin
        at, rss = np.array(self.at)[keep], np.array(self.rss)[keep] / 2**20
        descriptors = np.array(self.descriptors)[keep]
        about = {"role": self.role, "pid": self.pid, "samples": len(at)}
        if len(at) < max(8, expected - 2):
            return about | {"trouble": "it did not live through the soak"}
        slope, error = _slope(at, rss)
        quarters = [float(np.median(part)) for part in np.array_split(rss, 4)]
        fewest = [int(part.min()) for part in np.array_split(descriptors, 4)]
        trouble = ""
        if slope > MOST_MIB_PER_HOUR and all(np.diff(quarters) > 0):
            trouble = "memory grows"
        if fewest[-1] > fewest[0]:
            trouble = " and ".join(filter(None, [trouble, "descriptors grow"]))
        return about | {
            "rss_mib": quarters, "mib_per_hour": slope, "mib_per_hour_error": error,
            "descriptors": fewest, "trouble": trouble,
        }  # fmt: skip


def _slope(at: np.ndarray, rss: np.ndarray) -> tuple[float, float]:
    """MiB per hour by least squares, and its standard error were the samples independent."""
    hours = at / 3600
    around = hours - hours.mean()
    slope = float(around @ rss / (around @ around))
    rest = rss - rss.mean() - slope * around
    error = float(np.sqrt(rest @ rest / (len(at) - 2) / (around @ around)))
    return slope, error


class Soaked:
    """A run, and what is sampled of it."""

    def __init__(self, name: str, tree: dict[str, Any], place: Path, seconds: float) -> None:
        self.name = name
        self._folder = place / "runs" / "run"
        place.mkdir()
        (place / "config.toml").write_text(tomli_w.dumps({**tree, "stop": {"seconds": seconds}}))
        with (place / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tianji", "train", str(place / "config.toml"), "--plain",
                 "--json", "--runs", str(place / "runs"), "--name", "run"],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.processes: list[Sampled] = []

    def find(self) -> None:
        """Wait for its processes: the launcher, the one that hosts are forked from, the hosts."""
        table, end = self._folder / "hosts.json", time.monotonic() + START
        while not (table.exists() and (self._folder / "metrics.jsonl").exists()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.name} did not start; see {self._folder.parent}")
            time.sleep(0.1)
        hosts = json.loads(table.read_text())["hosts"]
        stat = Path(f"/proc/{hosts[0]['pid']}/stat").read_text()
        server = int(stat.rpartition(")")[2].split()[1])
        pids = [("launcher", self.process.pid), ("forkserver", server)]
        pids += [(host["role"], host["pid"]) for host in hosts]
        self.processes = [Sampled(role, pid) for role, pid in pids]

    def result(self) -> dict[str, Any]:
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            return {"code": None}
        result = json.loads((self._folder / "result.json").read_text())
        log = (self._folder / "log.txt").read_text()
        kept = {key: result.get(key) for key in ("status", "steps", "updates", "wall_s")}
        counts = {"checkpoints": log.count("checkpoint step_"), "evaluations": log.count("evalua")}
        return {"code": self.process.returncode, **kept, **counts}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its hosts end with it
            self.process.wait()


def soak(seconds: float, every: float, place: Path) -> list[dict[str, Any]]:
    runs: list[Soaked] = []
    try:
        runs += [
            Soaked(name, tree, place / str(i), seconds)
            for i, (name, tree) in enumerate(CONFIGS.items())
        ]
        for run in runs:
            run.find()
        begun, last, count = time.monotonic(), 0.0, 0
        # The end is left out: there they write a last checkpoint and go.
        while last < seconds - 5:
            time.sleep(every)
            last = time.monotonic() - begun
            if last >= seconds / 3:
                count += 1
            for run in runs:
                for process in run.processes:
                    process.sample(last)
        return [
            {
                "run": run.name,
                "processes": [p.judged(seconds / 3, count) for p in run.processes],
                "result": run.result(),
            }
            for run in runs
        ]
    finally:
        for run in runs:
            run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run, side by side")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        soaked = soak(arguments.seconds, arguments.every, Path(place))
    rows, troubles = [], []
    for run in soaked:
        result = run["result"]
        print(
            f"{run['run']}: {result.get('status')}, {result.get('updates') or 0:,} updates, "
            f"{result.get('steps') or 0:,} steps, {result.get('checkpoints')} checkpoints, "
            f"{result.get('evaluations')} evaluations"
        )
        if result["code"] != 0:
            troubles.append(f"{run['run']} ended with {result['code']}")
        for p in run["processes"]:
            if p["trouble"]:
                troubles.append(f"{run['run']}, {p['role']}: {p['trouble']}")
            if "rss_mib" in p:
                rows.append((
                    run["run"], p["role"], f"{p['rss_mib'][0]:.1f}", f"{p['rss_mib'][-1]:.1f}",
                    f"{p['mib_per_hour']:.1f} ± {2 * p['mib_per_hour_error']:.1f}",
                    f"{p['descriptors'][0]} {p['descriptors'][-1]}", p["trouble"],
                ))  # fmt: skip
    header = ("run", "process", "RSS MiB, first", "last", "MiB per hour", "descriptors", "")
    print(table(header, rows))
    bound = {"mib_per_hour": MOST_MIB_PER_HOUR, "descriptors": 0}
    about = {"seconds": arguments.seconds, "every": arguments.every, "bound": bound}
    print(save("soak", {**about, "runs": soaked, "troubles": troubles}))
    if troubles:
        sys.exit("\n".join(troubles))


if __name__ == "__main__":
    main()
