"""The workers of a measurement: one process at each end of an edge, with all connections of the pool between them.

The source (`pccl-probe-3`) writes whatever the connections take. The target (`pccl-count-3`) throws it away, and
counts: what has been written may be in a buffer far from having arrived, so the target's number is the honest one. Its
clock starts with the first byte. The first part of the time does not count, in which windows open and the burst passes
that a shaped link lets through. At the end the target says on the first connection how much came in how long. The
source takes that as the answer and closes everything at once, so that what is still in its buffers does not disturb
the next round.

Each side has a bound on the whole, and whatever ends early ends it with a reason. Megabytes move in a call, so Python
is no burden here.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from pccl._core.mailbox import ProbeEnded
from pccl._core.park import monotonic_ns
from pccl._core.wire import pack
from pccl.records import record

from .faults import planned
from .lane_worker import suit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER = struct.Struct("<QQ")  # bytes that count, and the nanoseconds in which they came
RAMP_SHARE = 0.4  # of the time, ahead of what counts: at 100 ms four round trips, in which a window grows sixteenfold
CHUNK_BYTES = 1 << 18  # written or read at once
LINGER_NONE = struct.pack("ii", 1, 0)  # close with a reset: what is in the buffers is of no use to anybody
LAST_WORDS_MS = 1000  # for the report that ends a worker, if its actor is busy


@record
class Course:
    """What both ends of a measurement know of it."""

    duration_ns: int  # from the first byte to the last that counts
    limit_ns: int  # for everything together, by which a worker has ended


class ProbeError(Exception):
    """Nothing can be measured, and why."""


def be_source(mailbox: socket.socket, connections: Sequence[socket.socket], course: Course) -> None:
    """Write until the target says how much has arrived, and report that."""
    _work(mailbox, connections, lambda: _send(connections, course))


def be_target(mailbox: socket.socket, connections: Sequence[socket.socket], course: Course) -> None:
    """Count what arrives, and say so to the source. The report to our own actor is for its log."""
    _work(mailbox, connections, lambda: _count(connections, course))


def _work(mailbox: socket.socket, connections: Sequence[socket.socket], measure: Callable[[], int]) -> None:
    for connection in connections:
        connection.setblocking(False)
    try:
        last_word = ProbeEnded(measure(), "")
    except ProbeError as error:
        last_word = ProbeEnded(0, str(error))
    except OSError as error:
        last_word = ProbeEnded(0, os.strerror(error.errno or 0))
    finally:
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            connection.close()
    select.select([], [mailbox], [], LAST_WORDS_MS / 1000)
    try:
        mailbox.send(pack(last_word))
    except OSError:
        pass  # the actor is stopped, or gone, which ends this process anyway


def _send(connections: Sequence[socket.socket], course: Course) -> int:
    fault = planned()
    deadline_ns = monotonic_ns() + course.limit_ns
    for connection in connections:
        suit(connection, len(connections))
    by_fd = {connection.fileno(): connection for connection in connections}
    first = connections[0].fileno()
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLOUT | select.POLLIN)
    chunk = memoryview(os.urandom(CHUNK_BYTES))  # what can be compressed on the way would look faster than it is
    answer = b""
    while len(answer) < ANSWER.size:
        ready = poll.poll(_left_ms(deadline_ns))
        if monotonic_ns() >= deadline_ns:
            raise ProbeError(f"the target did not answer in {course.limit_ns / 1e9:g} s")
        for fd, events in ready:
            if fd == first and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                answer += _receive(by_fd[fd], ANSWER.size - len(answer))
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                poll.unregister(fd)  # the target is done with it, and says more on the first one
            elif events & select.POLLOUT:
                if fault is not None:
                    fault.visit("probe.send")
                _write(by_fd[fd], chunk)
    return _rate(*ANSWER.unpack(answer))


def _receive(connection: socket.socket, most: int) -> bytes:
    try:
        data = connection.recv(most)
    except BlockingIOError:
        return b""
    if not data:
        raise ProbeError("the target closed the connection")
    return data


def _write(connection: socket.socket, chunk: memoryview) -> None:
    try:
        connection.send(chunk)
    except BlockingIOError:
        pass
    except OSError:
        pass  # it is found broken by its events


def _rate(nbytes: int, elapsed_ns: int) -> int:
    """What the answer means; the target is no more trusted than any other peer."""
    if not nbytes or not elapsed_ns:
        raise ProbeError("nothing arrived")
    return max(1, nbytes * 1_000_000_000 // elapsed_ns)


def _count(connections: Sequence[socket.socket], course: Course) -> int:
    fault = planned()
    limit_ns = monotonic_ns() + course.limit_ns
    by_fd = {connection.fileno(): connection for connection in connections}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    waste = bytearray(CHUNK_BYTES)
    total = ramp_bytes = began_ns = ramp_ns = end_ns = 0
    while not end_ns or monotonic_ns() < end_ns:
        for fd, _ in poll.poll(_left_ms(end_ns or limit_ns)):
            if fault is not None:
                fault.visit("probe.count")
            total += _drain(by_fd[fd], waste)
        now_ns = monotonic_ns()
        if now_ns >= limit_ns:
            raise ProbeError(f"nothing to count for {course.limit_ns / 1e9:g} s")
        if total and not began_ns:
            began_ns, end_ns = now_ns, now_ns + course.duration_ns
        if began_ns and not ramp_ns and now_ns - began_ns >= RAMP_SHARE * course.duration_ns:
            ramp_ns, ramp_bytes = now_ns, total
    counted, elapsed_ns = total - ramp_bytes, monotonic_ns() - (ramp_ns or began_ns)
    if not ramp_ns or not counted:  # this process slept through it, or so little came that all of it counts
        counted, elapsed_ns = total, monotonic_ns() - began_ns
    _answer(connections[0], waste, ANSWER.pack(counted, elapsed_ns), limit_ns)
    return _rate(counted, elapsed_ns)


def _drain(connection: socket.socket, waste: bytearray) -> int:
    """Take what is there. The kernel throws it away, so that the link is measured and not the memory."""
    try:
        nbytes = connection.recv_into(waste, CHUNK_BYTES, socket.MSG_TRUNC)
    except BlockingIOError:
        return 0
    if not nbytes:
        raise ProbeError("the source closed a connection")
    return nbytes


def _answer(connection: socket.socket, waste: bytearray, answer: bytes, limit_ns: int) -> None:
    """Say it, and read on until the source has heard: to close with bytes unread could destroy the answer."""
    connection.send(answer)
    while monotonic_ns() < limit_ns:
        if select.select([connection], [], [], _left_ms(limit_ns) / 1000)[0]:
            try:
                _drain(connection, waste)
            except (ProbeError, OSError):
                return


def _left_ms(deadline_ns: int) -> int:
    return max(0, (deadline_ns - monotonic_ns()) // 1_000_000 + 1)
