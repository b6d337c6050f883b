"""What hosts write down of their time: the ring, what is read back, whatever ends the host."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tianji
from tianji import driver, trace
from tianji.__main__ import main
from tianji.driver import Forever, Serial
from tianji.errors import Refusal
from tianji.role import Did
from tianji.role_names import parse_role
from tianji.trace import Ring

PPO = {
    "env": {"id": "toy/Chain", "kwargs": {"anywhere": True, "limit": 20}},
    "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2},
    "network": {"hidden": [8]},
    "scale": {"relax": "sync", "actors": 1, "envs_per_actor": 4, "rollout_length": 8},
    "stop": {"updates": 8},
}
LOCAL = "scale.engine=local"


def folder(tmp_path, *rings):
    """A folder that is a run's as far as `read` can see."""
    (tmp_path / "config.toml").touch()
    return tmp_path


def ring(tmp_path, host="actor-0", room=trace.ROOM):
    return Ring(trace.path_of(folder(tmp_path), host), room)


def told(track):
    """Its events as (key, begin, end)."""
    keys = [track.keys[i] for i in track.key]
    return list(zip(keys, track.begin.tolist(), track.end.tolist(), strict=True))


def train(tmp_path, *overrides, **kwargs):
    return tianji.train(PPO, overrides, runs=tmp_path, **kwargs)


def test_what_is_written_is_read_back_and_time_begins_with_the_first_event(tmp_path):
    ring(tmp_path, "learner").write(100.5, ["learner/take", "learner/update"], [101.0, 102.0])
    ring(tmp_path, "actor-1").write(100.25, ["actor/infer", "actor/push"], [101.25, 101.5])
    actor, learner = trace.read(tmp_path)
    assert (actor.host, learner.host) == ("actor-1", "learner")
    assert told(actor) == [("actor/infer", 0.0, 1.0), ("actor/push", 1.0, 1.25)]
    assert told(learner) == [("learner/take", 0.25, 0.75), ("learner/update", 0.75, 1.75)]
    assert (actor.key.dtype, actor.begin.dtype, actor.end.dtype) == ("int16", "f8", "f8")
    assert learner.seconds() == {"learner/take": 0.5, "learner/update": 1.0}


def test_events_of_one_key_that_follow_each_other_are_one_also_across_writes(tmp_path):
    made = ring(tmp_path)
    made.write(0.0, ["a/x", "a/x", "a/wait_b"], [1.0, 2.0, 3.0])
    made.write(3.0, ["a/wait_b", "a/wait_b"], [4.0, 5.0])
    made.write(5.0, ["a/wait_b", "a/x"], [6.0, 7.0])
    (track,) = trace.read(tmp_path)
    assert told(track) == [("a/x", 0, 2), ("a/wait_b", 2, 6), ("a/x", 6, 7)]


@given(data=st.data(), room=st.integers(2, 40))
def test_a_ring_holds_the_newest_events_whatever_the_sizes_of_writes(data, room, tmp_path_factory):
    path, expected, now = tmp_path_factory.mktemp("run"), [], 0.0
    made = ring(path, room=room)
    keys = st.sampled_from(["a/x", "a/y", "b/z"])
    for events in data.draw(st.lists(st.lists(keys, max_size=60), min_size=1, max_size=12)):
        begin, ends = now, []
        for key in events:
            before, now = now, now + data.draw(st.sampled_from([0.25, 1.0, 1.5]))
            ends.append(now)
            if expected and expected[-1][0] == key:
                expected[-1] = (key, expected[-1][1], now)
            else:
                expected.append((key, before, now))
        made.write(begin, events, ends)
    size = made.path.stat().st_size if expected else 0
    assert size <= trace.HEADER + room * trace.EVENT.itemsize
    if not expected:
        with pytest.raises(Refusal, match="there is no trace in"):
            trace.read(path)
    elif len(expected) < room:
        (track,) = trace.read(path)
        assert told(track) == expected
    else:
        (track,) = trace.read(path)
        assert told(track) == expected[-(room - 1) :]


def test_a_host_that_is_begun_anew_goes_on_after_a_gap(tmp_path):
    ring(tmp_path).write(10.0, ["actor/infer", "actor/push"], [11.0, 12.0])
    ring(tmp_path).write(20.0, ["actor/load", "actor/infer"], [21.0, 22.0])
    (track,) = trace.read(tmp_path)
    expected = [("infer", 0, 1), ("push", 1, 2), ("load", 10, 11), ("infer", 11, 12)]
    assert told(track) == [(f"actor/{kind}", begin, end) for kind, begin, end in expected]


