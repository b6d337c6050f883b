"""A run: its folder, its loop, its checkpoints, its end."""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from tianji.actor import SIMULATE
from tianji.buffer import RECEIVE
from tianji.build import Built, build
from tianji.checkpoint import CheckpointNotSaved, Checkpoints
from tianji.config import IDENTITY, SECTIONS, Config, load_config
from tianji.driver import Serial
from tianji.errors import Refusal, nearest
from tianji.evaluator import EVALUATED
from tianji.learner import UPDATE, NonFinite
from tianji.machine import manifest
from tianji.record import WINDOW, Recorder
from tianji.role import State
from tianji.trigger import Every, Reached
from tianji.types import Leaves, Report, Rollout, sha256
from tianji.view.terminal import SilentView, View

STORE_AUTO = 256 * 2**20
"""bytes up to which checkpoint.store = "auto" saves what the buffer holds"""

EXIT = {"done": 0, "interrupted": 130, "stopped": 75}


@dataclass(frozen=True)
class Result:
    """How a run ended; `tianji train --json` prints it."""

    status: str
    """"done": a stop condition holds; "interrupted": Ctrl-C; "stopped": SIGTERM or SIGUSR1"""
    run_dir: str
    wall_s: float
    """from launch to end"""
    start_s: float
    """from launch to the first env step"""
    steps: int
    updates: int
    episodes: int
    return_mean: float | None
    """of the last 100 training episodes"""
    steps_per_s: Mapping[str, float]
    staleness: Mapping[str, float] | None
    params_sha256: str
    stop_reason: str
    resumed: str | None = None
    """"exact", or "inexact: " and why; None where the run was not resumed"""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """what went wrong without ending the run"""

    @property
    def exit_code(self) -> int:
        return EXIT[self.status]

    def tree(self) -> dict[str, Any]:
        return asdict(self)


def train(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    runs: str | Path = "runs",
    view: View | None = None,
    age: Callable[[], float] | None = None,
) -> Result:
    """Train from a config: a file, the name of a shipped one, a mapping, or a loaded `Config`.

    `overrides` are "key=value" as on the command line; `age` gives the seconds since launch.
    """
    age = age or _since_now()
    resolved = config if isinstance(config, Config) else load_config(config, overrides)
    folder = _folder(Path(runs), name, resolved)
    prepare_torch(resolved)
    built = build(resolved)
    folder = _make(folder, name is not None, resolved)
    return _Run(resolved, folder, built, view or SilentView(), age).go()


def resume(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str = "latest",
    view: View | None = None,
    age: Callable[[], float] | None = None,
) -> Result:
    """Go on with a run from its checkpoint; overrides may change when it ends and what it keeps."""
    age = age or _since_now()
    folder = find_run(run)
    for override in overrides:
        section = override.partition("=")[0].split(".")[0]
        if section in IDENTITY or section == "seed":
            raise Refusal(
                f"{override} would make it another run: its checkpoints were learnt with the old "
                f"value. Start a new one with `tianji train`; only "
                f"{', '.join(s for s in SECTIONS if s not in IDENTITY)} can be changed here."
            )
    config = load_config(folder / "config.toml", overrides, name=folder.name)
    prepare_torch(config)
    loaded = Checkpoints(folder / "checkpoints", config.checkpoint.keep, config.identity()).load(
        checkpoint
    )
    built = build(config)
    going_on = _Run(config, folder, built, view or SilentView(), age)
    going_on.restore(loaded.parts)
    return going_on.go()


def find_run(run: str | Path) -> Path:
    folder = Path(run)
    if (folder / "config.toml").is_file():
        return folder
    parent = folder.parent
    others = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    raise Refusal(
        f"{folder} is no run folder (it has no config.toml), so there is nothing to load."
        f"{nearest(folder.name, others)}"
    )


def prepare_torch(config: Config) -> None:
    """Threads from the config, not from the machine: so that results repeat, and nothing spins."""
    import torch

    if config.scale.device == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            'scale.device = "cuda", but torch sees no GPU here, so the learner cannot start. Set '
            'scale.device = "cpu", or run `tianji doctor`.'
        )
    torch.set_num_threads(config.scale.cores)


