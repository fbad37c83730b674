# What the parts of a peer's machine share while one event is handled; the bodies are in outbox.pyx.

cdef class Outbox:
    cdef readonly list actions            # of the event being handled, in the order in which they are performed
    cdef readonly long long now_ns        # when that event happened

    cdef list open(self, long long now_ns)
