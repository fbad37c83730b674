"""The training process of a stressed run: connects, takes part in rounds, and tells every call over a pipe.

It does what users do and no more, so whatever goes wrong here goes wrong for them. A membership that ends, because its
actor was killed or because it was stopped for too long, is begun anew by connecting again; every other error ends the
process, with its traceback in the log, which the supervisor takes for the failure that it is. Two signals of the
supervisor are obeyed: SIGUSR1 leaves without a goodbye, in the middle of whatever runs; SIGUSR2 closes and exits.

Later calls (collectives, shared state) belong into `Training._step`, with a `Step` told for each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from pccl import Attribute, Communicator, KickedError, MasterLostError, Options, PCCLError, TooFewPeersError
from pccl.master import serve

from .records import CONNECT, PENDING, Numbers, Step, Task

if TYPE_CHECKING:
    from collections.abc import Callable

VANISHED = 7  # exit status of a process that was asked to leave without a goodbye
ORDERS = (signal.SIGUSR1, signal.SIGUSR2)  # leave without a goodbye; close and exit
CONNECT_ATTEMPTS = 5
AFTER_TIMEOUT = 0.05  # seconds: a call that was given up late may just have been answered; let the others go on first
ASKER_PATIENCE = 10.0  # seconds until a second thread that does not come back is left behind


class Teller:
    """Writes steps to the supervisor. A line is one write, so that two threads never mix theirs."""

    def __init__(self, fd: int, task: Task) -> None:
        self._fd = fd
        self._task = task

    def tell(self, call: str, start_ns: int, numbers: tuple[int, ...] | None, error: BaseException | None) -> None:
        """Tell of a call that has just ended."""
        said = f"{type(error).__name__}: {error}" if error is not None else ""
        seen = Numbers(*numbers) if numbers else None
        step = Step(self._task.life, self._task.group, call, start_ns, time.monotonic_ns(), seen, said)
        os.write(self._fd, step.encode())


class WatchedCommunicator(Communicator):
    """Tells of every single round, also of those inside wait_for_world_size: only so can rounds be told apart."""

    def __init__(self, teller: Teller, address: str, group: int, lanes: int, options: Options) -> None:
        super().__init__(address, group, lanes, options=options)
        self._teller = teller

    def connect(self, n_attempts: int = CONNECT_ATTEMPTS) -> None:
        """As `Communicator.connect`."""
        self._watch(CONNECT, lambda: super(WatchedCommunicator, self).connect(n_attempts))

    def are_peers_pending(self) -> bool:
        """As `Communicator.are_peers_pending`, of which nobody needs the numbers."""
        start_ns = time.monotonic_ns()
        try:
            pending = super().are_peers_pending()
        except PCCLError as error:
            self._teller.tell(PENDING, start_ns, None, error)
            raise
        self._teller.tell(PENDING, start_ns, None, None)
        return pending

    def _update_topology(self, name: str, wanted: int, deadline_ns: int | None) -> None:
        self._watch(name, lambda: super(WatchedCommunicator, self)._update_topology(name, wanted, deadline_ns))

    def _watch(self, name: str, call: Callable[[], Any]) -> None:
        start_ns = time.monotonic_ns()
        try:
            call()
        except PCCLError as error:
            self._teller.tell(name, start_ns, None, error)
            raise
        self._teller.tell(name, start_ns, self._numbers, None)


class Training:
    """One training process, through as many memberships as it takes."""

    def __init__(self, task: Task, report_fd: int) -> None:
        self._task = task
        self._options = Options.decode(task.options)
        self._teller = Teller(report_fd, task)
        self._random = random.Random(task.seed)
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
            except (MasterLostError, KickedError):
                pass  # was told; the next turn connects again
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
                self._step(membership)
                time.sleep(self._random.uniform(0, self._task.pause))
        finally:
            over.set()
            if self._task.ask_interval:
                asker.join(ASKER_PATIENCE)

    def _step(self, membership: WatchedCommunicator) -> None:
        """One turn of the training loop."""
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
        except (MasterLostError, KickedError):
            pass  # the main thread learns the same


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
        if task.address:
            Training(task, report_fd).run()
        else:
            be_master(task, report_fd)
    except BaseException:  # noqa: BLE001 - the last frame of this process; the supervisor judges its exit status
        traceback.print_exc()
        return 1
    return 0
