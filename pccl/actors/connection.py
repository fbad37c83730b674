"""A stream socket that carries messages: reads frames, writes frames, and ends exactly once.

The owner gives two callbacks: one for each message, one for the end, with a kind (`closed`, `error`, or what was wrong
with a frame) and a reason for people. A connection that says goodbye (`finish`) sends what is queued, half-closes, and
waits a moment for the other side to close, because closing over unread bytes would destroy the last words on their way.
"""

from __future__ import annotations

import errno
import os
import socket

from pccl._core.framing import FrameError, FrameReader, FrameWriter
from pccl._core.wire import WIRE_VERSION, WireError, decode, encode
from pccl.options import SEND_QUEUE_BYTES_MAX

from .loop import BROKEN, READABLE, WRITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop

LINGER_NS = 1_000_000_000  # how long last words may take to arrive before the socket is closed over them


class Connection:
    """One socket, its frames, and what happens with them."""

    __slots__ = (
        "_finishing",
        "_loop",
        "_on_down",
        "_on_message",
        "_reader",
        "_socket",
        "_wants_write",
        "_writer",
        "number",
    )

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        number: int,
        limits: dict[int, int],
        on_message: Callable[[int, Any], None],
        on_down: Callable[[int, str, str], None],
        exact: bool = False,
        connecting: bool = False,
    ) -> None:
        self.number = number
        self._loop = loop
        self._socket: socket.socket | None = sock
        self._on_message = on_message
        self._on_down = on_down
        self._reader = FrameReader(limits, WIRE_VERSION, exact)
        self._writer = FrameWriter(WIRE_VERSION, SEND_QUEUE_BYTES_MAX)
        self._wants_write = connecting
        self._finishing = False
        loop.watch(sock.fileno(), self._ready, READABLE | WRITABLE if connecting else READABLE)

    @property
    def closed(self) -> bool:
        """Whether the socket is gone from here."""
        return self._socket is None

    def become(
        self, limits: dict[int, int], on_message: Callable[[int, Any], None], on_down: Callable[[int, str, str], None]
    ) -> None:
        """The connection changes its purpose: it has proven itself."""
        self._reader.set_limits(limits)
        self._reader.exact = False
        self._on_message = on_message
        self._on_down = on_down

    def send(self, message: Any) -> None:
        """Queue a message and send as much as the socket takes. Failure comes by `on_down`, from the loop."""
        if self._socket is None or self._finishing:
            return
        try:
            self._writer.push(*encode(message))
            if not self._wants_write and not self._writer.flush(self._socket.fileno()):
                self._want_write(True)
        except BufferError:
            reason = f"{SEND_QUEUE_BYTES_MAX} bytes were sent and not read"
            self._loop.after(0, lambda: self._end("error", reason))
        except OSError as error:
            # The read side of the same socket reports it; what it still has to say is read first.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                reason = os.strerror(error.errno or 0)
                self._loop.after(0, lambda: self._end("error", reason))

    def finish(self, linger_ns: int = LINGER_NS) -> None:
        """Send what is queued, say that nothing follows, and close once the other side did, or soon."""
        if self._socket is None or self._finishing:
            return
        self._finishing = True
        self._loop.after(linger_ns, self.close)
        if not self._writer.pending:
            self._half_close()

    def close(self) -> None:
        """Close now. No callback follows."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    def detach(self) -> socket.socket | None:
        """Give the socket away; nothing is read or written here any more."""
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.forget(sock.fileno())
        return sock

    def is_idle(self) -> bool:
        """Whether no byte is half read or half written: only then may the socket change hands."""
        return not self._reader.buffered and not self._writer.pending

    def _ready(self, events: int) -> None:
        if self._socket is None:
            return
        if events & WRITABLE:
            self._write()
        if events & (READABLE | BROKEN) and self._socket is not None:
            self._read(self._socket.fileno())

    def _write(self) -> None:
        assert self._socket is not None
        try:
            if self._writer.flush(self._socket.fileno()):
                self._want_write(False)
                if self._finishing:
                    self._half_close()
        except OSError as error:
            self._end("error", os.strerror(error.errno or 0))

    def _read(self, fd: int) -> None:
        try:
            frames = self._reader.receive(fd)
            messages = [decode(opcode, body) for opcode, body in frames]
        except EOFError as error:
            self._end("closed", str(error))
            return
        except FrameError as error:
            self._end(error.kind, str(error))
            return
        except WireError as error:
            self._end("body", str(error))
            return
        except OSError as error:
            self._end("error", os.strerror(error.errno or 0))
            return
        if self._finishing:
            return  # only the end is of interest now
        for message in messages:
            self._on_message(self.number, message)
            if self._socket is None or self._finishing:
                return
        if self._reader.broken:
            self._read(fd)  # the frame behind the good ones is bad; the socket itself may never be ready again

    def _want_write(self, wanted: bool) -> None:
        if self._socket is not None and wanted != self._wants_write:
            self._wants_write = wanted
            self._loop.change(self._socket.fileno(), READABLE | WRITABLE if wanted else READABLE)

    def _half_close(self) -> None:
        try:
            assert self._socket is not None
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()  # it is already broken: nobody is left to hear the goodbye

    def _end(self, kind: str, reason: str) -> None:
        if self._socket is None:
            return
        if self._finishing:
            self.close()
            return
        self._on_down(self.number, kind, reason)


def prepare(sock: socket.socket) -> None:
    """What every socket of ours has: no waiting in calls, and no Nagle, which costs 40 ms per small message."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_of(address: Any) -> str:
    """The address part of a peer name, IPv4 written as such also on a dual-stack socket."""
    host = str(address[0])
    return host[7:] if host.startswith("::ffff:") and "." in host else host.partition("%")[0]
