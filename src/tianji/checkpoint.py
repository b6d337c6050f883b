"""Checkpoints on disk: safetensors and JSON, hashed, and whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from tianji.errors import Refusal, nearest
from tianji.role import State
from tianji.state import NATIVE, decode, dump, encode, parse
from tianji.types import BFLOAT16, Leaves

FORMAT = 2
MANIFEST = "MANIFEST.json"
STEP = re.compile(r"step_(\d{12,})")
PART = re.compile(r"(?!manifest$)[a-z][a-z0-9_]*")
PARTIAL, ASIDE = ".partial_", ".aside_"
"""Before a name: not yet or no longer a checkpoint; the one that is just being replaced."""

_Paths = list[Path]


class CheckpointNotSaved(Exception):
    """The disk did not take a checkpoint; all earlier ones are kept and training can go on."""


class _Flaw(Exception):
    """Why a checkpoint cannot be loaded: the file, what is wrong with it, and a remedy."""

    def __init__(self, file: Path, problem: str, remedy: str = "") -> None:
        self.file, self.problem, self.remedy = file, problem, remedy


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint held."""

    path: Path
    parts: dict[str, State]
    meta: dict[str, Any]
    step: int
    score: float | None


class Checkpoints:
    """The checkpoints of one run: one writer, any number of readers, which change nothing."""

    def __init__(self, folder: Path, keep: int, identity: str) -> None:
        """Keeps the last `keep` and the best; `identity`, a hash of the config, must be theirs."""
        if keep < 1:
            raise ValueError(f"keep = {keep} would delete every checkpoint: set it to 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.identity = identity

    def save(
        self,
        step: int,
        parts: Mapping[str, State],
        meta: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Adds a checkpoint, or replaces that of the same step; the highest score is the best."""
        name = f"step_{step:012d}"
        encoded: dict[str, tuple[Leaves, bytes]] = {}
        for part, state in parts.items():
            if not PART.fullmatch(part):
                raise ValueError(f'"{part}" cannot name a file: use a-z, 0-9 and _')
            arrays: Leaves = {}
            encoded[part] = arrays, dump(encode(dict(state), part, "", arrays))
        content = {"format": FORMAT, "step": step, "identity": self.identity}
        content["meta"] = encode(dict(meta), "meta", "", None)
        content["score"] = encode(score, "score", "", None)
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                _sync(self.folder.parent)
            self._tidy()
            new = self.folder / (PARTIAL + name)
            new.mkdir()
            content["files"] = {
                k: v for part in encoded for k, v in _write(new, part, *encoded[part])
            }
            _write_bytes(new / MANIFEST, _seal(content))
            _sync(new)
            self._commit(name, score)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own
            needed = sum(
                len(text) + sum(a.nbytes for a in ars.values()) for ars, text in encoded.values()
            )
            raise self._not_saved(step, needed, error) from error
        return self.folder / name

    def load(self, which: str = "latest", only: Sequence[str] | None = None) -> Loaded:
        """The checkpoint that `which` names: "latest", "best", or a folder's name; with `only`,
        some of its parts."""
        path = self._find(which)
        try:
            manifest = self._inspect(path)
            parts: dict[str, State] = {}
            for file in sorted(manifest["files"]):
                part, _, suffix = file.partition(".")
                if suffix == "json" and (only is None or part in only):
                    parts[part] = _read(path, part)
            meta, score = (decode(manifest[key], {}) for key in ("meta", "score"))
        except _Flaw as flaw:
            self._refuse(path, flaw)
        return Loaded(path, parts, meta, manifest["step"], score)

    def list(self) -> _Paths:
        """Every checkpoint in the folder, by step; nothing is said of whether it is intact."""
        names = set(os.listdir(self.folder)) if self.folder.is_dir() else set()
        found = {n: n for n in names if STEP.fullmatch(n)}
        for name in names - found.keys():  # a writer was killed between the renames of `_commit`
            if name.startswith(ASIDE) and STEP.fullmatch(original := name.removeprefix(ASIDE)):
                found.setdefault(original, name)
        return [self.folder / found[n] for n in sorted(found, key=lambda n: int(n[5:]))]

    def verify(self, path: Path) -> None:
        """Refuses a checkpoint that is damaged, incomplete, or of another identity or format."""
        try:
            self._inspect(path)
        except _Flaw as flaw:
            self._refuse(path, flaw)

    def _commit(self, name: str, score: float | None) -> None:
        """Makes the partial folder a checkpoint, points the links at it, and drops what is old."""
        scores = {n: s for n, s in self._scores().items() if n != name}
        mine = [*(n for n in scores if int(n[5:]) <= int(name[5:])), name]
        scores[name] = score
        links = {"latest": name}
        if best := _best(scores):
            links["best"] = best
        for link, target in links.items():  # before the renames: these may still need room
            (self.folder / (PARTIAL + link)).symlink_to(target)
        place, aside = self.folder / name, self.folder / (ASIDE + name)
        if place.exists():
            place.rename(aside)
        (self.folder / (PARTIAL + name)).rename(place)
        _sync(self.folder)
        for link in links:
            (self.folder / (PARTIAL + link)).replace(self.folder / link)
        _sync(self.folder)
        # A step that lies ahead of a run that went back to an earlier one is left alone, too.
        for old in set(mine[: -self.keep]) - set(links.values()):
            (self.folder / old).rename(self.folder / (PARTIAL + old))
        self._tidy()

    def _tidy(self) -> None:
        """Undoes a replacement that was cut short, then removes what killed writers left."""
        for aside in self.folder.glob(ASIDE + "*"):
            place = self.folder / aside.name.removeprefix(ASIDE)
            aside.rename(self.folder / (PARTIAL + "old_" + place.name) if place.exists() else place)
        for left in self.folder.glob(PARTIAL + "*"):
            if left.is_symlink() or left.is_file():
                left.unlink()
            else:  # one that a reader still holds open on a network disk goes at the next save
                shutil.rmtree(left, ignore_errors=True)

    def _not_saved(self, step: int, needed: int, error: Exception) -> CheckpointNotSaved:
        try:
            self._tidy()
            free = f"{shutil.disk_usage(self.folder).free:,} are free"
        except OSError as again:
            free = f"and the partial one could not be removed ({again})"
        kept = ", ".join(path.name for path in self.list()) or "none, there was none before"
        latest = self._target("latest")
        return CheckpointNotSaved(
            f"the checkpoint of step {step} was not saved in {self.folder}: {error}. It needs "
            f"about {needed:,} bytes, {free}. Kept: {kept}"
            + (f"; latest is {latest.name}" if latest else "")
            + ". Training can go on: free space before the next save."
        )

    def _find(self, which: str) -> Path:
        found = self.list()
        if not found:
            raise Refusal(
                f"there is no checkpoint in {self.folder}: nothing can be resumed. "
                "Name the folder of a run that saved one, or start anew."
            )
        if which in ("latest", "best") and (path := self._target(which)):
            return path
        if which == "latest":
            return next((p for p in reversed(found) if self._intact(p)), found[-1])
        names = {p.name.removeprefix(ASIDE): p for p in found}
        if which == "best":
            if best := _best(self._scores()):
                return names[best]
            raise Refusal(
                f'no checkpoint in {self.folder} has a score: there is no "best". '
                "Resume with --checkpoint latest."
            )
        if which not in names:
            raise Refusal(
                f'there is no checkpoint "{which}" in {self.folder}: nothing was loaded.'
                f"{nearest(which, [*names, 'latest', 'best'])} There are: {', '.join(names)}."
            )
        return names[which]

    def _target(self, link: str) -> Path | None:
        """The checkpoint that a link points to, if there is one."""
        place = self.folder / link
        name = os.readlink(place) if place.is_symlink() else ""
        return next((p for p in self.list() if p.name.removeprefix(ASIDE) == name), None)

    def _scores(self) -> dict[str, float | None]:
        """Those with a sound manifest and this identity, by step: all that a save may delete."""
        scores: dict[str, float | None] = {}
        for path in self.list():
            try:
                scores[path.name.removeprefix(ASIDE)] = decode(self._manifest(path)["score"], {})
            except _Flaw:
                continue
        return scores

    def _intact(self, path: Path) -> bool:
        try:
            self._inspect(path)
        except _Flaw:
            return False
        return True

    def _refuse(self, path: Path, flaw: _Flaw) -> NoReturn:
        others = (p for p in reversed(self.list()) if p != path and self._intact(p))
        if other := next(others, None):
            name = other.name.removeprefix(ASIDE)
            advice = f"{name} is intact: resume with --checkpoint {name}."
        else:
            advice = f"No other checkpoint in {self.folder} can be loaded: start anew elsewhere."
        remedy = flaw.remedy or "Bring the file back from a copy if there is one."
        raise Refusal(
            f"{flaw.file} {flaw.problem}: nothing was loaded from {path.name}. {remedy} {advice}"
        ) from flaw.__cause__

    def _inspect(self, path: Path) -> dict[str, Any]:
        """The manifest, after every file was found to be as it says."""
        manifest = self._manifest(path)
        for name, entry in manifest["files"].items():
            file = path / name
            try:
                size = file.stat().st_size
                if size != entry["size"]:
                    raise _Flaw(file, f"is {size} bytes long instead of {entry['size']}")
                if _sha256(file) != entry["sha256"]:
                    raise _Flaw(file, "is damaged (its sha256 is not the manifest's)")
            except OSError as error:
                raise _unreadable(file, error) from error
        return manifest

    def _manifest(self, path: Path) -> dict[str, Any]:
        file = path / MANIFEST
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise _unreadable(file, error) from error
        try:
            manifest = parse(raw)
            number, identity = manifest["format"], manifest["identity"]
            sound = raw == _seal({k: v for k, v in manifest.items() if k != "sha256"})
        except (ValueError, TypeError, KeyError) as error:
            raise _Flaw(file, "is damaged (it cannot be parsed)") from error
        if number != FORMAT:
            remedy = "Use the version of tianji that wrote it."
            raise _Flaw(file, f"has format {number}, this tianji reads {FORMAT}", remedy)
        if not sound:
            raise _Flaw(file, "is damaged (its sha256 is not that of its content)")
        if identity != self.identity:
            raise _Flaw(
                file,
                f"is of another config (identity {identity}, this run's is {self.identity})",
                "Resume it with the config that it was made with, or start anew in another folder.",
            )
        return dict(manifest)


def _best(scores: Mapping[str, float | None]) -> str | None:
    """The first of those with the highest score."""
    real = {name: s for name, s in scores.items() if s is not None and not math.isnan(s)}
    return min(real, key=lambda name: (-real[name], int(name[5:])), default=None)


def _write(folder: Path, part: str, arrays: Leaves, text: bytes) -> list[tuple[str, Any]]:
    """Writes the two files of a part; gives their names, sizes and hashes."""
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype.str not in NATIVE and array.dtype != BFLOAT16:
            plain[name] = array.reshape(-1).view(np.uint8)
    document, tensors = folder / f"{part}.json", folder / f"{part}.safetensors"
    _write_bytes(document, text)
    save_file(plain, tensors)
    shutil.copymode(document, tensors)  # safetensors makes its files readable to the owner alone
    _sync(tensors)
    return [
        (document.name, {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}),
        (tensors.name, {"size": tensors.stat().st_size, "sha256": _sha256(tensors)}),
    ]


def _read(folder: Path, part: str) -> State:
    document, tensors = folder / f"{part}.json", folder / f"{part}.safetensors"
    try:
        return dict(decode(parse(document.read_bytes()), load_file(tensors)))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _Flaw(document, f"and its safetensors cannot be read ({error})") from error


def save_file(arrays: Leaves, file: Path) -> None:
    """As safetensors.numpy does, which does not know bfloat16."""
    specs = {
        name: TensorSpec(
            dtype="bfloat16" if array.dtype == BFLOAT16 else array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    serialize_file(specs, file, metadata=None)


def load_file(file: Path) -> Leaves:
    with safe_open(file, framework="np") as tensors, file.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
        arrays: Leaves = {}
        for name in tensors.keys():  # noqa: SIM118  it is no mapping
            about = header[name]
            if about["dtype"] == "BF16":
                begin, end = about["data_offsets"]
                flat = np.fromfile(file, BFLOAT16, (end - begin) // 2, offset=8 + size + begin)
                arrays[name] = flat.reshape(about["shape"])
            else:
                arrays[name] = tensors.get_tensor(name)
    return arrays


def _seal(content: dict[str, Any]) -> bytes:
    """A manifest's bytes: its content, and the hash of that."""
    return dump(content | {"sha256": hashlib.sha256(dump(content)).hexdigest()})


def _unreadable(file: Path, error: OSError) -> _Flaw:
    missing = isinstance(error, FileNotFoundError)
    return _Flaw(file, "is missing" if missing else f"cannot be read ({error.strerror})")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    _sync(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
