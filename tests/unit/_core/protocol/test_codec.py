"""Messages and their bytes: each message of the table is encoded and decoded exactly as documented."""

from __future__ import annotations

import struct
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl._core.protocol import hellos, mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.codec import (
    BLOB_BYTES_MAX,
    BY_CLASS,
    BY_OPCODE,
    FIXED,
    PROTOCOL_VERSION,
    SIZED,
    TEXT_BYTES_MAX,
    CodecError,
    cut_text,
    decode,
    encode,
    limits,
    message,
)
from pccl.actors.io.framing import FrameError, FrameReader, frame

NONCE = bytes(range(32))
RUN = bytes(range(16))

# One message of each kind: opcode, message, body. Written out, so that every change of the protocol is visible: peers
# of different builds rely on these bytes.
# fmt: off
GOLDEN: list[tuple[int, Any, str]] = [
    (0x01, hellos.ClientHello(NONCE), f"{NONCE.hex()}"),
    (0x02, hellos.Challenge(NONCE), f"{NONCE.hex()}"),
    (0x03, hellos.Welcome(NONCE), f"{NONCE.hex()}"),
    (0x04, hellos.Refused(8, "é1"), "080300c3a931"),
    (0x10, hellos.Register(NONCE, 2, 3, "é3", 5, RUN, "é5"),
     f"{NONCE.hex()}0200000003000300c3a9330500{RUN.hex()}0300c3a935"),
    (0x14, hellos.AskStatus(NONCE), f"{NONCE.hex()}"),
    (0x48, m.Report(1, 2, b"\x00\xff"), "01000200020000ff"),
    (0x11, hellos.JoinLane(NONCE, RUN, 3, 4, 5, 6),
     f"{NONCE.hex()}{RUN.hex()}03000000040000000000000005000000000000000600"),
    (0x12, hellos.JoinState(NONCE, RUN, 3, 4, 5),
     f"{NONCE.hex()}{RUN.hex()}030000000000000004000000000000000500000000000000"),
    (0x13, hellos.JoinProbe(NONCE, RUN, 3, 4, 5, 6, 7, 8),
     f"{NONCE.hex()}{RUN.hex()}0300000000000000040000000000000005000000000000000600070008000000"),
    (0x15, hellos.JoinTrial(NONCE, RUN), f"{NONCE.hex()}{RUN.hex()}"),
    (0x18, m.VoteOptimize(1), "01000000"),
    (0x19, m.Probed(1, 2, 3, "é4"), "0100000000000000020000000000000003000000000000000300c3a934"),
    (0x1A, m.Tried(1, "é2"), "01000000000000000300c3a932"),
    (0x1B, m.VoteFinish(1), "01000000"),
    (0x1C, m.Threads(1), "01000000"),
    (0x20, m.VoteTopology(1, 2), "0100000002000000"),
    (0x21, m.VotePending(1), "01000000"),
    (0x22, m.Withdraw(1), "01000000"),
    (0x23, m.Wired(1), "01000000"),
    (0x24, m.WireFailed(1, 2, "é2"), "0100000002000000000000000300c3a932"),
    (0x25, m.EdgeLost(1, 2, 3, "é3"), "01000000020000000000000003000000000000000300c3a933"),
    (0x26, m.Leave("é0"), "0300c3a930"),
    (0x27, m.Beat(1, 2, 3, 4, 5, True),
     "0100000000000000020000000000000003000000000000000400000000000000050000000000000001"),
    (0x28, m.Initiate(b"\x00\xff"), "020000ff"),
    (0x29, m.Finished(1, False, "é2"), "0100000000000000000300c3a932"),
    (0x2A, m.Awaiting(1), "0100000000000000"),
    (0x2B, m.WithdrawReduce(1), "0100000000000000"),
    (0x2C, m.VoteSync(1, 2, 1, True, 3, RUN, RUN),
     f"010000000200000000000000010103000000{RUN.hex()}{RUN.hex()}"),
    (0x2D, m.Schema(1, 2, 3, b"\x00\xff"), "010000000200000003000000020000ff"),
    (0x2E, m.Fetched(1, 2, False, "é3"), "010000000200000000000000000300c3a933"),
    (0x30, m.Registered(1, RUN, 3, 4, "a=1"), f"0100000000000000{RUN.hex()}0300000004000000" + "0300613d31"),
    (0x31, m.Accepted(1, 2, 3, 4, 5, 6), "01000000000000000200000003000000040000000500000006000000"),
    (0x32, m.TopologyDone(1, 2, 3, 4, 5, 6, 7), "0100000002000000000000000300000004000000050000000600000007000000"),
    (0x33, m.PendingAnswer(1, True), "0100000001"),
    (0x34, m.CallFailed(1, 8, "é2"), "01000000080300c3a932"),
    (0x35, m.RingOrder(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "é8"),
     "010000000200000003000000040000000000000005000000060007000000000000000800000009000a000300c3a938"),
    (0x36, m.Kick(8, "é1"), "080300c3a931"),
    (0x37, m.Notice(8, "é1"), "080300c3a931"),
    (0x38, m.Commence(1, b"\x00\xff"), "01000000020000ff"),
    (0x39, m.AbortReduce(1, "é1"), "01000000000000000300c3a931"),
    (0x3A, m.ReduceDone(1), "0100000000000000"),
    (0x3B, m.ReduceFailed(1, 2, 8, "é3", 4, 5, 6, 7, 8, 9),
     "01000000000000000200000000000000080300c3a93304000000050000000600000007000000080000000900000000000000"),
    (0x3C, m.AskSchema(1), "01000000"),
    (0x3D, m.Serve(1, 2), "010000000200000000000000"),
    (0x3E, m.Fetch(1, 2, True, 3, RUN, b"\x00\xff"),
     f"010000000200000000000000010300000000000000{RUN.hex()}020000ff"),
    (0x3F, m.SourceGone(1, 2, 3), "0100000002000000000000000300000000000000"),
    (0x40, m.SyncDone(1, 2), "010000000200000000000000"),
    (0x41, m.Probe(1, 2, 3, 4, 5, "é6"), "0100000000000000020000000000000003000400000005000300c3a936"),
    (0x42, m.OptimizeDone(1, 2, 3, 4, 5, 6, 7), "0100000002000000000000000300000004000000050000000600000007000000"),
    (0x43, m.MoreSources(1, 2, b"\x00\xff"), "010000000200000000000000020000ff"),
    (0x44, m.World(1, 2, 3, 4, 5, 6), "01000000020000000300000004000000050000000600000000000000"),
    (0x45, m.Try(1, RUN, 3, "é4"), f"0100000000000000{RUN.hex()}03000300c3a934"),
    (0x46, m.RunFinished(1, "é1"), "010000000300c3a931"),
    (0x50, mailbox.CallConnect(1, 2, 3, 4, 5, b"\x00\xff", "é6", 8, b"\x00\xff", 30),
     "010000000200000003000000040000000500020000ff0300c3a9360800020000ff1e"),
    (0x51, mailbox.CallTopology(1, 2, 3), "010000000200000003000000"),
    (0x52, mailbox.CallPending(1, 2), "0100000002000000"),
    (0x53, mailbox.CallCancel(1, 2), "0100000002000000"),
    (0x54, mailbox.CallLeave(1, 2), "0100000002000000"),
    (0x55, mailbox.CallReduce(b"\x00\xff"), "020000ff"),
    (0x56, mailbox.CallAwait(1, 2), "0100000002000000"),
    (0x57, mailbox.CallShare(1, 2), "010000000200000000000000"),
    (0x58, mailbox.CallUnshare(1), "01000000"),
    (0x59, mailbox.CallSync(1, 2, 3, 2, 4, RUN, RUN, True),
     f"010000000200000003000000000000000204000000{RUN.hex()}{RUN.hex()}01"),
    (0x5A, mailbox.CallManifest(1, 2, 3, 4, 5), "010000000200000003000000040000000000000005000000"),
    (0x5C, mailbox.CallOptimize(1, 2), "0100000002000000"),
    (0x5D, mailbox.CallFinish(1, 2), "0100000002000000"),
    (0x5E, mailbox.FollowMaster(7), "0700000000000000"),
    (0x5F, mailbox.CallThreads(7), "07000000"),
    (0x60, mailbox.Attach(1, host_read=True), "010000000000000001"),
    (0x61, mailbox.Detach(1), "0100000000000000"),
    (0x62, mailbox.LinkEnded(1, "é1"), "01000000000000000300c3a931"),
    (0x63, mailbox.MapSegment(1, 2), "010000000200000000000000"),
    (0x64, mailbox.UnmapSegment(1), "01000000"),
    (0x65, mailbox.FetchManifest(), ""),
    (0x66, mailbox.FetchUnits(b"\x00\xff"), "020000ff"),
    (0x67, mailbox.ManifestFetched(1), "0100000000000000"),
    (0x68, mailbox.UnitsMoved(1, 2), "010000000200000000000000"),
    (0x69, mailbox.StateLinkEnded(True, "é1"), "010300c3a931"),
    (0x6A, mailbox.ProbeEnded(1, "é1"), "01000000000000000300c3a931"),
]
# fmt: on

