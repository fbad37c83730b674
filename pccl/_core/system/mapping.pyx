# cython: language_level=3, auto_pickle=False
"""Mappings of shared memory, as objects that export buffers and know their address; and memory files.

It adds what `mmap` of the standard library lacks: a mapping that keeps no duplicate of the descriptor (before Python
3.13 mmap does, and a thousand segments would need two thousand descriptors), that can be populated at once, and an
extent that owns every buffer taken from it. Memory files are created here too: memory with a descriptor and without a
name in the file system. One function opens the memory file of another process. Callers decide which memory is mapped
and when it is reused.

Nothing is unmapped while it is in use: buffers hold their extent, extents hold their mapping.

Large memory gets huge pages and is mapped at addresses where a huge page takes one entry of the page table. By default
the kernel does neither for shared memory, but since Linux 6.1 a process may ask for it. Measured with 256 MiB on AMD
Zen 4, in a virtual machine:

                                  pages of 4 KiB    of 2 MiB
  new, all pages taken                  160 ms         14 ms
  mapped by another process              26 ms        0.2 ms
  copied                             11 GB/s        14 GB/s
  float32 added in place             35 GB/s        46 GB/s     (bytes touched)
"""

import fcntl
import os
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from . cimport posix
from .futex cimport raise_errno

cdef enum:
    HUGE_BYTES = 1 << 21            # a huge page, on x86-64 and with small pages of 4 KiB on aarch64
    POPULATE_WRITE = 23             # MADV_POPULATE_WRITE, missing in older headers
    COLLAPSE = 25                   # MADV_COLLAPSE, likewise

cdef size_t PAGE_BYTES = os.sysconf("SC_PAGESIZE")  # 64 KiB on some aarch64


@cython.final
@cython.no_gc
cdef class Mapping:
    """The first `nbytes` of the memory behind `fd`, which may be closed afterwards.

    `populate` fills the page tables now, without the GIL, so that the first access causes no fault. If not `writable`,
    the descriptor may be read-only, and buffers are.
    """

    def __cinit__(self, int fd, Py_ssize_t nbytes, *, bint populate=False, bint writable=True):
        cdef int flags = posix.MAP_SHARED | posix.MAP_POPULATE if populate else posix.MAP_SHARED
        cdef int access = posix.PROT_READ | posix.PROT_WRITE if writable else posix.PROT_READ
        cdef void *start
        cdef int code
        if nbytes <= 0:
            raise ValueError(f"a mapping has at least one byte, not {nbytes}")
        with nogil:
            start = map_aligned(nbytes, access, flags, fd)
            code = posix.errno
        if start == posix.MAP_FAILED:
            raise_errno(code, f"mapping {nbytes} bytes of shared memory")
        self.start = <char *> start
        self.nbytes = nbytes
        self.readonly = not writable

    def __dealloc__(self):
        if self.start != NULL:
            # Gigabytes take tens of milliseconds; other threads run meanwhile.
            with nogil:
                posix.munmap(self.start, self.nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.nbytes, self.readonly, flags)

    @property
    def address(self) -> int:
        """The address of the first byte in this process."""
        return <uintptr_t> self.start

    def populate(self, Py_ssize_t offset, Py_ssize_t nbytes) -> None:
        """Fill the page tables for bytes that are about to be written: one call instead of a fault for each page.

        A kernel before 5.14 cannot do this; then each page faults.
        """
        cdef Py_ssize_t begin = offset & -<Py_ssize_t> PAGE_BYTES
        if offset < 0 or nbytes < 0 or offset > self.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} do not lie in a mapping of {self.nbytes} bytes")
        with nogil:
            posix.madvise(self.start + begin, offset + nbytes - begin, POPULATE_WRITE)


def reserve_pages(int fd, Py_ssize_t nbytes) -> None:
    """Allocate a memory page for all bytes of a memory file that have none.

    Raises OSError, ENOMEM or ENOSPC, if there is not enough memory; the first access would raise SIGBUS instead.
    """
    os.posix_fallocate(fd, 0, nbytes)


def enlarge_pages(int fd, Py_ssize_t nbytes) -> None:
    """Back memory that has no pages yet with huge pages, as far as the kernel has any; before Linux 6.1 it has none."""
    cdef Mapping whole = Mapping(fd, nbytes)
    cdef Py_ssize_t end = 0
    with nogil:
        # The kernel collapses a page table that has at least one page, and adds the missing ones.
        while nbytes - end >= HUGE_BYTES and posix.madvise(whole.start + end, PAGE_BYTES, POPULATE_WRITE) == 0:
            end += HUGE_BYTES
        if end > 0:
            posix.madvise(whole.start, end, COLLAPSE)


