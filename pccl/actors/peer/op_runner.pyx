# cython: language_level=3, auto_pickle=False
"""The actor's side of operations: put them on the board, report their ends, and ensure that aborted ones drain.

Operations go on the board in the order of their sequences. If the entry of one is taken, or the board is full, it waits
and all later ones wait behind it: this order keeps two peers from waiting for each other's operations.

An aborted operation has *drained* when no worker can touch its memory any more: it was never on the board, every worker
let go of it, or its worker set is killed and reaped. If a worker does not let go in time, because it was stopped, its
worker set is killed: an abort never waits without a bound.

A worker that was stopped while it held no operation cannot be found that way, but it also makes all peers stall, and
the peer that times out first need not be the one at fault. So after an abort every worker is asked, and must answer.
"""

from collections import deque

from pccl._core.peer.events import ReduceEnded, ReduceProgress, ReduceDrained, Traffic, WorkerDied

ABORT_GRACE_NS = 100_000_000  # a worker lets go after at most one block; one that takes longer was stopped
ANSWER_GRACE_NS = 250_000_000  # an answer may take twice this time: it takes microseconds, but the host may be busy


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
        """Put an operation that commences on the board, or into the queue of waiting operations."""
        self._waiting.append(action)
        self._put_up()

    def abort(self, sequence):
        """Make the workers let go of an operation; `ReduceDrained` follows, but never within this call."""
        worker_set = self._running.pop(sequence, None)
        if worker_set is not None and not worker_set.killed:
            worker_set.board.abort(sequence)
            # Also if no worker holds it now: a worker that only reads the entry counts too, and may be stopped there.
            self._loop.after(ABORT_GRACE_NS, lambda: self._insist(sequence))
        if worker_set is None:
            self._waiting = deque(action for action in self._waiting if action.sequence != sequence)
            self._loop.after(0, lambda: self._feed(ReduceDrained(sequence)))
        else:
            self._aborting[sequence] = worker_set
            self._loop.after(0, self.look)
            self._ask_workers()

    cpdef end(self, sequence):
        """Free the board entry of an operation that has its verdict."""
        worker_set = self._running.pop(sequence, None)
        if worker_set is not None and not worker_set.killed:
            worker_set.board.release(sequence)
        if self._waiting:
            self._put_up()

    cpdef look(self):
        """Report the operations that ended or drained."""
        worker_set = self._lanes.worker_set
        if worker_set is not None:
            board = worker_set.board
            for sequence in board.take_finished():
                if self._running.get(sequence) is worker_set and board.has_ended(sequence):
                    self._feed(ReduceEnded(sequence, *board.statistics(sequence)))
        if self._aborting:
            for sequence, worker_set in list(self._aborting.items()):
                if worker_set.gone or (not worker_set.killed and worker_set.board.is_drained(sequence)):
                    self._became_drained(sequence, worker_set)

    def report(self):
        """Tell the machine, before its tick, how many bytes each operation has moved."""
        sent, received = self._sent, self._received
        worker_set = self._lanes.worker_set
        if worker_set is not None:
            here = worker_set.board.totals()
            sent, received = sent + here[0], received + here[1]
        self._feed(Traffic(sent, received))
        # An operation that waits for its turn is not stalled while those before it move.
        for sequence, worker_set in list(self._running.items()):
            if not worker_set.killed:
                self._feed(ReduceProgress(sequence, worker_set.board.moved(sequence) or sent + received))
        for action in list(self._waiting):
            self._feed(ReduceProgress(action.sequence, sent + received))

    def keep_traffic(self):
        """Add the traffic of a worker set that is about to be killed to the totals."""
        if self._lanes.worker_set is not None:
            sent, received = self._lanes.worker_set.board.totals()
            self._sent += sent
            self._received += received

    cdef _put_up(self):
        worker_set = self._lanes.worker_set
        while self._waiting and worker_set is not None:
            action = self._waiting[0]
            if not worker_set.board.begin(action.sequence, action.operation, action.rank, action.world):
                return
            self._waiting.popleft()
            self._running[action.sequence] = worker_set

    cdef _became_drained(self, sequence, worker_set):
        del self._aborting[sequence]
        if not worker_set.killed:
            worker_set.board.release(sequence)
            if not self._aborting:
                worker_set.board.sweep()
        self._feed(ReduceDrained(sequence))
        self._put_up()

    def _insist(self, sequence):
        worker_set = self._aborting.get(sequence)
        if worker_set is not None and not worker_set.killed and not worker_set.board.is_drained(sequence):
            grace = f"{ABORT_GRACE_NS // 1_000_000} ms"
            self._feed(WorkerDied(f"a worker did not let go of an aborted operation in {grace}"))

    cdef _ask_workers(self):
        if not self._calling:
            self._calling = True
            self._lanes.call()
            self._loop.after(ANSWER_GRACE_NS, lambda: self._look_for_silent([]))

    def _look_for_silent(self, list suspects):
        """Check twice, because a call of another kind may have come just before the first check."""
        silent = self._lanes.silent()
        found = [worker for worker in suspects if worker in silent]
        if silent and not suspects:
            self._loop.after(ANSWER_GRACE_NS, lambda: self._look_for_silent(silent))
            return
        self._calling = False
        if found:
            self._feed(WorkerDied(f"{found[0]} does not answer"))
