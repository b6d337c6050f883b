from __future__ import annotations

import errno
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tianji.fault import Fault
from tianji.histogram import Histogram
from tianji.rebalance import Change
from tianji.record import Curve, Recorder, progress
from tianji.types import EPISODE, Array, Report
from tianji.verdict import Verdict
from tianji.view.status import SilentView, Status, View
from tianji.view.terminal import PlainView


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watcher(View):
    """A view that remembers what it was told."""

    def __init__(self, every: float = math.inf) -> None:
        self.every = every
        self.shown: list[Status] = []
        self.lines: list[str] = []

    def begin(self, title: str, facts: Mapping[str, object]) -> None: ...

    def show(self, status: Status) -> None:
        self.shown.append(status)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def end(self, result_lines: Iterable[str] = ()) -> None: ...


def episodes(*pairs: tuple[float, int]) -> Array:
    return np.array([(*pair, -1) for pair in pairs], EPISODE)


def report(
    version: int,
    *,
    of: Array | None = None,
    metrics: Mapping[str, float] | None = None,
    staleness: Iterable[int] = (),
    steps: int = 10,
    reuse: int = 4,
) -> Report:
    received = version * steps
    return Report(
        version=version,
        produced=received + 5,
        received=received,
        consumed=received * reuse,
        episodes=episodes() if of is None else of,
        metrics=metrics or {},
        staleness=np.array(list(staleness), np.int64),
    )


def recorder(folder: Path, clock: Clock, view: View | None = None, **kwargs: Any) -> Recorder:
    limits = kwargs.pop("limits", {"steps": 1000})
    return Recorder(folder, view or SilentView(), limits, clock=clock, **kwargs)


def rows(folder: Path) -> list[dict[str, float]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator: Any = EventAccumulator
    board = accumulator(str(folder / "tb"))
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in tags}


def test_a_row_holds_rates_means_and_staleness_of_its_interval(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock, started=97.0)
    clock.now = 102.0
    record.begin()
    record.update(report(1, of=episodes((3.0, 7), (5.0, 8)), metrics={"loss": 1.0}, staleness=[0]))
    record.update(report(2, metrics={"loss": 3.0, "kl": 0.5}, staleness=[2, 4]))
    clock.now = 104.0
    record.tick({"learner/update": 0.75})
    record.update(report(5, metrics={"loss": 8.0}, staleness=[9]))
    clock.now = 105.0
    record.tick()
    record.close()

    first, second = rows(tmp_path)
    assert first == {
        "step": 20,
        "wall_s": 7.0,
        "updates": 2,
        "episodes": 2,
        "rollout/ep_rew_mean": 4.0,
        "rollout/ep_len_mean": 7.5,
        "train/n_updates": 2.0,
        "train/loss": 2.0,
        "train/kl": 0.5,
        "time/fps": 10.0,
        "time/total_timesteps": 20.0,
        "time/time_elapsed": 7.0,
        "flow/produced_sps": 12.5,
        "flow/received_sps": 10.0,
        "flow/consumed_sps": 40.0,
        "flow/replay_ratio": 4.0,
        "staleness/mean": 2.0,
        "staleness/p95": pytest.approx(np.percentile([0, 2, 4], 95)),
        "staleness/max": 4.0,
        "staleness/freshness": 1.0,
        "staleness/P": 1.0,
        "staleness/filtered": 0.0,
        "util/learner/update": 0.75,
    }
    assert second["train/loss"] == 8.0
    assert "train/kl" not in second
    assert second["flow/received_sps"] == 30.0
    assert second["time/fps"] == pytest.approx(50 / 3)
    assert (second["staleness/mean"], second["staleness/max"]) == (9.0, 9.0)


