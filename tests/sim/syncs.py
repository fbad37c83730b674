"""The syncs of a simulated training process: with equal states or not, given up, failed and retried.

After a successful sync a program holds the agreed state at the agreed revision; that is checked here. A failed sync is
retried with the same state, or after a checkpoint was loaded. Sometimes a program does not increment its revision,
increments it twice, computes something else than the others, or uses another strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccl._core.master.election import NEVER
from pccl._core.peer.events import Complete
from pccl._core.protocol.events import NUMBERS, SYNCED
from pccl._core.protocol.mailbox import CallCancel, CallManifest, CallSync
from pccl._core.protocol.outcomes import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    KIND_CANCELLED,
    KIND_COLLECTIVE,
    KIND_DESCRIBE,
    KIND_KICKED,
    KIND_MASTER_LOST,
    KIND_PLAIN,
    NO_SHARED_STATE_AVAILABLE,
    PENDING_ASYNC_OPS,
    RANK_CONNECTION_LOST,
    SUCCESS,
)
from pccl._core.protocol.state_schema import digest_schema
from pccl.client.divergence import Divergence, Overwrite

from .clock import MILLISECOND, SECOND
from .states import ODD, RIGHT, State

if TYPE_CHECKING:
    from .programs import Program

# How a sync may end, beside the end of the membership.
ENDINGS = {
    (SUCCESS, KIND_PLAIN),
    (INVALID_USAGE, KIND_PLAIN),  # no member
    (INVALID_USAGE, KIND_COLLECTIVE),  # a deadlock, or no peer may send its state
    (INVALID_USAGE, KIND_CANCELLED),
    (PENDING_ASYNC_OPS, KIND_PLAIN),
    (NO_SHARED_STATE_AVAILABLE, KIND_COLLECTIVE),
    (INVALID_ARGUMENT, KIND_COLLECTIVE),  # no schema is agreed, and none has a majority
    (RANK_CONNECTION_LOST, KIND_COLLECTIVE),
}
POPULAR, RECEIVE, SEND = 0, 1, 2


class SyncMachine:
    """The shared state of one program, and the call that syncs it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._world = program.world
        random, plan = self._world.random, self._world.plan
        self.state = State(random.randrange(3) if self._world.chance(plan.dirty) else 0, program.shell.number)
        self.schema = ODD if self._world.chance(plan.odd) else RIGHT
        self.described = 0  # the segment of the latest manifest
        self.jumped = False  # it incremented its revision twice, so it may be kicked
        self.strategy = POPULAR
        self.resting: int | None = None  # the result of the sync in the phase without faults
        self._key: tuple[int, int] | None = None  # slot and generation of the call under way, or of its manifest
        self._attempt = 0  # counts the calls
        self._voted = b""  # the digest of its content
        self._in_step = False  # it holds the agreed state, and may make the next step
        self._divergence = Divergence()

    @property
    def under_way(self) -> bool:
        """Whether a call is under way."""
        return self._key is not None

    @property
    def is_slow(self) -> bool:
        """Whether it takes more than a comparison."""
        return self._key is not None and (self._key[0] == 2 or self._key not in self._program.under_way)

    def launch(self) -> None:
        """sync_shared_state, after a step of training unless the last call failed."""
        world, plan, state = self._world, self._world.plan, self.state
        if self._in_step and not world.chance(plan.repeat):
            state.train()
        if not world.settled:
            if world.chance(plan.dirty):
                state.values[world.random.randrange(4)] += 1
            if world.chance(plan.jump):
                state.revision += 2
                self.jumped = True
        self._in_step = False
        self._attempt += 1
        self.strategy = POPULAR if world.settled else world.random.choice(plan.strategies)
        self._voted = state.digest()
        key = self._key = 0, self._program.new_generation(0, "sync_shared_state")
        torn = state.torn == self._voted
        if not torn:
            world.contents[self._voted] = tuple(state.values)
        call = CallSync(*key, state.revision, self.strategy, 5, digest_schema(self.schema), self._voted, torn)
        self._program.mail(call)
        if not world.calm and world.chance(plan.patience):
            world.clock.after(world.random.randint(0, 3 * SECOND), self._give_up, self._attempt)

    def _give_up(self, attempt: int) -> None:
        if attempt == self._attempt:
            self.give_up()

    def give_up(self) -> None:
        """Give up the call. A caller that computes its manifest just stops."""
        if self._key is None or not self._program.shell.alive:
            return
        self._program.mail(CallCancel(*self._key))
        if self._key not in self._program.under_way:  # its slot is completed, and there will be no other
            self._key = None
            self._program.go_on()

    def completed(self, action: Complete) -> None:
        """Handle the end of the call, or of its first part."""
        if action.kind == KIND_DESCRIBE:
            assert self._key is not None
            self._world.clock.after(self._world.random.randint(0, 300) * MILLISECOND, self._describe, self._key)
            return
        self._key = None
        assert self._program.shell.states.transfer is None, "a slot completes while workers are in its memory"
        if action.kind in (KIND_KICKED, KIND_MASTER_LOST):
            self._program.finish()
            return
        assert (action.result, action.kind) in ENDINGS, f"a synchronisation ended with {action!r}"
        if action.result == SUCCESS or action.kind == KIND_COLLECTIVE:
            begin = SYNCED.size if action.result == SUCCESS else 0
            _, _, _, total, group, groups, largest = NUMBERS.unpack(action.payload[begin : begin + NUMBERS.size])
            assert 1 <= group <= largest <= total, f"a world of {total}, {group}, {largest}"
            assert 1 <= groups <= total, f"{groups} groups of {total}"
        if action.result == SUCCESS:
            self._succeeded(SYNCED.unpack_from(action.payload))
        else:
            self._failed(action.result)
        if self._world.settled:
            self.resting = action.result
        elif action.result == PENDING_ASYNC_OPS and self._program.reducing.in_flight:
            self._program.reducing.block()
        else:
            self._program.go_on()

    def _describe(self, asked: tuple[int, int]) -> None:
        if self._key != asked or not self._program.shell.alive:
            return  # given up meanwhile
        self.described += 1
        self._key = 2, self._program.new_generation(2, "sync_shared_state")
        self._program.mail(CallManifest(*self._key, self.described, 100, 1))

    def _succeeded(self, numbers: tuple[int, int, int]) -> None:
        """Check that the memory holds the agreed content at the agreed revision."""
        revision, tx_bytes, rx_bytes = numbers
        key = self._program.run, self._program.shell.group
        agreed = self._world.agreed_states[key]
        self._world.told[key] = max(revision, self._world.told.get(key, NEVER))
        assert agreed.get(revision) == self.state.digest(), f"revision {revision} succeeded with something else"
        assert not (tx_bytes and rx_bytes) or self._program.shell.states.heir, "sent and received in one round"
        assert rx_bytes == 0 or self.strategy != SEND, "SEND_ONLY was overwritten"
        self._count_overwrites(revision, rx_bytes)
        self.state.revision = revision
        self.state.torn = b""
        self._in_step = True

    def _count_overwrites(self, revision: int, rx_bytes: int) -> None:
        """Count the syncs that overwrite this program as a divergent member. The master has counted each of them."""
        is_member = self._divergence.ended()
        if is_member and rx_bytes and self.strategy != RECEIVE:
            self._divergence.overwritten(Overwrite((), 5, rx_bytes, self.state.revision, revision))
        members, numbers = self._world.master.state.members, self._program.numbers
        peer = members.peers.get(numbers[0]) if numbers and members.run == self._program.run else None
        assert peer is None or peer.overwritten >= self._divergence.times, f"the master counted {peer.overwritten}"

    def _failed(self, result: int) -> None:
        """If the memory differs from the vote, a transfer has torn it. Loading a checkpoint repairs it.

        A program that reads that the schemas differ is repaired.
        """
        if result == INVALID_ARGUMENT:
            self.schema = RIGHT
        if self.state.digest() != self._voted:
            self.state.torn = self.state.digest()
        if result == NO_SHARED_STATE_AVAILABLE or self._world.chance(self._world.plan.dirty):
            self.load_checkpoint()

    def load_checkpoint(self) -> None:
        """Load the agreed state, whatever the revision of the checkpoint; or the initial state."""
        agreed = self._world.agreed_states.get((self._program.run, self._program.shell.group))
        self.state.torn = b""
        if agreed:
            self.state.values = list(self._world.contents[agreed[max(agreed)]])
            self.state.revision = self._world.random.choice((0, self.state.revision))

    def is_odd(self, reason: str) -> bool:
        """Whether this program may be kicked for that reason."""
        plan = self._world.plan
        if reason.startswith("called sync_shared_state with"):
            return plan.strategies != (POPULAR,)
        if reason.startswith("its shared state is laid out differently"):
            return plan.odd > 0  # or the others have the odd schema
        return reason.startswith("its shared state is at revision") and self.jumped
