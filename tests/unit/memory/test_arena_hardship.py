"""The arena when memory or descriptors run out, with several threads, after a fork, and at exit."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
import time
from collections.abc import Iterator

import pytest

from pccl.memory import segments
from pccl.memory.arena import Arena, default
from tests.leaks import Footprint

from .arena_harness import MIB, private_arena, run


@pytest.fixture
def arena() -> Iterator[Arena]:
    with private_arena() as arena:
        yield arena


# --- Lack -------------------------------------------------------------------


def test_lack_of_memory_is_an_error_that_says_what_to_do(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "available_bytes", lambda: 5 * MIB)
    with pytest.raises(MemoryError, match=r"segment of 6291456 bytes .* 5242880 are available; drop tensors"):
        arena.allocate(6 * MIB)

    assert arena.statistics().segments == 0
    assert arena.allocate(5 * MIB).nbytes == 5 * MIB


def test_more_than_any_machine_has_is_an_error(arena: Arena) -> None:
    with pytest.raises(MemoryError, match="no room"):
        arena.allocate(1 << 60)


def test_idle_memory_makes_room_before_a_request_is_refused(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.allocate(4 * MIB).release()
    monkeypatch.setattr(segments, "available_bytes", lambda: 8 * MIB - arena.statistics().bytes_mapped)

    assert arena.allocate(6 * MIB).nbytes == 6 * MIB
    assert arena.statistics().segments == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_refusal_by_the_kernel_is_a_memory_error(arena: Arena, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="no room for a segment of 2097152 bytes"):
        arena.allocate(2 * MIB)


def test_lack_of_descriptors_is_an_error_that_says_what_to_do(arena: Arena) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    piece = arena.allocate(MIB)
    # The lowest free number is the limit: no descriptor can be added, even if higher ones are open.
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(OSError, match=r"no descriptor left for a segment of 2097152 bytes .* raise `ulimit -n`"):
            arena.allocate(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert arena.statistics().bytes_mapped == piece.nbytes == MIB


def test_lack_of_address_space_is_an_error_that_says_what_to_do() -> None:
    code = """
import resource
from pathlib import Path
from pccl.memory.arena import Arena
arena = Arena()
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (32 << 20),) * 2)
try:
    arena.allocate(64 << 20)
except MemoryError as error:
    print(error, arena.statistics().segments)
"""
    assert run(code) == (
        "no address space left for a segment of 67108864 bytes of shared memory;"
        " raise `ulimit -v` or vm.max_map_count 0\n"
    )


# --- Threads ----------------------------------------------------------------


def test_threads_never_hold_the_same_bytes(arena: Arena) -> None:
    """Goal: eight threads allocate and release at random; each reads in its pieces what it wrote."""
    end = time.monotonic() + 1
    wrong: list[str] = []

    def work(mark: int) -> None:
        chance, held = random.Random(mark), []  # type: ignore[var-annotated]
        while time.monotonic() < end and not wrong:
            if held and chance.random() < 0.5:
                piece, pattern = held.pop(chance.randrange(len(held)))
                if bytes(piece.view[:64]) != pattern or bytes(piece.view[-64:]) != pattern:
                    wrong.append(repr(piece))
                if arena.find(piece.address, piece.nbytes) != (piece.segment, piece.offset):
                    wrong.append(f"{piece!r} not found")
                if chance.random() < 0.5:
                    piece.release()
            elif len(held) < 20:
                piece = arena.allocate(chance.choice([1, 64, 100, 3000, 50_000, 600_000, MIB, 2 * MIB]))
                pattern = chance.randbytes(64)
                piece.view[:64] = piece.view[-64:] = pattern
                held.append((piece, pattern))
            elif chance.random() < 0.01:
                arena.trim()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert arena.statistics().bytes_in_use == 0


def test_a_release_inside_the_arena_neither_waits_nor_is_lost(arena: Arena) -> None:
    """Goal: the garbage collector may run a finaliser in the thread that holds the lock."""
    piece = arena.allocate(100)
    address = piece.address
    with arena._lock:  # type: ignore[attr-defined]
        piece.release()
        with pytest.raises(RuntimeError, match="can release pieces, but not allocate"):
            arena.allocate(100)

    assert arena.allocate(100).address == address


def test_a_release_does_not_wait_for_another_thread(arena: Arena) -> None:
    """Goal: a finaliser may release at any time; the next allocation can use the released memory."""
    piece = arena.allocate(100)
    address = piece.address
    thread = threading.Thread(target=piece.release)
    with arena._lock:  # type: ignore[attr-defined]
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    assert arena.allocate(100).address == address


def test_an_interrupt_between_two_lists_costs_nothing_but_the_segment(arena: Arena) -> None:
    """Goal: Ctrl-C between taking a spare segment and returning it loses only that segment."""
    arena.allocate(2 * MIB).release()
    assert arena.statistics().segments == 1  # and it is in the list
    arena._spare[2 * MIB].clear()  # type: ignore[attr-defined]

    assert arena.allocate(2 * MIB).nbytes == 2 * MIB
    arena.trim()
    assert arena.statistics().segments == 0


# --- Fork -------------------------------------------------------------------

FORK = """
import os
from pccl.memory.arena import default
parent = default()
piece, spare = parent.allocate(100), parent.allocate(2 << 20)
piece.view[0], spare.view[0] = 7, 8
number = spare.segment
spare.release()
lock = parent._lock.acquire()
pid = os.fork()
if pid == 0:
    assert piece.view[0] == 7
    fresh = default()
    assert fresh is not parent
    own = fresh.allocate(2 << 20)
    assert own.segment > number
    assert fresh.find(piece.address, 1) is None
    own.view[:4] = b"mine"
    piece.view[1] = 9
    try:
        parent.allocate(1)
    except RuntimeError as error:
        assert "belongs to the parent process" in str(error)
        piece.release()
        del piece, own
        os._exit(42)
parent._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
assert default() is parent
assert bytes(piece.view[:2]) == bytes([7, 9])
again = parent.allocate(2 << 20)
assert (again.segment, again.view[0]) == (number, 8)
assert parent.allocate(100).address != piece.address
print("unharmed")
"""


def test_a_forked_child_has_an_arena_of_its_own_and_reads_its_parents() -> None:
    """Goal: also if another thread held the lock at the fork; the parent is not affected."""
    assert run(FORK, "-X", "dev", "-W", "error") == "unharmed\n"


def test_the_default_arena_is_one() -> None:
    assert default() is default()


# --- The end ----------------------------------------------------------------


def test_a_closed_arena_hands_out_nothing_and_takes_nothing_from_anybody() -> None:
    with Footprint.watch() as footprint:
        arena = Arena()
        piece = arena.allocate(100)
        piece.view[0] = 3
        arena.close()
        arena.close()

        assert piece.view[0] == 3
        assert arena.find(piece.address, 1) is None
        with pytest.raises(RuntimeError, match="the arena is closed"):
            arena.allocate(1)
        piece.release()
        del piece
        assert footprint.leaks() == []


def test_the_interpreter_ends_without_complaints() -> None:
    """Goal: pieces in globals, in cycles and in the arena's cache at exit cause no warning."""
    code = """
from pccl.memory.arena import default
kept, cycle = default().allocate(100), []
cycle.append((cycle, default().allocate(2 << 20)))
del cycle
default().allocate(3 << 20).release()
print("end")
"""
    assert run(code, "-X", "dev", "-W", "error") == "end\n"
