# Contents of `answering`: the short way of a message through the master.

from pccl._core.master.master_state cimport MasterState
from pccl.actors.io.loop cimport Loop


cdef class Answering:
    cdef readonly MasterState state         # decides
    cdef readonly Loop loop                 # wakes us
    cdef readonly dict _connections         # number -> Connection of somebody who is known to the machine
    cdef public object _door                # who turns strangers away

    cdef int feed(self, event) except -1
