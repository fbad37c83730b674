# cython: language_level=3
"""One operation as bytes, for the mailbox between a training process and its actor: its fields one after the other.

Here lives the layout and nothing else. Records go through `operations`; a launch of one reduce fills the structure where
its message is put together, since the training process waits for that.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcpy

OPERATION_BYTES = sizeof(Packed)


def pack_operation(
    slot, sequence, tag, count, datatype, op, algorithm, quantized, flags, send_segment, send_offset, recv_segment,
    recv_offset, backup_segment, backup_offset, area_segment, area_offset,
):
    """The fields of an `Operation` as bytes."""
    cdef Packed packed
    packed.slot = slot
    packed.sequence = sequence
    packed.tag = tag
    packed.count = count
    packed.datatype = datatype
    packed.op = op
    packed.algorithm = algorithm
    packed.quantized = quantized
    packed.flags = flags
    packed.send_segment = send_segment
    packed.send_offset = send_offset
    packed.recv_segment = recv_segment
    packed.recv_offset = recv_offset
    packed.backup_segment = backup_segment
    packed.backup_offset = backup_offset
    packed.area_segment = area_segment
    packed.area_offset = area_offset
    return (<char *> &packed)[:sizeof(Packed)]


def unpack_operation(bytes data not None, Py_ssize_t offset):
    """The fields of the `Operation` whose bytes begin there."""
    cdef Packed packed
    if not 0 <= offset <= PyBytes_GET_SIZE(data) - <Py_ssize_t> sizeof(Packed):
        raise ValueError(f"no operation at {offset} of {PyBytes_GET_SIZE(data)} bytes")
    memcpy(&packed, PyBytes_AS_STRING(data) + offset, sizeof(Packed))
    return (
        packed.slot, packed.sequence, packed.tag, packed.count, packed.datatype, packed.op, packed.algorithm,
        packed.quantized, packed.flags, packed.send_segment, packed.send_offset, packed.recv_segment,
        packed.recv_offset, packed.backup_segment, packed.backup_offset, packed.area_segment, packed.area_offset,
    )
