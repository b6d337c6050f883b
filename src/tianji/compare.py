"""The same task under several presets, one run after the other, side by side."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tianji.against import new_speed
from tianji.build import look
from tianji.config import Config, load_config
from tianji.critical import worked
from tianji.errors import Failure, Refusal, nearest
from tianji.folder import run_folder
from tianji.history import History
from tianji.relax import PRESETS, Sizes
from tianji.result import EXIT, Result
from tianji.role_names import by_flow, waiting
from tianji.run import train, warm
from tianji.verdict import alone
from tianji.view.status import SilentView, View, columns, duration, human, number, percent

ALONE = "serial"
"""beside the presets: everything in one process"""

PAGE, FILE = "compare.html", "compare.json"


@dataclass(frozen=True)
class Entry:
    """One run; None where there is nothing that says it."""

    preset: str
    seed: int
    run_dir: str
    status: str
    """as a run's, or "failed" or "refused" """
    reason: str
    """why it ended"""
    begin: float = 0.0
    """seconds of the run's metrics before its first step"""
    start_s: float | None = None
    """seconds from its launch to its first step"""
    target_s: float | None = None
    """seconds from the first step until the target was reached"""
    new: float | None = None
    """new steps per second that could be consumed"""
    produced: float | None = None
    consumed: float | None = None
    staleness_mean: float | None = None
    staleness_p95: float | None = None
    staleness_max: float | None = None
    freshness: float | None = None
    idle_actor: float | None = None
    """share of its time that an actor does not work"""
    idle_learner: float | None = None
    return_mean: float | None = None
    steps: float | None = None
    updates: float | None = None
    seconds: float | None = None
    """of training"""
    verdict: str = ""
    time: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """where it went: shares, for each kind of host"""


FIGURES = {
    "target_s": "time to target",
    "new": "new steps/s",
    "staleness_mean": "staleness mean",
    "staleness_p95": "p95",
    "staleness_max": "max",
    "freshness": "freshness",
    "idle_actor": "actors idle",
    "idle_learner": "learner idle",
    "return_mean": "return",
    "steps": "steps",
    "updates": "updates",
    "seconds": "seconds",
    "start_s": "seconds to the first step",
}
"""what presets are compared by"""
BESIDE = ("steps", "updates", "seconds", "start_s")
"""of these, what a table leaves out"""


