"""Members that a sync overwrites: which of them are warned, what the warning says, and what status counts.

The mistakes are those that users make: an optimizer state that is not shared, gradients that torch has replaced, a
forgotten push_revision. Members are communicators of this process, so a log record may come from any of them; the
values that the syncs return say which of them diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pccl
import pccl.torch
from pccl import (
    Communicator,
    MasterNode,
    ReduceOp,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
)
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status

from .helpers import QUICK, Peers, everybody, peers_of, ring_order, running_master

ENFORCE, RECEIVE, SEND = (
    SharedStateSyncStrategy.ENFORCE_POPULAR,
    SharedStateSyncStrategy.RECEIVE_ONLY,
    SharedStateSyncStrategy.SEND_ONLY,
)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture
def trio(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0, 0) as peers:
        yield peers


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings about divergent members so far."""
    caplog.set_level(logging.INFO, "pccl")

    def found() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [line for line in lines if line.startswith("sync_shared_state overwrote")]

    return found


def counted(master: MasterNode) -> tuple[int, dict[int, int]]:
    """How often the master saw a divergent member: in all, and by peer."""
    run = query_status(*parse_address(master.address), QUICK)
    return run["counters"]["overwritten"], {peer["id"]: peer["overwritten"] for peer in run["peers"]}