def test_tensorboard_reads_the_same_values_at_the_same_steps_as_the_rows(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    rng = np.random.default_rng(0)
    for version in range(1, 40):
        of = episodes((float(rng.normal()), int(rng.integers(1, 99))))
        record.update(
            report(version, of=of, metrics={"loss": rng.normal()}, staleness=[version % 7])
        )
        clock.now += 0.3
        record.tick({"actor/simulate": rng.random()})
    record.evaluation(390, 39, episodes((1.0, 10), (2.0, 30)))
    record.close()

    written = rows(tmp_path)
    assert len(written) > 9
    board = scalars(tmp_path)
    head = {"step", "wall_s", "updates", "episodes"}
    assert set(board) == {tag for row in written for tag in row} - head
    for tag, points in board.items():
        expected = [(row["step"], row[tag]) for row in written if tag in row]
        assert [step for step, _ in points] == [step for step, _ in expected]
        np.testing.assert_allclose(
            [value for _, value in points], [value for _, value in expected], rtol=1e-6
        )


def test_an_evaluation_is_written_at_once_and_said(tmp_path: Path) -> None:
    view = Watcher()
    record = recorder(tmp_path, Clock(), view)
    record.evaluation(640, 5, episodes((10.0, 7), (20.0, 8)))
    (row,) = rows(tmp_path)
    assert (row["step"], row["updates"]) == (640, 5)
    assert (row["eval/mean_reward"], row["eval/mean_ep_length"]) == (15.0, 7.5)
    assert scalars(tmp_path)["eval/mean_reward"] == [(640, 15.0)]
    assert view.lines == ["evaluated version 5 at 640 steps: return 15.00, 2 episodes"]


def test_a_run_shorter_than_the_interval_has_one_row(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    record.update(report(1, metrics={"loss": 2.0}))
    clock.now += 0.01
    record.tick()
    assert not (tmp_path / "metrics.jsonl").exists()
    record.close()
    record.close()
    (row,) = rows(tmp_path)
    assert row["train/loss"] == 2.0
    assert row["flow/received_sps"] == pytest.approx(1000)


def test_closing_repeats_no_row_that_was_already_written(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    record.update(report(1))
    clock.now += 1.0
    record.tick()
    record.close()
    assert len(rows(tmp_path)) == 1


def test_a_run_that_never_reported_leaves_no_row(tmp_path: Path) -> None:
    recorder(tmp_path, Clock()).close()
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    of = episodes((math.inf, 1), (-math.inf, 2))
    record.update(report(1, of=of, metrics={"bad": math.nan, "worse": math.inf, "good": 1.0}))
    clock.now += 1.0
    record.tick({"actor/simulate": math.nan})
    (row,) = rows(tmp_path)
    missing = {"train/bad", "train/worse", "rollout/ep_rew_mean", "util/actor/simulate"}
    assert not missing & set(row)
    assert row["train/good"] == 1.0
    assert record.summary()["return_mean"] is None
    assert record.summary()["length_mean"] == 1.5


def test_the_window_is_exactly_the_mean_of_the_last_100_episodes(tmp_path: Path) -> None:
    record = recorder(tmp_path, Clock())
    assert record.progress.return_mean is None
    assert record.progress.length_mean is None
    rng = np.random.default_rng(1)
    seen: deque[tuple[float, int]] = deque(maxlen=100)
    total = 0
    for version in range(1, 400):
        # magnitudes at which a running sum of floats would drift
        count = int(rng.choice([0, 0, 1, 3, 250], p=[0.3, 0.3, 0.2, 0.19, 0.01]))
        of = np.zeros(count, EPISODE)
        of["return"] = rng.normal(size=count) * 10.0 ** rng.integers(-8, 9)
        of["length"] = rng.integers(1, 2**31 - 1, count)
        record.update(report(version, of=of))
        seen.extend((float(e["return"]), int(e["length"])) for e in of)
        total += count
        if seen:
            assert record.progress.return_mean == math.fsum(r for r, _ in seen) / len(seen)
            assert record.progress.length_mean == sum(n for _, n in seen) / len(seen)
    assert record.progress.episodes == record.summary()["episodes"] == total


def test_staleness_below_1024_is_exact() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 2, 19, 20, 21, 1000, 50_000):
        values = rng.integers(0, 1024, size)
        histogram = Histogram()
        for part in np.array_split(values, max(1, size // 37)):
            histogram.add(part)
        spread = histogram.spread()
        assert spread is not None
        assert spread.mean == pytest.approx(values.mean(), rel=1e-12)
        assert spread.p95 == pytest.approx(np.percentile(values, 95), rel=1e-12)
        assert spread.max == values.max()


def test_large_staleness_is_within_two_percent_in_bounded_memory() -> None:
    rng = np.random.default_rng(3)
    values = (10 ** rng.uniform(0, 12, 20_000)).astype(np.int64)
    histogram = Histogram()
    histogram.add(values)
    histogram.add(np.array([2**62]))
    spread = histogram.spread()
    assert spread is not None
    everything = np.append(values, 2**62)
    assert spread.p95 == pytest.approx(np.percentile(everything, 95), rel=0.02)
    assert spread.mean == pytest.approx(sum(everything.tolist()) / len(everything), rel=1e-12)
    assert spread.max == 2**62
    assert len(histogram.counts) == Histogram.BINS


def test_no_bin_is_wider_than_two_percent() -> None:
    edges = Histogram.EXACT * Histogram.RATIO ** np.arange(Histogram.BINS - Histogram.EXACT)
    inside = (edges[:-1] + edges[1:]) / 2
    for low, value, high in list(zip(edges, inside, edges[1:], strict=False))[:1000:50]:
        histogram = Histogram()
        histogram.add(np.array([int(value)] * 100 + [2**60]))
        spread = histogram.spread()
        assert spread is not None
        assert low <= spread.p95 <= high <= low * 1.0200001


def test_a_histogram_copies_what_it_is_given() -> None:
    histogram = Histogram()
    values = np.array([1, 2, 3])
    histogram.add(values)
    values[:] = 1000
    spread = histogram.spread()
    assert spread is not None
    assert spread.max == 3


def test_the_largest_staleness_is_kept_when_smaller_ones_follow() -> None:
    histogram = Histogram()
    histogram.add(np.full(Histogram.ROOM, 700))
    histogram.add(np.full(Histogram.ROOM + 1, 5))
    histogram.add(np.array([6]))
    spread = histogram.plus(Histogram()).spread()
    assert spread is not None
    assert spread.max == 700


def test_a_version_from_the_future_is_refused() -> None:
    histogram = Histogram()
    histogram.add(np.array([3, -1]))
    with pytest.raises(ValueError, match="newer than the learner"):
        histogram.spread()


def test_the_summary_is_of_the_whole_run(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    clock.now = 110.0
    record.begin()
    stale = [0, 1, 1, 2, 3, 5, 8, 2000]
    for version in range(1, 9):
        clock.now += 1.0
        record.update(report(version, of=episodes((1.0, 2)), staleness=[stale[version - 1]]))
        record.tick()
    clock.now = 120.0
    summary = record.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["episodes"] == 8
    assert summary["return_mean"] == 1.0
    assert summary["length_mean"] == 2.0
    assert summary["steps_per_s"] == {"produced": 8.5, "received": 8.0, "consumed": 32.0}
    assert summary["staleness"]["mean"] == 252.5
    assert summary["staleness"]["max"] == 2000
    assert summary["staleness"]["p95"] == pytest.approx(np.percentile(stale, 95), rel=0.02)
    assert "rows_lost" not in summary


def test_a_summary_before_the_first_episode_says_none(tmp_path: Path) -> None:
    summary = recorder(tmp_path, Clock()).summary()
    assert summary["return_mean"] is None
    assert summary["length_mean"] is None
    assert summary["staleness"] is None


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint would keep it: JSON, and arrays beside it."""

    def split(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: split(v) for k, v in value.items()}
        return value.copy() if isinstance(value, np.ndarray) else json.loads(json.dumps(value))

    result = split(state)
    assert isinstance(result, dict)
    return result


def test_a_resumed_run_continues_totals_and_starts_rates_anew(tmp_path: Path) -> None:
    clock = Clock()
    whole = recorder(tmp_path / "whole", clock)
    first = recorder(tmp_path / "run", clock)

    def feed(version: int) -> Report:
        of = episodes((version * 1.1, version))
        return report(version, of=of, staleness=[version % 5, version * 7])

    for version in range(1, 151):
        clock.now += 0.1
        for record in (whole, first):
            record.update(feed(version))
            record.tick()
    state = through_json(first.state())
    # what comes after the checkpoint is lost with the process
    for version in range(151, 171):
        clock.now += 0.1
        first.update(feed(version))
        first.tick()
    first.close()
    clock.now = 500.0
    second = recorder(tmp_path / "run", clock)
    second.load_state(state)
    second.begin()
    assert second.elapsed == pytest.approx(15.0)
    for version in range(151, 251):
        clock.now += 0.2
        for record in (whole, second):
            record.update(feed(version))
            record.tick()
    second.close()

    expected, summary = whole.summary(), second.summary()
    for key in ("episodes", "return_mean", "length_mean", "staleness"):
        assert summary[key] == expected[key]
    assert second.elapsed == pytest.approx(35.0)
    assert summary["steps_per_s"]["received"] == pytest.approx(50.0)
    assert rows(tmp_path / "run")[-1]["time/fps"] == pytest.approx(50.0)
    assert rows(tmp_path / "run")[-1]["time/time_elapsed"] == pytest.approx(35.0)

    assert len(list((tmp_path / "run" / "tb").iterdir())) == 2
    points = scalars(tmp_path / "run")["rollout/ep_rew_mean"]
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    assert min(steps) < 1500 < max(steps)
    reached = {row["step"] for row in rows(tmp_path / "run") if row["wall_s"] > 15.01}
    assert {step for step in steps if step > 1500} <= reached


def test_a_line_torn_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "wal')
    record = recorder(tmp_path, Clock())
    record.update(report(3))
    record.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 30]


def test_a_tick_before_anything_is_due_only_reads_the_clock(tmp_path: Path) -> None:
    clock = Clock()
    reads = 0

    def counted() -> float:
        nonlocal reads
        reads += 1
        return clock.now

    def util() -> dict[str, float]:
        raise AssertionError("nothing is due")

    record = Recorder(tmp_path, SilentView(), {}, clock=counted)
    reads = 0
    record.tick(util)
    assert reads == 1
    assert list(tmp_path.iterdir()) == []


def test_the_view_is_refreshed_at_its_own_pace(tmp_path: Path) -> None:
    clock = Clock()
    fast, slow = Watcher(0.125), Watcher(5.0)
    records = [recorder(tmp_path / name, clock, v) for name, v in (("a", fast), ("b", slow))]
    for version in range(1, 1001):
        clock.now = 100 + version / 100
        for record in records:
            record.update(report(version, staleness=[1]))
            record.tick({"learner/update": 1.0})
    assert 70 <= len(fast.shown) <= 80
    assert len(slow.shown) == 2
    assert slow.shown[0].util == {"learner/update": 1.0}
    for record in records:
        assert record.rows_lost == 0
    assert len(rows(tmp_path / "a")) == len(rows(tmp_path / "b")) == pytest.approx(10, abs=1)


def test_a_slow_view_gets_a_hundredth_of_the_time(tmp_path: Path) -> None:
    clock = Clock()

    class Slow(Watcher):
        def show(self, status: Status) -> None:
            super().show(status)
            clock.now += 0.5

    view = Slow(0.125)
    record = recorder(tmp_path, clock, view)
    while clock.now < 300:
        clock.now += 0.1
        record.tick()
    assert len(view.shown) in (4, 5)


def test_the_last_thing_shown_is_of_the_whole_run(tmp_path: Path) -> None:
    clock = Clock()
    view = Watcher()
    record = recorder(tmp_path, clock, view, limits={"steps": 400, "return": 10.0})
    for version, stale in ((1, 0), (2, 0), (3, 6)):
        clock.now += 1.0
        record.update(report(version, of=episodes((version * 2.0, 1)), staleness=[stale]))
        record.tick()
    record.close()
    status = view.shown[-1]
    assert status.received == 10.0
    assert status.staleness is not None
    assert (status.staleness.mean, status.staleness.max) == (2.0, 6)
    assert status.goals == ("steps 30 of 400", "return 4 of 10")
    assert status.fraction == pytest.approx((4 - 2) / (10 - 2))
    assert status.curve == ((10, 2.0), (20, 3.0), (30, 4.0))


def test_progress_towards_seconds_begins_with_the_training(tmp_path: Path) -> None:
    """As `stop.seconds` counts, whatever a run did before its first step."""
    clock, view = Clock(), Watcher()
    started = clock.now
    clock.now += 30.0
    record = recorder(tmp_path, clock, view, limits={"seconds": 20.0}, started=started)
    clock.now += 5.0
    record.update(report(1))
    record.tick()
    record.close()
    assert view.shown[-1].fraction == pytest.approx(0.25)
    assert view.shown[-1].elapsed == pytest.approx(35.0)


def test_progress_is_that_of_the_nearest_condition() -> None:
    counts: dict[str, float | None] = {
        "steps": 120_000,
        "updates": 30,
        "episodes": 9,
        "seconds": 61.0,
        "return": -312.0,
    }
    limits = {"steps": 500_000, "seconds": 600.0, "return": -100.0}
    fraction, goals = progress(limits, counts, first_return=-1000.0)
    assert goals == ("steps 120 k of 500 k", "time 1:01 of 10:00", "return -312 of -100")
    assert fraction == pytest.approx(688 / 900)
    assert progress(limits, counts | {"return": -2000.0}, -1000.0)[0] == pytest.approx(0.24)
    assert progress(limits, counts | {"return": -50.0}, -1000.0)[0] == 1.0
    assert progress(limits, counts | {"return": None}, None)[0] == pytest.approx(0.24)
    assert progress({}, counts, None) == (None, ())


def test_a_stop_condition_that_is_no_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"towards frames: the counts of a run are steps, "):
        recorder(tmp_path, Clock(), limits={"frames": 3})


def test_the_curve_keeps_few_points_over_the_whole_run() -> None:
    curve = Curve()
    for x in range(0, 1_000_000, 10):
        curve.add(x, float(x))
    places = np.array([x for x, _ in curve.points])
    assert len(places) < Curve.ROOM
    assert places[0] == 0
    assert places[-1] > 0.99 * 1_000_000
    assert np.diff(places).max() < 10_000
    assert all(x == y for x, y in curve.points)


def test_events_go_to_the_log_with_their_time_and_to_the_view(tmp_path: Path) -> None:
    view = Watcher()
    record = recorder(tmp_path, Clock(), view)
    record.event("checkpoint saved")
    record.close()
    record.event("one more — after the end")
    assert view.lines == ["checkpoint saved", "one more — after the end"]
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d checkpoint saved", first)
    assert second.endswith("one more — after the end")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs takes root; /dev/full is tested below either way")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while shutil.disk_usage(path.parent).free:
            file.write(b"x" * 512)


def test_a_full_disk_costs_rows_and_nothing_else(small_disk: Path) -> None:
    clock, view = Clock(), Watcher()
    folder = small_disk / "run"
    record = recorder(folder, clock, view)

    def train(versions: range) -> None:
        for version in versions:
            clock.now += 1.0
            record.update(report(version, metrics={"loss": 1.0}))
            record.tick()

    train(range(1, 4))
    ballast = small_disk / "ballast"
    fill(ballast)
    train(range(4, 40))
    lost = record.rows_lost
    assert lost > 20
    assert len(view.lines) == 1
    assert "No space left" in view.lines[0]
    record.event("said although the log cannot have it")
    ballast.unlink()
    train(range(40, 50))
    record.close()
    assert record.rows_lost == record.summary()["rows_lost"] == lost

    # what is on the disk is whole, before the gap and after it
    steps = [int(row["step"]) for row in rows(folder)]
    assert steps[:3] == [10, 20, 30]
    assert steps[-10:] == [version * 10 for version in range(40, 50)]
    assert len(steps) < 49
    board = [step for step, _ in scalars(folder)["train/loss"]]
    assert board[:3] == [10, 20, 30]
    assert board[-10:] == steps[-10:]
    assert len(list((folder / "tb").iterdir())) == 1


def test_a_device_that_is_always_full_loses_every_row(tmp_path: Path) -> None:
    clock, view = Clock(), Watcher()
    record = recorder(tmp_path, clock, view)
    for name in ("metrics.jsonl", "log.txt"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "tb").write_text("a file where the folder should be")
    for version in range(1, 6):
        clock.now += 1.0
        record.update(report(version))
        record.tick()
    record.event("heard")
    record.close()
    assert record.summary()["rows_lost"] == 5
    assert len(view.lines) == 2
    assert f"[Errno {errno.ENOSPC}]" in view.lines[0]


def test_importing_the_recorder_imports_neither_rich_nor_tensorboard_nor_torch() -> None:
    code = (
        "import sys, tianji.record; "
        "print({'rich', 'tensorboard', 'torch', 'google'} & {m.split('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_tag_is_in_the_reference(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    won = np.array([(1.0, 1, 1)], EPISODE)
    told = {"loss": 1.0, "gradient_skipped": 0.0, "gradient_damped": 0.0}
    record.update(report(1, of=won, metrics=told, staleness=[1]))
    for kind in ("env", "role", "run", "update"):
        record.fault(Fault("actor-0", "it broke", kind, aborted=1))
    clock.now += 1.0
    record.active, record.predicted = 3, 100.0
    busy = dict.fromkeys(("produced", "received", "consumed"), 0.5)
    record.tick({"learner/update": 1.0}, lambda: Verdict("balanced", "", busy=busy))
    record.evaluation(10, 1, won)
    record.close()
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    patterns = [
        re.escape(tag).replace("<metric>", "[^/]+").replace("<role>/<kind>", ".+/.+")
        for tag in documented
    ]
    written = {key for row in rows(tmp_path) for key in row}
    assert {key for key in written if not any(re.fullmatch(p, key) for p in patterns)} == set()
    assert {p for p in patterns if not any(re.fullmatch(p, key) for key in written)} == set()


def test_a_plain_view_takes_the_last_line_at_close(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    record = recorder(tmp_path, clock, PlainView(stream))
    record.update(report(1, of=episodes((3.0, 7))))
    clock.now += 0.5
    record.tick()
    assert stream.getvalue() == ""
    record.close()
    (line,) = stream.getvalue().splitlines()
    assert "return 3.000" in line


def test_the_verdict_is_a_row_of_flags_and_capacities_and_the_last_view_has_the_whole_runs(
    tmp_path: Path,
) -> None:
    clock, view = Clock(), Watcher(every=1.0)
    record = Recorder(tmp_path, view, {}, clock=clock)
    told = Verdict("train-bound", "learner busy", busy={"produced": 0.5, "consumed": 1.0})
    record.update(report(1))
    clock.now += 2.0
    record.tick({}, lambda: told)
    record.update(report(2))
    clock.now += 0.5
    record.conclusion = Verdict("balanced", "all in all")
    record.close()
    first, last = rows(tmp_path)
    assert first["verdict/train_bound"] == last["verdict/train_bound"] == 1.0
    assert first["verdict/balanced"] == 0.0
    assert first["capacity/produced_sps"] == 2 * first["flow/produced_sps"]
    assert last["capacity/consumed_sps"] == pytest.approx(80 / 2.5)
    assert [status.verdict for status in view.shown] == [told, record.conclusion]


def test_a_change_of_the_active_actors_is_told_kept_and_resumed(tmp_path: Path) -> None:
    clock = Clock()
    record = recorder(tmp_path, clock)
    record.rebalance(Change(4, 3, "why not"), "g1", 7)
    record.update(report(1))
    clock.now += 2.0
    record.tick()
    again = recorder(tmp_path / "again", clock)
    again.load_state(record.state())
    assert again.rebalanced == record.rebalanced
    (change,) = again.rebalanced
    about = {"steps": 0, "group": "g1", "from": 4, "to": 3, "why": "why not"}
    assert {k: v for k, v in change.items() if k != "wall_s"} == about
    assert "g1: rebalanced: 4 -> 3 actors: why not" in (tmp_path / "log.txt").read_text()
    assert rows(tmp_path)[-1]["scale/active_actors"] == 7.0
    record.close()
    again.close()