@dataclass(frozen=True)
class Comparison:
    """What came of it, so far."""

    folder: Path
    name: str
    """of the config"""
    task: str
    target: str
    """the return, or share of wins, that ends a run; empty: there is none"""
    presets: tuple[str, ...]
    seeds: int
    entries: tuple[Entry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """presets that cannot be, and why"""
    stopped: str = ""
    """the status of the run after which it was given up; empty: it was not"""

    @property
    def html(self) -> Path:
        return self.folder / PAGE

    @property
    def exit_code(self) -> int:
        if self.stopped:
            return EXIT[self.stopped]
        return 1 if any(entry.status in ("failed", "refused") for entry in self.entries) else 0

    @property
    def ran(self) -> list[str]:
        """Presets that have, as far as it is."""
        return [preset for preset in self.presets if self.of(preset)]

    def of(self, preset: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.preset == preset]

    def median(self, preset: str, figure: str) -> float | None:
        """Over the seeds that have it."""
        found = [getattr(entry, figure) for entry in self.of(preset)]
        known = [value for value in found if value is not None]
        return statistics.median(known) if known else None

    def reached(self, preset: str) -> int:
        """How many runs came to the target."""
        return sum(entry.target_s is not None for entry in self.of(preset))

    def tree(self) -> dict[str, Any]:
        return {
            "status": self.stopped or ("done" if self.exit_code == 0 else "failed"),
            "folder": str(self.folder),
            "html": str(self.html),
            "config": self.name,
            "task": self.task,
            "target": self.target,
            "seeds": self.seeds,
            "presets": {
                preset: {figure: self.median(preset, figure) for figure in FIGURES}
                | {
                    "reached": self.reached(preset),
                    "runs": [asdict(entry) for entry in self.of(preset)],
                }
                for preset in self.ran
            },
            "left_out": dict(self.left_out),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A table: its head, and a row for each preset that has run."""
        figures = [name for name in FIGURES if name not in BESIDE]
        if not self.target:
            figures.remove("target_s")
        head = ("preset", *(FIGURES[name] for name in figures))
        return [head, *((preset, *(self._cell(preset, name) for name in figures))
                        for preset in self.ran)]  # fmt: skip

    def _cell(self, preset: str, figure: str) -> str:
        value = self.median(preset, figure)
        if figure == "target_s":
            runs, reached = len(self.of(preset)), self.reached(preset)
            if not reached:
                return "not reached"
            some = f" ({reached} of {runs})" if reached < runs else ""
            return f"{value:.1f} s{some}"
        if value is None or not math.isfinite(value):
            return "–"
        if figure == "new":
            return human(value)
        if figure in ("freshness", "idle_actor", "idle_learner"):
            return percent(value)
        if figure == "return_mean":
            return number(value)
        column = (self.median(other, figure) for other in self.presets)
        return aligned(value, [other for other in column if other is not None])

    def told_left_out(self) -> list[str]:
        return [
            f"{', '.join(presets)} {'was' if len(presets) == 1 else 'were'} left out: {why}"
            for presets, why in _alike(self.left_out)
        ]

    def told_undone(self) -> list[str]:
        """What did not run, or not to its end."""
        return self.told_left_out() + [
            f"{entry.preset}, seed {entry.seed}, {entry.status}: {entry.reason}"
            for entry in self.entries
            if entry.status != "done"
        ]

    def told(self) -> list[str]:
        lines = columns(self.rows(), figures=True) + self.told_undone()
        if self.seeds > 1:
            lines.append(f"medians over the runs of {self.seeds} seeds")
        return [*lines, f"the page is {self.html}"]


def aligned(value: float, column: Sequence[float]) -> str:
    """With two digits behind the point below 10, one below 100, none above, and none where all of
    the column are whole; alike in a column, but for those below a tenth of its largest."""
    if all(other == round(other) for other in column if math.isfinite(other)):
        return f"{value:.0f}"
    largest = max(abs(other) for other in column if math.isfinite(other))
    of = largest if value == 0 or abs(value) >= largest / 10 else abs(value)
    digits = 2 if of < 9.995 else 1 if of < 99.95 else 0
    return f"{value:.{digits}f}"


def _alike(reasons: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Presets and what is wrong with them, those with one reason together."""
    presets: dict[str, list[str]] = {}
    for preset, why in reasons.items():
        presets.setdefault(why, []).append(preset)
    return [(names, why) for why, names in presets.items()]


def compare(
    config: str | Path | Mapping[str, Any],
    overrides: str | Sequence[str] = (),
    *,
    presets: Sequence[str],
    seconds: float | None = None,
    seeds: int = 1,
    runs: str | Path = "runs",
    name: str | None = None,
    skip: bool = False,
    say: Callable[[str], None] = lambda text: None,
    view: Callable[[], View] = SilentView,
) -> Comparison:
    """Train with every preset and seed in turn. What cannot be is refused before the first run, or
    left out with `skip`. The page and the figures are written anew after every run."""
    overrides = [overrides] if isinstance(overrides, str) else [*overrides]
    if seconds is not None:
        if not 0 < seconds < math.inf:
            raise Refusal(f"--seconds {seconds:g} is no time that a run could take. Give more.")
        overrides.append(f"stop.seconds={seconds!r}")
    configs, left_out = _configs(config, overrides, presets, skip)
    first = next(iter(configs.values()))
    folder = _folder(Path(runs), name, first)
    comparison = Comparison(
        folder=folder,
        name=first.name,
        task=f"{first.algorithm.name} · {first.env.id}",
        target=_target(first),
        presets=tuple(configs),
        seeds=seeds,
        entries=(),
        left_out=left_out,
    )
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise Refusal(
            f"the folder of the comparison {folder} cannot be made ({error.strerror}), so nothing "
            f"could be kept. Choose another place with --runs."
        ) from error
    for line in comparison.told_left_out():
        say(line)
    # Seeds outermost: what changes on the machine meanwhile concerns all presets.
    every = [(preset, first.seed + at) for at in range(seeds) for preset in configs]
    with warm():
        for at, (preset, seed) in enumerate(every):
            say(f"{at + 1} of {len(every)}: {preset}, seed {seed}{_left(comparison, len(every))}")
            resolved = load_config(config, [*overrides, *_own(preset, config, overrides),
                                            f"seed={seed}"])  # fmt: skip
            entry = _run(preset, resolved, folder, view())
            stopped = entry.status if entry.status in ("interrupted", "stopped") else ""
            comparison = replace(comparison, entries=(*comparison.entries, entry), stopped=stopped)
            _write(comparison, say)
            if stopped:
                break
    return comparison


def _configs(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    presets: Sequence[str],
    skip: bool,
) -> tuple[dict[str, Config], dict[str, str]]:
    """A config for each preset that can be; for each other one, why it cannot."""
    if not presets:
        raise Refusal("--presets names none, so there is nothing to compare. Name two or more.")
    if twice := [preset for preset in dict.fromkeys(presets) if presets.count(preset) > 1]:
        raise Refusal(
            f"--presets names {', '.join(twice)} more than once, and the same runs say nothing "
            f"new. Name each once; --seeds makes several runs of each."
        )
    if load_config(config, _apart(overrides)).auto:
        raise Refusal(
            'scale.actors = "auto" lets a plan choose where roles run, which may be one process, '
            "where presets do not differ. Set scale.actors to a number."
        )
    found: dict[str, Config] = {}
    wrong: dict[str, str] = {}
    for preset in presets:
        if preset not in PRESETS and preset != ALONE:
            raise Refusal(
                f"--presets names {preset!r}, which is no preset."
                f"{nearest(preset, [*PRESETS, ALONE])} `tianji list` names them all; serial is one "
                f"process."
            )
        load_config(config, _apart(overrides))  # what is wrong with all is no preset's fault
        try:
            resolved = load_config(config, [*overrides, *_own(preset, config, overrides)])
            look(resolved)
        except Refusal as error:
            wrong[preset] = str(error)
        else:
            found[preset] = resolved
    if wrong and (not skip or not found):
        told = " ".join(f"{', '.join(names)} cannot be compared: {why}"
                        for names, why in _alike(wrong))  # fmt: skip
        remedy = "" if not found else " Or leave such presets out with --skip."
        raise Refusal(f"{told}{remedy}")
    return found, wrong


def _own(
    preset: str, config: str | Path | Mapping[str, Any], overrides: Sequence[str]
) -> list[str]:
    """What makes the config one of this preset: processes, unless the command line says otherwise
    and the preset can do without."""
    if preset == ALONE:
        return ["scale.engine=serial", "scale.relax=sync"]
    own = [f"scale.relax={preset}"]
    scale = load_config(config, _apart(overrides)).scale
    relax = PRESETS[preset](Sizes(on_policy=True, alone=False))
    needs = relax.hosts == "worker" or math.isinf(relax.lead)
    if needs or not _asks_engine(overrides):
        own.append("scale.engine=local")
    if relax.hosts == "worker" and scale.groups == 1:
        if scale.actors == 1:
            raise Refusal(
                f"{preset} makes a worker of every actor, and scale.actors = 1 makes one, with "
                f"nobody to learn together with. Set scale.actors to 2 or more."
            )
        own += [f"scale.groups={scale.actors}", "scale.actors=1"]
    return own


def _asks_engine(overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() == "scale.engine" for override in overrides)


def _apart(overrides: Sequence[str]) -> list[str]:
    return [*overrides] if _asks_engine(overrides) else [*overrides, "scale.engine=local"]


def _folder(runs: Path, name: str | None, config: Config) -> Path:
    if name is not None:
        return run_folder(runs, name, config)
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = folder = runs / f"compare-{config.name}-{now}"
    n = 1
    while folder.exists():
        n += 1
        folder = base.with_name(f"{base.name}-{n}")
    return folder


def _target(config: Config) -> str:
    for name, score in (("return", config.stop.return_), ("win_rate", config.stop.win_rate)):
        if score is not None and math.isfinite(score):
            return f"{name} >= {score:g}"
    return ""


def _left(comparison: Comparison, total: int) -> str:
    """How long the rest takes, if the other runs are like those so far."""
    known = [entry.seconds for entry in comparison.entries if entry.seconds is not None]
    if not known:
        return ""
    rest = statistics.mean(known) * (total - len(comparison.entries))
    return f" (about {duration(rest)} of training left)"


def _run(preset: str, config: Config, folder: Path, view: View) -> Entry:
    name = f"{preset}-s{config.seed}"
    try:
        return _entry(preset, config, train(config, name=name, runs=folder, view=view))
    except Refusal as error:
        status, reason = "refused", str(error)
    except Failure as error:
        status, reason = "failed", str(error)
    except KeyboardInterrupt:
        status, reason = "interrupted", "ended at once"
    return Entry(preset, config.seed, str(folder / name), status, reason)


def _entry(preset: str, config: Config, result: Result) -> Entry:
    history = History.read(Path(result.run_dir))
    staleness = result.staleness or {}
    begin = result.measured["begin"]
    reached = bool(_target(config)) and result.stop_reason == _target(config)
    return Entry(
        preset=preset,
        seed=config.seed,
        run_dir=result.run_dir,
        status=result.status,
        reason=result.stop_reason,
        begin=begin,
        start_s=result.start_s,
        target_s=result.stop_s - begin if reached and result.stop_s is not None else None,
        new=new_speed(result.steps_per_s["received"], result.filtered, result.steps),
        produced=result.steps_per_s["produced"],
        consumed=result.steps_per_s["consumed"],
        staleness_mean=staleness.get("mean"),
        staleness_p95=staleness.get("p95"),
        staleness_max=staleness.get("max"),
        freshness=history.mean("staleness/freshness"),
        idle_actor=idle(result.time, "produced"),
        idle_learner=idle(result.time, "consumed"),
        return_mean=result.return_mean,
        steps=result.steps,
        updates=result.updates,
        seconds=result.measured["seconds"],
        verdict=result.verdict,
        time=result.time,
    )


def idle(time: Mapping[str, Mapping[str, float]], flow: str) -> float | None:
    """Share of the time in which no steps are produced, or consumed, also while another role works
    in the same process; None where that is not known."""
    if (kinds := by_flow(time).get(flow)) is not None:
        return waiting(kinds)
    host = alone(time)
    return 1.0 - worked(time[host]).get(flow, 0.0) if host and time[host] else None


def _write(comparison: Comparison, say: Callable[[str], None]) -> None:
    """A full disk stops nothing: it is said, and the next run tries again."""
    from tianji.view import side_by_side

    try:
        tree = json.dumps(comparison.tree(), indent=2)
        (comparison.folder / FILE).write_text(tree + "\n", encoding="utf-8")
        comparison.html.write_text(side_by_side.html(comparison), encoding="utf-8")
    except OSError as error:
        say(f"the comparison was not written: {error}")
