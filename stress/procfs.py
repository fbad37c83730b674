"""What /proc shows of the processes of a run: which processes live, what they hold, what is in their memory.

Only reads /proc. A process may end at any time; then the functions return nothing, which is never an error here.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import socket
import zlib
from contextlib import suppress
from pathlib import Path

from .zygote import MARK

SEGMENT = re.compile(rb"/memfd:pccl")
PIPE_BYTES = 1 << 20  # room for what a peer writes while the supervisor is busy


def marked_processes(mark: str, variable: str = MARK) -> set[int]:
    """All processes of a run, whatever their parent is now. Ended processes that wait to be reaped do not count."""
    wanted = f"{variable}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may end meanwhile, or belong to another user.
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process is a descendant of another one."""
    with suppress(OSError, IndexError):
        while pid > 1:
            if pid == ancestor:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        return False
    return True  # it ended meanwhile


def resident_bytes(pid: int) -> int:
    """The resident memory of a process."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def count_descriptors(pid: int) -> int:
    """The number of open descriptors of a process."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def describe(pid: int) -> str:
    """The name and command line of a process, for messages."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({command[:120].strip()})"
    return "gone by now"


def enlarge(pipe: int) -> None:
    """Enlarge a pipe to hold all reports while the supervisor is busy."""
    with suppress(OSError):  # above the limit of this user: keep the default
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def count_segments(pid: int) -> int:
    """The number of pccl segments that a process has mapped."""
    with suppress(OSError):
        return len(SEGMENT.findall(Path(f"/proc/{pid}/maps").read_bytes()))
    return 0


def checksum_memory(pid: int, address: int, nbytes: int) -> int | None:
    """The checksum of a memory range of another process; None if it cannot be read."""
    with suppress(OSError), Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(nbytes)
        return zlib.crc32(data) if len(data) == nbytes else None
    return None


def free_port(low: int = 20_000, high: int = 30_000) -> int:
    """A free port below the range of ephemeral ports, so that no outgoing connection takes it."""
    while True:
        port = random.randrange(low, high)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
