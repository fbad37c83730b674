# cython: language_level=3, cdivision=True, boundscheck=False, wraparound=False, auto_pickle=False
"""Local search for large rings: exchange two stretches while that helps, perturb the ring, and undo that if it did not.

**The move.** Steps have a direction, so a stretch may never be reversed. Only one exchange of three steps keeps all
directions: remove three steps, and walk the stretches between them in the other order:

    source > A…a > B…b > C… source     becomes     source > B…b > A…a > C… source

An exchange that helps makes the step of at least one source faster. So it is enough to try, for each source, the
targets that are faster, best first, and every third cut for each of them. Only sources whose step has changed are
examined again.

**The perturbation** cuts a random short stretch into three parts and walks them in opposite order, with four new
steps: no single exchange undoes it. While the ring has steps below the goal, a perturbation cuts at one of those.

**The goal** is the rate that no step should be below. A slower step has a penalty that is larger than the cost of any
ring, so the one sum that is minimised counts slow steps first. A ring without penalties has reached its goal. The first
goal is the bound: the highest rate that is not refuted. A rate is refuted if its edges do not connect all members, or
if they force steps that contradict each other. Attempts at a goal begin with rings of the `path_builder`; if they fail,
the next goal is half way between this goal and the best known rate. When no higher goal is reached, attempts improve
the sum. Attempts at goals and at the sum take turns, with more perturbations each time.

Deterministic for a given start, seed and number of perturbations: each line draws at most one random number, because C
does not define the order in which arguments are evaluated. The clock is used only to stop.
"""

cimport cython
from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from pccl._core.system.futex cimport now_ns

from .path_builder cimport PathBuilder, draw

cdef double RATE_MIN = 1e-6
cdef int64_t PENALTY = (<int64_t> 1) << (COST_BITS + 11)

cdef enum:
    STRETCH_MAX = 30                # members of each part that is cut: enough to matter, few enough to repair quickly
    PERTURBATIONS_PER_MEMBER = 2    # of the first attempt at a goal; later attempts have more
    SUM_SHARE = 20                  # attempts at the sum have this many times the perturbations of an attempt at a goal
    BEGINNINGS = 4                  # starts for each goal
    LIFTS_MAX = 12                  # goals in a row: each halves the distance, as a logarithm, between reached and not
    HALVINGS_MAX = 64               # for the bound: enough to distinguish any two rates of a network
    ROUNDS_GROWING = 20             # after this many rounds attempts do not become longer


