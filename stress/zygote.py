"""The zygote: a process that has everything imported and no thread, and forks training processes on demand.

A new interpreter for each peer would cost more than the library under test; a fork takes a millisecond. The supervisor
sends a task with two descriptors, the pipe for steps and the log. The answer is the pid of the child, and later its
exit status. Children die with the zygote, and the zygote with the supervisor, so an interrupted run leaves nothing
behind.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from pccl._core.system.process import die_with_parent, open_pidfd

from . import workload
from .records import Task

if TYPE_CHECKING:
    from pathlib import Path

MESSAGE_BYTES_MAX = 1 << 16  # larger than any task
ANSWER_TIMEOUT = 20.0  # seconds; imports may be slow on a busy machine, a fork is not
END_TIMEOUT = 10.0  # seconds that children may take to end after the supervisor closed the socket
MARK = "PCCL_STRESS_RUN"  # environment variable that tells the processes of this run from all others


class Exit(NamedTuple):
    """A child that has ended."""

    pid: int
    status: int  # exit status, or minus the signal


class Zygote:
    """The supervisor's side."""

    def __init__(self, mark: str, scratch: Path | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "pccl.stress.zygote", str(theirs.fileno()), str(os.getpid())]
        environment = {**os.environ, MARK: mark, **({"TMPDIR": str(scratch)} if scratch else {})}
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the supervisor, which ends the run in order
            )
        self.pid = self._process.pid
        self._exits: list[Exit] = []
        self._socket.settimeout(ANSWER_TIMEOUT)

    def fileno(self) -> int:
        """Readable when children have ended."""
        return self._socket.fileno()

    def spawn(self, task: Task, report_fd: int, log_fd: int) -> int:
        """Fork a child for this task; return its pid."""
        socket.send_fds(self._socket, [task.encode()], [report_fd, log_fd])
        while True:
            answer = self._receive()
            if answer.status == STARTED:
                return answer.pid
            self._exits.append(answer)

    def exits(self) -> list[Exit]:
        """Children that have ended since the last time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll(0):
            self._exits.append(self._receive())
        found, self._exits = self._exits, []
        return found

    def close(self) -> None:
        """End the zygote, and with it every child that is left."""
        self._socket.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> Exit:
        data = self._socket.recv(MESSAGE_BYTES_MAX)
        if not data:
            raise RuntimeError(f"the zygote (pid {self.pid}) ended by itself")
        return Exit(*json.loads(data))


STARTED = 1 << 16  # instead of a status: no child ends with this value


class ForkServer:
    """The zygote's side."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.epoll()
        self._poll.register(control.fileno(), select.EPOLLIN)
        self._children: dict[int, int] = {}  # pidfd -> pid

    def serve(self) -> None:
        """Serve until the supervisor closes the socket."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                elif not self._obey():
                    self._end_all()
                    return

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 2)
        except ConnectionResetError:
            return False  # the supervisor closed the socket with unread messages
        if not data:
            return False
        report_fd, log_fd = fds
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._begin(data, report_fd, log_fd, zygote)
        os.close(report_fd)
        os.close(log_fd)
        pidfd = open_pidfd(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.EPOLLIN)
        self._tell(Exit(pid, STARTED))
        return True

    def _begin(self, data: bytes, report_fd: int, log_fd: int, zygote: int) -> None:
        """Run the task in the child; never return."""
        status = 1
        try:
            die_with_parent(signal.SIGKILL)
            if os.getppid() == zygote:
                self._poll.close()
                self._control.close()
                for pidfd in self._children:
                    os.close(pidfd)
                os.dup2(log_fd, 1)
                os.dup2(log_fd, 2)
                os.close(log_fd)
                status = workload.be(Task.decode(data), report_fd)
        finally:
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(Exit(pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, what: Exit) -> None:
        self._control.send(json.dumps(what).encode())

    def _end_all(self) -> None:
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)


def main(arguments: list[str]) -> int:
    """Entry of the process; the arguments are its end of the control socket and the pid of its parent."""
    control_fd, parent = (int(argument) for argument in arguments)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 0  # the supervisor is gone already
    # A signal may arrive before a child has installed its handlers: it is delivered once the child is ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, workload.ORDERS)
    # Objects of the zygote live as long as its children; collecting them in a child would only copy pages.
    gc.freeze()
    ForkServer(socket.socket(fileno=control_fd)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
