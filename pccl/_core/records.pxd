# What other compiled modules may do with records: find their fields once, then read and fill them without a name.

cdef enum:
    FIELDS_MAX = 64                     # of one record; the options have half as many


cdef class Fields:
    cdef readonly tuple names           # in the order of their declaration
    cdef dict defaults                  # name -> value, of those that have one
    cdef Py_ssize_t count
    cdef Py_ssize_t offsets[FIELDS_MAX]  # of each field's slot, from the beginning of an instance


cdef Fields fields_of(cls)
# Where instances of any class with `__slots__` hold that one.
cdef Py_ssize_t offset_of(cls, str name) except -1
# A record, or another such object, whose fields are yet to be put, each exactly once, before anybody sees it.
cdef object blank(cls)
cdef int put(value, Py_ssize_t offset, field) except -1
cdef object get(value, Py_ssize_t offset)
