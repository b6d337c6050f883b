"""Processes that hosts are forked from, shared by runs: their imports take seconds."""

import contextlib
import sys
import uuid
from types import SimpleNamespace

import pytest

from tianji.engines.server import ForkServer


class Servers:
    """Called in the place of `ForkServer`: starts one for each `sys.path`, with the first run that
    wants it, and closes them in the end. What they start has `mark` in its environment."""

    def __init__(self):
        self.mark = f"tianji-test-{uuid.uuid4()}"
        self._started, self._closing = {}, contextlib.ExitStack()

    def __call__(self):
        path = tuple(sys.path)
        if path not in self._started:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TIANJI_TEST", self.mark)
                server = self._closing.enter_context(contextlib.closing(ForkServer()))
            self._started[path] = SimpleNamespace(
                line=server.line,
                process=server.process,
                fits=lambda: True,
                keep=lambda: None,
                close=lambda: None,
            )
        return self._started[path]

    @property
    def pids(self):
        return {server.process.pid for server in self._started.values()}

    def close(self):
        self._closing.close()
