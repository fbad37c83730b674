"""The reduces of a simulated training process: launched one by one or in lists, awaited, retried, given up.

A thread that blocks tells its actor after a while. A reduce that failed because a peer was lost is retried with the
survivors at once, under the same tag. Sometimes a reduce has another signature than the others, or a tag in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pccl._core.peer.events import Complete
from pccl._core.protocol.events import NUMBERS, REDUCED
from pccl._core.protocol.mailbox import CallAwait, CallCancel, CallReduce
from pccl._core.protocol.operations import Operation, pack_operations
from pccl._core.protocol.outcomes import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    KIND_CANCELLED,
    KIND_COLLECTIVE,
    KIND_KICKED,
    KIND_MASTER_LOST,
    KIND_PLAIN,
    RANK_CONNECTION_LOST,
    SUCCESS,
    TOO_FEW_PEERS,
)

from .clock import MILLISECOND, SECOND

if TYPE_CHECKING:
    from .programs import Program

# How a reduce may end, beside the end of the membership.
ENDINGS = {
    (SUCCESS, KIND_PLAIN),
    (INVALID_ARGUMENT, KIND_PLAIN),  # the tag is in use
    (INVALID_USAGE, KIND_PLAIN),  # no member, or another thread votes on the topology
    (INVALID_USAGE, KIND_CANCELLED),
    (INVALID_ARGUMENT, KIND_COLLECTIVE),  # signatures differ
    (INVALID_USAGE, KIND_COLLECTIVE),  # calls that never meet
    (TOO_FEW_PEERS, KIND_COLLECTIVE),
    (RANK_CONNECTION_LOST, KIND_COLLECTIVE),
}
FIRST_SLOT = 20  # below are the slots of other calls


class OpRunner:
    """The reduces of one program, and whether its main thread blocks on them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._world = program.world
        self.in_flight: dict[tuple[int, int], int] = {}  # slot and its generation -> tag
        self._blocked: set[tuple[int, int]] = set()
        self.given: set[tuple[int, int]] = set()  # tag and elements of every reduce
        self._lost: list[int] = []  # tags to be tried again
        self._resting: set[tuple[int, int]] = set()  # launched in the phase without faults

    def launch(self, tags: Sequence[int], *, blocking: bool) -> None:
        """Reduce under these tags."""
        world, plan = self._world, self._world.plan
        operations = []
        for tag in tags:
            slot = FIRST_SLOT + tag
            while any(used == slot for used, _ in self.in_flight):
                slot += 10  # the tag is in use: a mistake of this program
            count = 2 if not world.settled and world.chance(plan.mismatch) else 1
            self.given.add((tag, count))
            key = slot, self._program.new_generation(slot)
            self.in_flight[key] = tag
            if world.settled:
                self._resting.add(key)
            operations.append(Operation(*key, tag, count, 10, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0))
            if not world.calm and world.chance(plan.patience):
                world.clock.after(world.random.randint(0, 3 * SECOND), self._give_up, key)
        for part in [operations] if world.chance(plan.together) else [[operation] for operation in operations]:
            self._program.mail(CallReduce(pack_operations(part)))
        if blocking:
            self.block()

    def block(self) -> None:
        """Let the main thread wait for all reduces in flight."""
        for key in self.in_flight.keys() - self._blocked:
            self._world.clock.after(self._world.random.randint(0, 800) * MILLISECOND, self._await, key)
        self._blocked |= self.in_flight.keys()

    def _await(self, key: tuple[int, int]) -> None:
        if key in self._blocked:
            self._program.mail(CallAwait(*key))

    def give_up(self) -> None:
        """Give up all reduces in flight."""
        for key in self.in_flight:
            self._program.mail(CallCancel(*key))

    def _give_up(self, key: tuple[int, int]) -> None:
        if key in self.in_flight or self._world.chance(0.2):
            self._program.mail(CallCancel(*key))

    def completed(self, action: Complete) -> None:
        """Handle the end of one reduce."""
        key = action.slot, action.generation
        tag = self.in_flight.pop(key)
        self._check(action)
        if action.result == RANK_CONNECTION_LOST and action.kind == KIND_COLLECTIVE and key in self._blocked:
            self._lost.append(tag)
        if action.kind in (KIND_KICKED, KIND_MASTER_LOST):
            self._program.finish()
        if key in self._blocked:
            self._blocked.discard(key)
            if not self._blocked:
                self._go_on()

    def _go_on(self) -> None:
        lost, self._lost = self._lost, []
        if lost and not self._world.calm and not self._program.is_done() and self._world.chance(0.8):
            self.launch(lost, blocking=True)
        else:
            self._program.go_on()

    def _check(self, action: Complete) -> None:
        """Check the outcome of one reduce."""
        if action.kind not in (KIND_KICKED, KIND_MASTER_LOST):
            assert (action.result, action.kind) in ENDINGS, f"a reduce ended with {action!r}"
        size = 0
        if action.result == SUCCESS:
            size = REDUCED.unpack_from(action.payload)[0]
            assert size >= 2, f"a world of {size} reduced"
        elif action.kind == KIND_COLLECTIVE:
            _, _, _, total, group, groups, largest = NUMBERS.unpack(action.payload[: NUMBERS.size])
            assert 1 <= group <= largest <= total, f"a world of {total}, {group}, {largest}"
            assert 1 <= groups <= total, f"{groups} groups of {total}"
            assert action.payload[NUMBERS.size :].decode(), "a failure without a reason"
        if (action.slot, action.generation) in self._resting:
            members = self._world.master.state.members.groups[self._program.shell.group].size()
            expected = SUCCESS if members > 1 else TOO_FEW_PEERS
            assert action.result == expected, f"in a world at rest a reduce of {members} ended with {action!r}"
            assert members == 1 or size == members, f"{members} members, {size} reduced"
