"""What launcher and hosts send each other arrives as it was, or is refused."""

import numpy as np
import pytest

from tianji.engines import messages, wire
from tianji.fault import Fault
from tianji.role_names import RoleName
from tianji.tally import Tally, only_counts
from tianji.watch import Due


def sent(message):
    ours, theirs = wire.pair()
    with ours, theirs:
        wire.send(ours, message)
        return wire.receive(theirs)


def learnt():
    tally = Tally()
    tally.add(only_counts(3, 40, 30, 20))
    return messages.Learnt(tally.state(), Due(stop="steps >= 30", save=True))


@pytest.mark.parametrize(
    "message",
    [
        messages.Ready("abc"), messages.Go(1.5), messages.Stop(), messages.Pause(3),
        messages.Activate((0, 2)), messages.Follow({"actor-1": messages.Made(64, 2)}),
        messages.Status(2.0, {"actor/infer": 0.5}, 1.0, "infer", version=-1, filling=True),
        messages.Faulted(Fault("actor-0", "raised", seed=None)),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_arrives_as_it_was_sent(message):
    packet = sent(message)
    assert packet.fds == []
    assert packet.message() == message


def test_counts_and_what_is_due_arrive():
    found = sent(learnt()).message()
    assert found.due == Due(stop="steps >= 30", save=True)
    assert Tally.of(found.tally).last.received == 30


def test_states_keep_their_arrays_and_their_kinds():
    state = {"a": np.arange(3, dtype=np.int16), "b": [None, True, 2**70, float("inf")], "$": {}}
    found = sent(messages.States(1, {"actor-0": state})).message()
    assert found.roles["actor-0"]["a"].dtype == np.int16
    assert {**found.roles["actor-0"], "a": None} == {**state, "a": None}


@pytest.mark.parametrize("state", [{"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}])
def test_a_state_that_would_come_back_as_another_is_refused(state):
    with pytest.raises(TypeError, match="States/roles/actor-0/x"):
        sent(messages.States(1, {"actor-0": state}))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("Nonsense", "{}", "is no message"),
        ("Go", "{}", 'it has no "elapsed"'),
        ("Go", '{"elapsed": "soon"}', "elapsed is 'soon', no number"),
        ("Go", '{"elapsed": 1.0, "more": 2}', '"more" is unknown here'),
        ("Activate", '{"actors": [0, "1"]}', "actors.1 is"),
    ],
)
def test_what_is_no_message_is_refused(kind, text, words):
    with pytest.raises(ValueError, match=words):
        wire.Packet(kind, text.encode(), {}, []).message()


def test_a_message_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "MOST_TEXT", 64)
    with pytest.raises(ValueError, match="64 is the most"):
        sent(messages.Ready("x" * 65))


def test_names_of_roles_arrive():
    renew = messages.Renew("g1.actor-0", (RoleName("actor", 0, 1),), 2, wire_offer())
    assert sent(renew).message().roles == (RoleName("actor", 0, 1),)


def wire_offer():
    from tianji.channel import Offer

    return Offer("shm", {"ends": []})
