# What the master knows beside membership, rings and their optimisation; the bodies are in master_state.pyx.

from .optimizing cimport Optimizing

cdef class MasterState(Optimizing):
    cdef readonly long long next_deadline_ns  # when the machine wants its next Tick
    cdef readonly object story          # the latest events and actions
    cdef long long beat_ns              # when the master last sent its own heartbeats
    cdef bint checking                  # run check() after each event
    cdef readonly bint held             # the topology vote is unanimous, but every voter waits for a larger group
    cdef bint stopped                   # the latest sweep came so late that it judged nobody

    cdef list _handle(self, event, long long now_ns)
