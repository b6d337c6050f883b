"""What bounds an update: from accounts, and from traced events with a known answer."""

import numpy as np
import pytest

from tianji.critical import chain, cycle, waiting, waits_for
from tianji.trace import Track

APART = {
    "actor": {"infer": 0.1, "simulate": 0.2, "wait_buffer": 0.7},
    "buffer": {"receive": 0.02, "serve": 0.01, "wait_actor": 0.3, "wait_learner": 0.67},
    "learner": {"take": 0.05, "update": 0.85, "wait_buffer": 0.1},
}


def test_whom_a_kind_of_time_waits_for():
    assert waits_for("wait_buffer") == "buffer"
    assert waits_for("actor/wait_learner") == "learner"
    assert waits_for("actor/simulate") == ""
    assert waiting({"update": 0.6, "wait_buffer": 0.3, "wait_checkpoint": 0.1}) == pytest.approx(
        0.4
    )


def test_a_cycle_is_the_time_of_an_update_and_its_parts_are_shares_of_it():
    found = cycle(APART, seconds=10.0, updates=50)
    assert found.seconds == pytest.approx(0.2)
    assert found.bound == "learner"
    assert found.parts["learner"]["update"] == pytest.approx(0.17)
    assert sum(found.parts["actor"].values()) == pytest.approx(0.2)
    assert found.phases == pytest.approx(
        {"acting": 0.06, "receiving": 0.006, "taking": 0.01, "updating": 0.17,
         "the learner waits": 0.02}
    )  # fmt: skip


def test_actors_that_are_busiest_bound_the_cycle():
    slow = {**APART, "actor": {"simulate": 1.0}, "learner": {"update": 0.2, "wait_buffer": 0.8}}
    assert cycle(slow, 10.0, 50).bound == "actor"


def test_the_keys_of_one_process_name_the_roles():
    serial = {"serial": {"actor/infer": 0.2, "actor/simulate": 0.3, "buffer/receive": 0.1,
                         "learner/update": 0.3, "run/other": 0.1}}  # fmt: skip
    found = cycle(serial, 2.0, 2)
    assert found.phases == pytest.approx({"acting": 0.5, "receiving": 0.1, "updating": 0.3})


def test_without_an_update_there_is_no_cycle():
    assert cycle(APART, 10.0, 0) is None
    assert cycle(APART, 0.0, 5) is None
    assert cycle({}, 10.0, 5) is None


def track(host, *events):
    """Events are (name, begin, end)."""
    names = tuple(dict.fromkeys(name for name, _, _ in events))
    return Track(
        host, names,
        np.array([names.index(name) for name, _, _ in events], np.int16),
        np.array([begin for _, begin, _ in events], np.float64),
        np.array([end for _, _, end in events], np.float64),
    )  # fmt: skip


def alternating(cycles=4):
    """The learner updates for 2 s and waits 3 s for a rollout that takes 2.5 s to simulate, 0.5 s
    to be received and served."""
    learner, buffer, actor = [], [], []
    for i in range(cycles):
        t = 5.0 * i
        learner += [("learner/update", t, t + 2), ("learner/wait_buffer", t + 2, t + 5)]
        actor += [("actor/wait_learner", t, t + 2), ("actor/simulate", t + 2, t + 4.5),
                  ("actor/wait_buffer", t + 4.5, t + 5)]  # fmt: skip
        buffer += [("buffer/wait_actor", t, t + 4.5), ("buffer/serve", t + 4.5, t + 5)]
    learner.append(("learner/update", 5.0 * cycles, 5.0 * cycles + 2))
    return track("actor-0", *actor), track("buffer", *buffer), track("learner", *learner)


def test_a_chain_goes_through_whoever_ended_the_wait_and_has_no_hole():
    found = chain(alternating())
    assert found.updates == 4
    assert found.seconds == pytest.approx(20.0)
    assert sum(found.spent.values()) == pytest.approx(20.0)
    assert found.spent == pytest.approx(
        {"learner/update": 8.0, "buffer/serve": 2.0, "actor/simulate": 10.0, "handover": 0.0}
    )


def test_of_two_actors_the_later_one_is_on_the_chain():
    actor, buffer, learner = alternating()
    quick = track("actor-1", *((("actor/infer"), 5.0 * i + 2, 5.0 * i + 3) for i in range(4)))
    assert "actor/infer" not in chain([quick, actor, buffer, learner]).spent


def test_another_group_is_not_on_the_chain():
    mine = [Track(f"g0.{t.host}", t.keys, t.key, t.begin, t.end) for t in alternating()]
    other = track("g1.buffer", ("buffer/grant", 0.0, 4.9), ("buffer/grant", 5.0, 9.9))
    assert "buffer/grant" not in chain([other, *mine]).spent


def test_a_wait_that_nothing_explains_stays_one():
    lone = track("learner", ("learner/update", 0, 1), ("learner/wait_buffer", 1, 4),
                 ("learner/update", 4, 5))  # fmt: skip
    found = chain([lone])
    assert found.spent == pytest.approx({"learner/update": 1.0, "learner/wait_buffer": 3.0})
    assert found.hops == 0


def test_one_process_is_a_chain_of_all_that_it_did():
    serial = track("serial", ("learner/update", 0, 1), ("actor/simulate", 1, 3),
                   ("driver/turn", 3, 3.5), ("learner/update", 3.5, 5))  # fmt: skip
    assert chain([serial]).spent == pytest.approx(
        {"actor/simulate": 2.0, "driver/turn": 0.5, "learner/update": 1.5}
    )


def test_without_two_updates_there_is_no_chain():
    assert chain([]) is None
    assert chain([track("learner", ("learner/update", 0, 1))]) is None
    assert chain([track("actor-0", ("actor/simulate", 0, 1))]) is None


def test_a_chain_is_over_so_many_updates_at_most():
    assert chain(alternating(30), updates=5).updates == 5
