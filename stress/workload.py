"""The training process of a stressed run: connects, syncs its state, reduces, takes part in rounds, and tells it all.

It does what users do and no more, so whatever goes wrong here goes wrong for them. A membership that ends, because its
actor was killed or because it was stopped for too long, is begun anew by connecting again; every other error ends the
process, with its traceback in the log, which the supervisor takes for the failure that it is. Two signals of the
supervisor are obeyed: SIGUSR1 leaves without a goodbye, in the middle of whatever runs; SIGUSR2 closes and exits.

Newcomers are let in by a round, so every membership begins with what follows a round: sync, reduce, move on.
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

from . import proxy
from .arithmetic import is_optimized
from .reduce_loop import RoundOfReduces
from .state_loop import Keeper
from .step_log import Teller, WatchedCommunicator

if TYPE_CHECKING:
    from .arithmetic import Array
    from .records import Task

VANISHED = 7  # exit status of a process that was asked to leave without a goodbye
ORDERS = (signal.SIGUSR1, signal.SIGUSR2)  # leave without a goodbye; close and exit
AFTER_TIMEOUT = 0.05  # seconds: a call that was given up late may just have been answered; let the others go on first
ASKER_PATIENCE = 10.0  # seconds until a second thread that does not come back is left behind


class Training:
    """One training process, through as many memberships as it takes."""

    def __init__(self, task: Task, report_fd: int) -> None:
        self._task = task
        self._options = Options.decode(task.options)
        self._teller = Teller(report_fd, task)
        self._random = random.Random(task.seed)
        self._exhibits: deque[tuple[float, Array]] = deque()
        self._keeper = Keeper(task, self._teller) if task.checkpoints else None
        self._closing = False

    def run(self) -> None:
        """Until asked to leave."""
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(VANISHED))
        signal.signal(signal.SIGUSR2, self._on_close)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ORDERS)
        while not self._closing:
            task = self._task
            membership = WatchedCommunicator(self._teller, task.address, task.group, task.lanes, self._options)
            try:
                membership.connect()
                self._take_part(membership)
            except (MasterLostError, KickedError, PeerLostError):
                # Was told; the next turn connects again. Whose sync failed cannot know whether the others' did.
                pass
            finally:
                membership.close()

    def _on_close(self, *_: object) -> None:
        self._closing = True

    def _take_part(self, membership: WatchedCommunicator) -> None:
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

    def _train(self, membership: WatchedCommunicator) -> None:
        """What lies between two rounds."""
        number = membership.topology_round
        if self._keeper is not None:
            self._keeper.sync(membership, number)
        outcomes = RoundOfReduces(self._task, self._teller, self._exhibits).run(membership, number)
        if self._keeper is not None:
            self._keeper.apply(number, outcomes)
        if is_optimized(self._task.run_seed, number):
            try:
                membership.optimize_topology()
            except UsageError:
                pass  # was told: who is alone in the run has nothing to measure, and nothing else is an excuse

    def _hold_round(self, membership: WatchedCommunicator) -> None:
        """One round, by either of the calls that make one."""
        if self._random.random() >= self._task.wait_share:
            membership.update_topology()
            return
        wanted = self._random.randint(1, membership.get_attribute(Attribute.LOCAL_WORLD_SIZE) + 1)
        try:
            membership.wait_for_world_size(wanted, self._task.wait_timeout)
        except TooFewPeersError:
            time.sleep(AFTER_TIMEOUT)

    def _ask(self, membership: WatchedCommunicator, over: threading.Event) -> None:
        """The second thread: are_peers_pending may overlap anything, so here it does."""
        try:
            while not over.wait(self._task.ask_interval):
                membership.are_peers_pending()
        except PCCLError:
            pass  # was told, and the main thread learns the same; unless it has closed meanwhile


def be_master(task: Task, report_fd: int) -> None:
    """Serve until terminated; the address is the first and only line that is told."""

    def log(level: int, line: str) -> None:
        print(f"{time.monotonic():.6f} {level} {line}", file=sys.stderr, flush=True)

    serve("127.0.0.1:0", Options.decode(task.options), log, lambda where: _tell_address(report_fd, where))


def _tell_address(fd: int, where: str) -> None:
    os.write(fd, where.encode() + b"\n")


def be(task: Task, report_fd: int) -> int:
    """Be what the task says; the exit status. Whatever was not foreseen is shown and is a failure."""
    try:
        if task.role == "proxy":
            proxy.serve(report_fd)
        elif task.address:
            Training(task, report_fd).run()
        else:
            be_master(task, report_fd)
    except BaseException:  # noqa: BLE001 - the last frame of this process; the supervisor judges its exit status
        traceback.print_exc()
        return 1
    return 0
