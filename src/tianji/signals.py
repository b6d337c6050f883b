"""Signals that ask a run to end: heard, and answered when it is ready."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP call `answer` instead of killing, where handlers can be
    set; one that is ignored, as under nohup, stays so."""

    def __init__(self) -> None:
        self.heard: int | None = None
        """what came while there was nobody to answer"""
        self.answer: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.answer is not None:
            self.answer(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self.heard = number
