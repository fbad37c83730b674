"""DiLoCo with communication hidden behind training, while peers come and go.

The all-reduce of an outer step runs in the background during the inner steps of the next one, and its result is applied
one step late. If training takes longer than the all-reduce, communication costs no time.

One iteration of an older member, from top to bottom:

    does a peer wait?  ──yes──▶  finish the running reduce, admit the peer, give it the outer state
    inner steps, while the reduce of the previous iteration's delta runs
    wait for that reduce; compute this iteration's delta against the outer state that it started from
    apply the previous one; the outer state has changed
    did a peer join in this iteration?  ──yes──▶  second sync, SEND_ONLY
    launch the reduce of this iteration's delta

A newcomer starts below the first line. Its inner steps start from the same outer state as those of all peers, so its
delta counts. But it takes no part in the reduce that was running when it joined, so it cannot apply the result. The
second sync solves this: newcomers use RECEIVE_ONLY and receive the updated state of the older members. With these
strategies no number of newcomers outvotes an older member.

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
    """The shared outer state, and two deltas: one in the running reduce, one being computed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = pccl.torch.share_(parameters_to_vector(model.parameters()).detach())
        self._measured, self._sent = (pccl.torch.zeros(self.parameters.numel()) for _ in range(2))
        # Less momentum than without the delay: a gradient that is a step late overshoots more easily.
        self._optimizer = torch.optim.SGD([self.parameters], lr=0.4, momentum=0.2, nesterov=True)
        # Syncs are rarer than steps, so the revision does not count steps; a tensor of the state does.
        self.count = torch.zeros((), dtype=torch.int64)
        memory = named("optimizer", optimizer_tensors(self._optimizer))
        self.tensors = {"outer": self.parameters, "steps": self.count, **memory}
        # The number of members in the last reduce or topology round: the same on all of them. get_attribute may be
        # newer on one peer than on another, so no decision may depend on it here.
        self.world = 1
        self._handle: AsyncReduceHandle | None = None
        self._is_pending = False

    @property
    def steps(self) -> int:
        """The number of deltas that were reduced since the run began."""
        return int(self.count)

    def restart_model(self) -> None:
        """Set the model to a copy of the outer parameters, where inner training starts."""
        vector_to_parameters(self.parameters.clone(), self._model.parameters())

    def measure(self) -> None:
        """Compute the delta of the inner steps: old minus new, which has the sign of a gradient."""
        torch.sub(self.parameters, parameters_to_vector(self._model.parameters()).detach(), out=self._measured)

    def launch(self, comm: Any) -> None:
        """Launch the reduce of the computed delta."""
        self._measured, self._sent = self._sent, self._measured
        self._is_pending = True
        self.count += 1
        try:
            self._handle = comm.all_reduce_async(self._sent, self._sent, op=ReduceOp.AVG)
        except TooFewPeersError:
            self._handle, self.world = None, 1  # no other peer is left, and the average of one is itself

    def finish(self, comm: Any) -> float:
        """Wait for the running reduce, if there is one. Returns the seconds of waiting, which training did not hide.

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
        """Update the outer parameters with the average delta, if there is one."""
        if self._is_pending:
            self.parameters.grad = self._sent
            self._optimizer.step()
            self._is_pending = False

    def forget(self) -> None:
        """Forget the running reduce: it belongs to a membership that has ended."""
        self._handle, self._is_pending = None, False


def give_or_take(comm: Any, state: SharedState, is_newcomer: bool) -> None:
    """The second sync of an iteration in which a peer joined: newcomers receive what older members have applied."""
    if not is_newcomer:
        state.push_revision()
        comm.sync_shared_state(state, SharedStateSyncStrategy.SEND_ONLY)
        return
    try:
        received = comm.sync_shared_state(state, SharedStateSyncStrategy.RECEIVE_ONLY).rx_bytes
        say(f"received {received} bytes, the update of the reduce that was running when we joined")
    except UsageError:
        # No older member is left: all died, or all resume from checkpoints. Then the update is lost for all.
        comm.sync_shared_state(state)


def main() -> None:
    """Train until the run has made all its outer steps."""
    flags = parser(__doc__, steps=40)
    flags.add_argument("--inner-steps", type=int, default=10, metavar="N", help="between two all-reduces")
    flags.add_argument("--sync-every", type=int, default=10, metavar="N", help="outer steps between two syncs")
    arguments = flags.parse_args()
    task, model = Regression(arguments), small_model(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = Outer(model)
    state = shared_state(outer.tensors, arguments.checkpoint)

    def meet(comm: Any, is_newcomer: bool) -> bool:
        """Admit waiting peers, between two reduces. Returns whether a peer may have joined."""
        if is_newcomer:
            joined = True
        else:
            # All peers get the same answer and were in the same reduce, so they take the same decision.
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
