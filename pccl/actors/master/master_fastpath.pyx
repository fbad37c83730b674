# cython: language_level=3, auto_pickle=False
"""The short way of a message through the master: from the connection it came on to those that are answered on.

What is said becomes an event, the machine is asked, and what it wants to be sent is sent. That is all that happens for
nearly every message, four times for a reduce of two peers, and always just after a sleep, when nothing of it is in any
cache: so it is compiled, and as short as can be. Everything rare (to log, to dismiss, to save, to search) is the
business of whoever derives from this, through `_perform`. Nothing is decided here.
"""

from pccl._core.master.master_state cimport MasterState
from pccl._core.system.futex cimport now_ns
from pccl.actors.io.connection cimport Connection
from pccl.actors.io.loop cimport Loop
from pccl._core.master.events import PeerSaid, SendTo
from pccl._core.protocol.messages import Beat


cdef class Answering:
    """A machine, the loop that wakes it, and the connections of those it knows."""

    def __init__(self, MasterState state not None, Loop loop not None):
        self.state = state
        self.loop = loop
        self._connections = {}

    def _heard(self, number, message):
        """Somebody known has said something."""
        self.feed(PeerSaid(number, message))
        if type(message) is not Beat:
            self.loop.expect()  # who votes does not vote alone

    def _feed(self, event):
        """Anything else has happened."""
        self.feed(event)

    cdef int feed(self, event) except -1:
        cdef Connection connection
        for action in self.state.handle(event, now_ns()):
            if type(action) is SendTo:
                connection = self._connections.get(action.conn)
                if connection is not None:
                    connection.send(action.message)
            else:
                self._perform(action)
        return 0

    def _perform(self, action):
        """Whatever else the machine may ask for."""
        raise TypeError(f"the master cannot perform {action!r}")

    def _deadline(self):
        """When the machine wants to be woken, or the oldest stranger's time is up; there is hardly ever one."""
        if self._door.strangers:
            return min(self.state.next_deadline_ns, self._door.next_deadline_ns)
        return self.state.next_deadline_ns
