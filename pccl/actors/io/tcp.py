"""TCP connections as Linux lets us see and set them: round trips, buffers, backlog, pacing, patience, and the host.

Only what one connection can be asked or told. Which values suit a link is decided by the workers. Another system would
be served by another body behind the same names.
"""

from __future__ import annotations

import os
import socket
import struct
from hashlib import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

INFO_BYTES = 104  # of struct tcp_info, as far as all kernels have it
INFO_ROUND_TRIP = slice(68, 72)  # tcpi_rtt in it, microseconds
TCP_NOTSENT_LOWAT = 25
LINGER_NONE = struct.pack("ii", 1, 0)
MACHINE = "/proc/sys/kernel/random/boot_id"
NETWORK = "/proc/self/ns/net"
BUFFER_ASKED_MAX = "/proc/sys/net/core/wmem_max"
BUFFER_GROWN_MAX = "/proc/sys/net/ipv4/tcp_wmem"
MAPPED = "::ffff:"  # ahead of an IPv4 address, for the end whose listener takes both


def round_trip_us(connection: socket.socket) -> int:
    """The smoothed round trip in microseconds."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return int.from_bytes(info[INFO_ROUND_TRIP], "little")


def limit_unsent(connection: socket.socket, nbytes: int) -> None:
    """Keep no more than that in the kernel beyond what is in flight."""
    connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, nbytes)


def limit_silence(connection: socket.socket, duration_ns: int) -> None:
    """End the connection when the other side has acknowledged nothing for that long although it should have."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, duration_ns // 1_000_000)


def choose_congestion_control(connection: socket.socket, names: Iterable[bytes]) -> None:
    """Use the first of these that this kernel has and allows; otherwise keep what it uses."""
    for name in names:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            break
        except OSError:
            continue


def widen_buffer(connection: socket.socket) -> None:
    """Let more be in flight than the kernel would grow a buffer to by itself, where it may be asked for more."""
    try:
        with open(BUFFER_ASKED_MAX) as asked, open(BUFFER_GROWN_MAX) as grown:
            most = int(asked.read())
            if 2 * most > int(grown.read().split()[2]):  # the kernel takes twice what it is asked for
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
    except (OSError, ValueError, IndexError):
        pass  # no /proc, or not as we know it: the buffer grows by itself


def reset_on_close(connection: socket.socket) -> None:
    """Have `close` drop what is in the buffers, and tell the other side by a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)


def is_within_host(connection: socket.socket) -> bool:
    """Whether both ends have the same address, as on one host, though a proxy may still be between them."""
    try:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:
        return False  # reset already, which reading or writing tells


def whereabouts(connection: socket.socket, sends: bool) -> bytes:
    """Machine, network namespace and the sender's end of a connection, as one of both ends sees them.

    If the other one sees the same, there is nothing between them. Empty if their addresses differ already.
    """
    if not is_within_host(connection):
        return b""
    try:
        host, port = (connection.getsockname() if sends else connection.getpeername())[:2]
        with open(MACHINE) as boot:
            seen = f"{boot.read().strip()} {os.stat(NETWORK).st_ino} {host.removeprefix(MAPPED)} {port}"
    except OSError:
        return b""  # reset meanwhile, or no /proc: everything has a checksum then
    return sha256(seen.encode()).digest()
