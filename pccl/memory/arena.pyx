# cython: language_level=3, auto_pickle=False
"""The arena: an allocator of shared memory that reuses freed memory without system calls and page faults.

This module has the size classes, the free lists, and the decision when unused memory is returned to the system. It does
not know what the bytes mean or which other process maps them.

Theory of operation. A *piece* is one allocation: bytes of one segment. A piece of 1 MiB or more has a segment of its
own. Smaller pieces are cut from *slabs*, segments that grow with their number, so that ten thousand small tensors need
tens of descriptors and not ten thousand. Sizes are rounded up to classes, eight per doubling. A freed piece serves the
next request of its class. When the last piece of a slab is freed, the slab may be cut into other sizes.

A segment without a byte in use is *idle*. A program that alternates between the same sizes finds them all idle and
never maps or unmaps. Idle memory is returned, longest idle first, if there is too much of it beside the memory in use
and if it was not needed for many allocations; or all at once if the system refuses new memory, or by `trim()`. The
clock counts allocations, because training steps take milliseconds or hours.

Any thread may free a piece at any time, also a finaliser that interrupts the arena in the thread that holds the lock.
So freeing only appends to a queue; the next allocation sorts it in. Nothing slow happens under the lock: segments are
created and destroyed outside it. `find` takes no lock: it reads one immutable index, which is replaced as a whole.
Every launch of a reduce allocates and finds, with cold caches, so both are short and compiled.

After `os.fork` the child can read the inherited memory, but it belongs to the parent: in the child the inherited arena
allocates and frees nothing, and `default()` is a new one.
"""

import errno
import os
cimport cython
from _thread import RLock, allocate_lock
from itertools import count
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from weakref import WeakMethod, WeakSet

from pccl._core.system.check cimport check
from pccl._core.system.mapping cimport Extent, Mapping
from pccl._core.records import record

from .segments import Segment

cdef enum:
    CACHE_LINE = 64
    CLASS_STEPS = 8
    LARGE = 1 << 20

ALIGNMENT = <int> CACHE_LINE  # a cache line, and the widest vector of common processors
STEPS = <int> CLASS_STEPS  # size classes per doubling: at most an eighth of a piece is waste
LARGE_BYTES = <int> LARGE  # from here on a piece has its own segment: one descriptor per MiB is affordable
SLAB_BYTES = 4 << 20  # the smallest slab: room for four of the largest pieces, and populated in a millisecond
SLAB_SHARE = 8  # a new slab has at least this fraction of all slabs, so that their number grows only as the logarithm
IDLE_ALLOCATIONS_MAX = 1 << 14  # the longest cycle to expect: a step that stages thousands of tensors one by one
IDLE_BYTES_MIN = 64 << 20  # this much is always kept
IDLE_SHARE = 4  # beside that, a quarter of the memory in use

_SEGMENT_NAME = "pccl-arena"  # as /proc/self/maps shows it
_numbers = count(1)  # of segments; shared by all arenas of the process, so that a number is never used twice


@record
class ArenaStatistics:
    """What an arena holds; mapped is in use plus cached."""

    segments: int
    bytes_mapped: int
    bytes_in_use: int
    bytes_cached: int


def size_class(int64_t nbytes) -> int:
    """The size of the piece that serves a request: a multiple of 64, at most an eighth more from 512 bytes on.

    From 16 MiB on it is a multiple of 2 MiB, the size of a huge page.
    """
    if nbytes < 0:
        raise ValueError(f"a piece cannot have {nbytes} bytes")
    return class_of(nbytes)


