"""A listening port: accepts connections, does the answerer's side of the handshake, and passes on proven callers.

A port answers one or several kinds of hello. Each kind has a callback. It is called with `(connection, hello, host,
welcome)` for callers that hold the run's token, and answers by `connection.send(welcome)` or by a refusal. All other
connections are refused here, counted, and logged once for each host and kind.
"""

from __future__ import annotations

import errno
import os
import socket

from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.events import DEBUG, INFO, WARNING
from pccl._core.protocol.handshake import NONCE_BYTES, Admit, PendingConnections, Refuse, Say
from pccl._core.protocol.hellos import Refused
from pccl._core.protocol.outcomes import INVALID_USAGE
from pccl._core.system.futex import monotonic_ns
from pccl.options import PEER_PORT_FIRST, PEER_PORTS_MAX, PENDING_CONNECTIONS_MAX, PORT_MAX

from .connection import Connection, host_of, prepare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pccl._core.protocol.hellos import Welcome

    from .loop import Loop

BACKLOG = 512  # connections that the kernel queues while this process is busy, as when a large group wires its ring
ACCEPTS_MAX = 64  # per wake-up, so that a flood of connections does not keep members waiting
PAUSE_NS = 100_000_000  # after the system ran out of descriptors


class Listener:
    """One port and its pending connections."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        *,
        token: bytes,
        hellos: dict[type[Any], Callable[[Connection, Any, str, Welcome], None]],
        limits: dict[int, int],
        new_number: Callable[[], int],
        log: Callable[[int, str], None],
        timeout_ns: int,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._limits = limits
        self._new_number = new_number
        self._hellos = hellos  # kind -> the callback that decides about it
        self._log = log
        self._connections: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        self._short_of: str | None = ""  # why accepting failed last time; empty if it did not
        self.pending = PendingConnections(
            token, tuple(hellos), lambda: os.urandom(NONCE_BYTES), timeout_ns, PENDING_CONNECTIONS_MAX
        )
        listener.setblocking(False)
        loop.watch(listener.fileno(), lambda _: self._accept())

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._listener.getsockname()[1])

    def tick(self, now_ns: int) -> None:
        """Refuse pending connections whose time is up."""
        self._perform(self.pending.tick(now_ns))

    def close(self) -> None:
        """Close the port and all pending connections."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, address = self._listener.accept()
                prepare(sock)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(error)
                    return
                continue  # the caller closed the connection before it was accepted
            self._short_of = ""
            number, host = self._new_number(), host_of(address)
            self._connections[number] = Connection(
                self._loop,
                sock,
                number=number,
                limits=self._limits,
                on_message=self._heard,
                on_down=self._broke,
                exact=True,
            )
            self._hosts[number] = host
            self._perform(self.pending.arrived(number, host, monotonic_ns()))

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while: members keep their descriptors, newcomers wait in the kernel's queue."""
        if error.strerror != self._short_of:  # once, not ten times a second
            self._short_of = error.strerror
            self._log(WARNING, f"cannot accept connections for now: {error.strerror} (raise the limit: ulimit -n)")
        self._loop.forget(self._listener.fileno())
        self._loop.after(PAUSE_NS, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.watch(self._listener.fileno(), lambda _: self._accept())

    def _heard(self, number: int, message: Any) -> None:
        self._perform(self.pending.received(number, message))

    def _broke(self, number: int, kind: str, reason: str) -> None:
        if kind == "version":
            text = f"this side speaks version {PROTOCOL_VERSION} of pccl's protocol; {reason}"
            self._connections[number].send(Refused(INVALID_USAGE, text))
        self._perform(self.pending.refuse(number, kind, reason))

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is Say:
                self._connections[action.conn].send(action.message)
            elif kind is Admit:
                connection = self._connections.pop(action.conn)
                admitted = self._hellos[type(action.hello)]
                admitted(connection, action.hello, self._hosts.pop(action.conn), action.welcome)
            elif kind is Refuse:
                self._hosts.pop(action.conn, None)
                connection = self._connections.pop(action.conn)
                # A refusal that was just sent must arrive; all other connections are closed at once.
                if action.kind in ("token", "version", "port"):
                    connection.finish()
                else:
                    connection.close()
                line = f"refused a connection kind={action.kind} total={action.total}: {action.reason}"
                # A caller that closes during the handshake is mostly a peer that died: this needs no warning.
                level = INFO if action.kind in ("closed", "error") else WARNING
                self._log(level if action.first else DEBUG, line)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket on a numeric address or a name. Raises OSError, which says why it cannot."""
    family, _, _, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_peer_port(port: int) -> socket.socket:
    """Return the listening socket of a peer, for both IP versions, on `port` or (if 0) on the first free port."""
    wanted = [port] if port else range(PEER_PORT_FIRST, min(PEER_PORT_FIRST + PEER_PORTS_MAX, PORT_MAX + 1))
    failure: OSError | None = None
    for candidate in wanted:
        try:
            return bind(_any_address(), candidate)
        except OSError as error:
            failure = error
            if error.errno != errno.EADDRINUSE:
                break
    assert failure is not None
    raise failure


def _any_address() -> str:
    return "::" if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else "0.0.0.0"
