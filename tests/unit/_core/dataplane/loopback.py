"""Rings of real senders and receivers, as threads of this process. Waits are bounded, and nothing is left behind.

A `Member` is one peer without its actor: a board, a few segments, and workers that serve their connections in threads,
without processes and without the GIL. `ring_of` connects some of them. Tests can also write and read frames themselves.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from pccl._core.dataplane.board import BOARD_BYTES, BOARD_LANES, FLAG_BACKED_UP, Board
from pccl._core.dataplane.lane import LANE_ENDED, LANE_HOST_FRAME, LANE_MAIL, LANE_UNMAPPED
from pccl._core.dataplane.receiver import Receiver
from pccl._core.dataplane.sender import Sender
from pccl._core.kernels.arithmetic import crc32c_of
from pccl._core.protocol.operations import Operation
from pccl._core.system.mapping import Mapping, create_memory_file
from pccl.values import DataType, ReduceOp

PATIENCE = 10.0  # seconds; the waits take milliseconds on an idle machine

HEADER = struct.Struct("<IHHQQIIIII")
HEADER_BYTES = HEADER.size + 4
MAGIC = 0x33424350
BLOCK, PLAIN, HOST_READ, OFFER, WITHDRAWAL, INTRODUCTION = range(6)  # kinds of frames
NOTE = struct.Struct("<IIII")  # what a receiver writes back: magic, blocks returned, the offer it answers, the answer
NOTE_MAGIC = 0x31524350
INTRODUCED = 0xFFFFFFFF  # instead of the serial of an offer
# Neighbours on two hosts, on one host, and on one host with host reads.
OTHER_HOST, SAME_HOST, SAME_HOST_READ = "other host", "same host", "host read"
WHEREABOUTS = b"in one and the same test process"

SEND, RECV, BACKUP, AREA = 1, 2, 3, 4  # numbers of segments


def frame(
    sequence: int,
    hop: int,
    chunk: int,
    block: int,
    payload: bytes,
    *,
    magic: int = MAGIC,
    header_flip: int = 0,
    **other: int,
) -> bytes:
    """Return a frame as a sender writes it, or with wrong fields."""
    length, crc = other.get("length", len(payload)), other.get("crc", crc32c_of(payload))
    kind, offset, segment = other.get("kind", BLOCK), other.get("offset", 0), other.get("segment", 0)
    head = HEADER.pack(magic, hop, kind, sequence, offset, segment, chunk, block, length, crc)
    return head + struct.pack("<I", crc32c_of(head) ^ header_flip) + payload


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Read this many bytes; fail after PATIENCE seconds."""
    sock.settimeout(PATIENCE)
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        assert piece, f"closed after {len(data)} of {nbytes} bytes"
        data += piece
    return bytes(data)


def read_frame(sock: socket.socket, *, plain: bool = False) -> tuple[int, int, int, int, bytes]:
    """Read the next frame and check its checksums; return (sequence, hop, chunk, block, payload)."""
    head = read_exactly(sock, HEADER_BYTES)
    magic, hop, kind, sequence, offset, segment, chunk, block, length, crc = HEADER.unpack(head[: HEADER.size])
    assert (magic, kind, offset, segment) == (MAGIC, PLAIN if plain else BLOCK, 0, 0)
    assert struct.unpack("<I", head[HEADER.size :])[0] == crc32c_of(head[: HEADER.size])
    payload = read_exactly(sock, length)
    assert crc == (0 if plain else crc32c_of(payload))
    return sequence, hop, chunk, block, payload


def note(returned: int = 0, serial: int = 0, accepted: int = 0, *, magic: int = NOTE_MAGIC) -> bytes:
    """Return a note as a receiver writes it."""
    return NOTE.pack(magic, returned, serial, accepted)


def read_note(sock: socket.socket) -> tuple[int, int, int]:
    """Read a note; return (blocks returned, serial of the offer, answer)."""
    magic, *rest = NOTE.unpack(read_exactly(sock, NOTE.size))
    assert magic == NOTE_MAGIC
    return rest[0], rest[1], rest[2]


def read_introduction(sock: socket.socket) -> bytes:
    """Read an introduction; return the whereabouts of the sender."""
    head, body = read_exactly(sock, HEADER_BYTES), read_exactly(sock, 32)
    assert head + body == frame(0, 0, 0, 0, body, kind=INTRODUCTION)
    return body


