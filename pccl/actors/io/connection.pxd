# Contents of `connection`: a stream socket that carries messages.

from libc.stdint cimport uint32_t, uint64_t

from .framing cimport FrameReader, FrameWriter

from .loop cimport Loop, Watcher


cdef class Connection(Watcher):
    cdef readonly uint64_t number       # its number at its owner
    cdef Loop loop
    cdef object socket                  # None after it is closed or detached
    cdef int fd                         # of the socket, while there is one
    cdef object on_message
    cdef object on_down
    cdef FrameReader reader
    cdef FrameWriter writer
    cdef bint wants_write               # the socket is full, or is not connected yet
    cdef bint finishing                 # finish() was called: messages are ignored

    cpdef send(self, message)
    cpdef detach(self)

    cdef int write(self) except -1
    cdef int read(self) except -1
    cdef list receive(self)
    cdef int want_write(self, bint wanted) except -1
    cdef int half_close(self) except -1
    cdef int end(self, str kind, str reason) except -1
