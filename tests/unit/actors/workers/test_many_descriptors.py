"""Workers with descriptors above 1023, which select() cannot wait for; a large pool with many segments has them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from pccl._core.protocol.mailbox import Attach, MapSegment
from pccl.actors.workers.probe_worker import be_source, be_target
from pccl.values import DataType
from tests.unit._core.dataplane.loopback import SEND, Member, connect, operation, read_frame, read_introduction

from .test_lane_worker import Hired
from .test_probe_worker import Worker, links

OCCUPIED = 1100
LIMIT = 2048


@pytest.fixture
def occupied() -> Iterator[None]:
    """Open so many descriptors that new ones are above the limit of select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LIMIT:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, LIMIT), hard))
    opened: list[int] = []
    try:
        opened += (os.open(os.devnull, os.O_RDONLY) for _ in range(OCCUPIED))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("occupied")
def test_a_lane_reduces_with_a_segment_that_is_announced_late() -> None:
    """Goal: the worker wants the segment while its announcement is still in the mailbox."""
    member = Member()
    hired = Hired(member)
    near, far = connect()
    try:
        member.memory(SEND, 100)
        assert hired.mailbox.fileno() >= 1024
        hired.tell(MapSegment(SEND, 100), member.segments[SEND][0])
        hired.worker._map(SEND)
        hired.start()
        hired.tell(Attach(5), near.fileno())
        read_introduction(far)
        assert member.board.begin(1, operation(4, DataType.UINT8), 0, 2)
        assert read_frame(far)[0] == 1
    finally:
        hired.close()
        member.close()
        near.close()
        far.close()


@pytest.mark.usefixtures("occupied")
def test_a_probe_measures() -> None:
    with links(2) as (ours, theirs):
        assert ours[0].fileno() >= 1024
        target, source = Worker(be_target, theirs), Worker(be_source, ours)
        counted, reported = target.report(), source.report()

    assert counted == reported
    assert counted.reason == ""
