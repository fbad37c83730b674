"""Python for arm64: Debian's packages, unpacked below build/arm64/root, and a virtual environment with the wheels.

apt runs with folders of its own, an empty list of installed packages and arm64 as its architecture, so that it resolves
all dependencies of Python and does not change the system. Only the system's sources and keys are used.
Wheels are installed by the host's pip, which is told the platform: an emulated pip takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib

from tests import ROOT

from .emulator import emulated
from .places import SYSROOT, VENV, WORK, Stamp, fail, run_logged, say

# The interpreter, its headers, and the libraries that the wheels of numpy and matplotlib link with.
PACKAGES = ("python3", "libpython3-dev", "libstdc++6")

# Platform tags of aarch64 wheels that run on the oldest Debian that is supported here (glibc 2.36).
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_27", "manylinux_2_28", "manylinux_2_34")

APT = WORK / "apt"


def make_sysroot() -> None:
    """Fetch and unpack the packages, unless that is done."""
    stamp = Stamp("packages", *PACKAGES, str(SYSROOT))
    if not stamp.is_current:
        _fetch_packages()
        _unpack_packages()
        stamp.set()
    say(f"{python_name()} of Debian for arm64 is in {SYSROOT.relative_to(ROOT)}")


def make_environment() -> None:
    """Make the virtual environment and install the development wheels, unless that is done."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    stamp = Stamp("wheels", json.dumps(groups), python_name(), str(VENV), *PLATFORMS)
    if stamp.is_current:
        return
    if VENV.exists():
        shutil.rmtree(VENV)
    say("making a virtual environment")
    run_logged("venv", emulated(SYSROOT / "usr" / "bin" / python_name(), "-m", "venv", "--without-pip", VENV))
    say("installing wheels for aarch64 (some 100 MB; pip keeps what it downloaded)")
    version = python_name().removeprefix("python")
    target = VENV / "lib" / python_name() / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--target", str(target), "--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    command += [f"--platform={platform}_aarch64" for platform in PLATFORMS]
    run_logged("wheels", [*command, "pip", "--group", f"{ROOT / 'pyproject.toml'}:dev"])
    # New files would be newer than the C sources of the host, and Cython would translate all of those again.
    for declarations in (target / "Cython" / "Includes").rglob("*.pxd"):
        os.utime(declarations, (0, 0))
    stamp.set()


def python_name() -> str:
    """The interpreter's file name: python3.11, say."""
    link = SYSROOT / "usr" / "bin" / "python3"
    if not link.is_symlink():
        fail(f"there is no Python in {SYSROOT}; run: rm -r {WORK}")
    return link.readlink().name


def _fetch_packages() -> None:
    for folder in ("state/lists/partial", "cache/archives/partial", "log"):
        (APT / folder).mkdir(parents=True, exist_ok=True)
    (APT / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",  # the user that apt fetches as may not be allowed to write here
        "Debug::NoLocking": "1",
        "Dir::State": str(APT / "state"),
        "Dir::State::status": str(APT / "status"),
        "Dir::Cache": str(APT / "cache"),
        "Dir::Log": str(APT / "log"),
    }
    apt = ["apt-get", "--quiet=2", *(f"--option={name}={value}" for name, value in settings.items())]
    say("fetching the list of Debian's packages for arm64")
    run_logged("apt-update", [*apt, "update"])
    say(f"fetching {', '.join(PACKAGES)} and what they need (some 30 MB)")
    run_logged("apt-install", [*apt, "--download-only", "--no-install-recommends", "--yes", "install", *PACKAGES])


def _unpack_packages() -> None:
    packages = sorted((APT / "cache" / "archives").glob("*.deb"))
    say(f"unpacking {len(packages)} packages")
    if SYSROOT.exists():
        shutil.rmtree(SYSROOT)
    SYSROOT.mkdir(parents=True)
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", str(package), str(SYSROOT)], check=True)
