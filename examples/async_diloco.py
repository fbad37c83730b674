"""DiLoCo with communication hidden behind training, while peers come and go.

The all-reduce of an outer step runs in the background during the inner steps of the next one, and its result is applied
one step late. If training takes longer than the all-reduce, communication costs nothing.

One iteration of a veteran, from top to bottom:

    does anybody wait?  ──yes──▶  finish the reduce under way, admit them, give them the outer state
    inner steps, while the reduce of the previous iteration's delta goes on
    wait for that reduce; measure this iteration's delta against the outer state that it started from
    apply the previous one; the outer state has moved
    somebody joined in this iteration?  ──yes──▶  second sync, SEND_ONLY
    launch the reduce of this iteration's delta

A newcomer enters below the first line. Its inner steps start from the same outer state as everybody's, so its delta
counts. But it has no part in the reduce that was under way when it came, and so it cannot apply the result. That is
what the second sync is for: newcomers, RECEIVE_ONLY, take over the state that veterans have moved on to. With these
strategies no number of newcomers outvotes a veteran.

The second sync comes before the launch, because a sync and a reduce of one group may not overlap.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from common import (
    Regression,
    after_sync,
    average,
    digest,
    named,
    optimizer_tensors,
    parser,
    say,
    shared_state,
    small_model,
    take_part,
)
from diloco import train_inner
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pccl.torch
from pccl import ReduceOp, SharedStateSyncStrategy
from pccl.errors import TooFewPeersError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from pccl import AsyncReduceHandle, SharedState


class Outer:
    """The outer state that all peers agree on, and two deltas: one on its way round the ring, one being measured."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = pccl.torch.share_(parameters_to_vector(model.parameters()).detach())
        self._measured, self._sent = (pccl.torch.zeros(self.parameters.numel()) for _ in range(2))
        # Less momentum than without the delay: what comes a step late is easily overdone.
        self._optimizer = torch.optim.SGD([self.parameters], lr=0.4, momentum=0.2, nesterov=True)
        # Syncs are rarer than steps, so the revision does not count these; a tensor of the state does.
        self.count = torch.zeros((), dtype=torch.int64)
        memory = named("optimizer", optimizer_tensors(self._optimizer))
        self.tensors = {"outer": self.parameters, "steps": self.count, **memory}
        # How many took part in the last reduce or round: the same number for all of them, because they were together in
        # it. What get_attribute says may be newer on one peer than on another, so nothing may hang on that here.
        self.world = 1
        self._handle: AsyncReduceHandle | None = None
        self._is_pending = False

    @property
    def steps(self) -> int:
        """How many deltas were sent round the ring since the run began."""
        return int(self.count)

    def restart_model(self) -> None:
        """Inner training starts where the outer parameters are. A copy: it must not move them."""
        vector_to_parameters(self.parameters.clone(), self._model.parameters())

    def measure(self) -> None:
        """How far the inner steps have moved the model: old minus new, which is the sign of a gradient."""
        torch.sub(self.parameters, parameters_to_vector(self._model.parameters()).detach(), out=self._measured)

    def launch(self, comm: Any) -> None:
        """Send the delta that was measured round the ring, in the background."""
        self._measured, self._sent = self._sent, self._measured
        self._is_pending = True
        self.count += 1
        try:
            self._handle = comm.all_reduce_async(self._sent, self._sent, op=ReduceOp.AVG)
        except TooFewPeersError:
            self._handle, self.world = None, 1  # nobody else is left, and the average of one is itself

    def finish(self, comm: Any) -> float:
        """Wait for the reduce under way, if there is one, and say for how long: what training did not hide.

        If a peer was lost in it, the delta is as it was, and the others average it again.
        """
        began = time.monotonic()
        handle, self._handle = self._handle, None
        if handle is not None:
            ok, _, info = handle.wait()
            again = None if ok else average(comm, self._sent)
            self.world = info.world_size if ok else again.world_size if again else 1
        return time.monotonic() - began

    def apply(self) -> None:
        """Move the outer parameters by the average of the deltas that were sent, unless there is none yet."""
        if self._is_pending:
            self.parameters.grad = self._sent
            self._optimizer.step()
            self._is_pending = False

    def forget(self) -> None:
        """What was under way belongs to a membership that is over."""
        self._handle, self._is_pending = None, False


def give_or_take(comm: Any, state: SharedState, is_newcomer: bool) -> None:
    """The second sync of an iteration in which somebody joined: newcomers catch up with what veterans have applied."""
    if not is_newcomer:
        state.push_revision()
        comm.sync_shared_state(state, SharedStateSyncStrategy.SEND_ONLY)
        return
    try:
        received = comm.sync_shared_state(state, SharedStateSyncStrategy.RECEIVE_ONLY).rx_bytes
        say(f"received {received} bytes, the update that was under way when we joined")
    except UsageError:
        # Nobody is left who has it: all veterans died, or all resume from checkpoints. Then it never was.
        comm.sync_shared_state(state)


def main() -> None:
    """Train until the run has made all its outer steps."""
    flags = parser(__doc__, steps=40)
    flags.add_argument("--inner-steps", type=int, default=10, metavar="N", help="between two all-reduces")
    flags.add_argument("--sync-every", type=int, default=10, metavar="N", help="outer steps between two comparisons")
    arguments = flags.parse_args()
    task, model = Regression(arguments), small_model(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = Outer(model)
    state = shared_state(outer.tensors, arguments.checkpoint)

    def meet(comm: Any, is_newcomer: bool) -> bool:
        """Where membership changes: between two reduces. Returns whether somebody may have joined."""
        if is_newcomer:
            joined = True
        else:
            # All peers hear the same answer, and were in the same reduce: they decide alike.
            joined = comm.are_peers_pending() or outer.world < arguments.min_peers
            if not joined and outer.steps % arguments.sync_every:
                return False
            outer.finish(comm)
            if joined:
                comm.update_topology()
            state.push_revision()
        if joined:
            outer.world = comm.wait_for_world_size(arguments.min_peers, timeout=arguments.wait)
        received = comm.sync_shared_state(state).rx_bytes
        if received:
            say(f"received {received} bytes, revision {state.revision}")
        after_sync(arguments, comm, state, outer.tensors)
        outer.restart_model()
        return joined

    def train(comm: Any) -> None:
        outer.forget()
        is_newcomer = True
        while is_newcomer or outer.steps < arguments.steps:
            joined = meet(comm, is_newcomer)
            if outer.steps >= arguments.steps:
                break
            begin = outer.steps * arguments.inner_steps
            loss = train_inner(model, optimizer, task, range(begin, begin + arguments.inner_steps), comm.peer_id)
            time.sleep(arguments.pace)
            waited = outer.finish(comm)
            outer.measure()
            outer.apply()
            if joined and outer.steps:
                give_or_take(comm, state, is_newcomer)
            is_newcomer = False
            outer.launch(comm)
            outer.restart_model()
            say(f"step {outer.steps}  loss {loss:.4f}  peers {outer.world}  waited {waited:.3f} s")
        outer.finish(comm)
        outer.apply()
        state.push_revision()
        comm.sync_shared_state(state)
        after_sync(arguments, comm, state, outer.tensors)
        outer.restart_model()

    take_part(arguments, train)
    loss = task.held_out_loss(model)
    say(f"done  loss {loss:.6f}  revision {state.revision}  digest {digest(outer.tensors.values())}")


if __name__ == "__main__":
    main()
