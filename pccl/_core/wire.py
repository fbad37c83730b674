"""The message table's machinery: how a record of typed fields becomes bytes and comes back.

A message is declared once, in `messages`: its opcode, who sends it to whom, and its fields by wire type. Encoder,
decoder, size limit, documentation table, golden bytes and fuzzing all derive from that declaration. The largest size
of a message follows from its fields, so framing can refuse a length before it allocates anything.

Decoding trusts nothing: a short body, a long body, bad UTF-8, or a flag that is neither 0 nor 1 is a `WireError`.
No I/O, no clock. Frames (header, checksum, version) are `framing`'s business.
"""

from __future__ import annotations

import struct
from operator import attrgetter

from pccl.records import dataclass_transform, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

WIRE_VERSION = 1  # one number for the whole protocol: peers of different versions refuse each other at the first frame
TEXT_BYTES_MAX = 768  # reasons and host names; a reason that is longer is cut, because it is for people
BLOB_BYTES_MAX = 8192  # lists: of addresses, options, operations; no message that a stranger may send has one

# Wire types of fixed size, by their struct code.
FIXED = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "bytes16": "16s", "bytes32": "32s", "flag": "B"}
# Wire types with a length in front, by their largest number of bytes.
SIZED = {"text": TEXT_BYTES_MAX, "blob": BLOB_BYTES_MAX}


class WireError(ValueError):
    """A body that does not parse as the message its opcode names."""


class Layout:
    """How one message class lies on the wire: its opcode, its fields, and the largest body."""

    __slots__ = ("cls", "direction", "fields", "fixed", "limit", "names", "opcode", "tail", "types")

    def __init__(self, cls: type[Any], opcode: int, direction: str) -> None:
        self.cls = cls
        self.opcode = opcode
        self.direction = direction
        self.names: tuple[str, ...] = cls.__match_args__
        self.types = tuple(str(cls.__annotations__[name]) for name in self.names)
        #: All fields of a value at once; a lone field comes bare.
        self.fields = attrgetter(*self.names) if len(self.names) > 1 else None
        # One struct when every field is of fixed size: the common and the fast case. The next best is that only the
        # last one is not: then its length belongs to the struct, and the rest of the body is the field.
        fixed = [kind in FIXED and kind != "flag" for kind in self.types]
        codes = "<" + "".join(FIXED[kind] for kind, is_fixed in zip(self.types, fixed, strict=True) if is_fixed)
        self.fixed = struct.Struct(codes) if all(fixed) else None
        self.tail = struct.Struct(codes + "H") if fixed and all(fixed[:-1]) and self.types[-1] == "blob" else None
        self.limit = sum(2 + SIZED[kind] if kind in SIZED else struct.calcsize(FIXED[kind]) for kind in self.types)


BY_OPCODE: dict[int, Layout] = {}
BY_CLASS: dict[type[Any], Layout] = {}


@dataclass_transform(frozen_default=True)
def message(opcode: int, direction: str) -> Callable[[type[T]], type[T]]:
    """Declare a message: a frozen record that has an opcode and a layout."""

    def declare(cls: type[T]) -> type[T]:
        frozen = record(cls)
        layout = Layout(frozen, opcode, direction)
        if opcode in BY_OPCODE:
            raise ValueError(f"opcode {opcode:#x} is {BY_OPCODE[opcode].cls.__name__}, it cannot be {cls.__name__} too")
        BY_OPCODE[opcode] = BY_CLASS[frozen] = layout
        return frozen

    return declare


def limits(*classes: type[Any]) -> dict[int, int]:
    """Opcode to largest body, for the messages that are legal on a connection."""
    return {BY_CLASS[cls].opcode: BY_CLASS[cls].limit for cls in classes}


def encode(value: Any) -> tuple[int, bytes]:
    """The opcode and the body of a message."""
    layout = BY_CLASS[type(value)]
    if layout.fixed is not None and layout.fields is not None:
        return layout.opcode, layout.fixed.pack(*layout.fields(value))
    if layout.tail is not None:
        *head, blob = [getattr(value, name) for name in layout.names]
        if len(blob) <= BLOB_BYTES_MAX:
            return layout.opcode, layout.tail.pack(*head, len(blob)) + blob
    parts = []
    for name, kind in zip(layout.names, layout.types, strict=True):
        field = getattr(value, name)
        if kind in FIXED:
            parts.append(struct.pack("<" + FIXED[kind], field))
            continue
        data = cut_text(field) if kind == "text" else bytes(field)
        if len(data) > SIZED[kind]:
            raise ValueError(f"{layout.cls.__name__}.{name} has {len(data)} bytes, the wire takes {SIZED[kind]}")
        parts.append(struct.pack("<H", len(data)) + data)
    return layout.opcode, b"".join(parts)


def decode(opcode: int, body: bytes) -> Any:
    """The message of this opcode and body, or a WireError that says what is wrong with it."""
    layout = BY_OPCODE.get(opcode)
    if layout is None:
        raise WireError(f"opcode {opcode:#x} is not in the table")
    if layout.fixed is not None:
        if len(body) != layout.fixed.size:
            raise WireError(f"{layout.cls.__name__} has {len(body)} bytes, it should have {layout.fixed.size}")
        return layout.cls(*layout.fixed.unpack(body))
    if layout.tail is not None and len(body) >= layout.tail.size:
        *head, size = layout.tail.unpack_from(body)
        if size == len(body) - layout.tail.size and size <= BLOB_BYTES_MAX:
            return layout.cls(*head, body[layout.tail.size :])
    offset = 0
    fields: list[Any] = []
    for name, kind in zip(layout.names, layout.types, strict=True):
        try:
            field, offset = _decode_field(kind, body, offset)
        except (struct.error, UnicodeDecodeError, WireError) as error:
            raise WireError(f"{layout.cls.__name__}.{name}: {error}") from None
        fields.append(field)
    if offset != len(body):
        raise WireError(f"{layout.cls.__name__} has {len(body) - offset} bytes too many")
    return layout.cls(*fields)


def pack(value: Any) -> bytes:
    """A message as one datagram, for mailboxes: they keep boundaries and order, and both ends are ours."""
    opcode, body = encode(value)
    return bytes([opcode]) + body


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return decode(data[0], data[1:])


def _decode_field(kind: str, body: bytes, offset: int) -> tuple[Any, int]:
    if kind in FIXED:
        code = "<" + FIXED[kind]
        (field,) = struct.unpack_from(code, body, offset)
        if kind == "flag":
            if field > 1:
                raise WireError(f"a flag is 0 or 1, not {field}")
            field = bool(field)
        return field, offset + struct.calcsize(code)
    (size,) = struct.unpack_from("<H", body, offset)
    offset += 2
    if size > SIZED[kind]:
        raise WireError(f"{size} bytes, at most {SIZED[kind]} are allowed")
    data = body[offset : offset + size]
    if len(data) != size:
        raise WireError(f"{size} bytes announced, {len(data)} there")
    return (data.decode() if kind == "text" else data), offset + size


def cut_text(text: str, most: int = TEXT_BYTES_MAX) -> bytes:
    """UTF-8 of at most so many bytes, cut between characters and marked as cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return data
    return data[: most - 3].decode("utf-8", "ignore").encode() + b"..."