class Trainee:
    """A small model that is trained as in the DDP recipe, with the mistakes that a test asks for."""

    def __init__(self, rank: int, *, shares_adam: bool = True, set_to_none: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model = torch.nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        parameters = list(self.model.parameters())
        self.gradient = pccl.torch.zeros(sum(parameter.numel() for parameter in parameters))
        pieces = self.gradient.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.optimizer = torch.optim.Adam(parameters, lr=0.0)
        self.optimizer.step()  # makes its state
        self.optimizer.param_groups[0]["lr"] = 0.05
        tensors = dict(self.model.named_parameters())
        if shares_adam:
            for index, parameter in enumerate(parameters):
                for name, value in self.optimizer.state[parameter].items():
                    tensors[f"adam.{index}.{name}"] = value
        self.state = SharedState([TensorInfo.from_torch(tensor.detach(), name) for name, tensor in tensors.items()])
        self._set_to_none = set_to_none
        self._samples = torch.Generator().manual_seed(100 + rank)

    def step(self, peer: Communicator) -> SharedStateSyncInfo:
        """Sync and make one step."""
        info = peer.sync_shared_state(self.state)
        inputs = torch.rand(16, 8, generator=self._samples)
        self.optimizer.zero_grad(set_to_none=self._set_to_none)
        torch.nn.functional.mse_loss(self.model(inputs), inputs.sum(1, keepdim=True)).backward()
        peer.all_reduce(self.gradient, self.gradient, op=ReduceOp.AVG)
        self.optimizer.step()
        self.state.push_revision()
        return info


def steps(peers: Peers, trainees: list[Trainee], count: int) -> list[list[SharedStateSyncInfo]]:
    """All members make steps; return the syncs of each, in the order of their ids."""
    return everybody(peers, lambda peer, rank: [trainees[rank].step(peer) for _ in range(count)])


def test_a_healthy_run_says_nothing(trio: Peers, master: MasterNode, warnings: Callable[[], list[str]]) -> None:
    """Goal: the recipe keeps the members in step, and a newcomer that receives everything is not warned."""
    trainees = [Trainee(rank) for rank in range(3)]
    infos = steps(trio, trainees, 3)
    trio.admit(trio.newcomer())
    trainees.append(Trainee(3))
    late = steps(trio, trainees, 3)

    assert infos == [[SharedStateSyncInfo(0, 0)] * 3] * 3
    assert late[3][0].rx_bytes > 0
    assert {(info.overwritten, info.times_overwritten) for peer in late for info in peer} == {((), 0)}
    assert warnings() == []
    assert counted(master)[0] == 0


def test_an_optimizer_state_that_is_not_shared(
    trio: Peers, master: MasterNode, warnings: Callable[[], list[str]]
) -> None:
    """Goal: a peer that joins a run of Adam without its state is overwritten in every step, and is told so.

    Method: three members train, a fourth joins. It receives the parameters, but not the state of Adam, so all its steps
    differ. Its first sync is that of a newcomer; the 1st, 2nd and 4th overwritten one warn, the 3rd and 5th do not.
    """
    trainees = [Trainee(rank, shares_adam=False) for rank in range(3)]
    steps(trio, trainees, 3)
    trio.admit(trio.newcomer())
    trainees.append(Trainee(3, shares_adam=False))
    infos = steps(trio, trainees, 6)

    assert all(info == SharedStateSyncInfo(info.tx_bytes, 0) for peer in infos[:3] for info in peer)
    assert infos[3][0].rx_bytes > 0
    assert [info.overwritten for info in infos[3]] == [(), *[("bias", "weight")] * 5]
    assert [info.times_overwritten for info in infos[3]] == [0, 1, 2, 3, 4, 5]
    lines = warnings()
    assert len(lines) == 3
    for line, times in zip(lines, (1, 2, 4), strict=True):
        assert "2 of this peer's 2 tensors ('bias', 'weight', 36 bytes)" in line
        assert f"in {times} of {times} syncs since it joined" in line
        assert "optimizer state outside of the SharedState" in line
    fourth = ring_order(trio)[3].peer_id
    total, by_peer = counted(master)
    assert total == 5
    assert {peer: times for peer, times in by_peer.items() if times} == {fourth: 5}


def test_gradients_that_zero_grad_removed(trio: Peers, master: MasterNode, warnings: Callable[[], list[str]]) -> None:
    """Goal: with the default of zero_grad() the peers reduce a tensor that backward() no longer writes: they diverge.

    The peer with the lowest id wins the election, and the other two are overwritten in every step.
    """
    trainees = [Trainee(rank, set_to_none=True) for rank in range(3)]
    infos = steps(trio, trainees, 4)

    assert [info.times_overwritten for info in infos[0]] == [0] * 4
    for peer in infos[1:]:
        assert [info.times_overwritten for info in peer] == [0, 1, 2, 3]
        assert {"bias", "weight"} <= set(peer[-1].overwritten)
    assert len(warnings()) == 4, "two peers, the first and the second time"
    assert all("gradients that zero_grad() set to None" in line for line in warnings())
    assert counted(master)[0] == 6


def test_a_forgotten_push_revision(trio: Peers, master: MasterNode, warnings: Callable[[], list[str]]) -> None:
    """Goal: the warning of a member that is outdated names both revisions and the call that it forgot.

    Also with the same content, because then the peer has received the entries that may differ from others' as well.
    """
    arrays = [np.zeros(5, np.float32) for _ in trio]
    own = [np.full(3, float(rank)) for rank in range(3)]
    states = [
        SharedState(
            [
                TensorInfo.from_numpy(array, "weight"),
                TensorInfo.from_numpy(mine, "seed", allow_content_inequality=True),
            ]
        )
        for array, mine in zip(arrays, own, strict=True)
    ]

    def sync(strategy: SharedStateSyncStrategy = ENFORCE) -> list[SharedStateSyncInfo]:
        return everybody(trio, lambda peer, rank: peer.sync_shared_state(states[rank], strategy))

    def step(*pushes: int, differs: float = 0.0) -> None:
        for rank in range(3):
            arrays[rank] += 1.0 + differs * (rank not in pushes)
            if rank in pushes:
                states[rank].push_revision()

    sync()
    step(0, 1)
    infos = sync()
    assert [(info.overwritten, info.times_overwritten) for info in infos] == [((), 0), ((), 0), ((), 1)]
    assert own[2].tolist() in (own[0].tolist(), own[1].tolist())
    step(0, 1, differs=1.0)
    infos = sync()
    assert [(info.overwritten, info.times_overwritten) for info in infos] == [((), 0), ((), 0), (("weight",), 2)]
    assert [state.revision for state in states] == [2, 2, 2]

    first, second = warnings()
    assert "it was at revision 0, and the group at 1. Call push_revision once per step" in first
    assert "1 of this peer's 2 tensors ('weight', " in second
    assert "it was at revision 1, and the group at 2" in second
    assert counted(master)[0] == 2


def test_who_receives_by_choice_is_not_warned(
    trio: Peers, master: MasterNode, warnings: Callable[[], list[str]]
) -> None:
    """Goal: RECEIVE_ONLY asks to be overwritten, whatever it held."""
    arrays = [np.zeros(5, np.float32) for _ in trio]
    states = [SharedState([TensorInfo.from_numpy(array, "weight")]) for array in arrays]

    def sync(*strategies: SharedStateSyncStrategy) -> list[Any]:
        return everybody(trio, lambda peer, rank: peer.sync_shared_state(states[rank], strategies[rank]))

    sync(ENFORCE, ENFORCE, ENFORCE)
    for rank, array in enumerate(arrays):
        array[:] = rank
        states[rank].push_revision()
    infos = sync(SEND, RECEIVE, RECEIVE)

    assert [info.rx_bytes for info in infos] == [0, 20, 20]
    assert {(info.overwritten, info.times_overwritten) for info in infos} == {((), 0)}
    assert warnings() == []
    assert counted(master)[0] == 0