class _Run:
    """One process's part of a run."""

    def __init__(
        self, config: Config, folder: Path, built: Built, view: View, age: Callable[[], float]
    ) -> None:
        self._config = config
        self._folder = folder
        self._built = built
        self._view = view
        self._age = age
        self._limits = {
            name: limit
            for name, limit in (
                ("return", config.stop.return_),
                ("steps", config.stop.steps),
                ("updates", config.stop.updates),
                ("seconds", config.stop.seconds),
            )
            if limit is not None
        }
        self._stop = Reached(self._limits)
        self._save_every = Every(config.checkpoint.every)
        self._driver = Serial(built.roles)
        self._recorder = Recorder(folder, view, self._limits)
        self._checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint.keep, config.identity()
        )
        self._signal: int | None = None
        self._resumed: str | None = None
        self._evaluated: float | None = None
        """mean return of the last evaluation"""
        self._start_s = 0.0
        self._unsaved = 0
        self._util_before: dict[str, float] = {}

    def restore(self, parts: Mapping[str, State]) -> None:
        """Go on from a checkpoint's parts."""
        built, run = self._built, parts["run"]
        reset = [a.name for a, s in zip(built.actors, run["actors"], strict=True) if not a.exact(s)]
        if "store" in parts:
            built.transport.load_state(parts["store"])
        built.learner.load_state(parts["trainer"])
        if "store" not in parts:
            built.learner.begin()
        built.buffer.load_state(run["buffer"])
        for actor, state in zip(built.actors, run["actors"], strict=True):
            actor.load_state(state)
        if built.evaluator and run["evaluator"] is not None:
            built.evaluator.load_state(run["evaluator"])
        self._recorder.load_state(run["recorder"])
        self._driver.at = run["at"]
        self._evaluated = run["evaluated"]
        why = ["store not saved"] if "store" not in parts else []
        why += ["envs reset"] if reset else []
        self._resumed = f"inexact: {', '.join(why)}" if why else "exact"
        if reason := self._stop.due(self._counts()):
            later = f"stop.steps={self._built_steps() * 2}"
            if reason.startswith("return"):
                later = f"stop.return=inf {later}"
            raise Refusal(
                f"{self._folder} has already ended: {reason}. Give it a later end, such as "
                f"`tianji resume {self._folder} {later}`."
            )

    def go(self) -> Result:
        """Train until something ends it. Whatever that is, the folder says how it ended."""
        if self._resumed is None:
            self._built.learner.begin()
        self._recorder.begin()
        title = f"{self._config.algorithm.name} · {self._config.env.id}"
        self._view.begin(title, {"run": str(self._folder), "seed": self._config.seed})
        if self._resumed:
            self._recorder.event(
                f"resumed at update {self._built.learner.version}: {self._resumed}"
            )
        try:
            with _signals(self._caught):
                status, reason = self._loop()
                self._save()
            result = self._result(status, reason)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._recorder.close()
            self._view.end()
            self._built.close()
        _write_json(self._folder / "result.json", result.tree())
        return result

    def _loop(self) -> tuple[str, str]:
        driver, learner, tick, util = (
            self._driver,
            self._built.learner,
            self._recorder.tick,
            self._util,
        )
        while True:
            did = driver.step()
            if did is UPDATE:
                assert learner.report is not None
                if reason := self._after_update(learner.report):
                    return "done", reason
            elif did is SIMULATE and self._start_s == 0.0:
                self._start_s = self._age()
            elif did is RECEIVE and learner.version == 0:
                self._recorder.update(self._built.buffer.warming())
            elif did is EVALUATED:
                self._after_evaluation()
            tick(util)
            if self._signal is not None and learner.between_batches:
                name = signal.Signals(self._signal).name
                return ("interrupted" if self._signal == signal.SIGINT else "stopped"), name

    def _after_update(self, report: Report) -> str | None:
        """Record it; the reason to stop, if there is one now."""
        self._recorder.update(report)
        if reason := self._stop.due(self._counts()):
            return reason
        if self._save_every.due(report.version - 1, report.version):
            self._save()
        return None

    def _after_evaluation(self) -> None:
        evaluator = self._built.evaluator
        assert evaluator is not None
        episodes = evaluator.result
        self._recorder.evaluation(
            self._built_steps(), evaluator.version, episodes["return"].tolist(),
            episodes["length"].tolist(),
        )  # fmt: skip
        self._evaluated = float(episodes["return"].mean())

    def _counts(self) -> dict[str, float]:
        recorder, mean = self._recorder, self._recorder.return_mean
        enough = recorder.episodes >= WINDOW and mean is not None
        return {
            "return": mean if enough and mean is not None else -float("inf"),
            "steps": self._built_steps(),
            "updates": self._built.learner.version,
            "seconds": recorder.elapsed,
        }

    def _built_steps(self) -> int:
        return self._built.buffer.received

    def _save(self) -> None:
        """Write a checkpoint; a full disk is said and does not stop the run."""
        built = self._built
        policy = built.learner.policy_state()
        buffer, actors = built.buffer.state(), [actor.state() for actor in built.actors]
        parts: dict[str, State] = {"policy": policy, "trainer": built.learner.state()}
        store = self._config.checkpoint.store
        if store == "always" or (store == "auto" and built.transport.nbytes <= STORE_AUTO):
            parts["store"] = built.transport.state()
        else:
            buffer["store"] = None
            for state in actors:
                state.pop("env", None)
        parts["run"] = {
            "buffer": buffer,
            "actors": actors,
            "evaluator": built.evaluator.state() if built.evaluator else None,
            "recorder": self._recorder.state(),
            "at": self._driver.at,
            "evaluated": self._evaluated,
        }
        score = self._evaluated if built.evaluator else self._recorder.return_mean
        meta = {"updates": built.learner.version, "seed": self._config.seed}
        try:
            path = self._checkpoints.save(self._built_steps(), parts, meta, score)
            self._recorder.event(f"checkpoint {path.name}")
        except CheckpointNotSaved as error:
            self._unsaved += 1
            self._recorder.event(str(error))
        self._driver.skip()

    def _result(self, status: str, reason: str) -> Result:
        summary = self._recorder.summary()
        notes = {"rows_lost": summary["rows_lost"]} if "rows_lost" in summary else {}
        if self._unsaved:
            notes["checkpoints_not_saved"] = self._unsaved
        return Result(
            status=status,
            run_dir=str(self._folder),
            wall_s=round(self._age(), 3),
            start_s=round(self._start_s, 3),
            steps=self._built_steps(),
            updates=self._built.learner.version,
            episodes=summary["episodes"],
            return_mean=summary["return_mean"],
            steps_per_s={k: round(v, 1) for k, v in summary["steps_per_s"].items()},
            staleness=summary["staleness"],
            params_sha256=sha256(self._built.learner.networks()),
            stop_reason=reason,
            resumed=self._resumed,
            notes=notes,
        )

    def _fail(self, error: BaseException) -> None:
        """Leave behind what is needed to understand a failure."""
        if isinstance(error, NonFinite):
            path = self._folder / "nonfinite_batch.safetensors"
            _save_batch(path, error.batch)
            self._recorder.event(f"the batch is saved in {path}")
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        failure = {"status": status, "error": type(error).__name__, "message": str(error)}
        _write_json(self._folder / "result.json", failure | {"run_dir": str(self._folder)})
        self._recorder.log("failed:\n" + "".join(traceback.format_exception(error)).rstrip())

    def _util(self) -> dict[str, float]:
        """Shares of the time since the last call, by role and kind of work; they add up to 1."""
        seconds, before = dict(self._driver.seconds), self._util_before
        spent = {k: v - before.get(k, 0.0) for k, v in seconds.items()}
        self._util_before = seconds
        total = sum(spent.values())
        return {k: v / total for k, v in spent.items()} if total > 0 else {}

    def _caught(self, number: int) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number


