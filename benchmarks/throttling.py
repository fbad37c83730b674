"""A private loopback on which each connection has its own rate, and one of them may be slow.

`in_namespace` starts a module in a new network namespace without a name, so it disappears with its last process.
Inside, `Throttle` gives every connection of a lane its own class (HTB, chosen by the sender's port, since the bytes of
a lane flow in one direction) and everything else, mainly acknowledgements, a class without a practical limit. Needs
root, or user namespaces, and `ip`, `tc` and `ss`.

The queues of the classes keep their default depth. With 128 KiB each, two packets of loopback, the connections lose so
many packets that together they reach a quarter of their rates, and a slow one among them is hardly visible.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

TOOLS = ("unshare", "ip", "tc", "ss")
ROOM_MBIT = 100_000  # for all that is not limited
BURST = "128k"  # loopback sends up to 64 KiB at a time; a class with a smaller burst would never send that

# A sender's line of `ss -tnpH`: state, two queues, its own address with port, the other's, and its process.
SENDER = re.compile(r"^ESTAB\s+\d+\s+\d+\s+\S+:(\d+)\s+\S+\s+.*\(\"(pccl-send-\d+)\"", re.MULTILINE)


def namespace_command() -> list[str]:
    """Return the prefix of a command that runs it in a new namespace."""
    return ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--"]


def reason_against() -> str:
    """Why there can be no such namespace here; empty if there can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    probe = "ip link set lo up && tc qdisc add dev lo root handle 1: htb"
    tried = subprocess.run([*namespace_command(), "sh", "-c", probe], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip() or "no network namespace, or no HTB in it"


def in_namespace(module: str, *arguments: str) -> str:
    """Run a module in a new namespace; return its standard output."""
    command = [*namespace_command(), sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def raise_loopback() -> None:
    """Set the loopback device of a new namespace up."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


class Throttle:
    """The rates of all lanes that are connected in this namespace; each has `rate_mbit` until it is slowed down."""

    def __init__(self, rate_mbit: int) -> None:
        self._rate_mbit = rate_mbit
        found = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout
        self.senders = sorted((name, int(port)) for port, name in SENDER.findall(found))
        _tc("qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1")
        self._set("add", 1, ROOM_MBIT)
        for number, (_, port) in enumerate(self.senders, 2):
            self._set("add", number, rate_mbit)
            match = ("match", "ip", "sport", str(port), "0xffff")
            _tc(
                "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", "u32", *match, "flowid", f"1:{number:x}"
            )

    def slow_down(self, factor: float) -> None:
        """Multiply the rate of the first lane of one peer by this factor; 1 restores it."""
        self._set("change", 2, self._rate_mbit * factor)

    @staticmethod
    def _set(verb: str, number: int, rate_mbit: float) -> None:
        # The quantum is for borrowing, which no class does here; without it tc warns about every class.
        rate = ("rate", f"{round(rate_mbit * 1000)}kbit", "burst", BURST, "cburst", BURST, "quantum", "60000")
        _tc("class", verb, "dev", "lo", "parent", "1:", "classid", f"1:{number:x}", "htb", *rate)


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True)
