# cython: language_level=3, auto_pickle=False
"""One reduce as its caller asked for it, and what members must agree on before it may begin.

An *operation* is what the training process hands to its actor: which completion slot waits for it, what is reduced, and
where in shared memory. Its *shape* is the part that every member of the ring must give alike; only that travels to the
master, which compares bytes and never needs to know what they mean. Lists of both, and of the *pairs* that commence, are
fixed little-endian structures, one after the other, at most OPERATIONS_MAX to a message. The `.pxd` has their layouts,
for whoever fills or reads one without a record. A leaf: pure, and without the enums, which would cost the actors their
quick start; a test holds the names together.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from pccl._core.records cimport Fields, blank, fields_of, get, put
from pccl._core.records import record

OPERATIONS_MAX = 64  # per message: several times what a loop keeps in flight, and a message of a few kilobytes

# By number, as in the public enums.
DATATYPES = (
    *("UINT8", "INT8", "INT16", "UINT16", "UINT32", "INT32", "UINT64", "INT64"),
    *("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"),
)
OPS = ("SUM", "AVG", "PROD", "MAX", "MIN")
ALGORITHMS = {1: "MIN_MAX", 2: "ZERO_POINT_SCALE", 100: "MIN_MAX_4BIT", 101: "ZERO_POINT_SCALE_4BIT"}


@record
class ReduceSignature:
    """What all members must give alike for one tag."""

    tag: int
    count: int  # elements
    datatype: int
    op: int
    algorithm: int  # of quantization; 0: none
    quantized: int  # datatype on the wire; 0 without quantization

    def __str__(self):
        words = f"{self.count:,} x {name_of(DATATYPES, self.datatype)}, {name_of(OPS, self.op)}"
        if self.algorithm:
            algorithm = ALGORITHMS.get(self.algorithm, f"algorithm {self.algorithm}")
            words += f", quantized to {name_of(DATATYPES, self.quantized)} by {algorithm}"
        return words


@record
class Operation:
    """One reduce of this peer: who waits for it, its shape, and where its memory lies."""

    slot: int
    sequence: int  # of the completion slot, not of the collective
    tag: int
    count: int
    datatype: int
    op: int
    algorithm: int
    quantized: int
    flags: int  # belong to the data plane
    send_segment: int
    send_offset: int
    recv_segment: int
    recv_offset: int
    backup_segment: int  # 0: none
    backup_offset: int
    area_segment: int = 0  # of a quantized reduce, where coded blocks wait to be sent on
    area_offset: int = 0

    @property
    def shape(self):
        """What the other members must give alike."""
        return ReduceSignature(self.tag, self.count, self.datatype, self.op, self.algorithm, self.quantized)



# --- operations -------------------------------------------------------------------------------------------------

cdef Fields fields = fields_of(Operation)


cdef int read_operation(operation, PackedOperation *packed) except -1:
    cdef Py_ssize_t *at = fields.offsets
    if type(operation) is not Operation:
        raise TypeError(f"expected an Operation, not {operation!r}")
    packed.slot, packed.sequence = get(operation, at[0]), get(operation, at[1])
    packed.tag, packed.count = get(operation, at[2]), get(operation, at[3])
    packed.datatype, packed.op = get(operation, at[4]), get(operation, at[5])
    packed.algorithm, packed.quantized = get(operation, at[6]), get(operation, at[7])
    packed.flags = get(operation, at[8])
    packed.send_segment, packed.send_offset = get(operation, at[9]), get(operation, at[10])
    packed.recv_segment, packed.recv_offset = get(operation, at[11]), get(operation, at[12])
    packed.backup_segment, packed.backup_offset = get(operation, at[13]), get(operation, at[14])
    packed.area_segment, packed.area_offset = get(operation, at[15]), get(operation, at[16])
    return 0


cdef make_operation(const PackedOperation *packed):
    cdef Py_ssize_t *at = fields.offsets
    operation = blank(Operation)
    put(operation, at[0], packed.slot)
    put(operation, at[1], packed.sequence)
    put(operation, at[2], packed.tag)
    put(operation, at[3], packed.count)
    put(operation, at[4], packed.datatype)
    put(operation, at[5], packed.op)
    put(operation, at[6], packed.algorithm)
    put(operation, at[7], packed.quantized)
    put(operation, at[8], packed.flags)
    put(operation, at[9], packed.send_segment)
    put(operation, at[10], packed.send_offset)
    put(operation, at[11], packed.recv_segment)
    put(operation, at[12], packed.recv_offset)
    put(operation, at[13], packed.backup_segment)
    put(operation, at[14], packed.backup_offset)
    put(operation, at[15], packed.area_segment)
    put(operation, at[16], packed.area_offset)
    return operation


def pack_operations(operations):
    """A list of operations for the mailbox."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(operations) * sizeof(PackedOperation))
    cdef PackedOperation *packed = <PackedOperation *> PyBytes_AS_STRING(data)
    for operation in operations:
        read_operation(operation, packed)
        packed += 1
    return data


