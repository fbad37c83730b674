# What a peer knows of its sync_shared_state; the bodies are in sync_machine.pyx.

from .outbox cimport Outbox

cdef class Sync:
    cdef readonly object call            # this peer's number for it, as the master knows it
    cdef readonly object slot            # where the caller waits, or waited before it was asked to describe its state
    cdef readonly object generation
    cdef readonly str phase              # see the table in sync_machine.pyx
    cdef readonly bint schema_wanted     # the master asked for the schema, and the manifest is not there yet
    cdef readonly object described       # the caller's CallManifest
    cdef readonly object order           # the master's Serve or Fetch; None: there is none
    cdef readonly tuple sources          # of a Fetch: peers that are still there, until it begins
    cdef readonly tuple ending           # (result, kind, payload or revision), as soon as it is known
    cdef object tx_bytes
    cdef object rx_bytes

cdef class SyncMachine:
    cdef readonly Sync sync              # under way, or None
    cdef bytes numbers                   # of the world, as the master told them last, packed
    cdef Outbox outbox
    cdef bint checking                   # whether every step is compared with the table

    cdef int _step(self, subject, argument) except -1
    cdef _ask_caller(self)
    cdef str _begin_transfer(self)
    cdef _finish(self, tuple ending)