IDS = [type(value).__name__ for _, value, _ in GOLDEN]

STRATEGIES = {
    "u8": st.integers(0, 2**8 - 1),
    "u16": st.integers(0, 2**16 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "flag": st.booleans(),
    "bytes16": st.binary(min_size=16, max_size=16),
    "bytes32": st.binary(min_size=32, max_size=32),
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=TEXT_BYTES_MAX // 4),
    "blob": st.binary(max_size=64),
}


@pytest.mark.parametrize(("opcode", "value", "body"), GOLDEN, ids=IDS)
def test_bytes_are_as_agreed(opcode: int, value: Any, body: str) -> None:
    """Goal: every message has the opcode and the bytes that other builds expect, in both directions."""
    assert encode(value) == (opcode, bytes.fromhex(body))
    assert decode(opcode, bytes.fromhex(body)) == value


def test_every_message_has_golden_bytes() -> None:
    """Goal: every new message comes with its bytes."""
    assert {opcode for opcode, _, _ in GOLDEN} == set(BY_OPCODE)


@given(st.data())
def test_what_is_encoded_is_decoded(data: st.DataObject) -> None:
    """Goal: decode(encode(x)) == x for every message and every value of its fields."""
    layout = data.draw(st.sampled_from(sorted(BY_OPCODE.values(), key=lambda layout: layout.opcode)))
    value = layout.cls(*[data.draw(STRATEGIES[kind]) for kind in layout.types])

    opcode, body = encode(value)

    assert decode(opcode, body) == value
    assert len(body) <= layout.limit


@pytest.mark.parametrize("layout", BY_OPCODE.values(), ids=lambda layout: layout.cls.__name__)
def test_limits_follow_from_the_fields(layout: Any) -> None:
    """Goal: the largest legal body has exactly the size that framing allows for it."""
    largest = {
        "flag": True,
        "text": "x" * TEXT_BYTES_MAX,
        "blob": bytes(BLOB_BYTES_MAX),
        "bytes16": RUN,
        "bytes32": NONCE,
    }

    _, body = encode(layout.cls(*[largest.get(kind, 1) for kind in layout.types]))

    assert len(body) == layout.limit
    assert limits(layout.cls) == {layout.opcode: layout.limit}


@pytest.mark.parametrize(("opcode", "value", "body"), GOLDEN, ids=IDS)
def test_a_body_of_the_wrong_length_is_refused(opcode: int, value: Any, body: str) -> None:
    """Goal: no prefix of a message is a message, nor is anything longer."""
    whole = bytes.fromhex(body)
    for length in range(len(whole)):
        with pytest.raises(CodecError, match=type(value).__name__):
            decode(opcode, whole[:length])
    with pytest.raises(CodecError, match=type(value).__name__):
        decode(opcode, whole + b"\0")


@pytest.mark.parametrize(
    ("opcode", "body", "reason"),
    [
        (0xEE, b"", "opcode 0xee is not in the table"),
        (0x33, struct.pack("<IB", 1, 2), "a flag is 0 or 1, not 2"),
        (0x26, struct.pack("<H", TEXT_BYTES_MAX + 1) + bytes(TEXT_BYTES_MAX + 1), "at most 768 are allowed"),
        (0x26, struct.pack("<H", 2) + b"\xff\xfe", "can't decode"),
        (0x26, struct.pack("<H", 9) + b"short", "9 bytes announced, 5 there"),
    ],
)
def test_what_does_not_parse_is_a_wire_error(opcode: int, body: bytes, reason: str) -> None:
    """Goal: malformed bodies have one kind of error, and it says what is wrong."""
    with pytest.raises(CodecError, match=reason):
        decode(opcode, body)


def test_long_reasons_are_cut_between_characters() -> None:
    """Goal: a long reason is cut, but stays valid text, and shows that it was cut."""
    opcode, body = encode(m.Leave("é" * 1000))

    reason = decode(opcode, body).reason

    assert len(reason.encode()) <= TEXT_BYTES_MAX
    assert reason.endswith("é...")
    assert cut_text("short") == b"short"


def test_an_oversized_blob_is_our_own_mistake() -> None:
    """Goal: data is never cut silently."""
    with pytest.raises(ValueError, match="the message takes 8192"):
        encode(mailbox.CallConnect(1, 1, 1, 0, 1, bytes(BLOB_BYTES_MAX + 1), "", 0, b""))


def test_an_opcode_belongs_to_one_message() -> None:
    """Goal: two messages with one opcode fail when they are declared, not when they are used."""
    with pytest.raises(ValueError, match="opcode 0x1 is ClientHello"):

        @message(0x01, "nobody to nobody")
        class Twice:
            """Never declared."""


def test_every_wire_type_is_known() -> None:
    """Goal: the tests above draw values for every type there is."""
    assert set(STRATEGIES) == set(FIXED) | set(SIZED)
    assert {kind for layout in BY_CLASS.values() for kind in layout.types} <= set(STRATEGIES)


def test_conversations_only_name_what_belongs_there() -> None:
    """Goal: a pending connection may send the messages of a handshake, and no others. Each port reads all hellos."""
    assert set(hellos.HANDSHAKE_TO_MASTER) == {0x01, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15}
    assert hellos.HANDSHAKE_TO_PEER == hellos.HANDSHAKE_TO_MASTER
    assert set(hellos.WRONG_PORT) == {
        *(hellos.Register, hellos.AskStatus),
        *(hellos.JoinLane, hellos.JoinState, hellos.JoinProbe, hellos.JoinTrial),
    }
    assert all(0x18 <= opcode < 0x30 for opcode in m.TO_MASTER)
    assert all(0x27 <= opcode < 0x50 for opcode in m.TO_PEER)


# --- Mutated frames ---------------------------------------------------------
# Some mutations have a correct checksum, because the decoder would see none of them otherwise.

LIMITS = {opcode: layout.limit for opcode, layout in BY_OPCODE.items()}
OPCODES = sorted(BY_OPCODE)


def fuzz(frames: int, seed: int) -> Counter[str]:
    """Return how many mutated frames ended in which way; raise any unexpected exception."""
    random = Random(seed)
    outcome: Counter[str] = Counter()
    for _ in range(frames):
        data = mutate(random)
        try:
            outcome[read(data, random)] += 1
        except (FrameError, CodecError) as error:
            outcome[type(error).__name__] += 1
    return outcome


def read(data: bytes, random: Random) -> str:
    """Feed the bytes whole or in two pieces; return `message` or `incomplete`."""
    reader = FrameReader(LIMITS, PROTOCOL_VERSION)
    cut = random.randint(0, len(data))
    found = [*reader.feed(data[:cut]), *reader.feed(data[cut:])]
    for opcode, body in found:
        value = decode(opcode, body)
        assert decode(*encode(value)) == value, f"{value!r} does not survive a second trip"
    return "message" if found else "incomplete"


def mutate(random: Random) -> bytes:
    """Return a random frame, mutated or not."""
    opcode = random.choice(OPCODES)
    body = encode(BY_OPCODE[opcode].cls(*[draw(kind, random) for kind in BY_OPCODE[opcode].types]))[1]
    choice = random.randrange(6)
    if choice == 0:
        return frame(opcode, body, PROTOCOL_VERSION)
    if choice == 1:  # a wrong body under a correct checksum
        return frame(opcode, scratch(body, random), PROTOCOL_VERSION)
    if choice == 2:  # another message's body under a correct checksum
        return frame(random.choice(OPCODES), body, PROTOCOL_VERSION)
    whole = frame(opcode, body, PROTOCOL_VERSION)
    if choice == 3:
        return whole[: random.randint(0, len(whole))]
    return scratch(whole, random)


def scratch(data: bytes, random: Random) -> bytes:
    """Flip, insert, remove or repeat some bytes."""
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place = random.randint(0, len(found))
        choice = random.randrange(4)
        if choice == 0 and place < len(found):
            found[place] ^= 1 << random.randrange(8)
        elif choice == 1:
            found[place:place] = random.randbytes(random.randint(1, 8))
        elif choice == 2:
            del found[place : place + random.randint(1, 8)]
        else:
            found += found[:place]
    return bytes(found)


def draw(kind: str, random: Random) -> Any:
    """A legal value of a wire type."""
    if kind in ("bytes16", "bytes32"):
        return random.randbytes(int(kind[5:]))
    if kind == "text":
        return "é" * random.randint(0, 10)
    if kind == "blob":
        return random.randbytes(random.randint(0, 20))
    if kind == "flag":
        return random.random() < 0.5
    return random.getrandbits(int(kind[1:]))


def test_mutated_frames_parse_or_fail_cleanly() -> None:
    """Goal: whatever arrives, a frame either is a message or raises a FrameError or a CodecError."""
    outcome = fuzz(20_000, seed=1)

    assert sum(outcome.values()) == 20_000
    assert outcome["message"] > 100
    assert outcome["FrameError"] > 100
    assert outcome["CodecError"] > 100
