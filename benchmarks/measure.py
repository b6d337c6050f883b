"""What the benchmarks share: interleaved runs, medians with intervals, timed processes, results."""

import datetime
import json
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
T = TypeVar("T")


HERE = str(ROOT / "benchmarks")
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))}
"""for processes that import modules of this folder by env.imports"""
BARE = (
    "stop.return=1e9", "stop.steps=1_000_000_000", "checkpoint.seconds=inf",
    "checkpoint.store=never", "eval.every=0",
)  # fmt: skip
"""overrides of a run that ends by the clock and does nothing beside"""


def machine() -> dict[str, Any]:
    """The circumstances of a measurement: hardware, versions, date, commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "gymnasium", "numpy")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--verify", "--quiet", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
    }


def split_overrides() -> tuple[list[str], list[str]]:
    """The command line's own arguments, and what follows "--": overrides of configs."""
    own, more = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    return own, more


def interleaved(
    tasks: Mapping[str, Callable[[], T]], rounds: int, before: int = 0
) -> dict[str, list[T]]:
    """Run every task once per round; the order rotates, so no task always follows the same one. So
    many rounds were made before."""
    names = list(tasks)
    taken: dict[str, list[T]] = {name: [] for name in names}
    for at in range(rounds):
        shift = (before + at) % len(names)
        for name in names[shift:] + names[:shift]:
            taken[name].append(tasks[name]())
    return taken


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each task's samples; nan where there are none."""
    return {name: float(np.median(xs)) if len(xs) else float("nan") for name, xs in samples.items()}


def quartiles(xs: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile; nan where there are no samples."""
    if not len(xs):
        return float("nan"), float("nan")
    low, high = np.percentile(xs, [25, 75])
    return float(low), float(high)


def ratio_of_medians(
    a: Sequence[float], b: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """median(a) / median(b), and the ends of its 95 % percentile bootstrap interval.

    The two lists are resampled separately, as they may differ in length. Nan where either is empty.
    """
    if not len(a) or not len(b):
        return (float("nan"),) * 3
    rng = np.random.default_rng(seed)

    def resampled_medians(xs: Sequence[float]) -> np.ndarray:
        values = np.asarray(xs, dtype=float)
        return np.median(values[rng.integers(len(values), size=(resamples, len(values)))], axis=1)

    low, high = np.percentile(resampled_medians(a) / resampled_medians(b), [2.5, 97.5])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def run_process(
    argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 600.0
) -> tuple[str, dict[str, float]]:
    """Run a command at the repository's root; its stdout, and the seconds from spawn to exit.

    `env` is added to this process's own. `cpu_s` covers the child and every descendant that was
    waited for. A command that fails or runs past `timeout` raises RuntimeError with the end of its
    stderr.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        spawned = time.perf_counter()
        # A session of its own, so that a timeout ends the processes it started too.
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        ended = "failed"
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = f"ran past {timeout:g} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        total_s = time.perf_counter() - spawned
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if child.returncode:
        raise RuntimeError(
            f"{shlex.join(argv)} {ended} with status {child.returncode}; "
            f"its stderr ends:\n{stderr[-2000:] or '(nothing)'}"
        )
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return stdout, {"total_s": total_s, "cpu_s": cpu_s}


def run_json(
    argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 600.0
) -> dict[str, Any]:
    """Run a command; the JSON object of its last stdout line, with `total_s` and `cpu_s` added."""
    stdout, taken = run_process(argv, env, timeout)
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict):
        raise RuntimeError(
            f"{shlex.join(argv)} did not end its output with a JSON object; "
            f"its stdout ends:\n{stdout[-2000:] or '(nothing)'}"
        )
    return {**result, **taken}


def continued(path: Path) -> dict[str, Any]:
    """A result to add to: who measured it so far is among its `before`."""
    found: dict[str, Any] = json.loads(path.read_text())
    earlier = {"machine": found.pop("machine"), "command": found.pop("command")}
    return found | {"before": [*found.get("before", []), earlier]}


def save(name: str, payload: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json: the payload, the machine and the measuring command."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    whole = _nan_as_null({**payload, "machine": machine(), "command": command})
    text = json.dumps(whole, indent=2, allow_nan=False)
    # Written beside and renamed: an interrupted run leaves the older result whole.
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(path)
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text: the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def _nan_as_null(value: Any) -> Any:
    """JSON has no nan: a median of nothing is written as null."""
    if isinstance(value, Mapping):
        return {key: _nan_as_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_as_null(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(
                line.split(":", 1)[1].strip() for line in f if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
