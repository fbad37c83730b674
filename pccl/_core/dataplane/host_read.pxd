# Contents of `host_read`: what a sender and a receiver on one host say to each other about memory.

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from .segment_table cimport MappedSegment


cdef enum:
    HOST_READ_BYTES_MIN = 1 << 14   # a smaller block is sent: two copies cost less than returning a loan
    LOANS_MAX = 8                   # blocks of one lane on loan at a time: a small operation waits behind at most these
    RETURNS_AT_ONCE = 4             # blocks that are returned together, while more have arrived
    NOTE_MAGIC = 0x31524350         # "PCR1"
    INTRODUCED = 0xFFFFFFFF         # instead of the serial of an offer: the note answers the introduction
    NOTES_MAX = 16                  # notes that are read at a time


# Memory that the neighbour may map: the body of a frame of kind OFFER.
cdef packed struct Offer:
    uint64_t nbytes
    uint64_t inode                  # with the device: identifies this memory on the host
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


# A block that the neighbour has not returned yet.
cdef struct Loan:
    uint64_t sequence               # of its operation
    uint64_t nbytes


# All loans of a lane, in order.
cdef struct Loans:
    Loan loans[LOANS_MAX]
    uint32_t first                  # the oldest
    uint32_t count


# Frames without a block that a sender sends before the next block: introduction, offers and withdrawals.
cdef struct HostFrames:
    char *frames
    uint64_t nbytes                 # of the frames
    uint64_t size                   # of the allocation


# Notes that a sender has read, of which the last may be incomplete.
cdef struct NoteBuffer:
    Note notes[NOTES_MAX]
    uint64_t nbytes


cdef void lend(Loans *loans, uint64_t sequence, uint64_t nbytes) noexcept nogil
cdef Loan take_back(Loans *loans) noexcept nogil

# Appends a host frame. Returns 0, or -1 if there is no memory for it.
cdef int add_host_frame(
    HostFrames *host_frames, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes
) noexcept nogil

# Makes the offer of a segment and appends it. Returns 0, or -1 if there is no memory for it.
cdef int add_offer(HostFrames *host_frames, MappedSegment *mapped, uint32_t serial, uint32_t pid) noexcept nogil

# Reads notes from a socket. Returns the result of recv(): bytes, 0 at the end of the stream, or -1 with errno.
cdef ssize_t receive_notes(NoteBuffer *buffer, int fd) noexcept nogil

# Removes the first `count` notes.
cdef void remove_notes(NoteBuffer *buffer, uint64_t count) noexcept nogil
