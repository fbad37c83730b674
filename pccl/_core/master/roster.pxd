# What the master keeps of one peer; the bodies are in roster.pyx.

cdef class Peer:
    cdef readonly object id             # given out in order of registration, never reused
    cdef readonly object conn           # the shell's number for its control connection
    cdef readonly object group          # the peer group it asked for
    cdef readonly int lanes             # its pool size
    cdef readonly str host              # where others dial it
    cdef readonly int port
    cdef public str phase               # REGISTERED or ACCEPTED
    cdef public long long heard_ns      # when it was last heard of
    cdef public long long phase_ns      # when that phase began
    cdef public bint warned             # it was told once whom it waits for
    cdef public long long told_world    # up to which change of the world it knows the numbers
    cdef readonly object tx_bytes       # what its lanes have sent since it came, as of its latest heartbeat
    cdef readonly object rx_bytes
    cdef readonly double tx_rate        # bytes per second between its latest two heartbeats
    cdef readonly double rx_rate
    cdef tuple mark                     # when the rates were last taken, and tx_bytes and rx_bytes then
