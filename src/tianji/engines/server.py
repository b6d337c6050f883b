"""Starts the process that hosts are forked from, as early as can be: its imports take a second."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading

GRACE = 5.0
"""seconds that it has to end before it is killed"""

START = (
    "import json, sys; about = json.loads(sys.argv[1]); sys.path[:] = about['path']; "
    "from tianji.engines.forkserver import main; main(about['fd'], about['parent'])"
)


class ForkServer:
    """The process, and the line to it. It ends with this process, however that ends."""

    def __init__(self) -> None:
        self.keep()
        # Every lane takes a few descriptors, and the usual limit is for programs with few files.
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        about = {"path": sys.path, "fd": theirs.fileno(), "parent": os.getpid()}
        # Threads come from the plan: what is read when a library is loaded is set before that.
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(about)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | threads | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
        theirs.close()

    def keep(self) -> None:
        """It may be of use again, as long as nobody changes what is around it. What was changed
        until now does not count: imports of a run do that, too."""
        self._surroundings = _surroundings()

    def fits(self) -> bool:
        """Would one that is started now do what this one does?"""
        return self.process.poll() is None and self._surroundings == _surroundings()

    def close(self) -> None:
        self.line.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def _surroundings() -> tuple[object, ...]:
    """What a process takes over from the one that starts it and hosts go by; and who that is, as it
    ends with the thread that started it."""
    try:
        where = os.getcwd()
    except OSError:  # it was removed
        where = ""
    me = os.getpid(), threading.get_native_id()
    return list(sys.path), dict(os.environ), where, os.sched_getaffinity(0), me
