"""A lane's worker process: one mailbox, one connection, one loop.

A sender serves the connection to the next peer, a receiver the one from the previous peer. The worker is given its
connection by descriptor, tells the actor when it breaks, and closes it when told to. It holds no other descriptor of
the actor: whatever it inherited by the fork is closed first, so that no connection is kept open by a bystander.
"""

from __future__ import annotations

import os
import select
import signal
import socket

from pccl._core.messages import Attach, Detach, LinkEnded
from pccl._core.park import die_with_parent, set_process_name
from pccl._core.wire import pack, unpack

from .faults import planned

MAILBOX_BYTES_MAX = 4096  # larger than any message between an actor and its workers
DESCRIPTORS_MAX = 1 << 20  # above any limit that a process of ours runs under


def run(mailbox_fd: int, sends: bool, index: int, parent: int) -> None:
    """The child's whole life. Leaves by `_exit`, so that nothing of the actor's is run twice."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        # The actor may have died between the fork and the line above; then nobody would ever tell us.
        if os.getppid() == parent:
            set_process_name(f"pccl-{'send' if sends else 'recv'}-{index}")
            os.closerange(3, mailbox_fd)
            os.closerange(mailbox_fd + 1, DESCRIPTORS_MAX)
            LaneWorker(socket.socket(fileno=mailbox_fd)).serve()
        status = 0
    finally:
        os._exit(status)


class LaneWorker:
    """Waits for connections to serve, one at a time."""

    def __init__(self, mailbox: socket.socket) -> None:
        self._mailbox = mailbox
        self._poll = select.epoll()
        self._poll.register(mailbox.fileno(), select.EPOLLIN)
        self._fault = planned()
        self._link = 0
        self._connection: socket.socket | None = None

    def serve(self) -> None:
        """Until the mailbox closes, which it does with the actor."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._mailbox.fileno():
                    if not self._read_mailbox():
                        return
                elif self._connection is not None and fd == self._connection.fileno():
                    self._read_connection()

    def _read_mailbox(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._mailbox, MAILBOX_BYTES_MAX, 1)
        if not data:
            return False
        message = unpack(data)
        if self._fault is not None:
            self._fault.visit(f"lane.{type(message).__name__}")
        if isinstance(message, Attach):
            self._close()
            self._link = message.link
            self._connection = socket.socket(fileno=fds[0])
            self._connection.setblocking(False)
            self._poll.register(fds[0], select.EPOLLIN | select.EPOLLRDHUP)
        elif isinstance(message, Detach) and message.link == self._link:
            self._close()
        return True

    def _read_connection(self) -> None:
        """Nothing is said on an idle lane, so whatever can be read is its end."""
        assert self._connection is not None
        try:
            data = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._report(os.strerror(error.errno or 0))
            return
        self._report("unexpected bytes on an idle lane" if data else "closed by the other side")

    def _report(self, reason: str) -> None:
        link = self._link
        self._close()
        self._mailbox.send(pack(LinkEnded(link, reason)))

    def _close(self) -> None:
        if self._connection is not None:
            self._poll.unregister(self._connection.fileno())
            self._connection.close()
            self._connection = None
        self._link = 0
