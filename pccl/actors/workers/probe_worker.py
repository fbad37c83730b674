"""The workers of a measurement: one process at each end of an edge, with all connections of the pool between them.

The source (`pccl-probe-3`) writes whatever the connections take. The target (`pccl-count-3`) throws it away, and
counts: what has been written may be in a buffer far from having arrived, so the target's number is the honest one. Its
clock starts with the first byte. The first part of the time does not count, in which windows open and the burst passes
that a shaped link lets through. The rest is cut into slices, of which the middle half counts, by rate: a lost packet
that costs a timeout, or a machine that was busy with something else, stops one slice or two, and is not the link. At
the end the target says on the first connection how much came in how long. The source takes that as the answer and
closes everything at once, so that what is still in its buffers does not disturb the next round.

Each side has a bound on the whole, and whatever ends early ends it with a reason. A system call moves megabytes, so
Python is fast enough here.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from pccl._core.protocol.codec import pack
from pccl._core.protocol.mailbox import ProbeEnded
from pccl._core.records import record
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io import tcp
from pccl.actors.io.fault_points import planned
from pccl.actors.io.ready import wait_readable, wait_writable

from .lane_worker import suit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER = struct.Struct("<QQ")  # bytes that count, and the nanoseconds in which they came
RAMP_SHARE = 0.4  # of the time, ahead of what counts: at 100 ms four round trips, in which a window grows sixteenfold
SLICES = 12  # of the rest: long enough that a slow link delivers some packets in each
CHUNK_BYTES = 1 << 18  # written or read at once
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
            tcp.reset_on_close(connection)  # what is in the buffers is not needed any more
            connection.close()
    wait_writable(mailbox, LAST_WORDS_MS)
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
    arrivals: ArrivalCount | None = None
    while arrivals is None or not arrivals.is_over():
        nbytes = 0
        for fd, _ in poll.poll(_left_ms(limit_ns if arrivals is None else arrivals.due_ns)):
            if fault is not None:
                fault.visit("probe.count")
            nbytes += _drain(by_fd[fd], waste)
        now_ns = monotonic_ns()
        if now_ns >= limit_ns:
            raise ProbeError(f"nothing to count for {course.limit_ns / 1e9:g} s")
        if arrivals is None and nbytes:
            arrivals = ArrivalCount(course.duration_ns, now_ns)
        if arrivals is not None:
            arrivals.add(nbytes, now_ns)
    counted, elapsed_ns = arrivals.middle()
    _answer(connections[0], waste, ANSWER.pack(counted, elapsed_ns), limit_ns)
    return _rate(counted, elapsed_ns)


class ArrivalCount:
    """What arrived in each slice of the time, the first of which is the part that does not count."""

    def __init__(self, duration_ns: int, now_ns: int) -> None:
        ramp_ns = int(RAMP_SHARE * duration_ns)
        self._slice_ns = (duration_ns - ramp_ns) // SLICES
        self._end_ns = now_ns + duration_ns
        self._began_ns = now_ns
        self._nbytes = 0
        self._slices: list[tuple[int, int]] = []  # bytes, and the nanoseconds in which they came
        self.due_ns = now_ns + ramp_ns  # the end of this slice

    def add(self, nbytes: int, now_ns: int) -> None:
        """So much more has come by now. A slice is as long as it took us to notice its end."""
        self._nbytes += nbytes
        if now_ns >= self.due_ns:
            self._slices.append((self._nbytes, now_ns - self._began_ns))
            self._nbytes, self._began_ns = 0, now_ns
            self.due_ns = min(now_ns + self._slice_ns, max(self._end_ns, now_ns + 1))

    def is_over(self) -> bool:
        """Whether there is at least one slice that counts, and the time is up."""
        return len(self._slices) > 1 and self._began_ns >= self._end_ns

    def middle(self) -> tuple[int, int]:
        """Bytes and nanoseconds of those slices that are neither among the fastest nor among the slowest."""
        ranked = sorted(self._slices[1:], key=lambda one: one[0] / one[1])
        aside = len(ranked) // 4
        counted = ranked[aside : len(ranked) - aside]
        if not any(nbytes for nbytes, _ in counted):  # so little came that all of it counts
            counted = self._slices
        return sum(nbytes for nbytes, _ in counted), sum(elapsed_ns for _, elapsed_ns in counted)


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
        if wait_readable(connection, _left_ms(limit_ns)):
            try:
                _drain(connection, waste)
            except (ProbeError, OSError):
                return


def _left_ms(deadline_ns: int) -> int:
    return max(0, (deadline_ns - monotonic_ns()) // 1_000_000 + 1)
