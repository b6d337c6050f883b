"""A host without supervision, for supervision.py: it writes nothing for the launcher to look at.

The functions are the real ones less some lines, so that they stay in step with them; a line that is
not there any more is an error. A run imports this by env.imports. Where the variable SUPERVISION is
"without", the launcher does not look, either; where it is set, actors log what they took.
"""

import inspect
import json
import os
import textwrap
import time
from collections.abc import Callable
from typing import Any

from tianji.engines.host import Host
from tianji.engines.local import LocalEngine

SUPERVISION = "TIANJI_BENCHMARK_SUPERVISION"
TOLD = "took "
BEATS = ("beats = 0", "beats += 1", "board[place + BEAT] = beats")
STEPS = ("self._board[self._place + STEP] = role.steps",)


def without(function: Callable[..., Any], lines: tuple[str, ...]) -> Callable[..., Any]:
    """The function less these lines."""
    kept = textwrap.dedent(inspect.getsource(function)).splitlines()
    for line in lines:
        found = [i for i, text in enumerate(kept) if text.strip() == line]
        if len(found) != 1:
            raise RuntimeError(
                f"{function.__qualname__} has {line!r} {len(found)} times, so that supervision "
                f"cannot be taken out of it. Let this module follow it."
            )
        del kept[found[0]]
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + "\n".join(kept), __file__, "exec")
    exec(code, function.__globals__, made)
    return made[function.__name__]


def unwatched() -> dict[str, Callable[..., Any]]:
    """The functions of a host that supervision is in, without it, by name."""
    return {
        "_run": without(Host._run, BEATS),
        "_after_simulation": without(Host._after_simulation, STEPS),
    }


def telling(run: Callable[[Host], None]) -> Callable[[Host], None]:
    """A host's loop that says at its end what an actor took."""

    def told(self: Host) -> None:
        begun = time.process_time()
        run(self)
        if self._actor is not None:
            took = {"cpu_s": time.process_time() - begun, "steps": self._actor.produced}
            print(TOLD + json.dumps(took))

    return told


if SUPERVISION in os.environ:
    if os.environ[SUPERVISION] == "without":
        for name, function in unwatched().items():
            setattr(Host, name, function)
        LocalEngine._look_for_hangs = lambda self: None
    Host.run = telling(Host.run)
