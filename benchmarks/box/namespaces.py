"""The start of every process of a box: `make` becomes the emulator, `enter` becomes a program on one host.

A namespace here has no name and no file: the emulator holds all of them, and the devices in them, by descriptor. So
they are gone with the emulator and the last program inside, whatever happens. All of these die with the process that
owns the box. A script that imports nothing of ours, so that a program starts as soon as Python itself does.

    namespaces.py make OWNER EMULATOR_DESCRIPTOR PLAN_JSON
    namespaces.py enter OWNER NAMESPACE_PATH PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
# A device of IP packets, with a header for the work of a network card: TCP checksums, and the cut into packets.
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
# Packets that wait in the device for the emulator. It reads at once, so a full device would show an overloaded machine,
# not a property of a link; this limit is larger than what arrives while the emulator waits for a core.
DEVICE_PACKETS_MAX = 10_000

libc = ctypes.CDLL(None, use_errno=True)


def die_with(owner: int) -> None:
    """Ask the kernel to kill this process when the owner of the box ends; exit if the owner has already ended."""
    libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != owner:
        sys.exit(1)


def make(emulator: int, plan: dict[str, object]) -> None:
    """Make a namespace with a device for each host, print their file descriptors, then become the emulator."""
    namespaces, devices = [], []
    addresses, settings = plan["addresses"], plan["settings"]
    assert isinstance(addresses, list)
    assert isinstance(settings, dict)
    for address in addresses:
        _check(libc.unshare(CLONE_NEWNET), "unshare")
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        devices.append(_device(str(plan["device"])))
        _configure(str(plan["device"]), address, plan["mtu"])
        for name, value in settings.items():
            with open(f"/proc/sys/{name.replace('.', '/')}", "w") as file:
                file.write(value)
    for fd in namespaces + devices:
        os.set_inheritable(fd, True)
    print(json.dumps(namespaces), flush=True)
    os.execve(emulator, ["pccl-box", *map(str, devices)], os.environ)


def _device(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return fd


def _configure(device: str, address: str, mtu: object) -> None:
    commands = (
        "link set lo up",
        f"address add {address}/24 dev {device}",
        f"link set {device} mtu {mtu} txqueuelen {DEVICE_PACKETS_MAX} up",
    )
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def enter(namespace: str, program: list[str]) -> None:
    """Become the program, on the host with this namespace."""
    fd = os.open(namespace, os.O_RDONLY)
    _check(libc.setns(fd, CLONE_NEWNET), "setns")
    os.close(fd)
    os.execvp(program[0], program)


def _check(code: int, call: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    verb, owner, first, *rest = sys.argv[1:]
    die_with(int(owner))
    if verb == "make":
        make(int(first), json.loads(rest[0]))
    else:
        enter(first, rest)
