"""Lanes with failures: wrong frames, operations that are aborted while they run, connections that break."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import time
from contextlib import ExitStack

import numpy as np
import pytest

from pccl._core.dataplane.backup import backup_bytes, restore
from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.receiver import Receiver
from pccl._core.dataplane.sender import Sender
from pccl.values import DataType

from .loopback import (
    BACKUP,
    HEADER_BYTES,
    MAGIC,
    PATIENCE,
    RECV,
    SEND,
    Member,
    Worker,
    connect,
    eventually,
    frame,
    lone_member,
    operation,
    read_exactly,
    read_frame,
)

COUNT = 3000  # bytes: one block in each chunk
CANARY = 0xA5


def worker_of(member: Member, sends: bool, lane: int = 0) -> Worker:
    """Return the sender or the receiver of a lane."""
    return member.workers[2 * lane + (not sends)]


class Target:
    """A lone member at rank 0 of two, with an operation on bytes between canaries."""

    def __init__(self, member: Member, count: int = COUNT, *, in_place: bool = False) -> None:
        self.member, self.count, self.in_place = member, count, in_place
        self.cut = Cut(count, 1, 2)
        self.send = member.memory(SEND, count + 128)
        self.recv = self.send if in_place else member.memory(RECV, count + 128)
        self.backup = member.memory(BACKUP, backup_bytes(count, 1, 2))
        for whole in (self.send, self.recv):
            whole[:] = CANARY
        self.send[64:-64] = np.random.default_rng(0).integers(0, 100, count)
        self.old = self.send.copy()

    def begin(self, sequence: int) -> None:
        recv, backup = (SEND, BACKUP) if self.in_place else (RECV, 0)
        what = operation(self.count, DataType.UINT8, send=(SEND, 64), recv=(recv, 64), backup=(backup, 0))
        assert self.member.board.begin(sequence, what, 0, 2)

    def chunk(self, chunk: int) -> slice:
        begin, end = self.cut.chunk(chunk)
        return slice(64 + begin, 64 + end)

    def canaries_live(self) -> bool:
        return all(
            (whole[place] == CANARY).all()
            for whole in (self.send, self.recv)
            for place in (slice(64), slice(-64, None))
        )

    def reduce(self, sequence: int, out: socket.socket, into: socket.socket) -> None:
        """Act as the other member: send and read both chunks, of one block each."""
        self.begin(sequence)
        mine = read_frame(out)
        assert mine == (sequence, 0, 0, 0, self.old[self.chunk(0)].tobytes())
        theirs = np.full(len(self.old[self.chunk(1)]), 7, np.uint8)
        into.sendall(frame(sequence, 0, 1, 0, theirs.tobytes()))
        total = self.old[self.chunk(1)] + theirs
        assert read_frame(out) == (sequence, 1, 1, 0, total.tobytes())
        final = np.full(len(self.old[self.chunk(0)]), 9, np.uint8)
        into.sendall(frame(sequence, 1, 0, 0, final.tobytes()))
        self.member.finish(sequence)
        assert (self.recv[self.chunk(1)] == total).all()
        assert (self.recv[self.chunk(0)] == 9).all()
        assert self.canaries_live()
        self.member.board.release(sequence)
        self.restore()

    def restore(self) -> None:
        if self.in_place:
            restore(self.send.ctypes.data + 64, self.backup.ctypes.data, self.count, 1)
            self.backup[:] = 0
        assert (self.send == self.old).all()


def read_until(sock: socket.socket, sequence: int) -> None:
    """Read frames up to the first one of an operation; frames of earlier operations may come first."""
    for _ in range(100):
        if read_frame(sock)[0] == sequence:
            return
    raise AssertionError(f"no frame of {sequence}")


def right(**wrong: int) -> bytes:
    """Return the first frame that rank 0 of two receives, with these fields changed."""
    payload = bytes(Cut(COUNT, 1, 2).chunk(1)[1] - Cut(COUNT, 1, 2).chunk(1)[0])
    fields = {"sequence": 1, "hop": 0, "chunk": 1, "block": 0} | wrong
    return frame(**fields, payload=payload)


NO_FRAME = "the received bytes are not a frame"
REPEATED = "a block that has come before"
FOREIGN = "a frame that does not belong to its operation"
LENGTH = "a frame whose length does not fit its block"
CHECKSUM = "a block whose checksum is wrong"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (right(magic=0x30424350), NO_FRAME),
        (right(header_flip=1), NO_FRAME),
        (b"GET / HTTP/1.1\r\nHost: somewhere.example.com\r\n\r\n", NO_FRAME),
        (right(hop=1), FOREIGN),
        (right(hop=2), FOREIGN),
        (right(hop=0xFFFF), FOREIGN),
        (right(chunk=0), FOREIGN),
        (right(chunk=2), FOREIGN),
        (right(chunk=0xFFFFFFFF), FOREIGN),
        (right(block=1), FOREIGN),
        (right(block=0xFFFFFFFF), FOREIGN),
        (right(length=0), LENGTH),
        (right(length=COUNT // 2 - 1), LENGTH),
        (right(length=COUNT // 2 + 1), LENGTH),
        (right(length=0xFFFFFFFF), LENGTH),
        (right(crc=1), CHECKSUM),
        (right()[:HEADER_BYTES] + b"\x01" + right()[HEADER_BYTES + 1 :], CHECKSUM),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrong_frame_ends_the_connection_and_changes_nothing(data: bytes, problem: str, in_place: bool) -> None:
    with lone_member() as (member, (out,), (into,)):
        target = Target(member, in_place=in_place)
        target.begin(1)
        read_frame(out)
        into.sendall(data)
        eventually(lambda: member.problems, "the end of the connection")
        assert member.problems == [problem]
        assert into.recv(1) == b""
        assert target.canaries_live()
        assert (target.recv == (target.old if in_place else CANARY)).all()
        member.abort(1)
        target.restore()


@pytest.mark.parametrize("cut", [HEADER_BYTES + 1, None])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_block_that_comes_twice_ends_the_second_connection(hop: int, cut: int | None) -> None:
    """Goal: a block that arrived over another lane, wholly or in part, counts once; later bytes are not written."""
    with lone_member(lanes=2) as (member, _, (first, second)):
        target = Target(member)
        target.begin(1)
        chunk = 1 - hop
        data = frame(1, hop, chunk, 0, bytes([3]) * len(target.old[target.chunk(chunk)]))[:cut]
        first.sendall(data)
        arrived = len(target.old[target.chunk(0)]) + len(data) - HEADER_BYTES
        eventually(lambda: member.board.moved(1) >= arrived, "the first arrival")
        second.sendall(data)
        repeated = worker_of(member, False, 1)
        eventually(lambda: repeated.problems, "the end of the second connection")
        assert member.problems == [REPEATED]
        assert not member.board.has_ended(1)
        assert target.canaries_live()
        member.abort(1)


def test_a_ring_of_one_takes_no_frame() -> None:
    with lone_member() as (member, _, (into,)):
        member.memory(SEND, COUNT)
        what = operation(COUNT, DataType.UINT8, recv=(SEND, 0))
        assert member.board.begin(1, what, 0, 1)
        member.finish(1)
        into.sendall(frame(1, 0, 0, 0, bytes(COUNT)))
        eventually(lambda: member.problems, "the end of the connection")
        assert member.problems == [FOREIGN]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 30, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 700])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_receiver_lets_go_in_the_middle_of_a_frame(in_place: bool, cut: int, hop: int) -> None:
    """Goal: the tensor is released at once, the rest of the frame is dropped, and the next operation works."""
    with lone_member() as (member, (out,), (into,)):
        target = Target(member, in_place=in_place)
        target.begin(1)
        read_frame(out)
        chunk = 1 - hop
        data = frame(1, hop, chunk, 0, bytes([3]) * len(target.old[target.chunk(chunk)]))
        into.sendall(data[:cut])
        if cut > HEADER_BYTES:
            eventually(lambda: member.board.moved(1) >= len(target.old[target.chunk(0)]) + cut - HEADER_BYTES)
        member.abort(1)
        target.restore()
        member.board.release(1)
        into.sendall(data[cut:])
        target.reduce(2, out, into)
        assert not member.problems


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sender_lets_go_in_the_middle_of_a_frame(in_place: bool) -> None:
    """Goal: the tensor is released although the frame is not read, and the frame ends with its original bytes."""
    with lone_member(buffer_bytes=4096) as (member, (out,), _):
        count = 1 << 20
        target = Target(member, count, in_place=in_place)
        target.begin(1)
        sender = worker_of(member, True)
        eventually(lambda: member.board.moved(1) > 0)
        assert member.board.lane_statistics(True, 0)[1] == 0
        member.abort(1)
        target.restore()
        member.board.release(1)
        target.send[64:-64] = 0xEE  # the caller uses its tensor again
        sequence, hop, chunk, block, payload = read_frame(out)
        begin, end = target.cut.blocks(0)[0]
        assert (sequence, hop, chunk, block) == (1, 0, 0, 0)
        assert payload == target.old[64 + begin : 64 + end].tobytes()
        assert member.board.begin(2, operation(16, DataType.UINT8, send=(SEND, 64)), 0, 2)
        assert read_frame(out) == (2, 0, 0, 0, b"\xee" * 8)
        assert not sender.problems


def test_frames_of_what_is_over_are_dropped_in_little_memory() -> None:
    """Goal: a frame of an ended operation is read to its end, whatever its length."""
    with lone_member() as (member, (out,), (into,)):
        target = Target(member)
        target.begin(1)
        read_frame(out)
        member.abort(1)
        member.board.release(1)
        for nbytes in (0, 1, 5000, 3 << 20):
            into.sendall(frame(1, 0, 1, 0, bytes(nbytes)))
        target.reduce(2, out, into)
        assert member.board.lane_statistics(False, 0)[1] == 4 + 2
        before = resident_bytes()
        into.sendall(frame(1, 0, 1, 0, b"", length=0xFFFFFFFF))
        piece = bytes(1 << 20)
        for _ in range(64):
            into.sendall(piece)
        eventually(lambda: not unread(worker_of(member, False)))
        assert resident_bytes() - before < 32 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unread(worker: Worker) -> int:
    """Return the number of bytes that wait in the worker's socket."""
    assert worker.connection is not None
    return int.from_bytes(fcntl.ioctl(worker.connection.fileno(), termios.FIONREAD, bytes(4)), "little")


