# Contents of `tcp_info`: what the kernel knows of a TCP connection, for loops that hold no GIL.

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from . cimport posix


# Counters run modulo 2**32.
cdef struct TcpInfo:
    uint32_t packet_bytes           # of a full packet now; it may change
    uint32_t delivered              # packets that have arrived, in any order
    uint32_t sent                   # packets, retransmissions included
    uint32_t resent                 # packets retransmitted
    uint64_t in_flight              # bytes that are not acknowledged
    uint64_t unsent                 # bytes that wait in the kernel
    uint32_t round_trip_us          # smoothed
    uint32_t shortest_us            # the shortest of the last minutes


# Asks the kernel. False if this is no TCP connection.
cdef inline bint read_tcp_info(TcpInfo *found, int fd) noexcept nogil:
    cdef posix.tcp_info info
    cdef unsigned int length = sizeof(info)
    memset(&info, 0, sizeof(info))
    if posix.getsockopt(fd, posix.IPPROTO_TCP, posix.TCP_INFO, &info, &length) != 0:
        return False
    found.packet_bytes = info.tcpi_snd_mss
    found.delivered = info.tcpi_delivered
    found.sent = info.tcpi_data_segs_out
    found.resent = info.tcpi_total_retrans
    found.in_flight = <uint64_t> (info.tcpi_unacked - info.tcpi_sacked) * info.tcpi_snd_mss
    found.unsent = info.tcpi_notsent_bytes
    found.round_trip_us = info.tcpi_rtt
    found.shortest_us = info.tcpi_min_rtt
    return True
