"""Futex words between processes: no wake-up is lost, every wait ends by its bound, signals end a wait."""

import os
import signal
import threading
import time

import pytest

from pccl._core.system.futex import Stamp, Word, monotonic_ns
from pccl._core.system.process import open_pidfd
from tests.readable import is_readable

SECOND_NS = 1_000_000_000


def in_child(body):
    """Run `body` in a forked child, which exits with 0 only if `body` returned; return its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def exit_code(pid, timeout_ns=20 * SECOND_NS):
    """Return the exit code of the child; a child that hangs is killed at the bound and gives minus SIGKILL."""
    fd = open_pidfd(pid)
    try:
        if not is_readable(fd, timeout_ns / SECOND_NS):
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)


def wait_until(word, value, bound_ns=10 * SECOND_NS):
    """Sleep until the word holds `value`."""
    deadline_ns = monotonic_ns() + bound_ns
    while (seen := word.load()) != value:
        assert monotonic_ns() < deadline_ns, f"{seen} instead of {value}"
        word.wait(seen, deadline_ns - monotonic_ns())


def test_word_operations():
    memory = bytearray(8)
    word = Word(memory, 4)
    word.store(0xFFFFFFFF)

    assert memory == b"\0\0\0\0\xff\xff\xff\xff"
    assert word.load() == 0xFFFFFFFF
    assert word.exchange(7) == 0xFFFFFFFF
    assert not word.compare_exchange(8, 9)
    assert word.load() == 7
    assert word.compare_exchange(7, 9)
    assert word.load() == 9
    assert word.wake() == 0
    assert word.wake_all() == 0


def test_stamp_holds_64_bits():
    memory = bytearray(16)
    Stamp(memory, 8).store(2**64 - 1)

    assert Stamp(memory, 8).load() == 2**64 - 1
    assert Stamp(memory).load() == 0


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_that_do_not_fit_are_refused(value):
    with pytest.raises(OverflowError):
        Word(bytearray(4)).store(value)


@pytest.mark.parametrize("offset", [-4, 5, 6, 8, 2**40])
def test_places_outside_or_astray_are_refused(offset):
    memory = bytearray(8)
    with pytest.raises(ValueError, match=str(offset)):
        Word(memory, offset)
    # A refused word does not keep the buffer exported.
    memory.append(0)


def test_read_only_memory_is_refused():
    with pytest.raises(BufferError):
        Word(bytes(4))


def test_word_keeps_its_buffer_exported():
    memory = bytearray(4)
    word = Word(memory)
    with pytest.raises(BufferError):
        memory.append(0)
    del word
    memory.append(0)


def test_wait_answers_at_once_when_the_value_differs():
    assert Word(bytearray(4)).wait(1, 60 * SECOND_NS)


@pytest.mark.parametrize("timeout_ns", [-1, 0, 1, 20_000_000])
def test_wait_ends_by_its_bound(timeout_ns):
    begin_ns = monotonic_ns()

    assert not Word(bytearray(4)).wait(0, timeout_ns)
    assert monotonic_ns() - begin_ns >= timeout_ns


def test_wait_releases_the_gil():
    """A thread that sleeps lets the others run, and one of them wakes it."""
    word = Word(bytearray(4))
    thread = threading.Thread(
        target=lambda: (time.sleep(0.02), word.store(1), word.wake()),  # type: ignore[func-returns-value]
    )
    thread.start()
    wait_until(word, 1)
    thread.join()


def test_wake_reaches_another_process(shared):
    """The child reports that it is about to sleep; the parent wakes it long before its bound."""
    ready, go = Word(shared, 0), Word(shared, 64)

    def sleeper():
        ready.store(1)
        ready.wake()
        wait_until(go, 1)

    pid = in_child(sleeper)
    wait_until(ready, 1)
    go.store(1)
    go.wake()

    assert exit_code(pid) == 0


def test_no_wake_up_is_lost_in_ping_pong(shared):
    """Two processes take turns; a lost wake-up would cost the whole bound and fail both."""
    rounds = 5000
    word = Word(shared)

    def play(mine):
        for turn in range(mine, 2 * rounds, 2):
            wait_until(word, turn)
            word.store(turn + 1)
            word.wake()

    pid = in_child(lambda: play(1))
    play(0)
    wait_until(word, 2 * rounds)

    assert exit_code(pid) == 0


def test_signal_ends_a_wait_early():
    """The handler runs after the wait, and the wait returns that the word has not changed."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    try:
        # Again and again: one signal could come before the wait has begun.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        begin_ns = monotonic_ns()

        assert not Word(bytearray(4)).wait(0, 60 * SECOND_NS)
        assert monotonic_ns() - begin_ns < 30 * SECOND_NS
        assert set(seen) == {signal.SIGALRM}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_clock_is_the_one_of_the_host():
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    now = monotonic_ns()

    assert before <= now <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_looking_ends_with_a_change_or_with_its_time() -> None:
    """Goal: look() returns when another thread stores a value, and gives up after its time otherwise."""
    word = Word(bytearray(8))
    began = time.monotonic_ns()
    assert not word.look(0, 20_000_000)
    assert 20_000_000 <= time.monotonic_ns() - began < 5_000_000_000
    assert word.look(1, 5_000_000_000)  # the word already differs

    # Late, so that the value is stored during look(); the test would pass without it as well.
    thread = threading.Thread(target=lambda: (time.sleep(0.02), word.store(7)))  # type: ignore[func-returns-value]
    thread.start()
    assert word.look(0, 5_000_000_000)
    thread.join()
    assert word.load() == 7