@pytest.mark.parametrize("first", ["a/x", "a/y"])
def test_a_host_that_is_killed_while_it_writes_loses_what_it_had_not_written(
    first, tmp_path, monkeypatch
):
    """Wherever it is killed: events are written first, the oldest place first, then the header."""
    made, now = ring(tmp_path, room=16), 0.0
    for _ in range(5):
        made.write(now, ["a/x", "a/y"] * 3, [now + i + 1 for i in range(6)])
        now += 6
    before, expected, writes = made.path.read_bytes(), told(trace.read(tmp_path)[0]), []
    real = os.pwrite

    def heard(fd, data, at):
        writes.append((bytes(data), at))
        return real(fd, data, at)

    monkeypatch.setattr(trace.os, "pwrite", heard)
    made.write(now, [first, "b/z", "b/x", "b/y"], [now + i + 1 for i in range(4)])
    *events, (_, header_at) = writes
    assert header_at == 0
    size = trace.EVENT.itemsize
    steps = [(data[i : i + size], at + i) for data, at in events for i in range(0, len(data), size)]
    assert len(steps) == (4 if first == "a/y" else 5), "the newest one may go on"
    after = bytearray(before)
    for data, at in steps:
        after[at : at + size] = data
        made.path.write_bytes(after)
        (track,) = trace.read(tmp_path)
        assert told(track) == expected[len(expected) - len(track.key) :]
        assert len(track.key) >= len(expected) - len(steps)


def test_a_file_that_was_only_begun_is_no_track(tmp_path):
    ring(tmp_path, "buffer").write(0.0, ["buffer/serve"], [1.0])
    path = trace.path_of(tmp_path, "actor-0")
    path.write_bytes(bytes(trace.HEADER + 30))
    assert [track.host for track in trace.read(tmp_path)] == ["buffer"]


def test_more_keys_than_a_header_has_room_for_are_other(tmp_path):
    made = ring(tmp_path)
    keys = [f"actor/{'k' * 40}{i}" for i in range(200)]
    made.write(0.0, keys, [i + 1.0 for i in range(len(keys))])
    made.write(200.0, [f"actor/{'k' * 60}"], [201.0])
    (track,) = trace.read(tmp_path)
    assert len(made.path.read_bytes()[: trace.HEADER].rstrip()) < trace.HEADER
    known = len(track.keys) - 1
    assert 20 < known < 100
    assert track.keys.count("run/other") == 1
    assert told(track)[:known] == [(keys[i], i, i + 1) for i in range(known)]
    assert told(track)[known:] == [("run/other", known, 201)]


