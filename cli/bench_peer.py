"""One peer of `pccl bench`: the measurement, and how peers that join and die stay in step.

All members repeat the same three things: a topology round, one small reduce in which they agree on numbers, and a *lap*
of large reduces that are timed. A topology round admits a newcomer, so its next call is the next call of all members:
the small reduce. That reduce takes the maximum of what the members pass, so the zeros of a newcomer change nothing. All
members compute from the same maximum how many reduces the next lap has, and whether the measurement is over. A reduce
that fails because a peer was lost fails on all survivors, and all of them repeat it, so they stay in step. Laps have no
reduces until there are enough peers.

The time of a reduce is the time from the call to its return on this peer. Its effective rate is the size of the tensor
divided by that time. The tensor lies in shared memory, is reduced in place, and holds ones; its mean must stay one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl import Attribute, ReduceOp
from pccl.errors import PeerLostError, TooFewPeersError

from .status_view import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl import Communicator

LAP_SECONDS = 1.0  # the aim for one lap, and so for the time between two progress lines
LAP_REDUCES_MAX = 100_000  # reduces of one lap
POLL_SECONDS = 0.2  # between two topology rounds while peers are missing
AGREE_TAG, REDUCE_TAG = 1, 0


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. The largest `peers` and `seconds` of all peers count; size and dtype must be equal on all."""

    peers: int
    nbytes: int
    seconds: float
    dtype: str
    patience: float  # seconds to wait for the peers


@dataclass
class Lap:
    """The reduces of one lap on this peer, with times and bytes."""

    peers: int = 0  # that took part in the last of its reduces; fewer may be left when it is over
    elapsed: float = 0.0  # since the first lap began
    times: list[float] = field(default_factory=list)  # seconds of each reduce
    tx_bytes: int = 0
    rx_bytes: int = 0

    def add(self, other: Lap) -> None:
        """Add the numbers of another lap; `peers` is of the last one that reduced anything."""
        if other.times:
            self.peers = other.peers
        self.elapsed = other.elapsed
        self.times += other.times
        self.tx_bytes += other.tx_bytes
        self.rx_bytes += other.rx_bytes

    def numbers(self, nbytes: int) -> dict[str, Any]:
        """The numbers that the table and the JSON output show."""
        busy, ordered = sum(self.times), sorted(self.times)
        median = statistics.median(ordered) if ordered else 0.0
        return {
            "peers": self.peers,
            "elapsed_seconds": round(self.elapsed, 3),
            "reduces": len(ordered),
            "median_ms": round(median * 1e3, 3),
            "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3) if ordered else 0.0,
            "bytes_per_second": round(nbytes / median) if median else 0,
            "tx_bytes_per_second": round(self.tx_bytes / busy) if busy else 0,
            "rx_bytes_per_second": round(self.rx_bytes / busy) if busy else 0,
        }


