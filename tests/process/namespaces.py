"""Hosts that cannot all reach each other: network namespaces on one bridge, with routes cut between some of them.

Needs root and the `ip` command only. A route of type *unreachable* makes a dial fail at once and drops the answers to
dials from the other side, so one cut separates a pair in both directions. A rule of type *blackhole* for answers from a
peer's ports makes the host silent to dials: no answer leaves it, as with a firewall that drops what comes in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from pccl.options import PEER_PORT_FIRST, PEER_PORTS_MAX

from .helpers import PREAMBLE, Script

# Networks for measurements, which no real host uses: 198.18.0.0/15, of which each `HostNetwork` takes a /24.
NETWORKS = 512

PEER_PORTS = (PEER_PORT_FIRST, PEER_PORT_FIRST + PEER_PORTS_MAX - 1)
# Where the connections of a host with a firewall start: the usual range contains the ports of peers.
EPHEMERAL_PORTS = (PEER_PORTS[1] + 1, 60_999)


class HostNetwork:
    """Network namespaces as hosts; the master runs on this host, at `gateway`."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._number = 0

    def __enter__(self) -> HostNetwork:
        self._claim()
        bridge = f"{self._tag}b"
        try:
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
        # A deleted namespace takes its end of the veth pair with it, but some time later: the next network may need the
        # name before.
        for host in range(self._hosts):
            subprocess.run(["ip", "link", "del", f"{self._tag}o{host}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(host)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], check=False, capture_output=True)

    def _claim(self) -> None:
        """Take a network that no other test on this machine uses: a bridge name can exist only once."""
        for attempt in range(NETWORKS):
            self._number = (os.getpid() + attempt) % NETWORKS
            made = subprocess.run(
                ["ip", "link", "add", f"{self._tag}b", "type", "bridge"], check=False, capture_output=True, text=True
            )
            if made.returncode == 0:
                return
            assert "File exists" in made.stderr, made.stderr
        raise AssertionError(f"all {NETWORKS} networks are taken: see `ip link`")

    @property
    def _tag(self) -> str:
        return f"pccl{self._number}"

    @property
    def _prefix(self) -> str:
        return f"198.{18 + self._number // 256}.{self._number % 256}"

    @property
    def gateway(self) -> str:
        """The address of this host, where the master is."""
        return f"{self._prefix}.1"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"{self._prefix}.{10 + host}"

    def cut(self, host: int, other: int) -> None:
        """Cut the routes between these two hosts."""
        _ip("-n", self._space(host), "route", "add", "unreachable", self.address(other))

    def firewall(self, host: int) -> None:
        """Let nobody connect to the peers of this host, from now on: it ignores dials, and can dial all others.

        Skips the test where the kernel has no such rules (Linux 4.17 with CONFIG_IP_MULTIPLE_TABLES has them).
        """
        low, high = EPHEMERAL_PORTS
        setting = f"echo {low} {high} > /proc/sys/net/ipv4/ip_local_port_range"
        _ip("netns", "exec", self._space(host), "sh", "-c", setting)
        ports = f"{PEER_PORTS[0]}-{PEER_PORTS[1]}"
        rule = ["ip", "-n", self._space(host), "rule", "add", "ipproto", "tcp", "sport", ports, "blackhole"]
        made = subprocess.run(rule, check=False, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"a namespace has no firewall here: {' '.join(rule)}: {made.stderr.strip()}")

    def start(self, host: int, code: str, *arguments: object, **environment: str) -> Script:
        """Start a script on that host."""
        program = PREAMBLE + textwrap.dedent(code)
        return self.command(host, sys.executable, "-c", program, *arguments, **environment)

    def command(self, host: int, *command: object, **environment: str) -> Script:
        """Start any other program on that host."""
        return Script.command("ip", "netns", "exec", self._space(host), *command, **environment)

    def _space(self, host: int) -> str:
        return f"{self._tag}h{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
