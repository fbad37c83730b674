# Contents of `reduce_request`: the checked arguments of a reduce, and a reduce between its launch and its outcome.

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t

from pccl._core.protocol.operations cimport PackedNumbers, PackedOperation
from pccl.memory.arena cimport Arena, Piece
from pccl.memory.completion_slots cimport Slot

from .call_slots cimport CallSlots


# The checked arguments of a reduce. It holds both tensors.
cdef class ReduceRequest:
    cdef readonly object tag
    cdef readonly uint64_t elements
    cdef object sent                # the tensor that is sent; it keeps its memory alive
    cdef object received            # the tensor for the result; it may be the same
    cdef uintptr_t source           # address of the tensor that is sent
    cdef uintptr_t target           # address of the tensor for the result
    cdef uint32_t itemsize          # bytes of an element
    cdef bint on_device             # in the memory of a GPU
    cdef uint8_t datatype
    cdef uint8_t op
    cdef uint8_t algorithm          # of quantization; 0: none
    cdef uint8_t quantized          # datatype of the codes; 0 without quantization


# A reduce between its launch and its outcome.
cdef class PendingReduce:
    cdef readonly Slot slot
    cdef readonly object tag
    cdef readonly bint over         # it has succeeded or failed
    cdef ReduceRequest request
    cdef uint64_t nbytes
    cdef readonly Piece _staging    # the copy of a tensor that is not in shared memory
    cdef Piece backup               # of a tensor that is reduced in place
    cdef Piece area                 # of a quantized reduce
    cdef uint32_t send_segment
    cdef uint64_t send_offset
    cdef uint32_t recv_segment
    cdef uint64_t recv_offset

    # Before the launch
    cdef int prepare(self, Slot slot, ReduceRequest request, uint32_t world) except -1
    cdef int find_memory(self, uint32_t world) except -1
    cdef int copy_in(self) except -1
    cdef int share(self, CallSlots calls, str name) except -1
    cdef int fill(self, PackedOperation *packed) except -1
    cdef Py_ssize_t write(self, char *room) except -1
    cdef int post(self, CallSlots calls, str name) except -1

    # After it
    cdef hand_over(self, bytes payload, PackedNumbers *numbers)
    cpdef fail(self)
    cpdef release(self)
    cdef int copy_out(self) except -1
