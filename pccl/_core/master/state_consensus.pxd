# A group's consensus on its shared state; the bodies are in state_consensus.pyx.

cdef class Transfer:
    cdef readonly object round           # its number: grows by one, never used again
    cdef readonly object revision        # what is agreed when it is done
    cdef readonly bytes content
    cdef readonly bytes schema
    cdef readonly dict votes             # peer that takes part and has no answer yet -> its vote
    cdef readonly set sources            # peers that can still be fetched from
    cdef readonly set fetching           # peers that have not said that they hold the state
    cdef readonly dict divergent         # divergent members that it overwrites -> their votes
    cdef readonly dict endpoints         # peer that takes part, or did -> where it can be dialled
    cdef readonly dict stranded          # peer that fetches and has no source left -> why

cdef class StateConsensus:
    cdef readonly object number          # the peer group's
    cdef public object revision          # what was agreed last; NEVER before the first time
    cdef public bytes content            # the digest of that state
    cdef public bytes schema             # and of its schema
    cdef readonly object author          # the peer that agreed on all states alone; None if others agreed too
    cdef readonly dict votes             # peer -> its vote, until it is decided
    cdef readonly dict schemas           # digest -> the schema, if it had to be asked for
    cdef readonly dict asked             # digest -> (peer that was asked for that schema, pages so far)
    cdef readonly Transfer transfer      # under way, or None
    cdef readonly set synced             # members that have completed a sync
    cdef readonly list overwritten       # (divergent member, its revision, agreed revision) since `settle`
    cdef readonly object latest          # number of the latest transfer
    cdef list outbox                     # (peer, message) of the event being handled

    cpdef str phase(self)
    cpdef bint holds(self, peer) except -1
    cpdef bint is_idle(self) except -1

    cdef _lose_part(self, peer)
    cdef bint _know_schemas(self)
    cdef _ask(self, bytes schema)
    cdef dict _decide(self, dict peers, str run)
    cdef _forget_vote(self)
    cdef _begin_transfer(self, decision, bytes schema, dict peers)
    cdef _answer_all(self, dict votes, int result, str reason)
    cdef bint _complete_transfer(self, dict kicks)
    cdef _agree(self, Transfer transfer)
    cdef _appoint(self, heirs)
