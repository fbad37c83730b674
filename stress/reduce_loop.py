"""The reduces of one round, as an asynchronous training loop makes them: several at once, retried by the survivors.

All members of a group make the same operations in the same order and get the same verdicts, so they retry the same
operations and stay in step. A tensor whose reduce failed is an *exhibit*: the process does not use it for a while and
reports its address, and the supervisor reads it from outside, to check that it was restored and that no process writes
to it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import pccl
from pccl import (
    Communicator,
    DataType,
    MasterLostError,
    PCCLError,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    TooFewPeersError,
)

from .arithmetic import Array, PlannedReduce, checksum, contribution, draw_operations, participants_of, progress_of
from .records import REDUCE, Reduced, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pccl import AsyncReduceHandle

    from .step_log import StepLog

IN_FLIGHT = 3  # reduces that run at the same time
EXHIBIT_SECONDS = 1.5  # how long an exhibit is left unchanged; the supervisor reads it before
EXHIBITS_MAX = 8  # at one time
LOST = Result.RANK_CONNECTION_LOST.value
ALONE = Result.TOO_FEW_PEERS.value


@dataclass(slots=True)
class Attempt:
    """One attempt at an operation."""

    operation: PlannedReduce
    attempt: int
    source: Array
    target: Array  # the same if the operation is in place
    before: int
    start_ns: int
    handle: AsyncReduceHandle | None = None


@dataclass(frozen=True, slots=True)
class ReduceOutcome:
    """The result of an operation."""

    operation: PlannedReduce
    tensor: Array
    checksum: int


class ReduceRound:
    """All reduces between two topology rounds. `run` returns the results of those that succeeded."""

    def __init__(self, task: Task, step_log: StepLog, exhibits: deque[tuple[float, Array]]) -> None:
        self._task = task
        self._step_log = step_log
        self._exhibits = exhibits
        self._results: list[ReduceOutcome] = []
        self._number = 0

    def run(self, membership: Communicator, number: int) -> list[ReduceOutcome]:
        """Make the operations of this round. A peer that is alone skips the rest of them."""
        task = self._task
        self._number = number
        operations = draw_operations(task.run_seed, task.group, number, task.places)
        listed = [operation for operation in operations if operation.in_list]
        try:
            if listed:
                self._run_list(membership, listed)
            self._run_async(membership, [operation for operation in operations if not operation.in_list])
        except TooFewPeersError:
            pass  # the other members are gone, so no member has a different result
        return sorted(self._results, key=lambda result: result.operation.index)

    # ------------------------------------------------------------------------------------------ one by one

    def _run_async(self, membership: Communicator, operations: list[PlannedReduce]) -> None:
        waiting = deque((operation, 1) for operation in operations)
        in_flight: deque[Attempt] = deque()
        alone = False
        while waiting or in_flight:
            if waiting and len(in_flight) < IN_FLIGHT and not alone:
                operation, attempt = waiting.popleft()
                try:
                    in_flight.append(self._launch(membership, operation, attempt))
                except TooFewPeersError:
                    alone = True
                continue
            if not in_flight:
                break
            pending = in_flight.popleft()
            status = self._await(pending, in_flight)
            if status == LOST:
                waiting.appendleft((pending.operation, pending.attempt + 1))
            alone = alone or status == ALONE
        if alone:
            raise TooFewPeersError(Result.TOO_FEW_PEERS, REDUCE, "this peer is alone")

    def _prepare(self, operation: PlannedReduce, attempt: int) -> Attempt:
        task = self._task
        values = contribution(operation, self._number, task.place, task.places, task.life)
        source = _tensor(operation)
        np.copyto(source, values)
        target = source if operation.in_place else _tensor(operation)
        if operation.shows_progress:
            target.fill(0)
        return Attempt(operation, attempt, source, target, checksum(source), time.monotonic_ns())

    def _launch(self, membership: Communicator, operation: PlannedReduce, attempt: int) -> Attempt:
        pending = self._prepare(operation, attempt)
        try:
            pending.handle = membership.all_reduce_async(
                pending.source,
                pending.target,
                op=ReduceOp.SUM,
                tag=operation.tag,
                quantization_options=QuantizationOptions() if operation.quantized else None,
            )
        except TooFewPeersError:
            raise
        except PCCLError as error:
            self._step_log.record(REDUCE, pending.start_ns, None, error)
            raise
        return pending

    def _await(self, pending: Attempt, others: Iterable[Attempt]) -> int:
        """Wait for an attempt and report how it ended. Returns its status; raises if the membership has ended."""
        assert pending.handle is not None
        ok, status, info = pending.handle.wait()
        if ok:
            self._take(pending, info.local_world_size)
        elif status == LOST:
            self._tell(pending, self._failed(pending))
        elif status != ALONE:
            for other in others:
                assert other.handle is not None
                other.handle.wait()
            error = MasterLostError(Result(status), REDUCE, "its membership has ended")
            self._step_log.record(REDUCE, pending.start_ns, None, error, self._failed(pending))
            raise error
        return int(status)

    # ------------------------------------------------------------------------------------------ as a list

    def _run_list(self, membership: Communicator, operations: list[PlannedReduce]) -> None:
        prepared = [self._prepare(operation, 0) for operation in operations]
        descriptors = [
            ReduceOpDescriptor.from_numpy(
                pending.source,
                pending.target,
                ReduceDescriptor(
                    pending.operation.count,
                    ReduceOp.SUM,
                    pending.operation.tag,
                    ReduceOperandDescriptor(DataType.from_numpy_dtype(pending.source.dtype)),
                    QuantizationOptions() if pending.operation.quantized else None,
                ),
            )
            for pending in prepared
        ]
        try:
            membership.all_reduce_multiple_with_retry(descriptors, max_in_flight=IN_FLIGHT)
        except TooFewPeersError:
            raise
        except PCCLError as error:
            self._step_log.record(REDUCE, prepared[0].start_ns, None, error)
            raise
        for pending in prepared:
            self._take(pending, 0)

    # ------------------------------------------------------------------------------------------ what is told

    def _take(self, pending: Attempt, world: int) -> None:
        """Keep and report the result of an operation that succeeded."""
        after = checksum(pending.target)
        self._results.append(ReduceOutcome(pending.operation, pending.target, after))
        members = () if pending.operation.quantized else participants_of(pending.target, self._task.places)
        span = (float(pending.target.min()), float(pending.target.max())) if pending.operation.quantized else (0.0, 0.0)
        # A source that is not the target is never written: report its checksum of now.
        before = pending.before if pending.operation.in_place else checksum(pending.source)
        fact = Reduced(
            self._number, pending.operation.index, pending.attempt, True, world, before, after, members, span
        )
        self._tell(pending, fact)

    def _failed(self, pending: Attempt) -> Reduced:
        """Make the tensor of a failed operation an exhibit; return the fact to report."""
        after = checksum(pending.source)
        exhibit = None
        now = time.monotonic()
        while self._exhibits and self._exhibits[0][0] < now:
            self._exhibits.popleft()
        if pending.source.nbytes and len(self._exhibits) < EXHIBITS_MAX:
            self._exhibits.append((now + EXHIBIT_SECONDS, pending.source))
            exhibit = (pending.source.ctypes.data, pending.source.nbytes)
        operation, attempt = pending.operation, pending.attempt
        far = progress_of(pending.target, self._task.places) if operation.shows_progress else (0, 0.0)
        fact = Reduced(self._number, operation.index, attempt, False, 0, pending.before, after)
        return replace(fact, exhibit=exhibit, progress=far)

    def _tell(self, pending: Attempt, fact: Reduced) -> None:
        self._step_log.record(REDUCE, pending.start_ns, None, None, fact)


def _tensor(operation: PlannedReduce) -> Array:
    if operation.shared:
        return pccl.empty(operation.count, operation.dtype)
    return np.empty(operation.count, operation.dtype)