cpdef list unpack_operations(bytes data):
    """The inverse of `pack_operations`. ValueError if that is no list of operations."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedOperation), "operations")
    cdef const PackedOperation *packed = <const PackedOperation *> PyBytes_AS_STRING(data)
    return [make_operation(packed + i) for i in range(count)]


# --- shapes -----------------------------------------------------------------------------------------------------


cpdef bytes pack_signatures(shapes):
    """The shapes of these, for the master; of operations too."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(shapes) * sizeof(PackedSignature))
    cdef PackedSignature *packed = <PackedSignature *> PyBytes_AS_STRING(data)
    for shape in shapes:
        packed.tag, packed.count = shape.tag, shape.count
        packed.datatype, packed.op = shape.datatype, shape.op
        packed.algorithm, packed.quantized = shape.algorithm, shape.quantized
        packed += 1
    return data


def unpack_signatures(bytes data):
    """The inverse of `pack_signatures`. ValueError if that is no list of shapes."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedSignature), "shapes")
    cdef const PackedSignature *packed = <const PackedSignature *> PyBytes_AS_STRING(data)
    return [
        ReduceSignature(
            packed[i].tag, packed[i].count, packed[i].datatype, packed[i].op, packed[i].algorithm, packed[i].quantized,
        )
        for i in range(count)
    ]


cpdef list split_signatures(bytes data):
    """(tag, packed shape) of each: equal shapes are equal bytes. ValueError as above."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedSignature), "shapes")
    cdef const PackedSignature *packed = <const PackedSignature *> PyBytes_AS_STRING(data)
    if count == 1:
        return [(packed.tag, data)]
    return [(packed[i].tag, (<const char *> (packed + i))[:sizeof(PackedSignature)]) for i in range(count)]


# --- pairs ------------------------------------------------------------------------------------------------------


cpdef bytes pack_pairs(pairs):
    """Which tag commences under which sequence number."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(pairs) * sizeof(PackedPair))
    cdef PackedPair *packed = <PackedPair *> PyBytes_AS_STRING(data)
    for tag, sequence in pairs:
        packed.tag, packed.sequence = tag, sequence
        packed += 1
    return data


cpdef list unpack_pairs(bytes data):
    """The inverse of `pack_pairs`. ValueError if that is no list of pairs."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedPair), "pairs")
    cdef const PackedPair *packed = <const PackedPair *> PyBytes_AS_STRING(data)
    return [(packed[i].tag, packed[i].sequence) for i in range(count)]


cdef Py_ssize_t count_of(bytes data, Py_ssize_t size, str what) except -1:
    cdef Py_ssize_t length = 0 if data is None else PyBytes_GET_SIZE(data)
    if length % size or not 1 <= length // size <= OPERATIONS_MAX:
        raise ValueError(f"{length} bytes are not 1 to {OPERATIONS_MAX} {what} of {size} bytes each")
    return length // size


cdef str name_of(tuple names, Py_ssize_t number):
    return names[number] if number < len(names) else f"unknown {number}"
