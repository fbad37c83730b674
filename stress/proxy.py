"""The proxy: a process between peers that forwards every byte, until it is told to be a bad network.

Each *passage* has its own port and leads to one target. A passage can be silenced (bytes wait, nothing is closed, new
connections are accepted and get no answer), reset, half-closed, or made to flip one bit of the next bytes. Peers
advertise the address of their passage, and dial the master through another passage, so link faults need no privilege.
Commands are lines of JSON over a socket; the process ends when that socket closes.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHUNK = 1 << 18  # bytes read at once
BACKLOG = 64
RESET = struct.pack("ii", 1, 0)  # zero linger time: closing sends a reset
ORDER_BYTES_MAX = 1 << 16


@dataclass(slots=True, eq=False)
class End:
    """One socket of a pair."""

    socket: socket.socket
    passage: Passage
    is_target: bool
    other: End | None = None
    queue: bytearray = field(default_factory=bytearray)  # bytes from the other end that this end has not sent yet
    ended: bool = False  # the other end sends nothing more
    shut: bool = False  # and this end was shut down
    mask: int = 0


@dataclass(slots=True, eq=False)
class Passage:
    """One port and the connections through it."""

    name: str
    listener: socket.socket
    target: tuple[str, int]
    silent_until: float = 0.0
    flips: int = 0
    ends: set[End] = field(default_factory=set)


class Proxy:
    """All passages of a run."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._passages: dict[str, Passage] = {}
        self._rest = b""
        self._over = False

    def run(self) -> None:
        """Forward until the control socket closes."""
        while not self._over:
            for key, events in self._selector.select(self._patience()):
                if key.data is None:
                    self._obey()
                elif isinstance(key.data, Passage):
                    self._accept(key.data)
                elif key.data in key.data.passage.ends:
                    self._serve(key.data, events)
            self._wake()

    def _patience(self) -> float | None:
        waits = [passage.silent_until for passage in self._passages.values() if passage.silent_until]
        return max(min(waits) - time.monotonic(), 0.0) if waits else None

    def _wake(self) -> None:
        """End silences whose time is over."""
        now = time.monotonic()
        for passage in self._passages.values():
            if passage.silent_until and passage.silent_until <= now:
                passage.silent_until = 0.0
                self._selector.modify(passage.listener, selectors.EVENT_READ, passage)
                for end in list(passage.ends):
                    self._want(end)

    # ------------------------------------------------------------------------------------------ orders

    def _obey(self) -> None:
        data = self._control.recv(ORDER_BYTES_MAX)
        self._over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            getattr(self, f"_do_{order.pop('do')}")(**order)

    def _do_open(self, passage: str, host: str, port: int) -> None:
        """Open a passage to this target, or clear the faults of an existing one; answers with its port."""
        known = self._passages.get(passage)
        if known is None:
            listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            listener.setblocking(False)
            known = self._passages[passage] = Passage(passage, listener, (host, port))
            self._selector.register(listener, selectors.EVENT_READ, known)
        known.target = (host, port)
        known.flips, known.silent_until = 0, min(known.silent_until, time.monotonic())
        self._control.sendall(b"%d\n" % known.listener.getsockname()[1])

    def _do_silence(self, passage: str, seconds: float) -> None:
        found = self._passages[passage]
        found.silent_until = time.monotonic() + seconds
        for end in list(found.ends):
            self._want(end)

    def _do_reset(self, passage: str) -> None:
        for end in list(self._passages[passage].ends):
            with suppress(OSError):
                end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._drop(end)

    def _do_half_close(self, passage: str) -> None:
        """Shut down the direction to the target; the other direction stays open."""
        for end in [end for end in self._passages[passage].ends if end.is_target]:
            end.ended = True
            self._flush(end)

    def _do_flip(self, passage: str) -> None:
        self._passages[passage].flips += 1

    # ------------------------------------------------------------------------------------------ traffic

    def _accept(self, passage: Passage) -> None:
        try:
            caller, _ = passage.listener.accept()
        except OSError:
            return
        target = socket.socket()
        for one in (caller, target):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failure = target.connect_ex(passage.target)
        if failure not in (0, errno.EINPROGRESS):
            caller.close()
            target.close()
            return
        ends = End(caller, passage, is_target=False), End(target, passage, is_target=True)
        ends[0].other, ends[1].other = ends[1], ends[0]
        passage.ends.update(ends)
        for end in ends:
            self._want(end)

    def _want(self, end: End) -> None:
        """Select the events that this end can handle now: write queued bytes, read if the queue has room."""
        assert end.other is not None
        mask = 0
        if not end.passage.silent_until:
            if len(end.other.queue) < CHUNK and not end.other.ended:
                mask |= selectors.EVENT_READ
            if end.queue:
                mask |= selectors.EVENT_WRITE
        if mask == end.mask:
            return
        if not end.mask:
            self._selector.register(end.socket, mask, end)
        elif not mask:
            self._selector.unregister(end.socket)
        else:
            self._selector.modify(end.socket, mask, end)
        end.mask = mask

    def _serve(self, end: End, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(end)
        if events & selectors.EVENT_READ and end in end.passage.ends and not end.passage.silent_until:
            self._read(end)

    def _read(self, end: End) -> None:
        other = end.other
        assert other is not None
        try:
            data = bytearray(end.socket.recv(CHUNK))
        except BlockingIOError:
            return
        except OSError:
            self._break(end)
            return
        if not data:
            other.ended = True
        elif end.passage.flips:
            end.passage.flips -= 1
            data[len(data) // 2] ^= 1
        other.queue += data
        self._flush(other)
        if end in end.passage.ends:
            self._want(end)

    def _break(self, end: End) -> None:
        """One side broke without closing: break the other side too."""
        assert end.other is not None
        with suppress(OSError):
            end.other.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._drop(end)

    def _flush(self, end: End) -> None:
        other = end.other
        assert other is not None
        try:
            while end.queue:
                sent = end.socket.send(end.queue)
                del end.queue[:sent]
            if end.ended and not end.shut:
                end.shut = True
                end.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._break(end)
            return
        if end.shut and other.shut:
            self._drop(end)
            return
        self._want(end)
        self._want(other)

    def _drop(self, end: End) -> None:
        """Close both."""
        assert end.other is not None
        for one in (end, end.other):
            if one in one.passage.ends:
                one.passage.ends.discard(one)
                if one.mask:
                    self._selector.unregister(one.socket)
                one.socket.close()


def serve(control_fd: int) -> None:
    """Entry of the process."""
    Proxy(socket.socket(fileno=control_fd)).run()


class Network:
    """The supervisor's side."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._answers = control.makefile("rb")

    def open(self, passage: str, host: str, port: int) -> int:
        """Open a passage to this target. Returns its port, which stays the same."""
        self._order(do="open", passage=passage, host=host, port=port)
        return int(self._answers.readline())

    def order(self, do: str, passage: str, **arguments: Any) -> None:
        """`silence` for so many `seconds`, `reset`, `half_close` or `flip`."""
        self._order(do=do, passage=passage, **arguments)

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._control.close()

    def _order(self, **order: Any) -> None:
        self._control.sendall(json.dumps(order).encode() + b"\n")
