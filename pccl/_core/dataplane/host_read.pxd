# Contents of `host_read`: what a sender and a receiver on one host say to each other about memory.

from libc.stdint cimport uint32_t, uint64_t


cdef enum:
    HOST_READ_BYTES_MIN = 1 << 14   # a smaller block is sent: copying it twice costs less than giving it back
    LOANS_MAX = 8                   # blocks of one lane that are lent at a time: what a small operation may wait behind
    RETURNS_AT_ONCE = 4             # blocks that are given back together, while more of them are there
    NOTE_MAGIC = 0x31524350         # "PCR1"
    INTRODUCED = 0xFFFFFFFF         # in place of the serial of an offer: the introduction is answered


# Memory that the neighbour may map: the body of a frame of kind OFFER.
cdef packed struct Offer:
    uint64_t nbytes
    uint64_t inode                  # with the device, what tells this memory from all other on the host
    uint64_t device
    uint32_t segment                # the sender's number for it
    uint32_t serial                 # of the offer, on this connection; from 1
    uint32_t pid                    # of the sender
    uint32_t descriptor             # the sender's


# What a receiver writes back.
cdef packed struct Note:
    uint32_t magic
    uint32_t returned               # blocks, in the order in which they were lent
    uint32_t serial                 # of the offer that is answered; 0: none is
    uint32_t accepted               # the answer


# A block that the neighbour has not given back yet.
cdef struct Loan:
    uint64_t sequence               # of its operation
    uint64_t nbytes


# All such blocks of a lane, in order.
cdef struct Loans:
    Loan loans[LOANS_MAX]
    uint32_t first                  # the oldest
    uint32_t count


cdef void lend(Loans *loans, uint64_t sequence, uint64_t nbytes) noexcept nogil
cdef Loan take_back(Loans *loans) noexcept nogil
