# cython: language_level=3, auto_pickle=False
"""Arithmetic on blocks: reduce two blocks into one, quantize a block, and compute its CRC.

This module has the functions that other modules call without the GIL, and the choice of the instruction set. The
arithmetic is C, in `arithmetic.h`, because it is compiled once per instruction set. It does not know what blocks are.

The instruction set is chosen once, when this module is loaded: the best one of the machine, or the one that the
environment variable PCCL_SIMD names. All compute the same bits; another choice changes the speed, and shows whether an
instruction set causes a problem.
"""

import os
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t

cdef extern from "arithmetic.h" nogil:
    ctypedef struct kernel_set:
        const char *name

    kernel_set kernel_sets[]
    int kernel_sets_count
    const kernel_set *kernel_chosen

    void kernels_load()
    size_t kernels_itemsize(int datatype)
    uint32_t kernels_crc32c(uint32_t crc, const void *data, size_t nbytes)
    void kernels_stream_copy(void *target, const void *source, size_t nbytes)
    int kernels_reduce(
        int datatype, int op, void *out, const void *local, const void *incoming, size_t count, uint32_t divisor
    )

    size_t quantizer_group(const Quantizer *quantizer)
    size_t quantizer_bytes(const Quantizer *quantizer, size_t count)
    void kernels_encode(const Quantizer *quantizer, void *coded, const void *values, size_t count)
    void kernels_decode(const Quantizer *quantizer, void *values, const void *coded, size_t count)
    int kernels_reduce_coded(
        const Quantizer *how, int op, void *out, const void *local, const void *coded, size_t count, uint32_t divisor
    )


cdef int reduce_block(
    int datatype, int op, void *out, const void *local, const void *incoming, size_t count, uint32_t divisor
) noexcept nogil:
    return kernels_reduce(datatype, op, out, local, incoming, count, divisor)


cdef void stream_copy(void *target, const void *source, size_t nbytes) noexcept nogil:
    kernels_stream_copy(target, source, nbytes)


cdef uint32_t crc32c(uint32_t crc, const void *data, size_t nbytes) noexcept nogil:
    return kernels_crc32c(crc, data, nbytes)


cdef size_t itemsize_of(int datatype) noexcept nogil:
    return kernels_itemsize(datatype)


cdef const char *chosen_name() noexcept nogil:
    return kernel_chosen.name


cdef size_t group_of(const Quantizer *quantizer) noexcept nogil:
    return quantizer_group(quantizer)


cdef size_t coded_bytes(const Quantizer *quantizer, size_t count) noexcept nogil:
    return quantizer_bytes(quantizer, count)


cdef void encode_block(const Quantizer *quantizer, void *coded, const void *values, size_t count) noexcept nogil:
    kernels_encode(quantizer, coded, values, count)


cdef void decode_block(const Quantizer *quantizer, void *values, const void *coded, size_t count) noexcept nogil:
    kernels_decode(quantizer, values, coded, count)


cdef int reduce_coded(
    const Quantizer *quantizer, int op, void *out, const void *local, const void *coded, size_t count, uint32_t divisor
) noexcept nogil:
    return kernels_reduce_coded(quantizer, op, out, local, coded, count, divisor)


# --- the instruction set --------------------------------------------------------------------------------------

def available():
    """The instruction sets that this machine can compute with, slowest first."""
    return tuple([kernel_sets[i].name.decode() for i in range(kernel_sets_count)])


def chosen():
    """The instruction set in use."""
    return kernel_chosen.name.decode()


def use(name):
    """Compute with this instruction set from now on, in all threads of this process."""
    global kernel_chosen
    names = available()
    if name not in names:
        raise ValueError(f"instruction set {name!r} is not available; this machine supports {', '.join(names)}")
    kernel_chosen = &kernel_sets[<int> names.index(name)]


cdef int load() except -1:
    kernels_load()
    name = os.environ.get("PCCL_SIMD")
    if name:
        try:
            use(name)
        except ValueError as error:
            raise ImportError(f"PCCL_SIMD: {error}") from None
    return 0


load()


# --- the same on buffers, for tests and measurements ----------------------------------------------------------

cdef class _Held:
    """A contiguous buffer that stays exported as long as this object lives."""

    def __cinit__(self, buffer, int flags):
        PyObject_GetBuffer(buffer, &self.exported, flags)

    def __dealloc__(self):
        PyBuffer_Release(&self.exported)


cdef _Held of_length(object buffer, int flags, str name, Py_ssize_t nbytes):
    cdef _Held held = _Held(buffer, flags)
    if held.exported.len != nbytes:
        raise ValueError(f"{name} has {held.exported.len} bytes but needs {nbytes}")
    return held


def reduce_into(int datatype, int op, out, local, incoming, backup=None, uint32_t divisor=0):
    """Copy `local` to `backup`, if there is one, and reduce it with `incoming` into `out`."""
    cdef _Held source = _Held(local, PyBUF_SIMPLE)
    cdef Py_ssize_t nbytes = source.exported.len
    cdef _Held arrived = of_length(incoming, PyBUF_SIMPLE, "incoming", nbytes)
    cdef _Held target = of_length(out, PyBUF_WRITABLE, "out", nbytes)
    cdef _Held kept = None
    cdef void *keep = NULL
    if backup is not None:
        kept = of_length(backup, PyBUF_WRITABLE, "backup", nbytes)
        keep = kept.exported.buf
    cdef Py_ssize_t itemsize = itemsize_of(datatype)
    if itemsize == 0:
        raise ValueError(f"datatype {datatype} is unknown")
    if nbytes % itemsize:
        raise ValueError(f"{nbytes} bytes are not a whole number of elements of {itemsize} bytes")
    cdef int code
    with nogil:
        if keep != NULL:
            stream_copy(keep, source.exported.buf, nbytes)
        code = reduce_block(
            datatype, op, target.exported.buf, source.exported.buf, arrived.exported.buf, nbytes // itemsize, divisor
        )
    if code != 0:
        raise ValueError(f"operation {op} is unknown, or cannot be divided by {divisor}")


def crc32c_of(data, uint32_t crc=0):
    """The CRC32C of the bytes, continuing from `crc`."""
    cdef _Held held = _Held(data, PyBUF_SIMPLE)
    with nogil:
        crc = crc32c(crc, held.exported.buf, held.exported.len)
    return crc