cdef uint64_t class_of(uint64_t nbytes) noexcept:
    cdef uint64_t step = CACHE_LINE
    # An eighth of the largest power of two up to `nbytes`; found from below, because most requests are small.
    while step <= nbytes // (2 * CLASS_STEPS):
        step *= 2
    return max(<uint64_t> CACHE_LINE, (nbytes + step - 1) // step * step)


@cython.final
cdef class Region:
    """One segment of the arena: a slab, or the segment of a single large piece."""

    def __cinit__(self, segment not None, *, bint is_slab):
        self.number = next(_numbers)
        self.segment = segment
        self.mapping = segment.mapping
        self.address = <uintptr_t> self.mapping.start
        self.nbytes = segment.size
        self.is_slab = is_slab
        self.free = {}

    cdef bint carve(self, uint64_t size, uint64_t *offset) noexcept:
        """Cut a new piece at `offset`; False if the slab has no room for it."""
        if self.cut + size > self.nbytes:
            return False
        offset[0] = self.cut
        self.cut += size
        return True

    cdef int restore(self, uint64_t offset, uint64_t size) except -1:
        """Free a piece; after the last one the whole slab is free."""
        cdef list offsets
        check(self.live != 0, "a piece that comes back was handed out")
        check(offset + size <= self.nbytes, "a piece that comes back lies within its segment")
        self.live -= 1
        if self.live == 0:
            self.cut = 0
            self.free.clear()
        else:
            offsets = self.free.get(size)
            if offsets is None:
                offsets = self.free[size] = []
            offsets.append(offset)
        return 0

    cdef close(self):
        """Close the segment; the memory is freed with its last piece."""
        self.mapping = None
        self.segment.close()


# No garbage collection: the collector could clear a piece without its return to the arena. It is not needed, because
# nothing that a piece refers to refers to the piece.
@cython.final
@cython.no_gc
cdef class Piece(Extent):
    """Bytes of a segment: `nbytes` at `offset` of number `segment`, here at `address`, to be used through `view`.

    The piece returns to its arena by `release()`, or when the last reference to it is gone; arrays and views made from
    its buffer are references. After `release()` the bytes may be allocated again, even if old views of them exist.
    """

    cpdef release(self):
        """Return the piece to the arena; a second call does nothing."""
        if not self.released:
            self.released = True
            self.arena.give_back(self)

    def __dealloc__(self):
        # Without an arena it was never handed out.
        if self.arena is not None:
            self.release()

    @property
    def segment(self) -> int:
        """The number of the segment."""
        return self.region.number

    def __repr__(self) -> str:
        return f"<Piece segment={self.region.number} offset={self.offset}, {self.nbytes} bytes>"


cdef class Arena:
    """The shared memory of one process; any thread may call all methods."""

    def __init__(self):
        self.set_lock(RLock())
        self.refusal = ""
        self.returned = []
        self.regions = {}
        self.index = []
        self.slabs = []
        self._spare = {}
        self.idle = {}
        self.watchers = {}
        _arenas.add(self)

    cdef set_lock(self, lock):
        self._lock = lock
        # Looked up once: every launch of a reduce calls them.
        self.enter = lock.acquire
        self.leave = lock.release
        self.is_inside = lock._is_owned

    # --- Handing out --------------------------------------------------------

    def allocate(self, nbytes) -> Piece:
        """Return at least `nbytes` of populated memory with undefined contents, aligned to 64 bytes or better.

        Raises MemoryError or OSError if there is no memory or no file descriptor left even without idle segments.
        """
        return self.hand_out(size_class(nbytes))

    cdef Piece take(self, uint64_t nbytes):
        """`allocate` for callers in C."""
        return self.hand_out(class_of(nbytes))

    cdef Piece hand_out(self, uint64_t size):
        cdef bint is_slab
        # Whether this thread holds the lock, and a finaliser interrupted it; threading.Condition uses the same method.
        if self.is_inside():
            raise RuntimeError("a finaliser that interrupts the arena can release pieces, but not allocate any")
        cdef Piece piece = self.reuse(size)
        if piece is None:
            is_slab = size < LARGE
            region = Region(self._create(self._slab_bytes() if is_slab else size), is_slab=is_slab)
            piece = self.adopt(region, size)
        if self.idle_bytes and self.idle_bytes > IDLE_BYTES_MIN and self._is_wasteful():
            with self._lock:
                dropped = self._retire(self._idle_bytes_max(), self.clock - IDLE_ALLOCATIONS_MAX)
            self._drop(dropped)
        return piece

    cdef Piece reuse(self, uint64_t size):
        """A piece of memory that is mapped already, or None."""
        # A `with` would look up both methods, which takes as long as the rest of this function.
        self.enter()
        try:
            if self.refusal:
                raise RuntimeError(self.refusal)
            self.clock += 1
            if self.returned:
                self.sort_in()
            return self.reuse_spare(size) if size >= LARGE else self.reuse_slab(size)
        finally:
            self.leave()

    cdef Piece reuse_spare(self, uint64_t size):
        cdef list spare = self._spare.get(size)
        return self.piece_of(spare.pop(), 0, size) if spare else None

    cdef Piece reuse_slab(self, uint64_t size):
        cdef Region slab
        cdef uint64_t offset
        cdef list offsets
        for slab in self.slabs:
            if slab.free:
                offsets = slab.free.get(size)
                if offsets:
                    return self.piece_of(slab, offsets.pop(), size)
        for slab in self.slabs:
            if slab.carve(size, &offset):
                return self.piece_of(slab, offset, size)
        return None

    cdef Piece piece_of(self, Region region, uint64_t offset, uint64_t size):
        # An empty extent, whose address and size are set below: this avoids Python integers.
        cdef Piece piece = Piece.__new__(Piece, region.mapping, 0, 0)
        if region.live == 0 and self.idle.pop(region.number, None) is not None:
            self.idle_bytes -= region.nbytes
        check(offset + size <= region.nbytes, "a piece lies within its segment")
        if not region.is_slab:
            check(region.live == 0, "a large piece is alone in its segment")
        region.live += 1
        self.bytes_in_use += size
        piece.start += offset
        piece.nbytes = size
        piece.offset = offset
        piece.region = region
        piece.arena = self
        return piece

    def _slab_bytes(self) -> int:
        cdef Region slab
        cdef uint64_t total = 0
        # The list may change meanwhile, which only makes the new slab a little smaller or larger.
        for slab in list(self.slabs):
            total += slab.nbytes
        return size_class(max(SLAB_BYTES, total // SLAB_SHARE))

    def _create(self, nbytes):
        try:
            return _create_segment(nbytes)
        except (MemoryError, OSError):
            # The idle memory of this arena may be enough.
            self.trim()
        return _create_segment(nbytes)

    cdef Piece adopt(self, Region region, uint64_t size):
        cdef uint64_t offset = 0
        with self._lock:
            self.regions[region.number] = region
            if region.is_slab:
                self.slabs.append(region)
            self.bytes_mapped += region.nbytes
            self._reindex()
            region.carve(size, &offset)
            return self.piece_of(region, offset, size)

    def _reindex(self):
        self.index = sorted(self.regions.values(), key=_address)

    # --- Taking back --------------------------------------------------------

    cdef int give_back(self, Piece piece) except -1:
        if not self.refusal:
            self.returned.append((piece.region, piece.offset, piece.nbytes))
        return 0

    cdef int sort_in(self) except -1:
        cdef list returned
        cdef Region region
        cdef uint64_t offset, size
        # Pieces that are freed meanwhile go to the new list, which is sorted in next time.
        returned, self.returned = self.returned, []
        for region, offset, size in returned:
            region.restore(offset, size)
            check(size <= self.bytes_in_use, "no more comes back than was handed out")
            self.bytes_in_use -= size
            if region.live == 0:
                region.idle_since = self.clock
                self.idle[region.number] = region
                self.idle_bytes += region.nbytes
                if not region.is_slab:
                    self._spare.setdefault(size, []).append(region)
        return 0

    # --- Returning memory to the system -------------------------------------

    def trim(self, keep_bytes=0) -> None:
        """Return idle segments to the system, longest idle first, until at most `keep_bytes` of them are left."""
        with self._lock:
            self.sort_in()
            dropped = self._retire(keep_bytes, self.clock + 1)
        self._drop(dropped)

    def _idle_bytes_max(self) -> int:
        return max(IDLE_BYTES_MIN, self.bytes_in_use // IDLE_SHARE)

    def _is_wasteful(self) -> bool:
        """Whether there is idle memory to return; an estimate unless the lock is held."""
        cdef Region oldest
        if self.idle_bytes <= self._idle_bytes_max():
            return False
        oldest = next(iter(self.idle.values()), None)
        return oldest is not None and oldest.idle_since < self.clock - IDLE_ALLOCATIONS_MAX

    def _retire(self, keep_bytes, before) -> list:
        """Remove and return regions idle since before `before`, longest idle first, until `keep_bytes` are idle."""
        cdef list dropped = []
        cdef Region region
        for region in list(self.idle.values()):
            if self.idle_bytes <= keep_bytes or region.idle_since >= before:
                break
            del self.idle[region.number], self.regions[region.number]
            kin = self.slabs if region.is_slab else self._spare[region.nbytes]
            # Not `remove`, which raises if the region is missing: Ctrl-C may have come between the two lists.
            kin[:] = [other for other in kin if other is not region]
            self.idle_bytes -= region.nbytes
            self.bytes_mapped -= region.nbytes
            dropped.append(region)
        if dropped:
            self._reindex()
        return dropped

    def _drop(self, list regions) -> None:
        cdef Region region
        for region in regions:
            region.close()
        for watcher in list(self.watchers.values()) if regions else ():
            callback = watcher()
            if callback is not None:
                for region in regions:
                    callback(region.number)

    def watch(self, callback) -> None:
        """Call `callback` with the number of each segment that was returned to the system.

        This happens in any thread and inside finalisers: the callback may record the number, but must not wait or
        raise. A bound method is held weakly and removed with its object; any other callable is held until `unwatch`.
        """
        for key, watcher in list(self.watchers.items()):
            if watcher() is None:
                self.watchers.pop(key, None)
        self.watchers[_key(callback)] = WeakMethod(callback) if hasattr(callback, "__func__") else lambda: callback

    def unwatch(self, callback) -> None:
        """Undo `watch`; a second call does nothing."""
        self.watchers.pop(_key(callback), None)

    def close(self) -> None:
        """Close all file descriptors and allocate nothing more; memory in use stays readable."""
        self.refusal = self.refusal or "the arena is closed"
        cdef Region region
        regions, self.regions, self.index = self.regions, {}, []
        for region in regions.values():
            region.close()

    def __del__(self) -> None:
        self.close()

    # --- Looking up ---------------------------------------------------------

    def find(self, uintptr_t address, uint64_t nbytes):
        """(segment, offset) of a range of memory that is inside one segment, otherwise None."""
        cdef uint64_t offset
        cdef uint32_t segment = self.locate(address, nbytes, &offset)
        return (segment, offset) if segment else None

    cdef uint32_t locate(self, uintptr_t address, uint64_t nbytes, uint64_t *offset) noexcept:
        """The number of the segment; 0: the range is in none."""
        cdef list regions = self.index
        cdef Region region
        cdef Py_ssize_t low = 0, high = len(regions), middle
        while low < high:
            middle = (low + high) // 2
            if (<Region> regions[middle]).address <= address:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        region = <Region> regions[low - 1]
        offset[0] = address - region.address
        return region.number if offset[0] < region.nbytes and nbytes <= region.nbytes - offset[0] else 0

    def mapping(self, segment) -> Mapping:
        """The mapping of a segment; it keeps the memory mapped. Raises KeyError if there is no such segment."""
        return (<Region?> self.regions[segment]).segment.mapping

    def descriptor(self, segment) -> tuple:
        """(fd, bytes) of a segment, for another process. Raises KeyError if there is no such segment."""
        cdef Region region = self.regions[segment]
        return region.segment.fd, region.nbytes

    def statistics(self) -> ArenaStatistics:
        """What the arena holds now."""
        with self._lock:
            self.sort_in()
            mapped, in_use = self.bytes_mapped, self.bytes_in_use
            return ArenaStatistics(len(self.regions), mapped, in_use, mapped - in_use)

    def _disown(self) -> None:
        """In the child of a fork: a thread of the parent may hold the lock, and the memory belongs to the parent."""
        self.set_lock(RLock())
        self.refusal = "this arena belongs to the parent process; use pccl.memory.arena.default()"


def _address(Region region) -> int:
    return region.address


def _key(callback):
    """A key for a callback that does not keep the object of a bound method alive."""
    function = getattr(callback, "__func__", None)
    return callback if function is None else (id(callback.__self__), function)


def _create_segment(nbytes):
    wanted = f"for a segment of {nbytes} bytes of shared memory"
    try:
        return Segment.create(_SEGMENT_NAME, nbytes, populate=True)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            # Lack of memory itself is a MemoryError already; this is the mapping that was refused.
            raise MemoryError(f"no address space left {wanted}; raise `ulimit -v` or vm.max_map_count") from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = "raise `ulimit -n`, or pack tensors with pccl.torch.share_, which needs one for a whole module"
            raise OSError(error.errno, f"no descriptor left {wanted}; {advice}") from error
        raise


# --- The arena of this process ----------------------------------------------

_arenas = WeakSet()
cdef Arena _default = None
_default_lock = allocate_lock()


cpdef Arena default():
    """The arena of this process, created at its first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Arena()
    return _default


def _after_fork() -> None:
    global _default, _default_lock
    _default_lock = allocate_lock()
    _default = None
    for arena in list(_arenas):
        arena._disown()


os.register_at_fork(after_in_child=_after_fork)
