"""Names of roles and the table of their kinds; and a kind that is not one of ours."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji import trace
from tianji.advice import of_shares
from tianji.compare import idle
from tianji.critical import chain, cycle
from tianji.driver import Forever
from tianji.placement import Placement, placements, wanted
from tianji.role import Did, generator
from tianji.role_names import KINDS, STREAMS, Activity, RoleKind, RoleName, parse_role
from tianji.role_names import register_role as register
from tianji.verdict import judge
from tianji.view import perfetto, timeline, words

TEACHER = RoleKind(
    "teacher",
    stream=8,
    numbered=True,
    works_on=("wait_judge",),
    activities={"label": Activity("inference", "labelling"), "ponder": Activity()},
)
TIME = {
    "actor": {"simulate": 0.6, "wait_buffer": 0.4},
    "buffer": {"serve": 0.05, "wait_actor": 0.95},
    "learner": {"update": 0.9, "wait_buffer": 0.1},
}


@pytest.fixture
def registered():
    """Makes kinds of roles known for a test."""
    ours = dict(KINDS)
    yield register
    KINDS.clear()
    KINDS.update(ours)


@pytest.fixture
def teacher(registered):
    return registered(TEACHER)


@given(
    st.sampled_from([*KINDS, "worker", "serial", "teacher"]),
    st.integers(0, 99),
    st.none() | st.integers(0, 99),
)
def test_a_name_is_parsed_as_it_was_written(kind, index, group):
    name = RoleName(kind, index, group)
    assert parse_role(str(name)) == name


def test_names_are_written_as_ever():
    names = RoleName("actor"), RoleName("learner"), RoleName("learner", 2, 1), RoleName("actor", 3)
    assert [*map(str, names)] == ["actor-0", "learner", "g1.learner-2", "actor-3"]


def test_random_streams_are_those_of_ever():
    """Weights depend on them."""
    streams = {name: kind.stream for name, kind in KINDS.items()} | STREAMS
    assert streams == {
        "actor": 0, "buffer": 1, "learner": 2, "evaluator": 3, "env": 4, "eval_env": 5, "init": 6,
        "server": 7,
    }  # fmt: skip


@pytest.mark.parametrize("stream", range(8))
def test_a_stream_that_is_in_use_is_refused(stream, registered):
    with pytest.raises(ValueError, match=f"stream {stream} is that of .* 8 is free"):
        registered(RoleKind("teacher", stream))


@pytest.mark.parametrize("name", ["worker", "serial", "driver", "run", "my-role", "my.role", ""])
def test_a_kind_is_not_named_so_that_files_could_not_tell_it(name, registered):
    with pytest.raises(ValueError, match="cannot name a role"):
        registered(RoleKind(name, 8))


def test_what_cannot_be_drawn_is_refused(registered):
    with pytest.raises(ValueError, match=r"teacher: dreams has no colour.* inference, simulation"):
        registered(RoleKind("teacher", 8, activities={"label": Activity("dreams")}))
    drawn = set(timeline.LEGEND) - {"wait"}
    for i, picture in enumerate(drawn):
        registered(RoleKind(f"teacher{i}", 8 + i, activities={"label": Activity(picture)}))


def test_a_module_may_be_imported_twice(teacher, registered):
    registered(TEACHER)


def test_a_foreign_role_has_random_numbers_of_its_own(teacher):
    drawn = {kind: generator(7, kind).integers(2**62) for kind in (*KINDS, *STREAMS)}
    assert len(set(drawn.values())) == len(drawn) == 9
    assert generator(7, "teacher").integers(2**62) == drawn["teacher"]
    assert generator(7, "teacher", 1).integers(2**62) != drawn["teacher"]


def test_a_foreign_role_runs_on_what_learners_and_actors_leave(teacher):
    names = ["actor-0", "buffer", "learner", "teacher-0"]
    hosts = {name: (parse_role(name),) for name in names}
    placed = placements(hosts, [2, 3, 5], learner_cores=1, pin=True)
    assert placed == [
        Placement("actor-0", (3,), 1),
        Placement("buffer", (3, 5), 1),
        Placement("learner", (2,), 1),
        Placement("teacher-0", (3, 5), 1),
    ]
    assert wanted(hosts, learner_cores=1) == 2


def test_a_foreign_role_that_produces_has_cores_as_an_actor_has(registered):
    registered(RoleKind("generator", 8, flow="produced"))
    hosts = {str(name): (name,) for name in (RoleName("generator"), RoleName("learner"))}
    placed = placements(hosts, range(4), learner_cores=1, pin=True, env_threads=2)
    assert [p.cores for p in placed] == [(1, 2), (0,)]
    assert wanted(hosts, learner_cores=1, env_threads=2) == 3


class Teacher:
    name = RoleName("teacher", 1)

    def __init__(self):
        self._did = [Did("label"), Did("ponder"), Did(waits="buffer")]

    def step(self):
        self._did.append(self._did.pop(0))
        return self._did[-1]


def traced(folder):
    """A host of a foreign role beside two of ours, each with events of a tenth of a second."""
    now = iter(np.arange(0.0, 1000.0, 0.1))
    driver = Forever([Teacher()], lambda seconds: None, lambda: float(next(now)))
    for _ in range(6):
        driver.step()
    begin, keys, ends = driver.events()
    hosts = {
        "g0.learner": ["learner/update", "learner/wait_teacher"] * 4,
        "g0.actor-0": ["actor/simulate", "actor/wait_buffer"] * 4,
        str(RoleName("teacher", 1, group=0)): keys,
    }
    for host, events in hosts.items():
        ring = trace.Ring(trace.path_of(folder, host))
        ring.write(begin, events[: len(ends)], ends)
        ring.close()
    (folder / "config.toml").touch()
    return trace.read(folder)


def test_a_foreign_role_is_timed_traced_and_drawn(teacher, tmp_path):
    tracks = traced(tmp_path)
    assert [track.host for track in tracks] == ["g0.actor-0", "g0.learner", "g0.teacher-1"]
    last = tracks[-1]
    assert last.keys == ("teacher/label", "teacher/ponder", "teacher/wait_buffer")
    assert [trace.kind_of(key) for key in last.keys] == ["inference", "other", "wait"]
    text = timeline.page(tracks, "a run")
    data = re.search(r'<script type="application/json" class="tj-data">(.*?)</script>', text, re.S)
    content = json.loads(data[1])
    assert content["roles"][-2:] == ["teacher", "run"]
    kinds = [content["kinds"][kind] for kind in content["tracks"][-1]["kind"]]
    assert kinds == ["inference", "other", "wait"]
    events = [json.loads(event) for event in perfetto.events(tracks)]
    drawn = {event["name"]: event["cat"] for event in events if event["ph"] == "X"}
    assert drawn["label"] == "1 inference"
    assert "teacher" in {event["args"].get("name") for event in events if event["ph"] == "M"}


def test_a_wait_for_a_foreign_role_is_followed_to_it(teacher, tmp_path):
    found = chain(traced(tmp_path))
    assert found.spent["teacher/label"] > 0


def test_the_trace_of_a_role_that_is_not_known_here_is_drawn_all_the_same(tmp_path):
    tracks = traced(tmp_path)
    (track,) = (track for track in tracks if parse_role(track.host).kind == "teacher")
    assert [trace.kind_of(key) for key in track.keys] == ["other", "other", "wait"]
    assert trace.kind_of("teacher/infer") == "inference", "as others call such work"
    assert "teacher-1" in timeline.page(tracks, "a run")


def test_a_foreign_role_is_part_of_the_account_and_changes_no_verdict(teacher):
    time = TIME | {"teacher": {"label": 0.95, "wait_actor": 0.05}}
    assert judge(time) == judge(TIME)
    assert of_shares(time, {}, None, {}) == of_shares(TIME, {}, None, {})
    found = cycle(time, seconds=10.0, updates=10)
    assert found.phases["labelling"] == pytest.approx(0.95)
    assert (found.bound, found.busy["teacher"]) == ("teacher", pytest.approx(0.95))
    assert words.host_words("teacher") == "teachers, mean"
    assert [name for _, _, name, _ in words.bar("teacher", time["teacher"])] == [
        "label", "waits for actor",
    ]  # fmt: skip


def test_a_foreign_role_in_a_host_with_others_is_part_of_its_account(teacher):
    time = {"serial": {"actor/simulate": 0.3, "learner/update": 0.4, "teacher/label": 0.3}}
    assert "label 30 %" in judge(time).text
    assert cycle(time, 1.0, 1).phases["labelling"] == pytest.approx(0.3)


def test_a_foreign_role_that_produces_is_judged_as_actors_are(registered):
    registered(RoleKind("generator", 8, flow="produced", works_on=("wait_judge",)))
    time, as_actor = dict(TIME), {"simulate": 0.2, "wait_server": 0.4, "wait_buffer": 0.4}
    del time["actor"]
    time["generator"] = {"sample": 0.2, "wait_judge": 0.4, "wait_buffer": 0.4}
    assert judge(time) == judge(TIME | {"actor": as_actor})
    assert judge(time).busy["produced"] == pytest.approx(0.6)
    advice = of_shares(TIME | {"actor": as_actor}, {}, None, {})
    assert of_shares(time, {}, None, {}) == advice
    assert idle(time, "produced") == pytest.approx(0.8)
