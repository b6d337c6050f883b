"""The command line as a user has it: outputs, exit codes, signals, bad input."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import tianji
from tianji import catalogue
from tianji.__main__ import _told, main
from tianji.folder import locked
from tianji.relax import PRESETS

SMALL = [
    "ppo_cartpole", "algorithm.epochs=1", "network.hidden=[8]", "scale.envs_per_actor=4",
    "scale.rollout_length=8", "stop.updates=3",
]  # fmt: skip


def command(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "tianji", *map(str, argv)],
        capture_output=True, text=True, timeout=120, **kwargs,
    )  # fmt: skip


def json_of(capsys, *argv):
    """What a command in this process says in JSON, and on stderr; it ends well."""
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    done = command("train", *SMALL, "--runs", folder, "--name", "done", "--json")
    assert done.returncode == 0, done.stderr
    return folder / "done", done


def test_json_is_the_last_line_of_stdout_and_has_every_key(run):
    folder, done = run
    result = json.loads(done.stdout.splitlines()[-1])
    assert {
        "status", "run_dir", "wall_s", "start_s", "steps", "updates", "episodes", "return_mean",
        "steps_per_s", "staleness", "params_sha256", "stop_reason",
    } <= result.keys()  # fmt: skip
    assert result["status"] == "done"
    assert result["run_dir"] == str(folder)
    assert set(result["steps_per_s"]) == {"produced", "received", "consumed"}
    assert set(result["staleness"]) == {"mean", "p95", "max"}
    assert 0 < result["start_s"] < result["wall_s"]
    assert "\x1b" not in done.stdout + done.stderr


def test_overrides_may_stand_behind_options(tmp_path, capsys):
    argv = ["train", *SMALL, "--runs", str(tmp_path), "seed=9", "--name", "late", "stop.updates=1"]
    assert main([*argv, "--json"]) == 0
    config = (tmp_path / "late" / "config.toml").read_text()
    assert "seed = 9" in config
    assert "updates = 1" in config
    with pytest.raises(SystemExit):
        main([*argv, "--nonsense"])


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "tianji train ppo_cartpole" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "/abs", "a/b", "-x", "new\nline"])
def test_a_name_that_is_no_folder_name_is_refused(name, tmp_path, capsys):
    assert main(["train", *SMALL, "--runs", str(tmp_path / "r"), f"--name={name}"]) == 2
    assert "--name" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_run_has_one_writer(tmp_path, capsys):
    process = started(tmp_path)
    assert main(["resume", str(tmp_path / "run"), "stop.updates=9"]) == 2
    assert "another process" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    with locked(tmp_path / "run"):
        assert main(["resume", str(tmp_path / "run"), "stop.updates=2000000"]) == 2
    assert "another process" in capsys.readouterr().err


def test_a_resumed_run_remembers_what_it_was_told(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run[0], copy, symlinks=True)
    assert main(["resume", str(copy), "stop.updates=5", "--json"]) == 0
    assert "updates = 5" in (copy / "config.toml").read_text()
    capsys.readouterr()
    assert main(["resume", str(copy)]) == 2
    hint = re.search(r"`tianji (resume [^`]*)`", capsys.readouterr().err).group(1)
    assert main(shlex.split(hint)) == 0, "the remedy that is named must work"


def test_a_moved_end_of_a_schedule_is_not_called_exact(tmp_path, capsys):
    argv = ["train", *SMALL, "algorithm.schedule=linear", "--runs", str(tmp_path), "--name", "l"]
    assert main(argv) == 0
    assert main(["resume", str(tmp_path / "l"), "stop.updates=6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["resumed"] == "inexact: the schedule's end was moved"


def test_a_closed_or_full_stdout_ends_without_a_traceback(tmp_path):
    for redirect, codes in ((">&-", (0,)), (">/dev/full", (0, 1))):
        words = shlex.join(
            [sys.executable, "-m", "tianji", "train", *SMALL, "--runs", str(tmp_path)]
        )
        done = subprocess.run(
            f"{words} {redirect}", shell=True, capture_output=True, text=True, timeout=60
        )
        assert done.returncode in codes, done.stderr
        assert "Traceback" not in done.stderr


def test_without_json_the_result_and_the_run_folder_are_told(tmp_path, capsys):
    assert main(["train", *SMALL, "--runs", str(tmp_path), "--plain"]) == 0
    said = capsys.readouterr().out
    assert "done: updates >= 3" in said
    (folder,) = re.findall(r"^  run folder  (.+)$", said, re.MULTILINE)
    assert str(tmp_path) in folder
    assert f"\n  report      {folder}/report.html\n" in said
    assert "\n  plan " not in said, "none was followed"


def summary(result, **changes):
    return "\n".join(_told(dataclasses.replace(result, **changes)))


def test_a_report_that_was_not_written_is_not_named(tmp_path):
    result = tianji.train(SMALL[0], SMALL[1:], runs=tmp_path)
    report = Path(result.run_dir, "report.html")
    assert "  report      " in summary(result)
    os.utime(report, (1.0, 1.0))  # of an earlier process of the run
    assert "  report      " not in summary(result)
    report.unlink()
    assert "  report      " not in summary(result)


def test_the_summary_sets_the_plan_beside_what_was_measured(tmp_path):
    result = tianji.train(SMALL[0], SMALL[1:], runs=tmp_path)
    speeds = {"produced": 1.0, "received": 80_100.0, "consumed": 1.0}
    plan = Path(result.run_dir, "plan.json")
    plan.write_text(json.dumps({"predicted": {"new": 78_500.0}}))
    told = summary(result, steps_per_s=speeds, filtered=0)
    line = "\n  plan        78.5 k new steps/s predicted, 80.1 k measured (error -2 %)\n"
    assert line in told
    told = summary(result, steps_per_s=speeds, filtered=100, steps=200)
    assert "predicted, 40.0 k measured (error +96 %)" in told, "what was too stale was not new"
    told = summary(result, steps_per_s=speeds | {"received": 0.0})
    assert "predicted, 0 measured\n" in told
    plan.write_text("{")
    assert "  plan  " not in summary(result)


@pytest.mark.parametrize(
    "argv", [[], ["train"], ["resume"], ["eval"], ["play"], ["show"], ["list"], ["doctor"]]
)
def test_help_is_there_for_every_command(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    assert "usage: tianji" in capsys.readouterr().out


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from tianji.__main__ import parser; parser().format_help(); "
        "print([m for m in ('torch', 'numpy', 'gymnasium', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_eval_plays_as_many_episodes_as_asked(run, capsys):
    assert main(["eval", str(run[0]), "--episodes", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["episodes"] == len(told["returns"]) == 3
    assert told["return_mean"] == pytest.approx(np.mean(told["returns"]))
    assert main(["eval", str(run[0]), "--episodes", "2"]) == 0
    assert "2 episodes of CartPole-v1" in capsys.readouterr().out


def frames_of(path):
    """All pictures of a video, decoded by ffmpeg."""
    import imageio_ffmpeg

    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    decode = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-i",
        str(path),
        "-fps_mode",
        "passthrough",
        *raw,
    ]
    decoded = subprocess.run(decode, capture_output=True, check=True, timeout=60).stdout
    return np.frombuffer(decoded, np.uint8).reshape(-1, 400, 600, 3)


@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_play_writes_a_video_that_can_be_read(run, ending, tmp_path, capsys):
    path = tmp_path / f"episode.{ending}"
    assert main(["play", str(run[0]), "--video", str(path)]) == 0
    told = capsys.readouterr().out
    frames = frames_of(path)
    assert len(frames) >= 8
    if ending == "mp4":  # a GIF keeps pictures that do not change only once
        assert f"{path}: {len(frames)} frames" in told
    assert frames[0].std() > 0, "the picture is empty"


def test_play_shows_a_window(run, capsys):
    assert main(["play", str(run[0])]) == 0
    assert "return" in capsys.readouterr().out


def test_play_without_a_screen_says_what_to_do(run, capsys, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["play", str(run[0])]) == 2
    assert "--video" in capsys.readouterr().err


def test_show_tells_value_origin_and_meaning(capsys):
    assert main(["show", "ppo_cartpole", "seed=9"]) == 0
    rows = capsys.readouterr().out.splitlines()
    seed = next(row for row in rows if row.startswith("seed"))
    assert "9" in seed.split()
    assert "command line" in seed
    assert main(["show", "ppo_cartpole", "seed=9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seed"] == {
        "value": 9,
        "origin": "command line",
        "meaning": told["seed"]["meaning"],
    }
    assert told["env.id"]["origin"] == "ppo_cartpole.toml"


def test_list_names_everything_there_is(capsys):
    assert main(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"dqn", "ppo"} <= told["algorithms"].keys()
    assert list(told["presets"]) == list(PRESETS)
    assert told["presets"]["seed"]["edges"] == {"I": "live", "II": "waiting", "III": "free"}
    assert told["presets"]["apex"]["for"] == told["presets"]["reverb"]["for"] == ["replay"]
    assert told["presets"]["impala"]["for"] == ["on-policy"]
    assert {name for name, about in told["presets"].items() if about["groups"]} == {"a3c", "gala"}
    assert "ppo_cartpole" in told["configs"]
    assert any(env["extra"] == "box2d" for env in told["envs"])
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "ppo_cartpole" in listed
    for name, about in told["presets"].items():
        assert about["about"]
        assert re.search(rf"^  {name} +I \w+, II \w+, III \w+", listed, re.MULTILINE), name
    # Sentences are whole, in lines that a terminal has room for.
    assert max(map(len, listed.splitlines())) < 120
    words = " ".join(listed.split())
    for about in told["presets"].values():
        assert about["about"] in words
    for name, config in told["configs"].items():
        assert f"{name} {config['expect']}" in words
    assert told["algorithms"]["dqn"].endswith("(C51, QR).")
    assert told["configs"]["a2c_cartpole"]["expect"].endswith("(seeds 1 to 3)")
    assert told["configs"]["apex_cartpole"]["expect"].endswith("from other work")
    assert ("[see docs/smac.md]" in listed) is (importlib.util.find_spec("smac") is None)


def test_list_says_how_to_get_each_family_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(catalogue, "_is_there", lambda module: False)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) < 120
    words = " ".join(listed.split())
    assert "CarRacing-v3 [pip install 'tianji[box2d]']" in words
    assert "every other map of SMAC [see docs/smac.md]" in words


def test_doctor_finds_what_is_needed(capsys):
    assert main(["doctor"]) == 0
    assert "everything needed works" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["torch"]["works"]
    assert found["shared memory"]["works"]


class WrongShape(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.zeros(4, np.float32), {}


class RaisesAtReset(WrongShape):
    def reset(self, seed=None, options=None):
        raise OSError("no licence")


gymnasium.register("test/WrongShape-v0", WrongShape)
gymnasium.register("test/RaisesAtReset-v0", RaisesAtReset)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["env.id=CartPol-v1"], ["CartPol-v1", 'Did you mean "CartPole-v1"?']),
        (["algorithm.name=pppo"], ["pppo", 'Did you mean "ppo"?']),
        (["algorithm.gama=0.9"], ["algorithm.gama", 'Did you mean "algorithm.gamma"?']),
        (["algorithm.gamma=abc"], ["algorithm.gamma", "abc"]),
        (["env.id=test/WrongShape-v0"], ["(3,)", "(4,)"]),
        (["env.id=test/RaisesAtReset-v0"], ["no licence", "OSError"]),
        (["scale.rollout_length=1000000000"], ["GiB", "scale.rollout_length"]),
        (["env.kwargs={nonsense = 1}"], ["env.kwargs", "nonsense"]),
    ],
)
def test_bad_input_is_refused_before_the_first_step(argv, words, tmp_path, capsys):
    assert main(["train", *SMALL, *argv, "--runs", str(tmp_path)]) == 2
    told = capsys.readouterr()
    for word in words:
        assert word in told.err, told.err
    assert "Traceback" not in told.err
    assert list(tmp_path.iterdir()) == [], "something half-made was left"


def test_a_gpu_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", *SMALL, "scale.device=cuda", "--runs", str(tmp_path)]) == 2
    assert 'scale.device = "cpu"' in capsys.readouterr().err


def test_replay_that_does_not_fit_is_refused(tmp_path, capsys):
    argv = ["train", "dqn_cartpole", "algorithm.capacity=1000000000000", "--runs", str(tmp_path)]
    apart = ["scale.engine=local", "scale.actors=2", "scale.envs_per_actor=8"]
    for more, words in ([], False), ([*apart, "scale.rebalance=true"], True):
        assert main([*argv, *more]) == 2
        told = capsys.readouterr().err
        assert "algorithm.capacity" in told
        assert ("set scale.rebalance = false" in told) is words, "what is not on is not to blame"


def test_dqn_with_continuous_actions_is_refused(tmp_path, capsys):
    argv = ["train", "dqn_cartpole", "env.id=Pendulum-v1", "--runs", str(tmp_path)]
    assert main(argv) == 2
    assert "ppo" in capsys.readouterr().err


def test_a_missing_file_is_refused_without_a_traceback(tmp_path):
    done = command("train", tmp_path / "nothing.toml", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["status"] == "refused"
    assert "nothing.toml" in done.stderr


def test_a_run_folder_that_exists_is_refused(run, capsys):
    assert main(["train", *SMALL, "--runs", str(run[0].parent), "--name", "done"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    for verb in ("resume", "eval", "play"):
        assert main([verb, str(tmp_path)]) == 2
        assert "no run folder" in capsys.readouterr().err


def damage(run, tmp_path, change):
    """A copy of the run whose newest checkpoint's trainer arrays are changed."""
    copy = tmp_path / "copy"
    shutil.copytree(run[0], copy, symlinks=True)
    file = next((copy / "checkpoints").glob("step_*/trainer.safetensors"))
    file.write_bytes(change(file.read_bytes()))
    return copy


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-7],
        lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
        lambda data: b"",
    ],
    ids=["truncated", "one bit flipped", "empty"],
)
def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path, capsys, change):
    copy = damage(run, tmp_path, change)
    for verb in ("resume", "eval"):
        assert main([verb, str(copy)]) == 2
        told = capsys.readouterr().err
        assert "trainer.safetensors" in told
        assert "Traceback" not in told


