"""Distributed data parallel training that survives killed peers: every step averages the gradients of all peers.

The peers hold bit-identical parameters and optimizer state, and each computes gradients on its own samples. They
average the gradients and make the same step. A newcomer receives parameters, optimizer state and revision in its first
`sync_shared_state`; on all other peers that call compares digests and moves nothing.

All peers run the loop in the same order, and `connect` returns on a newcomer when `update_topology` returns on the
members. So a newcomer starts at the top of the loop at the moment when the members return to it.
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

import pccl.torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def gradients_in_one(model: nn.Module) -> Tensor:
    """One tensor in shared memory that holds all gradients: `backward` writes where the ring reads, nothing is copied.

    One large reduce is also faster than many small ones. `zero_grad(set_to_none=False)` keeps the gradients in it.
    """
    parameters = list(model.parameters())
    whole = pccl.torch.zeros(sum(parameter.numel() for parameter in parameters))
    pieces = whole.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return whole


def main() -> None:
    """Train until the run has made all its steps."""
    arguments = parser(__doc__, steps=200).parse_args()
    task, model = Regression(arguments), small_model(arguments.seed)
    gradient = gradients_in_one(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tensors = {**dict(model.named_parameters()), **named("optimizer", optimizer_tensors(optimizer))}
    state = shared_state(tensors, arguments.checkpoint)

    def train(comm: Any) -> None:
        while True:
            comm.wait_for_world_size(arguments.min_peers, timeout=arguments.wait)
            received = comm.sync_shared_state(state).rx_bytes
            if received:
                say(f"received {received} bytes, revision {state.revision}")
            after_sync(arguments, comm, state, tensors)
            if state.revision >= arguments.steps:
                return
            optimizer.zero_grad(set_to_none=False)  # the default would remove them from the shared memory
            loss = loss_of(model, task.batch(state.revision, comm.peer_id))
            loss.backward()
            info = average(comm, gradient)
            if info is not None:
                optimizer.step()  # the same on all peers, because its inputs are
                state.push_revision()
                say(f"step {state.revision}  loss {loss.item():.4f}  peers {info.world_size}")
            time.sleep(arguments.pace)
            comm.update_topology()  # admits waiting peers; a peer that is alone repeats the step later

    take_part(arguments, train)
    say(f"done  loss {task.held_out_loss(model):.6f}  revision {state.revision}  digest {digest(tensors.values())}")


if __name__ == "__main__":
    main()