cdef void *map_aligned(size_t nbytes, int access, int flags, int fd) noexcept nogil:
    """Map a file from its beginning, at an address where huge pages are possible; MAP_FAILED if it fails."""
    cdef int nothing = posix.MAP_PRIVATE | posix.MAP_ANONYMOUS | posix.MAP_NORESERVE
    cdef size_t pages = (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES, ahead
    cdef char *room
    cdef void *start
    cdef int code
    if nbytes < HUGE_BYTES:
        return posix.mmap(NULL, nbytes, access, flags, fd, 0)
    room = <char *> posix.mmap(NULL, pages + HUGE_BYTES, posix.PROT_NONE, nothing, -1, 0)
    if room == posix.MAP_FAILED:
        return room
    ahead = -<uintptr_t> room & (HUGE_BYTES - 1)
    start = posix.mmap(room + ahead, nbytes, access, flags | posix.MAP_FIXED, fd, 0)
    code = posix.errno
    if start == posix.MAP_FAILED:
        posix.munmap(room, pages + HUGE_BYTES)
    else:
        if ahead:
            posix.munmap(room, ahead)
        posix.munmap(room + ahead + pages, HUGE_BYTES - ahead)
    posix.errno = code
    return start


# No garbage collection: an extent refers to a mapping, which refers to nothing.
@cython.no_gc
cdef class Extent:
    """`nbytes` of a mapping from `offset` on; its buffers keep the extent alive, not only the mapping."""

    def __cinit__(self, Mapping mapping not None, Py_ssize_t offset, Py_ssize_t nbytes, *_):
        if offset < 0 or nbytes < 0 or offset > mapping.nbytes - nbytes:
            raise ValueError(f"{nbytes} bytes at offset {offset} do not lie in a mapping of {mapping.nbytes} bytes")
        self.mapping = mapping
        self.start = mapping.start + offset
        self.nbytes = nbytes

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.start, self.nbytes, 0, flags)

    @property
    def address(self) -> int:
        """The address of the first byte in this process."""
        return <uintptr_t> self.start

    @property
    def view(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self)


# ------------------------------------------------------------------------------------------ memory files

def create_memory_file(str name not None, int64_t size, *, bint seal=True) -> int:
    """A descriptor of `size` zero bytes of memory that are freed with their last holder.

    If sealed, its size is final: no holder can shrink it and so kill the others with SIGBUS.
    """
    cdef bytes encoded = name.encode()
    cdef const char *text = encoded
    cdef int fd, code
    if size <= 0:
        raise ValueError(f"a memory file needs at least one byte, not {size}")
    fd = posix.memfd_create(text, posix.MFD_CLOEXEC | posix.MFD_ALLOW_SEALING)
    if fd < 0:
        raise_errno(posix.errno, f"creating the memory file {name!r}")
    code = posix.ftruncate(fd, size)
    if code == 0 and seal:
        code = posix.fcntl(fd, posix.F_ADD_SEALS, posix.F_SEAL_SHRINK | posix.F_SEAL_GROW | posix.F_SEAL_SEAL)
    if code != 0:
        code = posix.errno
        posix.close(fd)
        raise_errno(code, f"giving the memory file {name!r} its {size} bytes")
    return fd


def is_size_final(int fd) -> bool:
    """Whether no holder of this file can shrink it; False for everything that is not a memory file."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def open_memory_of(int pid, int descriptor, uint64_t nbytes, uint64_t inode, uint64_t device) -> int:
    """A descriptor, for reading only, of memory that another process of this host holds under `descriptor`.

    OSError if it cannot be opened; ValueError if it is not that inode, is shorter than `nbytes`, or could shrink.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    # Check before opening: in another namespace the path may be any file, and opening some devices has effects.
    require_same(os.stat(path), inode, device, path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        require_same(found, inode, device, path)
        if found.st_size < nbytes or not is_size_final(fd):
            raise ValueError(f"{path} is not a memory file of {nbytes} bytes that cannot shrink")
    except BaseException:
        os.close(fd)
        raise
    return fd


cdef int require_same(object found, uint64_t inode, uint64_t device, str path) except -1:
    if (found.st_ino, found.st_dev) != (inode, device):
        raise ValueError(f"{path} is another file on this host")
    return 0