def eventually(condition: Callable[[], Any], what: str = "it", pause: float = 0.0005) -> None:
    """Wait until the condition holds, with this many seconds between two checks; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE:.0f} s"
        time.sleep(pause)  # only limits how often the condition is checked


def has_moved(members: list[Member], sequence: int) -> bool:
    """Whether one of these members has sent or received bytes of an operation."""
    return any(member.board.moved(sequence) for member in members)


def reach(member: Member, sequence: int, moved_bytes: int) -> None:
    """Wait until a member has sent and received this many bytes of an operation, or has ended it.

    Blocks take microseconds, so there is no pause between two checks.
    """
    board = member.board
    eventually(lambda: board.moved(sequence) >= moved_bytes or board.has_ended(sequence), "blocks move", 0)


def connect(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection, with buffers of this size if it is given."""
    with socket.socket() as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        near = socket.socket()
        if buffer_bytes:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near.settimeout(PATIENCE)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return near, far


class Worker:
    """A sender or receiver in a thread. The side that ends first closes the connection."""

    def __init__(self, member: Member, sends: bool, lane: int) -> None:
        self.member = member
        self.problems: list[str] = []
        self.wanted: list[int] = []  # segments that were not mapped when a block needed them
        self.mapping_allowed = threading.Event()
        self.mapping_allowed.set()
        self.connection: socket.socket | None = None
        self._commands: SimpleQueue[tuple[Callable[[], object], threading.Event]] = SimpleQueue()
        self._mailbox, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        bell = (member.sender_bells if sends else member.receiver_bells)[lane]
        kind: Any = Sender if sends else Receiver
        self.lane = kind(member.board, lane, sends, self._theirs.fileno(), bell)
        self._call = lambda: member.board.call(sends, lane)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            code = self.lane.serve()
            if code == LANE_ENDED:
                self.problems.append(self.lane.problem)
                self._detach()
            elif code == LANE_HOST_FRAME:
                self.lane.answer_host_frame()
            elif code == LANE_UNMAPPED:
                self.wanted.append(self.lane.wanted)
                assert self.mapping_allowed.wait(PATIENCE)
                self.lane.segments.add(self.lane.wanted, *self.member.segments[self.lane.wanted])
            elif code == LANE_MAIL and not self._read_mailbox():
                self._detach()
                return

    def _read_mailbox(self) -> bool:
        with suppress(BlockingIOError):
            if not self._theirs.recv(1):
                return False
            command, done = self._commands.get_nowait()
            command()
            done.set()
        return True

    def _detach(self) -> None:
        if self.connection is not None:
            self.lane.detach()
            self.connection.close()
            self.connection = None

    def _tell(self, command: Callable[[], object]) -> None:
        done = threading.Event()
        self._commands.put((command, done))
        self._mailbox.send(b"!")
        self._call()
        assert done.wait(PATIENCE), "the worker does not read its mail"

    def attach(self, connection: socket.socket, link: str = OTHER_HOST) -> None:
        """Serve this connection from now on, and close it at the end."""
        connection.setblocking(False)

        def command() -> None:
            self._detach()
            self.connection = connection
            known = b"" if link == OTHER_HOST else WHEREABOUTS
            self.lane.attach(connection.fileno(), whereabouts=known, host_read=link == SAME_HOST_READ)

        self._tell(command)

    def look(self) -> None:
        """Wait until the worker has read its mailbox, so it has finished what it did before."""
        self._tell(lambda: None)

    def detach(self) -> None:
        """Give up the connection, even in the middle of a frame."""
        self._tell(self._detach)

    def close(self) -> None:
        """End the thread through its mailbox."""
        self.mapping_allowed.set()
        self._mailbox.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the worker does not end"
        self._theirs.close()
        del self.lane  # closes its epoll now, not at a garbage collection


