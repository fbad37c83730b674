# cython: language_level=3, auto_pickle=False
"""One reduce as its caller asked for it, and what all members must pass alike before it can begin.

An *operation* is what the training process hands to its actor: which completion slot waits for it, what is reduced, and
where in shared memory. Its *signature* is the part that every member of the ring must pass alike; only that is sent to
the master, which compares the bytes without decoding them. Lists of both, and of the *pairs* that commence, are fixed
little-endian structures, one after the other, at most OPERATIONS_MAX to a message. Their fields are declared once, in
the `.pxd`: the client fills a structure in place, an `Operation` wraps one, and the board reads it.
A leaf: pure, and without the enums, whose import would slow down the start of the actors; a test compares the names.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcmp

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
    """What all members must pass alike for one tag."""

    tag: int
    count: int  # elements
    datatype: int
    op: int
    algorithm: int  # of quantization; 0: none
    quantized: int  # datatype of the codes; 0 without quantization

    def __str__(self):
        words = f"{self.count:,} x {name_of(DATATYPES, self.datatype)}, {name_of(OPS, self.op)}"
        if self.algorithm:
            algorithm = ALGORITHMS.get(self.algorithm, f"algorithm {self.algorithm}")
            words += f", quantized to {name_of(DATATYPES, self.quantized)} by {algorithm}"
        return words


@cython.final
@cython.freelist(16)
cdef class Operation:
    """One reduce of this peer: its completion slot, its signature, and the locations of its memory.

    Its arguments are the fields of `PackedOperation`, in that order or by name; a missing one is 0. Operations compare
    by content and cannot be changed.
    """

    def __init__(self, *values, **named):
        cdef dict fields = self.packed  # all zero
        if len(values) > len(fields) or not named.keys() <= fields.keys():
            raise TypeError(f"an Operation has the fields {', '.join(fields)}")
        fields.update(zip(list(fields), values))
        fields.update(named)
        self.packed = fields

    @property
    def slot(self):
        """The completion slot that the caller waits for."""
        return self.packed.slot

    @property
    def generation(self):
        """The generation of that slot."""
        return self.packed.generation

    @property
    def tag(self):
        """The number with which the user names the reduce."""
        return self.packed.tag

    @property
    def signature(self):
        """What the other members must pass alike."""
        return make_signature(signature_of(&self.packed))

    def __getattr__(self, name):
        cdef dict fields = self.packed
        if name not in fields:
            raise AttributeError(f"an Operation has no {name}")
        return fields[name]

    def __eq__(self, other):
        if type(other) is not Operation:
            return NotImplemented
        return memcmp(&self.packed, &(<Operation> other).packed, sizeof(PackedOperation)) == 0

    def __hash__(self):
        return hash((<const char *> &self.packed)[:sizeof(PackedOperation)])

    def __repr__(self):
        cdef dict fields = self.packed
        return f"Operation({', '.join([f'{name}={value}' for name, value in fields.items()])})"


cdef inline const PackedSignature *signature_of(const PackedOperation *packed) noexcept:
    """The signature inside an operation: the same fields in the same order, and no gaps in either."""
    return <const PackedSignature *> &packed.tag


cdef make_signature(const PackedSignature *packed):
    return ReduceSignature(
        packed.tag, packed.count, packed.datatype, packed.op, packed.algorithm, packed.quantized
    )


# --- operations -------------------------------------------------------------------------------------------------


def pack_operations(operations):
    """Pack operations for the mailbox."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(operations) * sizeof(PackedOperation))
    cdef PackedOperation *packed = <PackedOperation *> PyBytes_AS_STRING(data)
    cdef Operation operation
    for operation in operations:
        packed[0] = operation.packed
        packed += 1
    return data


cpdef list unpack_operations(bytes data):
    """The inverse of `pack_operations`. Raises ValueError if the bytes are no list of operations."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedOperation), "operations")
    cdef const PackedOperation *packed = <const PackedOperation *> PyBytes_AS_STRING(data)
    cdef list operations = []
    cdef Operation operation
    for i in range(count):
        operation = Operation.__new__(Operation)
        operation.packed = packed[i]
        operations.append(operation)
    return operations


# --- signatures -------------------------------------------------------------------------------------------------


cpdef bytes pack_signatures(signatures):
    """Pack signatures, or the signatures of operations, for the master."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(signatures) * sizeof(PackedSignature))
    cdef PackedSignature *packed = <PackedSignature *> PyBytes_AS_STRING(data)
    for one in signatures:
        if type(one) is Operation:
            packed[0] = signature_of(&(<Operation> one).packed)[0]
        else:
            packed.tag, packed.count = one.tag, one.count
            packed.datatype, packed.op = one.datatype, one.op
            packed.algorithm, packed.quantized = one.algorithm, one.quantized
        packed += 1
    return data


def unpack_signatures(bytes data):
    """The inverse of `pack_signatures`. Raises ValueError if the bytes are no list of signatures."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedSignature), "signatures")
    cdef const PackedSignature *packed = <const PackedSignature *> PyBytes_AS_STRING(data)
    return [make_signature(packed + i) for i in range(count)]


cpdef list split_signatures(bytes data):
    """(tag, packed signature) of each: equal signatures are equal bytes. Raises as `unpack_signatures`."""
    cdef Py_ssize_t i, count = count_of(data, sizeof(PackedSignature), "signatures")
    cdef const PackedSignature *packed = <const PackedSignature *> PyBytes_AS_STRING(data)
    if count == 1:
        return [(packed.tag, data)]
    return [(packed[i].tag, (<const char *> (packed + i))[:sizeof(PackedSignature)]) for i in range(count)]


# --- pairs ------------------------------------------------------------------------------------------------------


cpdef bytes pack_pairs(pairs):
    """Pack (tag, sequence) pairs: each tag commences under its sequence."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, len(pairs) * sizeof(PackedPair))
    cdef PackedPair *packed = <PackedPair *> PyBytes_AS_STRING(data)
    for tag, sequence in pairs:
        packed.tag, packed.sequence = tag, sequence
        packed += 1
    return data


cpdef list unpack_pairs(bytes data):
    """The inverse of `pack_pairs`. Raises ValueError if the bytes are no list of pairs."""
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
