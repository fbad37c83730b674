# cython: language_level=3
"""The codec of the message table: how a record of typed fields becomes bytes and comes back.

A message is declared once, in `hellos`, `messages` or `mailbox`: its opcode, its direction, and its fields by type.
Encoder, decoder, size limit, documentation table, golden bytes and fuzzing all derive from that declaration. The
largest size of a message follows from its fields, so framing can refuse a length before it allocates anything.

Decoding trusts nothing: a short body, a long body, bad UTF-8, or a flag that is neither 0 nor 1 is a `CodecError`.
No I/O, no clock. Frames (header, checksum, version) are in `framing`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from pccl._core.records cimport blank, fields_of, get as get_field, put as put_field
from pccl._core.records import record

PROTOCOL_VERSION = 2  # one number for everything: peers of different versions refuse each other at the first frame
TEXT_BYTES_MAX = 768  # reasons and host names; a longer reason is cut, because only people read it
BLOB_BYTES_MAX = 8192  # lists: of addresses, options, operations; no message of a handshake has one

# Field types of fixed size, by their number of bytes.
FIXED = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "flag": 1, "bytes16": 16, "bytes32": 32}
# Field types with a length in front, by their largest number of bytes.
SIZED = {"text": TEXT_BYTES_MAX, "blob": BLOB_BYTES_MAX}

# Field types that are not listed here are numbers.
cdef dict KINDS = {"flag": FLAG, "bytes16": BYTES, "bytes32": BYTES, "text": TEXT, "blob": BLOB}


class CodecError(ValueError):
    """A body that does not parse as the message its opcode names."""


cdef class MessageFormat:
    """How one message class is encoded: its opcode, its fields, and the largest body."""

    def __init__(self, cls, opcode, direction):
        self.cls = cls
        self.opcode = opcode
        self.direction = direction
        self.names = cls.__match_args__
        self.types = tuple([str(cls.__annotations__[name]) for name in self.names])
        self.count = len(self.names)
        if self.count > MESSAGE_FIELDS_MAX:
            raise ValueError(f"{cls.__name__} has {self.count} fields, a message may have {MESSAGE_FIELDS_MAX}")
        self.fields = fields_of(cls)
        for i, kind in enumerate(self.types):
            self.kinds[i] = KINDS.get(kind, NUMBER)
            self.sizes[i] = FIXED.get(kind) or SIZED[kind]
            self.limit += self.sizes[i] + (0 if kind in FIXED else LENGTH_BYTES)
            self.least += self.sizes[i] if kind in FIXED else LENGTH_BYTES


BY_OPCODE = {}
BY_CLASS = {}
cdef dict by_opcode = BY_OPCODE         # the same two, without a lookup by name
cdef dict by_class = BY_CLASS


def message(opcode, direction):
    """Declare a message: a frozen record that has an opcode and a format."""

    def declare(cls):
        frozen = record(cls)
        form = MessageFormat(frozen, opcode, direction)
        if opcode in BY_OPCODE:
            raise ValueError(f"opcode {opcode:#x} is {BY_OPCODE[opcode].cls.__name__}, it cannot be {cls.__name__} too")
        BY_OPCODE[opcode] = BY_CLASS[frozen] = form
        return frozen

    return declare


def limits(*classes):
    """Opcode to largest body, for the messages that are legal on a connection."""
    return {BY_CLASS[cls].opcode: BY_CLASS[cls].limit for cls in classes}


# --- to bytes -------------------------------------------------------------------------------------------------


cdef bytes encode_behind(value, size_t room, uint8_t *opcode):
    cdef MessageFormat form = by_class[type(value)]
    opcode[0] = form.opcode
    return encode_after(form, value, room)


def encode(value):
    """The opcode and the body of a message."""
    cdef MessageFormat form = by_class[type(value)]
    return form.opcode, encode_after(form, value, 0)


def pack(value):
    """A message as one datagram, for mailboxes, which keep boundaries and order; both ends are processes of pccl."""
    cdef MessageFormat form = by_class[type(value)]
    cdef bytes data = encode_after(form, value, 1)
    PyBytes_AS_STRING(data)[0] = <char> form.opcode
    return data


cdef bytes encode_after(MessageFormat form, value, size_t room):
    # The body, with `room` free bytes in front of it.
    cdef size_t i, length = room + form.least
    cdef list fields = [None] * form.count
    for i in range(form.count):
        field = get_field(value, form.fields.offsets[i])
        if form.kinds[i] >= BYTES:
            field = as_bytes(form, i, field)
            if form.kinds[i] != BYTES:
                length += PyBytes_GET_SIZE(field)
        fields[i] = field
    cdef bytes built = PyBytes_FromStringAndSize(NULL, length)
    cdef uint8_t *at = <uint8_t *> PyBytes_AS_STRING(built) + room
    for i in range(form.count):
        at = put(form, i, fields[i], at)
    return built


cdef bytes as_bytes(MessageFormat form, size_t i, field):
    cdef bytes data = cut_text(field) if form.kinds[i] == TEXT else field if type(field) is bytes else bytes(field)
    cdef size_t size = PyBytes_GET_SIZE(data)
    if size > form.sizes[i] or form.kinds[i] == BYTES and size < form.sizes[i]:
        raise ValueError(f"{form.cls.__name__}.{form.names[i]} has {size} bytes, the message takes {form.sizes[i]}")
    return data


cdef uint8_t *put(MessageFormat form, size_t i, field, uint8_t *at) except NULL:
    cdef uint64_t number
    cdef size_t size
    if form.kinds[i] == NUMBER:
        number = field
        if form.sizes[i] < 8 and number >> (8 * form.sizes[i]):
            raise OverflowError(f"{form.cls.__name__}.{form.names[i]} is {number}, more than {form.types[i]} holds")
        return store(at, number, form.sizes[i])
    if form.kinds[i] == FLAG:
        return store(at, 1 if field else 0, 1)
    size = PyBytes_GET_SIZE(field)
    if form.kinds[i] != BYTES:
        at = store(at, size, LENGTH_BYTES)
    memcpy(at, PyBytes_AS_STRING(field), size)
    return at + size


cdef inline uint8_t *store(uint8_t *at, uint64_t number, size_t size) noexcept nogil:
    cdef size_t i
    for i in range(size):
        at[i] = (number >> (8 * i)) & 0xFF
    return at + size


# --- and back -------------------------------------------------------------------------------------------------


cpdef decode(opcode, bytes body):
    """The message of this opcode and body. Raises CodecError, which says what is wrong with it."""
    return decode_from(opcode, body, 0)


cpdef unpack(bytes data):
    """The inverse of `pack`."""
    return decode_from(data[0] if data else 0, data, 1)


cdef decode_from(opcode, bytes data, size_t begin):
    if data is None:
        raise TypeError("a message is bytes, not None")
    cdef MessageFormat form = by_opcode.get(opcode)
    if form is None:
        raise CodecError(f"opcode {opcode:#x} is not in the table")
    cdef const uint8_t *body = <const uint8_t *> PyBytes_AS_STRING(data) + begin
    cdef size_t length = PyBytes_GET_SIZE(data) - begin
    cdef size_t i, size, offset = 0
    value = blank(form.cls)
    for i in range(form.count):
        size = form.sizes[i]
        if form.kinds[i] >= TEXT:
            size = announced(form, i, body, offset, length)
            offset += LENGTH_BYTES
        if size > length - offset:
            raise broken(form, i, f"{size} bytes announced, {length - offset} there")
        put_field(value, form.fields.offsets[i], take(form, i, body + offset, size))
        offset += size
    if offset != length:
        raise CodecError(f"{form.cls.__name__} has {length - offset} bytes too many")
    return value


cdef size_t announced(MessageFormat form, size_t i, const uint8_t *body, size_t offset, size_t length) except? 0:
    if length - offset < LENGTH_BYTES:
        raise broken(form, i, "its length is cut")
    cdef size_t size = load(body + offset, LENGTH_BYTES)
    if size > form.sizes[i]:
        raise broken(form, i, f"{size} bytes, at most {form.sizes[i]} are allowed")
    return size


cdef take(MessageFormat form, size_t i, const uint8_t *at, size_t size):
    if form.kinds[i] == NUMBER:
        return load(at, size)
    if form.kinds[i] == FLAG:
        if at[0] > 1:
            raise broken(form, i, f"a flag is 0 or 1, not {at[0]}")
        return at[0] == 1
    cdef bytes data = at[:size]
    if form.kinds[i] != TEXT:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise broken(form, i, str(error)) from None


cdef inline uint64_t load(const uint8_t *at, size_t size) noexcept nogil:
    cdef uint64_t number = 0
    cdef size_t i
    for i in range(size):
        number |= <uint64_t> at[i] << (8 * i)
    return number


cdef broken(MessageFormat form, size_t i, str what):
    return CodecError(f"{form.cls.__name__}.{form.names[i]}: {what}")


def cut_text(str text not None, Py_ssize_t most=TEXT_BYTES_MAX):
    """Encode as UTF-8 of at most `most` bytes; a longer text is cut between characters and marked with dots."""
    cdef bytes data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return data
    return data[: most - 3].decode("utf-8", "ignore").encode() + b"..."
