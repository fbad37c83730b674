"""The segment table of a worker: segments are found by number, and mapped exactly as long as they are in it."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccl._core.dataplane.segment_table import SegmentTable
from pccl._core.kernels.tensor_copy import copy
from pccl._core.system.mapping import create_memory_file
from pccl.values import DataType

from .loopback import Member, connect, operation, read_frame

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def fd() -> Iterator[int]:
    created = create_memory_file("probe-segment", PAGE)
    yield created
    os.close(created)


def mapped() -> int:
    """Return how often this process maps the memory of these tests."""
    return Path("/proc/self/maps").read_text().count("probe-segment")


def test_segments_come_and_go(fd: int) -> None:
    table = SegmentTable()
    assert 5 not in table
    table.add(5, fd, PAGE)
    assert 5 in table
    assert mapped() == 1
    table.remove(5)
    table.remove(5)
    assert 5 not in table
    assert mapped() == 0


def test_a_table_unmaps_what_it_holds(fd: int) -> None:
    table = SegmentTable()
    for number in range(1, 10):
        table.add(number, fd, PAGE)
    assert mapped() == 9
    del table
    assert mapped() == 0


def test_what_is_no_segment_is_refused(fd: int) -> None:
    table = SegmentTable()
    table.add(1, fd, PAGE)
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"segment {number} is 0, which no segment has, or is mapped already"):
            table.add(number, fd, PAGE)
    with pytest.raises(OSError, match="mapping"):
        table.add(2, -1, PAGE)
    with pytest.raises(ValueError, match="at least one byte"):
        table.add(3, fd, 0)
    assert [number for number in range(5) if number in table] == [1]
    assert mapped() == 1


def test_segments_are_found_whatever_their_numbers_are() -> None:
    """Goal: numbers with the same hash, at the end of the table, and after removals are found."""
    source = random.Random(3)
    numbers = [63, 127, 191, 1 << 20, (1 << 32) - 1, (1 << 32) - 65, *range(64, 64 * 90, 64)]
    source.shuffle(numbers)
    member = Member()
    try:
        near, far = connect()
        with far:
            for number in numbers:
                member.memory(number, 8)[:] = number % 251
            sender = member.worker(True, 0, near)
            for round_ in range(2):
                for sequence, number in enumerate(numbers, 1 + round_ * len(numbers)):
                    assert member.board.begin(sequence, operation(2, DataType.UINT8, send=(number, 0)), 0, 2)
                    assert read_frame(far)[4] == bytes([number % 251])
                    if round_:
                        sender._tell(lambda gone=number: sender.lane.segments.remove(gone))
                    member.board.release(sequence)
            assert sender.wanted == numbers  # each was asked for once
    finally:
        member.close()


def test_copies_may_overlap() -> None:
    memory = bytearray(range(100))
    expected = bytes(memory[:10]) + bytes(memory[:50]) + bytes(memory[60:])
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    copy(place + 10, place, 50)
    copy(place, place, 0)
    assert bytes(memory) == expected
