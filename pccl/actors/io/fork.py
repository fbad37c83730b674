"""Forking a worker: a child of the peer actor with a mailbox, a name for `ps`, and nothing else of the actor's.

Workers are forked, not started: it costs a millisecond, and everything that was read and mapped is already there. What
the actor holds open, and the worker was not given, is closed first, so that no connection is kept up by a bystander. A
worker dies with its actor, and leaves by `_exit`, so that nothing of the actor's is run twice.
"""

from __future__ import annotations

import os
import signal
import socket

from pccl._core.system.process import die_with_parent, set_process_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAILBOX_BYTES_MAX = 1 << 14  # larger than any message between an actor and its workers
DESCRIPTORS_MAX = 1 << 20  # above any limit that a process of ours runs under


def fork(name: str, kept: Iterable[int], serve: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """A child that holds these descriptors and does nothing but `serve` its mailbox; its pid and our end of that."""
    actor = os.getpid()  # asked before the fork: the child could only learn what its parent is by then
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _live(name, {theirs.fileno(), *kept}, actor, lambda: serve(theirs))
    theirs.close()
    ours.setblocking(False)
    return pid, ours


def _live(name: str, kept: set[int], actor: int, serve: Callable[[], None]) -> None:
    """The child's whole life."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        # The actor may have died between the fork and the line above; then nobody would ever tell us.
        if os.getppid() == actor:
            set_process_name(name)
            _close_all_but(kept)
            serve()
        status = 0
    finally:
        os._exit(status)


def _close_all_but(kept: set[int]) -> None:
    begin = 3
    for fd in sorted(fd for fd in kept if fd >= begin):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, DESCRIPTORS_MAX)


def kill(pid: int) -> None:
    """End a worker now. Its connection closes with it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reap(pids: set[int]) -> None:
    """Reap those of these workers that have exited."""
    for pid in list(pids):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.discard(pid)
        except ChildProcessError:
            pids.discard(pid)


def wait_for_exit(pids: set[int]) -> None:
    """Wait until all of these workers, which were killed, have exited, and reap them."""
    for pid in pids:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass
    pids.clear()
