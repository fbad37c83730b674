# What a peer knows of its sync_shared_state; the bodies are in syncing.pyx.

cdef class Sync:
    cdef readonly object call            # this peer's number for it, as the master knows it
    cdef readonly object slot            # what the caller waits for; after KIND_DESCRIBE nothing, until it has described
    cdef readonly object sequence
    cdef readonly bint waiting           # somebody waits for that slot
    cdef readonly bint describing        # the caller was asked to describe its state, and has not done so
    cdef readonly object described       # its CallManifest
    cdef readonly bint schema_wanted     # the master asked for the layout, and nobody has sent it
    cdef readonly object order           # the master's Serve or Fetch; None: there is none
    cdef readonly tuple sources          # of a Fetch: who is still there, until it begins
    cdef readonly bint moving            # the shell was told of the order, and not of its end
    cdef readonly bint ended             # the shell was told to end it
    cdef readonly bint fetched           # this peer's memory holds the elected state
    cdef readonly bint failed            # no source is left; the master knows
    cdef readonly bint inherits          # it has fetched, and serves now
    cdef readonly tuple ending           # (result, kind, payload, or a revision), as soon as it is known
    cdef object tx_bytes
    cdef object rx_bytes

cdef class SyncMachine:
    cdef readonly Sync sync              # under way; None: nobody synchronises
    cdef bytes numbers                   # of the world, as the master told them last, packed
    cdef list actions                    # of the event being handled

    cdef begin(self, list actions)
    cdef _need_manifest(self)
    cdef _go_on(self)
    cdef _conclude(self, tuple ending)
    cdef _finish(self)
