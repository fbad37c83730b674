"""Host reads: the messages between a sender and a receiver on one host, and what both must never do."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.sender import Sender
from pccl._core.system.mapping import create_memory_file, open_memory_of
from pccl.values import DataType

from .loopback import (
    BLOCK,
    HEADER,
    HEADER_BYTES,
    HOST_READ,
    INTRODUCTION,
    MAGIC,
    OFFER,
    SAME_HOST_READ,
    SEND,
    WITHDRAWAL,
    Member,
    connect,
    eventually,
    frame,
    lone_member,
    note,
    operation,
    read_exactly,
    read_frame,
    read_introduction,
    read_note,
    ring_of,
)

COUNT = 1 << 22  # bytes of two members: 2 MiB each
BLOCKS = len(Cut(COUNT, 1, 2).blocks(0))
LOANS_MAX, RETURNS_AT_ONCE = 8, 4
OFFERED = struct.Struct("<QQQIIII")
TCP_INFO_BYTES_SENT = struct.Struct("<200xQQ")  # tcpi_bytes_sent and tcpi_bytes_retrans, which it includes

WHAT = operation(COUNT, DataType.UINT8, send=(SEND, 0), recv=(SEND, 0))


def read_header(sock: socket.socket) -> dict[str, int]:
    """Read the header of any frame."""
    fields = HEADER.unpack(read_exactly(sock, HEADER_BYTES)[: HEADER.size])
    names = ("magic", "hop", "kind", "sequence", "offset", "segment", "chunk", "block", "length", "crc")
    header = dict(zip(names, fields, strict=True))
    assert header["magic"] == MAGIC
    return header


def read_offer(sock: socket.socket) -> dict[str, int]:
    """Read a frame that offers memory."""
    header = read_header(sock)
    assert (header["kind"], header["length"]) == (OFFER, OFFERED.size)
    names = ("nbytes", "inode", "device", "segment", "serial", "pid", "descriptor")
    offer = dict(zip(names, OFFERED.unpack(read_exactly(sock, OFFERED.size)), strict=True))
    assert header["segment"] == offer["segment"]
    return offer


def offer_of(fd: int, nbytes: int, segment: int = 9, serial: int = 1, **other: int) -> bytes:
    """Return a frame that offers memory of this process."""
    found = os.fstat(fd)
    body = OFFERED.pack(
        nbytes,
        other.get("inode", found.st_ino),
        found.st_dev,
        segment,
        serial,
        other.get("pid", os.getpid()),
        fd,
    )
    return frame(0, 0, 0, 0, body, kind=OFFER, segment=segment)


def lent(sequence: int, hop: int, chunk: int, block: int, nbytes: int, **other: int) -> bytes:
    """Return a frame whose block is in offered memory."""
    return frame(sequence, hop, chunk, block, b"", length=nbytes, crc=0, kind=HOST_READ, segment=9, **other)


# --- the sender ---------------------------------------------------------------


class Lender:
    """A member whose next peer is this test, which has accepted its memory."""

    def __init__(self, member: Member, out: socket.socket) -> None:
        self.member, self.out = member, out
        self.tensor = member.memory(SEND, COUNT)
        self.tensor[:] = np.arange(COUNT, dtype=np.uint8)
        assert member.board.begin(1, WHAT, 0, 2)
        self.inline = [read_frame(out)]
        self.offer = read_offer(out)

    def accept(self) -> int:
        """Accept the offer and read frames up to the first loan; return the number of blocks that were sent before."""
        self.out.sendall(note(serial=self.offer["serial"], accepted=1))
        while True:
            header = read_header(self.out)
            if header["kind"] == HOST_READ:
                self.first = header
                return len(self.inline)
            self.inline.append((header["sequence"], header["hop"], header["chunk"], header["block"], b""))
            read_exactly(self.out, header["length"])


@pytest.fixture
def lender() -> Iterator[Lender]:
    """A lender whose socket buffer is smaller than a block, so that it waits when the answer to its offer comes."""
    with lone_member(buffer_bytes=4096, link=SAME_HOST_READ) as (member, (out,), _):
        yield Lender(member, out)


def test_an_offer_says_where_the_memory_is(lender: Lender) -> None:
    fd, nbytes = lender.member.segments[SEND]
    found = os.fstat(fd)
    assert lender.offer == {
        "nbytes": nbytes,
        "inode": found.st_ino,
        "device": found.st_dev,
        "segment": SEND,
        "serial": 1,
        "pid": os.getpid(),
        "descriptor": fd,
    }


def test_blocks_are_sent_until_the_offer_is_accepted(lender: Lender) -> None:
    sent = lender.accept()
    assert 1 <= sent < BLOCKS
    begin, end = Cut(COUNT, 1, 2).blocks(0)[lender.first["block"]]
    assert (lender.first["segment"], lender.first["offset"], lender.first["length"]) == (SEND, begin, end - begin)
    assert lender.first["crc"] == 0


def test_a_refused_offer_is_not_repeated(lender: Lender) -> None:
    lender.out.sendall(note(serial=1, accepted=0))
    for _ in range(BLOCKS - 1):
        read_frame(lender.out)
    assert lender.member.board.begin(2, WHAT, 0, 2)
    for _ in range(BLOCKS):
        assert read_frame(lender.out)[0] == 2


def test_a_block_counts_as_sent_when_it_was_given_back(lender: Lender) -> None:
    """Goal: a sender with open loans has not ended, does not vote, and its tensor is not overwritten."""
    sent = lender.accept()
    lent_out = BLOCKS - sent
    assert RETURNS_AT_ONCE < lent_out <= LOANS_MAX
    for _ in range(lent_out - 1):
        assert read_header(lender.out)["kind"] == HOST_READ
    sizes = [end - begin for begin, end in Cut(COUNT, 1, 2).blocks(0)]
    statistics = lender.member.board.statistics
    eventually(lambda: lender.member.board.lane_statistics(True, 0)[1] == BLOCKS)
    assert statistics(1)[0] == sum(sizes[:sent])
    lender.out.sendall(note(returned=2))
    eventually(lambda: statistics(1)[0] == sum(sizes[: sent + 2]))
    lender.out.sendall(note(returned=lent_out - 2))
    eventually(lambda: statistics(1)[0] == sum(sizes))


def test_no_more_is_lent_than_may_be(lender: Lender) -> None:
    """Goal: a small operation waits for a bounded number of blocks of a large one, however fast the loans are."""
    lender.accept()
    assert lender.member.board.begin(2, WHAT, 0, 2)
    for _ in range(LOANS_MAX - 1):
        assert read_header(lender.out)["kind"] == HOST_READ
    lender.out.settimeout(0.1)
    with pytest.raises(TimeoutError):
        lender.out.recv(1)
    lender.out.sendall(note(returned=1))
    assert read_header(lender.out)["kind"] == HOST_READ


def test_what_is_small_is_sent(lender: Lender) -> None:
    lender.accept()
    lender.out.sendall(note(returned=1))
    lender.member.board.abort(1)
    small = operation(3000, DataType.UINT8, send=(SEND, 0), recv=(SEND, 0))
    assert lender.member.board.begin(2, small, 0, 2)
    while (header := read_header(lender.out))["kind"] == HOST_READ:
        assert header["sequence"] == 1
    assert (header["sequence"], header["length"]) == (2, 1536)


@pytest.mark.parametrize("answer", [note(returned=LOANS_MAX + 1), note(returned=1, magic=0), b"GET / HTTP/1.1\r\n\r\n"])
def test_a_senseless_answer_ends_the_connection(lender: Lender, answer: bytes) -> None:
    lender.accept()
    lender.out.sendall(answer)
    eventually(lambda: lender.member.problems == ["the other side returned a block that was not lent to it"])


def test_loans_of_an_aborted_operation_come_back_to_nobody(lender: Lender) -> None:
    """Goal: returned loans are accepted, and the blocks of the next operation are lent and counted separately."""
    lent_out = BLOCKS - lender.accept()
    for _ in range(lent_out - 1):
        read_header(lender.out)
    lender.member.abort(1)
    lender.member.board.release(1)
    assert lender.member.board.begin(2, WHAT, 0, 2)
    lender.out.sendall(note(returned=lent_out))
    for _ in range(LOANS_MAX):
        header = read_header(lender.out)
        assert (header["sequence"], header["kind"]) == (2, HOST_READ)
    assert lender.member.board.statistics(2)[0] == 0
    lender.out.sendall(note(returned=LOANS_MAX))
    eventually(lambda: lender.member.board.statistics(2)[0] > 0)


def test_memory_that_goes_is_withdrawn_between_two_frames(lender: Lender) -> None:
    lender.accept()
    sender = lender.member.workers[0]
    sender._tell(lambda: sender.lane.withdraw(SEND))
    while (header := read_header(lender.out))["kind"] == HOST_READ:
        lender.out.sendall(note(returned=1))
    assert (header["kind"], header["segment"], header["length"]) == (WITHDRAWAL, SEND, 0)


def test_a_new_connection_is_offered_everything_anew(lender: Lender) -> None:
    """Goal: the next neighbour has not mapped what the last one had."""
    lender.accept()
    sender = lender.member.workers[0]
    near, far = socket.socketpair()
    with far:
        sender.attach(near, SAME_HOST_READ)
        read_introduction(far)
        assert lender.member.board.begin(2, WHAT, 0, 2)
        assert read_header(far)["kind"] == BLOCK


# --- the receiver -------------------------------------------------------------


class Borrower:
    """A member whose previous peer is this test, which offers memory."""

    def __init__(self, member: Member, out: socket.socket, into: socket.socket) -> None:
        self.member, self.out, self.into = member, out, into
        self.tensor = member.memory(SEND, COUNT)
        self.tensor[:] = 1
        self.fd = create_memory_file("theirs", COUNT)
        os.pwrite(self.fd, b"\x02" * COUNT, 0)

    def offer(self, **other: int) -> tuple[int, int, int]:
        """Offer the memory; return the answer."""
        self.into.sendall(offer_of(self.fd, other.pop("nbytes", COUNT), **other))
        return read_note(self.into)


@pytest.fixture
def borrower() -> Iterator[Borrower]:
    with lone_member(link=SAME_HOST_READ) as (member, (out,), (into,)):
        made = Borrower(member, out, into)
        yield made
        os.close(made.fd)


def reducing(block: int) -> tuple[int, int, int]:
    """Return chunk, begin and length of a block that the member at rank 0 of 2 adds at hop 0."""
    begin, end = Cut(COUNT, 1, 2).blocks(1)[block]
    return 1, begin, end - begin


def test_a_block_is_added_from_where_it_lies(borrower: Borrower) -> None:
    assert borrower.offer() == (0, 1, 1)
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    chunk, begin, nbytes = reducing(0)
    borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=begin))
    assert read_note(borrower.into) == (1, 0, 0)
    assert (borrower.tensor[begin : begin + nbytes] == 3).all()
    assert borrower.member.board.statistics(1)[1] == nbytes
    assert borrower.tensor.sum() == COUNT + 2 * nbytes


def test_a_final_block_is_copied(borrower: Borrower) -> None:
    assert borrower.offer() == (0, 1, 1)
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    begin, end = Cut(COUNT, 1, 2).blocks(0)[2]
    borrower.into.sendall(lent(1, 1, 0, 2, end - begin, offset=7))
    assert read_note(borrower.into) == (1, 0, 0)
    assert (borrower.tensor[begin:end] == 2).all()


def test_what_was_added_from_there_is_sent_on_with_a_checksum(borrower: Borrower) -> None:
    """Goal: the previous peer is on this host, and the next peer on another one."""
    near, far = connect()
    with far:
        borrower.member.workers[0].attach(near)
        borrower.offer()
        assert borrower.member.board.begin(1, WHAT, 0, 2)
        chunk, begin, nbytes = reducing(0)
        borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=begin))
        frames = [read_frame(far) for _ in range(BLOCKS + 1)]  # read_frame checks the checksums
    assert [payload for _, hop, _, _, payload in frames if hop == 1] == [b"\x03" * nbytes]


def test_blocks_are_given_back_together_but_never_kept_while_nothing_comes(borrower: Borrower) -> None:
    borrower.offer()
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    frames = b""
    for block in range(RETURNS_AT_ONCE + 1):
        chunk, begin, nbytes = reducing(block)
        frames += lent(1, 0, chunk, block, nbytes, offset=begin)
    borrower.into.sendall(frames)
    assert read_note(borrower.into)[0] == RETURNS_AT_ONCE
    assert read_note(borrower.into)[0] == 1


def test_a_block_of_an_aborted_operation_is_given_back_unread(borrower: Borrower) -> None:
    borrower.offer()
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    borrower.member.abort(1)
    chunk, begin, nbytes = reducing(0)
    borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=begin))
    assert read_note(borrower.into) == (1, 0, 0)
    assert (borrower.tensor == 1).all()


def test_nothing_is_given_back_before_its_operation_has_begun(borrower: Borrower) -> None:
    borrower.offer()
    chunk, begin, nbytes = reducing(0)
    borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=begin))
    borrower.into.settimeout(0.1)
    with pytest.raises(TimeoutError):
        borrower.into.recv(1)
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    assert read_note(borrower.into) == (1, 0, 0)


@pytest.mark.parametrize("other", [{"pid": 2**22 + 1}, {"inode": 1}, {"nbytes": COUNT + 4097}])
def test_memory_that_is_not_what_was_offered_is_refused(borrower: Borrower, other: dict[str, Any]) -> None:
    """Goal: another process namespace has other processes; and nothing beyond the end is read."""
    assert borrower.offer(**other) == (0, 1, 0)
    assert len(borrower.member.workers[1].lane.borrowed) == 0


def test_whoever_wants_no_memory_refuses_it(borrower: Borrower) -> None:
    near, far = connect()
    with near:
        borrower.member.workers[1].attach(far)
        near.sendall(offer_of(borrower.fd, COUNT))
        assert read_note(near) == (0, 1, 0)


def test_memory_that_could_shrink_is_refused(borrower: Borrower) -> None:
    """Goal: reading memory that has shrunk would kill this process."""
    os.close(borrower.fd)
    borrower.fd = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(borrower.fd, COUNT)
    assert borrower.offer() == (0, 1, 0)


def test_what_is_no_file_in_memory_is_refused() -> None:
    with open("/dev/null") as device:
        found = os.fstat(device.fileno())
        with pytest.raises((OSError, ValueError)):
            os.close(open_memory_of(os.getpid(), device.fileno(), 0, found.st_ino, found.st_dev))


@pytest.mark.parametrize("offset", [COUNT - 1, COUNT, 2**64 - 1])
def test_a_block_outside_of_what_was_offered_ends_the_connection(borrower: Borrower, offset: int) -> None:
    borrower.offer()
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    chunk, _, nbytes = reducing(0)
    borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=offset))
    problem = "a block that lies outside of the memory that was offered"
    eventually(lambda: borrower.member.problems == [problem])
    assert (borrower.tensor == 1).all()


def test_a_block_in_memory_that_was_never_offered_ends_the_connection(borrower: Borrower) -> None:
    assert borrower.member.board.begin(1, WHAT, 0, 2)
    chunk, begin, nbytes = reducing(0)
    borrower.into.sendall(lent(1, 0, chunk, 0, nbytes, offset=begin))
    eventually(lambda: borrower.member.problems)


@pytest.mark.parametrize(
    "data",
    [
        frame(0, 0, 0, 0, b"", kind=INTRODUCTION + 1, segment=9),
        frame(0, 0, 0, 0, b"x", kind=WITHDRAWAL, segment=9),
        frame(0, 0, 0, 0, b"x" * OFFERED.size, kind=OFFER, segment=0),
        frame(0, 0, 0, 0, b"x" * OFFERED.size, kind=OFFER, segment=9, crc=1),
    ],
    ids=["unknown kind", "withdrawal with a body", "no segment", "damaged"],
)
def test_a_senseless_host_frame_ends_the_connection(borrower: Borrower, data: bytes) -> None:
    borrower.into.sendall(data)
    eventually(lambda: borrower.member.problems)


def test_an_offer_may_come_byte_by_byte(borrower: Borrower) -> None:
    for byte in offer_of(borrower.fd, COUNT):
        borrower.into.sendall(bytes([byte]))
    assert read_note(borrower.into) == (0, 1, 1)


def test_withdrawn_memory_is_unmapped(borrower: Borrower) -> None:
    borrower.offer()
    lane = borrower.member.workers[1].lane
    assert 9 in lane.borrowed
    borrower.into.sendall(frame(0, 0, 0, 0, b"", kind=WITHDRAWAL, segment=9))
    eventually(lambda: 9 not in lane.borrowed)


def test_the_same_number_may_be_offered_again(borrower: Borrower) -> None:
    borrower.offer()
    assert borrower.offer(serial=2) == (0, 2, 1)


def test_with_the_connection_everything_borrowed_goes(borrower: Borrower) -> None:
    borrower.offer()
    lane = borrower.member.workers[1].lane
    borrower.into.close()
    eventually(lambda: len(lane.borrowed) == 0)


# --- both ---------------------------------------------------------------------


def test_neighbours_on_one_host_send_next_to_nothing() -> None:
    """Goal: once the memory is mapped, blocks are not sent; the kernel's counts show it, and the sum is correct."""
    with ring_of(2, link=SAME_HOST_READ) as members:
        tensors = [member.memory(SEND, COUNT) for member in members]
        for sequence in range(1, 5):
            for rank, tensor in enumerate(tensors):
                tensor[:] = rank + 1
            before = [bytes_sent(member) for member in members]
            for rank, member in enumerate(members):
                assert member.board.begin(sequence, WHAT, rank, 2)
            for member in members:
                member.finish(sequence)
                assert member.board.statistics(sequence)[:2] == (COUNT, COUNT)
                member.board.release(sequence)
            assert all((tensor == 3).all() for tensor in tensors)
        travelled = [bytes_sent(member) - earlier for member, earlier in zip(members, before, strict=True)]
        assert travelled == [2 * BLOCKS * HEADER_BYTES] * 2


def bytes_sent(member: Member) -> int:
    """Return the bytes that the kernel has sent on the connection to the next member, each byte once.

    If a neighbour reads slowly and confirms late, the kernel sends its last segment again.
    """
    (connection,) = (worker.connection for worker in member.workers if isinstance(worker.lane, Sender))
    assert connection is not None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_SENT.size)
    sent, sent_again = TCP_INFO_BYTES_SENT.unpack(info)
    return int(sent - sent_again)
