"""Tests by tier: unit, sim and process; how each tier is meant is in CONTRIBUTING.md."""

import socket
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the source tree


def has_ipv6() -> bool:
    """Whether this machine has the address ::1; a kernel without it may still open sockets for IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
