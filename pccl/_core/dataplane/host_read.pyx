# cython: language_level=3, auto_pickle=False
"""Host reads: a peer reads blocks of the previous one directly in its memory, if both are on the same host.

Tensors lie in memory files anyway. A neighbour that maps them reads a block where it lies: it adds from there, or copies
once, where TCP would copy twice and carry the block through the kernel in between. Frames still travel over the
connection, so everything else about a lane stays the same: the order of blocks, waiting, aborts, the end of a peer.

**Offer.** Before the first block of a segment the sender says where the neighbour finds that memory: process, descriptor,
and inode. The receiver opens it for reading only, and maps it if the inode is that one and the memory can never shrink.
This fails if the host, the user or the process namespace is another one, and the receiver says so. Blocks are sent until
the offer is accepted, and always if it is refused. The sender withdraws an offer when the segment goes.

**Loan.** A frame of kind HOST_READ says where its block lies instead of containing it. The receiver gives the block back
after it has read it, and only then does it count as sent. A peer with blocks on loan is therefore not done with the
operation, has not voted, and its tensor is not yet the user's again. So no process reads memory that its owner may
already overwrite, unless the operation was aborted; then every peer discards what it read. There is no checksum, because
nothing travels.

Few blocks are on loan at a time. A small operation goes ahead of large ones, but not of blocks already on loan.
"""

from libc.stdint cimport uint32_t, uint64_t

from pccl._core.system.check cimport check


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
