"""What went wrong in a run: one record for each time, and how often it may."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from tianji.errors import Failure
from tianji.role import State


@dataclass(frozen=True)
class Fault:
    """One thing that went wrong, for RUN/faults.jsonl and for the summary of a run that failed."""

    role: str
    cause: str
    """what happened, in words"""
    kind: str = "role"
    """whom it concerns: "env", "role", "run", "update" or "disk" """
    pid: int | None = None
    signal: str | None = None
    """that killed the process"""
    exception: str | None = None
    """that was raised: its type and message"""
    oom: bool = False
    """was it killed for lack of memory, by the evidence of its control group?"""
    traceback: str = ""
    """the last one, or the stack at that moment"""
    seed: int | None = None
    """of the env that failed"""
    step: int | None = None
    """that each of its envs had made since it was seeded"""
    aborted: int = 0
    """episodes that were cut off"""
    action: str = ""
    """what was done about it"""

    def tree(self) -> State:
        return asdict(self)

    def then(self, action: str) -> Fault:
        return replace(self, action=action)


def raised(error: BaseException, role: str, env: str, seed: int, step: int, aborted: int) -> Fault:
    """An env that raised, or gave what cannot be used."""
    if isinstance(error, Failure):  # it did not raise, it gave what cannot be used
        what, trace, exception = f"returned {error}", "", None
    else:
        exception = f"{type(error).__name__}: {error}"
        what, trace = f"raised {exception}", "".join(traceback.format_exception(error))
    return Fault(
        role=role,
        kind="env",
        cause=f"{env} {what} in step {step} after its reset with seed {seed}",
        exception=exception,
        traceback=trace,
        seed=seed,
        step=step,
        aborted=aborted,
        action="env rebuilt",
    )


class Budget:
    """So many times within so many seconds."""

    def __init__(
        self, times: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.times = times
        self.seconds = seconds
        self._clock = clock
        self._spent: deque[float] = deque()

    def spend(self) -> bool:
        """Once more; False where it was spent already."""
        now = self._clock()
        while self._spent and self._spent[0] <= now - self.seconds:
            self._spent.popleft()
        if len(self._spent) >= self.times:
            return False
        self._spent.append(now)
        return True

    def __str__(self) -> str:
        return f"{self.times} within {self.seconds:g} s"