def test_a_write_that_fails_leaves_a_gap_and_the_next_one_is_tried(tmp_path, monkeypatch):
    made = ring(tmp_path)
    made.write(0.0, ["a/x", "a/y"], [1.0, 2.0])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(trace.os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            made.write(2.0, ["a/x", "a/y"], [3.0, 4.0])
    made.write(4.0, ["a/y", "a/x"], [5.0, 6.0])
    (track,) = trace.read(tmp_path)
    assert told(track) == [("a/x", 0, 1), ("a/y", 1, 2), ("a/y", 4, 5), ("a/x", 5, 6)]


def test_no_run_no_trace_and_a_damaged_one_are_refused(tmp_path):
    with pytest.raises(Refusal, match="is no run folder"):
        trace.read(tmp_path)
    folder(tmp_path)
    with pytest.raises(Refusal, match=r"there is no trace in .*nothing.*train it again"):
        trace.read(tmp_path)
    ring(tmp_path).write(0.0, ["a/x"], [1.0])
    trace.path_of(tmp_path, "buffer").write_bytes(b'{"format": "another"}')
    with pytest.raises(Refusal, match=r"buffer\.trace is no trace, or .*Delete it"):
        trace.read(tmp_path)


def test_a_trace_that_is_cut_short_is_refused_and_the_others_can_be_drawn(tmp_path):
    folder(tmp_path)
    ring(tmp_path).write(0.0, ["a/x", "a/y", "a/x"], [1.0, 2.0, 3.0])
    ring(tmp_path, host="buffer").write(0.0, ["a/x"], [1.0])
    path = trace.path_of(tmp_path, "buffer")
    whole = path.read_bytes()
    for size in (trace.HEADER, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Refusal, match=r"buffer\.trace is cut short: \d+ of its \d+ ev"):
            trace.read(tmp_path)
    path.write_bytes(whole[:1000])
    with pytest.raises(Refusal, match="cut short"):
        trace.read(tmp_path)
    path.unlink()
    assert len(trace.read(tmp_path)) == 1


def header_with(**changes):
    """A change to a file: its header says something else."""

    def change(data):
        about = json.loads(data[: trace.HEADER]) | changes
        return json.dumps(about).encode().ljust(trace.HEADER) + data[trace.HEADER :]

    return change


def swapped(data):
    """Two events in the wrong order."""
    size, at = trace.EVENT.itemsize, trace.HEADER
    return (
        data[:at] + data[at + size : at + 2 * size] + data[at : at + size] + data[at + 2 * size :]
    )


BROKEN = {
    "cut short": (lambda data: data[:-1], "is cut short"),
    "a header of nonsense": (lambda data: b"\xff" * 900 + data[900:], "do not say what it holds"),
    "half a header": (lambda data: data[:100], "do not say what it holds"),
    "a header without its keys": (header_with(keys=None), "do not say what it holds"),
    "no room": (header_with(room=0), "do not say what it holds"),
    "keys without names": (header_with(keys=[]), "not in order"),
    "events in disorder": (swapped, "not in order"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_one_broken_trace_is_named_and_the_others_are_drawn(change, words, tmp_path, capsys):
    ring(tmp_path).write(0.0, ["a/x", "a/y", "a/x"], [1.0, 2.0, 3.0])
    ring(tmp_path, "buffer").write(0.0, ["b/x", "b/y", "b/x"], [1.0, 2.0, 3.0])
    path = trace.path_of(tmp_path, "buffer")
    path.write_bytes(change(path.read_bytes()))
    tracks, broken = trace.salvage(tmp_path)
    assert [track.host for track in tracks] == ["actor-0"]
    assert list(broken) == ["buffer"]
    for part in (str(path), words, "nothing of it can be drawn. Restore it from a copy, or del"):
        assert part in broken["buffer"]
    with pytest.raises(Refusal, match=r"buffer\.trace"):
        trace.read(tmp_path)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert words in said.err
    about = json.loads(said.out)
    assert [host["host"] for host in about["hosts"]] == ["actor-0"]
    assert about["broken"] == broken
    assert (tmp_path / "trace.html").exists()
    trace.path_of(tmp_path, "actor-0").unlink()
    (tmp_path / "trace.html").unlink()
    assert main(["trace", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "trace.html").exists()


def test_a_trace_that_cannot_be_opened_is_named_like_one_that_is_broken(tmp_path):
    ring(tmp_path).write(0.0, ["a/x"], [1.0])
    trace.path_of(tmp_path, "buffer").mkdir()
    tracks, broken = trace.salvage(tmp_path)
    assert len(tracks) == 1
    assert "buffer.trace cannot be read (Is a directory)" in broken["buffer"]


def test_a_trace_of_another_version_is_refused_beside_whole_ones(tmp_path, capsys):
    ring(tmp_path).write(0.0, ["a/x"], [1.0])
    ring(tmp_path, "buffer").write(0.0, ["a/x"], [1.0])
    path = trace.path_of(tmp_path, "buffer")
    path.write_bytes(header_with(format="tianji trace 9")(path.read_bytes()))
    assert main(["trace", str(tmp_path)]) == 2
    assert "use the version that wrote it" in capsys.readouterr().err


def test_the_page_and_the_events_are_never_written_into_one_file(tmp_path, capsys, monkeypatch):
    ring(tmp_path).write(0.0, ["a/x"], [1.0])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for argv in (["--html", "same", "--perfetto", "./same"], ["--html", "./trace.json"]):
        assert main(["trace", ".", *argv]) == 2
        assert "--html and --perfetto would both be" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


class Ticking:
    """A clock that goes on by a little more each time."""

    def __init__(self):
        self.now, self.step = 5.0, 0.0

    def __call__(self):
        self.step += 0.125
        self.now += self.step
        return self.now


class Doing:
    def __init__(self, name, *kinds):
        self.name, self._kinds, self._at = parse_role(name), kinds, -1

    def step(self):
        self._at += 1
        kind = self._kinds[self._at % len(self._kinds)]
        return Did(waits="other") if kind is None else Did(kind)


@pytest.mark.parametrize(
    "make", [Serial, lambda roles, clock: Forever(roles, lambda s: None, clock)]
)
def test_events_of_a_driver_add_up_to_its_seconds_and_are_given_once(make):
    made = make(
        [Doing("actor-3", "infer", "simulate", None), Doing("learner", "update")], Ticking()
    )
    made.start()
    began, spent, last = made.now, {}, made.now
    for n in (3, 1, 0, 17):
        for _ in range(n):
            made.step()
        begin, keys, ends = made.events()
        assert begin == last
        for key, end in zip(keys, ends, strict=True):
            spent[key] = spent.get(key, 0.0) + end - last
            last = end
    assert spent == made.seconds
    assert last - began == made.elapsed
    assert set(spent) >= {"actor/infer", "actor/simulate", "learner/update"}


def test_a_driver_that_nobody_asks_keeps_the_newest_events(monkeypatch):
    monkeypatch.setattr(driver, "KEPT", 8)
    made = Serial([Doing("actor", "infer", "simulate")], Ticking())
    ends = []
    for _ in range(20):
        made.step()
        ends.append(made.now)
    begin, keys, found = made.events()
    assert (begin, found) == (ends[12], ends[13:])
    assert keys == ["actor/simulate" if i % 2 else "actor/infer" for i in range(13, 20)]
    made.step()
    assert made.events() == (ends[-1], ["actor/infer"], [made.now])


def test_the_trace_of_a_serial_run_adds_up_to_where_its_time_went(tmp_path):
    result = train(tmp_path, "eval.every=4", "eval.episodes=2")
    (track,) = trace.read(Path(result.run_dir))
    assert track.host == "serial"
    assert {key.split("/")[0] for key in track.keys} == {
        "actor", "buffer", "learner", "evaluator", "driver", "run",
    }  # fmt: skip
    assert {"actor/push", "learner/update", "learner/push"} <= set(track.keys)
    # What came after the result was made is "run/other" too.
    measured = {key: s for key, s in track.seconds().items() if key != "run/other"}
    shares = {key: s for key, s in result.time["serial"].items() if key != "run/other"}
    assert set(measured) == set(shares)
    scale = sum(measured.values()) / sum(shares.values())
    for key, share in shares.items():
        assert measured[key] == pytest.approx(share * scale, rel=1e-6, abs=1e-8), key


def test_the_traces_of_hosts_add_up_to_where_their_time_went(tmp_path):
    result = train(tmp_path, LOCAL)
    tracks = trace.read(Path(result.run_dir))
    assert [track.host for track in tracks] == ["actor-0", "buffer", "learner"]
    for track in tracks:
        kind = track.host.split("-")[0]
        assert np.array_equal(track.begin[1:], track.end[:-1]), "without a break"
        assert (track.end > track.begin).all()
        measured = {key.split("/")[1]: s for key, s in track.seconds().items()}
        shares = dict(result.time[kind])
        for late in ("wait_checkpoint", "tell"):  # after they have told how they are
            measured.pop(late, None)
            shares.pop(late, None)
        assert set(measured) == set(shares)
        scale = sum(measured.values()) / sum(shares.values())
        for key, share in shares.items():
            assert measured[key] == pytest.approx(share * scale, rel=1e-6, abs=1e-8), key
    actor, learner = tracks[0], tracks[-1]
    pushes = np.count_nonzero(actor.key == actor.keys.index("actor/push"))
    updates = np.count_nonzero(learner.key == learner.keys.index("learner/update"))
    assert updates == 8
    assert pushes >= 8


def test_workers_and_groups_have_a_track_each(tmp_path):
    result = tianji.train("a3c_cartpole", ["stop.updates=6", "stop.return=inf"], runs=tmp_path)
    tracks = trace.read(Path(result.run_dir))
    assert [track.host for track in tracks] == ["g0.worker", "g1.worker"]
    for track in tracks:
        assert {"actor/infer", "buffer/serve", "learner/update", "driver/turn"} <= set(track.keys)


def test_a_resumed_run_begins_a_new_trace(tmp_path):
    run = Path(train(tmp_path, LOCAL).run_dir)
    before = trace.read(run)
    assert len(before) == 3
    result = tianji.resume(run, ["stop.updates=16", "scale.engine=serial"])
    (track,) = trace.read(run)
    assert (track.host, result.updates, track.begin[0]) == ("serial", 16, 0.0)
    assert np.count_nonzero(track.key == track.keys.index("learner/update")) == 8


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_trace_that_cannot_be_written_is_said_once_and_stops_nothing(engine, tmp_path):
    run = Path(train(tmp_path).run_dir)
    for path in (run / trace.TRACE).iterdir():
        path.unlink()
    (run / trace.TRACE).rmdir()
    (run / trace.TRACE).touch()  # where a folder should be made
    result = tianji.resume(run, ["stop.updates=300", f"scale.engine={engine}"])
    assert (result.status, result.updates) == ("done", 300)
    (line,) = (run / "faults.jsonl").read_text().splitlines()
    fault = json.loads(line)
    assert (fault["kind"], fault["action"]) == ("disk", "goes on")
    assert ".trace is not complete: " in fault["cause"]
    assert result.notes["disk"] == 1


def test_a_full_disk_is_said_and_the_run_ends_as_it_would(tmp_path, monkeypatch):
    real = os.pwrite

    def full(fd, data, at):
        if at > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(trace.os, "pwrite", full)
    result = train(tmp_path)
    assert (result.status, result.updates) == ("done", 8)
    (line,) = Path(result.run_dir, "faults.jsonl").read_text().splitlines()
    assert "No space left on device" in json.loads(line)["cause"]
    monkeypatch.undo()
    assert result.params_sha256 == train(tmp_path).params_sha256


def wait_for(holds, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def test_what_a_killed_host_had_written_survives_and_so_does_that_of_a_killed_run(tmp_path):
    config = tmp_path / "config.toml"
    overrides = [LOCAL, "stop.updates=1000000"]
    config.write_text('[env]\nid = "toy/Chain"\n[algorithm]\nname = "ppo"\n[stop]\nupdates = 1\n')
    argv = [sys.executable, "-m", "tianji", "train", str(config), *overrides, "--plain",
            "--runs", str(tmp_path), "--name", "run"]  # fmt: skip
    launcher = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, path = tmp_path / "run", trace.path_of(tmp_path / "run", "actor-0")
    try:
        wait_for(lambda: path.exists() and path.stat().st_size > trace.HEADER, "no trace")
        hosts = json.loads((run / "hosts.json").read_text())["hosts"]
        pid = next(host["pid"] for host in hosts if host["role"] == "actor-0")
        os.kill(pid, signal.SIGKILL)

        def lives():
            track = next(t for t in trace.read(run) if t.host == "actor-0")
            broken = np.flatnonzero(track.begin[1:] != track.end[:-1])
            return (track, broken) if len(broken) else None

        track, broken = wait_for(lives, "it was not restarted")
        assert len(broken) == 1
        assert track.begin[broken[0] + 1] > track.end[broken[0]]
    finally:
        launcher.kill()
        launcher.wait()
    tracks = trace.read(run)
    assert {"actor-0", "buffer", "learner"} <= {track.host for track in tracks}
    assert all(len(track.key) for track in tracks)


def test_the_command_writes_both_files_and_says_what_they_cover(tmp_path, capsys):
    run = Path(train(tmp_path, LOCAL).run_dir)
    assert main(["trace", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run / 'trace.html'}: open it in a browser" in out
    assert f"{run / 'trace.json'}: open it at" in out
    assert "actor-0" in out
    assert " events, from 0.0" in out
    page = tmp_path / "sub.html"
    events = tmp_path / "sub.json.gz"
    assert main(["trace", str(run), "--html", str(page), "--perfetto", str(events), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["html"] == str(page)
    assert about["perfetto"] == str(events)
    assert [host["host"] for host in about["hosts"]] == ["actor-0", "buffer", "learner"]
    assert all(host["events"] > 0 and host["end"] > host["begin"] for host in about["hosts"])
    assert page.read_text().startswith("<!doctype html>")
    assert events.stat().st_size > 100


def test_the_command_refuses_what_it_cannot_draw(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.toml").touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert f"the newest is {tmp_path / 'one'}" in capsys.readouterr().err
    folder(tmp_path)
    assert main(["trace", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == "refused"
