# Contents of `codec`: how a record of typed fields becomes bytes and comes back.

from libc.stdint cimport uint8_t

from pccl._core.records cimport Fields


cdef enum FieldKind:                              # the kind of a field; its size is kept apart
    NUMBER
    FLAG
    BYTES
    TEXT
    BLOB

cdef enum:
    MESSAGE_FIELDS_MAX = 16             # of one message
    LENGTH_BYTES = 2                    # in front of a text or blob


cdef class MessageFormat:
    cdef readonly object cls
    cdef readonly uint8_t opcode
    cdef readonly str direction
    cdef readonly tuple names           # of the fields, in the order of their bytes
    cdef readonly tuple types           # of the fields, such as u32
    cdef readonly size_t limit          # the largest body
    cdef size_t least                   # the smallest body: all lengths zero
    cdef size_t count                   # of fields
    cdef Fields fields                  # where a record of the class holds them
    cdef FieldKind kinds[MESSAGE_FIELDS_MAX]
    cdef size_t sizes[MESSAGE_FIELDS_MAX]  # bytes of a fixed field, largest number of bytes of a sized one


# The body of a message, with `room` free bytes in front of it; its opcode is stored in `opcode`.
cdef bytes encode_behind(value, size_t room, uint8_t *opcode)
cpdef decode(opcode, bytes body)
cpdef unpack(bytes data)
