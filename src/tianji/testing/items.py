"""What the checkers of transports send, and what must be true of it when it arrives."""

from __future__ import annotations

import mmap
import time

import numpy as np

from tianji.channel import Conduit, Inbox, Slot
from tianji.types import Array, Params, leaf

SLOTS = 3
LAYOUT = {"head": leaf((2,), np.int64), "body": leaf((512,), np.int64)}


def content(sender: int, number: int) -> Array:
    return np.arange(512) * (sender + 1) + number * 1_000


def fill(slot: Slot, sender: int, number: int, rng: np.random.Generator | None = None) -> None:
    slot.leaf("head")[:] = sender, number
    if rng is not None:
        pause(rng)
    slot.leaf("body")[:] = content(sender, number)


def intact(slot: Slot, sender: int, number: int, probed: bool = False) -> None:
    """Has the slot what was pushed, when it is probed, and still when it is released?"""
    head = slot.leaf("head").tolist()
    if probed:
        wrong = moved = "an item changed while the receiver held it: slots are granted too early"
    else:
        moved = (
            f"item {head[1]} of sender {head[0]} came where {number} of sender {sender} was due: "
            "an item was lost, doubled or moved"
        )
        wrong = "an item arrived that is not whole"
    assert head == [sender, number], moved
    if not probed:
        assert slot.update == number, (
            f"an item came with update {slot.update} where {number} was due"
        )
    assert (slot.arrays["body"] == content(sender, number)).all(), wrong


def grant(inbox: Inbox, update: int, used: int) -> bool:
    given = inbox.grant(update)
    if given:
        assert used < SLOTS, "a slot was granted that is still in use: its data would be lost"
    else:
        assert used == SLOTS, "a grant was refused although a slot is free: the run would stall"
    return given


def reclaim(inbox: Inbox, numbers: list[tuple[int, int]], free: int) -> None:
    found = inbox.reclaim()
    assert found == numbers, f"grants {numbers} were never pushed, and reclaim() gave {found}"
    assert inbox.out == 0, "what was reclaimed is no longer out"
    assert len(set(inbox.state()["free"])) == free, "slots that were reclaimed must be free again"


def params_of(conduit: Conduit, version: int) -> Params:
    """A version of a newest-only conduit: all its numbers are this one."""
    params = Params(conduit.layout)
    params.flat[:] = version
    return params


def whole(version: int, seen: int, params: Params) -> None:
    out = params.flat
    assert version >= seen, f"version {version} came after version {seen}"
    assert version == seen or (out == version).all(), (
        f"version {version} was read half: it has numbers of {np.unique(out)[:3]}"
    )


def pause(rng: np.random.Generator) -> None:
    if rng.random() < 0.05:
        time.sleep(rng.uniform(0.0, 0.002))


def dawdle(rng: np.random.Generator) -> None:
    """Be the slower one, so that the other has always something under way when it is killed."""
    time.sleep(rng.uniform(0.0, 0.002))


def shared(count: int) -> Array:
    """Integers that forked processes share, so that they can tell each other how far they are."""
    numbers: Array = np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
    return numbers
