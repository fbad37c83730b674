"""A process that has imported torch, and forks once for each script to run: an import takes seconds of a core, and a
fork takes milliseconds. A script runs in a session of its own, as `python SCRIPT ...` would run it.

Not for tests of how a script starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from tests.readable import is_readable

from .helpers import BOUND, ROOT, Script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Each message is one JSON document. A script's process is named by its process id; the server sends its exit status,
# because only a parent gets that.
SERVER = """
import json, os, runpy, select, socket, sys
import torch, torch._dynamo  # the second is what optimizers import at their first step

server = socket.socket(fileno=int(sys.argv[1]))
poll, running, script = select.poll(), {}, None
poll.register(server, select.POLLIN)
while script is None:
    for fd, _ in poll.poll():
        if fd in running:
            poll.unregister(fd)
            os.close(fd)
            pid, status = os.waitpid(running.pop(fd), 0)
            server.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
            continue
        data, streams, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not data:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            script = json.loads(data)
            break
        child = os.pidfd_open(pid)
        running[child] = pid
        poll.register(child, select.POLLIN)
        server.send(json.dumps([pid, None]).encode())
        for stream in streams:
            os.close(stream)

os.setsid()
server.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
for fd in running:
    os.close(fd)
os.environ.clear()
os.environ.update(script["environment"])
sys.argv = script["command"]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class ForkServer:
    """Runs scripts in forks of one interpreter."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        self._sock = ours
        self._ended: dict[int, int] = {}

    def run(self, script: Path, *arguments: object) -> Script:
        """Start a script."""
        return ForkedScript(self, [str(script), *map(str, arguments)])

    def fork(self, command: list[str], stdin: int, stdout: int, stderr: int) -> int:
        """Start a script on these streams and return its process id."""
        request = {"command": command, "environment": dict(os.environ)}
        socket.send_fds(self._sock, [json.dumps(request).encode()], [stdin, stdout, stderr])
        while True:
            pid, status = self._receive()
            if status is None:
                return pid

    def wait(self, pid: int, timeout: float) -> int:
        """Wait for a script and return its exit status; raise subprocess.TimeoutExpired if it takes longer."""
        deadline = time.monotonic() + timeout
        while pid not in self._ended:
            if not is_readable(self._sock.fileno(), deadline - time.monotonic()):
                raise subprocess.TimeoutExpired(f"script {pid}", timeout)
            self._receive()
        return self._ended[pid]

    def _receive(self) -> tuple[int, int | None]:
        data = self._sock.recv(1 << 16)
        if not data:
            raise AssertionError(f"the fork server ended with status {self._process.wait()}")
        pid, status = json.loads(data)
        if status is not None:
            self._ended[pid] = status
        return pid, status

    def close(self) -> None:
        """End the server; all scripts must have ended before."""
        self._sock.close()
        self._process.wait()


class ForkedProcess:
    """The part of the interface of subprocess.Popen that a Script uses."""

    def __init__(self, server: ForkServer, command: list[str], stderr: int) -> None:
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        self.pid = server.fork(command, stdin, stdout, stderr)
        os.close(stdin)
        os.close(stdout)
        self.stdin = os.fdopen(to_stdin, "wb", buffering=0)
        self.stdout = os.fdopen(from_stdout, "rb", buffering=0)
        self._server = server

    def wait(self, timeout: float = BOUND) -> int:
        """Its exit status, once it has ended."""
        return self._server.wait(self.pid, timeout)

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ForkedScript(Script):
    """A script in a fork of a server's interpreter."""

    def __init__(self, server: ForkServer, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._unread = b""
        self.lines = []
        self.process = ForkedProcess(server, command, self._errors.fileno())  # type: ignore[assignment]
        self.pid = self.process.pid


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """A server for the length of a block."""
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()
