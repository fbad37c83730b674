# What a group's collectives consist of; the bodies are in collectives.pyx.

cdef class Tally:
    cdef readonly object tag             # chosen by users
    cdef readonly long long began_ns     # when the first member initiated it
    cdef readonly dict shapes            # peer -> the shape it gave, packed
    cdef readonly dict awaiting          # peer -> since when its caller blocks
    cdef public bint warned              # its long wait was reported

cdef class Running:
    cdef readonly object tag
    cdef readonly long long began_ns     # when the first member initiated it
    cdef readonly object sequence
    cdef readonly set members            # the ring when it commenced, without those who are gone
    cdef readonly set waiting            # members that have not finished
    cdef readonly set failed             # members that gave up and restored their memory
    cdef readonly str reason             # why the first one did; empty: nobody did

cdef class Collectives:
    cdef readonly object number          # the peer group's
    cdef readonly dict open              # tag -> Tally
    cdef readonly dict running           # sequence -> Running
    cdef readonly list aborted           # Failures that are told when the ring is wired
    cdef readonly dict held              # peer -> tags that it initiated and that have no verdict
    cdef readonly object latest          # sequence number of the latest that commenced
    cdef dict ripe                       # tags with new votes, in their order
    cdef list failures                   # Failures of the event being handled
    cdef list outbox                     # (peer, message) of the event being handled

    cdef _member_failed(self, Running run, peer, str reason)
    cdef list _commence(self, list ring)
    cdef _tell_failures(self, tuple numbers)
