# The votes of the calls that concern every member of the run; the bodies are in ballots.pyx.

cdef class Ballots:
    cdef readonly dict votes    # name of a call -> peer -> Vote
    cdef set warned             # names of calls whose long wait was reported

    cpdef str cast(self, str name, peer, vote)
    cpdef dict close(self, str name)
