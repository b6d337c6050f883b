"""What this machine does with a config, measured in seconds: the rates that a plan is made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tianji.config import Config
from tianji.errors import Refusal, wrong_with
from tianji.machine import cores as cores_here
from tianji.machine import cpu_model, gpu_model, version
from tianji.plan import Rates, Task
from tianji.view.status import human

FORMAT = 5
MAY_BE_EMPTY = ("infer", "inside", "together")
"""of rates: what was not measured for want of time, or as it does not matter"""
UNSTEADY = 0.1
"""such a variation of a machine's speed matters: more is measured, and a plan says what it means"""


@dataclass(frozen=True)
class Profile:
    """Measured rates, and what they hold for."""

    rates: Rates
    task: Task
    facts: dict[str, Any]
    """of the machine and what runs on it"""
    config: str
    """a hash of what was measured"""
    seconds: float
    """that it took"""
    whole: bool
    """False: a look of two seconds"""
    batches: dict[int, float] = field(default_factory=dict)
    """seconds of an update on one core, by the steps that it consumes"""
    inference: dict[str, float] = field(default_factory=dict)
    """steps per second of one actor with the config's envs, by how actions are computed"""
    skipped: tuple[str, ...] = ()
    """what there was no time for"""
    varied: float = 0.0
    """by how much the machine's own speed did, up or down, while this was measured"""

    def tree(self) -> dict[str, Any]:
        lead = self.task.lead if math.isfinite(self.task.lead) else str(self.task.lead)
        return {
            "format": FORMAT,
            "rates": self.rates.tree(),
            "task": dataclasses.asdict(self.task) | {"lead": lead},  # JSON has no infinity
            "facts": self.facts,
            "config": self.config,
            "seconds": self.seconds,
            "whole": self.whole,
            "batches": {str(k): v for k, v in self.batches.items()},
            "inference": self.inference,
            "skipped": list(self.skipped),
            "varied": self.varied,
        }

    def by_batch(self) -> dict[int, float]:
        """How many times as long an update takes as with the config's batch."""
        return {
            batch: seconds / self.batches[self.task.batch]
            for batch, seconds in self.batches.items()
        }

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Profile:
        task = dict(tree["task"])
        task["lead"] = float(task["lead"])
        return cls(
            Rates.of(tree["rates"]), Task(**task), tree["facts"], tree["config"], tree["seconds"],
            tree["whole"], {int(k): v for k, v in tree["batches"].items()}, tree["inference"],
            tuple(tree["skipped"]), tree["varied"],
        )  # fmt: skip


def facts() -> dict[str, Any]:
    """What rates depend on beside the config."""
    return {
        "cpu": cpu_model(),
        "cores": cores_here(),
        "gpu": gpu_model(),
        "system": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("tianji", "torch", "numpy", "gymnasium")},
    }


def elsewhere(there: Mapping[str, Any]) -> str:
    """What differs here from what rates were measured with; empty: nothing."""
    here = facts()
    return "; ".join(f"{key}: {there.get(key)}, here {here[key]}" for key in here
                     if there.get(key) != here[key])  # fmt: skip


