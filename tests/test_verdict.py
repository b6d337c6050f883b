"""Who waits for whom, in one line."""

import pytest

from tianji.verdict import by_role, verdict

IDLE_BUFFER = {"serve": 0.05, "wait_actor": 0.95}


def of(actor_waits, learner_waits, buffer=IDLE_BUFFER):
    return {
        "actor": {"simulate": 1 - actor_waits, "wait_buffer": actor_waits},
        "learner": {"update": 1 - learner_waits, "wait_buffer": learner_waits},
        "buffer": buffer,
    }


@pytest.mark.parametrize(
    ("time", "told"),
    [
        (of(0.41, 0.07), "learner 93 % busy; actors blocked 41 % on learner"),
        (of(0.03, 0.60), "actors 97 % busy; learner blocked 60 % on actors"),
        (of(0.05, 0.10), "learner 90 % busy; actors 95 % busy: balanced"),
        (of(0.5, 0.5, {"serve": 0.9, "wait_actor": 0.1}),
         "buffer 90 % busy: actors and learner wait for it"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named_with_who_waits_for_it(time, told):
    assert verdict(time) == told


def test_actors_that_wait_for_a_server_are_told_from_those_that_wait_for_the_learner():
    time = of(0.1, 0.3) | {"server": {"infer": 0.4, "wait_actor": 0.6}}
    assert verdict(time) == "actors 90 % busy; learner blocked 30 % on actors"
    time["actor"] = {"simulate": 0.3, "wait_server": 0.6, "wait_buffer": 0.1}
    assert verdict(time) == "server 40 % busy; actors blocked 60 % on server"
    time["actor"] = {"simulate": 0.3, "wait_server": 0.1, "wait_buffer": 0.6}
    assert verdict(time) == "learner 70 % busy; actors blocked 70 % on learner"


def test_in_one_process_nobody_waits():
    assert verdict({"serial": {"actor/infer": 0.4, "learner/update": 0.6}}) == ""
    shares = {"actor/infer": 0.3, "buffer/serve": 0.1, "learner/update": 0.6}
    assert verdict(by_role(shares)) == ""


def test_shares_are_sorted_by_role():
    shares = {"actor/infer": 0.2, "actor/wait_buffer": 0.8, "learner/update": 1.0}
    assert by_role(shares) == {
        "actor": {"infer": 0.2, "wait_buffer": 0.8},
        "learner": {"update": 1.0},
    }
