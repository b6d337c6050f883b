"""A run: its folder, its loop, its checkpoints, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tianji import explain, trace
from tianji.checkpoint import CheckpointNotSaved, Checkpoints
from tianji.config import IDENTITY, SECTIONS, WHERE, Config, engine_of, load_config
from tianji.engines.engine import (
    Engine,
    Evaluated,
    Event,
    Faulted,
    HostFailed,
    NoAnswer,
    Rebalanced,
    Started,
    Usage,
)
from tianji.engines.parts import advance, has_store, of_group, part_name, updates_of
from tianji.engines.server import ForkServer
from tianji.engines.spent import WINDOW
from tianji.errors import Failure, Refusal
from tianji.fault import Budget, Fault
from tianji.folder import (
    NONFINITE,
    PLAN,
    batch_arrays,
    find_run,
    left_out,
    locked,
    make_folder,
    read_json,
    read_plan,
    rewrite_config,
    run_folder,
    save_batch,
    write_json,
)
from tianji.graph import evaluates
from tianji.learner import NonFinite
from tianji.machine import cores, keep_memory, set_threads
from tianji.placement import wanted
from tianji.plan import SLACK
from tianji.record import Recorder
from tianji.result import Result
from tianji.role import State
from tianji.signals import Signals
from tianji.tally import Tally
from tianji.trigger import Counts
from tianji.verdict import Setting, Verdict, judge, scaling_of
from tianji.view.status import SilentView, View
from tianji.watch import Watch, limits

STORE_AUTO = 256 * 2**20
"""bytes up to which checkpoint.store = "auto" saves what the buffer holds"""
SCORES = {"return", "win_rate"}
"""stop conditions that are no counts: doubling them would not put the end off"""
RESCUE = 3.0
"""seconds in which a learner must come to rest after another role's failure, to be saved"""
_spare: list[ForkServer] | None = None
"""what hosts were forked from and others may be; None: it ends with each run"""


def train(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: str | Sequence[str] = (),
    *,
    name: str | None = None,
    runs: str | Path = "runs",
    plan: str | Path | None = None,
    view: View | None = None,
    age: Callable[[], float] | None = None,
) -> Result:
    """Train from a config: a file, the name of a shipped one, a mapping, or a loaded `Config`.

    `overrides` are "key=value" as on the command line; `plan` is a file whose plan is followed;
    `age` gives the seconds since launch.
    """
    age = age or _since_now()
    planned = None
    if plan is not None or _is_auto(config, overrides):
        from tianji import planner  # and what measures: most runs need neither

        config = config if isinstance(config, Config) else load_config(config, overrides)
        asked = config
        config, planned = planner.follow(config, None if plan is None else Path(plan))
        planner.check_asked(asked, config, [overrides] if isinstance(overrides, str) else overrides)
    with _server(config, overrides) as server:
        resolved = config if isinstance(config, Config) else load_config(config, overrides)
        folder = run_folder(Path(runs), name, resolved)
        view = view or SilentView()
        return _train(resolved, folder, name is not None, view, age, server, planned)


def _is_auto(
    config: str | Path | Mapping[str, Any] | Config, overrides: str | Sequence[str]
) -> bool:
    if isinstance(config, Config):
        return config.auto
    return engine_of(config, overrides) == "auto"


def _train(
    resolved: Config,
    folder: Path,
    named: bool,
    view: View,
    age: Callable[[], float],
    server: ForkServer | None,
    planned: State | None = None,
) -> Result:
    with Signals() as signals, contextlib.closing(_Engines(resolved, server)) as engines:
        engines.make()
        folder = make_folder(folder, named, resolved)
        with locked(folder):
            if planned is not None:
                write_json(folder / PLAN, planned)
            running = _Run(resolved, folder, engines, view, age, planned)
            try:
                return running.go(signals)
            except Refusal:
                if running.refused:
                    shutil.rmtree(folder)
                raise


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
    free = [f"scale.{key}" for key in WHERE]
    for override in overrides:
        key = override.partition("=")[0].strip()
        section = key.split(".")[0]
        if (section in IDENTITY and key not in free) or section == "seed":
            can = [*(s for s in SECTIONS if s not in IDENTITY), *free]
            raise Refusal(
                f"{override} would make it another run: its checkpoints were learnt with the old "
                f"value. Start a new one with `tianji train`; only {', '.join(can)} can be "
                f"changed here."
            )
    with locked(folder), _server(folder, overrides) as server:
        config = load_config(folder / "config.toml", overrides, name=folder.name)
        return _go_on(config, folder, checkpoint, view or SilentView(), age, server)