class Member:
    """One peer of a ring: a board, its memory, its workers."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes
        self.segments: dict[int, tuple[int, int]] = {}
        self.workers: list[Worker] = []
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.sender_bells = [os.eventfd(0, flags) for _ in range(lanes)]
        self.receiver_bells = [os.eventfd(0, flags) for _ in range(lanes)]
        self.bell = os.eventfd(0, flags)
        fd = create_memory_file("board", BOARD_BYTES)
        self._memory = Mapping(fd, BOARD_BYTES)
        os.close(fd)
        self.board = Board(memoryview(self._memory), self.sender_bells, self.receiver_bells, self.bell)

    def memory(self, number: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Make a new segment; return its bytes."""
        fd = create_memory_file("tensor", max(nbytes, 1))
        self.segments[number] = fd, max(nbytes, 1)
        return np.frombuffer(Mapping(fd, max(nbytes, 1)), np.uint8)[:nbytes]  # type: ignore[call-overload]

    def worker(self, sends: bool, lane: int, connection: socket.socket | None = None, link: str = OTHER_HOST) -> Worker:
        """Start and return a new worker."""
        worker = Worker(self, sends, lane)
        self.workers.append(worker)
        if connection is not None:
            worker.attach(connection, link)
        return worker

    @property
    def problems(self) -> list[str]:
        """Return the reasons why connections ended."""
        return [problem for worker in self.workers for problem in worker.problems]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Sleep on the actor's bell until the condition holds; a change of the condition must ring the bell."""
        poll = select.poll()
        poll.register(self.bell, select.POLLIN)
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen in {PATIENCE:.0f} s; {self.problems}"
            if poll.poll(1000 * (deadline - time.monotonic())):
                os.eventfd_read(self.bell)

    def wait_until_idle(self, *lanes: int) -> None:
        """Wait until the senders of these lanes sleep because there is no block.

        A sender that was just attached, or has just sent, still looks for a block, and would take the next one.
        """
        # At the head of the board (`Shared` in board.pxd) are two sets of bits: the senders that have a connection,
        # and those that are idle.
        head = memoryview(self._memory)[: 16 + 2 * BOARD_LANES // 8].cast("B")
        eventually(
            lambda: all(head[16 + BOARD_LANES // 8 + lane // 8] >> lane % 8 & 1 for lane in lanes),
            f"senders {lanes} are idle",
        )

    def finish(self, sequence: int) -> None:
        """Wait for the end of an operation."""
        self.wait_until(lambda: self.board.has_ended(sequence), f"the end of {sequence}")

    def abort(self, sequence: int) -> None:
        """Abort an operation and wait until no worker holds it."""
        self.board.abort(sequence)
        self.wait_until(lambda: self.board.is_drained(sequence), f"letting go of {sequence}")

    def close(self) -> None:
        """End the threads and close every descriptor."""
        for worker in self.workers:
            worker.close()
        for fd, _ in self.segments.values():
            os.close(fd)
        for bell in (*self.sender_bells, *self.receiver_bells, self.bell):
            os.close(bell)


def operation(
    count: int,
    datatype: DataType = DataType.FLOAT,
    op: ReduceOp = ReduceOp.SUM,
    *,
    send: tuple[int, int] = (SEND, 0),
    recv: tuple[int, int] = (RECV, 0),
    backup: tuple[int, int] = (0, 0),
    quantization: tuple[int, int] = (0, 0),
    area: tuple[int, int] = (0, 0),
) -> Operation:
    """Return an operation as the actor gets it, with tensors as segment and offset."""
    flags = FLAG_BACKED_UP if backup[0] else 0
    return Operation(0, 0, 0, count, datatype.value, op.value, *quantization, flags, *send, *recv, *backup, *area)


@contextmanager
def ring_of(world: int, lanes: int = 1, link: str = OTHER_HOST) -> Iterator[list[Member]]:
    """Make this many members, each connected to the next."""
    with ExitStack() as stack:
        members = [Member(lanes) for _ in range(world)]
        for member in members:
            stack.callback(member.close)
        for rank, member in enumerate(members):
            for lane in range(lanes):
                end, other = connect()
                member.worker(True, lane, end, link)
                members[(rank + 1) % world].worker(False, lane, other, link)
        senders = [worker.lane for member in members for worker in member.workers if isinstance(worker.lane, Sender)]
        eventually(
            lambda: all(sender.same_host_verified == (link != OTHER_HOST) for sender in senders),
            "the answer to all introductions",
        )
        yield members
        assert not [problem for member in members for problem in member.problems]


@contextmanager
def lone_member(
    lanes: int = 1, buffer_bytes: int = 0, link: str = OTHER_HOST
) -> Iterator[tuple[Member, list[socket.socket], list[socket.socket]]]:
    """Make one member; yield it with the other ends of its lanes: sockets it sends to, and sockets it receives from."""
    with ExitStack() as stack:
        member = Member(lanes)
        stack.callback(member.close)
        outgoing, incoming = [], []
        for lane in range(lanes):
            near, far = connect(buffer_bytes)
            member.worker(True, lane, near, link)
            outgoing.append(stack.enter_context(far))
            if link != OTHER_HOST:
                assert read_introduction(far) == WHEREABOUTS
            near, far = connect()
            member.worker(False, lane, far, link)
            incoming.append(stack.enter_context(near))
        yield member, outgoing, incoming
