"""Checkpoints: exact, whole or absent, and never silently wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file
from thorough import examples

from tianji import checkpoint
from tianji.checkpoint import CheckpointNotSaved, Checkpoints
from tianji.errors import Refusal
from tianji.role import State, generator, generator_state, load_generator_state
from tianji.types import EPISODE, Array


def store(folder: Path, keep: int = 3, identity: str = "abc") -> Checkpoints:
    return Checkpoints(folder, keep, identity)


def parts(step: int, size: int = 4) -> dict[str, State]:
    return {
        "policy": {"weights": np.full(size, step, np.float32), "version": step},
        "run": {"steps": step},
    }


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def step_name(step: int) -> str:
    return f"step_{step:012d}"


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
        assert b.flags.writeable
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    else:
        assert a == b


def round_trip(folder: Path, state: State) -> State:
    kept = store(folder)
    kept.save(1, {"part": state}, {"note": "x"}, None)
    return kept.load().parts["part"]


any_text = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["$", "a/b", "a.b", "a%2Fb", "/", "", "__metadata__", "\ud83d\ude00", "\ud800"]
)
any_array = hnp.arrays(
    hnp.scalar_dtypes() | hnp.array_dtypes(allow_subarrays=True),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | any_text
values = st.recursive(
    plain | any_array,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


@examples(200)
@given(st.dictionaries(any_text, values, max_size=4))
def test_any_state_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, state: State
) -> None:
    folder = tmp_path_factory.mktemp("round")
    assert_same(state, round_trip(folder, state))
    shutil.rmtree(folder)


def test_odd_arrays_come_back_exactly(tmp_path: Path) -> None:
    episodes = np.zeros(3, EPISODE)
    episodes["return"], episodes["length"] = [1.5, np.nan, -np.inf], [1, 2, 3]
    aligned = np.dtype([("a", "i1"), ("b", "f8", (2, 3)), ("c", [("d", ">u2")])], align=True)
    state = {
        "episodes": episodes,
        "aligned": np.zeros((2, 0, 3), aligned),
        "one": np.ones((), aligned),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::-3],
        "structured and strided": np.zeros((4, 4), EPISODE)[::2, ::2],
        "zero dimensions": np.array(3.5, np.float16),
        "empty": np.zeros((0, 7), np.uint64),
        "flag": np.array(True),
        "big endian": np.arange(3, dtype=">f4"),
        "nan": np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64),
    }
    assert_same(state, round_trip(tmp_path, state))


def test_odd_numbers_come_back_exactly(tmp_path: Path) -> None:
    state = {
        "large": 10**5000,
        "negative": -(2**128) - 1,
        "edge": [2**63 - 1, 2**63, -(2**63)],
        "floats": [math.inf, -math.inf, math.nan, -math.nan, -0.0, 5e-324, 0.1],
        "not the same": [True, 1, 1.0],
    }
    assert_same(state, round_trip(tmp_path, state))


def test_paths_that_look_alike_stay_apart(tmp_path: Path) -> None:
    a, b, c, d = (np.full(1, i) for i in range(4))
    state: State = {"a": {"b": a, "b/c": b}, "a/b": c, "a%2Fb": d, "x": [a, {"0": b}]}
    assert_same(state, round_trip(tmp_path, state))


def test_a_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    rng, other = generator(1, "actor"), generator(2, "actor")
    load_generator_state(other, round_trip(tmp_path, generator_state(rng)))
    assert rng.random(5).tolist() == other.random(5).tolist()


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"b": (1, 2)}}, "part/a/b: a tuple"),
        ({"a": [0, {1, 2}]}, "part/a/1: a set"),
        ({"a": np.float32(1)}, "part/a: a float32"),
        ({"a": np.float64(1)}, "part/a: a float64"),
        ({"a": b"x"}, "part/a: a bytes"),
        ({"a": np.ma.masked_array([1])}, "part/a: a MaskedArray"),
        ({"a": np.array([None])}, "part/a: an array of dtype object"),
        ({"a": {1: 2}}, "part/a: the key 1"),
    ],
)
def test_what_would_come_back_different_is_refused_by_its_path_before_anything_is_written(
    tmp_path: Path, state: State, path: str
) -> None:
    with pytest.raises(TypeError, match=path):
        store(tmp_path / "c").save(1, {"part": state}, {}, None)
    assert not (tmp_path / "c").exists()


def test_meta_holds_no_arrays(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="meta/a: a ndarray"):
        store(tmp_path).save(1, {}, {"a": np.zeros(1)}, None)


@pytest.mark.parametrize("name", ["", "manifest", "../x", "a.b", "A"])
def test_a_part_that_cannot_name_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        store(tmp_path).save(1, {name: {}}, {}, None)


def test_the_files_are_plain_and_their_sizes_and_hashes_are_in_the_manifest(tmp_path: Path) -> None:
    path = store(tmp_path).save(12345, parts(7), {"commit": "c", "rate": math.inf}, 2.5)
    assert path == tmp_path / "step_000000012345"
    files = ["policy.json", "policy.safetensors", "run.json", "run.safetensors"]
    assert names(path) == ["MANIFEST.json", *files]
    manifest = json.loads((path / "MANIFEST.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["identity"]) == (2, 12345, "abc")
    assert {k: v["size"] for k, v in manifest["files"].items()} == {
        f: (path / f).stat().st_size for f in files
    }
    assert load_file(path / "policy.safetensors")["/weights"].tolist() == [7.0] * 4
    modes = {stat.S_IMODE((path / f).stat().st_mode) for f in names(path)}
    assert len(modes) == 1
    loaded = store(tmp_path).load()
    assert (loaded.path, loaded.step, loaded.score) == (path, 12345, 2.5)
    assert loaded.meta == {"commit": "c", "rate": math.inf}
    assert set(loaded.parts) == {"policy", "run"}


def test_the_links_are_relative_so_that_a_moved_run_still_loads(tmp_path: Path) -> None:
    store(tmp_path / "a").save(1, parts(1), {}, 1.0)
    (tmp_path / "a").rename(tmp_path / "b")
    assert os.readlink(tmp_path / "b" / "latest") == os.readlink(tmp_path / "b" / "best")
    assert os.readlink(tmp_path / "b" / "latest") == step_name(1)
    assert store(tmp_path / "b").load("best").step == 1


# What is kept.


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=2)
    for step, score in enumerate([1.0, 5.0, math.nan, None, 5.0, -math.inf], start=1):
        kept.save(step, parts(step), {}, score)
    assert [p.name for p in kept.list()] == [step_name(s) for s in (2, 5, 6)]
    assert names(tmp_path) == ["best", "latest", *(step_name(s) for s in (2, 5, 6))]
    assert (kept.load("latest").step, kept.load("best").step) == (6, 2)


def test_a_better_one_frees_the_best_before(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=1)
    for step, score in enumerate([1.0, None, 3.0, 2.0], start=1):
        kept.save(step, parts(step), {}, score)
    assert [p.name for p in kept.list()] == [step_name(3), step_name(4)]


def test_without_scores_there_is_no_best(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(1, parts(1), {}, None)
    assert not (tmp_path / "best").is_symlink()
    with pytest.raises(Refusal, match=r"has a score.*--checkpoint latest"):
        kept.load("best")


def test_a_run_that_went_back_deletes_neither_its_new_ones_nor_what_lies_ahead(
    tmp_path: Path,
) -> None:
    kept = store(tmp_path, keep=2)
    for step in (10, 20, 30, 11, 12, 13):
        kept.save(step, parts(step), {}, None)
    assert [p.name for p in kept.list()] == [step_name(s) for s in (12, 13, 20, 30)]
    assert kept.load().step == 13


def test_checkpoints_of_another_config_are_never_deleted(tmp_path: Path) -> None:
    store(tmp_path, identity="other").save(1, parts(1), {}, 9.0)
    kept = store(tmp_path, keep=1)
    for step in (2, 3, 4):
        kept.save(step, parts(step), {}, 0.0)
    assert [p.name for p in kept.list()] == [step_name(s) for s in (1, 2, 4)]
    assert kept.load("best").step == 2


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep = 0"):
        store(tmp_path, keep=0)


def test_steps_beyond_the_padding_are_still_in_order(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=1)
    for step in (999_999_999_999, 1_000_000_000_000):
        kept.save(step, parts(1), {}, None)
    assert [p.name for p in kept.list()] == [step_name(1_000_000_000_000)]


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(1, parts(1), {"try": 1}, 5.0)
    kept.save(2, parts(2), {}, 3.0)
    kept.save(1, parts(1) | {"more": {}}, {"try": 2}, 1.0)
    assert names(tmp_path) == ["best", "latest", step_name(1), step_name(2)]
    assert kept.load().meta == {"try": 2}
    assert kept.load("best").step == 2


# Damage.


@pytest.fixture
def two(tmp_path: Path) -> tuple[Checkpoints, Path]:
    kept = store(tmp_path)
    kept.save(4096, parts(1), {}, None)
    return kept, kept.save(8192, parts(2), {}, None)


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1 << (at % 8)
    file.write_bytes(raw)


FILES = ["MANIFEST.json", "policy.json", "policy.safetensors", "run.json", "run.safetensors"]


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_byte_is_noticed_and_the_intact_one_named(
    two: tuple[Checkpoints, Path], file: str
) -> None:
    kept, path = two
    sound = (path / file).read_bytes()
    for at in range(len(sound)):
        flip(path / file, at)
        with pytest.raises(Refusal) as refusal:
            kept.load()
        message = str(refusal.value)
        assert str(path / file) in message
        assert "nothing was loaded" in message
        intact = step_name(4096)
        assert f"{intact} is intact: resume with --checkpoint {intact}" in message
        (path / file).write_bytes(sound)
    assert kept.load().step == 8192


@pytest.mark.parametrize("file", FILES)
def test_every_truncation_and_addition_is_noticed(two: tuple[Checkpoints, Path], file: str) -> None:
    kept, path = two
    sound = (path / file).read_bytes()
    for raw in [*(sound[:n] for n in range(len(sound))), sound + b"\n", sound + sound]:
        (path / file).write_bytes(raw)
        length = f"is {len(raw)} bytes long instead of {len(sound)}"
        with pytest.raises(Refusal, match=file if file == "MANIFEST.json" else f"{file} {length}"):
            kept.verify(path)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(two: tuple[Checkpoints, Path], file: str) -> None:
    kept, path = two
    (path / file).unlink()
    with pytest.raises(Refusal, match=f"{file} is missing.*{step_name(4096)} is intact"):
        kept.load()


def test_a_file_that_cannot_be_read_is_named(two: tuple[Checkpoints, Path]) -> None:
    kept, path = two
    (path / "run.json").unlink()
    (path / "run.json").mkdir()
    with pytest.raises(Refusal, match=r"run\.json"):
        kept.load()


def test_the_one_named_instead_is_the_newest_that_is_itself_intact(tmp_path: Path) -> None:
    kept = store(tmp_path, keep=9)
    paths = [kept.save(step, parts(step), {}, None) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        flip(path / "policy.safetensors", -1)
    with pytest.raises(Refusal, match=f"--checkpoint {step_name(2)}"):
        kept.load()
    for path in paths[:2]:
        flip(path / "run.json", 2)
    with pytest.raises(Refusal, match="No other checkpoint"):
        kept.load()


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that was changed by someone who knows how to seal it."""
    content = json.loads((path / "MANIFEST.json").read_bytes())
    del content["sha256"]
    (path / "MANIFEST.json").write_bytes(checkpoint._seal(content | changes))


