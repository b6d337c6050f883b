"""A run explained: what its folder has is on the page, what it has not is said, in every state."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tianji
from tianji import explain, run
from tianji.__main__ import main
from tianji.advice import of_shares
from tianji.config import load_config
from tianji.history import History
from tianji.plan import Choice
from tianji.view import markdown, report, timeline, words
from tianji.view.status import human, number

TOY = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 2},
    "network": {"hidden": [8]},
    "scale": {"envs_per_actor": 4, "rollout_length": 8},
    "stop": {"updates": 300},
}
LOCAL = ["scale.engine=local", "scale.actors=2", "stop.updates=200"]
VOID = {"meta", "br", "link", "img", "input", "hr"}
CLOSED = {"line", "rect", "circle", "polyline"}


class Balanced(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in CLOSED
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def checked(found):
    """Both pages of a run, which must be whole and reach for nothing outside of them."""
    page, text = report.html(found), markdown.markdown(found)
    parsed = Balanced(page)
    assert not re.search(r"https?://|<link|@import|\bsrc=|url\(", page)
    for host, shares in found.time.items():
        assert sum(shares.values()) == pytest.approx(1.0)
        figures = [float(figure.removesuffix(" %")) for *_, figure in words.bar(host, shares)]
        assert sum(figures) == pytest.approx(100.0)
    for tag, attributes in parsed.tags:
        if tag == "svg":
            assert attributes["aria-label"]
    for line in text.splitlines():
        assert line.count("<") == line.count("\\<")
    json.dumps(found.tree())
    return parsed, text


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return tianji.train(TOY, "eval.every=100", name="serial", runs=runs)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return tianji.train(TOY, LOCAL, name="local", runs=tmp_path_factory.mktemp("runs"))


@pytest.fixture(params=["serial", "local"])
def ended(request):
    return request.getfixturevalue(request.param)


def test_every_run_writes_its_report_and_its_result_stays_what_it_was(ended):
    folder = Path(ended.run_dir)
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(ended.tree()))
    before = (folder / "result.json").read_bytes()
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "report.md").read_text().startswith("# ")
    explain.write(folder)
    assert (folder / "result.json").read_bytes() == before


def test_the_numbers_of_the_page_are_those_of_the_result(ended):
    found = explain.explain(ended.run_dir)
    parsed, text = checked(found)
    facts = dict(words.facts(found))
    assert facts["steps"] == human(ended.steps)
    assert facts["updates"] == human(ended.updates)
    assert facts["return, last 100 episodes"] == number(ended.return_mean)
    assert facts["staleness, max"] == f"{ended.staleness['max']:.0f}"
    for name in ("produced", "received", "consumed"):
        assert found.rates[name] == ended.steps_per_s[name]
        assert facts[f"steps/s {name}"] == human(ended.steps_per_s[name])
    for value in facts.values():
        assert value in parsed.text
        assert value in text
    assert found.status == "done"
    assert ended.stop_reason in parsed.text


def test_the_time_of_every_role_is_that_of_the_result(ended):
    found = explain.explain(ended.run_dir)
    assert found.time.keys() == ended.time.keys()
    for host, shares in ended.time.items():
        for kind, share in shares.items():
            assert found.time[host][kind] == pytest.approx(share)
    assert found.time_seconds == ended.measured["seconds"]


def test_the_histogram_counts_all_that_was_consumed(local):
    found = explain.explain(local.run_dir)
    low, count = found.histogram["low"], found.histogram["count"]
    assert sum(a * b for a, b in zip(low, count, strict=True)) / sum(count) == pytest.approx(
        local.staleness["mean"]
    )
    assert max(low) == local.staleness["max"]
    bins = words.binned(found.histogram)
    assert sum(height for _, _, height in bins) == pytest.approx(sum(count))


def test_the_cycle_of_an_update_is_its_share_of_the_time(ended):
    found = explain.explain(ended.run_dir)
    measured = ended.measured
    assert measured["updates"] == ended.updates
    assert found.cycle.seconds == pytest.approx(measured["seconds"] / measured["updates"])
    for parts in found.cycle.parts.values():
        assert sum(parts.values()) == pytest.approx(found.cycle.seconds)
    assert {"acting", "updating", "taking"} <= found.cycle.phases.keys()


def test_the_longest_chain_accounts_for_all_of_its_time(ended):
    found = explain.explain(ended.run_dir)
    assert found.chain.updates >= 1
    assert sum(found.chain.spent.values()) == pytest.approx(found.chain.seconds)
    assert "learner/update" in found.chain.spent


def test_the_timeline_of_every_host_is_on_the_page(local):
    found = explain.explain(local.run_dir)
    parsed, _ = checked(found)
    data = [a for t, a in parsed.tags if t == "script" and a.get("class") == "tj-data"]
    assert len(data) == 1
    assert {track.host for track in found.tracks} == {"actor-0", "actor-1", "buffer", "learner"}
    cut = timeline.newest(found.tracks, 10)
    assert all(len(track.key) <= 11 for track in cut)
    assert max(track.end[-1] for track in cut) == max(track.end[-1] for track in found.tracks)


def test_without_a_plan_it_says_that_the_counts_came_from_the_config(serial):
    parsed, text = checked(explain.explain(serial.run_dir))
    assert "came from the config" in parsed.text
    assert "came from the config" in text


def copied(result, tmp_path, name="copy"):
    folder = tmp_path / name
    shutil.copytree(result.run_dir, folder, symlinks=True)
    return folder


def test_a_plan_is_shown_beside_what_was_measured(local, tmp_path):
    folder = copied(local, tmp_path)
    received = local.steps_per_s["received"]
    plan = {
        "choice": {"engine": "local", "actors": 2},
        "binding": "learner",
        "predicted": {"produced": 1.1 * received, "received": received, "new": 0.5 * received},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    found = explain.explain(folder)
    errors = {rate.name: rate.error for rate in found.planned.rates}
    assert errors["received"] == pytest.approx(0.0)
    assert errors["new"] == pytest.approx(-0.5, abs=0.02 + local.filtered / local.steps)
    parsed, text = checked(found)
    for page in (parsed.text, text):
        assert "engine local, actors 2" in page
        assert "+0.0 %" in page
    assert "new steps/s by the plan" in "\n".join(markdown.summary(found))
    plan["choice"] = dataclasses.asdict(Choice("local", 2, 8, 8))
    (folder / "plan.json").write_text(json.dumps(plan))
    text = checked(explain.explain(folder))[1]
    assert "Chosen: 2 actors with 8 envs each, a learner with 1 core, rollouts of 8 steps." in text
    (rate,) = (rate for rate in found.planned.rates if rate.name == "new")
    unknown = dataclasses.replace(found.planned, rates=(dataclasses.replace(rate, measured=None),))
    lines = markdown.summary(dataclasses.replace(found, planned=unknown))
    (line,) = (line for line in lines if "new steps/s by the plan" in line)
    assert "error" not in line, "nothing was measured"


def test_the_advice_of_a_verdict_comes_before_its_own(local, tmp_path):
    folder = copied(local, tmp_path)
    result = json.loads((folder / "result.json").read_text())
    result["bottleneck"] = {"kind": "train-bound", "text": "evidence", "advice": ["1 actor less"]}
    (folder / "result.json").write_text(json.dumps(result))
    found = explain.explain(folder)
    assert found.advice == ("1 actor less.",)
    assert found.verdict == "train-bound: evidence"
    result["bottleneck"]["advice"] = []
    result["rebalance"] = {
        "active": 1,
        "changes": [{"wall_s": 1.5, "steps": 10, "from": 2, "to": 1, "why": "it was <too> slow"}],
    }
    (folder / "result.json").write_text(json.dumps(result))
    found = explain.explain(folder)
    assert found.advice[0] == explain.NOTHING
    parsed, text = checked(found)
    assert "it was <too> slow" in parsed.text
    assert "it was \\<too\\> slow" in text


def test_names_and_messages_are_escaped(serial, tmp_path):
    folder = copied(serial, tmp_path, "<b>bold</b> & 'more'")
    result = json.loads((folder / "result.json").read_text())
    result["stop_reason"] = "<script>alert(1)</script> | `x` *y*"
    (folder / "result.json").write_text(json.dumps(result))
    fault = {"time": "2026-01-01T00:00:00", "role": "<i>", "cause": "</table>", "action": "|"}
    (folder / "faults.jsonl").write_text(json.dumps(fault) + "\n")
    found = explain.explain(folder)
    parsed, text = checked(found)
    assert "<script>alert(1)</script>" in parsed.text
    assert not {tag for tag, _ in parsed.tags} & {"b>", "marquee"}
    assert "<script>alert" not in report.html(found)
    assert "\\<script\\>" in text


def test_a_resumed_run_says_so_and_measures_its_last_process(serial, tmp_path):
    folder = copied(serial, tmp_path)
    more = tianji.resume(folder, "stop.updates=400")
    found = explain.explain(folder)
    parsed, _ = checked(found)
    assert "It was resumed (exact)" in parsed.text
    assert "last process alone" in parsed.text
    assert more.measured["updates"] == 100
    assert found.cycle.seconds == pytest.approx(more.measured["seconds"] / 100)
    steps = [row["step"] for row in found.history.rows]
    assert steps == sorted(steps)


def test_one_that_was_resumed_and_killed_is_not_taken_for_what_it_was(serial, tmp_path):
    folder = copied(serial, tmp_path)
    old = (folder / "result.json").read_bytes()
    tianji.resume(folder, "stop.updates=400")
    (folder / "result.json").write_bytes(old)
    found = explain.explain(folder)
    checked(found)
    assert found.status == "killed"
    assert found.counts["updates"] == 400


def test_a_result_that_cannot_be_read_is_not_taken_for_a_kill(serial, tmp_path):
    folder = copied(serial, tmp_path)
    (folder / "result.json").write_text('{"status": "do')
    found = explain.explain(folder)
    checked(found)
    assert found.status == "unknown"
    assert "result.json cannot be read" in found.ending


def test_one_update_and_no_episode_are_enough(tmp_path):
    result = tianji.train(TOY, "stop.updates=1", name="one", runs=tmp_path)
    assert result.updates == 1
    found = explain.explain(result.run_dir)
    parsed, _ = checked(found)
    assert found.counts["episodes"] == 0
    assert "there is no return to show" in parsed.text
    assert found.chain is None
    assert found.cycle is not None


def test_without_an_update_there_is_no_cycle_and_it_says_so(tmp_path):
    algorithm = {"name": "dqn", "warmup": 1000, "capacity": 2000}
    config = {**TOY, "algorithm": algorithm, "stop": {"steps": 64}}
    result = tianji.train(config, name="none", runs=tmp_path)
    assert result.updates == 0
    found = explain.explain(result.run_dir)
    parsed, _ = checked(found)
    assert found.cycle is None
    assert "no update was made" in parsed.text.lower()


def test_a_failed_run_is_explained_with_its_reason(tmp_path):
    config = {
        **TOY,
        "env": {"id": "testing/Fault", "imports": ["tianji.testing.faults"],
                "kwargs": {"at": {"raises": 40}, "marker": str(tmp_path / "marker")}},
        "faults": {"env_restarts": 0},
    }  # fmt: skip
    with pytest.raises(tianji.Failure, match="raised"):
        tianji.train(config, name="failed", runs=tmp_path)
    folder = tmp_path / "failed"
    assert (folder / "report.html").exists()
    found = explain.explain(folder)
    parsed, text = checked(found)
    assert found.status == "failed"
    assert "EnvFailed" in parsed.text
    assert len(found.faults) == 1
    assert "raised" in text


def test_restarts_are_on_the_page(tmp_path):
    config = {
        **TOY,
        "env": {"id": "testing/Fault", "imports": ["tianji.testing.faults"],
                "kwargs": {"at": {"raises": 40}, "marker": str(tmp_path / "marker")}},
        "stop": {"updates": 20},
    }  # fmt: skip
    result = tianji.train(config, name="restarted", runs=tmp_path)
    parsed, text = checked(explain.explain(result.run_dir))
    assert result.notes["env_restarts"] == 1
    assert "env restarts: 1" in parsed.text
    assert "env rebuilt" in parsed.text
    assert "env rebuilt" in text


@contextlib.contextmanager
def running(tmp_path, *overrides):
    """A run in another process, once it has written some rows."""
    argv = ["ppo_cartpole", "stop.return=inf", "stop.steps=100000000", *overrides]
    process = subprocess.Popen(
        [sys.executable, "-m", "tianji", "train", *argv, "--runs", tmp_path, "--name", "run"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    folder = tmp_path / "run"
    try:
        end = time.monotonic() + 60
        while not History.read(folder).rows:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield folder, process
    finally:
        process.kill()
        process.wait()


def test_a_run_is_explained_while_it_runs_and_after_it_was_killed(tmp_path):
    with running(tmp_path) as (folder, process):
        found = explain.explain(folder)
        checked(found)
        assert found.status == "running"
        assert found.time.keys() == {"serial"}
        assert main(["explain", str(folder)]) == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "wa')  # the line that it was writing
    (folder / "staleness.json").write_text('{"low": [0')
    found = explain.explain(folder)
    parsed, _ = checked(found)
    assert found.status == "killed"
    assert found.histogram is None
    assert "no result.json" in parsed.text
    assert found.counts["steps"] == found.history.rows[-1]["step"]


def test_processes_that_are_killed_leave_enough_to_explain(tmp_path):
    with running(tmp_path, "scale.engine=local", "scale.actors=2", "scale.envs_per_actor=32") as (
        folder,
        process,
    ):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    found = explain.explain(folder)
    checked(found)
    assert found.time.keys() == {"actor", "buffer", "learner"}
    assert found.advice


def test_a_run_that_was_killed_before_its_first_row_is_explained(serial, tmp_path):
    folder = tmp_path / "young"
    folder.mkdir()
    shutil.copy(Path(serial.run_dir, "config.toml"), folder)
    found = explain.explain(folder)
    parsed, _ = checked(found)
    assert found.status == "killed"
    for word in ("manifest.json is not there", "no account of the time", "No row of metrics"):
        assert word.lower() in parsed.text.lower()


@pytest.mark.parametrize(
    "overrides",
    [
        ["scale.relax=seed", "scale.actors=2"],
        ["scale.relax=a3c", "scale.groups=2"],
        ["scale.relax=tianji", "scale.groups=2"],
        ["scale.relax=tianji", "scale.learners=2", "scale.actors=2"],
    ],
    ids=["server", "workers", "groups", "learners"],
)
def test_several_groups_learners_workers_and_a_server_are_explained(overrides, tmp_path):
    result = tianji.train(TOY, [*overrides, "scale.engine=local", "stop.updates=60"],
                          name="several", runs=tmp_path)  # fmt: skip
    found = explain.explain(result.run_dir)
    checked(found)
    assert found.status == "done"
    groups = found.config["scale"]["groups"]
    each = result.measured["updates"] / groups
    assert found.cycle.seconds == pytest.approx(result.measured["seconds"] / each)
    assert found.advice
    if "scale.relax=seed" in overrides:
        assert "server" in found.time


def test_a_report_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.explain, "write", full)
    result = tianji.train(TOY, "stop.updates=2", name="full", runs=tmp_path)
    assert result.status == "done"
    assert "the report was not written" in (tmp_path / "full" / "log.txt").read_text()
    assert json.loads((tmp_path / "full" / "result.json").read_text())["status"] == "done"


def test_a_long_history_is_thinned_and_keeps_its_last_row(tmp_path):
    rows = [{"step": i, "wall_s": float(i), "updates": i, "episodes": 0} for i in range(5000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = History.read(tmp_path, most=100)
    assert len(found.rows) <= 100
    assert found.rows[-1] == rows[-1]
    assert found.every == 50


def test_rows_that_a_resume_went_back_behind_do_not_count(tmp_path):
    steps = [1, 2, 3, 4, 3, 4, 5]
    rows = [{"step": s, "wall_s": float(i), "updates": s} for i, s in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = History.read(tmp_path)
    assert [row["step"] for row in found.rows] == [1, 2, 3, 3, 4, 5]
    assert found.rows[3]["wall_s"] == 4.0


def test_the_command_writes_where_it_is_told_and_prints_one_object(serial, tmp_path, capsys):
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    argv = ["explain", serial.run_dir, "--html", str(page), "--markdown", str(text)]
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["status"] == "done"
    assert told["counts"]["steps"] == serial.steps
    assert told["html"] == str(page)
    assert page.exists()
    assert text.exists()


def test_what_is_no_run_and_what_cannot_be_written_are_refused(serial, tmp_path, capsys):
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    assert main(["explain", serial.run_dir, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "words"),
    [
        ({"actor": {"simulate": 0.3, "wait_buffer": 0.7}, "buffer": {"wait_actor": 1.0},
          "learner": {"update": 0.95, "wait_buffer": 0.05}}, "learner is the bottleneck"),
        ({"actor": {"simulate": 1.0}, "buffer": {"wait_actor": 1.0},
          "learner": {"update": 0.2, "wait_buffer": 0.8}}, "up to 5.0 times as many steps"),
        ({"actor": {"simulate": 0.95, "wait_buffer": 0.05}, "buffer": {"wait_actor": 1.0},
          "learner": {"update": 0.9, "wait_buffer": 0.1}}, "balanced"),
        ({"actor": {"simulate": 0.5, "wait_buffer": 0.5}, "buffer": {"wait_actor": 1.0},
          "learner": {"update": 0.5, "wait_buffer": 0.5}}, "at most 2.00 times as fast"),
        ({"actor": {"simulate": 0.2, "wait_server": 0.8}, "buffer": {"wait_actor": 1.0},
          "learner": {"update": 0.3, "wait_buffer": 0.7}, "server": {"infer": 1.0}},
         "inference server is busiest"),
        ({"actor": {"simulate": 0.2, "wait_buffer": 0.8}, "buffer": {"receive": 1.0},
          "learner": {"update": 0.3, "wait_buffer": 0.7}}, "buffer is busiest"),
        ({"serial": {"actor/simulate": 0.4, "learner/update": 0.5, "run/other": 0.1}},
         "at most 2.00 times as fast"),
    ],
)  # fmt: skip
def test_what_to_change_follows_from_where_the_time_goes(time, words):
    config = {"scale": {"actors": 4, "relax": "sync"}}
    told = of_shares(time, config, cores=8, scaling={})
    assert any(words in text for text in told), told


def test_fewer_actors_are_advised_only_where_fewer_would_do():
    time = {"actor": {"simulate": 0.3, "wait_buffer": 0.7}, "buffer": {"wait_actor": 1.0},
            "learner": {"update": 1.0}}  # fmt: skip
    four, one = (" ".join(of_shares(time, {"scale": {"actors": N}}, 8, {})) for N in (4, 1))
    assert "2 in place of 4" in four
    assert "in place of" not in one
    rebalanced = {"scale": {"actors": 4, "rebalance": True}}  # those that are not needed rest
    assert "in place of" not in " ".join(of_shares(time, rebalanced, 8, {}))


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({}, "`tianji profile` tells whether more cores (scale.cores) do."),
        ({1: 100.0}, "`tianji profile` tells whether more cores (scale.cores) do."),
        ({1: 100.0, 2: 40.0, 3: 104.0}, "More cores (scale.cores) do not, by the plan's profile."),
        ({1: 100.0, 2: 150.0, 3: 130.0}, "2 cores (scale.cores) make 1.50 times as many updates."),
        ({1: 100.0, 2: 150.0, 4: 151.0}, "2 cores (scale.cores) make 1.50 times as many updates."),
        ({1: 100.0, 8: 190.0}, "would, and actors have those that it needs."),
    ],
)
def test_more_cores_are_advised_for_a_learner_only_where_they_were_measured(scaling, told):
    time = {"actor": {"simulate": 0.3, "wait_buffer": 0.7}, "buffer": {"wait_actor": 1.0},
            "learner": {"update": 1.0}}  # fmt: skip
    config = {"scale": {"actors": 1, "cores": 1}}
    assert of_shares(time, config, 8, scaling)[0].endswith(told)


def test_a_run_that_is_cut_off_is_advised_by_its_plan(local, tmp_path):
    folder = copied(local, tmp_path)
    (folder / "result.json").unlink()
    plan = {"predicted": {"new": 1.0}, "rates": {"learn": {"1": 0.01, "2": 0.03}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    reader = explain._Reader(folder, running=True)
    time = {"actor": {"wait_buffer": 0.9}, "buffer": {"wait_actor": 1.0}, "learner": {"update": 1}}
    reader._time = time
    assert "do not, by the plan's profile" in " ".join(reader._own_advice())


TRAIN_BOUND = {
    "actor": {"simulate": 0.3, "wait_buffer": 0.7},
    "buffer": {"serve": 0.05, "wait_learner": 0.95},
    "learner": {"update": 0.94, "take": 0.06},
}


def with_result(folder, **changes):
    """Its result.json, with other values of some keys."""
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_finished_run_that_no_other_spread_helps_is_advised_as_a_killed_one_is(local, tmp_path):
    folder = copied(local, tmp_path)
    bottleneck = {"kind": "train-bound", "text": "learner 100 % busy", "advice": []}
    with_result(folder, time=TRAIN_BOUND, bottleneck=bottleneck, filtered=0)
    found = explain.explain(folder)
    first, second = found.advice
    assert first == "No other spread of the roles is predicted to bring more than 5 %."
    assert "The learner is the bottleneck: busy 100 %, of which update is 94 %" in second
    assert "Fewer epochs" not in second, "one epoch cannot be fewer"
    assert "arger minibatches (a lower algorithm.minibatches) make updates shorter" in second
    assert "in place of" not in " ".join(found.advice), "the verdict has judged that"
    parsed, text = checked(found)
    assert second in parsed.text
    assert "The learner is the bottleneck" in text
    assert f"next: {second}" in markdown.summary(found)


@pytest.mark.parametrize(
    ("algorithm", "told", "not_told"),
    [
        ({"epochs": 5, "minibatches": 4}, "Fewer epochs (algorithm.epochs) or larger minibatches",
         "batch_size"),
        ({"batch_size": 128, "new_steps": 4}, "Smaller batches (algorithm.batch_size) make updates "
         "shorter, a larger algorithm.new_steps fewer of them; more actors would only wait",
         "epochs"),
        ({"gamma": 0.9}, "A smaller network (network.hidden) makes updates shorter", "epochs"),
    ],
    ids=["on-policy", "replay", "neither"],
)  # fmt: skip
def test_only_what_the_algorithm_has_is_advised_for_its_updates(algorithm, told, not_told):
    config = {"algorithm": algorithm, "scale": {"actors": 1}}
    serial = {"serial": {"actor/simulate": 0.2, "learner/update": 0.8}}
    for shares, judged in ((TRAIN_BOUND, False), (TRAIN_BOUND, True), (serial, True)):
        text = " ".join(of_shares(shares, config, 8, {}, judged))
        assert told.split(";")[0] in text
        assert not_told not in text
    assert told in " ".join(of_shares(TRAIN_BOUND, config, 8, {}))


@pytest.mark.parametrize("name", ["dqn", "sac", "qmix", "a2c", "impala", "ppo"])
def test_keys_that_are_advised_are_keys_of_the_config(name):
    config = load_config(
        {"env": {"id": "CartPole-v1"}, "algorithm": {"name": name}, "stop": {"updates": 1}}
    )
    known = {row[0] for row in config.rows()}
    (text,) = of_shares(TRAIN_BOUND, config.tree(), 8, {}, judged=True)
    named = set(re.findall(r"(?:algorithm|network|scale)\.[a-z_]+", text))
    assert named
    assert named <= known, text


@pytest.mark.parametrize(
    "time",
    [
        {"actor": {"simulate": 0.9, "wait_buffer": 0.1}, "buffer": {"wait_actor": 1.0},
         "learner": {"update": 0.4, "wait_buffer": 0.6}},
        {"actor": {"simulate": 0.5, "wait_buffer": 0.5}, "buffer": {"wait_actor": 1.0},
         "learner": {"update": 0.5, "wait_buffer": 0.5}},
        {"serial": {"actor/simulate": 0.4, "learner/update": 0.5, "run/other": 0.1}},
        TRAIN_BOUND,
    ],
    ids=["actors", "turns", "serial", "learner"],
)  # fmt: skip
def test_after_a_verdict_no_other_spread_is_advised(time):
    """It has just been said that none would bring more."""
    config = {"algorithm": {"epochs": 4}, "scale": {"actors": 4, "relax": "sync"}}
    scaling = {1: 100.0, 2: 100.0, 3: 150.0}
    plain, judged = (" ".join(of_shares(time, config, 8, scaling, said)) for said in (False, True))
    spread = ("More actors (", "in place of", "A preset with a lead", "scale.engine", "3 cores")
    assert any(word in plain for word in spread)
    assert not any(word in judged for word in spread), judged
    assert len(judged) > 40


def test_a_preset_with_a_lead_is_not_advised_to_a_run_that_has_one():
    time = {"actor": {"simulate": 0.5, "wait_buffer": 0.5}, "buffer": {"wait_actor": 1.0},
            "learner": {"update": 0.5, "wait_buffer": 0.5}}  # fmt: skip
    (text,) = of_shares(time, {"scale": {"relax": "tianji"}}, 8, {})
    assert "A larger relax.lead" in text
    assert "preset" not in text
    (text,) = of_shares(time, {"scale": {"relax": "tianji"}, "relax": {"lead": 0}}, 8, {})
    assert "A preset with a lead" in text


def planned_run(local, tmp_path, predicted, capacity, binding="learner", **changes):
    """A copy of a run that made 1000 new steps/s, with a plan."""
    folder = copied(local, tmp_path)
    rates = {"produced": 1000.0, "received": 1000.0, "consumed": 1000.0}
    measured = {"begin": 0.0, "seconds": 60.0, "updates": 200, "steps": 60_000}
    with_result(folder, **{"steps_per_s": rates, "measured": measured, "filtered": 0,
                           "time": TRAIN_BOUND} | changes)  # fmt: skip
    plan = {"predicted": {"new": predicted}, "binding": binding, "capacity": capacity}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


AGAIN = "`tianji plan CONFIG --again` measures this machine anew."


@pytest.mark.parametrize(
    ("predicted", "capacity", "told", "not_told"),
    [
        (1500.0, {"actors": 3400.0, "learner": 1500.0, "channel": 1e6},
         ["33 % slower than predicted", "The learner could do 1.0 k new steps/s without ever "
          "waiting, where the plan took 1.5 k (-33 %)."], ["The actors could", "The buffer could"]),
        (1500.0, {"actors": 9000.0, "learner": 1500.0, "channel": 1e6},
         ["The learner could do"], ["The actors could"]),  # which made nothing slower
        (700.0, {"actors": 3400.0, "learner": 700.0, "channel": 1e6},
         ["43 % faster than predicted", "The learner could do 1.0 k new steps/s without ever "
          "waiting, where the plan took 700 (+43 %)."], ["The actors could"]),
        (700.0, {"actors": 700.0, "learner": 1100.0, "channel": 1e6},
         ["The actors could do 3.3 k", "took 700 (+376 %)"], ["The learner could"]),
        (1500.0, {"actors": 3500.0, "learner": 1100.0, "channel": 1.9e4},
         ["No side explains it", "the actors -5 %, the learner -9 %, the buffer +5 %"],
         ["could do 1"]),
        (1500.0, {}, ["33 % slower than predicted"], ["could do", "No side"]),
    ],
    ids=["slower", "only who held it up", "faster", "actors faster", "nobody", "not known"],
)  # fmt: skip
def test_where_a_plan_was_off_it_is_said_which_side_was(
    predicted, capacity, told, not_told, local, tmp_path
):
    found = explain.explain(planned_run(local, tmp_path, predicted, capacity))
    text = " ".join(found.planned.deviation)
    for words_ in (*told, AGAIN):
        assert words_ in text
    for words_ in not_told:
        assert words_ not in text
    assert found.tree()["plan"]["deviation"] == found.planned.deviation
    parsed, page = checked(found)
    assert text in parsed.text
    assert "tianji plan CONFIG --again" in page
    assert f"plan: {text}" in markdown.summary(found)


def test_a_plan_that_was_about_right_is_not_commented_on(local, tmp_path):
    capacity = {"actors": 10_000.0, "learner": 1140.0, "channel": 1e6}
    found = explain.explain(planned_run(local, tmp_path, 1140.0, capacity))
    assert found.planned.deviation == ()
    assert "--again" not in checked(found)[1]


def test_of_roles_in_turn_the_one_that_took_longer_is_named(local, tmp_path):
    time = {"serial": {"actor/simulate": 0.2, "buffer/receive": 0.01, "learner/update": 0.79}}
    capacity = {"actors": 5000.0, "learner": 2000.0, "channel": 1e5}  # 1408 new steps/s in turn
    found = explain.explain(
        planned_run(local, tmp_path, 1408.0, capacity, binding="turns", time=time)
    )
    text = " ".join(found.planned.deviation)
    assert "The learner could do 1.3 k new steps/s without ever waiting" in text
    assert "took 2.0 k (-37 %)" in text
    assert "The actors" not in text


def test_a_short_run_and_a_plan_from_a_look_are_said_where_it_was_off(local, tmp_path):
    measured = {"begin": 0.0, "seconds": 0.7, "updates": 200, "steps": 700}
    folder = planned_run(local, tmp_path, 1500.0, {}, measured=measured)
    assert "Only 0.7 s of training" in " ".join(explain.explain(folder).planned.deviation)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"whole": False}))
    assert "from a look of 2 s" in explain.explain(folder).planned.deviation[-1]


def test_two_pages_are_never_written_into_one_file(serial, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for html, text in (("same.x", "./same.x"), (f"{serial.run_dir}/report.md", None)):
        argv = ["explain", serial.run_dir, "--html", html, *(["--markdown", text] if text else [])]
        before = Path(serial.run_dir, "report.md").read_bytes()
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "--html and --markdown would both be" in said
        assert "the second would overwrite the first. Give each a file of its own" in said
        assert Path(serial.run_dir, "report.md").read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_a_broken_trace_of_one_host_is_said_beside_the_others(local, tmp_path):
    folder = copied(local, tmp_path)
    path = folder / "trace" / "actor-1.trace"
    path.write_bytes(path.read_bytes()[:4200])
    found = explain.explain(folder)
    assert {track.host for track in found.tracks} == {"actor-0", "buffer", "learner"}
    assert found.chain is not None
    assert "actor-1" in found.tree()["missing"]["timeline"]
    parsed, text = checked(found)
    for page in (parsed.text, text):
        assert "Of actor-1 nothing is shown" in page
        assert "actor-1.trace is cut short" in page
    assert "It is on the HTML page." in text
    assert sum(a.get("class") == "tj-data" for _, a in parsed.tags) == 1


def test_a_plan_that_cannot_be_read_is_said(local, tmp_path):
    folder = copied(local, tmp_path)
    for text in ("{", '{"x": 1}', '{"predicted": 3}'):
        (folder / "plan.json").write_text(text)
        found = explain.explain(folder)
        assert found.planned is None
        assert "cannot be read as a plan" in found.missing["plan"]


def test_the_page_is_shown_in_a_browser_on_demand(serial, tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or False)
    page = tmp_path / "page.html"
    argv = ["explain", serial.run_dir, "--html", str(page), "--markdown", str(tmp_path / "m.md")]
    assert main([*argv, "--open"]) == 0
    assert shown == [page.as_uri()]
    assert "no browser was found" in capsys.readouterr().err


def test_actors_that_wait_for_a_server_are_not_too_many():
    time = {"actor": {"simulate": 0.2, "wait_server": 0.8}, "buffer": {"wait_actor": 1.0},
            "server": {"infer": 0.5, "wait_actor": 0.5}, "learner": {"update": 1.0}}  # fmt: skip
    told = " ".join(of_shares(time, {"scale": {"actors": 4}}, 8, {}))
    assert "learner is the bottleneck" in told
    assert "in place of" not in told


def test_a_row_of_a_moment_is_not_drawn_as_a_rate():
    rows = [{"step": i, "wall_s": at, "updates": i, "flow/received_sps": 1.0}
            for i, at in enumerate((1.0, 2.0, 3.0, 3.01))]  # fmt: skip
    assert [x for x, _ in History(rows).flow("flow/received_sps")] == [1.0, 2.0, 3.0]
    assert len(History(rows[:1]).flow("flow/received_sps")) == 1
