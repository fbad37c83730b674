"""The workers of a probe: one process at each end of an edge, with all connections of the pool between them.

The source (`pccl-probe-3`) writes as much as the connections accept. The target (`pccl-count-3`) discards the bytes and
counts them. Only the target's count is right, because bytes that the source has written may still be in a buffer. Its
clock starts with the first byte. The first part of the time does not count: congestion windows grow, and a shaped link
lets a burst pass. The rest is cut into slices, sorted by rate, and the middle half of them counts: a lost packet that
costs a timeout, or a busy machine, affects one or two slices and says nothing about the link. At the end the target
sends on the first connection how many bytes came in how many nanoseconds. The source takes this as the answer and
closes all connections at once, so that bytes in its buffers do not disturb the next round.

Each side has a bound for the whole probe; a probe that ends early has a reason. A system call moves megabytes, so
Python is fast enough here.
"""

from __future__ import annotations

import os
import select
import struct

from pccl._core.protocol.codec import pack
from pccl._core.protocol.mailbox import ProbeEnded
from pccl._core.records import record
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io import tcp
from pccl.actors.io.fault_points import planned
from pccl.actors.io.fork import LAST_WORDS_MS
from pccl.actors.io.ready import wait_readable, wait_writable

from .lane_worker import suit

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

ANSWER = struct.Struct("<QQ")  # bytes that count, and the nanoseconds in which they came
RAMP_SHARE = 0.4  # of the time does not count: at 100 ms four round trips, in which a window grows sixteenfold
SLICES = 12  # of the rest: each long enough that a slow link delivers some packets
CHUNK_BYTES = 1 << 18  # written or read at once


@record
class Course:
    """The times of a probe, as both ends know them."""

    duration_ns: int  # from the first byte to the last that counts
    limit_ns: int  # for the whole probe, after which a worker has ended


class ProbeError(Exception):
    """The probe failed; the text says why."""


def be_source(mailbox: socket.socket, connections: Sequence[socket.socket], course: Course) -> None:
    """Write until the target says how much has arrived, and report the rate."""
    _work(mailbox, connections, lambda: _send(connections, course))


def be_target(mailbox: socket.socket, connections: Sequence[socket.socket], course: Course) -> None:
    """Count what arrives, and send the count to the source. The message to this peer's actor is for its log."""
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
    chunk = memoryview(os.urandom(CHUNK_BYTES))  # random, because a link that compresses would look too fast
    answer = b""
    while len(answer) < ANSWER.size:
        ready = poll.poll(_left_ms(deadline_ns))
        if monotonic_ns() >= deadline_ns:
            raise ProbeError(f"the target did not answer in {course.limit_ns / 1e9:g} s")
        for fd, events in ready:
            if fd == first and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                answer += _receive(by_fd[fd], ANSWER.size - len(answer))
            elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                poll.unregister(fd)  # the target has closed it; the answer comes on the first connection
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
        pass  # the poll reports its end


def _rate(nbytes: int, elapsed_ns: int) -> int:
    """Return the rate of an answer. It is checked, because the target is not trusted."""
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
    """The bytes that arrived in each slice of the time; the first slice is the part that does not count."""

    def __init__(self, duration_ns: int, now_ns: int) -> None:
        ramp_ns = int(RAMP_SHARE * duration_ns)
        self._slice_ns = (duration_ns - ramp_ns) // SLICES
        self._end_ns = now_ns + duration_ns
        self._began_ns = now_ns
        self._nbytes = 0
        self._slices: list[tuple[int, int]] = []  # bytes, and the nanoseconds in which they came
        self.due_ns = now_ns + ramp_ns  # the end of this slice

    def add(self, nbytes: int, now_ns: int) -> None:
        """Add bytes that have arrived by now. A slice ends at the first call after its end."""
        self._nbytes += nbytes
        if now_ns >= self.due_ns:
            self._slices.append((self._nbytes, now_ns - self._began_ns))
            self._nbytes, self._began_ns = 0, now_ns
            self.due_ns = min(now_ns + self._slice_ns, max(self._end_ns, now_ns + 1))

    def is_over(self) -> bool:
        """Whether the time is over and there is at least one slice that counts."""
        return len(self._slices) > 1 and self._began_ns >= self._end_ns

    def middle(self) -> tuple[int, int]:
        """Return bytes and nanoseconds of the slices without the fastest quarter and the slowest quarter."""
        ranked = sorted(self._slices[1:], key=lambda one: one[0] / one[1])
        aside = len(ranked) // 4
        counted = ranked[aside : len(ranked) - aside]
        if not any(nbytes for nbytes, _ in counted):  # so few bytes came that all of them count
            counted = self._slices
        return sum(nbytes for nbytes, _ in counted), sum(elapsed_ns for _, elapsed_ns in counted)


def _drain(connection: socket.socket, waste: bytearray) -> int:
    """Discard what has arrived; return its size. The kernel copies nothing, so the link is measured, not the memory."""
    try:
        nbytes = connection.recv_into(waste, CHUNK_BYTES, tcp.DISCARD)
    except BlockingIOError:
        return 0
    if not nbytes:
        raise ProbeError("the source closed a connection")
    return nbytes


def _answer(connection: socket.socket, waste: bytearray, answer: bytes, limit_ns: int) -> None:
    """Send the answer, and read until the source closes: a close with unread bytes could destroy the answer."""
    connection.send(answer)
    while monotonic_ns() < limit_ns:
        if wait_readable(connection, _left_ms(limit_ns)):
            try:
                _drain(connection, waste)
            except (ProbeError, OSError):
                return


def _left_ms(deadline_ns: int) -> int:
    return max(0, (deadline_ns - monotonic_ns()) // 1_000_000 + 1)
