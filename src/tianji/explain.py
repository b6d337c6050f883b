"""Where a run's time went, what bounded it, and what to change next: read from its folder."""

from __future__ import annotations

import fcntl
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tianji import trace
from tianji.advice import number_of, of_shares
from tianji.against import Compared, Planned, deviation, new_speed
from tianji.critical import Chain, Cycle, chain, cycle
from tianji.errors import Refusal
from tianji.folder import FAULTS, PLAN, STALENESS, find_run, read_json
from tianji.history import History
from tianji.role_names import SERIAL, WORKER
from tianji.trace import Track
from tianji.verdict import by_role, scaling_of

REPORT_HTML, REPORT_MARKDOWN = "report.html", "report.md"
NOTHING = "No other spread of the roles is predicted to bring more than 5 %."
FLOWS = ("produced", "received", "consumed")
MOST_FAULTS = 50
"""faults that are told one by one"""


IN_RESULT = {
    "steps": "steps",
    "updates": "updates",
    "episodes": "episodes",
    "return": "return_mean",
    "win_rate": "win_rate",
    "seconds": "wall_s",
    "start_seconds": "start_s",
    "filtered": "filtered",
    "replay_ratio": "replay_ratio",
}
"""counts of a run by what its result calls them"""
IN_ROW = {
    "steps": "step",
    "updates": "updates",
    "episodes": "episodes",
    "return": "rollout/ep_rew_mean",
    "win_rate": "rollout/win_rate",
    "seconds": "wall_s",
    "filtered": "staleness/filtered",
}
"""and by what a row of its metrics does"""


@dataclass(frozen=True)
class Explained:
    """What a run folder tells, ready to be shown; None and empty: the folder does not have it, and
    `missing` says why."""

    run: Path
    status: str
    """"done", "interrupted", "stopped", "failed", "killed" or "running" """
    ending: str
    """how it ended, in words"""
    about: Mapping[str, str]
    """what ran"""
    config: Mapping[str, Any]
    counts: Mapping[str, float | None]
    """steps, updates, episodes, return and seconds, as far as is known"""
    rates: Mapping[str, float]
    """steps per second: produced, received, consumed"""
    time: Mapping[str, Mapping[str, float]]
    """for each kind of host, shares of its time that add up to 1"""
    time_seconds: float
    """that the shares are of"""
    staleness: Mapping[str, float] | None
    histogram: Mapping[str, Sequence[float]] | None
    freshness: float | None
    history: History
    planned: Planned | None
    cycle: Cycle | None
    chain: Chain | None
    verdict: str
    advice: tuple[str, ...]
    faults: tuple[Mapping[str, Any], ...]
    notes: Mapping[str, Any]
    changes: tuple[Mapping[str, Any], ...] = ()
    """of the number of actors that are active, where it followed what was measured"""
    tracks: Sequence[Track] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """by section: what the folder does not have, and why"""

    def tree(self) -> dict[str, Any]:
        """For --json, without the rows and the events."""
        planned = None
        if self.planned is not None:
            planned = asdict(self.planned)
            for row, rate in zip(planned["rates"], self.planned.rates, strict=True):
                row["error"] = rate.error
        return {
            "run_dir": str(self.run),
            "status": self.status,
            "ending": self.ending,
            "about": dict(self.about),
            "counts": dict(self.counts),
            "steps_per_s": dict(self.rates),
            "time": {host: dict(kinds) for host, kinds in self.time.items()},
            "staleness": self.staleness and dict(self.staleness),
            "freshness": self.freshness,
            "plan": planned,
            "cycle": None if self.cycle is None else asdict(self.cycle),
            "chain": None if self.chain is None else asdict(self.chain),
            "verdict": self.verdict,
            "advice": list(self.advice),
            "faults": len(self.faults),
            "missing": dict(self.missing),
        }


def explain(run: str | Path, running: bool | None = None) -> Explained:
    """Read a run folder, in whatever state it is. `running`: does a process write into it now?
    None: look whether one does."""
    folder = find_run(run)
    if running is None:
        running = _is_locked(folder)
    return _Reader(folder, running).read()


