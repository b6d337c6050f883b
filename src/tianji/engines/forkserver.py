"""The process that hosts are forked from: it has the heavy imports done and nothing else."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was asked for
        os._exit(1)


def leave_signals_to_launcher() -> None:
    """Ctrl-C reaches the whole process group, and so does what a batch system sends: the launcher
    answers. A handler rather than SIG_IGN for all but Ctrl-C: programs that an env starts get the
    defaults back, and what is forked here ends when it is told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.getpid()

    def heard(number: int, frame: object) -> None:
        if os.getpid() != own:  # a process of an env
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, heard)


def main(fd: int, parent: int) -> None:
    """Fork a host for each request on the line; say how each one ended."""
    die_with_parent(parent)
    leave_signals_to_launcher()
    from tianji.engines import host, wire  # torch and gymnasium come with these
    from tianji.engines.messages import Exited, Forked

    line = socket.socket(fileno=fd)
    poll = select.poll()
    poll.register(line, select.POLLIN)
    hosts: dict[int, int] = {}
    """the pid of each host, by its pidfd"""
    while True:
        for ready, _ in poll.poll():
            if ready != line.fileno():
                poll.unregister(ready)
                pid = hosts.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                try:
                    wire.send(line, Exited(pid, code))
                except OSError:  # the launcher is gone, and this process with it in a moment
                    return
                continue
            packet = wire.receive(line)
            if packet is None:
                for pid in hosts.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)  # at once: there is nothing here to be tidied up
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                for other in (line.fileno(), *hosts):
                    os.close(other)
                line.detach()
                die_with_parent(server)
                host.main(packet)
            pidfd = os.pidfd_open(pid)
            hosts[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            for theirs in packet.fds:
                os.close(theirs)
            wire.send(line, Forked(pid), [pidfd])
