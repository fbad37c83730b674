"""The moonshot: a search for a better ring that continues in its own process while the master serves.

A good solution for a large ring takes seconds, and the master must answer messages meanwhile. So it forks a child,
which inherits the question and needs nothing else. The child runs at the lowest priority and sends every better ring at
once in one datagram. It ends when no better ring can exist, when its time is over, or when the master ends. The master
does not trust it: it checks that a reported ring is valid and evaluates it with its own rates, so a faulty child costs
a better ring and nothing else.

A question is a set of members with their rates. An answer is valid for exactly those members: when they change, the
search is cancelled, and `better_than` refuses an answer to another question. The owner decides whether and when to
adopt it.

No function here waits, except `close`. The loop reaps the child when the descriptor of its process becomes readable.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct

from pccl._core.master.ring_choice import is_better
from pccl._core.records import record
from pccl._core.solver.solver import MEMBERS_MAX, evaluate, solve
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.process import (
    address_space_bytes,
    die_with_parent,
    end_process,
    open_pidfd,
    set_process_name,
)
from pccl.actors.io.fork import close_all_but, mailbox_pair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from pccl.actors.io.loop import Loop

RING_BYTES_MAX = 2 * MEMBERS_MAX  # a ring is two bytes for each member, in order
PRIORITY = 19  # the lowest: everything else on the master's host has priority
MEMORY_BYTES_MAX = 256 << 20  # beyond what the master holds; the tables of the largest ring take a fifth of it
SLICE_NS_MIN = 250_000_000  # of the first search, so that a first result comes early
SLICE_NS_MAX = 8_000_000_000  # of later searches: long enough to improve a ring, short enough for several starts
SEEDS = 1 << 64  # the number of seeds of the solver
STEPS_MAX = 1 << 62  # no bound in practice: time is the bound here
GRACE_NS = 2_000_000_000  # how much longer than its time a child may live before it is ended by force


@record
class Question:
    """What a child inherits."""

    rates: array[float]  # the solver's table, in the order of the present ring
    count: int
    seed: int
    budget_ns: int


class Moonshot:
    """At most one search at a time, and the best ring that it has found."""

    def __init__(
        self,
        loop: Loop,
        *,
        on_better: Callable[[], None] = lambda: None,
        on_ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._on_better = on_better
        self._on_ended = on_ended  # called with the reason when a search ends, but not when it is cancelled
        self._child: _Child | None = None
        self._dying: set[_Child] = set()  # killed, not yet reaped
        self._peers: tuple[int, ...] = ()  # the members that the question is about, in the order of their ring
        self._question: Question | None = None
        self._order: list[int] | None = None  # the best answer: positions in `_peers`

    @property
    def pid(self) -> int:
        """The process id of the child that searches; 0 if there is none."""
        return 0 if self._child is None else self._child.pid

    def begin(self, ring: Sequence[int], rates: array[float], seed: int, budget_ns: int) -> None:
        """Search for a better ring of these peers, for `budget_ns`; `rates` is the solver's table in the ring's order.

        A running search is cancelled, because there is a new question. Raises OSError if no process can be forked.
        """
        self.cancel()
        evaluate(rates, range(len(ring)))  # raises ValueError where the child could only fail
        self._peers = tuple(ring)
        self._question = Question(rates, len(ring), seed, budget_ns)
        self._child = _Child(self._loop, self, self._question)

    def cancel(self) -> None:
        """End the child and forget the question and its answers."""
        self._peers, self._question, self._order = (), None, None
        if self._child is not None:
            self._dying.add(self._child)
            self._child.kill()
            self._child = None

    def better_than(self, ring: Sequence[int], rates: array[float]) -> list[int] | None:
        """Return a better ring by these rates, of the same peers and with the same first peer; None if there is none.

        The rates are in the order of this ring, and may be newer than those of the question.
        """
        if self._order is None or sorted(ring) != sorted(self._peers):
            return None
        position = {peer: index for index, peer in enumerate(ring)}
        found = [position[self._peers[index]] for index in self._order]
        begin = found.index(0)
        found = found[begin:] + found[:begin]
        if not is_better(evaluate(rates, found), evaluate(rates, range(len(ring)))):
            return None
        return [ring[index] for index in found]

    def close(self) -> None:
        """End the child and wait until it has exited; a killed process exits soon."""
        self.cancel()
        for child in tuple(self._dying):
            child.reap()

    # ------------------------------------------------------------------------------------------ from the child

    def heard(self, child: _Child, report: bytes) -> None:
        """Take a ring that the child reported. A report that is not a ring ends the child."""
        if child is not self._child or self._question is None:
            return
        rates, count = self._question.rates, self._question.count
        order = list(struct.unpack(f"<{count}H", report)) if len(report) == 2 * count else []
        if sorted(order) != list(range(count)):
            child.kill("reported something that is no ring")
            return
        present = range(count) if self._order is None else self._order
        if is_better(evaluate(rates, order), evaluate(rates, present)):
            self._order = order
            self._on_better()

    def ended(self, child: _Child, reason: str) -> None:
        """The child has exited; its best ring is kept."""
        self._dying.discard(child)
        if child is self._child:
            self._child = None
            self._on_ended(reason)


class _Child:
    """One process, from its fork until it is reaped."""

    def __init__(self, loop: Loop, owner: Moonshot, question: Question) -> None:
        self._loop = loop
        self._owner = owner
        self._reason = ""
        master = os.getpid()  # before the fork: later, the child's parent may be another process
        ours, theirs = mailbox_pair()
        self.pid = 0
        try:
            self.pid = os.fork()
            if self.pid == 0:
                run(theirs.fileno(), question, master)
            self._pidfd = open_pidfd(self.pid)
        except OSError:
            ours.close()
            if self.pid:  # there is no descriptor to watch it with
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._reports: socket.socket | None = ours
        loop.watch(ours.fileno(), self._ready)
        loop.watch(self._pidfd, lambda _: self.reap())
        # It ends by itself when its time is over. This timer is for a child that is stopped or gets no processor.
        loop.after(question.budget_ns + GRACE_NS, lambda: self.kill("did not end in its time"))

    def kill(self, reason: str = "was cancelled") -> None:
        """Kill it now; the loop reaps it. Does nothing if it has exited."""
        self._stop_reading()
        if self._pidfd >= 0:
            self._reason = self._reason or reason
            end_process(self._pidfd)

    def reap(self) -> None:
        """Read its last reports and reap it; blocks only if it was not killed and has not ended."""
        if self._pidfd < 0:
            return
        while self._reports is not None and self._read():
            pass
        self._stop_reading()
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the kernel reaps the children of a process that ignores SIGCHLD
            status = 0
        self._loop.forget(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._owner.ended(self, self._reason or describe_end(status))

    def _ready(self, _: int) -> None:
        self._read()

    def _read(self) -> bool:
        """Take one report; return False if there is none."""
        assert self._reports is not None
        try:
            report = self._reports.recv(RING_BYTES_MAX + 1)
        except BlockingIOError:
            return False
        except OSError:
            report = b""
        if not report:
            self._stop_reading()
            return False
        self._owner.heard(self, report)
        return True

    def _stop_reading(self) -> None:
        if self._reports is not None:
            self._loop.forget(self._reports.fileno())
            self._reports.close()
            self._reports = None


def describe_end(status: int) -> str:
    """Say how a child ended, for a log line."""
    if status == 0:
        return "is done"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


# ---------------------------------------------------------------------------------------------- in the child


def run(reports_fd: int, question: Question, master: int) -> NoReturn:
    """Run the child. It ends by `_exit`, so that the master's exit handlers do not run twice."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        # The master may have died between the fork and the line above; then no signal would ever come.
        if os.getppid() == master:
            settle(reports_fd, question.budget_ns)
            search(socket.socket(fileno=reports_fd), question)
        status = 0
    finally:
        os._exit(status)