@cython.final
cdef class Search:
    """A ring that is being improved, and the best ring so far. Only the constructor needs the GIL."""

    def __cinit__(self, int count, uint64_t seed):
        cdef size_t pairs = <size_t> count * count
        if not MEMBERS_MIN <= count <= MEMBERS_MAX:
            raise ValueError(f"a search is for rings of {MEMBERS_MIN} to {MEMBERS_MAX} members, not {count}")
        self.count = count
        self.chance = seed
        self.weights = <int64_t *> malloc(pairs * sizeof(int64_t))
        self.weights_into = <int64_t *> malloc(pairs * sizeof(int64_t))
        self.fastest = <int32_t *> malloc(pairs * sizeof(int32_t))
        self.ring = <int32_t *> calloc(2 * count, sizeof(int32_t))
        self.steps = <int64_t *> calloc(2 * count, sizeof(int64_t))
        self.position = <int32_t *> calloc(count, sizeof(int32_t))
        self.spare = <int32_t *> calloc(count, sizeof(int32_t))
        self.saved_ring = <int32_t *> calloc(2 * count, sizeof(int32_t))
        self.saved_steps = <int64_t *> calloc(2 * count, sizeof(int64_t))
        self.saved_position = <int32_t *> calloc(count, sizeof(int32_t))
        self.queue = <int32_t *> calloc(count, sizeof(int32_t))
        self.queued = <uint8_t *> calloc(count, sizeof(uint8_t))
        self.best = <int32_t *> calloc(count, sizeof(int32_t))
        self.order = <int32_t *> calloc(count, sizeof(int32_t))
        self.builder = PathBuilder(count)
        if not (self.weights and self.weights_into and self.fastest and self.ring and self.steps and self.position
                and self.spare and self.saved_ring and self.saved_steps and self.saved_position
                and self.queue and self.queued and self.best and self.order):
            raise MemoryError

    def __dealloc__(self):
        free(self.weights)
        free(self.weights_into)
        free(self.fastest)
        free(self.ring)
        free(self.steps)
        free(self.position)
        free(self.spare)
        free(self.saved_ring)
        free(self.saved_steps)
        free(self.saved_position)
        free(self.queue)
        free(self.queued)
        free(self.best)
        free(self.order)

    # ------------------------------------------------------------------------------------------ from outside

    cdef void begin(self, const int32_t *order) noexcept nogil:
        cdef int source
        for source in range(self.count):
            self.sort_targets(source)
        self.find_bound()
        if order != NULL:
            self.load(order)
            self.aim(RATE_MIN)
            self.note()
        self.go_greedily()
        self.aim(RATE_MIN)
        self.note()

    cdef bint run(self, int64_t perturbations, int64_t deadline_ns) noexcept nogil:
        cdef int64_t quota = PERTURBATIONS_PER_MEMBER * self.count
        cdef int rounds = 0
        self.perturbations_left = perturbations
        self.deadline_ns = deadline_ns
        self.stopped = False
        if self.bound <= 0:
            return True
        while True:
            self.lift(quota)
            if self.is_proven():
                return True
            if self.best_bottleneck > 0:
                self.load(self.best)
                if rounds & 1:
                    self.scramble()
                self.attempt(self.best_bottleneck, SUM_SHARE * quota, False)
            if self.perturbations_left <= 0 or self.stopped:
                return self.is_proven()
            if rounds < ROUNDS_GROWING:
                rounds += 1
                quota += quota >> 1

    cdef bint is_proven(self) noexcept nogil:
        """Whether it is proven that no ring is better: the slowest step is at its bound, and no other ring costs less.

        The latter is known if all steps are forced, or if every step is the best of its source, or of its target.
        """
        cdef int64_t out = 0, into = 0, least_out, least_into
        cdef int one, other
        if self.best_bottleneck < self.bound:
            return False
        self.builder.prepare(self.rates, self.best_bottleneck)
        if self.builder.root.taken == self.count:
            return True
        self.aim(self.best_bottleneck)
        for one in range(self.count):
            least_out = least_into = PENALTY
            for other in range(self.count):
                if other != one:
                    least_out = min(least_out, self.weights[one * self.count + other])
                    least_into = min(least_into, self.weights_into[one * self.count + other])
            out += least_out
            into += least_into
        return self.best_total <= max(out, into)

    # ------------------------------------------------------------------------------------------ goals

    cdef void find_bound(self) noexcept nogil:
        """Find the highest goal that is not refuted: all members are connected, and forced steps do not contradict."""
        cdef double goal, refuted
        cdef int _tries
        self.bound = goal = min(self.widest(False), self.widest(True))
        if goal <= 0 or self.builder.prepare(self.rates, goal):
            return
        self.bound, refuted = 0, goal
        for _tries in range(HALVINGS_MAX):
            goal = self.rate_between(self.bound, refuted)
            if goal <= 0:
                return
            if self.builder.prepare(self.rates, goal):
                self.bound = goal
            else:
                refuted = goal
        self.bound = refuted  # the rates between the two were not tried, so only this bound is proven

    cdef void lift(self, int64_t quota) noexcept nogil:
        """Make the slowest step faster: try the bound, then goals between the best rate and the last failed goal."""
        cdef double goal = self.bound, unreached = self.bound
        cdef int _tries, _attempts
        for _tries in range(LIFTS_MAX):
            self.builder.prepare(self.rates, goal)
            for _attempts in range(BEGINNINGS):
                if goal <= self.best_bottleneck or self.perturbations_left <= 0 or self.stopped:
                    break
                self.builder.write(&self.chance, self.order)
                self.load(self.order)
                self.attempt(goal, quota, True)
            if goal > self.best_bottleneck:
                unreached = goal
            goal = self.rate_between(self.best_bottleneck, unreached)
            if goal <= 0 or self.perturbations_left <= 0 or self.stopped:
                return

    cdef double widest(self, bint into) noexcept nogil:
        """The highest rate whose edges lead from member 0 to all others, or from all others to it; 0 if none does."""
        cdef int count = self.count, one, nearest
        cdef double width, bound = INFINITY
        cdef double *widths = <double *> self.saved_steps  # not in use yet
        for one in range(count):
            self.queued[one] = one == 0  # reused here for: members that are reached
            widths[one] = self.rates[<Py_ssize_t> one * count if into else one]
        for _ in range(count - 1):
            nearest = 0
            for one in range(1, count):
                if not self.queued[one] and (nearest == 0 or widths[one] > widths[nearest]):
                    nearest = one
            self.queued[nearest] = True
            width = widths[nearest]
            bound = min(bound, width)
            for one in range(1, count):
                widths[one] = max(widths[one], min(width, self.rates[
                    <Py_ssize_t> one * count + nearest if into else <Py_ssize_t> nearest * count + one
                ]))
        for one in range(count):
            self.queued[one] = False
        return bound

    cdef double rate_between(self, double low, double high) noexcept nogil:
        """A rate of the table about half way between these two; 0 if there is none between them."""
        cdef double middle = sqrt(low * high), below = 0, above = high, rate
        cdef Py_ssize_t index
        for index in range(<Py_ssize_t> self.count * self.count):
            rate = self.rates[index]
            if low < rate < high:
                if middle <= rate < above:
                    above = rate
                elif below < rate < middle:
                    below = rate
        return above if above < high else below

    cdef void aim(self, double goal) noexcept nogil:
        """Compute the weights of all steps and of the ring for this goal."""
        cdef int count = self.count, source, target
        cdef Py_ssize_t index
        cdef int64_t weight
        for source in range(count):
            for target in range(count):
                index = <Py_ssize_t> source * count + target
                weight = self.costs[index]
                if self.rates[index] < goal:
                    weight += PENALTY
                self.weights[index] = weight
                self.weights_into[<Py_ssize_t> target * count + source] = weight
        self.weight = 0
        for source in range(count):
            self.weigh(source)
            self.weight += self.steps[source]

    cdef bint attempt(self, double goal, int64_t quota, bint until_reached) noexcept nogil:
        """Perturb the present ring, at most `quota` times. Returns whether the goal is reached."""
        cdef int source
        cdef int64_t before
        self.aim(goal)
        for source in range(self.count):
            self.push(self.ring[source])
        self.descend()
        self.note()
        while quota > 0 and self.perturbations_left > 0 and not self.stopped:
            if until_reached and self.weight < PENALTY:
                return True
            quota -= 1
            self.perturbations_left -= 1
            before = self.weight
            self.save()
            self.perturb()
            self.descend()
            if self.weight > before:
                self.restore(before)
            elif self.weight < before:
                self.note()
        return self.weight < PENALTY

    cdef void note(self) noexcept nogil:
        """Keep the ring if it is the best so far."""
        cdef double bottleneck = INFINITY
        cdef int position
        if self.weight >= PENALTY:
            return
        for position in range(self.count):
            bottleneck = min(
                bottleneck, self.rates[<Py_ssize_t> self.ring[position] * self.count + self.ring[position + 1]]
            )
        if bottleneck > self.best_bottleneck or (
            bottleneck == self.best_bottleneck and self.weight < self.best_total
        ):
            self.best_bottleneck = bottleneck
            self.best_total = self.weight
            memcpy(self.best, self.ring, self.count * sizeof(int32_t))

    # ------------------------------------------------------------------------------------------ moves

    cdef void descend(self) noexcept nogil:
        """Exchange until no exchange at a queued member helps."""
        cdef int32_t source
        while self.queue_length:
            if self.deadline_ns and now_ns() >= self.deadline_ns:
                self.stopped = True
            source = self.queue[self.queue_begin]
            self.queue_begin = self.queue_begin + 1 if self.queue_begin + 1 < self.count else 0
            self.queue_length -= 1
            self.queued[source] = False
            if not self.stopped:
                self.improve(source)

    cdef bint improve(self, int32_t source) noexcept nogil:
        """Make the best exchange that gives `source` a better step, if any helps."""
        cdef int count = self.count, first = self.position[source] + 1, rank, cut, last
        cdef int best_cut = 0, best_last = 0
        # The ring and its steps from the successor of the source on; the source itself is the last.
        cdef const int32_t *ring = self.ring + first
        cdef const int64_t *steps = self.steps + first
        cdef const int64_t *leave = self.weights + <Py_ssize_t> source * count
        cdef const int64_t *enter = self.weights_into + <Py_ssize_t> ring[0] * count
        cdef const int32_t *targets = self.fastest + <Py_ssize_t> source * count
        cdef const int64_t *beside
        cdef int64_t present = leave[ring[0]], gain, found, best = 0
        for rank in range(count - 1):
            gain = present - leave[targets[rank]]
            if gain <= 0:
                break
            cut = self.position[targets[rank]] - first
            if cut < 0:
                cut += count
            gain += steps[cut - 1]
            beside = self.weights + <Py_ssize_t> ring[cut - 1] * count
            for last in range(cut, count - 1):
                found = gain + steps[last] - enter[ring[last]] - beside[ring[last + 1]]
                if found > best:
                    best, best_cut, best_last = found, cut, last
        if best == 0:
            return False
        self.exchange(first, best_cut, best_last + 1 - best_cut, count - 1 - best_last)
        return True

    cdef void exchange(self, int first, int one, int two, int three) noexcept nogil:
        """Exchange two of the three adjacent stretches that begin at `first`: any two give the same ring."""
        if three >= one and three >= two:
            self.turn(first, one, 0, two)
        elif one >= two:
            self.turn(first + one, two, 0, three)
        else:
            self.turn(first + one + two, three, 0, one)

    cdef void turn(self, int first, int one, int two, int three) noexcept nogil:
        """Reorder three adjacent stretches, which begin at position `first`, to the order three, two, one."""
        cdef int length = one + two + three, index, position
        first %= self.count
        memcpy(self.spare, self.ring + first, length * sizeof(int32_t))
        for index in range(three):
            self.put(first + index, self.spare[one + two + index])
        for index in range(two):
            self.put(first + three + index, self.spare[one + index])
        for index in range(one):
            self.put(first + three + two + index, self.spare[index])
        for index in range(-1, length):
            position = (first + index + self.count) % self.count
            self.weight -= self.steps[position]
            self.weigh(position)
            self.weight += self.steps[position]
        self.push(self.ring[(first - 1 + self.count) % self.count])
        self.push(self.ring[(first + three - 1 + self.count) % self.count])
        self.push(self.ring[(first + three + two - 1 + self.count) % self.count])
        self.push(self.ring[(first + length - 1) % self.count])

    cdef void perturb(self) noexcept nogil:
        """Put three short stretches into opposite order, at a slow step if there is one."""
        cdef int longest = min(STRETCH_MAX, (self.count - 1) // 3), position = draw(&self.chance, self.count), _tries
        if self.weight >= PENALTY:
            for _tries in range(self.count):
                if self.steps[position] >= PENALTY:
                    break
                position = position + 1 if position + 1 < self.count else 0
            # Every other time, the slow step is not at the beginning of the three stretches but within them.
            if draw(&self.chance, 2):
                position += self.count - draw(&self.chance, longest)
        self.shuffle(position + 1, longest)

    cdef void shuffle(self, int first, int longest) noexcept nogil:
        """Put three stretches of random lengths, which begin at position `first`, into opposite order."""
        cdef int one = 1 + draw(&self.chance, longest)
        cdef int two = 1 + draw(&self.chance, longest)
        cdef int three = 1 + draw(&self.chance, longest)
        self.turn(first, one, two, three)

    cdef void go_greedily(self) noexcept nogil:
        """Always step to the fastest target that is left. The result is a start, or one more ring candidate."""
        cdef int position, rank
        cdef int32_t here = 0
        for position in range(self.count):
            self.put(position, here)
            self.queued[here] = True  # reused here for: members that have a position
            for rank in range(self.count - 1):
                if not self.queued[self.fastest[<Py_ssize_t> here * self.count + rank]]:
                    here = self.fastest[<Py_ssize_t> here * self.count + rank]
                    break
        for position in range(self.count):
            self.queued[position] = False

    cdef void scramble(self) noexcept nogil:
        """Make several perturbations all over the ring, for another start that is not completely new."""
        cdef int _index, longest = (self.count - 1) // 3
        for _index in range(2 + self.count // 20):
            self.shuffle(draw(&self.chance, self.count), longest)

    # ------------------------------------------------------------------------------------------ the ring as memory

    cdef void load(self, const int32_t *order) noexcept nogil:
        """Make this the present ring; `aim` computes its weight."""
        cdef int index
        for index in range(self.count):
            self.put(index, order[index])

    cdef void put(self, int position, int32_t member) noexcept nogil:
        if position >= self.count:
            position -= self.count
        self.ring[position] = self.ring[position + self.count] = member
        self.position[member] = position

    cdef void weigh(self, int position) noexcept nogil:
        """Store the weight of the step that begins at this position."""
        cdef int64_t weight = self.weights[<Py_ssize_t> self.ring[position] * self.count + self.ring[position + 1]]
        self.steps[position] = self.steps[position + self.count] = weight

    cdef void push(self, int32_t member) noexcept nogil:
        cdef int end
        if not self.queued[member]:
            self.queued[member] = True
            end = self.queue_begin + self.queue_length
            self.queue[end if end < self.count else end - self.count] = member
            self.queue_length += 1

    cdef void save(self) noexcept nogil:
        memcpy(self.saved_ring, self.ring, 2 * self.count * sizeof(int32_t))
        memcpy(self.saved_steps, self.steps, 2 * self.count * sizeof(int64_t))
        memcpy(self.saved_position, self.position, self.count * sizeof(int32_t))

    cdef void restore(self, int64_t weight) noexcept nogil:
        memcpy(self.ring, self.saved_ring, 2 * self.count * sizeof(int32_t))
        memcpy(self.steps, self.saved_steps, 2 * self.count * sizeof(int64_t))
        memcpy(self.position, self.saved_position, self.count * sizeof(int32_t))
        self.weight = weight

    cdef void sort_targets(self, int source) noexcept nogil:
        """Sort all targets of a source, the fastest first, equals by number (Shellsort: short, in position)."""
        cdef int32_t *targets = self.fastest + <Py_ssize_t> source * self.count
        cdef const double *rates = self.rates + <Py_ssize_t> source * self.count
        cdef int count = self.count - 1, gap = count // 2, index, at
        cdef int32_t target
        for index in range(count):
            targets[index] = index + (index >= source)
        while gap > 0:
            for index in range(gap, count):
                target = targets[index]
                at = index
                while at >= gap and (
                    rates[targets[at - gap]] < rates[target]
                    or (rates[targets[at - gap]] == rates[target] and targets[at - gap] > target)
                ):
                    targets[at] = targets[at - gap]
                    at -= gap
                targets[at] = target
            gap //= 2