def subject(config: Config) -> str:
    """A hash of what of a config rates depend on: not of how it is spread, nor when it ends."""
    tree = config.tree()
    scale = {key: getattr(config.scale, key) for key in ("device", "halves", "env_threads")}
    envs = config.scale.actors * config.scale.envs_per_actor, config.scale.rollout_length
    about = [tree[section] for section in ("env", "algorithm", "network", "reuse")]
    loose = config.scale.relax, tree.get("relax"), tree.get("join")
    text = json.dumps([*about, scale, envs, *loose], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    if folder := os.environ.get("TIANJI_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tianji"


def cache_path(config: Config) -> Path:
    here = hashlib.sha256(json.dumps(facts(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"profile-{here[:8]}-{subject(config)[:16]}.json"


def cached(config: Config) -> Profile | None:
    """The profile of this config on this machine, if there is one."""
    path = cache_path(config)
    return load(path, config) if path.is_file() else None


def load(path: Path, config: Config) -> Profile:
    """A profile from a file; refuses one that does not hold here."""
    try:
        tree = json.loads(path.read_text())
        if tree.get("format") != FORMAT:
            raise ValueError(f"its format is {tree.get('format')}, not {FORMAT}")
        profile = Profile.of(tree)
        _check(profile)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"{path} is no profile that can be read ({wrong_with(error, 'a profile')}), so "
            f"there is nothing to plan from. Run `tianji profile CONFIG`, which writes one."
        ) from error
    if differ := elsewhere(profile.facts):
        raise Refusal(
            f"{path} was measured elsewhere ({differ}), so its rates would mislead. Run "
            f"`tianji profile CONFIG` here."
        )
    if profile.config != subject(config):
        raise Refusal(
            f"{path} was measured for another env, algorithm, network, relaxation or number of "
            f"envs, so its rates would mislead. Run `tianji profile CONFIG` for this one."
        )
    return profile


def _check(profile: Profile) -> None:
    """Raises ValueError if something of a profile could not have been measured."""
    rates, task = profile.rates, profile.task
    for name, value in vars(rates).items():
        if name == "device":
            continue
        if not isinstance(value, Mapping):
            _expect(0 <= value < math.inf, f"rates.{name} is {value}")
        elif value or name not in MAY_BE_EMPTY:
            sound = value and all(k >= 1 and 0 < v < math.inf for k, v in value.items())
            _expect(bool(sound), f"rates.{name} is {dict(value)}")
    _expect(0 < rates.valid <= 1, f"rates.valid is {rates.valid}")
    for name in ("rows", "batch", "envs", "T", "most_rows"):
        _expect(getattr(task, name) >= 1, f"task.{name} is {getattr(task, name)}")
    _expect(all(0 < seconds < math.inf for seconds in profile.batches.values()), "batches")
    _expect(not profile.batches or task.batch in profile.batches, "batches lack the config's")
    _expect(0 <= profile.varied < math.inf, f"varied is {profile.varied}")


def _expect(so: bool, what: str) -> None:
    if not so:
        raise ValueError(what)


def save(profile: Profile, config: Config) -> Path | None:
    """Keep a profile for plans to come; None, and it is said, where that cannot be."""
    path = cache_path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(profile.tree()) + "\n")
    except OSError as error:
        print(f"the profile is not kept: {error}. $TIANJI_CACHE may name another folder.",
              file=sys.stderr)  # fmt: skip
        return None
    return path


def told(profile: Profile) -> str:
    """As tables and a small chart."""
    rates, task, valid = profile.rates, profile.task, profile.rates.valid
    lines = [f"measured in {profile.seconds:.0f} s on {profile.facts['cores']} cores, "
             f"{profile.facts['cpu']}", "",
             "acting, one actor on one core (TR_A)"]  # fmt: skip
    speed = {envs: valid * envs / seconds for envs, seconds in rates.act.items()}
    most = max(speed.values())
    for envs, rate in sorted(speed.items()):
        bar = "█" * max(1, round(30 * rate / most))
        lines.append(f"  {envs:>4} env{'s' if envs > 1 else ' '}  {human(rate):>8} steps/s  {bar}")
    for name, rate in profile.inference.items():
        lines.append(f"  inference in {name}: {human(valid * rate)} steps/s")
    lines += [
        "",
        f"learning, new steps per second (TR_L), {human(task.batch)} steps consumed by an update",
    ]
    follows = {cores: valid * task.rows / seconds for cores, seconds in rates.learn.items()}
    most = max(follows.values())
    for cores, rate in sorted(follows.items()):
        bar = "█" * max(1, round(30 * rate / most))
        where = (
            f"{cores:>4} core{'s' if cores > 1 else ' '}" if rates.device == "cpu" else "     GPU "
        )
        lines.append(
            f"  {where} {human(rate):>8} steps/s  {bar}  {1e3 * rates.learn[cores]:.3g} ms"
        )
    for learners, factor in sorted(rates.team.items()):
        if learners > 1:
            lines.append(f"  {learners} learners {human(follows[1] / factor):>8} steps/s, a core "
                         f"each")  # fmt: skip
    for batch, longer in sorted(profile.by_batch().items()):
        seconds = longer * rates.learn[1]
        lines.append(f"  {human(batch):>6} steps: {1e3 * seconds:.3g} ms, "
                     f"{human(batch / seconds)} consumed steps/s")  # fmt: skip
    first = task.T * rates.step(task.envs) + rates.begin
    lines += [
        "",
        "handing on, of one rollout",
        f"  Tsp {duration(first)} to make it, Tsd {duration(rates.send)} to send, "
        f"Trv {duration(rates.receive)} to receive; {duration(rates.serve)} to serve a batch",
    ]
    if max(*rates.slow_act, *rates.together, 1) > 1:
        lines += ["", "beside others, how much longer it takes"]
    lines += [
        f"  {busy} busy cores: acting x {rates.slow_act[busy]:.2f}, learning x "
        f"{rates.learning_slowed(busy):.2f}; the slowest actor x {rates.behind(busy):.2f} of the "
        f"mean"
        for busy in sorted(rates.slow_act)
        if busy > 1
    ]
    lines += [
        f"  {workers} workers: acting and learning in turn x {factor:.2f}, joining included"
        for workers, factor in sorted(rates.together.items())
        if workers > 1
    ]
    if profile.whole:
        lines += ["", f"meanwhile the machine's own speed varied by ± {100 * profile.varied:.0f} %"]
    if profile.skipped:
        lines += ["", f"there was no time for: {', '.join(profile.skipped)}"]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e6 * seconds:.3g} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"
