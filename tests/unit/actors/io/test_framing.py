"""Frames: the bytes are as documented, the split of the stream makes no difference, bad input costs no memory."""

import pickle
import random
import socket
import zlib

import pytest

from pccl.actors.io.framing import HEADER_BYTES, FrameError, FrameReader, FrameWriter, frame
from tests.readable import is_readable

VERSION = 1
LIMITS = {7: 100, 8: 0, 9: 100_000}
FRAMES = [(7, b"hello"), (8, b""), (9, bytes(range(256)) * 300), (7, b"x" * 100)]
STREAM = b"".join(frame(opcode, body, VERSION) for opcode, body in FRAMES)

HELLO = frame(7, b"hello", VERSION)

# Each kind of error: the shortest bytes that cause it, and what the message must name.
BAD = {
    "magic": (b"GE", ["b'GE'", "b'PC'"]),
    "version": (b"PC\x02", ["version 2", "version 1"]),
    "opcode": (b"PC\x01\x06", ["opcode 6", "[7, 8, 9]"]),
    "length": (b"PC\x01\x07\x65\0\0\0", ["opcode 7", "101", "100"]),
    "crc": (HELLO[:-1] + b"0", ["opcode 7", "5 bytes", "0xd8f4c49e"]),
}


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


def receive_all(reader, fd):
    """Reads until the socket is empty."""
    frames = []
    while is_readable(fd):
        frames += reader.receive(fd)
    return frames


def feed_bytewise(reader, data):
    return [one for i in range(len(data)) for one in reader.feed(data[i : i + 1])]


def outcome(data, feed):
    """The frames in `data`, and the kind of error that ended them, if any."""
    reader = FrameReader(LIMITS, VERSION)
    frames = []
    try:
        for piece in feed(data):
            frames += reader.feed(piece)
        frames += reader.feed(b"")
    except FrameError as error:
        return frames, error.kind, reader.capacity
    return frames, reader.buffered, reader.capacity


def whole(data):
    return [data]


def bytewise(data):
    return [data[i : i + 1] for i in range(len(data))]


def test_golden_bytes():
    assert HEADER_BYTES == 12
    assert HELLO == bytes.fromhex("5043 01 07 05000000 9ec4f4d8") + b"hello"
    assert frame(0, b"", 255) == bytes.fromhex("5043 ff 00 00000000 87e823a1")


@pytest.mark.parametrize("length", [*range(40), 1000, 65_537])
def test_checksum_is_that_of_zlib(length):
    body = random.Random(length).randbytes(length)
    built = frame(200, body, 3)

    assert int.from_bytes(built[8:12], "little") == zlib.crc32(built[:8] + body)
    assert built[12:] == body


@pytest.mark.parametrize(("opcode", "version"), [(256, 1), (-1, 1), (1, 256), (1, -1)])
def test_header_fields_that_do_not_fit_are_refused(opcode, version):
    with pytest.raises(OverflowError):
        frame(opcode, b"", version)


@pytest.mark.parametrize("body", [None, "text", 5])
def test_body_is_bytes(body):
    with pytest.raises(TypeError):
        frame(1, body, 1)
    with pytest.raises(TypeError):
        FrameWriter(1, 100).push(1, body)


@pytest.mark.parametrize("exact", [False, True])
def test_pieces_make_no_difference(exact):
    for feed in (FrameReader.feed, feed_bytewise):
        reader = FrameReader(LIMITS, VERSION, exact)

        assert feed(reader, STREAM) == FRAMES
        assert reader.buffered == 0


