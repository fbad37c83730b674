"""The arena: allocating, releasing, finding, keeping and trimming memory."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.memory import arena as module
from pccl.memory.arena import ALIGNMENT, LARGE_BYTES, Arena, ArenaStatistics, Piece, size_class
from pccl.memory.segments import Segment

from .arena_harness import MIB, private_arena, run


@pytest.fixture
def arena() -> Iterator[Arena]:
    with private_arena() as arena:
        yield arena


def mappings() -> list[str]:
    """Return the lines of the process's memory map that belong to arenas; others come and go with the interpreter."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:pccl-arena" in line]


def mapped() -> int:
    return len(mappings())


# --- Size classes -----------------------------------------------------------


@given(st.integers(0, 1 << 50))
def test_a_class_is_large_enough_and_wastes_little(nbytes: int) -> None:
    """Goal: at most an eighth is wasted, except for the smallest; large classes are whole huge pages."""
    size = size_class(nbytes)

    assert size >= max(nbytes, ALIGNMENT)
    assert size % ALIGNMENT == 0
    assert size_class(size) == size
    assert size <= nbytes + ALIGNMENT or size <= nbytes * 1.125
    assert size % (2 * MIB) == 0 or nbytes < 16 * MIB


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_classes_are_ordered(one: int, other: int) -> None:
    assert size_class(min(one, other)) <= size_class(max(one, other))


def test_a_negative_size_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="cannot have -1 bytes"):
        arena.allocate(-1)


# --- Handing out and taking back --------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 100_000, LARGE_BYTES - 1, LARGE_BYTES, 5 * MIB + 1])
def test_a_piece_is_what_was_asked_for(arena: Arena, nbytes: int) -> None:
    """Goal: large enough, aligned, writable, and its address, segment and offset mean the same location."""
    piece = arena.allocate(nbytes)
    fd, size = arena.descriptor(piece.segment)
    piece.view[:4] = b"pccl"

    assert piece.nbytes == len(piece.view) == size_class(nbytes)
    assert piece.address % (4096 if nbytes >= LARGE_BYTES else ALIGNMENT) == 0
    assert piece.offset + piece.nbytes <= size == os.fstat(fd).st_size
    assert arena.find(piece.address, piece.nbytes) == (piece.segment, piece.offset)
    assert ctypes.string_at(piece.address, 4) == os.pread(fd, 4, piece.offset) == b"pccl"
    assert repr(piece) == f"<Piece segment={piece.segment} offset={piece.offset}, {piece.nbytes} bytes>"


@pytest.mark.parametrize("nbytes", [100, 3 * MIB])
def test_a_released_piece_is_handed_out_again(arena: Arena, nbytes: int) -> None:
    """Goal: to an allocation of the same size class, also a slightly smaller one; a second release is ignored."""
    first, guard = arena.allocate(nbytes), arena.allocate(nbytes)
    place = first.address
    first.release()
    first.release()
    again, other = arena.allocate(nbytes - 1), arena.allocate(nbytes)

    assert again.address == place
    assert len({again.address, other.address, guard.address}) == 3


def test_a_late_second_release_takes_nothing_from_the_next_owner(arena: Arena) -> None:
    first = arena.allocate(100)
    first.release()
    second = arena.allocate(100)
    first.release()
    del first

    assert arena.allocate(100).address != second.address


@pytest.mark.parametrize("nbytes", [100, 3 * MIB])
def test_a_forgotten_piece_returns_by_itself(arena: Arena, nbytes: int) -> None:
    piece = arena.allocate(nbytes)
    assert arena.statistics().bytes_in_use == piece.nbytes
    del piece

    assert arena.statistics().bytes_in_use == 0


