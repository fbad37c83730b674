"""A client that sends any message or bytes of the protocol and returns the answers.

For what no Communicator would do: wrong tokens, wrong versions, replays, messages out of order. Blocking sockets with a
timeout; one connection each.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pccl._core.protocol.codec import PROTOCOL_VERSION, decode, encode
from pccl._core.protocol.handshake import Caller
from pccl._core.protocol.hellos import TO_CALLER, JoinLane, Register, Welcome
from pccl._core.protocol.messages import TO_PEER
from pccl.actors.io.addresses import parse_address
from pccl.actors.io.framing import FrameReader, frame

from .helpers import BOUND

M = TypeVar("M")


def framed(message: Any, version: int = PROTOCOL_VERSION) -> bytes:
    """Return a message as a frame."""
    return frame(*encode(message), version)


class RawClient:
    """One connection to a master or to a peer's port."""

    def __init__(self, address: str, token: bytes = b"") -> None:
        self._socket = socket.create_connection(parse_address(address), timeout=BOUND)
        self._token = token
        self._reader = FrameReader({**TO_CALLER, **TO_PEER}, PROTOCOL_VERSION)
        self._heard: list[Any] = []
        self.sent = b""  # everything, for a replay

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self.sent += data
        self._socket.sendall(data)

    def say(self, *messages: Any) -> None:
        """Send well-formed messages with one call."""
        self.send(b"".join(framed(message) for message in messages))

    def hear(self, kind: type[M]) -> M:
        """Return the next message of this kind; skip others.

        Raise EOFError if the other side closes first, and TimeoutError if the message does not arrive within the bound,
        whatever other messages arrive.
        """
        deadline = time.monotonic() + BOUND
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            data = self._recv_until(deadline)
            if not data:
                raise EOFError(f"closed without a {kind.__name__}")
            self._heard += [decode(opcode, body) for opcode, body in self._reader.feed(data)]

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes, which need not be a frame. Raise EOFError and TimeoutError as `hear` does."""
        deadline = time.monotonic() + BOUND
        data = b""
        while len(data) < nbytes:
            piece = self._recv_until(deadline)
            if not piece:
                raise EOFError(f"closed after {len(data)} of {nbytes} bytes")
            data += piece
        return data

    @property
    def port(self) -> int:
        """The port of this side of the connection."""
        return int(self._socket.getsockname()[1])

    def is_turned_away(self, timeout: float = BOUND) -> bool:
        """Whether the other side closes the connection within that time, without a Welcome before."""
        deadline = time.monotonic() + timeout
        try:
            while data := self._recv_until(deadline):
                self._heard += [decode(opcode, body) for opcode, body in self._reader.feed(data)]
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return not any(isinstance(message, Welcome) for message in self._heard)

    def _recv_until(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the bound is over")
        self._socket.settimeout(left)
        try:
            return self._socket.recv(65536)
        finally:
            self._socket.settimeout(BOUND)

    def register(self, group: int = 0, lanes: int = 1, host: str = "", port: int = 1) -> None:
        """Do the handshake at a master's port with a Register message, up to its welcome."""
        self.handshake(lambda proof: Register(proof, group, lanes, host, port, bytes(16)))

    def join_lane(self, run: bytes, epoch: int, source: int, target: int, lane: int = 0) -> None:
        """Do the handshake at a peer's port with a JoinLane message."""
        self.handshake(lambda proof: JoinLane(proof, run, epoch, source, target, lane))

    def handshake(self, hello: Any, before_each: Callable[[], None] = lambda: None) -> None:
        """Do the caller's side of the handshake; call `before_each` before each message is sent.

        Raise PermissionError with the reason if it is refused.
        """
        caller = Caller(self._token, os.urandom(32), hello)
        reply: Any = caller.opening()
        while reply is not None:
            before_each()
            self.say(reply)
            reply = caller.received(self.hear(object))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
