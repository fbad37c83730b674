"""Completion slots: how the peer actor tells the training process that a command is done.

Here live the layout of the table and the life of a slot. What a result or a payload means, how long to wait in
all, and what a late beat implies is decided by the Communicator.

One segment, mapped by both processes, native byte order since it never leaves the host:

    header page   offset    0   magic            8 bytes
                            8   slot count       u32
                           12   slot bytes       u32
                           64   actor's beat     u64, monotonic ns, stored on every tick of the actor
                          128   actor's state    u32, a futex word whose values belong to the actor
    slot i        4096 + 1024 i
                  offset    0   state            u32, a futex word
                            4   sequence         u32, counts the uses of this slot
                            8   result           i32
                           12   length           u32, bytes of payload
                           16   payload          up to 1008 bytes

A slot moves in a circle, and each arrow belongs to one side:

    FREE ──acquire──▶ PENDING ──wait──▶ AWAITED        by the training process
                         └──────┬──────────┘
                             complete                  by the actor
                                ▼
    FREE ◀──release──────────  DONE                    by the training process

AWAITED is PENDING with somebody asleep, or about to be; only then does the actor pay for a wake-up. Both sides
change the state by one atomic operation, so either the waiter finds DONE or the actor finds AWAITED.

Nobody but the actor ends PENDING. A caller who gave up *abandons* the slot: it stays out of use until the actor has
completed it, and `acquire` takes it back when it runs out of others. Hence a completion can never land
in a slot that means something else by now, and a sequence that does not match is a completion sent twice.

The free list is ordinary memory of the training process. It must not be touched in a child of `os.fork`, which
has a copy of the list but shares the slots; the Communicator sees to that.
"""

import os
from _thread import RLock

from pccl._core.park import Stamp, Word
from pccl.memory.segments import Segment

SLOT_COUNT = 1024  # un-awaited operations at a time; a page is touched only when its slots are used
SLOT_BYTES = 1024  # room for a refusal with its reason, or for the fixed results of a collective
PAYLOAD_OFFSET = 16  # bytes of a slot ahead of its payload
PAYLOAD_BYTES_MAX = SLOT_BYTES - PAYLOAD_OFFSET

FREE = 0  # nobody's
PENDING = 1  # the actor owes a completion
DONE = 2  # result and payload are there
AWAITED = 3  # the actor owes a completion and a wake-up

_MAGIC = b"pcclSLOT"
_HEADER_BYTES = 4096  # a page of its own, so that slots never share one with the beat
_COUNT_CELL = 2  # slot count, in units of u32
_SIZE_CELL = 3  # slot bytes, in units of u32
_BEAT_OFFSET = 64  # a cache line of its own: it is written all the time
_ACTOR_OFFSET = 128
_SEQUENCE_MASK = 0xFFFFFFFF
_EVERYBODY = 0x7FFFFFFF  # wakes all threads that wait for the same slot
_ELLIPSIS = "…".encode()


class SlotsExhaustedError(RuntimeError):
    """Every slot belongs to an operation that nobody awaited; await some before launching more."""


class Slot:
    """One use of one slot by the training process, from `acquire` to `release` or `abandon`."""

    __slots__ = ("_table", "_word", "index", "sequence")

    index: int
    sequence: int

    def __init__(self, table: "SlotTable", word: Word, index: int, sequence: int) -> None:
        self._table: SlotTable | None = table
        self._word = word
        self.index = index
        self.sequence = sequence

    @property
    def done(self) -> bool:
        """Whether the actor completed it: one load from memory."""
        return self._table is not None and self._word.load() == DONE

    def wait(self, timeout_ns: int, look_ns: int = 0) -> bool:
        """Sleeps until done, at most `timeout_ns`; False early when a signal arrives, so callers loop.

        Looks for `look_ns` before it goes to sleep: what ends so soon costs nobody a wake-up.
        """
        self._live()
        word = self._word
        if word.load() == DONE or (look_ns and word.look(PENDING, look_ns) and word.load() == DONE):
            return True
        word.compare_exchange(PENDING, AWAITED)
        return word.wait(AWAITED, timeout_ns)

    @property
    def result(self) -> int:
        """The number that the actor completed it with."""
        return self._completed()._results[_cell(self.index) + 2]

    @property
    def payload(self) -> bytes:
        """The bytes that the actor completed it with."""
        table = self._completed()
        begin = _offset(self.index) + PAYLOAD_OFFSET
        return bytes(table._bytes[begin : begin + table._cells[_cell(self.index) + 3]])

    def release(self) -> None:
        """Gives the slot back, which must be done; result and payload are gone then."""
        table = self._completed()
        self._table = None
        table._recycle(self.index, self._word)

    def abandon(self) -> None:
        """Gives up waiting; the slot returns to use once the actor has completed it."""
        table = self._live()
        if self._word.load() == DONE:
            self.release()
        else:
            self._table = None
            table._abandoned.append(self.index)

    def _live(self) -> "SlotTable":
        if self._table is None:
            raise ValueError(f"slot {self.index} with sequence {self.sequence} was released or abandoned")
        return self._table

    def _completed(self) -> "SlotTable":
        table = self._live()
        if self._word.load() != DONE:
            raise ValueError(f"slot {self.index} with sequence {self.sequence} is not done: wait for it or abandon it")
        return table

    def __repr__(self) -> str:
        state = "given back" if self._table is None else "done" if self.done else "pending"
        return f"<Slot {self.index} sequence={self.sequence} {state}>"


