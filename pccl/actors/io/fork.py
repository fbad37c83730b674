"""Forks a worker: a child of the peer actor with a mailbox, a name for `ps`, and only the descriptors it needs.

Mailboxes are made here too, for all processes; another system would need another implementation of `mailbox_pair`.

Workers are forked without an exec: this takes a millisecond, and all loaded code and mapped memory is there. First the
worker closes all descriptors of the actor that it does not need, so that it does not keep other connections open. A
worker dies with its actor. It ends by `_exit`, so that the actor's exit handlers do not run twice.
"""

from __future__ import annotations

import os
import signal
import socket

from pccl._core.system.process import die_with_parent, set_process_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .loop import Loop

MAILBOX_BYTES_MAX = 1 << 14  # larger than any message between an actor and its workers
DESCRIPTORS_MAX = 1 << 20  # above the limit of any process of this library
LAST_WORDS_MS = 1000  # for the last message of a worker, if its actor is busy
REAP_INTERVAL_NS = 200_000  # between two looks for a killed process; with a millisecond, small syncs took 10 % longer


# Called with one line when a worker begins or ends; an actor with a debug log sets it when it starts.
worker_log: Callable[[str], None] | None = None


def mailbox_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new mailbox, of which programs that are executed inherit neither.

    A mailbox keeps messages whole and in order, carries descriptors, and tells each end that the other has closed.
    """
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def fork(
    loop: Loop,
    name: str,
    kept: Iterable[int],
    serve: Callable[[socket.socket], None],
    on_mail: Callable[[], None],
) -> tuple[int, socket.socket]:
    """Fork a child that holds these descriptors and runs `serve` with its mailbox; return its pid and our end of that.

    The loop calls `on_mail` when the child has written to its mailbox, or is gone. OSError if there is no child.
    """
    actor = os.getpid()  # asked before the fork: the child could only ask what its parent is by then
    ours, theirs = mailbox_pair()
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
    if worker_log is not None:
        worker_log(f"worker={name} pid={pid} began")
    try:
        loop.watch(ours.fileno(), lambda _: on_mail())
    except BaseException:  # a child whose mail nobody reads must not stay
        ours.close()
        kill(pid)
        wait_for_exit({pid})
        raise
    return pid, ours


def _live(name: str, kept: set[int], actor: int, serve: Callable[[], None]) -> None:
    """Run the child, and end it."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        # The actor may have died between the fork and the line above; then no signal would ever come.
        if os.getppid() == actor:
            set_process_name(name)
            close_all_but(kept)
            serve()
        status = 0
    finally:
        os._exit(status)


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor except these and the standard three."""
    begin = 3
    for fd in sorted(fd for fd in kept if fd >= begin):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, DESCRIPTORS_MAX)


def kill(pid: int) -> None:
    """Kill a worker now. Its connection closes with it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reap(pids: set[int]) -> None:
    """Reap those of these workers that have exited."""
    for pid in list(pids):
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.discard(pid)
                _log_end(pid, status)
        except ChildProcessError:
            pids.discard(pid)


def wait_for_exit(pids: set[int]) -> None:
    """Wait until all of these workers, which were killed, have exited, and reap them."""
    for pid in pids:
        try:
            _log_end(*os.waitpid(pid, 0))
        except ChildProcessError:
            pass
    pids.clear()


def _log_end(pid: int, status: int) -> None:
    if worker_log is not None:
        # Workers that are not needed any more are killed, so signal 9 is their usual end.
        worker_log(f"worker pid={pid} ended status={os.waitstatus_to_exitcode(status)}")
