"""Signals that ask a run to end: heard, and answered when it is ready."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP call `caught` instead of killing, where handlers can be
    set; one that is ignored, as under nohup, stays so."""

    def __init__(self, caught: Callable[[int], None]) -> None:
        self._caught = caught
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._caught(number)
