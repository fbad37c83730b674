# The operations of one peer, from commence to verdict; the bodies are in op_runner.pyx.

cdef class OpRunner:
    cdef object _loop
    cdef object _lanes
    cdef object _feed                    # gives the machine an event
    cdef object _waiting                 # a deque of BeginOperation: commenced, not yet on a board
    cdef dict _running                   # sequence -> the worker set whose board it is on
    cdef dict _aborting                  # the same, for operations whose workers must let go
    cdef bint _calling                   # workers were called, and their answers are not checked yet
    cdef object _sent                    # payload bytes of worker sets that were killed
    cdef object _received

    cpdef begin(self, action)
    cpdef end(self, sequence)
    cpdef look(self)

    cdef _put_up(self)
    cdef _became_drained(self, sequence, worker_set)
    cdef _ask_workers(self)
