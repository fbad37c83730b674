# cython: language_level=3, auto_pickle=False
"""The fast path of the master: from the connection on which a message came to the connections that get the answers.

A message becomes an event for the machine, and the messages that the machine returns are sent. Nearly every message
needs nothing else. It happens four times in a reduce of two peers, and always just after a sleep, when no cache holds
this code: so it is compiled and short. The actor owns this object; every rare action (log, dismiss, save, search) goes
to the callback that the actor gave. This module decides nothing.
"""

from pccl._core.master.master_state cimport MasterState
from pccl._core.system.futex cimport now_ns
from pccl.actors.io.connection cimport Connection
from pccl.actors.io.loop cimport Loop
from pccl._core.master.events import PeerSaid, SendTo
from pccl._core.protocol.messages import Beat


cdef class MasterFastpath:
    """A machine, the loop that wakes it, and the connections of the peers that it knows."""

    cdef MasterState state                  # decides
    cdef Loop loop                          # wakes the actor
    cdef object perform                     # called with every action that is not a SendTo
    cdef readonly dict connections          # number -> Connection of a peer that the machine knows
    cdef public object trace                # called with every event and its actions, or None; the actor sets it
    cdef public object pending              # the PendingConnections of the listener; the actor sets it

    def __init__(self, MasterState state not None, Loop loop not None, perform):
        self.state = state
        self.loop = loop
        self.perform = perform
        self.connections = {}
        self.pending = self.trace = None

    def heard(self, number, message):
        """Take a message of a peer that the machine knows."""
        self.feed(PeerSaid(number, message))
        if type(message) is not Beat:
            self.loop.expect()  # other members vote at about the same time

    cpdef int feed(self, event) except -1:
        """Give the machine an event, and perform the actions that it returns."""
        cdef Connection connection
        cdef list actions = self.state.handle(event, now_ns())
        if self.trace is not None:
            self.trace(event, actions)
        for action in actions:
            if type(action) is SendTo:
                connection = self.connections.get(action.conn)
                if connection is not None:
                    connection.send(action.message)
            else:
                self.perform(action)
        return 0

    def deadline(self):
        """Return when the machine wants its next Tick, or when the oldest handshake times out."""
        if self.pending is not None and self.pending.connections:
            return min(self.state.next_deadline_ns, self.pending.next_deadline_ns)
        return self.state.next_deadline_ns
