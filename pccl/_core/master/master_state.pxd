# What the master knows beside membership, rings and what groups do; the bodies are in master_state.pyx.

from .group_affairs cimport Affairs
from .roster cimport Peer

cdef class MasterState(Affairs):
    cdef readonly long long next_deadline_ns  # when the machine wants its next Tick
    cdef readonly object story          # the latest events and actions
    cdef object append_story            # its method, which every event needs
    cdef long long beat_ns              # when the master last sent its own heartbeats
    cdef bint checking                  # run check() after each event
    cdef readonly bint held             # the topology vote is unanimous, but every voter waits for a larger group
    cdef bint stopped                   # the latest sweep came so late that it judged nobody

    cpdef list handle(self, event, long long now_ns)
    cdef list _handle(self, event, long long now_ns)
    cdef int _hear(self, Peer peer, message) except -1

    # What follows from an event, as far as it can go.
    cdef int _settle(self) except -1
    cdef bint _close_round(self) except -1
    cdef int _open_round(self) except -1
    cpdef bint _round_is_ripe(self) except -1
    cdef int _answer_pending(self) except -1
