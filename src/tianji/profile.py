"""What this machine does with a config, measured in seconds: the rates that a plan is made from."""

from __future__ import annotations

import contextlib
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

from tianji.annotated import Reader, expect, short, table, tree
from tianji.config import Config
from tianji.errors import Refusal, wrong_with
from tianji.machine import cores as cores_here
from tianji.machine import cpu_model, gpu_model, version
from tianji.plan import Rates, Task
from tianji.view.status import human

FORMAT = 6
WITH_ONE = ("learn", "slow_act", "slow_learn", "slowest", "team")
"""of rates: curves that are known for one core, or one learner, at least"""
SHORTEST, DAY = 1e-12, 86400.0
"""seconds of what takes time at all, and of what can be measured"""
WRITTEN = Reader(
    ranges={
        "rates.receive": (SHORTEST, DAY),
        "rates.inside_act": (SHORTEST, DAY),
        "rates.valid": (SHORTEST, 1),
        "rates.rests": (SHORTEST, 1),
        "task.lead": (0, math.inf),
        "task.most_rows": (1, 1 << 62),
        "inference": (SHORTEST, 1 / SHORTEST),
    },
    number=(0, DAY),
    entry=(SHORTEST, DAY),
    # what was not measured for want of time, or as it does not matter
    may_be_empty={
        "rates.infer",
        "rates.rests",
        "rates.inside",
        "rates.together",
        "batches",
        "inference",
    },
)
"""what may have been measured"""
DIFFERENCES = 4
"""of a config, that are told, at most"""
UNSTEADY = 0.1
"""such a variation of a machine's speed matters: more is measured, and a plan says what it means"""


@dataclass(frozen=True)
class Profile:
    """Measured rates, and what they hold for."""

    rates: Rates
    task: Task
    facts: dict[str, Any]
    """of the machine and what runs on it"""
    config: dict[str, str]
    """what of a config they hold for, by its keys"""
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
    made: str = ""
    """when, by the local clock"""

    def tree(self) -> dict[str, Any]:
        written: dict[str, Any] = tree(self)
        if math.isinf(self.task.lead):  # JSON has no infinity
            written["task"]["lead"] = str(self.task.lead)
        return {"format": FORMAT, **written}

    def by_batch(self) -> dict[int, float]:
        """How many times as long an update takes as with the config's batch."""
        return {
            batch: seconds / self.batches[self.task.batch]
            for batch, seconds in self.batches.items()
        }

    @classmethod
    def of(cls, written: Any) -> Profile:
        """A profile that was written; ValueError where it could not have been measured."""
        parts = dict(table(written))
        found = parts.pop("format", None)
        expect(
            type(found) is int and found == FORMAT, f"its format is {short(found)}, not {FORMAT}"
        )
        profile: Profile = WRITTEN.read(cls, parts)
        _check(profile)
        return profile


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


def subject(config: Config) -> dict[str, str]:
    """What of a config rates depend on, by its keys: not how it is spread, nor when it ends."""
    tree, scale = config.tree(), config.scale
    found = {
        f"{section}.{key}": value
        for section in ("env", "algorithm", "network", "reuse", "relax", "join")
        for key, value in tree.get(section, {}).items()
    }
    for key in ("relax", "device", "halves", "env_threads", "rollout_length"):
        found[f"scale.{key}"] = getattr(scale, key)
    found["scale.actors x scale.envs_per_actor"] = scale.actors * scale.envs_per_actor
    return {key: json.dumps(value, sort_keys=True) for key, value in found.items()}


def differing(known: Mapping[str, str], config: Config) -> str:
    """In what a config is another one than rates are known for; empty: in nothing."""
    here = subject(config)
    keys = [key for key in {**known, **here} if known.get(key) != here.get(key)]
    told = [f"{key} = {known.get(key, 'unset')}, here {here.get(key, 'unset')}" for key in keys]
    return "; ".join([*told[:DIFFERENCES], *["and more"] * (len(told) > DIFFERENCES)])