class Bench:
    """One peer of the measurement."""

    def __init__(
        self, peer: Communicator, plan: BenchPlan, on_lap: Callable[[Lap, int], None], say: Callable[[str], None]
    ) -> None:
        self._peer = peer
        self._plan = plan
        self._on_lap = on_lap
        self._say = say
        self._tensor = pccl.empty(max(plan.nbytes // np.dtype(plan.dtype).itemsize, 1), plan.dtype)
        self._maximum = pccl.zeros(5, "float64")
        self._began: float | None = None  # None until there were enough peers
        self._known_world = 0  # the world size that the last line said
        self.nbytes = self._tensor.nbytes
        self.total = Lap()
        self.failed = 0  # reduces that failed because a peer was lost

    def run(self) -> None:
        """Measure until the time is over on all peers. Raises TooFewPeersError if no other peer came or is left."""
        deadline = time.monotonic() + self._plan.patience
        self._tensor.fill(1)
        lap_reduces, lap_seconds = 0, 0.0
        while True:
            elapsed = 0.0 if self._began is None else time.monotonic() - self._began
            agreed = self._agree(self._plan.peers, self._plan.seconds, elapsed, lap_reduces, lap_seconds)
            if agreed is not None:
                peers, seconds, elapsed, reduces, lasted = agreed
                if elapsed >= seconds:
                    return
                if self._began is None and (elapsed > 0 or self._world() >= peers):
                    self._began = time.monotonic()
                    self._known_world = self._world()
                if self._began is not None:
                    lap_reduces = _next_lap(int(reduces), lasted, seconds - elapsed)
                    lap_seconds = self._lap(lap_reduces, self._began)
            if self._began is None:
                self._wait_for_peers(deadline)
            elif self._world() < 2:
                raise TooFewPeersError(pccl.Result.TOO_FEW_PEERS, "bench", "all other peers are gone")
            self._peer.update_topology()  # admits waiting peers
            self._report_change()

    def _report_change(self) -> None:
        """Report how many peers joined, or were lost while no reduce ran: the next one succeeds with the others."""
        world, before = self._world(), self._known_world
        self._known_world = world
        if world != before and self._began is not None:
            number = abs(world - before)
            lost = f"{'was' if number == 1 else 'were'} lost between two reduces"
            self._say(f"{count(number, 'peer')} {'joined' if world > before else lost}; {world} peers continue")

    def _world(self) -> int:
        return self._peer.get_attribute(Attribute.LOCAL_WORLD_SIZE)

    def _wait_for_peers(self, deadline: float) -> None:
        world, wanted = self._world(), self._plan.peers
        if time.monotonic() > deadline:
            message = (
                f"{world} of {wanted} peers came within {self._plan.patience:g} s; start the others, or wait longer"
            )
            raise TooFewPeersError(pccl.Result.TOO_FEW_PEERS, "bench", message)
        time.sleep(POLL_SECONDS)

    def _agree(self, *passed: float) -> list[float] | None:
        """The maximum over all members, for each number; None if this peer is alone."""
        self._maximum[:] = passed
        try:
            self._reduce(self._maximum, ReduceOp.MAX, AGREE_TAG)
        except TooFewPeersError:
            return None
        return [float(number) for number in self._maximum]

    def _lap(self, reduces: int, first: float) -> float:
        """Make and time this many reduces; laps began at `first`. Returns the seconds of all, with failed ones."""
        lap, began = Lap(), time.monotonic()
        for _ in range(reduces):
            try:
                seconds, info = self._reduce(self._tensor, ReduceOp.AVG, REDUCE_TAG)
            except TooFewPeersError:
                break
            lap.peers = info.world_size
            lap.times.append(seconds)
            lap.tx_bytes += info.tx_bytes
            lap.rx_bytes += info.rx_bytes
        lasted = time.monotonic() - began
        if not (self._tensor[0] == self._tensor[-1] == 1 and bool((self._tensor == 1).all())):
            raise ValueError("a reduce gave a wrong result: the mean of ones is not one")
        lap.elapsed = time.monotonic() - first
        self.total.add(lap)
        self._on_lap(lap, self.nbytes)
        return lasted

    def _reduce(self, tensor: Any, op: ReduceOp, tag: int) -> tuple[float, pccl.ReduceInfo]:
        """One reduce, repeated with the survivors if a peer is lost. Returns the seconds of the successful attempt."""
        while True:
            began = time.perf_counter()
            try:
                info = self._peer.all_reduce(tensor, tensor, op=op, tag=tag)
            except PeerLostError as error:
                self.failed += 1
                self._known_world = self._world()
                self._say(f"{error.message}; {self._known_world} peers continue")
            else:
                seconds = time.perf_counter() - began
                if info.world_size != self._known_world:
                    self._report_change()
                return seconds, info


def _next_lap(reduces: int, seconds: float, left: float) -> int:
    """The number of reduces of the next lap, from the previous one; all peers compute the same number."""
    if not reduces or not seconds:
        return 1
    wanted = reduces * min(LAP_SECONDS, max(left, 0.0)) / seconds
    # At most ten times as many: the first reduces are slow because connections and memory are new.
    return max(1, min(round(wanted), reduces * 10, LAP_REDUCES_MAX))
