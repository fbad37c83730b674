"""Opening a connection: connect, do the caller's side of the handshake, and pass the connection to its owner.

One `Dialler` is one attempt, over one or several numeric addresses in turn. It ends exactly once: with `on_up` and the
connection, or with `on_down`, the reason, and whether the failure is final. The owner's machine has the timeouts; only
the attempt as a whole has a bound here, if `timeout_ns` is given.
"""

from __future__ import annotations

import errno
import os
import socket
from weakref import ref

from pccl._core.protocol.handshake import NONCE_BYTES, Caller
from pccl._core.protocol.hellos import TO_CALLER

from .connection import Connection, prepare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop

# Plain words for errors of the system; the system's text follows in brackets.
PLAIN = {
    os.strerror(errno.ECONNREFUSED): "nothing listens there",
    os.strerror(errno.EHOSTUNREACH): "no machine answers there",
    os.strerror(errno.ETIMEDOUT): "no machine answers there",
}


class Dialler:
    """One attempt to connect to one other side."""

    def __init__(
        self,
        loop: Loop,
        addresses: list[tuple[str, int]],
        *,
        token: bytes,
        hello: Callable[[bytes], Any],
        on_up: Callable[[Connection], None],
        on_down: Callable[[str, bool], None],
        timeout_ns: int = 0,
        number: int = 0,
    ) -> None:
        self._loop = loop
        self._addresses = list(addresses)
        self._several = len(addresses) > 1  # with a single address, the owner knows the address
        self._token = token
        self._hello = hello
        self._on_up = on_up
        self._on_down = on_down
        self._number = number
        self._connection: Connection | None = None
        self._caller: Caller | None = None
        self._reasons: list[str] = []
        self._over = False
        if timeout_ns:
            # A timer cannot be cancelled, so it must not keep an attempt that has ended. The owner keeps this one.
            me = ref(self)
            loop.after(timeout_ns, lambda: _time_out(me, timeout_ns))
        # From the loop, so that no callback is called before the constructor has returned.
        loop.after(0, self._dial_next)

    def cancel(self) -> None:
        """End the attempt. No callback follows."""
        self._over = True
        if self._connection is not None:
            self._connection.close()

    def _dial_next(self) -> None:
        if self._over:
            return
        if not self._addresses:
            self._fail("; ".join(self._reasons) or "no address to dial", final=False)
            return
        host, port = self._addresses.pop(0)
        where = (f"[{host}]:{port}: " if ":" in host else f"{host}:{port}: ") if self._several else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.inet_pton(family, host)  # a name would make the whole loop wait for the resolver
            sock = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            self._next_after(f"{where}{getattr(error, 'strerror', None) or f'{host!r} is not a numeric address'}")
            return
        prepare(sock)
        failure = sock.connect_ex((host, port))
        if failure not in (0, errno.EINPROGRESS):  # the loop reports when it is connected
            sock.close()
            self._next_after(f"{where}{_plainly(os.strerror(failure))}")
            return
        self._caller = Caller(self._token, os.urandom(NONCE_BYTES), self._hello)
        self._connection = Connection(
            self._loop,
            sock,
            number=self._number,
            limits=TO_CALLER,
            on_message=self._heard,
            on_down=lambda _, kind, reason: self._broke(kind, f"{where}{_plainly(reason)}"),
            exact=True,
            connecting=True,
        )
        self._connection.send(self._caller.opening())

    def _heard(self, _: int, message: Any) -> None:
        assert self._caller is not None
        assert self._connection is not None
        try:
            reply = self._caller.received(message)
        except PermissionError as error:
            self._fail(str(error), final=True)
            return
        if reply is not None:
            self._connection.send(reply)
            return
        self._over = True
        connection, self._connection = self._connection, None
        self._on_up(connection)

    def _broke(self, kind: str, reason: str) -> None:
        if self._connection is not None:
            self._connection.close()
        if kind == "version":
            self._fail(reason, final=True)
        elif kind in ("magic", "opcode", "length", "body"):
            what = "what listens there does not speak pccl's protocol: is the port right?"
            self._fail(what if kind == "magic" else f"{what} ({reason})", final=True)
        else:
            self._next_after(reason)  # also after a damaged frame: the next attempt may succeed

    def time_out(self, timeout_ns: int) -> None:
        """The time for the whole attempt is over."""
        what = "no answer"
        if self._connection is not None and self._connection.is_idle():
            what = "it took the connection, but did not answer as pccl does"
        self._fail(f"{what} within {timeout_ns / 1e9:g} s", final=False)

    def _next_after(self, reason: str) -> None:
        self._reasons.append(reason)
        self._loop.after(0, self._dial_next)

    def _fail(self, reason: str, *, final: bool) -> None:
        if not self._over:
            self.cancel()
            self._on_down(reason, final)


def _time_out(dialler: ref[Dialler], timeout_ns: int) -> None:
    attempt = dialler()
    if attempt is not None:
        attempt.time_out(timeout_ns)


def _plainly(reason: str) -> str:
    """Return the system's reason, after a plainer one if there is one."""
    plain = PLAIN.get(reason)
    return reason if plain is None else f"{plain} ({reason})"
