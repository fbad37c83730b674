"""The arena: shared memory that is handed out, taken back and handed out again, page faults long behind it.

Here live the size classes, the free lists, and the question when unused memory goes back to the system. What the
bytes mean, and which process maps them elsewhere, is not known here.

Theory of operation. A *piece* is what callers get: bytes of one segment. From 1 MiB on a piece has a segment of its
own; smaller ones are cut from *slabs*, segments that grow with their number, so that ten thousand small tensors need
some tens of descriptors and not ten thousand. Sizes are rounded up to classes, eight to a doubling, and a freed piece
serves the next request of its class: no system call, no page fault. A slab whose last piece comes back is whole
again and may be cut otherwise.

A segment none of whose bytes are in use is *idle*. Who alternates between the same sizes finds them all idle and
never maps or unmaps. Idle memory is given back, longest idle first, when there is more of it than is reasonable
beside what is in use and when it was not wanted for a great many allocations; or all at once when new memory is
refused, or by `trim()`. The clock is the count of allocations because training steps take milliseconds or hours.

Pieces come back from any thread at any point, also from a finaliser that interrupts the arena itself, in the thread
that holds the lock. So giving back only appends to a queue; the next allocation sorts it in. Nothing slow happens
under the lock: segments are created and destroyed outside it. `find` takes no lock at all: it reads one immutable
index, which is replaced as a whole.

After `os.fork` the child keeps reading what it inherited, but the bytes belong to the parent: in the child the
inherited arena hands out nothing and takes nothing back, and `default()` is a fresh one.
"""

import errno
import os
from _thread import RLock, allocate_lock
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import count
from weakref import WeakMethod, WeakSet

from pccl._core.mapping import Extent, Mapping
from pccl.memory.segments import Segment
from pccl.records import record

ALIGNMENT = 64  # a cache line, and the widest vector of any processor we know
STEPS = 8  # size classes per doubling: at most an eighth of a piece is waste
LARGE_BYTES = 1 << 20  # from here on a piece has its own segment: one descriptor per MiB is affordable
SLAB_BYTES = 4 << 20  # the smallest slab: four of the largest pieces in it, and populated in a millisecond
SLAB_SHARE = 8  # a new slab has at least this fraction of all slabs, so that their number grows only as the logarithm
IDLE_ALLOCATIONS_MAX = 1 << 14  # the longest cycle to expect: a step that stages thousands of tensors one by one
IDLE_BYTES_MIN = 64 << 20  # this much is kept in any case; nobody misses it
IDLE_SHARE = 4  # beside that, a quarter of what is in use: the waste that one accepts of a garbage collector

_SEGMENT_NAME = "pccl-arena"  # as /proc/self/maps shows it
_numbers = count(1)  # of segments; shared by all arenas of the process, so that a number never means two things


@record
class ArenaStatistics:
    """What an arena holds; mapped is in use plus cached."""

    segments: int
    bytes_mapped: int
    bytes_in_use: int
    bytes_cached: int


