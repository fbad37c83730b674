"""Random frames: mutated, cut, repeated and reordered streams for a real receiver, random answers for a sender.

With any input the process lives, no byte outside the tensor changes, no block counts twice, the connection ends with a
reason, and the same worker serves the next one. Under `make sanitize` no access is out of bounds, either. Each stream
comes from a seed, which is part of the test's name.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest

from pccl._core.dataplane.plan import Cut
from pccl._core.kernels.arithmetic import crc32c_of
from pccl.values import DataType

from .loopback import (
    BLOCK,
    HEADER,
    HEADER_BYTES,
    HOST_READ,
    INTRODUCED,
    INTRODUCTION,
    MAGIC,
    NOTE_MAGIC,
    OFFER,
    OTHER_HOST,
    PLAIN,
    RECV,
    SAME_HOST_READ,
    SEND,
    WHEREABOUTS,
    WITHDRAWAL,
    Member,
    Worker,
    connect,
    eventually,
    frame,
    lone_member,
    note,
    operation,
    read_exactly,
    read_introduction,
)

TRIALS = 25  # connections for each seed
COUNT = 150_000  # bytes: several blocks in each chunk
MARGIN = 4096  # bytes around a tensor that must not change
CANARY = 0xA5
LENDABLE = 9  # a segment that the other side may read

OFFERED = struct.Struct("<QQQIIII")  # the body of an offer: bytes, inode, device, segment, serial, pid, descriptor
FIELDS = ("magic", "hop", "kind", "sequence", "offset", "segment", "chunk", "block", "length", "crc")
WIDTHS = dict(zip(FIELDS, (32, 16, 16, 64, 64, 32, 32, 32, 32, 32), strict=True))


class Stream:
    """The random bytes of one connection: what a correct peer would send, with some damage."""

    def __init__(self, chance: random.Random, sequence: int, memory: tuple[int, int]) -> None:
        self._chance = chance
        self._sequence = sequence
        self._memory = memory  # descriptor and size of memory that can be offered
        cut = Cut(COUNT, 1, 2)
        self.frames = [
            frame(sequence, hop, 1 - hop, block, chance.randbytes(end - begin))
            for hop in (0, 1)
            for block, (begin, end) in enumerate(cut.blocks(1 - hop))
        ]
        self.payload_bytes = sum(len(one) - HEADER_BYTES for one in self.frames)
        harms: list[Callable[[], None]] = [
            *(self._flip, self._rewrite, self._cut, self._repeat, self._reorder, self._omit),
            *(self._insert_garbage, self._insert_host_frame, self._lend, self._offer),
        ]
        for harm in chance.choices(harms, k=chance.randint(0, 4)):
            harm()

    def pieces(self) -> list[bytes]:
        """Return the stream in parts of random sizes, so that headers and blocks are cut anywhere."""
        whole, pieces, at = b"".join(self.frames), [], 0
        while at < len(whole):
            size = self._chance.choice((1, 47, 48, 49, 4143, 4144, 4145, 100_000))
            pieces.append(whole[at : at + size])
            at += size
        return pieces

    def is_early(self) -> bool:
        """Whether a frame names an operation that never begins: the receiver waits for it, and reads nothing more."""
        heads = [HEADER.unpack(one[: HEADER.size]) for one in self.frames if len(one) >= HEADER_BYTES]
        return any(magic == MAGIC and sequence > self._sequence for magic, _, _, sequence, *_ in heads)

    def _index(self) -> int:
        return self._chance.randrange(len(self.frames))

    def _flip(self) -> None:
        index = self._index()
        data = bytearray(self.frames[index])
        data[self._chance.randrange(min(len(data), self._chance.choice((HEADER_BYTES, len(data)))))] ^= (
            1 << self._chance.randrange(8)
        )
        self.frames[index] = bytes(data)

    def _rewrite(self) -> None:
        """Change one field of a header, with a correct checksum."""
        index = self._index()
        data = self.frames[index]
        if len(data) < HEADER_BYTES:
            return
        values = list(HEADER.unpack(data[: HEADER.size]))
        field = self._chance.randrange(len(FIELDS))
        limit = 1 << WIDTHS[FIELDS[field]]
        near = self._chance.choice((-1, 1, 2))
        values[field] = self._chance.choice((0, 1, limit - 1, limit // 2, (values[field] + near) % limit))
        head = HEADER.pack(*values)
        self.frames[index] = head + struct.pack("<I", crc32c_of(head)) + data[HEADER_BYTES:]

    def _cut(self) -> None:
        index = self._index()
        self.frames[index] = self.frames[index][: self._chance.randrange(len(self.frames[index]))] or b"\0"

    def _repeat(self) -> None:
        self.frames.insert(self._index(), self.frames[self._index()])

    def _reorder(self) -> None:
        self._chance.shuffle(self.frames)

    def _omit(self) -> None:
        if len(self.frames) > 1:
            del self.frames[self._index()]

    def _insert_garbage(self) -> None:
        self.frames.insert(self._index(), self._chance.randbytes(self._chance.randint(1, 10_000)))

    def _insert_host_frame(self) -> None:
        """Insert a host frame of any kind, with a body that fits or does not."""
        kind = self._chance.choice((OFFER, WITHDRAWAL, INTRODUCTION, INTRODUCTION + 1, 0xFFFF))
        body = self._chance.choice((b"", WHEREABOUTS, self._chance.randbytes(OFFERED.size), b"x" * 5000))
        segment = self._chance.choice((0, LENDABLE, 0xFFFFFFFF))
        self.frames.insert(self._index(), frame(0, 0, 0, 0, body, kind=kind, segment=segment))

    def _offer(self, number: int = LENDABLE) -> None:
        """Insert an offer of memory that exists, or does not."""
        fd, nbytes = self._memory
        found = os.fstat(fd)
        wild = self._chance.random() < 0.5
        pid = self._chance.choice((0, 1, 1 << 31, 0xFFFFFFFF)) if wild else os.getpid()
        size = self._chance.choice((0, nbytes + 1, (1 << 64) - 1)) if wild else nbytes
        body = OFFERED.pack(size, found.st_ino, found.st_dev, number, 1, pid, fd)
        self.frames.insert(0, frame(0, 0, 0, 0, body, kind=OFFER, segment=number))

    def _lend(self) -> None:
        """Insert a loan of a block in offered memory, or beyond its end."""
        self._offer()
        index = self._index()
        data = self.frames[index]
        if len(data) < HEADER_BYTES or HEADER.unpack(data[: HEADER.size])[2] not in (BLOCK, PLAIN):
            return
        values = dict(zip(FIELDS, HEADER.unpack(data[: HEADER.size]), strict=True))
        nbytes = self._memory[1]
        values["offset"] = self._chance.choice((0, nbytes - values["length"], nbytes, nbytes + 1, (1 << 64) - 1))
        values["offset"] %= 1 << 64
        values |= {"kind": HOST_READ, "segment": self._chance.choice((LENDABLE, 1, 0xFFFFFFFF)), "crc": 0}
        head = HEADER.pack(*values.values())
        self.frames[index] = head + struct.pack("<I", crc32c_of(head))


class Victim:
    """A lone member at rank 0 of two, whose tensors lie between canaries."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.tensors = [member.memory(number, COUNT + 2 * MARGIN) for number in (SEND, RECV)]
        member.memory(LENDABLE, COUNT)
        for tensor in self.tensors:
            tensor[:] = CANARY
        self.sender, self.receiver = member.workers

    def begin(self, sequence: int) -> None:
        what = operation(COUNT, DataType.UINT8, send=(SEND, MARGIN), recv=(RECV, MARGIN))
        assert self.member.board.begin(sequence, what, 0, 2)

    def end(self, sequence: int) -> None:
        self.member.abort(sequence)
        self.member.board.release(sequence)
        self.member.board.sweep()
        for tensor in self.tensors:
            assert (tensor[:MARGIN] == CANARY).all()
            assert (tensor[-MARGIN:] == CANARY).all()