def test_an_unknown_format_is_refused(two: tuple[Checkpoints, Path]) -> None:
    kept, path = two
    rewrite(path, format=3)
    with pytest.raises(Refusal, match=f"has format 3, this tianji reads 2.*{step_name(4096)}"):
        kept.load()


def test_a_sealed_manifest_is_believed_so_the_refusals_above_come_from_the_seal(
    two: tuple[Checkpoints, Path],
) -> None:
    kept, path = two
    rewrite(path, meta={"changed": True})
    assert kept.load().meta == {"changed": True}


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    store(tmp_path, identity="abc").save(1, parts(1), {}, None)
    with pytest.raises(Refusal, match=r"another config.*identity abc.*is xyz.*with the config"):
        store(tmp_path, identity="xyz").load()


# Which one.


def test_each_can_be_loaded_by_its_name(two: tuple[Checkpoints, Path]) -> None:
    kept, _ = two
    assert kept.load(step_name(4096)).step == 4096


@pytest.mark.parametrize(
    ("which", "meant"),
    [("step_000000004097", step_name(4096)), ("lastest", "latest"), ("../etc", "")],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    two: tuple[Checkpoints, Path], which: str, meant: str
) -> None:
    kept, _ = two
    with pytest.raises(Refusal, match=f'Did you mean "{meant}"' if meant else "There are: step_"):
        kept.load(which)


