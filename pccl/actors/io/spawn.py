"""Starts an actor as a process of its own: a clean exec of the interpreter, never a fork of the caller.

The caller may hold a GPU, threads and gigabytes; the actor must hold none of these. It is started without `site`, finds
this package by path, and inherits its descriptors. An actor ends when its training process dies: by parent-death signal
if the main thread started it, and in any case because the actor watches that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Puts the folder of the package first on the path, then calls the module's main with the arguments.
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; sys.exit(main(sys.argv[2:]))"

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))  # the parent folder of the package

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # blocked at the start; an actor's main unblocks them

# What to think of a signal that killed an actor.
ADVICE: dict[int, str] = {signal.SIGKILL: ": if nobody sent it, the machine ran out of memory; see dmesg"}
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
CRASHED = ": a defect of pccl, please report it"

KILL_WAIT = 5.0  # seconds; a killed process exits at once, unless the kernel is stuck; then we do not wait for it


class ActorProcess:
    """A child process, from its start until it is reaped."""

    def __init__(self, module: str, arguments: Sequence[int], fds: Sequence[int]) -> None:
        if not sys.executable:
            raise OSError("sys.executable is empty: there is no interpreter to start the actor with")
        # A parent-death signal comes when the starting *thread* ends; the main thread lives as long as the process.
        die = int(threading.current_thread() is threading.main_thread())
        command = [sys.executable, "-I", "-S", "-c", _BOOT.format(module=module), _ROOT]
        command += [str(argument) for argument in (*arguments, os.getpid(), die)]
        # Ctrl-C must not end an actor that is starting: these signals stay blocked until its handlers are set.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            self._process = subprocess.Popen(command, pass_fds=list(fds), stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    def wait(self, timeout: float | None) -> bool:
        """Wait for its end; return whether it ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def describe_end(self) -> str:
        """Say how it ended, for an error message."""
        status = self._process.poll()
        if status is None:
            return "still runs, but does not answer"
        if status == 0:
            return "ended because it was told to"
        if status > 0:
            return f"ended with status {status}; the reason is on standard error"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
        advice = ADVICE.get(-status, CRASHED if -status in CRASHES else "")
        return f"was killed by signal {-status} ({name}{advice})"

    def kill(self) -> None:
        """Kill and reap it."""
        if self._process.poll() is None:
            self._process.kill()
            self.wait(KILL_WAIT)

    def disown(self) -> None:
        """Forget it without waiting: for a forked copy of the caller, which is not its parent."""
        self._process.returncode = 0