class _signals:  # noqa: N801  used as a `with` statement's word
    """Ctrl-C, SIGTERM and SIGUSR1 call `caught` instead of killing, where handlers can be set."""

    def __init__(self, caught: Callable[[int], None]) -> None:
        self._caught = caught
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        import threading

        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught(number)


def _since_now() -> Callable[[], float]:
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin


def _folder(runs: Path, name: str | None, config: Config) -> Path:
    """Where the run will live; refused where it would write into another's folder."""
    if name is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return runs / f"{config.name}-{now}-s{config.seed}"
    folder = runs / name
    if folder.exists():
        raise Refusal(
            f"{folder} exists already, and a run never writes into another's folder. Choose "
            f"another --name, or go on with it: `tianji resume {folder}`."
        )
    return folder


def _make(folder: Path, named: bool, config: Config) -> Path:
    """Make the run folder; one whose name was not asked for gets a number where it is taken."""
    resolved = "# The resolved config of this run: every key with its value.\n"
    resolved += tomli_w.dumps(config.tree())
    about = json.dumps(manifest(config.seed, config.identity()), indent=2) + "\n"
    made, base, n = False, folder, 1
    try:
        while not made:
            try:
                folder.mkdir(parents=True)
                made = True
            except FileExistsError:
                if named:
                    raise
                n += 1
                folder = base.with_name(f"{base.name}-{n}")
        (folder / "config.toml").write_text(resolved)
        (folder / "manifest.json").write_text(about)
    except OSError as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise Refusal(
            f"the run folder {folder} cannot be made ({error.strerror}), so nothing could be kept. "
            f"Choose another place with --runs."
        ) from error
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        print(f"{path} could not be written: {error.strerror}", file=sys.stderr)


def _save_batch(path: Path, batch: Iterable[Rollout]) -> None:
    import safetensors.numpy

    arrays: Leaves = {}
    for i, part in enumerate(batch):
        leaves = {f"observation.{k}": v for k, v in part.observation.items()}
        leaves |= {f"extras.{k}": v for k, v in part.extras.items()}
        for name in ("action", "reward", "terminated", "valid", "versions"):
            leaves[name] = getattr(part, name)
        arrays |= {f"part-{i}.{name}": array.copy() for name, array in leaves.items()}
    safetensors.numpy.save_file(arrays, path)
