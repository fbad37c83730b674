"""Run many sessions at once, each over its own connection, from one thread with one epoll.

A session gets half a second to finish; then its connection is reset. A reset leaves no port in TIME_WAIT; a million
connections would otherwise use up all ports.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from pccl._core.protocol.codec import PROTOCOL_VERSION, CodecError, decode
from pccl._core.protocol.hellos import TO_CALLER
from pccl._core.protocol.messages import TO_OPERATOR, TO_PEER
from pccl.actors.io.addresses import parse_address
from pccl.actors.io.framing import FrameError, FrameReader

from .random_messages import Drawing
from .sessions import Session, draw_session

TOGETHER = 48  # connections at a time
MOMENT = 0.5  # seconds that a session may take
PATIENCE = 5.0  # seconds for a connection to be accepted; a queue that stays full for longer is a failure
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, with a timeout of zero: close() resets the connection


class Attacker:
    """One connection and its session."""

    def __init__(self, address: tuple[str, int], session: Session) -> None:
        self.socket = socket.create_connection(address, timeout=PATIENCE)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.setblocking(False)
        self.deadline = time.monotonic() + MOMENT
        self.over = False
        self.frames = 0
        self._session = session
        self._unsent = b""
        self._reader = FrameReader({**TO_CALLER, **TO_PEER, **TO_OPERATOR}, PROTOCOL_VERSION)
        self._go_on(None)

    def ready(self) -> None:
        """Send unsent bytes, read what has arrived, and continue the session."""
        try:
            self._send()
            data = self.socket.recv(65536)
            heard = [decode(opcode, body) for opcode, body in self._reader.feed(data)]
        except BlockingIOError:
            return
        except (OSError, FrameError, CodecError):
            self.over = True
            return
        for message in heard:
            if not self.over:
                self._go_on(message)
        self.over = self.over or not data

    def _go_on(self, message: Any) -> None:
        try:
            frames = self._session.send(message)
        except StopIteration:
            self.over = not self._unsent
            return
        self.frames += len(frames)
        self._unsent += b"".join(frames)
        with contextlib.suppress(BlockingIOError):
            try:
                self._send()
            except OSError:
                self.over = True

    def _send(self) -> None:
        if self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def close(self) -> None:
        """Reset the connection and end the session."""
        self._session.close()
        self.socket.close()


def assault(
    targets: list[tuple[str, type[Any]]], frames: int, seed: int, progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Send this many frames to the targets (address, hello that it answers); return the frames and connections used."""
    draw = Drawing(random.Random(seed))
    attackers: dict[int, Attacker] = {}
    sent = connections = 0
    with contextlib.closing(select.epoll()) as poll:
        while sent < frames or attackers:
            while sent < frames and len(attackers) < TOGETHER:
                address, hello = draw.chance.choice(targets)
                attacker = Attacker(parse_address(address), draw_session(draw, hello))
                attackers[attacker.socket.fileno()] = attacker
                poll.register(attacker.socket.fileno(), select.EPOLLIN)
                connections += 1
                sent += attacker.frames
                attacker.frames = 0
            for fd, _ in poll.poll(MOMENT / 10):
                attackers[fd].ready()
            now = time.monotonic()
            for fd, attacker in list(attackers.items()):
                sent += attacker.frames
                attacker.frames = 0
                if attacker.over or now > attacker.deadline:
                    del attackers[fd]
                    attacker.close()
            progress(min(sent, frames), connections)
    return sent, connections
