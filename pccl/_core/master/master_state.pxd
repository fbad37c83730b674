# The parts of the master's machine and the class that joins them; the bodies are in master_state.pyx.

from .admission cimport Admission
from .ballots cimport Ballots
from .group_dispatch cimport GroupDispatch
from .membership cimport Membership, Peer
from .optimizer cimport Optimizer
from .runs cimport Runs
from .topology_round cimport TopologyRound

cdef class MasterState:
    cdef readonly Membership members    # peers and rings
    cdef readonly Ballots ballots       # votes of all members
    cdef readonly dict votes            # `ballots.votes`: call name -> {peer id: Vote}
    cdef readonly Optimizer optimizer   # of the rings
    cdef readonly Admission admission   # newcomers and their places
    cdef readonly TopologyRound topology_round  # admits newcomers
    cdef readonly Runs runs             # begins and finishes runs
    cdef GroupDispatch dispatch         # passes messages of members to their group
    cdef dict handlers                  # phase -> type of a message or event -> the method that handles it
    cdef object wait_watch              # reports long waits
    cdef readonly object options
    cdef readonly long long next_deadline_ns  # when the machine wants its next Tick
    cdef readonly object story          # the latest events and actions
    cdef object append_story            # its append method, which every event needs
    cdef long long beat_ns              # when the master last sent its own heartbeats
    cdef bint checking                  # run check() after each event
    cdef bint stopped                   # the latest sweep came so late that it kicked no peer

    cpdef list handle(self, event, long long now_ns)
    cdef list _handle(self, event, long long now_ns)
    cdef int _hear(self, Peer peer, message) except -1

    # Everything that follows from an event.
    cdef int _settle(self) except -1
    cdef int _answer_pending(self) except -1
