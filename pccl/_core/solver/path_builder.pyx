# cython: language_level=3, cdivision=True, boundscheck=False, wraparound=False, auto_pickle=False
"""Rings over the edges of a directed graph, woven from steps that are forced.

A ring takes one step out of every member and one into every member. So a member with one exit left must take it, and
one with one entry left must be entered there; every step that is taken closes all other exits of its source and all
other entries of its target; and a path may not close on itself before it holds everybody. These three rules are
followed until nothing follows any more. If they leave a member without exit or entry before anything was chosen, there
is no ring at all, and that is a proof. Otherwise somebody with the fewest ways left chooses, by chance among equals,
the way that fewest others have, and the rules go on.

Choices are not taken back. Where they led into a dead end, the paths that were woven are laid end to end, with a few
steps that the graph does not have: a beginning for `local_search`, which is good at mending few bad steps, and bad at
foreseeing forced ones.
"""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from pccl._core.system.posix cimport lowest_bit_u64


@cython.final
cdef class Weaver:
    """`prepare` for a graph, then `write` as many rings as wanted."""

    def __cinit__(self, int count):
        self.count = count
        self.words = (count + 63) // 64
        self.nbytes = 2 * sizeof(uint64_t) * count * self.words + 6 * sizeof(int32_t) * count
        self.root_memory = calloc(1, self.nbytes)
        self.weave_memory = calloc(1, self.nbytes)
        # Ways only become fewer, so everybody is down to one way out and to one way in at most once.
        self.queue = <int32_t *> calloc(2 * count, sizeof(int32_t))
        if not (self.root_memory and self.weave_memory and self.queue):
            raise MemoryError
        self.lay_out(&self.root, <char *> self.root_memory)
        self.lay_out(&self.weave, <char *> self.weave_memory)

    def __dealloc__(self):
        free(self.root_memory)
        free(self.weave_memory)
        free(self.queue)

    cdef void lay_out(self, Weave *weave, char *memory) noexcept nogil:
        """Both weaves have the same layout, so that one is copied over the other at once."""
        cdef size_t bits = <size_t> self.count * self.words
        cdef int32_t *numbers = <int32_t *> (memory + 2 * bits * sizeof(uint64_t))
        weave.leaving = <uint64_t *> memory
        weave.entering = weave.leaving + bits
        weave.exits = numbers
        weave.entries = numbers + self.count
        weave.following = numbers + 2 * self.count
        weave.preceding = numbers + 3 * self.count
        weave.last_of = numbers + 4 * self.count
        weave.first_of = numbers + 5 * self.count

    cdef bint prepare(self, const double *rates, double goal) noexcept nogil:
        cdef Weave *weave = &self.weave
        cdef int source, target
        memset(self.weave_memory, 0, self.nbytes)
        weave.taken = 0
        self.queued = 0
        self.dead_end = False
        for source in range(self.count):
            weave.following[source] = weave.preceding[source] = -1
            weave.first_of[source] = weave.last_of[source] = source
            for target in range(self.count):
                if source != target and rates[<Py_ssize_t> source * self.count + target] >= goal:
                    weave.leaving[source * self.words + (target >> 6)] |= <uint64_t> 1 << (target & 63)
                    weave.entering[target * self.words + (source >> 6)] |= <uint64_t> 1 << (source & 63)
                    weave.exits[source] += 1
                    weave.entries[target] += 1
        for source in range(self.count):
            self.check_exits(source)
            self.check_entries(source)
        self.follow()
        memcpy(self.root_memory, self.weave_memory, self.nbytes)
        self.root.taken = weave.taken
        return not self.dead_end

    cdef bint write(self, uint64_t *chance, int32_t *order) noexcept nogil:
        cdef Weave *weave = &self.weave
        cdef int first, here, place = 0
        memcpy(self.weave_memory, self.root_memory, self.nbytes)
        weave.taken = self.root.taken
        while self.choose(chance):
            self.follow()
        if weave.taken == self.count:
            weave.preceding[0] = -1  # cut it open where it is to begin
        for first in range(self.count):
            here = first if weave.preceding[first] < 0 else -1
            while here >= 0 and place < self.count:
                order[place] = here
                place += 1
                here = weave.following[here]
        return weave.taken == self.count

    # ------------------------------------------------------------------------------------------ rules

    cdef void follow(self) noexcept nogil:
        """Take every step that is forced, and those that are forced by it."""
        cdef Weave *weave = &self.weave
        cdef const uint64_t *row
        cdef int member, word
        while self.queued:
            self.queued -= 1
            member = self.queue[self.queued]
            if member < self.count:
                if weave.following[member] >= 0 or weave.exits[member] != 1:
                    continue
                row = weave.leaving + member * self.words
            else:
                if weave.preceding[member - self.count] >= 0 or weave.entries[member - self.count] != 1:
                    continue
                row = weave.entering + (member - self.count) * self.words
            word = 0
            while row[word] == 0:
                word += 1
            word = word * 64 + lowest_bit_u64(row[word])
            if member < self.count:
                self.take(member, word)
            else:
                self.take(word, member - self.count)

    cdef void take(self, int source, int target) noexcept nogil:
        """This step is part of the ring."""
        cdef Weave *weave = &self.weave
        cdef int word, other, first, last
        cdef uint64_t bits
        weave.following[source] = target
        weave.preceding[target] = source
        weave.taken += 1
        for word in range(self.words):
            bits = weave.leaving[source * self.words + word]
            while bits:
                other = word * 64 + lowest_bit_u64(bits)
                bits &= bits - 1
                self.forbid(source, other)
            bits = weave.entering[target * self.words + word]
            while bits:
                other = word * 64 + lowest_bit_u64(bits)
                bits &= bits - 1
                self.forbid(other, target)
        first, last = weave.first_of[source], weave.last_of[target]
        weave.last_of[first] = last
        weave.first_of[last] = first
        if weave.taken < self.count - 1:
            self.forbid(last, first)

    cdef void forbid(self, int source, int target) noexcept nogil:
        """This edge cannot be part of the ring."""
        cdef Weave *weave = &self.weave
        cdef uint64_t *row = weave.leaving + source * self.words + (target >> 6)
        cdef uint64_t bit = <uint64_t> 1 << (target & 63)
        if not row[0] & bit:
            return
        row[0] &= ~bit
        weave.entering[target * self.words + (source >> 6)] &= ~(<uint64_t> 1 << (source & 63))
        weave.exits[source] -= 1
        weave.entries[target] -= 1
        self.check_exits(source)
        self.check_entries(target)

    cdef void check_exits(self, int source) noexcept nogil:
        if self.weave.following[source] < 0:
            if self.weave.exits[source] == 0:
                self.dead_end = True
            elif self.weave.exits[source] == 1:
                self.queue[self.queued] = source
                self.queued += 1

    cdef void check_entries(self, int target) noexcept nogil:
        if self.weave.preceding[target] < 0:
            if self.weave.entries[target] == 0:
                self.dead_end = True
            elif self.weave.entries[target] == 1:
                self.queue[self.queued] = self.count + target
                self.queued += 1

    # ------------------------------------------------------------------------------------------ choices

    cdef bint choose(self, uint64_t *chance) noexcept nogil:
        """Somebody with the fewest ways left takes one. False if nobody has any."""
        cdef Weave *weave = &self.weave
        cdef int member, ways, fewest = 2 * self.count, chosen = -1, equals = 0
        for member in range(2 * self.count):
            ways = weave.exits[member] if member < self.count else weave.entries[member - self.count]
            if ways == 0 or ways > fewest:
                continue
            if ways < fewest:
                fewest, equals = ways, 0
            equals += 1
            if draw(chance, equals) == 0:
                chosen = member
        if chosen < 0:
            return False
        if chosen < self.count:
            self.take(chosen, self.pick(weave.leaving + chosen * self.words, weave.entries, chance))
        else:
            chosen -= self.count
            self.take(self.pick(weave.entering + chosen * self.words, weave.exits, chance), chosen)
        return True

    cdef int pick(self, const uint64_t *row, const int32_t *degrees, uint64_t *chance) noexcept nogil:
        """Of the members in a row, one that fewest others can have."""
        cdef int word, member, fewest = self.count + 1, chosen = -1, equals = 0
        cdef uint64_t bits
        for word in range(self.words):
            bits = row[word]
            while bits:
                member = word * 64 + lowest_bit_u64(bits)
                bits &= bits - 1
                if degrees[member] > fewest:
                    continue
                if degrees[member] < fewest:
                    fewest, equals = degrees[member], 0
                equals += 1
                if draw(chance, equals) == 0:
                    chosen = member
        return chosen
