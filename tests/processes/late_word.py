"""Makes the learner's word of an update arrive late, in every process that imports this."""

import time

from tianji.engines import wire
from tianji.engines.messages import Learnt

_send = wire.send


def send(line, message, fds=()):
    if isinstance(message, Learnt):
        time.sleep(0.3)
    _send(line, message, fds)


wire.send = send
