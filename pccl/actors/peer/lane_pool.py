"""The worker processes of a peer: a sender and a receiver for each lane, forked from the peer actor.

A worker holds its connection alone, so its death is seen by the neighbour at once, and nothing of it outlives it.
Workers are disposable: one that ends without being told to takes the whole crew with it, and the next order builds
all of them anew. They die with the actor (parent-death signal), and end by themselves when their mailbox closes.

A *crew* is a set of workers and the board they share. A crew that was killed is kept until its last process is reaped:
only then has nobody any more a hand on the tensors of its operations.

`LanePool` is the actor's side; `lane_worker` is what happens in the child.
"""

from __future__ import annotations

import os
import socket

from pccl._core.dataplane.board import BOARD_BYTES, Board
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import Attach, Detach, LinkEnded, MapSegment, UnmapSegment
from pccl.actors.io import fork, tcp
from pccl.actors.io.fork import MAILBOX_BYTES_MAX
from pccl.actors.io.loop import Bell, open_bell
from pccl.actors.io.ready import wait_writable
from pccl.actors.workers.lane_worker import LaneWorker
from pccl.memory.segments import Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl.actors.io.loop import Loop

REAP_INTERVAL_NS = 1_000_000  # a killed process is gone within this, unless its memory is large
MAIL_WAIT_MS = 1000  # for a worker to make room in its full mailbox: one that runs does so within milliseconds


class Worker:
    """One child process and its mailbox."""

    __slots__ = ("index", "mailbox", "pid", "sends")

    def __init__(self, pid: int, mailbox: socket.socket, sends: bool, index: int) -> None:
        self.pid = pid
        self.mailbox = mailbox
        self.sends = sends
        self.index = index

    def __str__(self) -> str:
        return f"{'sender' if self.sends else 'receiver'} {self.index} (pid {self.pid})"


class Crew:
    """Workers that share a board, from their first fork until the last of them is reaped."""

    def __init__(self, lanes: int, bell: int) -> None:
        self.workers: dict[tuple[bool, int], Worker] = {}
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
        """Whether nobody of it is left."""
        return self.killed and not self.zombies

    def reap(self) -> None:
        """Collect workers that have ended."""
        fork.reap(self.zombies)

    def close(self) -> None:
        """Give up what the crew shared."""
        for bells in self.bells:
            for bell in bells:
                os.close(bell)
            bells.clear()
        self._memory.close()


