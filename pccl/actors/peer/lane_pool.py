"""The worker processes of a peer: a sender and a receiver for each lane, forked from the peer actor.

Only the worker holds its connection, so the connection closes when the worker dies, and the neighbour notices at once.
Workers are disposable: if one ends without an order, all are killed, and the next order starts new ones. The kernel
kills them when the actor dies (parent-death signal), and they end by themselves when their mailbox closes.

A *worker set* is the lane workers that share one board. A set that was killed is kept until its last process is
reaped: only then can no process touch the tensors of its operations any more.

`LanePool` is the actor's side; `lane_worker` is the code of the child.
"""

from __future__ import annotations

import os
import socket

from pccl._core.dataplane.board import BOARD_BYTES, Board
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import Attach, Detach, LinkEnded, MapSegment, UnmapSegment
from pccl.actors.io import fork, tcp
from pccl.actors.io.fork import MAILBOX_BYTES_MAX, REAP_INTERVAL_NS
from pccl.actors.io.loop import Bell, open_bell
from pccl.actors.io.ready import wait_writable
from pccl.actors.workers.lane_worker import LaneWorker
from pccl.memory.segments import Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl.actors.io.loop import Loop

MAIL_WAIT_MS = 1000  # for a worker to read its full mailbox: a worker that runs does so within milliseconds


class LaneWorkerHandle:
    """What the actor knows of one lane worker: its process and its mailbox."""

    __slots__ = ("index", "mailbox", "pid", "sends")

    def __init__(self, pid: int, mailbox: socket.socket, sends: bool, index: int) -> None:
        self.pid = pid
        self.mailbox = mailbox
        self.sends = sends
        self.index = index

    def __str__(self) -> str:
        return f"{'sender' if self.sends else 'receiver'} {self.index} (pid {self.pid})"


class WorkerSet:
    """The lane workers that share one board, from the first fork until the last of them is reaped."""

    def __init__(self, lanes: int, bell: int) -> None:
        self.workers: dict[tuple[bool, int], LaneWorkerHandle] = {}
        self.zombies: set[int] = set()  # killed, not yet reaped
        self.killed = False
        self._memory = Segment.create("pccl-board", BOARD_BYTES)
        self.bells: list[list[int]] = [[], []]
        for _ in range(lanes):
            for bells in self.bells:
                bells.append(open_bell())
        self.board = Board(self._memory.view, self.bells[True], self.bells[False], bell)

    @property
    def gone(self) -> bool:
        """Whether it was killed and its last process is reaped."""
        return self.killed and not self.zombies

    def reap(self) -> None:
        """Reap workers that have exited."""
        fork.reap(self.zombies)

    def close(self) -> None:
        """Release the memory and the bells that the workers shared."""
        for bells in self.bells:
            for bell in bells:
                os.close(bell)
            bells.clear()
        self._memory.close()


