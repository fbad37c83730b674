"""Random messages: legal ones made from the protocol's message table, and functions that corrupt them.

Fields are drawn by their wire types, with a preference for edge values and for numbers that the run uses, because a
random 64-bit number matches nothing. Pure; all randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from pccl._core.protocol.codec import BY_CLASS, BY_OPCODE, FIXED, PROTOCOL_VERSION, SIZED, encode
from pccl.actors.io.framing import HEADER_BYTES, frame

EDGES = (0, 1, 2, 0x7F, 0xFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
WORDS = ("", "127.0.0.1", "::1", "no.such.host.invalid", "\0", "%s%n", "\n" * 10, "ä€😀" * 50, "x" * 256)


class Drawing:
    """A source of messages and frames."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.known: list[int] = [0, 1, 2, 3]  # epochs, peer ids and call numbers seen recently

    def learn(self, *numbers: int) -> None:
        """Remember numbers that this run uses; only the latest are kept."""
        self.known = [*self.known[-12:], *numbers]

    def message(self, cls: type[Any], **fixed: Any) -> Any:
        """Return a message of this class; fields that are not given are random."""
        layout = BY_CLASS[cls]
        drawn = {name: self._field(kind) for name, kind in zip(layout.names, layout.types, strict=True)}
        return cls(**{**drawn, **fixed})

    def framed(self, message: Any) -> bytes:
        """Return the message as a frame, not corrupted."""
        return frame(*encode(message), PROTOCOL_VERSION)

    def any_frame(self) -> bytes:
        """Return a well-formed frame of any message in the table, legal at this point or not."""
        layout = self.chance.choice(list(BY_OPCODE.values()))
        return self.framed(self.message(layout.cls))

    def spoil(self, data: bytes) -> bytes:
        """Return the frame corrupted; in half of the cases with a checksum that matches the corrupted body."""
        spoiled: bytes = self.chance.choice(SPOILERS)(self, data)
        if self.chance.random() < 0.5 and len(spoiled) > HEADER_BYTES:
            return frame(spoiled[3], spoiled[HEADER_BYTES:], spoiled[2])
        return spoiled

    def _field(self, kind: str) -> Any:
        chance = self.chance
        if kind == "flag":
            return chance.random() < 0.5
        if kind.startswith("bytes"):
            return chance.randbytes(int(kind[5:]))
        if kind == "text":
            return chance.choice(WORDS)
        if kind == "blob":
            return chance.randbytes(chance.randint(0, 64))
        limit = (1 << 8 * FIXED[kind]) - 1
        number = chance.choice((chance.choice(self.known), chance.choice(EDGES), chance.getrandbits(64)))
        return number & limit

    # ------------------------------------------------------------------------------------------ ways to corrupt

    def _flip_bits(self, data: bytes) -> bytes:
        spoiled = bytearray(data)
        for _ in range(self.chance.randint(1, 8)):
            spoiled[self.chance.randrange(len(spoiled))] ^= 1 << self.chance.randrange(8)
        return bytes(spoiled)

    def _change_length(self, data: bytes) -> bytes:
        length = self.chance.choice((0, 1, len(data), *SIZED.values(), 1 << 16, 0x7FFFFFFF, 0xFFFFFFFF))
        return data[:4] + struct.pack("<I", length) + data[8:]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self.chance.randrange(len(data))]

    def _splice(self, data: bytes) -> bytes:
        other = self.any_frame()
        return data[: self.chance.randrange(len(data))] + other[self.chance.randrange(len(other)) :]

    def _insert(self, data: bytes) -> bytes:
        offset = self.chance.randrange(len(data))
        return data[:offset] + self.chance.randbytes(self.chance.randint(1, 40)) + data[offset:]

    def _noise(self, data: bytes) -> bytes:
        return self.chance.randbytes(len(data))


SPOILERS = (
    Drawing._flip_bits,
    Drawing._flip_bits,
    Drawing._change_length,
    Drawing._truncate,
    Drawing._splice,
    Drawing._insert,
    Drawing._noise,
)
