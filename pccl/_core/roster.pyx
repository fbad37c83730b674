# cython: language_level=3
"""What the master keeps of one peer. Part of the master's machine; pure."""

from pccl.options import LANES_MAX

REGISTERED = "registered"  # through the door, waiting for a round
ACCEPTED = "accepted"  # a member


cdef class Peer:
    """One control connection and what is known about who is behind it."""

    def __init__(self, peer_id, conn, register, host, now_ns):
        self.id = peer_id
        self.conn = conn
        self.group = register.group
        self.lanes = min(max(register.lanes, 1), LANES_MAX)
        self.host = register.host or host
        self.port = register.port
        self.phase = REGISTERED
        self.heard_ns = now_ns
        self.phase_ns = now_ns
        self.warned = False
        self.tx_bytes = self.rx_bytes = 0