def _go_on(
    config: Config,
    folder: Path,
    checkpoint: str,
    view: View,
    age: Callable[[], float],
    server: ForkServer | None,
) -> Result:
    with Signals() as signals, contextlib.closing(_Engines(config, server)) as engines:
        engines.make()
        going_on = _Run(config, folder, engines, view, age, read_json(folder / PLAN))
        going_on.restore(checkpoint)
        return going_on.go(signals)


@contextlib.contextmanager
def _server(
    config: str | Path | Mapping[str, Any] | Config, overrides: str | Sequence[str]
) -> Iterator[ForkServer | None]:
    """The process that hosts are forked from, where there will be some. It is started before the
    config is understood, which takes imports of its own."""
    engine = config.scale.engine if isinstance(config, Config) else engine_of(config, overrides)
    if engine != "local":
        yield None
        return
    if not hasattr(os, "memfd_create"):
        raise Refusal(
            'scale.engine = "local" needs Linux: its processes share anonymous memory, which this '
            'system does not have. Set scale.engine = "serial".'
        )
    try:
        server = (_spare or []).pop()
    except IndexError:  # asked beforehand, another thread could take it in between
        server = ForkServer()
    whole = False
    try:
        if not server.fits():
            server.close()
            server = ForkServer()
        yield server
        whole = True
    except Exception:
        whole = True
        raise
    finally:
        if _spare is None or not whole:  # cut off, it may have something to say to this run still
            server.close()
        else:
            _spare.append(server)
            server.keep()


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Meanwhile every run of this process but the first begins sooner: the process that hosts are
    forked from, whose imports take a second or more, is kept from one to the next."""
    global _spare
    if _spare is not None:
        yield
        return
    kept: list[ForkServer] = []
    _spare = kept
    try:
        yield
    finally:
        _spare = None
        for server in kept:
            server.close()


class _Engines:
    """The engine that the config names, and another one in its place where it can go no further."""

    def __init__(self, config: Config, server: ForkServer | None) -> None:
        self._config = config
        self._server = server
        self._engine: Engine | None = None
        self._closing = contextlib.ExitStack()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def make(self) -> Engine:
        if self._engine is not None:
            self._engine.kill()
            self._engine.close()
            self._engine = None
        if self._server is not None and self._server.process.poll() is not None:
            self._server = self._closing.enter_context(contextlib.closing(ForkServer()))
        prepare_torch(self._config)
        try:
            self._engine = self._new()
        except MemoryError as error:
            raise Refusal(
                f"the run does not fit in memory: {error}. Lower scale.envs_per_actor, "
                f"scale.rollout_length, algorithm.capacity or network.hidden."
            ) from error
        return self._engine

    def _new(self) -> Engine:
        if self._server is not None:
            from tianji.engines.local import LocalEngine

            return LocalEngine(self._config, self._server)
        from tianji.engines.serial import SerialEngine

        return SerialEngine(self._config)

    def close(self) -> None:
        with self._closing:
            if self._engine is not None:
                self._engine.close()


def prepare_torch(config: Config) -> None:
    """Threads from the config, not from the machine: so that results repeat, and nothing spins."""
    import torch

    if config.scale.device == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            'scale.device = "cuda", but torch sees no GPU here, so the learner cannot start. Set '
            'scale.device = "cpu", or run `tianji doctor`.'
        )
    set_threads(config.scale.cores)
    keep_memory()


class EnvFailed(Failure):
    """Envs raised too often."""

    def __init__(self, fault: Fault, budget: Budget) -> None:
        super().__init__(
            f"{fault.role} failed: {fault.cause}. Envs may be built anew {budget} "
            f"(faults.env_restarts), and that was spent. What was learnt so far is saved; the "
            f"traceback is in the run's log."
        )
        self.fault = fault


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        engines: _Engines,
        view: View,
        age: Callable[[], float],
        planned: State | None = None,
    ) -> None:
        """`planned`: the plan that it follows, if it follows one."""
        self._config = config
        self._folder = folder
        self._engines = engines
        self._engine = engines.engine
        self._view = view
        self._age = age
        self._limits = limits(config)
        self._recorder = Recorder(folder, view, self._limits)
        self._checkpoints = Checkpoints(
            folder / "checkpoints", config.checkpoint.keep, config.identity()
        )
        faults = config.faults
        self._recoveries = Budget(faults.recoveries, faults.window)
        self._env_restarts = Budget(faults.env_restarts, faults.window)
        self._restored: dict[str, State] | None = None
        self._signal: int | None = None
        self._stop: str | None = None
        """why the run ends, once it does"""
        self._stop_s: float | None = None
        """seconds until then"""
        self._save_due = False
        self._resumed: str | None = None
        self._evaluated: float | None = None
        """mean return of the last evaluation"""
        self._plan = read_plan(folder)
        self._start_s = 0.0
        self._unsaved = self._lost = 0
        self._planned = planned
        if planned is not None:
            self._recorder.predicted = planned.get("predicted", {}).get("new")
        self.refused = False
        """did it end before anything was done that is worth keeping?"""

    def restore(self, checkpoint: str) -> None:
        """Go on from a checkpoint."""
        parts = self._checkpoints.load(checkpoint).parts
        self._restored, run = parts, parts["run"]
        self._recorder.load_state(run["recorder"])
        self._evaluated = run["evaluated"]
        graph, spec = self._engine.graph, self._engine.setup.spec
        groups = [of_group(parts, group) for group in range(spec.groups)]
        actors = [state for each in groups for state in each["run"]["actors"]]
        why = []
        if any("store" not in each for each in groups):
            why.append("store not saved")
        elif not all(has_store(each, graph, group) for group, each in enumerate(groups)):
            why.append("store of another size")
        if why or any("env" not in state for state in actors):
            why.append("envs reset")
        end = [spec.updates, spec.steps]
        if run["end"] != end and self._engine.setup.description.uses_end:
            why.append("the schedule's end was moved")
        self._resumed = f"inexact: {', '.join(why)}" if why else "exact"
        self._refuse_ended()

    def go(self, signals: Signals) -> Result:
        """Train until something ends it. Whatever that is, the folder says how it ended."""
        self._signal, signals.answer = signals.heard, self._caught
        with contextlib.ExitStack() as ending:
            ending.callback(self._view.end)
            ending.callback(self._explain)
            ending.callback(self._recorder.close)
            try:
                self._start()
                self._begin()
                status, reason = self._until_end()
                result = self._result(status, reason)
            except BaseException as error:
                if not self.refused:
                    self.fail(error)
                raise
            write_json(self._folder / "result.json", result.tree())
        return result

    def _explain(self) -> None:
        """Write the report. What goes wrong with it is said, and changes nothing of how the run
        ended."""
        if self.refused:
            return
        try:
            explain.write(self._folder, running=False)
        except Exception as error:
            self._recorder.event(f"the report was not written: {type(error).__name__}: {error}")
            self._recorder.log(traceback.format_exc().rstrip())

    def _start(self) -> None:
        try:
            self._start_roles()
        except Refusal:
            self.refused = self._resumed is None
            raise
        if self._resumed is not None:
            rewrite_config(self._folder, self._config)
            trace.clear(self._folder)

    def _start_roles(self) -> None:
        """One that dies meanwhile is a reason to try again."""
        while True:
            try:
                self._engine.start(self._folder)
                return
            except HostFailed as error:
                self._spend_recovery(error)
                self._recorder.fault(error.fault.then("started anew"))
                self._engine = self._engines.make()

    def _begin(self) -> None:
        self._engine.begin(self._restored)
        self._recorder.active = self._engine.active
        self._recorder.begin()
        title = f"{self._config.algorithm.name} · {self._config.env.id}"
        self._view.begin(title, {"run": str(self._folder), "seed": self._config.seed})
        if self._planned is not None and self._resumed is None:
            from tianji import planner

            self._recorder.event(planner.said(self._planned))
        self._say_if_crowded()
        if self._resumed:
            assert self._restored is not None
            updates = updates_of(self._restored)
            self._recorder.event(f"resumed at update {updates}: {self._resumed}")

    def _say_if_crowded(self) -> None:
        scale, here = self._config.scale, cores()
        want = wanted(self._engine.graph.hosts, scale.cores, scale.env_threads)
        choice = (self._planned or {}).get("choice", {})
        if (shared := choice.get("actor_cores")) is not None:  # a plan knows that their envs wait
            want -= scale.groups * (scale.actors - shared)
        if scale.engine == "local" and want > here:
            self._recorder.event(
                f"actors and learners have {want} threads and {here} cores, so that they slow each "
                f"other, unless their envs wait; `tianji plan` tells what is best here"
            )

    def _until_end(self) -> tuple[str, str]:
        """How it ended, and why, once that is saved. What the roles cannot go on without is begun
        anew from what was learnt."""
        while True:
            try:
                ended = self._loop()
                self._save()
                return ended
            except (HostFailed, NonFinite) as error:
                self._recover(error)

    def _recover(self, error: HostFailed | NonFinite) -> None:
        """Go on from what the learner knows, where it is alive, else from the last checkpoint."""
        self._spend_recovery(error)
        fault = _fault_of(error)
        parts, source = None, "where the learner was"
        if fault.role != "learner":
            parts = self._engine.rescue(RESCUE)
        for event in self._engine.heard():
            self._note(event)
        self._keep_batch(error)
        if parts is None:
            parts, source = self._newest_checkpoint()
        counts = self._engine.counts()
        self._engine = self._engines.make()
        self._start_roles()
        if parts is None:
            parts = self._engine.parts(-1)
        on_policy, lost = self._config.algorithm.traits.on_policy, 0
        for group, counted in enumerate(counts):
            theirs = of_group(parts, group)
            lost += advance(theirs, counted, on_policy)
            if "store" not in theirs:
                parts.pop(part_name("store", group), None)
        self._lost += lost
        parts["run"]["recorder"] = self._recorder.state()
        self._engine.begin(parts)
        self._recorder.active = self._engine.active
        self._save_due = False
        self._recorder.fault(
            dataclasses.replace(
                fault, kind="run", action=f"went on from {source}, {lost} updates were lost"
            )
        )

    def _spend_recovery(self, error: HostFailed | NonFinite) -> None:
        """Is it worth while to go on after this? Else it is raised."""
        rollback = _nonfinite(error) and self._config.faults.nonfinite == "rollback"
        if not rollback and (isinstance(error, NonFinite) or error.final):
            raise error
        if not self._recoveries.spend():
            error.args = (f"{error} (it was restarted {self._recoveries}: faults.recoveries)",)
            raise error

    def _newest_checkpoint(self) -> tuple[dict[str, State] | None, str]:
        """The parts of the newest checkpoint that is intact, and its name."""
        for path in reversed(self._checkpoints.list()):
            try:
                return dict(self._checkpoints.load(path.name).parts), f"checkpoint {path.name}"
            except Refusal as error:
                self._recorder.event(str(error))
        return None, "the beginning, as there is no checkpoint"

    def _loop(self) -> tuple[str, str]:
        """Until a stop condition holds or a signal comes, and all is at rest."""
        engine, recorder, asked = self._engine, self._recorder, math.inf
        while True:
            for event in engine.turn():
                self._note(event)
            if self._start_s == 0.0 and engine.started:
                self._start_s = self._age()
            recorder.tick(engine.shares, lambda: self._judge(WINDOW))
            evaluates = engine.evaluating and self._signal is None
            if self._signal is not None or (self._stop is not None and not evaluates):
                hopeful = engine.settle()
                asked = min(asked, time.monotonic())
                late = time.monotonic() - asked > self._config.faults.grace
                if engine.settled or not hopeful or late:
                    return self._ended()
            elif self._save_due and self._can_save():
                self._save_due = False
                self._save()
                engine.go_on()

    def _judge(self, seconds: float) -> Verdict | None:
        """What held the run up in the last so many seconds."""
        usage = self._engine.usage(seconds)
        return judge(usage.time, self._setting(usage))

    def _setting(self, usage: Usage) -> Setting:
        """What a verdict depends on beside where the time went."""
        scale, relax = self._config.scale, self._engine.setup.relax
        return Setting(
            actors=max(1, round(usage.active)),
            groups=scale.groups,
            cores=scale.cores,
            available=cores(),
            places=max(1, usage.places),
            crowd=usage.crowd,
            turns=relax.lead == 0,
            grows=self._config.algorithm.traits.on_policy,
            ordered=relax.late == "wait",
            busiest=usage.busiest,
            scaling=scaling_of(self._plan),
            planned=bool(self._plan),
            slack=SLACK if self._plan else 0.0,
            rebalances=scale.rebalance,
            silent=usage.silent,
        )

    def _can_save(self) -> bool:
        engine = self._engine
        rests = engine.settled or engine.stuck
        return rests and (engine.beside or not engine.evaluating)

    def _ended(self) -> tuple[str, str]:
        if self._stop is not None:
            return "done", self._stop
        assert self._signal is not None
        name = signal.Signals(self._signal).name
        return ("interrupted" if self._signal == signal.SIGINT else "stopped"), name

    def _note(self, event: Event) -> None:
        """Record it; what it makes due."""
        if isinstance(event, Evaluated):
            self._recorder.evaluation(event.steps, event.version, event.episodes)
            self._evaluated = float(event.episodes["return"].mean())
            return
        if isinstance(event, Rebalanced):
            self._recorder.rebalance(event.change, event.group, self._engine.active)
            return
        if isinstance(event, Started):
            return
        if isinstance(event, Faulted):
            fault = event.fault
            if event.batch:
                fault = left_out(fault, event.batch, self._folder)
            self._recorder.fault(fault)
            if event.fault.kind == "env" and not self._env_restarts.spend():
                raise EnvFailed(event.fault, self._env_restarts)
            return
        if not isinstance(event.report, Tally):
            self._recorder.update(event.report)
        elif event.report.last is not None:
            self._recorder.merge(event.report)
        if self._stop is None and event.due.stop is not None:
            self._stop, self._stop_s = event.due.stop, self._recorder.elapsed
        self._save_due = self._save_due or event.due.save

    def _save(self) -> None:
        """Write a checkpoint, where all is at rest; a full disk is said and stops nothing."""
        if not self._engine.settled:
            self._save_what_rests()
            return
        most = {"auto": STORE_AUTO, "always": math.inf, "never": -1}
        try:
            parts = self._engine.parts(most[self._config.checkpoint.store])
        except NoAnswer as error:
            self._unsaved += 1
            self._recorder.event(f"not saved: {error}; the last checkpoint, if any, is kept")
        else:
            self._write(parts)

    def _save_what_rests(self) -> None:
        """Somebody is busy for too long: save what was learnt, without envs and store."""
        if self._rescue(0.0):
            return
        self._unsaved += 1
        self._recorder.event(
            "not saved: the learner is in the middle of a long update; the last checkpoint, if "
            "there is one, is kept"
        )

    def _rescue(self, seconds: float) -> bool:
        """Save what was learnt, with what is known of how; False where it cannot be had."""
        parts = self._engine.rescue(seconds)
        for event in self._engine.heard():
            self._note(event)
        if parts is not None:
            self._write(parts)
        return parts is not None

    def _write(self, parts: dict[str, State]) -> None:
        spec = self._engine.setup.spec
        parts["run"] |= {
            "recorder": self._recorder.state(),
            "end": [spec.updates, spec.steps],
            "evaluated": self._evaluated,
        }
        score = self._evaluated if evaluates(self._config) else self._recorder.progress.return_mean
        meta = {"updates": updates_of(parts), "seed": self._config.seed}
        try:
            path = self._checkpoints.save(self._recorder.progress.last.received, parts, meta, score)
            self._recorder.event(f"checkpoint {path.name}")
        except CheckpointNotSaved as error:
            self._unsaved += 1
            self._recorder.event(str(error))

    def _result(self, status: str, reason: str) -> Result:
        summary = self._recorder.summary()
        spent = self._engine.time()
        self._recorder.conclusion = told = self._judge(math.inf)
        active, changes = self._engine.active, self._recorder.rebalanced
        notes = {"rows_lost": summary["rows_lost"]} if "rows_lost" in summary else {}
        if self._unsaved:
            notes["checkpoints_not_saved"] = self._unsaved
        notes |= {name: count for name, count in self._recorder.faults.items() if count}
        if self._recorder.faults["recoveries"]:
            notes["updates_lost"] = self._lost
        return Result(
            status=status,
            run_dir=str(self._folder),
            wall_s=round(self._age(), 3),
            start_s=round(self._start_s, 3),
            steps=self._recorder.progress.last.received,
            updates=self._engine.version,
            episodes=summary["episodes"],
            return_mean=summary["return_mean"],
            win_rate=summary.get("win_rate"),
            steps_per_s={k: round(v, 1) for k, v in summary["steps_per_s"].items()},
            replay_ratio=summary["replay_ratio"],
            staleness=summary["staleness"],
            filtered=summary["filtered"],
            time=spent,
            verdict="" if told is None else told.line,
            bottleneck=None if told is None else told.tree(),
            rebalance=None if active is None else {"active": active, "changes": changes},
            params_sha256=self._engine.networks_sha256(),
            stop_reason=reason,
            stop_s=None if self._stop_s is None else round(self._stop_s, 3),
            measured=summary["measured"],
            resumed=self._resumed,
            notes=notes,
        )

    def _refuse_ended(self) -> None:
        """A run that is to go on needs an end that is not behind it."""
        assert self._restored is not None
        watch = Watch(self._config)
        watch.load_state(self._restored["run"]["recorder"])
        counts = watch.counts
        reason = watch.ended(Counts())
        if reason is None:
            return
        by_name = counts.by_name()
        reached = [name for name, limit in self._limits.items() if by_name[name] >= limit]
        later = [
            f"stop.{name}={'inf' if name in SCORES else math.ceil(2 * by_name[name])}"
            for name in reached
        ]
        if reached == list(self._limits) and set(reached) <= SCORES:
            later.append(f"stop.steps={2 * counts.steps}")
        words = shlex.join(["tianji", "resume", str(self._folder), *later])
        raise Refusal(
            f"{self._folder} has already ended: {reason}. Give it a later end, such as `{words}`."
        )

    def fail(self, error: BaseException) -> None:
        """Leave behind what is needed to understand a failure, and what was learnt before it."""
        fault = _fault_of(error)
        self._recorder.log(f"failed: {error}\n{fault.traceback.rstrip()}")
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        about: State = {"status": status, "error": type(error).__name__, "message": str(error)}
        about |= {"run_dir": str(self._folder), "failure": fault.then("the run ended").tree()}
        write_json(self._folder / "result.json", about)
        if self._keep_batch(error):
            self._recorder.event(f"the batch is saved in {self._folder / NONFINITE}")
        if isinstance(error, Failure) and not isinstance(error, NonFinite):
            self._rescue(RESCUE)
        self._recorder.event(f"failed; the log is {self._folder / 'log.txt'}")

    def _keep_batch(self, error: BaseException) -> bool:
        """Save what an update failed with that is not finite; False where there is no such."""
        batch = batch_arrays(error.batch) if isinstance(error, NonFinite) else {}
        batch = error.batch if isinstance(error, HostFailed) else batch
        return bool(batch) and save_batch(self._folder / NONFINITE, batch)

    def _caught(self, number: int) -> None:
        if self._signal is not None and number == signal.SIGINT:
            self._engine.kill()
            raise KeyboardInterrupt
        self._signal = number


def _fault_of(error: BaseException) -> Fault:
    """What a run that cannot go on says of why."""
    if isinstance(error, HostFailed | EnvFailed):
        return error.fault
    return Fault(
        role="learner" if isinstance(error, NonFinite) else "launcher",
        cause=str(error),
        pid=os.getpid(),
        exception=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def _nonfinite(error: HostFailed | NonFinite) -> bool:
    """Is an update that is NaN or infinite the reason?"""
    named = isinstance(error, HostFailed) and (error.fault.exception or "")
    return isinstance(error, NonFinite) or str(named).startswith(NonFinite.__name__)


def _since_now() -> Callable[[], float]:
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin
