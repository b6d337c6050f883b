"""A transport whose offers are only an address and a word: the ends connect to it, and what they
hold arrives over that connection."""

import json
import os
import secrets
import socket
import tempfile
import threading

from tianji.channel import Offer, register_transport
from tianji.transports.shm import Shm

SENDING = threading.Lock()
"""While a process is forked, no descriptor is open that was sent."""
os.register_at_fork(
    before=SENDING.acquire, after_in_parent=SENDING.release, after_in_child=SENDING.release
)


@register_transport("addressed")
class Addressed(Shm):
    name = "addressed"

    def __init__(self):
        super().__init__()
        self._offers = {}
        """by their words: what nobody has connected for yet"""
        self._listener = None

    def offer(self, ends, life):
        if self._listener is None:
            self._listen()
        word = secrets.token_hex(8)
        with SENDING:
            self._offers[word] = ends, super().offer(ends, life)
        return Offer(self.name, {"address": self._address, "word": word})

    def accept(self, offer):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(offer.data["address"])
            line.send(offer.data["word"].encode())
            text, fds, *_ = socket.recv_fds(line, 1 << 16, 200)
        if (data := json.loads(text)) is not None:
            super().accept(Offer("shm", data, tuple(fds)))

    def revoke(self, conduit):
        with SENDING:
            for word, (ends, offer) in list(self._offers.items()):
                if any(end.conduit == conduit for end in ends):
                    del self._offers[word]
                    offer.close()
            super().revoke(conduit)

    def close(self):
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()
            self._listener = None
            os.unlink(self._address)
            os.rmdir(os.path.dirname(self._address))
        for _, offer in self._offers.values():
            offer.close()
        self._offers.clear()
        super().close()

    def _listen(self):
        self._address = os.path.join(tempfile.mkdtemp(), "ends")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, args=(self._listener,), daemon=True)
        self._thread.start()

    def _serve(self, listener):
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                word = line.recv(64).decode()
                with SENDING:
                    _, offer = self._offers.pop(word, (None, None))
                    if offer is None:  # it was revoked: a newer one is on its way
                        line.send(b"null")
                        continue
                    socket.send_fds(line, [json.dumps(offer.data).encode()], offer.fds)
                    offer.close()
