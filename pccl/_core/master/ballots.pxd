# The votes of the calls that concern every member of the run; the bodies are in ballots.pyx.

cdef class Ballots:
    cdef readonly dict votes    # name of a call -> peer -> Vote

    cpdef str cast(self, str name, peer, vote)
    cpdef dict close(self, str name)
