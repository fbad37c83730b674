# cython: language_level=3, cdivision=True, boundscheck=False, wraparound=False, auto_pickle=False
"""Rings over the edges of a directed graph, built from forced steps.

A ring takes one step out of every member and one into every member. So a member with one exit left must take it, and a
member with one entry left must be entered there. Every step that is taken closes all other exits of its source and all
other entries of its target. A path must not close before it holds all members. These three rules are applied until they
change nothing. If a member has no exit or no entry left before any choice was made, this proves that there is no
ring. Otherwise a member with the fewest choices left takes, at random among equals, the step that fewest others can
take, and the rules are applied again.

Choices are not undone. After a dead end, the paths are joined with a few steps that the graph does not have. Such a
ring is a start for `local_search`, which repairs a few bad steps well, but does not find forced steps.
"""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from pccl._core.system.posix cimport lowest_bit_u64


@cython.final
cdef class PathBuilder:
    """Builds rings: call `prepare` with a graph, then `write` for each ring."""

    def __cinit__(self, int count):
        self.count = count
        self.words = (count + 63) // 64
        self.nbytes = 2 * sizeof(uint64_t) * count * self.words + 6 * sizeof(int32_t) * count
        self.root_memory = calloc(1, self.nbytes)
        self.partial_memory = calloc(1, self.nbytes)
        # Edges are only removed, so a member comes down to one exit at most once, and to one entry at most once.
        self.queue = <int32_t *> calloc(2 * count, sizeof(int32_t))
        if not (self.root_memory and self.partial_memory and self.queue):
            raise MemoryError
        self.lay_out(&self.root, <char *> self.root_memory)
        self.lay_out(&self.partial, <char *> self.partial_memory)

    def __dealloc__(self):
        free(self.root_memory)
        free(self.partial_memory)
        free(self.queue)

    cdef void lay_out(self, PartialRing *partial, char *memory) noexcept nogil:
        """Point the fields into `memory`, at the same offsets for both, so that one can be copied to the other."""
        cdef size_t bits = <size_t> self.count * self.words
        cdef int32_t *numbers = <int32_t *> (memory + 2 * bits * sizeof(uint64_t))
        partial.leaving = <uint64_t *> memory
        partial.entering = partial.leaving + bits
        partial.exits = numbers
        partial.entries = numbers + self.count
        partial.following = numbers + 2 * self.count
        partial.preceding = numbers + 3 * self.count
        partial.last_of = numbers + 4 * self.count
        partial.first_of = numbers + 5 * self.count

    cdef bint prepare(self, const double *rates, double goal) noexcept nogil:
        cdef PartialRing *partial = &self.partial
        cdef int source, target
        memset(self.partial_memory, 0, self.nbytes)
        partial.taken = 0
        self.queued = 0
        self.dead_end = False
        for source in range(self.count):
            partial.following[source] = partial.preceding[source] = -1
            partial.first_of[source] = partial.last_of[source] = source
            for target in range(self.count):
                if source != target and rates[<Py_ssize_t> source * self.count + target] >= goal:
                    partial.leaving[source * self.words + (target >> 6)] |= <uint64_t> 1 << (target & 63)
                    partial.entering[target * self.words + (source >> 6)] |= <uint64_t> 1 << (source & 63)
                    partial.exits[source] += 1
                    partial.entries[target] += 1
        for source in range(self.count):
            self.check_exits(source)
            self.check_entries(source)
        self.follow()
        memcpy(self.root_memory, self.partial_memory, self.nbytes)
        self.root.taken = partial.taken
        return not self.dead_end

    cdef bint write(self, uint64_t *chance, int32_t *order) noexcept nogil:
        cdef PartialRing *partial = &self.partial
        cdef int first, here, position = 0
        memcpy(self.partial_memory, self.root_memory, self.nbytes)
        partial.taken = self.root.taken
        while self.choose(chance):
            self.follow()
        if partial.taken == self.count:
            partial.preceding[0] = -1  # cut the ring open at its first member
        for first in range(self.count):
            here = first if partial.preceding[first] < 0 else -1
            while here >= 0 and position < self.count:
                order[position] = here
                position += 1
                here = partial.following[here]
        return partial.taken == self.count

    # ------------------------------------------------------------------------------------------ rules

    cdef void follow(self) noexcept nogil:
        """Take every forced step, and the steps that are forced by it."""
        cdef PartialRing *partial = &self.partial
        cdef const uint64_t *row
        cdef int member, word
        while self.queued:
            self.queued -= 1
            member = self.queue[self.queued]
            if member < self.count:
                if partial.following[member] >= 0 or partial.exits[member] != 1:
                    continue
                row = partial.leaving + member * self.words
            else:
                if partial.preceding[member - self.count] >= 0 or partial.entries[member - self.count] != 1:
                    continue
                row = partial.entering + (member - self.count) * self.words
            word = 0
            while row[word] == 0:
                word += 1
            word = word * 64 + lowest_bit_u64(row[word])
            if member < self.count:
                self.take(member, word)
            else:
                self.take(word, member - self.count)

    cdef void take(self, int source, int target) noexcept nogil:
        """Make this step part of the ring, and forbid the edges that it excludes."""
        cdef PartialRing *partial = &self.partial
        cdef int word, other, first, last
        cdef uint64_t bits
        partial.following[source] = target
        partial.preceding[target] = source
        partial.taken += 1
        for word in range(self.words):
            bits = partial.leaving[source * self.words + word]
            while bits:
                other = word * 64 + lowest_bit_u64(bits)
                bits &= bits - 1
                self.forbid(source, other)
            bits = partial.entering[target * self.words + word]
            while bits:
                other = word * 64 + lowest_bit_u64(bits)
                bits &= bits - 1
                self.forbid(other, target)
        first, last = partial.first_of[source], partial.last_of[target]
        partial.last_of[first] = last
        partial.first_of[last] = first
        if partial.taken < self.count - 1:
            self.forbid(last, first)

    cdef void forbid(self, int source, int target) noexcept nogil:
        """Remove an edge that cannot be part of the ring."""
        cdef PartialRing *partial = &self.partial
        cdef uint64_t *row = partial.leaving + source * self.words + (target >> 6)
        cdef uint64_t bit = <uint64_t> 1 << (target & 63)
        if not row[0] & bit:
            return
        row[0] &= ~bit
        partial.entering[target * self.words + (source >> 6)] &= ~(<uint64_t> 1 << (source & 63))
        partial.exits[source] -= 1
        partial.entries[target] -= 1
        self.check_exits(source)
        self.check_entries(target)

    cdef void check_exits(self, int source) noexcept nogil:
        if self.partial.following[source] < 0:
            if self.partial.exits[source] == 0:
                self.dead_end = True
            elif self.partial.exits[source] == 1:
                self.queue[self.queued] = source
                self.queued += 1

    cdef void check_entries(self, int target) noexcept nogil:
        if self.partial.preceding[target] < 0:
            if self.partial.entries[target] == 0:
                self.dead_end = True
            elif self.partial.entries[target] == 1:
                self.queue[self.queued] = self.count + target
                self.queued += 1

    # ------------------------------------------------------------------------------------------ choices

    cdef bint choose(self, uint64_t *chance) noexcept nogil:
        """Take a step of a member that has the fewest choices left. False if no member has any."""
        cdef PartialRing *partial = &self.partial
        cdef int member, ways, fewest = 2 * self.count, chosen = -1, equals = 0
        for member in range(2 * self.count):
            ways = partial.exits[member] if member < self.count else partial.entries[member - self.count]
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
            self.take(chosen, self.pick(partial.leaving + chosen * self.words, partial.entries, chance))
        else:
            chosen -= self.count
            self.take(self.pick(partial.entering + chosen * self.words, partial.exits, chance), chosen)
        return True

    cdef int pick(self, const uint64_t *row, const int32_t *degrees, uint64_t *chance) noexcept nogil:
        """Return a member of a row that has the smallest degree, at random among equals."""
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
