# cython: language_level=3, auto_pickle=False
"""Lending: how blocks go from a peer to the next one on the same host without being sent.

Tensors lie in memory files anyway. A neighbour that maps them can read a block where it lies: add to it from there, or
copy it once, where TCP would copy it twice and carry it through the kernel in between. Only the frames still travel over
the connection, so everything else about a lane stays as it is: the order of blocks, waiting, aborts, the end of a peer.

**Offer.** Before the first block of a segment the sender says where the neighbour finds that memory: process, descriptor,
and the inode by which it is known. The receiver opens it through /proc, for reading only, and maps it if it is that inode
and can never shrink; that fails if the host, the user or the process namespace is another one, and then it says so. Until
the answer, and for ever if it is no, blocks are sent like everywhere else. When the segment goes, the offer is withdrawn.

**Loan.** A frame of kind LENT says where its block lies instead of containing it. The receiver gives it back when it has
read it, not before, and only then has the sender sent it: a peer whose blocks are lent is not done with the operation, has
not voted, and its tensor is not the user's again. So nobody ever reads what somebody else may already overwrite, unless the
operation was aborted; and then whatever was read is thrown away on all peers. There is no checksum: nothing travels.

Few blocks are lent at a time. A small operation goes ahead of large ones, but not of what was lent before it came.
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
