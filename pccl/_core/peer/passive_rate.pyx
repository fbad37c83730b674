# cython: language_level=3
"""What the edge from the previous peer carried while reduces ran, as its target saw it.

The rate is what was received, by the time in which at least one reduce ran. The edge was the limit if the receivers
spent nearly all of that time in the middle of frames: then the source always had something to send. A receiver that
waits for the next frame to begin waits for others, further back in the ring. What was aborted tells nothing, and
neither does what is too little to tell a rate from the delay. Part of the peer's machine; pure.
"""


BYTES_MIN = 4 << 20  # below it votes and delays are most of what is measured
LIMIT_SHARE = 0.9  # of a receiver's time in the middle of frames


cdef class PassiveRate:
    """Reduces that ended since the last heartbeat."""

    def __init__(self):
        self.reset()

    cpdef reset(self):
        """The ring changed, or a reduce came to nothing: begin anew."""
        self.running = 0
        self.since_ns = self.busy_ns = 0
        self.received = self.network_ns = self.spent_ns = 0

    cpdef began(self, long long count, long long now_ns):
        """So many more reduces run."""
        if count and not self.running:
            self.since_ns = now_ns
        self.running += count

    cpdef ended(self, event, long long now_ns):
        """This peer has received everything of a reduce."""
        cdef long long network_ns
        if not self.running:
            return  # of the time before the last reset
        network_ns = event.network_ns
        self.running -= 1
        self.received += <long long> event.rx_bytes
        self.network_ns += network_ns
        self.spent_ns += network_ns + <long long> event.neighbour_ns + <long long> event.reduce_ns
        if not self.running:
            self.busy_ns += now_ns - self.since_ns

    def take(self):
        """Bytes per second and whether the edge was the limit; (0, False) if nothing was seen, or not all of it yet."""
        if self.running or self.received < BYTES_MIN or self.busy_ns <= 0:
            return 0, False
        # Python's integers, because a heartbeat's bytes times a second may be more than 64 bits hold.
        rate = (<object> self.received) * 1_000_000_000 // self.busy_ns
        was_limit = self.network_ns >= LIMIT_SHARE * self.spent_ns
        self.reset()
        return rate, was_limit