class LanePool:
    """All lane workers of this peer: the worker set in use, and killed sets that are not yet reaped."""

    def __init__(
        self,
        loop: Loop,
        life_fd: int,
        *,
        on_link_ended: Callable[[int, str], None],
        on_worker_died: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._life_fd = life_fd  # every worker holds it open, so the pipe closes when the last has exited
        self._on_link_ended = on_link_ended
        self._on_worker_died = on_worker_died
        # Called when an operation has ended or drained, or when a killed worker set is reaped.
        self.on_board: Callable[[], None] = lambda: None
        self._bell = open_bell()
        self._by_link: dict[int, LaneWorkerHandle] = {}  # link -> the worker that serves it
        self._segments: dict[int, tuple[int, int]] = {}  # number -> descriptor and size
        self._former: list[WorkerSet] = []  # killed, not yet gone
        self.size = 1  # lanes of the pool
        self.patience_ns = 0  # how long the other end of a lane may acknowledge nothing
        self.host_read = False  # whether a neighbour on this host may read our memory
        self.worker_set: WorkerSet | None = None
        loop.watch(self._bell, Bell(self._bell, self._rung))

    def __contains__(self, link: int) -> bool:
        return link in self._by_link

    # ------------------------------------------------------------------------------------------ workers

    def spawn(self, lanes: int) -> None:
        """Start the senders and receivers that are missing for that many lanes. Raises OSError if that fails."""
        if self.worker_set is None:
            self.worker_set = WorkerSet(self.size, self._bell)
        for index in range(lanes):
            for sends in (True, False):
                if (sends, index) not in self.worker_set.workers:
                    self.worker_set.workers[sends, index] = self._fork(self.worker_set, sends, index)

    def kill(self) -> None:
        """Kill every worker now. Their connections close with them."""
        worker_set, self.worker_set = self.worker_set, None
        self._by_link.clear()
        if worker_set is None:
            return
        for worker in worker_set.workers.values():
            self._end(worker_set, worker)
        worker_set.workers.clear()
        worker_set.killed = True
        self._former.append(worker_set)
        self.reap()
        if self._former:
            self._loop.after(REAP_INTERVAL_NS, self._reap_again)

    def call(self) -> None:
        """Ask every worker to show that it runs; `silent` returns those that have not answered."""
        if self.worker_set is not None:
            for worker in self.worker_set.workers.values():
                self.worker_set.board.call(worker.sends, worker.index)

    def silent(self) -> list[LaneWorkerHandle]:
        """Workers that were called and have not answered yet."""
        if self.worker_set is None:
            return []
        board = self.worker_set.board
        return [
            worker for worker in self.worker_set.workers.values() if not board.has_answered(worker.sends, worker.index)
        ]

    def reap(self) -> None:
        """Reap workers that have exited, and release the sets whose last worker is reaped."""
        for worker_set in self._former:
            worker_set.reap()
        if any(worker_set.gone for worker_set in self._former):
            gone = [worker_set for worker_set in self._former if worker_set.gone]
            self._former = [worker_set for worker_set in self._former if not worker_set.gone]
            self._loop.after(0, self.on_board)
            for worker_set in gone:
                worker_set.close()

    def _reap_again(self) -> None:
        self.reap()
        if self._former:
            self._loop.after(REAP_INTERVAL_NS, self._reap_again)

    def wait_for_exit(self) -> None:
        """Wait until every killed worker has exited, and reap it."""
        for worker_set in self._former:
            fork.wait_for_exit(worker_set.zombies)

    def _fork(self, worker_set: WorkerSet, sends: bool, index: int) -> LaneWorkerHandle:
        bell = worker_set.bells[sends][index]
        # Segments are inherited and not sent: there may be more than a mailbox can hold before its first read.
        inherited = [fd for fd, _ in self._segments.values()]
        pid, mailbox = fork.fork(
            self._loop,
            f"pccl-{'send' if sends else 'recv'}-{index}",
            [self._life_fd, self._bell, bell, *worker_set.bells[True], *inherited],
            lambda theirs: LaneWorker(worker_set.board, theirs, bell, sends, index, segments=self._segments).serve(),
            lambda: self._heard(worker),
        )
        worker = LaneWorkerHandle(pid, mailbox, sends, index)
        return worker

    def _end(self, worker_set: WorkerSet, worker: LaneWorkerHandle) -> None:
        self._loop.forget(worker.mailbox.fileno())
        worker.mailbox.close()
        fork.kill(worker.pid)
        worker_set.zombies.add(worker.pid)

    # ------------------------------------------------------------------------------------------ connections

    def attach(self, link: int, sock: socket.socket, sends: bool, lane: int) -> None:
        """Give the connection to a worker; the copy in this process is closed in any case."""
        worker = self.worker_set.workers.get((sends, lane)) if self.worker_set is not None else None
        try:
            if worker is None:
                raise OSError(f"lane {lane} has no worker")
            # Only its sender can tell a link that loses all packets from a slow neighbour, so the sender ends it.
            tcp.limit_silence(sock, self.patience_ns)
            self._send(worker, Attach(link, self.host_read), [sock.fileno()])
        except OSError as error:
            reason = f"cannot hand over: {error}"
            self._loop.after(0, lambda: self._on_link_ended(link, reason))
        else:
            self._by_link[link] = worker
        finally:
            sock.close()

    def drop(self, link: int) -> None:
        """Make the worker close the connection."""
        worker = self._by_link.pop(link, None)
        if worker is not None:
            try:
                self._send(worker, Detach(link))
            except OSError:
                pass  # it is dead or stuck: its mailbox closes, or the next order finds the lane missing

    # ------------------------------------------------------------------------------------------ segments

    def share(self, segment: int, fd: int, nbytes: int) -> None:
        """Share memory that operations may name from now on; the pool owns the descriptor."""
        self.unshare(segment)
        self._segments[segment] = fd, nbytes
        self._tell_all(MapSegment(segment, nbytes), [fd])

    def unshare(self, segment: int) -> None:
        """Stop sharing memory, because no operation will name it again."""
        fd, _ = self._segments.pop(segment, (-1, 0))
        if fd >= 0:
            self._tell_all(UnmapSegment(segment), [])
            os.close(fd)

    def descriptor(self, segment: int) -> tuple[int, int] | None:
        """Return descriptor and size of shared memory; None if it was not shared."""
        return self._segments.get(segment)

    def _tell_all(self, message: object, fds: list[int]) -> None:
        if self.worker_set is None:
            return
        for worker in self.worker_set.workers.values():
            try:
                try:
                    self._send(worker, message, fds)
                except BlockingIOError:
                    # It has not read a few hundred messages, perhaps because it got no processor.
                    wait_writable(worker.mailbox, MAIL_WAIT_MS)
                    self._send(worker, message, fds)
            except OSError:
                # Its mailbox is full or broken: it is stopped or dead, and blocks in that segment would not move.
                reason = f"{worker} does not read its mailbox"
                self._loop.after(0, lambda reason=reason: self._on_worker_died(reason))  # type: ignore[misc]
                return

    # ------------------------------------------------------------------------------------------ mail

    def _heard(self, worker: LaneWorkerHandle) -> None:
        try:
            data = worker.mailbox.recv(MAILBOX_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            worker_set = self.worker_set
            if worker_set is not None and worker_set.workers.get((worker.sends, worker.index)) is worker:
                del worker_set.workers[worker.sends, worker.index]
                self._end(worker_set, worker)
                self._on_worker_died(f"{worker} ended unexpectedly")
            return
        message = unpack(data)
        if isinstance(message, LinkEnded) and self._by_link.pop(message.link, None) is not None:
            self._on_link_ended(message.link, message.reason)

    def _rung(self) -> None:
        self.on_board()

    def _send(self, worker: LaneWorkerHandle, message: object, fds: list[int] | None = None) -> None:
        socket.send_fds(worker.mailbox, [pack(message)], fds or [])
        if self.worker_set is not None:
            self.worker_set.board.call(worker.sends, worker.index)
