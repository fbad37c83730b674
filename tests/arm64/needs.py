"""Check what the run needs from this machine before anything else is done. Installs and changes nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess

from .emulator import ENTER, NAMESPACES
from .places import WORK, fail

# Program -> the command that installs it.
PROGRAMS = {
    "qemu-aarch64-static": "apt-get install qemu-user-static",
    "aarch64-linux-gnu-gcc": "apt-get install gcc-aarch64-linux-gnu",
    "cc": "apt-get install gcc",
    "git": "apt-get install git",
    "apt-get": "a Debian system: Python for arm64 comes from its archive",
    "dpkg-deb": "apt-get install dpkg",
    "unshare": "apt-get install util-linux",
}


def check_needs() -> None:
    """End with an error that names every missing requirement and the command that installs it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        fail(f"this emulates arm64 on x86-64 Linux, and here is {platform.machine()}; on arm64, run: make test")
    if _distribution() != "debian":
        fail(
            "this is not Debian. Python for arm64 is fetched from the archive that this system is configured for, and "
            "only Debian's has all architectures. Run it in a container of debian:12 that may create user namespaces"
        )
    absent = [f"{program} is absent: {remedy}" for program, remedy in PROGRAMS.items() if shutil.which(program) is None]
    if absent:
        fail("; ".join(absent))
    _check_registry()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def _check_registry() -> None:
    """Check that a new user namespace can have its own registry of interpreters."""
    WORK.mkdir(parents=True, exist_ok=True)
    # Any existing program is good enough: no aarch64 program is started here.
    command = [*NAMESPACES, "sh", str(ENTER), "/bin/true", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    fail(
        f"cannot register an emulator: {done.stderr.strip()}. This takes Linux 6.7 or newer ({platform.release()} runs)"
        " with binfmt_misc (modprobe binfmt_misc), and the right to create user namespaces (be root, or run: sysctl -w"
        " kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0; a container: --privileged)"
    )
