"""DiLoCo that survives killed peers: every peer trains alone for a while, then all average their changes.

An outer step is a number of inner steps without communication, then one all-reduce of the *delta*: the change of this
peer's parameters since the last outer step. The average of the deltas is the gradient of the outer optimizer. With ten
inner steps the traffic is a tenth of that of naive_ddp.py; real runs make hundreds of inner steps, which makes training
over the internet possible.

The shared state contains the outer parameters and the state of the outer optimizer. The inner optimizer is local to
each peer; a newcomer starts with an empty one.
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
    loss_of,
    named,
    optimizer_tensors,
    parser,
    say,
    shared_state,
    small_model,
    take_part,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import pccl.torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class Outer:
    """The outer parameters as one vector in shared memory, and the optimizer that updates them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = pccl.torch.share_(parameters_to_vector(model.parameters()).detach())
        self.delta = self.parameters.grad = pccl.torch.zeros(self.parameters.numel())
        self._optimizer = torch.optim.SGD([self.parameters], lr=0.7, momentum=0.9, nesterov=True)
        self.tensors = {"outer": self.parameters, **named("optimizer", optimizer_tensors(self._optimizer))}

    def restart_model(self) -> None:
        """Set the model to a copy of the outer parameters, where inner training starts."""
        vector_to_parameters(self.parameters.clone(), self._model.parameters())

    def measure(self) -> Tensor:
        """The delta of the inner steps: old minus new, which has the sign of a gradient."""
        return torch.sub(self.parameters, parameters_to_vector(self._model.parameters()).detach(), out=self.delta)

    def step(self) -> None:
        """Make an outer step with the average of all deltas as the gradient."""
        self._optimizer.step()


def train_inner(model: nn.Module, optimizer: torch.optim.Optimizer, task: Regression, steps: range, peer: int) -> float:
    """Make the inner steps, without communication. Returns the mean loss."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, task.batch(step, peer))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main() -> None:
    """Train until the run has made all its outer steps."""
    flags = parser(__doc__, steps=30)
    flags.add_argument("--inner-steps", type=int, default=10, metavar="N", help="between two all-reduces")
    arguments = flags.parse_args()
    task, model = Regression(arguments), small_model(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = Outer(model)
    state = shared_state(outer.tensors, arguments.checkpoint)

    def train(comm: Any) -> None:
        while True:
            comm.wait_for_world_size(arguments.min_peers, timeout=arguments.wait)
            received = comm.sync_shared_state(state).rx_bytes
            if received:
                say(f"received {received} bytes, revision {state.revision}")
            after_sync(arguments, comm, state, outer.tensors)
            outer.restart_model()
            if state.revision >= arguments.steps:
                return
            begin = state.revision * arguments.inner_steps
            loss = train_inner(model, optimizer, task, range(begin, begin + arguments.inner_steps), comm.peer_id)
            info = average(comm, outer.measure())
            if info is not None:
                outer.step()
                state.push_revision()
                say(f"step {state.revision}  loss {loss:.4f}  peers {info.world_size}")
            time.sleep(arguments.pace)
            comm.update_topology()  # admits waiting peers; a peer that is alone repeats the step later

    take_part(arguments, train)
    loss = task.held_out_loss(model)
    say(f"done  loss {loss:.6f}  revision {state.revision}  digest {digest(outer.tensors.values())}")


if __name__ == "__main__":
    main()
