"""Reads and sets what Linux offers for a TCP connection: round trip, buffers, backlog, pacing, timeout, and the host.

Each function is about one connection; the workers decide which values suit a link. Another system would need another
implementation of the same names.
"""

from __future__ import annotations

import os
import socket
import struct
from hashlib import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

INFO_BYTES = 104  # of struct tcp_info: the part that all kernels have
INFO_ROUND_TRIP = slice(68, 72)  # tcpi_rtt in it, microseconds
TCP_NOTSENT_LOWAT = 25
LINGER_NONE = struct.pack("ii", 1, 0)
MORE_FOLLOWS = socket.MSG_MORE  # flag of send(): more bytes follow at once, so wait for a full packet
DISCARD = socket.MSG_TRUNC  # flag of recv(): drop the bytes that have arrived, without a copy
MACHINE = "/proc/sys/kernel/random/boot_id"
NETWORK = "/proc/self/ns/net"
BUFFER_ASKED_MAX = "/proc/sys/net/core/wmem_max"
BUFFER_GROWN_MAX = "/proc/sys/net/ipv4/tcp_wmem"
MAPPED = "::ffff:"  # before an IPv4 address at the end whose listener accepts IPv4 and IPv6


def round_trip_us(connection: socket.socket) -> int:
    """The smoothed round trip in microseconds."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return int.from_bytes(info[INFO_ROUND_TRIP], "little")


def limit_unsent(connection: socket.socket, nbytes: int) -> None:
    """Limit the bytes that wait in the kernel and are not in flight."""
    connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, nbytes)


def limit_silence(connection: socket.socket, duration_ns: int) -> None:
    """Make the kernel end the connection if sent bytes are not acknowledged for that long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, duration_ns // 1_000_000)


def choose_congestion_control(connection: socket.socket, names: Iterable[bytes]) -> None:
    """Use the first of these algorithms that the kernel allows; otherwise keep the present one."""
    for name in names:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break
        except OSError:
            continue


def widen_buffer(connection: socket.socket) -> None:
    """Set the largest send buffer that the kernel allows, if it is larger than the one it grows by itself."""
    try:
        with open(BUFFER_ASKED_MAX) as asked, open(BUFFER_GROWN_MAX) as grown:
            most = int(asked.read())
            if 2 * most > int(grown.read().split()[2]):  # the kernel doubles the size that is asked for
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
    except (OSError, ValueError, IndexError):
        pass  # no /proc, or in an unknown format: the buffer grows by itself


def reset_on_close(connection: socket.socket) -> None:
    """Make `close` discard what is in the buffers and send a reset to the other side."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)


def is_within_host(connection: socket.socket) -> bool:
    """Whether both ends have the same address, as on one host. A proxy may still be between them."""
    try:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:
        return False  # it was reset; the next read or write reports that


def whereabouts(connection: socket.socket, sends: bool) -> bytes:
    """A hash of machine, network namespace and the sender's end of a connection, as this end sees them.

    If the other end computes the same, both ends are on one host without a proxy. Empty if their addresses differ.
    """
    if not is_within_host(connection):
        return b""
    try:
        host, port = (connection.getsockname() if sends else connection.getpeername())[:2]
        with open(MACHINE) as boot:
            seen = f"{boot.read().strip()} {os.stat(NETWORK).st_ino} {host.removeprefix(MAPPED)} {port}"
    except OSError:
        return b""  # it was reset, or there is no /proc: then all blocks have a checksum
    return sha256(seen.encode()).digest()