def test_buffer_grows_to_the_frame_and_not_beyond():
    reader = FrameReader(LIMITS, VERSION)
    assert reader.capacity == 4096
    # With the last byte of the header, the header is complete and valid.
    big = frame(9, b"y" * 100_000, VERSION)
    reader.feed(big[:11])
    assert reader.capacity == 4096
    reader.feed(big[11:12])
    assert reader.capacity == HEADER_BYTES + 100_000
    assert reader.feed(big[12:] + big) == [(9, b"y" * 100_000)] * 2
    assert reader.capacity == HEADER_BYTES + 100_000


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("exact", [False, True])
def test_each_error_comes_with_its_first_evidence(kind, exact):
    """One byte less is not enough; with it, the error is raised, and nothing was allocated."""
    data, words = BAD[kind]
    reader = FrameReader(LIMITS, VERSION, exact)

    assert reader.feed(data[:-1]) == []
    with pytest.raises(FrameError) as caught:
        reader.feed(data[-1:])
    assert caught.value.kind == kind
    for word in words:
        assert word in str(caught.value)
    assert reader.capacity == 4096


@pytest.mark.parametrize("kind", BAD)
def test_frames_ahead_of_a_bad_one_are_delivered(kind):
    """Good frames come first; then every call raises the error, whatever follows in the stream."""
    reader = FrameReader(LIMITS, VERSION)

    assert reader.feed(STREAM + BAD[kind][0] + STREAM) == FRAMES
    for _ in range(3):
        with pytest.raises(FrameError) as caught:
            reader.feed(STREAM)
        assert caught.value.kind == kind


def test_broken_reader_raises_without_reading(pair):
    left, right = pair
    left.send(HELLO + b"junk")
    reader = FrameReader(LIMITS, VERSION)

    assert reader.receive(right.fileno()) == [(7, b"hello")]
    left.send(HELLO)
    with pytest.raises(FrameError, match="begins with b'ju'"):
        reader.receive(right.fileno())
    assert right.recv(100) == HELLO


def test_frame_error_pickles():
    error = pickle.loads(pickle.dumps(FrameError("crc", "damaged")))

    assert (error.kind, str(error)) == ("crc", "damaged")


def test_new_limits_hold_for_the_frame_under_way():
    reader = FrameReader(LIMITS, VERSION)
    assert reader.feed(HELLO[:-1]) == []
    reader.set_limits({7: 4})
    with pytest.raises(FrameError) as caught:
        reader.feed(HELLO[-1:])
    assert caught.value.kind == "length"

    reader = FrameReader({8: 0}, VERSION)
    reader.set_limits(LIMITS)
    assert reader.feed(STREAM) == FRAMES


@pytest.mark.parametrize("limits", [{256: 1}, {-1: 1}, {1: -1}, {1: 2**32}])
def test_impossible_limits_are_refused_and_change_nothing(limits):
    with pytest.raises(ValueError):
        FrameReader(limits, VERSION)
    reader = FrameReader(LIMITS, VERSION)
    with pytest.raises(ValueError):
        reader.set_limits({7: 0, **limits})
    assert reader.feed(STREAM) == FRAMES


def test_garbage_is_refused_and_pieces_make_no_difference():
    """Random bytes, and good streams with a few flipped bytes: the outcome never depends on how the stream is split,
    and every delivered frame was sent."""
    source = random.Random(20)
    for _ in range(1500):
        if source.random() < 0.3:
            data = source.choice([b"", b"P", b"PC", b"PC\x01", b"PC\x01\x07"]) + source.randbytes(source.randrange(60))
        else:
            broken = bytearray(HELLO * 2 + frame(8, b"", VERSION) + HELLO)
            for _ in range(source.randrange(3)):
                broken[source.randrange(len(broken))] ^= 1 << source.randrange(8)
            data = bytes(broken)
        at_once = outcome(data, whole)

        assert at_once == outcome(data, bytewise)
        assert at_once[2] <= max(4096, HEADER_BYTES + max(LIMITS.values()))
        assert all(one in [(7, b"hello"), (8, b"")] for one in at_once[0])


def test_empty_socket_gives_nothing(pair):
    assert FrameReader(LIMITS, VERSION).receive(pair[1].fileno()) == []


