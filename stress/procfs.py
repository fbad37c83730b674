"""What the system shows of a run, whatever its processes say: who lives, what they hold, what is in their memory.

Reads /proc only. Every look may come too late: a process that is gone shows nothing, which is never an error here.
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
PIPE_BYTES = 1 << 20  # a peer must not wait because the supervisor is busy


def marked_processes(mark: str, variable: str = MARK) -> set[int]:
    """Every process of a run, wherever it hangs by now. One that has ended and waits to be reaped does not count."""
    wanted = f"{variable}={mark}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may end while we look, or belong to somebody else.
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether a process hangs below another one."""
    with suppress(OSError, IndexError):
        while pid > 1:
            if pid == ancestor:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        return False
    return True  # it ended while we looked


def resident_bytes(pid: int) -> int:
    """How much memory a process holds."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def count_descriptors(pid: int) -> int:
    """How many descriptors a process holds."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def describe(pid: int) -> str:
    """Its name and command line, for people."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({command[:120].strip()})"
    return "gone by now"


def enlarge(pipe: int) -> None:
    """Give a pipe room for everything that is told while the supervisor looks elsewhere."""
    with suppress(OSError):  # beyond what this user may have: then the default has to do
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def count_segments(pid: int) -> int:
    """How many of our memory segments a process has mapped."""
    with suppress(OSError):
        return len(SEGMENT.findall(Path(f"/proc/{pid}/maps").read_bytes()))
    return 0


def checksum_memory(pid: int, address: int, nbytes: int) -> int | None:
    """Of so many bytes in the memory of another process, or None if it cannot be read any more."""
    with suppress(OSError), Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(nbytes)
        return zlib.crc32(data) if len(data) == nbytes else None
    return None


def free_port(low: int = 20_000, high: int = 30_000) -> int:
    """A port below those that the system gives to callers, so that nobody takes it before we do."""
    while True:
        port = random.randrange(low, high)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
