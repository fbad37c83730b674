"""Simulated training processes: they connect, call, compute, give up and leave, each in its own style.

A program checks the contract of calls: a completion belongs to a call that is under way, comes once, and carries valid
numbers. After the last fault every program only updates the topology, as fast as it can, until the run has converged;
then all programs reduce and sync once more. The reduces of a program are in `reducing`, its shared state in `syncing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.peer.events import Called, Complete
from pccl._core.protocol.events import NUMBERS
from pccl._core.protocol.mailbox import (
    CallCancel,
    CallConnect,
    CallFinish,
    CallLeave,
    CallOptimize,
    CallPending,
    CallThreads,
    CallTopology,
)
from pccl._core.protocol.outcomes import KIND_CANCELLED, KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST, PENDING_ASYNC_OPS

from .clock import MILLISECOND, SECOND
from .reduces import OpRunner
from .runs import TOGETHER_NS
from .syncs import SyncMachine

if TYPE_CHECKING:
    from .nodes import PeerShell
    from .world import World

CONNECT, TOPOLOGY, PENDING, LEAVE = "connect", "update_topology", "are_peers_pending", "close"
REDUCE, SYNC, OPTIMIZE, FINISH = "all_reduce", "sync_shared_state", "optimize_topology", "finish"
SUCCESS, INVALID_USAGE = 0, 4


class Program:
    """One training process."""

    def __init__(self, world: World, shell: PeerShell, style: str, *, name: str, knows_token: bool = True) -> None:
        self.world = world
        self.shell = shell
        self.style = style
        self.name = name  # of its run
        self.end: tuple[int, int] | None = None  # result and kind of connect or finish, in the phase without faults
        self.knows_token = knows_token
        self.under_way: dict[tuple[int, int], str] = {}  # (slot, generation) to the name of the call
        self.run = b""  # the run of its present or last membership
        self._life = 0  # of the master that admitted it
        self.numbers: tuple[int, ...] | None = None  # the latest: peer id, round, epoch, then the world
        self.counted_ns = -1  # when those came
        self.ending = False  # it knows that its membership is over
        self.over = False  # it closes, or has ended
        self.killed = False
        self.closed = False  # close() returned
        self.reducing = OpRunner(self)
        self._optimizes_next = False
        self._has_threads = False  # a second thread has made a call
        self.syncing = SyncMachine(self)
        self._part = 0  # of a training step, which reduces, syncs, asks for newcomers, and so on
        self._generation = 0
        self._wanted = 0  # wait_for_world_size waits until its group has this many
        random = world.random
        attempts = 5 if world.calm else random.choice((1, 3, 5))
        self._post(CONNECT, CallConnect, attempts, shell.group, shell.lanes, b"", "", 0, b"")
        if not world.calm and world.chance(world.plan.patience / 2):
            self._give_up_later()

    def completed(self, action: Complete) -> None:
        """A call of this program ended."""
        if self.killed:
            return  # no process reads it
        key = action.slot, action.generation
        assert key in self.under_way, f"{action!r} ends a call that is not under way: {self.under_way}"
        name = self.under_way.pop(key)
        if name == LEAVE:
            self.closed = True
            return
        if name == REDUCE:
            self.reducing.completed(action)
            return
        if name == SYNC:
            self.syncing.completed(action)
            return
        if self._is_end(name, action):
            self.finish()
            return
        if action.result == SUCCESS and name == CONNECT:
            assert self.shell.control is not None
            self.run, self._life = self.shell.control.master.state.members.run, self.shell.control.master.life
        if action.result == SUCCESS and name in (CONNECT, TOPOLOGY):
            self._count(NUMBERS.unpack(action.payload))
            self._part = 0
        elif action.result == SUCCESS and name == OPTIMIZE:
            self._count_again(NUMBERS.unpack(action.payload))
        if action.result == PENDING_ASYNC_OPS and action.slot == 0 and self.reducing.in_flight:
            self.reducing.block()
        elif action.slot == 0:  # the main thread; the answer of a second thread is not used
            answer = action.result == SUCCESS and name == PENDING and action.payload == b"\1"
            self._plan_step(asked_and_pending=answer, given_up=action.kind == KIND_CANCELLED)

    def _is_end(self, name: str, action: Complete) -> bool:
        """Whether this answer ends the membership; note what it says about the end of the run."""
        if name in (CONNECT, FINISH):
            self.end = action.result, action.kind
        if name == FINISH:
            self._finish_answered(action)
        if action.kind == KIND_FINISHED and self.numbers is not None:
            self.world.run_rules.was_told(self.run)
        over = action.kind in (KIND_KICKED, KIND_MASTER_LOST, KIND_FINISHED)
        return over or (name == CONNECT and action.result != SUCCESS) or (name == FINISH and action.result == SUCCESS)

    def _finish_answered(self, action: Complete) -> None:
        if action.result == SUCCESS:
            assert self.shell.state.ending[1] == KIND_FINISHED, "finish succeeded, and the membership goes on"
            self.world.run_rules.was_told(self.run)
        elif action.result == INVALID_USAGE and b"can never meet" in action.payload:
            self.world.paths.mark("a finish and another call never meet")

    def finish_at_rest(self) -> None:
        """Call finish, in the phase without faults."""
        self.end = None
        if not self.is_done():
            self._post(FINISH, CallFinish)

    def has_finished(self) -> bool:
        """Whether that call was answered, or this program is done."""
        return self.end is not None or self.is_done()

    def give_up(self, *slots: int) -> None:
        """Give up the calls of these slots that are under way."""
        for slot, generation in self.under_way:
            if slot in slots:
                self.mail(CallCancel(slot, generation))

    def calm_down(self) -> None:
        """Give up calls of other threads and reduces, which would wait for calls that no member makes any more.

        With several threads the master breaks no deadlock while one of them may still call: then a person does.
        """
        self.give_up(1)
        self.reducing.give_up()
        self.syncing.give_up()
        if self.world.plan.threads:
            for call, name in self.under_way.items():
                if call[0] == 0 and name in (PENDING, OPTIMIZE, FINISH):
                    self.mail(CallCancel(*call))

    def reduce_at_rest(self) -> None:
        """Make one more step, in the phase without faults."""
        if not self.is_done():
            self.reducing.launch(range(self.world.plan.tags), blocking=False)

    def optimize_at_rest(self) -> None:
        """Call optimize_topology, in the phase without faults."""
        if not self.is_done():
            self._post(OPTIMIZE, CallOptimize)

    def has_optimized(self) -> bool:
        """Whether that call was answered."""
        return OPTIMIZE not in self.under_way.values()

    def sync_at_rest(self) -> None:
        """Sync its shared state, in the phase without faults."""
        self.syncing.resting = None
        if not self.is_done():
            self.syncing.launch()

    def is_at_rest(self) -> bool:
        """Whether no call of it is under way."""
        return not self.reducing.in_flight and not self.syncing.under_way

    def is_done(self) -> bool:
        """Whether its membership is over, or is about to be."""
        return self.over or self.ending or not self.shell.alive

    def leave(self) -> None:
        """close()."""
        if not self.over and self.shell.alive:
            self.over = True
            self._post(LEAVE, CallLeave, slot=9)

    def _count(self, numbers: tuple[int, ...]) -> None:
        _peer, count, _epoch, total, group, groups, largest = numbers
        assert not self.numbers or count > self.numbers[1], f"round {count} after {self.numbers}"
        common = self.world.rounds.setdefault((self._life, count), (total, groups, largest))
        assert common == (total, groups, largest), f"round {count}: {numbers}, but others got {common}"
        assert 1 <= group <= largest <= total, numbers
        assert 1 <= groups <= total, numbers
        assert largest + groups - 1 <= total <= largest * groups, numbers
        self.numbers = numbers
        self.counted_ns = self.world.clock.now_ns
        self.world.counted = True

    def _count_again(self, numbers: tuple[int, ...]) -> None:
        """An optimisation admits no peer: unless this program gave up a round, the number of members does not grow."""
        assert self.numbers is not None
        assert numbers[0] == self.numbers[0], f"{numbers} after {self.numbers}"
        assert numbers[1:3] >= self.numbers[1:3], f"{numbers} after {self.numbers}"
        assert numbers[1] > self.numbers[1] or numbers[3] <= self.numbers[3], f"{numbers} after {self.numbers}"

    def finish(self) -> None:
        """End the membership. A last call may fail with it as well; later the process closes."""
        if self.over or self.ending:
            return
        self.ending = True
        if self.world.chance(0.3):
            self._post(TOPOLOGY, CallTopology, 0, slot=5)
        if self.world.chance(0.3):
            self.mail(CallCancel(0, self._generation))
        self.world.clock.after(self.world.random.choice((0, 200, 1000)) * MILLISECOND, self.leave)

    def go_on(self) -> None:
        """Continue the main thread after its answer."""
        self._plan_step()

    def _plan_step(self, *, asked_and_pending: bool = False, given_up: bool = False) -> None:
        low, high = self.world.plan.think_ms
        if self.world.calm:
            low, high = 0, min(high, 50)
        elif self.world.chance(self.world.plan.nap):
            low, high = 1000, 9000
        delay_ns = self.world.random.randint(low, high) * MILLISECOND
        self.world.clock.after(delay_ns, self._step, asked_and_pending, given_up)

    def _step(self, asked_and_pending: bool, given_up: bool) -> None:
        world, plan = self.world, self.world.plan
        if self.is_done() or world.settled:
            return
        if world.calm:
            if self.reducing.in_flight:
                self.reducing.block()
            else:
                self._post(TOPOLOGY, CallTopology, 0)
            return
        if world.chance(plan.leave):
            self.leave()
            return
        together = world.clock.now_ns < world.run_rules.closing_ns and world.chance(0.8)
        if together or world.chance(plan.finish):
            if not together:
                world.run_rules.closing_ns = world.clock.now_ns + TOGETHER_NS
            self._post(FINISH, CallFinish)
            return
        style = "anything" if world.chance(plan.mistake) else self.style
        if self._wanted:
            style = "wait_for_world"
        self._follow("always_update" if asked_and_pending else style, given_up)
        if world.chance(plan.patience):
            self._give_up_later()
        if world.chance(plan.threads) and not any(slot == 1 for slot, _ in self.under_way):
            if not self._has_threads:
                self._has_threads = True
                self.mail(CallThreads(2))
            calls = ((PENDING, CallPending), (TOPOLOGY, CallTopology, 0), (OPTIMIZE, CallOptimize))
            self._post(*world.random.choice(calls), slot=1)

    def _follow(self, style: str, given_up: bool) -> None:
        """Make the next call of a program in this style."""
        if style == "always_update":
            self._post(TOPOLOGY, CallTopology, 0)
        elif style == "train":
            self._train()
        elif style == "sync":
            self._synchronise()
        elif style == "ask_then_update":
            self._post(PENDING, CallPending)
        elif style == "optimize":
            self._optimize()
        elif style == "wait_for_world":
            self._wait_for_world(given_up)
        else:
            self._do_anything()

    def _train(self) -> None:
        if self._part == 0:
            self.reducing.launch(range(self.world.plan.tags), blocking=True)
        elif self._part == 1 and self.world.plan.syncs:
            self.syncing.launch()
        else:
            self._post(PENDING, CallPending)
        self._part = (self._part + 1) % 3 if self.world.plan.syncs else 1 - self._part

    def _synchronise(self) -> None:
        if self._part < 2:
            self.syncing.launch()
        else:
            self._post(PENDING, CallPending)
        self._part = (self._part + 1) % 3

    def _optimize(self) -> None:
        """Admit newcomers, then optimise the ring, and so on: programs of this style often make the same call."""
        self._optimizes_next = not self._optimizes_next
        if self._optimizes_next:
            self._post(OPTIMIZE, CallOptimize)
        else:
            self._post(TOPOLOGY, CallTopology, 0)

    def _wait_for_world(self, given_up: bool) -> None:
        """Wait until the group is large enough or the caller gives up."""
        enough = self.numbers is not None and self.numbers[4] >= self._wanted > 0
        self._wanted = (
            0 if enough or given_up else self._wanted or self.world.random.randint(1, self.world.plan.peers + 1)
        )
        self._post(TOPOLOGY, CallTopology, self._wanted)
        if self._wanted:
            self._give_up_later()

    def _do_anything(self) -> None:
        choice = self.world.random.randrange(7)
        if choice == 0:
            self._post(PENDING, CallPending)
        elif choice == 1:
            self._plan_step()
        elif choice == 2:
            self.reducing.launch([self.world.random.randrange(4)], blocking=True)
        elif choice == 3 and len(self.reducing.in_flight) < 4:  # launched, and awaited later
            self.reducing.launch([self.world.random.randrange(4)], blocking=False)
            self._plan_step()
        elif choice == 4 and self.world.plan.syncs:
            self.syncing.launch()
        elif choice == 5:
            self._post(OPTIMIZE, CallOptimize)
        else:
            self._post(TOPOLOGY, CallTopology, 0)

    def _give_up_later(self) -> None:
        key = 0, self._generation
        self.world.clock.after(self.world.random.randint(0, 3 * SECOND), self._give_up, key)

    def _give_up(self, key: tuple[int, int]) -> None:
        """Give up a call. Its answer may already be under way; then the cancel comes too late, which is legal."""
        if self.world.calm and self.under_way.get(key) == CONNECT:
            return  # in the phase without faults every peer must be admitted
        if self.shell.alive and (key in self.under_way or self.world.chance(0.2)):
            self.mail(CallCancel(*key))

    def new_generation(self, slot: int, name: str = REDUCE) -> int:
        """Note a call in this slot; return the generation of the slot."""
        self._generation += 1
        self.under_way[slot, self._generation] = name
        return self._generation

    def _post(self, name: str, call: Any, *arguments: Any, slot: int = 0) -> None:
        self._generation += 1
        self.under_way[slot, self._generation] = name
        self.mail(call(slot, self._generation, *arguments))

    def mail(self, call: Any) -> None:
        """Send a command. The mailbox keeps the order, because it is one socket pair."""
        self.world.clock.after(0, self.shell.receive, self.world.feed, self.shell, Called(call))
