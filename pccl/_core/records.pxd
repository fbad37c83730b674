# What other compiled modules may do with records: find the fields once, then read and fill them by offset.

cdef enum:
    FIELDS_MAX = 64                     # of one record; the options have half as many


cdef class Fields:
    cdef readonly tuple names           # in the order of their declaration
    cdef dict defaults                  # name -> default value, for fields that have one
    cdef Py_ssize_t count
    cdef Py_ssize_t offsets[FIELDS_MAX]  # of each field's slot, from the beginning of an instance


cdef Fields fields_of(cls)
# The offset of a slot in instances of a class with `__slots__`.
cdef Py_ssize_t offset_of(cls, str name) except -1
# An instance without values: each field must be `put` exactly once before other code sees it.
cdef object blank(cls)
cdef int put(value, Py_ssize_t offset, field) except -1
cdef object get(value, Py_ssize_t offset)
