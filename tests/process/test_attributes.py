"""`get_attribute` after a collective: the numbers are those of that collective, also after a loss between two calls.

A peer is killed while no member is in a call. The master closes the ring by itself, so the next collective succeeds
over fewer peers; a program that sums and divides by LOCAL_WORLD_SIZE is right only if that number is the collective's
own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from pccl import Attribute, Communicator, MasterNode, ReduceOp, SharedState, TensorInfo
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status

from .helpers import QUICK, Peers, actor_pid, eventually, peers_of, running_master, together

ATTRIBUTES = (
    Attribute.GLOBAL_WORLD_SIZE,
    Attribute.LOCAL_WORLD_SIZE,
    Attribute.NUM_DISTINCT_PEER_GROUPS,
    Attribute.LARGEST_PEER_GROUP_WORLD_SIZE,
)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


def attributes(peer: Communicator) -> tuple[int, ...]:
    return tuple(peer.get_attribute(attribute) for attribute in ATTRIBUTES)


def lose(peers: Peers, master: MasterNode, victim: Communicator) -> None:
    """Kill a member's actor and wait until the master has closed the rings without it. No member is in a call."""
    group, members = victim._group, sum(peer._group == victim._group for peer in peers) - 1
    os.kill(actor_pid(victim), signal.SIGKILL)
    peers.remove(victim)
    victim.close()

    def closed() -> bool:
        groups = {one["group"]: one for one in query_status(*parse_address(master.address), QUICK)["groups"]}
        ring = groups.get(group, {"ring": [], "wiring": []})
        return len(ring["ring"]) == members and not ring["wiring"]

    eventually(closed, f"group {group} has a ring of {members}")


def reduce(peer: Communicator) -> int:
    """Reduce ones; the sum is the world size of that collective."""
    tensor = np.ones(1, np.float32)
    peer.all_reduce(tensor, tensor, op=ReduceOp.SUM)
    return int(tensor[0])


def test_a_reduce_after_a_loss_that_nobody_noticed_brings_its_own_numbers(master: MasterNode) -> None:
    """Goal: all four attributes are those of the collective that succeeded, on every member."""
    with peers_of(master.address, 0, 0, 0, 7) as peers:
        first, second, third, other = peers
        together(*(lambda peer=peer: reduce(peer) for peer in (first, second, third)))
        assert attributes(first) == (4, 3, 2, 3)

        lose(peers, master, third)
        assert attributes(first) == (4, 3, 2, 3), "no member made a call, so no member knows of the loss"
        sums = together(lambda: reduce(first), lambda: reduce(second))
        assert sums == [2, 2]
        assert [attributes(first), attributes(second)] == [(3, 2, 2, 2)] * 2

        # A loss in another group does not change the ring of this group, but three of its attributes.
        lose(peers, master, other)
        together(lambda: reduce(first), lambda: reduce(second))
        assert [attributes(first), attributes(second)] == [(2, 2, 1, 2)] * 2


def test_a_sync_after_a_loss_that_nobody_noticed_brings_its_own_numbers(master: MasterNode) -> None:
    """Goal: the same for sync_shared_state, also with a world size of one."""

    def sync(peer: Communicator) -> None:
        peer.sync_shared_state(SharedState([TensorInfo.from_numpy(np.ones(8, np.float32), "weights")]))

    with peers_of(master.address, 0, 0, 0) as peers:
        first, second, third = peers
        lose(peers, master, third)
        together(lambda: sync(first), lambda: sync(second))
        assert [attributes(first), attributes(second)] == [(2, 2, 1, 2)] * 2
        lose(peers, master, second)
        sync(first)
        assert attributes(first) == (1, 1, 1, 1)
