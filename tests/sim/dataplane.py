"""The data plane of the simulated cluster: which peers have begun or finished an operation, and whose memory is dirty.

Nothing is added up here. An operation is a *run* that all members of a ring begin. It moves once all have begun it, and
each member finishes after a random time, if every lane of the ring is up until then. An operation leaves its memory
dirty: with half a result, or with a whole one that an abort may still undo. Only an abort cleans it, in its own time.
Assertions check the machines: what may begin, when a slot may complete, and that no member is told of a success while
another is told of a failure. The bytes that an operation receives follow from the rate of its edge, the same rate that
a probe of that edge would measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.peer.events import ReduceDrained, ReduceEnded, ReduceProgress, Traffic
from pccl._core.protocol.events import NUMBERS, REDUCED
from pccl._core.protocol.outcomes import KIND_COLLECTIVE, SUCCESS

from .clock import MILLISECOND, SECOND
from .probes import rate

if TYPE_CHECKING:
    from .nodes import PeerShell


class Run:
    """One collective over one ring."""

    __slots__ = (
        "begun",
        "ended",
        "failed",
        "members",
        "numbers",
        "sequence",
        "signature",
        "stuck_until_ns",
        "succeeded",
    )

    def __init__(self, sequence: int, members: frozenset[int], numbers: tuple[int, ...]) -> None:
        self.sequence = sequence
        self.members = members
        self.numbers = numbers  # of the world in which it commenced, as in NUMBERS after the peer id
        self.signature: Any = None  # that of the first member that began it
        self.begun: dict[int, DataPlane] = {}
        self.ended: set[int] = set()
        self.stuck_until_ns = 0  # a link loses all bytes until then
        self.succeeded = self.failed = False  # what callers were told

    def moves(self) -> bool:
        """Whether all members have begun it and every lane between them is up."""
        return len(self.begun) == len(self.members) and all(
            plane.stands(self.sequence) for plane in self.begun.values()
        )


class Part:
    """One peer's part in a run."""

    __slots__ = ("aborted", "begun_ns", "drained", "ended", "moved", "operation", "run")

    def __init__(self, run: Run, operation: Any, begun_ns: int) -> None:
        self.run = run
        self.begun_ns = begun_ns
        self.operation = operation
        self.ended = self.aborted = self.drained = False
        self.moved = 0


