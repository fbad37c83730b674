# The short way of a message through the master; the bodies are in master_fastpath.pyx.

from pccl._core.master.master_state cimport MasterState
from pccl.actors.io.loop cimport Loop


cdef class MasterFastpath:
    cdef MasterState state                  # decides
    cdef Loop loop                          # wakes the actor
    cdef object perform                     # called with every action that is not a SendTo
    cdef readonly dict connections          # number -> Connection of a peer that the machine knows
    cdef public object door                 # callers that have not passed the handshake; the actor sets it

    cpdef int feed(self, event) except -1
