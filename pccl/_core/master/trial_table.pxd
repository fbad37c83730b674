# The trials of newcomers; the bodies are in trial_table.pyx.

from .membership cimport Membership

cdef class Trial:
    cdef readonly object source         # the peer that dials
    cdef readonly object target         # the peer that is dialled
    cdef readonly str outcome           # UNKNOWN, SHOWN, FAILED or OVERDUE
    cdef readonly str reason            # why it failed
    cdef readonly bint under_way        # a report is awaited
    cdef readonly long long ended_ns    # when the report came
    cdef readonly long long until_ns    # when the report is overdue, or when the outcome is too old

cdef class TrialTable:
    cdef Membership members             # peers and rings
    cdef readonly dict trials           # (source, target) -> Trial; a newcomer is at one end
    cdef dict touching                  # peer id -> the keys of its trials
    cdef long long patience_ns          # how long a trial may take
    cdef long long expiry_ns            # how long its outcome is used

    cdef Trial get(self, source, target)
    cdef bint is_shown(self, source, target) except -1
    cdef list of(self, peer_id)
    cdef int want(self, source, target) except -1
    cdef int _begin(self, Trial trial) except -1
    cdef bint end(self, Trial trial, str reason) except -1
    cdef int forget(self, Trial trial) except -1
    cdef list sweep(self)
