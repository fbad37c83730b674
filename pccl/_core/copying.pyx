# cython: language_level=3
"""Copying memory without the GIL: staging a tensor takes milliseconds in which other threads may run."""

from libc.stdint cimport uintptr_t
from libc.string cimport memmove


def copy(uintptr_t target, uintptr_t source, size_t nbytes):
    """Copy bytes between two addresses that the caller keeps alive; they may overlap."""
    with nogil:
        memmove(<void *> target, <const void *> source, nbytes)
