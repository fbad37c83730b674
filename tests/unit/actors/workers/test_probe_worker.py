"""Both ends of a probe, over real connections: what is counted, what is answered, and every way to fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from pccl._core.protocol.codec import unpack
from pccl._core.protocol.mailbox import ProbeEnded
from pccl.actors.workers.probe_worker import ANSWER, ArrivalCount, Course, be_source, be_target

MILLISECOND = 1_000_000
PATIENCE = 10.0  # seconds for a report, also on a busy machine
COURSE = Course(300 * MILLISECOND, 30_000 * MILLISECOND)  # a limit that no report here waits for
SHORT = Course(100 * MILLISECOND, 300 * MILLISECOND)


@contextmanager
def links(count: int) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """Open this many connections over loopback; yield their two ends."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours, theirs = [], []
        for _ in range(count):
            ours.append(stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5)))
            theirs.append(stack.enter_context(listener.accept()[0]))
        yield ours, theirs


class Worker:
    """One end of a probe in a thread, and its message to the actor."""

    def __init__(self, work: Callable[..., None], ends: list[socket.socket], course: Course = COURSE) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = theirs
        self._thread = threading.Thread(target=work, args=(theirs, ends, course))
        self._thread.start()

    def report(self) -> ProbeEnded:
        self._ours.settimeout(PATIENCE)
        message: Any = unpack(self._ours.recv(1 << 14))
        self._thread.join()
        self._ours.close()
        self._theirs.close()
        assert isinstance(message, ProbeEnded)
        return message


def counted_of(*arrivals: tuple[int, int]) -> tuple[int, int]:
    """Return what a probe of 1000 ms counts; an arrival is (milliseconds since the first byte, bytes until then)."""
    count = ArrivalCount(1000 * MILLISECOND, 0)
    for now_ms, nbytes in arrivals:
        count.add(nbytes, now_ms * MILLISECOND)
    assert count.is_over()
    return count.middle()


def test_a_burst_at_the_start_and_a_pause_are_not_the_rate() -> None:
    """Goal: 5 bytes each 5 ms, with a burst as shaped links allow and a pause of 100 ms, count as 1000 a second."""
    steady = [(now_ms, 5) for now_ms in range(5, 1100, 5) if not 600 <= now_ms < 700]

    nbytes, elapsed_ns = counted_of((0, 100_000), *steady)
    assert nbytes * 1_000_000_000 / elapsed_ns == pytest.approx(1000, rel=0.05)


def test_a_few_bytes_all_count() -> None:
    """Goal: a link so slow that most time slices are empty still has a rate."""
    assert counted_of((0, 10), *[(now_ms, 0) for now_ms in range(5, 990, 5)], (1000, 10)) == (20, 1000 * MILLISECOND)


def test_a_counter_that_slept_through_it_counts_what_it_finds() -> None:
    """Goal: the count ends in time, with one time slice at least."""
    nbytes, elapsed_ns = counted_of((0, 10), (1500, 1000), (1501, 0), (1502, 0))
    assert elapsed_ns > 0
    assert nbytes >= 0


@pytest.mark.parametrize("lanes", [1, 3])
def test_both_ends_agree_on_what_arrived(lanes: int) -> None:
    """Goal: the source reports the target's number, over all connections together."""
    with links(lanes) as (ours, theirs):
        target, source = Worker(be_target, theirs), Worker(be_source, ours)
        counted, reported = target.report(), source.report()

    assert counted == reported
    assert counted.reason == ""
    assert counted.bytes_per_second > 0


def test_what_is_counted_is_what_was_sent() -> None:
    """Goal: a source that sends steadily after a burst is answered with a part of its bytes and a part of the time.

    Which rate that is depends on when this process runs; the tests above have the numbers.
    """
    with links(1) as (ours, theirs):
        target = Worker(be_target, theirs)
        began_ns = time.monotonic_ns()
        ours[0].sendall(bytes(200_000))
        answer, sent = b"", 200_000
        while len(answer) < ANSWER.size:
            # The answer comes after the time of the probe, so this ends; the timeout is the pace.
            ours[0].settimeout(PATIENCE)
            ours[0].sendall(bytes(4000))
            sent += 4000
            ours[0].settimeout(0.002)
            with suppress(TimeoutError):
                answer += ours[0].recv(ANSWER.size - len(answer))
        ended_ns = time.monotonic_ns()
        ours[0].close()
        report = target.report()

    nbytes, elapsed_ns = ANSWER.unpack(answer)
    assert report == ProbeEnded(nbytes * 1_000_000_000 // elapsed_ns, "")
    assert 0 < nbytes <= sent
    assert 0 < elapsed_ns < ended_ns - began_ns


def test_a_source_that_sends_nothing_ends_the_target_in_time() -> None:
    with links(2) as (_, theirs):
        assert Worker(be_target, theirs, SHORT).report() == ProbeEnded(0, "nothing to count for 0.3 s")


def test_a_source_that_goes_away_ends_the_target_at_once() -> None:
    with links(2) as (ours, theirs):
        target = Worker(be_target, theirs)
        ours[1].close()

        assert target.report() == ProbeEnded(0, "the source closed a connection")


def test_a_target_that_says_nothing_ends_the_source_in_time() -> None:
    with links(1) as (ours, _):
        assert Worker(be_source, ours, SHORT).report() == ProbeEnded(0, "the target did not answer in 0.3 s")


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_target_that_goes_away_ends_the_source_at_once(how: str) -> None:
    with links(2) as (ours, theirs):
        source = Worker(be_source, ours)
        if how == "closed":
            theirs[0].shutdown(socket.SHUT_WR)
        else:
            theirs[0].close()
        report = source.report()

    assert report.bytes_per_second == 0
    assert "closed" in report.reason or "reset" in report.reason.lower()


def test_an_answer_of_nothing_is_a_failure() -> None:
    """Goal: an answer with no bytes, or no time, is not taken for a rate."""
    for answer in ((0, 5), (5, 0)):
        with links(1) as (ours, theirs):
            source = Worker(be_source, ours)
            theirs[0].sendall(ANSWER.pack(*answer))

            assert source.report() == ProbeEnded(0, "nothing arrived")
