# The collectives of one group; the bodies are in collectives.pyx.

cdef class OpenReduce:
    cdef readonly object tag             # chosen by users
    cdef readonly long long began_ns     # when the first member initiated it
    cdef readonly dict signatures        # peer -> the signature it gave, packed
    cdef bytes first                     # the signature of the first vote
    cdef bint is_mixed                   # a vote differed from the first; it may be gone again
    cdef readonly dict awaiting          # peer -> since when its caller blocks

cdef class RunningReduce:
    cdef readonly object tag
    cdef readonly long long began_ns     # when the first member initiated it
    cdef readonly object sequence
    cdef readonly set members            # the ring when it commenced, without members that are gone
    cdef readonly set waiting            # members that have not finished
    cdef readonly set failed             # members that gave up and whose memory is drained; None before the first one
    cdef readonly str reason             # why the first member gave up; empty: none did

cdef class Collectives:
    cdef readonly object number          # the peer group's
    cdef readonly dict open              # tag -> OpenReduce
    cdef readonly dict running           # sequence -> RunningReduce
    cdef readonly list aborted           # Failures that are sent when the ring is wired
    cdef readonly dict held              # peer -> tags that it initiated and that have no verdict
    cdef readonly object latest          # sequence of the latest reduce that commenced
    cdef dict ripe                       # tags with new votes, in their order
    cdef list failures                   # Failures of the event being handled
    cdef list commenced                  # (tag, sequence) of the event being handled
    cdef list outbox                     # (peers, message) of the event being handled
    cdef dict odd                        # members that must be kicked -> reason; None: none
    cdef bint is_mixed                   # an open tag may be mixed

    # What members say.
    cpdef str initiate(self, peer, bytes signatures, long long now_ns=*)
    cpdef str finished(self, peer, sequence, bint ok, str reason)
    cdef str _had_no_part(self, peer, sequence)
    cdef int _succeed(self, RunningReduce run) except -1
    cdef int _member_failed(self, RunningReduce run, peer, str reason) except -1

    # What the master decides, and which members it tells.
    cdef bint decide(self, list ring, bint wired, bint ready) except -1
    cdef list tell(self, list ring, unsigned int epoch, tuple numbers)
    cdef dict take_odd(self)
    cdef dict _find_odd(self, list ring)
    cdef int _commence(self, list ring) except -1
    cdef int _tell_failures(self, tuple numbers) except -1

    cpdef bint holds(self, peer) except -1