class SlotTable:
    """All slots of one communicator. The training process creates it and acquires; the actor attaches and completes."""

    __slots__ = (
        "_abandoned",
        "_beat",
        "_bytes",
        "_cells",
        "_free",
        "_lock",
        "_results",
        "_words",
        "actor",
        "count",
        "segment",
    )

    segment: Segment
    count: int
    actor: Word

    def __init__(self, segment: Segment, free: list[int]) -> None:
        """Use `create` or `attach`."""
        self.segment = segment
        self._bytes = segment.view
        self._cells = segment.view.cast("I")
        self._results = segment.view.cast("i")
        self._beat = Stamp(segment.view, _BEAT_OFFSET)
        self.actor = Word(segment.view, _ACTOR_OFFSET)
        self.count = self._cells[_COUNT_CELL]
        # One word per slot ever used; a list of references costs less than a search.
        self._words: list[Word | None] = [None] * self.count
        # The last one freed is the next one used, so that few pages are touched.
        self._free = free
        self._abandoned: list[int] = []
        self._lock = RLock()

    @classmethod
    def create(cls, count: int = SLOT_COUNT) -> "SlotTable":
        """A table of `count` free slots, for the process that waits."""
        if count <= 0:
            raise ValueError(f"a table has at least one slot, not {count}")
        segment = Segment.create("pccl-slots", _HEADER_BYTES + count * SLOT_BYTES)
        header = segment.view.cast("I")
        header[_COUNT_CELL] = count
        header[_SIZE_CELL] = SLOT_BYTES
        segment.view[: len(_MAGIC)] = _MAGIC
        return cls(segment, list(range(count - 1, -1, -1)))

    @classmethod
    def attach(cls, fd: int) -> "SlotTable":
        """The table behind `fd`, for the process that completes; `fd` is ours on success."""
        header = memoryview(os.pread(fd, 16, 0))
        if header[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"descriptor {fd} is no table of completion slots")
        _, _, count, slot_bytes = header.cast("I")
        if slot_bytes != SLOT_BYTES:
            raise ValueError(f"the slots behind descriptor {fd} have {slot_bytes} bytes, ours {SLOT_BYTES}")
        return cls(Segment.attach(fd, _HEADER_BYTES + count * SLOT_BYTES), [])

    def acquire(self) -> Slot:
        """A slot in state PENDING, for one command; from any thread of the process that created the table."""
        # Lists pop and append atomically, so the common case takes no lock.
        try:
            index = self._free.pop()
        except IndexError:
            index = self._reclaim()
        word = self._word(index)
        cell = _cell(index) + 1
        sequence = self._cells[cell] = (self._cells[cell] + 1) & _SEQUENCE_MASK
        word.store(PENDING)
        return Slot(self, word, index, sequence)

    def complete(self, index: int, sequence: int, result: int, payload: bytes = b"") -> bool:
        """Publishes a result and wakes who waits for it; False, and nothing touched, when nobody is owed one.

        A payload that does not fit is taken for text and cut.
        """
        if not 0 <= index < self.count:
            raise ValueError(f"slot {index} is not in a table of {self.count}")
        cell = _cell(index)
        word = self._word(index)
        if self._cells[cell + 1] != sequence or word.load() not in (PENDING, AWAITED):
            return False
        if len(payload) > PAYLOAD_BYTES_MAX:
            payload = _cut(payload)
        begin = _offset(index) + PAYLOAD_OFFSET
        self._bytes[begin : begin + len(payload)] = payload
        self._results[cell + 2] = result
        self._cells[cell + 3] = len(payload)
        if word.exchange(DONE) == AWAITED:
            word.wake(_EVERYBODY)
        return True

    def beat(self, now_ns: int) -> None:
        """The actor is alive and was awake at `now_ns` of the monotonic clock."""
        self._beat.store(now_ns)

    @property
    def last_beat_ns(self) -> int:
        """When the actor was last awake; 0 before its first beat."""
        return self._beat.load()

    def close(self) -> None:
        """Gives up the segment; slots still held stay readable, and the memory goes with the last of them."""
        self._free.clear()
        self._abandoned.clear()
        self.segment.close()

    def __enter__(self) -> "SlotTable":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _word(self, index: int) -> Word:
        word = self._words[index]
        if word is None:
            word = self._words[index] = Word(self._bytes, _offset(index))
        return word

    def _recycle(self, index: int, word: Word) -> None:
        word.store(FREE)
        self._free.append(index)

    def _reclaim(self) -> int:
        # Takes back what the actor completed after its callers had gone. The lock keeps a second thread from finding
        # nothing while the first one sorts; it is re-entrant for signal handlers.
        with self._lock:
            owed: list[int] = []
            try:
                while self._abandoned:
                    index = self._abandoned.pop()
                    word = self._word(index)
                    if word.load() == DONE:
                        self._recycle(index, word)
                    else:
                        owed.append(index)
            finally:
                self._abandoned.extend(owed)
            try:
                return self._free.pop()
            except IndexError:
                raise self._exhausted() from None

    def _exhausted(self) -> Exception:
        if self.segment.closed:
            return ValueError("the table of completion slots is closed")
        abandoned = len(self._abandoned)
        return SlotsExhaustedError(
            f"all {self.count} completion slots are in use: {self.count - abandoned} operations were launched and "
            f"not awaited, {abandoned} were given up and are still running; await some before launching more"
        )


def _offset(index: int) -> int:
    return _HEADER_BYTES + index * SLOT_BYTES


def _cell(index: int) -> int:
    return _offset(index) // 4


def _cut(text: bytes) -> bytes:
    # Steps back over the continuation bytes of a character that would be split.
    end = PAYLOAD_BYTES_MAX - len(_ELLIPSIS)
    while end > 0 and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end] + _ELLIPSIS