def test_a_piece_in_a_reference_cycle_returns_too(arena: Arena) -> None:
    """Goal: the traceback of an error is such a cycle; the collector must not clear the piece before its return."""
    cycle: list[object] = [arena.allocate(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert arena.statistics().bytes_in_use == 0


def test_a_view_keeps_its_piece(arena: Arena) -> None:
    view = arena.allocate(100).view[10:20]
    assert arena.statistics().bytes_in_use == 128
    del view

    assert arena.statistics().bytes_in_use == 0


def test_small_pieces_share_segments_and_large_ones_do_not(arena: Arena) -> None:
    small = [arena.allocate(LARGE_BYTES // 8) for _ in range(8)]
    large = [arena.allocate(LARGE_BYTES) for _ in range(8)]

    assert len({piece.segment for piece in small}) == 1
    assert len({piece.segment for piece in large}) == 8
    assert {piece.offset for piece in large} == {0}


def test_many_small_pieces_need_few_descriptors(arena: Arena) -> None:
    """Goal: slabs grow with their number; three thousand tensors need far fewer than the usual limit of 1024 files."""
    pieces = [arena.allocate(40_000) for _ in range(3000)]
    statistics = arena.statistics()

    assert statistics.segments < 25
    assert statistics.bytes_in_use == sum(piece.nbytes for piece in pieces)
    assert statistics.bytes_cached < statistics.bytes_in_use // 4


def test_a_slab_that_is_free_again_is_cut_anew(arena: Arena) -> None:
    """Goal: memory of small tensors that were released can be used for larger ones."""
    tiny = [arena.allocate(1000) for _ in range(3000)]
    assert arena.statistics().segments == 1
    del tiny
    halves = [arena.allocate(MIB // 2) for _ in range(8)]

    assert {piece.segment for piece in halves} == {halves[0].segment}
    assert arena.statistics().segments == 1


def test_numbers_start_at_one_and_are_never_reused() -> None:
    """Goal: a number means one segment for the life of the process, over all arenas."""
    code = """
from pccl.memory.arena import Arena
numbers = []
for arena in (Arena(), Arena()):
    for _ in range(3):
        numbers.append(arena.allocate(1 << 20).segment)
        arena.trim()
print(numbers)
"""
    assert run(code) == "[1, 2, 3, 4, 5, 6]\n"


def test_statistics_add_up(arena: Arena) -> None:
    small, large = arena.allocate(100), arena.allocate(3 * MIB)

    assert arena.statistics() == ArenaStatistics(2, 7 * MIB, 3 * MIB + 128, 4 * MIB - 128)
    large.release()
    assert arena.statistics() == ArenaStatistics(2, 7 * MIB, 128, 7 * MIB - 128)
    small.release()
    assert arena.statistics() == ArenaStatistics(2, 7 * MIB, 0, 7 * MIB)


# --- Steady state -----------------------------------------------------------


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_new_memory_is_touched_without_faults(arena: Arena) -> None:
    piece = arena.allocate(32 * MIB)
    view = piece.view
    before = minor_faults()
    for offset in range(0, 32 * MIB, 4096):
        view[offset] = 1

    assert minor_faults() - before < 100


def test_steady_state_neither_faults_nor_maps(arena: Arena) -> None:
    """Goal: the reduces of a training loop, with small and large sizes in turn, make no system call for memory."""
    sizes = [100, 5000, 700_000, MIB, 3 * MIB, 17 * MIB]
    payload = bytes(4096)

    def step() -> None:
        pieces = [arena.allocate(nbytes) for nbytes in sizes]
        for piece in pieces:
            piece.view[: min(4096, piece.nbytes)] = payload[: piece.nbytes]
            piece.release()

    for _ in range(3):
        step()
    before, faults, statistics = mappings(), minor_faults(), arena.statistics()
    for _ in range(500):
        step()

    assert minor_faults() - faults < 20
    assert arena.statistics() == statistics
    assert mappings() == before


# --- Looking up -------------------------------------------------------------


@pytest.fixture(scope="module")
def varied() -> Iterator[tuple[Arena, list[Piece]]]:
    """An arena with several segments of both kinds."""
    arena = Arena()
    pieces = [arena.allocate(nbytes) for nbytes in (100, 900_000, 2 * MIB, MIB, 5 * MIB, 3 * MIB)]
    yield arena, pieces
    for piece in pieces:
        piece.release()
    arena.close()


@given(st.data())
def test_find_is_what_a_search_of_all_segments_says(varied: tuple[Arena, list[Piece]], data: st.DataObject) -> None:
    """Goal: a range is found if and only if one segment holds all of it; edges are tried most often."""
    arena, pieces = varied
    segments = {piece.segment: (piece.address - piece.offset, arena.descriptor(piece.segment)[1]) for piece in pieces}
    start, size = data.draw(st.sampled_from(sorted(segments.values())))
    near = st.integers(-3, 3)
    address = max(0, data.draw(st.sampled_from([0, start, start + size, start + size // 2])) + data.draw(near))
    nbytes = max(0, data.draw(st.sampled_from([0, size, size // 2, 2 * size])) + data.draw(near))
    expected = [
        (number, address - begin)
        for number, (begin, length) in segments.items()
        if begin <= address < begin + length and address + nbytes <= begin + length
    ]

    assert arena.find(address, nbytes) == (expected[0] if expected else None)


def test_a_descriptor_maps_the_same_bytes(arena: Arena) -> None:
    piece = arena.allocate(3 * MIB)
    fd, nbytes = arena.descriptor(piece.segment)
    with Segment.attach(os.dup(fd), nbytes) as theirs:
        theirs.view[piece.offset + 5] = 77

        assert piece.view[5] == 77


# --- Giving up --------------------------------------------------------------


def test_trim_gives_idle_segments_back(arena: Arena) -> None:
    """Goal: descriptor and mapping of idle segments are gone; memory in use stays."""
    before = mapped()
    kept, gone = arena.allocate(2 * MIB), arena.allocate(3 * MIB)
    number, address = gone.segment, gone.address
    del gone
    assert arena.find(address, 1) == (number, 0)
    arena.trim()

    assert arena.find(address, 1) is None
    with pytest.raises(KeyError):
        arena.descriptor(number)
    assert arena.find(kept.address, kept.nbytes) == (kept.segment, 0)
    assert (arena.statistics().segments, mapped()) == (1, before + 1)


def test_trim_keeps_what_it_is_told_to_and_drops_the_longest_idle(arena: Arena) -> None:
    pieces = [arena.allocate(2 * MIB) for _ in range(4)]
    order = [pieces[index].segment for index in (2, 0, 3, 1)]
    for index in (2, 0, 3, 1):
        pieces[index].release()
    gone: list[int] = []
    arena.watch(gone.append)
    pieces.clear()
    arena.trim(keep_bytes=4 * MIB)

    assert gone == order[:2]
    assert arena.statistics().bytes_cached == 4 * MIB


def test_memory_stays_readable_when_its_segment_is_dropped(arena: Arena) -> None:
    """Goal: reading a piece after its release gives old bytes, not a signal."""
    piece = arena.allocate(2 * MIB)
    piece.view[0] = 5
    piece.release()
    arena.trim()

    assert piece.view[0] == 5


def test_watchers_hear_of_each_segment_once(arena: Arena) -> None:
    """Goal: a bound method does not keep its object alive; a removed watcher is not called."""

    class Listener:
        def __init__(self) -> None:
            self.heard: list[int] = []

        def note(self, segment: int) -> None:
            self.heard.append(segment)

    forgotten, kept, removed = Listener(), Listener(), Listener()
    plain: list[int] = []
    for callback in (forgotten.note, kept.note, removed.note, plain.append):
        arena.watch(callback)
    arena.unwatch(removed.note)
    arena.unwatch(removed.note)
    heard = forgotten.heard
    del forgotten, callback
    segment = arena.allocate(2 * MIB).segment
    arena.trim()
    arena.trim()

    assert (kept.heard, plain, removed.heard, heard) == ([segment], [segment], [], [])


@pytest.fixture
def impatient(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena that after ten allocations drops idle memory beyond a MiB or a quarter of the memory in use."""
    monkeypatch.setattr(module, "IDLE_ALLOCATIONS_MAX", 10)
    monkeypatch.setattr(module, "IDLE_BYTES_MIN", MIB)
    return arena


def test_alternating_between_the_same_sizes_never_unmaps(impatient: Arena) -> None:
    gone: list[int] = []
    impatient.watch(gone.append)
    for _ in range(50):
        for nbytes in (2 * MIB, 9 * MIB, 5 * MIB):
            impatient.allocate(nbytes).release()
            impatient.allocate(100).release()

    assert gone == []


def test_large_memory_that_is_not_wanted_any_more_is_given_back(impatient: Arena) -> None:
    """Goal: an application that goes on with small tensors is not affected."""
    segment = impatient.allocate(9 * MIB).segment
    gone: list[int] = []
    impatient.watch(gone.append)
    for _ in range(10):
        impatient.allocate(100).release()
    assert gone == []
    for _ in range(2):
        impatient.allocate(100).release()

    assert gone == [segment]


@pytest.mark.parametrize(("idle_mib", "segments"), [(9, 3), (12, 2)])
def test_idle_memory_that_is_little_beside_what_is_in_use_is_kept(
    impatient: Arena, idle_mib: int, segments: int
) -> None:
    """Goal: up to a quarter of the memory in use is kept; memory that is used all the time is not idle."""
    guard = impatient.allocate(40 * MIB)
    impatient.allocate(idle_mib * MIB).release()
    for _ in range(30):
        impatient.allocate(2 * MIB).release()

    assert impatient.statistics().segments == segments
    assert guard.nbytes == 40 * MIB