@pytest.mark.parametrize(
    ("sent", "where"),
    [
        (HELLO, "between two frames"),
        (HELLO[:5], "after 5 of 12 header bytes"),
        (HELLO[:14], "after 2 of 5 body bytes of opcode 7"),
    ],
)
def test_end_of_stream_tells_where(pair, sent, where):
    left, right = pair
    left.send(sent)
    left.close()
    reader = FrameReader(LIMITS, VERSION)
    reader.receive(right.fileno())
    for _ in range(2):
        with pytest.raises(EOFError, match=where):
            reader.receive(right.fileno())


def test_errors_of_the_socket_come_through(pair):
    left, right = pair
    fd = right.fileno()
    # Closing a socket with unread bytes sends a reset instead of an end of stream.
    right.send(b"unread")
    left.close()
    reader = FrameReader(LIMITS, VERSION)
    with pytest.raises(ConnectionResetError, match="reading from a peer"):
        reader.receive(fd)
    writer = FrameWriter(VERSION, 1000)
    writer.push(7, b"hello")
    with pytest.raises(BrokenPipeError, match="17 bytes unsent"):
        writer.flush(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.receive(-1)


def test_exact_mode_never_reads_over_the_frame(pair):
    """After each read of a stream of frames, the socket still holds everything behind the header or body read."""
    left, right = pair
    behind = b"not for us"
    left.send(HELLO + frame(8, b"", VERSION) + behind)
    reader = FrameReader(LIMITS, VERSION, exact=True)

    assert reader.receive(right.fileno()) == []
    assert reader.buffered == HEADER_BYTES
    assert right.recv(100, socket.MSG_PEEK).startswith(b"hello")
    assert reader.receive(right.fileno()) == [(7, b"hello")]
    assert reader.buffered == 0
    assert reader.receive(right.fileno()) == [(8, b"")]
    assert reader.buffered == 0
    assert right.recv(100) == behind


def test_exact_mode_can_be_left(pair):
    """A connection that became a member reads whole batches from then on."""
    left, right = pair
    left.send(HELLO * 3)
    reader = FrameReader(LIMITS, VERSION, exact=True)
    reader.receive(right.fileno())
    reader.exact = False

    assert reader.receive(right.fileno()) == [(7, b"hello")] * 3


def test_writer_sends_in_order(pair):
    left, right = pair
    writer, reader = FrameWriter(VERSION, 1 << 20), FrameReader(LIMITS, VERSION)
    for opcode, body in FRAMES:
        writer.push(opcode, body)

    assert writer.pending == len(STREAM)
    assert writer.flush(left.fileno())
    assert writer.pending == 0
    assert receive_all(reader, right.fileno()) == FRAMES


def test_writer_survives_partial_sends(pair):
    """Far more than a socket buffer, in frames of many sizes: each flush stops when the buffer is full, and no frame is
    lost, doubled or reordered."""
    left, right = pair
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    source = random.Random(3)
    sent = [(9, source.randbytes(source.choice([0, 1, 50, 5_000, 90_000]))) for _ in range(300)]
    writer, reader = FrameWriter(VERSION, 1 << 30), FrameReader(LIMITS, VERSION)
    for opcode, body in sent:
        writer.push(opcode, body)
    total, stops, received = writer.pending, 0, []
    while not writer.flush(left.fileno()):
        stops += 1
        assert 0 < writer.pending < total
        received += receive_all(reader, right.fileno())
    received += receive_all(reader, right.fileno())

    assert stops > 10
    assert received == sent


def test_writer_is_bounded():
    writer = FrameWriter(VERSION, 2 * len(HELLO))
    writer.push(7, b"hello")
    writer.push(7, b"hello")
    with pytest.raises(BufferError, match=r"17 bytes and 34 unsent bytes exceed the bound of 34"):
        writer.push(7, b"hello")
    assert writer.pending == 34


def test_flush_of_nothing_is_done():
    assert FrameWriter(VERSION, 100).flush(-1)
