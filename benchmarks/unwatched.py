"""A host without supervision, for supervision.py: it writes nothing for the launcher to look at.

The functions are the real ones less some lines, so that they stay in step with them; a line that is
no longer there is an error. A run imports this by env.imports. Where the variable SUPERVISION is
"without", the launcher does not look, either; where it is set, actors log what they took.
"""

import inspect
import json
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

from tianji.engines.host import Host
from tianji.engines.hosts import HostTable

SUPERVISION = "TIANJI_BENCHMARK_SUPERVISION"
TOLD = "took "
BEATS = dict.fromkeys(("beats = 0", "beats += 1", "board[place + BEAT] = beats"), "")
STEPS = {
    "if did is SIMULATE:": "",
    "self._board[self._place + STEP] = self._actors[0].steps": "",
    "elif did is UPDATE:": "if did is UPDATE:",
}


def without(function: Callable[..., Any], lines: Mapping[str, str]) -> Callable[..., Any]:
    """The function with other lines in the place of these; "": with none."""
    kept = textwrap.dedent(inspect.getsource(function)).splitlines()
    for line, other in lines.items():
        found = [i for i, text in enumerate(kept) if text.strip() == line]
        if len(found) != 1:
            raise RuntimeError(
                f"{function.__qualname__} has {line!r} {len(found)} times, so that it cannot be "
                f"taken out of it. Let the caller of without() follow it."
            )
        (at,) = found
        kept[at : at + 1] = [kept[at].replace(line, other)] if other else []
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + "\n".join(kept), __file__, "exec")
    exec(code, function.__globals__, made)
    return made[function.__name__]


def unwatched() -> dict[str, Callable[..., Any]]:
    """The functions of a host that supervision is in, without it, by name."""
    return {
        "_run": without(Host._run, BEATS),
        "_report": without(Host._report, STEPS),
    }


def telling(run: Callable[[Host], None]) -> Callable[[Host], None]:
    """A host's loop that says at its end what an actor took."""

    def told(self: Host) -> None:
        begun = time.process_time()
        run(self)
        if self._actors:
            steps = sum(actor.produced for actor in self._actors)
            took = {"cpu_s": time.process_time() - begun, "steps": steps}
            print(TOLD + json.dumps(took))

    return told


if SUPERVISION in os.environ:
    if os.environ[SUPERVISION] == "without":
        for name, function in unwatched().items():
            setattr(Host, name, function)
        HostTable.hanging = lambda self, seconds: []
    Host.run = telling(Host.run)
