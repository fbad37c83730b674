"""The leak guard: it finds every kind of leak, and reports none without one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import psutil

from tests.leaks import WAIT_SECONDS_MAX, Footprint, has_ended

# Takes a name like the library's processes, prints a line, and waits to be ended.
# Its parent ends at once, so that the process is an orphan when the guard looks for it.
ORPHAN = """
import os, sys
if os.fork() == 0:
    with open("/proc/self/comm", "w") as comm:
        comm.write("pccl-probe")
    print("ready", flush=True)
    sys.stdin.read()
"""

# Its main thread ends by a system call that ends no other thread (exit). The other one ends with the input.
HEADLESS = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_nothing_is_reported_when_nothing_is_left() -> None:
    """Goal: a clean test passes, also if it opened and closed things."""
    with Footprint.watch() as footprint:
        os.close(os.open("/dev/null", os.O_RDONLY))
        subprocess.run([sys.executable, "-c", ""], check=True)

        assert footprint.leaks() == []


def test_an_open_descriptor_is_named() -> None:
    """Goal: the message tells which file was left open."""
    with Footprint.watch() as footprint:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        leaks = footprint.leaks()
        os.close(descriptor)

        assert leaks == [f"descriptor {descriptor} -> /dev/null"]


def test_a_mapped_segment_is_named() -> None:
    """Goal: a segment that is closed but still mapped is found."""
    with Footprint.watch() as footprint:
        descriptor = os.memfd_create("pccl-probe")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        mapping = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        leaks = footprint.leaks()
        mapping.close()

        # mmap keeps a descriptor of its own, which is reported beside the mapping.
        assert "mapped segment /memfd:pccl-probe" in leaks
        assert footprint.leaks() == []


def test_a_running_child_is_named_and_ended() -> None:
    """Goal: a child that outlives its test is reported and then ended."""
    with Footprint.watch() as footprint:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        leaks = footprint.leaks(wait_seconds=0.1)
        child.communicate()

        assert any(line.startswith(f"process {child.pid} ") and line.endswith("still running") for line in leaks)
        assert footprint.leaks() == []


def test_an_orphan_is_found_by_its_mark() -> None:
    """Goal: a process whose parent died is no longer a descendant, and is still found."""
    with Footprint.watch() as footprint:
        with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            parent.wait()
            leaks = footprint.leaks(wait_seconds=0.1)

        assert any("pccl-probe" in line and "still running" in line for line in leaks)
        assert footprint.leaks() == []


def test_a_process_ends_with_its_last_thread() -> None:
    """Goal: nobody expects a free port or a closed descriptor of a process whose main thread alone has ended."""
    child = subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE)
    process, deadline = psutil.Process(child.pid), time.monotonic() + WAIT_SECONDS_MAX
    try:
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the main thread did not end"
        ended_with_a_thread_left = has_ended(process)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        ended_as_a_zombie = has_ended(process)
    finally:
        child.kill()
        child.wait()

    assert not ended_with_a_thread_left
    assert ended_as_a_zombie
    assert has_ended(process)
