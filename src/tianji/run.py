"""A run: its folder, its loop, its checkpoints, its end."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tianji.actor import SIMULATE
from tianji.buffer import RECEIVE
from tianji.build import Built, build
from tianji.checkpoint import CheckpointNotSaved, Checkpoints
from tianji.config import IDENTITY, SECTIONS, Config, load_config
from tianji.driver import Serial
from tianji.errors import Failure, Refusal
from tianji.evaluator import EVALUATED
from tianji.folder import (
    find_run,
    locked,
    make_folder,
    rewrite_config,
    run_folder,
    save_batch,
    write_json,
)
from tianji.learner import UPDATE, NonFinite
from tianji.record import WINDOW, Recorder
from tianji.result import Result
from tianji.role import State
from tianji.signals import Signals
from tianji.trigger import Every, Reached
from tianji.types import Report, sha256
from tianji.view.status import SilentView, View

STORE_AUTO = 256 * 2**20
"""bytes up to which checkpoint.store = "auto" saves what the buffer holds"""


def train(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: str | Sequence[str] = (),
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
    folder = run_folder(Path(runs), name, resolved)
    prepare_torch(resolved)
    with contextlib.closing(_build(resolved)) as built:
        folder = make_folder(folder, name is not None, resolved)
        with locked(folder):
            return _Run(resolved, folder, built, view or SilentView(), age).go()


def resume(
    run: str | Path,
    overrides: str | Sequence[str] = (),
    *,
    checkpoint: str = "latest",
    view: View | None = None,
    age: Callable[[], float] | None = None,
) -> Result:
    """Go on with a run from its checkpoint; overrides may change when it ends and what it keeps."""
    age = age or _since_now()
    folder = find_run(run)
    overrides = [overrides] if isinstance(overrides, str) else overrides
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
    with locked(folder), contextlib.closing(_build(config)) as built:
        going_on = _Run(config, folder, built, view or SilentView(), age)
        going_on.restore(checkpoint)
        rewrite_config(folder, config)
        return going_on.go()


def _build(config: Config) -> Built:
    try:
        return build(config)
    except MemoryError as error:
        raise Refusal(
            f"the run does not fit in memory: {error}. Lower scale.envs_per_actor, "
            f"scale.rollout_length, algorithm.capacity or network.hidden."
        ) from error


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
        self._evaluate_every = Every(config.eval.every)
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

    def restore(self, checkpoint: str) -> None:
        """Go on from a checkpoint."""
        parts = self._checkpoints.load(checkpoint).parts
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
        self._recorder.load_state(run["recorder"])
        self._driver.at = run["at"]
        self._evaluated = run["evaluated"]
        why = ["store not saved"] if "store" not in parts else []
        why += ["envs reset"] if reset else []
        end = [built.spec.updates, built.spec.steps]
        if run["end"] != end and getattr(self._config.algorithm, "uses_end", False):
            why.append("the schedule's end was moved")
        self._resumed = f"inexact: {', '.join(why)}" if why else "exact"
        self._refuse_ended()

    def go(self) -> Result:
        """Train until something ends it. Whatever that is, the folder says how it ended."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._view.end)
            ending.callback(self._recorder.close)
            try:
                self._begin()
                with Signals(self._caught):
                    status, reason = self._loop()
                    self._save()
                result = self._result(status, reason)
            except BaseException as error:
                self._fail(error)
                raise
            write_json(self._folder / "result.json", result.tree())
        return result

    def _begin(self) -> None:
        if self._resumed is None:
            self._built.learner.begin()
        self._recorder.begin()
        title = f"{self._config.algorithm.name} · {self._config.env.id}"
        self._view.begin(title, {"run": str(self._folder), "seed": self._config.seed})
        if self._resumed:
            version = self._built.learner.version
            self._recorder.event(f"resumed at update {version}: {self._resumed}")

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
            elif did is RECEIVE and self._built.buffer.filling:
                # No update is near that would report or judge: show what arrives, end if told to.
                self._recorder.update(self._built.buffer.report(learner.version, learner.consumed))
                if reason := self._stop.due(self._counts()):
                    return "done", reason
            tick(util)
            if self._signal is not None and learner.between_batches:
                name = signal.Signals(self._signal).name
                return ("interrupted" if self._signal == signal.SIGINT else "stopped"), name

    def _after_update(self, report: Report) -> str | None:
        """Record it; the reason to stop, if there is one now."""
        self._recorder.update(report)
        if self._evaluate_every.due(report.version - 1, report.version):
            self._evaluate()
        if reason := self._stop.due(self._counts()):
            return reason
        if self._save_every.due(report.version - 1, report.version):
            self._save()
        return None

    def _evaluate(self) -> None:
        """Let the evaluator play with this very version; a signal ends it early, unrecorded."""
        evaluator = self._built.evaluator
        assert evaluator is not None
        while self._signal is None:
            if self._driver.step_other(evaluator) is EVALUATED:
                returns, lengths = (evaluator.result[k].tolist() for k in ("return", "length"))
                self._recorder.evaluation(self._steps, evaluator.version, returns, lengths)
                self._evaluated = sum(returns) / len(returns)
                return
            self._recorder.tick(self._util)

    def _counts(self) -> dict[str, float]:
        recorder, mean = self._recorder, self._recorder.return_mean
        enough = recorder.episodes >= WINDOW and mean is not None
        return {
            "return": mean if enough and mean is not None else -float("inf"),
            "steps": self._steps,
            "updates": self._built.learner.version,
            "seconds": recorder.elapsed,
        }

    @property
    def _steps(self) -> int:
        return self._built.buffer.received

    def _save(self, store: bool = True) -> None:
        """Write a checkpoint; a full disk is said and does not stop the run. Without `store`, only
        what was learnt: envs and the buffer begin anew when it is resumed."""
        built = self._built
        policy = built.learner.policy_state()
        buffer, actors = built.buffer.state(), [actor.state() for actor in built.actors]
        parts: dict[str, State] = {"policy": policy, "trainer": built.learner.state()}
        wanted = self._config.checkpoint.store
        fits = wanted == "auto" and built.transport.nbytes <= STORE_AUTO
        if store and (wanted == "always" or fits):
            parts["store"] = built.transport.state()
        else:
            buffer["store"] = None
            for state in actors:
                state.pop("env", None)
        parts["run"] = {
            "buffer": buffer,
            "actors": actors,
            "recorder": self._recorder.state(),
            "at": self._driver.at,
            "end": [built.spec.updates, built.spec.steps],
            "evaluated": self._evaluated,
        }
        score = self._evaluated if built.evaluator else self._recorder.return_mean
        meta = {"updates": built.learner.version, "seed": self._config.seed}
        try:
            path = self._checkpoints.save(self._steps, parts, meta, score)
            self._recorder.event(f"checkpoint {path.name}")
        except CheckpointNotSaved as error:
            self._unsaved += 1
            self._recorder.event(str(error))
        self._driver.outside()

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
            steps=self._steps,
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

    def _refuse_ended(self) -> None:
        """A run that is to go on needs an end that is not behind it."""
        counts = self._counts()
        reason = self._stop.due(counts)
        if reason is None:
            return
        reached = [name for name, limit in self._limits.items() if counts[name] >= limit]
        later = [
            "stop.return=inf" if name == "return" else f"stop.{name}={math.ceil(2 * counts[name])}"
            for name in reached
        ]
        if reached == list(self._limits) == ["return"]:
            later.append(f"stop.steps={2 * self._steps}")
        words = shlex.join(["tianji", "resume", str(self._folder), *later])
        raise Refusal(
            f"{self._folder} has already ended: {reason}. Give it a later end, such as `{words}`."
        )

    def _fail(self, error: BaseException) -> None:
        """Leave behind what is needed to understand a failure, and what was learnt before it."""
        self._recorder.log("failed:\n" + "".join(traceback.format_exception(error)).rstrip())
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        failure = {"status": status, "error": type(error).__name__, "message": str(error)}
        write_json(self._folder / "result.json", failure | {"run_dir": str(self._folder)})
        if isinstance(error, NonFinite):
            path = self._folder / "nonfinite_batch.safetensors"
            if save_batch(path, error.batch):
                self._recorder.event(f"the batch is saved in {path}")
        elif isinstance(error, Failure) and self._built.learner.between_batches:
            self._save(store=False)
        self._recorder.event(f"failed; the log is {self._folder / 'log.txt'}")

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


def _since_now() -> Callable[[], float]:
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin
