"""Hosts that cannot all reach each other: network namespaces on one bridge, with routes cut between some of them.

Needs root, and only `ip`: a route of type *unreachable* fails a dial at once, and swallows the answers to whoever
dials from the other side, so one cut separates a pair in both directions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from .helpers import PREAMBLE, Script

# A network of documentation that no real host uses.
NETWORK = "198.51.100"


class Territory:
    """So many hosts; the master's own is this one, at `gateway`."""

    gateway = f"{NETWORK}.1"

    def __init__(self, hosts: int) -> None:
        self._tag = f"pc{os.getpid() % 10_000_000}"
        self._hosts = hosts

    def __enter__(self) -> Territory:
        bridge = f"{self._tag}b"
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for host in range(self._hosts):
                space, outer, inner = self._space(host), f"{self._tag}o{host}", f"{self._tag}i{host}"
                _ip("netns", "add", space)
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
                _ip("link", "set", outer, "master", bridge, "up")
                _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", inner)
                _ip("-n", space, "link", "set", inner, "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A namespace takes its end of the pair with it, and so the other end.
        for host in range(self._hosts):
            subprocess.run(["ip", "netns", "del", self._space(host)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], check=False, capture_output=True)

    def address(self, host: int) -> str:
        """Where a host is reached."""
        return f"{NETWORK}.{10 + host}"

    def cut(self, host: int, other: int) -> None:
        """These two hear nothing of each other any more."""
        _ip("-n", self._space(host), "route", "add", "unreachable", self.address(other))

    def start(self, host: int, code: str, *arguments: object) -> Script:
        """A script on that host."""
        program = PREAMBLE + textwrap.dedent(code)
        return Script.command("ip", "netns", "exec", self._space(host), sys.executable, "-c", program, *arguments)

    def _space(self, host: int) -> str:
        return f"{self._tag}h{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
