# Contents of `reducing`: the operations of one peer, from commence to verdict.

cdef class OpRunner:
    cdef object _loop
    cdef object _lanes
    cdef object _feed                    # what is told to the machine
    cdef object _waiting                 # a deque of BeginOperation: commenced, not yet on a board
    cdef dict _running                   # sequence -> the crew whose board it is on
    cdef dict _aborting                  # the same, of those whose workers are asked to let go
    cdef bint _calling                   # workers were called to see whether they answer
    cdef object _sent                    # payload of crews that are gone
    cdef object _received

    cpdef begin(self, action)
    cpdef end(self, sequence)
    cpdef look(self)

    cdef _put_up(self)
    cdef _became_quiet(self, sequence, crew)
    cdef _call_workers(self)
