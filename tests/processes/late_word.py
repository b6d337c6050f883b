"""Makes the learner's word of an update arrive late, in every process that imports this."""

import time

from tianji.engines import wire

_send = wire.send


def send(line, kind, content, fds=()):
    if kind == "updated":
        time.sleep(0.3)
    _send(line, kind, content, fds)


wire.send = send
