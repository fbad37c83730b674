"""Introductions of neighbours: blocks have no checksums if the same host is verified, and checksums otherwise."""

from __future__ import annotations

import pytest

from pccl._core.dataplane.plan import Cut
from pccl.values import DataType

from .loopback import (
    INTRODUCED,
    INTRODUCTION,
    OTHER_HOST,
    PLAIN,
    SAME_HOST,
    SAME_HOST_READ,
    SEND,
    WHEREABOUTS,
    connect,
    eventually,
    frame,
    lone_member,
    note,
    operation,
    read_frame,
    read_introduction,
    read_note,
)


@pytest.mark.parametrize("before", [OTHER_HOST, SAME_HOST])
@pytest.mark.parametrize("behind", [OTHER_HOST, SAME_HOST])
def test_a_block_has_a_checksum_exactly_where_it_leaves_the_host(before: str, behind: str) -> None:
    """Goal: the second of three members receives a sum and a result from one neighbour and forwards both."""
    count, kind = 3 * 64, {"kind": PLAIN, "crc": 0} if before == SAME_HOST else {}
    cut = Cut(count, 1, 3)
    with lone_member(link=before) as (member, _, (into,)):
        out, mine = connect()
        with out:
            member.workers[0].attach(mine, behind)
            if behind == SAME_HOST:
                assert read_introduction(out) == WHEREABOUTS
                out.sendall(note(serial=INTRODUCED, accepted=1))
                eventually(lambda: member.workers[0].lane.same_host_verified)
            member.memory(SEND, count)[:] = 1
            assert member.board.begin(1, operation(count, DataType.UINT8, recv=(SEND, 0)), 1, 3)
            sent = [read_frame(out, plain=behind == SAME_HOST)]  # read_frame checks the checksums
            for hop in (0, 2):
                into.sendall(frame(1, hop, cut.received(1, hop), 0, b"\x02" * 64, **kind))
                sent.append(read_frame(out, plain=behind == SAME_HOST))
    assert [(hop, set(payload)) for _, hop, _, _, payload in sent] == [(0, {1}), (1, {3}), (3, {2})]


@pytest.mark.parametrize("link", [OTHER_HOST, SAME_HOST, SAME_HOST_READ])
@pytest.mark.parametrize("told", [WHEREABOUTS, bytes(32), WHEREABOUTS[:31] + b"!"])
def test_a_sender_that_is_where_it_seems_to_be_is_a_neighbour(link: str, told: bytes) -> None:
    with lone_member(link=link) as (_, _, (into,)):
        into.sendall(frame(0, 0, 0, 0, told, kind=INTRODUCTION))
        assert read_note(into) == (0, INTRODUCED, link != OTHER_HOST and told == WHEREABOUTS)


def test_a_sender_that_is_not_believed_goes_on_with_checksums() -> None:
    with lone_member(link=SAME_HOST) as (member, (out,), _):
        member.memory(SEND, 4096)
        out.sendall(note(serial=INTRODUCED, accepted=0))
        for sequence in (1, 2):
            assert member.board.begin(sequence, operation(4), 0, 2)
            assert read_frame(out)[0] == sequence  # read_frame checks the checksum
        assert not member.workers[0].lane.same_host_verified
        out.sendall(note(serial=INTRODUCED, accepted=1))
        eventually(lambda: member.workers[0].lane.same_host_verified)
        assert member.board.begin(3, operation(4), 0, 2)
        assert read_frame(out, plain=True)[0] == 3
        again, far = connect()  # another neighbour, which has not answered yet
        with far:
            member.workers[0].attach(again, SAME_HOST)
            assert not member.workers[0].lane.same_host_verified
            read_introduction(far)
            assert member.board.begin(4, operation(4), 0, 2)
            assert read_frame(far)[0] == 4


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (frame(0, 0, 0, 0, WHEREABOUTS[1:], kind=INTRODUCTION), "a frame of no known kind"),
        (frame(0, 0, 0, 0, WHEREABOUTS, kind=INTRODUCTION, segment=9), "a frame of no known kind"),
        (frame(0, 0, 0, 0, WHEREABOUTS, kind=INTRODUCTION, crc=1), "a host frame whose checksum is wrong"),
    ],
)
def test_a_senseless_introduction_ends_the_connection(data: bytes, problem: str) -> None:
    with lone_member(link=SAME_HOST) as (member, _, (into,)):
        into.sendall(data)
        eventually(lambda: member.problems, "the end of the connection")
        assert member.problems == [problem]


def test_an_introduction_may_come_byte_by_byte_and_with_a_block_behind_it() -> None:
    with lone_member(link=SAME_HOST) as (member, _, (into,)):
        tensor = member.memory(SEND, 128)
        assert member.board.begin(1, operation(128, DataType.UINT8, recv=(SEND, 0)), 0, 2)
        data = frame(0, 0, 0, 0, WHEREABOUTS, kind=INTRODUCTION) + frame(1, 0, 1, 0, b"\x07" * 64, kind=PLAIN, crc=0)
        for byte in data[:100]:
            into.sendall(bytes([byte]))
        into.sendall(data[100:])
        assert read_note(into) == (0, INTRODUCED, 1)
        eventually(lambda: set(tensor[64:]) == {7})
