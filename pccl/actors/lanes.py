"""The worker processes of a peer: a sender and a receiver for each lane, forked from the peer actor.

A worker holds its connection alone, so its death is seen by the neighbour at once, and nothing of it outlives it.
Workers are disposable: one that ends without being told to takes the whole set with it, and the next order builds all
of them anew. They die with the actor (parent-death signal), and end by themselves when their mailbox closes.

`LanePool` is the actor's side; `serve` in `lane_worker` is what runs in the child.
"""

from __future__ import annotations

import os
import signal
import socket

from pccl._core.messages import Attach, Detach, LinkEnded
from pccl._core.wire import pack, unpack

from . import lane_worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop

MAILBOX_BYTES_MAX = 4096  # larger than any message between an actor and its workers


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


class LanePool:
    """All workers of this peer."""

    def __init__(
        self, loop: Loop, on_link_ended: Callable[[int, str], None], on_worker_died: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._on_link_ended = on_link_ended
        self._on_worker_died = on_worker_died
        self._workers: dict[tuple[bool, int], Worker] = {}
        self._places: dict[int, Worker] = {}  # link -> who serves it
        self._zombies: set[int] = set()  # killed, not yet reaped

    def __contains__(self, link: int) -> bool:
        return link in self._places

    def spawn(self, lanes: int) -> None:
        """Have a sender and a receiver for each of that many lanes."""
        for index in range(lanes):
            for sends in (True, False):
                if (sends, index) not in self._workers:
                    self._workers[sends, index] = self._fork(sends, index)

    def kill(self) -> None:
        """End every worker now. Their connections close with them."""
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()
        self._places.clear()
        self.reap()

    def attach(self, link: int, sock: socket.socket, sends: bool, lane: int) -> None:
        """Give the connection to a worker; our own copy is closed whatever happens."""
        worker = self._workers.get((sends, lane))
        try:
            if worker is None:
                raise OSError(f"lane {lane} has no worker")
            self._send(worker, Attach(link), [sock.fileno()])
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

    def reap(self) -> None:
        """Collect workers that have ended."""
        for pid in list(self._zombies):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._zombies.discard(pid)
            except ChildProcessError:
                self._zombies.discard(pid)

    def wait(self) -> None:
        """Reap everyone who was killed; they cannot refuse."""
        for pid in self._zombies:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass
        self._zombies.clear()

    def _fork(self, sends: bool, index: int) -> Worker:
        actor = os.getpid()  # asked before the fork: the child could only learn who its parent is by then
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            lane_worker.run(theirs.fileno(), sends, index, actor)  # never returns
        theirs.close()
        ours.setblocking(False)
        worker = Worker(pid, ours, sends, index)
        self._loop.watch(ours.fileno(), lambda _: self._heard(worker))
        return worker

    def _heard(self, worker: Worker) -> None:
        try:
            data = worker.mailbox.recv(MAILBOX_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if self._workers.get((worker.sends, worker.index)) is worker:
                del self._workers[worker.sends, worker.index]
                self._end(worker)
                self._on_worker_died(f"{worker} ended unexpectedly")
            return
        message = unpack(data)
        if isinstance(message, LinkEnded) and self._places.pop(message.link, None) is not None:
            self._on_link_ended(message.link, message.reason)

    def _send(self, worker: Worker, message: object, fds: list[int] | None = None) -> None:
        socket.send_fds(worker.mailbox, [pack(message)], fds or [])

    def _end(self, worker: Worker) -> None:
        self._loop.forget(worker.mailbox.fileno())
        worker.mailbox.close()
        try:
            os.kill(worker.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._zombies.add(worker.pid)
