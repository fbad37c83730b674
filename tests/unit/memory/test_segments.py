"""Segments: shared by descriptor, checked before they are mapped, never unmapped while in use."""

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from pccl._core.system.mapping import Extent, Mapping, create_memory_file
from pccl.memory.segments import Segment


def test_both_sides_see_the_same_memory():
    with Segment.create("pccl-test", 10_000) as ours, Segment.attach(os.dup(ours.fd), 10_000) as theirs:
        assert ours.size == theirs.size == len(ours.view) == 10_000
        assert bytes(ours.view) == bytes(10_000)
        ours.view[9_999] = 7
        assert theirs.view[9_999] == 7
        assert repr(ours) == f"<Segment fd={ours.fd}, 10000 bytes>"


def test_wrong_size_is_refused_and_the_descriptor_stays_the_callers():
    with Segment.create("pccl-test", 4096) as segment:
        fd = os.dup(segment.fd)
        with pytest.raises(ValueError, match="holds 4096 bytes, but a segment of 4097 was announced"):
            Segment.attach(fd, 4097)
        with pytest.raises(ValueError, match="at least one byte, not 0"):
            Segment.attach(fd, 0)
        os.close(fd)


def test_memory_that_may_shrink_is_refused(tmp_path):
    fd = create_memory_file("pccl-test", 4096, seal=False)
    with pytest.raises(ValueError, match="sealed against shrinking"):
        Segment.attach(fd, 4096)
    os.close(fd)
    (tmp_path / "plain").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "plain", os.O_RDWR)
    with pytest.raises(ValueError, match="no memory file"):
        Segment.attach(fd, 4096)
    os.close(fd)


def test_close_gives_everything_back():
    before = os.listdir("/proc/self/fd")
    segment = Segment.create("pccl-test", 4096)
    segment.close()
    segment.close()

    assert os.listdir("/proc/self/fd") == before
    assert segment.closed
    assert repr(segment) == "<Segment closed, 4096 bytes>"
    with pytest.raises(ValueError, match="closed"):
        _ = segment.view


def test_memory_outlives_close_while_it_is_used():
    segment = Segment.create("pccl-test", 4096)
    tail = segment.view[4000:]
    segment.close()
    tail[0] = 9

    assert tail[0] == 9


def test_forgotten_close_is_reported_and_made_up_for():
    before = os.listdir("/proc/self/fd")
    segment = Segment.create("pccl-test", 4096)
    with pytest.warns(ResourceWarning, match="4096 bytes was not closed"):
        del segment
        gc.collect()

    assert os.listdir("/proc/self/fd") == before


def test_size_that_no_host_has_fails_cleanly():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        Segment.create("pccl-test", 2**62)

    assert os.listdir("/proc/self/fd") == before


# --- Mappings and windows ---------------------------------------------------


def minor_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_a_segment_costs_one_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with Segment.create("pccl-test", 4096):
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_populated_memory_is_touched_without_faults():
    with Segment.create("pccl-test", 16 << 20, populate=True) as segment:
        view, pages = segment.view, range(0, 16 << 20, 4096)
        before = minor_faults()
        for offset in pages:
            view[offset] = 1

        assert minor_faults() - before < len(pages) // 10
        del view


def test_some_pages_can_be_populated_ahead_of_writing():
    with Segment.create("pccl-test", 16 << 20) as segment:
        view, pages = segment.view, range(4096, 8 << 20, 4096)
        segment.mapping.populate(4097, (8 << 20) - 4097)
        before = minor_faults()
        for offset in pages:
            view[offset] = 1

        assert minor_faults() - before < len(pages) // 10
        with pytest.raises(ValueError, match="do not lie in a mapping"):
            segment.mapping.populate(16 << 20, 1)
        del view


HUGE = 2 << 20


def mapped_as_huge(name):
    """Return the bytes of this memory that the process has mapped with huge pages."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = f"memfd:{name} " in line
        elif inside and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) << 10
    return total


def kernel_has_huge_pages():
    """Return whether this kernel gives huge pages of shared memory, tried without our code."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = create_memory_file("pccl-probe", HUGE)
    room = libc.mmap(None, 2 * HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    aligned = (room + HUGE - 1) // HUGE * HUGE
    libc.mmap(aligned, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, fd, 0)  # MAP_FIXED
    ctypes.memset(aligned, 1, HUGE)
    collapsed = libc.madvise(aligned, HUGE, 25) == 0  # MADV_COLLAPSE
    libc.munmap(room, 2 * HUGE)
    os.close(fd)
    return collapsed


def reserved_bytes():
    """Count the addresses of this process that are taken and cannot be accessed."""
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if " ---p " in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in (each.split("-") for each in ranges))


