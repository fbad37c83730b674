# cython: language_level=3, auto_pickle=False
"""Host reads: a receiver reads blocks directly from the memory of a sender on the same host.

All tensors lie in memory files. A neighbour that maps them reads a block where it is: it adds from there or copies it
once. TCP would copy it twice, through the kernel. Frames still travel over the connection, so everything else about a
lane stays the same: the order of blocks, waiting, aborts, the end of a peer.

**Offer.** Before the first block of a segment the sender says where the neighbour finds that memory: process,
descriptor and inode. The receiver opens it for reading only. It maps the memory if the inode is the same and the memory
can never shrink. This fails if the host, the user or the process namespace differs, and the receiver says so. Blocks
are sent until the offer is accepted, and always if it is refused. The sender withdraws an offer when it unmaps the
segment.

**Loan.** A frame of kind HOST_READ says where its block is and does not contain it. The receiver returns the block
after it has read it; only then does the block count as sent. A peer with blocks on loan has therefore not finished the
operation and has not voted, and the user does not have the tensor back yet. So no process reads memory that its owner
may overwrite, unless the operation was aborted; then every peer discards what it read. There is no CRC, because no
byte of the block is transmitted.

Few blocks are on loan at a time: a small operation overtakes large ones, but not blocks that are already on loan.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy, memmove, memset

from pccl._core.kernels.arithmetic cimport crc32c
from pccl._core.system cimport posix
from pccl._core.system.check cimport check

from .lane cimport FRAME_MAGIC, HEADER_BYTES, OFFER, Header
from .segment_table cimport MappedSegment


cdef void lend(Loans *loans, uint64_t sequence, uint64_t nbytes) noexcept nogil:
    check(loans.count < LOANS_MAX, "no more blocks are lent than there is room for")
    cdef Loan *loan = &loans.loans[(loans.first + loans.count) % LOANS_MAX]
    loan.sequence, loan.nbytes = sequence, nbytes
    loans.count += 1


cdef Loan take_back(Loans *loans) noexcept nogil:
    cdef Loan loan = loans.loans[loans.first]
    check(loans.count != 0, "a block that comes back was lent")
    loans.first = (loans.first + 1) % LOANS_MAX
    loans.count -= 1
    return loan


cdef int add_host_frame(
    HostFrames *host_frames, uint16_t kind, uint32_t segment, const void *body, uint32_t nbytes
) noexcept nogil:
    cdef uint64_t needed = host_frames.nbytes + HEADER_BYTES + nbytes
    cdef char *grown
    cdef Header header
    if needed > host_frames.size:
        grown = <char *> realloc(host_frames.frames, needed)
        if grown == NULL:
            return -1
        host_frames.frames, host_frames.size = grown, needed
    memset(&header, 0, HEADER_BYTES)
    header.magic, header.kind, header.segment, header.length = FRAME_MAGIC, kind, segment, nbytes
    header.crc = crc32c(0, body, nbytes)
    header.header_crc = crc32c(0, &header, HEADER_BYTES - 4)
    memcpy(host_frames.frames + host_frames.nbytes, &header, HEADER_BYTES)
    if nbytes:  # memcpy() from NULL is undefined even for 0 bytes
        memcpy(host_frames.frames + host_frames.nbytes + HEADER_BYTES, body, nbytes)
    host_frames.nbytes = needed
    return 0


cdef int add_offer(HostFrames *host_frames, MappedSegment *mapped, uint32_t serial, uint32_t pid) noexcept nogil:
    cdef Offer offer
    mapped.serial = serial
    offer.nbytes, offer.inode, offer.device = mapped.nbytes, mapped.inode, mapped.device
    offer.segment, offer.serial = mapped.segment, serial
    offer.pid, offer.descriptor = pid, mapped.descriptor
    return add_host_frame(host_frames, OFFER, mapped.segment, &offer, sizeof(offer))


cdef ssize_t receive_notes(NoteBuffer *buffer, int fd) noexcept nogil:
    cdef char *end = <char *> buffer.notes + buffer.nbytes
    cdef ssize_t count = posix.recv(fd, end, sizeof(buffer.notes) - buffer.nbytes, posix.MSG_DONTWAIT)
    if count > 0:
        buffer.nbytes += count
    check(buffer.nbytes <= sizeof(buffer.notes), "notes fit their buffer")
    return count


cdef void remove_notes(NoteBuffer *buffer, uint64_t count) noexcept nogil:
    buffer.nbytes -= count * sizeof(Note)
    memmove(buffer.notes, &buffer.notes[count], buffer.nbytes)