def settle(reports_fd: int, budget_ns: int) -> None:
    """Close the master's descriptors, and limit priority, memory and time."""
    close_all_but({reports_fd})
    set_process_name("pccl-moonshot")
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master, and this process ends with the master
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.nice(PRIORITY)
    limit(resource.RLIMIT_AS, address_space_bytes() + MEMORY_BYTES_MAX)
    limit(resource.RLIMIT_CPU, (budget_ns + GRACE_NS) // 1_000_000_000 + 1)
    limit(resource.RLIMIT_CORE, 0)


def limit(kind: int, amount: int) -> None:
    """Set a resource limit, but never above the present hard limit."""
    _, most = resource.getrlimit(kind)
    amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
    resource.setrlimit(kind, (amount, amount))


def search(reports: socket.socket, question: Question) -> None:
    """Search from the best ring and without a start in turn, each time longer, and report every better ring."""
    rates, count = question.rates, question.count
    deadline_ns = monotonic_ns() + question.budget_ns
    best: Sequence[int] = range(count)
    worth = evaluate(rates, best)
    slice_ns, turn = SLICE_NS_MIN, 0
    while (left_ns := deadline_ns - monotonic_ns()) > 0:
        began_ns, time_ns = monotonic_ns(), min(slice_ns, left_ns)
        start = best if turn % 2 == 0 else None
        found = solve(rates, count, start, (question.seed + turn) % SEEDS, STEPS_MAX, time_ns)
        if found is not None and is_better((found.bottleneck, found.total), worth):
            best, worth = found.order, (found.bottleneck, found.total)
            reports.send(struct.pack(f"<{count}H", *best))
        if monotonic_ns() - began_ns < time_ns:
            return  # it ended early: it is proven that there is no better ring, or no ring at all
        turn += 1
        slice_ns = min(slice_ns * 3 // 2, SLICE_NS_MAX)
