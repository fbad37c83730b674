# cython: language_level=3
"""What the master keeps of one peer. Part of the master's machine; pure."""

from pccl.options import LANES_MAX

REGISTERED = "registered"  # through the door, waiting for a round
ACCEPTED = "accepted"  # a member

cdef long long RATE_NS_MIN = 50_000_000  # bytes are divided by no shorter time than this


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
        self.tx_rate = self.rx_rate = 0.0
        self.mark = now_ns, 0, 0

    def moved(self, tx_bytes, rx_bytes, long long now_ns):
        """A heartbeat says what its lanes have moved so far."""
        cdef long long mark_ns
        self.tx_bytes, self.rx_bytes = tx_bytes, rx_bytes
        mark_ns, tx_mark, rx_mark = self.mark
        # Beats that were held up arrive together: their distance says nothing.
        if now_ns - mark_ns >= RATE_NS_MIN:
            self.tx_rate = max(tx_bytes - tx_mark, 0) * 1e9 / (now_ns - mark_ns)
            self.rx_rate = max(rx_bytes - rx_mark, 0) * 1e9 / (now_ns - mark_ns)
            self.mark = now_ns, tx_bytes, rx_bytes
