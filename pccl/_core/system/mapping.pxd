# Contents of `mapping`: a mapping of shared memory, and extents of it.

# One mapping of a file descriptor. It is unmapped with the last reference; every buffer taken from it is a reference.
cdef class Mapping:
    cdef char *start                # the first byte, or NULL while there is no mapping
    cdef readonly Py_ssize_t nbytes  # how many there are
    cdef bint readonly


# A byte range of a mapping. Python code derives from it, so that a buffer can keep more than memory alive.
cdef class Extent:
    cdef Mapping mapping            # keeps the bytes mapped
    cdef char *start                # the first byte
    cdef readonly Py_ssize_t nbytes  # how many there are
