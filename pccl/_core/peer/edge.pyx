# cython: language_level=3
"""One edge of the ring as its owner sees it: a peer on the other side and a row of lanes, each with its connection.

An edge is named by the peer and by the epoch in which the master ordered it; both ends hold the same name, so a
connection that arrives late, early or twice is told apart without guessing. Part of the peer's machine; pure.
"""


cdef class Lane:
    """One connection of an edge, from the first dial until it is handed to a worker."""

    def __init__(self, Edge edge, index):
        self.edge = edge
        self.index = index
        self.link = 0
        self.state = ABSENT
        self.attempts = 0
        self.deadline_ns = 0


cdef class Edge:
    """The way to the next peer (`sends`) or from the previous one."""

    def __init__(self, sends, peer, epoch, lanes, host="", port=0):
        self.sends = sends
        self.peer = peer
        self.epoch = epoch
        self.host = host
        self.port = port
        self.lanes = [Lane(self, index) for index in range(lanes)]

    def is_up(self):
        """Whether every lane is in a worker's hands."""
        cdef Lane lane
        for lane in self.lanes:
            if lane.state is not UP:
                return False
        return True

    def matches(self, peer, epoch, lanes):
        """Whether this is the edge that an order means."""
        return self.peer == peer and self.epoch == epoch and len(self.lanes) == lanes


ABSENT = "absent"  # no connection yet
DIALLING = "dialling"  # the shell connects and proves itself
PAUSED = "paused"  # a dial failed; the next one is due at the deadline
UP = "up"  # a worker serves it
