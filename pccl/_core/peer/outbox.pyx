# cython: language_level=3
"""The actions of the event that a peer's machine handles, and the time of that event.

The machine opens one outbox for each event, and every part of the machine appends its actions there. So actions leave
in the order in which they were decided, whichever part decided them. Nothing is decided here.
"""


cdef class Outbox:
    """Shared by all parts of one machine."""

    def __init__(self):
        self.actions = []
        self.now_ns = 0

    cdef list open(self, long long now_ns):
        # A new list, because the caller keeps the last one.
        self.actions = []
        self.now_ns = now_ns
        return self.actions
