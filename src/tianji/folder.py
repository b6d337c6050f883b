"""The run folder: how it is named, made and found, and what is put into it beside records."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from tianji.config import Config
from tianji.errors import Refusal, nearest
from tianji.fault import Fault
from tianji.machine import manifest
from tianji.types import Leaves, Rollout

HOSTS = "hosts.json"
"""while a run has processes: which they are, and how they are"""

ARRIVALS = "arrivals.bin"
"""which rollouts reached the buffer, where their order is not fixed"""

FAULTS = "faults.jsonl"
"""what went wrong, a line each"""

STALENESS = "staleness.json"
"""how often what staleness was consumed, so far"""

PLAN = "plan.json"
"""what was measured and chosen before the run, where it was planned"""

NONFINITE = "nonfinite_batch.safetensors"
"""the batch of the last update that was NaN or infinite"""


def run_folder(runs: Path, name: str | None, config: Config) -> Path:
    """Where the run will live; refused where it would write into another's folder."""
    if name is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return runs / f"{config.name}-{now}-s{config.seed}"
    if not re.fullmatch(r"[\w][\w .+=@-]*", name):
        raise Refusal(
            f"--name {name!r} cannot name a folder in {runs}. Use letters, digits, spaces and "
            f"_ . + = @ -, and begin with a letter or a digit; --runs says where it is made."
        )
    folder = runs / name
    if folder.exists():
        is_run = (folder / "config.toml").exists()
        resume = f", or go on with it: `tianji resume {shlex.quote(str(folder))}`" * is_run
        raise Refusal(
            f"{folder} exists already, and a run never writes into another's folder. Choose "
            f"another --name{resume}."
        )
    return folder


def make_folder(folder: Path, named: bool, config: Config) -> Path:
    """Make the run folder; one whose name was not asked for gets a number where it is taken."""
    resolved = _resolved(config)
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


def _resolved(config: Config) -> str:
    return "# The resolved config of this run: every key with its value.\n" + tomli_w.dumps(
        config.tree()
    )


def rewrite_config(folder: Path, config: Config) -> None:
    """Keep what a resumed run was told anew, so that resuming it again needs no word of it."""
    new = folder / "config.toml.new"
    try:
        new.write_text(_resolved(config))
        new.replace(folder / "config.toml")
    except OSError as error:
        print(f"{folder}/config.toml keeps its old content: {error.strerror}", file=sys.stderr)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a run folder; it ends with the process at the latest."""
    path = folder / "lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise Refusal(
            f"{folder} cannot be written to ({error.strerror}), so nothing of the run could be "
            f"kept. Copy it to a place where you may write."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Refusal(
                f"another process is writing into {folder}; two would spoil each other's records "
                f"and checkpoints. Wait for it or stop it first."
            ) from error
        yield


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or only half of it."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        print(f"{path} could not be written: {error.strerror}", file=sys.stderr)


def read_plan(folder: Path) -> dict[str, Any]:
    """What the run was planned to be; empty where its counts came from the config."""
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Refusal(
            f"{path} is no JSON ({error}), so nothing of the plan can be used. Delete it: the run "
            f"then goes by its config."
        ) from error
    return plan if isinstance(plan, dict) else {}


def batch_arrays(batch: Iterable[Rollout]) -> Leaves:
    """The arrays of an update that went wrong, to be kept or sent."""
    arrays: Leaves = {}
    for i, part in enumerate(batch):
        leaves = {f"observation.{k}": v for k, v in part.observation.items()}
        leaves |= {f"extras.{k}": v for k, v in part.extras.items()}
        for name in ("action", "reward", "terminated", "valid", "versions"):
            leaves[name] = getattr(part, name)
        arrays |= {f"part-{i}.{name}": array.copy() for name, array in leaves.items()}
    return arrays


def save_batch(path: Path, arrays: Leaves) -> bool:
    """Keep the arrays of an update that went wrong; False where the disk does not take them."""
    import safetensors
    import safetensors.numpy

    try:
        safetensors.numpy.save_file(arrays, path)
    except (OSError, safetensors.SafetensorError) as error:
        print(f"{path} could not be written: {error}", file=sys.stderr)
        return False
    return True


def left_out(fault: Fault, batch: Leaves, folder: Path) -> Fault:
    """The fault of an update that was left out, once its batch is kept."""
    where = folder / NONFINITE
    kept = f"; its batch is {where}" if save_batch(where, batch) else ""
    return replace(fault, cause=f"{fault.cause}{kept}", action="update left out")


def find_run(run: str | Path) -> Path:
    folder = Path(run)
    if (folder / "config.toml").is_file():
        return folder
    inside = sorted(folder.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if inside:
        raise Refusal(
            f"{folder} is no run folder (it has no config.toml), but {len(inside)} lie in it. Name "
            f"one of them; the newest is {inside[-1].parent}."
        )
    parent = folder.parent
    others = [p.name for p in parent.glob("*") if (p / "config.toml").is_file() and p != folder]
    what = "is no run folder (it has no config.toml)" if folder.exists() else "does not exist"
    raise Refusal(
        f"{folder} {what}, so there is nothing to load. Name the folder of a run, as `tianji "
        f"train` tells it.{nearest(folder.name, others)}"
    )
