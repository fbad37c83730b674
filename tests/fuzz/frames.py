"""Mutated frames against framing and decoding.

The invariant: whatever arrives, in whatever pieces, a frame either is a message of the table, or raises a FrameError or
a WireError, or is still incomplete. Some mutations carry a correct checksum, because otherwise nothing would ever get
past it to the decoder.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from pccl._core import messages  # noqa: F401, declares the table
from pccl._core.framing import FrameError, FrameReader, frame
from pccl._core.wire import BY_OPCODE, WIRE_VERSION, WireError, decode, encode

LIMITS = {opcode: layout.limit for opcode, layout in BY_OPCODE.items()}
OPCODES = sorted(BY_OPCODE)


def fuzz(frames: int, seed: int) -> Counter[str]:
    """How many mutated frames ended how; anything but a clean end is raised."""
    random = Random(seed)
    outcome: Counter[str] = Counter()
    for _ in range(frames):
        data = mutate(random)
        try:
            outcome[read(data, random)] += 1
        except (FrameError, WireError) as error:
            outcome[type(error).__name__] += 1
    return outcome


def read(data: bytes, random: Random) -> str:
    """Feed the bytes whole or in two pieces; `message` or `incomplete`."""
    reader = FrameReader(LIMITS, WIRE_VERSION)
    cut = random.randint(0, len(data))
    found = [*reader.feed(data[:cut]), *reader.feed(data[cut:])]
    for opcode, body in found:
        value = decode(opcode, body)
        assert decode(*encode(value)) == value, f"{value!r} does not survive a second trip"
    return "message" if found else "incomplete"


def mutate(random: Random) -> bytes:
    """A frame with something wrong with it, or nothing."""
    opcode = random.choice(OPCODES)
    body = encode(BY_OPCODE[opcode].cls(*[draw(kind, random) for kind in BY_OPCODE[opcode].types]))[1]
    choice = random.randrange(6)
    if choice == 0:
        return frame(opcode, body, WIRE_VERSION)
    if choice == 1:  # a wrong body under a correct checksum
        return frame(opcode, scratch(body, random), WIRE_VERSION)
    if choice == 2:  # another message's body under a correct checksum
        return frame(random.choice(OPCODES), body, WIRE_VERSION)
    whole = frame(opcode, body, WIRE_VERSION)
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