class LanePool:
    """All workers of this peer: the crew at work, and crews that are not all buried yet."""

    def __init__(
        self,
        loop: Loop,
        life_fd: int,
        *,
        on_link_ended: Callable[[int, str], None],
        on_worker_died: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._life_fd = life_fd  # every worker holds it, which is all it is for
        self._on_link_ended = on_link_ended
        self._on_worker_died = on_worker_died
        # Operations ended, let go of their memory, or lost the last of their workers.
        self.on_board: Callable[[], None] = lambda: None
        self._bell = open_bell()
        self._places: dict[int, Worker] = {}  # link -> who serves it
        self._segments: dict[int, tuple[int, int]] = {}  # number -> descriptor and size
        self._former: list[Crew] = []  # killed, not yet gone
        self.size = 1  # lanes of the pool
        self.patience_ns = 0  # how long the other end of a lane may acknowledge nothing
        self.host_read = False  # whether a neighbour on this host may read our memory
        self.crew: Crew | None = None
        loop.watch(self._bell, Bell(self._bell, self._rung))

    def __contains__(self, link: int) -> bool:
        return link in self._places

    # ------------------------------------------------------------------------------------------ workers

    def spawn(self, lanes: int) -> None:
        """Have a sender and a receiver for each of that many lanes."""
        if self.crew is None:
            self.crew = Crew(self.size, self._bell)
        for index in range(lanes):
            for sends in (True, False):
                if (sends, index) not in self.crew.workers:
                    self.crew.workers[sends, index] = self._fork(self.crew, sends, index)

    def kill(self) -> None:
        """End every worker now. Their connections close with them."""
        crew, self.crew = self.crew, None
        self._places.clear()
        if crew is None:
            return
        for worker in crew.workers.values():
            self._end(crew, worker)
        crew.workers.clear()
        crew.killed = True
        self._former.append(crew)
        self.reap()
        if self._former:
            self._loop.after(REAP_INTERVAL_NS, self._reap_again)

    def call(self) -> None:
        """Have every worker show that it runs."""
        if self.crew is not None:
            for worker in self.crew.workers.values():
                self.crew.board.call(worker.sends, worker.index)

    def silent(self) -> list[Worker]:
        """Workers that were called and have not answered yet."""
        if self.crew is None:
            return []
        board = self.crew.board
        return [worker for worker in self.crew.workers.values() if not board.has_answered(worker.sends, worker.index)]

    def reap(self) -> None:
        """Collect workers that have ended, and give up crews that nobody is left of."""
        for crew in self._former:
            crew.reap()
        if any(crew.gone for crew in self._former):
            gone = [crew for crew in self._former if crew.gone]
            self._former = [crew for crew in self._former if not crew.gone]
            self._loop.after(0, self.on_board)
            for crew in gone:
                crew.close()

    def _reap_again(self) -> None:
        self.reap()
        if self._former:
            self._loop.after(REAP_INTERVAL_NS, self._reap_again)

    def wait(self) -> None:
        """Reap everyone who was killed; they cannot refuse."""
        for crew in self._former:
            fork.wait(crew.zombies)

    def _fork(self, crew: Crew, sends: bool, index: int) -> Worker:
        bell = crew.bells[sends][index]
        # Segments are inherited and not sent: there may be more of them than a mailbox takes before it is first read.
        inherited = [fd for fd, _ in self._segments.values()]
        pid, mailbox = fork.fork(
            f"pccl-{'send' if sends else 'recv'}-{index}",
            [self._life_fd, self._bell, bell, *crew.bells[True], *inherited],
            lambda theirs: LaneWorker(crew.board, theirs, bell, sends, index, segments=self._segments).serve(),
        )
        worker = Worker(pid, mailbox, sends, index)
        try:
            self._loop.watch(mailbox.fileno(), lambda _: self._heard(worker))
        except BaseException:
            mailbox.close()
            fork.kill(pid)
            fork.wait({pid})
            raise
        return worker

    def _end(self, crew: Crew, worker: Worker) -> None:
        self._loop.forget(worker.mailbox.fileno())
        worker.mailbox.close()
        fork.kill(worker.pid)
        crew.zombies.add(worker.pid)

    # ------------------------------------------------------------------------------------------ connections

    def attach(self, link: int, sock: socket.socket, sends: bool, lane: int) -> None:
        """Give the connection to a worker; our own copy is closed whatever happens."""
        worker = self.crew.workers.get((sends, lane)) if self.crew is not None else None
        try:
            if worker is None:
                raise OSError(f"lane {lane} has no worker")
            # A link that swallows everything looks like a slow neighbour to all peers but the one that sends into it.
            tcp.limit_silence(sock, self.patience_ns)
            self._send(worker, Attach(link, self.host_read), [sock.fileno()])
        except OSError as error:
            reason = f"cannot hand over: {error}"
            self._loop.after(0, lambda: self._on_link_ended(link, reason))
        else:
            self._places[link] = worker
        finally:
            sock.close()

    def drop(self, link: int) -> None:
        """Have the worker close the connection."""
        worker = self._places.pop(link, None)
        if worker is not None:
            try:
                self._send(worker, Detach(link))
            except OSError:
                pass  # it is dead or stuck: then its mailbox tells, or the next order finds the lane missing

    # ------------------------------------------------------------------------------------------ segments

    def share(self, segment: int, fd: int, nbytes: int) -> None:
        """Memory that operations may name from now on; the descriptor is ours."""
        self.unshare(segment)
        self._segments[segment] = fd, nbytes
        self._tell_all(MapSegment(segment, nbytes), [fd])

    def unshare(self, segment: int) -> None:
        """No operation will name this memory again."""
        fd, _ = self._segments.pop(segment, (-1, 0))
        if fd >= 0:
            self._tell_all(UnmapSegment(segment), [])
            os.close(fd)

    def descriptor(self, segment: int) -> tuple[int, int] | None:
        """Descriptor and size of memory that was shared; None if it was not."""
        return self._segments.get(segment)

    def _tell_all(self, message: object, fds: list[int]) -> None:
        if self.crew is None:
            return
        for worker in self.crew.workers.values():
            try:
                try:
                    self._send(worker, message, fds)
                except BlockingIOError:
                    # It has not run for a few hundred messages, which may well be for want of a processor.
                    wait_writable(worker.mailbox, MAIL_WAIT_MS)
                    self._send(worker, message, fds)
            except OSError:
                # Its mailbox is full or broken: it is stopped or dead, and a block in that segment would never move.
                reason = f"{worker} takes no mail"
                self._loop.after(0, lambda reason=reason: self._on_worker_died(reason))  # type: ignore[misc]
                return

    # ------------------------------------------------------------------------------------------ mail

    def _heard(self, worker: Worker) -> None:
        try:
            data = worker.mailbox.recv(MAILBOX_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            crew = self.crew
            if crew is not None and crew.workers.get((worker.sends, worker.index)) is worker:
                del crew.workers[worker.sends, worker.index]
                self._end(crew, worker)
                self._on_worker_died(f"{worker} ended unexpectedly")
            return
        message = unpack(data)
        if isinstance(message, LinkEnded) and self._places.pop(message.link, None) is not None:
            self._on_link_ended(message.link, message.reason)

    def _rung(self) -> None:
        self.on_board()

    def _send(self, worker: Worker, message: object, fds: list[int] | None = None) -> None:
        socket.send_fds(worker.mailbox, [pack(message)], fds or [])
        if self.crew is not None:
            self.crew.board.call(worker.sends, worker.index)
