"""All reduces of one membership that are under way: launching, waiting, retrying, and who still has to wait for what.

A reduce is *un-awaited* from its launch until its outcome was handed out. One whose caller was interrupted is
*abandoned*: nobody will ask for it, but its memory is held until no worker can touch it. Nothing here raises for a
reduce that failed at a peer; that is an outcome.
"""

from __future__ import annotations

from _thread import RLock
from typing import TYPE_CHECKING

from ._core.mailbox import CallAwait, CallReduce
from ._core.operations import OPERATIONS_MAX
from ._core.park import monotonic_ns
from .errors import MasterLostError, PCCLError, TooFewPeersError, UsageError, error_from_outcome
from .launching import NOTHING, Launched, Request, read_failure
from .memory.arena import default
from .outcomes import KIND_KICKED, KIND_MASTER_LOST, KIND_PLAIN
from .records import record
from .values import ReduceInfo, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .actors.link import ActorLink

AWAIT_NS = 500_000_000  # who has waited this long says so: only then can the master explain calls that never meet


@record
class Outcome:
    """How a reduce ended."""

    result: int
    kind: int
    info: ReduceInfo
    reason: str

    def error(self, name: str) -> PCCLError:
        """The exception that says so."""
        return error_from_outcome(self.result, self.kind, name, self.reason)


