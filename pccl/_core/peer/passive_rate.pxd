# What a peer has seen of the edge from the previous one; the bodies are in metering.pyx.

cdef class PassiveRate:
    cdef long long running               # reduces under way
    cdef long long since_ns              # when the first of them began
    cdef long long busy_ns               # in which at least one ran, before that
    cdef long long received              # payload
    cdef long long network_ns            # receivers waited in the middle of frames
    cdef long long spent_ns              # receivers waited or added, in all

    cpdef reset(self)
    cpdef began(self, long long count, long long now_ns)
    cpdef ended(self, event, long long now_ns)
