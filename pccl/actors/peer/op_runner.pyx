# cython: language_level=3, auto_pickle=False
"""The actor's side of operations: put on the board what commenced, report what ended, see to it that aborts are quiet.

Operations go up in the order of their sequences. One that finds its place taken, or the board full, waits, and
everything behind it waits as well: the order is what keeps two peers from waiting for each other's operations.

An aborted operation is *quiet* when no worker can touch its memory any more: it was never put up, every worker let go
of it, or its crew is dead and buried. A worker that does not let go in time, because it was stopped, costs the crew its
life: abort never waits without a bound.

A worker that was stopped while it held nothing is noticed by nobody, and yet nothing moves: all peers stall, and who
gives up first need not be the one to blame. So after an abort every worker is called, and has to answer.
"""

from collections import deque

from pccl._core.peer.events import ReduceEnded, ReduceProgress, ReduceDrained, Traffic, WorkerDied

ABORT_GRACE_NS = 100_000_000  # a worker lets go within one block; one that takes this long was stopped
ANSWER_GRACE_NS = 250_000_000  # twice this is for an answer: it costs microseconds, but a machine may be busy


cdef class OpRunner:
    """All operations of this peer that have commenced and have no verdict yet."""

    def __init__(self, loop, lanes, feed):
        self._loop = loop
        self._lanes = lanes
        self._feed = feed
        self._waiting = deque()
        self._running = {}
        self._aborting = {}
        self._calling = False
        self._sent = self._received = 0
        lanes.on_board = self.look

    cpdef begin(self, action):
        """An operation commences."""
        self._waiting.append(action)
        self._put_up()

    def abort(self, sequence):
        """Have its workers let go; `ReduceDrained` follows, but never from within this call."""
        crew = self._running.pop(sequence, None)
        if crew is not None and not crew.killed:
            crew.board.abort(sequence)
            # Also if nobody holds it now: a worker that merely looks at it counts as well, and may be stopped there.
            self._loop.after(ABORT_GRACE_NS, lambda: self._insist(sequence))
        if crew is None:
            self._waiting = deque(action for action in self._waiting if action.sequence != sequence)
            self._loop.after(0, lambda: self._feed(ReduceDrained(sequence)))
        else:
            self._aborting[sequence] = crew
            self._loop.after(0, self.look)
            self._call_workers()

    cpdef end(self, sequence):
        """The verdict is in: its place is free."""
        crew = self._running.pop(sequence, None)
        if crew is not None and not crew.killed:
            crew.board.release(sequence)
        if self._waiting:
            self._put_up()

    cpdef look(self):
        """See which operations ended and which became quiet."""
        crew = self._lanes.crew
        if crew is not None:
            board = crew.board
            for sequence in board.take_finished():
                if self._running.get(sequence) is crew and board.has_ended(sequence):
                    self._feed(ReduceEnded(sequence, *board.statistics(sequence)))
        if self._aborting:
            for sequence, crew in list(self._aborting.items()):
                if crew.gone or (not crew.killed and crew.board.is_drained(sequence)):
                    self._became_quiet(sequence, crew)

    def report(self):
        """Before a tick of the machine: how far everything is."""
        sent, received = self._sent, self._received
        crew = self._lanes.crew
        if crew is not None:
            here = crew.board.totals()
            sent, received = sent + here[0], received + here[1]
        self._feed(Traffic(sent, received))
        # One that has not had its turn is not stalled while those before it move.
        for sequence, crew in list(self._running.items()):
            if not crew.killed:
                self._feed(ReduceProgress(sequence, crew.board.moved(sequence) or sent + received))
        for action in list(self._waiting):
            self._feed(ReduceProgress(action.sequence, sent + received))

    def lose_crew(self):
        """The crew is about to be killed: keep what it has counted."""
        if self._lanes.crew is not None:
            sent, received = self._lanes.crew.board.totals()
            self._sent += sent
            self._received += received

    cdef _put_up(self):
        crew = self._lanes.crew
        while self._waiting and crew is not None:
            action = self._waiting[0]
            if not crew.board.begin(action.sequence, action.operation, action.rank, action.world):
                return
            self._waiting.popleft()
            self._running[action.sequence] = crew

    cdef _became_quiet(self, sequence, crew):
        del self._aborting[sequence]
        if not crew.killed:
            crew.board.release(sequence)
            if not self._aborting:
                crew.board.sweep()
        self._feed(ReduceDrained(sequence))
        self._put_up()

    def _insist(self, sequence):
        crew = self._aborting.get(sequence)
        if crew is not None and not crew.killed and not crew.board.is_drained(sequence):
            grace = f"{ABORT_GRACE_NS // 1_000_000} ms"
            self._feed(WorkerDied(f"a worker did not let go of an aborted operation in {grace}"))

    cdef _call_workers(self):
        if not self._calling:
            self._calling = True
            self._lanes.call()
            self._loop.after(ANSWER_GRACE_NS, lambda: self._look_for_silent([]))

    def _look_for_silent(self, list suspects):
        """Twice, because a call of another kind may have come just before the first look."""
        silent = self._lanes.silent()
        found = [worker for worker in suspects if worker in silent]
        if silent and not suspects:
            self._loop.after(ANSWER_GRACE_NS, lambda: self._look_for_silent(silent))
            return
        self._calling = False
        if found:
            self._feed(WorkerDied(f"{found[0]} does not answer"))
