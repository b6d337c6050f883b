"""One way between two sleepers: a ping-pong over two conduits, and over two eventfds.

python transfer_latency.py tianji|eventfd [ROUND TRIPS]
"""

import json
import os
import select
import sys
import time
from collections.abc import Callable

import numpy as np

from tianji.channel import Conduit, End, Offer
from tianji.transports.shm import Shm
from tianji.types import leaf

WARMING = 500


def ping_pong(trips: int, send: Callable[[], None], receive: Callable[[], None]) -> np.ndarray:
    """Microseconds one way of each round trip."""
    taken = np.zeros(trips + WARMING)
    for at in range(len(taken)):
        begun = time.perf_counter()
        send()
        receive()
        taken[at] = time.perf_counter() - begun
    return taken[WARMING:] / 2 * 1e6


def echo(trips: int, send: Callable[[], None], receive: Callable[[], None]) -> None:
    for _ in range(trips + WARMING):
        receive()
        send()


def tianji(transport: Shm, there: Conduit, back: Conduit) -> tuple[Callable[[], None], ...]:
    """Send into one conduit, receive from the other; each side of the fork calls it once."""
    outbox, inbox = transport.outbox(there), transport.inbox(back)
    while inbox.grant(0):
        pass

    def send() -> None:
        while not (granted := outbox.granted()):
            transport.wait(0.1)
        slot = granted[0]
        outbox.push(slot)

    def receive() -> None:
        while (slot := inbox.probe()) is None:
            transport.wait(0.1)
        inbox.release(slot)
        inbox.grant(0)

    return send, receive


def accepted(offer: Offer) -> Shm:
    transport = Shm()
    transport.accept(offer)
    return transport


def eventfd(there: int, back: int) -> tuple[Callable[[], None], ...]:
    epoll = select.epoll()
    epoll.register(back, select.EPOLLIN)

    def send() -> None:
        os.eventfd_write(there, 1)

    def receive() -> None:
        while not epoll.poll(0.1):
            pass
        os.eventfd_read(back)

    return send, receive


def main() -> None:
    kind, trips = sys.argv[1], int((*sys.argv, "5000")[2])
    if kind == "tianji":
        # Two slots: one is being granted again while the other travels.
        layout = {"x": leaf((64,), np.uint8)}
        there, back = (Conduit(name, "queue", layout, 2) for name in ("there", "back"))
        made = Shm()
        made.open(there)
        made.open(back)
        offer = made.offer([End(there.name, "receive"), End(back.name, "send")], 0)
        sides = (lambda: tianji(made, there, back)), (lambda: tianji(accepted(offer), back, there))
    else:
        a, b = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        sides = (lambda: eventfd(a, b)), (lambda: eventfd(b, a))
    cores = sorted(os.sched_getaffinity(0))
    pid = os.fork()
    os.sched_setaffinity(0, cores[:1] if pid else cores[-1:])
    if not pid:
        try:
            echo(trips, *sides[1]())
        finally:
            os._exit(0)
    taken = ping_pong(trips, *sides[0]())
    os.waitpid(pid, 0)
    print(json.dumps({"median_us": np.median(taken), "p99_us": np.percentile(taken, 99)}))


if __name__ == "__main__":
    main()
