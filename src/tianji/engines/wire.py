"""Carries messages between a launcher and its hosts: JSON and raw arrays, never pickle."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from tianji.annotated import read, tree
from tianji.engines.messages import MESSAGES
from tianji.state import NATIVE, decode, encode, parse
from tianji.types import Leaves

INLINE = 16_384
"""bytes of JSON that travel in the packet itself; more, and arrays, in a memory file"""
MOST_FDS = 200
"""descriptors that one packet carries; the kernel takes 253"""
MOST_TEXT = 1 << 28
"""bytes of JSON in a message, at most"""


class Packet(NamedTuple):
    """A message that has arrived, and the descriptors that came with it."""

    kind: str
    text: bytes
    arrays: Leaves
    fds: list[int]

    def message(self) -> Any:
        """The message itself; ValueError where it is none, or has other fields."""
        if self.kind not in MESSAGES:
            raise ValueError(f"{self.kind!r} is no message")
        return read(MESSAGES[self.kind], decode(parse(self.text), self.arrays))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a line that keeps messages whole and in order."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(line: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a dataclass of `messages`; the descriptors stay open here."""
    kind, arrays = type(message).__name__, Leaves()
    text = json.dumps(encode(tree(message), kind, "", arrays), allow_nan=False).encode()
    if len(text) > MOST_TEXT:
        raise ValueError(f"{kind} has {len(text)} bytes, and {MOST_TEXT} is the most")
    head: dict[str, Any] = {"kind": kind, "fds": len(fds), "size": -1}
    own = -1
    if arrays or len(text) > INLINE:
        head |= {"size": len(text)}
        own = _file(text, arrays)
        text = b""
    try:
        sending = [*([own] if own >= 0 else []), *fds]
        packet = json.dumps(head).encode() + b"\n" + text
        _packet(line, packet, sending[:MOST_FDS])
        for begin in range(MOST_FDS, len(sending), MOST_FDS):
            _packet(line, b"fds", sending[begin : begin + MOST_FDS])
    finally:
        if own >= 0:
            os.close(own)


def receive(line: socket.socket) -> Packet | None:
    """The next message; None where the other end is gone. Raises BlockingIOError where the line
    does not block and there is none."""
    try:
        packet, fds = _receive(line)
    except ConnectionResetError:
        return None
    if not packet:
        return None
    head, _, text = packet.partition(b"\n")
    about = json.loads(head)
    wanted = about["fds"] + (about["size"] >= 0)
    while len(fds) < wanted:
        line.setblocking(True)
        more, others = _receive(line)
        if not more:
            return None
        fds += others
    arrays: Leaves = {}
    if about["size"] > MOST_TEXT:
        raise ValueError(f"a message has {about['size']} bytes, and {MOST_TEXT} is the most")
    if about["size"] >= 0:
        with os.fdopen(fds.pop(0), "rb") as file:
            text = file.read(about["size"])
            if rest := file.read():
                arrays = safetensors.numpy.load(rest)
    return Packet(about["kind"], text, arrays, fds)


def _file(text: bytes, arrays: Leaves) -> int:
    plain = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    for name, value in plain.items():
        if value.dtype.str not in NATIVE:
            plain[name] = value.reshape(-1).view(np.uint8)
    fd = os.memfd_create("message", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text)
        if plain:
            file.write(safetensors.numpy.save(plain))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _packet(line: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    line.sendmsg([packet], ancillary)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
    packet, ancillary, flags, _ = line.recvmsg(INLINE + 4096, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise RuntimeError("a message was cut short: the limit on open files may be too low")
    return packet, fds.tolist()
