# Contents of `feeding`: the part of a peer actor that every reduce passes through.

from pccl._core.peer.peer_state cimport PeerState
from pccl.actors.io.connection cimport Connection
from pccl.actors.io.loop cimport Loop, Watcher
from pccl.memory.completion_slots cimport SlotTable

from .op_runner cimport OpRunner


cdef enum:
    MAIL_BYTES_MAX = 1 << 16            # larger than any message between a training process and its actor
    ANCILLARY_BYTES = 64                # room for the one descriptor that a message may bring along


cdef class Feeding(Watcher):
    cdef readonly Loop loop
    cdef readonly SlotTable slots       # where calls are completed
    cdef readonly object mailbox        # to the training process
    cdef int mailbox_fd
    cdef public PeerState state         # made by the first call, which brings the options
    cdef public Connection master       # None while there is none
    cdef public OpRunner reducing       # operations that have commenced
    cdef public dict windows            # (slot, sequence) -> the window that looks up when that call has ended
    cdef public object door             # who turns strangers away, or None before there is a port
    cdef public long long rhythm_ns     # how often the caller wants to see a beat
    cdef object fault                   # the planned mishap, normally None
    cdef char mail[MAIL_BYTES_MAX]
    cdef char ancillary[ANCILLARY_BYTES]

    cpdef feed(self, event)
    cdef visit(self, action)
    cdef complete(self, action)
