"""Makes one phase of a run long enough to be hit, and ends a run when its folder says so; for the
processes of a run whose config imports this and whose environment names a folder."""

import functools
import os
import struct
import time
from pathlib import Path

from tianji.actor import Actor
from tianji.buffer import Buffer
from tianji.checkpoint import Checkpoints
from tianji.evaluator import Evaluator
from tianji.learner import Learner
from tianji.testing.faults import host_role
from tianji.trigger import register_trigger

PLACE, PHASE = "TIANJI_CHAOS", "TIANJI_CHAOS_PHASE"
"""in the environment: the folder of signs, and the phase that is stretched"""
LINGER = 1.0
"""seconds; shorter than the grace that hosts have to end"""
RECORD = struct.Struct("<qqd")
"""updates, steps, seconds since the epoch"""
TARGET, PROGRESS = "target", "progress"


def linger(phase, who):
    """Say that the phase has come, and stay in it for a while: once in a run for each role."""
    place = os.environ.get(PLACE)
    if place and os.environ.get(PHASE) == phase:
        try:
            (Path(place) / f"{phase}-{who}").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(LINGER)


def before(kind, method, phase, who, calls=1):
    """Linger before a method, when it is called for the `calls`-th time in a process or later."""
    plain, made = getattr(kind, method), 0

    @functools.wraps(plain)
    def wrapped(self, *args, **kwargs):
        nonlocal made
        made += 1
        if made >= calls and (name := who()):
            linger(phase, name)
        return plain(self, *args, **kwargs)

    setattr(kind, method, wrapped)


for role in (Actor, Buffer, Learner, Evaluator):
    before(role, "__init__", "start-up", host_role)
    # The second one: whatever happens in it, there is one before it.
    before(role, "state", "checkpointing", host_role, calls=2)
    before(role, "close", "shutdown", host_role)
before(Checkpoints, "_commit", "checkpointing", lambda: "launcher", calls=2)


@register_trigger("chaos")
def told_to_end(earlier, now):
    """Due when the target, a number of updates in a file, is reached. The learner, whom it is asked
    in after every update, also leaves a record of each."""
    place = Path(os.environ[PLACE])
    if host_role() == "learner":
        with (place / PROGRESS).open("ab") as file:
            file.write(RECORD.pack(now.updates, now.steps, time.time()))
    try:
        return now.updates >= int((place / TARGET).read_text())
    except (FileNotFoundError, ValueError):
        return False
