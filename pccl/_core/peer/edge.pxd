# What an edge consists of; the bodies are in edge.pyx.

cdef class Lane:
    cdef readonly Edge edge              # the edge it belongs to
    cdef readonly int index              # its place in the pool
    cdef public object link              # the shell's number for the connection; 0: none
    cdef public str state                # ABSENT, DIALLING, PAUSED or UP
    cdef public int attempts             # dials that failed
    cdef public long long deadline_ns    # when the dial times out, or the next one is due

cdef class Edge:
    cdef readonly bint sends             # to the next peer, or from the previous one
    cdef readonly object peer            # who is on the other side
    cdef readonly object epoch           # when the master ordered it
    cdef readonly str host               # where the other side listens; only of an edge that sends
    cdef readonly int port
    cdef readonly list lanes             # one Lane per connection of the pool
