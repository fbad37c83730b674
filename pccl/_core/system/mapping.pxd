# Contents of `mapping`: shared memory of a descriptor as an object, and windows of it.

# One mapping of a whole descriptor; unmapped with the last reference, and every buffer taken from it is one.
cdef class Mapping:
    cdef char *place                # the first byte, or NULL while there is no mapping
    cdef readonly Py_ssize_t nbytes  # how many there are
    cdef bint readonly


# Some bytes of a mapping. Python code derives from it, so that a buffer can hold on to more than memory.
cdef class Extent:
    cdef Mapping mapping            # keeps the bytes mapped
    cdef char *place                # the first byte
    cdef readonly Py_ssize_t nbytes  # how many there are