LONG = ["stop.updates=1000000", "scale.rollout_length=16"]


def started(tmp_path, *argv):
    """A training process that has made its first updates."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tianji", "train", *SMALL, *LONG, *argv, "--runs", str(tmp_path),
         "--name", "run", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "no metrics within 60 s"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 75, "stopped", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, "stopped", marks=pytest.mark.slow),
    ],
)
def test_signals_save_and_say_so_and_the_run_goes_on_exactly(
    tmp_path, capsys, number, code, status
):
    process = started(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == status
    end = f"stop.updates={result['updates'] + 5}"
    rest, _ = json_of(capsys, "resume", tmp_path / "run", end)
    assert rest["resumed"] == "exact"
    assert rest["updates"] == result["updates"] + 5
    whole, _ = json_of(capsys, "train", *SMALL, *LONG, end, "--runs", tmp_path)
    assert rest["params_sha256"] == whole["params_sha256"]


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, capsys):
    process = started(tmp_path, "checkpoint.every=5")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline, "no checkpoint within 60 s"
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    saved = tianji.load(tmp_path / "run").version
    assert saved >= 5
    more, _ = json_of(capsys, "resume", tmp_path / "run", f"stop.updates={saved + 3}")
    assert more["updates"] == saved + 3


def test_an_env_that_fails_later_ends_with_1_and_no_traceback(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium, numpy\n"
        "class Broken(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (3,), numpy.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    t = 0\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return numpy.zeros(3, numpy.float32), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        obs = numpy.full(3, numpy.nan if self.t > 12 else 0.0, numpy.float32)\n"
        "        return obs, 0.0, False, False, {}\n"
        "gymnasium.register('Broken-v0', Broken)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["env.id=Broken-v0", 'env.imports=["broken_env"]', "faults.env_restarts=0"]
    assert main(["train", *SMALL, *argv, "--runs", str(tmp_path), "--json"]) == 1
    said = capsys.readouterr()
    assert "Broken-v0 returned nan" in said.err
    assert "Traceback" not in said.err
    assert json.loads(said.out)["status"] == "failed"
    gymnasium.registry.pop("Broken-v0")
    del sys.modules["broken_env"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 700 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """A file that takes all the space that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1000)
    assert os.statvfs(folder).f_bavail == 0
    return path


def test_a_full_disk_does_not_stop_training_and_the_last_checkpoint_stays_good(small_disk, capsys):
    folder = small_disk / "run"
    json_of(capsys, "train", *SMALL, "checkpoint.every=1", "--runs", small_disk, "--name", "run")
    kept = os.readlink(folder / "checkpoints" / "latest")
    filler = fill(small_disk)
    full, said = json_of(capsys, "resume", folder, "stop.updates=30")
    assert full["updates"] == 30
    assert full["notes"]["checkpoints_not_saved"] == 27
    assert kept in said, "it must say what is kept"
    filler.unlink()
    assert os.readlink(folder / "checkpoints" / "latest") == kept
    more, _ = json_of(capsys, "resume", folder, "stop.updates=4")
    assert more["resumed"] == "exact"


def test_a_disk_that_is_full_from_the_start_is_refused(small_disk, capsys):
    fill(small_disk)
    assert main(["train", *SMALL, "--runs", str(small_disk)]) == 2
    assert "--runs" in capsys.readouterr().err
