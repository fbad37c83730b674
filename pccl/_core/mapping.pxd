# Contents of `mapping`: shared memory of a descriptor as an object, and windows of it.

from libc.stdint cimport int64_t


cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *place, size_t length, int protection, int flags, int fd, int64_t offset)
    int munmap(void *place, size_t length)
    void *MAP_FAILED
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED                  # every holder sees what one of them writes, also after a fork
    int MAP_POPULATE                # page tables are filled now, not by a fault at each first touch


# One mapping of a whole descriptor; unmapped with the last reference, and every buffer taken from it is one.
cdef class Mapping:
    cdef char *place                # the first byte, or NULL while there is no mapping
    cdef readonly Py_ssize_t nbytes # how many there are


# Some bytes of a mapping. Python code derives from it, so that a buffer can hold on to more than memory.
cdef class Window:
    cdef Mapping mapping            # keeps the bytes mapped
    cdef char *place                # the first byte
    cdef readonly Py_ssize_t nbytes # how many there are
    cdef bint surrendered           # whether `surrender` was called
