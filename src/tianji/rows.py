"""Files that only grow: lines, and TensorBoard's events; a full disk never leaves half a row."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path


class Appender:
    """A file that only grows, by whole writes: what does not fit leaves nothing behind."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """`fd`: the file, where somebody else has opened it to append."""
        self.path = path
        self._fd = fd

    def write(self, data: bytes) -> None:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
        size = os.fstat(self._fd).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            # half a record would make what follows unreadable
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class Board:
    """A TensorBoard event file, one event per row.

    TensorBoard's own EventFileWriter writes from a thread that dies of the first full disk, so
    this uses the layer under it, RecordWriter. Both are imported when the first row is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name = f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
        self._file = Appender(folder / name)
        self._begun = False
        self._resumed_at: int | None = None

    def resume(self, steps: int) -> None:
        """What an earlier process wrote beyond these steps is not part of the run."""
        self._resumed_at = steps

    def write(self, steps: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[attr-defined]
            Event,
            SessionLog,
        )
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        events = []
        if not self._begun:
            self._folder.mkdir(exist_ok=True)
            events.append(Event(wall_time=now, file_version="brain.Event:2"))
            if self._resumed_at is not None:
                start = SessionLog(status=SessionLog.START)
                events.append(Event(wall_time=now, step=self._resumed_at + 1, session_log=start))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        events.append(Event(wall_time=now, step=steps, summary=Summary(value=values)))
        records = io.BytesIO()
        writer = RecordWriter(records)  # type: ignore[no-untyped-call]
        for event in events:
            writer.write(event.SerializeToString())  # type: ignore[no-untyped-call]
        self._file.write(records.getvalue())
        self._begun = True

    def close(self) -> None:
        self._file.close()


def drop_torn_line(path: Path) -> None:
    """Cut off the line that a process was writing when it was killed, so that all lines parse."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
