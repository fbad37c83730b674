"""Runs commands that can execute aarch64 programs like any other program, by QEMU's user mode.

The registration lives in a user namespace of the command (enter.sh), so it needs no root and leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .places import PYTHON, SYSROOT, VENV, WORK, Stamp, fail, run_logged, say

HERE = Path(__file__).parent
ENTER = HERE / "enter.sh"
INTERPRETER = WORK / "interpreter"

# Prefixes of environment variables that are about the host's Python and compiler.
FOREIGN = ("PYTHON", "VIRTUAL_ENV", "CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "MAKE")

NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--"]


def build_interpreter() -> None:
    """Compile interpreter.c with the paths of this tree."""
    source = HERE / "interpreter.c"
    emulator = shutil.which("qemu-aarch64-static")
    stamp = Stamp("interpreter", source.read_bytes(), str(emulator), str(SYSROOT))
    if stamp.is_current and INTERPRETER.exists():
        return
    WORK.mkdir(parents=True, exist_ok=True)
    # Static, because the dynamic linker would look for its libraries under the name of the emulated program.
    command = ["cc", "-O2", "-Wall", "-Werror", "-static", f'-DEMULATOR="{emulator}"', f'-DSYSROOT="{SYSROOT}"']
    run_logged("interpreter", [*command, str(source), "-o", str(INTERPRETER)])
    stamp.set()


def emulated(*command: str | Path) -> list[str]:
    """Return the command line that runs a command with aarch64 programs executable."""
    return [*NAMESPACES, "sh", str(ENTER), str(INTERPRETER), *map(str, command)]


def environment() -> dict[str, str]:
    """Return the environment of the emulated virtual environment, without the host's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    own = {"VIRTUAL_ENV": str(VENV), "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
    return {**kept, **own, "CFLAGS": f"-I{SYSROOT}/usr/include"}  # the headers of Python include others from here


def check_emulation() -> None:
    """Check that the emulated Python starts, and its children too, also with an empty environment."""
    code = "import platform, subprocess, sys; print(platform.machine(), flush=True); {}"
    inner = "subprocess.run([sys.executable, '-c', 'import platform; print(platform.machine())'], env={}, check=True)"
    command = emulated(PYTHON, "-c", code.format(inner))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.stdout.split() != ["aarch64", "aarch64"]:
        fail(f"the emulated Python does not run as it should: {done.stdout} {done.stderr}")
    say("the emulator runs Python and its children")
