"""The training process of a stress run: connects, syncs its state, reduces, holds topology rounds, reports each call.

It makes the calls that users make. When a membership ends, because its actor was killed or because the peer was stopped
for too long, the process connects again. Every other error ends the process with a traceback in the log, which the
supervisor treats as a failure. The supervisor sends two signals: SIGUSR1 exits at once, in the middle of any call;
SIGUSR2 closes and exits.

A topology round admits newcomers, so every membership begins with what follows a topology round: sync, reduce, update.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING

from pccl import (
    Attribute,
    KickedError,
    MasterLostError,
    Options,
    PCCLError,
    PeerLostError,
    TooFewPeersError,
    UsageError,
)
from pccl.master import serve

from . import bad_newcomer, proxy
from .arithmetic import is_optimized
from .records import VANISHED
from .reduce_loop import ReduceRound
from .state_loop import StateLoop
from .step_log import LoggedCommunicator, StepLog

if TYPE_CHECKING:
    from .arithmetic import Array
    from .records import Task

ORDERS = (signal.SIGUSR1, signal.SIGUSR2)  # exit without closing; close and exit
AFTER_TIMEOUT = 0.05  # seconds: a call that was given up late may have been answered; lets the others continue first
ASKER_PATIENCE = 10.0  # seconds after which a second thread that does not return is abandoned


class Training:
    """One training process, through all its memberships."""

    def __init__(self, task: Task, report_fd: int) -> None:
        self._task = task
        self._options = Options.decode(task.options)
        self._step_log = StepLog(report_fd, task)
        self._random = random.Random(task.seed)
        self._exhibits: deque[tuple[float, Array]] = deque()
        self._state_loop = StateLoop(task, self._step_log) if task.checkpoints else None
        self._closing = False

    def run(self) -> None:
        """Train until asked to leave."""
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(VANISHED))
        signal.signal(signal.SIGUSR2, self._on_close)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ORDERS)
        while not self._closing:
            task = self._task
            membership = LoggedCommunicator(self._step_log, task.address, task.group, task.lanes, self._options)
            try:
                membership.connect()
                self._take_part(membership)
            except (MasterLostError, KickedError, PeerLostError):
                # Reported already. The next turn joins as a newcomer: the simplest way to be in step again.
                pass
            finally:
                membership.close()

    def _on_close(self, *_: object) -> None:
        self._closing = True

    def _take_part(self, membership: LoggedCommunicator) -> None:
        over = threading.Event()
        asker = threading.Thread(target=self._ask, args=(membership, over), daemon=True)
        if self._task.ask_interval:
            asker.start()
        try:
            while not self._closing:
                if self._task.places:
                    self._train(membership)
                time.sleep(self._random.uniform(0, self._task.pause))
                if not self._closing:
                    self._hold_round(membership)
        finally:
            over.set()
            if self._task.ask_interval:
                asker.join(ASKER_PATIENCE)

    def _train(self, membership: LoggedCommunicator) -> None:
        """The work between two topology rounds."""
        number = membership.topology_round
        if self._state_loop is not None:
            self._state_loop.sync(membership, number)
        outcomes = ReduceRound(self._task, self._step_log, self._exhibits).run(membership, number)
        if self._state_loop is not None:
            self._state_loop.apply(number, outcomes)
        if is_optimized(self._task.run_seed, number):
            try:
                membership.optimize_topology()
            except UsageError:
                pass  # reported already: a peer that is alone has nothing to measure

    def _hold_round(self, membership: LoggedCommunicator) -> None:
        """One topology round, by either of the calls that make one."""
        if self._random.random() >= self._task.wait_share:
            membership.update_topology()
            return
        wanted = self._random.randint(1, membership.get_attribute(Attribute.LOCAL_WORLD_SIZE) + 1)
        try:
            membership.wait_for_world_size(wanted, self._task.wait_timeout)
        except TooFewPeersError:
            time.sleep(AFTER_TIMEOUT)

    def _ask(self, membership: LoggedCommunicator, over: threading.Event) -> None:
        """The second thread: calls are_peers_pending, which may overlap with any other call."""
        try:
            while not over.wait(self._task.ask_interval):
                membership.are_peers_pending()
        except PCCLError:
            pass  # reported already; the main thread gets the same error, unless it has closed meanwhile


def be_master(task: Task, report_fd: int) -> None:
    """Serve until terminated; writes the address as the only line to `report_fd`."""

    def log(level: int, line: str) -> None:
        print(f"{time.monotonic():.6f} {level} {line}", file=sys.stderr, flush=True)

    serve("127.0.0.1:0", Options.decode(task.options), log, lambda where: _write_address(report_fd, where))


def _write_address(fd: int, where: str) -> None:
    os.write(fd, where.encode() + b"\n")


def be(task: Task, report_fd: int) -> int:
    """Run the task. Returns the exit status: 1, with a traceback in the log, after an unexpected exception."""
    try:
        if task.role == "proxy":
            proxy.serve(report_fd)
        elif task.mistake:
            return bad_newcomer.be(task)
        elif task.address:
            Training(task, report_fd).run()
        else:
            be_master(task, report_fd)
    except BaseException:  # noqa: BLE001 - the last frame of this process; the supervisor judges its exit status
        traceback.print_exc()
        return 1
    return 0