class Reduces:
    """The reduces of one membership."""

    def __init__(self, link: ActorLink, on_numbers: Callable[[bytes], None], world: Callable[[], int]) -> None:
        self._link = link
        self._on_numbers = on_numbers  # a failure brings news of the world
        self._world = world  # members of the group, as far as this peer knows
        self._pending: dict[int, Launched] = {}  # tag -> un-awaited
        self._abandoned: list[Launched] = []
        self._ended: Outcome | None = None  # the first failure that said that the membership has ended
        self._lock = RLock()  # held where a reduce ends: another thread may close the membership meanwhile
        default().watch(link.unshare)

    # ------------------------------------------------------------------------------------------ one by one

    def launch(self, name: str, requests: Sequence[Request]) -> list[Launched]:
        """Post these reduces, in one message."""
        if self._ended is not None:
            # Whoever retries what failed must not do so for ever.
            raise self._ended.error(name)
        world = self._world()
        if world < 2:
            message = "this peer is alone in its group: call wait_for_world_size(2) first, which waits for others"
            raise TooFewPeersError(Result.TOO_FEW_PEERS, name, message)
        for request in requests:
            if request.tag in self._pending:
                message = f"tag {request.tag} is in use by a reduce that was not awaited; wait() for it or use another"
                raise UsageError(Result.INVALID_ARGUMENT, name, message)
        if self._abandoned:
            self._sort_abandoned()
        launched: list[Launched] = []
        try:
            launched.extend(self._prepare(name, request, world) for request in requests)
        except BaseException:
            for one in launched:
                one.release()
                self._link.put_back(one.slot)
            raise
        for one in launched:
            self._pending[one.tag] = one
        try:
            self._link.post(name, CallReduce(b"".join([one.operation() for one in launched])))
        except BaseException:
            for one in launched:
                self._abandon(one)
            raise
        return launched

    def _prepare(self, name: str, request: Request, world: int) -> Launched:
        """Everything but the message: a slot, and memory that the actor knows."""
        slot = self._link.acquire(name)
        try:
            one = Launched(slot, request, world)
            self._link.share(name, one.segments, default().descriptor)
        except BaseException:
            self._link.put_back(slot)
            raise
        return one

    def finish(self, name: str, one: Launched, deadline_ns: int | None = None) -> Outcome | None:
        """Wait for a reduce: its outcome, or None if the deadline came first."""
        began_ns, told = monotonic_ns(), False
        try:
            while not self._link.wait(name, one.slot, self._link.slice(deadline_ns)):
                now_ns = monotonic_ns()
                if deadline_ns is not None and now_ns >= deadline_ns and not one.slot.done:
                    return None
                if deadline_ns is None and not told and now_ns - began_ns > AWAIT_NS:
                    told = True
                    self._link.post(name, CallAwait(one.slot.index, one.slot.sequence))
        except PCCLError as error:
            # The actor is dead. Its workers die with it; the memory is ours again when the last of them is gone.
            self._link.bury()
            self._forget(one)
            self._fail(one)
            kind = KIND_MASTER_LOST if isinstance(error, MasterLostError) else KIND_PLAIN
            return Outcome(error.result.value, kind, NOTHING, error.message)
        self._forget(one)
        return self._settle(one)

    def _settle(self, one: Launched) -> Outcome:
        outcome, payload = self._link.take(one.slot)
        with self._lock:
            if one.over:
                return Outcome(Result.INVALID_USAGE.value, KIND_PLAIN, NOTHING, "closed by another thread")
            if outcome == 0:
                return Outcome(0, KIND_PLAIN, one.succeed(payload), "")
            one.fail()
        result, kind, numbers, reason = read_failure(outcome, payload)
        if numbers:
            self._on_numbers(numbers)
        ended = Outcome(result, kind, NOTHING, reason)
        if kind in (KIND_KICKED, KIND_MASTER_LOST):
            self._ended = self._ended or ended
        return ended

    def _fail(self, one: Launched) -> None:
        with self._lock:
            one.fail()

    def _forget(self, one: Launched) -> None:
        if self._pending.get(one.tag) is one:
            del self._pending[one.tag]

    def _abandon(self, one: Launched) -> None:
        """The caller was interrupted."""
        self._forget(one)
        self._abandoned.append(one)
        self._link.cancel(one.slot)

    def _sort_abandoned(self) -> None:
        with self._lock:
            for one in [one for one in self._abandoned if one.slot.done]:
                self._abandoned.remove(one)
                self._settle(one)

    def require_none(self, name: str) -> None:
        """Before a call that excludes reduces: none is un-awaited, and what was abandoned is over."""
        if self._pending:
            tags = ", ".join(str(tag) for tag in sorted(self._pending)[:8])
            message = f"reduces were launched and not awaited (tags {tags}); wait() for them first"
            raise UsageError(Result.PENDING_ASYNC_OPS, name, message)
        while self._abandoned:
            self._link.wait(name, self._abandoned[-1].slot)
            self._sort_abandoned()

    def close(self) -> None:
        """The membership is over and no worker is left: what was under way has failed."""
        default().unwatch(self._link.unshare)
        for one in [*self._pending.values(), *self._abandoned]:
            self._fail(one)
        self._pending.clear()
        self._abandoned.clear()

    # ------------------------------------------------------------------------------------------ all of them

    def run(self, name: str, request: Request) -> Outcome:
        """Launch one and wait for it."""
        (one,) = self.launch(name, (request,))
        return self.complete(name, one)

    def complete(self, name: str, one: Launched) -> Outcome:
        """Wait for one that nobody else can wait for."""
        try:
            outcome = self.finish(name, one)
        except BaseException:
            self._abandon(one)
            raise
        assert outcome is not None
        return outcome

    def run_all(self, name: str, requests: Sequence[Request], in_flight: int) -> ReduceInfo:
        """Run all of them, so many at a time, and again with the survivors what failed because a peer was lost."""
        if in_flight > 1:
            _require_distinct_tags(name, requests)
        waiting = list(enumerate(requests))
        flying: list[tuple[int, Launched]] = []
        infos: list[ReduceInfo] = []
        failure: Outcome | None = None
        try:
            while waiting or flying:
                if failure is None and waiting and len(flying) < in_flight:
                    flying += self._launch_next(name, waiting, min(in_flight - len(flying), OPERATIONS_MAX))
                    continue
                if not flying:
                    break
                index, one = flying.pop(0)
                outcome = self.complete(name, one)
                if outcome.result == 0:
                    infos.append(outcome.info)
                elif outcome.result == Result.RANK_CONNECTION_LOST.value:
                    waiting.append((index, requests[index]))
                    waiting.sort(key=lambda item: item[0])
                else:
                    failure = failure or outcome
        except BaseException:
            for _, one in flying:
                self._abandon(one)
            raise
        if failure is not None:
            raise failure.error(name)
        return _summed(infos)

    def _launch_next(self, name: str, waiting: list[tuple[int, Request]], count: int) -> list[tuple[int, Launched]]:
        batch = waiting[:count]
        launched = self.launch(name, [request for _, request in batch])
        del waiting[:count]
        return [(index, one) for (index, _), one in zip(batch, launched, strict=True)]


def _require_distinct_tags(name: str, requests: Sequence[Request]) -> None:
    """Of a list, because any two of it may be in flight together once some had to be repeated."""
    seen: set[int] = set()
    for request in requests:
        if request.tag in seen:
            message = f"tag {request.tag} is used twice in one list; use one tag for each, or max_in_flight=1"
            raise UsageError(Result.INVALID_ARGUMENT, name, message)
        seen.add(request.tag)


def _summed(infos: list[ReduceInfo]) -> ReduceInfo:
    return ReduceInfo(
        infos[-1].local_world_size if infos else 0,
        sum(info.tx_bytes for info in infos),
        sum(info.rx_bytes for info in infos),
        sum(info.network_seconds for info in infos),
        sum(info.neighbour_seconds for info in infos),
        sum(info.reduce_seconds for info in infos),
    )
