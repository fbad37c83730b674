"""The ranks of a measurement: each is a process, all start a round together, and one clock times them.

The ranks share one page of memory that the parent created. Each rank has a cell in it that says for how many rounds it
is ready, and one cell has the start time of the round. Rank 0 waits for all ranks, then writes a time shortly in the
future; all sleep until then. So the start needs none of the measured libraries, no rank spins on a core that another
rank needs, and a round starts with idle sockets and sleeping processes, as in training.

The clock is CLOCK_MONOTONIC, which is common to all processes of a machine. A round lasts from the start of the *last*
rank to the end of the last rank. A rank that starts late (a world may have more ranks than cores) costs nothing;
counted from the first start, the round would measure the scheduler.

A result is checked after every round, outside the timed part: each rank contributes a pattern that depends on rank,
position and round, in whole numbers that float32 adds exactly in any order. So a stale result, a block at a wrong
position, or a block that was never reduced does not count as a fast one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Start = Callable[..., subprocess.Popen[str]]

LEAD_NS = 1_000_000  # from the last arrival to the start: every sleeping rank checks in this time
LOOK_SECONDS = 50e-6  # between two checks of a waiting rank: far below the lead, far above the cost of a check
MEET_SECONDS_MAX = 120  # a rank that does not come in this time has died or hangs
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29

PERIOD = 1009  # elements after which the pattern repeats: a prime, so that it fits no block
PIECE = 1024 * PERIOD  # elements compared at a time: few enough for a cache
SALTS = 512  # rounds after which patterns repeat; all sums stay whole in float32 up to 100 ranks


class Meeting:
    """The synchronisation of the ranks of one measurement, as used by one rank."""

    def __init__(self, fd: int, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._cells = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")
        self._start, self._agreed = world, world + 1  # indices of cells; those below belong to the ranks
        self._rounds = 0
        # The kernel may extend a sleep by 50 µs to save power, which would disturb a measurement.
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
        # The parent of the ranks may be killed; they must not continue without it.
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)

    def meet(self) -> None:
        """Return at the same moment as all others."""
        before = self._cells[self._start]
        self._rounds += 1
        self._cells[self.rank] = self._rounds
        if self.rank == 0:
            self._await(lambda: min(self._cells[: self.world]) >= self._rounds)
            self._cells[self._start] = time.monotonic_ns() + LEAD_NS
        else:
            self._await(lambda: self._cells[self._start] != before)
        time.sleep(max(0, self._cells[self._start] - time.monotonic_ns()) / 1e9)

    def agree(self, value: int) -> int:
        """Return the value that rank 0 passed."""
        if self.rank == 0:
            self._cells[self._agreed] = value
        self.meet()
        agreed = self._cells[self._agreed]
        self.meet()  # no rank writes the next value before all have read this one
        return agreed

    def timed(self, call: Callable[[], object]) -> tuple[int, int]:
        """Make a call together with all ranks; return its start and end in nanoseconds."""
        self.meet()
        start = time.monotonic_ns()
        call()
        end = time.monotonic_ns()
        self.meet()  # an early rank must not check its result on a core that others still need
        return start, end

    @staticmethod
    def _await(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MEET_SECONDS_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not come to the start of a round within {MEET_SECONDS_MAX} s")
            time.sleep(LOOK_SECONDS)


def start_here(_rank: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a rank's process, with options of Popen."""
    return subprocess.Popen(command, **options)


def run_ranks(
    module: str, plan: dict[str, Any], world: int, *, start: Start = start_here, **environment: str
) -> Generator[list[Any], None, None]:
    """Start the ranks; yield their lines, one line of each at a time. All ranks have ended when the iteration ends."""
    page = os.memfd_create("pccl-bench-meeting")
    ranks: list[subprocess.Popen[str]] = []
    try:
        os.ftruncate(page, mmap.PAGESIZE)
        for rank in range(world):
            seat = json.dumps({**plan, "rank": rank, "world": world, "page": page})
            command = [sys.executable, "-m", module, "--rank", seat]
            variables = {**os.environ, **environment}
            ranks.append(start(rank, command, stdout=subprocess.PIPE, text=True, pass_fds=[page], env=variables))
        pipes = [rank.stdout for rank in ranks if rank.stdout is not None]
        while all(lines := [pipe.readline() for pipe in pipes]):
            yield [json.loads(line) for line in lines]
        if any(codes := [rank.wait() for rank in ranks]):
            raise RuntimeError(f"the ranks of a world of {world} ended with {codes}; what they said is above")
    finally:
        os.close(page)
        for process in ranks:
            with process:  # closes the pipe and waits
                process.kill()


def say(line: object) -> None:
    """Print a line of a rank to its parent."""
    print(json.dumps(line), flush=True)


def progress(line: str) -> None:
    """Print a progress line to standard error; tables go to standard output."""
    print(f"  {line}", file=sys.stderr, flush=True)


def merge(reports: list[dict[str, list[tuple[int, int]]]], nbytes: int) -> dict[str, dict[str, float]]:
    """Return the quartiles and the effective throughput of each contender, from the starts and ends of all ranks."""
    return {name: summarize([report[name] for report in reports], nbytes) for name in reports[0]}


def summarize(ranks: list[list[tuple[int, int]]], nbytes: int) -> dict[str, float]:
    """Return the quartiles of the rounds in microseconds, and the bytes of one contribution divided by the median."""
    rounds = list(zip(*ranks, strict=True))
    times = [(max(end for _, end in pairs) - max(start for start, _ in pairs)) / 1000 for pairs in rounds]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {
        "median_us": round(middle, 1),
        "p25_us": round(low, 1),
        "p75_us": round(high, 1),
        "rounds": len(times),
        "bytes_per_second": round(nbytes / middle * 1e6),
    }


# --- Contents ---------------------------------------------------------------


def fill(array: np.ndarray[Any, Any], rank: int, salt: int) -> None:
    """Write the contribution of a rank to a round."""
    _spread(array, _row(salt) * np.float32(rank + 1))


def verify(array: np.ndarray[Any, Any], world: int, salt: int, what: str) -> None:
    """Raise RuntimeError unless the array is the sum of all contributions: a wrong result must not count as fast."""
    _compare(array, _row(salt) * np.float32(world * (world + 1) // 2), f"{what}: wrong sum")


def verify_untouched(array: np.ndarray[Any, Any], rank: int, salt: int, what: str) -> None:
    """Raise RuntimeError if a reduce out of place has changed its source."""
    _compare(array, _row(salt) * np.float32(rank + 1), f"{what}: the source was changed")


def _row(salt: int) -> np.ndarray[Any, Any]:
    return np.arange(1, PERIOD + 1, dtype=np.float32) + np.float32(salt % SALTS)


def _spread(array: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> None:
    whole = array.size // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = row
    array[whole:] = row[: array.size - whole]


def _compare(array: np.ndarray[Any, Any], row: np.ndarray[Any, Any], message: str) -> None:
    expected = np.tile(row, PIECE // PERIOD)
    for begin in range(0, array.size, PIECE):
        piece = array[begin : begin + PIECE]
        if not np.array_equal(piece, expected[: piece.size]):
            wrong = int(np.argmax(piece != expected[: piece.size]))
            raise RuntimeError(f"{message} at element {begin + wrong}: {piece[wrong]}, not {expected[wrong]}")