class DataPlane:
    """The lanes of one peer."""

    def __init__(self, shell: PeerShell) -> None:
        self._shell = shell
        self._world = shell.world
        self._latest = 0
        self._judged: dict[tuple[int, int], Run] = {}  # slot and its generation, between the end and the completion
        self._tx_bytes = self._rx_bytes = 0  # that all lanes have moved
        self._counted_ns = 0  # bytes received until then are counted
        self.parts: dict[int, Part] = {}

    def stands(self, sequence: int) -> bool:
        """Whether this peer still takes part, and all its lanes to the next one are up at both ends."""
        part = self.parts.get(sequence)
        if part is None or part.aborted or not self._shell.alive:
            return False
        sends = [end for end in self._shell.links.values() if end.dialled and end.attached]
        return bool(sends) and all(end.lane.far is not None and end.lane.far.is_open for end in sends)

    # ------------------------------------------------------------------------------------------ what the machine asks

    def begin(self, action: Any) -> None:
        """BeginOperation."""
        peer, sequence = self._shell.state.id, action.sequence
        run = self._world.runs[self._shell.state.ring_links.run, peer, sequence]
        assert sequence > self._latest, f"collective {sequence} begun after {self._latest}"
        assert action.world == len(run.members), f"world {action.world}, but {sorted(run.members)} were ordered"
        assert sum(end.attached for end in self._shell.links.values()) >= 2, "begun without lanes in both directions"
        slots = [part.operation.slot for part in self.parts.values()]
        assert action.operation.slot not in slots, f"slot {action.operation.slot} is dirty already"
        signature = action.operation.signature
        run.signature = run.signature or signature
        assert run.signature == signature, f"collective {sequence} is {run.signature} and {signature}"
        self._latest = sequence
        self.parts[sequence] = Part(run, action.operation, self._world.clock.now_ns)
        run.begun[peer] = self
        if len(run.begun) == len(run.members):
            for plane in run.begun.values():
                plane._plan_end(sequence)

    def abort(self, action: Any) -> None:
        """AbortOperation."""
        part = self.parts[action.sequence]
        assert not part.aborted, f"collective {action.sequence} aborted twice"
        part.aborted = True
        self._world.clock.after(self._delay_ns(), self._shell.receive, self._drain, action.sequence)

    def end(self, action: Any) -> None:
        """EndOperation."""
        part = self.parts.pop(action.sequence)
        if part.aborted:
            assert part.drained, f"collective {action.sequence} is over before it has drained"
        else:
            assert part.run.ended == part.run.members, f"collective {action.sequence} succeeded without all members"
        self._judged[part.operation.slot, part.operation.generation] = part.run

    def complete(self, action: Any) -> None:
        """Check a completing slot: its memory must be clean, and all callers must get the same verdict."""
        key = action.slot, action.generation
        dirty = [s for s, part in self.parts.items() if (part.operation.slot, part.operation.generation) == key]
        assert not dirty, f"slot {action.slot} completes while collective {dirty} has its memory"
        run = self._judged.pop(key, None)
        if run is not None:
            run.succeeded |= action.result == SUCCESS
            run.failed |= action.kind == KIND_COLLECTIVE  # every other failure is the end of a membership
            if action.result == SUCCESS:
                told = NUMBERS.unpack(action.payload[REDUCED.size :])[1:]
                assert told == run.numbers, f"collective {run.sequence} of {run.numbers} told its caller {told}"
            assert not (run.succeeded and run.failed), f"collective {run.sequence} succeeded here and failed there"

    # ------------------------------------------------------------------------------------------ what happens by itself

    def _delay_ns(self) -> int:
        return self._world.random.randint(0, self._world.plan.work_ms * MILLISECOND)

    def _plan_end(self, sequence: int) -> None:
        self._world.clock.after(self._delay_ns(), self._finish, sequence)

    def _finish(self, sequence: int) -> None:
        """End the local part, if all lanes are up. Workers run also while their actor is stopped.

        A peer that finished before a lane broke may not have needed that lane any more.
        """
        part, now_ns = self.parts.get(sequence), self._world.clock.now_ns
        if part is None or part.aborted or not self._shell.alive:
            return
        if now_ns < part.run.stuck_until_ns:
            self._world.clock.after(part.run.stuck_until_ns - now_ns, self._finish, sequence)
            return
        run = part.run
        gone = [peer for peer, plane in run.begun.items() if not plane.stands(sequence)]
        if not gone or (run.ended.issuperset(gone) and self._world.chance(0.5)):
            part.ended = True
            run.ended.add(self._shell.state.id)
            ended = self._count(part)
            # The actor receives it a little later, and may have aborted the operation by then.
            heard_ns = self._world.random.randint(0, 20 * MILLISECOND)
            self._world.clock.after(heard_ns, self._shell.receive, self._world.feed, self._shell, ended)

    def _count(self, part: Part) -> ReduceEnded:
        """Return the counts of the workers: the edge was the limit, or they waited for others most of the time."""
        world, shell = self._world, self._shell
        previous = part.run.begun[shell.state.ring_links.order.previous_peer]._shell
        carried = rate(world.plan, previous.number, shell.number)
        now_ns = world.clock.now_ns
        was_limit = world.chance(0.5)
        since_ns = max(self._counted_ns, part.begun_ns)  # operations at the same time share the edge
        self._counted_ns = now_ns
        share = 1.0 if was_limit else world.random.uniform(0.3, 1.0)
        rx_bytes = int(carried * (now_ns - since_ns) * share) // SECOND
        spent_ns = now_ns - part.begun_ns
        network_ns = spent_ns if was_limit else spent_ns // 2
        self._tx_bytes += rx_bytes
        self._rx_bytes += rx_bytes
        return ReduceEnded(part.run.sequence, rx_bytes, rx_bytes, network_ns, spent_ns - network_ns, 0)

    def _drain(self, sequence: int) -> None:
        self.parts[sequence].drained = True
        self._world.feed(self._shell, ReduceDrained(sequence))

    def report(self) -> None:
        """Tell the machine the progress of all operations before a Tick."""
        self._world.report(self._shell, Traffic(self._tx_bytes, self._rx_bytes))
        for sequence, part in [(s, part) for s, part in self.parts.items() if not part.aborted]:
            stuck = self._world.clock.now_ns < part.run.stuck_until_ns
            part.moved += not part.ended and part.run.moves() and not stuck
            self._world.report(self._shell, ReduceProgress(sequence, part.moved))