def feed(sock: socket.socket, pieces: list[bytes], *, reset: bool = False) -> None:
    """Write until the other side closes or all is written, then shut down the sending side, or reset the connection."""
    try:
        for piece in pieces:
            sock.sendall(piece)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side has already ended the connection


def fresh(worker: Worker, link: str) -> socket.socket:
    """Connect to a worker; return the other end."""
    ours, theirs = connect()
    worker.attach(theirs, link)
    return ours


@pytest.mark.parametrize("link", [OTHER_HOST, SAME_HOST_READ])
@pytest.mark.parametrize("seed", range(4))
def test_a_receiver_survives_any_stream(seed: int, link: str) -> None:
    chance = random.Random(f"{seed} {link}")
    with lone_member(link=link) as (member, _, _):
        victim = Victim(member)
        for sequence in range(1, TRIALS + 1):
            stream = Stream(chance, sequence, member.segments[LENDABLE])
            ended = len(victim.receiver.problems)
            victim.begin(sequence)
            with fresh(victim.receiver, link) as into:
                # The end of a stream is behind its bytes, so a receiver that waits with full buffers cannot see it. A
                # reset is not; in a run it is the master's next ring order that ends such a wait.
                feed(into, stream.pieces(), reset=stream.is_early())
                eventually(lambda before=ended: len(victim.receiver.problems) > before, "the end of the connection")
            assert victim.receiver.problems[-1]
            assert member.board.statistics(sequence)[1] <= stream.payload_bytes
            victim.end(sequence)