def cache_folder() -> Path:
    if folder := os.environ.get("TIANJI_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tianji"


def cache_path(config: Config) -> Path:
    here = hashlib.sha256(json.dumps(facts(), sort_keys=True).encode()).hexdigest()
    what = hashlib.sha256(json.dumps(subject(config), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"profile-{here[:8]}-{what[:16]}.json"


def cached(config: Config) -> Profile | None:
    """The profile of this config on this machine, if there is one."""
    path = cache_path(config)
    # Where one may not look, nothing was kept: pathlib's is_file() would raise.
    return load(path, config) if os.path.isfile(path) else None


def load(path: Path, config: Config) -> Profile:
    """A profile from a file; refuses one that does not hold here."""
    try:
        profile = Profile.of(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            f"{path} is no profile that can be read ({wrong_with(error, 'a profile')}), so "
            f"there is nothing to plan from. Run `tianji profile CONFIG`, which writes one."
        ) from error
    if differ := elsewhere(profile.facts):
        raise Refusal(
            f"{path} was measured elsewhere ({differ}), so its rates would mislead. Run "
            f"`tianji profile CONFIG` here."
        )
    if differ := differing(profile.config, config):
        raise Refusal(
            f"{path} was measured for another config ({differ}), so its rates would mislead. Run "
            f"`tianji profile CONFIG` for this one."
        )
    return profile


def _check(profile: Profile) -> None:
    """ValueError if parts of a profile do not fit each other."""
    rates, task = profile.rates, profile.task
    expect(rates.device in ("cpu", "cuda"), f"rates.device is {short(rates.device)}")
    for name in WITH_ONE:
        expect(1 in getattr(rates, name), f'it has no "rates.{name}.1"')
    expect(bool(rates.infer) or not task.server, "rates.infer is empty and task.server is True")
    for envs, seconds in rates.infer.items():
        expect(envs in rates.act and seconds <= rates.act[envs],
                f"rates.infer.{envs} is more than rates.act.{envs}")  # fmt: skip
    lead = task.lead
    expect(math.isinf(lead) or lead.is_integer(), f"task.lead is {lead}, no number of updates")
    lacks = bool(profile.batches) and task.batch not in profile.batches
    expect(not lacks, f"batches lack the config's, {task.batch}")
    for fact in facts():
        expect(fact in profile.facts, f'it has no "facts.{fact}"')
    for fact in profile.facts:
        expect(fact in facts(), f'"facts.{fact}" is unknown here')


def save(profile: Profile, config: Config) -> Path | None:
    """Keep a profile for plans to come; None, and it is said, where that cannot be."""
    path = cache_path(config)
    part = path.with_suffix(f".{os.getpid()}")  # what is there is whole, whenever it is read
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(profile.tree()) + "\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        print(f"the profile is not kept ({error}), so that the next plan measures anew. "
              f"$TIANJI_CACHE may name another folder.", file=sys.stderr)  # fmt: skip
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
    if rates.rests:
        lines.append(f"  the envs wait: for {100 * rates.resting(task.envs):.0f} % of a step an "
                     f"actor leaves its core to others")  # fmt: skip
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
        lines.append(f"  {where} {human(rate):>8} steps/s  {bar}  {duration(rates.learn[cores])}")
    for learners, factor in sorted(rates.team.items()):
        if learners > 1:
            lines.append(f"  {learners} learners {human(follows[1] / factor):>8} steps/s, a core "
                         f"each")  # fmt: skip
    for batch, longer in sorted(profile.by_batch().items()):
        seconds = longer * rates.learn[1]
        lines.append(f"  {human(batch):>6} steps: {duration(seconds)}, "
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
    """Three digits and a unit: 512 µs, 24.3 ms, 24.3 s; 2,430 s."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, in_seconds in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * in_seconds:
            return f"{seconds / in_seconds:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"
