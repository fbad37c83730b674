"""Addresses as people write them: `host:port`, `[IPv6]:port`, a name or a number.

Parsing and resolving, for the training process and the command line. Actors get numeric addresses only, so that a slow
resolver never delays a heartbeat.
"""

from __future__ import annotations

import socket

from pccl.options import PORT_MAX

ALL_ADDRESSES = "0.0.0.0"  # where one listens for connections to any IPv4 address of this machine


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port. Raises ValueError, which shows how to write an address."""
    if not isinstance(text, str):
        raise ValueError(f"an address must be a text like '10.0.0.7:48148', not {text!r}")
    if text.isascii() and text.isdigit():
        raise ValueError(f"address {text!r} is only a port; write the host before it, like 10.0.0.7:{text}")
    host, separator, port = text.rpartition(":")
    if (text.startswith("[") and text.endswith("]")) or not separator:
        host, port = text, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: write an IPv6 address in brackets, like [::1]:48148")
    if not port and default_port is not None and host:
        return host, default_port
    if not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= PORT_MAX:
        raise ValueError(f"address {text!r} must be host:port, like 10.0.0.7:48148 or [::1]:48148")
    return host, int(port)


def parse_listen_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """The same for an address to listen on, where a port alone (`48148` or `:48148`) means all addresses."""
    port = str(text).removeprefix(":")  # `parse_address` refuses what is no text
    if text in (port, f":{port}") and port.isascii() and port.isdigit():
        text = f"{ALL_ADDRESSES}:{port}"
    return parse_address(text, default_port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int) -> list[tuple[str, int]]:
    """Return all numeric addresses of a host, in the system's order of preference. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(str(address[0]).split("%")[0], port) for *_, address in found]
    return list(dict.fromkeys(addresses))
