"""Process calls: names, the death of a parent, and descriptors of processes."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from pccl._core.system.futex import Word, monotonic_ns
from pccl._core.system.process import (
    die_with_parent,
    end_process,
    is_stopped,
    open_pidfd,
    set_process_name,
    usable_cores,
)
from tests.readable import is_readable

from .test_futex import SECOND_NS, exit_code, in_child, wait_until


def test_process_name():
    def rename():
        set_process_name("pccl-recv-3-and-much-more")
        with open("/proc/self/comm") as comm:
            assert comm.read() == "pccl-recv-3-and\n"

    assert exit_code(in_child(rename)) == 0


def test_die_with_parent():
    """A grandchild that would sleep for a minute ends with its parent; the end of the pipe shows it."""
    program = (
        "import os, signal, time\n"
        "from pccl._core.system.process import die_with_parent\n"
        "parent = os.getpid()\n"
        "ready, announce = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    die_with_parent(signal.SIGKILL)\n"
        "    assert os.getppid() == parent\n"
        "    os.write(announce, b'!')\n"
        "    time.sleep(60)\n"
        "os.read(ready, 1)\n"
    )
    begin_ns = monotonic_ns()
    # The pipe to us ends only when both processes are gone.
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, timeout=30)

    assert monotonic_ns() - begin_ns < 30 * SECOND_NS


def test_impossible_signal_is_refused():
    with pytest.raises(OSError, match="signal 1000") as caught:
        die_with_parent(1000)
    assert caught.value.errno == errno.EINVAL


def test_pidfd_tells_the_end_of_a_process(shared):
    go = Word(shared)
    pid = in_child(lambda: wait_until(go, 1))
    fd = open_pidfd(pid)
    try:
        assert not is_readable(fd)
        go.store(1)
        go.wake()
        assert is_readable(fd, 20)
    finally:
        os.close(fd)
        os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError, match=str(pid)):
        open_pidfd(pid)


def test_a_stopped_process_is_known_until_it_is_ended():
    pid = in_child(lambda: time.sleep(60))
    fd = open_pidfd(pid)
    try:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_stopped(pid)
        end_process(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert not is_stopped(pid)
    finally:
        os.close(fd)


def test_a_process_knows_the_cores_it_may_use():
    """Goal: cores that the process is kept away from do not count."""

    def keep_to_one():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert usable_cores() == 1

    assert usable_cores() == len(os.sched_getaffinity(0))
    assert exit_code(in_child(keep_to_one)) == 0