def test_a_stream_without_harm_is_received() -> None:
    """Goal: undamaged streams are correct, so only the damage ends the connections in the other tests."""
    with lone_member() as (member, (out,), (into,)):
        victim = Victim(member)
        victim.tensors[0][MARGIN:-MARGIN] = 1
        unharmed = next(
            stream
            for stream in (Stream(random.Random(seed), 1, member.segments[LENDABLE]) for seed in range(100))
            if len(b"".join(stream.frames)) == stream.payload_bytes + HEADER_BYTES * len(stream.frames)
            and all(one[6:8] == b"\0\0" for one in stream.frames)
            and len({one[:HEADER_BYTES] for one in stream.frames}) == len(Cut(COUNT, 1, 2).blocks(0)) * 2
        )
        victim.begin(1)
        feed(into, unharmed.pieces())
        read_exactly(out, unharmed.payload_bytes + HEADER_BYTES * len(unharmed.frames))
        member.finish(1)
        assert member.board.statistics(1)[1] == unharmed.payload_bytes
        cut = Cut(COUNT, 1, 2)
        added = np.frombuffer(b"".join(one[HEADER_BYTES:] for one in unharmed.frames[: len(cut.blocks(1))]), np.uint8)
        begin, end = cut.chunk(1)
        assert (victim.tensors[1][MARGIN + begin : MARGIN + end] == added + np.uint8(1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_sender_survives_any_answers(seed: int) -> None:
    chance = random.Random(seed)
    words = (0, 1, 2, 8, 9, INTRODUCED, 1 << 31)
    with lone_member(link=SAME_HOST_READ) as (member, _, _):
        victim = Victim(member)
        for sequence in range(1, TRIALS + 1):
            ended = len(victim.sender.problems)
            with fresh(victim.sender, SAME_HOST_READ) as out:
                read_introduction(out)
                out.sendall(note(serial=INTRODUCED, accepted=chance.randint(0, 1)))
                victim.begin(sequence)
                answers = [
                    note(*(chance.choice(words) for _ in range(3)), magic=chance.choice((NOTE_MAGIC, NOTE_MAGIC, 0)))
                    for _ in range(chance.randint(0, 20))
                ]
                if chance.random() < 0.3:
                    answers.append(chance.randbytes(chance.randint(1, 100)))
                feed(out, answers)
                eventually(lambda before=ended: len(victim.sender.problems) > before, "the end of the connection")
            assert victim.sender.problems[-1]
            victim.end(sequence)
