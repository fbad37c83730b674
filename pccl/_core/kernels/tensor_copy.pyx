# cython: language_level=3
"""Copies of tensors without the GIL: staging takes milliseconds in which other threads may run."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uintptr_t
from libc.string cimport memmove

from .arithmetic cimport stream_copy

cdef enum:
    STREAMED_BYTES_MIN = 1 << 23    # from here on streaming stores are faster: 64 MB at 15 GB/s, memmove at 11


def copy(uintptr_t target, uintptr_t source, size_t nbytes):
    """Copy bytes between two addresses, which the caller keeps valid; the ranges may overlap."""
    cdef bint apart = target + nbytes <= source or source + nbytes <= target
    with nogil:
        if apart and nbytes >= STREAMED_BYTES_MIN:
            stream_copy(<void *> target, <const void *> source, nbytes)
        else:
            memmove(<void *> target, <const void *> source, nbytes)


def copy_into(target, uintptr_t source):
    """Fill a writable buffer with the bytes at an address."""
    cdef unsigned char[::1] view = target
    if view.shape[0]:
        copy(<uintptr_t> &view[0], source, view.shape[0])


def copy_from(uintptr_t target, source):
    """Copy all bytes of a buffer to an address."""
    cdef const unsigned char[::1] view = source
    if view.shape[0]:
        copy(target, <uintptr_t> &view[0], view.shape[0])


def address_of(buffer):
    """The address of a contiguous buffer, valid as long as the buffer lives."""
    cdef Py_buffer exported
    PyObject_GetBuffer(buffer, &exported, PyBUF_SIMPLE)
    address = <uintptr_t> exported.buf
    PyBuffer_Release(&exported)
    return address