def size_class(nbytes: int) -> int:
    """The size of the piece that serves a request: a multiple of 64, at most an eighth more from 512 bytes on.

    From 16 MiB on it is a multiple of 2 MiB, the size of a huge page.
    """
    if nbytes < 0:
        raise ValueError(f"a piece cannot have {nbytes} bytes")
    step = max(ALIGNMENT, (1 << nbytes.bit_length()) // (2 * STEPS))
    return max(ALIGNMENT, -(-nbytes // step) * step)


class _Region:
    """One segment of the arena: a slab, or the home of a single large piece."""

    __slots__ = ("address", "cut", "free", "idle_since", "is_slab", "live", "nbytes", "number", "segment")

    def __init__(self, segment: Segment, *, is_slab: bool) -> None:
        self.number = next(_numbers)
        self.segment = segment
        self.address = segment.mapping.address
        self.nbytes = segment.size
        self.is_slab = is_slab
        self.live = 0  # pieces in use
        self.idle_since = 0  # the arena's clock when the last one came back
        self.cut = 0  # bytes of a slab that have been cut into pieces
        self.free: dict[int, list[int]] = {}  # of a slab: size class to offsets

    def carve(self, size: int) -> int:
        """The offset of a new piece, or -1 if no such piece is left uncut."""
        offset = self.cut
        if offset + size > self.nbytes:
            return -1
        self.cut += size
        return offset

    def restore(self, offset: int, size: int) -> None:
        """Takes a piece back; the last one makes the slab whole."""
        self.live -= 1
        if self.live == 0:
            self.cut = 0
            self.free.clear()
        else:
            self.free.setdefault(size, []).append(offset)


class Piece(Extent):
    """Bytes of a segment: `nbytes` at `offset` of number `segment`, here at `address`, to be used through `view`.

    The piece returns to its arena by `release()`, or when nobody refers to it any more; arrays and views made from
    its buffer do. After `release()` the bytes may belong to somebody else, whoever still looks at them.
    """

    __slots__ = ("_arena", "_region", "offset", "segment")

    def __init__(self, _mapping: Mapping, offset: int, _nbytes: int, arena: "Arena", region: _Region) -> None:
        self.segment = region.number
        self.offset = offset
        self._arena = arena
        self._region = region

    def release(self) -> None:
        """Returns the piece to the arena; harmless when done before."""
        if self.surrender():
            self._arena._give_back(self._region, self.offset, self.nbytes)

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Piece segment={self.segment} offset={self.offset}, {self.nbytes} bytes>"


class Arena:
    """Shared memory for one process; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = RLock()  # knows its owner; it is never entered twice
        self._refusal = ""  # why nothing is handed out any more
        self._clock = 0  # allocations so far
        self._returned: deque[tuple[_Region, int, int]] = deque()  # came back, not sorted in yet
        self._regions: dict[int, _Region] = {}  # all, by number
        self._index: tuple[list[int], list[_Region]] = ([], [])  # all, by address; replaced, never changed
        self._slabs: list[_Region] = []  # oldest first, so that the newest run empty
        self._spare: dict[int, list[_Region]] = {}  # idle homes of large pieces by size class, hottest last
        self._idle: dict[int, _Region] = {}  # idle ones of both kinds, longest idle first
        self._idle_bytes = 0
        self._bytes_mapped = 0
        self._bytes_in_use = 0
        self._watchers: dict[object, Callable[[], Callable[[int], None] | None]] = {}  # each returns its callback
        _arenas.add(self)

    # --- Handing out --------------------------------------------------------

    def allocate(self, nbytes: int) -> Piece:
        """At least `nbytes` of populated memory with undefined contents, aligned to 64 bytes or better.

        MemoryError or OSError if there is no memory or no descriptor left even without what lies idle.
        """
        size = size_class(nbytes)
        # Whether this very thread holds the lock, and has been interrupted; threading.Condition asks the same.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("a finaliser that interrupts the arena can release pieces, but not allocate any")
        piece = self._reuse(size)
        if piece is None:
            is_slab = size < LARGE_BYTES
            region = _Region(self._create(self._slab_bytes() if is_slab else size), is_slab=is_slab)
            piece = self._adopt(region, size)
        if self._idle_bytes > IDLE_BYTES_MIN and self._is_wasteful():
            with self._lock:
                dropped = self._retire(self._idle_bytes_max(), self._clock - IDLE_ALLOCATIONS_MAX)
            self._drop(dropped)
        return piece

    def _reuse(self, size: int) -> Piece | None:
        with self._lock:
            if self._refusal:
                raise RuntimeError(self._refusal)
            self._clock += 1
            if self._returned:
                self._sort_in()
            if size >= LARGE_BYTES:
                spare = self._spare.get(size)
                return self._hand_out(spare.pop(), 0, size) if spare else None
            for slab in self._slabs:
                offsets = slab.free.get(size)
                if offsets:
                    return self._hand_out(slab, offsets.pop(), size)
            for slab in self._slabs:
                offset = slab.carve(size)
                if offset >= 0:
                    return self._hand_out(slab, offset, size)
            return None

    def _hand_out(self, region: _Region, offset: int, size: int) -> Piece:
        if region.live == 0 and self._idle.pop(region.number, None) is not None:
            self._idle_bytes -= region.nbytes
        region.live += 1
        self._bytes_in_use += size
        return Piece(region.segment.mapping, offset, size, self, region)

    def _slab_bytes(self) -> int:
        # The list may change meanwhile, which only makes the new slab a little smaller or larger.
        return size_class(max(SLAB_BYTES, sum(slab.nbytes for slab in list(self._slabs)) // SLAB_SHARE))

    def _create(self, nbytes: int) -> Segment:
        try:
            return _create_segment(nbytes)
        except (MemoryError, OSError):
            # What lies idle here may be exactly what is missing.
            self.trim()
        return _create_segment(nbytes)

    def _adopt(self, region: _Region, size: int) -> Piece:
        with self._lock:
            self._regions[region.number] = region
            if region.is_slab:
                self._slabs.append(region)
            self._bytes_mapped += region.nbytes
            self._reindex()
            return self._hand_out(region, region.carve(size), size)

    def _reindex(self) -> None:
        regions = sorted(self._regions.values(), key=_address)
        self._index = ([region.address for region in regions], regions)

    # --- Taking back --------------------------------------------------------

    def _give_back(self, region: _Region, offset: int, size: int) -> None:
        if not self._refusal:
            self._returned.append((region, offset, size))

    def _sort_in(self) -> None:
        while self._returned:
            region, offset, size = self._returned.popleft()
            region.restore(offset, size)
            self._bytes_in_use -= size
            if region.live == 0:
                region.idle_since = self._clock
                self._idle[region.number] = region
                self._idle_bytes += region.nbytes
                if not region.is_slab:
                    self._spare.setdefault(size, []).append(region)

    # --- Giving up ----------------------------------------------------------

    def trim(self, keep_bytes: int = 0) -> None:
        """Gives idle segments back to the system, longest idle first, until at most `keep_bytes` of them are left."""
        with self._lock:
            self._sort_in()
            dropped = self._retire(keep_bytes, self._clock + 1)
        self._drop(dropped)

    def _idle_bytes_max(self) -> int:
        return max(IDLE_BYTES_MIN, self._bytes_in_use // IDLE_SHARE)

    def _is_wasteful(self) -> bool:
        """Whether there is idle memory to give up; a guess unless the lock is held."""
        if self._idle_bytes <= self._idle_bytes_max():
            return False
        oldest = next(iter(self._idle.values()), None)
        return oldest is not None and oldest.idle_since < self._clock - IDLE_ALLOCATIONS_MAX

    def _retire(self, keep_bytes: int, before: int) -> list[_Region]:
        """Forgets idle regions, longest idle first, while there are more bytes and they were in use before then."""
        dropped: list[_Region] = []
        for region in list(self._idle.values()):
            if self._idle_bytes <= keep_bytes or region.idle_since >= before:
                break
            del self._idle[region.number], self._regions[region.number]
            kin = self._slabs if region.is_slab else self._spare[region.nbytes]
            # Not `remove`, which would insist: Ctrl-C may have come between the two lists.
            kin[:] = [other for other in kin if other is not region]
            self._idle_bytes -= region.nbytes
            self._bytes_mapped -= region.nbytes
            dropped.append(region)
        if dropped:
            self._reindex()
        return dropped

    def _drop(self, regions: list[_Region]) -> None:
        for region in regions:
            region.segment.close()
        for watcher in list(self._watchers.values()) if regions else ():
            callback = watcher()
            if callback is not None:
                for region in regions:
                    callback(region.number)

    def watch(self, callback: Callable[[int], None]) -> None:
        """Calls back with the number of each segment that is gone for good.

        That happens in any thread and inside finalisers: the callback may take a note, but never wait or raise. A
        bound method is held weakly and forgotten with its object; any other callable until `unwatch`.
        """
        for key, watcher in list(self._watchers.items()):
            if watcher() is None:
                self._watchers.pop(key, None)
        self._watchers[_key(callback)] = WeakMethod(callback) if hasattr(callback, "__func__") else lambda: callback

    def unwatch(self, callback: Callable[[int], None]) -> None:
        """Undoes `watch`; harmless when done before."""
        self._watchers.pop(_key(callback), None)

    def close(self) -> None:
        """Closes all descriptors and hands out nothing more; memory that somebody still uses stays readable."""
        self._refusal = self._refusal or "the arena is closed"
        regions, self._regions, self._index = self._regions, {}, ([], [])
        for region in regions.values():
            region.segment.close()

    def __del__(self) -> None:
        self.close()

    # --- Looking up ---------------------------------------------------------

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(segment, offset) of a range of memory that lies inside one segment as a whole, otherwise None."""
        starts, regions = self._index
        position = bisect_right(starts, address)
        if position == 0:
            return None
        region = regions[position - 1]
        offset = address - region.address
        return (region.number, offset) if offset + nbytes <= region.nbytes and offset < region.nbytes else None

    def mapping(self, segment: int) -> Mapping:
        """The mapping of a segment; who holds it keeps the memory mapped. KeyError if it is gone."""
        return self._regions[segment].segment.mapping

    def descriptor(self, segment: int) -> tuple[int, int]:
        """(fd, bytes) of a segment, to be passed to another process; KeyError if it is gone."""
        region = self._regions[segment]
        return region.segment.fd, region.nbytes

    def statistics(self) -> ArenaStatistics:
        """What is held at this moment."""
        with self._lock:
            self._sort_in()
            mapped, in_use = self._bytes_mapped, self._bytes_in_use
            return ArenaStatistics(len(self._regions), mapped, in_use, mapped - in_use)

    def _disown(self) -> None:
        """In the child of a fork: the lock may be held by a thread that is not here, and the memory is not ours."""
        self._lock = RLock()
        self._refusal = "this arena belongs to the parent process; use pccl.memory.arena.default()"


def _address(region: _Region) -> int:
    return region.address


def _key(callback: Callable[[int], None]) -> object:
    """What tells callbacks apart without keeping the object of a bound method alive."""
    function = getattr(callback, "__func__", None)
    return callback if function is None else (id(callback.__self__), function)  # type: ignore[attr-defined]


def _create_segment(nbytes: int) -> Segment:
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

_arenas: WeakSet[Arena] = WeakSet()
_default: Arena | None = None
_default_lock = allocate_lock()


def default() -> Arena:
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
