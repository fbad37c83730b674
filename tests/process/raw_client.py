"""A program that speaks the protocol by hand: says what it likes, and tells what it hears.

For what no Communicator would do: wrong tokens, wrong versions, replays, messages out of turn. Blocking sockets with a
bound; one connection each.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pccl._core.protocol.codec import WIRE_VERSION, decode, encode
from pccl._core.protocol.handshake import Caller
from pccl._core.protocol.messages import TO_CALLER, TO_PEER, JoinLane, Register, Welcome
from pccl.actors.io.addresses import parse_address
from pccl.actors.io.framing import FrameReader, frame

from .helpers import BOUND

M = TypeVar("M")


def framed(message: Any, version: int = WIRE_VERSION) -> bytes:
    """A message as it travels."""
    return frame(*encode(message), version)


class RawClient:
    """One connection to a master or to a peer's port."""

    def __init__(self, address: str, token: bytes = b"") -> None:
        self._socket = socket.create_connection(parse_address(address), timeout=BOUND)
        self._token = token
        self._reader = FrameReader({**TO_CALLER, **TO_PEER}, WIRE_VERSION)
        self._heard: list[Any] = []
        self.sent = b""  # everything, for a replay

    def send(self, data: bytes) -> None:
        """These bytes, whatever they are."""
        self.sent += data
        self._socket.sendall(data)

    def say(self, *messages: Any) -> None:
        """Well-formed messages, in one piece."""
        self.send(b"".join(framed(message) for message in messages))

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind; others are passed over.

        Raises EOFError if the other side ends first, and TimeoutError if the message does not come within the bound,
        whatever else comes meanwhile.
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
        """The next bytes, for what is no frame. Raises EOFError and TimeoutError as `hear` does."""
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
        """Whether the other side hangs up within that time, and has welcomed nobody before."""
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
        """ClientHello and prove oneself at a master's port, up to its welcome."""
        self.knock(lambda proof: Register(proof, group, lanes, host, port))

    def join_lane(self, run: bytes, epoch: int, source: int, target: int, lane: int = 0) -> None:
        """The same at a peer's port."""
        self.knock(lambda proof: JoinLane(proof, run, epoch, source, target, lane))

    def knock(self, hello: Any, before_each: Callable[[], None] = lambda: None) -> None:
        """The caller's side of the handshake; `before_each` is called ahead of each message that it sends.

        Raises PermissionError with the reason if it is refused.
        """
        caller = Caller(self._token, os.urandom(32), hello)
        reply: Any = caller.opening()
        while reply is not None:
            before_each()
            self.say(reply)
            reply = caller.received(self.hear(object))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
