"""The step log: a training process reports every call to the supervisor over a pipe, before it makes the next one."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from pccl import Communicator, PCCLError

from .records import CONNECT, OPTIMIZE, PENDING, Numbers, Step, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl import Options

    from .records import Fact

CONNECT_ATTEMPTS = 5


class StepLog:
    """Writes steps to the supervisor. A line is one write, so the lines of two threads never mix."""

    def __init__(self, fd: int, task: Task) -> None:
        self._fd = fd
        self._task = task

    def record(
        self,
        call: str,
        start_ns: int,
        numbers: tuple[int, ...] | None,
        error: BaseException | None,
        fact: Fact | None = None,
    ) -> None:
        """Report a call that has just ended."""
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        seen = Numbers(*numbers) if numbers else None
        step = Step(self._task.life, self._task.group, call, start_ns, time.monotonic_ns(), seen, text, fact)
        os.write(self._fd, step.encode())


class LoggedCommunicator(Communicator):
    """Reports every topology round, including those inside wait_for_world_size, so that rounds can be compared."""

    def __init__(self, step_log: StepLog, address: str, group: int, lanes: int, options: Options) -> None:
        super().__init__(address, group, lanes, options=options)
        self._step_log = step_log

    def connect(self, n_attempts: int = CONNECT_ATTEMPTS) -> None:
        """As `Communicator.connect`."""
        self._watch(CONNECT, lambda: super(LoggedCommunicator, self).connect(n_attempts))

    def optimize_topology(self) -> None:
        """As `Communicator.optimize_topology`."""
        self._watch(OPTIMIZE, super().optimize_topology)

    def are_peers_pending(self) -> bool:
        """As `Communicator.are_peers_pending`; reported without numbers."""
        start_ns = time.monotonic_ns()
        try:
            pending = super().are_peers_pending()
        except PCCLError as error:
            self._step_log.record(PENDING, start_ns, None, error)
            raise
        self._step_log.record(PENDING, start_ns, None, None)
        return pending

    def _update_topology(self, name: str, wanted: int, deadline_ns: int | None) -> None:
        self._watch(name, lambda: super(LoggedCommunicator, self)._update_topology(name, wanted, deadline_ns))

    def _watch(self, name: str, call: Callable[[], Any]) -> None:
        start_ns = time.monotonic_ns()
        try:
            call()
        except PCCLError as error:
            self._step_log.record(name, start_ns, None, error)
            raise
        self._step_log.record(name, start_ns, self._numbers(), None)
