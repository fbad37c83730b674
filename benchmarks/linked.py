"""Two hosts in a box: two network namespaces, and between them one link with a rate of its own.

The first namespace is that of the process that makes the link (see `throttling.in_namespace`); the second belongs to a
process that only holds it. Neither has a name, so both are gone, and the link with them, when the last of their
processes is: after a failure and after a SIGKILL as well as at the end. Needs root, or user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from .throttling import namespace_command, raise_loopback

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

TOOLS = ("unshare", "ip", "tc", "sh")
NEAR, FAR = "10.77.0.1", "10.77.0.2"  # the namespaces are private, so these addresses are free
BURST = "256k"  # a veth sends up to 64 KiB at a time; a smaller bucket would never let that pass
QUEUE = "100ms"  # the queue of the link: a router's buffer, deep enough for one connection to fill the link
CLONE_NEWNET = 0x40000000

SHAPED = f"tbf rate {{rate}}mbit burst {BURST} latency {QUEUE}"


def reason_against() -> str:
    """Why there can be no such link here; empty if there can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    shaped = SHAPED.format(rate=100)
    probe = f"ip link add near type veth peer name far && tc qdisc add dev near root {shaped}"
    tried = subprocess.run([*namespace_command(), "sh", "-c", probe], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"needs root: {tried.stderr.strip() or 'no network namespace'}"


class Link:
    """A second namespace, and a link to it with that rate in each direction."""

    def __init__(self, rate_mbit: int) -> None:
        raise_loopback()
        # It reads until its standard input ends, at the latest with this process.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "ip link set lo up && echo up && cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            raise RuntimeError("there is no second network namespace")
        self.pid = self._holder.pid
        shaped = SHAPED.format(rate=rate_mbit)
        enter = f"nsenter --net=/proc/{self.pid}/ns/net"
        for line in (
            f"ip link add near type veth peer name far netns {self.pid}",
            f"ip addr add {NEAR}/24 dev near && ip link set near up && tc qdisc add dev near root {shaped}",
            f"{enter} sh -c 'ip addr add {FAR}/24 dev far && ip link set far up && tc qdisc add dev far root {shaped}'",
        ):
            subprocess.run(["sh", "-c", line], check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.communicate()


def move_to(pid: int) -> None:
    """Enter the network namespace of that process, with all later children."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"the network namespace of process {pid} cannot be entered")
    finally:
        os.close(namespace)