def test_large_memory_is_mapped_where_huge_pages_can_be():
    """Goal: the addresses are aligned, and nothing is left of the reservation that finds them."""
    for size in (HUGE, HUGE + 1, 5 * HUGE - 1, 64 << 20):
        before = reserved_bytes()
        with Segment.create("pccl-aligned", size) as ours, Segment.attach(os.dup(ours.fd), size) as theirs:
            assert ours.mapping.address % HUGE == theirs.mapping.address % HUGE == 0
            ours.view[size - 1] = 7
            assert theirs.view[size - 1] == 7
            assert reserved_bytes() == before
        assert reserved_bytes() == before
        assert "memfd:pccl-aligned" not in Path("/proc/self/maps").read_text()


def test_large_memory_has_huge_pages():
    if not kernel_has_huge_pages():
        pytest.skip("this kernel gives no huge pages of shared memory to a process that asks for them")
    size = 3 * HUGE + 12_345
    with Segment.create("pccl-huge", size, populate=True) as ours, Segment.attach(os.dup(ours.fd), size) as theirs:
        assert bytes(ours.view) == bytes(size)
        assert theirs.view[0] == theirs.view[HUGE] == theirs.view[2 * HUGE] == 0  # mapped by the first access
        assert mapped_as_huge("pccl-huge") == 2 * 3 * HUGE
        ours.view[:] = os.urandom(size)
        assert theirs.view == ours.view


def test_without_huge_pages_memory_has_small_ones():
    """Goal: a kernel that is old or configured so refuses huge pages; nothing else changes."""
    script = """
import ctypes, os, resource
from tests.unit.memory.test_segments import Segment, mapped_as_huge
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
with Segment.create("pccl-huge", 16 << 20, populate=True) as segment:
    view, before = segment.view, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for offset in range(0, 16 << 20, 4096):
        view[offset] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 400
    assert mapped_as_huge("pccl-huge") == 0
    assert os.fstat(segment.fd).st_blocks * 512 == 16 << 20
    del view
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_memory_is_unmapped_with_its_last_view():
    mapped = Path("/proc/self/maps")
    segment = Segment.create("pccl-lifetime", 4096)
    tail = segment.view[4000:]
    segment.close()
    assert "memfd:pccl-lifetime" in mapped.read_text()
    del tail

    assert "memfd:pccl-lifetime" not in mapped.read_text()


def test_a_mapping_knows_its_address():
    with Segment.create("pccl-test", 4096) as segment:
        mapping = segment.mapping
        extent = Extent(mapping, 64, 128)
        segment.view[64:68] = b"pccl"

        assert (mapping.nbytes, extent.nbytes) == (4096, 128)
        assert extent.address == mapping.address + 64
        assert ctypes.string_at(extent.address, 4) == b"pccl"
        assert bytes(extent.view[:4]) == b"pccl"
        assert not extent.view.readonly


def test_a_window_is_held_by_its_buffers():
    class Watched(Extent):
        __slots__ = ("__weakref__",)

    with Segment.create("pccl-test", 4096) as segment:
        extent = Watched(segment.mapping, 0, 64)
        alive = weakref.ref(extent)
        part = extent.view[3:5]
        del extent
        assert alive() is not None
        del part
        assert alive() is None


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 4097), (4096, 1), (10, -1), (2**62, 2**62)])
def test_a_window_lies_in_its_mapping(offset, nbytes):
    with Segment.create("pccl-test", 4096) as segment, pytest.raises(ValueError, match="do not lie in a mapping"):
        Extent(segment.mapping, offset, nbytes)


def test_what_cannot_be_mapped_is_an_error_with_its_reason():
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        Mapping(0, 0)
    with pytest.raises(OSError, match="while mapping 4096 bytes"):
        Mapping(-1, 4096)


def test_pages_that_nobody_has_are_an_error_before_any_is_taken(monkeypatch):
    """Goal: if all pages were requested, the kernel would kill a process; so no page is requested."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the kernel was asked"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError, match=f"no room for a segment of {2**62} bytes"):
        Segment.create("pccl-test", 2**62, populate=True)

    assert os.listdir("/proc/self/fd") == before
