"""Segments: shared by descriptor, checked before they are mapped, never taken from under a user."""

import gc
import os

import pytest

from pccl._core.park import create_memfd
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
    fd = create_memfd("pccl-test", 4096, seal=False)
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