def test_an_early_frame_of_an_operation_that_never_comes_is_dropped() -> None:
    with lone_member() as (member, (out,), (into,)):
        target = Target(member)
        into.sendall(frame(1, 0, 1, 0, bytes(COUNT // 2)))
        target.reduce(2, out, into)


@pytest.mark.parametrize(
    "data", [b"", right()[:20], right()[:HEADER_BYTES], right()[: HEADER_BYTES + 100], right(sequence=9)]
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_closed_connection_is_reported_wherever_it_was(data: bytes, begun: bool) -> None:
    """Goal: also if the close came together with the data, before the worker read either."""
    with ExitStack() as stack:
        member = Member()
        stack.callback(member.close)
        target = Target(member)
        if begun:
            target.begin(1)
        near, far = connect()
        far.sendall(data)
        far.close()
        receiver = member.worker(False, 0, near)
        eventually(lambda: receiver.problems, "the report")
        assert receiver.problems[0].startswith("closed by the other side")
        member.abort(1)
        target.restore()


def test_a_close_that_comes_together_with_an_early_frame_is_reported() -> None:
    """Goal: a sleeping worker gets both in one wake-up, and only once."""
    with lone_member() as (member, _, (into,)):
        receiver = worker_of(member, False)
        receiver._tell(lambda: None)
        time.sleep(0.01)  # so that the worker sleeps, where the defect was; a worker that is awake must report the same
        into.send(right(sequence=9), socket.MSG_MORE)
        into.close()
        eventually(lambda: receiver.problems, "the report")
        assert receiver.problems == ["closed by the other side"]


def test_a_sender_notices_that_nobody_listens_any_more() -> None:
    with lone_member(lanes=2) as (member, outs, _):
        outs[0].close()
        eventually(lambda: member.problems)
        assert member.problems[0] in {"closed by the other side", "Connection reset by peer"}
        target = Target(member)
        target.begin(1)
        assert read_frame(outs[1])[0] == 1


def test_a_reset_says_so() -> None:
    with lone_member() as (member, _, (into,)):
        into.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        into.close()
        eventually(lambda: member.problems)
        assert member.problems == ["Connection reset by peer"]


@pytest.mark.parametrize("sends", [True, False])
def test_a_lane_detached_in_the_middle_of_a_frame_serves_the_next_connection(sends: bool) -> None:
    """Goal: it releases the operation, drops the rest of the frame, and starts with a new frame."""
    with lone_member(buffer_bytes=4096) as (member, _, (into,)), ExitStack() as stack:
        count = 1 << 20
        big = Target(member, count)
        big.begin(1)
        eventually(lambda: member.board.moved(1) > 0)
        if not sends:
            begin, end = big.cut.blocks(1)[0]
            moved = member.board.moved(1)
            into.sendall(frame(1, 0, 1, 0, bytes(end - begin))[:5000])
            eventually(lambda: member.board.moved(1) > moved)
        worker = worker_of(member, sends)
        worker.detach()
        near, far = connect()
        worker.attach(near)
        stack.enter_context(far)
        member.abort(1)
        member.board.release(1)
        what = operation(16, DataType.UINT8, send=(SEND, 64), recv=(RECV, 64))
        assert member.board.begin(2, what, 0, 2)
        if sends:
            read_until(far, 2)
        else:
            far.sendall(frame(2, 0, 1, 0, bytes(8)))
            eventually(lambda: member.board.statistics(2)[1] == 8)
        assert not worker.problems


@pytest.mark.parametrize("sends", [True, False])
def test_an_abort_while_a_segment_is_awaited(sends: bool) -> None:
    """Goal: a worker that waits for a segment to be mapped delays an abort no longer than the mapping takes."""
    with lone_member() as (member, (out,), (into,)):
        target = Target(member)
        worker = worker_of(member, sends)
        worker.mapping_allowed.clear()
        target.begin(1)
        if not sends:
            read_frame(out)  # the sender has done its part before the abort, and nothing of it comes later
            into.sendall(right())
        eventually(lambda: worker.wanted)
        assert worker.wanted == [SEND]
        # A receiver holds the operation again when all segments are mapped; a sender holds its block.
        drained = member.board.abort(1)
        assert not (sends and drained)
        worker.mapping_allowed.set()
        member.wait_until(lambda: member.board.is_drained(1), "letting go")
        member.board.release(1)
        worker_of(member, True).mapping_allowed.set()
        if sends:
            assert member.board.begin(2, operation(16, DataType.UINT8, send=(SEND, 64)), 0, 2)
            read_until(out, 2)
        else:
            target.reduce(2, out, into)


def test_mail_is_read_in_the_middle_of_a_frame() -> None:
    with lone_member(buffer_bytes=4096) as (member, (out,), _):
        target = Target(member, 1 << 20)
        target.begin(1)
        eventually(lambda: member.board.moved(1) > 0)
        began = time.monotonic()
        worker_of(member, True)._tell(lambda: None)
        assert time.monotonic() - began < PATIENCE / 2
        begin, end = target.cut.blocks(0)[0]
        head = read_exactly(out, HEADER_BYTES)
        assert head[:4] == MAGIC.to_bytes(4, "little")
        assert read_exactly(out, end - begin) == target.old[64 + begin : 64 + end].tobytes()


@pytest.mark.parametrize("kind", [Sender, Receiver])
def test_a_lane_that_was_never_built_closes_nothing(kind: type[Sender] | type[Receiver]) -> None:
    """Goal: it does not close descriptor 0, the initial value of its field."""
    before = os.fstat(0).st_ino
    with pytest.raises(TypeError):
        kind(None, 0, True, 0, 0)  # type: ignore[arg-type]
    assert os.fstat(0).st_ino == before


def test_a_lane_without_a_problem_has_none() -> None:
    with lone_member() as (member, _, _):
        assert [worker.lane.problem for worker in member.workers] == ["", ""]