def test_no_checkpoint_at_all_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(Refusal, match="there is no checkpoint"):
            store(folder).load()
        assert store(folder).list() == []
    assert names(tmp_path) == []


def dangle(link: Path) -> None:
    link.unlink()
    link.symlink_to(step_name(77))


def outside(link: Path) -> None:
    link.unlink()
    link.symlink_to("/")


@pytest.mark.parametrize("spoil", [Path.unlink, dangle, outside])
def test_without_a_usable_link_the_newest_intact_one_is_loaded(
    two: tuple[Checkpoints, Path], spoil: Callable[[Path], None]
) -> None:
    kept, path = two
    spoil(kept.folder / "latest")
    assert kept.load().step == 8192
    (path / "run.json").unlink()
    assert kept.load().step == 4096


def test_without_a_usable_link_the_best_is_found_by_its_score(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for step, score in [(1, 1.0), (2, 3.0), (3, 2.0)]:
        kept.save(step, parts(step), {}, score)
    dangle(tmp_path / "best")
    assert kept.load("best").step == 2


# Killed writers.

WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from tianji.checkpoint import Checkpoints
from tianji.errors import Refusal
kept = Checkpoints(Path(sys.argv[1]), 2, "abc")
try:
    loaded = kept.load()
except Refusal as refusal:
    assert "there is no checkpoint" in str(refusal), refusal
    step = 0
else:
    step = loaded.step
    assert (loaded.parts["policy"]["weights"] == step).all(), step
print("ready", flush=True)
for n in itertools.count(step * 2):
    state = {"weights": np.full(50_000, n // 2, np.float32)}
    kept.save(n // 2, {"policy": state, "run": {"n": n}}, {}, float(n % 7))
    print(n // 2, flush=True)
"""


def test_a_writer_that_is_killed_at_any_moment_never_spoils_the_latest(tmp_path: Path) -> None:
    """Each step is saved twice, so that replacing is killed as well as adding."""
    rng = random.Random(0)
    reached = -1
    for _ in range(20):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.15))
            writer.send_signal(signal.SIGKILL)
            printed = writer.stdout.read().split()
        assert writer.returncode == -signal.SIGKILL
        reached = max([reached, *map(int, printed)])
        if reached < 0:
            continue
        loaded = store(tmp_path).load()
        assert loaded.step >= reached
        assert (loaded.parts["policy"]["weights"] == loaded.step).all()
        for path in store(tmp_path).list():
            store(tmp_path).verify(path)
        reached = loaded.step
    assert reached > 0


OPERATIONS = ["rename", "replace", "symlink_to", "mkdir", "unlink", "_sync", "save_file", "rmtree"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts what a save does to the disk, and stops it after `limit` such operations."""
    seen = {"done": 0, "limit": 10**9}

    def counted(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seen["done"] >= seen["limit"]:
                raise Killed
            seen["done"] += 1
            return f(*args, **kwargs)

        return call

    for name in OPERATIONS:
        where: Any = Path if hasattr(Path, name) else shutil if name == "rmtree" else checkpoint
        monkeypatch.setattr(where, name, counted(getattr(where, name)))
    return seen


@pytest.mark.parametrize("step", [2, 3], ids=["replacing the latest", "adding one"])
def test_a_save_cut_off_after_any_operation_leaves_one_that_loads_and_the_next_save_tidies_up(
    tmp_path: Path, count: dict[str, int], step: int
) -> None:
    for limit in range(100):
        folder = tmp_path / str(limit)
        kept = store(folder, keep=2)
        for before in (1, 2):
            kept.save(before, parts(before), {"new": False}, float(before))
        count.update(done=0, limit=limit)
        try:
            kept.save(step, parts(step), {"new": True}, float(step))
            cut = False
        except Killed:
            cut = True
        count["limit"] = 10**9
        loaded = store(folder).load()
        assert loaded.step in (2, step)
        assert loaded.parts["policy"]["version"] == loaded.step
        assert loaded.meta == {"new": loaded.meta["new"]}
        assert store(folder).load("best").step in (2, step)
        for path in store(folder).list():
            store(folder).verify(path)
        again = store(folder, keep=2)
        again.save(4, parts(4), {}, 0.0)
        assert not [n for n in names(folder) if n.startswith(".")]
        assert again.load().step == 4
        if not cut:
            break
    assert limit > 15


def test_leftovers_of_killed_writers_are_ignored_by_load_and_removed_by_save(
    two: tuple[Checkpoints, Path],
) -> None:
    kept, path = two
    shutil.copytree(path, kept.folder / f".partial_{step_name(9000)}")
    (kept.folder / ".partial_latest").symlink_to(step_name(9000))
    before = names(kept.folder)
    assert store(kept.folder).load().step == 8192
    assert names(kept.folder) == before, "a reader changes nothing"
    kept.save(9001, parts(3), {}, None)
    assert not [n for n in names(kept.folder) if n.startswith(".")]


def test_a_replacement_that_was_cut_between_its_renames_is_read_and_then_undone(
    two: tuple[Checkpoints, Path],
) -> None:
    kept, path = two
    path.rename(kept.folder / f".aside_{path.name}")
    assert kept.load().step == kept.load(path.name).step == 8192
    kept.save(9000, parts(3), {}, None)
    assert path.is_dir()
    kept.verify(path)


# A disk that does not take it.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_what_was_there_and_says_what_was_needed(small_disk: Path) -> None:
    kept = store(small_disk / "c")
    kept.save(1, parts(1, size=100_000), {}, 1.0)
    before = {p: p.stat().st_mtime_ns for p in sorted((small_disk / "c").rglob("*"))}
    for step in (1, 2):
        with pytest.raises(CheckpointNotSaved) as not_saved:
            kept.save(step, parts(step, size=1_000_000), {}, 2.0)
        message = str(not_saved.value)
        assert "No space left" in message
        assert "4,000," in message
        assert f"Kept: {step_name(1)}; latest is {step_name(1)}" in message
        assert "Training can go on" in message
        assert before == {p: p.stat().st_mtime_ns for p in sorted((small_disk / "c").rglob("*"))}
        assert kept.load().step == kept.load("best").step == 1
    kept.save(3, parts(3, size=100_000), {}, 2.0)
    assert kept.load().step == 3


def test_a_disk_full_to_the_last_byte_keeps_the_latest_wherever_the_room_ends(
    small_disk: Path,
) -> None:
    kept = store(small_disk / "c", keep=1)
    kept.save(1, parts(1, size=1000), {}, None)
    filler = small_disk / "filler"
    outcomes = set()
    step = 1
    for spare in range(0, 96 * 1024, 4096):
        filler.unlink(missing_ok=True)
        room = shutil.disk_usage(small_disk).free - spare
        filler.write_bytes(b"x" * room)
        latest = kept.load().step
        step += 1
        try:
            kept.save(step, parts(step, size=1000), {}, None)
            outcomes.add(True)
            latest = step
        except CheckpointNotSaved:
            outcomes.add(False)
        assert kept.load().step == latest
        assert not [n for n in names(kept.folder) if n.startswith(".")]
    assert outcomes == {False, True}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["_sync", "rename", "symlink_to", "mkdir", "replace"])
def test_an_error_of_the_disk_anywhere_keeps_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, operation: str
) -> None:
    kept = store(tmp_path)
    kept.save(1, parts(1), {}, None)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path if hasattr(Path, operation) else checkpoint, operation, fails)
        with pytest.raises(CheckpointNotSaved, match=os.strerror(number)):
            kept.save(1, parts(1), {}, None)
    assert kept.load().step == 1
    kept.save(2, parts(2), {}, None)
    assert names(tmp_path) == ["latest", step_name(1), step_name(2)]


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from tianji.checkpoint import Checkpoints
size = 200_000_000
state = {"frames": np.ones(size, np.uint8), "episodes": np.ones(size // 8, "f4,i4")}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
Checkpoints(Path(sys.argv[1]), 1, "abc").save(1, {"store": state}, {}, None)
print((peak() - before) / (2 * size))
"""


def test_saving_a_large_store_copies_nothing_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    share = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(share) < 0.2


def test_a_loaded_array_is_its_own_memory(tmp_path: Path) -> None:
    weights: Array = round_trip(tmp_path, {"w": np.zeros(3)})["w"]
    weights += 1
    assert store(tmp_path).load().parts["part"]["w"].tolist() == [0, 0, 0]
