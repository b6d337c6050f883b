"""Presets side by side: each is run, what cannot be is refused first, what there is is written."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tianji import Refusal
from tianji.__main__ import main, parser
from tianji.compare import FIGURES, Comparison, Entry, _configs, aligned, compare, idle
from tianji.view import side_by_side
from tianji.view.status import SilentView

sys.path.insert(0, str(Path(__file__).parent))
from test_explain import Balanced

TOY = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 2},
    "network": {"hidden": [8]},
    "scale": {"actors": 2, "envs_per_actor": 4, "rollout_length": 8},
    "stop": {"updates": 60, "return": 15},
}
DQN = {
    **TOY,
    "algorithm": {"name": "dqn", "warmup": 200, "capacity": 600, "batch_size": 32, "new_steps": 8},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    said = []
    found = compare(
        TOY, presets=["serial", "sync", "tianji", "a3c"], runs=tmp_path_factory.mktemp("runs"),
        name="four", say=said.append,
    )  # fmt: skip
    return found, said


def test_every_preset_has_a_run_of_its_own(done):
    found, said = done
    assert [entry.preset for entry in found.entries] == ["serial", "sync", "tianji", "a3c"]
    assert all(entry.status == "done" for entry in found.entries)
    assert found.exit_code == 0
    for entry in found.entries:
        result = json.loads(Path(entry.run_dir, "result.json").read_text())
        assert entry.steps == result["steps"]
        assert entry.return_mean == result["return_mean"]
        assert entry.staleness_max == result["staleness"]["max"]
    assert sum("of 4: " in text for text in said) == 4


def test_presets_run_in_processes_and_serial_in_one(done):
    found, _ = done
    engines = {}
    for entry in found.entries:
        text = Path(entry.run_dir, "config.toml").read_text()
        engines[entry.preset] = 'engine = "local"' in text
    assert engines == {"serial": False, "sync": True, "tianji": True, "a3c": True}


def test_a_worker_is_made_of_every_actor(done):
    found, _ = done
    text = Path(found.of("a3c")[0].run_dir, "config.toml").read_text()
    assert "groups = 2" in text
    assert "actors = 1" in text


def test_sync_is_never_stale_and_tianji_may_be(done):
    found, _ = done
    assert found.median("sync", "staleness_max") == 0
    assert found.median("tianji", "staleness_max") <= 3
    for preset in found.presets:
        for role in ("idle_actor", "idle_learner"):
            assert 0 <= found.median(preset, role) <= 1


def test_time_to_target_is_when_it_was_reached(done):
    found, _ = done
    assert found.target == "return >= 15"
    for entry in found.entries:
        result = json.loads(Path(entry.run_dir, "result.json").read_text())
        if result["stop_reason"] == "return >= 15":
            begin = result["measured"]["begin"]
            assert entry.target_s == pytest.approx(result["stop_s"] - begin)
        else:
            assert entry.target_s is None


def test_the_page_is_whole_with_a_curve_and_a_timeline_for_each(done):
    found, _ = done
    page = found.html.read_text()
    parsed = Balanced(page)
    assert "http" not in page
    rows = [a["id"] for t, a in parsed.tags if a.get("class") == "tj-part"]
    assert rows == [f"timelines-{preset}-rows" for preset in found.presets]
    lines = [t for t, a in parsed.tags if t in ("polyline", "circle")]
    assert len(lines) >= 2 * len(found.presets)
    for row in found.rows():
        for cell in row:
            assert cell in parsed.text
    assert page == side_by_side.html(found)


def test_a_broken_trace_of_a_run_is_said_and_the_other_rows_are_drawn(done, tmp_path):
    found, _ = done
    folder = tmp_path / "four"
    shutil.copytree(found.folder, folder, symlinks=True)
    entries = [replace(entry, run_dir=str(folder / Path(entry.run_dir).name))
               for entry in found.entries]  # fmt: skip
    path = next((folder / "sync-s0" / "trace").glob("actor-0.trace"))
    path.write_bytes(path.read_bytes()[:4200])
    parsed = Balanced(side_by_side.html(replace(found, folder=folder, entries=tuple(entries))))
    assert "sync: " in parsed.text
    assert "actor-0.trace is cut short" in parsed.text
    rows = [a["id"] for t, a in parsed.tags if a.get("class") == "tj-part"]
    assert rows == [f"timelines-{preset}-rows" for preset in found.presets]


def test_the_figures_are_kept_as_json(done):
    found, _ = done
    tree = json.loads((found.folder / "compare.json").read_text())
    assert tree == json.loads(json.dumps(found.tree()))
    assert tree["presets"].keys() == set(found.presets)
    for told in tree["presets"].values():
        assert FIGURES.keys() <= told.keys()
        assert len(told["runs"]) == 1


def test_several_seeds_are_told_by_their_median(tmp_path):
    found = compare(TOY, ["stop.updates=10", "stop.return=inf"], presets=["serial"], seeds=3,
                    runs=tmp_path)  # fmt: skip
    assert [entry.seed for entry in found.entries] == [0, 1, 2]
    steps = sorted(entry.steps for entry in found.entries)
    assert found.median("serial", "steps") == steps[1]
    assert found.target == ""
    assert "time to target" not in found.rows()[0]
    assert "medians over the runs of 3 seeds" in found.told()


def test_a_target_that_is_not_reached_is_said(tmp_path):
    found = compare(TOY, ["stop.updates=3", "stop.return=400"], presets=["serial"], runs=tmp_path)
    assert found.rows()[1][1] == "not reached"
    assert found.tree()["presets"]["serial"]["target_s"] is None


@pytest.mark.parametrize(
    ("config", "overrides", "presets", "words"),
    [
        (TOY, [], ["sync", "apex"], "apex cannot be compared: relax.explore"),
        (DQN, [], ["sync", "periodic"], "periodic cannot be compared: relax.start"),
        (TOY, ["scale.actors=1"], ["a3c", "sync"], "makes a worker of every actor"),
        (TOY, [], ["syncc"], 'Did you mean "sync"'),
        (TOY, [], [], "--presets names none"),
        (TOY, [], ["sync", "tianji", "sync"], "names sync more than once"),
        (TOY, ["scale.actors=auto"], ["sync", "tianji"], "Set scale.actors to a number"),
        (TOY, ["scale.learners=3"], ["sync"], "scale.learners = 3 does not divide"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    config, overrides, presets, words, tmp_path
):
    with pytest.raises(Refusal, match=words.replace("(", r"\(")):
        compare(config, overrides, presets=presets, runs=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_several_presets_is_said_once(tmp_path):
    overrides = ["algorithm.warmup=8", "scale.engine=local"]
    with pytest.raises(Refusal, match="sync, tianji, apex cannot be compared: alg") as told:
        compare(DQN, overrides, presets=["sync", "periodic", "tianji", "apex"], runs=tmp_path)
    text = str(told.value)
    assert text.count("is too early") == 1
    assert text.count("cannot be compared") == 2
    assert "periodic cannot be compared: relax.start" in text
    found = compare(TOY, "stop.updates=1", presets=["serial", "apex", "reverb"], skip=True,
                    runs=tmp_path)  # fmt: skip
    assert set(found.left_out) == {"apex", "reverb"}
    for why in set(found.left_out.values()):
        assert sum(why in line for line in found.told()) == 1


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["compare", "ppo_cartpole", "--presets", "serial", "--runs"]
    for runs in (tmp_path / "file" / "runs", "/proc/x"):
        assert main([*argv, str(runs), "--json"]) == 2
        said = capsys.readouterr()
        assert f"refused: the folder of the comparison {runs}" in said.err
        assert "so nothing could be kept. Choose another place with --runs." in said.err
        assert "1 of 1" not in said.err
        assert json.loads(said.out)["status"] == "refused"


def test_the_examples_of_the_help_are_not_refused(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    examples = re.findall(r"^  tianji (compare .*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        asked = parser().parse_args(shlex.split(example))
        presets = asked.presets.split(",")
        configs, left_out = _configs(asked.config, asked.overrides, presets, skip=False)
        assert list(configs) == presets
        assert left_out == {}


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ([0.9959, 107.9], ["1.00", "108"]),
        ([204.1, 201.0], ["204", "201"]),
        ([9.98, 10.2], ["10.0", "10.2"]),
        ([0.0, 0.9959, 2.5], ["0.00", "1.00", "2.50"]),
        ([0.0, 1.0, 417.0], ["0", "1", "417"]),
        ([9.996], ["10.0"]),
        ([99.96], ["100"]),
        ([0.5, 42.25, 3.0], ["0.50", "42.2", "3.00"]),
    ],
)
def test_figures_of_a_column_have_as_many_digits_as_their_size_asks_for(column, told):
    assert [aligned(value, column) for value in column] == told


def test_the_table_tells_staleness_with_few_digits(tmp_path):
    entries = tuple(
        Entry(preset, 0, "", "done", "", staleness_mean=mean, staleness_p95=p95, staleness_max=most)
        for preset, mean, p95, most in (("sync", 0.9959, 1.5, 2.0), ("free", 107.9, 204.1, 417.0))
    )
    found = Comparison(tmp_path, "c", "t", "", ("sync", "free"), 1, entries)
    head, *rows = found.rows()
    at = head.index("staleness mean")
    assert [row[at : at + 3] for row in rows] == [("1.00", "1.50", "2"), ("108", "204", "417")]


def test_what_cannot_be_is_left_out_on_demand(tmp_path):
    found = compare(TOY, "stop.updates=3", presets=["serial", "apex"], skip=True, runs=tmp_path)
    assert [entry.preset for entry in found.entries] == ["serial"]
    assert "relax.explore" in found.left_out["apex"]
    assert "apex was left out" in " ".join(found.told())
    assert "apex was left out" in found.html.read_text()
    with pytest.raises(Refusal, match="apex cannot"):
        compare(TOY, presets=["apex"], skip=True, runs=tmp_path)


def test_a_run_that_fails_does_not_take_the_others_with_it(tmp_path):
    config = {
        **TOY,
        "env": {"id": "testing/Fault", "imports": ["tianji.testing.faults"],
                "kwargs": {"at": {"raises": 40}, "marker": str(tmp_path / "marker")}},
        "faults": {"env_restarts": 0},
        "stop": {"updates": 30},
    }  # fmt: skip
    found = compare(config, presets=["serial"], seeds=2, runs=tmp_path)
    assert [entry.status for entry in found.entries] == ["failed", "done"]
    assert found.exit_code == 1
    Balanced(found.html.read_text())
    assert any("failed" in line and "raised" in line for line in found.told())


def test_ctrl_c_ends_the_run_and_writes_what_there_is(tmp_path):
    class Signalling(SilentView):
        begun = 0

        def begin(self, title, facts):
            Signalling.begun += 1
            if Signalling.begun == 2:
                os.kill(os.getpid(), signal.SIGINT)

    found = compare(TOY, ["stop.return=inf"], presets=["serial"], seeds=3, runs=tmp_path,
                    view=Signalling)  # fmt: skip
    assert [entry.status for entry in found.entries] == ["done", "interrupted"]
    assert found.stopped == "interrupted"
    assert found.exit_code == 130
    assert json.loads((found.folder / "compare.json").read_text())["status"] == "interrupted"
    parsed = Balanced(found.html.read_text())
    assert "given up before all had run" in parsed.text


def test_the_command_prints_one_object_last_and_its_progress_elsewhere(tmp_path):
    argv = ["ppo_cartpole", "network.hidden=[8]", "scale.envs_per_actor=4", "stop.updates=2",
            "--presets", "serial", "--runs", str(tmp_path), "--json"]  # fmt: skip
    told = subprocess.run(
        [sys.executable, "-m", "tianji", "compare", *argv],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    (line,) = told.stdout.splitlines()
    tree = json.loads(line)
    assert tree["status"] == "done"
    assert Path(tree["html"]).exists()
    assert "1 of 1: serial" in told.stderr


def test_bad_words_on_the_command_line_are_refused(tmp_path, capsys):
    argv = ["compare", "ppo_cartpole", "--runs", str(tmp_path), "--presets"]
    assert main([*argv, "sync", "--seconds", "-1"]) == 2
    assert "--seconds" in capsys.readouterr().err
    assert main([*argv, "nonsense"]) == 2
    assert "no preset" in capsys.readouterr().err
    assert main([*argv, "sync", "no.key=1"]) == 2
    assert "no key" in capsys.readouterr().err


def test_a_comparison_does_not_write_into_another(tmp_path):
    first = compare(TOY, "stop.updates=1", presets=["serial"], runs=tmp_path)
    second = compare(TOY, "stop.updates=1", presets=["serial"], runs=tmp_path)
    assert first.folder != second.folder
    compare(TOY, "stop.updates=1", presets=["serial"], runs=tmp_path, name="mine")
    with pytest.raises(Refusal, match="exists already") as told:
        compare(TOY, "stop.updates=1", presets=["serial"], runs=tmp_path, name="mine")
    assert "resume" not in str(told.value), "a comparison cannot be"


def test_idle_is_what_a_role_does_not_work():
    apart = {"actor": {"simulate": 0.4, "wait_buffer": 0.6}, "learner": {"update": 1.0}}
    assert idle(apart, "produced") == pytest.approx(0.6)
    assert idle(apart, "consumed") == 0
    serial = {"serial": {"actor/simulate": 0.4, "learner/update": 0.5, "run/other": 0.1}}
    assert idle(serial, "produced") == pytest.approx(0.6)
    assert idle(serial, "consumed") == pytest.approx(0.5)
    assert idle({}, "consumed") is None
