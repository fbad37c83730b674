# cython: language_level=3, auto_pickle=False
"""simplehash: 64 bits that say whether two tensors hold the same bytes.

This module has the functions that Python calls. docs/simplehash.md defines the hash. The code is C, in `digest.h` and
the files that it includes, because it is compiled once per instruction set. Callers pass addresses, keep the memory
valid, and do not change it meanwhile; alignment and length do not matter.

The instruction set is the one that `arithmetic` has chosen. All compute the same digests, on any number of threads, and
so does `digest.cu`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from .arithmetic cimport chosen_name

cdef extern from "digest_threads.h" nogil:
    enum:
        DIGEST_BLOCK_BYTES

    ctypedef struct digest_set:
        pass

    ctypedef struct digest_tensor:
        const uint8_t *data
        uint64_t nbytes
        uint64_t *blocks

    ctypedef uint64_t (*block_function)(const digest_set *set, const uint8_t *data, size_t nbytes) noexcept nogil

    void digest_load()
    const digest_set *digest_set_named(const char *name)
    uint64_t digest_block(const digest_set *set, const uint8_t *data, size_t nbytes)
    uint64_t sum_block(const digest_set *set, const uint8_t *data, size_t nbytes)
    uint64_t digest_fold(const uint64_t *pieces, uint64_t count, uint64_t nbytes)
    uint64_t digest_blocks_of(uint64_t nbytes)
    void digest_on_threads(
        const digest_tensor *tensors, size_t count, block_function function, const digest_set *set, int threads
    )

digest_load()

# The part of a tensor that one digest covers, and that is sent where two digests differ.
STATE_BLOCK_BYTES = <int> DIGEST_BLOCK_BYTES

DIGEST_BYTES = sizeof(uint64_t)  # of one block, or of one tensor


cdef uint64_t digest_folded(const uint64_t *blocks, uint64_t nbytes) noexcept nogil:
    """The digest of `nbytes` bytes from the digests of all their blocks, in order."""
    return digest_fold(blocks, digest_blocks_of(nbytes), nbytes)


# --- from Python ----------------------------------------------------------------------------------------------

def digest(uintptr_t address, uint64_t nbytes, int threads=1):
    """The digest of `nbytes` bytes at an address."""
    cdef bytes blocks = block_digests(address, nbytes, threads)
    return digest_folded(words_in(blocks), nbytes)


def digest_many(list addresses, list lengths, int threads):
    """The digests of many tensors, 8 bytes each in little endian order. The threads share all tensors."""
    cdef Py_ssize_t count = len(addresses)
    cdef bytes found = PyBytes_FromStringAndSize(NULL, count * sizeof(uint64_t))
    cdef uint64_t *digests = words_in(found)
    cdef uint64_t *blocks = NULL
    cdef digest_tensor *tensors = NULL
    if len(lengths) != count:
        raise ValueError(f"{count} addresses come with {len(lengths)} lengths")
    check_threads(threads)
    try:
        tensors = <digest_tensor *> room(count * sizeof(digest_tensor))
        blocks = <uint64_t *> room(fill(tensors, addresses, lengths) * sizeof(uint64_t))
        with nogil:
            digest_each(tensors, count, blocks, digests, threads)
    finally:
        free(blocks)
        free(tensors)
    return found


def block_digests(uintptr_t address, uint64_t nbytes, int threads):
    """The digests of all blocks of `nbytes` bytes at an address, 8 bytes each in little endian order."""
    return on_blocks(address, nbytes, threads, digest_block)


def digest_of_blocks(blocks, uint64_t nbytes):
    """The digest of `nbytes` bytes from the digests of their blocks."""
    # A copy unless it is a bytes object: a view may begin at an unaligned address.
    cdef bytes held = blocks if type(blocks) is bytes else bytes(memoryview(blocks))
    cdef uint64_t count = digest_blocks_of(nbytes)
    if <uint64_t> len(held) != count * sizeof(uint64_t):
        raise ValueError(f"{nbytes} bytes have {count} block digests of 8 bytes; {len(held)} bytes were given")
    return digest_folded(words_in(held), nbytes)


def read_only(uintptr_t address, uint64_t nbytes, int threads):
    """Read bytes as a digest does and add them, for measurements: no digest can be faster than this."""
    cdef bytes sums = on_blocks(address, nbytes, threads, sum_block)
    return sum(memoryview(sums).cast("Q")) % 2**64


# --- what they have in common ---------------------------------------------------------------------------------

cdef bytes on_blocks(uintptr_t address, uint64_t nbytes, int threads, block_function function):
    check_threads(threads)
    cdef bytes found = PyBytes_FromStringAndSize(NULL, digest_blocks_of(nbytes) * sizeof(uint64_t))
    cdef digest_tensor tensor
    tensor.data = <const uint8_t *> address
    tensor.nbytes = nbytes
    tensor.blocks = words_in(found)
    with nogil:
        digest_on_threads(&tensor, 1, function, digest_set_named(chosen_name()), threads)
    return found


cdef void digest_each(
    digest_tensor *tensors, size_t count, uint64_t *blocks, uint64_t *digests, int threads
) noexcept nogil:
    cdef size_t i
    cdef uint64_t first = 0
    for i in range(count):
        tensors[i].blocks = blocks + first
        first += digest_blocks_of(tensors[i].nbytes)
    digest_on_threads(tensors, count, digest_block, digest_set_named(chosen_name()), threads)
    for i in range(count):
        digests[i] = digest_folded(tensors[i].blocks, tensors[i].nbytes)


cdef uint64_t fill(digest_tensor *tensors, list addresses, list lengths) except? 0:
    """Fill in where the tensors are; returns how many blocks they have."""
    cdef uint64_t blocks = 0
    cdef size_t i = 0
    for address, nbytes in zip(addresses, lengths):
        tensors[i].data = <const uint8_t *> <uintptr_t> address
        tensors[i].nbytes = nbytes
        blocks += digest_blocks_of(nbytes)
        i += 1
    return blocks


cdef uint64_t *words_in(bytes held):
    return <uint64_t *> PyBytes_AS_STRING(held)


cdef void *room(size_t nbytes) except NULL:
    cdef void *found = malloc(nbytes if nbytes > 0 else 1)
    if found == NULL:
        raise MemoryError(f"{nbytes} bytes for the digests of blocks")
    return found


cdef int check_threads(int threads) except -1:
    if threads < 1:
        raise ValueError(f"a digest takes at least one thread; {threads} were given")
    return 0