def write(
    run: str | Path,
    html: Path | None = None,
    markdown: Path | None = None,
    running: bool | None = None,
) -> Explained:
    """Explain a run in two files, by default in its own folder."""
    from tianji.view import markdown as text
    from tianji.view import report

    found = explain(run, running)
    for path, page in (
        (html or found.run / REPORT_HTML, report.html),
        (markdown or found.run / REPORT_MARKDOWN, text.markdown),
    ):
        path.write_text(page(found), encoding="utf-8")
    return found


def has_report(run: Path) -> bool:
    """Is there a page of the run as it ended, not of an earlier process alone?"""
    try:
        made, ended = ((run / name).stat().st_mtime_ns for name in (REPORT_HTML, "result.json"))
    except OSError:
        return False
    return made >= ended


class _Reader:
    """The parts of an explanation, each from the files that have it."""

    def __init__(self, folder: Path, running: bool) -> None:
        self._folder = folder
        self._running = running
        self._missing: dict[str, str] = {}
        self._config = _toml(folder / "config.toml")
        self._manifest = read_json(folder / "manifest.json") or {}
        self._result = read_json(folder / "result.json") or {}
        self._plan = read_json(folder / PLAN)
        self._history = History.read(folder)
        self._last = self._history.rows[-1] if self._history.rows else {}
        self._outdated = self._last.get("updates", 0) > self._result.get("updates", math.inf)
        """is the result one of an earlier process, and the run has gone on since?"""
        self._whole = not running and not self._outdated and "steps" in self._result
        """is there a result of a run that came to an end by itself?"""
        self._counts, self._rates = self._known_counts(), self._known_rates()
        self._time, self._seconds = self._known_time()

    def read(self) -> Explained:
        status, ending = self._ending()
        updates = self._measured("updates", self._counts["updates"] or 0)
        groups = number_of(self._config, "groups")
        around = cycle(self._time, self._seconds, updates / groups)
        if around is None:
            self._missing["critical path"] = (
                "no update was made, so there is no cycle to look at."
                if self._time
                else "it needs an account of the time, and there is none."
            )
        tracks = self._tracks()
        verdict, advice = self._verdict()
        return Explained(
            run=self._folder,
            status=status,
            ending=ending,
            about=self._about(),
            config=self._config,
            counts=self._counts,
            rates=self._rates,
            time=self._time,
            time_seconds=self._seconds,
            staleness=self._staleness(),
            histogram=self._histogram(),
            freshness=self._history.mean("staleness/freshness"),
            history=self._history,
            planned=self._planned(),
            cycle=around,
            chain=chain(tracks),
            verdict=verdict,
            advice=advice,
            faults=self._faults(),
            notes=self._result.get("notes", {}),
            changes=tuple((self._result.get("rebalance") or {}).get("changes", ())),
            tracks=tracks,
            missing=self._missing,
        )

    def _ending(self) -> tuple[str, str]:
        result = self._result
        if self._running:
            return "running", "it is still running; this is what it has written so far."
        if self._outdated:
            return "killed", (
                f"it had ended ({result['stop_reason']}) and was resumed, and that process left no "
                f"result.json: it was killed. What follows is what it had written by then."
            )
        if not result and (self._folder / "result.json").exists():
            return "unknown", (
                "result.json cannot be read: it is no JSON object. What follows is what the other "
                "files have."
            )
        if not result:
            return "killed", (
                "there is no result.json, and no process writes into the folder: it was killed, or "
                "the machine was. What follows is what it had written by then."
            )
        if self._whole:
            resumed = result.get("resumed")
            more = f" It was resumed ({resumed})." if resumed else ""
            return result["status"], f"{result['stop_reason']}.{more}"
        return result["status"], f"{result.get('error', '')}: {result.get('message', '')}"

    def _about(self) -> dict[str, str]:
        config, manifest = self._config, self._manifest
        scale = config.get("scale", {})
        machine = manifest.get("machine", {})
        packages = manifest.get("packages", {})
        sizes = [
            f"{scale[key]} {word if scale[key] == 1 else word + 's'}"
            for key, word in (("groups", "group"), ("actors", "actor"), ("learners", "learner"))
            if key in scale and (key == "actors" or scale[key] != 1)
        ]
        about = {
            "algorithm": config.get("algorithm", {}).get("name"),
            "environment": config.get("env", {}).get("id"),
            "engine": scale.get("engine"),
            "preset": scale.get("relax"),
            "scale": ", ".join(
                [*sizes, f"{scale.get('envs_per_actor')} envs each",
                 f"rollouts of {scale.get('rollout_length')} steps"]
            ),
            "seed": config.get("seed"),
            "started": manifest.get("created"),
            "machine": machine and f"{machine.get('cpu')}, {machine.get('cores')} cores, "
            f"{machine.get('system')}",
            "versions": ", ".join(
                [f"Python {manifest['python']}" if "python" in manifest else "",
                 *(f"{name} {v}" for name, v in packages.items() if v)]
            ).strip(", "),
            "commit": manifest.get("commit"),
            "command": " ".join(map(str, manifest.get("command", []))),
            "config hash": manifest.get("config_sha256"),
        }  # fmt: skip
        if not manifest:
            self._missing["what ran"] = "manifest.json is not there, so the machine is not known."
        return {name: str(value) for name, value in about.items() if value not in (None, "")}

    def _known_counts(self) -> dict[str, float | None]:
        found, names = (self._result, IN_RESULT) if self._whole else (self._last, IN_ROW)
        return {name: found.get(key) for name, key in names.items()}

    def _measured(self, name: str, otherwise: float) -> float:
        """Of the process that wrote the result, which rates and times are of."""
        if self._whole:
            measured: Mapping[str, float] = self._result.get("measured", {})
            return measured.get(name, otherwise)
        return otherwise

    def _known_rates(self) -> dict[str, float]:
        if self._whole:
            return dict(self._result["steps_per_s"])
        means = {name: self._history.mean(f"flow/{name}_sps", "wall_s") for name in FLOWS}
        rates = {name: mean for name, mean in means.items() if mean is not None}
        if not rates:
            self._missing["throughput"] = "no row of metrics was written: it ended within a second."
        return rates

    def _known_time(self) -> tuple[dict[str, dict[str, float]], float]:
        """Shares, and the seconds that they are of."""
        if self._whole:
            time = {host: dict(kinds) for host, kinds in self._result["time"].items() if kinds}
            otherwise = self._result["wall_s"] - self._result["start_s"]
            seconds = self._measured("seconds", otherwise)
            if self._result.get("resumed"):
                self._missing["time"] = (
                    "the run was resumed: shares, rates and cycles are of its last process alone."
                )
        else:
            time, seconds = _by_host(self._history.shares()), self._last.get("wall_s", 0.0)
            if time:
                self._missing["time"] = (
                    "there is no final account, so these are means over the rows of metrics."
                )
        if not time:
            self._missing["time"] = (
                "no account of the time was written: it ended before the first row of metrics."
            )
        return {host: _whole(kinds) for host, kinds in time.items()}, seconds

    def _staleness(self) -> Mapping[str, float] | None:
        if self._whole:
            found: Mapping[str, float] | None = self._result["staleness"]
            return found
        mean = self._history.mean("staleness/mean")
        if mean is None:
            return None
        return {"mean": mean, "max": max(y for _, y in self._history.series("staleness/max"))}

    def _histogram(self) -> Mapping[str, Sequence[float]] | None:
        found = read_json(self._folder / STALENESS)
        if found is None:
            self._missing["staleness"] = (
                f"there is no {STALENESS}: no update had consumed anything when it was to be "
                f"written, or the run is of a version that did not write it."
            )
        return found

    def _planned(self) -> Planned | None:
        plan = self._plan or {}
        predicted = plan.get("predicted")
        if not isinstance(predicted, Mapping):
            there = (self._folder / PLAN).exists()
            self._missing["plan"] = (
                f"{PLAN} cannot be read as a plan, so it is not known what was predicted."
                if there
                else f"there is no {PLAN}: the counts of actors, envs and learners came from the "
                f"config, so nothing was predicted."
            )
            return None
        measured = dict(self._rates)
        if "received" in measured:
            measured["new"] = new_speed(measured["received"], *self._filtered())
        choice = plan.get("choice")
        found = Planned(
            choice=choice if isinstance(choice, Mapping) else {},
            binding=str(plan.get("binding", "")),
            rates=tuple(
                Compared(name, float(rate), measured.get(name))
                for name, rate in predicted.items()
                if isinstance(rate, int | float)
            ),
        )
        told = deviation(found, plan, self._time, measured, self._seconds)
        return replace(found, deviation=told)

    def _tracks(self) -> Sequence[Track]:
        try:
            tracks, broken = trace.salvage(self._folder)
        except Refusal as error:
            self._missing["timeline"] = str(error)
            return ()
        if broken:
            self._missing["timeline"] = (
                f"of {', '.join(broken)} nothing is shown, and the longest chain is followed "
                f"without. {' '.join(broken.values())}"
            )
        return tracks

    def _verdict(self) -> tuple[str, tuple[str, ...]]:
        """And what to change: as the verdict says; where that is nothing, as the shares say."""
        bottleneck = self._result.get("bottleneck") if self._whole else None
        if not bottleneck:
            told = str(self._result.get("verdict", "")) if self._whole else ""
            return told, self._own_advice()
        advice = tuple(_sentence(text) for text in bottleneck["advice"])
        return f"{bottleneck['kind']}: {bottleneck['text']}", advice or (
            NOTHING, *self._own_advice(judged=True)
        )  # fmt: skip

    def _faults(self) -> tuple[Mapping[str, Any], ...]:
        try:
            lines = (self._folder / FAULTS).read_text().splitlines()
        except FileNotFoundError:
            return ()
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # half a line, of a process that writes or was killed
                continue
        return tuple(found)

    def _filtered(self) -> tuple[float, float]:
        """Steps that were too stale, of those received."""
        return self._counts.get("filtered") or 0, self._counts.get("steps") or 0

    def _own_advice(self, judged: bool = False) -> tuple[str, ...]:
        cores = self._manifest.get("machine", {}).get("cores")
        advice = [*of_shares(self._time, self._config, cores, scaling_of(self._plan), judged)]
        filtered, steps = self._filtered()
        if steps and filtered / steps > 0.01:
            advice.append(
                f"{filtered / steps:.1%} of the steps received were too stale to be consumed: made "
                f"for nothing. A lower relax.lead makes fewer of them."
            )
        return tuple(text.replace("%", " %") for text in advice)


def _by_host(shares: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Shares by "role/kind" as those of hosts: roles that share one add up to 1 only together."""
    roles = by_role(shares)
    whole = {role: kinds for role, kinds in roles.items() if sum(kinds.values()) > 0.9}
    rest = {
        f"{role}/{kind}": share
        for role, kinds in roles.items()
        if role not in whole
        for kind, share in kinds.items()
    }
    if not rest:
        return whole
    return {SERIAL if not whole else WORKER: rest, **whole}


def _sentence(text: object) -> str:
    words = str(text)
    return words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")


def _whole(kinds: Mapping[str, float]) -> dict[str, float]:
    """Shares that add up to 1: what is not accounted for is other."""
    total = math.fsum(kinds.values())
    if total > 1.0:
        return {kind: share / total for kind, share in kinds.items()}
    rest = 1.0 - total
    return dict(kinds) | ({"other": kinds.get("other", 0.0) + rest} if rest > 1e-9 else {})


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except ValueError as error:
        raise Refusal(
            f"{path} is not TOML, so it is not known what ran: {error}. Restore it from a copy."
        ) from error


def _is_locked(folder: Path) -> bool:
    """Does a process write into the run folder?"""
    try:
        file = (folder / "lock").open()
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
