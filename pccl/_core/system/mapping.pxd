# Contents of `mapping`: a mapping of shared memory, and extents of it.

cimport cython

# `no_gc` must stand here and in the .pyx: modules of derived classes read only this file. They would take their base
# for collectable, and the collector would clear their objects.


# One mapping of a file descriptor. It is unmapped with the last reference; every buffer taken from it is a reference.
@cython.no_gc
cdef class Mapping:
    cdef char *start                # the first byte, or NULL while there is no mapping
    cdef readonly Py_ssize_t nbytes  # how many there are
    cdef bint readonly


# A byte range of a mapping. Python code derives from it, so that a buffer can keep more than memory alive.
@cython.no_gc
cdef class Extent:
    cdef Mapping mapping            # keeps the bytes mapped
    cdef char *start                # the first byte
    cdef readonly Py_ssize_t nbytes  # how many there are
