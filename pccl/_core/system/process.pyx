# cython: language_level=3, auto_pickle=False
"""Process calls: names, cores, the death of a parent, and descriptors that tell when a process ends.

Callers decide which processes start and what follows from an end. Another system would need another implementation of
the same names.
"""

import os
import signal

from . cimport posix
from .futex cimport raise_errno

# The kernel keeps 16 bytes of a name, the last of which is zero.
cdef enum:
    PROCESS_NAME_BYTES_MAX = 15


def set_process_name(str name not None) -> None:
    """Names the calling process for `ps` and `top`; a longer name is cut."""
    cdef bytes encoded = name.encode("utf-8", "replace")[:PROCESS_NAME_BYTES_MAX]
    cdef const char *text = encoded
    if posix.prctl(posix.PR_SET_NAME, text) != 0:
        raise_errno(posix.errno, f"naming the process {name!r}")


def die_with_parent(int number) -> None:
    """Makes the kernel send signal `number` to the calling process when its parent ends.

    "Parent" means the *thread* that forked this process, so that thread must not end early. The setting survives exec
    and is not inherited by children. If the parent died before this call, no signal comes: compare `os.getppid()` with
    the expected process afterwards.
    """
    if posix.prctl(posix.PR_SET_PDEATHSIG, <unsigned long> number) != 0:
        raise_errno(posix.errno, f"asking for signal {number} at the death of the parent")


def open_pidfd(int pid) -> int:
    """A descriptor that becomes readable when process `pid` ends, and that never refers to another process."""
    cdef long fd = posix.syscall(posix.SYS_pidfd_open, pid, 0)
    if fd < 0:
        raise_errno(posix.errno, f"opening a descriptor of process {pid}")
    return fd


def end_process(int pidfd) -> None:
    """Kill the process of a descriptor from `open_pidfd`, and never another one."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def address_space_bytes() -> int:
    """How much address space the calling process holds."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def usable_cores() -> int:
    """How many processor cores the calling process may use."""
    return len(os.sched_getaffinity(0))


def is_stopped(int pid) -> bool:
    """Whether a process was stopped by a signal or a debugger. False if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")
