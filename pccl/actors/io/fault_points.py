"""Fault points: named points at which a test can make a process die, stop or slow down, or damage its connections.

`PCCL_FAULT=point:count:action` is read once, when a process starts. The point says where: `training.CallReduce` is just
before a training process posts that call, `peer.AttachLink` just before the peer actor performs that action,
`peer.send.Wired` just before it sends that message, `lane.Attach` just before a worker follows that command,
`state.serve.answer` just before a state worker answers, `state.fetch.unit` after a state worker has fetched a unit,
`probe.send` and `probe.count` when a probe worker writes or reads. So every call, action and message is a point without
further code. The count says at which visit (1: the first). The action says what happens: `kill` and `stop` send the
process that signal; `delay` makes it sleep for `DELAY` seconds; `close`, `reset`, `half-close` and `garble` act on
every connection that the process has at that time to other processes, and `garble` sends one invalid byte. Without the
variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "PCCL_FAULT"
DELAY = 0.5  # seconds; longer than anything on loopback takes, shorter than any timeout
GARBAGE = b"\xa5"


class Fault:
    """One planned fault."""

    def __init__(self, text: str) -> None:
        try:
            self.point, count, self.action = text.rsplit(":", 2)
            self.visits_left = int(count)
            if self.action not in ACTIONS:
                raise ValueError
        except ValueError:
            choices = ", ".join(ACTIONS)
            raise ValueError(f"{VARIABLE}={text!r} must be point:count:action, with an action of {choices}") from None

    def visit(self, point: str) -> None:
        """Act if this is the planned point and the planned visit."""
        if point != self.point:
            return
        self.visits_left -= 1
        if self.visits_left == 0:
            ACTIONS[self.action]()


def planned() -> Fault | None:
    """Return the fault that PCCL_FAULT describes; normally None."""
    text = os.environ.get(VARIABLE)
    return Fault(text) if text else None


def _connections() -> Iterator[socket.socket]:
    """Yield every connection of this process to another one, each as a duplicate socket."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # not a socket
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    duplicate.getpeername()
                except OSError:
                    continue  # it listens, or is not connected yet
                yield duplicate


def _shut(how: int) -> None:
    for connection in _connections():
        connection.shutdown(how)


def _reset() -> None:
    import ctypes  # here, because only this function needs it

    nowhere = bytes(16)  # an address without a family: the kernel drops the connection with a reset
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        ctypes.CDLL(None).connect(connection.fileno(), nowhere, len(nowhere))


def _garble() -> None:
    for connection in _connections():
        try:
            connection.send(GARBAGE)
        except OSError:
            pass  # its buffer is full, or the other side is gone


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "delay": lambda: time.sleep(DELAY),
    "close": lambda: _shut(socket.SHUT_RDWR),
    "half-close": lambda: _shut(socket.SHUT_WR),
    "reset": _reset,
    "garble": _garble,
}
